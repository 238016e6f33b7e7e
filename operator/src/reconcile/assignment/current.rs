//! Clusters and pool claims that nodes have now, as written to their `CacheNode`s by the operator.

use std::collections::BTreeMap;
use std::sync::Arc;

use kube::ResourceExt;
use reprise_crds::CacheNode;
use reprise_crds::node::PoolClaim;

use crate::framework::labels::{MANAGED_BY, OPERATOR};

/// What nodes have now, by name of the node.
#[derive(Clone, Debug, Default)]
pub struct CurrentAssignment {
    nodes: BTreeMap<String, Arc<CacheNode>>,
}

impl CurrentAssignment {
    /// Reads the `CacheNode`s that the operator created. Those created by other writers are ignored.
    pub fn from_cache_nodes(cache_nodes: &[Arc<CacheNode>]) -> CurrentAssignment {
        let having = cache_nodes.iter().filter(|node| counts(node));
        CurrentAssignment { nodes: having.map(|node| (node.name_any(), Arc::clone(node))).collect() }
    }

    /// Returns whether a cluster (`namespace/name`) has a node.
    pub(super) fn has(&self, cluster: &str, node: &str) -> bool {
        self.nodes.get(node).is_some_and(|having| is_of(having, cluster))
    }

    /// Returns the number of claims of a node.
    pub(super) fn claims(&self, node: &str) -> usize {
        self.nodes.get(node).map(|having| having.spec.claims.len()).unwrap_or_default()
    }

    /// Returns the claim of a pool on a node of a cluster.
    pub(super) fn claim(&self, node: &str, cluster: &str, pool_uid: &str) -> Option<&PoolClaim> {
        let having = self.nodes.get(node).filter(|having| is_of(having, cluster))?;
        having.spec.claims.iter().find(|claim| claim.uid.as_str() == pool_uid)
    }

    /// Returns whether a node no longer has something that it had: its cluster, a claim, or the devices of a
    /// claim.
    pub fn has_lost(&self, node: &str, now: Option<&CacheNode>) -> bool {
        let Some(before) = self.nodes.get(node) else { return false };
        let Some(now) = now.filter(|now| counts(now)) else { return true };
        let is_same = |one: &PoolClaim, claim: &PoolClaim| {
            one.uid == claim.uid && one.file == claim.file && one.globs == claim.globs
        };
        let has = |claim: &PoolClaim| now.spec.claims.iter().any(|one| is_same(one, claim));
        before.spec.cluster_ref != now.spec.cluster_ref || !before.spec.claims.iter().all(has)
    }
}

/// Returns whether the operator created a `CacheNode` and it is not being deleted.
fn counts(node: &CacheNode) -> bool {
    let is_ours = node.labels().get(MANAGED_BY).is_some_and(|by| by == OPERATOR);
    is_ours && node.metadata.deletion_timestamp.is_none()
}

fn is_of(node: &CacheNode, cluster: &str) -> bool {
    let Some(named) = &node.spec.cluster_ref else { return false };
    cluster.split_once('/') == Some((named.namespace.as_str(), named.name.as_str()))
}
