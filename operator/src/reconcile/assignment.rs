//! Assignment of nodes to clusters and of pools to nodes, and refusals of conflicting clusters and pools.
//!
//! Nodes keep their cluster and their pools: no cluster loses a node, and no pool a device, because another
//! resource or a label is edited. Conflicts are resolved by this order:
//!
//! | claimed | first | then |
//! |---|---|---|
//! | a node | the cluster in its `CacheNode`, while it selects the node, is refused, or is paused | the oldest cluster |
//! | a pool | the cluster whose nodes have the pool, while it names the pool | the oldest accepted cluster |
//! | a device, or a setting shared by all pools of a cluster | the pool that nodes have with its current spec | edited pools, then refused edits, then pools on no node; the oldest of each |
//!
//! The loser is refused as a whole, so that no spec is applied in part. Nodes that already have it keep it
//! unchanged ([`NodeAssignment::retained`]). A pool is assigned to those nodes of its cluster that it
//! selects.
//!
//! The computation is pure. It is repeated when specs, or names and labels of nodes, change. While there are
//! conflicts it is also repeated when a node loses its cluster, a pool or a device (`crate::reconcile::stores`). It
//! compares nodes × pools labels and nodes × pools × pools device names.
//!
//! Invariant: applying an assignment to nodes does not change the next one.

use std::collections::BTreeMap;
use std::sync::Arc;

use k8s_openapi::api::core::v1::Node;
use kube::{Resource, ResourceExt};
use reprise_crds::node::PoolClaim;
use reprise_crds::status::{ConditionStatus, ConditionType, Reason, find, holds};
use reprise_crds::{KVCacheCluster, SSDPool};

use self::current::CurrentAssignment;
use crate::framework::refusal::Refusal;
use crate::reconcile::names::ClusterNames;
use crate::reconcile::pool::validate::unsupported;
use crate::reconcile::selection::{has_all, selects};

pub mod current;
mod pool_conflicts;

pub use pool_conflicts::globs_overlap;

/// Most pools on one node, equal to the most claims of a `CacheNode`.
const POOLS_PER_NODE_MAX: usize = 8;

/// The assignment of all nodes, clusters and pools.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Assignment {
    /// Assignments of nodes, by name.
    pub nodes: BTreeMap<String, NodeAssignment>,
    /// Assignments of clusters, by `namespace/name`.
    pub clusters: BTreeMap<String, ClusterAssignment>,
    /// Assignments of pools, by name.
    pub pools: BTreeMap<String, PoolAssignment>,
    /// Whether the assignment depends on what nodes have now: a conflict caused a refusal, or several
    /// clusters name one pool.
    pub is_contested: bool,
}

/// Cluster and pools of a node.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct NodeAssignment {
    /// Cluster of the node, as `namespace/name`.
    pub cluster: Option<String>,
    /// Names of the accepted pools on the node.
    pub pools: Vec<String>,
    /// Refused pools that the node already has. Their claims stay unchanged.
    pub retained: Vec<RetainedPool>,
}

/// A refused pool on a node that already has it.
#[derive(Clone, Debug, PartialEq)]
pub struct RetainedPool {
    /// Name of the pool.
    pub name: String,
    /// The node's claim of the pool, which stays unchanged.
    pub claim: PoolClaim,
}

/// Nodes of a cluster.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ClusterAssignment {
    /// Nodes assigned to the cluster. If it is refused, only those that it already had.
    pub nodes: Vec<String>,
    /// Reason if the cluster is refused.
    pub refused: Option<Refusal>,
}

/// Cluster and nodes of a pool.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PoolAssignment {
    /// Cluster of the pool, as `namespace/name`.
    pub cluster: Option<String>,
    /// Nodes assigned to the pool. If it is refused, only those that already have it.
    pub nodes: Vec<String>,
    /// Reason if the pool is refused.
    pub refused: Option<Refusal>,
}

impl PoolAssignment {
    /// Returns whether the cluster's agents are configured for the pool: it is accepted, or nodes already
    /// have it.
    pub fn is_used(&self) -> bool {
        self.refused.is_none() || !self.nodes.is_empty()
    }
}

/// A pool with a known cluster, before its nodes are decided.
struct Candidate<'a> {
    pool: &'a SSDPool,
    /// Cluster of the pool, as `namespace/name`.
    cluster: String,
    /// Names of the cluster's nodes that have the pool now, sorted.
    current_nodes: Vec<String>,
    /// Precedence among all pools.
    rank: Rank,
}

