//! Nodes that have left for good: forgotten by one member, gone with all, and never believed again under what they were.

use std::time::{Duration, Instant};

use reprise_controlplane::server::ControlPlane;
use reprise_proto::controlplane::{
    DescribeRequest, ForgetNodeRequest, ListNodesRequest, NodeChange, NodeMode, ReportRequest,
    SetNodeRequest, WatchNodesRequest,
};
use tokio::time::timeout;
use tonic::{Code, Status};

use crate::harness::{self, Node, PATIENCE};
use crate::several::{listed, member, named, placement, store};

/// A member that starts waits 10 s for nodes that it expects.
const SOONER_THAN_GIVEN_UP: Duration = Duration::from_secs(6);

async fn forget(of: &ControlPlane, name: &str) -> Result<u32, Status> {
    let request = ForgetNodeRequest { name: name.to_owned() };
    Ok(harness::membership(of).await.forget_node(request).await?.into_inner().node)
}

async fn names(of: &ControlPlane) -> Vec<String> {
    let listed = harness::membership(of).await.list_nodes(ListNodesRequest {}).await.expect("answered");
    listed.into_inner().nodes.into_iter().map(|node| node.name).collect()
}

/// Forgets a node as soon as its silence is noticed.
async fn forget_silent(of: &ControlPlane, name: &str) -> u32 {
    named(of, name, |node| !node.alive).await;
    forget(of, name).await.expect("forgotten")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_that_lives_stays_and_a_name_that_nobody_has_is_told_with_those_there_are() {
    let member = harness::start().await;
    let mut node = Node::register_only(&member, "a").await;
    let refused = forget(&member, "a").await.expect_err("it lives");
    assert_eq!(refused.code(), Code::FailedPrecondition);
    let words = refused.message();
    assert!(words.contains("stop its agent") && words.contains("reprise drain a --wait"), "{words}");
    assert!(node.beat().await, "nothing has happened to it");
    let refused = forget(&member, "b").await.expect_err("nobody");
    assert_eq!(refused.code(), Code::NotFound);
    assert!(refused.message().contains("there are a"), "{refused}");
    member.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_that_another_member_hears_stays() {
    let store = store();
    let (a, b) = (member(&store, "a").await, member(&store, "b").await);
    listed(&b, 2).await;
    let mut node = Node::register_only(&a, "n").await;
    let refused = forget(&b, "n").await.expect_err("it may register in a moment");
    assert_eq!(refused.code(), Code::Unavailable);
    assert!(refused.message().contains("has started just now"), "{refused}");
    // Its beats to the second member have stopped.
    let _silent = Node::register_only(&b, "n").await;
    let give_up = Instant::now() + PATIENCE;
    let refused = loop {
        assert!(node.beat().await);
        let seen = harness::membership(&b).await.list_nodes(ListNodesRequest {}).await.expect("answered");
        let refused = forget(&b, "n").await.expect_err("one of them hears it");
        if !seen.into_inner().nodes[0].alive {
            break refused;
        }
        assert!(Instant::now() < give_up, "it stays alive without beats");
        tokio::time::sleep(Duration::from_millis(50)).await;
    };
    assert_eq!(refused.code(), Code::FailedPrecondition, "{refused}");
    assert!(node.beat().await);
    a.shutdown().await;
    b.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_that_is_forgotten_is_gone_with_all_members_and_comes_back_as_another() {
    let store = store();
    let (a, b) = (member(&store, "a").await, member(&store, "b").await);
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

    // The other member has it from the store, and tells its watchers.
    let removed = timeout(PATIENCE, async {
        loop {
            let change = watch.message().await.expect("no error").expect("the stream goes on");
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

    // Its process still runs, and goes on as before: nobody believes it.
    for (node, member) in [(&mut node, &a), (&mut elsewhere, &b)] {
        assert!(!node.beat().await);
        assert!(node.slots().await.fenced);
        assert!(node.send(node.update(harness::keys(0..1), 1)).await.fenced);
        let (number, epoch) = (node.granted.node, node.granted.epoch);
        let report = ReportRequest { node: number, epoch, ..ReportRequest::default() };
        assert!(placement(member).await.report(report).await.expect("answered").into_inner().fenced);
    }

    // It registers, as what it is told to do: a new node, which nobody has told to drain.
    let mut again = Node::register_only(&a, "n").await;
    assert!(again.granted.node > number && again.beat().await);
    let seen = named(&b, "n", |_| true).await;
    assert_eq!((seen.node, seen.mode()), (again.granted.node, NodeMode::Active));
    assert!(!node.beat().await, "its former number is nobody's");
    let refused = forget(&a, "n").await.expect_err("it lives");
    assert_eq!(refused.code(), Code::FailedPrecondition);
    a.shutdown().await;
    b.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_member_that_starts_does_not_wait_for_a_node_that_was_forgotten() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("store");
    let member = ControlPlane::start(harness::config_with_store(&path)).await.expect("started");
    let _stays = Node::register(&member, "a").await;
    let _leaves = Node::register(&member, "b").await;
    forget_silent(&member, "b").await;
    member.shutdown().await;

    let member = harness::start_again(&path).await;
    let started = Instant::now();
    assert_eq!(names(&member).await, ["a"]);
    let mut stays = Node::register(&member, "a").await;
    let size = stays.directory.describe(DescribeRequest {}).await.expect("answered").into_inner();
    assert_eq!(size.slots_partial, 0, "nobody else is waited for");
    assert!(started.elapsed() < SOONER_THAN_GIVEN_UP, "{:?}: too late to tell", started.elapsed());
    member.shutdown().await;
}
