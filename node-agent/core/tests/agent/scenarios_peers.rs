//! The directory, fetches from peers, serves for peers: one behaviour at a time.

use std::time::Duration;

use reprise_agent_core::agent::Settings;
use reprise_agent_core::effect::{FillId, LoadedBlock, LookupId, LossReason, Reply, ServeId, Source};
use reprise_agent_core::event::{Event, FillError, FillUpdate, Priority, Replica, Request, Scope};
use reprise_policy::routing::LoadClass;
use reprise_policy::{BlockKey, NodeId, SessionId, SlotSet, TenantId, Tier};

use crate::engine::Asked;
use crate::jobs::Job;
use crate::world::{Setup, World, key, keys, large_layout, small_layout};

const ONE: NodeId = NodeId(1);
const TWO: NodeId = NodeId(2);
const LATER: Duration = Duration::from_millis(50);

/// Blocks 0..4 are here, durable.
fn world() -> (World, SessionId) {
    let mut world = World::new(Setup::default());
    let session = world.open_session(TenantId::DEFAULT, large_layout());
    save_durably(&mut world, session, &keys(0..4));
    (world, session)
}

fn save_durably(world: &mut World, session: SessionId, keys: &[BlockKey]) {
    world.reserve(session, keys.len() as u32);
    world.commit(session, keys, Priority::Normal);
    world.pass(Duration::from_millis(6));
    world.finish_jobs();
}

fn trim(world: &mut World, session: SessionId) {
    world.request(session, Asked::Other, Request::Trim);
}

fn last_reply(world: &World, session: SessionId) -> &Reply {
    &world.engines[&session].replies.last().expect("a reply").1
}

fn matched(world: &World, session: SessionId) -> Vec<Source> {
    match last_reply(world, session) {
        Reply::Matched { sources } => sources.clone(),
        other => panic!("no match: {other:?}"),
    }
}

fn blocks(world: &World, session: SessionId) -> Vec<LoadedBlock> {
    match last_reply(world, session) {
        Reply::Loaded { blocks, .. } => blocks.clone(),
        other => panic!("no load: {other:?}"),
    }
}

fn lost(block: &LoadedBlock) -> Option<LossReason> {
    match block {
        LoadedBlock::Lost(reason) => Some(*reason),
        LoadedBlock::Ok { .. } => None,
    }
}

#[test]
fn a_match_that_finds_everything_here_asks_nobody() {
    let (mut world, session) = world();
    world.match_keys(session, &keys(0..4), Scope::Cluster);
    assert_eq!(matched(&world, session), [Source::OwnDram; 4]);
    assert_eq!(world.core.counters().lookups, 0);
}

#[test]
fn a_match_asks_once_for_what_is_not_here_and_counts_the_contiguous_run() {
    let (mut world, session) = world();
    world.give_peer(ONE, key(10), Tier::Nvme);
    world.give_peer(TWO, key(10), Tier::Dram);
    world.give_peer(TWO, key(12), Tier::Dram);
    let chain = [key(0), key(10), key(1), key(11), key(12)];
    world.match_keys(session, &chain, Scope::Cluster);
    let Job::Lookup { keys, .. } = &world.jobs[0] else { panic!("a question") };
    assert_eq!(*keys, [key(10), key(11), key(12)]);
    world.finish_jobs();
    assert_eq!(matched(&world, session), [Source::OwnDram, Source::PeerDram, Source::OwnDram]);
}

#[test]
fn a_long_chain_is_asked_for_as_far_as_its_first_keys_are_found() {
    let (mut world, session) = world();
    let chain = keys(100..1100);
    world.match_keys(session, &chain, Scope::Cluster);
    world.finish_jobs();
    assert_eq!(matched(&world, session), []);
    assert_eq!((world.core.counters().lookups, world.core.counters().lookup_keys), (1, 64), "nowhere");
    for number in 100..150 {
        world.give_peer(ONE, key(number), Tier::Dram);
    }
    world.match_keys(session, &chain, Scope::Cluster);
    world.finish_jobs();
    assert_eq!(matched(&world, session).len(), 50);
    assert_eq!(world.core.counters().lookups, 2, "its end is among the first");
    for number in 150..400 {
        world.give_peer(TWO, key(number), Tier::Nvme);
    }
    world.match_keys(session, &chain, Scope::Cluster);
    world.finish_jobs();
    assert_eq!(matched(&world, session).len(), 300);
    assert_eq!((world.core.counters().lookups, world.core.counters().lookup_keys), (4, 128 + 1000));
}

