//! Scenarios: lookups in the directory, fetches from peers, and serves to peers.

use std::time::Duration;

use reprise_agent_core::Settings;
use reprise_agent_core::effect::{FillId, LoadedBlock, LookupId, LossReason, Reply, ServeId, Source};
use reprise_agent_core::event::{Event, FillError, FillUpdate, PeerEvent, Priority, Replica, Request, Scope};
use reprise_policy::routing::LoadClass;
use reprise_policy::{BlockKey, NodeId, SessionId, SlotSet, TenantId, Tier};

use crate::engine::RequestKind;
use crate::harness::{Harness, Setup, key, keys, large_layout, small_layout};
use crate::jobs::Job;

const ONE: NodeId = NodeId(1);
const TWO: NodeId = NodeId(2);
const LATER: Duration = Duration::from_millis(50);

/// Harness with blocks 0..4 durable on this node.
fn harness() -> (Harness, SessionId) {
    let mut harness = Harness::new(Setup::default());
    let session = harness.open_session(TenantId::DEFAULT, large_layout());
    save_durably(&mut harness, session, &keys(0..4));
    (harness, session)
}

fn save_durably(harness: &mut Harness, session: SessionId, keys: &[BlockKey]) {
    harness.reserve(session, keys.len() as u32);
    harness.commit(session, keys, Priority::Normal);
    harness.pass(Duration::from_millis(6));
    harness.finish_jobs();
}

fn trim(harness: &mut Harness, session: SessionId) {
    harness.request(session, RequestKind::Other, Request::Trim);
}

fn last_reply(harness: &Harness, session: SessionId) -> &Reply {
    &harness.engines[&session].replies.last().expect("a reply").1
}

fn matched(harness: &Harness, session: SessionId) -> Vec<Source> {
    match last_reply(harness, session) {
        Reply::Matched { sources } => sources.clone(),
        other => panic!("no match: {other:?}"),
    }
}