/// Precedence of pools, first to last.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Rank {
    /// A node has the pool with its current spec.
    Current,
    /// Nodes have the pool with an earlier spec.
    Edited,
    /// Like [`Rank::Edited`], but the edit was refused before. It must not gain precedence when another pool
    /// is edited later.
    EditRefused,
    /// No node has the pool.
    Unused,
}

impl Assignment {
    /// Computes the assignment from the stored specs and from what nodes have now.
    pub fn compute(
        clusters: &[Arc<KVCacheCluster>],
        pools: &[Arc<SSDPool>],
        nodes: &[Arc<Node>],
        current: &CurrentAssignment,
    ) -> Assignment {
        let mut assignment = Assignment::default();
        // Sorted, so that messages that name nodes do not depend on the order in the store.
        let mut nodes = nodes.to_vec();
        nodes.sort_by_key(|node| node.name_any());
        let nodes = nodes.as_slice();
        for node in nodes {
            assignment.nodes.insert(node.name_any(), NodeAssignment::default());
        }
        let clusters = by_age(clusters, |cluster| cluster.meta());
        assignment.assign_nodes(&clusters, nodes, current);
        let mut candidates = Vec::new();
        for pool in by_age(pools, |pool| pool.meta()) {
            match assignment.candidate(pool, &clusters, current) {
                Some(candidate) => candidates.push(candidate),
                None => {
                    assignment.pools.insert(pool.name_any(), PoolAssignment::default());
                }
            }
        }
        // The sort is stable: pools of one rank stay ordered by age.
        candidates.sort_by_key(|candidate| candidate.rank);
        for (at, candidate) in candidates.iter().enumerate() {
            assignment.assign_pool(candidate, nodes, current, (&candidates[..at], &candidates[at + 1..]));
        }
        assignment
    }

    /// Assigns nodes to clusters.
    ///
    /// A refused cluster keeps all nodes that it has, also those that its edited selector no longer matches.
    /// Which clusters are refused is known only after a pass, and the kept nodes may cause more refusals. So
    /// passes repeat until no cluster is added; a cluster that was refused once stays refused.
    fn assign_nodes(
        &mut self,
        clusters: &[&KVCacheCluster],
        nodes: &[Arc<Node>],
        current: &CurrentAssignment,
    ) {
        let mut holders = holders(clusters, nodes, current);
        let mut refused: BTreeMap<String, Refusal> = BTreeMap::new();
        loop {
            for assignment in self.nodes.values_mut() {
                assignment.cluster = None;
            }
            for cluster in clusters {
                self.assign_cluster(cluster, nodes, current, (&holders, &refused));
            }
            let before = refused.len();
            for (key, assignment) in &self.clusters {
                let Some(refusal) = &assignment.refused else { continue };
                refused.entry(key.clone()).or_insert_with(|| refusal.clone());
                let names = nodes.iter().map(|node| node.name_any());
                let theirs = names.filter(|node| current.has(key, node));
                holders.extend(theirs.map(|node| (node, key.clone())));
            }
            if refused.len() == before {
                break;
            }
        }
        self.is_contested |= !refused.is_empty();
    }

    /// Assigns a cluster the nodes that it selects. If another cluster has one of them, it only keeps its
    /// own.
    fn assign_cluster(
        &mut self,
        cluster: &KVCacheCluster,
        nodes: &[Arc<Node>],
        current: &CurrentAssignment,
        (holders, refused): (&BTreeMap<String, String>, &BTreeMap<String, Refusal>),
    ) {
        let key = ClusterNames::of(cluster).key();
        let selected_nodes: Vec<String> = selected(cluster, nodes).map(|node| node.name_any()).collect();
        let conflict = selected_nodes.iter().find_map(|node| {
            let given = self.nodes.get(node).and_then(|assignment| assignment.cluster.as_ref());
            let owner = given.or_else(|| holders.get(node)).filter(|owner| **owner != key)?;
            let message = format!(
                "node {node} already runs the agent of KVCacheCluster {owner}: set agents.nodeSelector of \
                 both clusters so that no node matches both"
            );
            Some(Refusal::new(Reason::Conflict, message))
        });
        let refused = refused.get(&key).cloned().or(conflict);
        let is_free =
            |node: &String| self.nodes.get(node).is_some_and(|assignment| assignment.cluster.is_none());
        let has = |node: &String| current.has(&key, node) && is_free(node);
        // A frozen cluster also keeps nodes that its edited selector no longer matches, until the edit takes
        // effect.
        let names = nodes.iter().map(|node| node.name_any());
        let given: Vec<String> = match &refused {
            Some(_) => names.filter(has).collect(),
            None if is_frozen(cluster) => {
                names.filter(|node| is_in(&selected_nodes, node) || has(node)).collect()
            }
            None => selected_nodes,
        };
        for node in &given {
            self.nodes.entry(node.clone()).or_default().cluster = Some(key.clone());
        }
        self.clusters.insert(key, ClusterAssignment { nodes: given, refused });
    }