#[test]
fn a_long_chain_whose_second_question_fails_counts_as_far_as_the_first_one_found() {
    let (mut world, session) = world();
    for number in 100..400 {
        world.give_peer(ONE, key(number), Tier::Dram);
    }
    world.match_keys(session, &[keys(0..4), keys(100..400)].concat(), Scope::Cluster);
    world.advance(0);
    world.jobs.clear();
    world.pass(Duration::from_millis(200));
    assert_eq!(matched(&world, session).len(), 4 + 64);
    assert_eq!(world.core.counters().lookup_failures, 1);
}

#[test]
fn without_the_directory_a_match_counts_what_is_here() {
    let (mut world, session) = world();
    world.faults.lookup = 1000;
    world.match_keys(session, &keys(2..9), Scope::Cluster);
    world.finish_jobs();
    assert_eq!(matched(&world, session).len(), 2);
}

#[test]
fn a_question_that_is_never_answered_ends_by_itself() {
    let (mut world, session) = world();
    world.match_keys(session, &keys(2..9), Scope::Cluster);
    world.jobs.clear();
    world.pass(Duration::from_millis(200));
    assert_eq!(matched(&world, session).len(), 2);
    assert_eq!(world.core.counters().lookup_failures, 1);
}

#[test]
fn blocks_elsewhere_are_fetched_in_one_group_per_peer() {
    let (mut world, session) = world();
    for number in 10..13 {
        world.give_peer(ONE, key(number), Tier::Dram);
    }
    world.give_peer(TWO, key(13), Tier::Nvme);
    world.load(session, &[key(0), key(10), key(11), key(12), key(13)], LATER, Scope::Cluster);
    world.advance(0);
    assert_eq!(world.fills().len(), 4);
    world.finish_jobs();
    let sources: Vec<Source> = blocks(&world, session)
        .iter()
        .map(|block| match block {
            LoadedBlock::Ok { source, .. } => *source,
            LoadedBlock::Lost(reason) => panic!("{reason:?}"),
        })
        .collect();
    let dram = Source::PeerDram;
    assert_eq!(sources, [Source::OwnDram, dram, dram, dram, Source::PeerNvme]);
    assert!(world.announced.contains(&(key(10), Tier::Dram)), "what was fetched is cached");
    assert!(!world.announced.contains(&(key(10), Tier::Nvme)), "and not written to this node's devices");
}

#[test]
fn when_a_peer_has_it_no_more_the_next_replica_is_tried() {
    let (mut world, session) = world();
    world.give_peer(ONE, key(10), Tier::Dram);
    world.give_peer(TWO, key(10), Tier::Nvme);
    world.load(session, &keys(10..11), LATER, Scope::Cluster);
    world.advance(0);
    world.peers.held.remove(&ONE);
    world.finish_jobs();
    assert!(matches!(blocks(&world, session)[0], LoadedBlock::Ok { source: Source::PeerNvme, .. }));
    assert_eq!(world.core.counters().fill_absent, 1);
}

#[test]
fn when_every_replica_has_gone_the_block_is_a_miss() {
    let (mut world, session) = world();
    world.give_peer(ONE, key(10), Tier::Dram);
    world.give_peer(TWO, key(10), Tier::Nvme);
    world.load(session, &keys(10..11), LATER, Scope::Cluster);
    world.advance(0);
    world.peers.held.clear();
    world.finish_jobs();
    assert_eq!(lost(&blocks(&world, session)[0]), Some(LossReason::Miss));
    assert_eq!(world.core.counters().arena_used_bytes, 4 * large_layout().slot_bytes());
}

#[test]
fn a_block_that_rotted_here_is_fetched_from_a_peer() {
    let (mut world, session) = world();
    trim(&mut world, session);
    world.give_peer(ONE, key(0), Tier::Dram);
    world.load(session, &keys(0..1), LATER, Scope::Cluster);
    let Job::Read { read, .. } = &world.jobs[0] else { panic!("a read") };
    let page = read.page;
    world.disks[0].rot(page);
    world.finish_jobs();
    assert!(matches!(blocks(&world, session)[0], LoadedBlock::Ok { source: Source::PeerDram, .. }));
    world.read_all();
}

#[test]
fn a_block_that_rotted_here_and_is_nowhere_else_has_failed() {
    let (mut world, session) = world();
    trim(&mut world, session);
    world.load(session, &keys(0..1), LATER, Scope::Cluster);
    world.fail(0, FillError::Corrupt);
    world.finish_jobs();
    assert_eq!(lost(&blocks(&world, session)[0]), Some(LossReason::Failed));
}

