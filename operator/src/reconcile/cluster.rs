//! `KVCacheCluster`: the control-plane members, their etcd, the agents, and the settings that engines need to
//! connect.

use std::sync::Arc;
use std::time::Duration;

use kube::runtime::controller::Action;
use kube::{Api, ResourceExt};
use reprise_crds::KVCacheCluster;

use crate::framework::error::OperatorError;
use crate::reconcile::context::Context;
use crate::reconcile::membership::REPORT_TIMEOUT;

pub mod apply;
pub mod build;
pub mod controller;
pub mod dereference;
pub mod etcd;
pub mod status;
pub mod validate;
pub mod versions;
pub mod workloads;

/// Port of the members' metrics and health checks.
pub const MEMBER_ADMIN_PORT: u16 = 7401;

/// Polling interval of an external etcd, which sends no events.
const POLL_INTERVAL: Duration = Duration::from_secs(30);
/// Polling interval of an etcd that cannot be used.
const RETRY_INTERVAL: Duration = Duration::from_secs(5);
/// Retry interval for objects that another component owns; giving them up causes no event.
const CONFLICT_RETRY_INTERVAL: Duration = Duration::from_secs(10);
/// Requeue interval without other deadlines. It covers silent agents (one minute) and the renewal of
/// certificates.
const RESYNC_INTERVAL: Duration = REPORT_TIMEOUT;

/// Brings a cluster's children to the state that its spec describes, and updates its status.
///
/// # Errors
/// Returns an error if an API request failed; the reconcile is retried.
pub async fn reconcile(cluster: Arc<KVCacheCluster>, context: Arc<Context>) -> Result<Action, OperatorError> {
    if cluster.metadata.deletion_timestamp.is_some() {
        // Kubernetes deletes its children. Re-creating them would delay a foreground deletion.
        return Ok(Action::await_change());
    }
    let mut inputs = dereference::dereference(&cluster, &context).await;
    let refused = validate::validate(&cluster, &inputs);
    let applied = if refused.is_none() && !cluster.spec.paused {
        Some(apply::apply(&cluster, &mut inputs, &context).await?)
    } else {
        None
    };
    let (status, findings) = status::compute(&cluster, &inputs, refused.as_ref(), applied.as_ref());
    let api: Api<KVCacheCluster> =
        Api::namespaced(context.client.clone(), &cluster.namespace().unwrap_or_default());
    let status_due = crate::framework::status::write(&context, &*cluster, &api, &findings, status).await?;
    let poll = match &inputs.store {
        Some(store) if store.is_good() => POLL_INTERVAL,
        Some(_) => RETRY_INTERVAL,
        None if refused.is_none() && etcd::is_starting(&cluster, inputs.etcd_pods) => RETRY_INTERVAL,
        None => RESYNC_INTERVAL,
    };
    let applied = applied.unwrap_or_default();
    let conflict = (!applied.refused.is_empty()).then_some(CONFLICT_RETRY_INTERVAL);
    let deadlines = [status_due, applied.next_restore, conflict].into_iter().flatten();
    Ok(Action::requeue(deadlines.fold(poll, Duration::min)))
}
