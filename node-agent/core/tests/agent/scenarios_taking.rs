//! Blocks that other nodes offer: one behaviour at a time.

use std::time::Duration;

use reprise_agent_core::agent::limits::SHAPES_OF_OFFERS_MAX;
use reprise_agent_core::agent::{Settings, TenantQuotas};
use reprise_agent_core::effect::{CommitStatus, LoadedBlock, Reply, Report, Source};
use reprise_agent_core::event::{Event, FillError, Grant, Priority, Request, Scope};
use reprise_policy::{
    BlockKey, Dtype, Layout, LayoutSpec, NodeId, NodeMode, Parts, Quota, SessionId, TenantId, Tier,
};

use crate::engine::Asked;
use crate::scenarios_giving::save_durably;
use crate::world::{Setup, World, key, keys, large_layout, layout, small_layout};

const ONE: NodeId = NodeId(1);
const TWO: NodeId = NodeId(2);
const LATER: Duration = Duration::from_millis(50);
/// Longer than what is taken may wait.
const LONG: Duration = Duration::from_secs(12);
const TENANT: TenantId = TenantId::DEFAULT;

fn world() -> (World, SessionId) {
    let mut world = World::new(Setup::default());
    let session = world.open_session(TENANT, large_layout());
    (world, session)
}

fn with_settings(change: impl FnOnce(&mut Settings)) -> Setup {
    let mut setup = Setup::default();
    change(&mut setup.settings);
    setup
}

fn is_durable_here(world: &World, key: BlockKey) -> bool {
    world.announced.contains(&(key, Tier::Nvme))
}

fn last_reply(world: &World, session: SessionId) -> &Reply {
    &world.engines[&session].replies.last().expect("a reply").1
}

fn loaded(world: &World, session: SessionId) -> &LoadedBlock {
    match last_reply(world, session) {
        Reply::Loaded { blocks, .. } => &blocks[0],
        other => panic!("no load: {other:?}"),
    }
}

#[test]
fn an_offered_block_is_fetched_and_becomes_durable_without_any_session() {
    let mut world = World::new(Setup::default());
    world.give_peer(ONE, key(5), Tier::Nvme);
    assert_eq!(world.peer_offer(ONE, TenantId(3), large_layout(), &[key(5)]), (vec![0], Duration::ZERO));
    world.finish_jobs();
    world.pass(LATER);
    world.finish_jobs();
    assert!(is_durable_here(&world, key(5)));
    let counters = world.core.counters();
    assert_eq!((counters.pulled_blocks, counters.taken_blocks_stored), (1, 1));
    let session = world.open_session(TenantId(3), large_layout());
    world.match_keys(session, &[key(5)], Scope::Local);
    let Reply::Matched { sources } = last_reply(&world, session) else { panic!("a match") };
    assert_eq!(*sources, [Source::OwnDram], "an ordinary block of its tenant");
    let stranger = world.open_session(TenantId(4), large_layout());
    world.match_keys(stranger, &[key(5)], Scope::Local);
    let Reply::Matched { sources } = last_reply(&world, stranger) else { panic!("a match") };
    assert!(sources.is_empty());
}

#[test]
fn a_block_that_is_durable_here_is_taken_and_not_fetched_again() {
    let (mut world, session) = world();
    save_durably(&mut world, session, &keys(0..1));
    assert_eq!(world.peer_offer(ONE, TENANT, large_layout(), &keys(0..1)).0, [0]);
    assert!(world.jobs.is_empty());
}

/// Pulls a block and makes it durable.
fn pull(world: &mut World, key: BlockKey) {
    world.give_peer(ONE, key, Tier::Nvme);
    assert_eq!(world.peer_offer(ONE, TENANT, large_layout(), &[key]).0, [0]);
    world.finish_jobs();
    world.pass(LATER);
    world.finish_jobs();
    assert!(is_durable_here(world, key));
}

