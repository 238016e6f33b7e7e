//! `CacheTenant`: whether it is right, and whether reservations fit what there is. Its limits on each node reach the agents with their
//! configuration ([`crate::cluster`]), so nothing is built here.
//!
//! Deliberately absent so far: budgets in the whole cluster, which are refused with words, and purging.

use std::sync::Arc;

use kube::Api;
use kube::runtime::controller::Action;
use reprise_crds::CacheTenant;

use crate::cluster::REPORTED_WITHIN;
use crate::context::Context;
use crate::error::OperatorError;

pub mod dereference;
pub mod status;
pub mod validate;

/// Says what is so of a tenant.
///
/// # Errors
/// The API server did not do what it was asked for; tried again.
pub async fn reconcile(tenant: Arc<CacheTenant>, context: Arc<Context>) -> Result<Action, OperatorError> {
    let rooms = dereference::dereference(&tenant, &context);
    let refused = validate::validate(&tenant);
    let (fresh, findings) = status::of(&rooms, refused.as_ref());
    let api: Api<CacheTenant> = Api::all(context.client.clone());
    let found = crate::status::Found {
        object: &*tenant,
        api: &api,
        before: tenant.status.as_ref(),
        findings: &findings,
    };
    let wait = crate::status::write(&context, found, fresh).await?;
    // Capacities change with what nodes say, and nodes are many: they are looked at again rather than followed.
    Ok(Action::requeue(wait.map_or(REPORTED_WITHIN, |wait| wait.min(REPORTED_WITHIN))))
}
