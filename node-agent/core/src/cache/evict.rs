//! Eviction from the arena.
//!
//! Only clean, unleased frames are evictable; the eviction policy contains no others. Evicting is O(evicted)
//! and needs no I/O, so it happens when a slot is needed and not ahead of time. A slot group without a victim
//! takes over a region of another group whose slots are all evictable. Finding that no such region exists
//! costs nothing, however full the arena is. Last, retention pins yield that alone keep a region.

use std::collections::BTreeMap;

use reprise_policy::Tier;
use reprise_policy::eviction::{EntryIndex, Group, fair};
use reprise_policy::quota::{QuotaUsage, SpaceRequest};

use crate::cache::accounts::{TenantIndex, nvme_bytes};
use crate::cache::arena::SlotGroupId;
use crate::cache::describe::BlockOrigin;
use crate::cache::devices::group_of_read_only;
use crate::cache::frames::{FrameIndex, FrameState};
use crate::cache::index::Dram;
use crate::cache::{Cache, SlotRequest};
use crate::effect::Change;

impl Cache {
    /// Frees a slot of a slot group, or a whole region that it can take; `false` if nothing is evictable.
    pub(super) fn make_room(&mut self, slot_group: SlotGroupId) -> bool {
        if let Some(victim) = self.arena.victim(slot_group) {
            self.drop_frame_victim(victim);
            return true;
        }
        let mut frames = self.arena.reclaimable(slot_group);
        if frames.is_none() && self.break_retained_region(slot_group) {
            frames = self.arena.reclaimable(slot_group);
        }
        let Some(frames) = frames else { return false };
        for frame in frames {
            self.arena.remove_evictable(self.frames.get(frame).place, frame);
            self.evict_frame(frame);
        }
        true
    }

