//! Reads what is wanted of a node: its cluster, the pools on it, the profiles that were decided for it, and what of its controllers is lent.

use std::sync::Arc;

use k8s_openapi::api::core::v1::Node;
use kube::ResourceExt;
use kube::runtime::reflector::ObjectRef;
use reprise_crds::fields::{Digest, Name, Text, Uid};
use reprise_crds::node::{ControllerShare, PoolClaim, ProfileClaim, QueueClaim};
use reprise_crds::status::{ConditionType, holds};
use reprise_crds::{CacheNode, GPUQueueAllocation, KVCacheCluster, SSDPool};

use crate::allocation::dereference::name as allocation_name;
use crate::allocation::life;
use crate::cluster::build::configuration::agent_digest;
use crate::cluster::dereference::referred;
use crate::cluster::status::has_reported;
use crate::context::Context;
use crate::plan::Plan;
use crate::profile::PROFILES_MAX;
use crate::profile::order::selected;

/// Allocations that a node's agent is told of, at the most; the definition says so too.
const QUEUES_MAX: usize = 128;

/// What is wanted of a node, as it is.
#[derive(Clone, Debug)]
pub struct Found {
    /// Its cluster.
    pub cluster: Option<NodeCluster>,
    /// Pools on it.
    pub pools: Vec<Arc<SSDPool>>,
    /// Pools that are refused and that it has, with the claims that it has.
    pub kept: Vec<(Arc<SSDPool>, PoolClaim)>,
    /// Profiles that it should have now, by name.
    pub profiles: Vec<ProfileClaim>,
    /// Grants of its allocations that stand.
    pub queues: Vec<QueueClaim>,
    /// Whether its agent may have something of its allocations.
    pub lent: Lent,
    /// What is there of it.
    pub live: Option<Arc<CacheNode>>,
}

/// Whether a node's agent may have something of the node's allocations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lent {
    /// There are no grants.
    Nothing,
    /// There are grants whose end was not said yet, or that end while the agent says something: it will say that it has let go of them.
    Answered,
    /// There are grants that end, and the agent says nothing any more.
    Silent,
}

/// The cluster of a node.
#[derive(Clone, Debug)]
pub struct NodeCluster {
    /// It.
    pub cluster: Arc<KVCacheCluster>,
    /// Digest of its agents' configuration.
    pub configuration: String,
    /// Whether it may be changed.
    pub state: ClusterState,
}

/// Whether a cluster may be changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClusterState {
    /// It is kept as its spec says.
    Kept,
    /// It is paused, or it is refused, or its spec was not accepted yet: what is there stays.
    Left,
}

/// The cluster, as `namespace/name`, whose node a `CacheNode` is.
pub fn cluster_of(live: &CacheNode) -> Option<String> {
    live.spec.cluster_ref.as_ref().map(|cluster| format!("{}/{}", cluster.namespace, cluster.name))
}

/// Whether a cluster may be changed.
pub fn state(cluster: &KVCacheCluster, plan: &Plan) -> ClusterState {
    let conditions = cluster.status.as_ref().map(|status| status.conditions.as_slice()).unwrap_or_default();
    let generation = cluster.metadata.generation.unwrap_or_default();
    // A label of a node may have it refused before its status says so.
    let is_refused = plan.cluster(cluster).is_some_and(|plan| plan.refused.is_some());
    let left = cluster.spec.paused || is_refused || !holds(conditions, ConditionType::Accepted, generation);
    if left { ClusterState::Left } else { ClusterState::Kept }
}

