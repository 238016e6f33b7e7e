//! Scenarios: saving, back-pressure and eviction.

use std::time::Duration;

use reprise_agent_core::Settings;
use reprise_agent_core::effect::{CommitStatus, Diagnostic, LeaseId, PlaceKind, Reply, Source};
use reprise_agent_core::event::{CommitItem, CommitRequest, Priority, Request, Scope};
use reprise_policy::{BlockKey, Parts, SessionId, TenantId, Tier};

use crate::engine::RequestKind;
use crate::harness::{Harness, Setup, key, keys, large_layout, layout, small_layout};
use crate::jobs::Job;
use crate::memory::checksums;

fn harness() -> (Harness, SessionId) {
    with(Setup::default())
}

fn with(setup: Setup) -> (Harness, SessionId) {
    let mut harness = Harness::new(setup);
    let session = harness.open_session(TenantId::DEFAULT, large_layout());
    (harness, session)
}

/// Reserves and commits these keys.
fn save(harness: &mut Harness, session: SessionId, keys: &[BlockKey]) {
    harness.reserve(session, keys.len() as u32);
    harness.commit(session, keys, Priority::Normal);
}

fn save_durably(harness: &mut Harness, session: SessionId, keys: &[BlockKey]) {
    save(harness, session, keys);
    harness.pass(Duration::from_millis(6));
    harness.finish_jobs();
}

fn last_statuses(harness: &Harness, session: SessionId) -> Vec<CommitStatus> {
    match &harness.engines[&session].replies.last().expect("a reply").1 {
        Reply::Committed { statuses, .. } => statuses.clone(),
        other => panic!("not an answer to a commit: {other:?}"),
    }
}

fn sources(harness: &mut Harness, session: SessionId, keys: &[BlockKey]) -> Vec<Source> {
    harness.match_keys(session, keys, Scope::Local);
    match &harness.engines[&session].replies.last().expect("a reply").1 {
        Reply::Matched { sources } => sources.clone(),
        other => panic!("not an answer to a match: {other:?}"),
    }
}

#[test]
fn committed_block_is_readable_at_once_and_durable_after_the_delay() {
    let (mut harness, session) = harness();
    save(&mut harness, session, &keys(0..2));
    assert_eq!(sources(&mut harness, session, &keys(0..3)), [Source::OwnDram; 2]);
    assert!(harness.jobs.is_empty(), "two blocks wait for the delay");
    assert_eq!(harness.core.next_deadline(), Some(harness.now.after(Duration::from_millis(5))));
    harness.pass(Duration::from_millis(5));
    harness.finish_jobs();
    assert_eq!(harness.engines[&session].notices.len(), 1);
    assert_eq!(harness.engines[&session].notices[0].1, 2);
    assert!(
        harness.announced.contains(&(key(0), Tier::Dram))
            && harness.announced.contains(&(key(0), Tier::Nvme))
    );
    assert_eq!(harness.core.next_deadline(), None);
}

#[test]
fn flushes_at_once_when_enough_bytes_are_queued() {
    let (mut harness, session) = harness();
    save(&mut harness, session, &keys(0..4));
    assert_eq!(harness.jobs.len(), 4, "four writes");
    harness.finish_jobs();
    assert_eq!(harness.engines[&session].notices[0].1, 4);
}

#[test]
fn flush_spreads_queued_blocks_over_devices() {
    let (mut harness, session) = with(Setup { disks: vec![8 << 20, 8 << 20], ..Setup::default() });
    save(&mut harness, session, &keys(0..4));
    let on_first =
        harness.jobs.iter().filter(|job| matches!(job, Job::Device { device, .. } if device.0 == 0));
    assert_eq!(on_first.count(), 2);
    harness.finish_jobs();
    assert_eq!(harness.engines[&session].notices[0].1, 4);
}

#[test]
fn full_arena_returns_fewer_slots_and_a_retry_delay() {
    let (mut harness, session) = harness();
    harness.reserve(session, 20);
    assert_eq!(harness.engines[&session].reserved.len(), 16);
    harness.reserve(session, 1);
    assert_eq!(harness.engines[&session].reserved.len(), 16);
    harness.commit(session, &keys(0..16), Priority::Normal);
    harness.reserve(session, 1);
    assert_eq!(harness.engines[&session].reserved.len(), 0, "unsaved blocks are not evicted");
    harness.finish_jobs();
    harness.reserve(session, 1);
    assert_eq!(harness.engines[&session].reserved.len(), 1, "saved blocks are evicted");
    assert_eq!(harness.core.counters().dram_evictions, 1);
}

