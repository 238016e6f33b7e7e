//! Making room in the arena.
//!
//! Only frames that are clean and unleased can go: the eviction policy of a size class contains nothing else.
//! Evicting is O(evicted) and needs no I/O, so it happens when a slot is wanted, not ahead of it. A class without a
//! victim looks for a region of another class among those in which everything can go; finding that there is none costs
//! nothing, however full the arena is.

use reprise_policy::Tier;
use reprise_policy::eviction::EntryIndex;

use super::AgentCore;
use super::arena::ClassId;
use super::frames::{FrameIndex, FrameState};
use super::index::Dram;
use super::tenants::TenantIndex;
use crate::effect::Change;
use crate::event::Priority;

impl AgentCore {
    /// Makes a slot of a class free, or a region; `false` when nothing may go.
    pub(super) fn make_room(&mut self, class: ClassId) -> bool {
        if let Some(victim) = self.arena.victim(class) {
            self.drop_frame_victim(victim);
            return true;
        }
        let Some(frames) = self.arena.reclaimable(class) else { return false };
        for frame in frames {
            self.arena.remove_evictable(self.frames.get(frame).place, frame);
            self.evict_frame(frame);
        }
        true
    }

    /// Makes a tenant's slots so few that one more of so many bytes is within its limit; `false` when not enough may go.
    pub(super) fn make_room_below_limit(
        &mut self,
        tenant: TenantIndex,
        class: ClassId,
        slot_bytes: u64,
    ) -> bool {
        while self.tenants.dram(tenant).room() < slot_bytes {
            let victim = self.arena.victim_of_tenant(class);
            let bytes = victim.map_or(slot_bytes, |victim| self.frame_slot(victim).bytes);
            self.tenants.get_mut(tenant).counts.dram_limited_bytes += bytes;
            let Some(victim) = victim else { return false };
            self.drop_frame_victim(victim);
        }
        true
    }

    /// Drops the DRAM copy that a tenant's own order names first; `false` when it has none that can go.
    pub(super) fn evict_dram_of(&mut self, tenant: TenantIndex) -> bool {
        let id = self.tenants.get(tenant).id;
        let Some(victim) = self.arena.any_victim(id) else { return false };
        let bytes = self.frame_slot(victim).bytes;
        self.tenants.get_mut(tenant).counts.dram_limited_bytes += bytes;
        self.drop_frame_victim(victim);
        true
    }

    /// Drops what an order of the arena has named.
    fn drop_frame_victim(&mut self, victim: FrameIndex) {
        self.arena.take_victim(self.frames.get(victim).place);
        self.evict_frame(victim);
    }

    /// Drops clean, unleased DRAM copies of blocks that are on NVMe; returns how many.
    pub(super) fn trim(&mut self) -> u64 {
        let stored = |entry: EntryIndex| self.index.entry(entry).stored().is_some();
        let droppable: Vec<FrameIndex> = self
            .frames
            .iter()
            .filter(|(_, frame)| frame.state == FrameState::Clean && frame.leases == 0)
            .filter(|(_, frame)| frame.entry().is_some_and(stored))
            .map(|(index, _)| index)
            .collect();
        for frame in &droppable {
            self.arena.remove_evictable(self.frames.get(*frame).place, *frame);
            self.evict_frame(*frame);
        }
        droppable.len() as u64
    }

    /// Drops a block's copy in DRAM. The frame is clean, unleased and no longer in the policy.
    fn evict_frame(&mut self, frame: FrameIndex) {
        let entry = self.frames.get(frame).entry().expect("a clean frame can be found");
        self.counters.dram_evictions += 1;
        self.counters.dram_evicted_bytes += self.frame_slot(frame).bytes;
        let tenant = self.tenant_of(self.frames.get(frame).shape);
        self.tenants.get_mut(tenant).counts.dram_evictions += 1;
        self.frames.get_mut(frame).set_entry(None);
        self.free_frame(frame);
        self.index.entry_mut(entry).set_dram(Dram::Absent);
        self.resident_blocks -= 1;
        self.replica_changed(entry, Tier::Dram, Change::Removed);
        self.forget_if_nowhere(entry);
    }

    /// A clean frame that nobody reads is the next of its class to go.
    pub(super) fn evict_first(&mut self, frame: FrameIndex) {
        let state = self.frames.get(frame);
        if state.state == FrameState::Clean && state.leases == 0 {
            let class = state.entry().map_or(0, |entry| self.index.entry(entry).class());
            self.arena.put_first(state.place, frame, class);
        }
    }

    /// Somebody values a block more than was known. Where it waits to be evicted it moves to its new class, as the one
    /// used last. What its journal record says stays as it was written: after a restart the block has the class of then.
    pub(super) fn raise_priority(&mut self, entry: EntryIndex, priority: Priority) {
        let before = self.index.entry(entry).class();
        self.index.entry_mut(entry).raise_priority(priority);
        let state = self.index.entry(entry);
        let class = state.class();
        if class == before {
            return;
        }
        let dram = state.dram();
        let is_read = matches!(dram, Dram::Filling(_));
        if state.stored().is_some() && !is_read {
            self.enter_nvme_order(entry);
        }
        if let Dram::Resident(index) = dram {
            let frame = self.frames.get(index);
            if frame.state == FrameState::Clean && frame.leases == 0 {
                let place = frame.place;
                self.arena.remove_evictable(place, index);
                self.arena.add_evictable(place, index, class);
            }
        }
    }

    /// Removes a block from the index when it is neither in DRAM, nor on its way there, nor on a device.
    pub(super) fn forget_if_nowhere(&mut self, entry: EntryIndex) {
        let state = self.index.entry(entry);
        if state.dram() == Dram::Absent && state.stored().is_none() {
            let shape = state.shape();
            self.index.remove(entry);
            self.shapes.release(shape);
        }
    }
}
