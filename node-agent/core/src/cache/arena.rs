//! Allocation of arena slots.
//!
//! The arena is a set of regions. A slot group (a tenant and a slot size) takes an unowned region when it has
//! no free slot left. The region is then cut into slots of that size, and becomes unowned when its last slot
//! is freed:
//!
//! ```text
//! region: unowned ──take──▶ owned by a group: [used|used|free|fresh…] ──last slot freed──▶ unowned
//! ```
//!
//! Allocation and freeing are O(1). A region that has held data of a tenant passes to another tenant only with
//! new memory ([`renewal`]). Unused regions are kept back for tenants with a reservation or a session
//! ([`reservations`]).
//!
//! A group also keeps the eviction order of its readable, unleased, clean slots: a group that needs a slot
//! needs one of its own size. A group without a victim may take over a region of another group of its tenant,
//! if every slot in the region is evictable.
//!
//! Out of scope: memory mappings, and the contents of slots (`frames`).

use std::collections::BTreeSet;

use reprise_policy::TenantId;
use reprise_policy::eviction::{Block, EntryIndex, EvictionOrder, EvictionPolicy, Group};
use reprise_policy::quota::{self, Quota, QuotaError};

pub use crate::cache::arena::renewal::Renewal;
use crate::cache::arena::renewal::{Renewals, Stage};
use crate::cache::arena::reservations::Reservations;
use crate::cache::frames::FrameIndex;
use crate::effect::{ArenaSlot, RegionId};
use crate::limits::{REGIONS_MAX, SLOTS_PER_REGION_MAX};

mod renewal;
mod reservations;
#[cfg(test)]
mod tests;
mod victims;

/// Position of a region that is not in its owner's list of regions with free slots.
const NOT_PARTIAL: u32 = u32::MAX;

/// Number of a slot group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SlotGroupId(u16);

/// Slot in the arena: position of its region, and number within the region.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct RegionSlot {
    pub(crate) region: u16,
    slot: u16,
}

/// All regions, and the slot groups that own them.
#[derive(Debug)]
pub(crate) struct Arena {
    regions: Vec<Region>,
    unowned: Vec<u16>,
    /// Owned regions in which every used slot is evictable.
    idle: BTreeSet<u16>,
    groups: Vec<SlotGroup>,
    /// Evictable slots, by frame; a slot group is a group of the order. One order serves all slot groups,
    /// because its memory grows with the largest frame number.
    order: EvictionOrder,
    /// Number of regions that no tenant has used yet.
    fresh: u64,
    reservations: Reservations,
    renewals: Renewals,
    bytes: u64,
    used_bytes: u64,
}

#[derive(Debug)]
struct Region {
    id: RegionId,
    bytes: u64,
    /// Tenant whose data the region's memory has ever held.
    tenant: Option<TenantId>,
    stage: Stage,
    /// Number of memory files that the region has had before.
    generation: u32,
    /// Grants of the memory to open sessions, one for each kind of access.
    grants: u32,
    owner: Option<SlotGroupId>,
    slots: u32,
    /// First slot that was not used since the owner took the region.
    fresh: u32,
    free: Vec<u16>,
    /// Frames of the slots below `fresh`.
    frames: Vec<FrameIndex>,
    evictable: u32,
    partial_at: u32,
}

#[derive(Debug)]
struct SlotGroup {
    tenant: TenantId,
    slot_bytes: u64,
    /// Number of size classes that use the group.
    size_classes: u32,
    /// Regions of the group that have free slots.
    partial: Vec<u16>,
}

impl Region {
    fn used(&self) -> u32 {
        self.fresh - self.free.len() as u32
    }

    fn full(&self) -> bool {
        self.used() == self.slots
    }

    /// Whether another group of the tenant may take the region over after an eviction of all its blocks.
    fn is_idle(&self) -> bool {
        self.owner.is_some() && self.stage == Stage::InUse && self.evictable == self.used()
    }
}

