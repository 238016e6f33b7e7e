//! Writes a `CacheNode`, if it is not as it is wanted.

use k8s_openapi::api::core::v1::Node;
use kube::ResourceExt;
use kube::api::{Api, PatchParams};
use reprise_crds::{CacheNode, CacheNodeSpec, GROUP, OPERATOR_FIELD_MANAGER, VERSION};
use serde_json::{Value, json};

use super::build::Wanted;
use super::dereference::Found;
use crate::conflict::{self, Removed};
use crate::context::Context;
use crate::error::OperatorError;
use crate::metrics::Write;
use crate::names::{MANAGED_BY, OPERATOR};

/// Makes it what is wanted. The spec is ours alone: what somebody else writes there is put back.
///
/// # Errors
/// The API server did not take it.
pub async fn apply(
    node: &Node,
    found: &Found,
    wanted: Wanted,
    context: &Context,
) -> Result<(), OperatorError> {
    match (wanted, found.live.as_deref()) {
        (Wanted::Unchanged, _) | (Wanted::Nothing, None) => Ok(()),
        (Wanted::Nothing, Some(live)) => remove(live, context).await,
        (Wanted::Spec(spec), live) => {
            if live.is_some_and(|live| {
                live.metadata.deletion_timestamp.is_some() || is_as_wanted(live, node, &spec)
            }) {
                return Ok(());
            }
            write(node, &spec, context).await
        }
    }
}

fn is_as_wanted(live: &CacheNode, node: &Node, spec: &CacheNodeSpec) -> bool {
    let owned = live.owner_references().iter().any(|owner| Some(&owner.uid) == node.metadata.uid.as_ref());
    is_ours(live) && owned && in_order(live.spec.clone()) == in_order(spec.clone())
}

/// Lists that are sets may come back in another order.
fn in_order(mut spec: CacheNodeSpec) -> CacheNodeSpec {
    spec.claims.sort_by(|a, b| a.pool.cmp(&b.pool));
    for claim in &mut spec.claims {
        claim.globs.sort();
    }
    spec.profiles.sort_by(|a, b| a.name.cmp(&b.name));
    spec
}

async fn write(node: &Node, spec: &CacheNodeSpec, context: &Context) -> Result<(), OperatorError> {
    let name = node.name_any();
    let body: Value = json!({
        "apiVersion": format!("{GROUP}/{VERSION}"),
        "kind": "CacheNode",
        "metadata": {
            "name": name,
            "labels": { MANAGED_BY: OPERATOR },
            // With the node it goes.
            "ownerReferences": [{ "apiVersion": "v1", "kind": "Node", "name": name, "uid": node.metadata.uid }],
        },
        "spec": spec,
    });
    let api: Api<CacheNode> = Api::all(context.client.clone());
    let params = PatchParams::apply(OPERATOR_FIELD_MANAGER).force();
    conflict::apply(&api, &name, &params, &body)
        .await
        .map_err(OperatorError::api(format!("apply CacheNode {name}")))?;
    context.metrics.wrote("CacheNode", Write::Apply);
    let (claims, profiles) = (spec.claims.len(), spec.profiles.len());
    tracing::info!(node = name, claims, profiles, "what is wanted of the node is written");
    Ok(())
}

/// Only what we made: a CacheNode that somebody wrote by hand stays.
async fn remove(live: &CacheNode, context: &Context) -> Result<(), OperatorError> {
    if !is_ours(live) {
        return Ok(());
    }
    let api: Api<CacheNode> = Api::all(context.client.clone());
    let name = live.name_any();
    let removed = conflict::remove(&api, live, is_ours).await;
    if removed.map_err(OperatorError::api(format!("delete CacheNode {name}")))? == Removed::Now {
        context.metrics.wrote("CacheNode", Write::Delete);
        tracing::info!(node = name, "no cluster has the node any more");
    }
    Ok(())
}

/// Whether the operator has made it.
pub(super) fn is_ours(live: &CacheNode) -> bool {
    live.labels().get(MANAGED_BY).is_some_and(|by| by == OPERATOR)
}
