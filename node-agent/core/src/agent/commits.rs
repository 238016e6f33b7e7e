//! Saving blocks: reserve, commit and abort.
//!
//! A reserved slot belongs to one session; other sessions cannot read it, and it is never evicted. After the
//! commit, the block is readable on the node. A commit of a block that exists already releases the slot. A
//! commit of a block that is only being fetched from a peer replaces the fetch, which continues for those
//! that wait for it.
//!
//! The items of a commit are consecutive blocks of a chain, and the commit names the block before them. Each
//! new block therefore enters the eviction orders directly before its parent ([`crate::cache`]).
//!
//! Reservations expire. A slot that is not committed in time is released, and its commit is rejected, so that
//! a faulty engine cannot keep slots from others. The slots of one `Reserve` expire together.

use std::time::Duration;

use reprise_policy::eviction::EntryIndex;
use reprise_policy::{BlockKey, SessionId, Tier};

use crate::agent::sessions::{Reservation, ReservationGroup};
use crate::agent::tickets::{ItemOutcome, TicketState};
use crate::agent::writeback::queue::WriteCause;
use crate::agent::{AgentCore, Timer};
use crate::cache::{BlockOrigin, Dram, FrameIndex, FrameState, SizeClassId};
use crate::effect::{Change, CommitStatus, LeaseId, Reply, Ticket};
use crate::event::{CommitItem, CommitRequest, Priority, RequestId};
use crate::limits::{COMMIT_ITEMS_MAX, RESERVE_SLOTS_MAX, TICKETS_PER_SESSION_MAX};
use crate::slab::SlabId;

/// Parameters of a commit for one of its blocks.
#[derive(Clone, Copy, Debug)]
struct CommitContext {
    ticket: SlabId,
    priority: Priority,
    /// Block before this one in the chain.
    parent: Option<BlockKey>,
}

impl AgentCore {
    /// Reserves up to `count` slots for a session, as far as its shares allow.
    pub(crate) fn reserve(&mut self, session: SessionId, request: RequestId, count: u32) {
        self.counters.reserves += 1;
        self.counters.reserve_slots_wanted += u64::from(count);
        let Some(size_class) = self.sessions.get(&session).map(|session| session.size_class) else { return };
        if let Some(refusal) = self.reject_reservation(size_class) {
            return self.reply(session, request, refusal);
        }
        let mut leases = Vec::new();
        let mut frames = Vec::new();
        let group = self.begin_group(session);
        while leases.len() < count.min(RESERVE_SLOTS_MAX) as usize {
            let Some(frame) = self.reserve_one(session, size_class, group) else { break };
            frames.push(frame.1);
            leases.push((LeaseId(frame.0.0), self.cache.frame_slot(frame.1)));
        }
        self.end_group_if_empty(group);
        self.counters.reserve_slots_given += leases.len() as u64;
        let complete = leases.len() as u64 >= u64::from(count);
        let retry_after = if complete { Duration::ZERO } else { self.settings.retry_after };
        let regions = self.grants(session, frames.into_iter());
        self.reply(session, request, Reply::Reserved { regions, leases, retry_after });
    }

    pub(crate) fn abort(&mut self, session: SessionId, request: RequestId, leases: &[LeaseId]) {
        for lease in leases {
            if let Some(frame) = self.remove_reservation(session, *lease) {
                self.free_slot(frame);
            }
        }
        self.reply(session, request, Reply::Aborted);
    }

    pub(crate) fn commit(
        &mut self,
        session: SessionId,
        request: RequestId,
        CommitRequest { items, priority, parent }: &CommitRequest,
    ) {
        if items.len() > COMMIT_ITEMS_MAX {
            let text = format!("{} items in one commit: send at most {COMMIT_ITEMS_MAX}", items.len());
            return self.reply(session, request, Reply::BadRequest(text));
        }
        let Some(state) = self.sessions.get_mut(&session) else { return };
        if state.tickets.len() >= TICKETS_PER_SESSION_MAX as usize {
            let message = "too many commits wait for their durable notice".to_owned();
            let retry_after = self.settings.retry_after;
            return self.reply(session, request, Reply::Busy { message, retry_after });
        }
        state.commits += 1;
        let ticket = Ticket(state.commits);
        // The extra count is for this call: it delays the notice until after the reply.
        let waiting = TicketState { session, ticket, waiting: 1, durable: 0, lost: Vec::new() };
        let id = self.tickets.insert(waiting);
        state.tickets.insert(id);
        self.counters.commits += 1;
        let parents = std::iter::once(*parent).chain(items.iter().map(|item| item.key));
        let statuses = items
            .iter()
            .zip(parents)
            .map(|(item, parent)| {
                let saved = CommitContext { ticket: id, priority: *priority, parent };
                self.commit_item(session, item, saved)
            })
            .collect();
        self.reply(session, request, Reply::Committed { ticket, statuses });
        let waiting = self.tickets.get_mut(id).expect("it waits for this call");
        waiting.waiting -= 1;
        self.notify_if_ended(id);
    }