    /// Returns a pool as candidate, or `None` if no accepted cluster names it and no node has it.
    fn candidate<'a>(
        &mut self,
        pool: &'a SSDPool,
        clusters: &[&KVCacheCluster],
        current: &CurrentAssignment,
    ) -> Option<Candidate<'a>> {
        let (name, uid) = (pool.name_any(), pool.uid().unwrap_or_default());
        let names_it =
            |cluster: &&&KVCacheCluster| cluster.spec.pools.iter().any(|named| named.name.as_str() == name);
        let naming: Vec<String> =
            clusters.iter().filter(names_it).map(|cluster| ClusterNames::of(cluster).key()).collect();
        self.is_contested |= naming.len() > 1;
        let nodes_with = |key: &String| -> Vec<String> {
            let nodes =
                self.clusters.get(key).map(|assignment| assignment.nodes.as_slice()).unwrap_or_default();
            nodes.iter().filter(|node| current.claim(node, key, &uid).is_some()).cloned().collect()
        };
        let in_use = naming.iter().map(|key| (key, nodes_with(key))).find(|(_, nodes)| !nodes.is_empty());
        if let Some((key, current_nodes)) = in_use {
            let generation = pool.metadata.generation.unwrap_or_default();
            let mut claims = current_nodes.iter().filter_map(|node| current.claim(node, key, &uid));
            // Claims of a pool that is being deleted follow its spec even if it is refused, so they do not
            // count.
            let is_current = pool.metadata.deletion_timestamp.is_none()
                && claims.any(|claim| claim.generation == generation);
            let rank = match was_refused(pool).is_some() {
                _ if is_current => Rank::Current,
                true => Rank::EditRefused,
                false => Rank::Edited,
            };
            return Some(Candidate { pool, cluster: key.clone(), current_nodes, rank });
        }
        let is_accepted =
            |key: &&String| self.clusters.get(*key).is_some_and(|assignment| assignment.refused.is_none());
        let cluster = naming.iter().find(is_accepted)?.clone();
        Some(Candidate { pool, cluster, current_nodes: Vec::new(), rank: Rank::Unused })
    }

    /// Assigns a pool to nodes or refuses it, given the candidates before and after it.
    fn assign_pool(
        &mut self,
        candidate: &Candidate,
        nodes: &[Arc<Node>],
        current: &CurrentAssignment,
        (before, after): (&[Candidate], &[Candidate]),
    ) {
        let Candidate { pool, cluster: key, current_nodes, .. } = candidate;
        let name = pool.name_any();
        let of_cluster = |node: &&Arc<Node>| {
            self.nodes
                .get(&node.name_any())
                .is_some_and(|assignment| assignment.cluster.as_ref() == Some(key))
        };
        let selected_nodes = nodes.iter().filter(of_cluster);
        let selected_nodes = selected_nodes.filter(|node| selects(&pool.spec.node_selector, node.labels()));
        let selected_nodes: Vec<String> = selected_nodes.map(|node| node.name_any()).collect();
        let accepted = |other: &&Candidate| {
            other.cluster == *key
                && self
                    .pools
                    .get(&other.pool.name_any())
                    .is_some_and(|assignment| assignment.refused.is_none())
        };
        let contradicts = || {
            before.iter().filter(accepted).find_map(|first| {
                let theirs = &self.pools[&first.pool.name_any()].nodes;
                let shared = selected_nodes.iter().find(|node| is_in(theirs, node));
                pool_conflicts::between(pool, first.pool, shared.map(String::as_str))
            })
        };
        let others = || before.iter().chain(after).filter(|other| other.cluster == *key);
        // Nodes have another pool's devices until the agent releases them, even if that pool loses the node
        // now.
        let occupied = || {
            others().find_map(|other| {
                let uid = other.pool.uid().unwrap_or_default();
                let shared = selected_nodes.iter().filter(|node| is_in(&other.current_nodes, node));
                let claims = shared.filter_map(|node| Some((node.as_str(), current.claim(node, key, &uid)?)));
                pool_conflicts::occupied(pool, &other.pool.name_any(), claims)
            })
        };
        let crowded = || {
            let gets = |other: &Candidate, node: &String| {
                let assignment = self.pools.get(&other.pool.name_any());
                is_in(&other.current_nodes, node)
                    || assignment.is_some_and(|assignment| is_in(&assignment.nodes, node))
            };
            let full = |node: &&String| {
                let assignment = self.nodes.get(*node);
                let given = assignment
                    .map(|assignment| assignment.pools.len() + assignment.retained.len())
                    .unwrap_or_default();
                // The cheap tests come first: most nodes have the pool already or have room for it.
                !is_in(current_nodes, node)
                    && given + current.claims(node) >= POOLS_PER_NODE_MAX
                    && others().filter(|other| gets(other, node)).count() >= POOLS_PER_NODE_MAX
            };
            selected_nodes.iter().find(full).map(|node| {
                let message = format!(
                    "node {node} already has {POOLS_PER_NODE_MAX} pools: set nodeSelector so that it does \
                     not match this node"
                );
                Refusal::new(Reason::Conflict, message)
            })
        };
        // A deletion must not wipe devices that no node ever assigned to the pool: they may hold another
        // pool's data.
        let late = || {
            let is_deleting = pool.metadata.deletion_timestamp.is_some();
            let was_contested = was_refused(pool).is_some_and(|reason| reason == Reason::Conflict.as_str());
            (is_deleting && was_contested).then(|| {
                let message = "the pool was refused before its deletion, which therefore affects only nodes that already have it";
                Refusal::new(Reason::Conflict, message)
            })
        };
        let refused = unsupported(pool).or_else(late).or_else(contradicts).or_else(occupied).or_else(crowded);
        let decided = match refused {
            None => PoolAssignment { cluster: Some(key.clone()), nodes: selected_nodes, refused: None },
            Some(mut refused) => {
                if !current_nodes.is_empty() {
                    refused.message.push_str("; until then, nodes keep the pool as it was");
                }
                PoolAssignment {
                    cluster: Some(key.clone()),
                    nodes: current_nodes.clone(),
                    refused: Some(refused),
                }
            }
        };
        self.is_contested |=
            decided.refused.as_ref().is_some_and(|refused| refused.reason == Reason::Conflict);
        let uid = pool.uid().unwrap_or_default();
        for node in &decided.nodes {
            let assignment = self.nodes.entry(node.clone()).or_default();
            if decided.refused.is_none() {
                assignment.pools.push(name.clone());
            } else if let Some(claim) = current.claim(node, key, &uid) {
                assignment.retained.push(RetainedPool { name: name.clone(), claim: claim.clone() });
            }
        }
        self.pools.insert(name, decided);
    }

    /// Returns the assignment of a cluster.
    pub fn cluster(&self, cluster: &KVCacheCluster) -> Option<&ClusterAssignment> {
        self.clusters.get(&ClusterNames::of(cluster).key())
    }
}

