//! Pool of one device in operation.

use super::batch::{BATCHES_MAX, Batch, BatchProgress, Payloads};
use super::error::PoolError;
use super::geometry::{Geometry, PoolParams, SUPERBLOCK_OFFSETS};
use super::header::{HeaderFields, encode_header};
use super::journal::{Journal, JournalActions, JournalPart, JournalPosition, QueuedRecord};
use super::layouts::TenantLayout;
use super::lend::Lending;
use super::operations::{Operations, Purpose, SyncGate, Waiter};
use super::record::{BankIncarnation, Record, RecordKind};
use super::slots::{SlotContent, Slots, short, slot_pages};
use super::superblock::{BankHeader, Superblock};
use super::{
    BatchId, BlockWrite, DeviceError, DeviceOp, DeviceOpKind, OpToken, PageNumber, PoolEvent, StoredBlock,
};
use reprise_policy::BlockKey;
use reprise_policy::layout::PAGE_BYTES;

/// Incarnation of the first bank of a new pool.
const FIRST_INCARNATION: BankIncarnation = BankIncarnation { epoch: 1, begun: 1 };

/// Pool of one device.
#[derive(Debug)]
pub struct DevicePool {
    pub(super) superblock: Superblock,
    pub(super) slots: Slots,
    pub(super) journal: Journal,
    pub(super) batches: Vec<Batch>,
    /// Records of removed blocks that wait for a batch or for [`DevicePool::flush_frees`].
    removals: Vec<Record>,
    pub(super) operations: Operations,
    pub(super) gate: SyncGate,
    /// Generation of the next slot write; never repeats on a device.
    pub(super) next_generation: u64,
    health: Health,
    pub(super) lending: Lending,
}

/// Usage of a device's space and journal. Slots include their header pages.
///
/// `slot_bytes_used + slot_bytes_free + pending_frees_bytes + slot_bytes_quarantined + slack_bytes =
/// capacity_bytes`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PoolUsage {
    /// Bytes of slots that are reserved, being written or stored.
    pub slot_bytes_used: u64,
    /// Bytes of free slots and of segments without blocks. A segment belongs to one slot size while it holds
    /// blocks, so this space is not available to every size: see [`DevicePool::allocatable`].
    pub slot_bytes_free: u64,
    /// Number of slots that are never used again.
    pub slots_quarantined: u64,
    /// Bytes of slots that are never used again.
    pub slot_bytes_quarantined: u64,
    /// Bytes of freed slots whose free record is not durable yet.
    pub pending_frees_bytes: u64,
    /// Bytes at the ends of segments where no slot fits.
    pub slack_bytes: u64,
    /// Total bytes of all segments.
    pub capacity_bytes: u64,
    /// Number of stored blocks, without those being freed.
    pub blocks_stored: u64,
    /// Number of checkpoint entries that no slot uses.
    pub entries_free: u64,
    /// Number of entries of freed slots whose free record is not durable yet.
    pub entries_pending: u64,
    /// Maximum number of blocks and quarantined slots.
    pub entries_max: u64,
    /// Bytes written to the log of the active bank.
    pub journal_bytes_used: u64,
    /// Bytes of a bank's log.
    pub journal_bytes_capacity: u64,
    /// Number of bank switches since the pool was opened.
    pub checkpoints: u64,
    /// Number of records made durable since the pool was opened.
    pub journal_records: u64,
    /// Bytes of memory used for slots and segments.
    pub memory_bytes: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Health {
    Working,
    /// Blocks are read, but nothing is written.
    ReadOnly,
    Lost,
}

/// State of a pool after recovery.
#[derive(Debug)]
pub(super) struct RecoveredState {
    /// Superblock of the device.
    pub(super) superblock: Superblock,
    /// Restored slots of the device.
    pub(super) slots: Slots,
    /// Position at which the journal continues.
    pub(super) position: JournalPosition,
    /// Generation that is higher than that of every earlier write.
    pub(super) next_generation: u64,
}

