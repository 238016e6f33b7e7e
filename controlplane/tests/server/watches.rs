//! Watch streams: current objects and every change, end at shutdown, and limit.

use reprise_controlplane::server::ControlPlane;
use reprise_proto::controlplane::{FollowRequest, NodeChange, WatchNodesRequest};
use tokio::time::timeout;
use tonic::{Code, Streaming};

use crate::harness::{self, Node, PATIENCE};

async fn next<T>(stream: &mut Streaming<T>) -> T {
    timeout(PATIENCE, stream.message())
        .await
        .expect("in time")
        .expect("no error")
        .expect("the stream continues")
}

fn seen(change: NodeChange) -> (String, u64, bool) {
    let node = change.node.expect("a node");
    // The upper half of an epoch identifies the store.
    (node.name, node.epoch & u64::from(u32::MAX), node.alive)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_watch_starts_with_current_nodes_and_continues_with_changes() {
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
    let mut second = seen(next(&mut watch).await);
    if !second.2 {
        // The member may apply the new store record before it completes the registration.
        assert_eq!(second, ("b".to_owned(), 1, false));
        second = seen(next(&mut watch).await);
    }
    assert_eq!(second, ("b".to_owned(), 1, true));
    let _again = Node::register(&member, "a").await;
    assert_eq!(seen(next(&mut watch).await), ("a".to_owned(), 2, true));
    member.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rejects_watchers_beyond_the_limit_until_one_is_closed() {
    let mut config = harness::config();
    config.limits.watchers = 1;
    let member = ControlPlane::start(config).await.expect("started");
    let mut membership = harness::membership(&member).await;
    let mut events = harness::events(&member).await;
    let first = membership.watch_nodes(WatchNodesRequest {}).await.expect("answered").into_inner();
    let refused = events.follow(FollowRequest::default()).await.expect_err("beyond the limit");
    assert_eq!(refused.code(), Code::ResourceExhausted);
    assert!(refused.message().contains("limits.watchers"), "{refused}");
    drop(first);
    timeout(PATIENCE, async { while events.follow(FollowRequest::default()).await.is_err() {} })
        .await
        .expect("admitted after the member detected the end");
    member.shutdown().await;
}

/// The status may be lost: if the client still sends data when the connection ends, TCP resets the
/// connection.
const GOODBYES_MAX: usize = 5;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_shutdown_ends_streams_with_a_reason_and_does_not_hang() {
    let mut codes = Vec::new();
    while codes.len() < GOODBYES_MAX && !codes.contains(&Code::Unavailable) {
        let member = harness::start().await;
        let mut watch = harness::membership(&member)
            .await
            .watch_nodes(WatchNodesRequest {})
            .await
            .expect("answered")
            .into_inner();
        let shutdown = tokio::spawn(member.shutdown());
        let ended = timeout(PATIENCE, watch.message()).await.expect("in time").expect_err("ended");
        assert!([Code::Unavailable, Code::Unknown].contains(&ended.code()), "{ended}");
        codes.push(ended.code());
        timeout(PATIENCE, shutdown).await.expect("in time").expect("no panic");
    }
    assert_eq!(codes.last(), Some(&Code::Unavailable), "{codes:?}");
}
