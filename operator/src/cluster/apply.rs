//! Writes the children of a cluster: certificates first, which are made once and not built.

use reprise_crds::KVCacheCluster;
use reprise_crds::cluster::EtcdMode;

use super::dereference::Found;
use super::{build, certificates};
use crate::children::{self, Applied};
use crate::context::Context;
use crate::error::OperatorError;

/// Makes what is there what was built.
///
/// # Errors
/// The API server did not take something, for a reason that may pass.
pub async fn apply(
    cluster: &KVCacheCluster,
    found: &Found,
    context: &Context,
) -> Result<Applied, OperatorError> {
    let (digest, kept) = match cluster.spec.etcd.mode {
        EtcdMode::Managed => {
            let digest = certificates::ensure(cluster, context).await?;
            (Some(digest), certificates::kept(&found.referred.names).to_vec())
        }
        EtcdMode::External => (None, Vec::new()),
    };
    let wanted = build::build(cluster, found, digest.as_deref());
    children::apply(context, &found.referred.names.uid, &wanted, &kept).await
}
