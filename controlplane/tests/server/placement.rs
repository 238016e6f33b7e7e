//! Places, routes and modes, requested like agents, gateways and operators do.

use std::time::Instant;

use reprise_controlplane::server::ControlPlane;
use reprise_proto::controlplane::placement_client::PlacementClient;
use reprise_proto::controlplane::{
    Bytes, DrainProgress, ListNodesRequest, LookupRequest, NodeInfo, NodeMode, NodeUsage, PlaceReason,
    PlaceReply, PlaceRequest, ReportReply, ReportRequest, RouteReply, RouteRequest, SetNodeRequest,
    WatchNodesRequest,
};
use tonic::Code;
use tonic::transport::Channel;

use crate::harness::{self, Node, PATIENCE, channel, keys, start};

const GIB: u64 = 1 << 30;
const SLOT: u64 = 2 << 20;

/// Wire operations of announcements.
const DRAM: u8 = 1;
const NVME: u8 = 2;

/// A node that reports its usage.
struct Holder {
    node: Node,
    placement: PlacementClient<Channel>,
    report: ReportRequest,
}

impl Holder {
    /// Registers a node with an empty pool of 100 GiB.
    async fn new(member: &ControlPlane, name: &str) -> Holder {
        let node = Node::register(member, name).await;
        let usage = NodeUsage {
            capacity: Some(Bytes { dram: GIB, nvme: 100 * GIB }),
            used: Some(Bytes::default()),
            queued_bytes: 0,
        };
        let report = ReportRequest {
            node: node.granted.node,
            epoch: node.granted.epoch,
            usage: Some(usage),
            ..ReportRequest::default()
        };
        let placement = PlacementClient::new(channel(member).await);
        let mut holder = Holder { node, placement, report };
        holder.send_report().await;
        holder
    }

    fn number(&self) -> u16 {
        u16::try_from(self.node.granted.node).expect("16 bits")
    }

    async fn send_report(&mut self) -> ReportReply {
        let reply = self.placement.report(self.report.clone()).await.expect("answered").into_inner();
        assert!(!reply.fenced);
        reply
    }

    async fn uses(&mut self, nvme: u64) -> ReportReply {
        self.report.usage.as_mut().expect("usage is set").used = Some(Bytes { dram: 0, nvme });
        self.send_report().await
    }

    fn place_request(&self, keys: Vec<u8>, reason: PlaceReason) -> PlaceRequest {
        PlaceRequest {
            holder: self.node.granted.node,
            epoch: self.node.granted.epoch,
            keys: keys.into(),
            slot_bytes: SLOT,
            reason: reason.into(),
            to: 0,
        }
    }

    async fn place(&mut self, request: PlaceRequest) -> PlaceReply {
        self.placement.place(request).await.expect("answered").into_inner()
    }

    async fn targets(&mut self, keys: Vec<u8>, reason: PlaceReason) -> Vec<u16> {
        let request = self.place_request(keys, reason);
        let reply = self.place(request).await;
        assert!(!reply.fenced && reply.elsewhere.is_empty(), "{reply:?}");
        targets(&reply)
    }

    async fn set(&mut self, name: &str, mode: NodeMode) -> NodeMode {
        let request = SetNodeRequest { name: name.to_owned(), mode: mode.into() };
        let reply = self.placement.set_node(request).await.expect("set").into_inner();
        reply.before()
    }

    async fn route(&mut self, keys: Vec<u8>) -> RouteReply {
        let request = RouteRequest { keys: keys.into(), nodes_max: 0 };
        self.placement.route(request).await.expect("answered").into_inner()
    }
}

fn targets(reply: &PlaceReply) -> Vec<u16> {
    reply.targets.chunks(2).map(|target| u16::from_le_bytes([target[0], target[1]])).collect()
}

/// Name, run and run in DRAM of each node of a route.
fn runs(reply: &RouteReply) -> Vec<(&str, u32, u32)> {
    reply.nodes.iter().map(|node| (node.name.as_str(), node.run, node.dram_run)).collect()
}

