//! `SSDPool`: validation, and the reports of its nodes. [`crate::reconcile::node`] writes its claims, with everything
//! else in a node's spec.

use std::sync::Arc;

use kube::Api;
use kube::runtime::controller::Action;
use reprise_crds::SSDPool;

use crate::framework::error::OperatorError;
use crate::framework::finalizers::{self, ObjectState};
use crate::reconcile::context::Context;
use crate::reconcile::membership::REPORT_TIMEOUT;
use crate::reconcile::names::WIPE_FINALIZER;
use guard::Guard;

pub mod build;
pub mod controller;
pub mod dereference;
pub mod guard;
pub mod status;
pub mod validate;

/// Brings a pool's finalizers to their desired state and updates its status.
///
/// # Errors
/// Returns an error if an API request failed; the reconcile is retried.
pub async fn reconcile(pool: Arc<SSDPool>, context: Arc<Context>) -> Result<Action, OperatorError> {
    let api: Api<SSDPool> = Api::all(context.client.clone());
    let inputs = dereference::dereference(&pool, &context);
    let mut guard = Guard::of(&pool, build::is_guarded(&pool, &inputs), &context);
    if guard::reconcile_finalizer(&context, &pool, &api, &mut guard).await? {
        // The finalizer change triggers the next reconcile.
        return Ok(Action::await_change());
    }
    let wipe = build::finalizer(&pool, &inputs);
    let state = finalizers::set(&context, &*pool, &api, WIPE_FINALIZER, wipe).await?;
    if state == ObjectState::Gone && !guard::has_guard(&pool) {
        return Ok(Action::await_change());
    }
    let (fresh, findings) = status::compute(&pool, &inputs, &guard);
    let wait = crate::framework::status::write(&context, &*pool, &api, &findings, fresh).await?;
    // A node that stops reporting causes no event.
    let waits = [wait, guard.requeue_after(&pool), Some(REPORT_TIMEOUT)];
    Ok(Action::requeue(waits.into_iter().flatten().min().unwrap_or(REPORT_TIMEOUT)))
}
