//! Reads what is wanted of a node: its cluster, the pools on it, and the profiles that were decided for it.

use std::sync::Arc;

use k8s_openapi::api::core::v1::Node;
use kube::ResourceExt;
use kube::runtime::reflector::ObjectRef;
use reprise_crds::fields::{Digest, Name};
use reprise_crds::node::{PoolClaim, ProfileClaim};
use reprise_crds::status::{ConditionType, holds};
use reprise_crds::{CacheNode, KVCacheCluster, SSDPool};

use crate::cluster::build::configuration::agent_digest;
use crate::cluster::dereference::referred;
use crate::context::Context;
use crate::plan::Plan;
use crate::profile::PROFILES_MAX;
use crate::profile::order::selected;

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
    /// What is there of it.
    pub live: Option<Arc<CacheNode>>,
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
    Found {
        profiles: profiles.unwrap_or_default(),
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
