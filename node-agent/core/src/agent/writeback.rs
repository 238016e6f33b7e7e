//! Write-back: makes committed blocks durable.
//!
//! Unsaved blocks are queued in order of commit, in one queue per tenant and slot size. The queues are
//! flushed when the oldest block has waited for the delay, when enough bytes are queued, or when an
//! allocation found the arena full. A flush assigns batches to devices, the emptiest first; the pools turn
//! batches into writes and syncs. After a failed write, a block is retried in another slot, a few times. A
//! queue whose size has no free slot, or whose tenant is at its limit, waits without delaying the others.
//!
//! Without a usable device, nothing is saved: tickets end as lost at once, and blocks are clean, so they are
//! cached until they are evicted.
//!
//! Invariants: a frame is `Unsaved` exactly while it has a record here; a record is in the queue or in one
//! batch.

use std::collections::BTreeMap;

use reprise_policy::eviction::EntryIndex;
use reprise_policy::{BlockKey, ContentId, Tick};

use crate::agent::AgentCore;
use crate::agent::tickets::{ItemOutcome, TicketList};
use crate::agent::writeback::queue::Queue;
use crate::cache::{Dram, EvictionPosition, FrameIndex, FrameState, SizeClass, SpaceState, nvme_bytes};
use crate::effect::DeviceId;
use crate::limits::{BATCH_BLOCKS_MAX, WRITE_ATTEMPTS_MAX};
use crate::pool::{BatchId, BlockWrite, StoredBlock};
use crate::slab::{Slab, SlabId};

pub(crate) use queue::{Lane, WriteCause};

pub(crate) mod queue;

/// Maximum unsaved ancestors to skip: the blocks by which other devices may lag behind, a batch on each of a
/// few.
const ANCESTORS_MAX: usize = 4 * BATCH_BLOCKS_MAX;

/// Unsaved blocks, their queue, and the batches in flight.
#[derive(Debug)]
pub(crate) struct WriteBack {
    pub(crate) unsaved: Slab<UnsavedBlock>,
    queue: Queue,
    unsaved_bytes: u64,
    /// Part of `unsaved_bytes` that peers offered.
    replicated_bytes: u64,
    batches: Vec<Batch>,
    batches_started: u64,
    urgency: Urgency,
}

/// Block that is not durable yet.
#[derive(Debug)]
pub(crate) struct UnsavedBlock {
    pub(crate) frame: FrameIndex,
    pub(crate) tickets: TicketList,
    pub(crate) cause: WriteCause,
    /// Block before it in its chain, if the commit named one.
    parent: Option<BlockKey>,
    since: Tick,
    attempts: u8,
    state: SaveState,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SaveState {
    Queued,
    Writing(BatchId),
}

/// Condition for the next flush.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Urgency {
    /// Enough bytes, or the delay has passed.
    Normal,
    /// At once, because an allocation found the arena full.
    Immediate,
    /// Devices are busy or full; the next event retries.
    Stalled,
}

/// Whether blocks of a dropped lane remain queued.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Remaining {
    None,
    Some,
}

/// Blocks that one device is writing.
#[derive(Debug)]
struct Batch {
    id: BatchId,
    device: DeviceId,
    blocks: Vec<SlabId>,
}

impl WriteBack {
    /// Creates an empty queue.
    pub(crate) fn new() -> WriteBack {
        WriteBack {
            unsaved: Slab::new(),
            queue: Queue::default(),
            unsaved_bytes: 0,
            replicated_bytes: 0,
            batches: Vec::new(),
            batches_started: 0,
            urgency: Urgency::Normal,
        }
    }

    /// Slot bytes of blocks that are not durable yet.
    pub(crate) fn unsaved_bytes(&self) -> u64 {
        self.unsaved_bytes
    }

    /// Part of `unsaved_bytes` that peers offered.
    pub(crate) fn replicated_bytes(&self) -> u64 {
        self.replicated_bytes
    }

    /// Frames that devices are writing.
    pub(crate) fn being_written(&self) -> impl Iterator<Item = FrameIndex> {
        let records = self.batches.iter().flat_map(|batch| &batch.blocks);
        records.filter_map(|record| self.unsaved.get(*record)).map(|block| block.frame)
    }

