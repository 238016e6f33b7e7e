//! A node of a cluster: the spec of its `CacheNode`, its mode at the control plane, and the readiness
//! condition on the `Node` ([`readiness`]).
//!
//! The operator is the only writer of the spec, which contains all instructions to the agent.
//! The agent writes the status, except one condition ([`mode`]).

use std::sync::Arc;

use k8s_openapi::api::core::v1::Node;
use kube::runtime::controller::Action;

use crate::framework::clock;
use crate::framework::error::{FORBIDDEN, OperatorError};
use crate::reconcile::context::Context;

pub mod apply;
pub mod build;
pub mod controller;
pub mod dereference;
pub mod mode;
pub mod readiness;

/// Brings a node's `CacheNode`, its mode at the control plane and its readiness condition to their desired
/// state.
///
/// # Errors
/// Returns an error if an API request failed; the reconcile is retried.
pub async fn reconcile(node: Arc<Node>, context: Arc<Context>) -> Result<Action, OperatorError> {
    let inputs = dereference::dereference(&node, &context);
    let (live, spec) = (inputs.live.as_deref(), build::build(&node, &inputs));
    let condition = readiness::desired(&node, live, spec.is_some(), &clock::now());
    let condition_written = readiness::write(&node, condition, live, &context).await;
    let is_forbidden = |error: &OperatorError| error.code() == Some(FORBIDDEN);
    if spec.is_none() && condition_written.as_ref().is_err_and(|error| !is_forbidden(error)) {
        // The condition is removed before the CacheNode, unless the operator may not. The other steps do not depend on it.
        return condition_written.map(|()| Action::await_change());
    }
    let paced = apply::apply(&node, live, spec.as_ref(), &context).await?;
    let next_mode_check = match (&inputs.cluster, live, spec) {
        // A mode that was just written triggers another reconcile.
        (Some(cluster), Some(live), Some(spec)) if spec.mode == live.spec.mode => {
            mode::sync(cluster, live, &context).await?
        }
        _ => None,
    };
    condition_written?;
    let next = [paced, next_mode_check, readiness::next_check(live)].into_iter().flatten().min();
    Ok(next.map_or_else(Action::await_change, Action::requeue))
}