impl Arena {
    /// Creates an arena of free regions. Regions beyond [`REGIONS_MAX`] are not used.
    pub(crate) fn new(regions: &[(RegionId, u64)], eviction: EvictionPolicy) -> Arena {
        let regions: Vec<Region> = regions
            .iter()
            .take(REGIONS_MAX)
            .map(|(id, bytes)| Region {
                id: *id,
                bytes: *bytes,
                tenant: None,
                stage: Stage::InUse,
                generation: 0,
                grants: 0,
                owner: None,
                slots: 0,
                fresh: 0,
                free: Vec::new(),
                frames: Vec::new(),
                evictable: 0,
                partial_at: NOT_PARTIAL,
            })
            .collect();
        Arena {
            unowned: (0..regions.len()).rev().map(|region| region as u16).collect(),
            bytes: regions.iter().map(|region| region.bytes).sum(),
            used_bytes: 0,
            fresh: regions.len() as u64,
            reservations: Reservations::default(),
            renewals: Renewals::default(),
            idle: BTreeSet::new(),
            groups: Vec::new(),
            order: EvictionOrder::new(eviction),
            regions,
        }
    }

    /// Total bytes of all regions.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Total bytes of slots in use.
    pub(crate) fn used_bytes(&self) -> u64 {
        self.used_bytes
    }

    /// Bytes of the largest region, which is the maximum slot size.
    pub(crate) fn region_bytes_max(&self) -> u64 {
        self.regions.iter().map(|region| region.bytes).max().unwrap_or(0)
    }

    /// Reserves memory for a tenant, rounded up to whole regions.
    pub(crate) fn reserve(&mut self, tenant: TenantId, bytes: u64) {
        let regions = bytes.div_ceil(self.region_bytes_min());
        self.reservations.reserve(tenant, regions);
    }

    /// Checks that the arena can satisfy the reservations of all tenants.
    pub(super) fn check_reservations(&self, quotas: &[Quota]) -> Result<u64, QuotaError> {
        quota::check_reservations(self.bytes, self.region_bytes_min(), quotas.iter().copied())
    }

    /// Whether a tenant may receive replicas that no engine of this node requested. A tenant without a region gets its
    /// first only if enough remain for tenants with engines: of unused, unreserved regions, half of all regions and at
    /// least two.
    pub(crate) fn may_accept_replicas(&self, tenant: TenantId) -> bool {
        let remaining_min = (self.regions.len() as u64).div_ceil(2).max(2);
        self.reservations.has_own(tenant, self.fresh)
            || self.reservations.left_after_one(self.fresh) >= remaining_min
    }

    fn region_bytes_min(&self) -> u64 {
        self.regions.iter().map(|region| region.bytes).min().unwrap_or(1).max(1)
    }

    /// Returns the slot group of a tenant's slots of one size, and counts one more size class that uses it.
    pub(super) fn join_slot_group(&mut self, tenant: TenantId, slot_bytes: u64) -> SlotGroupId {
        let same = |group: &SlotGroup| group.tenant == tenant && group.slot_bytes == slot_bytes;
        let at = self.groups.iter().position(same).or_else(|| {
            // A group without size classes has no frames, and therefore no regions.
            let vacant = self.groups.iter().position(|group| group.size_classes == 0)?;
            self.groups[vacant] = SlotGroup::new(tenant, slot_bytes);
            Some(vacant)
        });
        let at = at.unwrap_or_else(|| {
            self.groups.push(SlotGroup::new(tenant, slot_bytes));
            self.groups.len() - 1
        });
        self.groups[at].size_classes += 1;
        SlotGroupId(at as u16)
    }

    /// Counts one size class less that uses the group.
    pub(super) fn leave_slot_group(&mut self, group: SlotGroupId) {
        self.group_mut(group).size_classes -= 1;
    }

    /// Allocates a slot from the group's regions, or from a region that it takes.
    pub(crate) fn allocate(&mut self, group: SlotGroupId) -> Option<RegionSlot> {
        let region = match self.group(group).partial.last() {
            Some(region) => *region,
            None => self.take_region(group)?,
        };
        let slot_bytes = self.group(group).slot_bytes;
        let state = &mut self.regions[usize::from(region)];
        let slot = match state.free.pop() {
            Some(slot) => slot,
            None => {
                state.fresh += 1;
                state.frames.push(FrameIndex::NONE);
                (state.fresh - 1) as u16
            }
        };
        if state.full() {
            self.leave_partial(region);
        }
        self.note_idle(region);
        self.used_bytes += slot_bytes;
        Some(RegionSlot { region, slot })
    }