fn in_dram(world: &World, keys: &[BlockKey]) -> usize {
    keys.iter().filter(|key| world.announced.contains(&(**key, Tier::Dram))).count()
}

#[test]
fn blocks_that_nobody_asked_for_displace_each_other_in_memory_and_not_what_engines_use() {
    let (mut world, session) = world();
    save_durably(&mut world, session, &keys(0..16));
    assert_eq!(in_dram(&world, &keys(0..16)), 16, "the arena is full");
    for number in 100..108 {
        pull(&mut world, key(number));
    }
    assert_eq!(in_dram(&world, &keys(0..16)), 15, "one place is enough for all of them");
    assert_eq!(in_dram(&world, &keys(100..108)), 1);
}

#[test]
fn a_pulled_block_that_an_engine_reads_stays_in_memory_like_any_other() {
    let (mut world, session) = world();
    save_durably(&mut world, session, &keys(0..16));
    world.give_peer(ONE, key(100), Tier::Nvme);
    world.peer_offer(ONE, TENANT, large_layout(), &[key(100)]);
    while let Some(fetch) = world.fills().first().copied() {
        world.advance_to(fetch, large_layout().layers());
    }
    assert!(!is_durable_here(&world, key(100)), "it is being saved");
    world.load(session, &[key(100)], LATER, Scope::Local);
    let load = *world.engines[&session].loads.keys().next().expect("held");
    world.release(session, load);
    world.pass(LATER);
    world.finish_jobs();
    pull(&mut world, key(101));
    assert_eq!((in_dram(&world, &[key(100)]), in_dram(&world, &keys(0..16))), (1, 14));
}

#[test]
fn what_was_pulled_and_is_not_saved_yet_leaves_engines_their_share_of_memory() {
    let mut world = World::new(with_settings(|settings| settings.arena_unsaved_permille = 750));
    let session = world.open_session(TENANT, large_layout());
    for number in 100..102 {
        world.give_peer(ONE, key(number), Tier::Nvme);
    }
    world.peer_offer(ONE, TENANT, large_layout(), &keys(100..102));
    while let Some(fetch) = world.fills().first().copied() {
        world.advance_to(fetch, large_layout().layers());
    }
    assert_eq!(world.core.counters().unsaved_blocks, 2);
    world.reserve(session, 16);
    assert_eq!(world.engines[&session].reserved.len(), 12, "three quarters of 16 slots");
}

#[test]
fn a_block_that_was_fetched_for_an_engine_is_only_written() {
    let (mut world, session) = world();
    world.give_peer(ONE, key(5), Tier::Dram);
    world.load(session, &[key(5)], LATER, Scope::Cluster);
    world.finish_jobs();
    assert!(!is_durable_here(&world, key(5)));
    assert_eq!(world.peer_offer(ONE, TENANT, large_layout(), &[key(5)]).0, [0]);
    assert!(world.fills().is_empty());
    world.pass(LATER);
    world.finish_jobs();
    assert!(is_durable_here(&world, key(5)));
}

#[test]
fn a_load_waits_for_the_fetch_of_an_offered_block_and_an_offer_for_that_of_a_load() {
    let (mut world, session) = world();
    world.give_peer(ONE, key(5), Tier::Dram);
    world.give_peer(ONE, key(6), Tier::Dram);
    world.peer_offer(ONE, TENANT, large_layout(), &[key(5)]);
    world.load(session, &[key(5), key(6)], LATER, Scope::Cluster);
    world.finish_jobs_but_fills();
    world.peer_offer(ONE, TENANT, large_layout(), &[key(6)]);
    assert_eq!(world.fills().len(), 2, "each block is fetched once");
    world.finish_jobs();
    assert!(matches!(loaded(&world, session), LoadedBlock::Ok { .. }));
    world.pass(LATER);
    world.finish_jobs();
    assert!(is_durable_here(&world, key(5)) && is_durable_here(&world, key(6)));
}

