//! Write-back: from commit to durable.
//!
//! Unsaved blocks wait in order of commit, each tenant and slot size in a queue of its own. The queues are flushed when
//! the oldest block has waited for the delay, when enough bytes wait, or when somebody found the arena full. A flush gives batches
//! to devices (the emptiest first), which the pools turn into writes and syncs. A block whose write fails is tried
//! elsewhere a few times. A queue for whose size no device has a slot, or whose tenant is at its limit, waits for room,
//! and the others pass it.
//!
//! An agent without a usable device saves nothing: its tickets end as lost at once, and its blocks are clean, that
//! is, cached until the room is needed.
//!
//! Invariants: a frame is `Unsaved` exactly while it has a record here; a record is in the queue or in one batch.

use std::collections::BTreeMap;

use reprise_policy::{BlockKey, ContentId, Tick};

use super::AgentCore;
use super::devices::Room;
use super::frames::{FrameIndex, FrameState};
use super::limits::{BATCH_BLOCKS_MAX, WRITE_ATTEMPTS_MAX};
use super::shapes::Shape;
use super::slab::{Slab, SlabId};
use super::tenants::nvme_bytes;
use super::tickets::{ItemEnd, TicketList};
use crate::effect::DeviceId;
use crate::pool::{BatchId, BlockWrite, StoredBlock};
use queue::Queue;
pub(super) use queue::{Cause, Lane};

mod queue;

/// State of the write-back; see the module.
#[derive(Debug)]
pub(super) struct WriteBack {
    pub(super) unsaved: Slab<UnsavedBlock>,
    queue: Queue,
    unsaved_bytes: u64,
    /// The part of them that was taken from peers.
    taken_bytes: u64,
    batches: Vec<Batch>,
    batches_started: u64,
    pace: Pace,
}

/// A block that is not durable yet.
#[derive(Debug)]
pub(super) struct UnsavedBlock {
    pub(super) frame: FrameIndex,
    pub(super) tickets: TicketList,
    pub(super) cause: Cause,
    /// The block before it in its chain, where the commit named one.
    parent: Option<BlockKey>,
    worth: Worth,
    since: Tick,
    attempts: u8,
    state: SaveState,
}

/// Where the copy in DRAM of a saved block stands in the order of eviction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Worth {
    /// Behind all others: somebody here uses it.
    Used,
    /// First of its class: it came for its copy on a device, and displaces nothing that is used.
    Unasked,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SaveState {
    Queued,
    Writing(BatchId),
}

/// What the queue waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Pace {
    /// Company, or the delay.
    Patient,
    /// Nothing: somebody needs the room.
    Urged,
    /// Devices that are busy or full: the end of something under way, which is an event.
    Stalled,
}

/// Whether something of a lane that was given up still waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Left {
    None,
    Some,
}

/// Blocks being written by one device.
#[derive(Debug)]
struct Batch {
    id: BatchId,
    device: DeviceId,
    blocks: Vec<SlabId>,
}

impl WriteBack {
    /// Nothing to write.
    pub(super) fn new() -> WriteBack {
        WriteBack {
            unsaved: Slab::new(),
            queue: Queue::default(),
            unsaved_bytes: 0,
            taken_bytes: 0,
            batches: Vec::new(),
            batches_started: 0,
            pace: Pace::Patient,
        }
    }

    /// Slot bytes of blocks that are not durable yet.
    pub(super) fn unsaved_bytes(&self) -> u64 {
        self.unsaved_bytes
    }

    /// The part of them that was taken from peers.
    pub(super) fn taken_bytes(&self) -> u64 {
        self.taken_bytes
    }

    /// Somebody reads a block that is not durable yet.
    pub(super) fn note_read(&mut self, slot: u32) {
        if let Some(block) = self.unsaved.at_mut(slot) {
            block.worth = Worth::Used;
        }
    }

    /// Frames that devices are writing.
    pub(super) fn being_written(&self) -> impl Iterator<Item = FrameIndex> {
        let records = self.batches.iter().flat_map(|batch| &batch.blocks);
        records.filter_map(|record| self.unsaved.get(*record)).map(|block| block.frame)
    }

