//! Applies a `CacheNode` if it differs from the desired state.
//!
//! A `CacheNode` that another component created is not changed. The node's agent already uses it, with
//! devices that its author listed; another spec would release them. The conflict is reported on it and on the
//! cluster until it is deleted. The agent continues meanwhile, and afterwards uses the operator's
//! `CacheNode`. The label identifies the operator's objects; if it was removed, the field manager does. Both
//! are in the store, so all reconcilers agree.

use k8s_openapi::api::core::v1::Node;
use kube::ResourceExt;
use kube::api::{Api, PatchParams};
use reprise_crds::status::{ConditionStatus, ConditionType, Finding, Reason, find};
use reprise_crds::{CacheNode, CacheNodeSpec, GROUP, OPERATOR_FIELD_MANAGER, VERSION};
use serde_json::{Value, json};

use super::build::DesiredCacheNode;
use super::dereference::NodeInputs;
use crate::framework::change::is_by_operator;
use crate::framework::children;
use crate::framework::digest;
use crate::framework::error::OperatorError;
use crate::framework::events::Subject;
use crate::framework::field_ownership::restore::{self, Extras, OwnedWrite, WriteOutcome};
use crate::framework::labels::{MANAGED_BY, OPERATOR};
use crate::framework::metrics::Write;
use crate::framework::status::publish_event;
use crate::reconcile::context::Context;

/// Key of a node in [`crate::framework::field_ownership::restore`].
pub(crate) fn key(node: &str) -> String {
    format!("CacheNode//{node}")
}

/// Message about a `CacheNode` that another component created.
pub(crate) fn foreign_message(node: &str) -> String {
    format!(
        "CacheNode {node} was created by another component. The node's agent uses it, so the operator does not change it: \
         delete it (kubectl delete cachenode {node}), and the operator creates its own"
    )
}

/// Applies the desired state. The spec belongs to the operator alone: changes by other writers are reverted.
///
/// # Errors
/// The API server rejected the write.
pub async fn apply(
    node: &Node,
    inputs: &NodeInputs,
    desired: DesiredCacheNode,
    context: &Context,
) -> Result<(), OperatorError> {
    let live = inputs.live.as_deref();
    if live.is_none_or(is_ours) {
        context.other_writers.record_report(&key(&node.name_any()), None);
    }
    let spec = match desired {
        DesiredCacheNode::Unchanged => return Ok(()),
        DesiredCacheNode::Absent => {
            return match live {
                Some(live) => delete(live, context).await,
                None => Ok(()),
            };
        }
        DesiredCacheNode::Spec(spec) | DesiredCacheNode::Releasing(spec) => spec,
    };
    match live {
        Some(live) if live.metadata.deletion_timestamp.is_some() || is_up_to_date(live, node, &spec) => {
            Ok(())
        }
        Some(live) if is_foreign(live) => {
            report_foreign(live, context).await;
            Ok(())
        }
        _ => write(node, &spec, live, context).await,
    }
}

/// Whether another component created it: it has neither our label nor fields managed by the operator.
pub(crate) fn is_foreign(live: &CacheNode) -> bool {
    let has_ours = live.managed_fields().iter().any(is_by_operator);
    !is_ours(live) && !has_ours
}

/// Reports a foreign `CacheNode` once.
async fn report_foreign(live: &CacheNode, context: &Context) {
    let name = live.name_any();
    if context.other_writers.record_report(&key(&name), live.uid()) {
        context.metrics.record_conflict("CacheNode");
        let finding = Finding::no(ConditionType::Accepted, Reason::Conflict, foreign_message(&name));
        publish_event(context, live, &finding).await;
    }
}