#[test]
fn failed_reservation_expedites_the_write_back() {
    let settings = Settings { writeback_bytes: 1 << 30, ..Setup::default().settings };
    let (mut harness, session) = with(Setup { settings, ..Setup::default() });
    save(&mut harness, session, &keys(0..16));
    assert!(harness.jobs.is_empty());
    harness.reserve(session, 1);
    assert!(!harness.jobs.is_empty(), "the flush does not wait for the delay");
}

#[test]
fn reservations_and_unsaved_blocks_leave_room_for_loads() {
    let settings = Settings { arena_unsaved_permille: 500, ..Setup::default().settings };
    let (mut harness, session) = with(Setup { settings, ..Setup::default() });
    harness.reserve(session, 16);
    let given = harness.engines[&session].reserved.len();
    assert!((7..=8).contains(&given), "half of 16 slots, not {given}");
}

#[test]
fn abort_releases_slots_and_ignores_unknown_leases() {
    let (mut harness, session) = harness();
    harness.reserve(session, 2);
    let engine = harness.engines.get_mut(&session).expect("open");
    let mut leases: Vec<LeaseId> = engine.reserved.drain(..).map(|(lease, _)| lease).collect();
    leases.extend([leases[0], LeaseId(0), LeaseId(u64::MAX)]);
    harness.request(session, RequestKind::Other, Request::Abort { leases });
    assert_eq!(harness.core.counters().arena_used_bytes, 0);
}

#[test]
fn duplicate_commit_has_the_outcome_of_its_block() {
    let (mut harness, session) = harness();
    harness.reserve(session, 2);
    harness.commit(session, &[key(0), key(0)], Priority::Normal);
    assert_eq!(last_statuses(&harness, session), [CommitStatus::Committed, CommitStatus::Duplicate]);
    let other = harness.open_session(TenantId::DEFAULT, large_layout());
    save(&mut harness, other, &[key(0)]);
    assert_eq!(last_statuses(&harness, other), [CommitStatus::Duplicate]);
    assert!(harness.engines[&other].notices.is_empty(), "the block is not durable yet");
    assert_eq!(harness.core.counters().arena_used_bytes, large_layout().slot_bytes());
    harness.pass(Duration::from_millis(6));
    harness.finish_jobs();
    assert_eq!(harness.engines[&session].notices[0].1, 2);
    assert_eq!(harness.engines[&other].notices[0].1, 1);
    save(&mut harness, other, &[key(0)]);
    assert_eq!(harness.engines[&other].notices[1].1, 1, "a duplicate of a durable block is durable at once");
}

#[test]
fn invalid_item_releases_its_slot_and_is_reported() {
    let (mut harness, session) = harness();
    harness.reserve(session, 3);
    let leases: Vec<LeaseId> = harness.engines[&session].reserved.iter().map(|(lease, _)| *lease).collect();
    let good = checksums(1, &large_layout());
    let items = vec![
        CommitItem { lease: leases[0], key: None, checksums: good.clone() },
        CommitItem { lease: leases[1], key: Some(key(1)), checksums: good[1..].into() },
        CommitItem { lease: LeaseId(77), key: Some(key(2)), checksums: good.clone() },
    ];
    let kind = RequestKind::Commit(keys(0..3));
    harness.request(
        session,
        kind,
        Request::Commit(CommitRequest { items, priority: Priority::Normal, parent: None, position: Some(0) }),
    );
    let expected = [CommitStatus::BadItem, CommitStatus::BadItem, CommitStatus::NoLease];
    assert_eq!(last_statuses(&harness, session), expected);
    assert_eq!(harness.core.counters().arena_used_bytes, large_layout().slot_bytes());
    let other = harness.open_session(TenantId::DEFAULT, large_layout());
    let foreign_item = vec![CommitItem { lease: leases[2], key: Some(key(3)), checksums: good }];
    let request = Request::Commit(CommitRequest {
        items: foreign_item,
        priority: Priority::Normal,
        parent: None,
        position: Some(0),
    });
    harness.request(other, RequestKind::Commit(keys(3..4)), request);
    assert_eq!(last_statuses(&harness, other), [CommitStatus::NoLease], "a lease belongs to its session");
    assert_eq!(harness.core.counters().reserved_bytes, large_layout().slot_bytes());
}

#[test]
fn empty_commit_gets_a_reply_and_a_notice() {
    let (mut harness, session) = harness();
    harness.commit(session, &[], Priority::Normal);
    assert_eq!(harness.engines[&session].notices.len(), 1);
}

#[test]
fn agent_without_devices_caches_and_reports_blocks_as_lost() {
    let (mut harness, session) = with(Setup { disks: Vec::new(), ..Setup::default() });
    save(&mut harness, session, &keys(0..16));
    assert_eq!(harness.engines[&session].notices[0].2, keys(0..16));
    assert_eq!(sources(&mut harness, session, &keys(0..16)).len(), 16);
    save(&mut harness, session, &keys(16..20));
    assert_eq!(sources(&mut harness, session, &keys(16..20)).len(), 4, "cached blocks are evicted");
    assert_eq!(sources(&mut harness, session, &keys(0..16)).len(), 12);
    assert!(!harness.announced.contains(&(key(15), Tier::Dram)));
}

