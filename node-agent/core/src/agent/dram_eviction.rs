//! Eviction from the arena.
//!
//! Only clean, unleased frames are evictable; the eviction policy contains no others. Evicting is O(evicted)
//! and needs no I/O, so it happens when a slot is needed and not ahead of time. A slot group without a victim
//! takes over a region of another group whose slots are all evictable. Finding that no such region exists
//! costs nothing, however full the arena is.

use reprise_policy::Tier;
use reprise_policy::eviction::EntryIndex;

use super::AgentCore;
use super::arena::SlotGroupId;
use super::frames::{FrameIndex, FrameState};
use super::index::Dram;
use super::tenants::TenantIndex;
use crate::effect::Change;
use crate::event::Priority;

impl AgentCore {
    /// Frees a slot of a slot group, or a whole region that it can take; `false` if nothing is evictable.
    pub(super) fn make_room(&mut self, slot_group: SlotGroupId) -> bool {
        if let Some(victim) = self.arena.victim(slot_group) {
            self.drop_frame_victim(victim);
            return true;
        }
        let Some(frames) = self.arena.reclaimable(slot_group) else { return false };
        for frame in frames {
            self.arena.remove_evictable(self.frames.get(frame).place, frame);
            self.evict_frame(frame);
        }
        true
    }

    /// Evicts slots of a tenant until one more slot of `slot_bytes` is within its limit; `false` if too few
    /// are evictable.
    pub(super) fn make_room_below_limit(
        &mut self,
        tenant: TenantIndex,
        slot_group: SlotGroupId,
        slot_bytes: u64,
    ) -> bool {
        while self.tenants.dram(tenant).room() < slot_bytes {
            let victim = self.arena.victim_of_tenant(slot_group);
            let bytes = victim.map_or(slot_bytes, |victim| self.frame_slot(victim).bytes);
            self.tenants.get_mut(tenant).counts.dram_limited_bytes += bytes;
            let Some(victim) = victim else { return false };
            self.drop_frame_victim(victim);
        }
        true
    }

    /// Evicts the next victim of a tenant from DRAM; `false` if it has no evictable copy.
    pub(super) fn evict_dram_of(&mut self, tenant: TenantIndex) -> bool {
        let id = self.tenants.get(tenant).id;
        let Some(victim) = self.arena.any_victim(id) else { return false };
        let bytes = self.frame_slot(victim).bytes;
        self.tenants.get_mut(tenant).counts.dram_limited_bytes += bytes;
        self.drop_frame_victim(victim);
        true
    }

    /// Evicts a frame that the arena returned as a victim.
    fn drop_frame_victim(&mut self, victim: FrameIndex) {
        self.arena.take_victim(self.frames.get(victim).place);
        self.evict_frame(victim);
    }

    /// Drops clean, unleased DRAM copies of blocks that are on NVMe; returns their number.
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

    /// Drops a block's copy in DRAM. The frame is clean, unleased and not in the policy.
    fn evict_frame(&mut self, frame: FrameIndex) {
        let entry = self.frames.get(frame).entry().expect("a clean frame can be found");
        self.counters.dram_evictions += 1;
        self.counters.dram_evicted_bytes += self.frame_slot(frame).bytes;
        let tenant = self.tenant_of(self.frames.get(frame).size_class);
        self.tenants.get_mut(tenant).counts.dram_evictions += 1;
        self.frames.get_mut(frame).set_entry(None);
        self.free_frame(frame);
        self.index.entry_mut(entry).set_dram(Dram::Absent);
        self.resident_blocks -= 1;
        self.replica_changed(entry, Tier::Dram, Change::Removed);
        self.remove_if_absent(entry);
    }

    /// Makes a clean, unleased frame the next victim of its class.
    pub(super) fn evict_first(&mut self, frame: FrameIndex) {
        let state = self.frames.get(frame);
        if state.state == FrameState::Clean && state.leases == 0 {
            let class = state.entry().map_or(0, |entry| self.index.entry(entry).class());
            self.arena.insert_oldest(state.place, frame, class);
        }
    }

    /// Raises the priority of a block. An evictable block moves to its new class, as the most recently used.
    /// The journal record keeps the old priority, which is in force again after a restart.
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

    /// Removes a block from the index if it is neither in DRAM, nor being filled, nor on a device.
    pub(super) fn remove_if_absent(&mut self, entry: EntryIndex) {
        let state = self.index.entry(entry);
        if state.dram() == Dram::Absent && state.stored().is_none() {
            let size_class = state.size_class();
            self.index.remove(entry);
            self.size_classes.release(size_class);
        }
    }
}
