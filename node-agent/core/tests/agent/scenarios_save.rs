//! Saving, back-pressure, eviction: one behaviour at a time.

use std::time::Duration;

use reprise_agent_core::agent::Settings;
use reprise_agent_core::effect::{CommitStatus, LeaseId, Reply, Report, Source};
use reprise_agent_core::event::{CommitItem, CommitRequest, Priority, Request, Scope};
use reprise_policy::{BlockKey, Parts, SessionId, TenantId, Tier};

use crate::engine::Asked;
use crate::jobs::Job;
use crate::memory::checksums;
use crate::world::{Setup, World, key, keys, large_layout, layout, small_layout};

fn world() -> (World, SessionId) {
    with(Setup::default())
}

fn with(setup: Setup) -> (World, SessionId) {
    let mut world = World::new(setup);
    let session = world.open_session(TenantId::DEFAULT, large_layout());
    (world, session)
}

/// Reserves and commits.
fn save(world: &mut World, session: SessionId, keys: &[BlockKey]) {
    world.reserve(session, keys.len() as u32);
    world.commit(session, keys, Priority::Normal);
}

fn save_durably(world: &mut World, session: SessionId, keys: &[BlockKey]) {
    save(world, session, keys);
    world.pass(Duration::from_millis(6));
    world.finish_jobs();
}

fn last_statuses(world: &World, session: SessionId) -> Vec<CommitStatus> {
    match &world.engines[&session].replies.last().expect("a reply").1 {
        Reply::Committed { statuses, .. } => statuses.clone(),
        other => panic!("not an answer to a commit: {other:?}"),
    }
}

fn sources(world: &mut World, session: SessionId, keys: &[BlockKey]) -> Vec<Source> {
    world.match_keys(session, keys, Scope::Local);
    match &world.engines[&session].replies.last().expect("a reply").1 {
        Reply::Matched { sources } => sources.clone(),
        other => panic!("not an answer to a match: {other:?}"),
    }
}

#[test]
fn a_committed_block_is_readable_at_once_and_durable_soon() {
    let (mut world, session) = world();
    save(&mut world, session, &keys(0..2));
    assert_eq!(sources(&mut world, session, &keys(0..3)), [Source::OwnDram; 2]);
    assert!(world.jobs.is_empty(), "two blocks wait for company");
    assert_eq!(world.core.next_deadline(), Some(world.now.after(Duration::from_millis(5))));
    world.pass(Duration::from_millis(5));
    world.finish_jobs();
    assert_eq!(world.engines[&session].notices.len(), 1);
    assert_eq!(world.engines[&session].notices[0].1, 2);
    assert!(
        world.announced.contains(&(key(0), Tier::Dram)) && world.announced.contains(&(key(0), Tier::Nvme))
    );
    assert_eq!(world.core.next_deadline(), None);
}

#[test]
fn enough_waiting_bytes_are_flushed_without_delay() {
    let (mut world, session) = world();
    save(&mut world, session, &keys(0..4));
    assert_eq!(world.jobs.len(), 4, "four writes");
    world.finish_jobs();
    assert_eq!(world.engines[&session].notices[0].1, 4);
}

#[test]
fn what_was_waiting_when_a_flush_is_due_is_spread_over_devices() {
    let (mut world, session) = with(Setup { disks: vec![8 << 20, 8 << 20], ..Setup::default() });
    save(&mut world, session, &keys(0..4));
    let on_first = world.jobs.iter().filter(|job| matches!(job, Job::Device { device, .. } if device.0 == 0));
    assert_eq!(on_first.count(), 2);
    world.finish_jobs();
    assert_eq!(world.engines[&session].notices[0].1, 4);
}

#[test]
fn a_full_arena_gives_fewer_slots_and_says_when_to_ask_again() {
    let (mut world, session) = world();
    world.reserve(session, 20);
    assert_eq!(world.engines[&session].reserved.len(), 16);
    world.reserve(session, 1);
    assert_eq!(world.engines[&session].reserved.len(), 16);
    world.commit(session, &keys(0..16), Priority::Normal);
    world.reserve(session, 1);
    assert_eq!(world.engines[&session].reserved.len(), 0, "unsaved blocks are not dropped");
    world.finish_jobs();
    world.reserve(session, 1);
    assert_eq!(world.engines[&session].reserved.len(), 1, "saved ones are");
    assert_eq!(world.core.counters().dram_evictions, 1);
}

