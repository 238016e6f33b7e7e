//! The thread that verifies checksums of blocks in DRAM that an engine suspects.
//!
//! Verifying takes about 0.3 ms for a block of 2 MiB and more than 10 ms for 82 MiB, too long for the
//! core's thread. The queue holds the core's maximum number of checks, so it is full only if the thread has
//! ended.

use std::sync::Arc;

use crossbeam_channel::{Receiver, Sender, bounded};
use reprise_agent_core::effect::BlockCheck;
use reprise_agent_core::event::{Event, Integrity};
use reprise_agent_core::limits::CHECKS_MAX;
use reprise_buffers::Arena;

use crate::core_loop::{Inbox, Input};
use crate::error::{AgentError, ErrorKind};

/// Handle of the thread, which ends when the handle is dropped.
pub(crate) struct Checker {
    queue: Sender<BlockCheck>,
}

/// The check was not queued.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CheckRejected;

impl Checker {
    /// Starts the verification thread.
    ///
    /// # Errors
    /// The thread cannot be spawned.
    pub(crate) fn start(arena: Arc<Arena>, inbox: Inbox) -> Result<Checker, AgentError> {
        let (queue, checks) = bounded(CHECKS_MAX);
        std::thread::Builder::new()
            .name("checker".to_owned())
            .spawn(move || run(&arena, &inbox, &checks))
            .map_err(|error| {
                AgentError::new(ErrorKind::Resource, "cannot spawn the checker thread").with_source(error)
            })?;
        Ok(Checker { queue })
    }

    /// Queues a check; its result is sent as an event.
    ///
    /// # Errors
    /// The check is not queued, and no event follows.
    pub(crate) fn submit(&self, check: BlockCheck) -> Result<(), CheckRejected> {
        self.queue.try_send(check).map_err(|_| CheckRejected)
    }
}

fn run(arena: &Arena, inbox: &Inbox, checks: &Receiver<BlockCheck>) {
    for check in checks {
        let event = Event::CheckDone { check: check.check, integrity: verify(arena, &check) };
        if inbox.send(Input::Event(event)).is_err() {
            return;
        }
    }
}

/// Verifies the checksum of every object.
fn verify(arena: &Arena, check: &BlockCheck) -> Integrity {
    let object_bytes = check.layout.object_bytes();
    let is_intact = |(object, expected): (u64, &u32)| {
        let offset = check.slot.offset + object * object_bytes;
        arena.span(check.slot.region.0, offset, object_bytes).map(|span| span.crc32c() == *expected)
    };
    match (0..).zip(&check.checksums).map(is_intact).collect::<Result<Vec<bool>, _>>() {
        Ok(objects) if objects.iter().all(|intact| *intact) => Integrity::Intact,
        Ok(_) => Integrity::Damaged,
        // The span is outside the arena, so nothing was verified.
        Err(_) => Integrity::Unknown,
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use reprise_agent_core::effect::{ArenaSlot, CheckId, RegionId};
    use reprise_buffers::{ArenaConfig, HugePolicy};
    use reprise_policy::{Dtype, Layout, LayoutSpec, Parts};

    use super::*;

    const PATIENCE: Duration = Duration::from_secs(10);

    /// Returns a layout with four objects of 4 KiB.
    fn layout() -> Layout {
        let (layers, parts, kv_heads, head_dim) = (2, Parts::KeyValue, 1, 128);
        let (dtype, tokens_per_block, tp_rank, tp_size) = (Dtype::Bf16, 16, 0, 1);
        LayoutSpec { layers, parts, kv_heads, head_dim, dtype, tokens_per_block, tp_rank, tp_size }
            .validate()
            .expect("a valid layout")
    }

    fn check(id: u64, offset: u64, checksums: &[u32]) -> BlockCheck {
        let slot = ArenaSlot { region: RegionId(0), offset, bytes: layout().slot_bytes() };
        BlockCheck { check: CheckId(id), slot, layout: layout(), checksums: checksums.into() }
    }

    #[test]
    fn block_is_intact_until_one_byte_changes() {
        let region_bytes = 2 << 20;
        let config = ArenaConfig { bytes: region_bytes, region_bytes, huge: HugePolicy::Never };
        let arena = Arc::new(Arena::new(&config).expect("2 MiB"));
        let object = |number: u64| arena.span(0, 65536 + number * 4096, 4096).expect("inside");
        for number in 0..4 {
            object(number).copy_in(&[number as u8 + 1; 4096]).expect("as long as the span");
        }
        let checksums: Vec<u32> = (0..4).map(|number| object(number).crc32c()).collect();
        let (inbox, events) = Inbox::new();
        let checker = Checker::start(arena.clone(), inbox).expect("a thread");
        let verdict = |check: BlockCheck| {
            let id = check.check;
            checker.submit(check).expect("room");
            match events.recv_timeout(PATIENCE).expect("an event") {
                Input::Event(Event::CheckDone { check, integrity }) if check == id => integrity,
                _ => panic!("expected the result of the check"),
            }
        };
        assert_eq!(verdict(check(1, 65536, &checksums)), Integrity::Intact);
        arena.span(0, 65536 + 4 * 4096 - 1, 1).and_then(|byte| byte.copy_in(&[0])).expect("inside");
        assert_eq!(verdict(check(2, 65536, &checksums)), Integrity::Damaged);
        assert_eq!(verdict(check(3, 2 << 20, &checksums)), Integrity::Unknown);
    }
}
