//! Scenarios: regions of the arena that change tenants.

use std::time::Duration;

use reprise_agent_core::effect::{ArenaSlot, LoadedBlock, PlaceKind, RegionId, Reply};
use reprise_agent_core::event::{FillError, Priority, Request, Scope};
use reprise_agent_core::{Settings, TenantQuotas};
use reprise_policy::{Quota, SessionId, TenantId, Tier};

use crate::engine::RequestKind;
use crate::harness::{Faults, Harness, Setup, key, keys, large_layout, small_layout};
use crate::jobs::Job;

const A: TenantId = TenantId(1);
const B: TenantId = TenantId(2);
const C: TenantId = TenantId(3);

impl Harness {
    /// Checks that the memory of no slot in a reply has ever had a slot of another tenant.
    pub(crate) fn assert_own_regions(&mut self, session: SessionId, reply: &Reply) {
        let tenant = self.engines[&session].tenant;
        let places: Vec<ArenaSlot> = match reply {
            Reply::Reserved { leases, .. } => leases.iter().filter_map(|(_, place)| place.arena()).collect(),
            Reply::Loaded { blocks, .. } => blocks
                .iter()
                .filter_map(|block| match block {
                    LoadedBlock::Ok { place, .. } => place.arena(),
                    LoadedBlock::Lost(_) => None,
                })
                .collect(),
            _ => return,
        };
        for slot in places {
            let of = *self.region_tenants.entry(slot.region).or_insert(tenant);
            assert_eq!(of, tenant, "{slot:?} lies in memory of another tenant");
        }
    }
}

fn regions(regions: u16) -> Harness {
    let settings = Settings { pool_free_permille: 0, ..Setup::default().settings };
    Harness::new(Setup { disks: vec![8 << 20], regions, settings, ..Setup::default() })
}

fn save_durably(harness: &mut Harness, session: SessionId, numbers: std::ops::Range<u64>) {
    let keys = keys(numbers);
    harness.reserve(session, keys.len() as u32);
    harness.commit(session, &keys, Priority::Normal);
    harness.pass(Duration::from_millis(6));
    harness.finish_jobs();
}

fn reserved(harness: &Harness, session: SessionId) -> usize {
    harness.engines[&session].reserved.len()
}

fn abort_all(harness: &mut Harness, session: SessionId) {
    let reserved = std::mem::take(&mut harness.engines.get_mut(&session).expect("open").reserved);
    let leases = reserved.into_iter().map(|(lease, _)| lease).collect();
    harness.request(session, RequestKind::Other, Request::Abort { leases });
}

fn on(harness: &Harness, tier: Tier, numbers: std::ops::Range<u64>) -> usize {
    numbers.filter(|number| harness.announced.contains(&(key(*number), tier))).count()
}

fn last_reply(harness: &Harness, session: SessionId) -> &Reply {
    &harness.engines[&session].replies.last().expect("answered").1
}

#[test]
fn tenant_gets_the_memory_of_a_tenant_whose_sessions_have_ended() {
    let mut harness = regions(4);
    let a = harness.open_session(A, large_layout());
    save_durably(&mut harness, a, 0..16);
    assert_eq!(on(&harness, Tier::Dram, 0..16), 16);
    harness.close_session(a);
    let b = harness.open_session(B, large_layout());
    harness.finish_jobs();
    for _ in 0..4 {
        harness.reserve(b, 16);
        harness.finish_jobs();
    }
    assert_eq!(reserved(&harness, b), 16, "no session of the other tenant is left");
    assert_eq!((on(&harness, Tier::Dram, 0..16), on(&harness, Tier::Nvme, 0..16)), (0, 16));
    let counters = harness.core.counters();
    assert_eq!((counters.regions_retired, counters.regions_renewed), (4, 4));
}

#[test]
fn tenant_with_a_session_gets_one_region_of_a_tenant_that_maps_all() {
    let mut harness = regions(4);
    let a = harness.open_session(A, large_layout());
    save_durably(&mut harness, a, 0..16);
    let b = harness.open_session(B, large_layout());
    harness.finish_jobs();
    harness.reserve(b, 16);
    assert_eq!(reserved(&harness, b), 4, "further regions are mapped");
    assert_eq!((on(&harness, Tier::Dram, 0..16), on(&harness, Tier::Nvme, 0..16)), (12, 16));
    harness.load(a, &keys(0..16), Duration::ZERO, Scope::Local);
    harness.finish_jobs();
    let Reply::Loaded { blocks, .. } = last_reply(&harness, a) else { panic!("a load") };
    let loaded = blocks.iter().filter(|block| matches!(block, LoadedBlock::Ok { .. })).count();
    assert_eq!(loaded, 12, "the tenant has three regions, and the rest of the load finds no space");
}

