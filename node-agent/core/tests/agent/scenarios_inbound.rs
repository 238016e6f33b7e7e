//! Scenarios: blocks that other nodes offer.

use std::time::Duration;

use reprise_agent_core::effect::{CommitStatus, Diagnostic, LoadedBlock, Reply, Source};
use reprise_agent_core::event::{Event, FillError, Grant, Priority, Request, Scope};
use reprise_agent_core::limits::OFFERED_SIZE_CLASSES_MAX;
use reprise_agent_core::{Settings, TenantQuotas};
use reprise_policy::{
    BlockKey, Dtype, Layout, LayoutSpec, NodeId, NodeMode, Parts, Quota, SessionId, TenantId, Tier,
};

use crate::engine::RequestKind;
use crate::harness::{Harness, Setup, key, keys, large_layout, layout, small_layout};
use crate::scenarios_outbound::save_durably;

const ONE: NodeId = NodeId(1);
const TWO: NodeId = NodeId(2);
const LATER: Duration = Duration::from_millis(50);
/// Longer than the maximum wait of an accepted block.
const LONG: Duration = Duration::from_secs(12);
const TENANT: TenantId = TenantId::DEFAULT;

fn harness() -> (Harness, SessionId) {
    let mut harness = Harness::new(Setup::default());
    let session = harness.open_session(TENANT, large_layout());
    (harness, session)
}

fn with_settings(change: impl FnOnce(&mut Settings)) -> Setup {
    let mut setup = Setup::default();
    change(&mut setup.settings);
    setup
}

fn is_durable_here(harness: &Harness, key: BlockKey) -> bool {
    harness.announced.contains(&(key, Tier::Nvme))
}

fn last_reply(harness: &Harness, session: SessionId) -> &Reply {
    &harness.engines[&session].replies.last().expect("a reply").1
}

fn loaded(harness: &Harness, session: SessionId) -> &LoadedBlock {
    match last_reply(harness, session) {
        Reply::Loaded { blocks, .. } => &blocks[0],
        other => panic!("no load: {other:?}"),
    }
}

#[test]
fn offered_block_is_fetched_and_made_durable_without_a_session() {
    let mut harness = Harness::new(Setup::default());
    harness.add_peer_replica(ONE, key(5), Tier::Nvme);
    assert_eq!(harness.peer_offer(ONE, TenantId(3), large_layout(), &[key(5)]), (vec![0], Duration::ZERO));
    harness.finish_jobs();
    harness.pass(LATER);
    harness.finish_jobs();
    assert!(is_durable_here(&harness, key(5)));
    let counters = harness.core.counters();
    assert_eq!((counters.pulled_blocks, counters.taken_blocks_stored), (1, 1));
    let session = harness.open_session(TenantId(3), large_layout());
    harness.match_keys(session, &[key(5)], Scope::Local);
    let Reply::Matched { sources } = last_reply(&harness, session) else { panic!("a match") };
    assert_eq!(*sources, [Source::OwnDram], "an ordinary block of its tenant");
    let other_session = harness.open_session(TenantId(4), large_layout());
    harness.match_keys(other_session, &[key(5)], Scope::Local);
    let Reply::Matched { sources } = last_reply(&harness, other_session) else { panic!("a match") };
    assert!(sources.is_empty());
}

#[test]
fn durable_block_is_accepted_and_not_fetched_again() {
    let (mut harness, session) = harness();
    save_durably(&mut harness, session, &keys(0..1));
    assert_eq!(harness.peer_offer(ONE, TENANT, large_layout(), &keys(0..1)).0, [0]);
    assert!(harness.jobs.is_empty());
}

/// Pulls a block and makes it durable.
fn pull(harness: &mut Harness, key: BlockKey) {
    harness.add_peer_replica(ONE, key, Tier::Nvme);
    assert_eq!(harness.peer_offer(ONE, TENANT, large_layout(), &[key]).0, [0]);
    harness.finish_jobs();
    harness.pass(LATER);
    harness.finish_jobs();
    assert!(is_durable_here(harness, key));
}

