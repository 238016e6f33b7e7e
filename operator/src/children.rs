//! Writes children, and removes what was a child and is wanted no more.
//!
//! What is ours alone is put back when somebody else has written it, and said ([`crate::put_back`]).
//!
//! Invariants: a child that is there as it is wanted is not written; what does not carry the cluster's unique id is never touched;
//! a conflict or a refusal of one child keeps none of the others from being written, but for pods whose claims have no template: they would
//! wait for it, so those that run go on as they are.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use kube::api::{Api, DynamicObject, PatchParams, ValidationDirective};
use kube::core::Status;
use kube::{Client, Resource, ResourceExt};
use reprise_crds::OPERATOR_FIELD_MANAGER;
use reprise_crds::status::Reason;

use crate::child::{Child, ChildKind, Ownership, missing};
use crate::conflict::{self, Part, Removed};
use crate::context::Context;
use crate::error::OperatorError;
use crate::metrics::Write;
use crate::names::{APPLIED, CLUSTER_UID};
use crate::plan::Refusal;
use crate::put_back::{self, Ours, Outcome, Taken};
use crate::status::PutBack;
use crate::surplus;

/// HTTP's codes for what is not valid, to the API server or to a policy of somebody: as it is, too large, by its fields.
const INVALID: [u16; 3] = [400, 413, 422];
/// HTTP's code for what one may not do: by rights, quotas, or policies of somebody.
const FORBIDDEN: u16 = 403;
/// The API server's word for a namespace that goes.
const NAMESPACE_GOES: &str = "NamespaceTerminating";

/// What came of writing children.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Applied {
    /// What could not be written, and who could do something about it.
    pub refused: Vec<Refusal>,
    /// What somebody else had written, and is again as it was.
    pub(crate) put_back: Vec<PutBack>,
    /// When the next child that is paced may be put back ([`crate::put_back`]).
    pub(crate) waits: Option<Duration>,
}

/// What came of one child.
enum One {
    /// It is as it is wanted, or will be at its turn.
    Done,
    /// It is so again.
    PutBack(PutBack),
    /// It is not.
    Refused(Refusal),
}

/// By which a child is known here and in words.
pub(crate) fn key(kind: ChildKind, namespace: Option<&str>, name: &str) -> String {
    format!("{}/{}/{name}", kind.as_str(), namespace.unwrap_or_default())
}

/// Objects of a child's kind and namespace.
pub(crate) fn api(client: &Client, kind: ChildKind, namespace: Option<&str>) -> Api<DynamicObject> {
    match namespace {
        Some(namespace) => Api::namespaced_with(client.clone(), namespace, &kind.resource()),
        None => Api::all_with(client.clone(), &kind.resource()),
    }
}

/// Makes the children of a cluster those that are wanted. `kept` are children that are written elsewhere, by kind and name.
///
/// # Errors
/// The API server did not answer, or refused for a reason that may pass.
pub async fn apply(
    context: &Context,
    cluster_uid: &str,
    wanted: &[Child],
    kept: &[(ChildKind, String)],
) -> Result<Applied, OperatorError> {
    let mut applied = Applied::default();
    let mut refused = BTreeSet::new();
    for child in wanted {
        if waits(child.kind, &refused) {
            refused.insert(child.kind);
            continue;
        }
        match apply_one(context, cluster_uid, child).await? {
            One::Done => {}
            One::PutBack(put_back) => applied.put_back.push(put_back),
            One::Refused(refusal) => {
                context.metrics.conflicted(child.kind.as_str());
                applied.refused.push(refusal);
                refused.insert(child.kind);
            }
        }
    }
    let names = wanted.iter().map(|child| (child.kind, child.name.as_str()));
    let names = names.chain(kept.iter().map(|(kind, name)| (*kind, name.as_str())));
    // Of one cluster, so in one namespace.
    let namespace = wanted.iter().find_map(|child| child.namespace.as_deref());
    let keys = names.map(|(kind, name)| key(kind, namespace.filter(|_| kind.is_namespaced()), name));
    let now = Instant::now();
    applied.waits = keys.filter_map(|key| context.disputes.waits(&key, now)).min();
    applied.refused.extend(remove_unwanted(context, cluster_uid, wanted, kept, &refused).await?);
    Ok(applied)
}

