//! Several members in one process that share a store: changes on one are visible on the others.

use std::net::TcpListener;
use std::sync::Arc;
use std::time::{Duration, Instant};

use reprise_controlplane::config::Config;
use reprise_controlplane::server::ControlPlane;
use reprise_controlplane_store::{MemoryStore, Store, Transaction, Write};
use reprise_proto::controlplane::placement_client::PlacementClient;
use reprise_proto::controlplane::{
    Bytes, ListMembersRequest, ListNodesRequest, NodeInfo, NodeMode, NodeUsage, PeerEndpoint, PlaceReason,
    PlaceRequest, ReportRequest, RouteReply, RouteRequest, SetNodeRequest,
};
use tonic::transport::Channel;

use crate::harness::{self, Node, PATIENCE, channel, keys};

/// Number of keys; enough for every member to own some.
const KEYS: u64 = 64;

pub(crate) fn store() -> Arc<MemoryStore> {
    Arc::new(MemoryStore::new())
}

pub(crate) async fn member(store: &Arc<MemoryStore>, name: &str) -> ControlPlane {
    let mut config: Config = harness::config();
    config.member.name = Some(name.to_owned());
    ControlPlane::start_with_store(store.clone(), config).await.expect("started")
}

/// Starts two members that share a store.
pub(crate) async fn two_members() -> (Arc<MemoryStore>, ControlPlane, ControlPlane) {
    let store = store();
    let (a, b) = (member(&store, "a").await, member(&store, "b").await);
    (store, a, b)
}

/// Starts two members, each of which lists both.
async fn two_listed_members() -> (Arc<MemoryStore>, ControlPlane, ControlPlane) {
    let (store, a, b) = two_members().await;
    listed(&a, 2).await;
    listed(&b, 2).await;
    (store, a, b)
}

/// Adds a member that accepts connections but does not reply, until the listener is dropped.
async fn add_silent_member(store: &MemoryStore) -> TcpListener {
    let silent = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let value = format!("{{\"address\":\"{}\"}}", silent.local_addr().expect("bound")).into_bytes();
    let write = Write::Put { key: b"members/silent".to_vec(), value, lease: None };
    store.transact(Transaction { conditions: Vec::new(), writes: vec![write] }).await.expect("valid");
    silent
}

/// Waits until a member lists this number of members and is registered itself.
pub(crate) async fn listed(of: &ControlPlane, members: usize) {
    let mut membership = harness::membership(of).await;
    let give_up = Instant::now() + PATIENCE;
    loop {
        let list = membership.list_members(ListMembersRequest {}).await.expect("a list").into_inner();
        if list.members.len() == members && list.registered {
            return;
        }
        assert!(Instant::now() < give_up, "{list:?}");
        tokio::task::yield_now().await;
    }
}

pub(crate) async fn placement(of: &ControlPlane) -> PlacementClient<Channel> {
    PlacementClient::new(channel(of).await)
}

/// Waits until a member lists a node that satisfies `holds`.
pub(crate) async fn named(of: &ControlPlane, name: &str, holds: impl Fn(&NodeInfo) -> bool) -> NodeInfo {
    let mut membership = harness::membership(of).await;
    let give_up = Instant::now() + PATIENCE;
    loop {
        let nodes = membership.list_nodes(ListNodesRequest {}).await.expect("answered").into_inner().nodes;
        if let Some(node) = nodes.iter().find(|node| node.name == name && holds(node)) {
            return node.clone();
        }
        assert!(Instant::now() < give_up, "{nodes:?}");
        tokio::task::yield_now().await;
    }
}

/// A node registered with a member, with these keys in the member's slots.
async fn holder(of: &ControlPlane, name: &str, held: std::ops::Range<u64>, operation: u8) -> Node {
    let mut node = Node::register_only(of, name).await;
    let slots = node.slots().await;
    node.open(&slots.wanted, &slots.wanted).await;
    node.announce(keys(held), operation).await;
    node
}

