//! Updates and lookups: sequences, inventories, limits, invalid input, large inventories, and concurrent
//! heartbeats.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use reprise_policy::{BlockKey, SlotSet};
use reprise_proto::controlplane::{DescribeRequest, LookupRequest, UpdateRequest};
use tonic::Code;

use crate::harness::{self, Node};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lookups_return_replicas_of_other_nodes_by_tier_in_key_order() {
    let member = harness::start().await;
    let mut first = Node::register(&member, "a").await;
    let mut second = Node::register(&member, "b").await;
    first.announce(harness::keys(0..2), 1).await;
    first.announce(harness::keys(1..3), 2).await;
    second.announce(harness::keys(2..4), 2).await;
    assert_eq!(
        second.lookup(harness::keys(0..5)).await,
        [vec![(1, 1)], vec![(1, 1), (1, 2)], vec![(1, 2)], vec![], vec![]],
        "without the requester's own replicas"
    );
    assert_eq!(first.lookup(harness::keys(2..4)).await, [vec![(2, 2)], vec![(2, 2)]]);
    first.announce(harness::keys(1..2), 0x81).await;
    assert_eq!(second.lookup(harness::keys(1..2)).await, [vec![(1, 2)]], "withdrawn from DRAM only");
    let request = LookupRequest { keys: harness::keys(2..3).into(), asking_node: 0 };
    let everywhere = harness::directory(&member).await.lookup(request).await.expect("answered").into_inner();
    let mut all = harness::replicas(&everywhere);
    // The key decides the order of equal replicas.
    all[0].sort_unstable();
    assert_eq!(all, [vec![(1, 2), (2, 2)]], "node 0 leaves out no replicas");
    assert_eq!(first.lookup(Vec::new()).await, Vec::<Vec<(u16, u8)>>::new());
    member.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reports_a_gap_and_applies_nothing_until_a_new_inventory() {
    let member = harness::start().await;
    let mut node = Node::register(&member, "a").await;
    let mut asking = Node::register(&member, "b").await;
    node.announce(harness::keys(0..10), 2).await;
    // The opening of the inventory had number 0.
    let late = UpdateRequest { sequence: 15, ..node.update(harness::keys(20..21), 2) };
    let reply = node.send(late).await;
    assert_eq!((reply.fenced, reply.expected_sequence), (false, 11));
    assert_eq!(asking.lookup(harness::keys(20..21)).await, [vec![]]);

    let again = UpdateRequest { sequence: 6, ..node.update(harness::keys(5..12), 2) };
    let reply = node.send(again).await;
    assert_eq!(reply.expected_sequence, 13, "known changes are skipped, the rest is applied");
    assert_eq!(asking.lookup(harness::keys(9..12)).await, vec![vec![(1, 2)]; 3]);

    let begins = SlotSet::ALL.to_bytes().to_vec().into();
    let inventory =
        UpdateRequest { sequence: 30, reset: true, begins, ..node.update(harness::keys(50..52), 1) };
    let reply = node.send(inventory.clone()).await;
    assert_eq!(reply.expected_sequence, 33);
    assert_eq!(
        asking.lookup(harness::keys(9..10)).await,
        [vec![]],
        "the inventory replaces earlier announcements"
    );
    assert_eq!(asking.lookup(harness::keys(50..51)).await, [vec![(1, 1)]]);
    node.sequence = 33;
    node.announce(harness::keys(60..61), 1).await;
    assert_eq!(node.send(inventory).await.expected_sequence, 34, "a repeated inventory discards nothing");
    assert_eq!(asking.lookup(harness::keys(60..61)).await, [vec![(1, 1)]]);
    member.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rejects_malformed_requests_without_changes() {
    let member = harness::start().await;
    let mut node = Node::register(&member, "a").await;
    let good = node.update(harness::keys(0..2), 2);
    let long = node.update(harness::keys(0..8193), 2);
    for (request, words) in [
        (UpdateRequest { keys: vec![0; 31].into(), ..good.clone() }, "multiple of 16"),
        (UpdateRequest { operations: vec![1].into(), ..good.clone() }, "one operation byte"),
        (UpdateRequest { operations: vec![1, 3].into(), ..good.clone() }, "tier 1 (DRAM) or 2 (NVMe)"),
        (UpdateRequest { operations: vec![0x80, 1].into(), ..good.clone() }, "index 0"),
        (UpdateRequest { node: 1 << 20, ..good.clone() }, "node number"),
        (UpdateRequest { sequence: u64::MAX, ..good.clone() }, "count changes from 0"),
        (UpdateRequest { begins: vec![0; 511].into(), ..good.clone() }, "begins has 511 bytes"),
        (UpdateRequest { ends: vec![0; 513].into(), ..good.clone() }, "a set of hash slots has 512"),
        (long, "at most 8192"),
    ] {
        let refused = node.directory.update(request).await.expect_err(words);
        assert_eq!(refused.code(), Code::InvalidArgument);
        assert!(refused.message().contains(words), "{refused}");
    }
    for (request, words) in [
        (LookupRequest { keys: vec![0; 15].into(), asking_node: 1 }, "multiple of 16"),
        (LookupRequest { keys: harness::keys(0..8193).into(), asking_node: 1 }, "at most 8192"),
        (LookupRequest { keys: harness::keys(0..1).into(), asking_node: 1 << 16 }, "node number"),
    ] {
        let refused = node.directory.lookup(request).await.expect_err(words);
        assert_eq!(refused.code(), Code::InvalidArgument);
        assert!(refused.message().contains(words), "{refused}");
    }
    let unknown = UpdateRequest { node: 77, ..good.clone() };
    assert!(node.send(unknown).await.fenced, "an unregistered node");
    let described = node.directory.describe(DescribeRequest {}).await.expect("answered").into_inner();
    assert_eq!((described.keys, described.updates), (0, 0));
    assert_eq!(node.send(good).await.expected_sequence, 3, "the sequence is unchanged");
    member.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn handles_inventories_of_a_million_entries() {
    const ENTRIES: u64 = 1_000_000;
    const BATCH: u64 = 8192;
    let member = harness::start().await;
    let mut node = Node::register(&member, "a").await;
    let mut asking = Node::register(&member, "b").await;
    for first in (0..ENTRIES).step_by(BATCH as usize) {
        let request = node.update(harness::keys(first..ENTRIES.min(first + BATCH)), 2);
        node.sequence += request.operations.len() as u64;
        let reply = node.send(request).await;
        assert_eq!(reply.expected_sequence, node.sequence);
        assert!(asking.heartbeat().await && node.heartbeat().await);
    }
    let described = node.directory.describe(DescribeRequest {}).await.expect("answered").into_inner();
    assert_eq!((described.keys, described.replicas, described.updates), (ENTRIES, ENTRIES, ENTRIES));
    assert!(described.bytes <= 64 * ENTRIES, "{} bytes", described.bytes);
    assert_eq!((described.nodes[0].node, described.nodes[0].nvme), (node.granted.node, ENTRIES));
    for first in [0, 123_456, ENTRIES - BATCH] {
        let found = asking.lookup(harness::keys(first..first + BATCH)).await;
        assert!(found.iter().all(|replicas| *replicas == [(1, 2)]), "all of {first}..");
    }
    let absent = asking.lookup(harness::keys(ENTRIES..ENTRIES + BATCH)).await;
    assert!(absent.iter().all(Vec::is_empty));
    let nothing = UpdateRequest { reset: true, ..node.update(Vec::new(), 2) };
    assert_eq!(node.send(nothing).await.expected_sequence, node.sequence + 1);
    assert!(asking.lookup(harness::keys(0..BATCH)).await.iter().all(Vec::is_empty), "removed at once");
    member.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn slots_are_partial_and_changes_rejected_until_inventories_are_announced() {
    let member = harness::start().await;
    let mut node = Node::register(&member, "a").await;
    let mut late = Node::register_only(&member, "b").await;
    node.announce(harness::keys(0..4), 2).await;
    let request = LookupRequest { keys: harness::keys(0..4).into(), asking_node: 0 };
    let reply = node.directory.lookup(request.clone()).await.expect("answered").into_inner();
    assert_eq!((reply.partial, reply.elsewhere.len()), (4, 0));
    assert_eq!(harness::replicas(&reply), vec![vec![(1, 2)]; 4], "known replicas are returned");
    assert!(reply.map_epoch > 0);

    late.announce(harness::keys(0..4), 1).await;
    let standing = late.slots().await;
    assert_eq!((standing.fenced, standing.owned == standing.wanted), (false, true));
    let one = BlockKey(harness::keys(0..1).try_into().expect("one key")).hash_slot();
    let one = [one].into_iter().collect::<SlotSet>();
    late.open(&one.to_bytes(), &[]).await;
    late.announce(harness::keys(0..4), 1).await;
    assert_eq!(late.slots().await.wanted, SlotSet::ALL.without(&one).to_bytes().as_slice());
    let reply = node.directory.lookup(request.clone()).await.expect("answered").into_inner();
    assert_eq!(reply.partial, 4, "begun inventories are incomplete");
    assert_eq!(harness::replicas(&reply)[..2], [vec![(2, 1), (1, 2)], vec![(1, 2)]]);

    let all = SlotSet::ALL.to_bytes();
    late.open(&SlotSet::ALL.without(&one).to_bytes(), &all).await;
    let reply = node.directory.lookup(request).await.expect("answered").into_inner();
    assert_eq!(reply.partial, 0);
    assert_eq!(late.slots().await.wanted, SlotSet::EMPTY.to_bytes().as_slice());
    let version = late.slots().await.slots_version;
    assert_eq!(late.send(late.update(harness::keys(9..10), 1)).await.slots_version, version);
    member.shutdown().await;
}

/// Heartbeats on their own connection, while other connections keep all workers busy with batches. A busy machine
/// delays calls of all connections, so most heartbeats are compared with the calls that end meanwhile.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn answers_heartbeats_while_busy_with_updates_and_lookups() {
    const LOADED_FOR: Duration = Duration::from_secs(2);
    const LOADERS: u64 = 4;
    const CALLS_MAX: u64 = 2 * LOADERS;
    let member = harness::start().await;
    let mut beating = Node::register(&member, "beating").await;
    let end = Instant::now() + LOADED_FOR;
    let (mut load, calls) = (Vec::new(), Arc::new(AtomicU64::new(0)));
    for loader in 0..LOADERS {
        let mut node = Node::register(&member, &format!("loader-{loader}")).await;
        let calls = Arc::clone(&calls);
        load.push(tokio::spawn(async move {
            let keys = harness::keys(loader * 100_000..loader * 100_000 + 8192);
            while Instant::now() < end {
                node.announce(keys.clone(), 1).await;
                calls.fetch_add(1, Ordering::Relaxed);
                node.announce(keys.clone(), 0x81).await;
                calls.fetch_add(1, Ordering::Relaxed);
                node.lookup(keys.clone()).await;
                calls.fetch_add(1, Ordering::Relaxed);
            }
        }));
    }
    // Number of calls that end during each heartbeat.
    let mut during = Vec::new();
    while Instant::now() < end {
        let before = calls.load(Ordering::Relaxed);
        assert!(beating.heartbeat().await);
        during.push(calls.load(Ordering::Relaxed) - before);
    }
    for task in load {
        task.await.expect("no panic");
    }
    during.sort_unstable();
    let all = calls.load(Ordering::Relaxed);
    assert!(all > LOADERS && during.len() > 10, "{all} calls, {} heartbeats", during.len());
    let usual = during[during.len() * 9 / 10];
    assert!(usual <= CALLS_MAX, "{usual} of {all} calls overtake a heartbeat");
    member.shutdown().await;
}
