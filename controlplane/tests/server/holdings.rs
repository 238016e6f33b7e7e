//! What tenants hold: every member of its own, and nobody who has not heard all nodes.

use std::time::{Duration, Instant};

use reprise_controlplane::server::ControlPlane;
use reprise_policy::Epoch;
use reprise_policy::shards::{MemberName, ShardMap};
use reprise_proto::controlplane::{
    Blocks, Bytes, ListHoldingsReply, ListHoldingsRequest, ReportRequest, TenantHolding, TenantReport,
};
use tonic::Code;

use crate::harness::{Node, PATIENCE, start};
use crate::several::{listed, member, placement, store};

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

/// A node reports to a member; it is registered there.
async fn say(to: &ControlPlane, node: &Node, tenants: Vec<TenantReport>) {
    let (number, epoch) = (node.granted.node, node.granted.epoch);
    let request = ReportRequest { node: number, epoch, tenants, ..ReportRequest::default() };
    let reply = placement(to).await.report(request).await.expect("answered").into_inner();
    assert!(!reply.fenced, "{reply:?}");
}

#[tokio::test]
async fn what_nodes_hold_is_added_up_without_a_budget_and_who_has_not_reported_is_named() {
    let member = start().await;
    let (a, b) = (Node::register(&member, "a").await, Node::register(&member, "b").await);
    let asked = ["team-a", "team-b"];
    let nobody = holdings(&member, &asked).await;
    assert_eq!((nobody.unheard_nodes, nobody.unheard.len()), (2, 2), "{nobody:?}");
    say(&member, &a, vec![report("team-a", 10, 1)]).await;
    let part = holdings(&member, &asked).await;
    assert_eq!((part.unheard, part.unheard_nodes), (vec!["b".to_owned()], 1));
    say(&member, &b, vec![report("team-a", 32, 4), report("default", 5, 5)]).await;
    let whole = holdings(&member, &asked).await;
    assert_eq!(whole.tenants, [held("team-a", 42, 5), held("team-b", 0, 0)]);
    assert_eq!((whole.unheard_nodes, whole.away_nodes), (0, 0));
    // It comes again, under another epoch, and may hold less by now.
    let again = Node::register(&member, "a").await;
    assert_eq!(holdings(&member, &asked).await.unheard, ["a"]);
    say(&member, &again, vec![]).await;
    assert_eq!(holdings(&member, &["team-a"]).await.tenants, [held("team-a", 32, 4)]);
    member.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_of_two_members_answers_for_its_own_tenants() {
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
        let said = |name: &String| {
            let elsewhere = TenantReport { tenant: name.clone(), elsewhere: true, ..TenantReport::default() };
            if own.contains(&name.as_str()) { report(name, 7, 1) } else { elsewhere }
        };
        let asked: Vec<&str> = names.iter().map(String::as_str).collect();
        let expected: Vec<TenantHolding> = own.iter().map(|name| held(name, 7, 1)).collect();
        let give_up = Instant::now() + PATIENCE;
        loop {
            say(member, &node, names.iter().map(said).collect()).await;
            // Its certainty of the map comes a moment after the list.
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
async fn questions_that_make_no_sense_are_refused_with_words() {
    let member = start().await;
    for (tenants, words) in [
        (vec![String::new()], "name the tenants"),
        (vec!["Team A".to_owned()], "Team A"),
        (vec!["t".to_owned(); 1025], "1024 at the most"),
    ] {
        let asked = placement(&member).await.list_holdings(ListHoldingsRequest { tenants }).await;
        let refused = asked.expect_err("refused");
        assert_eq!(refused.code(), Code::InvalidArgument);
        assert!(refused.message().contains(words), "{refused}");
    }
    member.shutdown().await;
}
