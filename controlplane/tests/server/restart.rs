//! Restart of a member: numbers and epochs survive; the directory does not, and inventories are announced
//! again.

use reprise_controlplane::server::ControlPlane;
use reprise_proto::controlplane::ListNodesRequest;

use crate::harness::{self, Node};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn after_a_restart_numbers_stay_epochs_rise_and_agents_announce_again() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("store");
    let member = ControlPlane::start(harness::config_with_store(&path)).await.expect("started");
    let mut before = Node::register(&member, "a").await;
    let other = Node::register(&member, "b").await;
    before.announce(harness::keys(0..5), 2).await;
    member.shutdown().await;

    let member = harness::start_again(&path).await;
    let mut membership = harness::membership(&member).await;
    let listed = membership.list_nodes(ListNodesRequest {}).await.expect("answered").into_inner().nodes;
    assert_eq!(
        listed.iter().map(|node| (node.name.as_str(), node.alive)).collect::<Vec<_>>(),
        [("a", false), ("b", false)]
    );
    before.membership = membership;
    before.directory = harness::directory(&member).await;
    assert!(!before.heartbeat().await, "the node must register again");
    assert!(before.send(before.update(harness::keys(5..6), 2)).await.fenced);

    let mut third = Node::register(&member, "c").await;
    assert_eq!(third.granted.node, 3, "numbers are not reused");
    let mut after = Node::register(&member, "a").await;
    assert_eq!((after.granted.node, after.granted.epoch), (before.granted.node, before.granted.epoch + 1));
    assert_eq!(third.lookup(harness::keys(0..5)).await, vec![vec![]; 5], "the directory is soft state");
    after.announce(harness::keys(0..5), 2).await;
    assert_eq!(third.lookup(harness::keys(0..5)).await, vec![vec![(1, 2)]; 5]);
    assert_eq!(other.granted.node, 2);
    member.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_failed_start_names_the_setting_to_change() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("store");
    let first = ControlPlane::start(harness::config_with_store(&path)).await.expect("started");

    let refused = ControlPlane::start(harness::config_with_store(&path)).await.expect_err("in use");
    assert!(format!("{refused:#}").contains("in use by another process"), "{refused:#}");

    let mut config = harness::config();
    config.listen = first.grpc;
    let refused = ControlPlane::start(config).await.expect_err("occupied");
    assert!(format!("{refused:#}").contains("change 'listen'"), "{refused:#}");

    std::fs::write(directory.path().join("garbage"), b"garbage").expect("written");
    let garbage = harness::config_with_store(&directory.path().join("garbage"));
    let refused = ControlPlane::start(garbage).await.expect_err("foreign");
    assert!(format!("{refused:#}").contains("not a Reprise store"), "{refused:#}");
    first.shutdown().await;
}
