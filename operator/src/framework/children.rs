//! Applies the children of a cluster, and deletes those that are no longer desired.
//!
//! Changes of other writers to applied fields are reverted and reported
//! ([`crate::framework::field_ownership::restore`]).
//!
//! Invariants:
//! * a child that is up to date is not written;
//! * an object without the cluster's uid in its label is never changed;
//! * a rejection of one child does not affect the others. The exception are pods whose device
//!   claims have no template: they could not start, so the running ones are kept.

use std::collections::BTreeSet;
use std::time::Duration;

use kube::api::{Api, DynamicObject, PatchParams, ValidationDirective};
use kube::core::Status;
use kube::{Client, ResourceExt};
use reprise_crds::OPERATOR_FIELD_MANAGER;
use reprise_crds::status::Reason;
use tokio::time::Instant;

use crate::framework::child::{Child, ChildKind, missing_paths};
use crate::framework::error::OperatorError;
use crate::framework::events::Subject;
use crate::framework::field_ownership::conflict::{self, Part};
use crate::framework::field_ownership::restore::{self, OwnedWrite, WriteOutcome};
use crate::framework::labels::{APPLIED, CLUSTER_UID};
use crate::framework::metrics::Write;
use crate::framework::refusal::Refusal;
use crate::framework::services::Services;

/// HTTP status codes for invalid objects (by the API server or an admission policy): malformed, too large,
/// invalid fields.
const INVALID: [u16; 3] = [400, 413, 422];
/// HTTP status code for forbidden requests: by permissions, quotas or admission policies.
const FORBIDDEN: u16 = 403;
/// Cause in the API server's response if the namespace is being deleted.
const NAMESPACE_TERMINATING: &str = "NamespaceTerminating";

/// Result of applying children.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ApplyOutcome {
    /// Children that could not be applied, with the remedy.
    pub refused: Vec<Refusal>,
    /// Delay until the next paced child may be restored ([`crate::framework::field_ownership::restore`]).
    pub(crate) next_restore: Option<Duration>,
}

/// Key of a child in caches, messages and logs.
pub(crate) fn key(kind: ChildKind, namespace: Option<&str>, name: &str) -> String {
    format!("{}/{}/{name}", kind.as_str(), namespace.unwrap_or_default())
}

/// API client for a kind and namespace of children.
pub(crate) fn api(client: &Client, kind: ChildKind, namespace: Option<&str>) -> Api<DynamicObject> {
    match namespace {
        Some(namespace) => Api::namespaced_with(client.clone(), namespace, &kind.resource()),
        None => Api::all_with(client.clone(), &kind.resource()),
    }
}

/// Applies the desired children of a cluster. `others` are children that are written elsewhere, by kind and
/// name. Events about other writers are published on the cluster.
///
/// # Errors
/// The API server did not respond, or rejected a write for a transient reason.
pub async fn apply(
    context: &Services,
    cluster: &Subject,
    desired: &[Child],
    others: &[(ChildKind, String)],
) -> Result<ApplyOutcome, OperatorError> {
    let cluster_uid = cluster.reference.uid.as_deref().unwrap_or_default();
    let mut applied = ApplyOutcome::default();
    let mut refused = BTreeSet::new();
    for child in desired {
        if is_blocked(child.kind, &refused) {
            refused.insert(child.kind);
            continue;
        }
        if let Some(refusal) = apply_one(context, cluster, child).await? {
            context.metrics.record_conflict(child.kind.as_str());
            applied.refused.push(refusal);
            refused.insert(child.kind);
        }
    }
    let names = desired.iter().map(|child| (child.kind, child.name.as_str()));
    let names = names.chain(others.iter().map(|(kind, name)| (*kind, name.as_str())));
    // All children are of one cluster, so in one namespace.
    let namespace = desired.iter().find_map(|child| child.namespace.as_deref());
    let keys = names.map(|(kind, name)| key(kind, namespace.filter(|_| kind.is_namespaced()), name));
    let now = Instant::now();
    applied.next_restore = keys.filter_map(|key| context.other_writers.pacing_delay(&key, now)).min();
    applied.refused.extend(delete_unwanted(context, cluster_uid, desired, others, &refused).await?);
    Ok(applied)
}

/// Whether a child must not be applied because of earlier rejections.
fn is_blocked(kind: ChildKind, refused: &BTreeSet<ChildKind>) -> bool {
    kind == ChildKind::DaemonSet && refused.contains(&ChildKind::ResourceClaimTemplate)
}