/// Reads it, from the stores.
pub fn dereference(node: &Node, context: &Context) -> Found {
    let world = &context.world;
    let plan = world.plan();
    let own = plan.nodes.get(&node.name_any()).cloned().unwrap_or_default();
    let cluster = own.cluster.as_ref().and_then(|key| world.cluster(key)).map(|cluster| NodeCluster {
        configuration: agent_digest(&cluster, &referred(&cluster, context)),
        state: state(&cluster, &plan),
        cluster,
    });
    let live = world.cache_nodes.get(&ObjectRef::new(&node.name_any()));
    let profiles =
        cluster.as_ref().map(|own| profiles(&own.cluster, &node.name_any(), live.as_deref(), context));
    let granted = granted(&node.name_any(), context);
    Found {
        profiles: profiles.unwrap_or_default(),
        queues: queues(&granted, live.as_deref()),
        lent: lent(&granted, live.as_deref()),
        cluster,
        pools: own.pools.iter().filter_map(|pool| world.pools.get(&ObjectRef::new(pool))).collect(),
        kept: own
            .kept
            .iter()
            .filter_map(|kept| Some((world.pools.get(&ObjectRef::new(&kept.name))?, kept.claim.clone())))
            .collect(),
        live,
    }
}

/// Allocations of a node that have a grant, in the order in which they were made.
fn granted(node: &str, context: &Context) -> Vec<Arc<GPUQueueAllocation>> {
    let has_one = |one: &GPUQueueAllocation| {
        let status = one.status.as_ref();
        one.spec.node_name.as_str() == node && status.is_some_and(|status| !status.allocations.is_empty())
    };
    let mut granted = context.world.allocations.state_filter(has_one);
    granted.sort_by_cached_key(|one| (one.metadata.creation_timestamp.clone().map(|at| at.0), one.uid()));
    granted
}

fn lent(granted: &[Arc<GPUQueueAllocation>], live: Option<&CacheNode>) -> Lent {
    let stands = granted.iter().any(|one| life::stands(one));
    match granted {
        [] => Lent::Nothing,
        [..] if stands || live.is_some_and(has_reported) => Lent::Answered,
        [..] => Lent::Silent,
    }
}

/// What the node's agent is told of them. When there are too many, those wait that it is not told of yet, and were made last.
fn queues(granted: &[Arc<GPUQueueAllocation>], live: Option<&CacheNode>) -> Vec<QueueClaim> {
    let claim = |one: &GPUQueueAllocation| {
        let grants = one.status.iter().flat_map(|status| &status.allocations);
        let share = grants
            .map(|grant| ControllerShare { serial: grant.serial.clone(), queue_pairs: grant.queue_pairs });
        QueueClaim {
            uid: Uid::new(one.uid().unwrap_or_default()),
            allocation: Text::new(allocation_name(one)),
            isolation: one.spec.isolation,
            controllers: share.collect(),
        }
    };
    let stands = granted.iter().filter(|one| life::stands(one));
    let mut claims: Vec<QueueClaim> = stands.map(|one| claim(one)).collect();
    let is_told = |uid: &Uid| live.is_some_and(|live| live.spec.queues.iter().any(|claim| claim.uid == *uid));
    claims.sort_by_key(|claim| !is_told(&claim.uid));
    claims.truncate(QUEUES_MAX);
    claims.sort_by(|a, b| a.uid.cmp(&b.uid));
    claims
}

/// What was decided of the profiles that the cluster selects. Of one that nobody has looked at yet the node keeps what it has.
fn profiles(
    cluster: &KVCacheCluster,
    node: &str,
    live: Option<&CacheNode>,
    context: &Context,
) -> Vec<ProfileClaim> {
    let has = live.map(|live| live.spec.profiles.as_slice()).unwrap_or_default();
    let claims = selected(cluster, context).into_iter().take(PROFILES_MAX).filter_map(|profile| {
        let name = profile.name_any();
        let digest = match context.decisions.of(&profile) {
            Some(decided) => decided.nodes.get(node).map(Digest::new),
            None => has.iter().find(|claim| claim.name.as_str() == name).map(|claim| claim.digest.clone()),
        };
        Some(ProfileClaim { name: Name::new(name), digest: digest? })
    });
    let mut claims: Vec<ProfileClaim> = claims.collect();
    claims.sort_by(|a, b| a.name.cmp(&b.name));
    claims
}