#[test]
fn a_session_that_finds_the_arena_unsaved_hastens_the_write_back() {
    let settings = Settings { writeback_bytes: 1 << 30, ..Setup::default().settings };
    let (mut world, session) = with(Setup { settings, ..Setup::default() });
    save(&mut world, session, &keys(0..16));
    assert!(world.jobs.is_empty());
    world.reserve(session, 1);
    assert!(!world.jobs.is_empty(), "the flush does not wait for the delay");
}

#[test]
fn reservations_and_unsaved_blocks_leave_room_for_loads() {
    let settings = Settings { arena_unsaved_permille: 500, ..Setup::default().settings };
    let (mut world, session) = with(Setup { settings, ..Setup::default() });
    world.reserve(session, 16);
    let given = world.engines[&session].reserved.len();
    assert!((7..=8).contains(&given), "half of 16 slots, not {given}");
}

#[test]
fn aborted_slots_come_back_and_unknown_leases_are_passed_over() {
    let (mut world, session) = world();
    world.reserve(session, 2);
    let engine = world.engines.get_mut(&session).expect("open");
    let mut leases: Vec<LeaseId> = engine.reserved.drain(..).map(|(lease, _)| lease).collect();
    leases.extend([leases[0], LeaseId(0), LeaseId(u64::MAX)]);
    world.request(session, Asked::Other, Request::Abort { leases });
    assert_eq!(world.core.counters().arena_used_bytes, 0);
}

#[test]
fn a_key_committed_twice_is_a_duplicate_that_ends_like_its_block() {
    let (mut world, session) = world();
    world.reserve(session, 2);
    world.commit(session, &[key(0), key(0)], Priority::Normal);
    assert_eq!(last_statuses(&world, session), [CommitStatus::Committed, CommitStatus::Duplicate]);
    let other = world.open_session(TenantId::DEFAULT, large_layout());
    save(&mut world, other, &[key(0)]);
    assert_eq!(last_statuses(&world, other), [CommitStatus::Duplicate]);
    assert!(world.engines[&other].notices.is_empty(), "it is not durable yet");
    assert_eq!(world.core.counters().arena_used_bytes, large_layout().slot_bytes());
    world.pass(Duration::from_millis(6));
    world.finish_jobs();
    assert_eq!(world.engines[&session].notices[0].1, 2);
    assert_eq!(world.engines[&other].notices[0].1, 1);
    save(&mut world, other, &[key(0)]);
    assert_eq!(world.engines[&other].notices[1].1, 1, "a duplicate of a durable block is durable at once");
}

#[test]
fn a_bad_item_gives_its_slot_back_and_says_so() {
    let (mut world, session) = world();
    world.reserve(session, 3);
    let leases: Vec<LeaseId> = world.engines[&session].reserved.iter().map(|(lease, _)| *lease).collect();
    let good = checksums(1, &large_layout());
    let items = vec![
        CommitItem { lease: leases[0], key: None, checksums: good.clone() },
        CommitItem { lease: leases[1], key: Some(key(1)), checksums: good[1..].into() },
        CommitItem { lease: LeaseId(77), key: Some(key(2)), checksums: good.clone() },
    ];
    let asked = Asked::Commit(keys(0..3));
    world.request(
        session,
        asked,
        Request::Commit(CommitRequest { items, priority: Priority::Normal, parent: None }),
    );
    let expected = [CommitStatus::BadItem, CommitStatus::BadItem, CommitStatus::NoLease];
    assert_eq!(last_statuses(&world, session), expected);
    assert_eq!(world.core.counters().arena_used_bytes, large_layout().slot_bytes());
    let other = world.open_session(TenantId::DEFAULT, large_layout());
    let stolen = vec![CommitItem { lease: leases[2], key: Some(key(3)), checksums: good }];
    let request = Request::Commit(CommitRequest { items: stolen, priority: Priority::Normal, parent: None });
    world.request(other, Asked::Commit(keys(3..4)), request);
    assert_eq!(last_statuses(&world, other), [CommitStatus::NoLease], "a lease belongs to its session");
    assert_eq!(world.core.counters().reserved_bytes, large_layout().slot_bytes());
}

#[test]
fn a_commit_of_nothing_is_answered_and_noticed() {
    let (mut world, session) = world();
    world.commit(session, &[], Priority::Normal);
    assert_eq!(world.engines[&session].notices.len(), 1);
}

#[test]
fn an_agent_without_devices_caches_and_says_that_nothing_is_durable() {
    let (mut world, session) = with(Setup { disks: Vec::new(), ..Setup::default() });
    save(&mut world, session, &keys(0..16));
    assert_eq!(world.engines[&session].notices[0].2, keys(0..16));
    assert_eq!(sources(&mut world, session, &keys(0..16)).len(), 16);
    save(&mut world, session, &keys(16..20));
    assert_eq!(sources(&mut world, session, &keys(16..20)).len(), 4, "cached blocks make room");
    assert_eq!(sources(&mut world, session, &keys(0..16)).len(), 12);
    assert!(!world.announced.contains(&(key(15), Tier::Dram)));
}

