//! A node of a cluster: the spec of its `CacheNode`, its mode at the control plane, and the readiness
//! condition on the `Node` ([`readiness`]).
//!
//! The operator is the only writer of the spec, which contains all instructions to the agent.
//! The agent writes the status, except one condition ([`mode`]).

use std::sync::Arc;

use k8s_openapi::api::core::v1::Node;
use kube::ResourceExt;
use kube::runtime::controller::Action;
use tokio::time::Instant;

use crate::framework::clock;
use crate::framework::error::OperatorError;
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
    let wanted = build::build(&node, &inputs);
    let wanted_mode = match &wanted {
        build::DesiredCacheNode::Spec(spec) => Some(spec.mode),
        _ => None,
    };
    let readiness = readiness::next_step(&node, inputs.live.as_deref(), &wanted, &clock::now());
    let is_deleted = wanted == build::DesiredCacheNode::Absent;
    if is_deleted {
        readiness::write(&node, &readiness, &context).await?;
    }
    apply::apply(&node, &inputs, wanted, &context).await?;
    apply::report_contested_status(&node, inputs.live.as_deref(), &context).await;
    // A spec that was just written triggers another reconcile, with its new generation.
    let live =
        inputs.live.as_deref().filter(|live| apply::is_ours(live) && Some(live.spec.mode) == wanted_mode);
    let mode_check = match (&inputs.cluster, live) {
        (Some(own), Some(live)) => mode::sync(&node, &own.cluster, live, &context).await,
        _ => Ok(None),
    };
    if is_deleted {
        return Ok(Action::await_change());
    }
    // Write the condition even if setting the mode failed.
    readiness::write(&node, &readiness, &context).await?;
    let paced = context.other_writers.pacing_delay(&apply::key(&node.name_any()), Instant::now());
    let next =
        mode_check?.into_iter().chain(readiness::next_check(inputs.live.as_deref())).chain(paced).min();
    Ok(next.map_or_else(Action::await_change, Action::requeue))
}
