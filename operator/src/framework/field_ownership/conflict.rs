//! Meaning and handling of the API server's 409 answers.
//!
//! | request | cause | handling |
//! |---|---|---|
//! | apply | another field manager owns a field | reported, and the field is left; or restored, if the operator owns it exclusively ([`crate::framework::field_ownership::restore`]) |
//! | apply | another writer modified or created the object at the same moment | retried: an apply carries no resource version |
//! | delete | the name now belongs to an object with another unique id | read again: the new object may have to be deleted as well |
//!
//! Retries follow each other immediately. If the last one fails, the whole reconcile fails and backs off.

use std::fmt::Debug;

use kube::ResourceExt;
use kube::api::{Api, DeleteParams, Patch, PatchParams, Preconditions, PropagationPolicy};
use kube::core::Status;
use serde::Serialize;
use serde::de::DeserializeOwned;

/// HTTP status codes of the API server.
const CONFLICT: u16 = 409;
const NOT_FOUND: u16 = 404;

/// Reason of the cause that the API server lists for each field that another manager owns.
const FIELD_MANAGER: &str = "FieldManagerConflict";

/// Attempts that follow each other immediately.
const TRIES_MAX: usize = 3;

/// Part of an object that a request writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Part {
    /// The object without its status.
    Object,
    /// The status, by its subresource.
    Status,
}

/// Whether a deletion was carried out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DeleteOutcome {
    /// This call deleted the object.
    Deleted,
    /// The object was gone or being deleted already, or its name now belongs to an object that is kept.
    NotNeeded,
}

/// Returns whether the API server rejected an apply because other managers own fields.
pub(crate) fn is_field_conflict(status: &Status) -> bool {
    let causes = status.details.iter().flat_map(|details| &details.causes);
    status.code == CONFLICT && causes.into_iter().any(|cause| cause.reason == FIELD_MANAGER)
}

/// Applies an object or its status.
///
/// # Errors
/// The API server rejected the request, or other managers own fields ([`is_field_conflict`]).
pub(crate) async fn apply<K, P>(
    api: &Api<K>,
    name: &str,
    part: Part,
    params: &PatchParams,
    body: &P,
) -> Result<K, kube::Error>
where
    K: Clone + DeserializeOwned + Debug,
    P: Serialize + Debug,
{
    let patch = Patch::Apply(body);
    let write = async || match part {
        Part::Object => api.patch(name, params, &patch).await,
        Part::Status => api.patch_status(name, params, &patch).await,
    };
    for _ in 1..TRIES_MAX {
        match write().await {
            Err(kube::Error::Api(status)) if status.code == CONFLICT && !is_field_conflict(&status) => {}
            answer => return answer,
        }
    }
    write().await
}

/// Deletes exactly this object, unless it is being deleted already. If its name now belongs to another
/// object, deletes that one only if it is `unwanted` as well.
///
/// # Errors
/// The API server rejected the request, or the object changed on every attempt.
pub(crate) async fn delete<K>(
    api: &Api<K>,
    found: &K,
    unwanted: impl Fn(&K) -> bool,
) -> Result<DeleteOutcome, kube::Error>
where
    K: ResourceExt + Clone + DeserializeOwned + Debug,
{
    if found.meta().deletion_timestamp.is_some() {
        return Ok(DeleteOutcome::NotNeeded);
    }
    let name = found.name_any();
    let mut uid = found.uid();
    for is_last in (1..=TRIES_MAX).map(|number| number == TRIES_MAX) {
        let params = DeleteParams {
            preconditions: Some(Preconditions { uid, resource_version: None }),
            propagation_policy: Some(PropagationPolicy::Background),
            ..DeleteParams::default()
        };
        match api.delete(&name, &params).await {
            Ok(_) => return Ok(DeleteOutcome::Deleted),
            Err(kube::Error::Api(status)) if status.code == NOT_FOUND => return Ok(DeleteOutcome::NotNeeded),
            Err(kube::Error::Api(status)) if status.code == CONFLICT && !is_last => {}
            Err(error) => return Err(error),
        }
        match api.get_opt(&name).await? {
            Some(live) if live.meta().deletion_timestamp.is_none() && unwanted(&live) => uid = live.uid(),
            _ => return Ok(DeleteOutcome::NotNeeded),
        }
    }
    Ok(DeleteOutcome::NotNeeded)
}

#[cfg(test)]
mod tests;
