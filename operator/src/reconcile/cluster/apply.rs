//! Applies the children of a cluster. The authority and salts come first; they are created once, not built. Without
//! the permission for their Secrets, no child is changed. Reports restored fields, and nodes whose `CacheNode` another component created.

use kube::runtime::reflector::ObjectRef;
use reprise_crds::KVCacheCluster;
use reprise_crds::status::Reason;

use super::build;
use super::dereference::ClusterInputs;
use crate::framework::child::ChildKind;
use crate::framework::children::{self, ApplyOutcome};
use crate::framework::error::{FORBIDDEN, OperatorError};
use crate::framework::events::Subject;
use crate::framework::refusal::Refusal;
use crate::reconcile::authority::{self, AuthorityState, console};
use crate::reconcile::context::Context;
use crate::reconcile::node;
use crate::reconcile::{salts, secrets};

/// Applies the built children.
///
/// # Errors
/// Returns transient API errors.
pub async fn apply(
    cluster: &KVCacheCluster,
    inputs: &mut ClusterInputs,
    context: &Context,
) -> Result<ApplyOutcome, OperatorError> {
    // Pods would wait for their certificates.
    if let AuthorityState::Unusable(refusal) = &inputs.certificates
        && refusal.reason == Reason::Forbidden
    {
        return Ok(ApplyOutcome { refused: vec![refusal.clone()], ..ApplyOutcome::default() });
    }
    if matches!(inputs.certificates, AuthorityState::Absent) {
        inputs.certificates = authority::create(cluster, context).await?;
    }
    let names = &inputs.agent_config.names;
    match write_secrets(cluster, inputs, context).await {
        Err(error) if error.code() == Some(FORBIDDEN) => {
            let refusal = secrets::refusal(names, &error.to_string());
            return Ok(ApplyOutcome { refused: vec![refusal], ..ApplyOutcome::default() });
        }
        written => written?,
    }
    let kept = [
        (ChildKind::Secret, names.authority()),
        (ChildKind::Secret, names.console()),
        // It is not built while the authority cannot be read.
        (ChildKind::ConfigMap, names.authorities()),
        (ChildKind::Secret, names.salts()),
        (ChildKind::Secret, names.keys()),
    ];
    let wanted = build::build(cluster, inputs);
    let mut applied = children::apply(context, &Subject::of(cluster), &wanted, &kept).await?;
    applied.refused.extend(nodes(inputs, context));
    Ok(applied)
}

/// Writes the Secrets that are not built, because their content is random.
async fn write_secrets(
    cluster: &KVCacheCluster,
    inputs: &ClusterInputs,
    context: &Context,
) -> Result<(), OperatorError> {
    salts::ensure(cluster, &inputs.agent_config.tenants, context).await?;
    match &inputs.certificates {
        AuthorityState::Present(authority) => console::ensure(cluster, context, authority).await,
        _ => Ok(()),
    }
}

/// Returns a refusal for each node whose `CacheNode` another component created. It depends only on the
/// objects, so all replicas report the same.
fn nodes(inputs: &ClusterInputs, context: &Context) -> Vec<Refusal> {
    let has_foreign = |name: &&String| {
        let live = context.stores.cache_nodes.get(&ObjectRef::new(name));
        live.is_some_and(|live| live.metadata.deletion_timestamp.is_none() && node::apply::is_foreign(&live))
    };
    let refusal = |name: &String| Refusal::new(Reason::Conflict, node::apply::foreign_message(name));
    inputs.assignment.nodes.iter().filter(has_foreign).map(refusal).collect()
}
