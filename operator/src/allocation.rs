//! `GPUQueueAllocation`: NVMe queue pairs of one node, counted, granted to one GPU, and kept for it by the node's agent.
//!
//! ```text
//!            granted            over, taken back, deleted          the agent has let go of it
//!  wants ─────────────► stands ─────────────────────────► ends ──────────────────────────────────────► released
//!    ▲ └─► waits ─┐                                          (its room is held)                          or gone
//!    └────────────┘
//! ```
//!
//! Grants are kept in the status and nowhere else. Allocations of one node share its controllers, so they are decided together
//! ([`grant`]), by whichever of them is reconciled. What is stored is looked at first, at no cost; when something is to be written, the node's
//! allocations are asked for anew, and decided and written by one task at a time ([`apply`]). So a decision knows every grant before it,
//! also those that no watch has told of yet.
//!
//! Invariants:
//! * the grants of a controller together stay within the pool's `maxGpuQueuePercent` of its queue pairs;
//! * a grant is never changed, only ended; what has ended is not granted again;
//! * the room of a grant is free once the node's agent is not told of it any more and has said so of that spec, or has left, or its `CacheNode` or the
//!   node is gone ([`dereference::Found::kept`]);
//! * a grant stands only on an object with the finalizer, and what is given back is written before what is granted instead;
//! * one that cannot be written stops nobody else of its node, but those who need room that it has ([`room`]); of one that is refused its
//!   finalizer not even those who need what it asks for ([`turn`]);
//! * nothing is granted by what a former replica has decided ([`apply`]).
//!
//! Agents are told of grants in `spec.queues` of their `CacheNode` ([`crate::node`]), of none whose end was said, and list in `status.applied.queues` what they
//! keep. A grant that was written into a spec late, by a replica that has lost its lease or by what was known a moment ago, is put right by the next reconcile of the node; meanwhile the
//! agent keeps nothing that cannot be beside what it has.
//!
//! Deliberately absent: queues themselves, which no agent of this release makes; `reservedFor`, which nobody sets in this release: as long as it
//! is there, a deletion waits; limits of tenants (`maxGpuQueuePairs`), which are refused.

use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::runtime::controller::Action;
use reprise_crds::GPUQueueAllocation;

use crate::clock;
use crate::context::Context;
use crate::error::OperatorError;
use apply::Unwritten;

pub mod apply;
pub mod build;
pub mod dereference;
pub mod grant;
pub mod life;
pub mod room;
pub mod standing;
pub mod status;
pub mod turn;
pub mod validate;

/// The end of a grant is never waited for in shorter steps.
const STEP_MIN: Duration = Duration::from_millis(100);

/// Decides the grants of an allocation's node, and says what is so of them.
///
/// # Errors
/// The API server did not do what it was asked for; tried again.
pub async fn reconcile(
    allocation: Arc<GPUQueueAllocation>,
    context: Arc<Context>,
) -> Result<Action, OperatorError> {
    let (node, now) = (allocation.spec.node_name.to_string(), clock::now());
    let known = dereference::known(&node, &context);
    if !build::steps(&known, &now).is_empty() {
        // A task of its own goes on when this one is given up: what is on its way must not arrive after a later decision.
        let settling = tokio::spawn({
            let context = Arc::clone(&context);
            async move { apply::settle(&node, &context).await }
        });
        let settled = settling.await.unwrap_or_else(|error| std::panic::resume_unwind(error.into_panic()));
        report(&allocation, settled?, &context).await?;
    }
    Ok(next(&allocation, &now))
}

/// What could not be written of an allocation is its own failure: it is tried again with a growing delay, and the end of another one's grant
/// does not wait for that.
async fn report(
    allocation: &GPUQueueAllocation,
    unwritten: Vec<Unwritten>,
    context: &Context,
) -> Result<(), OperatorError> {
    let is_own = |one: &Unwritten| one.object.metadata.uid == allocation.metadata.uid;
    let (own, others): (Vec<_>, Vec<_>) = unwritten.into_iter().partition(is_own);
    // Each try is about the whole node: two that fail would ask for each other for ever.
    if let Some(own) = own.into_iter().next() {
        return Err(own.error);
    }
    for other in others {
        tracing::info!(error = %other.error, "something of another allocation of the node could not be written");
        context.triggers.allocation(&other.object).await;
    }
    Ok(())
}

/// Nothing tells of the end of a grant; everything else is an event.
fn next(allocation: &GPUQueueAllocation, now: &Time) -> Action {
    let granted = allocation.status.as_ref().filter(|status| !status.allocations.is_empty());
    match granted.and_then(|status| status.expires_at.as_ref()) {
        Some(ends) if ends.0 > now.0 => Action::requeue(clock::until(ends).max(STEP_MIN)),
        _ => Action::await_change(),
    }
}

#[cfg(test)]
mod tests;