#[test]
fn a_load_looks_elsewhere_when_the_fetch_of_an_offered_block_fails() {
    let (mut world, session) = world();
    world.give_peer(TWO, key(5), Tier::Dram);
    world.peer_offer(ONE, TENANT, large_layout(), &[key(5)]);
    world.load(session, &[key(5)], LATER, Scope::Cluster);
    let fetch = world.fills()[0];
    world.fail(fetch, FillError::Absent);
    world.finish_jobs();
    assert!(matches!(loaded(&world, session), LoadedBlock::Ok { source: Source::PeerDram, .. }));
}

#[test]
fn a_fetch_that_fails_leaves_nothing() {
    let mut world = World::new(Setup::default());
    world.peer_offer(ONE, TENANT, large_layout(), &keys(0..3));
    while let Some(fetch) = world.fills().first().copied() {
        world.fail(fetch, FillError::PeerLost);
    }
    world.pass(LONG);
    world.finish_jobs();
    let counters = world.core.counters();
    assert_eq!(
        (counters.arena_used_bytes, counters.pulls_in_flight_bytes, counters.pulls_waiting),
        (0, 0, 0)
    );
    assert!(world.announced.is_empty());
}

#[test]
fn a_commit_of_a_block_that_is_being_fetched_wins() {
    let (mut world, session) = world();
    world.reserve(session, 1);
    world.give_peer(ONE, key(5), Tier::Nvme);
    world.peer_offer(ONE, TENANT, large_layout(), &[key(5)]);
    world.commit(session, &[key(5)], Priority::Normal);
    let Reply::Committed { statuses, .. } = last_reply(&world, session) else { panic!("a commit") };
    assert_eq!(*statuses, [CommitStatus::Committed]);
    world.finish_jobs();
    world.pass(LATER);
    world.finish_jobs();
    assert!(is_durable_here(&world, key(5)));
    assert_eq!(world.core.counters().pulls_in_flight_bytes, 0);
}

#[test]
fn a_node_that_is_not_active_takes_nothing() {
    for mode in [NodeMode::Cordoned, NodeMode::Draining] {
        let mut world = World::new(Setup::default());
        world.apply(Event::Mode { mode, revision: 1 });
        let (taken, retry_after) = world.peer_offer(ONE, TENANT, large_layout(), &keys(0..2));
        assert_eq!((taken, retry_after), (vec![], Duration::from_secs(10)));
    }
}

#[test]
fn nothing_is_evicted_for_an_offered_block() {
    let (mut world, session) = world();
    let before: Vec<BlockKey> = keys(0..170);
    save_durably(&mut world, session, &before);
    let kept = |world: &World| before.iter().filter(|key| is_durable_here(world, **key)).count();
    let (full, evicted) = (kept(&world), world.core.counters().nvme_evictions);
    for number in 200..260 {
        world.give_peer(ONE, key(number), Tier::Nvme);
    }
    let (taken, retry_after) = world.peer_offer(ONE, TENANT, large_layout(), &keys(200..260));
    assert!(taken.len() < 60 && retry_after == Duration::from_secs(10), "{} taken", taken.len());
    for _ in 0..4 {
        world.finish_jobs();
        world.pass(LATER);
    }
    assert_eq!((kept(&world), world.core.counters().nvme_evictions), (full, evicted));
}

#[test]
fn nothing_is_evicted_for_an_offered_block_whose_segment_has_an_end_that_nothing_fits_into() {
    let mut world = World::new(with_settings(|settings| settings.pool_free_permille = 300));
    let session = world.open_session(TENANT, large_layout());
    save_durably(&mut world, session, &keys(0..170));
    let evicted = world.core.counters().nvme_evictions;
    assert!(evicted > 0, "the devices are as full as they may be");
    for number in 200..260 {
        world.give_peer(ONE, key(number), Tier::Nvme);
    }
    world.peer_offer(ONE, TENANT, small_layout(), &keys(200..260));
    for _ in 0..4 {
        world.finish_jobs();
        world.pass(LATER);
    }
    assert_eq!(world.core.counters().nvme_evictions, evicted);
}