    /// Every record is in the queue or in one batch, and the bytes that wait are counted.
    pub(super) fn audit(&self) -> Result<(), String> {
        let queued = self.queue.iter().map(|(_, id)| (id, SaveState::Queued));
        let queued_bytes: u64 = self.queue.iter().map(|(bytes, _)| bytes).sum();
        if queued_bytes != self.queue.bytes() {
            return Err(format!("{queued_bytes} bytes wait, {} counted", self.queue.bytes()));
        }
        let writing = self
            .batches
            .iter()
            .flat_map(|batch| batch.blocks.iter().map(|id| (*id, SaveState::Writing(batch.id))));
        let mut places: Vec<(SlabId, SaveState)> = queued.chain(writing).collect();
        let listed = places.len();
        places.sort_by_key(|(id, _)| *id);
        places.dedup_by_key(|(id, _)| *id);
        let right = |(id, state): &(SlabId, SaveState)| {
            self.unsaved.get(*id).is_some_and(|block| block.state == *state)
        };
        if listed != self.unsaved.len() || places.len() != listed || !places.iter().all(right) {
            return Err(format!("{} unsaved blocks, {listed} queued or being written", self.unsaved.len()));
        }
        Ok(())
    }
}

impl AgentCore {
    /// Somebody found the arena full: saved blocks could be dropped, so save them now.
    pub(super) fn urge_writeback(&mut self) {
        if !self.writeback.queue.is_empty() {
            self.writeback.pace = Pace::Urged;
        }
    }

    /// A readable, findable frame needs saving; `ticket` waits for it. Without a usable device it never will be.
    pub(super) fn save_later(&mut self, frame: FrameIndex, ticket: SlabId, parent: Option<BlockKey>) {
        let mut tickets = TicketList::default();
        tickets.push(ticket);
        if let Some(waiting) = self.tickets.get_mut(ticket) {
            waiting.waiting += 1;
        }
        self.queue_save((self.lane_of(frame, Cause::Committed), Worth::Used), frame, tickets, parent);
    }

    /// Puts a readable, findable frame into the queue of a lane.
    pub(super) fn queue_save(
        &mut self,
        (lane, worth): (Lane, Worth),
        frame: FrameIndex,
        tickets: TicketList,
        parent: Option<BlockKey>,
    ) {
        let (state, cause) = (SaveState::Queued, lane.cause);
        let record =
            UnsavedBlock { frame, tickets, cause, parent, worth, since: self.now, attempts: 0, state };
        let id = self.writeback.unsaved.insert(record);
        self.writeback.unsaved_bytes += lane.slot_bytes;
        if cause == Cause::Taken {
            self.writeback.taken_bytes += lane.slot_bytes;
        }
        self.taking.coming.enter(lane.tenant, lane.slot_bytes);
        self.writeback.queue.push(lane, id, self.now);
        self.set_frame_state(frame, FrameState::Unsaved(id.slot()));
    }

    /// The instant at which the oldest queued block must be on its way; none while devices are busy or full.
    pub(super) fn writeback_deadline(&self) -> Option<Tick> {
        let oldest = self.writeback.queue.oldest()?;
        (self.writeback.pace == Pace::Patient).then(|| oldest.after(self.settings.writeback_delay))
    }

    /// Starts as many batches as are due and possible.
    pub(super) fn write_back(&mut self) {
        if !self.writeback_due() {
            return;
        }
        let share = self.batch_bytes();
        let mut full = Vec::new();
        while !self.writeback.queue.is_empty() {
            let Some(device) = self.devices.emptiest(&full) else { break };
            if !self.start_batch(device, share) {
                full.push(device);
            }
        }
        let mut pace = Pace::Stalled;
        for lane in self.writeback.queue.lanes() {
            if self.is_hopeless(lane) && self.give_up(lane) == Left::Some {
                pace = Pace::Patient;
            }
        }
        self.writeback.pace = if self.writeback.queue.is_empty() { Pace::Patient } else { pace };
    }

    /// Whether nothing that is under way or could be evicted will ever make room for the blocks of a lane. Makes room where
    /// there is none.
    fn is_hopeless(&mut self, lane: Lane) -> bool {
        if !self.may_be_saved(lane) {
            return true;
        }
        let at_limit = self.tenants.nvme(lane.tenant).room() < nvme_bytes(lane.slot_bytes);
        match lane.cause {
            Cause::Taken => at_limit || !self.devices.has_slot(lane.slot_bytes),
            // At its limit a tenant waits for the end of its own reads and writes.
            Cause::Committed if at_limit || self.devices.has_slot(lane.slot_bytes) => false,
            Cause::Committed => self.make_pool_room(lane) == Room::Never,
        }
    }

    /// Whether blocks of a lane fit a device, and their tenant may have one of them there.
    pub(super) fn may_be_saved(&self, lane: Lane) -> bool {
        self.devices.can_hold(lane.slot_bytes)
            && self.tenants.nvme(lane.tenant).quota.limit() >= nvme_bytes(lane.slot_bytes)
    }

    /// Where the block of a frame waits.
    pub(super) fn lane_of(&self, frame: FrameIndex, cause: Cause) -> Lane {
        let Shape { slot_bytes, tenant_index, .. } = *self.shapes.get(self.frames.get(frame).shape);
        Lane { slot_bytes, tenant: tenant_index, cause }
    }

