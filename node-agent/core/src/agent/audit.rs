//! Full check of the core's invariants between events, for tests.

use std::collections::BTreeMap;

use reprise_policy::TenantId;

use crate::agent::AgentCore;
use crate::agent::fills::{FillSource, WaitPlace, Waiter};
use crate::agent::loads::{LoadBlock, Stage};
use crate::agent::serves::ServeBlock;
use crate::cache::{CopyState, Dram, FrameIndex, FrameState, nvme_bytes};
use crate::slab::SlabId;

/// Slots and bytes of a tenant in one tier.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct SlotUsage {
    slots: u64,
    bytes: u64,
}

impl AgentCore {
    /// Checks every invariant of the core. Costs time in proportion to the whole state.
    ///
    /// # Errors
    /// A description of the first violated invariant.
    pub fn audit(&self) -> Result<(), String> {
        self.audit_frames()?;
        self.cache.audit()?;
        self.audit_leases()?;
        self.audit_waiters()?;
        self.audit_tenants()?;
        self.quota.audit(&self.cache)?;
        self.replicate.audit_timers()?;
        self.audit_sessions()?;
        self.replicate.audit_outbound()?;
        self.audit_inbound()?;
        self.extents.audit(&self.cache)?;
        self.audit_writeback()
    }

    fn audit_frames(&self) -> Result<(), String> {
        let (mut slots, mut reserved, mut evictable, mut retired) = (BTreeMap::new(), 0, 0, 0);
        for (index, frame) in self.cache.frames.iter() {
            let slot = self.cache.arena.slot(frame.place);
            ensure!(slots.insert((slot.region, slot.offset), index).is_none(), "{slot:?} is in two frames");
            let entry = frame.entry();
            let findable = entry.is_some_and(|entry| match self.cache.index.entry(entry).dram() {
                Dram::Absent => false,
                Dram::Filling(by) => by == index && matches!(frame.state, FrameState::Filling(_)),
                Dram::Resident(by) => {
                    by == index && matches!(frame.state, FrameState::Clean | FrameState::Unsaved(_))
                }
            });
            match frame.state {
                FrameState::Vacant => {}
                FrameState::Reserved => {
                    reserved += slot.bytes;
                    ensure!(entry.is_none() && frame.leases == 0, "{slot:?} is reserved and readable");
                }
                FrameState::Filling(fill) => {
                    let fill = self.fills.at(fill).ok_or(format!("{slot:?}: no such fill"))?;
                    ensure!(fill.frame == index, "{slot:?} and its fill disagree");
                    ensure!(entry.is_none() || findable, "{slot:?}: its entry does not refer to the fill");
                }
                FrameState::Unsaved(record) => {
                    let record = self.writeback.unsaved.at(record).ok_or(format!("{slot:?}: no record"))?;
                    ensure!(record.frame == index && findable, "{slot:?} is unsaved, but not findable");
                }
                FrameState::Clean => {
                    evictable += usize::from(frame.leases == 0);
                    ensure!(frame.copy_state != CopyState::Damaged, "{slot:?} is damaged, and clean");
                    ensure!(findable && frame.has_checksums(), "{slot:?} is clean, but not findable");
                }
                FrameState::Retired => {
                    retired += slot.bytes;
                    ensure!(entry.is_none(), "{slot:?} is retired, and findable");
                }
                FrameState::Orphan => {
                    ensure!(entry.is_none() && frame.leases > 0, "{slot:?} is an orphan without a lease");
                }
            }
        }
        let bytes: u64 =
            self.cache.frames.iter().map(|(_, frame)| self.cache.arena.slot(frame.place).bytes).sum();
        ensure!(
            bytes == self.cache.arena.used_bytes(),
            "{bytes} bytes in frames, {} in use",
            self.cache.arena.used_bytes()
        );
        ensure!(
            reserved == self.reserved_bytes,
            "{reserved} bytes reserved, {} counted",
            self.reserved_bytes
        );
        let known = self.cache.frames.iter().filter(|(_, frame)| frame.has_checksums()).count();
        let rows = self.cache.frames.checksum_rows();
        ensure!(known == rows, "checksums of {known} frames are known, {rows} are kept");
        let lost = self.cache.counters.arena_lost_bytes;
        ensure!(retired == lost, "{retired} bytes retired, {lost} counted");
        let listed = self.cache.arena.evictable();
        ensure!(evictable == listed, "{evictable} evictable frames, {listed} in the policies");
        Ok(())
    }