fn in_dram(harness: &Harness, keys: &[BlockKey]) -> usize {
    keys.iter().filter(|key| harness.announced.contains(&(**key, Tier::Dram))).count()
}

#[test]
fn unrequested_replicas_displace_each_other_and_not_blocks_of_engines() {
    let (mut harness, session) = harness();
    save_durably(&mut harness, session, &keys(0..16));
    assert_eq!(in_dram(&harness, &keys(0..16)), 16, "the arena is full");
    for number in 100..108 {
        pull(&mut harness, key(number));
    }
    assert_eq!(in_dram(&harness, &keys(0..16)), 15, "all replicas share one slot");
    assert_eq!(in_dram(&harness, &keys(100..108)), 1);
}

#[test]
fn replica_read_by_an_engine_remains_in_dram() {
    let (mut harness, session) = harness();
    save_durably(&mut harness, session, &keys(0..16));
    harness.add_peer_replica(ONE, key(100), Tier::Nvme);
    harness.peer_offer(ONE, TENANT, large_layout(), &[key(100)]);
    while let Some(fetch) = harness.fills().first().copied() {
        harness.advance_to(fetch, large_layout().layers());
    }
    assert!(!is_durable_here(&harness, key(100)), "the block is being saved");
    harness.load(session, &[key(100)], LATER, Scope::Local);
    let load = *harness.engines[&session].loads.keys().next().expect("held");
    harness.release(session, load);
    harness.pass(LATER);
    harness.finish_jobs();
    pull(&mut harness, key(101));
    assert_eq!((in_dram(&harness, &[key(100)]), in_dram(&harness, &keys(0..16))), (1, 14));
}

#[test]
fn unsaved_replicas_leave_engines_their_share_of_the_arena() {
    let mut harness = Harness::new(with_settings(|settings| settings.arena_unsaved_permille = 750));
    let session = harness.open_session(TENANT, large_layout());
    for number in 100..102 {
        harness.add_peer_replica(ONE, key(number), Tier::Nvme);
    }
    harness.peer_offer(ONE, TENANT, large_layout(), &keys(100..102));
    while let Some(fetch) = harness.fills().first().copied() {
        harness.advance_to(fetch, large_layout().layers());
    }
    assert_eq!(harness.core.counters().unsaved_blocks, 2);
    harness.reserve(session, 16);
    assert_eq!(harness.engines[&session].reserved.len(), 12, "three quarters of 16 slots");
}

#[test]
fn block_fetched_for_an_engine_is_only_written() {
    let (mut harness, session) = harness();
    harness.add_peer_replica(ONE, key(5), Tier::Dram);
    harness.load(session, &[key(5)], LATER, Scope::Cluster);
    harness.finish_jobs();
    assert!(!is_durable_here(&harness, key(5)));
    assert_eq!(harness.peer_offer(ONE, TENANT, large_layout(), &[key(5)]).0, [0]);
    assert!(harness.fills().is_empty());
    harness.pass(LATER);
    harness.finish_jobs();
    assert!(is_durable_here(&harness, key(5)));
}

#[test]
fn loads_and_offers_share_fetches() {
    let (mut harness, session) = harness();
    harness.add_peer_replica(ONE, key(5), Tier::Dram);
    harness.add_peer_replica(ONE, key(6), Tier::Dram);
    harness.peer_offer(ONE, TENANT, large_layout(), &[key(5)]);
    harness.load(session, &[key(5), key(6)], LATER, Scope::Cluster);
    harness.finish_jobs_but_fills();
    harness.peer_offer(ONE, TENANT, large_layout(), &[key(6)]);
    assert_eq!(harness.fills().len(), 2, "each block is fetched once");
    harness.finish_jobs();
    assert!(matches!(loaded(&harness, session), LoadedBlock::Ok { .. }));
    harness.pass(LATER);
    harness.finish_jobs();
    assert!(is_durable_here(&harness, key(5)) && is_durable_here(&harness, key(6)));
}