    /// Frees the slot of a reservation that has ended.
    pub(crate) fn free_slot(&mut self, frame: FrameIndex) {
        self.reserved_bytes -= self.cache.frame_slot(frame).bytes;
        self.cache.free_frame(frame);
    }

    /// Returns an error if blocks of a size class can never fit into the arena.
    pub(crate) fn reject_block_size(&self, size_class: SizeClassId) -> Option<Reply> {
        self.cache.check_block_size(size_class).err().map(Reply::BadRequest)
    }

    /// Returns an error if a size class can never get even one reserved slot.
    fn reject_reservation(&self, size_class: SizeClassId) -> Option<Reply> {
        if let Some(refusal) = self.reject_block_size(size_class) {
            return Some(refusal);
        }
        let (block, arena) = (self.cache.sizes.get(size_class).slot_bytes, self.cache.arena.bytes());
        let limit = self.cache.accounts.dram_limit_configured(self.cache.tenant_of(size_class));
        if block > limit {
            return Some(Reply::BadRequest(format!(
                "a block of this layout has {block} bytes but this tenant is limited to {limit} in memory: raise its \
                 dram.limit under [[tenants]] in the agent's configuration, or use fewer tokens per block"
            )));
        }
        let share = self.cache.share_of_arena(self.settings.arena_unsaved_permille);
        let of_session = self.cache.share_of_arena(self.settings.arena_session_permille);
        (block > share.min(of_session)).then(|| {
            Reply::BadRequest(format!(
                "a block of this layout has {block} bytes; of the arena's {arena}, saves may take {share} and one \
                 session {of_session}: raise arena.bytes, cache.arena_unsaved_permille or \
                 cache.arena_session_permille in the agent's configuration, or use fewer tokens per block"
            ))
        })
    }

    fn reserve_one(
        &mut self,
        session: SessionId,
        size_class: SizeClassId,
        group: SlabId,
    ) -> Option<(SlabId, FrameIndex)> {
        let slot_bytes = self.cache.sizes.get(size_class).slot_bytes;
        let used = self.reserved_bytes + self.unsaved_bytes_of_engines() + slot_bytes;
        if used > self.cache.share_of_arena(self.settings.arena_unsaved_permille) {
            self.expedite_writeback();
            return None;
        }
        let held = self.sessions.get(&session)?.reservations.len() as u64;
        if (held + 1) * slot_bytes > self.cache.share_of_arena(self.settings.arena_session_permille) {
            return None;
        }
        let frame = self.cache.allocate_frame(size_class, FrameState::Reserved)?;
        self.reserved_bytes += slot_bytes;
        let list = &mut self.sessions.get_mut(&session)?.reservations;
        let position = list.len() as u32;
        let id = self.reservations.insert(Reservation { session, frame, position, group });
        list.push(id);
        self.groups.get_mut(group)?.open += 1;
        Some((id, frame))
    }

    /// Removes a reservation of this session; the caller owns its frame.
    fn remove_reservation(&mut self, session: SessionId, lease: LeaseId) -> Option<FrameIndex> {
        let id = SlabId(lease.0);
        self.reservations.get(id).filter(|reservation| reservation.session == session)?;
        let reservation = self.reservations.remove(id)?;
        self.leave_group(reservation.group);
        let list = &mut self.sessions.get_mut(&session)?.reservations;
        list.swap_remove(reservation.position as usize);
        if let Some(moved) = list.get(reservation.position as usize) {
            let moved = self.reservations.get_mut(*moved).expect("listed reservations live");
            moved.position = reservation.position;
        }
        Some(reservation.frame)
    }

    fn begin_group(&mut self, session: SessionId) -> SlabId {
        let expires = self.now.after(self.settings.reservation_timeout);
        let group = self.groups.insert(ReservationGroup { session, open: 0, expires });
        self.timers.set(expires, Timer::Reservations(group));
        group
    }

    /// Counts one reservation of a group less, and ends an empty group.
    pub(crate) fn leave_group(&mut self, group: SlabId) {
        self.groups.get_mut(group).expect("a reservation's group lasts as long as it").open -= 1;
        self.end_group_if_empty(group);
    }

    fn end_group_if_empty(&mut self, id: SlabId) {
        if let Some(group) = self.groups.get(id).filter(|group| group.open == 0) {
            self.timers.clear(group.expires, Timer::Reservations(id));
            self.groups.remove(id);
        }
    }

    /// Releases the reservations of an expired group. Costs time in proportion to the session's reservations.
    pub(crate) fn expire_reservations(&mut self, group: SlabId) {
        let Some(session) = self.groups.get(group).map(|group| group.session) else { return };
        let Some(state) = self.sessions.get(&session) else { return };
        let of_group = |id: &&SlabId| self.reservations.get(**id).is_some_and(|known| known.group == group);
        let expired: Vec<SlabId> = state.reservations.iter().filter(of_group).copied().collect();
        self.counters.expired_reservations += expired.len() as u64;
        for id in expired {
            if let Some(frame) = self.remove_reservation(session, LeaseId(id.0)) {
                self.free_slot(frame);
            }
        }
    }

