//! `CacheTenant`: validates it, checks that reservations fit, sets its budget at the control planes of its
//! clusters, copies its encryption keys, and reports its usage. Limits per node and the assignment of pods reach the agents through the
//! children of clusters ([`crate::reconcile::cluster`]), so nothing is built here.

use std::sync::Arc;
use std::time::Duration;

use kube::runtime::controller::Action;
use kube::{Api, ResourceExt};
use reprise_crds::status::{ConditionStatus, ConditionType, Finding, Reason};
use reprise_crds::tenant::TenantDeletion;
use reprise_crds::{CacheTenant, CacheTenantStatus};

use crate::framework::clock;
use crate::framework::error::OperatorError;
use crate::framework::finalizers::{self, Finalizer, ObjectState};
use crate::framework::refusal::accepted;
use crate::framework::status::{publish_event, write};
use crate::reconcile::context::Context;
use crate::reconcile::control_plane::RETRY_INTERVAL;
use crate::reconcile::names::{BUDGET_FINALIZER, PURGE_FINALIZER};
use dereference::TenantClusters;

pub mod budget;
pub mod capacity;
pub mod controller;
pub mod dereference;
pub mod keys;
pub mod pods;
pub mod usage;
pub mod validate;

/// Interval for reading objects without a watch: Secrets with keys, control planes, and reports of many nodes.
const POLL_INTERVAL: Duration = Duration::from_secs(20);

/// Reasons of conditions that end without an event, after which the operator polls more often. The client of control
/// planes limits its calls itself.
const PENDING: [Reason; 4] =
    [Reason::ControlPlaneUnreachable, Reason::NotReported, Reason::Progressing, Reason::Releasing];

/// Message of a tenant without clusters.
const NO_CLUSTER: &str = "the tenant applies to no KVCacheCluster: create one, or correct spec.clusters";

/// Sets a tenant's budget at the control planes and updates its status.
///
/// # Errors
/// Returns an error if an API request failed; the reconcile is retried.
pub async fn reconcile(tenant: Arc<CacheTenant>, context: Arc<Context>) -> Result<Action, OperatorError> {
    let api: Api<CacheTenant> = Api::all(context.client.clone());
    let refused = validate::rejected(&context.stores.tenants.state()).remove(&tenant.name_any());
    let is_owned = finalizers::has(&*tenant, BUDGET_FINALIZER);
    if tenant.metadata.deletion_timestamp.is_none() && refused.is_none() {
        // Before any control plane is changed. One per reconcile: the change triggers the next one.
        let purges = tenant.spec.deletion_policy == TenantDeletion::Purge;
        let wanted =
            [(BUDGET_FINALIZER, is_owned || budget::needs_finalizer(&tenant)), (PURGE_FINALIZER, purges)];
        for (finalizer, is_wanted) in wanted {
            if finalizers::has(&*tenant, finalizer) != is_wanted {
                let desired = if is_wanted { Finalizer::Present } else { Finalizer::Absent };
                finalizers::set(&context, &*tenant, &api, finalizer, desired).await?;
                return Ok(Action::await_change());
            }
        }
    }
    let clusters = TenantClusters::of(&tenant, context.stores.clusters.state());
    let mut results = budget::sync(&tenant, refused.as_ref(), &clusters, &context).await;
    if budget::is_purged(&tenant, &results) {
        keys::remove(&tenant, &clusters, &mut results, &context).await;
    }
    if budget::is_purged(&tenant, &results) {
        // Publish the event before removing the finalizer, because the object may be deleted with it.
        let checked: Vec<String> = clusters.members().map(|one| one.names.key()).collect();
        let finding = budget::purged(&checked, &clusters.released);
        publish_event(&context, &*tenant, &finding).await;
        finalizers::set(&context, &*tenant, &api, PURGE_FINALIZER, Finalizer::Absent).await?;
        // The zero budget is removed in the next reconcile.
        return Ok(Action::await_change());
    }
    let is_withdrawn = budget::is_withdrawn(&tenant, refused.as_ref(), &results);
    let finalizer = if is_owned && !is_withdrawn { Finalizer::Present } else { Finalizer::Absent };
    let state = finalizers::set(&context, &*tenant, &api, BUDGET_FINALIZER, finalizer).await?;
    if state == ObjectState::Gone && !budget::is_purging(&tenant) {
        return Ok(Action::await_change());
    }
    let measured = usage::measure(&tenant, &clusters, &context).await;
    let assignments = pods::assignments(&tenant, &clusters, &context);
    let of_budgets = budget::infeasible(&results);
    let feasible = of_budgets.unwrap_or_else(|| capacity::finding(&tenant, &clusters, &context));
    let mut findings = vec![accepted(refused.as_ref()), feasible];
    findings.extend(budget::applied(&tenant, &results, refused.as_ref()));
    findings.extend(pods::finding(&tenant, &assignments).filter(|_| refused.is_none()));
    findings.extend(keys::sync(&tenant, refused.as_ref(), &clusters, &measured, &context).await);
    findings.push(ready(&findings));
    findings.extend(budget::blocked(&tenant, &results));
    findings.extend(pods::public_finding(&tenant, &assignments));
    let (usage, of_usage) = usage::evaluate(&tenant, &measured, refused.as_ref(), &clock::now());
    findings.extend(of_usage);
    let fresh = CacheTenantStatus { usage, ..CacheTenantStatus::default() };
    let wait = write(&context, &*tenant, &api, &findings, fresh).await?;
    let is_pending = findings.iter().any(|found| PENDING.contains(&found.reason));
    let next = if is_pending { RETRY_INTERVAL } else { POLL_INTERVAL };
    Ok(Action::requeue(wait.map_or(next, |wait| wait.min(next))))
}

/// Returns condition `Ready` from the conditions that it summarises.
fn ready(findings: &[Finding]) -> Finding {
    let kind = ConditionType::Ready;
    match findings.iter().find(|found| found.status == ConditionStatus::False) {
        Some(found) => Finding::no(kind, found.reason, &found.message),
        None => Finding::yes(
            kind,
            Reason::AsDesired,
            "agents have the limits per node, and control planes have the budget",
        ),
    }
}