#[test]
fn low_priority_goes_first_and_then_what_was_used_longest_ago() {
    let (mut world, session) = world();
    world.reserve(session, 16);
    world.commit(session, &keys(0..8), Priority::Normal);
    world.commit(session, &keys(8..12), Priority::High);
    world.commit(session, &keys(12..16), Priority::Low);
    world.finish_jobs();
    world.pass(Duration::from_millis(6));
    world.finish_jobs();
    // Key 0 is used again.
    world.load(session, &keys(0..1), Duration::ZERO, Scope::Local);
    let load = *world.engines[&session].loads.keys().next().expect("a load");
    world.release(session, load);
    world.reserve(session, 11);
    let resident = |key: BlockKey| world.announced.contains(&(key, Tier::Dram));
    assert!(keys(12..16).into_iter().all(|key| !resident(key)), "low goes first");
    assert!(keys(1..8).into_iter().all(|key| !resident(key)), "then what was not used since");
    assert!(resident(key(0)) && keys(8..12).into_iter().all(resident));
}

#[test]
fn a_leased_block_is_never_evicted() {
    let (mut world, session) = world();
    save_durably(&mut world, session, &keys(0..16));
    world.load(session, &keys(0..4), Duration::ZERO, Scope::Local);
    world.reserve(session, 16);
    assert_eq!(world.engines[&session].reserved.len(), 12);
    world.read_all();
}

#[test]
fn a_layout_takes_over_the_regions_that_another_no_longer_needs() {
    let (mut world, session) = world();
    save_durably(&mut world, session, &keys(0..16));
    let small = world.open_session(TenantId::DEFAULT, small_layout());
    world.reserve(small, 31);
    let per_region = (4 * large_layout().slot_bytes() / small_layout().slot_bytes()) as usize;
    assert_eq!(per_region, 30);
    assert_eq!(world.engines[&small].reserved.len(), 31, "two regions were emptied");
    assert_eq!(world.core.counters().dram_blocks, 8);
    world.close_session(small);
    world.reserve(session, 16);
    assert_eq!(world.engines[&session].reserved.len(), 16);
}

#[test]
fn another_tenants_memory_is_not_taken_and_its_blocks_are_not_seen() {
    let (mut world, session) = world();
    save_durably(&mut world, session, &keys(0..16));
    let stranger = world.open_session(TenantId(7), large_layout());
    assert!(sources(&mut world, stranger, &keys(0..1)).is_empty());
    world.reserve(stranger, 1);
    assert!(world.engines[&stranger].reserved.is_empty(), "memory that held a tenant's data stays its own");
}

#[test]
fn the_death_of_a_session_returns_its_slots_and_tickets() {
    let (mut world, session) = world();
    world.reserve(session, 6);
    world.commit(session, &keys(0..3), Priority::Normal);
    world.close_session(session);
    assert_eq!(world.core.counters().arena_used_bytes, 3 * large_layout().slot_bytes());
    world.pass(Duration::from_millis(6));
    world.finish_jobs();
    assert_eq!(world.core.counters().nvme_blocks, 3, "what was committed is saved nevertheless");
}

#[test]
fn a_block_that_fits_no_region_is_refused_with_what_to_do() {
    let (mut world, _) = with(Setup { region_bytes: 16 << 10, ..Setup::default() });
    let session = *world.engines.keys().next().expect("open");
    world.request(session, Asked::Other, Request::Reserve { count: 1 });
    let Reply::BadRequest(text) = &world.engines[&session].replies[0].1 else { panic!("not refused") };
    assert!(text.contains("arena.region_bytes"), "{text}");
}

#[test]
fn requests_of_a_session_that_could_not_be_opened_are_busy() {
    let (mut world, session) = world();
    let engine = world.engines.remove(&session).expect("open");
    world.close_session(session);
    world.engines.insert(session, engine);
    world.request(session, Asked::Other, Request::Stats);
    assert!(matches!(world.engines[&session].replies[0].1, Reply::Busy { .. }));
}

#[test]
fn stats_are_the_counters_by_name() {
    let (mut world, session) = world();
    save(&mut world, session, &keys(0..2));
    world.request(session, Asked::Other, Request::Stats);
    let Reply::Stats(stats) = &world.engines[&session].replies.last().expect("a reply").1 else {
        panic!("no stats")
    };
    assert_eq!(stats.iter().find(|(name, _)| *name == "committed_blocks"), Some(&("committed_blocks", 2)));
    let own = world.core.tenant_usage().next().expect("the default tenant").fields();
    assert!(own.iter().all(|field| stats.contains(field)), "and those of the session's tenant");
    assert_eq!(stats.len(), world.core.counters().fields().count() + own.len());
}

