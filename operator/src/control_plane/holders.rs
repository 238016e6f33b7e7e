//! Nodes on which there may be something of a tenant that may have nothing any more.
//!
//! The member that has the tenant's ledger knows it; all are asked at once. A node holds nothing when it has said so under its order of
//! nothing. Who is silent, has not registered or does not know the order yet may hold something: its blocks come back with it.
//!
//! While nobody calls since a call was not answered, nobody asks for this either, and one for this that is not answered counts among them.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use futures_util::future::join_all;
use reprise_crds::fields::Quantity;
use reprise_proto::controlplane::membership_client::MembershipClient;
use reprise_proto::controlplane::placement_client::PlacementClient;
use reprise_proto::controlplane::{
    Bytes, ListMembersRequest, ListNodesRequest, ListTenantsRequest, MemberInfo, NodeInfo, TenantShare,
};
use tonic::transport::Channel;

use super::{ControlPlanes, Unmet, channel, result, within};
use crate::metrics::{Call, Metrics};
use crate::names::ClusterNames;

/// Nodes that are named at the most: a condition is for people.
const NAMED_MAX: usize = 8;

/// For each member, of the time that all of it may take.
const MEMBER_PATIENCE: Duration = Duration::from_secs(1);

/// What members say.
struct Said {
    nodes: Vec<NodeInfo>,
    /// What the member that counts it has counted; if none has said it, the members that said nothing at all.
    ledger: Result<Vec<TenantShare>, Vec<String>>,
}

impl ControlPlanes {
    /// Which nodes may hold something of a tenant whose budget is nothing, and why, in words; `None` when none does. Those that are
    /// expected, and those that are registered.
    ///
    /// # Errors
    /// [`Unmet`].
    pub async fn holders(
        &self,
        cluster: &ClusterNames,
        tenant: &str,
        expected: &[String],
        metrics: &Metrics,
    ) -> Result<Option<String>, Unmet> {
        if let Some(unmet) = self.silence(cluster).await {
            return Err(unmet);
        }
        let asked = within(ask(&self.address(cluster), tenant)).await;
        metrics.called(Call::List, result(&asked));
        if asked.is_err() {
            self.note(cluster, &asked, |_| {}).await;
        }
        let Said { nodes, ledger } = asked?;
        Ok(match ledger {
            Ok(shares) => in_words(&holders(expected, &nodes, &shares)),
            Err(silent) => Some(uncounted(&silent)),
        })
    }
}

async fn ask(address: &str, tenant: &str) -> Result<Said, Unmet> {
    let first = channel(address).await?;
    let mut membership = MembershipClient::new(first.clone());
    let nodes = membership.list_nodes(ListNodesRequest {}).await?.into_inner().nodes;
    let members = membership.list_members(ListMembersRequest {}).await?.into_inner();
    let answering = &members.answering;
    let asked = join_all(members.members.iter().map(|member| {
        // The one that answers is reached where it has answered.
        let known = (member.name == *answering).then(|| first.clone());
        ask_for_ledger(member, known, tenant)
    }));
    let (mut ledger, mut silent) = (None, Vec::new());
    for (member, said) in members.members.iter().zip(asked.await) {
        match said {
            Ok(shares) => ledger = ledger.or(shares),
            Err(_) => silent.push(member.name.clone()),
        }
    }
    Ok(Said { nodes, ledger: ledger.ok_or(silent) })
}

/// What nodes hold, of the member that counts it; `None` when that is another one. Who hangs keeps nobody else from being heard.
async fn ask_for_ledger(
    member: &MemberInfo,
    known: Option<Channel>,
    tenant: &str,
) -> Result<Option<Vec<TenantShare>>, Unmet> {
    let listed = tokio::time::timeout(MEMBER_PATIENCE, async {
        let reached = match known {
            Some(reached) => reached,
            None => channel(&member.address).await?,
        };
        let listed = PlacementClient::new(reached).list_tenants(ListTenantsRequest {}).await?;
        Ok::<_, Unmet>(listed.into_inner())
    });
    let late = |_| Unmet::Absent(format!("no answer within {MEMBER_PATIENCE:?}"));
    let of_tenant =
        listed.await.map_err(late)??.tenants.into_iter().find(|state| {
            state.ledger_here && state.tenant.as_ref().is_some_and(|known| known.name == tenant)
        });
    Ok(of_tenant.map(|state| state.shares))
}

/// Why nobody can tell what nodes hold.
fn uncounted(silent: &[String]) -> String {
    let nobody = "no member has counted yet what nodes hold";
    if silent.is_empty() {
        return nobody.to_owned();
    }
    format!("{nobody}, and these cannot be reached from here: {}", silent.join(", "))
}

