//! Requests to objects that other writers may have replaced.
//!
//! A request that another write overtakes (409) fails the reconcile, which is retried with backoff.

use std::fmt::Debug;

use kube::ResourceExt;
use kube::api::{Api, DeleteParams, Preconditions, PropagationPolicy};
use serde::de::DeserializeOwned;

/// HTTP status code: the object does not exist.
const NOT_FOUND: u16 = 404;

/// Part of an object that a request writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Part {
    /// The object without its status.
    Object,
    /// The status, by its subresource.
    Status,
}

/// Deletes exactly this object, unless it is gone or being deleted already. Returns whether this call deleted it.
///
/// # Errors
/// The API server rejected the request, for example because the name now belongs to another object (409).
pub(crate) async fn delete<K>(api: &Api<K>, found: &K) -> Result<bool, kube::Error>
where
    K: ResourceExt + Clone + DeserializeOwned + Debug,
{
    if found.meta().deletion_timestamp.is_some() {
        return Ok(false);
    }
    let params = DeleteParams {
        preconditions: Some(Preconditions { uid: found.uid(), resource_version: None }),
        propagation_policy: Some(PropagationPolicy::Background),
        ..DeleteParams::default()
    };
    match api.delete(&found.name_any(), &params).await {
        Ok(_) => Ok(true),
        Err(kube::Error::Api(status)) if status.code == NOT_FOUND => Ok(false),
        Err(error) => Err(error),
    }
}