#[test]
fn evicts_low_priority_first_then_least_recently_used() {
    let (mut harness, session) = harness();
    harness.reserve(session, 16);
    harness.commit(session, &keys(0..8), Priority::Normal);
    harness.commit(session, &keys(8..12), Priority::High);
    harness.commit(session, &keys(12..16), Priority::Low);
    harness.finish_jobs();
    harness.pass(Duration::from_millis(6));
    harness.finish_jobs();
    // Key 0 is used again.
    harness.load(session, &keys(0..1), Duration::ZERO, Scope::Local);
    let load = *harness.engines[&session].loads.keys().next().expect("a load");
    harness.release(session, load);
    harness.reserve(session, 11);
    let resident = |key: BlockKey| harness.announced.contains(&(key, Tier::Dram));
    assert!(keys(12..16).into_iter().all(|key| !resident(key)), "low priority is evicted first");
    assert!(keys(1..8).into_iter().all(|key| !resident(key)), "then the least recently used");
    assert!(resident(key(0)) && keys(8..12).into_iter().all(resident));
}

#[test]
fn leased_block_is_never_evicted() {
    let (mut harness, session) = harness();
    save_durably(&mut harness, session, &keys(0..16));
    harness.load(session, &keys(0..4), Duration::ZERO, Scope::Local);
    harness.reserve(session, 16);
    assert_eq!(harness.engines[&session].reserved.len(), 12);
    harness.read_all();
}

#[test]
fn layout_takes_over_idle_regions_of_another_layout() {
    let (mut harness, session) = harness();
    save_durably(&mut harness, session, &keys(0..16));
    let small = harness.open_session(TenantId::DEFAULT, small_layout());
    harness.reserve(small, 31);
    let per_region = (4 * large_layout().slot_bytes() / small_layout().slot_bytes()) as usize;
    assert_eq!(per_region, 30);
    assert_eq!(harness.engines[&small].reserved.len(), 31, "two regions were reclaimed");
    assert_eq!(harness.core.counters().dram_blocks, 8);
    harness.close_session(small);
    harness.reserve(session, 16);
    assert_eq!(harness.engines[&session].reserved.len(), 16);
}

#[test]
fn memory_and_blocks_of_another_tenant_are_inaccessible() {
    let (mut harness, session) = harness();
    save_durably(&mut harness, session, &keys(0..16));
    let other_session = harness.open_session(TenantId(7), large_layout());
    assert!(sources(&mut harness, other_session, &keys(0..1)).is_empty());
    harness.reserve(other_session, 1);
    assert!(
        harness.engines[&other_session].reserved.is_empty(),
        "memory with a tenant's data never changes tenants"
    );
}

#[test]
fn closing_a_session_releases_its_slots_and_tickets() {
    let (mut harness, session) = harness();
    harness.reserve(session, 6);
    harness.commit(session, &keys(0..3), Priority::Normal);
    harness.close_session(session);
    assert_eq!(harness.core.counters().arena_used_bytes, 3 * large_layout().slot_bytes());
    harness.pass(Duration::from_millis(6));
    harness.finish_jobs();
    assert_eq!(harness.core.counters().nvme_blocks, 3, "committed blocks are saved nevertheless");
}

#[test]
fn rejects_block_larger_than_a_region_with_a_remedy() {
    let (mut harness, _) = with(Setup { region_bytes: 16 << 10, ..Setup::default() });
    let session = *harness.engines.keys().next().expect("open");
    harness.request(session, RequestKind::Other, Request::Reserve { count: 1, kind: PlaceKind::Arena });
    let Reply::BadRequest(text) = &harness.engines[&session].replies[0].1 else { panic!("not rejected") };
    assert!(text.contains("arena.region_bytes"), "{text}");
}

#[test]
fn requests_of_an_unopened_session_are_busy() {
    let (mut harness, session) = harness();
    let engine = harness.engines.remove(&session).expect("open");
    harness.close_session(session);
    harness.engines.insert(session, engine);
    harness.request(session, RequestKind::Other, Request::Stats);
    assert!(matches!(harness.engines[&session].replies[0].1, Reply::Busy { .. }));
}