#[test]
fn a_tenant_at_its_limit_takes_nothing_and_loses_nothing() {
    let slot = large_layout().slot_bytes() + 4096;
    let tenant = TenantId(1);
    let quota = Quota::new(0, 3 * slot).expect("a quota");
    let quotas = vec![TenantQuotas { tenant, dram: Quota::UNLIMITED, nvme: quota }];
    let mut world = World::new(with_settings(|settings| settings.tenants = quotas));
    let session = world.open_session(tenant, large_layout());
    save_durably(&mut world, session, &keys(0..2));
    assert_eq!(world.peer_offer(ONE, tenant, large_layout(), &keys(10..14)).0.len(), 1);
    let grant = Quota::new(0, 2 * slot).expect("a quota");
    world.apply(Event::Budget(Grant { tenant, version: 1, dram: Quota::UNLIMITED, nvme: grant }));
    world.give_peer(ONE, key(10), Tier::Nvme);
    for _ in 0..3 {
        world.finish_jobs();
        world.pass(LATER);
    }
    assert!(is_durable_here(&world, key(0)) && is_durable_here(&world, key(1)));
    assert!(!is_durable_here(&world, key(10)), "the room went while it came");
    assert_eq!(world.core.counters().unsaved_blocks, 0);
}

#[test]
fn a_tenant_whose_memory_holds_no_single_block_takes_none_and_what_it_took_before_is_given_up_at_once() {
    let slot = large_layout().slot_bytes();
    let tenant = TenantId(1);
    let limited = |limit| Quota::new(0, limit).expect("nothing is reserved");
    let quotas = vec![TenantQuotas { tenant, dram: limited(slot - 1), nvme: Quota::UNLIMITED }];
    let mut world = World::new(with_settings(|settings| settings.tenants = quotas));
    let refused = (vec![], Duration::from_secs(10));
    assert_eq!(world.peer_offer(ONE, tenant, large_layout(), &keys(0..2)), refused);

    let mut world = World::new(Setup::default());
    let session = world.open_session(tenant, large_layout());
    world.reserve(session, 16);
    assert_eq!(world.peer_offer(ONE, tenant, large_layout(), &keys(0..1)).0, [0], "memory may be let go");
    assert_eq!(world.core.counters().pulls_waiting, 1);
    let (dram, nvme) = (limited(slot - 1), Quota::UNLIMITED);
    world.apply(Event::Budget(Grant { tenant, version: 1, dram, nvme }));
    world.pass(Duration::from_secs(1));
    let counters = world.core.counters();
    assert_eq!(
        (counters.pulls_waiting, counters.pulls_dropped),
        (0, 1),
        "well before it has waited too long"
    );
}

#[test]
fn blocks_are_taken_no_faster_than_the_bandwidth_allows_and_fetched_a_few_at_a_time() {
    let slot = large_layout().slot_bytes();
    let mut world = World::new(with_settings(|settings| settings.placement_bandwidth = 6 * slot));
    let (taken, retry_after) = world.peer_offer(ONE, TENANT, large_layout(), &keys(0..10));
    assert_eq!(taken, (0..6).collect::<Vec<u32>>());
    assert!(retry_after > Duration::ZERO && retry_after < Duration::from_secs(1));
    assert_eq!(world.fills().len(), 2, "an eighth of the arena's 16 slots");
    assert_eq!(world.core.counters().pulls_waiting, 4);
    assert_eq!(world.peer_offer(ONE, TENANT, large_layout(), &keys(0..6)).0.len(), 6, "they are promised");
    assert_eq!(world.core.counters().pulls_waiting, 4);
}