#[test]
fn region_in_use_passes_when_its_last_reader_ends() {
    let mut harness = regions(2);
    let a = harness.open_session(A, large_layout());
    save_durably(&mut harness, a, 0..8);
    harness.load(a, &keys(0..8), Duration::ZERO, Scope::Local);
    let b = harness.open_session(B, large_layout());
    harness.finish_jobs();
    harness.reserve(b, 1);
    assert_eq!(reserved(&harness, b), 0, "all blocks are being read");
    let load = *harness.engines[&a].loads.keys().next().expect("held");
    harness.release(a, load);
    harness.finish_jobs();
    harness.reserve(b, 8);
    assert_eq!(reserved(&harness, b), 4);
    assert_eq!(on(&harness, Tier::Dram, 0..8), 4, "the other region keeps its blocks");
}

#[test]
fn further_readers_do_not_keep_a_region() {
    let mut harness = regions(2);
    let a = harness.open_session(A, large_layout());
    save_durably(&mut harness, a, 0..8);
    harness.load(a, &keys(0..8), Duration::ZERO, Scope::Local);
    let b = harness.open_session(B, large_layout());
    let first = *harness.engines[&a].loads.keys().next().expect("held");
    harness.load(a, &keys(0..8), Duration::ZERO, Scope::Local);
    harness.finish_jobs();
    assert_eq!(harness.engines[&a].loads.len(), 2, "the same blocks are in use without a pause");
    harness.release(a, first);
    harness.finish_jobs();
    harness.reserve(b, 8);
    assert_eq!(reserved(&harness, b), 4);
}

#[test]
fn region_stays_with_its_tenant_if_a_lost_device_may_write_to_it() {
    let mut harness = regions(2);
    let a = harness.open_session(A, large_layout());
    save_durably(&mut harness, a, 0..8);
    harness.request(a, RequestKind::Other, Request::Trim);
    harness.load(a, &keys(0..8), Duration::ZERO, Scope::Local);
    let b = harness.open_session(B, large_layout());
    for region in [RegionId(0), RegionId(1)] {
        let is_in = |job: &Job| matches!(job, Job::Read { read, .. } if read.slot.region == region);
        let at = harness.jobs.iter().position(is_in).expect("a slot that is being filled");
        let Job::Read { read, .. } = &harness.jobs[at] else { unreachable!("found") };
        let slot = read.slot;
        harness.memory.strand(slot);
        harness.fail(at, FillError::Stranded);
    }
    harness.finish_jobs();
    let load = *harness.engines[&a].loads.keys().next().expect("held");
    harness.release(a, load);
    harness.finish_jobs();
    harness.reserve(b, 1);
    assert_eq!((reserved(&harness, b), harness.core.counters().regions_renewed), (0, 0));
    harness.reserve(a, 8);
    assert_eq!(reserved(&harness, a), 6, "the tenant uses the rest of both regions");
}

#[test]
fn unsaved_blocks_become_durable_before_their_region_passes() {
    let mut harness = regions(2);
    let a = harness.open_session(A, large_layout());
    harness.reserve(a, 8);
    harness.commit(a, &keys(0..8), Priority::Normal);
    let b = harness.open_session(B, large_layout());
    assert!(!harness.jobs.iter().any(|job| matches!(job, Job::Renew(_))), "nothing is durable yet");
    harness.finish_jobs();
    harness.reserve(b, 8);
    assert_eq!((reserved(&harness, b), on(&harness, Tier::Nvme, 0..8)), (4, 8));
}

#[test]
fn rejects_a_tenant_beyond_the_number_of_regions_with_the_numbers() {
    let mut harness = regions(2);
    for (tenant, first) in [(A, 0), (B, 100)] {
        let session = harness.open_session(tenant, large_layout());
        save_durably(&mut harness, session, first..first + 4);
    }
    let c = harness.open_session(C, large_layout());
    harness.request(c, RequestKind::Other, Request::Reserve { count: 1, kind: PlaceKind::Arena });
    let Reply::BadRequest(text) = last_reply(&harness, c) else { panic!("no region is left") };
    for part in ["all 2 regions", "arena.bytes", "arena.region_bytes", "dram.reserved"] {
        assert!(text.contains(part), "{part}: {text}");
    }
}