/// Whether a child is left as it is because of those that were refused before.
fn waits(kind: ChildKind, refused: &BTreeSet<ChildKind>) -> bool {
    kind == ChildKind::DaemonSet && refused.contains(&ChildKind::ResourceClaimTemplate)
}

/// Whether children that are wanted no more stay all the same: pods that were not written name the claims of before.
fn stay(kind: ChildKind, refused: &BTreeSet<ChildKind>) -> bool {
    kind == ChildKind::ResourceClaimTemplate && refused.contains(&ChildKind::DaemonSet)
}

/// Writes a child unless it is there as it is wanted.
async fn apply_one(context: &Context, cluster_uid: &str, child: &Child) -> Result<One, OperatorError> {
    let namespace = child.namespace.as_deref();
    let api = api(&context.client, child.kind, namespace);
    let key = key(child.kind, namespace, &child.name);
    let live = context.world.child(child.kind, namespace, &child.name);
    match &live {
        Some(live) => {
            if let Some(refusal) = of_somebody_else(live, cluster_uid, child) {
                return Ok(One::Refused(refusal));
            }
            if live.metadata.deletion_timestamp.is_some() || is_as_wanted(context, &key, child, live) {
                return Ok(One::Done);
            }
        }
        // Either it is not there, or it is without our labels: then it is not ours to write.
        None => {
            let found = match api.get_opt(&child.name).await {
                Ok(found) => found,
                Err(error) => return refused(&key, error).map(One::Refused),
            };
            if let Some(refusal) = found.and_then(|found| of_somebody_else(&found, cluster_uid, child)) {
                return Ok(One::Refused(refusal));
            }
        }
    }
    let (written, taken) = match write(context, &api, &key, child).await {
        Ok(Outcome::Written(written)) => (written, None),
        Ok(Outcome::PutBack(written, taken)) => (written, Some(taken)),
        Ok(Outcome::Waits(_)) => return Ok(One::Done),
        Err(error) => return refused(&key, error).map(One::Refused),
    };
    context.metrics.wrote(child.kind.as_str(), Write::Apply);
    tracing::info!(object = %key, "written");
    let (written, taken) = match without_surplus(&api, child, &written).await {
        Ok(None) => (written, taken),
        Ok(Some((without, added))) => {
            context.metrics.wrote(child.kind.as_str(), Write::Apply);
            context.disputes.put_back(&key, Instant::now());
            (without, Some(added))
        }
        Err(error) => return refused(&key, error).map(One::Refused),
    };
    if child.kind == ChildKind::ResourceClaimTemplate && !child.is_held_by(&written) {
        // Its spec cannot be changed: left there, it would be in the way once the server keeps all of it.
        remove(context, child.kind, &written).await?;
        return Ok(One::Refused(not_kept(&key)));
    }
    let taken = taken.or_else(|| {
        let live = live.as_deref().filter(|live| had_less(context, &key, child, (*live, &written)))?;
        let taken = Taken::removed(&missing(live, &child.body).join(", "));
        context.disputes.put_back(&key, Instant::now());
        Some(taken)
    });
    let version = written.resource_version().unwrap_or_default();
    context.remember(key, child.digest.clone(), version);
    let what = written.object_ref(&child.kind.resource());
    Ok(taken.map_or(One::Done, |taken| One::PutBack(PutBack { kind: child.kind.as_str(), what, taken })))
}