impl DevicePool {
    /// Returns the writes that format a device as an empty pool: byte offsets and whole pages. Execute them
    /// in this order, then sync. The superblock comes last, so an interrupted format leaves no pool.
    ///
    /// # Errors
    /// [`PoolError::BadParams`] and [`PoolError::TooSmall`].
    pub fn format(params: &PoolParams) -> Result<Vec<(u64, Vec<u8>)>, PoolError> {
        let superblock = Superblock {
            pool_uuid: params.pool_uuid,
            device_index: params.device_index,
            created_unix_us: params.created_unix_us,
            geometry: Geometry::plan(params)?,
        };
        let header = BankHeader {
            incarnation: FIRST_INCARNATION,
            next_generation: 1,
            checkpoint_records: 0,
            checkpoint_pages: 0,
        };
        let [active, other] = [0, 1].map(|bank| superblock.geometry.header_offsets(bank));
        let header_page = header.encode(&superblock, 0);
        let blank = vec![0; header_page.len()];
        let blanks = other.map(|offset| (offset, blank.clone()));
        let headers = active.map(|offset| (offset, header_page.clone()));
        let superblocks = SUPERBLOCK_OFFSETS.map(|offset| (offset, superblock.encode()));
        Ok(blanks.into_iter().chain(headers).chain(superblocks).collect())
    }

    /// Creates the pool from recovered state.
    pub(super) fn resume(recovered: RecoveredState) -> DevicePool {
        let lending = Lending::of_earlier(recovered.slots.recovered_leases());
        DevicePool {
            journal: Journal::new(&recovered.superblock, recovered.position),
            superblock: recovered.superblock,
            slots: recovered.slots,
            batches: Vec::with_capacity(BATCHES_MAX),
            removals: Vec::new(),
            operations: Operations::default(),
            gate: SyncGate::default(),
            next_generation: recovered.next_generation,
            health: Health::Working,
            lending,
        }
    }

    /// Identity of the device's pool, independent of where the device is attached.
    pub fn pool_uuid(&self) -> [u8; 16] {
        self.superblock.pool_uuid
    }

    /// Index of the device in the node's configuration when it was formatted.
    pub fn device_index(&self) -> u8 {
        self.superblock.device_index
    }

    /// Whether blocks can be written.
    pub fn is_writable(&self) -> bool {
        self.health == Health::Working
    }

    /// Allocates a slot for a payload of this size. `None` if there is no free slot: free some blocks first.
    /// A payload that does not fit into a segment never gets a slot ([`DevicePool::payload_bytes_max`]).
    pub fn allocate(&mut self, payload_bytes: u64) -> Option<PageNumber> {
        if !self.is_writable() {
            return None;
        }
        self.slots.allocate(slot_pages(payload_bytes)?)
    }

    /// Number of slots of this size that [`DevicePool::allocate`] could return now.
    pub fn allocatable(&self, payload_bytes: u64) -> u64 {
        if !self.is_writable() {
            return 0;
        }
        slot_pages(payload_bytes).map_or(0, |pages| self.slots.allocatable(pages))
    }

    /// Maximum bytes of a payload: what fits into a segment.
    pub fn payload_bytes_max(&self) -> u64 {
        self.superblock.geometry.segment_bytes - PAGE_BYTES
    }

    /// Frees a stored block or a lent slot. The slot can be allocated again once its free record is durable: with the next
    /// batch or [`DevicePool::flush_frees`]. A crash before that restores the block. No read of the slot and,
    /// if it is lent, no write may be in flight. Does nothing if the slot is quarantined.
    ///
    /// # Panics
    /// If the slot neither holds a stored block nor is lent.
    pub fn free(&mut self, page: PageNumber) {
        let record = self.slots.begin_free(page);
        match self.health {
            Health::Working => self.removals.extend(record),
            Health::ReadOnly if record.is_some() => {
                self.slots.finish_free(page);
            }
            Health::ReadOnly | Health::Lost => {}
        }
    }

    /// Quarantines the slot of a stored block permanently after a medium error. Recorded with the next batch
    /// or [`DevicePool::flush_frees`]. Does nothing if the slot is already quarantined.
    ///
    /// # Panics
    /// If the slot was never written.
    pub fn quarantine(&mut self, page: PageNumber) {
        let record = self.slots.quarantine(page);
        self.push_removal(record);
    }

    /// Keeps a record for the next batch or flush, if the device works.
    pub(super) fn push_removal(&mut self, record: Option<Record>) {
        self.removals.extend(record.filter(|_| self.health == Health::Working));
    }

    /// Whether the slot at a page has the size for payloads of `payload_bytes`.
    pub fn has_size(&self, page: PageNumber, payload_bytes: u64) -> bool {
        slot_pages(payload_bytes).is_some_and(|pages| self.slots.size_of(page) == Some(pages))
    }

    /// Number of the segment that contains a page.
    pub fn segment_of(&self, page: PageNumber) -> Option<u32> {
        self.slots.segment_of(page)
    }