async fn route(placement: &mut PlacementClient<Channel>) -> RouteReply {
    let request = RouteRequest { keys: keys(0..KEYS).into(), nodes_max: 0 };
    placement.route(request).await.expect("answered").into_inner()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn other_members_list_a_registered_node_with_its_address_but_not_as_alive() {
    let (_, a, b) = two_members().await;
    let node = Node::register_only(&a, "n").await;
    let seen = named(&b, "n", |_| true).await;
    assert_eq!((seen.peer_endpoints, seen.alive), (vec![PeerEndpoint::tcp("127.0.0.1:7000")], false));
    assert_eq!(seen.node, node.granted.node);
    let mut again = Node::register_only(&b, "n").await;
    assert!(again.granted.epoch > node.granted.epoch && again.heartbeat().await);
    assert!(named(&b, "n", |_| true).await.alive);
    a.shutdown().await;
    b.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_mode_set_on_one_member_applies_on_all_and_survives_restarts() {
    let (store, a, b) = two_members().await;
    let node = Node::register_only(&a, "n").await;
    named(&b, "n", |_| true).await;
    let request = SetNodeRequest { name: "n".to_owned(), mode: NodeMode::Draining.into() };
    placement(&b).await.set_node(request).await.expect("set");
    named(&a, "n", |node| node.mode() == NodeMode::Draining).await;
    let (number, epoch) = (node.granted.node, node.granted.epoch);
    let report = ReportRequest { node: number, epoch, ..ReportRequest::default() };
    let reply = placement(&a).await.report(report).await.expect("answered").into_inner();
    assert_eq!(reply.mode(), NodeMode::Draining);
    a.shutdown().await;
    b.shutdown().await;
    let c = member(&store, "c").await;
    let mut membership = harness::membership(&c).await;
    let nodes = membership.list_nodes(ListNodesRequest {}).await.expect("answered").into_inner().nodes;
    assert_eq!(
        nodes.iter().map(NodeInfo::mode).collect::<Vec<_>>(),
        [NodeMode::Draining],
        "from its first reply on"
    );
    let node = Node::register_only(&c, "n").await;
    let report = ReportRequest { node: number, epoch: node.granted.epoch, ..ReportRequest::default() };
    let again = placement(&c).await.report(report).await.expect("answered").into_inner();
    assert_eq!((again.mode(), again.mode_revision), (NodeMode::Draining, reply.mode_revision));
    c.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn any_member_routes_for_the_keys_of_all_members() {
    let (_, a, b) = two_listed_members().await;
    let _nodes = [holder(&a, "n", 0..KEYS, 1).await, holder(&b, "n", 0..KEYS, 1).await];
    let mut answers = Vec::new();
    for member in [&a, &b] {
        let reply = route(&mut placement(member).await).await;
        assert_eq!((reply.cluster_run, reply.unanswered), (KEYS as u32, 0), "{reply:?}");
        answers.push((reply.nodes[0].name.clone(), reply.nodes[0].run, reply.nodes[0].dram_run));
    }
    assert_eq!(answers, vec![("n".to_owned(), KEYS as u32, KEYS as u32); 2]);
    a.shutdown().await;
    b.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn counts_keys_of_a_silent_member_in_time_without_ending_runs() {
    let store = store();
    let a = member(&store, "a").await;
    let _silent = add_silent_member(&store).await;
    listed(&a, 2).await;
    let _node = holder(&a, "n", 0..KEYS, 2).await;
    let mut placement = placement(&a).await;
    let asked = Instant::now();
    let reply = route(&mut placement).await;
    assert!(asked.elapsed() < Duration::from_secs(2), "{:?}", asked.elapsed());
    assert!((1..KEYS as u32).contains(&reply.unanswered), "{reply:?}");
    let run = reply.nodes[0].run;
    assert!(run + reply.unanswered >= KEYS as u32 && run > reply.cluster_run, "{reply:?}");
    a.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_silent_member_does_not_delay_calls_to_others() {
    let (store, a, b) = two_members().await;
    let _silent = add_silent_member(&store).await;
    listed(&a, 3).await;
    listed(&b, 3).await;
    let placement = placement(&a).await;
    let alone = route(&mut placement.clone()).await.unanswered;
    let mut asking = tokio::task::JoinSet::new();
    for _ in 0..200 {
        let mut placement = placement.clone();
        asking.spawn(async move { route(&mut placement).await.unanswered });
    }
    let answered = asking.join_all().await.into_iter().filter(|unanswered| *unanswered == alone).count();
    assert!(answered > 150, "{answered} of 200 had the reply of the responsive member");
    a.shutdown().await;
    b.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn only_one_member_plans_moves() {
    let (_, a, b) = two_listed_members().await;
    let mut deciders = 0;
    for member in [&a, &b] {
        let (mut full, mut empty) =
            (Node::register_only(member, "full").await, Node::register_only(member, "empty").await);
        let report = |node: &Node, nvme: u64| ReportRequest {
            node: node.granted.node,
            epoch: node.granted.epoch,
            usage: Some(NodeUsage {
                capacity: Some(Bytes { dram: 0, nvme: 1 << 30 }),
                used: Some(Bytes { dram: 0, nvme }),
                queued_bytes: 0,
            }),
            ..ReportRequest::default()
        };
        let mut placement = placement(member).await;
        placement.report(report(&empty, 0)).await.expect("answered");
        // The decision is at most one second old.
        let give_up = Instant::now() + Duration::from_millis(1500);
        while Instant::now() < give_up {
            assert!(full.heartbeat().await && empty.heartbeat().await);
            let reply = placement.report(report(&full, 1 << 29)).await.expect("answered").into_inner().r#move;
            if let Some(reply) = reply {
                assert_eq!((reply.to, reply.bytes), (empty.granted.node, 1 << 28));
                deciders += 1;
                break;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
    assert_eq!(deciders, 1);
    a.shutdown().await;
    b.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn only_the_owner_of_a_key_places_it() {
    let (_, a, b) = two_listed_members().await;
    let mut answered = vec![0; KEYS as usize];
    for member in [&a, &b] {
        let node = holder(member, "n", 0..KEYS, 2).await;
        let request = PlaceRequest {
            holder: node.granted.node,
            epoch: node.granted.epoch,
            keys: keys(0..KEYS).into(),
            slot_bytes: 1 << 20,
            reason: PlaceReason::Drain.into(),
            to: 0,
        };
        let reply = placement(member).await.place(request).await.expect("answered").into_inner();
        assert!(reply.map_epoch > 0 && !reply.elsewhere.is_empty());
        assert_eq!(reply.targets.len(), 2 * KEYS as usize);
        let own = |index: &usize| !reply.elsewhere.contains(&(*index as u32));
        (0..KEYS as usize).filter(own).for_each(|index| answered[index] += 1);
    }
    assert!(answered.iter().all(|count| *count == 1), "{answered:?}");
    a.shutdown().await;
    b.shutdown().await;
}
