//! Write-back: makes committed blocks durable.
//!
//! Unsaved blocks are queued in order of commit, in one queue per tenant and slot size. The queues are
//! flushed when the oldest block has waited for the delay, when enough bytes are queued, or when an
//! allocation found the arena full. A flush assigns blocks to the devices in turn, one batch to each; the pools
//! turn batches into writes and syncs. After a failed write, a block is retried in another slot, a few times. A
//! queue whose size has no free slot, or whose tenant is at its limit, waits without delaying the others.
//!
//! While engines report layers with a slack profile, due writes go into their windows ([`super::slack`]). Blocks that
//! do not fit are carried over to later windows, for at most `slack_delay`. Without such a profile, due writes wait for
//! as long while blocks are read from devices.
//!
//! Without a usable device, nothing is saved: tickets end as lost at once, and blocks are clean, so they are
//! cached until they are evicted.
//!
//! Invariants: a frame is `Unsaved` exactly while it has a record here; a record is in the queue or in one
//! batch.

use std::collections::BTreeMap;

use reprise_policy::demotion::Temperature;
use reprise_policy::fair_order::Weights;
use reprise_policy::{BlockKey, Tick};

use crate::cache::{
    Cache, EvictionPosition, FrameIndex, FrameState, Lease, Save as Saving, SlotRequest, SpaceState,
    TenantIndex, nvme_bytes,
};
use crate::context::Context;
use crate::effect::DeviceId;
use crate::limits::WRITE_ATTEMPTS_MAX;
use crate::pool::{BatchId, StoredBlock};
use crate::save::Save;
use crate::save::queue::{Attempt, Lane, Queue, WriteCause};
use crate::save::slack::{Release, Slack, Written};
use crate::save::tickets::{ItemOutcome, TicketList};
use crate::settings::Settings;
use crate::slab::{Slab, SlabId};
use new_batch::{NewBatch, Run};

mod demote;
mod new_batch;
mod release;

/// Unsaved blocks, their queue, and the batches in flight.
#[derive(Debug)]
pub(super) struct WriteBack {
    unsaved: Slab<UnsavedBlock>,
    queue: Queue,
    unsaved_bytes: u64,
    /// Part of `unsaved_bytes` that peers offered.
    replicated_bytes: u64,
    /// Part of `unsaved_bytes` whose DRAM copies will be the next victims.
    demoting_bytes: u64,
    batches: Vec<Batch>,
    batches_started: u64,
    urgency: Urgency,
    /// Limits of due writes.
    pub(super) slack: Slack,
    /// Time at which due writes that wait for slack are reconsidered; `None` if none wait.
    deferred_until: Option<Tick>,
    /// The agent is about to stop: no write is deferred.
    is_stopping: bool,
}

/// Block that is not durable yet.
#[derive(Debug)]
struct UnsavedBlock {
    lease: Lease<Saving>,
    tickets: TicketList,
    cause: WriteCause,
    since: Tick,
    attempts: u8,
    state: SaveState,
    /// How idle the block was when it was demoted.
    demoted: Option<Temperature>,
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
    pub(super) fn new(weights: Weights<TenantIndex>) -> WriteBack {
        WriteBack {
            unsaved: Slab::new(),
            queue: Queue::new(weights),
            unsaved_bytes: 0,
            replicated_bytes: 0,
            demoting_bytes: 0,
            batches: Vec::new(),
            batches_started: 0,
            urgency: Urgency::Normal,
            slack: Slack::default(),
            deferred_until: None,
            is_stopping: false,
        }
    }

    /// Slot bytes of blocks that are not durable yet.
    pub(super) fn unsaved_bytes(&self) -> u64 {
        self.unsaved_bytes
    }

    /// Number of blocks that are not durable yet.
    pub(super) fn unsaved_blocks(&self) -> usize {
        self.unsaved.len()
    }

