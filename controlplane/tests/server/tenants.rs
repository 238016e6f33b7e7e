//! Budgets of tenants: set over gRPC, split into orders to nodes by what these report.

use std::time::Instant;

use reprise_controlplane::server::ControlPlane;
use reprise_policy::Epoch;
use reprise_policy::shards::{MemberName, ShardMap};
use reprise_proto::controlplane::placement_client::PlacementClient;
use reprise_proto::controlplane::{
    Bytes, ListMembersRequest, ListTenantsRequest, NodeUsage, RemoveTenantRequest, ReportReply,
    ReportRequest, SetTenantRequest, Tenant, TenantOrder, TenantReport, TenantState,
};
use tonic::Code;
use tonic::transport::Channel;

use crate::harness::{Node, PATIENCE, channel, start};

const GIB: u64 = 1 << 30;

fn both(bytes: u64) -> Option<Bytes> {
    Some(Bytes { dram: bytes, nvme: bytes })
}

fn tenant(reserved: u64, limit: u64) -> SetTenantRequest {
    let tenant = Tenant { name: "team-a".to_owned(), reserved: both(reserved), limit: both(limit) };
    SetTenantRequest { tenant: Some(tenant) }
}

/// What an agent knows of one tenant.
struct Reporter {
    node: Node,
    placement: PlacementClient<Channel>,
    report: TenantReport,
    /// Whether it names the tenant, and by which map it reports.
    names: bool,
    map_digest: u64,
}

impl Reporter {
    async fn new(member: &ControlPlane, name: &str) -> Reporter {
        let report = TenantReport {
            tenant: "team-a".to_owned(),
            limit: both(GIB),
            used: both(0),
            ..TenantReport::default()
        };
        let placement = PlacementClient::new(channel(member).await);
        let node = Node::register(member, name).await;
        let mut reporter = Reporter { node, placement, report, names: false, map_digest: 0 };
        reporter.say().await;
        Reporter { names: true, ..reporter }
    }

    async fn say(&mut self) -> ReportReply {
        let request = ReportRequest {
            node: self.node.granted.node,
            epoch: self.node.granted.epoch,
            tenants: self.names.then(|| self.report.clone()).into_iter().collect(),
            map_digest: self.map_digest,
            usage: Some(NodeUsage {
                capacity: Some(Bytes { dram: GIB, nvme: 1024 * GIB }),
                ..NodeUsage::default()
            }),
            ..ReportRequest::default()
        };
        self.placement.report(request).await.expect("answered").into_inner()
    }

    /// Reports and obeys until it is told something of which this holds.
    async fn told(&mut self, wanted: impl Fn(&TenantOrder) -> bool) -> TenantOrder {
        let give_up = Instant::now() + PATIENCE;
        loop {
            for order in self.say().await.orders {
                assert!(order.version > self.report.version, "an order that is not newer: {order:?}");
                self.report.version = order.version;
                self.report.limit = order.limit.or_else(|| both(u64::MAX));
                if wanted(&order) {
                    return order;
                }
            }
            assert!(Instant::now() < give_up, "no such order came: {:?}", self.report);
            tokio::time::sleep(std::time::Duration::from_millis(20)).await;
        }
    }
}

fn limit(order: &TenantOrder) -> u64 {
    order.limit.map_or(u64::MAX, |bytes| bytes.dram)
}

async fn list(reporter: &mut Reporter) -> TenantState {
    let list = reporter.placement.list_tenants(ListTenantsRequest {}).await.expect("answered").into_inner();
    list.tenants.into_iter().next().expect("one has a budget")
}

#[tokio::test]
async fn a_budget_is_split_among_nodes_with_its_reservation_and_ends_when_it_is_removed() {
    let member = start().await;
    let mut a = Reporter::new(&member, "a").await;
    let mut b = Reporter::new(&member, "b").await;
    a.placement.set_tenant(tenant(GIB / 4, GIB)).await.expect("there is room");
    let half = |order: &TenantOrder| limit(order) == GIB / 2;
    let order = {
        let (order, _) = tokio::join!(a.told(half), b.told(half));
        order
    };
    assert_eq!(order.reserved, both(GIB / 8));
    a.say().await;
    b.say().await;
    let state = list(&mut a).await;
    assert!(state.ledger_here);
    assert_eq!((state.charged, state.shares.len()), (both(GIB), 2));
    assert!(state.shares.iter().all(|share| share.follows), "both have said so: {state:?}");

    a.placement.remove_tenant(RemoveTenantRequest { name: "team-a".to_owned() }).await.expect("it was there");
    let ended = a.told(|order| order.limit.is_none()).await;
    assert_eq!(ended.reserved, None);
    assert!(a.say().await.orders.is_empty(), "said once");
    member.shutdown().await;
}

