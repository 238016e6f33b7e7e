//! Nodes that may still hold blocks of a tenant whose budget is zero.
//!
//! The member with the tenant's ledger knows them; all members are queried concurrently. A node holds nothing
//! if it has reported so after it received the zero quota. A node that is silent, has not registered, or has
//! not received the quota may hold blocks, and they become available when it returns.

use std::collections::{BTreeMap, BTreeSet};

use reprise_crds::fields::Quantity;
use reprise_proto::controlplane::membership_client::MembershipClient;
use reprise_proto::controlplane::placement_client::PlacementClient;
use reprise_proto::controlplane::{
    Bytes, ListNodesRequest, ListTenantsRequest, NodeInfo, TenantShare, TenantState,
};
use tonic::transport::Channel;

use super::{CallError, ControlPlanes, call_members, list_first};
use crate::reconcile::names::ClusterNames;

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
    ) -> Result<Option<String>, CallError> {
        let list = |mut member: PlacementClient<Channel>| async move {
            Ok(member.list_tenants(ListTenantsRequest {}).await?.into_inner().tenants)
        };
        let request = async {
            let (first, security) = self.connect(cluster).await?;
            let nodes = MembershipClient::new(first.clone()).list_nodes(ListNodesRequest {}).await?;
            Ok((nodes.into_inner().nodes, call_members(&first, &security, list).await?))
        };
        let (nodes, answers) = self.call(cluster, "list", request).await?;
        let mut silent = Vec::new();
        for (member, answer) in answers {
            let Ok(tenants) = answer else {
                silent.push(member);
                continue;
            };
            let is_ledger = |state: &TenantState| {
                state.ledger_here && state.tenant.as_ref().is_some_and(|known| known.name == tenant)
            };
            if let Some(ledger) = tenants.into_iter().find(is_ledger) {
                let holders = holders(expected, &nodes, &ledger.shares);
                return Ok((!holders.is_empty()).then(|| list_first(&holders, holders.len(), "; ")));
            }
        }
        let unknown = "no member has a complete ledger of the nodes' holdings yet";
        Ok(Some(match silent.as_slice() {
            [] => unknown.to_owned(),
            silent => format!("{unknown}, and these members cannot be reached: {}", silent.join(", ")),
        }))
    }
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
}