#[test]
fn stats_contain_all_counters_by_name() {
    let (mut harness, session) = harness();
    save(&mut harness, session, &keys(0..2));
    harness.request(session, RequestKind::Other, Request::Stats);
    let Reply::Stats(stats) = &harness.engines[&session].replies.last().expect("a reply").1 else {
        panic!("no stats")
    };
    assert_eq!(stats.iter().find(|(name, _)| *name == "committed_blocks"), Some(&("committed_blocks", 2)));
    let own = harness.core.tenant_usage().next().expect("the default tenant").fields();
    assert!(own.iter().all(|field| stats.contains(field)), "including those of the session's tenant");
    assert_eq!(stats.len(), harness.core.counters().fields().count() + own.len());
}

#[test]
fn reservation_expires_if_not_committed_in_time() {
    let (mut harness, session) = harness();
    harness.reserve(session, 2);
    harness.pass(Duration::from_secs(30));
    harness.reserve(session, 1);
    harness.commit(session, &keys(0..1), Priority::Normal);
    harness.pass(Duration::from_secs(30));
    assert_eq!(harness.core.counters().expired_reservations, 1, "one was committed, one is younger");
    let engine = harness.engines.get_mut(&session).expect("open");
    let (late, _) = engine.reserved.remove(0);
    let item = CommitItem { lease: late, key: Some(key(7)), checksums: checksums(1, &large_layout()) };
    let request = Request::Commit(CommitRequest {
        items: vec![item],
        priority: Priority::Normal,
        parent: None,
        position: Some(0),
    });
    harness.request(session, RequestKind::Commit(keys(7..8)), request);
    assert_eq!(last_statuses(&harness, session), [CommitStatus::NoLease]);
    harness.finish_jobs();
    harness.commit(session, &keys(1..2), Priority::Normal);
    assert_eq!(last_statuses(&harness, session), [CommitStatus::Committed]);
    harness.pass(Duration::from_millis(6));
    harness.finish_jobs();
    assert_eq!(harness.core.counters().reserved_bytes, 0);
    assert_eq!(harness.core.next_deadline(), None);
}

#[test]
fn one_session_can_reserve_only_its_share() {
    let settings = Settings { arena_session_permille: 250, ..Setup::default().settings };
    let (mut harness, session) = with(Setup { settings, ..Setup::default() });
    harness.reserve(session, 16);
    assert_eq!(harness.engines[&session].reserved.len(), 4);
    let other = harness.open_session(TenantId::DEFAULT, large_layout());
    harness.reserve(other, 4);
    assert_eq!(harness.engines[&other].reserved.len(), 4);
    harness.commit(session, &keys(0..4), Priority::Normal);
    harness.reserve(session, 4);
    assert_eq!(harness.engines[&session].reserved.len(), 4, "committed slots are no longer reserved");
}

#[test]
fn rejects_block_larger_than_the_shares_with_a_remedy() {
    let settings = Settings { arena_session_permille: 50, ..Setup::default().settings };
    let (mut harness, session) = with(Setup { settings, ..Setup::default() });
    harness.reserve(session, 1);
    let Reply::BadRequest(text) = &harness.engines[&session].replies[0].1 else { panic!("not rejected") };
    assert!(text.contains("arena_session_permille") && text.contains("arena.bytes"), "{text}");
}

#[test]
fn duplicate_commit_with_higher_priority_is_evicted_later() {
    let (mut harness, session) = harness();
    save_durably(&mut harness, session, &keys(0..15));
    harness.reserve(session, 1);
    harness.commit(session, &keys(0..1), Priority::High);
    harness.reserve(session, 15);
    let resident: Vec<u64> =
        (0..15).filter(|number| harness.announced.contains(&(key(*number), Tier::Dram))).collect();
    assert_eq!(resident, [0], "in DRAM");
}

#[test]
fn raised_priority_also_counts_on_devices() {
    let settings = Settings { pool_free_permille: 900, ..Setup::default().settings };
    let (mut harness, session) = with(Setup { disks: vec![8 << 20], settings, ..Setup::default() });
    save_durably(&mut harness, session, &keys(0..4));
    harness.reserve(session, 1);
    harness.commit(session, &keys(0..1), Priority::High);
    for start in (10..110).step_by(4) {
        save_durably(&mut harness, session, &keys(start..start + 4));
    }
    let on_nvme = |number| harness.announced.contains(&(key(number), Tier::Nvme));
    assert!(on_nvme(0) && !on_nvme(1) && !on_nvme(50));
}

#[test]
fn unstorable_layout_is_reported_once() {
    let huge = layout(32, Parts::KeyValue, 2048);
    let (mut harness, _) = with(Setup { region_bytes: huge.slot_bytes(), ..Setup::default() });
    let other = harness.open_session(TenantId::DEFAULT, huge);
    save(&mut harness, other, &keys(500..502));
    save(&mut harness, other, &keys(502..503));
    let payload_bytes_max = (2 << 20) - 4096;
    let report = Diagnostic::Unstorable { block_bytes: huge.slot_bytes(), payload_bytes_max };
    assert_eq!(harness.reports, [report]);
}
