//! Which node belongs to which cluster, which pools are on it, and which clusters and pools are refused for what others claim.
//!
//! What is older stays: of two clusters that select one node, and of two pools that contradict each other, the younger is refused as
//! a whole, so that nothing is half applied. A pool is on those nodes of its cluster that it selects.
//!
//! Pure, and made anew when specs, or names and labels of nodes have changed (`crate::world`): nodes × pools comparisons of labels,
//! some 20 ms for 1,000 nodes and 20 pools.

use std::collections::BTreeMap;
use std::sync::Arc;

use k8s_openapi::api::core::v1::Node;
use kube::{Resource, ResourceExt};
use reprise_crds::status::Reason;
use reprise_crds::{KVCacheCluster, SSDPool};

use crate::names::ClusterNames;
use crate::pool::validate::unsupported;
use crate::selection::{has_all, selects};

mod contradictions;

pub use contradictions::globs_overlap;

/// Pools on one node, at the most: as many as a CacheNode has claims.
const POOLS_PER_NODE_MAX: usize = 8;

/// What was decided.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    /// By name of the node.
    pub nodes: BTreeMap<String, NodePlan>,
    /// By `namespace/name`.
    pub clusters: BTreeMap<String, ClusterPlan>,
    /// By name.
    pub pools: BTreeMap<String, PoolPlan>,
}

/// What is on a node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodePlan {
    /// `namespace/name` of its cluster.
    pub cluster: Option<String>,
    /// Pools on it, by name.
    pub pools: Vec<String>,
}

/// What a cluster has.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ClusterPlan {
    /// Its nodes.
    pub nodes: Vec<String>,
    /// Why it is refused.
    pub refused: Option<Refusal>,
}

/// What a pool has.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PoolPlan {
    /// `namespace/name` of its cluster.
    pub cluster: Option<String>,
    /// Nodes that it selects; those that it has, unless it is refused.
    pub nodes: Vec<String>,
    /// Why it is refused.
    pub refused: Option<Refusal>,
}

/// Why something is refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// In one word.
    pub reason: Reason,
    /// And what to do.
    pub message: String,
}

impl Refusal {
    /// A refusal.
    pub fn new(reason: Reason, message: impl Into<String>) -> Refusal {
        Refusal { reason, message: message.into() }
    }
}

impl Plan {
    /// Decides.
    pub fn make(clusters: &[Arc<KVCacheCluster>], pools: &[Arc<SSDPool>], nodes: &[Arc<Node>]) -> Plan {
        let mut plan = Plan::default();
        // What is said of nodes must not change with the order in which they are stored.
        let mut nodes = nodes.to_vec();
        nodes.sort_by_key(|node| node.name_any());
        let nodes = nodes.as_slice();
        for node in nodes {
            plan.nodes.insert(node.name_any(), NodePlan::default());
        }
        let clusters = by_age(clusters, |cluster| cluster.meta());
        for cluster in &clusters {
            plan.give_nodes(cluster, nodes);
        }
        let mut accepted: Vec<(&SSDPool, Vec<String>)> = Vec::new();
        for pool in by_age(pools, |pool| pool.meta()) {
            let name = pool.name_any();
            let decided = plan.decide(pool, &clusters, nodes, &accepted);
            if decided.refused.is_none() {
                for node in &decided.nodes {
                    plan.nodes.entry(node.clone()).or_default().pools.push(name.clone());
                }
                accepted.push((pool, decided.nodes.clone()));
            }
            plan.pools.insert(name, decided);
        }
        plan
    }

