//! Writes the children of a cluster: certificates first, which are made once and not built. Says what was put back of them, and which of its nodes are
//! not as it wants them.

use kube::runtime::reflector::ObjectRef;
use reprise_crds::KVCacheCluster;
use reprise_crds::cluster::EtcdMode;
use reprise_crds::status::Reason;

use super::dereference::Found;
use super::{build, certificates};
use crate::children::{self, Applied};
use crate::context::Context;
use crate::error::OperatorError;
use crate::node;
use crate::plan::Refusal;
use crate::status::tell_put_back;

/// Makes what is there what was built.
///
/// # Errors
/// The API server did not take something, for a reason that may pass.
pub async fn apply(
    cluster: &KVCacheCluster,
    found: &Found,
    context: &Context,
) -> Result<Applied, OperatorError> {
    let (drawn, kept) = match cluster.spec.etcd.mode {
        EtcdMode::Managed => {
            let drawn = certificates::ensure(cluster, context).await?;
            (Some(drawn), certificates::kept(&found.referred.names).to_vec())
        }
        EtcdMode::External => (None, Vec::new()),
    };
    let wanted = build::build(cluster, found, drawn.as_ref());
    let mut applied = children::apply(context, &found.referred.names.uid, &wanted, &kept).await?;
    for put_back in &applied.put_back {
        tell_put_back(context, cluster, put_back).await;
    }
    applied.refused.extend(nodes(found, context));
    Ok(applied)
}

/// Nodes of the cluster whose `CacheNode` another writer has made. Derived from the objects alone, so every process reports the same.
fn nodes(found: &Found, context: &Context) -> Vec<Refusal> {
    let is_left = |name: &&String| {
        let live = context.world.cache_nodes.get(&ObjectRef::new(name));
        live.is_some_and(|live| {
            live.metadata.deletion_timestamp.is_none() && node::apply::is_of_other_maker(&live)
        })
    };
    let refusal = |name: &String| Refusal::new(Reason::Conflict, node::apply::not_ours(name));
    found.plan.nodes.iter().filter(is_left).map(refusal).collect()
}
