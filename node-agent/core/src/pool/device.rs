//! The pool of one device while it is in use.

use super::batch::{BATCHES_MAX, Batch, BatchWaits};
use super::error::PoolError;
use super::geometry::{Geometry, PoolParams, SUPERBLOCK_OFFSETS};
use super::header::{HeaderFields, encode_header};
use super::journal::{Journal, JournalPart, JournalPosition, JournalWants, Queued};
use super::layouts::Owned;
use super::operations::{Operations, Purpose, SyncGate, Waiter};
use super::record::{BankLife, Record, RecordKind};
use super::slots::{SlotContent, Slots, short, slot_pages};
use super::superblock::{BankHeader, Superblock};
use super::{
    BatchId, BlockWrite, DeviceError, DeviceOp, DeviceOpKind, OpToken, PageNumber, PoolEvent, StoredBlock,
};
use reprise_policy::BlockKey;
use reprise_policy::layout::PAGE_BYTES;

/// Life of the first bank of a new pool, whose next generation is 1.
const FIRST_LIFE: BankLife = BankLife { epoch: 1, begun: 1 };

/// The pool of one device.
#[derive(Debug)]
pub struct DevicePool {
    superblock: Superblock,
    slots: Slots,
    journal: Journal,
    batches: Vec<Batch>,
    /// Frees and quarantines that wait for a batch or [`DevicePool::flush_frees`] to carry them.
    removals: Vec<Record>,
    operations: Operations,
    gate: SyncGate,
    /// Number of the next write into a slot; none is used twice on one device.
    next_generation: u64,
    health: Health,
}

/// How a device's space and journal are used. Slots count with their header pages.
///
/// `slot_bytes_used + slot_bytes_free + pending_frees_bytes + slot_bytes_quarantined + slack_bytes = capacity_bytes`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PoolUsage {
    /// Bytes of slots that are reserved, being written or stored.
    pub slot_bytes_used: u64,
    /// Bytes of slots that could be taken, and of segments without blocks. Segments belong to one slot size while they
    /// hold a block, so not every size can use all of it: see [`DevicePool::allocatable`].
    pub slot_bytes_free: u64,
    /// Slots that are never used again.
    pub slots_quarantined: u64,
    /// Their bytes.
    pub slot_bytes_quarantined: u64,
    /// Bytes of freed slots whose free record is not durable yet.
    pub pending_frees_bytes: u64,
    /// Bytes at the ends of segments where no slot fits.
    pub slack_bytes: u64,
    /// Bytes of all segments.
    pub capacity_bytes: u64,
    /// Blocks stored, those being freed not counted.
    pub blocks_stored: u64,
    /// Entries that a checkpoint has room for and no slot takes.
    pub entries_free: u64,
    /// Entries of freed slots whose free record is not durable yet.
    pub entries_pending: u64,
    /// Blocks and quarantined slots that there may be at once.
    pub entries_max: u64,
    /// Bytes of the active bank's log that are written.
    pub journal_bytes_used: u64,
    /// Bytes of a bank's log.
    pub journal_bytes_capacity: u64,
    /// Changes of the journal bank since the pool was opened.
    pub checkpoints: u64,
    /// Records made durable since the pool was opened.
    pub journal_records: u64,
    /// Bytes of memory held for slots and segments.
    pub memory_bytes: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Health {
    Working,
    Lost,
}

/// What recovery hands over.
#[derive(Debug)]
pub(super) struct Recovered {
    /// The device.
    pub(super) superblock: Superblock,
    /// Its slots.
    pub(super) slots: Slots,
    /// Where appending goes on.
    pub(super) position: JournalPosition,
    /// No write before had this or a later number.
    pub(super) next_generation: u64,
}