    /// Checks that every record is in the queue or in one batch, and that bytes are counted correctly.
    pub(crate) fn audit(&self) -> Result<(), String> {
        let queued = self.queue.iter().map(|(_, id)| (id, SaveState::Queued));
        let queued_bytes: u64 = self.queue.iter().map(|(bytes, _)| bytes).sum();
        if queued_bytes != self.queue.bytes() {
            return Err(format!("{queued_bytes} bytes queued, {} counted", self.queue.bytes()));
        }
        let writing = self
            .batches
            .iter()
            .flat_map(|batch| batch.blocks.iter().map(|id| (*id, SaveState::Writing(batch.id))));
        let mut places: Vec<(SlabId, SaveState)> = queued.chain(writing).collect();
        let listed = places.len();
        places.sort_by_key(|(id, _)| *id);
        places.dedup_by_key(|(id, _)| *id);
        let is_consistent = |(id, state): &(SlabId, SaveState)| {
            self.unsaved.get(*id).is_some_and(|block| block.state == *state)
        };
        if listed != self.unsaved.len() || places.len() != listed || !places.iter().all(is_consistent) {
            return Err(format!("{} unsaved blocks, {listed} queued or being written", self.unsaved.len()));
        }
        Ok(())
    }
}

impl AgentCore {
    /// Flushes the queue at the next opportunity, because saved blocks could be evicted from the full arena.
    pub(crate) fn expedite_writeback(&mut self) {
        if !self.writeback.queue.is_empty() {
            self.writeback.urgency = Urgency::Immediate;
        }
    }

    /// Queues a readable, findable frame for writing; `ticket` waits for the result.
    pub(crate) fn queue_commit(&mut self, frame: FrameIndex, ticket: SlabId, parent: Option<BlockKey>) {
        let mut tickets = TicketList::default();
        tickets.push(ticket);
        if let Some(waiting) = self.tickets.get_mut(ticket) {
            waiting.waiting += 1;
        }
        self.queue_save(
            (self.lane_of(frame, WriteCause::Committed), EvictionPosition::Last),
            frame,
            tickets,
            parent,
        );
    }

    /// Adds a readable, findable frame to the queue of a lane.
    pub(crate) fn queue_save(
        &mut self,
        (lane, position): (Lane, EvictionPosition),
        frame: FrameIndex,
        tickets: TicketList,
        parent: Option<BlockKey>,
    ) {
        let (state, cause) = (SaveState::Queued, lane.cause);
        let record = UnsavedBlock { frame, tickets, cause, parent, since: self.now, attempts: 0, state };
        self.cache.frames.get_mut(frame).position = position;
        let id = self.writeback.unsaved.insert(record);
        self.writeback.unsaved_bytes += lane.slot_bytes;
        if cause == WriteCause::Replicated {
            self.writeback.replicated_bytes += lane.slot_bytes;
        }
        self.cache.pending_space.add(lane.tenant, lane.slot_bytes);
        self.writeback.queue.push(lane, id, self.now);
        self.cache.set_frame_state(frame, FrameState::Unsaved(id.slot()));
    }

    /// Time at which the oldest queued block must be written; `None` while devices are busy or full.
    pub(crate) fn writeback_deadline(&self) -> Option<Tick> {
        let oldest = self.writeback.queue.oldest()?;
        (self.writeback.urgency == Urgency::Normal).then(|| oldest.after(self.settings.writeback_delay))
    }

    /// Starts all batches that are due and possible.
    pub(crate) fn write_back(&mut self) {
        if !self.writeback_due() {
            return;
        }
        let share = self.batch_bytes();
        let mut full = Vec::new();
        while !self.writeback.queue.is_empty() {
            let Some(device) = self.cache.devices.emptiest(&full) else { break };
            if !self.start_batch(device, share) {
                full.push(device);
            }
        }
        let mut urgency = Urgency::Stalled;
        for lane in self.writeback.queue.lanes() {
            if self.can_never_be_written(lane) && self.drop_lane(lane) == Remaining::Some {
                urgency = Urgency::Normal;
            }
        }
        self.writeback.urgency = if self.writeback.queue.is_empty() { Urgency::Normal } else { urgency };
    }