    /// Releases the retained copies of the region that a slot group could take over without them. Chooses the region with
    /// the fewest; `false` without one. Costs time in proportion to the retained copies.
    fn break_retained_region(&mut self, slot_group: SlotGroupId) -> bool {
        let frames = &self.frames;
        let is_only_lease = |frame: &FrameIndex| {
            let state = frames.get(*frame);
            state.state == FrameState::Clean && state.leases == 1
        };
        let held: Vec<FrameIndex> = self.retained.in_dram.keys().copied().filter(is_only_lease).collect();
        let places = held.iter().map(|frame| frames.get(*frame).place);
        let Some(region) = self.arena.region_kept_by(slot_group, places) else { return false };
        for frame in held {
            if self.frames.get(frame).place.region == region {
                self.retained.broken += 1;
                self.lose_retained_frame(frame);
            }
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
        while self.accounts.dram(tenant).room() < slot_bytes {
            let victim = self.arena.victim_of_tenant(slot_group);
            let bytes = victim.map_or(slot_bytes, |victim| self.frame_slot(victim).bytes);
            self.accounts.get_mut(tenant).counts.dram_limited_bytes += bytes;
            let Some(victim) = victim else { return false };
            self.drop_frame_victim(victim);
        }
        true
    }

    /// Evicts the next victim of a tenant from DRAM; `false` if it has no evictable copy.
    pub(crate) fn evict_dram_of(&mut self, tenant: TenantIndex) -> bool {
        let id = self.accounts.get(tenant).id;
        let Some(victim) = self.arena.any_victim(id) else { return false };
        let bytes = self.frame_slot(victim).bytes;
        self.accounts.get_mut(tenant).counts.dram_limited_bytes += bytes;
        self.drop_frame_victim(victim);
        true
    }

    /// Evicts a frame that the arena returned as a victim.
    pub(super) fn drop_frame_victim(&mut self, victim: FrameIndex) {
        self.arena.take_victim(self.frames.get(victim).place);
        self.evict_frame(victim);
    }

    /// Drops clean, unleased DRAM copies of blocks that are on NVMe; returns their number.
    pub(crate) fn trim(&mut self) -> u64 {
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
    pub(super) fn evict_frame(&mut self, frame: FrameIndex) {
        let entry = self.frames.get(frame).entry().expect("a clean frame can be found");
        self.count_eviction(entry, frame);
        self.frames.get_mut(frame).set_entry(None);
        self.free_frame(frame);
        self.index.entry_mut(entry).set_dram(Dram::Absent);
        self.resident_blocks -= 1;
        self.replica_changed(entry, Tier::Dram, Change::Removed);
        self.remove_if_absent(entry);
    }

    /// Counts the eviction of a block's copy in DRAM.
    pub(super) fn count_eviction(&mut self, entry: EntryIndex, frame: FrameIndex) {
        self.counters.dram_evictions += 1;
        self.counters.dram_evicted_bytes += self.frame_slot(frame).bytes;
        let state = self.index.entry(entry);
        let is_lost = state.stored().is_none() && state.origin() == BlockOrigin::Saved;
        self.counters.dram_dropped_blocks += u64::from(is_lost);
        let tenant = self.tenant_of(self.frames.get(frame).size_class);
        self.accounts.get_mut(tenant).counts.dram_evictions += 1;
    }

    /// Evicts the next victim; `false` if no block is evictable, or everything left is reserved.
    pub(super) fn evict_stored(&mut self) -> bool {
        let Some(entry) = self.take_nvme_victim(None) else { return false };
        self.drop_victim(entry);
        true
    }

    /// Drops a stored block that was removed from the order.
    pub(super) fn drop_victim(&mut self, entry: EntryIndex) {
        let state = self.index.entry(entry);
        self.counters.nvme_evictions += 1;
        self.counters.nvme_evicted_bytes += self.sizes.get(state.size_class()).slot_bytes;
        let tenant = self.tenant_of(state.size_class());
        self.accounts.get_mut(tenant).counts.nvme_evictions += 1;
        self.remove_stored(entry);
    }

    /// Evicts the next victim of a tenant from its device; `false` if it has no evictable block. The tenant's
    /// quota counts blocks of all devices, so those of devices that are only read are the last victims.
    pub(crate) fn evict_nvme_of(&mut self, index: TenantIndex) -> bool {
        let mut groups = [Group(index.0), group_of_read_only(index)].into_iter();
        let Some(entry) = groups.find_map(|group| self.devices.take_victim(group)) else { return false };
        let bytes = self.sizes.get(self.index.entry(entry).size_class()).slot_bytes;
        self.accounts.get_mut(index).counts.nvme_limited_bytes += bytes;
        self.drop_victim(entry);
        true
    }

    /// Removes and returns the next NVMe victim, for a lane or ahead of writes. It belongs to the first
    /// tenant in the order of [`reprise_policy::quota::victims`] that has an evictable block of at most the allowed size.
    pub(super) fn take_nvme_victim(&mut self, wanting: Option<SlotRequest>) -> Option<EntryIndex> {
        let usages: Vec<QuotaUsage> = self.accounts.ids().map(|index| self.accounts.nvme(index)).collect();
        let request = wanting.map(|request| SpaceRequest {
            tenant: usize::from(request.tenant.0),
            bytes: nvme_bytes(request.slot_bytes),
        });
        let Cache { devices, index, sizes, .. } = self;
        let bytes_of = |entry| nvme_bytes(sizes.get(index.entry(entry).size_class()).slot_bytes);
        fair::take_victim(&mut devices.order, &usages, request, bytes_of)
    }

    /// Whether evicting these blocks for a tenant leaves the reservations of other tenants untouched.
    pub(super) fn may_drop(&self, blocks: &[EntryIndex], wanting: Option<TenantIndex>) -> bool {
        let mut lost: BTreeMap<TenantIndex, u64> = BTreeMap::new();
        for entry in blocks {
            let size_class = self.index.entry(*entry).size_class();
            let bytes = nvme_bytes(self.sizes.get(size_class).slot_bytes);
            *lost.entry(self.tenant_of(size_class)).or_default() += bytes;
        }
        lost.into_iter()
            .all(|(index, bytes)| wanting == Some(index) || bytes <= self.accounts.nvme(index).over())
    }

    /// Evicts blocks of a tenant until one more is within its limit; `false` if too few are evictable.
    pub(crate) fn make_nvme_room(&mut self, request: SlotRequest) -> bool {
        let bytes = nvme_bytes(request.slot_bytes);
        while self.accounts.nvme(request.tenant).room() < bytes {
            if !self.evict_nvme_of(request.tenant) {
                return false;
            }
        }
        true
    }
}
