//! Batches of blocks that a run of the write-back assembles.

use std::collections::BTreeMap;

use crate::effect::DeviceId;
use crate::limits::BATCH_BLOCKS_MAX;
use crate::pool::{BatchId, BlockWrite};
use crate::save::slack::{Release, Written};
use crate::slab::SlabId;

/// One run of the write-back.
#[derive(Debug)]
pub(super) struct Run<'a> {
    /// Blocks that may be written.
    pub(super) release: &'a Release,
    /// Batch of each device.
    pub(super) batches: BTreeMap<DeviceId, NewBatch>,
    /// Blocks of all batches.
    pub(super) written: Written,
}

/// Batch that is assembled for a device.
#[derive(Debug)]
pub(super) struct NewBatch {
    pub(super) id: BatchId,
    pub(super) blocks: Vec<SlabId>,
    pub(super) writes: Vec<BlockWrite>,
    bytes: u64,
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

    /// Adds a block to the batch.
    pub(super) fn add(&mut self, record: SlabId, write: BlockWrite, slot_bytes: u64) {
        self.blocks.push(record);
        self.writes.push(write);
        self.bytes += slot_bytes;
    }
}
