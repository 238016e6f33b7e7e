//! Applies the children of a cluster, and deletes those that are no longer desired.
//!
//! Changes of other writers to applied fields are reverted and reported
//! ([`crate::framework::field_ownership::restore`]).
//!
//! Invariants:
//! * a child that is up to date is not written;
//! * an object without the cluster's uid in its label is never changed;
//! * a rejection of one child does not affect the others.

use std::collections::BTreeSet;
use std::fmt::Debug;
use std::time::Duration;

use kube::api::{Api, DeleteParams, DynamicObject, PatchParams, Preconditions, ValidationDirective};
use kube::{Client, ResourceExt};
use reprise_crds::OPERATOR_FIELD_MANAGER;
use reprise_crds::status::Reason;
use serde::de::DeserializeOwned;

use crate::framework::child::{Child, ChildKind};
use crate::framework::error::{FORBIDDEN, NOT_FOUND, OperatorError};
use crate::framework::events::Subject;
use crate::framework::field_ownership::restore::{self, OwnedWrite, WriteOutcome};
use crate::framework::labels::{APPLIED, CLUSTER_UID};
use crate::framework::metrics::Write;
use crate::framework::refusal::Refusal;
use crate::framework::services::Services;

/// HTTP status codes for invalid objects (by the API server or an admission policy): malformed, too large,
/// invalid fields.
const INVALID: [u16; 3] = [400, 413, 422];

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
    for child in desired {
        let key = key(child.kind, child.namespace.as_deref(), &child.name);
        let refusal = match apply_one(context, cluster, child, &key).await {
            Ok(Applied::Done) => continue,
            Ok(Applied::Paced(wait)) => {
                applied.next_restore = applied.next_restore.into_iter().chain([wait]).min();
                continue;
            }
            Ok(Applied::Foreign(refusal)) => refusal,
            Err(error) => to_refusal(&key, error)?,
        };
        context.metrics.record_conflict(child.kind.as_str());
        applied.refused.push(refusal);
    }
    let names = desired.iter().map(|child| (child.kind, child.name.as_str()));
    let names = names.chain(others.iter().map(|(kind, name)| (*kind, name.as_str()))).collect();
    applied.refused.extend(delete_unwanted(context, cluster_uid, &names).await?);
    Ok(applied)
}

/// Result of applying one child.
enum Applied {
    /// It is up to date, or being deleted.
    Done,
    /// It is restored after this time.
    Paced(Duration),
    /// The existing object does not belong to the cluster.
    Foreign(Refusal),
}

/// Applies a child unless it is up to date or paced.
async fn apply_one(
    context: &Services,
    cluster: &Subject,
    child: &Child,
    key: &str,
) -> Result<Applied, kube::Error> {
    let namespace = child.namespace.as_deref();
    let api = api(&context.client, child.kind, namespace);
    let live = context.children.get(child.kind, namespace, &child.name);
    // It is missing in the store if it does not exist or lacks our labels; in the latter case it is foreign.
    let unlabelled = if live.is_none() { api.get_opt(&child.name).await? } else { None };
    let is_of_cluster =
        |found: &DynamicObject| found.labels().get(CLUSTER_UID) == cluster.reference.uid.as_ref();
    if live.as_deref().or(unlabelled.as_ref()).is_some_and(|found| !is_of_cluster(found)) {
        let message = format!(
            "{} {} exists but does not belong to this cluster: delete it, or use another name for the KVCacheCluster",
            child.kind.as_str(),
            child.name
        );
        return Ok(Applied::Foreign(Refusal::new(Reason::Conflict, message)));
    }
    if let Some(live) = &live
        && (live.metadata.deletion_timestamp.is_some() || is_up_to_date(context, key, child, live))
    {
        return Ok(Applied::Done);
    }
    let write = OwnedWrite {
        api: &api,
        kind: child.kind.as_str(),
        key,
        name: &child.name,
        is_status: false,
        params: PatchParams::apply(OPERATOR_FIELD_MANAGER).validation(ValidationDirective::Strict),
        body: &child.body,
        extras: child.extras(),
        subject: cluster,
    };
    let removed = |written: &DynamicObject| {
        let is_reduced =
            live.as_deref().is_some_and(|live| was_reduced(context, key, child, (live, written)));
        is_reduced.then(|| "fields".to_owned())
    };
    let written = match restore::apply(context, &write, removed).await? {
        WriteOutcome::Written(written) => written,
        WriteOutcome::Paced(wait) => return Ok(Applied::Paced(wait)),
    };
    context.metrics.record_write(child.kind.as_str(), Write::Apply);
    tracing::info!(object = key, "applied");
    let version = written.resource_version().unwrap_or_default();
    context.record_applied(key.to_owned(), child.digest.clone(), version);
    Ok(Applied::Done)
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
        kube::Error::Api(status) if status.code == FORBIDDEN => {
            let message = format!(
                "the operator is not permitted to write {key}: {}. Unless the namespace is being deleted, update the chart to this \
                 version, and check quotas and admission policies of the namespace",
                status.message
            );
            Ok(Refusal::new(Reason::Forbidden, message))
        }
        error => Err(OperatorError::api(format!("apply {key}"))(error)),
    }
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

/// Deletes children that are no longer desired. Returns those that the operator is not permitted to delete.
async fn delete_unwanted(
    context: &Services,
    cluster_uid: &str,
    desired: &BTreeSet<(ChildKind, &str)>,
) -> Result<Vec<Refusal>, OperatorError> {
    let mut refused = Vec::new();
    for kind in ChildKind::ALL {
        for child in context.children.all(kind) {
            let is_of_cluster = child.labels().get(CLUSTER_UID).is_some_and(|uid| uid == cluster_uid);
            if is_of_cluster && !desired.contains(&(kind, child.name_any().as_str())) {
                let api = api(&context.client, kind, child.namespace().as_deref());
                match delete(context, kind.as_str(), &api, &child).await {
                    Err(error) if error.code() == Some(FORBIDDEN) => {
                        let message = format!(
                            "the operator is not permitted to delete a child that is no longer needed: {}. Update the chart to \
                             this version, or delete the object by hand",
                            error.message()
                        );
                        refused.push(Refusal::new(Reason::Forbidden, message));
                    }
                    deleted => deleted?,
                }
            }
        }
    }
    Ok(refused)
}

/// Deletes exactly this object, unless it is gone or being deleted already.
///
/// # Errors
/// The API server did not respond, or the name now belongs to another object (409).
pub(crate) async fn delete<K>(
    context: &Services,
    kind: &'static str,
    api: &Api<K>,
    found: &K,
) -> Result<(), OperatorError>
where
    K: ResourceExt + Clone + DeserializeOwned + Debug,
{
    if found.meta().deletion_timestamp.is_some() {
        return Ok(());
    }
    let params = DeleteParams {
        preconditions: Some(Preconditions { uid: found.uid(), resource_version: None }),
        ..DeleteParams::background()
    };
    let name = found.name_any();
    match api.delete(&name, &params).await {
        Ok(_) => {
            context.metrics.record_write(kind, Write::Delete);
            tracing::info!(kind, name, "deleted an object that is no longer needed");
            Ok(())
        }
        Err(kube::Error::Api(status)) if status.code == NOT_FOUND => Ok(()),
        Err(error) => Err(OperatorError::api(format!("delete {kind} {name}"))(error)),
    }
}