    /// Returns the blocks to free so that a segment of another slot size becomes available for this payload
    /// size. `None` if freeing blocks is not sufficient, for example because of a quarantined slot or a write
    /// in progress.
    pub fn drainable(&self, segment: u32, payload_bytes: u64) -> Option<Vec<(BlockKey, PageNumber)>> {
        self.slots.drainable(segment, slot_pages(payload_bytes)?).filter(|_| self.is_writable())
    }

    /// Returns the [`DevicePool::drainable`] segment with the fewest blocks. O(slots).
    pub fn emptiest_drainable(&self, payload_bytes: u64) -> Option<u32> {
        self.slots.emptiest_drainable(slot_pages(payload_bytes)?).filter(|_| self.is_writable())
    }

    /// Stops allocation in a segment until all of it is free. The caller frees its blocks next.
    pub fn start_drain(&mut self, segment: u32) {
        self.slots.start_drain(segment);
    }

    /// Whether space for this payload size becomes available without freeing further blocks.
    pub fn space_pending(&self, payload_bytes: u64) -> bool {
        self.is_writable() && slot_pages(payload_bytes).is_some_and(|pages| self.slots.space_pending(pages))
    }

    /// Returns the block stored at a page, or `None` if no durable block is stored there.
    pub fn stored(&self, page: PageNumber) -> Option<StoredBlock> {
        self.slots.stored(page)
    }

    /// Whether [`DevicePool::write_batch`] may be called: the device works and has fewer than [`BATCHES_MAX`]
    /// batches in flight, without those of lent slots.
    pub fn can_start_batch(&self) -> bool {
        let of_arena = self.batches.iter().filter(|batch| batch.payloads() == Payloads::Arena);
        self.is_writable() && of_arena.count() < BATCHES_MAX
    }

    /// Writes blocks into allocated slots and makes them durable, reported as one [`PoolEvent::BatchDone`].
    /// Earlier frees and quarantines become durable with the batch.
    ///
    /// # Panics
    /// If [`DevicePool::can_start_batch`] returns `false`, the batch id is in use, a slot is not reserved or
    /// has the wrong size, or a block does not have one checksum per object.
    pub fn write_batch(&mut self, batch: BatchId, blocks: Vec<BlockWrite>) -> Vec<DeviceOp> {
        assert!(self.can_start_batch(), "check can_start_batch first");
        assert!(self.batches.iter().all(|other| other.id() != batch), "a batch id names one batch");
        let mut ops = Vec::with_capacity(blocks.len() + 1);
        let mut pending = Batch::new(batch, Payloads::Arena, blocks.len());
        for block in blocks {
            self.start_block(&mut pending, &block, &mut ops);
        }
        if pending.writes() == BatchProgress::Complete {
            self.gate.wait(Waiter::Batch(batch));
        }
        self.batches.push(pending);
        self.pump(&mut ops);
        ops
    }

    /// Makes pending frees and quarantines durable without a batch, and starts repairs that recovery
    /// requires. Call it after opening the pool, when space is short, and when no batch was written for a
    /// while.
    pub fn flush_frees(&mut self) -> Vec<DeviceOp> {
        let mut ops = Vec::new();
        if self.health == Health::Working {
            self.queue_removals();
            self.pump(&mut ops);
        }
        ops
    }

    /// Handles the result of an operation. Returns the next operations and the resulting events.
    ///
    /// After [`PoolEvent::DeviceLost`] or [`PoolEvent::WritesStopped`], no further operations are returned.
    /// Batches in flight are reported as failed when the last of their block writes was reported, so that the
    /// device no longer uses their memory. On a device that is only read from then on, slots without a stored
    /// block are free.
    ///
    /// # Panics
    /// If the token names no operation in flight.
    pub fn done(
        &mut self,
        token: OpToken,
        result: Result<(), DeviceError>,
    ) -> (Vec<DeviceOp>, Vec<PoolEvent>) {
        let (mut ops, mut events) = (Vec::new(), Vec::new());
        let purpose = self.operations.end(token);
        match (purpose, result) {
            (Purpose::Block { batch, .. }, _) if self.health != Health::Working => {
                self.batch_mut(batch).write_done();
                self.report_lost_batches(&mut events);
            }
            _ if self.health != Health::Working => {}
            (Purpose::Block { batch, .. }, Ok(())) => self.block_written(batch),
            (Purpose::Block { batch, page }, Err(DeviceError::Media)) => {
                self.slots.quarantine(page);
                self.block_written(batch);
            }
            (Purpose::Block { batch, page }, Err(DeviceError::Refused)) => {
                self.slots.abandon_write(page);
                self.batch_mut(batch).write_refused(page);
                self.block_written(batch);
            }
            (Purpose::Block { batch, .. }, Err(error @ (DeviceError::Unwritable | DeviceError::Lost))) => {
                self.batch_mut(batch).write_done();
                self.stop("a block could not be written", error, &mut events);
            }
            (Purpose::Journal(_), Err(error)) => {
                self.stop("the journal could not be written", error, &mut events);
            }
            (Purpose::Sync, Err(error)) => {
                self.stop("the device could not be synced", error, &mut events);
            }
            (Purpose::Journal(part), Ok(())) => self.journal_written(part),
            (Purpose::Sync, Ok(())) => self.synced(&mut ops, &mut events),
        }
        self.pump(&mut ops);
        (ops, events)
    }