#[test]
fn a_peer_that_was_lost_is_asked_last_for_a_while() {
    let (mut world, session) = world();
    for number in 10..30 {
        world.give_peer(ONE, key(number), Tier::Dram);
        world.give_peer(TWO, key(number), Tier::Nvme);
    }
    let asked_first = |world: &World| match world.jobs.last() {
        Some(Job::Fetch { node, .. }) => *node,
        other => panic!("no fetch: {other:?}"),
    };
    world.load(session, &keys(10..11), LATER, Scope::Cluster);
    world.advance(0);
    assert_eq!(asked_first(&world), ONE);
    let job = world.fills()[0];
    world.fail(job, FillError::PeerLost);
    assert_eq!(asked_first(&world), TWO, "the next replica");
    world.finish_jobs();
    world.load(session, &keys(11..12), LATER, Scope::Cluster);
    world.advance(0);
    assert_eq!(asked_first(&world), TWO, "it is suspect");
    world.finish_jobs();
    world.pass(Duration::from_secs(2));
    world.load(session, &keys(12..13), LATER, Scope::Cluster);
    world.advance(0);
    assert_eq!(asked_first(&world), ONE, "and has a new chance later");
    world.finish_jobs();
}

#[test]
fn a_commit_of_a_block_that_is_being_fetched_wins_and_the_fetch_ends_for_who_waits() {
    let (mut world, session) = world();
    world.give_peer(ONE, key(10), Tier::Dram);
    world.load(session, &keys(10..11), LATER, Scope::Cluster);
    world.advance(0);
    let job = world.fills()[0];
    world.advance_to(job, 2);
    let other = world.open_session(TenantId::DEFAULT, large_layout());
    world.reserve(other, 1);
    world.commit(other, &keys(10..11), Priority::Normal);
    world.match_keys(other, &keys(10..11), Scope::Local);
    assert_eq!(matched(&world, other), [Source::OwnDram]);
    world.pass(Duration::from_millis(6));
    world.finish_jobs();
    assert_eq!(world.engines[&other].notices[0].1, 1);
    world.read_all();
    let load = *world.engines[&session].loads.keys().next().expect("answered");
    assert!(world.engines[&session].progress(load).done);
    assert_eq!(world.core.counters().arena_used_bytes, 6 * large_layout().slot_bytes());
    world.release(session, load);
    assert_eq!(
        world.core.counters().arena_used_bytes,
        5 * large_layout().slot_bytes(),
        "the fetched copy goes"
    );
}

#[test]
fn a_commit_of_a_block_that_is_cached_from_a_peer_makes_it_durable() {
    let (mut world, session) = world();
    world.give_peer(ONE, key(10), Tier::Dram);
    world.load(session, &keys(10..11), LATER, Scope::Cluster);
    world.finish_jobs();
    save_durably(&mut world, session, &keys(10..11));
    assert_eq!(world.engines[&session].notices.last().expect("a notice").1, 1);
    assert!(world.announced.contains(&(key(10), Tier::Nvme)));
    assert_eq!(world.core.counters().duplicate_items, 1);
}

#[test]
fn answers_for_loads_that_have_ended_are_passed_over() {
    let (mut world, session) = world();
    world.give_peer(ONE, key(10), Tier::Dram);
    world.load(session, &keys(10..11), Duration::from_millis(1), Scope::Cluster);
    let Job::Lookup { lookup, .. } = world.jobs.remove(0) else { panic!("a question") };
    world.pass(Duration::from_millis(1));
    assert_eq!(lost(&blocks(&world, session)[0]), Some(LossReason::Deadline));
    let found = vec![vec![Replica { node: ONE, tier: Tier::Dram, load: LoadClass::default() }]];
    world.apply(Event::Found { lookup, found });
    assert!(world.jobs.is_empty());
}

#[test]
fn an_answer_that_is_too_short_leaves_the_rest_unfound() {
    let (mut world, session) = world();
    world.load(session, &keys(10..12), LATER, Scope::Cluster);
    let Job::Lookup { lookup, .. } = world.jobs.remove(0) else { panic!("a question") };
    world.apply(Event::Found { lookup, found: Vec::new() });
    assert_eq!(blocks(&world, session).iter().filter_map(lost).count(), 2);
}

/// What was given to the transport so far: headers seen, then (block, offset) of objects in order.
fn send_everything(world: &mut World) {
    for serve in world.serves.keys().copied().collect::<Vec<_>>() {
        let blocks = world.serves[&serve].blocks.len() as u32;
        for _ in 0..2 {
            for block in (0..blocks).flat_map(|block| [block; 8]) {
                world.send(serve, block);
            }
        }
    }
}

