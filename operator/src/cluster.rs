//! `KVCacheCluster`: members, their store, agents, and what engines need to connect.

use std::sync::Arc;
use std::time::Duration;

use kube::runtime::controller::Action;
use kube::{Api, ResourceExt};
use reprise_crds::KVCacheCluster;

use crate::context::Context;
use crate::error::OperatorError;
use crate::finalizers;
use crate::in_use::{self, Kept};
use crate::names::IN_USE_FINALIZER;

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
    let mut usage = in_use::of_cluster(&cluster, &context);
    let forbidden = match in_use::keep(&context, &*cluster, &api, &mut usage).await? {
        // It is reconciled by that change.
        Kept::Changed => return Ok(Action::await_change()),
        Kept::Free if goes => return Ok(Action::await_change()),
        Kept::Free | Kept::Held => None,
        Kept::Forbidden(refused) => {
            Some(finalizers::forbidden(&*cluster, IN_USE_FINALIZER, in_use::FOR_WHOM, &refused))
        }
    };
    let found = dereference::dereference(&cluster, &context).await;
    let refused = validate::validate(&cluster, &found);
    // What is the cluster's goes with it; making it anew would only hold it up. While engines hold it, it works as before.
    let applied = if refused.is_none() && !cluster.spec.paused && in_use::is_kept(&*cluster) {
        match apply::apply(&cluster, &found, &context).await {
            Ok(applied) => Some(applied),
            // What it waits for is looked at all the same, and soon: who is looked at too seldom is never seen to rest.
            Err(error) if goes => {
                let (namespace, name, words) = (cluster.namespace(), cluster.name_any(), error.words());
                tracing::warn!(namespace, name, words, "not all of a cluster that goes is as it is wanted");
                None
            }
            Err(error) => return Err(error),
        }
    } else {
        None
    };
    let (status, mut findings) = status::of(&cluster, &found, refused.as_ref(), applied.as_ref());
    findings.extend(usage.blocked(&*cluster).or(forbidden));
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
        None if refused.is_none() && volumes::wait(&cluster, found.etcd.as_deref()) => LOOK_SOON,
        None => NEXT,
    };
    let next = usage.look_again(&*cluster).map_or(next, |soon| soon.min(next));
    let (is_refused, paced) =
        applied.map_or((false, None), |applied| (!applied.refused.is_empty(), applied.waits));
    let next = if is_refused { next.min(GIVEN_UP_WITHIN) } else { next };
    let next = paced.map_or(next, |paced| paced.min(next));
    Ok(Action::requeue(wait.map_or(next, |wait| wait.min(next))))
}