    /// Usage of space and journal. O(slot sizes).
    pub fn usage(&self) -> PoolUsage {
        let tally = self.slots.tally();
        let (entries_free, entries_pending) = self.slots.entries_free();
        PoolUsage {
            entries_free,
            entries_pending,
            entries_max: self.slots.entries_max(),
            slot_bytes_used: tally.used * PAGE_BYTES,
            slot_bytes_free: tally.free * PAGE_BYTES,
            slots_quarantined: tally.quarantined_slots,
            slot_bytes_quarantined: tally.quarantined * PAGE_BYTES,
            pending_frees_bytes: tally.freeing * PAGE_BYTES,
            slack_bytes: tally.slack * PAGE_BYTES,
            capacity_bytes: self.slots.capacity_pages() * PAGE_BYTES,
            blocks_stored: tally.stored,
            journal_bytes_used: self.journal.log_bytes_used(),
            journal_bytes_capacity: u64::from(self.superblock.geometry.log_pages) * PAGE_BYTES,
            checkpoints: self.journal.checkpoints(),
            journal_records: self.journal.records(),
            memory_bytes: self.slots.memory_bytes() as u64,
        }
    }

    /// Checks the invariants of the slots against a full recount, for tests. O(slots).
    ///
    /// # Errors
    /// A description of the first violated invariant.
    pub fn audit(&self) -> Result<(), String> {
        self.slots.audit()
    }

    fn start_block(&mut self, batch: &mut Batch, block: &BlockWrite, ops: &mut Vec<DeviceOp>) {
        let tenant_layout = TenantLayout { tenant: block.tenant, layout: block.layout };
        let Some(layout) = self.slots.acquire_layout(&tenant_layout) else {
            self.slots.release(block.page);
            batch.block_refused(block.key);
            return;
        };
        let generation = self.next_generation;
        self.next_generation += 1;
        let (header, header_crc) = encode_header(&HeaderFields {
            pool_uuid: self.superblock.pool_uuid,
            page: block.page,
            key: block.key,
            content: block.content,
            layout: block.layout,
            generation: short(generation),
            tenant: block.tenant_name.as_ref(),
            checksums: &block.checksums,
        });
        let content = SlotContent {
            key: block.key,
            layout,
            generation,
            header_crc,
            priority: block.priority,
            content: block.content,
        };
        let bytes = self.slots.begin_write(block.page, &content);
        assert_eq!(bytes, block.layout.slot_bytes(), "the slot was allocated for this layout");
        assert_eq!(bytes, block.slot.bytes, "the arena slot is one of this layout");
        batch.block_started(block.page, block.key);
        let token = self.operations.begin(Purpose::Block { batch: batch.id(), page: block.page });
        let kind = DeviceOpKind::WriteBlock {
            tenant: block.tenant,
            offset: block.page.offset(),
            header,
            slot: block.slot,
        };
        ops.push(DeviceOp { token, kind });
    }

    fn block_written(&mut self, batch: BatchId) {
        if self.batch_mut(batch).write_done() == BatchProgress::Complete {
            self.gate.wait(Waiter::Batch(batch));
        }
    }

    fn journal_written(&mut self, part: JournalPart) {
        match part {
            JournalPart::Group => self.gate.wait(Waiter::Journal(part)),
            JournalPart::BankSwitch => self.journal.switch_written(),
        }
    }

    fn synced(&mut self, ops: &mut Vec<DeviceOp>, events: &mut Vec<PoolEvent>) {
        for waiter in self.gate.finish() {
            match waiter {
                Waiter::Batch(batch) => self.batch_synced(batch, events),
                Waiter::Journal(JournalPart::Group) => self.group_durable(events),
                Waiter::Journal(JournalPart::BankSwitch) => {
                    let mut actions = JournalActions::default();
                    self.journal.switch_synced(self.next_generation, &mut actions);
                    self.start_journal(actions, ops);
                }
            }
        }
    }

