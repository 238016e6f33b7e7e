//! The order of eviction within a chain: whatever goes, what is left of a chain is its beginning.

use std::time::Duration;

use reprise_agent_core::agent::Settings;
use reprise_agent_core::effect::Reply;
use reprise_agent_core::event::{Priority, Scope};
use reprise_policy::{BlockKey, SessionId, TenantId};

use crate::rng::Rng;
use crate::world::{Setup, World, key, keys, large_layout};

/// Agents with room for about a hundred blocks on devices, a tenth of which is kept free: so room is made a few blocks at a time.
fn with_small_disks(disks: Vec<u64>) -> Setup {
    let settings = Settings { pool_free_permille: 100, ..Setup::default().settings };
    Setup { disks, settings, ..Setup::default() }
}

/// An agent with `slots` slots in DRAM and no device: what is committed may be evicted at once.
fn without_devices(slots: u16) -> (World, SessionId) {
    let setup = Setup { regions: slots / 4, disks: Vec::new(), ..Setup::default() };
    opened(setup)
}

fn opened(setup: Setup) -> (World, SessionId) {
    let mut world = World::new(setup);
    let session = world.open_session(TenantId::DEFAULT, large_layout());
    (world, session)
}

/// Saves blocks of a chain as engines do: so many with a commit, each behind the one before.
fn save(
    world: &mut World,
    session: SessionId,
    chain: &[BlockKey],
    mut parent: Option<BlockKey>,
    window: usize,
) {
    for blocks in chain.chunks(window) {
        world.reserve(session, blocks.len() as u32);
        world.commit_behind(session, blocks, Priority::Normal, parent);
        world.pass(Duration::from_millis(6));
        world.finish_jobs();
        parent = blocks.last().copied();
    }
}

/// How many leading blocks a match finds.
fn matched(world: &mut World, session: SessionId, keys: &[BlockKey]) -> usize {
    world.match_keys(session, keys, Scope::Local);
    match &world.engines[&session].replies.last().expect("a reply").1 {
        Reply::Matched { sources } => sources.len(),
        other => panic!("not an answer to a match: {other:?}"),
    }
}

/// How many blocks are there, wherever in the chain. Does not touch them.
fn present(world: &World, keys: &[BlockKey]) -> usize {
    keys.iter().filter(|key| world.core.describe(key).is_some()).count()
}

/// Loads blocks, all of which must come, and releases them.
fn load(world: &mut World, session: SessionId, keys: &[BlockKey]) {
    world.load(session, keys, Duration::ZERO, Scope::Local);
    world.finish_jobs();
    let held: Vec<_> = world.engines[&session].loads.keys().copied().collect();
    held.into_iter().for_each(|load| world.release(session, load));
}

#[test]
fn a_match_finds_all_that_is_left_of_a_prompt_after_others_were_saved() {
    for window in [1, 16, 80] {
        let (mut world, session) = without_devices(128);
        save(&mut world, session, &keys(0..80), None, window);
        save(&mut world, session, &keys(100..160), None, window);
        assert_eq!(matched(&mut world, session, &keys(0..80)), 68, "{window} blocks a commit");
        assert_eq!(matched(&mut world, session, &keys(100..160)), 60);
    }
}

/// Saves other blocks until none of a chain is left. At each step what is left is its beginning.
fn displace(world: &mut World, session: SessionId, chain: &[BlockKey]) {
    let mut partly = 0;
    for first in (300..800).step_by(4) {
        let left = present(world, chain);
        assert_eq!(present(world, &chain[..left]), left, "a part that is not the beginning of the chain");
        match left {
            0 => break,
            left => partly += u32::from(left < chain.len()),
        }
        save(world, session, &keys(first..first + 4), None, 4);
    }
    assert_eq!(present(world, chain), 0, "more was saved than the node has room for");
    assert!(partly > 1, "the chain was not evicted step by step");
}

#[test]
fn on_a_device_the_tail_of_a_chain_goes_first_as_well() {
    let (mut world, session) = opened(with_small_disks(vec![8 << 20]));
    save(&mut world, session, &keys(0..40), None, 4);
    displace(&mut world, session, &keys(0..40));
}