    fn commit_item(&mut self, session: SessionId, item: &CommitItem, saved: CommitContext) -> CommitStatus {
        let Some(frame) = self.remove_reservation(session, item.lease) else {
            self.counters.refused_items += 1;
            return CommitStatus::NoLease;
        };
        let size_class = self.cache.frames.get(frame).size_class;
        let objects = self.cache.sizes.objects(size_class);
        let known = item.key.and_then(|key| self.cache.index.find(&key));
        let visible = known.is_none_or(|entry| self.cache.index.entry(entry).size_class() == size_class);
        let (Some(key), true) = (item.key, visible && item.checksums.len() == objects) else {
            self.counters.refused_items += 1;
            self.free_slot(frame);
            return CommitStatus::BadItem;
        };
        if let Some(entry) = known {
            self.cache.yield_to_commit(entry);
        }
        match known {
            Some(entry) if self.cache.index.entry(entry).source(size_class).is_some() => {
                self.free_slot(frame);
                self.commit_duplicate(entry, saved);
                CommitStatus::Duplicate
            }
            _ => {
                self.cache.set_checksums(frame, &item.checksums);
                self.publish(frame, key, saved);
                CommitStatus::Committed
            }
        }
    }

    /// Handles a commit of an existing block: the item becomes durable or lost with the block.
    fn commit_duplicate(&mut self, entry: EntryIndex, saved: CommitContext) {
        let CommitContext { ticket, priority, parent } = saved;
        self.counters.duplicate_items += 1;
        self.cache.raise_priority(entry, priority);
        self.order_before_parent(entry, parent);
        self.cache.index.entry_mut(entry).set_origin(BlockOrigin::Saved);
        let state = self.cache.index.entry(entry);
        let key = state.key();
        if state.stored().is_some() {
            return self.count_item(ticket, key, ItemOutcome::Durable);
        }
        let Dram::Resident(frame) = state.dram() else {
            unreachable!("a block with a source is stored or resident")
        };
        match self.cache.frames.get(frame).state {
            FrameState::Unsaved(record) => {
                let id = self.writeback.unsaved.id_at(record).expect("an unsaved frame has a record");
                self.writeback.unsaved.get_mut(id).expect("just found").tickets.push(ticket);
                self.tickets.get_mut(ticket).expect("it waits for this call").waiting += 1;
                self.promote_to_committed(id);
            }
            _ => self.save_or_lose(frame, key, saved),
        }
    }

    /// Makes a committed block findable and readable.
    fn publish(&mut self, frame: FrameIndex, key: BlockKey, saved: CommitContext) {
        let priority = saved.priority;
        let size_class = self.cache.frames.get(frame).size_class;
        let slot_bytes = self.cache.sizes.get(size_class).slot_bytes;
        let entry = match self.cache.index.find(&key) {
            Some(entry) => {
                // Only a fetch from a peer brings this block: the fetch continues without the entry.
                if let Dram::Filling(filling) = self.cache.index.entry(entry).dram() {
                    self.cache.frames.get_mut(filling).set_entry(None);
                }
                self.cache.raise_priority(entry, priority);
                self.cache.index.entry_mut(entry).set_origin(BlockOrigin::Saved);
                entry
            }
            None => self.cache.insert_entry(key, size_class, priority, BlockOrigin::Saved),
        };
        self.reserved_bytes -= slot_bytes;
        self.counters.committed_blocks += 1;
        self.counters.committed_bytes += self.cache.sizes.get(size_class).layout.block_bytes();
        self.cache.index.entry_mut(entry).set_dram(Dram::Resident(frame));
        self.cache.frames.get_mut(frame).set_entry(Some(entry));
        self.cache.resident_blocks += 1;
        self.cache.replica_changed(entry, Tier::Dram, Change::Added);
        self.save_or_lose(frame, key, saved);
    }

    /// Queues a readable, unstored block for writing, or counts it as lost if it cannot be stored.
    fn save_or_lose(&mut self, frame: FrameIndex, key: BlockKey, saved: CommitContext) {
        let lane = self.lane_of(frame, WriteCause::Committed);
        if self.cache.may_be_saved(lane.request()) {
            return self.queue_commit(frame, saved.ticket, saved.parent);
        }
        if self.cache.devices.can_hold(lane.slot_bytes) {
            self.cache.count_limited(lane.request());
        } else {
            self.cache.report_unstorable(context!(self), self.cache.frames.get(frame).size_class);
        }
        self.cache.set_frame_state(frame, FrameState::Clean);
        if let Some(entry) = self.cache.frames.get(frame).entry() {
            self.order_before_parent(entry, saved.parent);
        }
        self.count_item(saved.ticket, key, ItemOutcome::Lost);
    }

    /// Records the outcome of an item that is known at the time of the commit.
    fn count_item(&mut self, ticket: SlabId, key: BlockKey, end: ItemOutcome) {
        let waiting = self.tickets.get_mut(ticket).expect("it waits for this call");
        match end {
            ItemOutcome::Durable => waiting.durable += 1,
            ItemOutcome::Lost => waiting.lost.push(key),
        }
    }
}
