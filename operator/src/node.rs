//! A node of a cluster: the whole spec of its `CacheNode`, which nobody else writes.
//!
//! Everything that passes from operator to agent is in this spec, for all pools and whatever wants something of the node; its status is the
//! agent's, so there is no file for it.

use std::sync::Arc;

use k8s_openapi::api::core::v1::Node;
use kube::runtime::controller::Action;

use crate::context::Context;
use crate::error::OperatorError;

pub mod apply;
pub mod build;
pub mod dereference;

/// Makes a node's `CacheNode` what clusters and pools say.
///
/// # Errors
/// The API server did not do what it was asked for; tried again.
pub async fn reconcile(node: Arc<Node>, context: Arc<Context>) -> Result<Action, OperatorError> {
    let found = dereference::dereference(&node, &context);
    let wanted = build::build(&node, &found);
    apply::apply(&node, &found, wanted, &context).await?;
    Ok(Action::await_change())
}
