//! What the API server's 409 means, and what is done about it.
//!
//! | of | cause | done |
//! |---|---|---|
//! | an apply | another manager owns a field, and said so | reported to who may give it up, and left; or put back, if it is ours alone ([`crate::put_back`]) |
//! | an apply | somebody else has written or made the object at the same moment | tried again: an apply names no version |
//! | a deletion | under the name is another object than the one meant | read anew: what is there now may have to go as well |
//!
//! A few tries follow each other at once. One that still fails is an error of the whole reconcile, which waits for its turn.

use std::fmt::Debug;

use kube::ResourceExt;
use kube::api::{Api, DeleteParams, Patch, PatchParams, Preconditions, PropagationPolicy};
use kube::core::Status;
use serde::Serialize;
use serde::de::DeserializeOwned;

/// HTTP's codes, as the API server uses them.
const CONFLICT: u16 = 409;
const NOT_FOUND: u16 = 404;

/// The cause that the API server names for each field that another manager owns.
const FIELD_MANAGER: &str = "FieldManagerConflict";

/// Tries that follow each other at once.
const TRIES_MAX: usize = 3;

/// What of an object is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Part {
    /// All but its status.
    Object,
    /// Its status.
    Status,
}

/// Whether an object is there no more because of us.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Removed {
    /// It was deleted now.
    Now,
    /// It was gone or goes already, or another one has its name that stays.
    Already,
}

/// Whether a refusal is of fields that another manager owns.
pub(crate) fn is_of_fields(status: &Status) -> bool {
    let causes = status.details.iter().flat_map(|details| &details.causes);
    status.code == CONFLICT && causes.into_iter().any(|cause| cause.reason == FIELD_MANAGER)
}

/// Applies an object.
///
/// # Errors
/// The API server did not take it; fields of others ([`is_of_fields`]) among the reasons.
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
            Err(kube::Error::Api(status)) if status.code == CONFLICT && !is_of_fields(&status) => {}
            answer => return answer,
        }
    }
    write().await
}

/// Deletes exactly this object, unless it goes already; another one of its name only if that is `unwanted` as well.
///
/// # Errors
/// The API server did not do it.
pub(crate) async fn remove<K>(
    api: &Api<K>,
    found: &K,
    unwanted: impl Fn(&K) -> bool,
) -> Result<Removed, kube::Error>
where
    K: ResourceExt + Clone + DeserializeOwned + Debug,
{
    if found.meta().deletion_timestamp.is_some() {
        return Ok(Removed::Already);
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
            Ok(_) => return Ok(Removed::Now),
            Err(kube::Error::Api(status)) if status.code == NOT_FOUND => return Ok(Removed::Already),
            Err(kube::Error::Api(status)) if status.code == CONFLICT && !is_last => {}
            Err(error) => return Err(error),
        }
        match api.get_opt(&name).await? {
            Some(live) if live.meta().deletion_timestamp.is_none() && unwanted(&live) => uid = live.uid(),
            _ => return Ok(Removed::Already),
        }
    }
    Ok(Removed::Already)
}

#[cfg(test)]
mod tests;