    /// Slot bytes of queued blocks while due writes wait for slack.
    pub(super) fn deferred_bytes(&self) -> u64 {
        self.deferred_until.map_or(0, |_| self.queue.bytes())
    }

    /// Unsaved slot bytes that count against the engines' share of the arena. Replicas have their own share;
    /// their excess beyond it counts, because no unsaved block can be evicted.
    pub(super) fn unsaved_bytes_of_engines(&self, cache: &Cache) -> u64 {
        self.unsaved_bytes - self.replicated_bytes.min(cache.pull_bytes_max())
    }

    /// Flushes the queue at the next opportunity, because saved blocks could be evicted from the full arena.
    pub(super) fn expedite(&mut self) {
        if !self.queue.is_empty() {
            self.urgency = Urgency::Immediate;
        }
    }

    /// Adds a readable, findable block to the queue of its lane.
    fn queue_save(
        &mut self,
        cache: &mut Cache,
        now: Tick,
        (lease, cause, position): (Lease<Saving>, WriteCause, EvictionPosition),
        tickets: TicketList,
    ) -> SlabId {
        let lane = lane(cache.slot_request(&lease), cause);
        let (state, demoted) = (SaveState::Queued, None);
        let block = UnsavedBlock { lease, tickets, cause, since: now, attempts: 0, state, demoted };
        let id = self.unsaved.insert(block);
        self.unsaved_bytes += lane.slot_bytes;
        self.add_bytes_of(cause, lane.slot_bytes);
        self.queue.push(lane, id, now);
        let lease = &self.unsaved.get(id).expect("just inserted").lease;
        cache.mark_unsaved(lease, id.slot(), position);
        id
    }

    /// Promotes an offered or demoted, unsaved block that an engine has committed.
    fn promote_to_committed(&mut self, cache: &mut Cache, record: SlabId) {
        let Some(block) = self.unsaved.get_mut(record) else { return };
        cache.set_position(&block.lease, EvictionPosition::Last);
        let before = std::mem::replace(&mut block.cause, WriteCause::Committed);
        let bytes = cache.slot(&block.lease).bytes;
        self.remove_bytes_of(before, bytes);
    }

    /// Adds bytes to the part of `unsaved_bytes` that a cause has, if it is counted.
    fn add_bytes_of(&mut self, cause: WriteCause, bytes: u64) {
        match cause {
            WriteCause::Committed => {}
            WriteCause::Demoted => self.demoting_bytes += bytes,
            WriteCause::Replicated => self.replicated_bytes += bytes,
        }
    }

    fn remove_bytes_of(&mut self, cause: WriteCause, bytes: u64) {
        match cause {
            WriteCause::Committed => {}
            WriteCause::Demoted => self.demoting_bytes -= bytes,
            WriteCause::Replicated => self.replicated_bytes -= bytes,
        }
    }

    fn requeue(&mut self, cache: &Cache, record: SlabId) {
        let Some(block) = self.unsaved.get_mut(record) else { return };
        block.state = SaveState::Queued;
        let lane = lane(cache.slot_request(&block.lease), block.cause);
        self.queue.push_front(lane, record, block.since);
    }

    /// Time at which the oldest queued block must be written; `None` while devices are busy or full.
    fn deadline(&self, settings: &Settings) -> Option<Tick> {
        let oldest = self.queue.oldest()?;
        if self.deferred_until.is_some() {
            return self.deferred_until;
        }
        (self.urgency == Urgency::Normal).then(|| oldest.after(settings.writeback_delay))
    }

    /// Whether a flush is due. Without a usable device it is always due, so that all blocks are resolved.
    fn is_due(&self, cache: &Cache, cx: &Context) -> bool {
        let Some(oldest) = self.queue.oldest() else { return false };
        self.urgency != Urgency::Normal
            || self.queue.bytes() >= cx.settings.writeback_bytes
            || oldest.after(cx.settings.writeback_delay) <= cx.now
            || cache.writable_devices() == 0
    }

