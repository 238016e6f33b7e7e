//! Scenarios: the eviction order within a chain always leaves the beginning of the chain.

use std::time::Duration;

use reprise_agent_core::Settings;
use reprise_agent_core::effect::Reply;
use reprise_agent_core::event::{Priority, Scope};
use reprise_policy::{BlockKey, SessionId, TenantId};

use crate::harness::{Harness, Setup, key, keys, large_layout};
use crate::rng::{Rng, seeds};

/// Settings with room for about a hundred blocks on devices. A tenth is kept free, so a few blocks are
/// evicted at a time.
fn with_small_disks(disks: Vec<u64>) -> Setup {
    let settings = Settings { pool_free_permille: 100, ..Setup::default().settings };
    Setup { disks, settings, ..Setup::default() }
}

/// Agent with `slots` slots in DRAM and no device: committed blocks are evictable at once.
fn without_devices(slots: u16) -> (Harness, SessionId) {
    let setup = Setup { regions: slots / 4, disks: Vec::new(), ..Setup::default() };
    opened(setup)
}

fn opened(setup: Setup) -> (Harness, SessionId) {
    let mut harness = Harness::new(setup);
    let session = harness.open_session(TenantId::DEFAULT, large_layout());
    (harness, session)
}

/// Saves blocks of a chain like an engine: `window` blocks per commit, each after its parent.
fn save(
    harness: &mut Harness,
    session: SessionId,
    chain: &[BlockKey],
    mut parent: Option<BlockKey>,
    window: usize,
) {
    for blocks in chain.chunks(window) {
        harness.reserve(session, blocks.len() as u32);
        harness.commit_after(session, blocks, Priority::Normal, parent);
        harness.pass(Duration::from_millis(6));
        harness.finish_jobs();
        parent = blocks.last().copied();
    }
}

/// Number of leading blocks that a match finds.
fn matched(harness: &mut Harness, session: SessionId, keys: &[BlockKey]) -> usize {
    harness.match_keys(session, keys, Scope::Local);
    match &harness.engines[&session].replies.last().expect("a reply").1 {
        Reply::Matched { sources } => sources.len(),
        other => panic!("not an answer to a match: {other:?}"),
    }
}

/// Number of blocks with a copy, anywhere in the chain. Does not touch them.
fn present(harness: &Harness, keys: &[BlockKey]) -> usize {
    keys.iter().filter(|key| harness.core.describe(key).is_some()).count()
}

/// Loads blocks, all of which must be available, and releases them.
fn load(harness: &mut Harness, session: SessionId, keys: &[BlockKey]) {
    harness.load(session, keys, Duration::ZERO, Scope::Local);
    harness.finish_jobs();
    let held: Vec<_> = harness.engines[&session].loads.keys().copied().collect();
    held.into_iter().for_each(|load| harness.release(session, load));
}

#[test]
fn match_finds_all_remaining_blocks_of_a_prompt_after_others_were_saved() {
    for window in [1, 16, 80] {
        let (mut harness, session) = without_devices(128);
        save(&mut harness, session, &keys(0..80), None, window);
        save(&mut harness, session, &keys(100..160), None, window);
        assert_eq!(matched(&mut harness, session, &keys(0..80)), 68, "{window} blocks a commit");
        assert_eq!(matched(&mut harness, session, &keys(100..160)), 60);
    }
}

/// Saves other blocks until a chain is evicted completely. At each step, only its beginning remains.
fn displace(harness: &mut Harness, session: SessionId, chain: &[BlockKey]) {
    let mut partly = 0;
    for first in (300..800).step_by(4) {
        let left = present(harness, chain);
        assert_eq!(
            present(harness, &chain[..left]),
            left,
            "the remaining part is not the beginning of the chain"
        );
        match left {
            0 => break,
            left => partly += u32::from(left < chain.len()),
        }
        save(harness, session, &keys(first..first + 4), None, 4);
    }
    assert_eq!(present(harness, chain), 0, "more was saved than the node has room for");
    assert!(partly > 1, "the chain was not evicted step by step");
}

#[test]
fn evicts_tail_of_a_chain_first_on_a_device() {
    let (mut harness, session) = opened(with_small_disks(vec![8 << 20]));
    save(&mut harness, session, &keys(0..40), None, 4);
    displace(&mut harness, session, &keys(0..40));
}

#[test]
fn chain_loaded_from_a_device_loses_its_tail_first() {
    let (mut harness, session) = opened(with_small_disks(vec![8 << 20]));
    save(&mut harness, session, &keys(0..12), None, 4);
    save(&mut harness, session, &keys(100..120), None, 4);
    load(&mut harness, session, &keys(0..12));
    displace(&mut harness, session, &keys(0..12));
}

#[test]
fn match_marks_found_blocks_as_used() {
    let (mut harness, session) = without_devices(16);
    save(&mut harness, session, &keys(0..8), None, 8);
    save(&mut harness, session, &keys(100..108), None, 8);
    assert_eq!(matched(&mut harness, session, &keys(0..8)), 8);
    save(&mut harness, session, &keys(200..206), None, 6);
    assert_eq!(matched(&mut harness, session, &keys(0..8)), 8);
    assert_eq!(matched(&mut harness, session, &keys(100..108)), 2);
}