#[test]
fn load_tries_another_source_when_the_fetch_of_an_offered_block_fails() {
    let (mut harness, session) = harness();
    harness.add_peer_replica(TWO, key(5), Tier::Dram);
    harness.peer_offer(ONE, TENANT, large_layout(), &[key(5)]);
    harness.load(session, &[key(5)], LATER, Scope::Cluster);
    let fetch = harness.fills()[0];
    harness.fail(fetch, FillError::Absent);
    harness.finish_jobs();
    assert!(matches!(loaded(&harness, session), LoadedBlock::Ok { source: Source::PeerDram, .. }));
}

#[test]
fn failed_fetch_leaves_no_trace() {
    let mut harness = Harness::new(Setup::default());
    harness.peer_offer(ONE, TENANT, large_layout(), &keys(0..3));
    while let Some(fetch) = harness.fills().first().copied() {
        harness.fail(fetch, FillError::PeerLost);
    }
    harness.pass(LONG);
    harness.finish_jobs();
    let counters = harness.core.counters();
    assert_eq!(
        (counters.arena_used_bytes, counters.pulls_in_flight_bytes, counters.pulls_waiting),
        (0, 0, 0)
    );
    assert!(harness.announced.is_empty());
}

#[test]
fn commit_replaces_a_block_being_fetched() {
    let (mut harness, session) = harness();
    harness.reserve(session, 1);
    harness.add_peer_replica(ONE, key(5), Tier::Nvme);
    harness.peer_offer(ONE, TENANT, large_layout(), &[key(5)]);
    harness.commit(session, &[key(5)], Priority::Normal);
    let Reply::Committed { statuses, .. } = last_reply(&harness, session) else { panic!("a commit") };
    assert_eq!(*statuses, [CommitStatus::Committed]);
    harness.finish_jobs();
    harness.pass(LATER);
    harness.finish_jobs();
    assert!(is_durable_here(&harness, key(5)));
    assert_eq!(harness.core.counters().pulls_in_flight_bytes, 0);
}

#[test]
fn inactive_node_rejects_offers() {
    for mode in [NodeMode::Cordoned, NodeMode::Draining] {
        let mut harness = Harness::new(Setup::default());
        harness.apply(Event::Mode { mode, revision: 1 });
        let (taken, retry_after) = harness.peer_offer(ONE, TENANT, large_layout(), &keys(0..2));
        assert_eq!((taken, retry_after), (vec![], Duration::from_secs(10)));
    }
}

#[test]
fn offered_block_evicts_nothing() {
    let (mut harness, session) = harness();
    let before: Vec<BlockKey> = keys(0..170);
    save_durably(&mut harness, session, &before);
    let kept = |harness: &Harness| before.iter().filter(|key| is_durable_here(harness, **key)).count();
    let (full, evicted) = (kept(&harness), harness.core.counters().nvme_evictions);
    for number in 200..260 {
        harness.add_peer_replica(ONE, key(number), Tier::Nvme);
    }
    let (taken, retry_after) = harness.peer_offer(ONE, TENANT, large_layout(), &keys(200..260));
    assert!(taken.len() < 60 && retry_after == Duration::from_secs(10), "{} taken", taken.len());
    for _ in 0..4 {
        harness.finish_jobs();
        harness.pass(LATER);
    }
    assert_eq!((kept(&harness), harness.core.counters().nvme_evictions), (full, evicted));
}

#[test]
fn offered_block_evicts_nothing_despite_unusable_segment_ends() {
    let mut harness = Harness::new(with_settings(|settings| settings.pool_free_permille = 300));
    let session = harness.open_session(TENANT, large_layout());
    save_durably(&mut harness, session, &keys(0..170));
    let evicted = harness.core.counters().nvme_evictions;
    assert!(evicted > 0, "the devices are filled up to the free target");
    for number in 200..260 {
        harness.add_peer_replica(ONE, key(number), Tier::Nvme);
    }
    harness.peer_offer(ONE, TENANT, small_layout(), &keys(200..260));
    for _ in 0..4 {
        harness.finish_jobs();
        harness.pass(LATER);
    }
    assert_eq!(harness.core.counters().nvme_evictions, evicted);
}

