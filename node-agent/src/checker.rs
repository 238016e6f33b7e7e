//! The thread that compares blocks in DRAM with their checksums, when an engine suspects them.
//!
//! A block of 2 MiB takes about 0.3 ms, one of 82 MiB more than 10 ms: too long for the core's thread. The queue has
//! room for as many checks as the core has under way, so it is full only if the thread has ended.

use std::sync::Arc;

use crossbeam_channel::{Receiver, Sender, bounded};
use reprise_agent_core::agent::limits::CHECKS_MAX;
use reprise_agent_core::effect::BlockCheck;
use reprise_agent_core::event::{Event, Integrity};
use reprise_buffers::Arena;

use crate::core_loop::{Inbox, Input};
use crate::error::{AgentError, ErrorKind};

/// The way to the thread, which ends when this is dropped.
pub(crate) struct Checker {
    queue: Sender<BlockCheck>,
}

/// The check was not taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct NotTaken;

impl Checker {
    /// Starts the thread.
    ///
    /// # Errors
    /// The system has no thread to give.
    pub(crate) fn start(arena: Arc<Arena>, inbox: Inbox) -> Result<Checker, AgentError> {
        let (queue, checks) = bounded(CHECKS_MAX);
        std::thread::Builder::new()
            .name("checker".to_owned())
            .spawn(move || run(&arena, &inbox, &checks))
            .map_err(|error| AgentError::new(ErrorKind::Resource, "cannot start a thread").because(error))?;
        Ok(Checker { queue })
    }

    /// Gives the thread a block to look at; what it finds comes as an event.
    ///
    /// # Errors
    /// No event will come.
    pub(crate) fn submit(&self, check: BlockCheck) -> Result<(), NotTaken> {
        self.queue.try_send(check).map_err(|_| NotTaken)
    }
}

fn run(arena: &Arena, inbox: &Inbox, checks: &Receiver<BlockCheck>) {
    for check in checks {
        let event = Event::Checked { check: check.check, integrity: look_at(arena, &check) };
        if inbox.send(Input::Event(event)).is_err() {
            return;
        }
    }
}

/// Compares every object.
fn look_at(arena: &Arena, check: &BlockCheck) -> Integrity {
    let object_bytes = check.layout.object_bytes();
    let is_intact = |(object, expected): (u64, &u32)| {
        let offset = check.slot.offset + object * object_bytes;
        arena.span(check.slot.region.0, offset, object_bytes).map(|span| span.crc32c() == *expected)
    };
    match (0..).zip(&check.checksums).map(is_intact).collect::<Result<Vec<bool>, _>>() {
        Ok(objects) if objects.iter().all(|intact| *intact) => Integrity::Intact,
        Ok(_) => Integrity::Damaged,
        // Not inside the arena: nothing was looked at.
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

    /// Four objects of 4 KiB.
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
    fn a_block_is_intact_until_one_byte_of_it_changes() {
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
                Input::Event(Event::Checked { check, integrity }) if check == id => integrity,
                _ => panic!("not the end of the check"),
            }
        };
        assert_eq!(verdict(check(1, 65536, &checksums)), Integrity::Intact);
        arena.span(0, 65536 + 4 * 4096 - 1, 1).and_then(|byte| byte.copy_in(&[0])).expect("inside");
        assert_eq!(verdict(check(2, 65536, &checksums)), Integrity::Damaged);
        assert_eq!(verdict(check(3, 2 << 20, &checksums)), Integrity::Unknown);
    }
}