    /// Records the frame of a slot.
    pub(super) fn set_frame(&mut self, place: RegionSlot, frame: FrameIndex) {
        self.regions[usize::from(place.region)].frames[usize::from(place.slot)] = frame;
    }

    /// Frees a slot, which must not be evictable.
    pub(crate) fn free(&mut self, place: RegionSlot) {
        let region = &mut self.regions[usize::from(place.region)];
        let owner = region.owner.expect("a region with a used slot has an owner");
        region.free.push(place.slot);
        region.frames[usize::from(place.slot)] = FrameIndex::NONE;
        let empty = region.used() == 0;
        let may_list = region.partial_at == NOT_PARTIAL && region.stage == Stage::InUse;
        self.used_bytes -= self.group(owner).slot_bytes;
        if empty {
            self.disown(place.region);
        } else if may_list {
            self.enter_partial(place.region, owner);
        }
        self.note_idle(place.region);
    }

    /// Makes a frame's slot evictable, as the newest in the eviction order. The block's group is the slot group.
    pub(super) fn add_evictable(&mut self, place: RegionSlot, frame: FrameIndex, block: &Block) {
        let group = Group(self.owner(place).0);
        self.regions[usize::from(place.region)].evictable += 1;
        self.note_idle(place.region);
        self.order.insert(EntryIndex(frame.0), &Block { group, ..*block });
    }

    /// Makes an evictable frame the next victim of its queue.
    pub(super) fn put_first(&mut self, frame: FrameIndex) {
        self.order.put_first(EntryIndex(frame.0));
    }

    /// Moves an evictable frame before the one of its block's parent in the eviction order.
    pub(super) fn settle(&mut self, frame: FrameIndex) {
        self.order.settle(EntryIndex(frame.0));
    }

    /// Records that the block of a frame is readable.
    pub(super) fn attach(&mut self, place: RegionSlot, frame: FrameIndex) {
        let group = Group(self.owner(place).0);
        self.order.attach(EntryIndex(frame.0), group);
    }

    /// Records that a frame no longer has its block.
    pub(super) fn forget(&mut self, frame: FrameIndex) {
        self.order.forget(EntryIndex(frame.0));
    }

    /// Records that a frame has the block before another frame's in its chain.
    pub(super) fn link(&mut self, frame: FrameIndex, parent: FrameIndex) {
        self.order.link(EntryIndex(frame.0), EntryIndex(parent.0));
    }

    /// Whether the frame of the block's parent is known.
    pub(super) fn is_linked(&self, frame: FrameIndex) -> bool {
        self.order.parent(EntryIndex(frame.0)).is_some()
    }

    /// Marks frames as most recently used, one after the other, if they are evictable.
    pub(super) fn touch_run(&mut self, frames: &[EntryIndex]) {
        self.order.touch_run(frames);
    }

    /// Counts a use of a frame's block.
    pub(super) fn used(&mut self, frame: FrameIndex) {
        self.order.used(EntryIndex(frame.0));
    }

    /// Removes a frame from the eviction order.
    pub(crate) fn remove_evictable(&mut self, place: RegionSlot, frame: FrameIndex) {
        self.regions[usize::from(place.region)].evictable -= 1;
        self.note_idle(place.region);
        self.order.remove(EntryIndex(frame.0));
    }

    /// Removes and returns the group's next victim. The caller must pass its slot to `take_victim`.
    pub(super) fn victim(&mut self, group: SlotGroupId) -> Option<FrameIndex> {
        self.order.victim(Group(group.0)).map(|victim| FrameIndex(victim.0))
    }

    /// Returns a victim of this group or, failing that, of another group of its tenant.
    pub(super) fn victim_of_tenant(&mut self, group: SlotGroupId) -> Option<FrameIndex> {
        let tenant = self.group(group).tenant;
        self.victim(group).or_else(|| self.any_victim(tenant))
    }

