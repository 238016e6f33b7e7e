//! Nodes that may still hold blocks of a tenant whose budget is zero.
//!
//! The member with the tenant's ledger knows them; all members are queried concurrently. A node holds nothing
//! if it has reported so after it received the zero quota. A node that is silent, has not registered, or has
//! not received the quota may hold blocks, and they become available when it returns.
//!
//! Calls share the backoff of [`ControlPlanes`]: during a backoff none are made, and a failed call starts
//! one.

use std::collections::{BTreeMap, BTreeSet};

use reprise_crds::fields::Quantity;
use reprise_proto::controlplane::membership_client::MembershipClient;
use reprise_proto::controlplane::placement_client::PlacementClient;
use reprise_proto::controlplane::{Bytes, ListNodesRequest, ListTenantsRequest, NodeInfo, TenantShare};
use tonic::transport::Channel;

use super::{CallError, ControlPlanes, Target, call_members};
use crate::framework::metrics::{Call, Metrics};
use crate::reconcile::names::ClusterNames;

/// Maximum number of nodes in a message.
const NAMED_MAX: usize = 8;

impl ControlPlanes {
    /// Describes the expected and registered nodes that may hold blocks of a tenant whose budget is zero;
    /// otherwise `None`.
    ///
    /// # Errors
    /// [`CallError`].
    pub async fn holders(
        &self,
        cluster: &ClusterNames,
        tenant: &str,
        expected: &[String],
        metrics: &Metrics,
    ) -> Result<Option<String>, CallError> {
        if let Some(error) = self.backoff_error(cluster).await {
            return Err(error);
        }
        let request = async { query_members(&self.target(cluster)?, tenant).await };
        let (nodes, ledger) = self.call(cluster, (Call::List, metrics), request, |_| {}).await?;
        Ok(match ledger {
            Ok(shares) => join(&holders(expected, &nodes, &shares)),
            Err(silent) => Some(describe_uncounted(&silent)),
        })
    }
}

/// Returns the nodes, and the ledger of the member that has it or otherwise the members that did not respond.
async fn query_members(
    target: &Target,
    tenant: &str,
) -> Result<(Vec<NodeInfo>, Result<Vec<TenantShare>, Vec<String>>), CallError> {
    let first = target.connect().await?;
    let nodes =
        MembershipClient::new(first.clone()).list_nodes(ListNodesRequest {}).await?.into_inner().nodes;
    let list = |mut member: PlacementClient<Channel>| async move {
        Ok::<_, CallError>(member.list_tenants(ListTenantsRequest {}).await?.into_inner().tenants)
    };
    let (mut ledger, mut silent) = (None, Vec::new());
    for (member, answer) in call_members(target, &first, list).await? {
        match answer {
            Ok(tenants) => {
                let of_tenant = tenants.into_iter().find(|state| {
                    state.ledger_here && state.tenant.as_ref().is_some_and(|known| known.name == tenant)
                });
                ledger = ledger.or(of_tenant.map(|state| state.shares));
            }
            Err(_) => silent.push(member),
        }
    }
    Ok((nodes, ledger.ok_or(silent)))
}

/// Describes why the holdings of nodes are unknown.
fn describe_uncounted(silent: &[String]) -> String {
    let unknown = "no member has a complete ledger of the nodes' holdings yet";
    if silent.is_empty() {
        return unknown.to_owned();
    }
    format!("{unknown}, and these members cannot be reached: {}", silent.join(", "))
}

/// Describes the nodes that may hold blocks, sorted by name.
fn holders(expected: &[String], nodes: &[NodeInfo], shares: &[TenantShare]) -> Vec<String> {
    let shares: BTreeMap<u32, &TenantShare> = shares.iter().map(|share| (share.node, share)).collect();
    let known: BTreeMap<&str, &NodeInfo> = nodes.iter().map(|node| (node.name.as_str(), node)).collect();
    let names: BTreeSet<&str> = expected.iter().map(String::as_str).chain(known.keys().copied()).collect();
    let why = |name: &str| {
        let Some(node) = known.get(name) else { return Some("has not registered".to_owned()) };
        let follows = |share: &&&TenantShare| share.follows && is_nothing(share.granted.as_ref());
        match shares.get(&node.node).filter(follows) {
            Some(share) if is_nothing(share.used.as_ref()) => None,
            _ if !node.alive => Some(format!("is absent (run reprise forget {name} if it does not return)")),
            Some(share) => {
                let (dram, ssd) = share.used.as_ref().map_or((0, 0), |used| (used.dram, used.nvme));
                let (dram, ssd) = (Quantity::of_bytes(dram), Quantity::of_bytes(ssd));
                Some(format!("holds {dram} of memory and {ssd} on devices"))
            }
            None => Some("has not reported its holdings yet".to_owned()),
        }
    };
    names.into_iter().filter_map(|name| why(name).map(|why| format!("{name} {why}"))).collect()
}

fn is_nothing(bytes: Option<&Bytes>) -> bool {
    bytes.is_none_or(|bytes| *bytes == Bytes::default())
}

fn join(holders: &[String]) -> Option<String> {
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
    fn node_may_hold_blocks_until_it_reports_none_under_a_zero_quota() {
        let both = || vec![node(1, true), node(2, true)];
        let one = || share(1, 0, 0);
        let does_not_follow = TenantShare { follows: false, ..share(2, 0, 0) };
        for (expected, nodes, shares, found) in [
            ("n1", both(), vec![one(), share(2, 0, 0)], ""),
            // It died afterwards, and has no blocks that could return.
            ("", vec![node(1, false)], vec![one()], ""),
            ("", both(), vec![one()], "n2 has not reported"),
            ("", both(), vec![one(), share(2, 0, 4096)], "n2 holds 0 of memory and 4Ki on devices"),
            ("", both(), vec![one(), share(2, 4096, 0)], "n2 has not reported"),
            ("", both(), vec![one(), does_not_follow], "n2 has not reported"),
            ("n1 n3", vec![node(1, true)], vec![one()], "n3 has not registered"),
            ("", vec![node(2, false)], vec![share(2, 0, 4096)], "n2 is absent"),
        ] {
            let expected: Vec<String> = expected.split_whitespace().map(str::to_owned).collect();
            let holders = holders(&expected, &nodes, &shares).join("; ");
            assert!(holders.starts_with(found) && holders.is_empty() == found.is_empty(), "{holders}");
            assert!(!holders.contains("; "), "only one node may hold blocks: {holders}");
        }
    }

    #[test]
    fn messages_name_the_first_nodes_and_silent_members() {
        assert!(!describe_uncounted(&[]).contains("reached"));
        assert!(describe_uncounted(&["m-0".to_owned(), "m-1".to_owned()]).ends_with("be reached: m-0, m-1"));
        assert_eq!(join(&[]), None);
        let all: Vec<String> = (0..10).map(|number| format!("n{number} is absent")).collect();
        let message = join(&all).expect("a message");
        assert!(
            message.starts_with("n0 is absent; ") && message.ends_with("; and 2 more nodes"),
            "{message}"
        );
    }
}
