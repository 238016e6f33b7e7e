//! The thread that copies blocks of a public tenant within the arena, for other tenants.
//!
//! Each object passes a private buffer, where it is verified: no process can change it between copy and check. A block of
//! 2 MiB takes about 0.4 ms, too long for the core's thread. One thread is enough: a tenant copies each block once, and
//! computing a block takes longer.

use std::sync::Arc;

use crossbeam_channel::{Receiver, Sender, bounded};
use reprise_agent_core::effect::{BlockCopy, CopyBatch, FillId};
use reprise_agent_core::event::{Event, FillError, FillUpdate};
use reprise_buffers::{Arena, BufferError};
use reprise_policy::{Layout, Tier};

use crate::core_loop::{Inbox, Input};
use crate::error::{AgentError, ErrorKind};

/// Maximum batches in the queue, each of one load. A batch beyond it is rejected, and its blocks count as missing.
const BATCHES_MAX: usize = 1024;

/// Handle of the thread, which ends when the handle is dropped.
pub(crate) struct BlockCopier {
    queue: Sender<CopyBatch>,
}

impl BlockCopier {
    /// Starts the thread.
    ///
    /// # Errors
    /// The thread cannot be spawned.
    pub(crate) fn start(arena: Arc<Arena>, inbox: Inbox) -> Result<BlockCopier, AgentError> {
        let (queue, batches) = bounded(BATCHES_MAX);
        std::thread::Builder::new()
            .name("block-copier".to_owned())
            .spawn(move || run(&arena, &inbox, &batches))
            .map_err(|error| {
                AgentError::new(ErrorKind::Resource, "cannot spawn the thread that copies blocks")
                    .with_source(error)
            })?;
        Ok(BlockCopier { queue })
    }

    /// Queues copies; their results are sent as events.
    ///
    /// # Errors
    /// The fills of a batch that was not queued.
    pub(crate) fn submit(&self, batch: CopyBatch) -> Result<(), Vec<FillId>> {
        let rejected = self.queue.try_send(batch).map_err(crossbeam_channel::TrySendError::into_inner);
        rejected.map_err(|batch| batch.blocks.iter().map(|block| block.fill).collect())
    }
}

fn run(arena: &Arena, inbox: &Inbox, batches: &Receiver<CopyBatch>) {
    let mut buffer = Vec::new();
    for CopyBatch { layout, blocks } in batches {
        for block in blocks {
            let update = match copy(arena, &layout, &block, &mut buffer) {
                Ok(true) => FillUpdate::Layers { layers: layout.layers(), checksums: None, tier: Tier::Dram },
                Ok(false) => FillUpdate::Failed(FillError::Corrupt),
                // A slot is outside the arena, so nothing was copied.
                Err(_) => FillUpdate::Failed(FillError::Refused),
            };
            if inbox.send(Input::Event(Event::Fill { fill: block.fill, update })).is_err() {
                return;
            }
        }
    }
}

/// Copies a block; `false` if an object does not match its checksum.
fn copy(
    arena: &Arena,
    layout: &Layout,
    block: &BlockCopy,
    buffer: &mut Vec<u8>,
) -> Result<bool, BufferError> {
    let object_bytes = layout.object_bytes();
    buffer.resize(usize::try_from(object_bytes).expect("a block is at most 128 MiB"), 0);
    for (object, checksum) in (0..).zip(&block.checksums) {
        let offset = object * object_bytes;
        let from = arena.span(block.from.region.0, block.from.offset + offset, object_bytes)?;
        let into = arena.span(block.into.region.0, block.into.offset + offset, object_bytes)?;
        if from.copy_out_checked(buffer) != *checksum {
            return Ok(false);
        }
        into.copy_in(buffer)?;
    }
    Ok(true)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use reprise_agent_core::effect::{ArenaSlot, RegionId};
    use reprise_buffers::{ArenaConfig, HugePolicy};
    use reprise_policy::{Dtype, LayoutSpec, Parts};

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

    fn slot(region: u16, offset: u64) -> ArenaSlot {
        ArenaSlot { region: RegionId(region), offset, bytes: layout().slot_bytes() }
    }

    #[test]
    fn block_is_copied_between_regions_and_a_damaged_one_is_reported() {
        let region_bytes = 2 << 20;
        let config = ArenaConfig { bytes: 2 * region_bytes, region_bytes, huge: HugePolicy::Never };
        let arena = Arc::new(Arena::new(&config).expect("4 MiB"));
        let object = |region, number: u64| arena.span(region, 65536 + number * 4096, 4096).expect("inside");
        for number in 0..4 {
            object(0, number).copy_in(&[number as u8 + 1; 4096]).expect("as long as the span");
        }
        let checksums: Box<[u32]> = (0..4).map(|number| object(0, number).crc32c()).collect();
        let (inbox, events) = Inbox::new();
        let copier = BlockCopier::start(arena.clone(), inbox).expect("a thread");
        let result = |from: ArenaSlot, id| {
            let block =
                BlockCopy { fill: FillId(id), from, into: slot(1, 65536), checksums: checksums.clone() };
            copier.submit(CopyBatch { layout: layout(), blocks: vec![block] }).expect("room");
            match events.recv_timeout(PATIENCE).expect("an event") {
                Input::Event(Event::Fill { fill, update }) if fill == FillId(id) => update,
                _ => panic!("expected the result of the copy"),
            }
        };
        let whole = FillUpdate::Layers { layers: 2, checksums: None, tier: Tier::Dram };
        assert_eq!(result(slot(0, 65536), 1), whole);
        let copied: Vec<u32> = (0..4).map(|number| object(1, number).crc32c()).collect();
        assert_eq!(copied, checksums.to_vec());
        arena.span(0, 65536 + 4 * 4096 - 1, 1).and_then(|byte| byte.copy_in(&[0])).expect("inside");
        assert_eq!(result(slot(0, 65536), 2), FillUpdate::Failed(FillError::Corrupt));
        assert_eq!(result(slot(0, 2 << 20), 3), FillUpdate::Failed(FillError::Refused));
    }
}