/// Publishes a new condition `StatusContested` of an agent (other writers of the status) as an event and counts it:
/// agents have no permission to create events. After a restart of the operator it is published once more.
pub(super) async fn report_contested_status(node: &Node, live: Option<&CacheNode>, context: &Context) {
    let condition = live.and_then(|live| {
        let contested = find(&live.status.as_ref()?.conditions, ConditionType::StatusContested)?;
        (contested.status == ConditionStatus::True).then_some(contested)
    });
    let text =
        condition.map(|condition| format!("{:?} {}", condition.last_transition_time, condition.message));
    let is_new = context.other_writers.record_report(&node.name_any(), text);
    if let (true, Some(live), Some(condition)) = (is_new, live, condition) {
        context.metrics.record_restore("CacheNode");
        let finding = Finding::yes(ConditionType::StatusContested, Reason::FieldConflict, &condition.message);
        publish_event(context, live, &finding).await;
    }
}

fn is_up_to_date(live: &CacheNode, node: &Node, spec: &CacheNodeSpec) -> bool {
    let owned = live.owner_references().iter().any(|owner| Some(&owner.uid) == node.metadata.uid.as_ref());
    is_ours(live) && owned && normalized(live.spec.clone()) == normalized(spec.clone())
}

/// Sorts lists that are sets, whose order may differ in the stored object.
fn normalized(mut spec: CacheNodeSpec) -> CacheNodeSpec {
    spec.claims.sort_by(|a, b| a.pool.cmp(&b.pool));
    for claim in &mut spec.claims {
        claim.globs.sort();
        claim.serials.sort();
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
            // The garbage collector deletes it together with the node.
            "ownerReferences": [{ "apiVersion": "v1", "kind": "Node", "name": name, "uid": node.metadata.uid }],
        },
        "spec": spec,
    });
    let (api, key) = (Api::<CacheNode>::all(context.client.clone()), key(&name));
    let params = PatchParams::apply(OPERATOR_FIELD_MANAGER);
    let digest = digest::of(&json!(normalized(spec.clone())).to_string());
    let known = context.last_applied(&key);
    let removed = |written: &CacheNode| {
        let generation = written.metadata.generation.unwrap_or_default().to_string();
        removed_fields(live?, (&digest, &generation), known).map(str::to_owned)
    };
    // Only an existing object has other writers.
    let subject = live.map_or_else(|| Subject::of(node), Subject::of);
    let ours = OwnedWrite {
        api: &api,
        kind: "CacheNode",
        key: &key,
        name: &name,
        is_status: false,
        params,
        body: &body,
        extras: Extras::Removed,
        subject: &subject,
    };
    let outcome = restore::apply(context, &ours, removed).await;
    let written = match outcome.map_err(OperatorError::api(format!("apply CacheNode {name}")))? {
        WriteOutcome::Written(written) => written,
        WriteOutcome::Paced(_) => return Ok(()),
    };
    context.metrics.record_write("CacheNode", Write::Apply);
    let (claims, profiles, queues) = (spec.claims.len(), spec.profiles.len(), spec.queues.len());
    tracing::info!(node = name, claims, profiles, queues, "applied CacheNode");
    let generation = written.metadata.generation.unwrap_or_default().to_string();
    context.record_applied(key, digest, generation);
    Ok(())
}

/// Returns what another writer removed: the label, or fields of the spec. The latter is detected if the same
/// content was applied before at an older generation; an equal generation only means that the store lags.
fn removed_fields(
    live: &CacheNode,
    (digest, generation): (&str, &str),
    known: Option<(String, String)>,
) -> Option<&'static str> {
    if !is_ours(live) {
        return Some("metadata.labels");
    }
    known.filter(|known| known.0 == digest && known.1 != generation).map(|_| "fields of spec")
}

/// Deletes a `CacheNode` that the operator created; others are kept.
async fn delete(live: &CacheNode, context: &Context) -> Result<(), OperatorError> {
    if !is_ours(live) {
        return Ok(());
    }
    let api: Api<CacheNode> = Api::all(context.client.clone());
    children::delete(context, "CacheNode", &api, live).await
}

/// Whether it has the operator's label.
pub(super) fn is_ours(live: &CacheNode) -> bool {
    live.labels().get(MANAGED_BY).is_some_and(|by| by == OPERATOR)
}