#[test]
fn a_reservation_that_is_not_committed_in_time_is_taken_back() {
    let (mut world, session) = world();
    world.reserve(session, 2);
    world.pass(Duration::from_secs(30));
    world.reserve(session, 1);
    world.commit(session, &keys(0..1), Priority::Normal);
    world.pass(Duration::from_secs(30));
    assert_eq!(world.core.counters().expired_reservations, 1, "one was committed, one is younger");
    let engine = world.engines.get_mut(&session).expect("open");
    let (late, _) = engine.reserved.remove(0);
    let item = CommitItem { lease: late, key: Some(key(7)), checksums: checksums(1, &large_layout()) };
    let request =
        Request::Commit(CommitRequest { items: vec![item], priority: Priority::Normal, parent: None });
    world.request(session, Asked::Commit(keys(7..8)), request);
    assert_eq!(last_statuses(&world, session), [CommitStatus::NoLease]);
    world.finish_jobs();
    world.commit(session, &keys(1..2), Priority::Normal);
    assert_eq!(last_statuses(&world, session), [CommitStatus::Committed]);
    world.pass(Duration::from_millis(6));
    world.finish_jobs();
    assert_eq!(world.core.counters().reserved_bytes, 0);
    assert_eq!(world.core.next_deadline(), None);
}

#[test]
fn one_session_reserves_a_share_and_leaves_the_rest_to_others() {
    let settings = Settings { arena_session_permille: 250, ..Setup::default().settings };
    let (mut world, session) = with(Setup { settings, ..Setup::default() });
    world.reserve(session, 16);
    assert_eq!(world.engines[&session].reserved.len(), 4);
    let other = world.open_session(TenantId::DEFAULT, large_layout());
    world.reserve(other, 4);
    assert_eq!(world.engines[&other].reserved.len(), 4);
    world.commit(session, &keys(0..4), Priority::Normal);
    world.reserve(session, 4);
    assert_eq!(world.engines[&session].reserved.len(), 4, "what is committed is not reserved");
}

#[test]
fn a_block_that_may_never_be_reserved_is_refused_with_what_to_do() {
    let settings = Settings { arena_session_permille: 50, ..Setup::default().settings };
    let (mut world, session) = with(Setup { settings, ..Setup::default() });
    world.reserve(session, 1);
    let Reply::BadRequest(text) = &world.engines[&session].replies[0].1 else { panic!("not refused") };
    assert!(text.contains("arena_session_permille") && text.contains("arena.bytes"), "{text}");
}

#[test]
fn a_block_committed_again_with_a_higher_priority_is_kept_longer() {
    let (mut world, session) = world();
    save_durably(&mut world, session, &keys(0..15));
    world.reserve(session, 1);
    world.commit(session, &keys(0..1), Priority::High);
    world.reserve(session, 15);
    let resident: Vec<u64> =
        (0..15).filter(|number| world.announced.contains(&(key(*number), Tier::Dram))).collect();
    assert_eq!(resident, [0], "in memory");
}

#[test]
fn a_raised_priority_also_counts_on_devices() {
    let settings = Settings { pool_free_permille: 900, ..Setup::default().settings };
    let (mut world, session) = with(Setup { disks: vec![8 << 20], settings, ..Setup::default() });
    save_durably(&mut world, session, &keys(0..4));
    world.reserve(session, 1);
    world.commit(session, &keys(0..1), Priority::High);
    for start in (10..110).step_by(4) {
        save_durably(&mut world, session, &keys(start..start + 4));
    }
    let on_nvme = |number| world.announced.contains(&(key(number), Tier::Nvme));
    assert!(on_nvme(0) && !on_nvme(1) && !on_nvme(50));
}

#[test]
fn that_blocks_fit_no_segment_is_reported_once_for_a_layout() {
    let huge = layout(32, Parts::KeyValue, 2048);
    let (mut world, _) = with(Setup { region_bytes: huge.slot_bytes(), ..Setup::default() });
    let other = world.open_session(TenantId::DEFAULT, huge);
    save(&mut world, other, &keys(500..502));
    save(&mut world, other, &keys(502..503));
    let payload_bytes_max = (2 << 20) - 4096;
    let report = Report::Unstorable { block_bytes: huge.slot_bytes(), payload_bytes_max };
    assert_eq!(world.reports, [report]);
}
