//! Scenarios: classes of blocks while the requests that list them run, are preempted, and end.

use std::time::Duration;

use reprise_agent_core::Counters;
use reprise_agent_core::effect::Reply;
use reprise_agent_core::event::{Lookahead, Priority, Request};
use reprise_agent_core::limits::{
    BEGUN_ADDED_MAX, BEGUN_CHANGES_MAX, BEGUN_KEYS_MAX, BEGUN_LISTED_MAX, BEGUN_SILENCE_MAX,
    LOOKAHEAD_KEYS_MAX,
};
use reprise_policy::eviction::Class;
use reprise_policy::prefetch::{BegunRequest, HINT_VERSION, RequestState};
use reprise_policy::{BlockKey, SessionId, TenantId};

use crate::engine::RequestKind;
use crate::harness::{Harness, Setup, key, keys, large_layout};

const SECOND: Duration = Duration::from_secs(1);

/// Agent with 16 slots in DRAM and no device: committed blocks are evictable at once.
fn harness() -> (Harness, SessionId) {
    let mut harness = Harness::new(Setup { disks: Vec::new(), ..Setup::default() });
    let session = harness.open_session(TenantId::DEFAULT, large_layout());
    (harness, session)
}

fn save(harness: &mut Harness, session: SessionId, keys: &[BlockKey], priority: Priority) {
    harness.reserve(session, keys.len() as u32);
    harness.commit(session, keys, priority);
    harness.pass(Duration::from_millis(6));
    harness.finish_jobs();
}

fn begun(request: u64, state: RequestState, first: u32, keys: &[BlockKey]) -> BegunRequest {
    BegunRequest { request, state, first, keys: keys.to_vec() }
}

fn runs(request: u64, keys: &[BlockKey]) -> BegunRequest {
    begun(request, RequestState::Running, 0, keys)
}

fn preempted(request: u64, keys: &[BlockKey]) -> BegunRequest {
    begun(request, RequestState::Preempted, 0, keys)
}

/// Sends a hint with this list; returns the number of parts that were ignored.
fn hint(harness: &mut Harness, session: SessionId, begun: Option<Vec<BegunRequest>>) -> u32 {
    let iteration = Duration::from_millis(20);
    let hint = Lookahead { version: HINT_VERSION, iteration, begun, ..Lookahead::default() };
    harness.request(session, RequestKind::Other, Request::Lookahead(hint));
    match &harness.engines[&session].replies.last().expect("a reply").1 {
        Reply::LookaheadAccepted(report) => report.ignored,
        other => panic!("a hint is answered with {other:?}"),
    }
}

fn list(harness: &mut Harness, session: SessionId, begun: Vec<BegunRequest>) {
    assert_eq!(hint(harness, session, Some(begun)), 0);
}

fn classes(harness: &Harness, keys: &[BlockKey]) -> Vec<Option<Class>> {
    keys.iter().map(|key| harness.core.describe(key).map(|block| block.class)).collect()
}

fn class(harness: &Harness, key: BlockKey) -> Class {
    harness.core.describe(&key).expect("on this node").class
}

fn counters(harness: &Harness) -> Counters {
    harness.core.counters()
}

#[test]
fn block_is_active_while_its_request_runs_and_has_its_own_class_after() {
    let (mut harness, session) = harness();
    save(&mut harness, session, &keys(0..3), Priority::Normal);
    list(&mut harness, session, vec![runs(1, &keys(0..2))]);
    assert_eq!(classes(&harness, &keys(0..3)), [Class::Active, Class::Active, Class::Recent].map(Some));
    list(&mut harness, session, vec![preempted(1, &[])]);
    assert_eq!(classes(&harness, &keys(0..3)), [Class::Idle, Class::Idle, Class::Recent].map(Some));
    list(&mut harness, session, vec![runs(1, &[])]);
    assert_eq!(class(&harness, key(1)), Class::Active);
    assert_eq!(hint(&mut harness, session, None), 0, "the list before stays in force");
    assert_eq!(class(&harness, key(1)), Class::Active);
    list(&mut harness, session, Vec::new());
    assert_eq!(classes(&harness, &keys(0..3)), [Class::Recent; 3].map(Some));
    let counted = counters(&harness);
    assert_eq!((counted.begun_requests, counted.begun_blocks, counted.begun_class_changes), (0, 0, 8));
}

