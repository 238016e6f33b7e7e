//! Deletes cluster-scoped objects of clusters that no longer exist.
//!
//! Namespaced children have their cluster as owner, so Kubernetes deletes them. A role binding or an admission policy
//! has no namespace and therefore cannot have that owner. Clusters have no finalizer, which would block all deletions
//! while the operator is away. So the operator deletes such objects itself.

use std::time::Duration;

use kube::ResourceExt;
use tokio::time::MissedTickBehavior;

use crate::framework::child::ChildKind;
use crate::framework::children;
use crate::framework::error::OperatorError;
use crate::framework::labels::CLUSTER_UID;
use crate::reconcile::context::Context;

/// Interval of passes. A pass only reads the stores, unless it finds an orphan.
const EVERY: Duration = Duration::from_secs(2);

/// Deletes orphans until the task is aborted.
pub async fn run(context: &Context) {
    let mut passes = tokio::time::interval(EVERY);
    passes.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        passes.tick().await;
        if let Err(error) = once(context).await {
            tracing::warn!(%error, "cannot delete objects of deleted clusters; retrying");
        }
    }
}

async fn once(context: &Context) -> Result<(), OperatorError> {
    // Bindings last: an uninstall waits until they are gone, and then nothing else would delete the remaining
    // objects.
    for kind in ChildKind::ALL.into_iter().rev().filter(|kind| !kind.is_namespaced()) {
        for child in context.children.all(kind) {
            let Some(uid) = child.labels().get(CLUSTER_UID) else { continue };
            if context.stores.cluster_by_uid(uid).is_none() {
                let api = children::api(&context.client, kind, None);
                children::delete(context, kind.as_str(), &api, &child).await?;
            }
        }
    }
    Ok(())
}