    /// Starts a batch on each device that has slots for released blocks, which go to the devices in turn; returns the
    /// number of batches, and their blocks.
    fn start_batches(&mut self, cache: &mut Cache, cx: &mut Context, release: &Release) -> (u64, Written) {
        let mut run = Run { release, batches: BTreeMap::new(), written: Written::default() };
        let mut candidates = self.queue.candidates();
        while let Some(lane) = candidates.take() {
            let attempt = self.add_to_batch(cache, cx, lane, &mut run);
            candidates.resume(&mut self.queue, lane, attempt);
        }
        let Run { batches, written, .. } = run;
        let started = batches.len() as u64;
        for (device, NewBatch { id, blocks, writes, .. }) in batches {
            self.batches.push(Batch { id, device, blocks });
            cache.start_batch(cx, device, id, writes);
        }
        (started, written)
    }

    /// Adds the oldest block of a lane to a batch, if the block is released and a device has room for it.
    fn add_to_batch(&mut self, cache: &mut Cache, cx: &Context, lane: Lane, run: &mut Run) -> Attempt {
        let slot_bytes = lane.slot_bytes;
        let is_released = |since| run.release.includes(slot_bytes, since, run.written.bytes);
        let Some(since) = self.queue.oldest_of(lane).filter(|since| is_released(*since)) else {
            return Attempt::Refused;
        };
        let mut targets = cache.write_targets(slot_bytes);
        let is_full = |batch: &NewBatch| !batch.has_room(slot_bytes, cx.settings.writeback_bytes);
        targets.retain(|target| !run.batches.get(&target.device).is_some_and(is_full));
        if targets.is_empty() || !make_nvme_room(cache, lane) {
            return Attempt::Refused;
        }
        let Some((device, page)) = cache.allocate_page(&mut targets, lane.request()) else {
            return Attempt::Refused;
        };
        let batch = run.batches.entry(device).or_insert_with(|| {
            self.batches_started += 1;
            NewBatch::new(BatchId(self.batches_started))
        });
        let record = self.queue.pop(lane).expect("just seen");
        let block = self.unsaved.get_mut(record).expect("queued records live");
        block.state = SaveState::Writing(batch.id);
        run.written.add(run.release, slot_bytes, since.after(cx.settings.writeback_delay));
        batch.add(record, cache.block_write(&block.lease, page), slot_bytes);
        Attempt::Served
    }

    /// Removes a batch that has ended, and releases the space that its tenants are charged for. Stored blocks
    /// are charged again with their index entries.
    fn end_batch(&mut self, cache: &mut Cache, id: BatchId) -> Option<Batch> {
        let at = self.batches.iter().position(|batch| batch.id == id)?;
        let batch = self.batches.swap_remove(at);
        for record in &batch.blocks {
            let block = self.unsaved.get(*record).expect("a block that is being written has a record");
            cache.release_charge(cache.slot_request(&block.lease));
        }
        Some(batch)
    }