#[test]
fn running_blocks_are_evicted_after_finished_ones_and_preempted_ones_before() {
    let (mut harness, session) = harness();
    save(&mut harness, session, &keys(0..4), Priority::Normal);
    save(&mut harness, session, &keys(4..8), Priority::Normal);
    save(&mut harness, session, &keys(8..12), Priority::Normal);
    save(&mut harness, session, &keys(12..16), Priority::Normal);
    // The running one is the least recently used, the preempted one the most.
    list(&mut harness, session, vec![runs(1, &keys(0..4)), preempted(2, &keys(12..16))]);
    let is_here = |harness: &Harness, key: BlockKey| harness.core.describe(&key).is_some();
    save(&mut harness, session, &keys(20..24), Priority::Normal);
    assert!((12..16).all(|number| !is_here(&harness, key(number))), "preempted blocks leave first");
    save(&mut harness, session, &keys(24..28), Priority::Normal);
    save(&mut harness, session, &keys(28..32), Priority::Normal);
    assert!((4..12).all(|number| !is_here(&harness, key(number))));
    assert!((0..4).all(|number| is_here(&harness, key(number))), "a running request keeps its blocks");
}

#[test]
fn block_that_arrives_after_the_hint_has_the_class_of_its_request() {
    let (mut harness, session) = harness();
    list(&mut harness, session, vec![runs(1, &keys(0..1))]);
    save(&mut harness, session, &keys(0..1), Priority::Low);
    assert_eq!(class(&harness, key(0)), Class::Active);
    list(&mut harness, session, vec![begun(1, RequestState::Running, 1, &keys(1..2))]);
    save(&mut harness, session, &keys(1..2), Priority::Normal);
    assert_eq!(classes(&harness, &keys(0..2)), [Class::Active; 2].map(Some), "keys are appended");
    list(&mut harness, session, vec![]);
    assert_eq!(classes(&harness, &keys(0..2)), [Class::Evictable, Class::Recent].map(Some));
}

#[test]
fn shared_block_is_active_while_one_of_its_requests_runs() {
    let (mut harness, session) = harness();
    save(&mut harness, session, &keys(0..1), Priority::Normal);
    save(&mut harness, session, &keys(1..2), Priority::High);
    let other = harness.open_session(TenantId::DEFAULT, large_layout());
    list(&mut harness, session, vec![preempted(1, &keys(0..2))]);
    list(&mut harness, other, vec![runs(1, &keys(0..1))]);
    assert_eq!(class(&harness, key(0)), Class::Active);
    harness.close_session(other);
    assert_eq!(class(&harness, key(0)), Class::Idle);
    assert_eq!(class(&harness, key(1)), Class::Active, "a shared prefix stays while a request is preempted");
}

#[test]
fn engine_that_dies_or_is_silent_leaves_no_class_behind() {
    let (mut harness, session) = harness();
    save(&mut harness, session, &keys(0..2), Priority::Normal);
    list(&mut harness, session, vec![runs(1, &keys(0..2))]);
    harness.pass(BEGUN_SILENCE_MAX / 2);
    assert_eq!(hint(&mut harness, session, None), 0, "any hint shows that the engine runs");
    harness.pass(BEGUN_SILENCE_MAX - SECOND);
    assert_eq!(class(&harness, key(0)), Class::Active);
    harness.pass(2 * SECOND);
    assert_eq!((class(&harness, key(0)), counters(&harness).begun_expired_requests), (Class::Recent, 1));
    assert_eq!(hint(&mut harness, session, Some(vec![runs(1, &[])])), 1, "its keys must travel again");
    list(&mut harness, session, vec![runs(1, &keys(0..2))]);
    assert_eq!(class(&harness, key(0)), Class::Active);
    harness.close_session(session);
    assert_eq!((class(&harness, key(0)), counters(&harness).begun_requests), (Class::Recent, 0));
}

#[test]
fn request_that_never_finishes_expires_until_it_leaves_the_list() {
    let (mut harness, session) = harness();
    save(&mut harness, session, &keys(0..1), Priority::Normal);
    list(&mut harness, session, vec![runs(1, &keys(0..1))]);
    for _ in 0..BEGUN_LISTED_MAX.as_secs() / 9 + 1 {
        harness.pass(9 * SECOND);
        hint(&mut harness, session, Some(vec![runs(1, &[])]));
    }
    assert_eq!((class(&harness, key(0)), counters(&harness).begun_expired_requests), (Class::Recent, 1));
    list(&mut harness, session, vec![runs(1, &keys(0..1))]);
    assert_eq!(class(&harness, key(0)), Class::Recent);
    list(&mut harness, session, vec![]);
    list(&mut harness, session, vec![runs(1, &keys(0..1))]);
    assert_eq!(class(&harness, key(0)), Class::Active);
}

