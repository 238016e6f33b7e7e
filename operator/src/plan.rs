//! Which node belongs to which cluster, which pools are on it, and which clusters and pools are refused for what others claim.
//!
//! What nodes have stays with them: nobody loses a node or a device because somebody else is edited, or because a label is. Who comes first:
//!
//! | claimed | comes first | then |
//! |---|---|---|
//! | a node | the cluster of its `CacheNode`, as long as it selects the node, is refused or is paused | the oldest cluster |
//! | a pool | the cluster whose nodes have it, as long as it names the pool | the oldest cluster that is accepted |
//! | a device, and what all pools of a cluster share | the pool that nodes have as its spec says | one that was edited since, one that is refused since, one that no node has; of equals the oldest |
//!
//! Who comes later is refused as a whole, so that nothing is half applied, and nodes keep what they have of it, as it was ([`NodePlan::kept`]).
//! A pool is on those nodes of its cluster that it selects.
//!
//! Pure, and made anew when specs, or names and labels of nodes have changed, and, while something is contested, when a node has lost what it had
//! (`crate::world`): nodes × pools comparisons of labels, and nodes × pools × pools of names. What nodes have and the plan gives them
//! changes nothing of it, whoever comes first.

use std::collections::BTreeMap;
use std::sync::Arc;

use k8s_openapi::api::core::v1::Node;
use kube::{Resource, ResourceExt};
use reprise_crds::node::PoolClaim;
use reprise_crds::status::{ConditionStatus, ConditionType, Reason, find, holds};
use reprise_crds::{KVCacheCluster, SSDPool};

use self::held::Held;
use crate::names::ClusterNames;
use crate::pool::validate::unsupported;
use crate::selection::{has_all, selects};

mod contradictions;
pub mod held;

pub use contradictions::globs_overlap;

/// Pools on one node, at the most: as many as a CacheNode has claims.
const POOLS_PER_NODE_MAX: usize = 8;

/// What was decided.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Plan {
    /// By name of the node.
    pub nodes: BTreeMap<String, NodePlan>,
    /// By `namespace/name`.
    pub clusters: BTreeMap<String, ClusterPlan>,
    /// By name.
    pub pools: BTreeMap<String, PoolPlan>,
    /// Whether anything of it is by what nodes have: something is refused for what others have, or a pool is named by several clusters.
    pub is_contested: bool,
}

/// What is on a node.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct NodePlan {
    /// `namespace/name` of its cluster.
    pub cluster: Option<String>,
    /// Pools on it, by name.
    pub pools: Vec<String>,
    /// Pools that are refused and that it has, with their claims, which stay as they are.
    pub kept: Vec<KeptPool>,
}

/// A pool that is refused, on a node that has it.
#[derive(Clone, Debug, PartialEq)]
pub struct KeptPool {
    /// Its name.
    pub name: String,
    /// What the node has.
    pub claim: PoolClaim,
}

/// What a cluster has.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ClusterPlan {
    /// Its nodes; of one that is refused those that it has already.
    pub nodes: Vec<String>,
    /// Why it is refused.
    pub refused: Option<Refusal>,
}

/// What a pool has.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PoolPlan {
    /// `namespace/name` of its cluster.
    pub cluster: Option<String>,
    /// Nodes that it selects; of one that is refused those that have it already, as it was.
    pub nodes: Vec<String>,
    /// Why it is refused.
    pub refused: Option<Refusal>,
}

impl PoolPlan {
    /// Whether agents of its cluster are made for it: it is accepted, or nodes have it as it was.
    pub fn is_used(&self) -> bool {
        self.refused.is_none() || !self.nodes.is_empty()
    }
}

/// A pool before it is decided about.
struct Candidate<'a> {
    pool: &'a SSDPool,
    /// `namespace/name` of its cluster.
    cluster: String,
    /// Nodes of the cluster that have it, by name.
    having: Vec<String>,
    /// How it comes in the order of pools.
    rank: Rank,
}

