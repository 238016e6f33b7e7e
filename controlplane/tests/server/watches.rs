//! Watch streams: a snapshot and every change, told when something was missed, ended by a shutdown, bounded in number.

use reprise_controlplane::server::ControlPlane;
use reprise_proto::controlplane::{NodeChange, WatchNodesRequest, WatchReply, WatchRequest};
use tokio::time::timeout;
use tonic::{Code, Streaming};

use crate::harness::{self, Node, PATIENCE};

async fn next<T>(stream: &mut Streaming<T>) -> T {
    timeout(PATIENCE, stream.message())
        .await
        .expect("in time")
        .expect("no error")
        .expect("the stream goes on")
}

fn seen(change: NodeChange) -> (String, u64, bool) {
    let node = change.node.expect("a node");
    (node.name, node.epoch, node.alive)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_watch_begins_with_the_nodes_there_are_and_goes_on_with_changes() {
    let member = harness::start().await;
    let _first = Node::register(&member, "a").await;
    let mut watch = harness::membership(&member)
        .await
        .watch_nodes(WatchNodesRequest {})
        .await
        .expect("answered")
        .into_inner();
    assert_eq!(seen(next(&mut watch).await), ("a".to_owned(), 1, true));
    let _second = Node::register(&member, "b").await;
    assert_eq!(seen(next(&mut watch).await), ("b".to_owned(), 1, true));
    let _again = Node::register(&member, "a").await;
    assert_eq!(seen(next(&mut watch).await), ("a".to_owned(), 2, true));
    member.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_directory_watch_reports_changes_in_order_and_replaced_inventories() {
    let member = harness::start().await;
    let mut node = Node::register(&member, "a").await;
    let mut watch =
        harness::directory(&member).await.watch(WatchRequest {}).await.expect("answered").into_inner();
    node.announce(harness::keys(0..2000), 2).await;
    node.announce(harness::keys(0..1), 0x82).await;
    let mut keys = Vec::new();
    let mut operations = Vec::new();
    while operations.len() < 2001 {
        let WatchReply { node, keys: changed, operations: done, missed } = next(&mut watch).await;
        assert_eq!((node, missed), (1, false));
        keys.extend_from_slice(&changed);
        operations.extend_from_slice(&done);
    }
    assert_eq!(keys[..2000 * 16], harness::keys(0..2000));
    assert!(operations[..2000].iter().all(|operation| *operation == 2));
    assert_eq!((&keys[2000 * 16..], operations[2000]), (harness::keys(0..1).as_slice(), 0x82));
    let mut inventory = node.update(harness::keys(7..8), 1);
    inventory.reset = true;
    inventory.begins = reprise_policy::SlotSet::ALL.to_bytes().to_vec().into();
    node.send(inventory).await;
    let replaced = next(&mut watch).await;
    assert_eq!((replaced.node, replaced.missed), (1, true), "look again at what node 1 holds");
    assert_eq!(next(&mut watch).await.keys.as_ref(), harness::keys(7..8));
    member.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_directory_watch_that_is_not_read_is_told_that_it_missed_changes() {
    let member = harness::start().await;
    let mut node = Node::register(&member, "a").await;
    let mut slow =
        harness::directory(&member).await.watch(WatchRequest {}).await.expect("answered").into_inner();
    let keys = harness::keys(0..8192);
    // More than the connection's windows and the shared buffer hold together: 400 batches of 136 KiB are 54 MiB.
    for round in 0..400 {
        node.announce(keys.clone(), if round % 2 == 0 { 1 } else { 0x81 }).await;
    }
    let mut told = false;
    let mut received = 0_usize;
    while !told {
        let reply = next(&mut slow).await;
        received += reply.operations.len();
        told = reply.missed;
    }
    assert!(received < 400 * 8192);
    let (_, metrics) = harness::http(&member, "/metrics").await;
    assert!(metrics.contains("reprise_controlplane_watch_missed_total{of=\"directory\"}"), "{metrics}");
    member.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn too_many_watchers_are_refused_and_a_closed_one_makes_room() {
    let mut config = harness::config();
    config.limits.watchers = 1;
    let member = ControlPlane::start(config).await.expect("started");
    let mut membership = harness::membership(&member).await;
    let mut directory = harness::directory(&member).await;
    let first = membership.watch_nodes(WatchNodesRequest {}).await.expect("answered").into_inner();
    let refused = directory.watch(WatchRequest {}).await.expect_err("one is enough");
    assert_eq!(refused.code(), Code::ResourceExhausted);
    assert!(refused.message().contains("limits.watchers"), "{refused}");
    drop(first);
    timeout(PATIENCE, async { while directory.watch(WatchRequest {}).await.is_err() {} })
        .await
        .expect("room as soon as the member has noticed");
    member.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_shutdown_ends_the_streams_with_words_and_does_not_hang() {
    let member = harness::start().await;
    let mut watch = harness::membership(&member)
        .await
        .watch_nodes(WatchNodesRequest {})
        .await
        .expect("answered")
        .into_inner();
    let shutdown = tokio::spawn(member.shutdown());
    let ended = timeout(PATIENCE, watch.message()).await.expect("in time").expect_err("ended");
    assert_eq!(ended.code(), Code::Unavailable);
    timeout(PATIENCE, shutdown).await.expect("in time").expect("no panic");
}