/// Applies a child: what is ours alone also over what somebody else has written.
async fn write(
    context: &Context,
    api: &Api<DynamicObject>,
    key: &str,
    child: &Child,
) -> Result<Outcome<DynamicObject>, kube::Error> {
    let (name, part) = (child.name.as_str(), Part::Object);
    let params = PatchParams::apply(OPERATOR_FIELD_MANAGER).validation(ValidationDirective::Strict);
    match child.ownership {
        Ownership::OursAlone => {
            let ours = Ours { api, key, name, part, params, body: &child.body };
            put_back::apply(&context.disputes, &ours).await
        }
        Ownership::Shared => {
            conflict::apply(api, name, part, &params, &child.body).await.map(Outcome::Written)
        }
    }
}

/// Takes away what others have added to a child that is ours alone.
async fn without_surplus(
    api: &Api<DynamicObject>,
    child: &Child,
    written: &DynamicObject,
) -> Result<Option<(DynamicObject, Taken)>, kube::Error> {
    if child.is_closed() { surplus::remove(api, written, &child.body).await } else { Ok(None) }
}

/// Whether fields of a child were gone that had been applied, and came back now. What the API server only writes in another way changes nothing of
/// what is stored, so it gets no version.
fn had_less(
    context: &Context,
    key: &str,
    child: &Child,
    (live, written): (&DynamicObject, &DynamicObject),
) -> bool {
    let version = written.metadata.resource_version.as_ref();
    let was_applied = live.annotations().get(APPLIED).is_none_or(|applied| *applied == child.digest);
    let is_old = context.remembered(key).is_some_and(|(_, known)| Some(&known) == version);
    let is_changed = version != live.metadata.resource_version.as_ref();
    child.ownership == Ownership::OursAlone && was_applied && is_changed && !is_old
}

/// What stands in the way of a child for good; what may pass is an error.
fn refused(key: &str, error: kube::Error) -> Result<Refusal, OperatorError> {
    match error {
        kube::Error::Api(status) if conflict::is_of_fields(&status) => {
            Ok(field_conflict(key, &status.message))
        }
        kube::Error::Api(status) if INVALID.contains(&status.code) => {
            let message = format!("the API server refuses {key}: {}", status.message);
            Ok(Refusal::new(Reason::InvalidSpec, message))
        }
        kube::Error::Api(status) if is_of_a_namespace_that_goes(&status) => {
            let message = format!("{key} cannot be made: {}", status.message);
            Ok(Refusal::new(Reason::Forbidden, message))
        }
        kube::Error::Api(status) if status.code == FORBIDDEN => {
            let message = format!(
                "the operator may not write {key}, which is left as it is: {}. Look at the rights of this version's chart, and at quotas and \
                 admission policies of the namespace",
                status.message
            );
            Ok(Refusal::new(Reason::Forbidden, message))
        }
        error => Err(OperatorError::api(format!("apply {key}"))(error)),
    }
}

/// Without admin access a claim of all devices would take them from whoever else wants them.
fn not_kept(key: &str) -> Refusal {
    let message = format!(
        "the API server drops fields of {key}, so no pod is given it: switch its feature gate DRAAdminAccess on, which Kubernetes has \
         always on from 1.36, or use another mode"
    );
    Refusal::new(Reason::Unsupported, message)
}

fn is_of_a_namespace_that_goes(status: &Status) -> bool {
    let causes = status.details.iter().flat_map(|details| &details.causes);
    status.code == FORBIDDEN && causes.into_iter().any(|cause| cause.reason == NAMESPACE_GOES)
}

fn is_as_wanted(context: &Context, key: &str, child: &Child, live: &DynamicObject) -> bool {
    if child.is_held_by(live) {
        return true;
    }
    let known = context.remembered(key);
    known.is_some_and(|(digest, version)| {
        digest == child.digest && live.metadata.resource_version.as_ref() == Some(&version)
    })
}

/// Why an object of the wanted name cannot be taken.
fn of_somebody_else(found: &DynamicObject, cluster_uid: &str, child: &Child) -> Option<Refusal> {
    if found.labels().get(CLUSTER_UID).is_some_and(|uid| uid == cluster_uid) {
        return None;
    }
    let (kind, name) = (child.kind.as_str(), &child.name);
    let message = format!(
        "{kind} {name} is there and does not belong to this cluster: remove it, or use another name for the KVCacheCluster"
    );
    Some(Refusal::new(Reason::Conflict, message))
}