/// Returns whether a sorted list contains a name. All lists of nodes in this module are sorted.
fn is_in(sorted: &[String], name: &String) -> bool {
    sorted.binary_search(name).is_ok()
}

/// Returns the reason why a pool was refused, from its stored conditions.
fn was_refused(pool: &SSDPool) -> Option<&str> {
    let accepted = find(&pool.status.as_ref()?.conditions, ConditionType::Accepted)?;
    (accepted.status == ConditionStatus::False).then_some(accepted.reason.as_str())
}

/// Returns whether a cluster keeps its nodes because its current spec is not in effect: it is paused, or its
/// latest generation is not accepted (yet).
fn is_frozen(cluster: &KVCacheCluster) -> bool {
    let Some(status) = &cluster.status else { return false };
    let generation = cluster.metadata.generation.unwrap_or_default();
    cluster.spec.paused || !holds(&status.conditions, ConditionType::Accepted, generation)
}

/// Returns the nodes that a cluster selects.
fn selected<'a>(cluster: &KVCacheCluster, nodes: &'a [Arc<Node>]) -> impl Iterator<Item = &'a Arc<Node>> {
    let selector = cluster.spec.agents.node_selector.clone();
    nodes.iter().filter(move |node| has_all(&selector, node.labels()))
}

/// Maps each node to the cluster (`namespace/name`) that has it and still selects it, or is frozen.
fn holders(
    clusters: &[&KVCacheCluster],
    nodes: &[Arc<Node>],
    current: &CurrentAssignment,
) -> BTreeMap<String, String> {
    let mut holders = BTreeMap::new();
    for cluster in clusters {
        let key = ClusterNames::of(cluster).key();
        let selector = &cluster.spec.agents.node_selector;
        let theirs = nodes.iter().filter(|node| is_frozen(cluster) || has_all(selector, node.labels()));
        let theirs = theirs.map(|node| node.name_any()).filter(|node| current.has(&key, node));
        holders.extend(theirs.map(|node| (node, key.clone())));
    }
    holders
}

/// Sorts objects by age, oldest first. Drops deleted ones unless a finalizer holds them: a pool still has its
/// devices while it is being wiped.
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
