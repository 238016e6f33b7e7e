//! Forgetting nodes: removed from all members, and rejected under their old registration.

use std::time::{Duration, Instant};

use reprise_controlplane::server::ControlPlane;
use reprise_proto::controlplane::{
    DescribeRequest, ForgetNodeRequest, ListNodesRequest, NodeChange, NodeMode, ReportRequest,
    SetNodeRequest, WatchNodesRequest,
};
use tokio::time::timeout;
use tonic::{Code, Status};

use crate::harness::{self, Node, PATIENCE};
use crate::several_members::{listed, named, placement, two_members_with_expiring_nodes};

/// Shorter than the 10 s for which a starting member waits for expected nodes.
const SOONER_THAN_GIVEN_UP: Duration = Duration::from_secs(9);
/// A busy machine can delay a start for longer than that.
const ATTEMPTS_MAX: usize = 5;

async fn forget(of: &ControlPlane, name: &str) -> Result<u32, Status> {
    let request = ForgetNodeRequest { name: name.to_owned() };
    Ok(harness::membership(of).await.forget_node(request).await?.into_inner().node)
}

async fn names(of: &ControlPlane) -> Vec<String> {
    let listed = harness::membership(of).await.list_nodes(ListNodesRequest {}).await.expect("answered");
    listed.into_inner().nodes.into_iter().map(|node| node.name).collect()
}

/// Forgets a node as soon as it counts as silent.
async fn forget_silent(of: &ControlPlane, name: &str) -> u32 {
    named(of, name, |node| !node.alive).await;
    forget(of, name).await.expect("forgotten")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn does_not_forget_a_live_node_and_lists_names_for_an_unknown_one() {
    let member = harness::start().await;
    let mut node = Node::register_only(&member, "a").await;
    let refused = forget(&member, "a").await.expect_err("the node is alive");
    assert_eq!(refused.code(), Code::FailedPrecondition);
    let words = refused.message();
    assert!(words.contains("stop its agent") && words.contains("reprise drain a --wait"), "{words}");
    assert!(node.heartbeat().await, "the node is unchanged");
    let refused = forget(&member, "b").await.expect_err("unknown");
    assert_eq!(refused.code(), Code::NotFound);
    assert!(refused.message().contains("known nodes are a"), "{refused}");
    member.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn does_not_forget_a_node_that_is_alive_for_another_member() {
    let (_, a, b) = two_members_with_expiring_nodes().await;
    listed(&b, 2).await;
    let mut node = Node::register_only(&a, "n").await;
    let refused = forget(&b, "n").await.expect_err("it may register soon");
    assert_eq!(refused.code(), Code::Unavailable);
    assert!(refused.message().contains("has just started"), "{refused}");
    // Its heartbeats to the second member have stopped.
    let _silent = Node::register_only(&b, "n").await;
    let give_up = Instant::now() + PATIENCE;
    let refused = loop {
        assert!(node.heartbeat().await);
        let seen = harness::membership(&b).await.list_nodes(ListNodesRequest {}).await.expect("answered");
        let refused = forget(&b, "n").await.expect_err("alive for one member");
        if !seen.into_inner().nodes[0].alive {
            break refused;
        }
        assert!(Instant::now() < give_up, "the node stays alive without heartbeats");
        tokio::time::sleep(Duration::from_millis(50)).await;
    };
    assert_eq!(refused.code(), Code::FailedPrecondition, "{refused}");
    assert!(node.heartbeat().await);
    a.shutdown().await;
    b.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_forgotten_node_is_removed_from_all_members_and_returns_as_a_new_node() {
    let (_, a, b) = two_members_with_expiring_nodes().await;
    listed(&a, 2).await;
    let mut node = Node::register_only(&a, "n").await;
    let mut elsewhere = Node::register_only(&b, "n").await;
    let request = SetNodeRequest { name: "n".to_owned(), mode: NodeMode::Draining.into() };
    placement(&a).await.set_node(request).await.expect("set");
    named(&b, "n", |node| !node.alive && node.mode() == NodeMode::Draining).await;
    let watching = harness::membership(&b).await.watch_nodes(WatchNodesRequest {}).await;
    let mut watch = watching.expect("answered").into_inner();
    let number = forget_silent(&a, "n").await;
    assert_eq!(number, node.granted.node);

    // The other member learns it from the store, and notifies its watchers.
    let removed = timeout(PATIENCE, async {
        loop {
            let change = watch.message().await.expect("no error").expect("the stream continues");
            if let NodeChange { node: Some(gone), removed: true } = change {
                return gone;
            }
        }
    });
    let removed = removed.await.expect("in time");
    assert_eq!((removed.node, removed.name.as_str(), removed.alive), (number, "n", false));
    for member in [&a, &b] {
        assert_eq!(names(member).await, [""; 0]);
    }

    // Its agent still runs, but all its calls are rejected.
    for (node, member) in [(&mut node, &a), (&mut elsewhere, &b)] {
        assert!(!node.heartbeat().await);
        assert!(node.slots().await.fenced);
        assert!(node.send(node.update(harness::keys(0..1), 1)).await.fenced);
        let (number, epoch) = (node.granted.node, node.granted.epoch);
        let report = ReportRequest { node: number, epoch, ..ReportRequest::default() };
        assert!(placement(member).await.report(report).await.expect("answered").into_inner().fenced);
    }

    // It registers, as required: as a new node in mode active.
    let mut again = Node::register_only(&a, "n").await;
    assert!(again.granted.node > number && again.heartbeat().await);
    let seen = named(&b, "n", |_| true).await;
    assert_eq!((seen.node, seen.mode()), (again.granted.node, NodeMode::Active));
    assert!(!node.heartbeat().await, "its former number is unused");
    let refused = forget(&a, "n").await.expect_err("the node is alive");
    assert_eq!(refused.code(), Code::FailedPrecondition);
    a.shutdown().await;
    b.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_starting_member_does_not_wait_for_forgotten_nodes() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("store");
    let member = ControlPlane::start(harness::config_with_store(&path)).await.expect("started");
    let _stays = Node::register(&member, "a").await;
    let _leaves = Node::register(&member, "b").await;
    forget_silent(&member, "b").await;
    member.shutdown().await;

    for _ in 0..ATTEMPTS_MAX {
        let started = Instant::now();
        let member = harness::start_again(&path).await;
        assert_eq!(names(&member).await, ["a"]);
        let mut stays = Node::register(&member, "a").await;
        let size = stays.directory.describe(DescribeRequest {}).await.expect("answered").into_inner();
        let took = started.elapsed();
        member.shutdown().await;
        assert_eq!(size.slots_partial, 0, "no other node is expected");
        if took < SOONER_THAN_GIVEN_UP {
            return;
        }
    }
    panic!("no start was fast enough to distinguish a member that waits");
}