#[test]
fn chain_extended_after_a_match_keeps_its_beginning() {
    let (mut harness, session) = without_devices(16);
    save(&mut harness, session, &keys(0..4), None, 4);
    save(&mut harness, session, &keys(100..108), None, 8);
    matched(&mut harness, session, &keys(0..8));
    save(&mut harness, session, &keys(4..8), Some(key(3)), 2);
    save(&mut harness, session, &keys(200..210), None, 10);
    assert_eq!(matched(&mut harness, session, &keys(0..8)), 6);
    assert_eq!(present(&harness, &keys(0..8)), 6);
}

#[test]
fn blocks_committed_again_remain_older_than_their_parents() {
    let (mut harness, session) = without_devices(16);
    save(&mut harness, session, &keys(0..8), None, 8);
    save(&mut harness, session, &keys(2..6), Some(key(1)), 4);
    save(&mut harness, session, &keys(100..112), None, 12);
    assert_eq!(matched(&mut harness, session, &keys(0..8)), 4);
    assert_eq!(present(&harness, &keys(0..8)), 4);
}

/// Saves the second half of a chain without the place of its first block, then the first half in a class that is
/// evicted first, and matches all of it. Saves other blocks until four are evicted; returns the number of leading blocks.
fn left_after_teaching(teach: impl Fn(&mut Harness, SessionId)) -> usize {
    let (mut harness, session) = without_devices(16);
    harness.reserve(session, 4);
    harness.commit_at(session, &keys(4..8), Priority::High, (None, None));
    teach(&mut harness, session);
    harness.reserve(session, 4);
    harness.commit(session, &keys(0..4), Priority::Low);
    assert_eq!(matched(&mut harness, session, &keys(0..8)), 8);
    save(&mut harness, session, &keys(100..112), None, 12);
    assert_eq!(present(&harness, &keys(0..8)), 4);
    matched(&mut harness, session, &keys(0..8))
}

#[test]
fn part_of_a_chain_without_its_place_teaches_no_wrong_place() {
    assert_eq!(left_after_teaching(|_, _| ()), 4, "after the commit");
    let left = left_after_teaching(|harness, session| {
        harness.match_at(session, &keys(4..8), None, Scope::Local);
    });
    assert_eq!(left, 4, "after a match");
}

#[test]
fn unknown_place_does_not_replace_a_known_one() {
    let left = left_after_teaching(|harness, session| {
        harness.match_at(session, &keys(4..8), Some(4), Scope::Local);
        harness.match_at(session, &keys(4..8), None, Scope::Local);
        harness.reserve(session, 4);
        harness.commit_at(session, &keys(4..8), Priority::High, (None, None));
    });
    assert_eq!(left, 4);
}

#[test]
fn place_of_a_later_part_follows_from_its_position() {
    // The whole chain is never matched: the parts are linked by the position of the second one and its parent.
    for (in_match, in_commit) in [(Some(4), None), (None, Some(4)), (None, None)] {
        let (mut harness, session) = without_devices(16);
        harness.reserve(session, 8);
        harness.commit(session, &keys(0..4), Priority::Low);
        harness.commit_at(session, &keys(4..8), Priority::High, (None, None));
        harness.match_at(session, &keys(4..8), in_match, Scope::Local);
        harness.reserve(session, 4);
        harness.commit_at(session, &keys(4..8), Priority::High, (Some(key(3)), in_commit));
        save(&mut harness, session, &keys(100..112), None, 12);
        let left = present(&harness, &keys(0..4));
        assert_eq!(left, 4, "{in_match:?} in the match, {in_commit:?} in the commit");
    }
}

#[test]
fn chain_read_by_a_peer_loses_its_tail_first() {
    let (mut harness, session) = without_devices(16);
    save(&mut harness, session, &keys(0..8), None, 8);
    let serve = harness.peer_request(&keys(0..8), large_layout(), Duration::from_secs(1));
    while harness.serves.contains_key(&serve) {
        (0..8).for_each(|block| harness.send(serve, block));
    }
    save(&mut harness, session, &keys(100..112), None, 12);
    assert_eq!(matched(&mut harness, session, &keys(0..8)), 4);
    assert_eq!(present(&harness, &keys(0..8)), 4);
}

/// Requests of several conversations: each matches a whole prompt, loads the found blocks, and saves the
/// rest.
fn converse(harness: &mut Harness, session: SessionId, rng: &mut Rng, requests: usize) {
    const CONVERSATIONS: usize = 24;
    const BLOCKS_MAX: usize = 12;
    for _ in 0..requests {
        let conversation = rng.below(CONVERSATIONS);
        let first = (conversation * BLOCKS_MAX) as u64;
        let prompt = keys(first..first + 1 + rng.below(BLOCKS_MAX) as u64);
        let found = matched(harness, session, &prompt);
        assert_eq!(present(harness, &prompt), found, "of conversation {conversation}");
        load(harness, session, &prompt[..found]);
        let parent = found.checked_sub(1).map(|last| prompt[last]);
        save(harness, session, &prompt[found..], parent, 1 + rng.below(4));
    }
}

#[test]
fn random_conversations_always_keep_their_beginnings() {
    for seed in seeds(12) {
        for disks in [Vec::new(), vec![8 << 20], vec![6 << 20; 2]] {
            let setup = Setup { seed, regions: 6, ..with_small_disks(disks) };
            let (mut harness, session) = opened(setup);
            converse(&mut harness, session, &mut Rng::new(seed), 150);
            assert!(harness.core.counters().dram_evictions > 0);
        }
    }
}
