//! Scenarios: hints of engines, and blocks that are read ahead of their load.

use std::time::Duration;

use reprise_agent_core::effect::{LoadedBlock, Reply, Source};
use reprise_agent_core::event::{FillError, Lookahead, Priority, Ranks, Request, Scope};
use reprise_agent_core::limits::{
    LOOKAHEAD_READY_STEPS_MAX, LOOKAHEAD_REQUESTS_MAX, LOOKAHEAD_SESSION_KEYS_MAX, LOOKAHEAD_STAGED_MAX,
    PREFETCH_ATTEMPTS_MAX,
};
use reprise_agent_core::{Counters, Settings, TenantQuotas};
use reprise_policy::prefetch::{BegunRequest, HINT_VERSION, LookaheadReport, LookaheadRequest, RequestState};
use reprise_policy::quota::Quota;
use reprise_policy::{BlockKey, LayoutSpec, SessionId, TenantId};

use crate::engine::RequestKind;
use crate::harness::{Harness, Setup, key, keys, large_layout, small_layout};
use crate::jobs::Job;
use crate::rng::Rng;

const ITERATION: Duration = Duration::from_millis(20);

/// Blocks that one session may stage: an eighth of the 32 slots of [`cold_harness`].
const SESSION_BLOCKS: u64 = 4;

/// Harness with `blocks` blocks on NVMe only, and 32 slots in DRAM.
fn cold_harness(blocks: u64) -> (Harness, SessionId) {
    let mut harness = Harness::new(Setup { regions: 8, ..Setup::default() });
    let session = harness.open_session(TenantId::DEFAULT, large_layout());
    harness.reserve(session, blocks as u32);
    harness.commit(session, &keys(0..blocks), Priority::Normal);
    harness.pass(Duration::from_millis(6));
    harness.finish_jobs();
    harness.request(session, RequestKind::Other, Request::Trim);
    (harness, session)
}

fn waits(request: u64, iterations: u32, keys: &[BlockKey]) -> LookaheadRequest {
    LookaheadRequest { request, iterations, confidence: 1000, keys: keys.to_vec() }
}

fn lookahead(requests: Vec<LookaheadRequest>) -> Lookahead {
    Lookahead { version: HINT_VERSION, iteration: ITERATION, requests, ..Lookahead::default() }
}

/// Sends a hint and returns its answer.
fn hint(harness: &mut Harness, session: SessionId, lookahead: Lookahead) -> Reply {
    harness.request(session, RequestKind::Other, Request::Lookahead(lookahead));
    harness.engines[&session].replies.last().expect("a reply").1.clone()
}

fn report(harness: &mut Harness, session: SessionId, lookahead: Lookahead) -> LookaheadReport {
    match hint(harness, session, lookahead) {
        Reply::LookaheadAccepted(report) => report,
        other => panic!("a hint is answered with {other:?}"),
    }
}

fn load(harness: &mut Harness, session: SessionId, keys: &[BlockKey]) -> Vec<Option<Source>> {
    harness.load(session, keys, Duration::from_millis(50), Scope::Local);
    match &harness.engines[&session].replies.last().expect("a reply").1 {
        Reply::Loaded { blocks, .. } => blocks.iter().map(source).collect(),
        _ => Vec::new(),
    }
}

fn source(block: &LoadedBlock) -> Option<Source> {
    match block {
        LoadedBlock::Ok { source, .. } => Some(*source),
        LoadedBlock::Lost(_) => None,
    }
}

fn counters(harness: &Harness) -> Counters {
    harness.core.counters()
}

/// Advances a read with `from` layers to `to` layers.
fn advance_fill_at(harness: &mut Harness, from: u32, to: u32) {
    let at_layers = |job: &Job| matches!(job, Job::Read { layers, .. } if *layers == from);
    let job = harness.jobs.iter().position(at_layers).expect("a read with that many layers");
    harness.advance_to(job, to);
}

