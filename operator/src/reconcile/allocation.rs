//! `GPUQueueAllocation`: grants NVMe queue pairs of one node to one GPU. The node's agent sets them aside.
//!
//! ```text
//!           grant written        expired, preempted or deleted        agent released the pairs
//! pending ────────────────► granted ────────────────────────────► ending ──────────────────────► released or deleted
//!   ▲ └─► waiting ─┐                                       (pairs still count as used)
//!   └──────────────┘
//! ```
//!
//! Grants are stored only in the status. Allocations of one node compete for the same controllers, so one
//! reconcile decides them all ([`grant`]). If the local stores show that a write is due, it lists the node's allocations
//! from the API server, and decides again before each write ([`build`]). One pass per node does this at a time
//! ([`apply`]). A decision therefore knows every earlier grant, including grants that no watch has delivered yet.
//!
//! Invariants:
//! * A new grant never raises the grants of a controller above the pool's `maxGpuQueuePercent` of its pairs.
//! * A grant never changes; it only ends. A released allocation is not granted again.
//! * The pairs of a grant are free again in these cases: the agent has reported a `CacheNode` spec without
//!   the grant; the agent has left; the `CacheNode` or the node is gone
//!   ([`dereference::GrantInputs::agent_queues`]).
//! * Only an object with the operator's finalizer has a grant. Releases are written before grants that use
//!   the released pairs.
//! * A write that the API server rejects delays only allocations that need the affected pairs.
//! * A grant decided by a former leader never takes effect ([`apply`]).
//!
//! Agents read grants from `spec.queues` of their `CacheNode` ([`crate::reconcile::node`]) and list the pairs that they
//! set aside in `status.applied.queues`. A replica that has lost its lease, or a stale cache, may write an outdated
//! grant into a spec. The node's next reconcile corrects it. Until then the agent sets aside no pairs that conflict
//! with those it already has.

use std::collections::BTreeSet;
use std::sync::Arc;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::runtime::controller::Action;
use reprise_crds::GPUQueueAllocation;

use crate::framework::clock;
use crate::framework::error::OperatorError;
use crate::reconcile::context::Context;
use crate::reconcile::membership::REPORT_TIMEOUT;
use crate::reconcile::node::readiness::next_check;
use build::Pass;
use dereference::GrantInputs;

pub mod apply;
pub mod build;
pub mod controller;
pub mod dereference;
pub mod grant;
pub mod lifecycle;
pub mod programmed;
pub mod status;
pub mod validate;

/// Decides the grants of all allocations on this allocation's node, and updates their statuses.
///
/// # Errors
/// Returns an error if an API request failed; the reconcile is retried.
pub async fn reconcile(
    allocation: Arc<GPUQueueAllocation>,
    context: Arc<Context>,
) -> Result<Action, OperatorError> {
    let now = clock::now();
    let inputs = dereference::from_stores(allocation.spec.node_name.as_str(), &context);
    let known = Pass::new(inputs, BTreeSet::new(), now.clone());
    if known.next_write().is_none() {
        return Ok(next(&known.inputs, &now));
    }
    let inputs = apply::reconcile_node(&allocation, &context).await?;
    Ok(next(&inputs, &now))
}

/// Requeues when the next grant of the node expires, which causes no watch event. Neither does an agent that becomes
/// silent, or reports again without a change.
fn next(inputs: &GrantInputs, now: &Time) -> Action {
    let statuses = inputs.allocations.iter().filter_map(|of| of.object.status.as_ref());
    let granted: Vec<_> = statuses.filter(|status| !status.allocations.is_empty()).collect();
    if granted.is_empty() {
        return Action::await_change();
    }
    let ends = granted.iter().filter_map(|status| status.expires_at.as_ref());
    let ends = ends.filter(|ends| ends.0 > now.0).map(clock::until);
    let check = next_check(inputs.cache_node.as_deref()).unwrap_or(REPORT_TIMEOUT);
    Action::requeue(ends.min().map_or(check, |ends| ends.min(check)))
}

#[cfg(test)]
mod tests;
