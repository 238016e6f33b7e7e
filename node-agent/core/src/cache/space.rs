//! Space on the devices for a slot size without a free slot.
//!
//! The next victim determines where space is freed. If the victim has the needed size, its slot is reused.
//! Otherwise its whole segment is emptied, because a segment holds slots of one size. The evicted blocks are
//! cold, and at most one segment is emptied at a time. Victims in segments that cannot be emptied now keep
//! their place in the order. Such a segment has a block that is being read or written, or a quarantined slot.

use reprise_policy::TenantId;
use reprise_policy::eviction::EntryIndex;

use crate::cache::accounts::nvme_bytes;
use crate::cache::devices::{SpaceCheck, sum_of_usage};
use crate::cache::index::Stored;
use crate::cache::sizes::{SizeClass, SizeClassId};
use crate::cache::{Cache, SlotRequest};
use crate::context::Context;
use crate::effect::DeviceId;
use crate::limits::{
    POOL_EVICTIONS_FOR_SIZE, POOL_EVICTIONS_PER_APPLY, POOL_VICTIMS_MAX, PULL_ARENA_PERMILLE, PULL_BYTES_MAX,
};

/// Prospect of free space on a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SpaceState {
    /// An operation is in progress whose end is an event.
    Pending,
    /// Nothing can be freed.
    Unavailable,
}

/// What happens to retention pins in a segment that is emptied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SegmentPins {
    /// A segment with pinned blocks is not emptied.
    Kept,
    /// Pinned blocks are evicted too: pins are advice, and one in each segment would keep all other sizes out.
    Broken,
}

/// Way in which evicting a victim helps a slot size.
enum Reclaim {
    /// Its slot, or its journal entry, is directly usable.
    Slot,
    /// Its segment can be emptied by evicting these blocks.
    Segment { segment: u32, blocks: Vec<EntryIndex> },
    /// Evicting it does not help.
    Nothing { segment: u32 },
}

impl Cache {
    /// Checks that blocks of a size class can fit into the arena.
    ///
    /// # Errors
    /// Sizes of the block and of the largest region, and what to do.
    pub(crate) fn check_block_size(&self, size_class: SizeClassId) -> Result<(), String> {
        let (block, region) = (self.sizes.get(size_class).slot_bytes, self.arena.region_bytes_max());
        if block <= region {
            return Ok(());
        }
        Err(format!(
            "a block of this layout has {block} bytes, but a region of the arena only {region}: raise \
             arena.region_bytes in the agent's configuration, or use fewer tokens per block"
        ))
    }

    /// Sets the share of the pool that is kept free.
    pub(crate) fn set_pool_free(&mut self, permille: u16) {
        self.pool_free_permille = permille;
        self.devices.space_check = SpaceCheck::Due;
        self.outcomes.capacity_changed = true;
    }

    /// Evicts blocks until the free target is met, and flushes pending free records.
    pub(crate) fn keep_pool_free(&mut self, cx: &mut Context) {
        if self.devices.space_check == SpaceCheck::Unneeded {
            return;
        }
        let mut evicted = 0;
        while evicted < POOL_EVICTIONS_PER_APPLY && self.pool_short() && self.evict_stored() {
            evicted += 1;
        }
        for id in self.devices.ids().filter(|id| self.devices.device(*id).owes_flush()).collect::<Vec<_>>() {
            let device = self.devices.device_mut(id);
            device.records_owed = 0;
            let ops = device.pool.flush_frees();
            self.emit_ops(cx, id, ops);
        }
        self.devices.space_check = match evicted {
            // The next event evicts the rest.
            POOL_EVICTIONS_PER_APPLY => SpaceCheck::Due,
            _ => SpaceCheck::Unneeded,
        };
    }

    /// Whether free and pending bytes, or journal entries, are below the target.
    fn pool_short(&self) -> bool {
        let usage = sum_of_usage(self.devices.writable_devices());
        let target = |of: u64| of * u64::from(self.pool_free_permille) / 1000;
        usage.slot_bytes_free + usage.pending_frees_bytes < target(usage.capacity_bytes)
            || usage.entries_free + usage.entries_pending < target(usage.entries_max)
    }