    /// Whether nothing in progress or evictable will ever free space for a lane. Otherwise starts to free
    /// space, if none is free.
    fn can_never_be_written(&mut self, lane: Lane) -> bool {
        if !self.cache.may_be_saved(lane.request()) {
            return true;
        }
        let at_limit = self.cache.accounts.nvme(lane.tenant).room() < nvme_bytes(lane.slot_bytes);
        match lane.cause {
            WriteCause::Replicated => at_limit || !self.cache.devices.has_slot(lane.slot_bytes),
            // A tenant at its limit waits for the end of its own reads and writes.
            WriteCause::Committed if at_limit || self.cache.devices.has_slot(lane.slot_bytes) => false,
            WriteCause::Committed => self.cache.make_pool_room(lane.request()) == SpaceState::Unavailable,
        }
    }

    /// Returns the lane for the block of a frame.
    pub(crate) fn lane_of(&self, frame: FrameIndex, cause: WriteCause) -> Lane {
        let SizeClass { slot_bytes, tenant_index, .. } =
            *self.cache.sizes.get(self.cache.frames.get(frame).size_class);
        Lane { slot_bytes, tenant: tenant_index, cause }
    }

    /// Makes room for a block within the limit of its tenant. Nothing is evicted for replicas.
    fn make_nvme_room(&mut self, lane: Lane) -> bool {
        match lane.cause {
            WriteCause::Committed => self.cache.make_nvme_room(lane.request()),
            WriteCause::Replicated => {
                self.cache.nvme_usage(lane.tenant).room() >= nvme_bytes(lane.slot_bytes)
            }
        }
    }

    /// Handles the end of a batch.
    pub(crate) fn batch_done(&mut self, id: BatchId, stored: &[StoredBlock]) {
        let Some(at) = self.writeback.batches.iter().position(|batch| batch.id == id) else { return };
        let batch = self.writeback.batches.swap_remove(at);
        for record in &batch.blocks {
            let block =
                self.writeback.unsaved.get(*record).expect("a block that is being written has a record");
            let lane = self.lane_of(block.frame, block.cause);
            // Stored blocks are charged again with their index entries.
            self.cache.accounts.release_nvme(lane.tenant, lane.slot_bytes);
        }
        if self.cache.devices.is_usable(batch.device) {
            for block in self.in_order_of_commit(&batch, stored) {
                self.block_stored(batch.device, block);
            }
        }
        for record in batch.blocks {
            let writing = |block: &UnsavedBlock| block.state == SaveState::Writing(id);
            if self.writeback.unsaved.get(record).is_some_and(writing) {
                self.write_failed(record, batch.device);
            }
        }
    }