    /// Gives a cluster the nodes that it selects, unless an older one has one of them.
    fn give_nodes(&mut self, cluster: &KVCacheCluster, nodes: &[Arc<Node>]) {
        let key = ClusterNames::of(cluster).key();
        let wanted = nodes.iter().filter(|node| has_all(&cluster.spec.agents.node_selector, node.labels()));
        let wanted: Vec<String> = wanted.map(|node| node.name_any()).collect();
        let taken = wanted.iter().find_map(|node| {
            let owner = self.nodes.get(node).and_then(|plan| plan.cluster.clone());
            owner.map(|owner| (node.clone(), owner))
        });
        let decided = match taken {
            Some((node, owner)) => {
                let message = format!(
                    "node {node} has the agent of KVCacheCluster {owner} already, which is older: set agents.nodeSelector \
                     so that no node is selected by both"
                );
                ClusterPlan { nodes: Vec::new(), refused: Some(Refusal::new(Reason::Conflict, message)) }
            }
            None => {
                for node in &wanted {
                    self.nodes.entry(node.clone()).or_default().cluster = Some(key.clone());
                }
                ClusterPlan { nodes: wanted, refused: None }
            }
        };
        self.clusters.insert(key, decided);
    }

    fn decide(
        &self,
        pool: &SSDPool,
        clusters: &[&KVCacheCluster],
        nodes: &[Arc<Node>],
        accepted: &[(&SSDPool, Vec<String>)],
    ) -> PoolPlan {
        let name = pool.name_any();
        let names_it = |cluster: &&&KVCacheCluster| {
            let accepted = self.cluster(cluster).is_some_and(|plan| plan.refused.is_none());
            accepted && cluster.spec.pools.iter().any(|named| named.name.as_str() == name)
        };
        let Some(cluster) = clusters.iter().find(names_it) else { return PoolPlan::default() };
        let key = ClusterNames::of(cluster).key();
        let of_cluster = |node: &&Arc<Node>| {
            self.nodes.get(&node.name_any()).is_some_and(|plan| plan.cluster.as_ref() == Some(&key))
        };
        let selected = nodes.iter().filter(of_cluster);
        let selected = selected.filter(|node| selects(&pool.spec.node_selector, node.labels()));
        let selected: Vec<String> = selected.map(|node| node.name_any()).collect();
        let contradicts = || {
            let of_the_same = |older: &&(&SSDPool, Vec<String>)| {
                let plan = self.pools.get(&older.0.name_any());
                plan.is_some_and(|plan| plan.cluster.as_ref() == Some(&key))
            };
            accepted.iter().filter(of_the_same).find_map(|(older, theirs)| {
                let shared = selected.iter().find(|node| theirs.contains(node));
                contradictions::between(pool, older, shared.map(String::as_str))
            })
        };
        let crowded = || {
            let full = |node: &&String| {
                self.nodes.get(*node).is_some_and(|plan| plan.pools.len() >= POOLS_PER_NODE_MAX)
            };
            selected.iter().find(full).map(|node| {
                let message = format!(
                    "node {node} has {POOLS_PER_NODE_MAX} pools already: set nodeSelector so that the node is not selected"
                );
                Refusal::new(Reason::Conflict, message)
            })
        };
        let refused = unsupported(pool).or_else(contradicts).or_else(crowded);
        PoolPlan { cluster: Some(key), nodes: selected, refused }
    }

    /// What was decided of a cluster.
    pub fn cluster(&self, cluster: &KVCacheCluster) -> Option<&ClusterPlan> {
        self.clusters.get(&ClusterNames::of(cluster).key())
    }
}

/// The oldest first. What is being deleted counts as long as a finalizer holds it: a pool that is wiped has its devices still.
fn by_age<K>(
    objects: &[Arc<K>],
    meta: impl Fn(&K) -> &k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta,
) -> Vec<&K> {
    let has_finalizers = |object: &K| meta(object).finalizers.as_ref().is_some_and(|all| !all.is_empty());
    let stays = |object: &&K| meta(object).deletion_timestamp.is_none() || has_finalizers(object);
    let mut sorted: Vec<&K> = objects.iter().map(Arc::as_ref).filter(stays).collect();
    sorted.sort_by_cached_key(|object| {
        let meta = meta(object);
        let made = meta.creation_timestamp.as_ref().map(|time| time.0);
        (made, meta.namespace.clone(), meta.name.clone())
    });
    sorted
}

#[cfg(test)]
mod tests;
