//! `CacheTenant`: whether it is right, whether reservations fit what there is, its budget at the control planes of its clusters, and what it holds there. Its limits on
//! each node, and which pods are it, reach the agents with what is built for clusters ([`crate::cluster`]), so nothing is built here.

use std::sync::Arc;
use std::time::Duration;

use kube::Api;
use kube::runtime::controller::Action;
use reprise_crds::CacheTenant;

use crate::clock;
use crate::cluster::REPORTED_WITHIN;
use crate::context::Context;
use crate::error::OperatorError;
use crate::finalizers::{self, Attempt, Finalizer, Left, try_set};
use crate::names::{BUDGET_FINALIZER, PURGE_FINALIZER};

pub mod budget;
pub mod dereference;
pub mod pods;
pub mod status;
pub mod usage;
pub mod validate;

/// Nodes take over whose pods are whose within a minute or so, and say so.
const PODS_LOOK_AGAIN: Duration = Duration::from_secs(5);

/// For what a deletion waits.
const FOR_WHAT: &str = "its budgets and blocks to be taken back";

/// Makes control planes have a tenant's budget, and says what is so of it.
///
/// # Errors
/// The API server did not do what it was asked for; tried again.
pub async fn reconcile(tenant: Arc<CacheTenant>, context: Arc<Context>) -> Result<Action, OperatorError> {
    let api: Api<CacheTenant> = Api::all(context.client.clone());
    let refused = validate::validate(&tenant);
    let ours = budget::is_ours(&tenant);
    let goes = tenant.metadata.deletion_timestamp.is_some();
    let mut forbidden = None;
    if !goes && refused.is_none() {
        match hold(&tenant, ours, &api, &context).await? {
            None => {}
            Some((_, Attempt::Done(_))) => return Ok(Action::await_change()),
            Some((finalizer, Attempt::Forbidden(refused))) => forbidden = Some((finalizer, refused)),
        }
    }
    let settled = budget::settle(&tenant, refused.as_ref(), &context).await;
    if budget::is_purged(&tenant, &settled) {
        // Before the finalizer goes: the object may go with it. Once, where it may not be taken away.
        if context.refusals.standing(&*tenant, PURGE_FINALIZER).is_none() {
            let finding =
                status::purged(&budget::asked(&tenant, &settled), &budget::unasked(&tenant, &context));
            crate::status::tell(&context, &*tenant, &finding).await;
        }
        match try_set(&context, &*tenant, &api, PURGE_FINALIZER, Finalizer::Unwanted).await? {
            // What is left to do is to take its budget of nothing back.
            Attempt::Done(_) => return Ok(Action::await_change()),
            Attempt::Forbidden(refused) => forbidden = Some((PURGE_FINALIZER, refused)),
        }
    }
    let undone = budget::is_undone(&tenant, refused.as_ref(), &settled);
    let finalizer = if ours && !undone { Finalizer::Wanted } else { Finalizer::Unwanted };
    match try_set(&context, &*tenant, &api, BUDGET_FINALIZER, finalizer).await? {
        Attempt::Done(Left::Nothing) if !budget::is_purging(&tenant) => return Ok(Action::await_change()),
        Attempt::Done(_) => {}
        Attempt::Forbidden(refused) => forbidden = Some((BUDGET_FINALIZER, refused)),
    }
    let rooms = dereference::dereference(&tenant, &context);
    let measured = usage::measure(&tenant, &context).await;
    let standings = pods::look(&tenant, &context);
    let bound = pods::finding(&tenant, &standings).filter(|_| refused.is_none());
    let (mut fresh, mut findings) = status::of(&tenant, &rooms, &settled, refused.as_ref(), bound);
    let told = usage::tell(&tenant, &measured, refused.as_ref(), &clock::now());
    fresh.usage = told.usage;
    findings.extend(told.findings);
    findings.extend(
        forbidden.map(|(finalizer, refused)| finalizers::forbidden(&*tenant, finalizer, FOR_WHAT, &refused)),
    );
    let found = crate::status::Found {
        object: &*tenant,
        api: &api,
        before: tenant.status.as_ref(),
        findings: &findings,
    };
    let wait = crate::status::write(&context, found, fresh).await?;
    // Capacities change with what nodes say, and nodes are many: they are looked at again rather than followed.
    let awaited = if pods::is_awaited(&standings) { PODS_LOOK_AGAIN } else { REPORTED_WITHIN };
    let next = budget::next(&settled).unwrap_or(REPORTED_WITHIN).min(told.next).min(awaited);
    Ok(Action::requeue(wait.map_or(next, |wait| wait.min(next))))
}

/// Has a tenant the finalizers that it needs, before anybody is told, and one at a time: what comes of it is a change, and the next reconcile tells.
/// `None`: it has them.
async fn hold(
    tenant: &CacheTenant,
    ours: bool,
    api: &Api<CacheTenant>,
    context: &Context,
) -> Result<Option<(&'static str, Attempt)>, OperatorError> {
    let purges = budget::wants_purge(tenant);
    let (finalizer, wanted) = if !ours && (purges || budget::wanted(tenant).is_some()) {
        (BUDGET_FINALIZER, Finalizer::Wanted)
    } else if purges != budget::has_purge(tenant) {
        (PURGE_FINALIZER, if purges { Finalizer::Wanted } else { Finalizer::Unwanted })
    } else {
        return Ok(None);
    };
    Ok(Some((finalizer, try_set(context, tenant, api, finalizer, wanted).await?)))
}