/// Whether children that are no longer desired must be kept: the pods that were not updated refer to the
/// previous claim templates.
fn must_keep(kind: ChildKind, refused: &BTreeSet<ChildKind>) -> bool {
    kind == ChildKind::ResourceClaimTemplate && refused.contains(&ChildKind::DaemonSet)
}

/// Applies a child unless it is up to date or paced. Returns why it cannot be applied, if it cannot.
async fn apply_one(
    context: &Services,
    cluster: &Subject,
    child: &Child,
) -> Result<Option<Refusal>, OperatorError> {
    let cluster_uid = cluster.reference.uid.as_deref().unwrap_or_default();
    let namespace = child.namespace.as_deref();
    let api = api(&context.client, child.kind, namespace);
    let key = key(child.kind, namespace, &child.name);
    let live = context.children.get(child.kind, namespace, &child.name);
    // It is missing in the store if it does not exist or lacks our labels; in the latter case it is foreign.
    let unlabelled = match &live {
        Some(_) => None,
        None => match api.get_opt(&child.name).await {
            Ok(found) => found,
            Err(error) => return to_refusal(&key, error).map(Some),
        },
    };
    if let Some(refusal) =
        live.as_deref().or(unlabelled.as_ref()).and_then(|found| foreign_object(found, cluster_uid, child))
    {
        return Ok(Some(refusal));
    }
    if let Some(live) = &live
        && (live.metadata.deletion_timestamp.is_some() || is_up_to_date(context, &key, child, live))
    {
        return Ok(None);
    }
    let write = OwnedWrite {
        api: &api,
        kind: child.kind.as_str(),
        key: &key,
        name: &child.name,
        part: Part::Object,
        params: PatchParams::apply(OPERATOR_FIELD_MANAGER).validation(ValidationDirective::Strict),
        body: &child.body,
        extras: child.extras(),
        subject: cluster,
    };
    let removed = |written: &DynamicObject| {
        let live = live.as_deref().filter(|live| was_reduced(context, &key, child, (*live, written)))?;
        Some(missing_paths(live, &child.body).join(", "))
    };
    let written = match restore::apply(context, &write, removed).await {
        Ok(WriteOutcome::Written(written)) => written,
        Ok(WriteOutcome::Paced(_)) => return Ok(None),
        Err(error) => return to_refusal(&key, error).map(Some),
    };
    context.metrics.record_write(child.kind.as_str(), Write::Apply);
    tracing::info!(object = %key, "applied");
    if child.kind == ChildKind::ResourceClaimTemplate && !child.is_applied(&written) {
        // Its spec is immutable: if kept, it would still lack the fields after the API server supports them.
        delete(context, child.kind, &written).await?;
        return Ok(Some(unsupported_fields(&key)));
    }
    let version = written.resource_version().unwrap_or_default();
    context.record_applied(key, child.digest.clone(), version);
    Ok(None)
}

/// Whether another writer had removed fields that this write restored. If the API server only normalizes a
/// field differently, the stored object and its `resourceVersion` do not change.
fn was_reduced(
    context: &Services,
    key: &str,
    child: &Child,
    (live, written): (&DynamicObject, &DynamicObject),
) -> bool {
    let version = written.metadata.resource_version.as_ref();
    let was_applied = live.annotations().get(APPLIED).is_none_or(|applied| *applied == child.digest);
    let is_old = context.last_applied(key).is_some_and(|(_, known)| Some(&known) == version);
    let is_changed = version != live.metadata.resource_version.as_ref();
    was_applied && is_changed && !is_old
}

/// Converts a permanent error to a refusal; transient errors are returned.
fn to_refusal(key: &str, error: kube::Error) -> Result<Refusal, OperatorError> {
    match error {
        kube::Error::Api(status) if INVALID.contains(&status.code) => {
            let message = format!("the API server rejects {key}: {}", status.message);
            Ok(Refusal::new(Reason::InvalidSpec, message))
        }
        kube::Error::Api(status) if is_namespace_terminating(&status) => {
            let message = format!("cannot create {key}: {}", status.message);
            Ok(Refusal::new(Reason::Forbidden, message))
        }
        kube::Error::Api(status) if status.code == FORBIDDEN => {
            let message = format!(
                "the operator is not permitted to write {key}: {}. Update the chart to this version, and check quotas and admission \
                 policies of the namespace",
                status.message
            );
            Ok(Refusal::new(Reason::Forbidden, message))
        }
        error => Err(OperatorError::api(format!("apply {key}"))(error)),
    }
}