#[test]
fn invalid_parts_of_a_list_are_ignored_and_counted() {
    let (mut harness, session) = harness();
    save(&mut harness, session, &keys(0..2), Priority::Normal);
    let unknown = runs(1, &[]);
    let gap = begun(2, RequestState::Running, 1, &keys(1..2));
    let twice = [runs(3, &keys(0..1)), preempted(3, &[])];
    let all = [unknown, gap].into_iter().chain(twice).collect();
    assert_eq!(hint(&mut harness, session, Some(all)), 3);
    assert_eq!(classes(&harness, &keys(0..2)), [Class::Active, Class::Recent].map(Some));
    let gap = begun(3, RequestState::Running, 2, &keys(1..2));
    assert_eq!(hint(&mut harness, session, Some(vec![gap])), 1);
    assert_eq!(counters(&harness).begun_ignored_requests, 4);
    // Keys from the first one on replace all former ones.
    list(&mut harness, session, vec![runs(3, &keys(1..2))]);
    assert_eq!(classes(&harness, &keys(0..2)), [Class::Recent, Class::Active].map(Some));
}

#[test]
fn engine_that_lists_all_blocks_changes_no_order_of_other_tenants() {
    let (a, b) = (TenantId(1), TenantId(2));
    let mut harness = Harness::new(Setup { disks: Vec::new(), ..Setup::default() });
    let [greedy, other] = [a, b].map(|tenant| harness.open_session(tenant, large_layout()));
    save(&mut harness, other, &keys(0..4), Priority::Normal);
    save(&mut harness, greedy, &keys(100..112), Priority::Normal);
    let all: Vec<BlockKey> = keys(0..4).into_iter().chain(keys(100..116)).collect();
    list(&mut harness, greedy, vec![runs(1, &all)]);
    assert_eq!(
        classes(&harness, &keys(0..4)),
        [Class::Recent; 4].map(Some),
        "blocks of others are not listed"
    );
    save(&mut harness, greedy, &keys(112..116), Priority::Normal);
    let left = |numbers| classes(&harness, &keys(numbers)).into_iter().flatten().count();
    assert_eq!((left(0..4), left(100..116)), (4, 12), "it evicts its own blocks");
}

/// Lists the blocks of a request in several hints, next to others.
fn fill(harness: &mut Harness, session: SessionId, request: u64, all: &[BlockKey], others: &[u64]) {
    for (part, keys) in all.chunks(BEGUN_ADDED_MAX).enumerate() {
        let first = (part * BEGUN_ADDED_MAX) as u32;
        let mut listed = vec![begun(request, RequestState::Running, first, keys)];
        listed.extend(others.iter().map(|other| runs(*other, &[])));
        list(harness, session, listed);
    }
    harness.core.audit().expect("invariants hold");
}

/// Numbers of the saved blocks whose class is not the given one.
fn others(harness: &Harness, keys: &[BlockKey], class: Class) -> Vec<usize> {
    let is_other = |key: &BlockKey| harness.core.describe(key).is_some_and(|block| block.class != class);
    keys.iter().enumerate().filter(|(_, key)| is_other(key)).map(|(number, _)| number).collect()
}

#[test]
fn lists_are_bounded_in_keys() {
    let (mut harness, session) = harness();
    let all = keys(2_000..2_000 + BEGUN_KEYS_MAX as u64);
    let (most, rest) = all.split_at(BEGUN_KEYS_MAX - 8);
    list(&mut harness, session, vec![runs(2, &rest[..4])]);
    fill(&mut harness, session, 1, most, &[2]);
    let extra: Vec<BlockKey> = keys(90_000..90_008);
    let known = || vec![runs(1, &[]), runs(2, &[])];
    let and = |more: BegunRequest| Some(known().into_iter().chain([more]).collect());
    assert_eq!(hint(&mut harness, session, and(runs(3, &extra))), 1);
    assert_eq!(hint(&mut harness, session, and(runs(3, &[]))), 1, "its keys must travel again");
    assert_eq!(hint(&mut harness, session, and(runs(4, &extra[..4]))), 0);
    assert_eq!(counters(&harness).begun_blocks, BEGUN_KEYS_MAX as u64);
    let too_many = vec![runs(1, &keys(0..LOOKAHEAD_KEYS_MAX as u64 + 1))];
    let hint = Lookahead { version: HINT_VERSION, begun: Some(too_many), ..Lookahead::default() };
    harness.request(session, RequestKind::Other, Request::Lookahead(hint));
    let last = &harness.engines[&session].replies.last().expect("a reply").1;
    assert!(matches!(last, Reply::BadRequest(text) if text.contains("keys")), "{last:?}");
}