/// The order of pools.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Rank {
    /// A node has it as its spec says.
    Had,
    /// Nodes have it as its spec said before.
    Edited,
    /// The same, and it was refused: who is edited for another reason later does not lose to it.
    Refused,
    /// No node has it.
    New,
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
    /// Decides, by what there is and by what nodes have.
    pub fn make(
        clusters: &[Arc<KVCacheCluster>],
        pools: &[Arc<SSDPool>],
        nodes: &[Arc<Node>],
        held: &Held,
    ) -> Plan {
        let mut plan = Plan::default();
        // What is said of nodes must not change with the order in which they are stored.
        let mut nodes = nodes.to_vec();
        nodes.sort_by_key(|node| node.name_any());
        let nodes = nodes.as_slice();
        for node in nodes {
            plan.nodes.insert(node.name_any(), NodePlan::default());
        }
        let clusters = by_age(clusters, |cluster| cluster.meta());
        plan.share_nodes(&clusters, nodes, held);
        let mut candidates = Vec::new();
        for pool in by_age(pools, |pool| pool.meta()) {
            match plan.candidate(pool, &clusters, held) {
                Some(candidate) => candidates.push(candidate),
                None => {
                    plan.pools.insert(pool.name_any(), PoolPlan::default());
                }
            }
        }
        // Those of one rank stay in the order of their ages.
        candidates.sort_by_key(|candidate| candidate.rank);
        for (at, candidate) in candidates.iter().enumerate() {
            plan.decide(candidate, nodes, held, (&candidates[..at], &candidates[at + 1..]));
        }
        plan
    }

    /// Gives nodes to clusters. Who is refused keeps all that it has, also what an edit does not select any more: that is known after a first try only, and
    /// may have others refused. Who was refused once stays so.
    fn share_nodes(&mut self, clusters: &[&KVCacheCluster], nodes: &[Arc<Node>], held: &Held) {
        let mut holders = holders(clusters, nodes, held);
        let mut refused: BTreeMap<String, Refusal> = BTreeMap::new();
        loop {
            for plan in self.nodes.values_mut() {
                plan.cluster = None;
            }
            for cluster in clusters {
                self.give_nodes(cluster, nodes, held, (&holders, &refused));
            }
            let before = refused.len();
            for (key, plan) in &self.clusters {
                let Some(refusal) = &plan.refused else { continue };
                refused.entry(key.clone()).or_insert_with(|| refusal.clone());
                let names = nodes.iter().map(|node| node.name_any());
                let theirs = names.filter(|node| held.has(key, node));
                holders.extend(theirs.map(|node| (node, key.clone())));
            }
            if refused.len() == before {
                break;
            }
        }
        self.is_contested |= !refused.is_empty();
    }

    /// Gives a cluster the nodes that it selects, unless another one has one of them: then it keeps those that it has.
    fn give_nodes(
        &mut self,
        cluster: &KVCacheCluster,
        nodes: &[Arc<Node>],
        held: &Held,
        (holders, refused): (&BTreeMap<String, String>, &BTreeMap<String, Refusal>),
    ) {
        let key = ClusterNames::of(cluster).key();
        let wanted: Vec<String> = selected(cluster, nodes).map(|node| node.name_any()).collect();
        let taken = wanted.iter().find_map(|node| {
            let given = self.nodes.get(node).and_then(|plan| plan.cluster.as_ref());
            let owner = given.or_else(|| holders.get(node)).filter(|owner| **owner != key)?;
            let message = format!(
                "node {node} has the agent of KVCacheCluster {owner} already: set agents.nodeSelector of both so that no node is \
                 selected by both"
            );
            Some(Refusal::new(Reason::Conflict, message))
        });
        let refused = refused.get(&key).cloned().or(taken);
        let is_free = |node: &String| self.nodes.get(node).is_some_and(|plan| plan.cluster.is_none());
        let has = |node: &String| held.has(&key, node) && is_free(node);
        // Also those that an edit does not select any more, as long as that is not in effect.
        let names = nodes.iter().map(|node| node.name_any());
        let given: Vec<String> = match &refused {
            Some(_) => names.filter(has).collect(),
            None if is_left(cluster) => names.filter(|node| is_in(&wanted, node) || has(node)).collect(),
            None => wanted,
        };
        for node in &given {
            self.nodes.entry(node.clone()).or_default().cluster = Some(key.clone());
        }
        self.clusters.insert(key, ClusterPlan { nodes: given, refused });
    }

    /// A pool of which a cluster is known.
    fn candidate<'a>(
        &mut self,
        pool: &'a SSDPool,
        clusters: &[&KVCacheCluster],
        held: &Held,
    ) -> Option<Candidate<'a>> {
        let (name, uid) = (pool.name_any(), pool.uid().unwrap_or_default());
        let names_it =
            |cluster: &&&KVCacheCluster| cluster.spec.pools.iter().any(|named| named.name.as_str() == name);
        let naming: Vec<String> =
            clusters.iter().filter(names_it).map(|cluster| ClusterNames::of(cluster).key()).collect();
        self.is_contested |= naming.len() > 1;
        let having = |key: &String| -> Vec<String> {
            let nodes = self.clusters.get(key).map(|plan| plan.nodes.as_slice()).unwrap_or_default();
            nodes.iter().filter(|node| held.claim(node, key, &uid).is_some()).cloned().collect()
        };
        let has_it = naming.iter().map(|key| (key, having(key))).find(|(_, having)| !having.is_empty());
        if let Some((key, having)) = has_it {
            let generation = pool.metadata.generation.unwrap_or_default();
            let mut claims = having.iter().filter_map(|node| held.claim(node, key, &uid));
            // The claims of one that is deleted follow it, also if it is refused.
            let is_had = pool.metadata.deletion_timestamp.is_none()
                && claims.any(|claim| claim.generation == generation);
            let rank = match was_refused(pool).is_some() {
                _ if is_had => Rank::Had,
                true => Rank::Refused,
                false => Rank::Edited,
            };
            return Some(Candidate { pool, cluster: key.clone(), having, rank });
        }
        let is_accepted = |key: &&String| self.clusters.get(*key).is_some_and(|plan| plan.refused.is_none());
        let cluster = naming.iter().find(is_accepted)?.clone();
        Some(Candidate { pool, cluster, having: Vec::new(), rank: Rank::New })
    }

    /// Decides about a pool, between those before and those after it.
    fn decide(
        &mut self,
        candidate: &Candidate,
        nodes: &[Arc<Node>],
        held: &Held,
        (before, after): (&[Candidate], &[Candidate]),
    ) {
        let Candidate { pool, cluster: key, having, .. } = candidate;
        let name = pool.name_any();
        let of_cluster = |node: &&Arc<Node>| {
            self.nodes.get(&node.name_any()).is_some_and(|plan| plan.cluster.as_ref() == Some(key))
        };
        let wanted = nodes.iter().filter(of_cluster);
        let wanted = wanted.filter(|node| selects(&pool.spec.node_selector, node.labels()));
        let wanted: Vec<String> = wanted.map(|node| node.name_any()).collect();
        let accepted = |other: &&Candidate| {
            other.cluster == *key
                && self.pools.get(&other.pool.name_any()).is_some_and(|plan| plan.refused.is_none())
        };
        let contradicts = || {
            before.iter().filter(accepted).find_map(|first| {
                let theirs = &self.pools[&first.pool.name_any()].nodes;
                let shared = wanted.iter().find(|node| is_in(theirs, node));
                contradictions::between(pool, first.pool, shared.map(String::as_str))
            })
        };
        let others = || before.iter().chain(after).filter(|other| other.cluster == *key);
        // What nodes have of others is there until they have it no more, whatever is decided of these.
        let occupied = || {
            others().find_map(|other| {
                let uid = other.pool.uid().unwrap_or_default();
                let shared = wanted.iter().filter(|node| is_in(&other.having, node));
                let claims = shared.filter_map(|node| Some((node.as_str(), held.claim(node, key, &uid)?)));
                contradictions::occupied(pool, &other.pool.name_any(), claims)
            })
        };
        let crowded = || {
            let gets = |other: &Candidate, node: &String| {
                let plan = self.pools.get(&other.pool.name_any());
                is_in(&other.having, node) || plan.is_some_and(|plan| is_in(&plan.nodes, node))
            };
            let full = |node: &&String| {
                let plan = self.nodes.get(*node);
                let given = plan.map(|plan| plan.pools.len() + plan.kept.len()).unwrap_or_default();
                // What has room for it, or has it, is most of them.
                !is_in(having, node)
                    && given + held.claims(node) >= POOLS_PER_NODE_MAX
                    && others().filter(|other| gets(other, node)).count() >= POOLS_PER_NODE_MAX
            };
            wanted.iter().find(full).map(|node| {
                let message = format!(
                    "node {node} has {POOLS_PER_NODE_MAX} pools already: set nodeSelector so that the node is not selected"
                );
                Refusal::new(Reason::Conflict, message)
            })
        };
        // What nodes never had of it is not destroyed with it: it is somebody else's.
        let late = || {
            let goes = pool.metadata.deletion_timestamp.is_some();
            let was_contested = was_refused(pool).is_some_and(|reason| reason == Reason::Conflict.as_str());
            (goes && was_contested).then(|| {
                let message = "it was refused when it was deleted: only what nodes have of it goes with it";
                Refusal::new(Reason::Conflict, message)
            })
        };
        let refused = unsupported(pool).or_else(late).or_else(contradicts).or_else(occupied).or_else(crowded);
        let decided = match refused {
            None => PoolPlan { cluster: Some(key.clone()), nodes: wanted, refused: None },
            Some(mut refused) => {
                if !having.is_empty() {
                    refused.message.push_str("; until then nodes keep the pool as it was");
                }
                PoolPlan { cluster: Some(key.clone()), nodes: having.clone(), refused: Some(refused) }
            }
        };
        self.is_contested |=
            decided.refused.as_ref().is_some_and(|refused| refused.reason == Reason::Conflict);
        let uid = pool.uid().unwrap_or_default();
        for node in &decided.nodes {
            let plan = self.nodes.entry(node.clone()).or_default();
            if decided.refused.is_none() {
                plan.pools.push(name.clone());
            } else if let Some(claim) = held.claim(node, key, &uid) {
                plan.kept.push(KeptPool { name: name.clone(), claim: claim.clone() });
            }
        }
        self.pools.insert(name, decided);
    }

    /// What was decided of a cluster.
    pub fn cluster(&self, cluster: &KVCacheCluster) -> Option<&ClusterPlan> {
        self.clusters.get(&ClusterNames::of(cluster).key())
    }
}

