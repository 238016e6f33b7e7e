//! Reads the allocations of a node and the objects that they refer to: controllers, GPUs and pools.

use std::sync::Arc;

use kube::ResourceExt;
use kube::api::{Api, ListParams};
use kube::runtime::reflector::ObjectRef;
use reprise_crds::fields::{Engine, Percent};
use reprise_crds::node::{AppliedQueues, Controller};
use reprise_crds::pool::GPU_QUEUE_PERCENT_DEFAULT;
use reprise_crds::status::{ConditionStatus, ConditionType, Reason, find};
use reprise_crds::{CacheNode, CacheNodeStatus, GPUQueueAllocation, SSDPool};

use super::grant::{LendableController, budget};
use crate::framework::error::OperatorError;
use crate::reconcile::context::Context;
use crate::reconcile::membership::{cluster_of, has_reported};

/// The inputs to the grant decision for one node.
#[derive(Clone, Debug)]
pub struct GrantInputs {
    pub node: String,
    pub presence: NodePresence,
    /// `CacheNode` with the agent's report; `None` if the node has none.
    pub cache_node: Option<Arc<CacheNode>>,
    /// Whether the agent has not reported for a minute. Queue pairs end with it, also those of its last report.
    pub is_silent: bool,
    /// Its controllers that belong to a pool of raw devices.
    pub lenders: Vec<LendableController>,
    /// All allocations of the node, sorted by namespace and name.
    pub allocations: Vec<ResolvedAllocation>,
}

/// Whether a node exists and belongs to a cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NodePresence {
    /// The node belongs to a cluster.
    Present,
    /// The node no longer belongs to the cluster of its `CacheNode`, which remains until the agent has
    /// released its resources.
    Removed,
    /// The node does not exist, so nothing of it can be granted. Its agent may run as long as the machine
    /// does.
    Gone,
}

/// The queue pairs of an allocation that the node's agent holds, or may hold.
#[derive(Clone, Debug, PartialEq)]
pub enum AgentQueues {
    /// The agent has reported on this allocation.
    Reported(AppliedQueues),
    /// The spec lists the allocation, or the agent may not have seen yet that it no longer does.
    Unconfirmed,
}

/// An allocation and its pool.
#[derive(Clone, Debug)]
pub struct ResolvedAllocation {
    pub object: Arc<GPUQueueAllocation>,
    pub pool: Option<Arc<SSDPool>>,
    /// Whether the pool is assigned to the node.
    pub is_pool_on_node: bool,
}

/// Returns the inputs for a node from the local stores.
pub fn from_stores(node: &str, context: &Context) -> GrantInputs {
    let stores = &context.stores;
    let allocations = stores.allocations.state_filter(|one| one.spec.node_name.as_str() == node);
    build_inputs(node, allocations, stores.cache_nodes.get(&ObjectRef::new(node)), context)
}

/// Returns the inputs for a node with the API server's current allocations and `CacheNode`. They include
/// grants that no watch has delivered yet.
///
/// Another task may write the `CacheNode` spec from older data at the same time and list a grant that has
/// ended; see [`super`] for why this is harmless.
///
/// # Errors
/// The API server did not answer.
pub async fn from_api_server(node: &str, context: &Context) -> Result<GrantInputs, OperatorError> {
    let allocations: Api<GPUQueueAllocation> = Api::all(context.client.clone());
    let of_node = ListParams::default().fields(&format!("spec.nodeName={node}"));
    let listed = allocations.list(&of_node).await;
    let listed = listed.map_err(OperatorError::api(format!("list the allocations of node {node}")))?;
    let nodes: Api<CacheNode> = Api::all(context.client.clone());
    let cache_node = nodes.get_opt(node).await;
    let cache_node = cache_node.map_err(OperatorError::api(format!("get CacheNode {node}")))?;
    let allocations = listed.items.into_iter().map(Arc::new).collect();
    Ok(build_inputs(node, allocations, cache_node.map(Arc::new), context))
}

fn build_inputs(
    node: &str,
    allocations: Vec<Arc<GPUQueueAllocation>>,
    cache_node: Option<Arc<CacheNode>>,
    context: &Context,
) -> GrantInputs {
    let mut allocations: Vec<ResolvedAllocation> =
        allocations.into_iter().map(|object| resolve(object, context)).collect();
    allocations.sort_by_cached_key(|of| name(&of.object));
    let status = cache_node.as_ref().and_then(|node| node.status.as_ref());
    let controllers = status.map(|status| status.controllers.as_slice()).unwrap_or_default();
    GrantInputs {
        node: node.to_owned(),
        presence: presence(node, cache_node.as_deref(), context),
        lenders: controllers.iter().filter_map(|controller| lender(controller, context)).collect(),
        is_silent: cache_node.as_deref().is_some_and(|node| !has_reported(node)),
        cache_node,
        allocations,
    }
}