#[test]
fn a_chain_that_is_loaded_from_a_device_loses_its_tail_first() {
    let (mut world, session) = opened(with_small_disks(vec![8 << 20]));
    save(&mut world, session, &keys(0..12), None, 4);
    save(&mut world, session, &keys(100..120), None, 4);
    load(&mut world, session, &keys(0..12));
    displace(&mut world, session, &keys(0..12));
}

#[test]
fn a_match_is_a_use_of_what_it_finds() {
    let (mut world, session) = without_devices(16);
    save(&mut world, session, &keys(0..8), None, 8);
    save(&mut world, session, &keys(100..108), None, 8);
    assert_eq!(matched(&mut world, session, &keys(0..8)), 8);
    save(&mut world, session, &keys(200..206), None, 6);
    assert_eq!(matched(&mut world, session, &keys(0..8)), 8);
    assert_eq!(matched(&mut world, session, &keys(100..108)), 2);
}

#[test]
fn a_chain_that_goes_on_after_a_match_keeps_its_beginning() {
    let (mut world, session) = without_devices(16);
    save(&mut world, session, &keys(0..4), None, 4);
    save(&mut world, session, &keys(100..108), None, 8);
    matched(&mut world, session, &keys(0..8));
    save(&mut world, session, &keys(4..8), Some(key(3)), 2);
    save(&mut world, session, &keys(200..210), None, 10);
    assert_eq!(matched(&mut world, session, &keys(0..8)), 6);
    assert_eq!(present(&world, &keys(0..8)), 6);
}

#[test]
fn blocks_that_are_committed_again_stay_behind_their_parents() {
    let (mut world, session) = without_devices(16);
    save(&mut world, session, &keys(0..8), None, 8);
    save(&mut world, session, &keys(2..6), Some(key(1)), 4);
    save(&mut world, session, &keys(100..112), None, 12);
    assert_eq!(matched(&mut world, session, &keys(0..8)), 4);
    assert_eq!(present(&world, &keys(0..8)), 4);
}

#[test]
fn a_chain_that_a_peer_has_read_loses_its_tail_first() {
    let (mut world, session) = without_devices(16);
    save(&mut world, session, &keys(0..8), None, 8);
    let serve = world.peer_request(&keys(0..8), large_layout(), Duration::from_secs(1));
    while world.serves.contains_key(&serve) {
        (0..8).for_each(|block| world.send(serve, block));
    }
    save(&mut world, session, &keys(100..112), None, 12);
    assert_eq!(matched(&mut world, session, &keys(0..8)), 4);
    assert_eq!(present(&world, &keys(0..8)), 4);
}

/// Requests of several conversations, each a match of a whole prompt, a load of what is there, and a save of the rest.
fn converse(world: &mut World, session: SessionId, rng: &mut Rng, requests: usize) {
    const CONVERSATIONS: usize = 24;
    const BLOCKS_MAX: usize = 12;
    for _ in 0..requests {
        let conversation = rng.below(CONVERSATIONS);
        let first = (conversation * BLOCKS_MAX) as u64;
        let prompt = keys(first..first + 1 + rng.below(BLOCKS_MAX) as u64);
        let found = matched(world, session, &prompt);
        assert_eq!(present(world, &prompt), found, "of conversation {conversation}");
        load(world, session, &prompt[..found]);
        let parent = found.checked_sub(1).map(|last| prompt[last]);
        save(world, session, &prompt[found..], parent, 1 + rng.below(4));
    }
}

#[test]
fn whatever_conversations_are_served_what_is_left_of_each_is_its_beginning() {
    for seed in 0..12 {
        for disks in [Vec::new(), vec![8 << 20], vec![6 << 20; 2]] {
            let setup = Setup { seed, regions: 6, ..with_small_disks(disks) };
            let (mut world, session) = opened(setup);
            converse(&mut world, session, &mut Rng::new(seed), 150);
            assert!(world.core.counters().dram_evictions > 0);
        }
    }
}