    /// Returns a victim of any group of a tenant. O(groups).
    pub(super) fn any_victim(&mut self, tenant: TenantId) -> Option<FrameIndex> {
        let of_tenant = |at: &u16| self.groups[usize::from(*at)].tenant == tenant;
        let groups: Vec<u16> = (0..self.groups.len() as u16).filter(of_tenant).collect();
        groups.into_iter().find_map(|group| self.victim(SlotGroupId(group)))
    }

    /// Completes [`Arena::victim`] once the caller knows the victim's slot.
    pub(super) fn take_victim(&mut self, place: RegionSlot) {
        self.regions[usize::from(place.region)].evictable -= 1;
        self.note_idle(place.region);
    }

    /// Updates the set of regions in which every used slot is evictable.
    fn note_idle(&mut self, region: u16) {
        let state = &self.regions[usize::from(region)];
        if state.is_idle() {
            self.idle.insert(region);
        } else {
            self.idle.remove(&region);
        }
    }

    /// Returns the frames of a region that the group could take over: every slot in it is evictable, and it
    /// belongs to another group of the tenant. Chooses the region with the fewest used bytes. Iterates idle
    /// regions only, so it costs nothing in an arena that is full of leased slots.
    pub(super) fn reclaimable(&self, group: SlotGroupId) -> Option<Vec<FrameIndex>> {
        let SlotGroup { tenant, slot_bytes, .. } = self.group(group);
        self.idle
            .iter()
            .map(|region| &self.regions[usize::from(*region)])
            .filter(|region| region.owner.is_some_and(|owner| owner != group))
            .filter(|region| region.tenant == Some(*tenant) && region.bytes >= *slot_bytes)
            .min_by_key(|region| u64::from(region.used()) * region.bytes / u64::from(region.slots))
            .map(|region| region.frames.iter().copied().filter(|frame| *frame != FrameIndex::NONE).collect())
    }

    /// Returns the address of a slot.
    pub(crate) fn slot(&self, place: RegionSlot) -> ArenaSlot {
        let region = &self.regions[usize::from(place.region)];
        let bytes = self.group(self.owner(place)).slot_bytes;
        ArenaSlot { region: region.id, offset: u64::from(place.slot) * bytes, bytes }
    }

    /// Returns the identifier of the region at a position.
    pub(crate) fn region_id(&self, region: u16) -> RegionId {
        self.regions[usize::from(region)].id
    }

    /// Number of evictable slots.
    pub(crate) fn evictable(&self) -> usize {
        self.order.len()
    }

    /// Checks the invariants of the arena.
    pub(crate) fn audit(&self) -> Result<(), String> {
        let mut used_bytes = 0;
        for (at, region) in self.regions.iter().enumerate() {
            let name = region.id.0;
            let Some(owner) = region.owner else {
                let is_free = self.unowned.contains(&(at as u16)) == (region.stage == Stage::InUse);
                if !is_free || region.fresh != 0 {
                    return Err(format!("region {name} has no owner but is not free"));
                }
                continue;
            };
            let group = self.group(owner);
            let held = region.frames.iter().filter(|frame| **frame != FrameIndex::NONE).count();
            if held != region.used() as usize || region.used() == 0 || region.fresh > region.slots {
                return Err(format!("region {name}: {held} frames, {} used slots", region.used()));
            }
            if region.tenant != Some(group.tenant) || region.evictable > region.used() {
                return Err(format!("region {name}: wrong tenant, or more evictable slots than used ones"));
            }
            if u64::from(region.slots) * group.slot_bytes > region.bytes {
                return Err(format!("region {name} is cut into more slots than fit"));
            }
            let listed = group.partial.get(region.partial_at as usize) == Some(&(at as u16));
            if listed != (!region.full() && region.stage == Stage::InUse) {
                return Err(format!("region {name}: free slots and the list of partial regions disagree"));
            }
            used_bytes += u64::from(region.used()) * group.slot_bytes;
        }
        let fresh = self.regions.iter().filter(|region| region.tenant.is_none()).count() as u64;
        if fresh != self.fresh {
            return Err(format!("{fresh} unused regions, {} counted", self.fresh));
        }
        self.audit_renewals()?;
        let idle: BTreeSet<u16> =
            (0..).zip(&self.regions).filter(|(_, region)| region.is_idle()).map(|(at, _)| at).collect();
        if idle != self.idle {
            return Err(format!("regions {:?} are idle, not {:?}", idle, self.idle));
        }
        let evictable: u64 = self.regions.iter().map(|region| u64::from(region.evictable)).sum();
        if evictable != self.evictable() as u64 {
            return Err(format!("{evictable} evictable slots by region, {} by policy", self.evictable()));
        }
        if used_bytes != self.used_bytes || used_bytes > self.bytes {
            let (counted, all) = (self.used_bytes, self.bytes);
            return Err(format!("{used_bytes} bytes in used slots, {counted} counted, {all} in all regions"));
        }
        Ok(())
    }

