//! Tenant usage: every member lists its own tenants, and nodes without a report.

use std::time::{Duration, Instant};

use reprise_controlplane::server::ControlPlane;
use reprise_policy::Epoch;
use reprise_policy::shards::{MemberName, ShardMap};
use reprise_proto::controlplane::{
    Blocks, Bytes, ListHoldingsReply, ListHoldingsRequest, ReportRequest, TenantHolding, TenantReport,
};
use tonic::Code;

use crate::harness::{Node, PATIENCE, start};
use crate::several_members::{listed, member, placement, store};

async fn holdings(of: &ControlPlane, tenants: &[&str]) -> ListHoldingsReply {
    let tenants = tenants.iter().map(|name| (*name).to_owned()).collect();
    let asked = placement(of).await.list_holdings(ListHoldingsRequest { tenants }).await;
    asked.expect("answered").into_inner()
}

fn report(tenant: &str, bytes: u64, blocks: u64) -> TenantReport {
    TenantReport {
        tenant: tenant.to_owned(),
        used: Some(Bytes { dram: bytes, nvme: 2 * bytes }),
        blocks: Some(Blocks { dram: blocks, nvme: 2 * blocks }),
        ..TenantReport::default()
    }
}

fn held(tenant: &str, bytes: u64, blocks: u64) -> TenantHolding {
    let TenantReport { tenant, used, blocks, .. } = report(tenant, bytes, blocks);
    TenantHolding { tenant, used, blocks }
}

/// Sends a report of a node to a member that it is registered with.
async fn send_report(to: &ControlPlane, node: &Node, tenants: Vec<TenantReport>) {
    let (number, epoch) = (node.granted.node, node.granted.epoch);
    let request = ReportRequest { node: number, epoch, tenants, ..ReportRequest::default() };
    let reply = placement(to).await.report(request).await.expect("answered").into_inner();
    assert!(!reply.fenced, "{reply:?}");
}

#[tokio::test]
async fn sums_usage_without_a_budget_and_lists_unreported_nodes() {
    let member = start().await;
    let (a, b) = (Node::register(&member, "a").await, Node::register(&member, "b").await);
    let asked = ["team-a", "team-b"];
    let empty_reply = holdings(&member, &asked).await;
    assert_eq!((empty_reply.unheard_nodes, empty_reply.unheard.len()), (2, 2), "{empty_reply:?}");
    send_report(&member, &a, vec![report("team-a", 10, 1)]).await;
    let part = holdings(&member, &asked).await;
    assert_eq!((part.unheard, part.unheard_nodes), (vec!["b".to_owned()], 1));
    send_report(&member, &b, vec![report("team-a", 32, 4), report("default", 5, 5)]).await;
    let whole = holdings(&member, &asked).await;
    assert_eq!(whole.tenants, [held("team-a", 42, 5), held("team-b", 0, 0)]);
    assert_eq!((whole.unheard_nodes, whole.away_nodes), (0, 0));
    // It registers under another epoch, and its usage may have changed.
    let again = Node::register(&member, "a").await;
    assert_eq!(holdings(&member, &asked).await.unheard, ["a"]);
    send_report(&member, &again, vec![]).await;
    assert_eq!(holdings(&member, &["team-a"]).await.tenants, [held("team-a", 32, 4)]);
    member.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_member_lists_usage_of_its_own_tenants() {
    let store = store();
    let members = [member(&store, "a").await, member(&store, "b").await];
    let names: Vec<String> = (0..32).map(|number| format!("t{number}")).collect();
    let map = ShardMap::new(Epoch(1), ["a", "b"].map(|name| MemberName::new(name).expect("a name")));
    let map = map.expect("two members");
    for (at, member) in members.iter().enumerate() {
        listed(member, 2).await;
        let node = Node::register_only(member, "n").await;
        let own: Vec<&str> = names
            .iter()
            .map(String::as_str)
            .filter(|name| {
                let tenant: reprise_policy::TenantName = name.parse().expect("a name");
                map.owner(tenant.hash_slot()).is_some_and(|owner| usize::from(owner.0) == at)
            })
            .collect();
        assert!(!own.is_empty() && own.len() < names.len());
        let reported = |name: &String| {
            let elsewhere = TenantReport { tenant: name.clone(), elsewhere: true, ..TenantReport::default() };
            if own.contains(&name.as_str()) { report(name, 7, 1) } else { elsewhere }
        };
        let asked: Vec<&str> = names.iter().map(String::as_str).collect();
        let expected: Vec<TenantHolding> = own.iter().map(|name| held(name, 7, 1)).collect();
        let give_up = Instant::now() + PATIENCE;
        loop {
            send_report(member, &node, names.iter().map(reported).collect()).await;
            // The map becomes certain slightly later than the list.
            let answered = holdings(member, &asked).await;
            if answered.tenants == expected && answered.unheard_nodes == 0 {
                break;
            }
            assert!(Instant::now() < give_up, "{answered:?}");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
    for member in members {
        member.shutdown().await;
    }
}

#[tokio::test]
async fn rejects_invalid_requests_with_the_reason() {
    let member = start().await;
    for (tenants, words) in [
        (vec![String::new()], "empty tenant name"),
        (vec!["Team A".to_owned()], "Team A"),
        (vec!["t".to_owned(); 1025], "at most 1024"),
    ] {
        let asked = placement(&member).await.list_holdings(ListHoldingsRequest { tenants }).await;
        let refused = asked.expect_err("refused");
        assert_eq!(refused.code(), Code::InvalidArgument);
        assert!(refused.message().contains(words), "{refused}");
    }
    member.shutdown().await;
}