#[test]
fn listed_blocks_are_in_dram_before_their_load_and_count_as_used() {
    let (mut harness, session) = cold_harness(4);
    let first = report(&mut harness, session, lookahead(vec![waits(7, 4, &keys(0..4))]));
    assert_eq!((first.ignored, first.ready), (0, vec![]));
    assert_eq!(harness.fills().len(), 4);
    harness.finish_jobs();
    let second = report(&mut harness, session, lookahead(vec![waits(7, 3, &[])]));
    assert_eq!(second.ready, [7], "the blocks are known from the first hint");
    assert_eq!(load(&mut harness, session, &keys(0..4)), [Some(Source::OwnDram); 4]);
    let counted = counters(&harness);
    assert_eq!((counted.prefetch_blocks, counted.prefetch_used_blocks), (4, 4));
    assert_eq!((counted.prefetch_wasted_bytes, counted.prefetch_staged_bytes), (0, 0));
    harness.read_all();
}

#[test]
fn without_hints_nothing_is_read_ahead() {
    let (mut harness, session) = cold_harness(4);
    harness.pass(Duration::from_secs(60));
    assert_eq!(harness.fills().len(), 0);
    load(&mut harness, session, &keys(0..2));
    assert_eq!(harness.fills().len(), 2);
    harness.finish_jobs();
    let prefetch = |(name, value): (&str, u64)| (name.starts_with("prefetch_") && value > 0).then_some(value);
    assert_eq!(counters(&harness).fields().find_map(prefetch), None);
}

#[test]
fn load_of_a_block_in_flight_waits_for_the_remainder_only() {
    let (mut harness, session) = cold_harness(2);
    hint(&mut harness, session, lookahead(vec![waits(7, 4, &keys(0..2))]));
    advance_fill_at(&mut harness, 0, 2);
    advance_fill_at(&mut harness, 0, 3);
    assert_eq!(load(&mut harness, session, &keys(0..2)), [Some(Source::OwnNvme); 2], "two layers are there");
    assert_eq!(harness.fills().len(), 2, "no second read");
    assert_eq!(harness.promoted.len(), 2, "the load waits for both");
    load(&mut harness, session, &keys(0..2));
    assert_eq!(harness.promoted.len(), 2, "awaited reads are promoted once");
    harness.finish_jobs();
    let counted = counters(&harness);
    assert_eq!((counted.prefetch_used_blocks, counted.prefetch_joined_blocks), (2, 2));
    assert_eq!((counted.prefetch_staged_bytes, counted.device_fills), (0, 2));
    harness.read_all();
}

#[test]
fn staged_blocks_never_exceed_the_sessions_share_of_the_arena() {
    let (mut harness, session) = cold_harness(16);
    let requests = (0..8).map(|number| waits(number, 4, &keys(2 * number..2 * number + 2))).collect();
    hint(&mut harness, session, lookahead(requests));
    assert_eq!(harness.fills().len() as u64, SESSION_BLOCKS);
    harness.finish_jobs();
    let slot = large_layout().slot_bytes();
    assert_eq!(counters(&harness).prefetch_staged_bytes, SESSION_BLOCKS * slot);
    // Loads of the first two requests make room for the next two.
    load(&mut harness, session, &keys(0..4));
    let rest = (2..8).map(|number| waits(number, 3, &[])).collect();
    hint(&mut harness, session, lookahead(rest));
    assert_eq!(harness.fills().len() as u64, SESSION_BLOCKS);
    harness.finish_jobs();
    assert_eq!(load(&mut harness, session, &keys(4..8)), [Some(Source::OwnDram); 4]);
}

#[test]
fn nearest_request_is_read_first() {
    let (mut harness, session) = cold_harness(16);
    hint(&mut harness, session, lookahead(vec![waits(1, 4, &keys(0..8)), waits(2, 1, &keys(8..12))]));
    harness.finish_jobs();
    assert_eq!(load(&mut harness, session, &keys(8..12)), [Some(Source::OwnDram); 4]);
}

#[test]
fn preemption_and_finish_cancel_and_count_as_waste() {
    let (mut harness, session) = cold_harness(8);
    hint(&mut harness, session, lookahead(vec![waits(1, 4, &keys(0..2)), waits(2, 4, &keys(2..4))]));
    harness.advance_to(harness.fills()[0], 4);
    let cancelled = Lookahead { cancelled: vec![1, 2, 99], ..lookahead(vec![]) };
    assert_eq!(report(&mut harness, session, cancelled).ignored, 0);
    let counted = counters(&harness);
    let payload = large_layout().block_bytes();
    assert_eq!((counted.prefetch_cancelled_requests, counted.prefetch_wasted_bytes), (2, 4 * payload));
    assert_eq!((counted.prefetch_staged_bytes, counted.read_leases), (0, 0));
    harness.finish_jobs();
    assert_eq!(load(&mut harness, session, &keys(0..4)), [Some(Source::OwnDram); 4], "still cached");
}