#[test]
fn a_taken_block_that_finds_no_room_is_forgotten_after_a_while() {
    let (mut world, session) = world();
    world.reserve(session, 16);
    world.give_peer(ONE, key(5), Tier::Nvme);
    assert_eq!(world.peer_offer(ONE, TENANT, large_layout(), &[key(5)]).0, [0]);
    assert!(world.fills().is_empty(), "all slots are reserved");
    world.pass(Duration::from_secs(11));
    let counters = world.core.counters();
    assert_eq!((counters.pulls_waiting, counters.pulls_dropped), (0, 1));
}

#[test]
fn a_pull_begins_when_the_arena_has_room_again() {
    let (mut world, session) = world();
    world.reserve(session, 16);
    world.give_peer(ONE, key(5), Tier::Nvme);
    world.peer_offer(ONE, TENANT, large_layout(), &[key(5)]);
    let leases = world.engines.get_mut(&session).expect("open").reserved.drain(..4);
    let leases = leases.map(|(lease, _)| lease).collect();
    world.request(session, Asked::Other, Request::Abort { leases });
    world.pass(Duration::from_millis(20));
    assert_eq!(world.fills().len(), 1);
}

#[test]
fn a_pull_without_room_in_the_arena_does_not_hold_up_those_of_another_tenant() {
    let (mut world, session) = world();
    let other = world.open_session(TenantId(3), large_layout());
    world.reserve(other, 1);
    world.reserve(session, 12);
    world.peer_offer(ONE, TENANT, large_layout(), &keys(5..7));
    assert!(world.fills().is_empty(), "the other region is another tenant's");
    world.give_peer(ONE, key(8), Tier::Nvme);
    world.peer_offer(ONE, TenantId(3), large_layout(), &[key(8)]);
    world.pass(Duration::from_millis(20));
    assert_eq!((world.fills().len(), world.core.counters().pulls_waiting), (1, 2));
    world.finish_jobs();
    world.pass(LATER);
    world.finish_jobs();
    assert!(is_durable_here(&world, key(8)));
}

#[test]
fn what_was_taken_and_not_fetched_costs_no_bandwidth() {
    let slot = large_layout().slot_bytes();
    let mut world = World::new(with_settings(|settings| settings.placement_bandwidth = 4 * slot));
    let session = world.open_session(TENANT, large_layout());
    world.reserve(session, 16);
    assert_eq!(world.peer_offer(ONE, TENANT, large_layout(), &keys(0..9)).0.len(), 4);
    world.apply(Event::Mode { mode: NodeMode::Cordoned, revision: 1 });
    world.pass(Duration::from_millis(20));
    assert_eq!(world.core.counters().pulls_dropped, 4);
    world.apply(Event::Mode { mode: NodeMode::Active, revision: 2 });
    assert_eq!(world.peer_offer(ONE, TENANT, large_layout(), &keys(0..9)).0.len(), 4);
}

#[test]
fn blocks_of_tenants_without_memory_here_are_refused_when_half_of_it_is_others() {
    let mut world = World::new(Setup::default());
    assert_eq!(world.peer_offer(ONE, TenantId(3), large_layout(), &keys(0..2)).0.len(), 2);
    assert_eq!(world.fills().len(), 2, "as many as are pulled at once");
    for tenant in [TenantId(4), TenantId(5)] {
        let key = key(u64::from(tenant.0));
        assert_eq!(world.peer_offer(ONE, tenant, large_layout(), &[key]).0, [0], "2 of 4 regions are left");
    }
    while let Some(fetch) = world.fills().first().copied() {
        world.fail(fetch, FillError::PeerLost);
    }
    assert_eq!(world.core.counters().pulls_dropped, 1, "the second would leave one");
    assert_eq!(
        world.peer_offer(ONE, TenantId(6), large_layout(), &[key(6)]),
        (vec![], Duration::from_secs(10))
    );
    assert_eq!(world.peer_offer(ONE, TenantId(3), large_layout(), &[key(7)]).0, [0], "it has a region");
}