#[test]
fn a_hint_changes_the_state_of_some_blocks_and_the_next_ones_continue() {
    let (mut harness, session) = harness();
    let all = keys(2_000..2_000 + 3 * BEGUN_CHANGES_MAX as u64);
    let parts = [0, BEGUN_CHANGES_MAX, 2 * BEGUN_CHANGES_MAX];
    for at in parts {
        save(&mut harness, session, &all[at..=at], Priority::Normal);
    }
    fill(&mut harness, session, 1, &all, &[]);
    let last = all.len() as u32;
    let one = |state| vec![begun(1, state, last, &[])];
    for left in (0..3).rev() {
        list(&mut harness, session, one(RequestState::Preempted));
        assert_eq!(others(&harness, &all, Class::Idle), parts[..left], "from the last block to the first");
        harness.core.audit().expect("invariants hold");
    }
    // A change ends before the next one begins, and hints without a list continue it.
    list(&mut harness, session, one(RequestState::Running));
    list(&mut harness, session, one(RequestState::Preempted));
    assert_eq!(others(&harness, &all, Class::Active), parts[..1]);
    harness.core.audit().expect("invariants hold");
    for changed in [3, 2, 1, 0] {
        assert_eq!(hint(&mut harness, session, None), 0);
        assert_eq!(others(&harness, &all, Class::Idle).len(), changed);
        harness.core.audit().expect("invariants hold");
    }
    // Closing a session while a state changes leaves nothing.
    list(&mut harness, session, one(RequestState::Running));
    harness.close_session(session);
    assert_eq!(classes(&harness, &[all[0]]), [Some(Class::Recent)]);
    assert_eq!((counters(&harness).begun_blocks, harness.core.audit()), (0, Ok(())));
}

#[test]
fn a_hint_ends_some_blocks_and_adds_some_and_the_next_ones_continue() {
    let (mut harness, session) = harness();
    let all = keys(2_000..2_000 + 3 * BEGUN_CHANGES_MAX as u64);
    fill(&mut harness, session, 1, &all, &[]);
    // Another first block replaces all: the keys travel again until the former ones have ended.
    let other = || runs(1, &keys(9..10));
    for left in [2, 1] {
        assert_eq!(hint(&mut harness, session, Some(vec![other()])), 1);
        assert_eq!(counters(&harness).begun_blocks, (left * BEGUN_CHANGES_MAX) as u64);
        harness.core.audit().expect("invariants hold");
    }
    list(&mut harness, session, vec![other()]);
    assert_eq!(counters(&harness).begun_blocks, 1);
    let many = keys(20_000..20_000 + BEGUN_ADDED_MAX as u64 + 1);
    assert_eq!(hint(&mut harness, session, Some(vec![runs(1, &[]), runs(2, &many)])), 1);
    assert_eq!(counters(&harness).begun_blocks, many.len() as u64);
    list(&mut harness, session, vec![runs(1, &[]), runs(2, &many)]);
    assert_eq!(counters(&harness).begun_blocks, many.len() as u64 + 1);
    for left in [many.len() + 1 - BEGUN_CHANGES_MAX, many.len() + 1 - 2 * BEGUN_CHANGES_MAX, 0] {
        let list = (left == many.len() + 1 - BEGUN_CHANGES_MAX).then(Vec::new);
        assert_eq!(hint(&mut harness, session, list), 0);
        assert_eq!(counters(&harness).begun_blocks, left as u64);
        harness.core.audit().expect("invariants hold");
    }
    assert_eq!(counters(&harness).begun_requests, 0);
}

#[test]
fn keys_that_travel_again_change_nothing() {
    let (mut harness, session) = harness();
    save(&mut harness, session, &keys(0..4), Priority::Normal);
    list(&mut harness, session, vec![runs(1, &keys(0..4))]);
    let before = counters(&harness).begun_class_changes;
    list(&mut harness, session, vec![runs(1, &keys(0..2))]);
    list(&mut harness, session, vec![begun(1, RequestState::Running, 2, &keys(2..4))]);
    assert_eq!(counters(&harness).begun_class_changes, before);
    assert_eq!(classes(&harness, &keys(0..4)), [Class::Active; 4].map(Some));
    let gap = || Some(vec![begun(1, RequestState::Running, 5, &[])]);
    assert_eq!(hint(&mut harness, session, gap()), 1, "the engine believes that it has sent more");
}

#[test]
fn request_expires_once() {
    let (mut harness, session) = harness();
    list(&mut harness, session, vec![runs(1, &keys(0..1))]);
    for _ in 0..BEGUN_LISTED_MAX.as_secs() / 9 {
        harness.pass(9 * SECOND);
        hint(&mut harness, session, Some(vec![runs(1, &[]), runs(2, &keys(1..2))]));
    }
    assert_eq!(counters(&harness).begun_expired_requests, 1);
    list(&mut harness, session, vec![runs(1, &[]), runs(3, &keys(1..2))]);
    harness.pass(BEGUN_SILENCE_MAX + SECOND);
    assert_eq!((counters(&harness).begun_expired_requests, counters(&harness).begun_requests), (2, 0));
}