async fn listed(member: &ControlPlane, name: &str) -> NodeInfo {
    let nodes = harness::membership(member).await.list_nodes(ListNodesRequest {}).await.expect("answered");
    nodes.into_inner().nodes.into_iter().find(|node| node.name == name).expect("a node")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn places_a_hot_block_until_two_nodes_have_it_durably() {
    let member = start().await;
    let (mut a, mut b) = (Holder::new(&member, "a").await, Holder::new(&member, "b").await);
    a.node.announce(keys(0..3), NVME).await;
    assert_eq!(a.targets(keys(0..3), PlaceReason::Hot).await, [b.number(); 3]);
    b.node.announce(keys(0..1), NVME).await;
    b.node.announce(keys(1..2), DRAM).await;
    assert_eq!(
        a.targets(keys(0..3), PlaceReason::Hot).await,
        [0, b.number(), b.number()],
        "DRAM is not durable"
    );
    let mut c = Holder::new(&member, "c").await;
    let choice = a.targets(keys(1..2), PlaceReason::Hot).await;
    assert_eq!(choice, [b.number()], "a node with the block in DRAM need not fetch it");
    assert_eq!(c.targets(keys(0..1), PlaceReason::Hot).await, [0], "enough replicas, for any requester");
    assert!(b.uses(100 * GIB).await.mode == i32::from(NodeMode::Active));
    c.uses(100 * GIB).await;
    assert_eq!(a.targets(keys(2..3), PlaceReason::Hot).await, [u16::MAX], "no node has room");
    member.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn placed_bytes_count_against_the_target_until_its_report() {
    let member = start().await;
    let (mut a, mut b) = (Holder::new(&member, "a").await, Holder::new(&member, "b").await);
    // A 64th of the pool must stay free: there is room for four more blocks above that, and for a last one
    // that goes below.
    b.uses(100 * GIB - 100 * GIB / 64 - 4 * SLOT).await;
    let placed = a.targets(keys(0..8), PlaceReason::Drain).await;
    assert_eq!(placed, [[b.number(); 5].as_slice(), &[u16::MAX; 3]].concat());
    assert_eq!(a.targets(keys(8..9), PlaceReason::Drain).await, [u16::MAX], "also in the next call");
    b.send_report().await;
    assert_eq!(a.targets(keys(8..9), PlaceReason::Drain).await, [b.number()]);
    member.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cordoned_nodes_are_not_chosen_and_draining_nodes_report_progress() {
    let member = start().await;
    let (mut a, mut b) = (Holder::new(&member, "a").await, Holder::new(&member, "b").await);
    let mut watch = harness::membership(&member)
        .await
        .watch_nodes(WatchNodesRequest {})
        .await
        .expect("answered")
        .into_inner();
    for _ in 0..2 {
        watch.message().await.expect("no error").expect("a node");
    }
    assert_eq!(a.set("b", NodeMode::Cordoned).await, NodeMode::Active);
    let change = watch.message().await.expect("no error").expect("a change").node.expect("a node");
    assert_eq!((change.name.as_str(), change.mode()), ("b", NodeMode::Cordoned));
    assert_eq!(a.targets(keys(0..1), PlaceReason::Drain).await, [u16::MAX]);
    let order = b.send_report().await;
    assert_eq!(order.mode(), NodeMode::Cordoned);

    assert_eq!(a.set("b", NodeMode::Draining).await, NodeMode::Cordoned);
    assert_eq!(listed(&member, "b").await.drain, None);
    b.report.drain = Some(DrainProgress { drained: true, walked_blocks: 3, ..DrainProgress::default() });
    let newer = b.send_report().await;
    assert_eq!(newer.mode(), NodeMode::Draining);
    assert!(newer.mode_revision > order.mode_revision);
    assert_eq!(listed(&member, "b").await.drain, None, "the report was made before this drain");
    b.send_report().await;
    assert_eq!(listed(&member, "b").await.drain, b.report.drain);

    assert_eq!(b.set("b", NodeMode::Active).await, NodeMode::Draining);
    assert_eq!(b.set("b", NodeMode::Active).await, NodeMode::Active);
    assert_eq!(a.targets(keys(0..1), PlaceReason::Drain).await, [b.number()]);
    assert_eq!(listed(&member, "b").await.drain, None);
    member.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn replicas_on_a_draining_node_do_not_count() {
    let member = start().await;
    let (mut a, mut b) = (Holder::new(&member, "a").await, Holder::new(&member, "b").await);
    a.node.announce(keys(0..1), NVME).await;
    b.node.announce(keys(0..1), NVME).await;
    assert_eq!(a.targets(keys(0..1), PlaceReason::Drain).await, [0]);
    a.set("b", NodeMode::Draining).await;
    let c = Holder::new(&member, "c").await;
    assert_eq!(a.targets(keys(0..1), PlaceReason::Drain).await, [c.number()]);
    assert_eq!(a.targets(keys(0..1), PlaceReason::Hot).await, [c.number()]);
    member.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_full_node_moves_blocks_to_an_empty_one_and_to_no_other() {
    let member = start().await;
    let (mut a, mut b) = (Holder::new(&member, "a").await, Holder::new(&member, "b").await);
    let give_up = Instant::now() + PATIENCE;
    // Decided once a second.
    let order = loop {
        if let Some(order) = a.uses(50 * GIB).await.r#move {
            break order;
        }
        assert!(Instant::now() < give_up, "no move was planned");
        tokio::task::yield_now().await;
    };
    assert_eq!((order.to, order.bytes), (b.node.granted.node, 10 * (256 << 20)));
    assert_eq!(b.send_report().await.r#move, None);
    a.node.announce(keys(0..1), NVME).await;
    let to_b = PlaceRequest { to: order.to, ..a.place_request(keys(0..1), PlaceReason::Move) };
    assert_eq!(targets(&a.place(to_b.clone()).await), [b.number()]);
    b.node.announce(keys(0..1), NVME).await;
    assert_eq!(targets(&a.place(to_b.clone()).await), [0], "b has it durably");
    let other = PlaceRequest { keys: keys(1..2).into(), ..to_b };
    a.set("b", NodeMode::Cordoned).await;
    assert_eq!(targets(&a.place(other).await), [u16::MAX]);
    member.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rejects_invalid_requests_and_fences_old_registrations() {
    let member = start().await;
    let mut a = Holder::new(&member, "a").await;
    let good = a.place_request(keys(0..1), PlaceReason::Hot);
    for (request, words) in [
        (PlaceRequest { slot_bytes: 0, ..good.clone() }, "invalid slot_bytes 0"),
        (PlaceRequest { reason: 9, ..good.clone() }, "HOT, DRAIN or MOVE"),
        (PlaceRequest { reason: PlaceReason::Move.into(), ..good.clone() }, "`to` to another node"),
        (PlaceRequest { keys: vec![0; 17].into(), ..good.clone() }, "multiple of 16"),
        (PlaceRequest { keys: keys(0..8193).into(), ..good.clone() }, "at most 8192"),
    ] {
        let refused = a.placement.place(request).await.expect_err(words);
        assert_eq!(refused.code(), Code::InvalidArgument);
        assert!(refused.message().contains(words), "{refused}");
    }
    assert!(a.place(PlaceRequest { epoch: good.epoch - 1, ..good.clone() }).await.fenced);
    assert!(a.place(PlaceRequest { holder: 77, ..good }).await.fenced);
    let unknown = SetNodeRequest { name: "b".to_owned(), mode: NodeMode::Cordoned.into() };
    let refused = a.placement.set_node(unknown).await.expect_err("unknown node");
    assert_eq!(refused.code(), Code::NotFound);
    assert!(refused.message().contains("known nodes are a"), "{refused}");
    let nothing = SetNodeRequest { name: "a".to_owned(), mode: 0 };
    let refused = a.placement.set_node(nothing).await.expect_err("invalid mode");
    assert_eq!(refused.code(), Code::InvalidArgument);
    member.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn routes_rank_nodes_by_cached_prefix() {
    let member = start().await;
    let (mut a, mut b) = (Holder::new(&member, "a").await, Holder::new(&member, "b").await);
    let mut c = Holder::new(&member, "c").await;
    a.node.announce(keys(0..4), NVME).await;
    b.node.announce(keys(0..4), DRAM).await;
    c.node.announce(keys(4..6), NVME).await;
    let reply = a.route(keys(0..9)).await;
    assert_eq!(runs(&reply), [("b", 4, 4), ("a", 4, 0)]);
    assert_eq!((reply.cluster_run, reply.unanswered, reply.partial), (6, 0, 0));
    b.report.usage.as_mut().expect("usage is set").queued_bytes = 7 * GIB;
    b.send_report().await;
    let reply = a.route(keys(0..9)).await;
    assert_eq!(reply.nodes[0].queued_bytes, 7 * GIB);
    a.set("b", NodeMode::Draining).await;
    assert_eq!(runs(&a.route(keys(0..9)).await), [("a", 4, 0)], "without the draining node");
    assert_eq!(a.route(Vec::new()).await, RouteReply::default());
    let one = RouteRequest { keys: keys(0..1).into(), nodes_max: 1 };
    assert_eq!(a.placement.route(one).await.expect("answered").into_inner().nodes.len(), 1);
    member.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lookups_return_idle_nodes_first_with_their_load() {
    let member = start().await;
    let (mut a, mut b) = (Holder::new(&member, "a").await, Holder::new(&member, "b").await);
    let mut asking = Holder::new(&member, "c").await;
    a.node.announce(keys(0..50), NVME).await;
    b.node.announce(keys(0..50), NVME).await;
    a.report.usage.as_mut().expect("usage is set").queued_bytes = 4 * (64 << 20);
    let give_up = Instant::now() + PATIENCE;
    loop {
        // The peer table is rebuilt at most four times a second.
        a.send_report().await;
        let request = LookupRequest { keys: keys(0..50).into(), asking_node: asking.node.granted.node };
        let reply = asking.node.directory.lookup(request).await.expect("answered").into_inner();
        let packed: Vec<&[u8]> = reply.replicas.chunks(4).collect();
        assert_eq!(packed.len(), 100);
        if packed.iter().all(|replica| replica[3] == 0) {
            assert!(Instant::now() < give_up, "no load was returned");
            tokio::task::yield_now().await;
            continue;
        }
        for pair in packed.chunks(2) {
            assert_eq!((u16::from(pair[0][0]), pair[0][3]), (b.number(), 0));
            assert_eq!((u16::from(pair[1][0]), pair[1][3]), (a.number(), 3));
        }
        break;
    }
    member.shutdown().await;
}
