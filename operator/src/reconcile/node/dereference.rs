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
    pub cluster: Option<NodeCluster>,
    pub pools: Vec<Arc<SSDPool>>,
    /// Pools on the node whose devices another pool names there as well, so they are not wiped.
    pub contested: BTreeSet<String>,
    /// Profiles that the node should have now, by name.
    pub profiles: Vec<ProfileClaim>,
    /// Active grants of the node's allocations.
    pub queues: Vec<QueueClaim>,
    /// Whether the agent may hold queue pairs of the node's allocations.
    pub agent_grants: AgentGrants,
    pub live: Option<Arc<CacheNode>>,
}

/// Whether a node's agent may hold queue pairs of the node's allocations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AgentGrants {
    /// There are no grants.
    None,
    /// There are active grants, or ending ones whose agent reports; it will report their release.
    Reporting,
    /// All grants are ending, and the agent no longer reports.
    Silent,
}

/// The cluster of a node.
#[derive(Clone, Debug)]
pub struct NodeCluster {
    pub cluster: Arc<KVCacheCluster>,
    /// Digest of its agents' configuration.
    pub configuration: String,
}

/// Reads the inputs from the local stores.
pub fn dereference(node: &Node, context: &Context) -> NodeInputs {
    let stores = &context.stores;
    let assignment = stores.assignment();
    let own = assignment.nodes.get(&node.name_any()).cloned().unwrap_or_default();
    let cluster = own.cluster.as_ref().and_then(|key| stores.cluster(key)).map(|cluster| NodeCluster {
        configuration: agent_digest(&cluster, &agent_config_inputs(&cluster, context)),
        cluster,
    });
    let live = stores.cache_nodes.get(&ObjectRef::new(&node.name_any()));
    let profiles =
        cluster.as_ref().map(|own| profiles(&own.cluster, &node.name_any(), live.as_deref(), context));
    let granted = granted(&node.name_any(), context);
    let is_contested = |pool: &String| assignment.pools[pool].contested.contains_key(&node.name_any());
    NodeInputs {
        profiles: profiles.unwrap_or_default(),
        queues: queues(&granted, live.as_deref()),
        agent_grants: agent_grants(&granted, live.as_deref()),
        cluster,
        pools: own.pools.iter().filter_map(|pool| stores.pools.get(&ObjectRef::new(pool))).collect(),
        contested: own.pools.into_iter().filter(is_contested).collect(),
        live,
    }
}

/// Returns the allocations of a node that have a grant, by creation time.
fn granted(node: &str, context: &Context) -> Vec<Arc<GPUQueueAllocation>> {
    let has_one = |one: &GPUQueueAllocation| {
        let status = one.status.as_ref();
        one.spec.node_name.as_str() == node && status.is_some_and(|status| !status.allocations.is_empty())
    };
    let mut granted = context.stores.allocations.state_filter(has_one);
    granted.sort_by_cached_key(|one| (one.metadata.creation_timestamp.clone().map(|at| at.0), one.uid()));
    granted
}

fn agent_grants(granted: &[Arc<GPUQueueAllocation>], live: Option<&CacheNode>) -> AgentGrants {
    let active = granted.iter().any(|one| lifecycle::has_grant(one));
    match granted {
        [] => AgentGrants::None,
        [..] if active || live.is_some_and(has_reported) => AgentGrants::Reporting,
        [..] => AgentGrants::Silent,
    }
}

/// Returns the queue claims for the spec. Above the limit, the newest allocations that the spec does not list
/// yet have to wait.
fn queues(granted: &[Arc<GPUQueueAllocation>], live: Option<&CacheNode>) -> Vec<QueueClaim> {
    let claim = |one: &GPUQueueAllocation| {
        let grants = one.status.iter().flat_map(|status| &status.allocations);
        let share = grants
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
    let active = granted.iter().filter(|one| lifecycle::has_grant(one));
    let mut claims: Vec<QueueClaim> = active.map(|one| claim(one)).collect();
    let is_listed =
        |uid: &Uid| live.is_some_and(|live| live.spec.queues.iter().any(|claim| claim.uid == *uid));
    // Listed claims come first, so that the limit affects only claims which the agent does not have yet.
    claims.sort_by_key(|claim| !is_listed(&claim.uid));
    claims.truncate(QUEUES_MAX);
    // A stable order avoids writes without a change.
    claims.sort_by(|a, b| a.uid.cmp(&b.uid));
    claims
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