#[test]
fn request_that_begins_too_early_is_a_missed_window_and_loads_as_without_a_hint() {
    let (mut harness, session) = cold_harness(8);
    hint(&mut harness, session, lookahead(vec![waits(1, 4, &keys(0..8))]));
    assert_eq!(harness.fills().len() as u64, SESSION_BLOCKS);
    hint(&mut harness, session, lookahead(vec![]));
    assert_eq!(counters(&harness).prefetch_missed_windows, 1);
    harness.load(session, &keys(0..8), Duration::from_millis(50), Scope::Local);
    harness.finish_jobs();
    let counted = counters(&harness);
    assert_eq!((counted.prefetch_used_blocks, counted.prefetch_wasted_bytes), (SESSION_BLOCKS, 0));
    assert_eq!((counted.device_fills, counted.failed_blocks), (8, 0));
    harness.read_all();
}

#[test]
fn blocks_of_a_request_that_never_loads_are_released() {
    let (mut harness, session) = cold_harness(4);
    hint(&mut harness, session, lookahead(vec![waits(1, 4, &keys(0..2))]));
    harness.finish_jobs();
    hint(&mut harness, session, lookahead(vec![]));
    assert!(counters(&harness).prefetch_staged_bytes > 0, "its load is expected");
    harness.pass(Duration::from_secs(2));
    let counted = counters(&harness);
    assert_eq!(counted.prefetch_staged_bytes, 0);
    assert_eq!(counted.prefetch_wasted_bytes, 2 * large_layout().block_bytes());
}

#[test]
fn request_that_an_engine_never_finishes_expires() {
    let (mut harness, session) = cold_harness(4);
    hint(&mut harness, session, lookahead(vec![waits(1, 4, &keys(0..2))]));
    harness.finish_jobs();
    for number in 0..40 {
        harness.pass(LOOKAHEAD_STAGED_MAX / 20);
        // With and without its keys.
        let keys = keys(0..2 * (number % 2));
        hint(&mut harness, session, lookahead(vec![waits(1, 4, &keys)]));
    }
    let counted = counters(&harness);
    assert_eq!((counted.prefetch_expired_requests, counted.prefetch_staged_bytes), (1, 0));
    assert_eq!(counted.prefetch_blocks, 2, "an expired request is not read again");
}

#[test]
fn invalid_parts_of_hints_are_ignored_and_counted() {
    let (mut harness, session) = cold_harness(4);
    let uncertain = LookaheadRequest { confidence: 0, ..waits(3, 1, &keys(0..1)) };
    let requests = vec![
        waits(1, 0, &keys(0..1)),
        waits(2, 4, &[]),
        uncertain,
        waits(4, 4, &[key(90), key(1)]),
        waits(4, 4, &keys(0..1)),
    ];
    let zero = Lookahead { iteration: Duration::ZERO, ..lookahead(requests) };
    let ignored = report(&mut harness, session, zero);
    assert_eq!((ignored.ignored, ignored.ready), (5, vec![]), "the time, and four requests");
    assert_eq!(harness.fills().len(), 0, "no time is known yet");
    hint(&mut harness, session, Lookahead { iteration: Duration::from_secs(61), ..lookahead(vec![]) });
    let counted = counters(&harness);
    assert_eq!((counted.prefetch_ignored_times, counted.prefetch_ignored_requests), (2, 4));
    assert_eq!(counted.prefetch_unknown_keys, 1);
}

#[test]
fn hints_of_another_version_or_size_are_rejected_with_the_remedy() {
    let (mut harness, session) = cold_harness(4);
    let many = (0..=LOOKAHEAD_REQUESTS_MAX as u64).map(|number| waits(number, 1, &[])).collect();
    let newer = Lookahead { version: HINT_VERSION + 1, ..lookahead(vec![waits(1, 4, &keys(0..2))]) };
    for (lookahead, words) in [
        (newer, "unknown version 3: expected 2"),
        (lookahead(many), "1025 requests: expected at most 1024"),
        (lookahead(vec![waits(1, 1, &vec![key(0); 65_537])]), "65537 keys: expected at most 65536"),
    ] {
        let Reply::BadRequest(text) = hint(&mut harness, session, lookahead) else { panic!("accepted") };
        assert!(text.contains(words), "{text}");
    }
    let counted = counters(&harness);
    assert_eq!((counted.prefetch_rejected_hints, counted.prefetch_blocks), (3, 0));
    assert_eq!(harness.fills().len(), 0);
}