/// Without admin access, a claim of all devices would take them from other pods.
fn unsupported_fields(key: &str) -> Refusal {
    let message = format!(
        "the API server drops fields of {key}, so it is not used: enable the feature gate DRAAdminAccess, which is always enabled \
         from Kubernetes 1.36, or use another mode"
    );
    Refusal::new(Reason::Unsupported, message)
}

fn is_namespace_terminating(status: &Status) -> bool {
    let causes = status.details.iter().flat_map(|details| &details.causes);
    status.code == FORBIDDEN && causes.into_iter().any(|cause| cause.reason == NAMESPACE_TERMINATING)
}

fn is_up_to_date(context: &Services, key: &str, child: &Child, live: &DynamicObject) -> bool {
    if child.is_applied(live) {
        return true;
    }
    let known = context.last_applied(key);
    known.is_some_and(|(digest, version)| {
        digest == child.digest && live.metadata.resource_version.as_ref() == Some(&version)
    })
}

/// Returns a refusal if the existing object does not belong to the cluster.
fn foreign_object(found: &DynamicObject, cluster_uid: &str, child: &Child) -> Option<Refusal> {
    if found.labels().get(CLUSTER_UID).is_some_and(|uid| uid == cluster_uid) {
        return None;
    }
    let (kind, name) = (child.kind.as_str(), &child.name);
    let message = format!(
        "{kind} {name} exists but does not belong to this cluster: delete it, or use another name for the KVCacheCluster"
    );
    Some(Refusal::new(Reason::Conflict, message))
}

/// Deletes children that are no longer desired. Returns those that the operator is not permitted to delete.
async fn delete_unwanted(
    context: &Services,
    cluster_uid: &str,
    desired: &[Child],
    others: &[(ChildKind, String)],
    refused: &BTreeSet<ChildKind>,
) -> Result<Vec<Refusal>, OperatorError> {
    let mut undeletable = Vec::new();
    let stays: BTreeSet<(ChildKind, &str)> = desired
        .iter()
        .map(|child| (child.kind, child.name.as_str()))
        .chain(others.iter().map(|(kind, name)| (*kind, name.as_str())))
        .collect();
    for kind in ChildKind::ALL.into_iter().filter(|kind| !must_keep(*kind, refused)) {
        for child in context.children.of_cluster(kind, cluster_uid) {
            if stays.contains(&(kind, child.name_any().as_str())) {
                continue;
            }
            match delete(context, kind, &child).await {
                Err(error) if error.code() == Some(FORBIDDEN) => {
                    let key = key(kind, child.namespace().as_deref(), &child.name_any());
                    let message = format!(
                        "{key} is no longer needed, but the operator is not permitted to delete it: {}. Update the chart to this version, and \
                         check admission policies",
                        error.message()
                    );
                    undeletable.push(Refusal::new(Reason::Forbidden, message));
                }
                result => result?,
            }
        }
    }
    Ok(undeletable)
}

/// Deletes exactly this object, unless it is being deleted already.
///
/// # Errors
/// The API server did not respond, or the name now belongs to another object.
pub(crate) async fn delete(
    context: &Services,
    kind: ChildKind,
    child: &DynamicObject,
) -> Result<(), OperatorError> {
    let (name, api) = (child.name_any(), api(&context.client, kind, child.namespace().as_deref()));
    let deleted = conflict::delete(&api, child).await;
    if deleted.map_err(OperatorError::api(format!("delete {} {name}", kind.as_str())))? {
        context.metrics.record_write(kind.as_str(), Write::Delete);
        tracing::info!(kind = kind.as_str(), name, "deleted a child that is no longer needed");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keeps_pods_and_their_claim_templates_if_a_template_is_rejected() {
        use ChildKind::{DaemonSet, ResourceClaimTemplate};
        let none = BTreeSet::new();
        let without_template = BTreeSet::from([ResourceClaimTemplate]);
        // The DaemonSet then counts as rejected.
        let without_daemon_set = BTreeSet::from([ResourceClaimTemplate, DaemonSet]);
        let position = |kind| ChildKind::ALL.iter().position(|one| *one == kind);
        assert!(position(ResourceClaimTemplate) < position(DaemonSet), "templates are applied first");
        for kind in ChildKind::ALL {
            assert!(!is_blocked(kind, &none) && !must_keep(kind, &none), "{kind:?}");
            assert_eq!(is_blocked(kind, &without_template), kind == DaemonSet, "{kind:?}");
            assert_eq!(must_keep(kind, &without_daemon_set), kind == ResourceClaimTemplate, "{kind:?}");
        }
    }
}
