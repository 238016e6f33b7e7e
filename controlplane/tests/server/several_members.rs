//! Several members in one process that share a store: changes on one are visible on the others.

use std::net::TcpListener;
use std::sync::Arc;
use std::time::{Duration, Instant};

use reprise_controlplane::config::Config;
use reprise_controlplane::server::ControlPlane;
use reprise_controlplane_store::{MemoryStore, Store, Transaction, Write};
use reprise_policy::shards::{MemberName, ShardMap};
use reprise_policy::{BlockKey, Epoch};
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
    member_with(store, name, harness::config()).await
}

async fn member_with(store: &Arc<MemoryStore>, name: &str, mut config: Config) -> ControlPlane {
    config.member.name = Some(name.to_owned());
    ControlPlane::start_with_store(store.clone(), config).await.expect("started")
}

/// Starts two members that share a store.
pub(crate) async fn two_members() -> (Arc<MemoryStore>, ControlPlane, ControlPlane) {
    let store = store();
    let (a, b) = (member(&store, "a").await, member(&store, "b").await);
    (store, a, b)
}

/// Starts two members that share a store. Nodes die without heartbeats, as by default.
pub(crate) async fn two_members_with_expiring_nodes() -> (Arc<MemoryStore>, ControlPlane, ControlPlane) {
    let store = store();
    let config = harness::config_of_expiring_nodes;
    let (a, b) = (member_with(&store, "a", config()).await, member_with(&store, "b", config()).await);
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

/// Routes until all members have replied: on a busy machine, one may miss the time limit of a call.
async fn route_of_all(placement: &mut PlacementClient<Channel>) -> RouteReply {
    let give_up = Instant::now() + PATIENCE;
    loop {
        let reply = route(placement).await;
        if reply.unanswered == 0 {
            return reply;
        }
        assert!(Instant::now() < give_up, "{reply:?}");
    }
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
        let reply = route_of_all(&mut placement(member).await).await;
        assert_eq!(reply.cluster_run, KEYS as u32, "{reply:?}");
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
    // The member's own time limit is 200 ms. Without it, every call takes 4 s: until the connection's ping fails.
    // A busy machine delays some of them.
    let give_up = Instant::now() + PATIENCE;
    let reply = loop {
        let asked = Instant::now();
        let reply = route(&mut placement).await;
        if asked.elapsed() < Duration::from_secs(2) {
            break reply;
        }
        assert!(Instant::now() < give_up, "no call was answered in time");
    };
    assert!((1..KEYS as u32).contains(&reply.unanswered), "{reply:?}");
    let run = reply.nodes[0].run;
    assert!(run + reply.unanswered >= KEYS as u32 && run > reply.cluster_run, "{reply:?}");
    a.shutdown().await;
}

/// Number of keys of the silent member, next to members `a` and `b`.
fn silent_keys() -> u32 {
    let names = ["a", "b", "silent"].map(|name| MemberName::new(name).expect("a name"));
    let map = ShardMap::new(Epoch(1), names).expect("three members");
    let owner = |key: BlockKey| map.owner(key.hash_slot()).map(|owner| &map.members()[usize::from(owner.0)]);
    let of_silent = |number: &u64| owner(harness::key(*number)).is_some_and(|name| name.as_str() == "silent");
    u32::try_from((0..KEYS).filter(of_silent).count()).expect("few keys")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_silent_member_does_not_delay_calls_to_others() {
    let (store, a, b) = two_members().await;
    let _silent = add_silent_member(&store).await;
    listed(&a, 3).await;
    listed(&b, 3).await;
    let placement = placement(&a).await;
    let of_silent = silent_keys();
    // If the silent member delayed calls to the other, no round would have that member's replies. A busy machine
    // delays the replies of some rounds.
    let give_up = Instant::now() + PATIENCE;
    loop {
        let mut asking = tokio::task::JoinSet::new();
        for _ in 0..200 {
            let mut placement = placement.clone();
            asking.spawn(async move { route(&mut placement).await.unanswered });
        }
        let unanswered = asking.join_all().await;
        let answered = unanswered.iter().filter(|unanswered| **unanswered == of_silent).count();
        if answered > 150 {
            break;
        }
        assert!(Instant::now() < give_up, "{answered} of 200 had the reply of the responsive member");
    }
    a.shutdown().await;
    b.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn only_one_member_plans_moves() {
    let (_, a, b) = two_listed_members().await;
    let mut reporters = Vec::new();
    for member in [&a, &b] {
        let full = Node::register_only(member, "full").await;
        let empty = Node::register_only(member, "empty").await;
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
        reporters.push((placement, report(&full, 1 << 29), empty.granted.node));
    }
    // A decision is at most one second old: both members have made theirs after a longer time, and one of them
    // has planned a move.
    let (started, mut deciders) = (Instant::now(), [false; 2]);
    while deciders == [false; 2] || started.elapsed() < Duration::from_millis(1500) {
        for ((placement, report, empty), decides) in reporters.iter_mut().zip(&mut deciders) {
            let reply = placement.report(report.clone()).await.expect("answered").into_inner().r#move;
            if let Some(reply) = reply {
                assert_eq!((reply.to, reply.bytes), (*empty, 1 << 28));
                *decides = true;
            }
        }
        assert!(started.elapsed() < PATIENCE, "no member plans a move");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert_ne!(deciders, [true; 2]);
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
