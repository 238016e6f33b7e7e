//! Reservations: slots that engines fill.
//!
//! A reserved slot belongs to one session; other sessions cannot read it, and it is never evicted.
//!
//! Reservations expire. A slot that is not committed in time is released, and its commit is rejected, so that
//! a faulty engine cannot keep slots from others. The slots of one `Reserve` expire together.

use std::collections::BTreeSet;
use std::time::Duration;

use reprise_policy::{SessionId, Tick};

use crate::cache::{Cache, FrameIndex, FrameState, Lease, SizeClassId, Write};
use crate::context::{Caller, Context};
use crate::effect::{Access, LeaseId, Place, Reply};
use crate::limits::RESERVE_SLOTS_MAX;
use crate::regions::RegionSet;
use crate::save::Save;
use crate::settings::Settings;
use crate::slab::SlabId;

/// What a session saves.
#[derive(Debug, Default)]
pub(super) struct Writer {
    /// Reservations of the session; each stores its position here.
    pub(super) reservations: Vec<SlabId>,
    /// Commits with blocks that are neither durable nor lost yet.
    pub(super) tickets: BTreeSet<SlabId>,
    /// Number of commits so far.
    pub(super) commits: u64,
    /// Regions that the session may write.
    writable: RegionSet,
}

impl Writer {
    /// Regions that the session may write.
    pub(super) fn regions(&self) -> &RegionSet {
        &self.writable
    }
}

/// Slot that an engine fills.
#[derive(Debug)]
pub(super) struct Reservation {
    session: SessionId,
    lease: Lease<Write>,
    /// Position in the session's list of reservations.
    position: u32,
    /// Group of the `Reserve` call that created it.
    group: SlabId,
}

/// Reservations of one `Reserve` call, which expire together.
#[derive(Debug)]
pub(super) struct ReservationGroup {
    session: SessionId,
    /// Number of reservations that have not ended.
    open: u32,
    expires: Tick,
}

impl Save {
    /// Reserves up to `count` slots for a session, as far as its shares allow.
    pub(crate) fn reserve(&mut self, cache: &mut Cache, cx: &mut Context, caller: Caller, count: u32) {
        self.counters.reserves += 1;
        self.counters.reserve_slots_wanted += u64::from(count);
        if let Some(refusal) = reject_reservation(cache, cx.settings, caller.size_class) {
            return cx.reply(caller, Reply::BadRequest(refusal));
        }
        let mut leases = Vec::new();
        let mut frames = Vec::new();
        let group = self.begin_group(cx, caller.session);
        while leases.len() < count.min(RESERVE_SLOTS_MAX) as usize {
            let Some((id, frame)) = self.reserve_one(cache, cx.settings, caller, group) else { break };
            frames.push(frame);
            leases.push((LeaseId(id.0), Place::Arena(cache.frame_slot(frame))));
        }
        self.end_group_if_empty(group);
        self.counters.reserve_slots_given += leases.len() as u64;
        if leases.is_empty()
            && let Err(refusal) = cache.check_regions(caller.size_class)
        {
            return cx.reply(caller, Reply::BadRequest(refusal));
        }
        let complete = leases.len() as u64 >= u64::from(count);
        let retry_after = if complete { Duration::ZERO } else { cx.settings.retry_after };
        let Some(writer) = self.sessions.get_mut(&caller.session) else { return };
        let regions = cache.new_regions(frames.into_iter(), Access::ReadWrite, &mut writer.writable);
        cx.reply(caller, Reply::Reserved { regions, leases, retry_after });
    }

    /// Releases reserved slots of a session.
    pub(crate) fn abort(&mut self, cache: &mut Cache, cx: &mut Context, caller: Caller, leases: &[LeaseId]) {
        for lease in leases {
            if let Some(lease) = self.remove_reservation(caller.session, *lease) {
                self.free_slot(cache, lease);
            }
        }
        cx.reply(caller, Reply::Aborted);
    }

    /// Frees the slot of a reservation that has ended.
    pub(super) fn free_slot(&mut self, cache: &mut Cache, lease: Lease<Write>) {
        self.reserved_bytes -= cache.slot(&lease).bytes;
        cache.discard(lease);
    }

    fn reserve_one(
        &mut self,
        cache: &mut Cache,
        settings: &Settings,
        Caller { session, size_class, .. }: Caller,
        group: SlabId,
    ) -> Option<(SlabId, FrameIndex)> {
        let slot_bytes = cache.slot_bytes(size_class);
        let unsaved = self.writeback.unsaved_bytes_of_engines(cache);
        if self.reserved_bytes + unsaved + slot_bytes > cache.share_of_arena(settings.arena_unsaved_permille)
        {
            self.writeback.expedite();
            return None;
        }
        let held = self.sessions.get(&session)?.reservations.len() as u64;
        if (held + 1) * slot_bytes > cache.share_of_arena(settings.arena_session_permille) {
            return None;
        }
        let lease = cache.reserve(size_class)?;
        let frame = lease.frame();
        self.reserved_bytes += slot_bytes;
        let list = &mut self.sessions.get_mut(&session).expect("just seen").reservations;
        let position = list.len() as u32;
        let id = self.reservations.insert(Reservation { session, lease, position, group });
        list.push(id);
        self.groups.get_mut(group).expect("the caller has begun it").open += 1;
        Some((id, frame))
    }

