//! `KVCacheCluster`: members, their store, agents, and what engines need to connect.

use std::sync::Arc;
use std::time::Duration;

use kube::runtime::controller::Action;
use kube::{Api, ResourceExt};
use reprise_crds::KVCacheCluster;

use crate::context::Context;
use crate::error::OperatorError;
use crate::in_use::{self, Kept};

pub mod apply;
pub mod build;
pub mod certificates;
pub mod dereference;
pub mod status;
pub mod store;
pub mod validate;
pub mod versions;
pub mod volumes;

/// Port of the members' gRPC services.
pub const GRPC_PORT: u16 = 7400;
/// Port of the members' metrics and health.
pub const MEMBER_ADMIN_PORT: u16 = 7401;

/// A CacheNode that is older says that its agent is away.
pub const REPORTED_WITHIN: Duration = Duration::from_secs(60);

/// A store of somebody else is asked so often whether it answers, and sooner when it did not: nothing tells us.
const LOOK_AGAIN: Duration = Duration::from_secs(30);
const LOOK_SOON: Duration = Duration::from_secs(5);
/// What others own is tried again so soon, since nothing tells us that they gave it up.
const GIVEN_UP_WITHIN: Duration = Duration::from_secs(10);
/// Certificates are looked at once a day, and agents for having gone silent once a minute.
const NEXT: Duration = REPORTED_WITHIN;

/// Makes a cluster what its spec says.
///
/// # Errors
/// The API server did not do what it was asked for; tried again.
pub async fn reconcile(cluster: Arc<KVCacheCluster>, context: Arc<Context>) -> Result<Action, OperatorError> {
    let goes = cluster.metadata.deletion_timestamp.is_some();
    let api: Api<KVCacheCluster> =
        Api::namespaced(context.client.clone(), &cluster.namespace().unwrap_or_default());
    let usage = in_use::of_cluster(&cluster, &context);
    let unprotected = match in_use::keep(&context, &*cluster, &api, &usage).await? {
        // It is reconciled by that change.
        Kept::Changed => return Ok(Action::await_change()),
        Kept::Free if goes => return Ok(Action::await_change()),
        Kept::Free | Kept::Held => None,
        Kept::Unprotected(error) => Some(error),
    };
    let found = dereference::dereference(&cluster, &context).await;
    let refused = validate::validate(&cluster, &found);
    // What is the cluster's goes with it; making it anew would only hold it up. While engines hold it, it works as before.
    let applied = if refused.is_none() && !cluster.spec.paused && in_use::is_kept(&*cluster) {
        Some(apply::apply(&cluster, &found, &context).await?)
    } else {
        None
    };
    let (status, mut findings) = status::of(&cluster, &found, refused.as_ref(), applied.as_ref());
    findings.extend(usage.blocked(&*cluster));
    findings.extend(unprotected.as_ref().map(in_use::unprotected));
    let said = crate::status::Found {
        object: &*cluster,
        api: &api,
        before: cluster.status.as_ref(),
        findings: &findings,
    };
    let wait = crate::status::write(&context, said, status).await?;
    let next = match &found.store {
        Some(look) if look.is_good() => LOOK_AGAIN,
        Some(_) => LOOK_SOON,
        None if volumes::wait(&cluster, found.etcd.as_deref()) => LOOK_SOON,
        None => NEXT,
    };
    let next = usage.look_again(&*cluster).map_or(next, |soon| soon.min(next));
    let refused = applied.is_some_and(|applied| !applied.refused.is_empty());
    let next = if refused { next.min(GIVEN_UP_WITHIN) } else { next };
    if let Some(error) = unprotected {
        // Said, and tried again, less and less often.
        return Err(error);
    }
    Ok(Action::requeue(wait.map_or(next, |wait| wait.min(next))))
}