fn blocks(harness: &Harness, session: SessionId) -> Vec<LoadedBlock> {
    match last_reply(harness, session) {
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
fn match_of_local_blocks_sends_no_lookup() {
    let (mut harness, session) = harness();
    harness.match_keys(session, &keys(0..4), Scope::Cluster);
    assert_eq!(matched(&harness, session), [Source::OwnDram; 4]);
    assert_eq!(harness.core.counters().lookups, 0);
}

#[test]
fn match_looks_up_missing_blocks_once_and_counts_the_contiguous_run() {
    let (mut harness, session) = harness();
    harness.add_peer_replica(ONE, key(10), Tier::Nvme);
    harness.add_peer_replica(TWO, key(10), Tier::Dram);
    harness.add_peer_replica(TWO, key(12), Tier::Dram);
    let chain = [key(0), key(10), key(1), key(11), key(12)];
    harness.match_keys(session, &chain, Scope::Cluster);
    let Job::Lookup { keys, .. } = &harness.jobs[0] else { panic!("a lookup") };
    assert_eq!(*keys, [key(10), key(11), key(12)]);
    harness.finish_jobs();
    assert_eq!(matched(&harness, session), [Source::OwnDram, Source::PeerDram, Source::OwnDram]);
}

#[test]
fn long_chain_is_looked_up_only_if_its_first_keys_are_found() {
    let (mut harness, session) = harness();
    let chain = keys(100..1100);
    harness.match_keys(session, &chain, Scope::Cluster);
    harness.finish_jobs();
    assert_eq!(matched(&harness, session), []);
    assert_eq!((harness.core.counters().lookups, harness.core.counters().lookup_keys), (1, 64), "no replica");
    for number in 100..150 {
        harness.add_peer_replica(ONE, key(number), Tier::Dram);
    }
    harness.match_keys(session, &chain, Scope::Cluster);
    harness.finish_jobs();
    assert_eq!(matched(&harness, session).len(), 50);
    assert_eq!(harness.core.counters().lookups, 2, "the chain ends among its first keys");
    for number in 150..400 {
        harness.add_peer_replica(TWO, key(number), Tier::Nvme);
    }
    harness.match_keys(session, &chain, Scope::Cluster);
    harness.finish_jobs();
    assert_eq!(matched(&harness, session).len(), 300);
    assert_eq!((harness.core.counters().lookups, harness.core.counters().lookup_keys), (4, 128 + 1000));
}

#[test]
fn failed_second_lookup_keeps_the_run_of_the_first() {
    let (mut harness, session) = harness();
    for number in 100..400 {
        harness.add_peer_replica(ONE, key(number), Tier::Dram);
    }
    harness.match_keys(session, &[keys(0..4), keys(100..400)].concat(), Scope::Cluster);
    harness.advance(0);
    harness.jobs.clear();
    harness.pass(Duration::from_millis(200));
    assert_eq!(matched(&harness, session).len(), 4 + 64);
    assert_eq!(harness.core.counters().lookup_failures, 1);
}

#[test]
fn match_counts_local_blocks_without_the_directory() {
    let (mut harness, session) = harness();
    harness.faults.lookup = 1000;
    harness.match_keys(session, &keys(2..9), Scope::Cluster);
    harness.finish_jobs();
    assert_eq!(matched(&harness, session).len(), 2);
}

#[test]
fn unanswered_lookup_times_out() {
    let (mut harness, session) = harness();
    harness.match_keys(session, &keys(2..9), Scope::Cluster);
    harness.jobs.clear();
    harness.pass(Duration::from_millis(200));
    assert_eq!(matched(&harness, session).len(), 2);
    assert_eq!(harness.core.counters().lookup_failures, 1);
}

#[test]
fn remote_blocks_are_fetched_in_one_group_per_peer() {
    let (mut harness, session) = harness();
    for number in 10..13 {
        harness.add_peer_replica(ONE, key(number), Tier::Dram);
    }
    harness.add_peer_replica(TWO, key(13), Tier::Nvme);
    harness.load(session, &[key(0), key(10), key(11), key(12), key(13)], LATER, Scope::Cluster);
    harness.advance(0);
    assert_eq!(harness.fills().len(), 4);
    harness.finish_jobs();
    let sources: Vec<Source> = blocks(&harness, session)
        .iter()
        .map(|block| match block {
            LoadedBlock::Ok { source, .. } => *source,
            LoadedBlock::Lost(reason) => panic!("{reason:?}"),
        })
        .collect();
    let dram = Source::PeerDram;
    assert_eq!(sources, [Source::OwnDram, dram, dram, dram, Source::PeerNvme]);
    assert!(harness.announced.contains(&(key(10), Tier::Dram)), "fetched blocks are cached");
    assert!(!harness.announced.contains(&(key(10), Tier::Nvme)), "but not written to this node's devices");
}

#[test]
fn tries_the_next_replica_if_a_peer_no_longer_has_the_block() {
    let (mut harness, session) = harness();
    harness.add_peer_replica(ONE, key(10), Tier::Dram);
    harness.add_peer_replica(TWO, key(10), Tier::Nvme);
    harness.load(session, &keys(10..11), LATER, Scope::Cluster);
    harness.advance(0);
    harness.peers.held.remove(&ONE);
    harness.finish_jobs();
    assert!(matches!(blocks(&harness, session)[0], LoadedBlock::Ok { source: Source::PeerNvme, .. }));
    assert_eq!(harness.core.counters().fill_absent, 1);
}

#[test]
fn slot_of_a_failed_fetch_is_free_before_any_load_tries_another_replica() {
    let region_bytes = large_layout().slot_bytes();
    let mut harness = Harness::new(Setup { regions: 1, region_bytes, ..Setup::default() });
    let sessions = [0; 2].map(|_| harness.open_session(TenantId::DEFAULT, large_layout()));
    harness.add_peer_replica(ONE, key(10), Tier::Dram);
    harness.add_peer_replica(TWO, key(10), Tier::Nvme);
    for session in sessions {
        harness.load(session, &keys(10..11), LATER, Scope::Cluster);
    }
    harness.finish_jobs_but_fills();
    assert_eq!(harness.fills().len(), 1, "both loads wait for one fetch");
    let job = harness.fills()[0];
    harness.fail(job, FillError::Absent);
    assert_eq!(harness.fills().len(), 1, "the only slot is free for the next fetch");
    harness.finish_jobs();
    for session in sessions {
        assert!(matches!(blocks(&harness, session)[0], LoadedBlock::Ok { source: Source::PeerNvme, .. }));
    }
    assert_eq!(harness.core.counters().no_space_blocks, 0);
}

#[test]
fn block_without_a_remaining_replica_is_a_miss() {
    let (mut harness, session) = harness();
    harness.add_peer_replica(ONE, key(10), Tier::Dram);
    harness.add_peer_replica(TWO, key(10), Tier::Nvme);
    harness.load(session, &keys(10..11), LATER, Scope::Cluster);
    harness.advance(0);
    harness.peers.held.clear();
    harness.finish_jobs();
    assert_eq!(lost(&blocks(&harness, session)[0]), Some(LossReason::Miss));
    assert_eq!(harness.core.counters().arena_used_bytes, 4 * large_layout().slot_bytes());
}

#[test]
fn corrupt_local_block_is_fetched_from_a_peer() {
    let (mut harness, session) = harness();
    trim(&mut harness, session);
    harness.add_peer_replica(ONE, key(0), Tier::Dram);
    harness.load(session, &keys(0..1), LATER, Scope::Cluster);
    let Job::Read { read, .. } = &harness.jobs[0] else { panic!("a read") };
    let page = read.page;
    harness.disks[0].rot(page);
    harness.finish_jobs();
    assert!(matches!(blocks(&harness, session)[0], LoadedBlock::Ok { source: Source::PeerDram, .. }));
    harness.read_all();
}

#[test]
fn corrupt_local_block_without_another_replica_has_failed() {
    let (mut harness, session) = harness();
    trim(&mut harness, session);
    harness.load(session, &keys(0..1), LATER, Scope::Cluster);
    harness.fail(0, FillError::Corrupt);
    harness.finish_jobs();
    assert_eq!(lost(&blocks(&harness, session)[0]), Some(LossReason::Failed));
}

#[test]
fn failed_peer_is_tried_last_for_a_limited_time() {
    let (mut harness, session) = harness();
    for number in 10..30 {
        harness.add_peer_replica(ONE, key(number), Tier::Dram);
        harness.add_peer_replica(TWO, key(number), Tier::Nvme);
    }
    let first_queried = |harness: &Harness| match harness.jobs.last() {
        Some(Job::Fetch { node, .. }) => *node,
        other => panic!("no fetch: {other:?}"),
    };
    harness.load(session, &keys(10..11), LATER, Scope::Cluster);
    harness.advance(0);
    assert_eq!(first_queried(&harness), ONE);
    let job = harness.fills()[0];
    harness.fail(job, FillError::PeerLost);
    assert_eq!(first_queried(&harness), TWO, "the next replica");
    harness.finish_jobs();
    harness.load(session, &keys(11..12), LATER, Scope::Cluster);
    harness.advance(0);
    assert_eq!(first_queried(&harness), TWO, "the first peer is suspect");
    harness.finish_jobs();
    harness.pass(Duration::from_secs(2));
    harness.load(session, &keys(12..13), LATER, Scope::Cluster);
    harness.advance(0);
    assert_eq!(first_queried(&harness), ONE, "the first peer is no longer suspect");
    harness.finish_jobs();
}

#[test]
fn commit_replaces_a_fetch_that_completes_for_its_waiters() {
    let (mut harness, session) = harness();
    harness.add_peer_replica(ONE, key(10), Tier::Dram);
    harness.load(session, &keys(10..11), LATER, Scope::Cluster);
    harness.advance(0);
    let job = harness.fills()[0];
    harness.advance_to(job, 2);
    let other = harness.open_session(TenantId::DEFAULT, large_layout());
    harness.reserve(other, 1);
    harness.commit(other, &keys(10..11), Priority::Normal);
    harness.match_keys(other, &keys(10..11), Scope::Local);
    assert_eq!(matched(&harness, other), [Source::OwnDram]);
    harness.pass(Duration::from_millis(6));
    harness.finish_jobs();
    assert_eq!(harness.engines[&other].notices[0].1, 1);
    harness.read_all();
    let load = *harness.engines[&session].loads.keys().next().expect("answered");
    assert!(harness.engines[&session].progress(load).done);
    assert_eq!(harness.core.counters().arena_used_bytes, 6 * large_layout().slot_bytes());
    harness.release(session, load);
    assert_eq!(
        harness.core.counters().arena_used_bytes,
        5 * large_layout().slot_bytes(),
        "the fetched copy is freed"
    );
}

#[test]
fn commit_makes_a_cached_block_durable() {
    let (mut harness, session) = harness();
    harness.add_peer_replica(ONE, key(10), Tier::Dram);
    harness.load(session, &keys(10..11), LATER, Scope::Cluster);
    harness.finish_jobs();
    save_durably(&mut harness, session, &keys(10..11));
    assert_eq!(harness.engines[&session].notices.last().expect("a notice").1, 1);
    assert!(harness.announced.contains(&(key(10), Tier::Nvme)));
    assert_eq!(harness.core.counters().duplicate_items, 1);
}

#[test]
fn ignores_lookup_answers_for_ended_loads() {
    let (mut harness, session) = harness();
    harness.add_peer_replica(ONE, key(10), Tier::Dram);
    harness.load(session, &keys(10..11), Duration::from_millis(1), Scope::Cluster);
    let Job::Lookup { lookup, .. } = harness.jobs.remove(0) else { panic!("a lookup") };
    harness.pass(Duration::from_millis(1));
    assert_eq!(lost(&blocks(&harness, session)[0]), Some(LossReason::Deadline));
    let found = vec![vec![Replica { node: ONE, tier: Tier::Dram, load: LoadClass::default() }]];
    harness.apply(Event::LookupAnswered { lookup, found });
    assert!(harness.jobs.is_empty());
}

#[test]
fn keys_missing_from_a_short_answer_are_misses() {
    let (mut harness, session) = harness();
    harness.load(session, &keys(10..12), LATER, Scope::Cluster);
    let Job::Lookup { lookup, .. } = harness.jobs.remove(0) else { panic!("a lookup") };
    harness.apply(Event::LookupAnswered { lookup, found: Vec::new() });
    assert_eq!(blocks(&harness, session).iter().filter_map(lost).count(), 2);
}

/// Sends everything that the core has passed to the transport, in order.
fn send_everything(harness: &mut Harness) {
    for serve in harness.serves.keys().copied().collect::<Vec<_>>() {
        let blocks = harness.serves[&serve].blocks.len() as u32;
        for _ in 0..2 {
            for block in (0..blocks).flat_map(|block| [block; 8]) {
                harness.send(serve, block);
            }
        }
    }
}

#[test]
fn serves_blocks_from_dram_layer_by_layer_and_releases_them_when_sent() {
    let (mut harness, session) = harness();
    let serve = harness.peer_request(&[key(0), key(50), key(1)], large_layout(), LATER);
    assert!(harness.jobs.is_empty());
    assert_eq!(harness.core.counters().read_leases, 2);
    assert_eq!(harness.core.counters().serve_blocks_absent, 1);
    harness.reserve(session, 16);
    assert_eq!(harness.engines[&session].reserved.len(), 14, "slots being sent are not reused");
    harness.send(serve, 0);
    send_everything(&mut harness);
    assert!(harness.serves.is_empty());
    assert_eq!((harness.core.counters().read_leases, harness.core.counters().serves_in_flight), (0, 0));
}

#[test]
fn a_peer_that_acts_for_another_tenant_finds_no_block() {
    let (mut harness, session) = harness();
    let resident = harness.peer_request_of(TenantId(7), &keys(0..2), large_layout(), LATER);
    assert!(!harness.serves.contains_key(&resident), "all blocks in DRAM are absent at once");
    trim(&mut harness, session);
    let stored = harness.peer_request_of(TenantId(7), &keys(0..2), large_layout(), LATER);
    assert!(!harness.serves.contains_key(&stored), "all blocks on NVMe are absent at once");
    assert!(harness.jobs.is_empty(), "nothing is read for another tenant");
    let counters = harness.core.counters();
    assert_eq!((counters.serve_blocks_absent, counters.serve_bytes, counters.read_leases), (4, 0, 0));
}

#[test]
fn serves_blocks_from_nvme_as_their_layers_are_verified() {
    let (mut harness, session) = harness();
    trim(&mut harness, session);
    let serve = harness.peer_request(&keys(0..1), large_layout(), LATER);
    harness.advance_to(0, 1);
    assert_eq!(harness.core.counters().serve_bytes, large_layout().layer_bytes());
    harness.send(serve, 0);
    harness.advance_to(0, 4);
    assert_eq!(harness.core.counters().serve_bytes, large_layout().block_bytes());
    send_everything(&mut harness);
    assert!(harness.serves.is_empty());
    assert!(harness.announced.contains(&(key(0), Tier::Dram)), "blocks read for a peer are resident");
}

#[test]
fn serve_and_load_share_one_read() {
    let (mut harness, session) = harness();
    trim(&mut harness, session);
    harness.load(session, &keys(0..1), LATER, Scope::Local);
    harness.advance_to(0, 2);
    let before = harness.core.counters().serve_bytes;
    harness.peer_request(&[key(0), key(0)], large_layout(), LATER);
    assert_eq!(harness.fills().len(), 1);
    let layers = 2 * large_layout().layer_bytes();
    assert_eq!(harness.core.counters().serve_bytes - before, 2 * layers, "verified layers are sent at once");
    harness.finish_jobs();
    send_everything(&mut harness);
    assert!(harness.serves.is_empty());
}

#[test]
fn unreadable_block_is_absent_for_a_peer() {
    let (mut harness, session) = harness();
    trim(&mut harness, session);
    let serve = harness.peer_request(&keys(0..2), large_layout(), LATER);
    harness.advance_to(0, 2);
    let job = harness.fills()[0];
    harness.fail(job, FillError::Device);
    let job = harness.fills()[0];
    harness.fail(job, FillError::Device);
    assert_eq!(harness.core.counters().serve_blocks_absent, 2);
    assert_eq!(harness.core.counters().read_leases, 1, "one block is being sent");
    harness.abort_serve(serve);
    assert_eq!((harness.core.counters().read_leases, harness.core.counters().arena_used_bytes), (0, 0));
}

#[test]
fn serve_never_waits_for_a_fetch() {
    let (mut harness, session) = harness();
    harness.add_peer_replica(ONE, key(10), Tier::Dram);
    harness.load(session, &keys(10..11), LATER, Scope::Cluster);
    harness.advance(0);
    harness.peer_request(&keys(10..11), large_layout(), LATER);
    assert_eq!(harness.core.counters().serve_blocks_absent, 1);
    assert!(harness.serves.is_empty());
    harness.finish_jobs();
}

#[test]
fn blocks_of_another_layout_are_absent_for_a_peer() {
    let (mut harness, _) = harness();
    harness.peer_request(&keys(0..2), small_layout(), LATER);
    assert!(harness.serves.is_empty());
    assert_eq!(harness.core.counters().serve_blocks_absent, 2);
}

#[test]
fn serve_ends_at_its_deadline_and_its_reads_continue() {
    let (mut harness, session) = harness();
    trim(&mut harness, session);
    let serve = harness.peer_request(&keys(0..2), large_layout(), Duration::from_millis(3));
    harness.advance_to(0, 1);
    harness.pass(Duration::from_millis(3));
    assert_eq!(harness.core.counters().serve_blocks_absent, 2);
    for _ in 0..3 {
        harness.send(serve, 0);
        harness.send(serve, 1);
    }
    assert!(harness.serves.is_empty());
    assert_eq!(harness.core.counters().read_leases, 0);
    harness.finish_jobs();
    assert_eq!(harness.core.counters().dram_blocks, 2);
}

#[test]
fn inventory_contains_every_replica() {
    let (mut harness, session) = harness();
    trim(&mut harness, session);
    harness.load(session, &keys(0..1), LATER, Scope::Local);
    harness.finish_jobs();
    harness.announced.clear();
    harness.apply(Event::InventoryWanted { slots: Box::new(SlotSet::ALL) });
    let mut expected: Vec<(BlockKey, Tier)> = keys(0..4).into_iter().map(|key| (key, Tier::Nvme)).collect();
    expected.push((key(0), Tier::Dram));
    assert_eq!(harness.announced, expected.iter().copied().collect());

    harness.announced.clear();
    let slot: SlotSet = [key(0).hash_slot()].into_iter().collect();
    harness.apply(Event::InventoryWanted { slots: Box::new(slot.clone()) });
    assert_eq!(harness.announced, expected.into_iter().filter(|(key, _)| slot.has_key(key)).collect());
}

#[test]
fn trim_keeps_blocks_cached_from_a_peer() {
    let (mut harness, session) = harness();
    harness.add_peer_replica(ONE, key(10), Tier::Dram);
    harness.load(session, &keys(10..11), LATER, Scope::Cluster);
    harness.finish_jobs();
    let load = *harness.engines[&session].loads.keys().next().expect("answered");
    harness.release(session, load);
    trim(&mut harness, session);
    assert!(matches!(last_reply(&harness, session), Reply::Trimmed { blocks: 4 }));
    assert!(harness.announced.contains(&(key(10), Tier::Dram)));
}

#[test]
fn ignores_events_with_unknown_ids() {
    let (mut harness, _) = harness();
    let before = harness.core.counters().clone();
    let (lookup, serve, fill) = (LookupId(7), ServeId(7), FillId(7));
    let events = [
        Event::LookupAnswered { lookup, found: vec![Vec::new()] },
        Event::LookupFailed { lookup },
        Event::Peer(PeerEvent::ServeDone { serve, block: 3 }),
        Event::Peer(PeerEvent::ServeAborted { serve }),
        Event::Fill { fill, update: FillUpdate::Failed(FillError::Device) },
        Event::SessionClosed { session: SessionId(99) },
    ];
    for event in events {
        harness.apply(event);
    }
    assert_eq!(harness.core.counters(), before);
}

/// 16 durable blocks on NVMe only, and an arena of 16 slots, a quarter of which serves may use.
fn cold_harness_with_a_share() -> (Harness, SessionId) {
    let settings = Settings { arena_serves_permille: 250, ..Setup::default().settings };
    let mut harness = Harness::new(Setup { settings, ..Setup::default() });
    let session = harness.open_session(TenantId::DEFAULT, large_layout());
    save_durably(&mut harness, session, &keys(0..16));
    trim(&mut harness, session);
    (harness, session)
}

/// Completes all reads and sends, including those that result.
fn serve_to_the_end(harness: &mut Harness) {
    for _ in 0..16 {
        harness.finish_jobs();
        send_everything(harness);
    }
    assert!(harness.serves.is_empty());
}

#[test]
fn serve_of_many_cold_blocks_uses_a_share_of_the_arena() {
    let (mut harness, session) = cold_harness_with_a_share();
    harness.peer_request(&keys(0..16), large_layout(), LATER);
    assert_eq!(harness.fills().len(), 4, "a quarter of 16 slots");
    harness.reserve(session, 16);
    assert_eq!(harness.engines[&session].reserved.len(), 12, "the rest remains for engines");
    serve_to_the_end(&mut harness);
    let counters = harness.core.counters();
    assert_eq!((counters.serve_blocks_nvme, counters.serve_blocks_absent), (16, 0));
}

#[test]
fn two_peers_take_turns_within_the_share() {
    let (mut harness, _) = cold_harness_with_a_share();
    harness.peer_request(&keys(0..8), large_layout(), LATER);
    harness.peer_request(&keys(8..16), large_layout(), LATER);
    serve_to_the_end(&mut harness);
    assert_eq!(harness.core.counters().serve_blocks_nvme, 16);
}

#[test]
fn waiting_blocks_are_absent_at_the_deadline_and_dropped_with_the_peer() {
    let (mut harness, _) = cold_harness_with_a_share();
    harness.peer_request(&keys(0..8), large_layout(), Duration::from_millis(10));
    let gone = harness.peer_request(&keys(8..16), large_layout(), LATER);
    harness.abort_serve(gone);
    harness.pass(Duration::from_millis(10));
    assert_eq!(harness.core.counters().serve_blocks_absent, 8);
    harness.finish_jobs();
    assert_eq!(harness.core.counters().serves_in_flight, 0);
    assert_eq!(harness.core.counters().read_leases, 0);
    harness.peer_request(&keys(12..13), large_layout(), LATER);
    assert_eq!(harness.fills().len(), 1, "the share is free again");
    serve_to_the_end(&mut harness);
}