#[test]
fn tenant_at_its_limit_rejects_offers_and_loses_nothing() {
    let slot = large_layout().slot_bytes() + 4096;
    let tenant = TenantId(1);
    let quota = Quota::new(0, 3 * slot).expect("a quota");
    let quotas = vec![TenantQuotas { tenant, dram: Quota::UNLIMITED, nvme: quota }];
    let mut harness = Harness::new(with_settings(|settings| settings.tenants = quotas));
    let session = harness.open_session(tenant, large_layout());
    save_durably(&mut harness, session, &keys(0..2));
    assert_eq!(harness.peer_offer(ONE, tenant, large_layout(), &keys(10..14)).0.len(), 1);
    let grant = Quota::new(0, 2 * slot).expect("a quota");
    harness.apply(Event::Budget(Grant { tenant, version: 1, dram: Quota::UNLIMITED, nvme: grant }));
    harness.add_peer_replica(ONE, key(10), Tier::Nvme);
    for _ in 0..3 {
        harness.finish_jobs();
        harness.pass(LATER);
    }
    assert!(is_durable_here(&harness, key(0)) && is_durable_here(&harness, key(1)));
    assert!(!is_durable_here(&harness, key(10)), "the room was used during the fetch");
    assert_eq!(harness.core.counters().unsaved_blocks, 0);
}

#[test]
fn tenant_without_memory_for_a_block_rejects_offers_and_drops_accepted_blocks_at_once() {
    let slot = large_layout().slot_bytes();
    let tenant = TenantId(1);
    let limited = |limit| Quota::new(0, limit).expect("nothing is reserved");
    let quotas = vec![TenantQuotas { tenant, dram: limited(slot - 1), nvme: Quota::UNLIMITED }];
    let mut harness = Harness::new(with_settings(|settings| settings.tenants = quotas));
    let refused = (vec![], Duration::from_secs(10));
    assert_eq!(harness.peer_offer(ONE, tenant, large_layout(), &keys(0..2)), refused);

    let mut harness = Harness::new(Setup::default());
    let session = harness.open_session(tenant, large_layout());
    harness.reserve(session, 16);
    assert_eq!(
        harness.peer_offer(ONE, tenant, large_layout(), &keys(0..1)).0,
        [0],
        "the limit allows one block"
    );
    assert_eq!(harness.core.counters().pulls_waiting, 1);
    let (dram, nvme) = (limited(slot - 1), Quota::UNLIMITED);
    harness.apply(Event::Budget(Grant { tenant, version: 1, dram, nvme }));
    harness.pass(Duration::from_secs(1));
    let counters = harness.core.counters();
    assert_eq!((counters.pulls_waiting, counters.pulls_dropped), (0, 1), "well before the maximum wait");
}

#[test]
fn accepts_blocks_at_the_bandwidth_and_fetches_a_few_at_a_time() {
    let slot = large_layout().slot_bytes();
    let mut harness = Harness::new(with_settings(|settings| settings.placement_bandwidth = 6 * slot));
    let (taken, retry_after) = harness.peer_offer(ONE, TENANT, large_layout(), &keys(0..10));
    assert_eq!(taken, (0..6).collect::<Vec<u32>>());
    assert!(retry_after > Duration::ZERO && retry_after < Duration::from_secs(1));
    assert_eq!(harness.fills().len(), 2, "an eighth of the arena's 16 slots");
    assert_eq!(harness.core.counters().pulls_waiting, 4);
    assert_eq!(
        harness.peer_offer(ONE, TENANT, large_layout(), &keys(0..6)).0.len(),
        6,
        "they were accepted before"
    );
    assert_eq!(harness.core.counters().pulls_waiting, 4);
}

#[test]
fn accepted_block_without_room_is_dropped_after_the_maximum_wait() {
    let (mut harness, session) = harness();
    harness.reserve(session, 16);
    harness.add_peer_replica(ONE, key(5), Tier::Nvme);
    assert_eq!(harness.peer_offer(ONE, TENANT, large_layout(), &[key(5)]).0, [0]);
    assert!(harness.fills().is_empty(), "all slots are reserved");
    harness.pass(Duration::from_secs(11));
    let counters = harness.core.counters();
    assert_eq!((counters.pulls_waiting, counters.pulls_dropped), (0, 1));
}

