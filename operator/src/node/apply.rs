//! Writes a `CacheNode`, if it is not as it is wanted.
//!
//! One that somebody else has made is left: the node's agent works by it already, with devices that its author named, and to put another spec in its
//! place would let go of these. So that is said, on it and on the cluster, until it is removed. The agent goes on meanwhile, and after that with the
//! operator's. The label tells whose it is, and where that was removed, the manager of its fields. Both are in the store, so every reconciler derives it
//! from the object.

use std::time::Instant;

use k8s_openapi::api::core::v1::Node;
use kube::api::{Api, PatchParams};
use kube::{Resource, ResourceExt};
use reprise_crds::status::{ConditionType, Finding, Reason};
use reprise_crds::{CacheNode, CacheNodeSpec, GROUP, OPERATOR_FIELD_MANAGER, VERSION};
use serde_json::{Value, json};

use super::build::Wanted;
use super::dereference::Found;
use crate::conflict::{self, Part, Removed};
use crate::context::Context;
use crate::digest;
use crate::error::OperatorError;
use crate::metrics::Write;
use crate::names::{MANAGED_BY, OPERATOR};
use crate::put_back::{self, Ours, Outcome, Taken};
use crate::status::{PutBack, tell, tell_put_back};
use crate::surplus;
use crate::watch::is_by_operator;

/// By which a node is known in [`crate::put_back`].
pub(crate) fn key(node: &str) -> String {
    format!("CacheNode//{node}")
}

/// What to say of one that somebody else has made.
pub(crate) fn not_ours(node: &str) -> String {
    format!(
        "CacheNode {node} was not made by the operator, which leaves it, and the node's agent works by it: remove it (kubectl delete cachenode \
         {node}), and the operator makes its own"
    )
}

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
    let live = found.live.as_deref();
    if live.is_none_or(is_ours) {
        context.disputes.take(&key(&node.name_any()));
    }
    match (wanted, live) {
        (Wanted::Unchanged, _) | (Wanted::Nothing, None) => Ok(()),
        (Wanted::Nothing, Some(live)) => remove(live, context).await,
        (Wanted::Spec(spec) | Wanted::Queues(spec) | Wanted::Leaves(spec), None) => {
            write(node, &spec, None, context).await
        }
        (Wanted::Spec(_) | Wanted::Queues(_) | Wanted::Leaves(_), Some(live))
            if live.metadata.deletion_timestamp.is_some() =>
        {
            Ok(())
        }
        (Wanted::Spec(spec) | Wanted::Queues(spec) | Wanted::Leaves(spec), Some(live))
            if is_as_wanted(live, node, &spec) =>
        {
            Ok(())
        }
        (Wanted::Spec(_) | Wanted::Queues(_) | Wanted::Leaves(_), Some(live)) if is_of_other_maker(live) => {
            leave(live, context).await;
            Ok(())
        }
        (Wanted::Spec(spec) | Wanted::Queues(spec) | Wanted::Leaves(spec), Some(live)) => {
            write(node, &spec, Some(live), context).await
        }
    }
}

/// Whether another writer made it: it has neither our label nor fields of ours.
pub(crate) fn is_of_other_maker(live: &CacheNode) -> bool {
    let has_ours = live.managed_fields().iter().any(is_by_operator);
    !is_ours(live) && !has_ours
}

/// Leaves it to whoever made it, and says so once.
async fn leave(live: &CacheNode, context: &Context) {
    let name = live.name_any();
    if context.disputes.leave(&key(&name), &live.uid().unwrap_or_default()) {
        context.metrics.conflicted("CacheNode");
        let finding = Finding::no(ConditionType::Accepted, Reason::Conflict, not_ours(&name));
        tell(context, live, &finding).await;
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
    spec.queues.sort_by(|a, b| a.uid.cmp(&b.uid));
    for claim in &mut spec.queues {
        claim.controllers.sort_by(|a, b| a.serial.cmp(&b.serial));
    }
    spec
}

async fn write(
    node: &Node,
    spec: &CacheNodeSpec,
    live: Option<&CacheNode>,
    context: &Context,
) -> Result<(), OperatorError> {
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
    let (api, key) = (Api::<CacheNode>::all(context.client.clone()), key(&name));
    let params = PatchParams::apply(OPERATOR_FIELD_MANAGER);
    let ours = Ours { api: &api, key: &key, name: &name, part: Part::Object, params, body: &body };
    let outcome = put_back::apply(&context.disputes, &ours).await;
    let (written, taken) = match outcome.map_err(OperatorError::api(format!("apply CacheNode {name}")))? {
        Outcome::Written(written) => (written, None),
        Outcome::PutBack(written, taken) => (written, Some(taken)),
        Outcome::Waits(_) => return Ok(()),
    };
    context.metrics.wrote("CacheNode", Write::Apply);
    let without = surplus::remove(&api, &written, &body).await;
    let (written, taken) = match without.map_err(OperatorError::api(format!("trim CacheNode {name}")))? {
        None => (written, taken),
        Some((without, added)) => {
            context.metrics.wrote("CacheNode", Write::Apply);
            context.disputes.put_back(&key, Instant::now());
            (without, Some(added))
        }
    };
    let (claims, profiles, queues) = (spec.claims.len(), spec.profiles.len(), spec.queues.len());
    tracing::info!(node = name, claims, profiles, queues, "what is wanted of the node is written");
    let digest = digest::of(&json!(in_order(spec.clone())).to_string());
    let generation = written.metadata.generation.unwrap_or_default().to_string();
    let taken = taken.or_else(|| {
        let fields = removed(live?, (&digest, &generation), context.remembered(&key))?;
        let taken = Taken::removed(fields);
        context.disputes.put_back(&key, Instant::now());
        Some(taken)
    });
    context.remember(key, digest, generation);
    if let Some(taken) = taken {
        let put_back = PutBack { kind: "CacheNode", what: written.object_ref(&()), taken };
        tell_put_back(context, &written, &put_back).await;
    }
    Ok(())
}

/// What somebody has removed, if what was written now had been written before: label or fields of the spec. Generations tell the latter, and also that
/// the store is only late.
fn removed(
    live: &CacheNode,
    (digest, generation): (&str, &str),
    known: Option<(String, String)>,
) -> Option<&'static str> {
    if !is_ours(live) {
        return Some("metadata.labels");
    }
    known.filter(|known| known.0 == digest && known.1 != generation).map(|_| "fields of spec")
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