    /// Removes a reservation of this session; the caller owns its slot.
    pub(super) fn remove_reservation(&mut self, session: SessionId, lease: LeaseId) -> Option<Lease<Write>> {
        let id = SlabId(lease.0);
        self.reservations.get(id).filter(|reservation| reservation.session == session)?;
        let Reservation { lease, position, group, .. } = self.reservations.remove(id)?;
        self.leave_group(group);
        let list =
            &mut self.sessions.get_mut(&session).expect("a reservation's session is open").reservations;
        list.swap_remove(position as usize);
        if let Some(moved) = list.get(position as usize) {
            self.reservations.get_mut(*moved).expect("listed reservations live").position = position;
        }
        Some(lease)
    }

    fn begin_group(&mut self, cx: &Context, session: SessionId) -> SlabId {
        let expires = cx.now.after(cx.settings.reservation_timeout);
        let group = self.groups.insert(ReservationGroup { session, open: 0, expires });
        self.timers.set(expires, group);
        group
    }

    /// Counts one reservation of a group less, and ends an empty group.
    fn leave_group(&mut self, group: SlabId) {
        self.groups.get_mut(group).expect("a reservation's group lasts as long as it").open -= 1;
        self.end_group_if_empty(group);
    }

    fn end_group_if_empty(&mut self, id: SlabId) {
        if let Some(group) = self.groups.get(id).filter(|group| group.open == 0) {
            self.timers.clear(group.expires, id);
            self.groups.remove(id);
        }
    }

    /// Releases the reservations of an expired group. Costs time in proportion to the session's reservations.
    pub(super) fn expire_reservations(&mut self, cache: &mut Cache, group: SlabId) {
        let Some(session) = self.groups.get(group).map(|group| group.session) else { return };
        let Some(writer) = self.sessions.get(&session) else { return };
        let of_group = |id: &&SlabId| self.reservations.get(**id).is_some_and(|known| known.group == group);
        let expired: Vec<SlabId> = writer.reservations.iter().filter(of_group).copied().collect();
        self.counters.expired_reservations += expired.len() as u64;
        for id in expired {
            if let Some(lease) = self.remove_reservation(session, LeaseId(id.0)) {
                self.free_slot(cache, lease);
            }
        }
    }

    /// Ends the reservations of a session that has closed.
    pub(super) fn end_reservations(&mut self, cache: &mut Cache, writer: &Writer) {
        for id in &writer.reservations {
            let Reservation { lease, group, .. } =
                self.reservations.remove(*id).expect("listed reservations live");
            self.leave_group(group);
            self.free_slot(cache, lease);
        }
    }

    /// Checks that sessions, reservations and groups refer to each other, and their frames.
    pub(super) fn audit_reservations(&self, cache: &Cache) -> Result<(), String> {
        let mut listed = 0;
        for (id, writer) in &self.sessions {
            for (at, reservation) in (0..).zip(&writer.reservations) {
                let known = self.reservations.get(*reservation);
                let fits = known.is_some_and(|known| known.session == *id && known.position == at);
                ensure!(fits, "session {id}: reservation {at} belongs to another session");
            }
            listed += writer.reservations.len();
        }
        ensure!(listed == self.reservations.len(), "reservations without a session");
        for (id, group) in self.groups.iter() {
            let open = self.reservations.iter().filter(|(_, one)| one.group == id).count();
            ensure!(
                open == group.open as usize && open > 0,
                "{id:?}: {open} reservations, {} counted",
                group.open
            );
        }
        let (groups, timers) = (self.groups.len(), self.timers.len());
        ensure!(groups == timers, "{groups} groups of reservations, {timers} timers");
        let mut bytes = 0;
        for (id, Reservation { lease, .. }) in self.reservations.iter() {
            let state = cache.frame(lease.frame()).state;
            ensure!(state == FrameState::Reserved, "{id:?} reserves a frame that is {state:?}");
            bytes += cache.slot(lease).bytes;
        }
        let counted = self.reserved_bytes;
        ensure!(bytes == counted, "{bytes} bytes reserved, {counted} counted");
        Ok(())
    }
}

/// Returns an error if a size class can never get even one reserved slot.
fn reject_reservation(cache: &Cache, settings: &Settings, size_class: SizeClassId) -> Option<String> {
    if let Err(too_large) = cache.check_block_size(size_class) {
        return Some(too_large);
    }
    let (block, limit) = (cache.slot_bytes(size_class), cache.dram_limit_configured(size_class));
    if block > limit {
        return Some(format!(
            "a block of this layout has {block} bytes but this tenant is limited to {limit} in memory: raise its \
             dram.limit under [[tenants]] in the agent's configuration, or use fewer tokens per block"
        ));
    }
    let share = cache.share_of_arena(settings.arena_unsaved_permille);
    let of_session = cache.share_of_arena(settings.arena_session_permille);
    let arena = cache.arena_bytes();
    (block > share.min(of_session)).then(|| {
        format!(
            "a block of this layout has {block} bytes; of the arena's {arena}, saves may take {share} and one \
             session {of_session}: raise arena.bytes, cache.arena_unsaved_permille or \
             cache.arena_session_permille in the agent's configuration, or use fewer tokens per block"
        )
    })
}