    /// Checks that every lease belongs to a block of a load, a block of a serve, or a check.
    fn audit_leases(&self) -> Result<(), String> {
        let mut held: BTreeMap<FrameIndex, u32> = BTreeMap::new();
        let of_fill = |fill: u32| self.fills.at(fill).map(|fill| fill.frame).ok_or("no such fill".to_owned());
        for (_, load) in self.loads.iter() {
            for block in &load.blocks {
                let frame = match *block {
                    LoadBlock::Ready { frame, .. } | LoadBlock::Held { frame } => frame,
                    LoadBlock::Waiting(place) => of_fill(place.fill)?,
                    LoadBlock::Unplaced | LoadBlock::Lost(_) => continue,
                };
                *held.entry(frame).or_default() += 1;
            }
        }
        let mut serving = 0;
        for block in self.serves.values().flat_map(|serve| &serve.blocks) {
            let frame = match *block {
                ServeBlock::Due | ServeBlock::Ended => continue,
                ServeBlock::Sending { frame } => frame,
                ServeBlock::Waiting { place, .. } => of_fill(place.fill)?,
            };
            serving += self.cache.frame_slot(frame).bytes;
            *held.entry(frame).or_default() += 1;
        }
        let counted = self.serve_share.leased_bytes;
        ensure!(serving == counted, "{serving} bytes leased to serves, {counted} counted");
        for (id, frame) in self.cache.checks.iter() {
            *held.entry(*frame).or_default() += 1;
            let checked = self.cache.frames.get(*frame).copy_state == CopyState::Checking;
            ensure!(checked, "{id:?} checks a frame that is not being checked");
        }
        let total: u64 = held.values().map(|leases| u64::from(*leases)).sum();
        ensure!(total == self.cache.frames.read_leases(), "{total} leases held, not as counted");
        for (index, frame) in self.cache.frames.iter() {
            let holders = held.remove(&index).unwrap_or(0);
            ensure!(holders == frame.leases, "{index:?}: {} leases, {holders} holders", frame.leases);
        }
        ensure!(held.is_empty(), "leases on free slots: {held:?}");
        Ok(())
    }

    /// Checks that fills, loads and serves refer to each other, and that the progress of each load matches
    /// its blocks.
    fn audit_waiters(&self) -> Result<(), String> {
        for (id, fill) in self.fills.iter() {
            let state = self.cache.frames.get(fill.frame).state;
            ensure!(state == FrameState::Filling(id.slot()), "{id:?} fills a frame that is {state:?}");
            for (position, waiter) in (0..).zip(&fill.waiters) {
                let here = WaitPlace { fill: id.slot(), position };
                let waits = match *waiter {
                    Waiter::Load { load, block } => self
                        .loads
                        .get(load)
                        .is_some_and(|load| load.blocks[block as usize] == LoadBlock::Waiting(here)),
                    Waiter::Serve { serve, block } => self.serves.get(&serve).is_some_and(|serve| {
                        matches!(serve.blocks[block as usize], ServeBlock::Waiting { place, .. } if place == here)
                    }),
                };
                ensure!(waits, "{waiter:?} does not refer to {here:?}");
            }
        }
        let bytes_from_peers: u64 = self
            .fills
            .iter()
            .filter(|(_, fill)| matches!(fill.origin, FillSource::Peer(_)))
            .map(|(_, fill)| self.cache.frame_slot(fill.frame).bytes)
            .sum();
        ensure!(
            bytes_from_peers == self.peers.queued_bytes(),
            "{bytes_from_peers} bytes requested from peers, not as counted"
        );
        for (id, load) in self.loads.iter() {
            let mut pending = 0;
            let mut ready = self.cache.sizes.get(load.size_class).layout.layers();
            for (at, block) in (0..).zip(&load.blocks) {
                match *block {
                    LoadBlock::Unplaced => {
                        (pending, ready) = (pending + 1, 0);
                        ensure!(
                            load.stage == Stage::Placing,
                            "{id:?} is answered although block {at} is unplaced"
                        );
                    }
                    LoadBlock::Waiting(place) => {
                        let fill = self.fills.at(place.fill).ok_or(format!("{id:?}: no fill for {at}"))?;
                        let waiter = fill.waiters.get(place.position as usize);
                        let known = waiter == Some(&Waiter::Load { load: id, block: at });
                        ensure!(known, "{id:?}: the fill of block {at} does not refer to it");
                        (pending, ready) = (pending + 1, ready.min(fill.layers));
                    }
                    LoadBlock::Ready { .. } | LoadBlock::Held { .. } | LoadBlock::Lost(_) => {}
                }
            }
            let progress = (load.progress.pending(), load.progress.ready());
            ensure!(progress == (pending, ready), "{id:?}: {progress:?} should be {:?}", (pending, ready));
            let stage = match (pending, ready) {
                (0, _) if load.stage == Stage::Expired => Stage::Expired,
                (0, _) => Stage::Complete,
                (_, 0) => Stage::Placing,
                (_, layers) => Stage::Answered { layers },
            };
            ensure!(load.stage == stage, "{id:?} is {:?} and should be {stage:?}", load.stage);
        }
        Ok(())
    }

