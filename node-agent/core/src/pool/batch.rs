//! Write batches in flight.

use reprise_policy::BlockKey;

use super::{BatchId, PageNumber, PoolEvent, StoredBlock};

/// Maximum batches in flight: one writing its blocks, one syncing them, one in the journal, one spare.
pub const BATCHES_MAX: usize = 4;

/// Writer of the payloads of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Payloads {
    /// The pool, from the arena; [`BATCHES_MAX`] bounds the memory that these batches use.
    Arena,
    /// Another process, in lent slots.
    Lent,
}

/// Write batch, from its first write to its event.
#[derive(Debug)]
pub(super) struct Batch {
    id: BatchId,
    payloads: Payloads,
    /// Blocks whose write was started.
    blocks: Vec<(PageNumber, BlockKey)>,
    writes_in_flight: usize,
    records_in_journal: usize,
    stored: Vec<StoredBlock>,
    failed: Vec<BlockKey>,
}

/// State of a step of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum BatchProgress {
    /// Operations of the step are in flight.
    Pending,
    /// The step is complete; the next one can start.
    Complete,
}

impl Batch {
    /// Creates a batch without blocks.
    pub(super) fn new(id: BatchId, payloads: Payloads, blocks: usize) -> Batch {
        Batch {
            id,
            payloads,
            blocks: Vec::with_capacity(blocks),
            writes_in_flight: 0,
            records_in_journal: 0,
            stored: Vec::new(),
            failed: Vec::new(),
        }
    }

    /// Identifier of the batch.
    pub(super) fn id(&self) -> BatchId {
        self.id
    }

    /// Returns the writer of the payloads.
    pub(super) fn payloads(&self) -> Payloads {
        self.payloads
    }

    /// Adds a slot that needs a record but no write.
    pub(super) fn slot_lent(&mut self, page: PageNumber, key: BlockKey) {
        self.blocks.push((page, key));
    }

    /// Adds a block whose write was started.
    pub(super) fn block_started(&mut self, page: PageNumber, key: BlockKey) {
        self.blocks.push((page, key));
        self.writes_in_flight += 1;
    }

    /// Adds a block that was rejected before its write was started.
    pub(super) fn block_refused(&mut self, key: BlockKey) {
        self.failed.push(key);
    }

    /// Removes a block whose write the device did not start.
    pub(super) fn write_refused(&mut self, page: PageNumber) {
        let at = self
            .blocks
            .iter()
            .position(|(other, _)| *other == page)
            .expect("the write of this block was started");
        let (_, key) = self.blocks.remove(at);
        self.failed.push(key);
    }

    /// Counts the end of a block write, successful or not.
    pub(super) fn write_done(&mut self) -> BatchProgress {
        self.writes_in_flight -= 1;
        self.writes()
    }

    /// Whether block writes are in flight.
    pub(super) fn writes(&self) -> BatchProgress {
        if self.writes_in_flight == 0 { BatchProgress::Complete } else { BatchProgress::Pending }
    }

    /// Starts the journal step after all blocks were synced; returns the blocks that need a record.
    pub(super) fn begin_records(&mut self) -> &[(PageNumber, BlockKey)] {
        self.records_in_journal = self.blocks.len();
        self.stored.reserve_exact(self.blocks.len());
        &self.blocks
    }

    /// Records that the record of a stored block is durable.
    pub(super) fn block_stored(&mut self, block: StoredBlock) -> BatchProgress {
        self.stored.push(block);
        self.record_durable()
    }

    /// Records that the quarantine record of a block's slot is durable.
    pub(super) fn block_failed(&mut self, key: BlockKey) -> BatchProgress {
        self.failed.push(key);
        self.record_durable()
    }

    /// Returns the event of a durable batch.
    pub(super) fn into_event(self) -> PoolEvent {
        PoolEvent::BatchDone { batch: self.id, stored: self.stored, failed: self.failed }
    }

    /// Pages of the blocks whose write was started.
    pub(super) fn pages(&self) -> impl Iterator<Item = PageNumber> {
        self.blocks.iter().map(|(page, _)| *page)
    }

    /// Returns the event of a batch on a lost device: all blocks have failed, even those that were durable.
    pub(super) fn into_lost_event(self) -> PoolEvent {
        let mut failed: Vec<BlockKey> = self.blocks.iter().map(|(_, key)| *key).collect();
        failed.extend(self.failed.iter().filter(|key| !self.blocks.iter().any(|(_, other)| other == *key)));
        PoolEvent::BatchDone { batch: self.id, stored: Vec::new(), failed }
    }

    fn record_durable(&mut self) -> BatchProgress {
        self.records_in_journal -= 1;
        if self.records_in_journal == 0 { BatchProgress::Complete } else { BatchProgress::Pending }
    }
}