#[test]
fn reserved_regions_never_pass() {
    let bytes = 8 * large_layout().slot_bytes();
    let quota = Quota::new(bytes, u64::MAX).expect("below the limit");
    let tenants = vec![TenantQuotas { tenant: A, dram: quota, nvme: Quota::UNLIMITED }];
    let settings = Settings { tenants, pool_free_permille: 0, ..Setup::default().settings };
    let setup = Setup { disks: vec![8 << 20], regions: 2, settings, ..Setup::default() };
    let mut harness = Harness::new(setup);
    let a = harness.open_session(A, large_layout());
    save_durably(&mut harness, a, 0..8);
    let b = harness.open_session(B, large_layout());
    harness.request(b, RequestKind::Other, Request::Reserve { count: 1, kind: PlaceKind::Arena });
    assert!(matches!(last_reply(&harness, b), Reply::BadRequest(text) if text.contains("all 2 regions")));
    assert_eq!(on(&harness, Tier::Dram, 0..8), 8);
}

#[test]
fn region_stays_with_its_tenant_if_the_memory_cannot_be_replaced() {
    let mut harness = regions(2);
    let a = harness.open_session(A, large_layout());
    save_durably(&mut harness, a, 0..8);
    harness.faults.renewal = 1000;
    let b = harness.open_session(B, large_layout());
    harness.finish_jobs();
    harness.reserve(b, 1);
    assert_eq!((reserved(&harness, b), harness.jobs.len()), (0, 0), "no further attempt at once");
    harness.reserve(a, 8);
    assert_eq!(reserved(&harness, a), 8);
    harness.faults.renewal = 0;
    abort_all(&mut harness, a);
    harness.pass(Duration::from_secs(2));
    harness.reserve(b, 1);
    harness.finish_jobs();
    harness.reserve(b, 1);
    assert_eq!(reserved(&harness, b), 1);
}

/// Random sessions of four tenants on few regions. The harness checks that no tenant gets a slot in memory that had a
/// slot of another one, and the audit after each event that shares and stages fit the regions.
#[test]
fn tenants_with_sessions_always_get_memory_in_the_end() {
    for seed in 0..60 {
        let faults = Faults { renewal: 100, read: 20, write_media: 5, ..Faults::default() };
        let setup = Setup { seed, regions: 5, disks: vec![16 << 20], faults, ..Setup::default() };
        let mut harness = Harness::new(setup);
        let mut open: Vec<(TenantId, SessionId)> = Vec::new();
        for step in 0..300_u64 {
            let tenant = 1 + harness.rng.below(4) as u16;
            match harness.rng.below(10) {
                0 if open.len() < 6 => {
                    let layout = if harness.rng.chance(300) { small_layout() } else { large_layout() };
                    open.push((TenantId(tenant), harness.open_session(TenantId(tenant), layout)));
                }
                1 if open.len() > 1 => {
                    let (_, session) = open.swap_remove(harness.rng.below(open.len()));
                    harness.close_session(session);
                }
                2 => harness.pass(Duration::from_millis(700)),
                3 | 4 if !harness.jobs.is_empty() => {
                    let job = harness.rng.below(harness.jobs.len());
                    harness.advance(job);
                }
                _ if open.is_empty() => {}
                _ => work(&mut harness, &open, step),
            }
            harness.read_all();
        }
        harness.faults = Faults::default();
        harness.finish_jobs();
        settle(&mut harness, &open, seed);
    }
}

/// Saves or loads in a random session.
fn work(harness: &mut Harness, open: &[(TenantId, SessionId)], step: u64) {
    let (tenant, session) = open[harness.rng.below(open.len())];
    let is_small = harness.engines[&session].layout == small_layout();
    let base = u64::from(tenant.0) * 100 + if is_small { crate::harness::SMALL_KEYS_FROM } else { 0 };
    let first = base + harness.rng.below(40) as u64;
    let range = keys(first..first + 1 + step % 6);
    match harness.rng.below(4) {
        0 => drop(harness.load(session, &range, Duration::ZERO, Scope::Local)),
        1 => {
            if let Some(load) = harness.engines[&session].loads.keys().next().copied() {
                harness.release(session, load);
            }
        }
        _ => {
            harness.reserve(session, range.len() as u32);
            harness.commit(session, &range, Priority::Normal);
        }
    }
}

/// Ends all that is in use; then each tenant with a session gets a slot.
fn settle(harness: &mut Harness, open: &[(TenantId, SessionId)], seed: u64) {
    // Longer than reservations and loads last.
    harness.pass(Duration::from_secs(601));
    harness.finish_jobs();
    for (_, session) in open {
        harness.engines.get_mut(session).expect("open").reserved.clear();
    }
    for (tenant, session) in open {
        for _ in 0..20 {
            if reserved(harness, *session) > 0 {
                break;
            }
            harness.reserve(*session, 1);
            harness.finish_jobs();
            harness.pass(Duration::from_secs(1));
            harness.finish_jobs();
        }
        assert!(reserved(harness, *session) > 0, "seed {seed}: {tenant:?} has no memory");
        // Another session of the tenant may need the region for blocks of another size.
        abort_all(harness, *session);
    }
}
