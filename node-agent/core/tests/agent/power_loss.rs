//! Power loss: repeated crashes at random times of an agent whose devices lose unsynced writes.
//!
//! Every block that was announced as durable before the crash is readable afterwards with its committed
//! content. Every other block is a clean miss or readable.

use std::collections::BTreeSet;
use std::time::Duration;

use reprise_agent_core::Settings;
use reprise_agent_core::effect::{LoadedBlock, LossReason, Source};
use reprise_agent_core::event::{Event, Scope};
use reprise_policy::{BlockKey, Layout, Quota, SlotSet, TenantId, Tier};

use crate::harness::{Faults, Harness, Setup, keys, large_layout, layout_of, small_layout};
use crate::random::{TENANTS, finish_all, random_setup, step};
use crate::rng::{for_seeds, has_fixed_seeds};

const QUIET: Faults = Faults {
    renewal: 0,
    write_media: 0,
    read: 0,
    refused: 0,
    fetch: 60,
    lookup: 80,
    place: 0,
    check: 0,
    directory_stale: 60,
    device_lost: 0,
    stranded: 0,
};

fn promised(harness: &Harness) -> BTreeSet<BlockKey> {
    harness.announced.iter().filter(|(_, tier)| *tier == Tier::Nvme).map(|(key, _)| *key).collect()
}

/// Loads these keys of a tenant in small groups, from this node only; returns the keys that were found.
fn load_everything(
    harness: &mut Harness,
    tenant: TenantId,
    layout: Layout,
    all: &BTreeSet<BlockKey>,
) -> BTreeSet<BlockKey> {
    let all: Vec<BlockKey> = all.iter().copied().filter(|key| layout_of(key) == layout).collect();
    let session = harness.open_session(tenant, layout);
    let mut there = BTreeSet::new();
    for some in all.chunks(4) {
        harness.load(session, some, Duration::from_secs(1), Scope::Local);
        harness.finish_jobs();
        let engine = &harness.engines[&session];
        let (load, held) = engine.loads.iter().next().expect("answered");
        assert!(engine.progress(*load).done && engine.progress(*load).failed.is_empty());
        for (key, block) in held.keys.iter().zip(&held.blocks) {
            match block {
                LoadedBlock::Ok { source: Source::OwnDram | Source::OwnNvme, .. } => {
                    there.insert(*key);
                }
                LoadedBlock::Lost(LossReason::Miss) => {}
                other => panic!("{key}: neither readable nor a clean miss: {other:?}"),
            }
        }
        harness.read_all();
        let load = *load;
        harness.release(session, load);
    }
    harness.close_session(session);
    there
}

#[test]
fn after_power_loss_announced_durable_blocks_are_readable_and_others_clean_misses() {
    let survivors = std::cell::Cell::new(0);
    for_seeds(40, |seed| {
        let setup = random_setup(seed, QUIET);
        let disks = if setup.disks.is_empty() { vec![8 << 20] } else { setup.disks.clone() };
        let (mut settings, regions) = (setup.settings.clone(), 6);
        // Each tenant has two regions, to load blocks of two layouts.
        let two_regions = Quota::new(2 * setup.region_bytes, u64::MAX).expect("below the limit");
        settings.tenants.iter_mut().for_each(|quotas| quotas.dram = two_regions);
        let mut harness = Harness::new(Setup { disks, settings, regions, ..setup });
        for _ in 0..4 {
            let steps = 200 + harness.rng.below(600);
            for _ in 0..steps {
                step(&mut harness);
            }
            let promised = promised(&harness);
            harness = harness.crash();
            assert!(harness.announced.is_empty(), "recovered blocks are announced on request only");
            harness.apply(Event::InventoryWanted { slots: Box::new(SlotSet::ALL) });
            let found: BTreeSet<BlockKey> = self::promised(&harness);
            // A block whose free record was not durable reappears. If this exceeds its tenant's limit,
            // because its space was used on another device, a block is evicted at once.
            let evicted = harness.core.counters().nvme_evictions as usize;
            let gone: Vec<_> = promised.difference(&found).collect();
            assert!(gone.len() <= evicted, "durable blocks are missing: {gone:?}, {evicted} evicted");
            let expected: BTreeSet<BlockKey> =
                found.iter().copied().chain(keys(0..48)).chain(keys(1000..1048)).collect();
            let mut there = BTreeSet::new();
            for tenant in (0..TENANTS).map(TenantId) {
                for layout in [large_layout(), small_layout()] {
                    let found = load_everything(&mut harness, tenant, layout, &expected);
                    assert!(there.is_disjoint(&found), "a block belongs to one tenant");
                    there.extend(found);
                }
            }
            assert_eq!(there, found, "every indexed block is readable");
            survivors.set(survivors.get() + promised.len());
        }
        finish_all(&mut harness);
    });
    if has_fixed_seeds() {
        assert!(survivors.get() > 500, "only {} blocks were durable at a crash", survivors.get());
    }
}

#[test]
fn crash_right_after_the_notice_keeps_the_block() {
    for_seeds(20, |seed| {
        let mut harness = Harness::new(Setup { seed, ..Setup::default() });
        let session = harness.open_session(TenantId::DEFAULT, large_layout());
        harness.reserve(session, 3);
        harness.commit(session, &keys(0..3), Default::default());
        harness.pass(Duration::from_millis(6));
        while harness.engines[&session].notices.is_empty() {
            let job = harness.rng.below(harness.jobs.len());
            harness.advance(job);
        }
        assert_eq!(harness.engines[&session].notices[0].1, 3);
        let mut harness = harness.crash();
        let saved: BTreeSet<BlockKey> = keys(0..3).into_iter().collect();
        assert_eq!(load_everything(&mut harness, TenantId::DEFAULT, large_layout(), &saved), saved);
    });
}

#[test]
fn full_pool_accepts_writes_after_a_restart() {
    let settings = Settings { pool_free_permille: 100, ..Setup::default().settings };
    let mut harness = Harness::new(Setup { disks: vec![8 << 20], settings, ..Setup::default() });
    let session = harness.open_session(TenantId::DEFAULT, large_layout());
    for start in (0..240).step_by(4) {
        harness.reserve(session, 4);
        harness.commit(session, &keys(start..start + 4), Default::default());
        harness.pass(Duration::from_millis(6));
        harness.finish_jobs();
    }
    assert!(harness.core.counters().nvme_evictions > 0, "the pool was full");
    let promised = promised(&harness);
    let mut harness = harness.crash();
    harness.apply(Event::InventoryWanted { slots: Box::new(SlotSet::ALL) });
    assert!(self::promised(&harness).is_superset(&promised));
    let session = harness.open_session(TenantId::DEFAULT, large_layout());
    harness.reserve(session, 4);
    harness.commit(session, &keys(500..504), Default::default());
    harness.pass(Duration::from_millis(6));
    harness.finish_jobs();
    assert_eq!(harness.engines[&session].notices[0].1, 4, "new blocks become durable");
}