fn presence(node: &str, cache_node: Option<&CacheNode>, context: &Context) -> NodePresence {
    let stores = &context.stores;
    if stores.nodes.get(&ObjectRef::new(node)).is_none() {
        return NodePresence::Gone;
    }
    let before = cache_node.and_then(cluster_of);
    let assignment = stores.assignment();
    let cluster = assignment.nodes.get(node).and_then(|node| node.cluster.as_ref());
    let is_present = cluster.is_some_and(|cluster| before.is_none_or(|before| before == *cluster));
    if is_present { NodePresence::Present } else { NodePresence::Removed }
}

fn resolve(object: Arc<GPUQueueAllocation>, context: &Context) -> ResolvedAllocation {
    let (stores, pool) = (&context.stores, object.spec.pool_ref.name.as_str());
    let assignment = stores.assignment();
    let assigned = assignment.nodes.get(object.spec.node_name.as_str()).map(|node| &node.pools);
    ResolvedAllocation {
        pool: stores.pools.get(&ObjectRef::new(pool)),
        is_pool_on_node: assigned.is_some_and(|pools| pools.iter().any(|assigned| assigned == pool)),
        object,
    }
}

/// Returns the share of queue pairs of a pool's controllers that may be granted; `None` for a pool without controllers.
pub(super) fn queue_percent(pool: &SSDPool) -> Option<Percent> {
    match &pool.spec.devices {
        Some(devices) => Some(devices.max_gpu_queue_percent),
        // The agent emulates a controller on the file of the directory.
        None if pool.spec.engine == Engine::UserNvme => Some(GPU_QUEUE_PERCENT_DEFAULT),
        None => None,
    }
}

/// Returns a controller whose queue pairs can be granted: it is in an existing pool.
fn lender(controller: &Controller, context: &Context) -> Option<LendableController> {
    let name = controller.pool.as_ref()?;
    let pool = context.stores.pools.get(&ObjectRef::new(name.as_str()))?;
    Some(LendableController {
        serial: controller.serial.to_string(),
        pool: name.to_string(),
        budget: budget(controller.queue_pairs, queue_percent(&pool)?),
    })
}

/// Name of an allocation as `namespace/name`.
pub fn name(object: &GPUQueueAllocation) -> String {
    format!("{}/{}", object.namespace().unwrap_or_default(), object.name_any())
}

impl GrantInputs {
    /// Returns the agent's last report, if there is one.
    pub fn status(&self) -> Option<&CacheNodeStatus> {
        self.cache_node.as_ref().and_then(|node| node.status.as_ref())
    }

    /// Returns the queue pairs of an allocation that the agent holds or may hold; `None` if the node is gone.
    /// The agent holds none once it has reported a spec that does not list the allocation, or has reported
    /// that it leaves. Before its first report on this `CacheNode` an agent holds only pairs that it had
    /// under an earlier one; deleting that `CacheNode` gives them up.
    pub fn agent_queues(&self, allocation: &GPUQueueAllocation) -> Option<AgentQueues> {
        let node = self.cache_node.as_deref().filter(|_| self.presence != NodePresence::Gone)?;
        let uid = allocation.metadata.uid.as_deref()?;
        let applied = node.status.as_ref().and_then(|status| status.applied.as_ref());
        let mut listed = applied.into_iter().flat_map(|applied| &applied.queues);
        if let Some(queues) = listed.find(|queues| queues.uid.as_str() == uid) {
            return Some(AgentQueues::Reported(queues.clone()));
        }
        let is_told = node.spec.queues.iter().any(|claim| claim.uid.as_str() == uid);
        (is_told || !has_answered(node)).then_some(AgentQueues::Unconfirmed)
    }
}

/// Whether the agent's report covers the current spec, is its last one, or does not exist yet.
fn has_answered(node: &CacheNode) -> bool {
    let Some(status) = node.status.as_ref().filter(|status| status.last_updated.is_some()) else {
        return true;
    };
    let ready = find(&status.conditions, ConditionType::AgentReady);
    let has_left = ready.is_some_and(|ready| {
        ready.status == ConditionStatus::False && ready.reason == Reason::AgentGone.as_str()
    });
    has_left || status.observed_generation >= node.metadata.generation.unwrap_or_default()
}