    /// Starts to free space for a block size without a free slot, unless that is in progress.
    pub(crate) fn make_pool_room(&mut self, request: SlotRequest) -> SpaceState {
        if self.devices.usable_devices().any(|device| device.pool.space_pending(request.slot_bytes)) {
            return SpaceState::Pending;
        }
        if self.evict_for_size(request)
            || self.empty_some_segment(request, SegmentPins::Kept)
            || (!self.retained.is_empty() && self.empty_some_segment(request, SegmentPins::Broken))
        {
            return SpaceState::Pending;
        }
        if self.operations_may_free_space() { SpaceState::Pending } else { SpaceState::Unavailable }
    }

    /// Whether an operation in flight may free space: its end is an event, after which further blocks may be evicted.
    /// Pins and leases of clients do not count, because they may never end.
    pub(crate) fn operations_may_free_space(&self) -> bool {
        self.devices.usable_devices().any(|device| {
            let pending_frees = device.pool.usage().pending_frees_bytes;
            device.reads_in_flight > 0 || device.batches_in_flight > 0 || pending_frees > 0
        })
    }

    /// Evicts victims in order until slots of the size or one segment become free; returns whether any was
    /// evicted.
    fn evict_for_size(&mut self, request: SlotRequest) -> bool {
        let (mut evicted, mut passed) = (0, Vec::new());
        let mut tried: Vec<(DeviceId, u32)> = Vec::new();
        while evicted < POOL_EVICTIONS_FOR_SIZE && passed.len() < POOL_VICTIMS_MAX {
            let Some(entry) = self.take_nvme_victim(Some(request)) else { break };
            let stored = self.index.entry(entry).stored().expect("only stored blocks are in the order");
            match self.victim_for(stored, request, &tried) {
                Reclaim::Slot => {
                    self.drop_victim(entry);
                    evicted += 1;
                }
                Reclaim::Segment { segment, blocks } if evicted == 0 => {
                    self.reinsert_nvme_victim(entry);
                    self.empty_segment(stored.device, segment, blocks);
                    evicted = POOL_EVICTIONS_FOR_SIZE;
                }
                Reclaim::Segment { .. } => {
                    passed.push(entry);
                    break;
                }
                Reclaim::Nothing { segment } => {
                    tried.push((stored.device, segment));
                    passed.push(entry);
                }
            }
        }
        for entry in passed.into_iter().rev() {
            self.reinsert_nvme_victim(entry);
        }
        evicted > 0
    }

    fn reinsert_nvme_victim(&mut self, entry: EntryIndex) {
        self.devices.put_first(entry);
    }

    fn victim_for(&self, stored: Stored, request: SlotRequest, tried: &[(DeviceId, u32)]) -> Reclaim {
        let pool = &self.devices.device(stored.device).pool;
        let segment = pool.segment_of(stored.page).expect("a stored block is in a segment");
        // Nothing is freed on a device that cannot be written.
        if !pool.is_writable() {
            return Reclaim::Nothing { segment };
        }
        if pool.has_size(stored.page, request.slot_bytes) || pool.usage().entries_free == 0 {
            return Reclaim::Slot;
        }
        if tried.contains(&(stored.device, segment)) {
            return Reclaim::Nothing { segment };
        }
        match self.drainable(stored.device, segment, (request, SegmentPins::Kept)) {
            Some(blocks) => Reclaim::Segment { segment, blocks },
            None => Reclaim::Nothing { segment },
        }
    }

    /// Empties the segment with the least data, because no cold block is in a segment that can be emptied.
    fn empty_some_segment(&mut self, request: SlotRequest, pins: SegmentPins) -> bool {
        for device in self.devices.ids().filter(|id| self.devices.is_usable(*id)).collect::<Vec<_>>() {
            let Some(segment) = self.devices.device(device).pool.emptiest_drainable(request.slot_bytes)
            else {
                continue;
            };
            if let Some(blocks) = self.drainable(device, segment, (request, pins)) {
                self.retained.count_broken(&blocks);
                self.empty_segment(device, segment, blocks);
                return true;
            }
        }
        false
    }

    /// Returns the blocks of a segment if all of them may be evicted for the lane's tenant, and emptying it
    /// gives the size a segment.
    fn drainable(
        &self,
        device: DeviceId,
        segment: u32,
        (request, pins): (SlotRequest, SegmentPins),
    ) -> Option<Vec<EntryIndex>> {
        let blocks = self.devices.device(device).pool.drainable(segment, request.slot_bytes)?;
        let blocks: Option<Vec<EntryIndex>> = blocks
            .into_iter()
            .map(|(key, page)| {
                let entry = self.index.find(&key)?;
                let state = self.index.entry(entry);
                let here = state.stored().is_some_and(|at| at.device == device && at.page == page);
                let is_evictable = match pins {
                    SegmentPins::Kept => self.is_in_nvme_order(entry),
                    SegmentPins::Broken => self.is_unused_on_device(entry),
                };
                (here && is_evictable).then_some(entry)
            })
            .collect();
        blocks.filter(|blocks| self.may_drop(blocks, Some(request.tenant)))
    }