    /// Returns the stored blocks of a batch with parents before their children, because writes end in any
    /// order.
    fn in_order_of_commit<'a>(&self, batch: &Batch, stored: &'a [StoredBlock]) -> Vec<&'a StoredBlock> {
        let key = |record: &SlabId| {
            let entry = self.cache.frames.get(self.writeback.unsaved.get(*record)?.frame).entry()?;
            Some(self.cache.index.entry(entry).key())
        };
        let order: BTreeMap<Option<BlockKey>, usize> = batch.blocks.iter().map(key).zip(0..).collect();
        let mut blocks: Vec<&StoredBlock> = stored.iter().collect();
        blocks.sort_by_key(|block| order.get(&Some(block.key)));
        blocks
    }

    /// Parent of an unsaved block in its chain.
    pub(crate) fn parent_of_unsaved(&self, frame: FrameIndex) -> Option<BlockKey> {
        let FrameState::Unsaved(slot) = self.cache.frames.get(frame).state else { return None };
        self.writeback.unsaved.at(slot)?.parent
    }

    /// Whether a flush is due. Without a usable device it is always due, so that all blocks are resolved.
    fn writeback_due(&self) -> bool {
        let Some(oldest) = self.writeback.queue.oldest() else { return false };
        self.writeback.urgency != Urgency::Normal
            || self.writeback.queue.bytes() >= self.settings.writeback_bytes
            || oldest.after(self.settings.writeback_delay) <= self.now
            || self.cache.devices.writable() == 0
    }

    /// Bytes of one batch: each device gets an equal share of the queue, at most `writeback_bytes`.
    fn batch_bytes(&self) -> u64 {
        let devices = self.cache.devices.writable().max(1) as u64;
        self.writeback.queue.bytes().div_ceil(devices).min(self.settings.writeback_bytes)
    }

    /// Starts a batch of the oldest blocks that the device has slots for, at least one; `false` if there is
    /// no such block.
    fn start_batch(&mut self, device: DeviceId, bytes_max: u64) -> bool {
        let id = BatchId(self.writeback.batches_started + 1);
        let (mut writes, mut blocks, mut bytes) = (Vec::new(), Vec::new(), 0);
        for lane in self.writeback.queue.lanes() {
            let slot_bytes = lane.slot_bytes;
            let room =
                |count, bytes| count == 0 || (bytes + slot_bytes <= bytes_max && count < BATCH_BLOCKS_MAX);
            while self.writeback.queue.holds(lane) && room(writes.len(), bytes) {
                if !self.make_nvme_room(lane) {
                    break;
                }
                let Some(page) = self.cache.devices.allocate(device, slot_bytes) else { break };
                self.cache.accounts.charge_nvme(lane.tenant, slot_bytes);
                let record = self.writeback.queue.pop(lane).expect("just seen");
                let block = self.writeback.unsaved.get_mut(record).expect("queued records live");
                block.state = SaveState::Writing(id);
                let frame = block.frame;
                bytes += slot_bytes;
                blocks.push(record);
                writes.push(self.block_write(frame, page));
            }
        }
        if writes.is_empty() {
            return false;
        }
        self.writeback.batches_started += 1;
        self.writeback.batches.push(Batch { id, device, blocks });
        self.counters.writeback_batches += 1;
        let ops = self.cache.devices.write_batch(device, id, writes);
        self.cache.emit_ops(context!(self), device, ops);
        true
    }

    fn block_write(&self, frame: FrameIndex, page: crate::pool::PageNumber) -> BlockWrite {
        let state = self.cache.frames.get(frame);
        let entry = self.cache.index.entry(state.entry().expect("an unsaved block can be found"));
        let SizeClass { tenant, tenant_index, layout, .. } = *self.cache.sizes.get(state.size_class);
        BlockWrite {
            key: entry.key(),
            tenant,
            tenant_name: self.cache.accounts.get(tenant_index).name.clone(),
            layout,
            content: ContentId::UNKNOWN,
            priority: entry.class(),
            checksums: self.cache.checksums(frame).into(),
            slot: self.cache.arena.slot(state.place),
            page,
        }
    }

    /// Records that a block of a batch is durable.
    fn block_stored(&mut self, device: DeviceId, block: &StoredBlock) {
        let found =
            self.cache.index.find(&block.key).and_then(|entry| match self.cache.index.entry(entry).dram() {
                Dram::Resident(frame) => Some((entry, frame)),
                _ => None,
            });
        let Some((entry, frame)) = found else { return self.cache.devices.free(device, block.page) };
        let FrameState::Unsaved(slot) = self.cache.frames.get(frame).state else {
            return self.cache.devices.free(device, block.page);
        };
        let bytes = self.cache.sizes.get(self.cache.frames.get(frame).size_class).layout.block_bytes();
        self.cache.counters.stored_blocks_total += 1;
        self.cache.counters.stored_bytes_total += bytes;
        self.cache.keep_stored(entry, device, block);
        let record = self.writeback.unsaved.id_at(slot).expect("an unsaved frame has a record");
        if self.writeback.unsaved.get(record).is_some_and(|block| block.cause == WriteCause::Replicated) {
            self.counters.taken_blocks_stored += 1;
        }
        self.end_unsaved(record, ItemOutcome::Durable);
    }

    /// Handles a failed write: retries in another slot, or gives up. A device that is lost or
    /// read-only does not count as an attempt.
    fn write_failed(&mut self, record: SlabId, device: DeviceId) {
        self.counters.write_failures += 1;
        let fault = self.cache.devices.is_writable(device);
        let block = self.writeback.unsaved.get_mut(record).expect("the caller has checked");
        block.attempts += u8::from(fault);
        if block.attempts >= WRITE_ATTEMPTS_MAX {
            self.end_unsaved(record, ItemOutcome::Lost);
        } else {
            self.requeue(record);
        }
    }

    fn requeue(&mut self, record: SlabId) {
        let Some(block) = self.writeback.unsaved.get_mut(record) else { return };
        block.state = SaveState::Queued;
        let (since, frame, cause) = (block.since, block.frame, block.cause);
        let lane = self.lane_of(frame, cause);
        self.writeback.queue.push_front(lane, record, since);
    }

    /// Drops the blocks of a lane that can never be written. Blocks that engines have committed since a peer
    /// offered them move to the lane of committed blocks.
    fn drop_lane(&mut self, lane: Lane) -> Remaining {
        let is_limited =
            self.cache.devices.can_hold(lane.slot_bytes) && !self.cache.may_be_saved(lane.request());
        let mut left = Remaining::None;
        while let Some(record) = self.writeback.queue.pop(lane) {
            let block = self.writeback.unsaved.get(record).expect("queued records live");
            if block.cause != lane.cause {
                left = Remaining::Some;
                self.writeback.queue.push(Lane { cause: block.cause, ..lane }, record, block.since);
                continue;
            }
            if is_limited && lane.cause == WriteCause::Committed {
                self.cache.count_limited(lane.request());
            }
            self.end_unsaved(record, ItemOutcome::Lost);
        }
        left
    }

    /// Promotes an offered, unsaved block that an engine has committed.
    pub(crate) fn promote_to_committed(&mut self, record: SlabId) {
        let Some(block) = self.writeback.unsaved.get_mut(record) else { return };
        let frame = block.frame;
        self.cache.frames.get_mut(frame).position = EvictionPosition::Last;
        if std::mem::replace(&mut block.cause, WriteCause::Committed) == WriteCause::Replicated {
            self.writeback.replicated_bytes -= self.cache.frame_slot(frame).bytes;
        }
    }

    /// Ends the record of a block that is durable or lost; its frame becomes clean.
    fn end_unsaved(&mut self, record: SlabId, end: ItemOutcome) {
        let Some(ended) = self.writeback.unsaved.remove(record) else { return };
        let Lane { slot_bytes, tenant, .. } = self.lane_of(ended.frame, ended.cause);
        self.writeback.unsaved_bytes -= slot_bytes;
        self.cache.pending_space.remove(tenant, slot_bytes);
        if ended.cause == WriteCause::Replicated {
            self.writeback.replicated_bytes -= slot_bytes;
        }
        let entry = self.cache.frames.get(ended.frame).entry().expect("an unsaved block can be found");
        let key = self.cache.index.entry(entry).key();
        self.cache.set_frame_state(ended.frame, FrameState::Clean);
        match self.cache.frames.get(ended.frame).position {
            EvictionPosition::Last => self.order_before_parent(entry, ended.parent),
            EvictionPosition::First => self.cache.evict_first(ended.frame),
        }
        self.cache.drop_if_damaged(ended.frame);
        self.end_items(&ended.tickets, key, end);
    }

    /// Moves a block immediately before its parent in its eviction orders, or makes it the newest if it has
    /// none.
    pub(crate) fn order_before_parent(&mut self, entry: EntryIndex, parent: Option<BlockKey>) {
        if self.cache.is_ordered(entry) {
            let ancestor = self.nearest_saved(parent);
            self.cache.order_before(entry, ancestor);
        }
    }

    /// Returns a block or, if it is unsaved, its nearest saved ancestor.
    fn nearest_saved(&self, key: Option<BlockKey>) -> Option<EntryIndex> {
        let mut entry = self.cache.index.find(&key?)?;
        // Parents that clients send may form a cycle.
        for _ in 0..ANCESTORS_MAX {
            let Dram::Resident(frame) = self.cache.index.entry(entry).dram() else { break };
            let is_saved = !matches!(self.cache.frames.get(frame).state, FrameState::Unsaved(_));
            if is_saved {
                break;
            }
            entry = self.cache.index.find(&self.parent_of_unsaved(frame)?)?;
        }
        Some(entry)
    }
}