#[test]
fn pull_starts_when_the_arena_has_room_again() {
    let (mut harness, session) = harness();
    harness.reserve(session, 16);
    harness.add_peer_replica(ONE, key(5), Tier::Nvme);
    harness.peer_offer(ONE, TENANT, large_layout(), &[key(5)]);
    let leases = harness.engines.get_mut(&session).expect("open").reserved.drain(..4);
    let leases = leases.map(|(lease, _)| lease).collect();
    harness.request(session, RequestKind::Other, Request::Abort { leases });
    harness.pass(Duration::from_millis(20));
    assert_eq!(harness.fills().len(), 1);
}

#[test]
fn pull_without_room_does_not_delay_pulls_of_another_tenant() {
    let (mut harness, session) = harness();
    let other = harness.open_session(TenantId(3), large_layout());
    harness.reserve(other, 1);
    harness.reserve(session, 12);
    harness.peer_offer(ONE, TENANT, large_layout(), &keys(5..7));
    assert!(harness.fills().is_empty(), "the other region belongs to another tenant");
    harness.add_peer_replica(ONE, key(8), Tier::Nvme);
    harness.peer_offer(ONE, TenantId(3), large_layout(), &[key(8)]);
    harness.pass(Duration::from_millis(20));
    assert_eq!((harness.fills().len(), harness.core.counters().pulls_waiting), (1, 2));
    harness.finish_jobs();
    harness.pass(LATER);
    harness.finish_jobs();
    assert!(is_durable_here(&harness, key(8)));
}

#[test]
fn dropped_pulls_return_their_bandwidth() {
    let slot = large_layout().slot_bytes();
    let mut harness = Harness::new(with_settings(|settings| settings.placement_bandwidth = 4 * slot));
    let session = harness.open_session(TENANT, large_layout());
    harness.reserve(session, 16);
    assert_eq!(harness.peer_offer(ONE, TENANT, large_layout(), &keys(0..9)).0.len(), 4);
    harness.apply(Event::Mode { mode: NodeMode::Cordoned, revision: 1 });
    harness.pass(Duration::from_millis(20));
    assert_eq!(harness.core.counters().pulls_dropped, 4);
    harness.apply(Event::Mode { mode: NodeMode::Active, revision: 2 });
    assert_eq!(harness.peer_offer(ONE, TENANT, large_layout(), &keys(0..9)).0.len(), 4);
}

#[test]
fn rejects_tenants_without_a_region_when_half_of_the_arena_is_in_use() {
    let mut harness = Harness::new(Setup::default());
    assert_eq!(harness.peer_offer(ONE, TenantId(3), large_layout(), &keys(0..2)).0.len(), 2);
    assert_eq!(harness.fills().len(), 2, "as many as are pulled at once");
    for tenant in [TenantId(4), TenantId(5)] {
        let key = key(u64::from(tenant.0));
        assert_eq!(harness.peer_offer(ONE, tenant, large_layout(), &[key]).0, [0], "2 of 4 regions remain");
    }
    while let Some(fetch) = harness.fills().first().copied() {
        harness.fail(fetch, FillError::PeerLost);
    }
    assert_eq!(harness.core.counters().pulls_dropped, 1, "the second pull would leave one region");
    assert_eq!(
        harness.peer_offer(ONE, TenantId(6), large_layout(), &[key(6)]),
        (vec![], Duration::from_secs(10))
    );
    assert_eq!(
        harness.peer_offer(ONE, TenantId(3), large_layout(), &[key(7)]).0,
        [0],
        "the tenant owns a region"
    );
}

/// Layout of one page per block, different for each number.
fn rank_of_many(number: u16) -> Layout {
    let spec = LayoutSpec {
        layers: 1,
        parts: Parts::Latent,
        kv_heads: 1,
        head_dim: 1 + number / 64,
        dtype: Dtype::Bf16,
        tokens_per_block: 16,
        tp_rank: number % 64,
        tp_size: 64,
    };
    spec.validate().expect("a valid layout")
}

