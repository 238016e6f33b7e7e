//! Deletes cluster-scoped objects of clusters that no longer exist.
//!
//! Namespaced children have their cluster as owner, so Kubernetes deletes them. A role binding or an
//! admission policy has no namespace and therefore cannot have that owner. Clusters
//! have no finalizer, which would block all deletions while the operator is away. So the operator deletes such
//! objects itself: at startup, when a cluster is deleted, and once a minute for missed events.

use std::time::Duration;

use kube::ResourceExt;

use crate::framework::child::ChildKind;
use crate::framework::children;
use crate::framework::error::OperatorError;
use crate::framework::labels::CLUSTER_UID;
use crate::reconcile::context::Context;

/// Longest time between two passes. A pass only reads the stores, unless it finds an orphan.
const EVERY: Duration = Duration::from_secs(60);

/// Deletes orphans until the task is aborted: after each notification, and periodically.
pub async fn run(context: &Context) {
    loop {
        // A timeout and a notification both start a pass.
        let _ = tokio::time::timeout(EVERY, context.stores.wait_for_orphans()).await;
        while let Err(error) = once(context).await {
            let wait = context.backoff.record_failure("orphans");
            tracing::warn!(%error, ?wait, "cannot delete objects of deleted clusters; retrying");
            tokio::time::sleep(wait).await;
        }
        context.backoff.record_success("orphans");
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