/// Whether a name is in a list that is sorted, as all lists of nodes here are.
fn is_in(sorted: &[String], name: &String) -> bool {
    sorted.binary_search(name).is_ok()
}

/// Why a pool is refused, as far as was said of it.
fn was_refused(pool: &SSDPool) -> Option<&str> {
    let accepted = find(&pool.status.as_ref()?.conditions, ConditionType::Accepted)?;
    (accepted.status == ConditionStatus::False).then_some(accepted.reason.as_str())
}

/// Whether what a cluster has stays as it is, since its spec is not in effect: it is paused, or was edited and is not accepted, or not yet.
fn is_left(cluster: &KVCacheCluster) -> bool {
    let Some(status) = &cluster.status else { return false };
    let generation = cluster.metadata.generation.unwrap_or_default();
    cluster.spec.paused || !holds(&status.conditions, ConditionType::Accepted, generation)
}

/// Nodes that a cluster selects.
fn selected<'a>(cluster: &KVCacheCluster, nodes: &'a [Arc<Node>]) -> impl Iterator<Item = &'a Arc<Node>> {
    let selector = cluster.spec.agents.node_selector.clone();
    nodes.iter().filter(move |node| has_all(&selector, node.labels()))
}

/// By node the cluster that has it and selects it still, or is left as it is, as `namespace/name`.
fn holders(clusters: &[&KVCacheCluster], nodes: &[Arc<Node>], held: &Held) -> BTreeMap<String, String> {
    let mut holders = BTreeMap::new();
    for cluster in clusters {
        let key = ClusterNames::of(cluster).key();
        let selector = &cluster.spec.agents.node_selector;
        let theirs = nodes.iter().filter(|node| is_left(cluster) || has_all(selector, node.labels()));
        let theirs = theirs.map(|node| node.name_any()).filter(|node| held.has(&key, node));
        holders.extend(theirs.map(|node| (node, key.clone())));
    }
    holders
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
