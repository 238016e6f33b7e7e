//! Where an allocation is in its life, by what is stored of it and what is said of its node. Pure.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::ResourceExt;
use reprise_crds::queues::QueueGrant;
use reprise_crds::status::{Condition, ConditionStatus, ConditionType as Type, Reason, find};
use reprise_crds::{GPUQueueAllocation, GPUQueueAllocationStatus};

use super::dereference::{Found, Kept, Presence};
use crate::names::QUEUES_FINALIZER;
use crate::node::dereference::cluster_of;
use crate::plan::Refusal;

/// Where an allocation is in its life.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Life {
    /// It is refused, and has nothing.
    Refused,
    /// It has nothing yet.
    Wants,
    /// It has a grant.
    Stands {
        /// What the agent has of it.
        kept: Option<Kept>,
    },
    /// Its grant ends, and the agent has something of it still, or may have.
    Ends(Ending, Kept),
    /// Nothing holds its grant any more, which is to be said.
    Ended(Ending),
    /// That was said: it is over for good.
    Over,
    /// It is being deleted, and nothing of ours holds it: it has no grant, or none that outlives our finalizer.
    Goes,
}

/// Why a grant ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cause {
    /// Its time is over.
    Expired,
    /// Somebody else needs it more.
    TakenBack,
    /// There is no such node any more, or no cluster has it.
    AgentGone,
    /// The allocation is deleted.
    Deleted,
}

/// The end of a grant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ending {
    /// Why.
    pub cause: Cause,
    /// Why, and what to do.
    pub message: String,
}

impl Cause {
    /// All of them.
    pub const ALL: [Cause; 4] = [Cause::Expired, Cause::TakenBack, Cause::AgentGone, Cause::Deleted];

    /// In the word of conditions; by it a grant that ends is known again.
    pub fn reason(self) -> Reason {
        match self {
            Cause::Expired => Reason::Expired,
            Cause::TakenBack => Reason::TakenBack,
            Cause::AgentGone => Reason::AgentGone,
            Cause::Deleted => Reason::Releasing,
        }
    }
}

/// Where an allocation is in its life.
pub fn life(object: &GPUQueueAllocation, found: &Found, refused: Option<&Refusal>, now: &Time) -> Life {
    let goes = object.metadata.deletion_timestamp.is_some();
    let status = object.status.as_ref();
    let Some(status) = status.filter(|status| !status.allocations.is_empty()) else {
        let conditions = status.map(|status| status.conditions.as_slice()).unwrap_or_default();
        let is_over =
            find(conditions, Type::Released).is_some_and(|released| released.status == ConditionStatus::True);
        return match () {
            () if goes => Life::Goes,
            () if is_over => Life::Over,
            () if refused.is_some() => Life::Refused,
            () => Life::Wants,
        };
    };
    let kept = found.kept(object);
    let ending = has_begun(&status.conditions).or_else(|| begins(object, status, found, now));
    match (ending, kept) {
        (None, kept) => Life::Stands { kept },
        (Some(ending), Some(left)) => Life::Ends(ending, left),
        (Some(_), None) if goes && is_only_ours(object) => Life::Goes,
        (Some(ending), None) => Life::Ended(ending),
    }
}

/// Whether an object that is being deleted goes with our finalizer. One that somebody else holds as well is there after it, so its grant is ended by a
/// status, or nobody could have its room.
fn is_only_ours(object: &GPUQueueAllocation) -> bool {
    matches!(object.finalizers(), [only] if only == QUEUES_FINALIZER)
}

/// Whether it has a grant whose end was not said yet: what its node's agent is told of.
pub fn stands(object: &GPUQueueAllocation) -> bool {
    let status = object.status.as_ref().filter(|status| !status.allocations.is_empty());
    status.is_some_and(|status| has_begun(&status.conditions).is_none())
}

/// An end that was said already.
fn has_begun(conditions: &[Condition]) -> Option<Ending> {
    let allocated = find(conditions, Type::Allocated)?;
    let is_no = allocated.status == ConditionStatus::False;
    let cause = Cause::ALL.into_iter().find(|cause| cause.reason().as_str() == allocated.reason)?;
    is_no.then(|| Ending { cause, message: allocated.message.clone() })
}

/// An end that there is a reason for now.
fn begins(
    object: &GPUQueueAllocation,
    status: &GPUQueueAllocationStatus,
    found: &Found,
    now: &Time,
) -> Option<Ending> {
    let node = &found.node;
    let ends = |cause: Cause, message: String| Some(Ending { cause, message });
    match found.presence {
        Presence::Here => {}
        Presence::Left => {
            let before = found.cache_node.as_deref().and_then(cluster_of);
            let left = before.map_or_else(
                || format!("no KVCacheCluster has node {node} any more"),
                |before| format!("KVCacheCluster {before} has node {node} no more"),
            );
            let message = format!(
                "{left}: make a new GPUQueueAllocation for another node, or once agents.nodeSelector of a cluster selects this one, and delete \
                 this one"
            );
            return ends(Cause::AgentGone, message);
        }
        Presence::Gone => {
            let message = format!("node {node} is gone: make a new GPUQueueAllocation for another one");
            return ends(Cause::AgentGone, message);
        }
    }
    // Who uses it is heeded as long as there is an agent that could tell of its end.
    let is_used = status.reserved_for.is_some() && found.cache_node.is_some();
    if object.metadata.deletion_timestamp.is_some() && !is_used {
        return ends(Cause::Deleted, "it is being deleted".to_owned());
    }
    match &status.expires_at {
        Some(over) if over.0 <= now.0 => {
            let message =
                "the time of the grant (ttl) is over: make a new GPUQueueAllocation, and delete this one";
            ends(Cause::Expired, message.to_owned())
        }
        _ => None,
    }
}

/// Queue pairs of a grant, on all controllers.
pub fn pairs(grants: &[QueueGrant]) -> u32 {
    grants.iter().map(|grant| grant.queue_pairs).fold(0, u32::saturating_add)
}
