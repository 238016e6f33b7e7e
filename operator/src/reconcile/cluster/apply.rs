//! Applies the children of a cluster. The authority and salts come first; they are created once, not built. Without
//! the permission for their Secrets, or with a foreign Secret in place of the salts, no child is changed. Reports restored
//! fields, and nodes whose `CacheNode` another component created.

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
    let refused = |refusal| Ok(ApplyOutcome { refused: vec![refusal], ..ApplyOutcome::default() });
    // Pods would wait for their certificates.
    if let AuthorityState::Unusable(refusal) = &inputs.certificates
        && refusal.reason == Reason::Forbidden
    {
        return refused(refusal.clone());
    }
    let of_console = match write_secrets(cluster, inputs, context).await {
        Err(error) if error.code() == Some(FORBIDDEN) => {
            return refused(secrets::refusal(&inputs.agent_config.names, &error.to_string()));
        }
        Ok(SecretRefusals { salts: Some(refusal), .. }) => return refused(refusal),
        written => written?.console,
    };
    let names = &inputs.agent_config.names;
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
    applied.refused.extend(of_console.into_iter().chain(nodes(inputs, context)));
    Ok(applied)
}

/// Why Secrets with random content cannot be written.
#[derive(Debug)]
struct SecretRefusals {
    /// Agents cannot have their salts.
    salts: Option<Refusal>,
    /// Scrapers have no certificate. The children may be applied.
    console: Option<Refusal>,
}

/// Writes the Secrets that are not built, because their content is random.
async fn write_secrets(
    cluster: &KVCacheCluster,
    inputs: &mut ClusterInputs,
    context: &Context,
) -> Result<SecretRefusals, OperatorError> {
    if matches!(inputs.certificates, AuthorityState::Absent) {
        inputs.certificates = authority::create(cluster, context).await?;
    }
    let salts = salts::ensure(cluster, &inputs.agent_config.tenants, context).await?;
    let console = match &inputs.certificates {
        AuthorityState::Present(authority) => console::ensure(cluster, context, authority).await?,
        _ => None,
    };
    Ok(SecretRefusals { salts, console })
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
