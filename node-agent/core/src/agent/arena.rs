//! Which slots of the arena are taken.
//!
//! The arena is a set of regions. A region without an owner is taken by a size class (a tenant and a slot size)
//! that has no free slot left, is cut into slots of that size, and has no owner again when its last slot is freed:
//!
//! ```text
//! region: no owner ──take──▶ owned by a class: [used|used|free|fresh…] ──last slot freed──▶ no owner
//! ```
//!
//! Allocation and freeing are O(1). A region that has ever belonged to a tenant is never given to another one:
//! nothing in this core zeroes memory. So regions that nobody has had are kept for tenants with a reservation
//! ([`reservations`]).
//!
//! The class also keeps the order of eviction of its readable, unleased, clean slots, because what helps a class
//! that needs a slot is a slot of that class. A class that has no victim may take over a region of another class
//! of its tenant in which everything can be evicted.
//!
//! Deliberately absent: memory, and what is in a slot (`frames`).

mod reservations;

use std::collections::BTreeSet;

use reprise_policy::TenantId;
use reprise_policy::eviction::{EntryIndex, EvictionKind, EvictionPolicy, Group, Standing};

use reprise_policy::quota::{self, Quota, QuotaError};

use reservations::Reservations;

use super::frames::FrameIndex;
use super::limits::{REGIONS_MAX, SLOTS_PER_REGION_MAX};
use crate::effect::{ArenaSlot, RegionId};

/// Position of a region that is not in its owner's list of regions with free slots.
const NOT_PARTIAL: u32 = u32::MAX;

/// A size class.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ClassId(u16);

/// A slot: region by position, slot by number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct Place {
    pub(super) region: u16,
    slot: u16,
}

/// The arena; see the module.
#[derive(Debug)]
pub(super) struct Arena {
    regions: Vec<Region>,
    unowned: Vec<u16>,
    /// Regions with an owner in which everything can be evicted.
    idle: BTreeSet<u16>,
    classes: Vec<Class>,
    /// Evictable slots by frame; a class is a group. One for all classes, because an order costs memory by the largest
    /// frame number.
    order: Box<dyn EvictionPolicy>,
    /// Regions that nobody has had.
    fresh: u64,
    reservations: Reservations,
    bytes: u64,
    used_bytes: u64,
}

#[derive(Debug)]
struct Region {
    id: RegionId,
    bytes: u64,
    /// Whose data it has ever held.
    tenant: Option<TenantId>,
    owner: Option<ClassId>,
    slots: u32,
    /// Slots from here on were never used since the owner took the region.
    fresh: u32,
    free: Vec<u16>,
    /// Frame of each slot below `fresh`.
    frames: Vec<FrameIndex>,
    evictable: u32,
    partial_at: u32,
}

#[derive(Debug)]
struct Class {
    tenant: TenantId,
    slot_bytes: u64,
    /// Shapes that use the class.
    shapes: u32,
    /// Its regions that have free slots.
    partial: Vec<u16>,
}

impl Region {
    fn used(&self) -> u32 {
        self.fresh - self.free.len() as u32
    }

    fn full(&self) -> bool {
        self.used() == self.slots
    }
}