#[tokio::test]
async fn what_one_node_wants_is_taken_from_one_that_does_not_use_it() {
    let member = start().await;
    let mut a = Reporter::new(&member, "a").await;
    let mut b = Reporter::new(&member, "b").await;
    a.placement.set_tenant(tenant(0, GIB)).await.expect("there is room");
    let half = |order: &TenantOrder| limit(order) == GIB / 2;
    tokio::join!(a.told(half), b.told(half));
    (a.report.used, a.report.limited) = (both(GIB / 2), both(GIB));
    let ((), order) = {
        let lowered = async {
            b.told(|order| limit(order) < GIB / 4).await;
            // It says so, until the other has been told.
            for _ in 0..200 {
                b.say().await;
                tokio::time::sleep(std::time::Duration::from_millis(20)).await;
            }
        };
        let raised = a.told(|order| limit(order) > GIB * 3 / 4);
        tokio::select! {
            order = raised => ((), order),
            () = lowered => panic!("nothing was granted to the one that wants"),
        }
    };
    assert!(
        limit(&order) + b.report.limit.map_or(0, |bytes| bytes.dram) <= GIB,
        "never more than the budget"
    );
    member.shutdown().await;
}

#[tokio::test]
async fn what_nobody_can_keep_is_refused_with_words_and_a_fenced_node_is_told_so() {
    let member = start().await;
    let mut a = Reporter::new(&member, "a").await;
    let refused = a.placement.set_tenant(tenant(2 * GIB, 2 * GIB)).await.expect_err("the node has 1 GiB");
    assert_eq!(refused.code(), Code::FailedPrecondition);
    assert!(refused.message().contains("1GiB more"), "{refused}");
    let refused = a.placement.set_tenant(tenant(2, 1)).await.expect_err("above its limit");
    assert!(refused.message().contains("raise the limit"), "{refused}");
    let nobody = RemoveTenantRequest { name: "team-b".to_owned() };
    assert_eq!(a.placement.remove_tenant(nobody).await.expect_err("unknown").code(), Code::NotFound);
    a.report.tenant = "Team A".to_owned();
    let request = ReportRequest {
        node: a.node.granted.node,
        epoch: a.node.granted.epoch,
        tenants: vec![a.report.clone()],
        ..ReportRequest::default()
    };
    assert_eq!(a.placement.report(request).await.expect_err("no name").code(), Code::InvalidArgument);
    a.report.tenant = "team-a".to_owned();
    a.node.granted.epoch -= 1;
    assert!(a.say().await.fenced);
    member.shutdown().await;
}

#[tokio::test]
async fn a_node_that_takes_another_member_for_the_owner_holds_orders_up() {
    let member = start().await;
    let mut a = Reporter::new(&member, "a").await;
    let mut b = Reporter::new(&member, "b").await;
    a.placement.set_tenant(tenant(0, GIB)).await.expect("there is room");
    b.report.elsewhere = true;
    b.say().await;
    for _ in 0..30 {
        assert!(a.say().await.orders.is_empty(), "the other may hold it all");
        b.say().await;
        tokio::time::sleep(std::time::Duration::from_millis(50)).await;
    }
    b.report.elsewhere = false;
    tokio::join!(a.told(|_| true), b.told(|_| true));
    member.shutdown().await;
}

#[tokio::test]
async fn a_node_that_reports_by_another_map_holds_orders_up_also_for_tenants_that_it_does_not_name() {
    let member = start().await;
    let mut a = Reporter::new(&member, "a").await;
    let mut b = Reporter::new(&member, "b").await;
    let list = a.node.membership.list_members(ListMembersRequest {}).await.expect("a list").into_inner();
    let names = list.members.iter().map(|member| MemberName::new(&member.name).expect("a name"));
    let now = ShardMap::new(Epoch(list.epoch), names).expect("a map").digest();
    (a.map_digest, b.map_digest, b.names) = (now, now ^ 1, false);
    b.say().await;
    a.placement.set_tenant(tenant(0, GIB)).await.expect("there is room");
    for _ in 0..30 {
        assert!(a.say().await.orders.is_empty(), "a former owner may have granted it all to the other");
        assert!(b.say().await.orders.is_empty(), "it would not take an order");
        tokio::time::sleep(std::time::Duration::from_millis(50)).await;
    }
    b.map_digest = now;
    tokio::join!(a.told(|_| true), b.told(|_| true));
    member.shutdown().await;
}
