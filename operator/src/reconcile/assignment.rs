//! Assignment of nodes to clusters and of pools to nodes. Of contradicting objects, the older one is in effect.
//!
//! | claimed | belongs to |
//! |---|---|
//! | a node | the frozen cluster ([`is_frozen`]) in its `CacheNode`, else the oldest cluster that selects it |
//! | a pool | the oldest cluster that names it |
//! | devices on a node, and one of eight places for pools | the oldest pools that select the node |
//! | settings that all pools of a cluster share | the oldest pool of the cluster |
//!
//! Age is `creationTimestamp`, then UID. A younger cluster or pool keeps the nodes where nothing contradicts it, and
//! reports the conflict. A pool with other shared settings is refused as a whole, because an agent has one value of each.
//!
//! The computation is pure and has no memory: operators that read the same objects compute the same assignment. It is
//! repeated when specs, or names and labels of nodes, change, or a `CacheNode` of a frozen cluster. It compares
//! nodes × pools labels and pools × pools device names.

use std::collections::BTreeMap;
use std::sync::Arc;

use k8s_openapi::api::core::v1::Node;
use kube::{Resource, ResourceExt};
use reprise_crds::status::Reason;
use reprise_crds::{CacheNode, KVCacheCluster, SSDPool};

use crate::framework::labels::{MANAGED_BY, OPERATOR};
use crate::framework::refusal::Refusal;
use crate::reconcile::membership::{cluster_of, is_frozen};
use crate::reconcile::names::ClusterNames;
use crate::reconcile::pool::validate::unsupported;
use crate::reconcile::selection::{has_all, selects};

mod conflicts;

/// Most pools on one node, equal to the most claims of a `CacheNode`.
const POOLS_PER_NODE_MAX: usize = 8;

/// The assignment of all nodes, clusters and pools.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Assignment {
    /// Assignments of nodes, by name.
    pub nodes: BTreeMap<String, NodeAssignment>,
    /// Assignments of clusters, by `namespace/name`.
    pub clusters: BTreeMap<String, ClusterAssignment>,
    /// Assignments of pools, by name.
    pub pools: BTreeMap<String, PoolAssignment>,
}

/// Cluster and pools of a node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodeAssignment {
    /// Cluster of the node, as `namespace/name`.
    pub cluster: Option<String>,
    /// Names of the pools on the node, oldest first.
    pub pools: Vec<String>,
}

/// Nodes of a cluster.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ClusterAssignment {
    /// Nodes assigned to the cluster, sorted.
    pub nodes: Vec<String>,
    /// Nodes that it selects and that belong to another cluster, with that cluster.
    pub contested: BTreeMap<String, String>,
    /// The conflict to report, if nodes are contested.
    pub conflict: Option<Refusal>,
}

/// Cluster and nodes of a pool.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PoolAssignment {
    /// Cluster of the pool, as `namespace/name`.
    pub cluster: Option<String>,
    /// Nodes assigned to the pool, sorted.
    pub nodes: Vec<String>,
    /// Reason if the pool is refused as a whole. It then has no nodes.
    pub refused: Option<Refusal>,
    /// The conflict to report, if older pools exclude the pool from nodes.
    pub conflict: Option<Refusal>,
    /// Nodes on which another pool, older or younger, names the same devices, with that pool. A wipe there could
    /// destroy the other pool's data, which the agent may have opened for both, one after the other.
    pub contested: BTreeMap<String, String>,
}

/// A pool with a cluster.
struct Bound<'a> {
    pool: &'a SSDPool,
    name: String,
    cluster: String,
    /// Names of the cluster's nodes that it selects, sorted.
    selected: Vec<String>,
}

impl Assignment {
    /// Computes the assignment from the stored objects.
    pub fn compute(
        clusters: &[Arc<KVCacheCluster>],
        pools: &[Arc<SSDPool>],
        nodes: &[Arc<Node>],
        cache_nodes: &[Arc<CacheNode>],
    ) -> Assignment {
        let mut nodes: Vec<&Node> = nodes.iter().map(Arc::as_ref).collect();
        nodes.sort_by_key(|node| node.name_any());
        let clusters: Vec<(String, &KVCacheCluster)> =
            by_age(clusters).into_iter().map(|cluster| (ClusterNames::of(cluster).key(), cluster)).collect();
        let mut assignment = Assignment::default();
        assignment.assign_nodes(&clusters, &nodes, cache_nodes);
        let mut older = Vec::new();
        for pool in by_age(pools) {
            let name = pool.name_any();
            let names_it = |(_, cluster): &&(String, &KVCacheCluster)| {
                cluster.spec.pools.iter().any(|named| named.name.as_str() == name)
            };
            let Some((cluster, _)) = clusters.iter().find(names_it) else {
                assignment.pools.insert(name, PoolAssignment::default());
                continue;
            };
            let is_selected = |node: &&&Node| {
                let own = &assignment.nodes[&node.name_any()];
                own.cluster.as_ref() == Some(cluster) && selects(&pool.spec.node_selector, node.labels())
            };
            let selected = nodes.iter().filter(is_selected).map(|node| node.name_any()).collect();
            let bound = Bound { pool, name, cluster: cluster.clone(), selected };
            assignment.assign_pool(&bound, &older);
            older.push(bound);
        }
        assignment
    }

