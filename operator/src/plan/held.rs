//! What nodes have now: their clusters, and the claims of pools, as the operator wrote them.

use std::collections::BTreeMap;
use std::sync::Arc;

use kube::ResourceExt;
use reprise_crds::CacheNode;
use reprise_crds::node::PoolClaim;

use crate::names::{MANAGED_BY, OPERATOR};

/// By name of the node.
#[derive(Clone, Debug, Default)]
pub struct Held {
    nodes: BTreeMap<String, Arc<CacheNode>>,
}

impl Held {
    /// Reads it from the `CacheNode`s that the operator made. Those that somebody wrote by hand give nobody anything.
    pub fn of(cache_nodes: &[Arc<CacheNode>]) -> Held {
        let having = cache_nodes.iter().filter(|node| counts(node));
        Held { nodes: having.map(|node| (node.name_any(), Arc::clone(node))).collect() }
    }

    /// Whether a cluster (`namespace/name`) has a node.
    pub(super) fn has(&self, cluster: &str, node: &str) -> bool {
        self.nodes.get(node).is_some_and(|having| is_of(having, cluster))
    }

    /// How many claims a node has.
    pub(super) fn claims(&self, node: &str) -> usize {
        self.nodes.get(node).map(|having| having.spec.claims.len()).unwrap_or_default()
    }

    /// The claim of a pool that a node of a cluster has.
    pub(super) fn claim(&self, node: &str, cluster: &str, pool_uid: &str) -> Option<&PoolClaim> {
        let having = self.nodes.get(node).filter(|having| is_of(having, cluster))?;
        having.spec.claims.iter().find(|claim| claim.uid.as_str() == pool_uid)
    }

    /// Whether a node has no more what it had.
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

/// Whether what a `CacheNode` says is what a node has.
fn counts(node: &CacheNode) -> bool {
    let is_ours = node.labels().get(MANAGED_BY).is_some_and(|by| by == OPERATOR);
    is_ours && node.metadata.deletion_timestamp.is_none()
}

fn is_of(node: &CacheNode, cluster: &str) -> bool {
    let Some(named) = &node.spec.cluster_ref else { return false };
    cluster.split_once('/') == Some((named.namespace.as_str(), named.name.as_str()))
}
