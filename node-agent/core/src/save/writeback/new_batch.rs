//! A batch of blocks that is being assembled for a device.

use crate::limits::BATCH_BLOCKS_MAX;
use crate::pool::{BatchId, BlockWrite};
use crate::slab::SlabId;

/// Batch that is being put together.
#[derive(Debug)]
pub(super) struct NewBatch {
    pub(super) id: BatchId,
    pub(super) blocks: Vec<SlabId>,
    pub(super) writes: Vec<BlockWrite>,
    pub(super) bytes: u64,
}

impl NewBatch {
    pub(super) fn new(id: BatchId) -> NewBatch {
        NewBatch { id, blocks: Vec::new(), writes: Vec::new(), bytes: 0 }
    }

    /// Whether one more block fits. The first one always does.
    pub(super) fn has_room(&self, slot_bytes: u64, bytes_max: u64) -> bool {
        let count = self.blocks.len();
        count == 0 || (self.bytes + slot_bytes <= bytes_max && count < BATCH_BLOCKS_MAX)
    }
}