#[test]
fn a_peer_gets_blocks_from_dram_layer_by_layer_and_their_leases_end_when_sent() {
    let (mut world, session) = world();
    let serve = world.peer_request(&[key(0), key(50), key(1)], large_layout(), LATER);
    assert!(world.jobs.is_empty());
    assert_eq!(world.core.counters().read_leases, 2);
    assert_eq!(world.core.counters().serve_blocks_absent, 1);
    world.reserve(session, 16);
    assert_eq!(world.engines[&session].reserved.len(), 14, "what is being sent is not reused");
    world.send(serve, 0);
    send_everything(&mut world);
    assert!(world.serves.is_empty());
    assert_eq!((world.core.counters().read_leases, world.core.counters().serves_in_flight), (0, 0));
}

#[test]
fn a_peer_gets_blocks_from_nvme_as_their_layers_are_verified() {
    let (mut world, session) = world();
    trim(&mut world, session);
    let serve = world.peer_request(&keys(0..1), large_layout(), LATER);
    world.advance_to(0, 1);
    assert_eq!(world.core.counters().serve_bytes, large_layout().layer_bytes());
    world.send(serve, 0);
    world.advance_to(0, 4);
    assert_eq!(world.core.counters().serve_bytes, large_layout().block_bytes());
    send_everything(&mut world);
    assert!(world.serves.is_empty());
    assert!(world.announced.contains(&(key(0), Tier::Dram)), "what was read for a peer is resident");
}

#[test]
fn a_peer_and_an_engine_share_one_read() {
    let (mut world, session) = world();
    trim(&mut world, session);
    world.load(session, &keys(0..1), LATER, Scope::Local);
    world.advance_to(0, 2);
    let before = world.core.counters().serve_bytes;
    world.peer_request(&[key(0), key(0)], large_layout(), LATER);
    assert_eq!(world.fills().len(), 1);
    let layers = 2 * large_layout().layer_bytes();
    assert_eq!(world.core.counters().serve_bytes - before, 2 * layers, "what is ready goes out at once");
    world.finish_jobs();
    send_everything(&mut world);
    assert!(world.serves.is_empty());
}

#[test]
fn a_block_that_cannot_be_read_for_a_peer_is_absent() {
    let (mut world, session) = world();
    trim(&mut world, session);
    let serve = world.peer_request(&keys(0..2), large_layout(), LATER);
    world.advance_to(0, 2);
    let job = world.fills()[0];
    world.fail(job, FillError::Device);
    let job = world.fills()[0];
    world.fail(job, FillError::Device);
    assert_eq!(world.core.counters().serve_blocks_absent, 2);
    assert_eq!(world.core.counters().read_leases, 1, "one is being sent");
    world.abort_serve(serve);
    assert_eq!((world.core.counters().read_leases, world.core.counters().arena_used_bytes), (0, 0));
}

#[test]
fn a_serve_never_waits_for_a_fetch() {
    let (mut world, session) = world();
    world.give_peer(ONE, key(10), Tier::Dram);
    world.load(session, &keys(10..11), LATER, Scope::Cluster);
    world.advance(0);
    world.peer_request(&keys(10..11), large_layout(), LATER);
    assert_eq!(world.core.counters().serve_blocks_absent, 1);
    assert!(world.serves.is_empty());
    world.finish_jobs();
}

#[test]
fn a_peer_that_expects_another_layout_gets_nothing() {
    let (mut world, _) = world();
    world.peer_request(&keys(0..2), small_layout(), LATER);
    assert!(world.serves.is_empty());
    assert_eq!(world.core.counters().serve_blocks_absent, 2);
}

#[test]
fn a_serve_that_is_late_ends_and_its_reads_go_on() {
    let (mut world, session) = world();
    trim(&mut world, session);
    let serve = world.peer_request(&keys(0..2), large_layout(), Duration::from_millis(3));
    world.advance_to(0, 1);
    world.pass(Duration::from_millis(3));
    assert_eq!(world.core.counters().serve_blocks_absent, 2);
    for _ in 0..3 {
        world.send(serve, 0);
        world.send(serve, 1);
    }
    assert!(world.serves.is_empty());
    assert_eq!(world.core.counters().read_leases, 0);
    world.finish_jobs();
    assert_eq!(world.core.counters().dram_blocks, 2);
}

