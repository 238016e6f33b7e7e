//! Applies a `CacheNode` if it differs from the desired state.
//!
//! A `CacheNode` that another component created is not changed. The node's agent already uses it, with
//! devices that its author listed; another spec would release them. The cluster reports the conflict until
//! it is deleted. The agent continues meanwhile, and afterwards uses the operator's `CacheNode`. The label
//! identifies the operator's objects; if it was removed, the field manager does. Both are in the store, so
//! all reconcilers agree.

use std::fmt::Debug;
use std::time::Duration;

use k8s_openapi::api::core::v1::Node;
use kube::api::{Api, PatchParams};
use kube::{Resource, ResourceExt};
use reprise_crds::{CacheNode, CacheNodeSpec, GROUP, OPERATOR_FIELD_MANAGER, VERSION};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use crate::framework::change::is_by_operator;
use crate::framework::children;
use crate::framework::digest;
use crate::framework::error::OperatorError;
use crate::framework::events::{Subject, kind_of};
use crate::framework::field_ownership::restore::{self, Extras, OwnedWrite, WriteOutcome};
use crate::framework::labels::{MANAGED_BY, OPERATOR};
use crate::framework::metrics::Write;
use crate::framework::status;
use crate::reconcile::context::Context;

/// Message about a `CacheNode` that another component created.
pub(crate) fn foreign_message(node: &str) -> String {
    format!(
        "CacheNode {node} was created by another component. The node's agent uses it, so the operator does not change it: \
         delete it (kubectl delete cachenode {node}), and the operator creates its own"
    )
}

/// Applies the desired spec, or deletes the `CacheNode` of a node that should have no agent. Changes by other writers are
/// reverted. Returns the delay if restoring it is paced.
///
/// # Errors
/// The API server rejected the write.
pub async fn apply(
    node: &Node,
    live: Option<&CacheNode>,
    spec: Option<&CacheNodeSpec>,
    context: &Context,
) -> Result<Option<Duration>, OperatorError> {
    if live.is_some_and(|live| is_foreign(live) || live.metadata.deletion_timestamp.is_some()) {
        return Ok(None);
    }
    match (live, spec) {
        (_, Some(spec)) => write(node, spec, live, context).await,
        (Some(live), None) => {
            let api: Api<CacheNode> = Api::all(context.client.clone());
            children::delete(context, "CacheNode", &api, live).await?;
            Ok(None)
        }
        (None, None) => Ok(None),
    }
}

/// Whether another component created it: it has neither our label nor fields managed by the operator.
pub(crate) fn is_foreign(live: &CacheNode) -> bool {
    !is_labelled(live) && !live.managed_fields().iter().any(is_by_operator)
}

fn is_labelled(live: &CacheNode) -> bool {
    live.labels().get(MANAGED_BY).is_some_and(|by| by == OPERATOR)
}

/// Text that changes with the object and its spec.
fn version(of: &CacheNode) -> String {
    format!("{:?} {:?}", of.metadata.uid, of.metadata.generation)
}

async fn write(
    node: &Node,
    spec: &CacheNodeSpec,
    live: Option<&CacheNode>,
    context: &Context,
) -> Result<Option<Duration>, OperatorError> {
    let name = node.name_any();
    let (key, digest) = (format!("CacheNode//{name}"), digest::of(&json!(spec).to_string()));
    // Version after the last write of this spec. The API server may store lists in another order.
    let applied = context.last_applied(&key).filter(|(applied, _)| *applied == digest);
    let applied = applied.map(|(_, version)| version);
    let is_up_to_date = |live: &CacheNode| {
        let mut owners = live.owner_references().iter();
        is_labelled(live)
            && owners.any(|owner| Some(&owner.uid) == node.metadata.uid.as_ref())
            && (live.spec == *spec || applied == Some(version(live)))
    };
    if live.is_some_and(is_up_to_date) {
        return Ok(None);
    }
    let body = json!({
        "apiVersion": format!("{GROUP}/{VERSION}"),
        "kind": "CacheNode",
        "metadata": {
            "name": name,
            "labels": { MANAGED_BY: OPERATOR },
            // The garbage collector deletes it together with the node.
            "ownerReferences": [{ "apiVersion": "v1", "kind": "Node", "name": name, "uid": node.metadata.uid }],
        },
        "spec": spec,
    });
    let removed = |written: &CacheNode| {
        // With an equal version, the store only lags behind the last write.
        let is_reduced = applied.is_some_and(|applied| applied != version(written));
        let fields =
            if is_labelled(live?) { is_reduced.then_some("fields of spec") } else { Some("metadata.labels") };
        fields.map(str::to_owned)
    };
    let owned = OwnedWrite {
        api: &Api::<CacheNode>::all(context.client.clone()),
        kind: "CacheNode",
        key: &key,
        name: &name,
        is_status: false,
        params: PatchParams::apply(OPERATOR_FIELD_MANAGER),
        body: &body,
        extras: Extras::Removed,
        // Only an existing object has other writers.
        subject: &live.map_or_else(|| Subject::of(node), Subject::of),
    };
    let outcome = restore::apply(context, &owned, removed).await;
    let written = match outcome.map_err(OperatorError::api(format!("apply CacheNode {name}")))? {
        WriteOutcome::Written(written) => written,
        WriteOutcome::Paced(wait) => return Ok(Some(wait)),
    };
    context.metrics.record_write("CacheNode", Write::Apply);
    let (claims, profiles, queues) = (spec.claims.len(), spec.profiles.len(), spec.queues.len());
    tracing::info!(node = name, claims, profiles, queues, "applied CacheNode");
    context.record_applied(key, digest, version(&written));
    Ok(None)
}

/// Writes the operator's only condition of a node or `CacheNode`, or removes it. Returns whether it was written: it is
/// not while restoring it is paced, or if the object was deleted concurrently.
///
/// # Errors
/// The API server rejected the write.
pub(super) async fn write_condition<K>(
    object: &K,
    condition: Option<&impl Serialize>,
    context: &Context,
) -> Result<bool, OperatorError>
where
    K: Resource<DynamicType = ()> + Clone + Debug + DeserializeOwned + Serialize,
{
    let (kind, name) = (kind_of::<K>(), object.name_any());
    let mut body: Value =
        json!({ "apiVersion": K::api_version(&()), "kind": kind, "metadata": { "name": name } });
    // A condition that is not applied again is removed.
    if let Some(condition) = condition {
        body["status"] = json!({ "conditions": [condition] });
    }
    let api: Api<K> = Api::all(context.client.clone());
    match status::apply(context, object, &api, &body).await {
        Ok(None) => {
            context.metrics.record_write(kind, Write::Status);
            Ok(true)
        }
        Ok(Some(_)) => Ok(false),
        Err(kube::Error::Api(status)) if status.is_not_found() => Ok(false),
        Err(error) => Err(OperatorError::api(format!("write a condition of {kind} {name}"))(error)),
    }
}