    /// Checks that every tenant's usage is counted correctly and within its limit.
    fn audit_tenants(&self) -> Result<(), String> {
        let mut held: BTreeMap<TenantId, [SlotUsage; 2]> = BTreeMap::new();
        let mut count = |tenant: TenantId, room: usize, bytes: u64| {
            let SlotUsage { slots, bytes: all } = &mut held.entry(tenant).or_default()[room];
            (*slots, *all) = (*slots + 1, *all + bytes);
        };
        for (_, frame) in self.cache.frames.iter() {
            let size_class = self.cache.sizes.get(frame.size_class);
            count(size_class.tenant, 0, size_class.slot_bytes);
        }
        for (_, entry) in self.cache.index.iter().filter(|(_, entry)| entry.stored().is_some()) {
            let size_class = self.cache.sizes.get(entry.size_class());
            count(size_class.tenant, 1, nvme_bytes(size_class.slot_bytes));
        }
        for frame in self.writeback.being_written() {
            let size_class = self.cache.sizes.get(self.cache.frames.get(frame).size_class);
            count(size_class.tenant, 1, nvme_bytes(size_class.slot_bytes));
        }
        for (tenant, slot_bytes) in self.extents.charges(&self.cache) {
            count(tenant, 1, nvme_bytes(slot_bytes));
        }
        for usage in self.tenant_usage() {
            let dram = SlotUsage { slots: usage.blocks.dram, bytes: usage.dram.used };
            let nvme = SlotUsage { slots: usage.blocks.nvme, bytes: usage.nvme.used };
            let (tenant, used) = (usage.tenant, [dram, nvme]);
            let counted = held.remove(&tenant).unwrap_or_default();
            ensure!(used == counted, "{tenant:?} holds {counted:?}, but {used:?} are counted");
        }
        ensure!(held.is_empty(), "bytes of unknown tenants: {held:?}");
        Ok(())
    }

    fn audit_sessions(&self) -> Result<(), String> {
        let (mut reservations, mut loads, mut tickets) = (0, 0, 0);
        for (id, session) in &self.sessions {
            for (at, reservation) in (0..).zip(&session.reservations) {
                let known = self.reservations.get(*reservation);
                let fits = known.is_some_and(|known| known.session == *id && known.position == at);
                ensure!(fits, "session {id}: reservation {at} belongs to another session");
            }
            for load in session.loads() {
                let own = self.loads.get(load).is_some_and(|load| load.session == *id);
                ensure!(own, "session {id}: {load:?} belongs to another session");
                loads += 1;
            }
            reservations += session.reservations.len();
            tickets += session.tickets.len();
        }
        ensure!(reservations == self.reservations.len(), "reservations without a session");
        for (id, group) in self.groups.iter() {
            let open = self.reservations.iter().filter(|(_, one)| one.group == id).count();
            ensure!(
                open == group.open as usize && open > 0,
                "{id:?}: {open} reservations, {} counted",
                group.open
            );
        }
        ensure!(loads == self.loads.len(), "loads without a session");
        ensure!(tickets == self.tickets.len(), "tickets without a session");
        let timed_loads = self.loads.iter().filter(|(_, load)| load.stage != Stage::Expired).count();
        let timers = timed_loads + self.lookups.len() + self.groups.len();
        ensure!(self.timers.len() >= timers, "something waits without a deadline");
        ensure!(self.timers.len() <= timers + self.serves.len(), "timers without an owner");
        let uses: u64 = self.cache.sizes.uses().sum();
        let holders = self.sessions.len()
            + self.cache.index.len()
            + self.cache.frames.iter().count()
            + self.inbound.waiting();
        ensure!(uses == holders as u64, "size classes: {uses} uses, {holders} holders");
        Ok(())
    }

    fn audit_writeback(&self) -> Result<(), String> {
        let mut waiting: BTreeMap<SlabId, u32> = BTreeMap::new();
        let mut bytes = 0;
        for (id, record) in self.writeback.unsaved.iter() {
            let state = self.cache.frames.get(record.frame).state;
            ensure!(state == FrameState::Unsaved(id.slot()), "{id:?} saves a frame that is {state:?}");
            bytes += self.cache.frame_slot(record.frame).bytes;
            for ticket in record.tickets.iter() {
                *waiting.entry(ticket).or_default() += 1;
            }
        }
        for (id, ticket) in self.tickets.iter() {
            let items = waiting.get(&id).copied().unwrap_or(0);
            ensure!(items == ticket.waiting && items > 0, "{:?} waits for {items} items", ticket.ticket);
        }
        ensure!(bytes == self.writeback.unsaved_bytes(), "{bytes} unsaved bytes, not as counted");
        self.writeback.audit()
    }
}
