//! Tests of the allocation of slots and regions.

use std::collections::BTreeSet;

use super::*;

const SLOT: u64 = 8192;

fn arena(regions: u16) -> Arena {
    let regions: Vec<_> = (0..regions).map(|region| (RegionId(region), 4 * SLOT)).collect();
    Arena::new(&regions, EvictionPolicy::default())
}

#[test]
fn rejects_unrequested_replicas_when_other_tenants_hold_all_regions() {
    let (mut arena, engines, owed) = (arena(3), TenantId(1), TenantId(2));
    arena.reserve(owed, 4 * SLOT);
    assert!(arena.may_accept_replicas(owed));
    arena.reserve(owed, 0);
    let group = arena.join_slot_group(engines, SLOT);
    assert_eq!(std::iter::from_fn(|| arena.allocate(group)).count(), 12);
    arena.reserve(owed, 4 * SLOT);
    assert!(!arena.may_accept_replicas(owed), "another tenant holds all regions permanently");
    assert!(arena.may_accept_replicas(engines));
}

#[test]
fn allocates_every_slot_once_and_again_after_free() {
    let mut arena = arena(3);
    let group = arena.join_slot_group(TenantId::DEFAULT, SLOT);
    let places: BTreeSet<RegionSlot> = std::iter::from_fn(|| {
        let place = arena.allocate(group)?;
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
fn empty_region_serves_another_slot_size() {
    let mut arena = arena(1);
    let small = arena.join_slot_group(TenantId::DEFAULT, SLOT);
    let large = arena.join_slot_group(TenantId::DEFAULT, 2 * SLOT);
    let place = arena.allocate(small).expect("free");
    assert_eq!(arena.allocate(large), None);
    arena.free(place);
    let place = arena.allocate(large).expect("free again");
    assert_eq!(arena.slot(place).bytes, 2 * SLOT);
}

#[test]
fn region_with_data_of_a_tenant_never_passes_to_another_tenant() {
    let mut arena = arena(1);
    let first = arena.join_slot_group(TenantId(1), SLOT);
    let second = arena.join_slot_group(TenantId(2), SLOT);
    let place = arena.allocate(first).expect("free");
    arena.free(place);
    assert_eq!(arena.allocate(second), None);
    assert!(arena.allocate(first).is_some());
}

#[test]
fn accepts_unrequested_replicas_only_while_half_of_the_regions_remain() {
    let mut arena = arena(5);
    let first = arena.join_slot_group(TenantId(1), SLOT);
    assert!(arena.may_accept_replicas(TenantId(1)), "four regions remain");
    arena.reserve(TenantId(9), 4 * SLOT);
    assert!(arena.may_accept_replicas(TenantId(1)), "three unreserved regions remain");
    arena.allocate(first).expect("free");
    assert!(arena.may_accept_replicas(TenantId(1)), "the tenant owns a region");
    assert!(!arena.may_accept_replicas(TenantId(2)));
    assert!(arena.may_accept_replicas(TenantId(9)), "one region is reserved for the tenant");
    assert!(!self::arena(2).may_accept_replicas(TenantId(1)), "only one region would remain");
}

#[test]
fn reclaims_only_regions_whose_slots_are_all_evictable() {
    let mut arena = arena(1);
    let small = arena.join_slot_group(TenantId::DEFAULT, SLOT);
    let large = arena.join_slot_group(TenantId::DEFAULT, 2 * SLOT);
    let places: Vec<RegionSlot> = (0..2)
        .map(|frame| {
            let place = arena.allocate(small).expect("free");
            arena.set_frame(place, FrameIndex(frame));
            place
        })
        .collect();
    arena.add_evictable(places[0], FrameIndex(0), &Block::default());
    assert_eq!(arena.reclaimable(large), None);
    arena.add_evictable(places[1], FrameIndex(1), &Block::default());
    assert_eq!(arena.reclaimable(large), Some(vec![FrameIndex(0), FrameIndex(1)]));
    assert_eq!(arena.reclaimable(small), None, "a group evicts its own slots one by one");
    arena.audit().expect("consistent");
}

#[test]
fn never_allocates_a_slot_larger_than_every_region() {
    let mut arena = arena(2);
    let group = arena.join_slot_group(TenantId::DEFAULT, 5 * SLOT);
    assert_eq!(arena.allocate(group), None);
    assert_eq!(arena.region_bytes_max(), 4 * SLOT);
}