#[test]
fn keys_of_another_tenant_or_layout_are_unknown() {
    let (mut harness, session) = cold_harness(4);
    let foreign = harness.open_session(TenantId(1), large_layout());
    let other = harness.open_session(TenantId::DEFAULT, small_layout());
    for session in [foreign, other] {
        hint(&mut harness, session, lookahead(vec![waits(1, 4, &keys(0..2))]));
    }
    assert_eq!((harness.fills().len(), counters(&harness).prefetch_unknown_keys), (0, 4));
    hint(&mut harness, session, lookahead(vec![waits(1, 4, &keys(0..2))]));
    harness.finish_jobs();
    load(&mut harness, foreign, &keys(0..2));
    assert_eq!(counters(&harness).prefetch_used_blocks, 0, "the load of another tenant finds nothing");
}

#[test]
fn end_of_a_session_releases_its_staged_blocks() {
    let (mut harness, session) = cold_harness(4);
    hint(&mut harness, session, lookahead(vec![waits(1, 4, &keys(0..4))]));
    harness.advance_to(harness.fills()[0], 4);
    harness.close_session(session);
    harness.finish_jobs();
    let counted = counters(&harness);
    assert_eq!((counted.prefetch_staged_bytes, counted.read_leases), (0, 0));
    assert_eq!(harness.core.next_deadline(), None);
}

#[test]
fn shared_prefix_is_read_once_for_all_requests() {
    let (mut harness, session) = cold_harness(4);
    let requests = (0..10).map(|number| waits(number, 4, &keys(0..2))).collect();
    hint(&mut harness, session, lookahead(requests));
    assert_eq!(harness.fills().len(), 2);
    harness.finish_jobs();
    let requests = (0..10).map(|number| waits(number, 3, &[])).collect();
    hint(&mut harness, session, lookahead(requests));
    let cancelled = Lookahead { cancelled: (0..9).collect(), ..lookahead(vec![waits(9, 2, &[])]) };
    assert_eq!(report(&mut harness, session, cancelled).ready, [9]);
    assert_eq!(counters(&harness).prefetch_wasted_bytes, 0, "one request still holds them");
    assert_eq!(load(&mut harness, session, &keys(0..2)), [Some(Source::OwnDram); 2]);
}

#[test]
fn block_that_cannot_be_read_ahead_is_loaded_from_another_source_or_missed() {
    let (mut harness, session) = cold_harness(2);
    hint(&mut harness, session, lookahead(vec![waits(1, 4, &keys(0..2))]));
    harness.fail(harness.fills()[0], FillError::Device);
    harness.finish_jobs();
    let counted = counters(&harness);
    assert_eq!((counted.prefetch_failed_blocks, counted.prefetch_blocks), (1, 1));
    assert_eq!(load(&mut harness, session, &keys(0..2)), [None, Some(Source::OwnDram)]);
}

/// Harness as [`cold_harness`] for a tenant with a DRAM limit.
fn limited_harness(blocks: u64, limit_slots: u64) -> (Harness, SessionId) {
    let limit = Quota::new(0, limit_slots * large_layout().slot_bytes()).expect("valid");
    let tenant = TenantQuotas { tenant: TenantId(1), dram: limit, nvme: Quota::UNLIMITED };
    let settings = Settings { tenants: vec![tenant], ..Setup::default().settings };
    let mut harness = Harness::new(Setup { regions: 8, settings, ..Setup::default() });
    let session = harness.open_session(TenantId(1), large_layout());
    harness.reserve(session, blocks as u32);
    harness.commit(session, &keys(0..blocks), Priority::Normal);
    harness.pass(Duration::from_millis(6));
    harness.finish_jobs();
    harness.request(session, RequestKind::Other, Request::Trim);
    (harness, session)
}