#[test]
fn offers_leave_half_of_the_layout_table_to_engines_and_report_it() {
    const OFFERED: usize = OFFERED_SIZE_CLASSES_MAX + 200;
    let mut harness = Harness::new(Setup { disks: vec![128 << 20], ..Setup::default() });
    harness.open_session(TENANT, large_layout());
    let mut refused = 0;
    for number in 0..OFFERED as u16 {
        let layout = rank_of_many(number);
        let (taken, _) = harness.peer_offer(ONE, TENANT, layout, &[key(10_000 + u64::from(number))]);
        refused += usize::from(taken.is_empty());
    }
    assert_eq!(harness.reports, [Diagnostic::OffersRefused { layouts: OFFERED_SIZE_CLASSES_MAX }]);
    assert_eq!(OFFERED - refused, OFFERED_SIZE_CLASSES_MAX - 1, "all except the session's layout");
    let own = harness.open_session(TENANT, layout(7, Parts::Latent, 64));
    harness.match_keys(own, &[key(1)], Scope::Local);
    assert!(matches!(last_reply(&harness, own), Reply::Matched { .. }), "engines may add theirs");
}

#[test]
fn pending_blocks_of_other_tenants_do_not_count_against_a_tenants_limit() {
    let slot = large_layout().slot_bytes() + 4096;
    let tenant = TenantId(1);
    let quota = Quota::new(0, 3 * slot).expect("a quota");
    let quotas = vec![TenantQuotas { tenant, dram: Quota::UNLIMITED, nvme: quota }];
    let mut harness = Harness::new(with_settings(|settings| settings.tenants = quotas));
    let session = harness.open_session(TENANT, large_layout());
    harness.reserve(session, 4);
    harness.commit(session, &keys(0..4), Priority::Normal);
    assert!(harness.core.counters().unsaved_blocks > 0);
    assert_eq!(harness.peer_offer(ONE, tenant, large_layout(), &keys(10..14)).0, [0, 1, 2]);
}

#[test]
fn accepted_blocks_count_against_the_limit_with_header_pages() {
    let slot = small_layout().slot_bytes() + 4096;
    let tenant = TenantId(1);
    let quota = Quota::new(0, 4 * slot).expect("a quota");
    let quotas = vec![TenantQuotas { tenant, dram: Quota::UNLIMITED, nvme: quota }];
    let mut harness = Harness::new(with_settings(|settings| settings.tenants = quotas));
    assert_eq!(harness.peer_offer(ONE, tenant, small_layout(), &keys(1000..1003)).0.len(), 3);
    assert_eq!(harness.peer_offer(ONE, tenant, small_layout(), &keys(1003..1006)).0.len(), 1);
}

#[test]
fn pull_does_not_start_when_its_room_was_used() {
    let (mut harness, session) = harness();
    harness.reserve(session, 16);
    harness.add_peer_replica(ONE, key(5), Tier::Nvme);
    assert_eq!(harness.peer_offer(ONE, TENANT, large_layout(), &[key(5)]).0, [0]);
    let nvme = Quota::new(0, 4096).expect("a quota");
    harness.apply(Event::Budget(Grant { tenant: TENANT, version: 1, dram: Quota::UNLIMITED, nvme }));
    let leases = harness.engines.get_mut(&session).expect("open").reserved.drain(..4);
    let leases = leases.map(|(lease, _)| lease).collect();
    harness.request(session, RequestKind::Other, Request::Abort { leases });
    harness.pass(Duration::from_millis(20));
    assert!(harness.fills().is_empty());
    assert_eq!(harness.core.counters().pulls_dropped, 1);
}

#[test]
fn rejects_offer_of_a_key_that_another_tenant_has() {
    let (mut harness, session) = harness();
    save_durably(&mut harness, session, &keys(0..1));
    assert_eq!(harness.peer_offer(ONE, TenantId(9), large_layout(), &keys(0..1)).0, []);
    assert_eq!(harness.peer_offer(ONE, TENANT, small_layout(), &keys(0..1)).0, []);
}
