//! Power loss: an agent on devices that lose what was not synced, killed at a random instant, again and again.
//!
//! What the directory was told to be on NVMe when the power failed is there afterwards, and reads as it was
//! committed; everything else is a clean miss.

use std::collections::BTreeSet;
use std::time::Duration;

use reprise_agent_core::agent::Settings;
use reprise_agent_core::effect::{LoadedBlock, LossReason, Source};
use reprise_agent_core::event::{Event, Scope};
use reprise_policy::{BlockKey, Layout, Quota, SlotSet, TenantId, Tier};

use crate::random::{TENANTS, random_setup, settle, step};
use crate::rng::{for_seeds, seed_wanted};
use crate::world::{Faults, Setup, World, keys, large_layout, layout_of, small_layout};

const QUIET: Faults = Faults {
    write_media: 0,
    read: 0,
    refused: 0,
    fetch: 60,
    lookup: 80,
    place: 0,
    check: 0,
    directory_lies: 60,
    device_lost: 0,
    stranded: 0,
};

fn promised(world: &World) -> BTreeSet<BlockKey> {
    world.announced.iter().filter(|(_, tier)| *tier == Tier::Nvme).map(|(key, _)| *key).collect()
}

/// A tenant loads these keys, as far as they have a layout, a few at a time, from this node only; returns those that were
/// there.
fn load_everything(
    world: &mut World,
    tenant: TenantId,
    layout: Layout,
    all: &BTreeSet<BlockKey>,
) -> BTreeSet<BlockKey> {
    let all: Vec<BlockKey> = all.iter().copied().filter(|key| layout_of(key) == layout).collect();
    let session = world.open_session(tenant, layout);
    let mut there = BTreeSet::new();
    for some in all.chunks(4) {
        world.load(session, some, Duration::from_secs(1), Scope::Local);
        world.finish_jobs();
        let engine = &world.engines[&session];
        let (load, held) = engine.loads.iter().next().expect("answered");
        assert!(engine.progress(*load).done && engine.progress(*load).failed.is_empty());
        for (key, block) in held.keys.iter().zip(&held.blocks) {
            match block {
                LoadedBlock::Ok { source: Source::OwnDram | Source::OwnNvme, .. } => {
                    there.insert(*key);
                }
                LoadedBlock::Lost(LossReason::Miss) => {}
                other => panic!("{key}: neither there nor a clean miss: {other:?}"),
            }
        }
        world.read_all();
        let load = *load;
        world.release(session, load);
    }
    world.close_session(session);
    there
}

#[test]
fn after_power_loss_what_was_announced_durable_is_there_and_the_rest_is_a_clean_miss() {
    let survivors = std::cell::Cell::new(0);
    for_seeds(40, |seed| {
        let setup = random_setup(seed, QUIET);
        let disks = if setup.disks.is_empty() { vec![8 << 20] } else { setup.disks.clone() };
        let (mut settings, regions) = (setup.settings.clone(), 6);
        // Every tenant has two regions, to load blocks of two layouts.
        let two_regions = Quota::new(2 * setup.region_bytes, u64::MAX).expect("below the limit");
        settings.tenants.iter_mut().for_each(|quotas| quotas.dram = two_regions);
        let mut world = World::new(Setup { disks, settings, regions, ..setup });
        for _ in 0..4 {
            let steps = 200 + world.rng.below(600);
            for _ in 0..steps {
                step(&mut world);
            }
            let promised = promised(&world);
            world = world.crash();
            assert!(world.announced.is_empty(), "nothing is announced before the control plane asks");
            world.apply(Event::InventoryWanted { slots: Box::new(SlotSet::ALL) });
            let found: BTreeSet<BlockKey> = self::promised(&world);
            // A block whose end was not durable yet comes back; where its tenant is beyond its limit with it, because what took
            // its room is on another device, one goes at once.
            let evicted = world.core.counters().nvme_evictions as usize;
            let gone: Vec<_> = promised.difference(&found).collect();
            assert!(gone.len() <= evicted, "durable blocks are gone: {gone:?}, {evicted} evicted");
            let looked_for: BTreeSet<BlockKey> =
                found.iter().copied().chain(keys(0..48)).chain(keys(1000..1048)).collect();
            let mut there = BTreeSet::new();
            for tenant in (0..TENANTS).map(TenantId) {
                for layout in [large_layout(), small_layout()] {
                    let of_tenant = load_everything(&mut world, tenant, layout, &looked_for);
                    assert!(there.is_disjoint(&of_tenant), "a block is one tenant's");
                    there.extend(of_tenant);
                }
            }
            assert_eq!(there, found, "what is in the index can be read");
            survivors.set(survivors.get() + promised.len());
        }
        settle(&mut world);
    });
    if seed_wanted().is_none() {
        assert!(survivors.get() > 500, "only {} blocks were durable at a crash", survivors.get());
    }
}

#[test]
fn a_crash_right_after_the_notice_keeps_the_block() {
    for_seeds(20, |seed| {
        let mut world = World::new(Setup { seed, ..Setup::default() });
        let session = world.open_session(TenantId::DEFAULT, large_layout());
        world.reserve(session, 3);
        world.commit(session, &keys(0..3), Default::default());
        world.pass(Duration::from_millis(6));
        while world.engines[&session].notices.is_empty() {
            let job = world.rng.below(world.jobs.len());
            world.advance(job);
        }
        assert_eq!(world.engines[&session].notices[0].1, 3);
        let mut world = world.crash();
        let saved: BTreeSet<BlockKey> = keys(0..3).into_iter().collect();
        assert_eq!(load_everything(&mut world, TenantId::DEFAULT, large_layout(), &saved), saved);
    });
}

#[test]
fn a_pool_that_was_written_full_comes_back_with_room() {
    let settings = Settings { pool_free_permille: 100, ..Setup::default().settings };
    let mut world = World::new(Setup { disks: vec![8 << 20], settings, ..Setup::default() });
    let session = world.open_session(TenantId::DEFAULT, large_layout());
    for start in (0..240).step_by(4) {
        world.reserve(session, 4);
        world.commit(session, &keys(start..start + 4), Default::default());
        world.pass(Duration::from_millis(6));
        world.finish_jobs();
    }
    assert!(world.core.counters().nvme_evictions > 0, "the pool was full");
    let promised = promised(&world);
    let mut world = world.crash();
    world.apply(Event::InventoryWanted { slots: Box::new(SlotSet::ALL) });
    assert!(self::promised(&world).is_superset(&promised));
    let session = world.open_session(TenantId::DEFAULT, large_layout());
    world.reserve(session, 4);
    world.commit(session, &keys(500..504), Default::default());
    world.pass(Duration::from_millis(6));
    world.finish_jobs();
    assert_eq!(world.engines[&session].notices[0].1, 4, "new blocks become durable");
}