#[test]
fn staged_blocks_use_the_same_share_of_a_tenants_dram_limit_as_of_the_arena() {
    // A quarter of 16 slots for the tenant, half of that for a session.
    let (mut harness, session) = limited_harness(8, 16);
    hint(&mut harness, session, lookahead(vec![waits(1, 4, &keys(0..8))]));
    assert_eq!(harness.fills().len(), 2);
    let others: Vec<SessionId> = (0..2).map(|_| harness.open_session(TenantId(1), large_layout())).collect();
    hint(&mut harness, others[0], lookahead(vec![waits(1, 4, &keys(2..8))]));
    hint(&mut harness, others[1], lookahead(vec![waits(1, 4, &keys(4..8))]));
    assert_eq!(harness.fills().len(), 4, "the sessions of a tenant share its limit");
    harness.finish_jobs();
    harness.load(session, &keys(4..8), Duration::from_millis(50), Scope::Local);
    harness.finish_jobs();
    assert_eq!(counters(&harness).failed_blocks, 0, "loads of the tenant find room");
}

#[test]
fn keys_of_staged_blocks_and_blocks_in_dram_count_toward_the_limit_of_a_session() {
    let (mut harness, session) = cold_harness(2);
    load(&mut harness, session, &keys(0..2));
    harness.finish_jobs();
    let many: Vec<BlockKey> = keys(0..2).into_iter().cycle().take(LOOKAHEAD_SESSION_KEYS_MAX / 2).collect();
    let hinted = lookahead((0..4).map(|number| waits(number, 4, &many)).collect());
    assert_eq!(report(&mut harness, session, hinted).ignored, 2, "two requests reach the limit");
    assert_eq!(counters(&harness).prefetch_ignored_requests, 2);
    let hinted = Lookahead { cancelled: vec![0], ..lookahead(vec![waits(1, 3, &[]), waits(2, 4, &many)]) };
    assert_eq!(report(&mut harness, session, hinted).ignored, 0, "a cancelled request makes room");
}

#[test]
fn request_whose_entry_is_ignored_has_not_begun() {
    let (mut harness, session) = cold_harness(4);
    hint(&mut harness, session, lookahead(vec![waits(1, 4, &keys(0..4)), waits(2, 4, &keys(0..1))]));
    harness.finish_jobs();
    for iterations in [0, 0, 2] {
        let uncertain = LookaheadRequest { confidence: 1001, ..waits(2, 4, &[]) };
        hint(&mut harness, session, lookahead(vec![waits(1, iterations, &[]), uncertain]));
        harness.pass(Duration::from_secs(2));
    }
    let counted = counters(&harness);
    assert_eq!((counted.prefetch_missed_windows, counted.prefetch_wasted_bytes), (0, 0));
    assert_eq!(report(&mut harness, session, lookahead(vec![waits(1, 1, &[])])).ready, [1]);
}

#[test]
fn request_is_ready_only_while_its_blocks_are_readable_in_dram() {
    let (mut harness, session) = cold_harness(2);
    let other = harness.open_session(TenantId::DEFAULT, large_layout());
    harness.load(other, &keys(0..1), Duration::from_millis(50), Scope::Local);
    let listed = |iterations| lookahead(vec![waits(1, iterations, &keys(0..1))]);
    assert_eq!(report(&mut harness, session, listed(4)).ready, [], "a load is reading it");
    harness.finish_jobs();
    assert_eq!(report(&mut harness, session, lookahead(vec![waits(1, 3, &[])])).ready, [1]);
    harness.close_session(other);
    harness.request(session, RequestKind::Other, Request::Trim);
    assert_eq!(report(&mut harness, session, lookahead(vec![waits(1, 2, &[])])).ready, [], "evicted");
    report(&mut harness, session, lookahead(vec![waits(1, 2, &[])]));
    assert_eq!(harness.fills().len(), 1, "it is read ahead");
    harness.finish_jobs();
    assert_eq!(report(&mut harness, session, lookahead(vec![waits(1, 1, &[])])).ready, [1]);
    harness.request(session, RequestKind::Other, Request::Trim);
    assert_eq!(report(&mut harness, session, lookahead(vec![waits(1, 1, &[])])).ready, [1], "it is leased");
}