/// The server's message names managers and fields.
fn field_conflict(key: &str, said: &str) -> Refusal {
    let said = said.split_whitespace().collect::<Vec<_>>().join(" ");
    let message = format!(
        "somebody else owns fields of {key}, which is left as it is until they are given up (kubectl apply --server-side without these \
         fields, by the manager that is named): {said}"
    );
    Refusal::new(Reason::FieldConflict, message)
}

/// What may not be removed.
async fn remove_unwanted(
    context: &Context,
    cluster_uid: &str,
    wanted: &[Child],
    kept: &[(ChildKind, String)],
    refused: &BTreeSet<ChildKind>,
) -> Result<Vec<Refusal>, OperatorError> {
    let mut left = Vec::new();
    let stays: BTreeSet<(ChildKind, &str)> = wanted
        .iter()
        .map(|child| (child.kind, child.name.as_str()))
        .chain(kept.iter().map(|(kind, name)| (*kind, name.as_str())))
        .collect();
    for kind in ChildKind::ALL.into_iter().filter(|kind| !stay(*kind, refused)) {
        for child in context.world.children_of(kind, cluster_uid) {
            if stays.contains(&(kind, child.name_any().as_str())) {
                continue;
            }
            match remove(context, kind, &child).await {
                Err(error) if error.code() == Some(FORBIDDEN) => {
                    let key = key(kind, child.namespace().as_deref(), &child.name_any());
                    let message = format!(
                        "{key} is wanted no more, and the operator may not remove it: {}. Look at the rights of this version's chart, and at \
                         admission policies",
                        error.words()
                    );
                    left.push(Refusal::new(Reason::Forbidden, message));
                }
                removed => removed?,
            }
        }
    }
    Ok(left)
}

/// Deletes this object, unless it goes already, or what has its name by now if that is of the same cluster.
///
/// # Errors
/// The API server did not answer.
pub(crate) async fn remove(
    context: &Context,
    kind: ChildKind,
    child: &DynamicObject,
) -> Result<(), OperatorError> {
    let (name, of) = (child.name_any(), child.labels().get(CLUSTER_UID));
    let is_theirs = |live: &DynamicObject| of.is_some() && live.labels().get(CLUSTER_UID) == of;
    let api = api(&context.client, kind, child.namespace().as_deref());
    match conflict::remove(&api, child, is_theirs).await {
        Ok(Removed::Now) => {
            context.metrics.wrote(kind.as_str(), Write::Delete);
            tracing::info!(kind = kind.as_str(), name, "removed, since it is wanted no more");
            Ok(())
        }
        Ok(Removed::Already) => Ok(()),
        Err(error) => Err(OperatorError::api(format!("delete {} {name}", kind.as_str()))(error)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pods_whose_claims_have_no_template_are_left_as_they_are_with_the_claims_that_they_have() {
        use ChildKind::{DaemonSet, ResourceClaimTemplate};
        let none = BTreeSet::new();
        let without_template = BTreeSet::from([ResourceClaimTemplate]);
        // As they are written: the DaemonSet counts as refused then.
        let without_pods = BTreeSet::from([ResourceClaimTemplate, DaemonSet]);
        let position = |kind| ChildKind::ALL.iter().position(|one| *one == kind);
        assert!(position(ResourceClaimTemplate) < position(DaemonSet), "templates are written first");
        for kind in ChildKind::ALL {
            assert!(!waits(kind, &none) && !stay(kind, &none), "{kind:?}");
            assert_eq!(waits(kind, &without_template), kind == DaemonSet, "{kind:?}");
            assert_eq!(stay(kind, &without_pods), kind == ResourceClaimTemplate, "{kind:?}");
        }
    }
}
