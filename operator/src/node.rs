//! A node of a cluster: the whole spec of its `CacheNode`, which nobody else writes, the node's mode at the control plane, and what the
//! node itself says of its cache ([`readiness`]).
//!
//! Everything that passes from operator to agent is in this spec, for all pools and whatever wants something of the node; its status is the
//! agent's, but for one condition ([`mode`]).

use std::sync::Arc;
use std::time::Instant;

use k8s_openapi::api::core::v1::Node;
use kube::ResourceExt;
use kube::runtime::controller::Action;

use crate::clock;
use crate::context::Context;
use crate::error::OperatorError;

pub mod apply;
pub mod build;
mod contested;
pub mod dereference;
pub mod mode;
pub mod readiness;

/// Makes a node's `CacheNode` what clusters and pools say, the control plane have its mode, and the node say whether its cache serves.
///
/// # Errors
/// The API server did not do what it was asked for; tried again.
pub async fn reconcile(node: Arc<Node>, context: Arc<Context>) -> Result<Action, OperatorError> {
    let found = dereference::dereference(&node, &context);
    let wanted = build::build(&node, &found);
    let wanted_mode = match &wanted {
        build::Wanted::Spec(spec) => Some(spec.mode),
        _ => None,
    };
    let readiness = readiness::step(&node, found.live.as_deref(), &wanted, &clock::now());
    let goes = wanted == build::Wanted::Nothing;
    if goes {
        readiness::write(&node, &readiness, &context).await?;
    }
    apply::apply(&node, &found, wanted, &context).await?;
    contested::hear(&node, found.live.as_deref(), &context).await;
    // A spec that was just written comes back as a change, and with its generation.
    let live =
        found.live.as_deref().filter(|live| apply::is_ours(live) && Some(live.spec.mode) == wanted_mode);
    let told = match (&found.cluster, live) {
        (Some(own), Some(live)) => mode::tell(&node, own, live, &context).await,
        _ => Ok(None),
    };
    if goes {
        return Ok(Action::await_change());
    }
    // Neither waits for the other.
    readiness::write(&node, &readiness, &context).await?;
    let paced = context.disputes.waits(&apply::key(&node.name_any()), Instant::now());
    let next = told?.into_iter().chain(readiness::look_again(found.live.as_deref())).chain(paced).min();
    Ok(next.map_or_else(Action::await_change, Action::requeue))
}