#[test]
fn request_with_more_blocks_than_one_hint_examines_becomes_ready_and_hides_none() {
    let (mut harness, session) = cold_harness(8);
    let other = harness.open_session(TenantId::DEFAULT, large_layout());
    harness.load(other, &keys(0..8), Duration::from_millis(50), Scope::Local);
    harness.finish_jobs();
    harness.close_session(other);
    let many: Vec<BlockKey> = keys(0..4).repeat(2500);
    assert!(many.len() > 2 * LOOKAHEAD_READY_STEPS_MAX);
    let mut requests = vec![waits(1, 3, &many), waits(2, 3, &keys(4..8))];
    let mut hints = Vec::new();
    for _ in 0..6 {
        hints.push(report(&mut harness, session, lookahead(requests)).ready);
        requests = vec![waits(1, 3, &[]), waits(2, 3, &[])];
    }
    let of_both = hints.iter().position(|ready| *ready == [1, 2]).expect("ready within six hints");
    assert!(hints[..of_both].iter().all(|ready| *ready == [2]), "{hints:?}");
    assert!(hints[of_both..].iter().all(|ready| *ready == [1, 2]), "it stays ready: {hints:?}");
    harness.request(session, RequestKind::Other, Request::Trim);
    assert_eq!(report(&mut harness, session, lookahead(requests)).ready, [], "evicted");
}

#[test]
fn failed_read_ahead_is_tried_again_by_later_hints_a_bounded_number_of_times() {
    let (mut harness, session) = cold_harness(1);
    hint(&mut harness, session, lookahead(vec![waits(1, 4, &keys(0..1))]));
    for attempt in 1..PREFETCH_ATTEMPTS_MAX {
        harness.fail(harness.fills()[0], FillError::Refused);
        assert_eq!(report(&mut harness, session, lookahead(vec![waits(1, 3, &[])])).ready, []);
        assert_eq!(harness.fills().len(), 1, "attempt {attempt} is followed by another one");
    }
    harness.fail(harness.fills()[0], FillError::Refused);
    hint(&mut harness, session, lookahead(vec![waits(1, 3, &[])]));
    assert_eq!(harness.fills().len(), 0);
    assert_eq!(counters(&harness).prefetch_failed_blocks, u64::from(PREFETCH_ATTEMPTS_MAX));
    let (mut harness, session) = cold_harness(1);
    hint(&mut harness, session, lookahead(vec![waits(1, 4, &keys(0..1))]));
    harness.fail(harness.fills()[0], FillError::Refused);
    hint(&mut harness, session, lookahead(vec![waits(1, 3, &[])]));
    harness.finish_jobs();
    assert_eq!(report(&mut harness, session, lookahead(vec![waits(1, 2, &[])])).ready, [1]);
    assert_eq!(load(&mut harness, session, &keys(0..1)), [Some(Source::OwnDram)]);
}

#[test]
fn pins_of_staged_blocks_count_as_use() {
    let (mut harness, session) = cold_harness(2);
    hint(&mut harness, session, lookahead(vec![waits(1, 4, &keys(0..2))]));
    harness.finish_jobs();
    harness.pin_extents(session, &[key(0), key(1), key(90)]);
    let counted = counters(&harness);
    assert_eq!((counted.prefetch_used_blocks, counted.prefetch_staged_bytes), (2, 0));
    hint(&mut harness, session, lookahead(vec![]));
    harness.pass(Duration::from_secs(20));
    assert_eq!(counters(&harness).prefetch_wasted_bytes, 0);
}

#[test]
fn blocks_that_wait_are_counted_once_for_each_cause() {
    let (mut harness, session) = cold_harness(16);
    hint(&mut harness, session, lookahead(vec![waits(1, 4, &keys(0..16))]));
    for _ in 0..5 {
        hint(&mut harness, session, lookahead(vec![waits(1, 4, &[])]));
    }
    assert_eq!(counters(&harness).prefetch_unstaged_blocks, 16 - SESSION_BLOCKS);
    let (mut harness, session) = cold_harness(16);
    let slow = |request| Lookahead { iteration: Duration::from_micros(100), ..lookahead(vec![request]) };
    hint(&mut harness, session, slow(waits(1, 2, &keys(0..16))));
    let (deferred, late) =
        (counters(&harness).prefetch_deferred_blocks, counters(&harness).prefetch_late_blocks);
    assert!(late > 0 && late <= 16, "{late} of 16 blocks cannot arrive within 200 µs");
    for _ in 0..5 {
        hint(&mut harness, session, slow(waits(1, 2, &[])));
    }
    let counted = counters(&harness);
    assert!(counted.prefetch_late_blocks <= 16 && counted.prefetch_deferred_blocks <= 16);
    assert!(counted.prefetch_late_blocks >= late && counted.prefetch_deferred_blocks >= deferred);
}

