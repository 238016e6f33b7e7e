//! Reads the inputs of a node's `CacheNode`: its cluster, its pools, the decided profiles, and granted queue
//! pairs.

use std::collections::BTreeSet;
use std::sync::Arc;

use k8s_openapi::api::core::v1::Node;
use kube::ResourceExt;
use kube::runtime::reflector::ObjectRef;
use reprise_crds::fields::{Digest, Name, Text, Uid};
use reprise_crds::node::{ControllerShare, ProfileClaim, QueueClaim};
use reprise_crds::{CacheNode, GPUQueueAllocation, KVCacheCluster, SSDPool};

use crate::reconcile::allocation::dereference::name as allocation_name;
use crate::reconcile::allocation::lifecycle;
use crate::reconcile::cluster::build::configuration::agent_digest;
use crate::reconcile::cluster::dereference::agent_config_inputs;
use crate::reconcile::context::Context;
use crate::reconcile::membership::has_reported;
use crate::reconcile::profile::dereference::selected;

/// Maximum number of allocations in a `CacheNode` spec; the CRD schema has the same limit.
const QUEUES_MAX: usize = 128;

/// The inputs of a node's `CacheNode`.
#[derive(Clone, Debug)]
pub struct NodeInputs {
    pub cluster: Option<Arc<KVCacheCluster>>,
    /// Digest of the configuration of the cluster's agents.
    pub configuration: Option<Digest>,
    pub pools: Vec<Arc<SSDPool>>,
    /// Pools on the node whose devices another pool names there as well, so they are not wiped.
    pub contested: BTreeSet<String>,
    /// Profiles that the node should have now, by name.
    pub profiles: Vec<ProfileClaim>,
    /// Active grants of the node's allocations.
    pub queues: Vec<QueueClaim>,
    /// Whether the agent may hold queue pairs, and will report their release. It will not if all grants are ending and it
    /// no longer reports.
    pub holds_queues: bool,
    pub live: Option<Arc<CacheNode>>,
}

/// Reads the inputs from the local stores.
pub fn dereference(node: &Node, context: &Context) -> NodeInputs {
    let (stores, name) = (&context.stores, node.name_any());
    let assignment = stores.assignment();
    let own = assignment.nodes.get(&name).cloned().unwrap_or_default();
    let cluster = own.cluster.as_ref().and_then(|key| stores.cluster(key));
    let configuration = |cluster: &Arc<KVCacheCluster>| {
        Digest::new(agent_digest(cluster, &agent_config_inputs(cluster, context)))
    };
    let live = stores.cache_nodes.get(&ObjectRef::new(&name));
    let profiles = cluster.as_ref().map(|cluster| profiles(cluster, &name, live.as_deref(), context));
    let is_here = |one: &GPUQueueAllocation| one.spec.node_name.as_str() == name;
    let mut granted =
        stores.allocations.state_filter(|one| is_here(one) && !lifecycle::granted(one).is_empty());
    let has_grants = !granted.is_empty();
    granted.retain(|one| lifecycle::has_grant(one));
    let is_contested = |pool: &String| assignment.pools[pool].contested.contains_key(&name);
    NodeInputs {
        configuration: cluster.as_ref().map(configuration),
        profiles: profiles.unwrap_or_default(),
        holds_queues: !granted.is_empty() || (has_grants && live.as_deref().is_some_and(has_reported)),
        queues: queues(granted, live.as_deref()),
        cluster,
        pools: own.pools.iter().filter_map(|pool| stores.pools.get(&ObjectRef::new(pool))).collect(),
        contested: own.pools.into_iter().filter(is_contested).collect(),
        live,
    }
}

/// Returns the queue claims of the allocations with an active grant. Above the limit, allocations that the spec does
/// not list yet have to wait.
fn queues(mut active: Vec<Arc<GPUQueueAllocation>>, live: Option<&CacheNode>) -> Vec<QueueClaim> {
    let claim = |one: &Arc<GPUQueueAllocation>| {
        let share = lifecycle::granted(one)
            .iter()
            .map(|grant| ControllerShare { serial: grant.serial.clone(), queue_pairs: grant.queue_pairs });
        QueueClaim {
            uid: Uid::new(one.uid().unwrap_or_default()),
            allocation: Text::new(allocation_name(one)),
            isolation: one.spec.isolation,
            depth: one.spec.depth,
            registered_memory: one.spec.registered_memory.clone(),
            slack_profile: one.spec.slack_profile_ref.as_ref().map(|profile| profile.name.clone()),
            controllers: share.collect(),
        }
    };
    let listed: Vec<&str> =
        live.iter().flat_map(|live| &live.spec.queues).map(|claim| claim.uid.as_str()).collect();
    active.sort_by_cached_key(|one| (!listed.contains(&one.uid().unwrap_or_default().as_str()), one.uid()));
    active.truncate(QUEUES_MAX);
    // A stable order avoids writes without a change.
    active.sort_by_cached_key(|one| one.uid());
    active.iter().map(claim).collect()
}

/// Returns the decided profiles that the cluster selects. While there is no decision on a profile, the node
/// keeps its present revision.
fn profiles(
    cluster: &KVCacheCluster,
    node: &str,
    live: Option<&CacheNode>,
    context: &Context,
) -> Vec<ProfileClaim> {
    let has = live.map(|live| live.spec.profiles.as_slice()).unwrap_or_default();
    let claims = selected(cluster, context).into_iter().filter_map(|profile| {
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