    /// Queues the records of a batch whose blocks were synced, and the pending removals with them.
    fn batch_synced(&mut self, id: BatchId, events: &mut Vec<PoolEvent>) {
        let position = self.batch_position(id);
        let blocks = self.batches[position].begin_records();
        for (page, _) in blocks {
            self.journal.push(self.slots.record_of_write(*page), Some(id));
        }
        if blocks.is_empty() {
            events.push(self.batches.remove(position).into_event());
        }
        self.queue_removals();
    }

    fn group_durable(&mut self, events: &mut Vec<PoolEvent>) {
        let mut freed = 0;
        for QueuedRecord { record, batch } in self.journal.group_synced() {
            let progress = match (record.kind, batch) {
                (RecordKind::Free, _) => {
                    freed += u32::from(self.slots.finish_free(record.page));
                    continue;
                }
                // A lend without a batch belongs to a withdrawn block.
                (RecordKind::Quarantine | RecordKind::Lend, None) => continue,
                (RecordKind::Lend, Some(id)) => {
                    let lent = self.slots.lent(record.page);
                    (id, self.batch_mut(id).block_stored(lent))
                }
                (RecordKind::Store, batch) => {
                    let stored = self.slots.commit(record.page);
                    let id = batch.expect("every store belongs to a batch");
                    (id, self.batch_mut(id).block_stored(stored))
                }
                (RecordKind::Quarantine, Some(id)) => (id, self.batch_mut(id).block_failed(record.key)),
            };
            if let (id, BatchProgress::Complete) = progress {
                let position = self.batch_position(id);
                events.push(self.batches.remove(position).into_event());
            }
        }
        if freed > 0 {
            events.push(PoolEvent::SpaceFreed);
        }
    }

    fn queue_removals(&mut self) {
        for record in self.removals.drain(..) {
            self.journal.push(record, None);
        }
    }

    /// Starts all operations that are possible now.
    pub(super) fn pump(&mut self, ops: &mut Vec<DeviceOp>) {
        if !self.is_writable() {
            return;
        }
        let mut actions = JournalActions::default();
        self.journal.advance(&self.slots, self.next_generation, &mut actions);
        self.start_journal(actions, ops);
        if let Some(purpose) = self.gate.start() {
            ops.push(DeviceOp { token: self.operations.begin(purpose), kind: DeviceOpKind::Sync });
        }
    }

    fn start_journal(&mut self, actions: JournalActions, ops: &mut Vec<DeviceOp>) {
        for write in actions.writes {
            let token = self.operations.begin(Purpose::Journal(write.part));
            let kind = DeviceOpKind::WritePages { offset: write.offset, bytes: write.bytes };
            ops.push(DeviceOp { token, kind });
        }
        for part in actions.syncs {
            self.gate.wait(Waiter::Journal(part));
        }
    }

    /// Ends writing after an error, and reading too if the device is lost.
    fn stop(&mut self, what: &str, error: DeviceError, events: &mut Vec<PoolEvent>) {
        let reason = format!("{what}: {error}");
        let (health, event) = match error {
            DeviceError::Lost => (Health::Lost, PoolEvent::DeviceLost { reason }),
            DeviceError::Media | DeviceError::Refused | DeviceError::Unwritable => {
                (Health::ReadOnly, PoolEvent::WritesStopped { reason })
            }
        };
        self.health = health;
        self.journal.abandon();
        self.gate.abandon();
        self.removals.clear();
        if self.health == Health::ReadOnly {
            self.slots.finish_all_frees();
        }
        events.push(event);
        self.report_lost_batches(events);
    }

    fn report_lost_batches(&mut self, events: &mut Vec<PoolEvent>) {
        let batches = std::mem::take(&mut self.batches);
        for batch in batches {
            match batch.writes() {
                BatchProgress::Pending => self.batches.push(batch),
                BatchProgress::Complete => {
                    if self.health == Health::ReadOnly {
                        batch.pages().for_each(|page| self.slots.forget_write(page));
                    }
                    events.push(batch.into_lost_event());
                }
            }
        }
    }

    fn batch_position(&self, id: BatchId) -> usize {
        self.batches.iter().position(|batch| batch.id() == id).expect("a batch lasts until it is reported")
    }

    fn batch_mut(&mut self, id: BatchId) -> &mut Batch {
        let position = self.batch_position(id);
        &mut self.batches[position]
    }
}