/// Who may hold something, and why, by name.
fn holders(expected: &[String], nodes: &[NodeInfo], shares: &[TenantShare]) -> Vec<String> {
    let shares: BTreeMap<u32, &TenantShare> = shares.iter().map(|share| (share.node, share)).collect();
    let known: BTreeMap<&str, &NodeInfo> = nodes.iter().map(|node| (node.name.as_str(), node)).collect();
    let names: BTreeSet<&str> = expected.iter().map(String::as_str).chain(known.keys().copied()).collect();
    let why = |name: &str| {
        let Some(node) = known.get(name) else { return Some("has not registered".to_owned()) };
        let follows = |share: &&&TenantShare| share.follows && is_nothing(share.granted.as_ref());
        match shares.get(&node.node).filter(follows) {
            Some(share) if is_nothing(share.used.as_ref()) => None,
            _ if !node.alive => Some(format!("is away (reprise forget {name}, if it does not come back)")),
            Some(share) => {
                let (dram, ssd) = share.used.as_ref().map_or((0, 0), |used| (used.dram, used.nvme));
                let (dram, ssd) = (Quantity::of_bytes(dram), Quantity::of_bytes(ssd));
                Some(format!("holds {dram} of memory and {ssd} of devices"))
            }
            None => Some("has not said yet what it holds".to_owned()),
        }
    };
    names.into_iter().filter_map(|name| why(name).map(|why| format!("{name} {why}"))).collect()
}

fn is_nothing(bytes: Option<&Bytes>) -> bool {
    bytes.is_none_or(|bytes| *bytes == Bytes::default())
}

fn in_words(holders: &[String]) -> Option<String> {
    if holders.is_empty() {
        return None;
    }
    let named = holders[..holders.len().min(NAMED_MAX)].join("; ");
    match holders.len().saturating_sub(NAMED_MAX) {
        0 => Some(named),
        more => Some(format!("{named}; and {more} more nodes")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(number: u32, alive: bool) -> NodeInfo {
        NodeInfo { node: number, name: format!("n{number}"), alive, ..NodeInfo::default() }
    }

    fn share(number: u32, granted: u64, used: u64) -> TenantShare {
        let bytes = |bytes| Some(Bytes { dram: 0, nvme: bytes });
        TenantShare { node: number, granted: bytes(granted), used: bytes(used), follows: true }
    }

    #[test]
    fn a_node_holds_nothing_when_it_has_said_so_under_an_order_of_nothing() {
        let nodes = [node(1, true), node(2, true)];
        let empty = [share(1, 0, 0), share(2, 0, 0)];
        assert_eq!(holders(&["n1".to_owned()], &nodes, &empty), Vec::<String>::new());
        // It died afterwards, and has nothing that could come back.
        assert_eq!(holders(&[], &[node(1, false)], &empty), Vec::<String>::new());
        for (shares, words) in [
            (vec![share(1, 0, 0)], "n2 has not said yet"),
            (vec![share(1, 0, 0), share(2, 0, 4096)], "n2 holds 0 of memory and 4Ki of devices"),
            (vec![share(1, 0, 0), share(2, 4096, 0)], "n2 has not said yet"),
            (vec![share(1, 0, 0), TenantShare { follows: false, ..share(2, 0, 0) }], "n2 has not said yet"),
        ] {
            let found = holders(&[], &nodes, &shares);
            assert!(found.len() == 1 && found[0].starts_with(words), "{found:?}");
        }
    }

    #[test]
    fn who_is_away_or_has_never_come_is_waited_for() {
        let found = holders(
            &["n1".to_owned(), "n3".to_owned()],
            &[node(1, true), node(2, false)],
            &[share(1, 0, 0), share(2, 0, 4096)],
        );
        assert_eq!(found.len(), 2, "{found:?}");
        assert!(found[0].starts_with("n2 is away") && found[1] == "n3 has not registered", "{found:?}");
    }

    #[test]
    fn members_that_do_not_answer_are_named_where_nobody_has_counted() {
        assert!(!uncounted(&[]).contains("reached"));
        assert!(uncounted(&["m-0".to_owned(), "m-1".to_owned()]).ends_with("from here: m-0, m-1"));
    }

    #[test]
    fn of_many_some_are_named() {
        assert_eq!(in_words(&[]), None);
        let all: Vec<String> = (0..10).map(|number| format!("n{number} is away")).collect();
        let words = in_words(&all).expect("there are some");
        assert!(words.starts_with("n0 is away; ") && words.ends_with("; and 2 more nodes"), "{words}");
    }
}
