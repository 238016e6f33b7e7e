//! Tenant budgets over gRPC: grants to nodes follow their reports.

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

/// An agent's state for one tenant.
struct Reporter {
    node: Node,
    placement: PlacementClient<Channel>,
    report: TenantReport,
    /// Whether it reports the tenant, and under which map.
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
        reporter.send_report().await;
        Reporter { names: true, ..reporter }
    }

    async fn send_report(&mut self) -> ReportReply {
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

    /// Reports and applies grants until one satisfies `wanted`.
    async fn report_until(&mut self, wanted: impl Fn(&TenantOrder) -> bool) -> TenantOrder {
        let give_up = Instant::now() + PATIENCE;
        loop {
            for order in self.send_report().await.orders {
                assert!(order.version > self.report.version, "grant is not newer: {order:?}");
                self.report.version = order.version;
                self.report.limit = order.limit.or_else(|| both(u64::MAX));
                if wanted(&order) {
                    return order;
                }
            }
            assert!(Instant::now() < give_up, "no matching grant arrived: {:?}", self.report);
            tokio::time::sleep(std::time::Duration::from_millis(20)).await;
        }
    }
}

fn limit(order: &TenantOrder) -> u64 {
    order.limit.map_or(u64::MAX, |bytes| bytes.dram)
}

async fn list(reporter: &mut Reporter) -> TenantState {
    let list = reporter.placement.list_tenants(ListTenantsRequest {}).await.expect("answered").into_inner();
    list.tenants.into_iter().next().expect("one tenant has a budget")
}

#[tokio::test]
async fn divides_a_budget_among_nodes_until_it_is_removed() {
    let member = start().await;
    let mut a = Reporter::new(&member, "a").await;
    let mut b = Reporter::new(&member, "b").await;
    a.placement.set_tenant(tenant(GIB / 4, GIB)).await.expect("there is room");
    let half = |order: &TenantOrder| limit(order) == GIB / 2;
    let order = {
        let (order, _) = tokio::join!(a.report_until(half), b.report_until(half));
        order
    };
    assert_eq!(order.reserved, both(GIB / 8));
    a.send_report().await;
    b.send_report().await;
    let state = list(&mut a).await;
    assert!(state.ledger_here);
    assert_eq!((state.charged, state.shares.len()), (both(GIB), 2));
    assert!(state.shares.iter().all(|share| share.follows), "both have acknowledged: {state:?}");

    a.placement.remove_tenant(RemoveTenantRequest { name: "team-a".to_owned() }).await.expect("it exists");
    let ended = a.report_until(|order| order.limit.is_none()).await;
    assert_eq!(ended.reserved, None);
    assert!(a.send_report().await.orders.is_empty(), "sent once");
    member.shutdown().await;
}

#[tokio::test]
async fn moves_unused_bytes_to_a_node_with_demand() {
    let member = start().await;
    let mut a = Reporter::new(&member, "a").await;
    let mut b = Reporter::new(&member, "b").await;
    a.placement.set_tenant(tenant(0, GIB)).await.expect("there is room");
    let half = |order: &TenantOrder| limit(order) == GIB / 2;
    tokio::join!(a.report_until(half), b.report_until(half));
    (a.report.used, a.report.limited) = (both(GIB / 2), both(GIB));
    let order = {
        let lowered = async {
            b.report_until(|order| limit(order) < GIB / 4).await;
            // Acknowledges until the other node's grant is raised.
            loop {
                b.send_report().await;
                tokio::time::sleep(std::time::Duration::from_millis(20)).await;
            }
        };
        let raised = a.report_until(|order| limit(order) > GIB * 3 / 4);
        tokio::select! {
            order = raised => order,
            () = lowered => unreachable!("it reports without end"),
        }
    };
    assert!(limit(&order) + b.report.limit.map_or(0, |bytes| bytes.dram) <= GIB, "grants exceed the budget");
    member.shutdown().await;
}

#[tokio::test]
async fn rejects_unsatisfiable_budgets_and_fences_old_registrations() {
    let member = start().await;
    let mut a = Reporter::new(&member, "a").await;
    let refused = a.placement.set_tenant(tenant(2 * GIB, 2 * GIB)).await.expect_err("the node has 1 GiB");
    assert_eq!(refused.code(), Code::FailedPrecondition);
    assert!(refused.message().contains("1GiB more"), "{refused}");
    let refused = a.placement.set_tenant(tenant(2, 1)).await.expect_err("above its limit");
    assert!(refused.message().contains("raise the limit"), "{refused}");
    let unknown = RemoveTenantRequest { name: "team-b".to_owned() };
    assert_eq!(a.placement.remove_tenant(unknown).await.expect_err("unknown").code(), Code::NotFound);
    a.report.tenant = "Team A".to_owned();
    let request = ReportRequest {
        node: a.node.granted.node,
        epoch: a.node.granted.epoch,
        tenants: vec![a.report.clone()],
        ..ReportRequest::default()
    };
    assert_eq!(a.placement.report(request).await.expect_err("invalid name").code(), Code::InvalidArgument);
    a.report.tenant = "team-a".to_owned();
    a.node.granted.epoch -= 1;
    assert!(a.send_report().await.fenced);
    member.shutdown().await;
}

#[tokio::test]
async fn a_node_that_reports_elsewhere_delays_grants() {
    let member = start().await;
    let mut a = Reporter::new(&member, "a").await;
    let mut b = Reporter::new(&member, "b").await;
    a.placement.set_tenant(tenant(0, GIB)).await.expect("there is room");
    b.report.elsewhere = true;
    b.send_report().await;
    for _ in 0..30 {
        assert!(a.send_report().await.orders.is_empty(), "the other node may hold the whole budget");
        b.send_report().await;
        tokio::time::sleep(std::time::Duration::from_millis(50)).await;
    }
    b.report.elsewhere = false;
    tokio::join!(a.report_until(|_| true), b.report_until(|_| true));
    member.shutdown().await;
}

#[tokio::test]
async fn a_node_that_reports_under_another_map_delays_grants_of_all_tenants() {
    let member = start().await;
    let mut a = Reporter::new(&member, "a").await;
    let mut b = Reporter::new(&member, "b").await;
    let list = a.node.membership.list_members(ListMembersRequest {}).await.expect("a list").into_inner();
    let names = list.members.iter().map(|member| MemberName::new(&member.name).expect("a name"));
    let now = ShardMap::new(Epoch(list.epoch), names).expect("a map").digest();
    (a.map_digest, b.map_digest, b.names) = (now, now ^ 1, false);
    b.send_report().await;
    a.placement.set_tenant(tenant(0, GIB)).await.expect("there is room");
    for _ in 0..30 {
        assert!(
            a.send_report().await.orders.is_empty(),
            "a former owner may have granted the whole budget to the other node"
        );
        assert!(b.send_report().await.orders.is_empty(), "it would not accept a grant");
        tokio::time::sleep(std::time::Duration::from_millis(50)).await;
    }
    b.map_digest = now;
    tokio::join!(a.report_until(|_| true), b.report_until(|_| true));
    member.shutdown().await;
}
