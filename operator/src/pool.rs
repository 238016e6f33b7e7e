//! `SSDPool`: accepted or refused, and what the nodes say of it. Its claims are written by [`crate::node`], which writes all of a node.

use std::sync::Arc;

use kube::Api;
use kube::runtime::controller::Action;
use reprise_crds::SSDPool;

use crate::cluster::REPORTED_WITHIN;
use crate::context::Context;
use crate::error::OperatorError;
use crate::finalizers::{Attempt, Left};
use crate::in_use::{self, Kept};

pub mod apply;
pub mod build;
pub mod dereference;
pub mod status;
pub mod validate;

/// Makes a pool what its spec says.
///
/// # Errors
/// The API server did not do what it was asked for; tried again.
pub async fn reconcile(pool: Arc<SSDPool>, context: Arc<Context>) -> Result<Action, OperatorError> {
    let api: Api<SSDPool> = Api::all(context.client.clone());
    let mut found = dereference::dereference(&pool, &context);
    let kept = in_use::keep(&context, &*pool, &api, &mut found.usage).await?;
    if matches!(kept, Kept::Changed) {
        // It is reconciled by that change.
        return Ok(Action::await_change());
    }
    let refused = validate::validate(&pool, &found);
    let finalizer = build::finalizer(&pool, &found);
    let attempt = apply::apply(&pool, finalizer, &context).await?;
    if matches!((&attempt, &kept), (Attempt::Done(Left::Nothing), Kept::Free)) {
        return Ok(Action::await_change());
    }
    let (fresh, mut findings) = status::of(&pool, &found, refused.as_ref());
    if let Some(forbidden) = status::forbidden(&pool, &kept, &attempt) {
        findings.retain(|found| found.kind != forbidden.kind);
        findings.push(forbidden);
    }
    let said =
        crate::status::Found { object: &*pool, api: &api, before: pool.status.as_ref(), findings: &findings };
    let wait = crate::status::write(&context, said, fresh).await?;
    // A node that has gone silent tells nobody.
    let next = found.usage.look_again(&*pool).map_or(REPORTED_WITHIN, |soon| soon.min(REPORTED_WITHIN));
    Ok(Action::requeue(wait.map_or(next, |wait| wait.min(next))))
}