#[test]
fn the_whole_inventory_names_every_replica() {
    let (mut world, session) = world();
    trim(&mut world, session);
    world.load(session, &keys(0..1), LATER, Scope::Local);
    world.finish_jobs();
    world.announced.clear();
    world.apply(Event::InventoryWanted { slots: Box::new(SlotSet::ALL) });
    let mut expected: Vec<(BlockKey, Tier)> = keys(0..4).into_iter().map(|key| (key, Tier::Nvme)).collect();
    expected.push((key(0), Tier::Dram));
    assert_eq!(world.announced, expected.iter().copied().collect());

    world.announced.clear();
    let slot: SlotSet = [key(0).hash_slot()].into_iter().collect();
    world.apply(Event::InventoryWanted { slots: Box::new(slot.clone()) });
    assert_eq!(world.announced, expected.into_iter().filter(|(key, _)| slot.has_key(key)).collect());
}

#[test]
fn trim_keeps_what_is_cached_from_a_peer() {
    let (mut world, session) = world();
    world.give_peer(ONE, key(10), Tier::Dram);
    world.load(session, &keys(10..11), LATER, Scope::Cluster);
    world.finish_jobs();
    let load = *world.engines[&session].loads.keys().next().expect("answered");
    world.release(session, load);
    trim(&mut world, session);
    assert!(matches!(last_reply(&world, session), Reply::Trimmed { blocks: 4 }));
    assert!(world.announced.contains(&(key(10), Tier::Dram)));
}

#[test]
fn reports_on_what_is_not_known_change_nothing() {
    let (mut world, _) = world();
    let before = world.core.counters().clone();
    let (lookup, serve, fill) = (LookupId(7), ServeId(7), FillId(7));
    let events = [
        Event::Found { lookup, found: vec![Vec::new()] },
        Event::LookupFailed { lookup },
        Event::ServeDone { serve, block: 3 },
        Event::ServeAborted { serve },
        Event::Fill { fill, update: FillUpdate::Failed(FillError::Device) },
        Event::SessionClosed { session: SessionId(99) },
    ];
    for event in events {
        world.apply(event);
    }
    assert_eq!(*world.core.counters(), before);
}

/// 16 durable blocks on NVMe only, and an arena of 16 slots of which serves may have a quarter.
fn cold_world_with_a_share() -> (World, SessionId) {
    let settings = Settings { arena_serves_permille: 250, ..Setup::default().settings };
    let mut world = World::new(Setup { settings, ..Setup::default() });
    let session = world.open_session(TenantId::DEFAULT, large_layout());
    save_durably(&mut world, session, &keys(0..16));
    trim(&mut world, session);
    (world, session)
}

/// Everything is read and sent, and what begins by that as well.
fn serve_to_the_end(world: &mut World) {
    for _ in 0..16 {
        world.finish_jobs();
        send_everything(world);
    }
    assert!(world.serves.is_empty());
}

#[test]
fn a_peer_that_wants_many_cold_blocks_gets_them_in_a_share_of_the_arena() {
    let (mut world, session) = cold_world_with_a_share();
    world.peer_request(&keys(0..16), large_layout(), LATER);
    assert_eq!(world.fills().len(), 4, "a quarter of 16 slots");
    world.reserve(session, 16);
    assert_eq!(world.engines[&session].reserved.len(), 12, "the rest is the engines'");
    serve_to_the_end(&mut world);
    let counters = world.core.counters();
    assert_eq!((counters.serve_blocks_nvme, counters.serve_blocks_absent), (16, 0));
}

#[test]
fn two_peers_take_turns_in_their_share() {
    let (mut world, _) = cold_world_with_a_share();
    world.peer_request(&keys(0..8), large_layout(), LATER);
    world.peer_request(&keys(8..16), large_layout(), LATER);
    serve_to_the_end(&mut world);
    assert_eq!(world.core.counters().serve_blocks_nvme, 16);
}

#[test]
fn blocks_that_waited_for_their_turn_are_absent_at_the_deadline_and_gone_with_the_peer() {
    let (mut world, _) = cold_world_with_a_share();
    world.peer_request(&keys(0..8), large_layout(), Duration::from_millis(10));
    let gone = world.peer_request(&keys(8..16), large_layout(), LATER);
    world.abort_serve(gone);
    world.pass(Duration::from_millis(10));
    assert_eq!(world.core.counters().serve_blocks_absent, 8);
    world.finish_jobs();
    assert_eq!(world.core.counters().serves_in_flight, 0);
    assert_eq!(world.core.counters().read_leases, 0);
    world.peer_request(&keys(12..13), large_layout(), LATER);
    assert_eq!(world.fills().len(), 1, "the share is free again");
    serve_to_the_end(&mut world);
}