    /// Sees to it that one more block of a lane is within its tenant's limit; `false` when not enough may go.
    fn make_nvme_room_below_limit(&mut self, lane: Lane) -> bool {
        let bytes = nvme_bytes(lane.slot_bytes);
        while self.tenants.nvme(lane.tenant).room() < bytes {
            if lane.cause == Cause::Taken || !self.evict_nvme_of(lane.tenant) {
                return false;
            }
        }
        true
    }

    /// A pool reports a batch.
    pub(super) fn batch_done(&mut self, id: BatchId, stored: &[StoredBlock]) {
        let Some(at) = self.writeback.batches.iter().position(|batch| batch.id == id) else { return };
        let batch = self.writeback.batches.swap_remove(at);
        for record in &batch.blocks {
            let block = self.writeback.unsaved.get(*record).expect("what is being written has a record");
            let lane = self.lane_of(block.frame, block.cause);
            // What was stored is counted again by its entry.
            self.tenants.give_nvme(lane.tenant, lane.slot_bytes);
        }
        if self.devices.is_usable(batch.device) {
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

    /// What a device has stored of a batch, parents before their children: writes end in any order.
    fn in_order_of_commit<'a>(&self, batch: &Batch, stored: &'a [StoredBlock]) -> Vec<&'a StoredBlock> {
        let key = |record: &SlabId| {
            let entry = self.frames.get(self.writeback.unsaved.get(*record)?.frame).entry()?;
            Some(self.index.entry(entry).key())
        };
        let order: BTreeMap<Option<BlockKey>, usize> = batch.blocks.iter().map(key).zip(0..).collect();
        let mut blocks: Vec<&StoredBlock> = stored.iter().collect();
        blocks.sort_by_key(|block| order.get(&Some(block.key)));
        blocks
    }

    /// Of a block that is not durable yet, the block before it in its chain.
    pub(super) fn parent_of_unsaved(&self, frame: FrameIndex) -> Option<BlockKey> {
        let FrameState::Unsaved(slot) = self.frames.get(frame).state else { return None };
        self.writeback.unsaved.at(slot)?.parent
    }

    /// Whether a flush is due. Without a usable device everything is due, to come to its end.
    fn writeback_due(&self) -> bool {
        let Some(oldest) = self.writeback.queue.oldest() else { return false };
        self.writeback.pace != Pace::Patient
            || self.writeback.queue.bytes() >= self.settings.writeback_bytes
            || oldest.after(self.settings.writeback_delay) <= self.now
            || self.devices.usable() == 0
    }

    /// Bytes of one batch: all devices get a share of the queue, but none a larger batch than the setting.
    fn batch_bytes(&self) -> u64 {
        let devices = self.devices.usable().max(1) as u64;
        self.writeback.queue.bytes().div_ceil(devices).min(self.settings.writeback_bytes)
    }