#[test]
fn block_of_a_tensor_parallel_group_is_ready_once_the_parts_of_all_ranks_are_in_dram() {
    let mut harness = Harness::new(Setup { regions: 8, ..Setup::default() });
    let layout_of =
        |tp_rank| LayoutSpec { tp_rank, tp_size: 2, ..*large_layout().spec() }.validate().expect("valid");
    let sessions = [0, 1].map(|rank| harness.open_session(TenantId::DEFAULT, layout_of(rank)));
    for (rank, session) in (0..).zip(sessions) {
        harness.reserve(session, 1);
        harness.commit(session, &[key(rank)], Priority::Normal);
        harness.pass(Duration::from_millis(6));
        harness.finish_jobs();
    }
    harness.request(sessions[0], RequestKind::Other, Request::Trim);
    let all = |requests| Lookahead { ranks: Ranks::All, ..lookahead(requests) };
    let odd = hint(&mut harness, sessions[0], all(vec![waits(1, 4, &keys(0..1))]));
    assert!(matches!(odd, Reply::BadRequest(text) if text.contains("1 keys of 2 ranks")));
    hint(&mut harness, sessions[0], all(vec![waits(1, 4, &keys(0..2))]));
    assert_eq!(harness.fills().len(), 2, "the parts of both ranks are read");
    harness.advance_to(harness.fills()[0], 4);
    assert_eq!(
        report(&mut harness, sessions[0], all(vec![waits(1, 3, &[])])).ready,
        [],
        "one part is missing"
    );
    harness.finish_jobs();
    assert_eq!(report(&mut harness, sessions[0], all(vec![waits(1, 2, &[])])).ready, [1]);
    for (rank, session) in (0..).zip(sessions) {
        assert_eq!(load(&mut harness, session, &[key(rank)]), [Some(Source::OwnDram)]);
    }
    assert_eq!(counters(&harness).prefetch_used_blocks, 2, "each rank's worker loads its own part");
    // With the part of one rank only, the block is not known to be complete.
    hint(&mut harness, sessions[0], all(vec![waits(2, 4, &[key(0), key(77)])]));
    assert_eq!(report(&mut harness, sessions[0], all(vec![waits(2, 3, &[])])).ready, []);
}

/// Sends a random hint, sometimes an invalid one, and sometimes loads its keys.
pub(crate) fn random_hint(harness: &mut Harness, session: SessionId, keys: &[BlockKey]) {
    let rng: &mut Rng = &mut harness.rng;
    let request = |rng: &mut Rng| LookaheadRequest {
        request: rng.below(6) as u64,
        iterations: rng.below(5) as u32,
        confidence: 500 + rng.below(550) as u16,
        keys: if rng.chance(800) { keys.to_vec() } else { Vec::new() },
    };
    let count = rng.below(4);
    let begun = |rng: &mut Rng| BegunRequest {
        request: rng.below(4) as u64,
        state: [RequestState::Running, RequestState::Preempted][rng.below(2)],
        first: rng.below(4) as u32,
        keys: if rng.chance(600) { keys.to_vec() } else { Vec::new() },
    };
    let begun = rng.chance(700).then(|| (0..rng.below(5)).map(|_| begun(rng)).collect());
    let hint = Lookahead {
        begun,
        version: if rng.chance(50) { 9 } else { HINT_VERSION },
        iteration: Duration::from_micros(rng.below(30_000) as u64),
        requests: (0..count).map(|_| request(rng)).collect(),
        cancelled: if rng.chance(300) { vec![rng.below(6) as u64] } else { Vec::new() },
        ..Lookahead::default()
    };
    let loads = rng.chance(400);
    harness.request(session, RequestKind::Other, Request::Lookahead(hint));
    if loads {
        harness.load(session, keys, Duration::from_millis(10), Scope::Local);
    }
}
