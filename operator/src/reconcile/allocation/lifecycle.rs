//! Derives the state of an allocation from its stored status, its node and the agent's report. Pure.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::ResourceExt;
use reprise_crds::queues::QueueGrant;
use reprise_crds::status::{Condition, ConditionStatus, ConditionType as Type, Reason, find};
use reprise_crds::{GPUQueueAllocation, GPUQueueAllocationStatus};

use super::dereference::{AgentQueues, GrantInputs, NodePresence};
use crate::framework::refusal::Refusal;
use crate::reconcile::membership::cluster_of;
use crate::reconcile::names::QUEUES_FINALIZER;

/// State of an allocation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Lifecycle {
    /// Its spec is rejected, and it has no grant.
    Refused,
    /// It has no grant yet.
    Pending,
    /// It has a grant.
    Granted {
        /// Queue pairs that the agent holds for it.
        kept: Option<AgentQueues>,
    },
    /// Its grant is ending; the agent still holds queue pairs, or may.
    Ending(GrantEnd, AgentQueues),
    /// The agent holds nothing for the ending grant; the release must be written to the status.
    Ended(GrantEnd),
    /// The release is recorded; the allocation is never granted again.
    Released,
    /// It is being deleted and needs no status update: it has no grant, or our finalizer is the only one.
    Deleting,
}

/// Why a grant ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cause {
    /// Its `ttl` has passed.
    Expired,
    /// A guaranteed allocation needs the controller.
    TakenBack,
    /// The node is gone, or no longer belongs to the cluster.
    AgentGone,
    /// The allocation is being deleted.
    Deleted,
}

/// The end of a grant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GrantEnd {
    /// Why the grant ends.
    pub cause: Cause,
    /// Message for conditions: the cause and the remedy.
    pub message: String,
}

impl Cause {
    /// All causes, for lookup by reason.
    pub const ALL: [Cause; 4] = [Cause::Expired, Cause::TakenBack, Cause::AgentGone, Cause::Deleted];

    /// Condition reason of this cause. [`recorded_end`] recognizes an ending grant by it.
    pub fn reason(self) -> Reason {
        match self {
            Cause::Expired => Reason::Expired,
            Cause::TakenBack => Reason::TakenBack,
            Cause::AgentGone => Reason::AgentGone,
            Cause::Deleted => Reason::Releasing,
        }
    }
}

/// Derives the state of an allocation.
pub fn lifecycle(
    object: &GPUQueueAllocation,
    inputs: &GrantInputs,
    refused: Option<&Refusal>,
    now: &Time,
) -> Lifecycle {
    let is_deleting = object.metadata.deletion_timestamp.is_some();
    let status = object.status.as_ref();
    let Some(status) = status.filter(|status| !status.allocations.is_empty()) else {
        let conditions = status.map(|status| status.conditions.as_slice()).unwrap_or_default();
        let is_over =
            find(conditions, Type::Released).is_some_and(|released| released.status == ConditionStatus::True);
        return match () {
            () if is_deleting => Lifecycle::Deleting,
            () if is_over => Lifecycle::Released,
            () if refused.is_some() => Lifecycle::Refused,
            () => Lifecycle::Pending,
        };
    };
    let kept = inputs.agent_queues(object);
    let ending = recorded_end(&status.conditions).or_else(|| due_end(object, status, inputs, now));
    match (ending, kept) {
        (None, kept) => Lifecycle::Granted { kept },
        (Some(ending), Some(left)) => Lifecycle::Ending(ending, left),
        (Some(_), None) if is_deleting && has_only_our_finalizer(object) => Lifecycle::Deleting,
        (Some(ending), None) => Lifecycle::Ended(ending),
    }
}

/// Whether our finalizer is the only one. An object with other finalizers outlives ours, so its grant must be
/// released by a status update; otherwise its pairs would stay used.
fn has_only_our_finalizer(object: &GPUQueueAllocation) -> bool {
    matches!(object.finalizers(), [only] if only == QUEUES_FINALIZER)
}

/// Whether it has a grant whose end is not recorded: the agent must hold its queue pairs.
pub fn has_grant(object: &GPUQueueAllocation) -> bool {
    let status = object.status.as_ref().filter(|status| !status.allocations.is_empty());
    status.is_some_and(|status| recorded_end(&status.conditions).is_none())
}

/// Returns the end of the grant that the status already records.
fn recorded_end(conditions: &[Condition]) -> Option<GrantEnd> {
    let allocated = find(conditions, Type::Allocated)?;
    let is_no = allocated.status == ConditionStatus::False;
    let cause = Cause::ALL.into_iter().find(|cause| cause.reason().as_str() == allocated.reason)?;
    is_no.then(|| GrantEnd { cause, message: allocated.message.clone() })
}

/// Returns the reason to end the grant now, if there is one.
fn due_end(
    object: &GPUQueueAllocation,
    status: &GPUQueueAllocationStatus,
    inputs: &GrantInputs,
    now: &Time,
) -> Option<GrantEnd> {
    let node = &inputs.node;
    let ends = |cause: Cause, message: String| Some(GrantEnd { cause, message });
    match inputs.presence {
        NodePresence::Present => {}
        NodePresence::Removed => {
            let before = inputs.cache_node.as_deref().and_then(cluster_of);
            let left = before.map_or_else(
                || format!("node {node} no longer belongs to a KVCacheCluster"),
                |before| format!("node {node} no longer belongs to KVCacheCluster {before}"),
            );
            let message = format!(
                "{left}: delete this GPUQueueAllocation and create one for another node, or create it again once the \
                 agents.nodeSelector of a cluster selects this node"
            );
            return ends(Cause::AgentGone, message);
        }
        NodePresence::Gone => {
            let message = format!(
                "node {node} is gone: delete this GPUQueueAllocation and create one for another node"
            );
            return ends(Cause::AgentGone, message);
        }
    }
    if object.metadata.deletion_timestamp.is_some() {
        return ends(Cause::Deleted, "the allocation is being deleted".to_owned());
    }
    match &status.expires_at {
        Some(over) if over.0 <= now.0 => {
            let message =
                "the ttl of the grant has passed: create a new GPUQueueAllocation and delete this one";
            ends(Cause::Expired, message.to_owned())
        }
        _ => None,
    }
}

/// Total queue pairs of a grant over all controllers.
pub fn pairs(grants: &[QueueGrant]) -> u32 {
    grants.iter().map(|grant| grant.queue_pairs).fold(0, u32::saturating_add)
}