/// Layouts of one page a block, each another one.
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
fn offers_of_new_layouts_leave_half_of_the_table_to_engines_and_the_operator_hears_of_it() {
    const OFFERED: usize = SHAPES_OF_OFFERS_MAX + 200;
    let mut world = World::new(Setup { disks: vec![128 << 20], ..Setup::default() });
    world.open_session(TENANT, large_layout());
    let mut refused = 0;
    for number in 0..OFFERED as u16 {
        let layout = rank_of_many(number);
        let (taken, _) = world.peer_offer(ONE, TENANT, layout, &[key(10_000 + u64::from(number))]);
        refused += usize::from(taken.is_empty());
    }
    assert_eq!(world.reports, [Report::OffersRefused { layouts: SHAPES_OF_OFFERS_MAX }]);
    assert_eq!(OFFERED - refused, SHAPES_OF_OFFERS_MAX - 1, "all but the session's");
    let own = world.open_session(TENANT, layout(7, Parts::Latent, 64));
    world.match_keys(own, &[key(1)], Scope::Local);
    assert!(matches!(last_reply(&world, own), Reply::Matched { .. }), "engines bring theirs");
}

#[test]
fn what_comes_for_other_tenants_does_not_count_against_a_tenants_limit() {
    let slot = large_layout().slot_bytes() + 4096;
    let tenant = TenantId(1);
    let quota = Quota::new(0, 3 * slot).expect("a quota");
    let quotas = vec![TenantQuotas { tenant, dram: Quota::UNLIMITED, nvme: quota }];
    let mut world = World::new(with_settings(|settings| settings.tenants = quotas));
    let session = world.open_session(TENANT, large_layout());
    world.reserve(session, 4);
    world.commit(session, &keys(0..4), Priority::Normal);
    assert!(world.core.counters().unsaved_blocks > 0);
    assert_eq!(world.peer_offer(ONE, tenant, large_layout(), &keys(10..14)).0, [0, 1, 2]);
}

#[test]
fn what_was_taken_counts_against_a_tenants_limit_with_its_header_pages() {
    let slot = small_layout().slot_bytes() + 4096;
    let tenant = TenantId(1);
    let quota = Quota::new(0, 4 * slot).expect("a quota");
    let quotas = vec![TenantQuotas { tenant, dram: Quota::UNLIMITED, nvme: quota }];
    let mut world = World::new(with_settings(|settings| settings.tenants = quotas));
    assert_eq!(world.peer_offer(ONE, tenant, small_layout(), &keys(1000..1003)).0.len(), 3);
    assert_eq!(world.peer_offer(ONE, tenant, small_layout(), &keys(1003..1006)).0.len(), 1);
}

#[test]
fn a_pull_is_not_begun_when_the_room_for_it_has_gone() {
    let (mut world, session) = world();
    world.reserve(session, 16);
    world.give_peer(ONE, key(5), Tier::Nvme);
    assert_eq!(world.peer_offer(ONE, TENANT, large_layout(), &[key(5)]).0, [0]);
    let nvme = Quota::new(0, 4096).expect("a quota");
    world.apply(Event::Budget(Grant { tenant: TENANT, version: 1, dram: Quota::UNLIMITED, nvme }));
    let leases = world.engines.get_mut(&session).expect("open").reserved.drain(..4);
    let leases = leases.map(|(lease, _)| lease).collect();
    world.request(session, Asked::Other, Request::Abort { leases });
    world.pass(Duration::from_millis(20));
    assert!(world.fills().is_empty());
    assert_eq!(world.core.counters().pulls_dropped, 1);
}

#[test]
fn another_tenants_block_of_the_same_key_is_not_taken() {
    let (mut world, session) = world();
    save_durably(&mut world, session, &keys(0..1));
    assert_eq!(world.peer_offer(ONE, TenantId(9), large_layout(), &keys(0..1)).0, []);
    assert_eq!(world.peer_offer(ONE, TENANT, small_layout(), &keys(0..1)).0, []);
}