impl Arena {
    /// An arena of these regions, all free. Regions beyond the limit are not used.
    pub(super) fn new(regions: &[(RegionId, u64)], eviction: EvictionKind) -> Arena {
        let regions: Vec<Region> = regions
            .iter()
            .take(REGIONS_MAX)
            .map(|(id, bytes)| Region {
                id: *id,
                bytes: *bytes,
                tenant: None,
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
            idle: BTreeSet::new(),
            classes: Vec::new(),
            order: eviction.build(),
            regions,
        }
    }

    /// Bytes of all regions.
    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Bytes of slots in use.
    pub(super) fn used_bytes(&self) -> u64 {
        self.used_bytes
    }

    /// Bytes of the largest region: no slot can be larger.
    pub(super) fn region_bytes_max(&self) -> u64 {
        self.regions.iter().map(|region| region.bytes).max().unwrap_or(0)
    }

    /// Keeps so many bytes for a tenant, in whole regions.
    pub(super) fn reserve(&mut self, tenant: TenantId, bytes: u64) {
        let regions = bytes.div_ceil(self.region_bytes_min());
        self.reservations.reserve(tenant, regions);
    }

    /// Whether so much can be kept for all tenants.
    pub(super) fn check_reservations(&self, quotas: &[Quota]) -> Result<u64, QuotaError> {
        quota::check_reservations(self.bytes, self.region_bytes_min(), quotas.iter().copied())
    }

    /// Whether a tenant's blocks may come here though no engine of this node has asked for them. A region that they take is
    /// the tenant's for good, so one that has none gets the first only when enough is left for those who come with engines:
    /// of regions that nobody has had and nobody is owed, half of all and two at the least.
    pub(super) fn may_take_unasked(&self, tenant: TenantId) -> bool {
        let left_wanted = (self.regions.len() as u64).div_ceil(2).max(2);
        self.reservations.has_own(tenant, self.fresh)
            || self.reservations.left_after_one(self.fresh) >= left_wanted
    }

    fn region_bytes_min(&self) -> u64 {
        self.regions.iter().map(|region| region.bytes).min().unwrap_or(1).max(1)
    }

    /// The class of a tenant's slots of a size; one shape more uses it.
    pub(super) fn join_class(&mut self, tenant: TenantId, slot_bytes: u64) -> ClassId {
        let same = |class: &Class| class.tenant == tenant && class.slot_bytes == slot_bytes;
        let at = self.classes.iter().position(same).or_else(|| {
            // A class without shapes has no frames, hence no regions.
            let vacant = self.classes.iter().position(|class| class.shapes == 0)?;
            self.classes[vacant] = Class::new(tenant, slot_bytes);
            Some(vacant)
        });
        let at = at.unwrap_or_else(|| {
            self.classes.push(Class::new(tenant, slot_bytes));
            self.classes.len() - 1
        });
        self.classes[at].shapes += 1;
        ClassId(at as u16)
    }

    /// One shape fewer uses the class.
    pub(super) fn leave_class(&mut self, class: ClassId) {
        self.class_mut(class).shapes -= 1;
    }

    /// Takes a free slot, from the class's regions or from a region without an owner.
    pub(super) fn allocate(&mut self, class: ClassId) -> Option<Place> {
        let region = match self.class(class).partial.last() {
            Some(region) => *region,
            None => self.take_region(class)?,
        };
        let slot_bytes = self.class(class).slot_bytes;
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
        Some(Place { region, slot })
    }

    /// Notes which frame describes a slot.
    pub(super) fn set_frame(&mut self, place: Place, frame: FrameIndex) {
        self.regions[usize::from(place.region)].frames[usize::from(place.slot)] = frame;
    }

    /// Gives a slot back. It must not be evictable.
    pub(super) fn free(&mut self, place: Place) {
        let region = &mut self.regions[usize::from(place.region)];
        let owner = region.owner.expect("a region with a used slot has an owner");
        region.free.push(place.slot);
        region.frames[usize::from(place.slot)] = FrameIndex::NONE;
        let empty = region.used() == 0;
        let listed = region.partial_at != NOT_PARTIAL;
        self.used_bytes -= self.class(owner).slot_bytes;
        if empty {
            self.disown(place.region);
        } else if !listed {
            self.enter_partial(place.region, owner);
        }
        self.note_idle(place.region);
    }

    /// Makes a frame's slot evictable.
    pub(super) fn add_evictable(&mut self, place: Place, frame: FrameIndex, class: u8) {
        let owner = self.owner(place);
        self.regions[usize::from(place.region)].evictable += 1;
        self.note_idle(place.region);
        self.order.insert(EntryIndex(frame.0), Standing { group: Group(owner.0), class });
    }

    /// Makes an evictable frame the next of its class to go.
    pub(super) fn put_first(&mut self, place: Place, frame: FrameIndex, class: u8) {
        let group = Group(self.owner(place).0);
        self.order.put_back(EntryIndex(frame.0), Standing { group, class });
    }

    /// Makes an evictable frame the one that goes immediately before `successor`.
    pub(super) fn order_before(&mut self, place: Place, frame: FrameIndex, class: u8, successor: FrameIndex) {
        let group = Group(self.owner(place).0);
        let standing = Standing { group, class };
        self.order.insert_before(EntryIndex(frame.0), standing, EntryIndex(successor.0));
    }

    /// Notes a use of a frame; nothing happens when it is not evictable.
    pub(super) fn touch(&mut self, frame: FrameIndex) {
        self.order.touch(EntryIndex(frame.0));
    }

    /// Makes it not evictable.
    pub(super) fn remove_evictable(&mut self, place: Place, frame: FrameIndex) {
        self.regions[usize::from(place.region)].evictable -= 1;
        self.note_idle(place.region);
        self.order.remove(EntryIndex(frame.0));
    }

    /// The frame of the class that should go next; it is no longer evictable once `take_victim` is told its place.
    pub(super) fn victim(&mut self, class: ClassId) -> Option<FrameIndex> {
        self.order.victim(Group(class.0)).map(|victim| FrameIndex(victim.0))
    }

    /// The frame that should go next of any class of the class's tenant, this class first.
    pub(super) fn victim_of_tenant(&mut self, class: ClassId) -> Option<FrameIndex> {
        let tenant = self.class(class).tenant;
        self.victim(class).or_else(|| self.any_victim(tenant))
    }

    /// The frame that should go next of some class of a tenant. O(classes).
    pub(super) fn any_victim(&mut self, tenant: TenantId) -> Option<FrameIndex> {
        let of_tenant = |at: &u16| self.classes[usize::from(*at)].tenant == tenant;
        let classes: Vec<u16> = (0..self.classes.len() as u16).filter(of_tenant).collect();
        classes.into_iter().find_map(|class| self.victim(ClassId(class)))
    }

    /// Completes [`Arena::victim`].
    pub(super) fn take_victim(&mut self, place: Place) {
        self.regions[usize::from(place.region)].evictable -= 1;
        self.note_idle(place.region);
    }

    /// Keeps the set of regions in which everything can be evicted.
    fn note_idle(&mut self, region: u16) {
        let state = &self.regions[usize::from(region)];
        if state.owner.is_some() && state.evictable == state.used() {
            self.idle.insert(region);
        } else {
            self.idle.remove(&region);
        }
    }

    /// A region of another class of the same tenant that the class could use and in which everything can be
    /// evicted: its frames. The emptiest, to lose the least. Looks at such regions only: in an arena that is full of
    /// what cannot go, that is at none.
    pub(super) fn reclaimable(&self, class: ClassId) -> Option<Vec<FrameIndex>> {
        let Class { tenant, slot_bytes, .. } = self.class(class);
        self.idle
            .iter()
            .map(|region| &self.regions[usize::from(*region)])
            .filter(|region| region.owner.is_some_and(|owner| owner != class))
            .filter(|region| region.tenant == Some(*tenant) && region.bytes >= *slot_bytes)
            .min_by_key(|region| u64::from(region.used()) * region.bytes / u64::from(region.slots))
            .map(|region| region.frames.iter().copied().filter(|frame| *frame != FrameIndex::NONE).collect())
    }

    /// Address of a slot.
    pub(super) fn slot(&self, place: Place) -> ArenaSlot {
        let region = &self.regions[usize::from(place.region)];
        let bytes = self.class(self.owner(place)).slot_bytes;
        ArenaSlot { region: region.id, offset: u64::from(place.slot) * bytes, bytes }
    }

    /// Identity of the region at a position.
    pub(super) fn region_id(&self, region: u16) -> RegionId {
        self.regions[usize::from(region)].id
    }

    /// Evictable slots. Whether one frame is evictable is known to the order only.
    pub(super) fn evictable(&self) -> usize {
        self.order.len()
    }

    /// Checks what must always hold.
    pub(super) fn audit(&self) -> Result<(), String> {
        let mut used_bytes = 0;
        for (at, region) in self.regions.iter().enumerate() {
            let name = region.id.0;
            let Some(owner) = region.owner else {
                if !self.unowned.contains(&(at as u16)) || region.fresh != 0 {
                    return Err(format!("region {name} has no owner but is not free"));
                }
                continue;
            };
            let class = self.class(owner);
            let held = region.frames.iter().filter(|frame| **frame != FrameIndex::NONE).count();
            if held != region.used() as usize || region.used() == 0 || region.fresh > region.slots {
                return Err(format!("region {name}: {held} frames, {} used slots", region.used()));
            }
            if region.tenant != Some(class.tenant) || region.evictable > region.used() {
                return Err(format!("region {name}: wrong tenant, or more evictable slots than used ones"));
            }
            if u64::from(region.slots) * class.slot_bytes > region.bytes {
                return Err(format!("region {name} is cut into more slots than fit"));
            }
            let listed = class.partial.get(region.partial_at as usize) == Some(&(at as u16));
            if listed == region.full() {
                return Err(format!("region {name} is wrongly listed as having free slots, or not"));
            }
            used_bytes += u64::from(region.used()) * class.slot_bytes;
        }
        let fresh = self.regions.iter().filter(|region| region.tenant.is_none()).count() as u64;
        if fresh != self.fresh {
            return Err(format!("{fresh} regions were nobody's, {} counted", self.fresh));
        }
        let idle = |region: &Region| region.owner.is_some() && region.evictable == region.used();
        let idle: BTreeSet<u16> =
            (0..).zip(&self.regions).filter(|(_, region)| idle(region)).map(|(at, _)| at).collect();
        if idle != self.idle {
            return Err(format!("regions {:?} are idle, not {:?}", idle, self.idle));
        }
        let evictable: u64 = self.regions.iter().map(|region| u64::from(region.evictable)).sum();
        if evictable != self.evictable() as u64 {
            return Err(format!("{evictable} evictable slots by region, {} by policy", self.evictable()));
        }
        if used_bytes != self.used_bytes || used_bytes > self.bytes {
            return Err(format!(
                "{used_bytes} used bytes counted, {} kept, {} there",
                self.used_bytes, self.bytes
            ));
        }
        Ok(())
    }

    fn class(&self, class: ClassId) -> &Class {
        &self.classes[usize::from(class.0)]
    }

    fn class_mut(&mut self, class: ClassId) -> &mut Class {
        &mut self.classes[usize::from(class.0)]
    }

    fn owner(&self, place: Place) -> ClassId {
        self.regions[usize::from(place.region)].owner.expect("a region with a used slot has an owner")
    }

    /// Gives a region without an owner to a class; one that held this tenant's data before, when there is one.
    fn take_region(&mut self, class: ClassId) -> Option<u16> {
        let Class { tenant, slot_bytes, .. } = *self.class(class);
        let suits = |region: &u16, wanted: Option<TenantId>| {
            let state = &self.regions[usize::from(*region)];
            state.tenant == wanted && state.bytes >= slot_bytes
        };
        let at = self.unowned.iter().rposition(|region| suits(region, Some(tenant))).or_else(|| {
            let may_own = self.fresh > 0 && self.reservations.may_own(tenant, self.fresh);
            self.unowned.iter().rposition(|region| may_own && suits(region, None))
        })?;
        let region = self.unowned.swap_remove(at);
        let state = &mut self.regions[usize::from(region)];
        if state.tenant.is_none() {
            self.fresh -= 1;
            self.reservations.own(tenant);
        }
        state.tenant = Some(tenant);
        state.owner = Some(class);
        state.slots = (state.bytes / slot_bytes).min(SLOTS_PER_REGION_MAX) as u32;
        self.enter_partial(region, class);
        Some(region)
    }

    fn disown(&mut self, region: u16) {
        self.leave_partial(region);
        let state = &mut self.regions[usize::from(region)];
        state.owner = None;
        state.fresh = 0;
        state.free.clear();
        state.frames.clear();
        self.unowned.push(region);
    }

    fn enter_partial(&mut self, region: u16, class: ClassId) {
        let partial = &mut self.class_mut(class).partial;
        partial.push(region);
        let at = partial.len() as u32 - 1;
        self.regions[usize::from(region)].partial_at = at;
    }

    fn leave_partial(&mut self, region: u16) {
        let state = &mut self.regions[usize::from(region)];
        let at = std::mem::replace(&mut state.partial_at, NOT_PARTIAL);
        let Some(owner) = state.owner.filter(|_| at != NOT_PARTIAL) else { return };
        let partial = &mut self.class_mut(owner).partial;
        partial.swap_remove(at as usize);
        if let Some(moved) = partial.get(at as usize).copied() {
            self.regions[usize::from(moved)].partial_at = at;
        }
    }
}

impl Class {
    fn new(tenant: TenantId, slot_bytes: u64) -> Class {
        Class { tenant, slot_bytes, shapes: 0, partial: Vec::new() }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    const SLOT: u64 = 8192;

    fn arena(regions: u16) -> Arena {
        let regions: Vec<_> = (0..regions).map(|region| (RegionId(region), 4 * SLOT)).collect();
        Arena::new(&regions, EvictionKind::default())
    }

    #[test]
    fn blocks_do_not_come_unasked_for_a_region_that_is_owed_and_that_others_have() {
        let (mut arena, engines, owed) = (arena(3), TenantId(1), TenantId(2));
        arena.reserve(owed, 4 * SLOT);
        assert!(arena.may_take_unasked(owed));
        arena.reserve(owed, 0);
        let class = arena.join_class(engines, SLOT);
        assert_eq!(std::iter::from_fn(|| arena.allocate(class)).count(), 12);
        arena.reserve(owed, 4 * SLOT);
        assert!(!arena.may_take_unasked(owed), "all regions are another's for good");
        assert!(arena.may_take_unasked(engines));
    }

    #[test]
    fn every_slot_is_given_once_and_comes_back() {
        let mut arena = arena(3);
        let class = arena.join_class(TenantId::DEFAULT, SLOT);
        let places: BTreeSet<Place> = std::iter::from_fn(|| {
            let place = arena.allocate(class)?;
            arena.set_frame(place, FrameIndex(0));
            Some(place)
        })
        .collect();
        assert_eq!(places.len(), 12);
        let slots: BTreeSet<_> = places.iter().map(|place| arena.slot(*place)).collect();
        assert_eq!(slots.len(), 12);
        assert_eq!((arena.used_bytes(), arena.bytes()), (12 * SLOT, 12 * SLOT));
        for place in places {
            arena.free(place);
            arena.audit().expect("consistent");
        }
        assert_eq!(arena.used_bytes(), 0);
    }

    #[test]
    fn an_emptied_region_serves_another_slot_size() {
        let mut arena = arena(1);
        let small = arena.join_class(TenantId::DEFAULT, SLOT);
        let large = arena.join_class(TenantId::DEFAULT, 2 * SLOT);
        let place = arena.allocate(small).expect("free");
        assert_eq!(arena.allocate(large), None);
        arena.free(place);
        let place = arena.allocate(large).expect("free again");
        assert_eq!(arena.slot(place).bytes, 2 * SLOT);
    }

    #[test]
    fn a_region_that_held_a_tenants_data_is_not_given_to_another_tenant() {
        let mut arena = arena(1);
        let first = arena.join_class(TenantId(1), SLOT);
        let second = arena.join_class(TenantId(2), SLOT);
        let place = arena.allocate(first).expect("free");
        arena.free(place);
        assert_eq!(arena.allocate(second), None);
        assert!(arena.allocate(first).is_some());
    }

    #[test]
    fn who_has_no_region_gets_one_unasked_only_while_half_of_them_are_left() {
        let mut arena = arena(5);
        let first = arena.join_class(TenantId(1), SLOT);
        assert!(arena.may_take_unasked(TenantId(1)), "4 are left then");
        arena.reserve(TenantId(9), 4 * SLOT);
        assert!(arena.may_take_unasked(TenantId(1)), "3 are left then that are owed to nobody");
        arena.allocate(first).expect("free");
        assert!(arena.may_take_unasked(TenantId(1)), "it has one");
        assert!(!arena.may_take_unasked(TenantId(2)));
        assert!(arena.may_take_unasked(TenantId(9)), "one is kept for it");
        assert!(!self::arena(2).may_take_unasked(TenantId(1)), "one would be left");
    }

    #[test]
    fn only_a_region_in_which_everything_can_go_is_reclaimable() {
        let mut arena = arena(1);
        let small = arena.join_class(TenantId::DEFAULT, SLOT);
        let large = arena.join_class(TenantId::DEFAULT, 2 * SLOT);
        let places: Vec<Place> = (0..2)
            .map(|frame| {
                let place = arena.allocate(small).expect("free");
                arena.set_frame(place, FrameIndex(frame));
                place
            })
            .collect();
        arena.add_evictable(places[0], FrameIndex(0), 1);
        assert_eq!(arena.reclaimable(large), None);
        arena.add_evictable(places[1], FrameIndex(1), 1);
        assert_eq!(arena.reclaimable(large), Some(vec![FrameIndex(0), FrameIndex(1)]));
        assert_eq!(arena.reclaimable(small), None, "a class evicts its own slots one by one");
        arena.audit().expect("consistent");
    }

    #[test]
    fn a_slot_larger_than_every_region_is_never_given() {
        let mut arena = arena(2);
        let class = arena.join_class(TenantId::DEFAULT, 5 * SLOT);
        assert_eq!(arena.allocate(class), None);
        assert_eq!(arena.region_bytes_max(), 4 * SLOT);
    }
}
