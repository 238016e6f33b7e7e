//! Registration, heartbeats, death and return of nodes.

use std::time::{Duration, Instant};

use reprise_controlplane::server::ControlPlane;
use reprise_identity::Security;
use reprise_policy::Interval;
use reprise_proto::connection::Connection;
use reprise_proto::controlplane::{
    HeartbeatRequest, ListNodesRequest, PeerEndpoint, RegisterReply, RegisterRequest, WatchNodesRequest,
};
use tokio::time::timeout;
use tonic::Code;

use crate::harness::{self, Node, PATIENCE};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn passes_on_endpoints_of_protocols_that_it_does_not_know() {
    let member = harness::start().await;
    let mut membership = harness::membership(&member).await;
    let newer = PeerEndpoint { protocol: "rdma-9".to_owned(), address: "gid/fe80::1/17".to_owned() };
    let peer_endpoints = vec![newer, PeerEndpoint::tcp("127.0.0.1:7000")];
    let request = RegisterRequest { peer_endpoints: peer_endpoints.clone(), ..harness::registration("a") };
    membership.register(request).await.expect("registered");
    let listed = membership.list_nodes(ListNodesRequest {}).await.expect("answered").into_inner().nodes;
    assert_eq!(listed[0].peer_endpoints, peer_endpoints, "in the order of the node");
    member.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rejects_callers_of_the_former_protocol_with_both_versions() {
    let member = harness::start().await;
    let connection = Connection::new(&member.grpc.to_string(), &Security::Plain).expect("an address");
    for call in ["Membership/Register", "Directory/Lookup", "Placement/SetNode", "Events/Follow"] {
        let path = format!("/reprise.controlplane.v1.{call}");
        let refused = connection.call::<RegisterReply>(&path, &RegisterRequest::default()).await;
        let refused = refused.expect_err("another version");
        assert_eq!(refused.code(), Code::Unimplemented);
        for words in
            ["caller speaks reprise.controlplane.v1", "member speaks reprise.controlplane.v2", "same release"]
        {
            assert!(refused.message().contains(words), "{refused}");
        }
    }
    member.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lists_a_registered_node_with_its_details() {
    let member = harness::start_with_expiring_nodes().await;
    let mut node = Node::register(&member, "a").await;
    let registrations = node.granted.epoch & u64::from(u32::MAX);
    assert_eq!((node.granted.node, registrations), (1, 1), "the upper half identifies the store");
    assert_eq!((node.granted.heartbeat_every_us, node.granted.dead_after_us), (250_000, 1_500_000));
    let listed = node.membership.list_nodes(ListNodesRequest {}).await.expect("answered").into_inner().nodes;
    assert_eq!(listed.len(), 1);
    let registration = harness::registration("a");
    assert_eq!((listed[0].node, listed[0].epoch, listed[0].alive), (1, node.granted.epoch, true));
    assert_eq!(
        (&listed[0].name, &listed[0].peer_endpoints),
        (&registration.name, &registration.peer_endpoints)
    );
    assert_eq!(listed[0].usage, None, "capacities come with the first report");
    assert_eq!(
        (&listed[0].failure_domain, &listed[0].version),
        (&registration.failure_domain, &registration.version)
    );
    member.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_registration_under_the_same_name_keeps_the_number_and_fences_the_older_one() {
    let member = harness::start().await;
    let mut old = Node::register(&member, "a").await;
    old.announce(harness::keys(0..3), 1).await;
    let other = Node::register(&member, "b").await;
    let mut new = Node::register(&member, "a").await;
    assert_eq!((new.granted.node, new.granted.epoch), (old.granted.node, old.granted.epoch + 1));
    assert_ne!(other.granted.node, new.granted.node);
    assert!(!old.heartbeat().await, "the older registration is unknown");
    assert!(new.heartbeat().await);
    let reply = old.send(old.update(harness::keys(3..4), 1)).await;
    assert!(reply.fenced);
    let mut other = other;
    assert_eq!(
        other.lookup(harness::keys(0..4)).await,
        vec![vec![]; 4],
        "a new registration has no inventory yet"
    );
    member.shutdown().await;
}

/// Figures of DESIGN §7 with the default configuration: not offered within two seconds of the last heartbeat. A
/// busy machine can delay the member, so one of several attempts must be in time.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_silent_node_is_not_offered_after_two_seconds_and_returns_with_its_next_heartbeat() {
    const ATTEMPTS_MAX: usize = 10;
    let member = harness::start_with_expiring_nodes().await;
    let mut asking = Node::register(&member, "asking").await;
    let mut silent = Node::register(&member, "silent").await;
    silent.announce(harness::keys(0..1), 2).await;
    let node = u16::try_from(silent.granted.node).expect("a number");
    let mut changes =
        asking.membership.watch_nodes(WatchNodesRequest {}).await.expect("answered").into_inner();
    let mut offered_for = Vec::new();
    while offered_for.last().is_none_or(|time| *time >= Duration::from_secs(2)) {
        assert!(offered_for.len() < ATTEMPTS_MAX, "still offered after {offered_for:?}");
        // The member receives the heartbeat between these two moments.
        let earliest = Instant::now();
        assert!(silent.heartbeat().await);
        let latest = Instant::now();
        let mut last_offer = Duration::ZERO;
        loop {
            assert!(asking.heartbeat().await);
            let silence = latest.elapsed();
            if asking.lookup(harness::keys(0..1)).await != [vec![(node, 2)]] {
                break;
            }
            last_offer = silence;
        }
        let silence = earliest.elapsed();
        assert!(silence >= Duration::from_millis(1400), "not offered after {silence:?} already");
        offered_for.push(last_offer);
    }
    let notified = timeout(PATIENCE, async {
        loop {
            let change = changes.message().await.expect("a change").expect("the stream continues");
            let info = change.node.expect("a node");
            if info.node == silent.granted.node && !info.alive {
                return;
            }
        }
    });
    notified.await.expect("watchers are notified of the death");
    assert!(silent.heartbeat().await, "its registration is valid");
    assert_eq!(asking.lookup(harness::keys(0..1)).await, [vec![(node, 2)]], "its inventory was kept");
    silent.announce(harness::keys(1..2), 1).await;
    member.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_silent_for_long_must_register_again() {
    let mut config = harness::config();
    config.membership.heartbeat_every = Interval(Duration::from_millis(20));
    config.membership.dead_after = Interval(Duration::from_millis(50));
    config.membership.forget_after = Interval(Duration::from_millis(100));
    let member = ControlPlane::start(config).await.expect("started");
    let mut node = Node::register(&member, "a").await;
    node.announce(harness::keys(0..1000), 2).await;
    let gone = timeout(PATIENCE, async {
        // Heartbeats of another epoch do not keep a node alive. The counters show when it has been swept.
        while !harness::http(&member, "/directory").await.1.contains("\"keys\":0,") {
            let request = HeartbeatRequest { node: node.granted.node, epoch: node.granted.epoch + 1 };
            let reply = node.membership.heartbeat(request).await.expect("answered");
            assert!(!reply.into_inner().known);
        }
    });
    gone.await.expect("forgotten and swept");
    assert!(!node.heartbeat().await);
    assert!(node.send(node.update(harness::keys(0..1), 1)).await.fenced);
    member.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rejects_invalid_requests_with_the_valid_format() {
    let member = harness::start().await;
    let mut membership = harness::membership(&member).await;
    for (request, words) in [
        (RegisterRequest { name: String::new(), ..harness::registration("a") }, "letters, digits"),
        (RegisterRequest { name: "a/../b".to_owned(), ..harness::registration("a") }, "letters, digits"),
        (
            RegisterRequest {
                peer_endpoints: vec![PeerEndpoint::tcp("nowhere")],
                ..harness::registration("a")
            },
            "host:port",
        ),
        (RegisterRequest { admin_address: "1".to_owned(), ..harness::registration("a") }, "host:port"),
        (RegisterRequest { version: "x".repeat(1000), ..harness::registration("a") }, "at most"),
    ] {
        let refused = membership.register(request).await.expect_err("refused");
        assert_eq!(refused.code(), Code::InvalidArgument);
        assert!(refused.message().contains(words), "{refused}");
    }
    let refused =
        membership.heartbeat(HeartbeatRequest { node: 70_000, epoch: 1 }).await.expect_err("refused");
    assert_eq!(refused.code(), Code::InvalidArgument);
    let unknown = membership.heartbeat(HeartbeatRequest { node: 7, epoch: 1 }).await.expect("answered");
    assert!(!unknown.into_inner().known);
    assert!(
        membership.list_nodes(ListNodesRequest {}).await.expect("answered").into_inner().nodes.is_empty()
    );
    member.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_admin_endpoint_serves_nodes_counters_metrics_and_health() {
    let member = harness::start().await;
    let mut node = Node::register(&member, "a").await;
    node.announce(harness::keys(0..10), 2).await;
    node.announce(harness::keys(0..4), 1).await;
    node.lookup(harness::keys(0..10)).await;
    assert!(node.heartbeat().await);
    assert_eq!(harness::http(&member, "/healthz").await, (200, "ok\n".to_owned()));
    assert_eq!(harness::http(&member, "/readyz").await.0, 200);
    assert_eq!(harness::http(&member, "/nothing").await.0, 404);
    let (_, nodes) = harness::http(&member, "/nodes").await;
    let nodes: serde_json::Value = serde_json::from_str(&nodes).expect("JSON");
    assert_eq!(
        (&nodes[0]["name"], &nodes[0]["alive"], &nodes[0]["node"]),
        (&"a".into(), &true.into(), &1.into())
    );
    let (_, counts) = harness::http(&member, "/directory").await;
    let counts: serde_json::Value = serde_json::from_str(&counts).expect("JSON");
    assert_eq!(
        (&counts["keys"], &counts["replicas"], &counts["lookups"]),
        (&10.into(), &14.into(), &10.into())
    );
    assert_eq!((&counts["nodes"][0]["dram"], &counts["nodes"][0]["nvme"]), (&4.into(), &10.into()));
    let (_, metrics) = harness::http(&member, "/metrics").await;
    for line in [
        "reprise_controlplane_registrations_total 1",
        "reprise_controlplane_heartbeats_total{result=\"known\"} 1",
        "reprise_controlplane_nodes{state=\"alive\"} 1",
        "reprise_controlplane_changes_total 14",
        "reprise_controlplane_updates_total{result=\"applied\"} 3",
        "reprise_controlplane_lookup_keys_total 10",
        "reprise_controlplane_directory_replicas 14",
    ] {
        assert!(metrics.contains(line), "{line} is missing in\n{metrics}");
    }
    member.shutdown().await;
}
