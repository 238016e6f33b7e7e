//! What nodes have now: their clusters, and the claims of pools, as the operator wrote them.

use std::collections::BTreeMap;
use std::sync::Arc;

use kube::ResourceExt;
use reprise_crds::CacheNode;
use reprise_crds::node::PoolClaim;

use crate::names::{MANAGED_BY, OPERATOR};

/// By name of the node.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Held {
    nodes: BTreeMap<String, Having>,
}

/// What one node has.
#[derive(Clone, Debug, PartialEq)]
pub struct Having {
    /// `namespace/name` of its cluster.
    cluster: String,
    claims: Vec<PoolClaim>,
}

impl Held {
    /// Reads it from the `CacheNode`s that the operator made. Those that somebody wrote by hand give nobody anything.
    pub fn of(cache_nodes: &[Arc<CacheNode>]) -> Held {
        let nodes = cache_nodes.iter().filter_map(|node| Some((node.name_any(), Having::of(node)?)));
        Held { nodes: nodes.collect() }
    }

    /// The cluster that has a node.
    pub(super) fn cluster(&self, node: &str) -> Option<&str> {
        self.nodes.get(node).map(|having| having.cluster.as_str())
    }

    /// The claim of a pool that a node of a cluster has.
    pub(super) fn claim(&self, node: &str, cluster: &str, pool_uid: &str) -> Option<&PoolClaim> {
        let having = self.nodes.get(node).filter(|having| having.cluster == cluster)?;
        having.claims.iter().find(|claim| claim.uid.as_str() == pool_uid)
    }

    /// Whether a node has no more what it had.
    pub fn has_lost(&self, node: &str, now: Option<&CacheNode>) -> bool {
        let Some(before) = self.nodes.get(node) else { return false };
        let Some(now) = now.and_then(Having::of) else { return true };
        let place = |claim: &PoolClaim| (claim.uid.clone(), claim.file.clone(), claim.globs.clone());
        let has = |claim: &PoolClaim| now.claims.iter().any(|one| place(one) == place(claim));
        before.cluster != now.cluster || !before.claims.iter().all(has)
    }
}

impl Having {
    fn of(node: &CacheNode) -> Option<Having> {
        let is_ours = node.labels().get(MANAGED_BY).is_some_and(|by| by == OPERATOR);
        let is_kept = is_ours && node.metadata.deletion_timestamp.is_none();
        let cluster = node.spec.cluster_ref.as_ref().filter(|_| is_kept)?;
        let cluster = format!("{}/{}", cluster.namespace, cluster.name);
        Some(Having { cluster, claims: node.spec.claims.clone() })
    }
}