    /// Gives a device the blocks that have waited longest and that it has slots for, at least one; `false` when it has
    /// a slot for none.
    fn start_batch(&mut self, device: DeviceId, bytes_max: u64) -> bool {
        let id = BatchId(self.writeback.batches_started + 1);
        let (mut writes, mut blocks, mut bytes) = (Vec::new(), Vec::new(), 0);
        for lane in self.writeback.queue.lanes() {
            let slot_bytes = lane.slot_bytes;
            let room =
                |count, bytes| count == 0 || (bytes + slot_bytes <= bytes_max && count < BATCH_BLOCKS_MAX);
            while self.writeback.queue.holds(lane) && room(writes.len(), bytes) {
                if !self.make_nvme_room_below_limit(lane) {
                    break;
                }
                let Some(page) = self.devices.allocate(device, slot_bytes) else { break };
                self.tenants.take_nvme(lane.tenant, slot_bytes);
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
        let ops = self.devices.write_batch(device, id, writes);
        self.emit_ops(device, ops);
        true
    }

    fn block_write(&self, frame: FrameIndex, page: crate::pool::PageNumber) -> BlockWrite {
        let state = self.frames.get(frame);
        let entry = self.index.entry(state.entry().expect("an unsaved block can be found"));
        let Shape { tenant, tenant_index, layout, .. } = *self.shapes.get(state.shape);
        BlockWrite {
            key: entry.key(),
            tenant,
            tenant_name: self.tenants.get(tenant_index).name.clone(),
            layout,
            content: ContentId::UNKNOWN,
            priority: entry.class(),
            checksums: self.checksums(frame).into(),
            slot: self.arena.slot(state.place),
            page,
        }
    }

    /// A block of a batch is durable.
    fn block_stored(&mut self, device: DeviceId, block: &StoredBlock) {
        let found = self.index.find(&block.key).and_then(|entry| match self.index.entry(entry).dram() {
            super::index::Dram::Resident(frame) => Some((entry, frame)),
            _ => None,
        });
        let Some((entry, frame)) = found else { return self.devices.free(device, block.page) };
        let FrameState::Unsaved(slot) = self.frames.get(frame).state else {
            return self.devices.free(device, block.page);
        };
        let bytes = self.shapes.get(self.frames.get(frame).shape).layout.block_bytes();
        self.counters.stored_blocks_total += 1;
        self.counters.stored_bytes_total += bytes;
        self.keep_stored(entry, device, block);
        let record = self.writeback.unsaved.id_at(slot).expect("an unsaved frame has a record");
        if self.writeback.unsaved.get(record).is_some_and(|block| block.cause == Cause::Taken) {
            self.counters.taken_blocks_stored += 1;
        }
        self.end_unsaved(record, ItemEnd::Durable);
    }

    /// A block's write failed. Tries another slot, or gives up; a lost device is not the block's fault.
    fn write_failed(&mut self, record: SlabId, device: DeviceId) {
        self.counters.write_failures += 1;
        let fault = self.devices.is_usable(device);
        let block = self.writeback.unsaved.get_mut(record).expect("the caller has looked");
        block.attempts += u8::from(fault);
        if block.attempts >= WRITE_ATTEMPTS_MAX {
            self.end_unsaved(record, ItemEnd::Lost);
        } else {
            self.requeue(record);
        }
    }

    fn requeue(&mut self, record: SlabId) {
        let Some(block) = self.writeback.unsaved.get_mut(record) else { return };
        block.state = SaveState::Queued;
        let (since, frame, cause) = (block.since, block.frame, block.cause);
        let lane = self.lane_of(frame, cause);
        self.writeback.queue.put_back(lane, record, since);
    }

    /// Nothing will ever make room for the blocks of a lane. Those that engines have committed since they were taken from
    /// a peer go on in the lane of such blocks.
    fn give_up(&mut self, lane: Lane) -> Left {
        let is_limited = self.devices.can_hold(lane.slot_bytes) && !self.may_be_saved(lane);
        let mut left = Left::None;
        while let Some(record) = self.writeback.queue.pop(lane) {
            let block = self.writeback.unsaved.get(record).expect("queued records live");
            if block.cause != lane.cause {
                left = Left::Some;
                self.writeback.queue.push(Lane { cause: block.cause, ..lane }, record, block.since);
                continue;
            }
            if is_limited && lane.cause == Cause::Committed {
                self.count_limited(lane);
            }
            self.end_unsaved(record, ItemEnd::Lost);
        }
        left
    }

    /// An engine has committed a block that waits to be saved: it is saved like any other.
    pub(super) fn save_as_committed(&mut self, record: SlabId) {
        let Some(block) = self.writeback.unsaved.get_mut(record) else { return };
        block.worth = Worth::Used;
        if std::mem::replace(&mut block.cause, Cause::Committed) == Cause::Taken {
            let frame = block.frame;
            self.writeback.taken_bytes -= self.frame_slot(frame).bytes;
            self.leave_taking_frame(frame);
        }
    }

    /// A block of a lane is not saved because its tenant's limit is below one block: what the tenant would have liked to have.
    pub(super) fn count_limited(&mut self, lane: Lane) {
        self.tenants.get_mut(lane.tenant).counts.nvme_limited_bytes += lane.slot_bytes;
    }

    /// A block is durable or never will be: either way its frame is clean.
    fn end_unsaved(&mut self, record: SlabId, end: ItemEnd) {
        let Some(ended) = self.writeback.unsaved.remove(record) else { return };
        let Lane { slot_bytes, tenant, .. } = self.lane_of(ended.frame, ended.cause);
        self.writeback.unsaved_bytes -= slot_bytes;
        self.taking.coming.leave(tenant, slot_bytes);
        if ended.cause == Cause::Taken {
            self.writeback.taken_bytes -= slot_bytes;
            self.leave_taking_frame(ended.frame);
        }
        let entry = self.frames.get(ended.frame).entry().expect("an unsaved block can be found");
        let key = self.index.entry(entry).key();
        self.set_frame_state(ended.frame, FrameState::Clean);
        match ended.worth {
            Worth::Used => self.order_before_parent(entry, ended.parent),
            Worth::Unasked => self.evict_first(ended.frame),
        }
        self.drop_if_damaged(ended.frame);
        self.end_items(&ended.tickets, key, end);
    }
}
