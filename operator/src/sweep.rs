//! Removes what belonged to a cluster that is gone.
//!
//! What lies in a cluster's namespace has the cluster as its owner, and Kubernetes removes it. A binding of rights or an admission policy has
//! no namespace and so cannot have that owner. A finalizer on every cluster would hold them all while the operator is away (only those that engines use
//! have one), so it is removed here: at the start, whenever a cluster goes, and once a minute, for what no event tells of.

use std::time::Duration;

use kube::ResourceExt;

use crate::child::ChildKind;
use crate::children;
use crate::context::Context;
use crate::error::OperatorError;
use crate::names::CLUSTER_UID;

/// Time between two sweeps, at the most. One looks at stores only, unless it finds something.
const EVERY: Duration = Duration::from_secs(60);

/// Sweeps for ever, whenever something may have been orphaned and from time to time.
pub async fn run(context: &Context) {
    loop {
        // Ends either way: then it is time.
        let _ = tokio::time::timeout(EVERY, context.world.until_orphaned()).await;
        while let Err(error) = once(context).await {
            let wait = context.backoff.failed("sweep");
            tracing::warn!(%error, ?wait, "what belongs to no cluster could not be removed");
            tokio::time::sleep(wait).await;
        }
        context.backoff.succeeded("sweep");
    }
}

async fn once(context: &Context) -> Result<(), OperatorError> {
    // Rights last: an uninstall waits until they are gone, and nobody removes anything afterwards.
    for kind in ChildKind::ALL.into_iter().rev().filter(|kind| !kind.is_namespaced()) {
        for child in context.world.children(kind) {
            let Some(uid) = child.labels().get(CLUSTER_UID) else { continue };
            if context.world.cluster_of_uid(uid).is_none() {
                children::remove(context, kind, &child).await?;
            }
        }
    }
    Ok(())
}
