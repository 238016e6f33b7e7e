//! Derives the state of an allocation from its stored status, its node and the agent's report. Pure.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::ResourceExt;
use reprise_crds::GPUQueueAllocation;
use reprise_crds::queues::QueueGrant;
use reprise_crds::status::{Condition, ConditionStatus, ConditionType as Type, Reason, find};

use super::dereference::{AgentQueues, GrantInputs, NodePresence};
use crate::framework::refusal::Refusal;
use crate::reconcile::membership::cluster_of;
use crate::reconcile::names::QUEUES_FINALIZER;

/// State of an allocation.
#[derive(Clone, Debug, PartialEq)]
pub enum Lifecycle {
    /// It has no grant yet.
    Pending,
    /// It has a grant.
    Granted,
    /// Its grant is ending, by one of [`END_REASONS`]. The message has the cause and the remedy.
    Ending(Refusal),
    /// The release is recorded; the allocation is never granted again.
    Released,
    /// It is being deleted and needs no status update: it has no grant, or our finalizer is the only one.
    Deleting,
}

/// Reasons of the condition `Allocated` by which an ending grant is recognized: its `ttl` has passed, a guaranteed
/// allocation needs the controller, the node is gone or has left the cluster, or the allocation is being deleted.
const END_REASONS: [Reason; 4] = [Reason::Expired, Reason::TakenBack, Reason::AgentGone, Reason::Releasing];

/// Returns the grants of an allocation, by controller. Empty if it has none, or they are released.
pub fn granted(object: &GPUQueueAllocation) -> &[QueueGrant] {
    object.status.as_ref().map(|status| status.allocations.as_slice()).unwrap_or_default()
}

fn condition(object: &GPUQueueAllocation, kind: Type) -> Option<&Condition> {
    find(&object.status.as_ref()?.conditions, kind)
}

/// Derives the state of an allocation of which the agent holds these queue pairs, or may hold them.
pub fn lifecycle(
    object: &GPUQueueAllocation,
    kept: Option<&AgentQueues>,
    inputs: &GrantInputs,
    now: &Time,
) -> Lifecycle {
    let is_deleting = object.metadata.deletion_timestamp.is_some();
    if granted(object).is_empty() {
        let released = condition(object, Type::Released);
        let is_over = released.is_some_and(|released| released.status == ConditionStatus::True);
        return match () {
            () if is_deleting => Lifecycle::Deleting,
            () if is_over => Lifecycle::Released,
            () => Lifecycle::Pending,
        };
    }
    // An object with other finalizers outlives ours, so its grant must be released by a status update; otherwise its pairs
    // would stay used.
    let is_last = matches!(object.finalizers(), [only] if only == QUEUES_FINALIZER);
    match recorded_end(object).or_else(|| due_end(object, inputs, now)) {
        None => Lifecycle::Granted,
        Some(_) if kept.is_none() && is_deleting && is_last => Lifecycle::Deleting,
        Some(end) => Lifecycle::Ending(end),
    }
}

/// Whether it has a grant whose end is not recorded: the agent must hold its queue pairs.
pub fn has_grant(object: &GPUQueueAllocation) -> bool {
    !granted(object).is_empty() && recorded_end(object).is_none()
}

/// Returns the end of the grant that the status already records.
fn recorded_end(object: &GPUQueueAllocation) -> Option<Refusal> {
    let allocated = condition(object, Type::Allocated)?;
    let is_no = allocated.status == ConditionStatus::False;
    let reason = END_REASONS.into_iter().find(|reason| reason.as_str() == allocated.reason)?;
    is_no.then(|| Refusal::new(reason, &allocated.message))
}

/// Returns the reason to end the grant now, if there is one.
fn due_end(object: &GPUQueueAllocation, inputs: &GrantInputs, now: &Time) -> Option<Refusal> {
    let node = &inputs.node;
    let expires_at = object.status.as_ref().and_then(|status| status.expires_at.as_ref());
    let is_expired = expires_at.is_some_and(|end| end.0 <= now.0);
    let end = |reason, message: &str| Some(Refusal::new(reason, message));
    match inputs.presence {
        NodePresence::Removed => {
            let cluster = inputs.cache_node.as_deref().and_then(cluster_of);
            let cluster =
                cluster.map_or_else(|| "a KVCacheCluster".to_owned(), |key| format!("KVCacheCluster {key}"));
            let message = format!(
                "node {node} no longer belongs to {cluster}: delete this GPUQueueAllocation and create one for another node, or \
                 create it again once the agents.nodeSelector of a cluster selects this node"
            );
            end(Reason::AgentGone, &message)
        }
        NodePresence::Gone => {
            let remedy = "delete this GPUQueueAllocation and create one for another node";
            end(Reason::AgentGone, &format!("node {node} is gone: {remedy}"))
        }
        NodePresence::Present if object.metadata.deletion_timestamp.is_some() => {
            end(Reason::Releasing, "the allocation is being deleted")
        }
        NodePresence::Present if is_expired => end(
            Reason::Expired,
            "the ttl of the grant has passed: create a new GPUQueueAllocation and delete this one",
        ),
        NodePresence::Present => None,
    }
}

/// Total queue pairs of a grant over all controllers.
pub fn pairs(grants: &[QueueGrant]) -> u32 {
    grants.iter().map(|grant| grant.queue_pairs).fold(0, u32::saturating_add)
}