    fn empty_segment(&mut self, device: DeviceId, segment: u32, blocks: Vec<EntryIndex>) {
        self.devices.device_mut(device).pool.start_drain(segment);
        for entry in blocks {
            self.devices.remove_evictable(entry);
            self.drop_victim(entry);
        }
    }

    /// Number of blocks of a size class that fit into the devices, their journals and the tenant's quota,
    /// without touching the free target or pending space. Zero if the tenant's DRAM limit is below one block, or no
    /// device has a write budget for one.
    /// The unusable ends of segments are counted as used, before the segments are assigned to a size.
    pub(crate) fn room_without_eviction(&self, size_class: SizeClassId) -> u64 {
        let SizeClass { slot_bytes, tenant_index, .. } = *self.sizes.get(size_class);
        if self.accounts.dram(tenant_index).quota.limit() < slot_bytes || !self.has_write_budget(slot_bytes) {
            return 0;
        }
        let bytes = nvme_bytes(slot_bytes);
        let usage = sum_of_usage(self.devices.writable_devices());
        let kept_free = |of: u64| of * u64::from(self.pool_free_permille) / 1000;
        let pending = &self.pending_space;
        let ends = |(bytes, blocks)| self.devices.ends_of_segments(bytes, blocks);
        let withheld =
            kept_free(usage.capacity_bytes) + pending.bytes() + pending.sizes().map(ends).sum::<u64>();
        let free = usage.slot_bytes_free.saturating_sub(withheld);
        let free = free.saturating_sub(ends((bytes, free / bytes)));
        let of_tenant =
            self.accounts.nvme(tenant_index).room().saturating_sub(pending.bytes_of(tenant_index));
        let entries = usage.entries_free.saturating_sub(kept_free(usage.entries_max) + pending.blocks());
        let slots = self.devices.slots_free(slot_bytes).saturating_sub(pending.blocks());
        (free / bytes).min(of_tenant / bytes).min(entries).min(slots)
    }

    /// Whether the devices and the tenant's memory still have room for a block whose space is pending. The
    /// room seen when it was accepted may have gone to engines and other blocks.
    pub(crate) fn has_pending_room(&mut self, size_class: SizeClassId) -> bool {
        self.remove_pending(size_class);
        let has_room = self.room_without_eviction(size_class) > 0;
        self.add_pending(size_class);
        has_room && self.may_accept_replicas(self.sizes.get(size_class).tenant)
    }

    /// Whether a tenant may receive replicas that no engine of this node requested.
    pub(crate) fn may_accept_replicas(&self, tenant: TenantId) -> bool {
        self.arena.may_accept_replicas(tenant)
    }

    /// Whether a region of the arena and a device are large enough for a block.
    pub(crate) fn may_hold(&self, slot_bytes: u64) -> bool {
        slot_bytes <= self.arena.region_bytes_max() && self.devices.can_hold(slot_bytes)
    }

    /// Adds the space of a block that will be saved.
    pub(crate) fn add_pending(&mut self, size_class: SizeClassId) {
        let SizeClass { slot_bytes, tenant_index, .. } = *self.sizes.get(size_class);
        self.pending_space.add(tenant_index, slot_bytes);
    }

    /// Removes the space of a block that is durable or dropped.
    pub(crate) fn remove_pending(&mut self, size_class: SizeClassId) {
        let SizeClass { slot_bytes, tenant_index, .. } = *self.sizes.get(size_class);
        self.pending_space.remove(tenant_index, slot_bytes);
    }

    /// Maximum slot bytes of replicas being fetched and written.
    pub(crate) fn pull_bytes_max(&self) -> u64 {
        PULL_BYTES_MAX.min(self.share_of_arena(PULL_ARENA_PERMILLE))
    }

    /// A share of the arena, in bytes.
    pub(crate) fn share_of_arena(&self, permille: u16) -> u64 {
        self.arena.bytes() * u64::from(permille) / 1000
    }
}