impl DevicePool {
    /// What to write to a device to make it an empty pool: byte offsets and whole pages, to be written in this order
    /// and then synced. The superblock comes last, so an interrupted format leaves no pool rather than half of one.
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
        let header =
            BankHeader { life: FIRST_LIFE, next_generation: 1, checkpoint_records: 0, checkpoint_pages: 0 };
        let [active, other] = [0, 1].map(|bank| superblock.geometry.header_offsets(bank));
        let header_page = header.encode(&superblock, 0);
        let blank = vec![0; header_page.len()];
        let blanks = other.map(|offset| (offset, blank.clone()));
        let headers = active.map(|offset| (offset, header_page.clone()));
        let superblocks = SUPERBLOCK_OFFSETS.map(|offset| (offset, superblock.encode()));
        Ok(blanks.into_iter().chain(headers).chain(superblocks).collect())
    }

    /// Goes on after a recovery.
    pub(super) fn resume(recovered: Recovered) -> DevicePool {
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
        }
    }

    /// Identity of the device's pool, wherever the device is plugged in.
    pub fn pool_uuid(&self) -> [u8; 16] {
        self.superblock.pool_uuid
    }

    /// Index of the device in the node's configuration when it was formatted.
    pub fn device_index(&self) -> u8 {
        self.superblock.device_index
    }

    /// Takes a slot for a payload of so many bytes. `None` when there is none: free some blocks first. A payload
    /// that does not fit a segment never gets one ([`DevicePool::payload_bytes_max`]).
    pub fn allocate(&mut self, payload_bytes: u64) -> Option<PageNumber> {
        if self.health == Health::Lost {
            return None;
        }
        self.slots.allocate(slot_pages(payload_bytes)?)
    }

    /// How many slots for such a payload [`DevicePool::allocate`] would give now.
    pub fn allocatable(&self, payload_bytes: u64) -> u64 {
        slot_pages(payload_bytes).map_or(0, |pages| self.slots.allocatable(pages))
    }

    /// Bytes of the largest payload that fits a segment.
    pub fn payload_bytes_max(&self) -> u64 {
        self.superblock.geometry.segment_bytes - PAGE_BYTES
    }

    /// Ends a stored block. Its slot can be allocated again when its free record is durable: with the next batch or
    /// [`DevicePool::flush_frees`]. Until then a crash brings the block back. No read of the slot may be in flight.
    /// Does nothing when the slot is quarantined.
    ///
    /// # Panics
    /// When there is no stored block.
    pub fn free(&mut self, page: PageNumber) {
        self.removals.extend(self.slots.begin_free(page));
    }

    /// Takes the slot of a stored block out of use for ever: its medium is bad. Recorded with the next batch or
    /// [`DevicePool::flush_frees`]. Does nothing when it is out of use already.
    ///
    /// # Panics
    /// When nothing was written to the slot.
    pub fn quarantine(&mut self, page: PageNumber) {
        self.removals.extend(self.slots.quarantine(page));
    }

    /// Whether the slot at a page is one of those that payloads of so many bytes take.
    pub fn has_size(&self, page: PageNumber, payload_bytes: u64) -> bool {
        slot_pages(payload_bytes).is_some_and(|pages| self.slots.size_of(page) == Some(pages))
    }

    /// Identity of the segment of a slot.
    pub fn segment_of(&self, page: PageNumber) -> Option<u32> {
        self.slots.segment_of(page)
    }

    /// The blocks to be freed so that a segment of another slot size can take payloads of so many bytes; `None` when
    /// freeing blocks would not do. What is in the way may go: a write that ends, but not a quarantined slot.
    pub fn drainable(&self, segment: u32, payload_bytes: u64) -> Option<Vec<(BlockKey, PageNumber)>> {
        self.slots.drainable(segment, slot_pages(payload_bytes)?)
    }

    /// The [`DevicePool::drainable`] segment with the fewest blocks. O(slots).
    pub fn emptiest_drainable(&self, payload_bytes: u64) -> Option<u32> {
        self.slots.emptiest_drainable(slot_pages(payload_bytes)?)
    }

    /// Hands out no slot of a segment any more until all of it is free. Its blocks are to be freed next.
    pub fn start_drain(&mut self, segment: u32) {
        self.slots.start_drain(segment);
    }

    /// Whether room for such a payload comes without anything more being freed: with what was freed already.
    pub fn room_coming(&self, payload_bytes: u64) -> bool {
        slot_pages(payload_bytes).is_some_and(|pages| self.slots.room_coming(pages))
    }

    /// The block stored at a page; `None` when nothing durable is stored there.
    pub fn stored(&self, page: PageNumber) -> Option<StoredBlock> {
        self.slots.stored(page)
    }

    /// Whether [`DevicePool::write_batch`] may be called: fewer than [`BATCHES_MAX`] are in flight and the device works.
    pub fn can_start_batch(&self) -> bool {
        self.health == Health::Working && self.batches.len() < BATCHES_MAX
    }

    /// Writes blocks into slots that [`DevicePool::allocate`] gave and makes them durable, reported as one
    /// [`PoolEvent::BatchDone`]. Frees and quarantines so far become durable with it.
    ///
    /// # Panics
    /// When [`DevicePool::can_start_batch`] says no, the batch's id is in use, a slot is not a reserved one of the
    /// layout's size, or a block has not one checksum per object.
    pub fn write_batch(&mut self, batch: BatchId, blocks: Vec<BlockWrite>) -> Vec<DeviceOp> {
        assert!(self.can_start_batch(), "ask can_start_batch first");
        assert!(self.batches.iter().all(|other| other.id() != batch), "a batch id names one batch");
        let mut ops = Vec::with_capacity(blocks.len() + 1);
        let mut pending = Batch::new(batch, blocks.len());
        for block in blocks {
            self.start_block(&mut pending, &block, &mut ops);
        }
        if pending.writes() == BatchWaits::ForNothing {
            self.gate.wait(Waiter::Batch(batch));
        }
        self.batches.push(pending);
        self.pump(&mut ops);
        ops
    }

    /// Makes frees and quarantines so far durable without waiting for a batch, and starts what recovery has found to be
    /// repaired. Call it when space is short or nothing was written for a while; once after opening, too.
    pub fn flush_frees(&mut self) -> Vec<DeviceOp> {
        let mut ops = Vec::new();
        if self.health == Health::Working {
            self.queue_removals();
            self.pump(&mut ops);
        }
        ops
    }

    /// An operation was done. Returns what to do next and what has happened by it.
    ///
    /// After [`PoolEvent::DeviceLost`] no operation is returned any more; batches in flight are reported as failed when
    /// the last of their block writes was reported, so that their memory is no longer in use by the device.
    ///
    /// # Panics
    /// When the token names no operation in flight.
    pub fn done(
        &mut self,
        token: OpToken,
        result: Result<(), DeviceError>,
    ) -> (Vec<DeviceOp>, Vec<PoolEvent>) {
        let (mut ops, mut events) = (Vec::new(), Vec::new());
        let purpose = self.operations.end(token);
        match (purpose, result) {
            (Purpose::Block { batch, .. }, _) if self.health == Health::Lost => {
                self.batch_mut(batch).write_done();
                self.report_lost_batches(&mut events);
            }
            _ if self.health == Health::Lost => {}
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
            (Purpose::Block { batch, .. }, Err(DeviceError::Lost)) => {
                self.batch_mut(batch).write_done();
                self.lose("a block could not be written: the device is lost", &mut events);
            }
            (Purpose::Journal(_), Err(error)) => {
                self.lose(&format!("the journal could not be written: {error}"), &mut events);
            }
            (Purpose::Sync, Err(error)) => {
                self.lose(&format!("the device could not be synced: {error}"), &mut events);
            }
            (Purpose::Journal(part), Ok(())) => self.journal_written(part),
            (Purpose::Sync, Ok(())) => self.synced(&mut ops, &mut events),
        }
        self.pump(&mut ops);
        (ops, events)
    }

    /// How space and journal are used. O(slot sizes).
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

    /// Checks the invariants of the slots from scratch; for tests, O(slots).
    ///
    /// # Errors
    /// Says which does not hold.
    pub fn audit(&self) -> Result<(), String> {
        self.slots.audit()
    }

    fn start_block(&mut self, batch: &mut Batch, block: &BlockWrite, ops: &mut Vec<DeviceOp>) {
        let owned = Owned { tenant: block.tenant, layout: block.layout };
        let Some(layout) = self.slots.acquire_layout(&owned) else {
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
        let kind = DeviceOpKind::WriteBlock { offset: block.page.offset(), header, slot: block.slot };
        ops.push(DeviceOp { token, kind });
    }

    fn block_written(&mut self, batch: BatchId) {
        if self.batch_mut(batch).write_done() == BatchWaits::ForNothing {
            self.gate.wait(Waiter::Batch(batch));
        }
    }

    fn journal_written(&mut self, part: JournalPart) {
        match part {
            JournalPart::Group => self.gate.wait(Waiter::Journal(part)),
            JournalPart::Flip => self.journal.flip_written(),
        }
    }

    fn synced(&mut self, ops: &mut Vec<DeviceOp>, events: &mut Vec<PoolEvent>) {
        for waiter in self.gate.finish() {
            match waiter {
                Waiter::Batch(batch) => self.batch_synced(batch, events),
                Waiter::Journal(JournalPart::Group) => self.group_durable(events),
                Waiter::Journal(JournalPart::Flip) => {
                    let mut wants = JournalWants::default();
                    self.journal.flip_synced(self.next_generation, &mut wants);
                    self.start_journal(wants, ops);
                }
            }
        }
    }

    /// A batch's blocks are durable: their records go into the journal, and the removals so far with them.
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
        for Queued { record, batch } in self.journal.group_synced() {
            let waits = match (record.kind, batch) {
                (RecordKind::Free, _) => {
                    freed += u32::from(self.slots.finish_free(record.page));
                    continue;
                }
                (RecordKind::Quarantine, None) => continue,
                (RecordKind::Store, batch) => {
                    let stored = self.slots.commit(record.page);
                    let id = batch.expect("every store belongs to a batch");
                    (id, self.batch_mut(id).block_stored(stored))
                }
                (RecordKind::Quarantine, Some(id)) => (id, self.batch_mut(id).block_failed(record.key)),
            };
            if let (id, BatchWaits::ForNothing) = waits {
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

    /// Starts whatever can be started.
    fn pump(&mut self, ops: &mut Vec<DeviceOp>) {
        if self.health == Health::Lost {
            return;
        }
        let mut wants = JournalWants::default();
        self.journal.advance(&self.slots, self.next_generation, &mut wants);
        self.start_journal(wants, ops);
        if let Some(purpose) = self.gate.start() {
            ops.push(DeviceOp { token: self.operations.begin(purpose), kind: DeviceOpKind::Sync });
        }
    }

    fn start_journal(&mut self, wants: JournalWants, ops: &mut Vec<DeviceOp>) {
        for write in wants.writes {
            let token = self.operations.begin(Purpose::Journal(write.part));
            let kind = DeviceOpKind::WritePages { offset: write.offset, bytes: write.bytes };
            ops.push(DeviceOp { token, kind });
        }
        for part in wants.syncs {
            self.gate.wait(Waiter::Journal(part));
        }
    }

    fn lose(&mut self, reason: &str, events: &mut Vec<PoolEvent>) {
        self.health = Health::Lost;
        self.journal.abandon();
        self.gate.abandon();
        self.removals.clear();
        events.push(PoolEvent::DeviceLost { reason: reason.to_owned() });
        self.report_lost_batches(events);
    }

    fn report_lost_batches(&mut self, events: &mut Vec<PoolEvent>) {
        let batches = std::mem::take(&mut self.batches);
        for batch in batches {
            match batch.writes() {
                BatchWaits::Longer => self.batches.push(batch),
                BatchWaits::ForNothing => events.push(batch.into_lost_event()),
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