    /// Returns the stored blocks of a batch with parents before their children, because writes end in any
    /// order.
    fn in_order_of_commit<'a>(
        &self,
        cache: &Cache,
        batch: &Batch,
        stored: &'a [StoredBlock],
    ) -> Vec<&'a StoredBlock> {
        let key = |record: &SlabId| self.unsaved.get(*record).map(|block| cache.key_of(&block.lease));
        let order: BTreeMap<Option<BlockKey>, usize> = batch.blocks.iter().map(key).zip(0..).collect();
        let mut blocks: Vec<&StoredBlock> = stored.iter().collect();
        blocks.sort_by_key(|block| order.get(&Some(block.key)));
        blocks
    }

    /// Checks that every record is in the queue or in one batch, and that bytes are counted correctly.
    fn audit(&self) -> Result<(), String> {
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

impl Save {
    /// Flushes the queue at the next opportunity, because saved blocks could be evicted from the full arena.
    pub(crate) fn expedite(&mut self) {
        self.writeback.expedite();
    }

    /// Flushes the queue at the next opportunity and defers no further write, because the agent is about to stop.
    pub(crate) fn stop(&mut self) {
        self.writeback.is_stopping = true;
        self.writeback.expedite();
    }

    /// Slot bytes of offered blocks that are not durable yet.
    pub(crate) fn replicated_bytes(&self) -> u64 {
        self.writeback.replicated_bytes
    }

    /// Queues a committed block for writing; a ticket waits for the result.
    pub(super) fn queue_commit(
        &mut self,
        cache: &mut Cache,
        now: Tick,
        lease: Lease<Saving>,
        ticket: SlabId,
    ) {
        let mut tickets = TicketList::default();
        tickets.push(ticket);
        self.await_item(ticket);
        let committed = (lease, WriteCause::Committed, EvictionPosition::Last);
        self.writeback.queue_save(cache, now, committed, tickets);
    }

    /// Makes a ticket wait for a block that is not durable yet.
    pub(super) fn join_unsaved(&mut self, cache: &mut Cache, record: u32, ticket: SlabId) {
        let id = self.writeback.unsaved.id_at(record).expect("an unsaved frame has a record");
        self.writeback.unsaved.get_mut(id).expect("just found").tickets.push(ticket);
        self.await_item(ticket);
        self.writeback.promote_to_committed(cache, id);
    }

    /// Queues a block in DRAM for writing, as a replica, unless it is being saved or cannot be.
    pub(crate) fn save_replica(
        &mut self,
        cache: &mut Cache,
        now: Tick,
        frame: FrameIndex,
        position: EvictionPosition,
    ) {
        if let Some(lease) = cache.claim_replica(frame, position) {
            let replica = (lease, WriteCause::Replicated, position);
            self.writeback.queue_save(cache, now, replica, TicketList::default());
        }
    }

    /// Time at which the oldest queued block must be written; `None` while devices are busy or full.
    pub(super) fn write_deadline(&self, settings: &Settings) -> Option<Tick> {
        self.writeback.deadline(settings)
    }

    /// Starts all batches that are due and possible, within the slack of the engines. `device_reads` is the number
    /// of blocks that are being read from devices.
    pub(crate) fn write_back(&mut self, cache: &mut Cache, cx: &mut Context, device_reads: usize) {
        self.demote(cache, cx);
        self.writeback.deferred_until = None;
        if !self.writeback.is_due(cache, cx) {
            return;
        }
        self.writeback.slack.drop_expired(cx.now);
        let carried_over_until = match self.unlimited(cache, cx) {
            Some(why) if device_reads > 0 && self.yields_to_reads(cache, cx, why) => {
                self.write_back_at_bound(cache, cx)
            }
            Some(why) => {
                self.release(cache, cx, Release::at_once(why));
                None
            }
            None => self.write_back_in_slack(cache, cx, device_reads),
        };
        let mut urgency = Urgency::Stalled;
        for lane in self.writeback.queue.lanes() {
            if can_never_be_written(cache, lane) && self.drop_lane(cache, cx, lane) == Remaining::Some {
                urgency = Urgency::Normal;
            }
        }
        if self.writeback.queue.is_empty() {
            urgency = Urgency::Normal;
        } else if carried_over_until.is_some() {
            (urgency, self.writeback.deferred_until) = (Urgency::Normal, carried_over_until);
        }
        self.writeback.urgency = urgency;
    }

    /// Handles the end of a batch.
    pub(crate) fn batch_done(
        &mut self,
        cache: &mut Cache,
        cx: &mut Context,
        id: BatchId,
        stored: &[StoredBlock],
    ) {
        let Some(batch) = self.writeback.end_batch(cache, id) else { return };
        if cache.is_usable(batch.device) {
            for block in self.writeback.in_order_of_commit(cache, &batch, stored) {
                self.block_stored(cache, cx, batch.device, block);
            }
        }
        for record in batch.blocks {
            let writing = |block: &UnsavedBlock| block.state == SaveState::Writing(id);
            if self.writeback.unsaved.get(record).is_some_and(writing) {
                self.write_failed(cache, cx, record, batch.device);
            }
        }
    }

    /// Records that a block of a batch is durable.
    fn block_stored(&mut self, cache: &mut Cache, cx: &mut Context, device: DeviceId, block: &StoredBlock) {
        let Some(slot) = cache.store(device, block) else { return };
        let record = self.writeback.unsaved.id_at(slot).expect("an unsaved frame has a record");
        match self.writeback.unsaved.get(record).map(|block| (block.cause, block.demoted)) {
            Some((WriteCause::Replicated, _)) => self.counters.taken_blocks_stored += 1,
            Some((WriteCause::Demoted, Some(temperature))) => cache.count_demoted(temperature),
            _ => {}
        }
        self.end_unsaved(cache, cx, record, ItemOutcome::Durable);
    }

    /// Handles a failed write: retries in another slot, or gives up. A device that is lost or
    /// read-only does not count as an attempt.
    fn write_failed(&mut self, cache: &mut Cache, cx: &mut Context, record: SlabId, device: DeviceId) {
        self.counters.write_failures += 1;
        let fault = cache.is_writable(device);
        let block = self.writeback.unsaved.get_mut(record).expect("the caller has checked");
        block.attempts += u8::from(fault);
        if block.attempts >= WRITE_ATTEMPTS_MAX {
            self.end_unsaved(cache, cx, record, ItemOutcome::Lost);
        } else {
            self.writeback.requeue(cache, record);
        }
    }

    /// Drops the blocks of a lane that can never be written. Blocks that engines have committed since a peer
    /// offered them move to the lane of committed blocks.
    fn drop_lane(&mut self, cache: &mut Cache, cx: &mut Context, lane: Lane) -> Remaining {
        let is_limited = cache.can_hold(lane.slot_bytes) && !cache.may_be_saved(lane.request());
        let is_over_budget = !cache.has_write_budget(lane.slot_bytes);
        let mut left = Remaining::None;
        while let Some(record) = self.writeback.queue.remove_first(lane) {
            let block = self.writeback.unsaved.get(record).expect("queued records live");
            if block.cause != lane.cause {
                left = Remaining::Some;
                self.writeback.queue.push(Lane { cause: block.cause, ..lane }, record, block.since);
                continue;
            }
            if is_limited && lane.cause != WriteCause::Replicated {
                cache.count_limited(lane.request());
            } else if is_over_budget {
                cache.count_over_budget();
            }
            self.end_unsaved(cache, cx, record, ItemOutcome::Lost);
        }
        left
    }

    /// Ends the record of a block that is durable or lost; its frame becomes clean.
    fn end_unsaved(&mut self, cache: &mut Cache, cx: &mut Context, record: SlabId, end: ItemOutcome) {
        let Some(ended) = self.writeback.unsaved.remove(record) else { return };
        let slot_bytes = cache.slot(&ended.lease).bytes;
        self.writeback.unsaved_bytes -= slot_bytes;
        self.writeback.remove_bytes_of(ended.cause, slot_bytes);
        let key = cache.key_of(&ended.lease);
        let (entry, frame, position) = cache.saved(ended.lease);
        let position = match end {
            ItemOutcome::Durable => cache.position_after_save(entry, position),
            // The only copy of the block is in DRAM, so it must not be the next victim.
            ItemOutcome::Lost if ended.cause == WriteCause::Demoted => EvictionPosition::Last,
            ItemOutcome::Lost => position,
        };
        match position {
            EvictionPosition::Last => cache.settle(entry),
            EvictionPosition::First => cache.evict_first(frame),
        }
        cache.drop_if_damaged(frame);
        self.end_items(cx, &ended.tickets, key, end);
    }

    /// Frames of unsaved blocks, for the audit.
    pub(crate) fn unsaved_frames(&self) -> impl Iterator<Item = FrameIndex> {
        self.writeback.unsaved.iter().map(|(_, block)| block.lease.frame())
    }

    /// Frames that devices are writing, for the audit.
    pub(crate) fn being_written(&self) -> impl Iterator<Item = FrameIndex> {
        let records = self.writeback.batches.iter().flat_map(|batch| &batch.blocks);
        records.filter_map(|record| self.writeback.unsaved.get(*record)).map(|block| block.lease.frame())
    }

    /// Checks that records, their frames and the tickets that wait for them agree.
    pub(super) fn audit_writeback(&self, cache: &Cache) -> Result<(), String> {
        let mut waiting: BTreeMap<SlabId, u32> = BTreeMap::new();
        let (mut bytes, mut of_replicas, mut of_demotions) = (0, 0, 0);
        for (id, record) in self.writeback.unsaved.iter() {
            let state = cache.frame(record.lease.frame()).state;
            ensure!(state == FrameState::Unsaved(id.slot()), "{id:?} saves a frame that is {state:?}");
            let slot_bytes = cache.slot(&record.lease).bytes;
            bytes += slot_bytes;
            of_replicas += if record.cause == WriteCause::Replicated { slot_bytes } else { 0 };
            of_demotions += if record.cause == WriteCause::Demoted { slot_bytes } else { 0 };
            for ticket in record.tickets.iter() {
                *waiting.entry(ticket).or_default() += 1;
            }
        }
        for (id, ticket) in self.tickets.iter() {
            let items = waiting.get(&id).copied().unwrap_or(0);
            ensure!(items == ticket.waiting && items > 0, "{:?} waits for {items} items", ticket.ticket);
        }
        let (counted, counted_replicas) = (self.writeback.unsaved_bytes, self.writeback.replicated_bytes);
        let counted_demotions = self.writeback.demoting_bytes;
        ensure!(
            of_demotions == counted_demotions,
            "{of_demotions} bytes demoted, {counted_demotions} counted"
        );
        ensure!(bytes == counted, "{bytes} unsaved bytes, {counted} counted");
        ensure!(
            of_replicas == counted_replicas,
            "{of_replicas} unsaved bytes of replicas, {counted_replicas} counted"
        );
        self.writeback.audit()
    }
}

/// Returns the lane for a block that needs this space.
fn lane(SlotRequest { tenant, slot_bytes }: SlotRequest, cause: WriteCause) -> Lane {
    Lane { slot_bytes, tenant, cause }
}

/// Whether nothing in progress or evictable will ever free space for a lane, or no write budget is left for it. A
/// block does not wait for a budget, because it could not be evicted meanwhile. Otherwise starts to free space,
/// if none is free.
fn can_never_be_written(cache: &mut Cache, lane: Lane) -> bool {
    if !cache.may_be_saved(lane.request()) || !cache.has_write_budget(lane.slot_bytes) {
        return true;
    }
    let at_limit = cache.nvme_usage(lane.tenant).room() < nvme_bytes(lane.slot_bytes);
    match lane.cause {
        WriteCause::Replicated => at_limit || !cache.has_page(lane.slot_bytes),
        // A tenant at its limit waits for the end of reads and writes, but not of its leases and pins.
        WriteCause::Committed | WriteCause::Demoted if at_limit => !cache.operations_may_free_space(),
        WriteCause::Committed | WriteCause::Demoted if cache.has_page(lane.slot_bytes) => false,
        WriteCause::Committed | WriteCause::Demoted => {
            cache.make_pool_room(lane.request()) == SpaceState::Unavailable
        }
    }
}

/// Makes room for a block within the limit of its tenant. Nothing is evicted for replicas.
fn make_nvme_room(cache: &mut Cache, lane: Lane) -> bool {
    match lane.cause {
        WriteCause::Committed | WriteCause::Demoted => cache.make_nvme_room(lane.request()),
        WriteCause::Replicated => cache.nvme_usage(lane.tenant).room() >= nvme_bytes(lane.slot_bytes),
    }
}