    fn group(&self, group: SlotGroupId) -> &SlotGroup {
        &self.groups[usize::from(group.0)]
    }

    fn group_mut(&mut self, group: SlotGroupId) -> &mut SlotGroup {
        &mut self.groups[usize::from(group.0)]
    }

    fn owner(&self, place: RegionSlot) -> SlotGroupId {
        self.regions[usize::from(place.region)].owner.expect("a region with a used slot has an owner")
    }

    /// Assigns an unowned region to a group: preferably one that has held this tenant's data before.
    fn take_region(&mut self, group: SlotGroupId) -> Option<u16> {
        let SlotGroup { tenant, slot_bytes, .. } = *self.group(group);
        let is_suitable = |region: &u16, wanted: Option<TenantId>| {
            let state = &self.regions[usize::from(*region)];
            state.tenant == wanted && state.bytes >= slot_bytes
        };
        let at = self.unowned.iter().rposition(|region| is_suitable(region, Some(tenant))).or_else(|| {
            let may_own = self.fresh > 0 && self.reservations.may_own(tenant, self.fresh);
            self.unowned.iter().rposition(|region| may_own && is_suitable(region, None))
        })?;
        let region = self.unowned.swap_remove(at);
        let state = &mut self.regions[usize::from(region)];
        if state.tenant.is_none() {
            self.fresh -= 1;
            self.reservations.own(tenant);
        }
        self.renewals.search_again();
        state.tenant = Some(tenant);
        state.owner = Some(group);
        state.slots = (state.bytes / slot_bytes).min(SLOTS_PER_REGION_MAX) as u32;
        self.enter_partial(region, group);
        Some(region)
    }

    fn disown(&mut self, region: u16) {
        self.leave_partial(region);
        let state = &mut self.regions[usize::from(region)];
        state.owner = None;
        state.fresh = 0;
        state.free.clear();
        state.frames.clear();
        self.renewals.search_again();
        match state.stage {
            Stage::Retiring(_) => self.vacate(region),
            Stage::InUse | Stage::Renewing(_) => self.unowned.push(region),
        }
    }

    fn enter_partial(&mut self, region: u16, group: SlotGroupId) {
        let partial = &mut self.group_mut(group).partial;
        partial.push(region);
        let at = partial.len() as u32 - 1;
        self.regions[usize::from(region)].partial_at = at;
    }

    fn leave_partial(&mut self, region: u16) {
        let state = &mut self.regions[usize::from(region)];
        let at = std::mem::replace(&mut state.partial_at, NOT_PARTIAL);
        let Some(owner) = state.owner.filter(|_| at != NOT_PARTIAL) else { return };
        let partial = &mut self.group_mut(owner).partial;
        partial.swap_remove(at as usize);
        if let Some(moved) = partial.get(at as usize).copied() {
            self.regions[usize::from(moved)].partial_at = at;
        }
    }
}

impl SlotGroup {
    fn new(tenant: TenantId, slot_bytes: u64) -> SlotGroup {
        SlotGroup { tenant, slot_bytes, size_classes: 0, partial: Vec::new() }
    }
}