    /// Assigns nodes to clusters, given by age.
    fn assign_nodes(
        &mut self,
        clusters: &[(String, &KVCacheCluster)],
        nodes: &[&Node],
        cache_nodes: &[Arc<CacheNode>],
    ) {
        self.clusters = clusters.iter().map(|(key, _)| (key.clone(), ClusterAssignment::default())).collect();
        let kept = kept_nodes(clusters, cache_nodes);
        for node in nodes {
            let name = node.name_any();
            let selecting: Vec<&(String, &KVCacheCluster)> = clusters
                .iter()
                .filter(|(_, cluster)| has_all(&cluster.spec.agents.node_selector, node.labels()))
                .collect();
            // A frozen cluster cannot use a node that it newly selects. A cluster without a status is new.
            let can_use =
                |(_, cluster): &&&(String, &KVCacheCluster)| cluster.status.is_none() || !is_frozen(cluster);
            let oldest = selecting.iter().find(can_use).or(selecting.first()).map(|(key, _)| key);
            let owner = kept.get(&name).or(oldest).cloned();
            if let Some(owner) = &owner {
                self.clusters.entry(owner.clone()).or_default().nodes.push(name.clone());
                for (key, _) in selecting.into_iter().filter(|(key, _)| key != owner) {
                    let other = self.clusters.entry(key.clone()).or_default();
                    other.contested.insert(name.clone(), owner.clone());
                }
            }
            self.nodes.insert(name, NodeAssignment { cluster: owner, pools: Vec::new() });
        }
        for cluster in self.clusters.values_mut() {
            cluster.conflict = conflicts::nodes(&cluster.contested);
        }
    }

    /// Assigns a pool to nodes or refuses it, given the older pools.
    fn assign_pool(&mut self, bound: &Bound, older: &[Bound]) {
        let Bound { pool, name, cluster, selected } = bound;
        let older: Vec<&Bound> = older.iter().filter(|other| other.cluster == *cluster).collect();
        let first = older.iter().find(|other| self.pools[&other.name].refused.is_none());
        let refused = unsupported(pool).or_else(|| conflicts::settings(pool, first?.pool));
        let is_refused = refused.is_some();
        let mut own = PoolAssignment { cluster: Some(cluster.clone()), refused, ..PoolAssignment::default() };
        let overlapping: Vec<(&Bound, String)> = older
            .iter()
            .filter_map(|other| Some((*other, conflicts::shared_location(pool, other.pool)?)))
            .collect();
        // Nodes with the index of the excluding pool; a full node has none.
        let mut excluded: Vec<(&str, Option<usize>)> = Vec::new();
        for node in selected {
            let is_there = |other: &Bound| other.selected.binary_search(node).is_ok();
            for (other, _) in overlapping.iter().filter(|(other, _)| is_there(other)) {
                own.contested.entry(node.clone()).or_insert_with(|| other.name.clone());
                let other = self.pools.get_mut(&other.name).expect("older pools are assigned");
                other.contested.entry(node.clone()).or_insert_with(|| name.clone());
            }
            let pools = &mut self.nodes.get_mut(node).expect("every node has an entry").pools;
            let holder = overlapping.iter().position(|(other, _)| pools.contains(&other.name));
            if is_refused {
                continue;
            }
            if holder.is_some() || pools.len() >= POOLS_PER_NODE_MAX {
                excluded.push((node.as_str(), holder));
            } else {
                pools.push(name.clone());
                own.nodes.push(node.clone());
            }
        }
        own.conflict = excluded.first().map(|(_, cause)| {
            let same = excluded.iter().filter(|(_, other)| other == cause);
            let nodes = conflicts::node_list(&same.map(|(node, _)| *node).collect::<Vec<_>>());
            let message = match cause.map(|index| &overlapping[index]) {
                Some((Bound { name, .. }, what)) => format!(
                    "{what} on {nodes} may already belong to SSDPool {name}, which is older: use a different directory or \
                     other devices, or set nodeSelector of both pools so that no node matches both"
                ),
                None => format!(
                    "{POOLS_PER_NODE_MAX} older pools are on {nodes}, the most for a node: set nodeSelector so that it does \
                     not match there"
                ),
            };
            Refusal::new(Reason::Conflict, message)
        });
        self.pools.insert(name.clone(), own);
    }

    /// Returns the assignment of a cluster.
    pub fn cluster(&self, cluster: &KVCacheCluster) -> Option<&ClusterAssignment> {
        self.clusters.get(&ClusterNames::of(cluster).key())
    }
}

/// Maps nodes to the frozen cluster that has them, by the operator's `CacheNode`s.
fn kept_nodes(
    clusters: &[(String, &KVCacheCluster)],
    cache_nodes: &[Arc<CacheNode>],
) -> BTreeMap<String, String> {
    let is_ours = |node: &&Arc<CacheNode>| node.labels().get(MANAGED_BY).is_some_and(|by| by == OPERATOR);
    let of = cache_nodes.iter().filter(is_ours).filter_map(|node| Some((node.name_any(), cluster_of(node)?)));
    let is_kept = |key: &String| clusters.iter().any(|(own, cluster)| own == key && is_frozen(cluster));
    of.filter(|(_, cluster)| is_kept(cluster)).collect()
}

/// Sorts objects by age, oldest first. Drops deleted ones unless a finalizer holds them: a pool still has its
/// devices while it is being wiped.
fn by_age<K: Resource>(objects: &[Arc<K>]) -> Vec<&K> {
    let stays = |object: &&K| object.meta().deletion_timestamp.is_none() || !object.finalizers().is_empty();
    let mut sorted: Vec<&K> = objects.iter().map(Arc::as_ref).filter(stays).collect();
    sorted.sort_by_cached_key(|object| {
        let created = object.meta().creation_timestamp.as_ref().map(|time| time.0);
        (created, object.uid(), object.name_any())
    });
    sorted
}

#[cfg(test)]
mod tests;
