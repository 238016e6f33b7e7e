//! Requests to objects that other writers change or replace at the same time.
//!
//! Answers 409, except those about field managers, fail the reconcile, which is retried with backoff. An apply
//! carries no resource version, so the API server itself retries an apply that another write overtakes.

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
    /// The object was gone or being deleted already.
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
    match part {
        Part::Object => api.patch(name, params, &patch).await,
        Part::Status => api.patch_status(name, params, &patch).await,
    }
}

/// Deletes exactly this object, unless it is being deleted already.
///
/// # Errors
/// The API server rejected the request, for example because the name now belongs to another object (409).
pub(crate) async fn delete<K>(api: &Api<K>, found: &K) -> Result<DeleteOutcome, kube::Error>
where
    K: ResourceExt + Clone + DeserializeOwned + Debug,
{
    if found.meta().deletion_timestamp.is_some() {
        return Ok(DeleteOutcome::NotNeeded);
    }
    let params = DeleteParams {
        preconditions: Some(Preconditions { uid: found.uid(), resource_version: None }),
        propagation_policy: Some(PropagationPolicy::Background),
        ..DeleteParams::default()
    };
    match api.delete(&found.name_any(), &params).await {
        Ok(_) => Ok(DeleteOutcome::Deleted),
        Err(kube::Error::Api(status)) if status.code == NOT_FOUND => Ok(DeleteOutcome::NotNeeded),
        Err(error) => Err(error),
    }
}
