//! Write batches in flight.

use reprise_policy::BlockKey;

use super::{BatchId, PageNumber, PoolEvent, StoredBlock};

/// Batches in flight at the most: one writing its blocks, one syncing them, one in the journal, one to spare.
pub const BATCHES_MAX: usize = 4;

/// A batch from its first write to its report.
#[derive(Debug)]
pub(super) struct Batch {
    id: BatchId,
    /// All blocks that were accepted.
    blocks: Vec<(PageNumber, BlockKey)>,
    writes_in_flight: usize,
    records_in_journal: usize,
    stored: Vec<StoredBlock>,
    failed: Vec<BlockKey>,
}

/// What a batch waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum BatchWaits {
    /// For something in flight.
    Longer,
    /// For nothing: it can take its next step.
    ForNothing,
}

impl Batch {
    /// A batch of no blocks yet.
    pub(super) fn new(id: BatchId, blocks: usize) -> Batch {
        Batch {
            id,
            blocks: Vec::with_capacity(blocks),
            writes_in_flight: 0,
            records_in_journal: 0,
            stored: Vec::new(),
            failed: Vec::new(),
        }
    }

    /// Its name.
    pub(super) fn id(&self) -> BatchId {
        self.id
    }

    /// A block's write was started.
    pub(super) fn block_started(&mut self, page: PageNumber, key: BlockKey) {
        self.blocks.push((page, key));
        self.writes_in_flight += 1;
    }

    /// A block was refused: nothing of it was written.
    pub(super) fn block_refused(&mut self, key: BlockKey) {
        self.failed.push(key);
    }

    /// The device did not take a block's write: its slot is no longer the batch's.
    pub(super) fn write_refused(&mut self, page: PageNumber) {
        let at = self.blocks.iter().position(|(other, _)| *other == page).expect("its write was started");
        let (_, key) = self.blocks.remove(at);
        self.failed.push(key);
    }

    /// A block's write came to its end, well or not.
    pub(super) fn write_done(&mut self) -> BatchWaits {
        self.writes_in_flight -= 1;
        self.writes()
    }

    /// Whether writes are in flight.
    pub(super) fn writes(&self) -> BatchWaits {
        if self.writes_in_flight == 0 { BatchWaits::ForNothing } else { BatchWaits::Longer }
    }

    /// All blocks are synced; one record for each goes into the journal.
    pub(super) fn begin_records(&mut self) -> &[(PageNumber, BlockKey)] {
        self.records_in_journal = self.blocks.len();
        self.stored.reserve_exact(self.blocks.len());
        &self.blocks
    }

    /// The record of a stored block is durable.
    pub(super) fn block_stored(&mut self, block: StoredBlock) -> BatchWaits {
        self.stored.push(block);
        self.record_durable()
    }

    /// The record of a block's bad slot is durable.
    pub(super) fn block_failed(&mut self, key: BlockKey) -> BatchWaits {
        self.failed.push(key);
        self.record_durable()
    }

    /// The report.
    pub(super) fn into_event(self) -> PoolEvent {
        PoolEvent::BatchDone { batch: self.id, stored: self.stored, failed: self.failed }
    }

    /// The report when the device is lost: no block is readable, whatever was durable before.
    pub(super) fn into_lost_event(self) -> PoolEvent {
        let mut failed: Vec<BlockKey> = self.blocks.iter().map(|(_, key)| *key).collect();
        failed.extend(self.failed.iter().filter(|key| !self.blocks.iter().any(|(_, other)| other == *key)));
        PoolEvent::BatchDone { batch: self.id, stored: Vec::new(), failed }
    }

    fn record_durable(&mut self) -> BatchWaits {
        self.records_in_journal -= 1;
        if self.records_in_journal == 0 { BatchWaits::ForNothing } else { BatchWaits::Longer }
    }
}
