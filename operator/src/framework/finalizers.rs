//! Adds or removes one of the operator's finalizers.

use std::fmt::Debug;

use kube::api::{Api, Patch, PatchParams};
use kube::{Resource, ResourceExt};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use crate::framework::error::{NOT_FOUND, OperatorError};
use crate::framework::events::kind_of;
use crate::framework::metrics::Write;
use crate::framework::services::Services;

/// Desired state of a finalizer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finalizer {
    /// The object must not be removed yet.
    Present,
    /// All cleanup is done.
    Absent,
}

/// Whether this finalizer still matters for the object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ObjectState {
    /// The object exists and is not being deleted, or this finalizer holds it.
    Present,
    /// The object is gone, or is being deleted without this finalizer. Other finalizers may still hold it.
    Gone,
}

/// Returns whether an object has a finalizer.
pub fn has(object: &impl ResourceExt, finalizer: &str) -> bool {
    object.finalizers().iter().any(|one| one == finalizer)
}

/// Returns the body of a patch that adds or removes a finalizer. With the resource version the API server rejects it if
/// another writer changed the list meanwhile.
pub fn patch(object: &impl ResourceExt, finalizer: &str, desired: Finalizer) -> Value {
    let mut finalizers = object.finalizers().to_vec();
    finalizers.retain(|one| one != finalizer);
    if desired == Finalizer::Present {
        finalizers.push(finalizer.to_owned());
    }
    json!({ "metadata": { "finalizers": finalizers, "resourceVersion": object.resource_version() } })
}

/// Adds or removes a finalizer. It is not added to an object that is being deleted.
///
/// # Errors
/// The API server rejected the write, for example because another writer changed the object (409).
pub async fn set<K>(
    context: &Services,
    object: &K,
    api: &Api<K>,
    finalizer: &str,
    desired: Finalizer,
) -> Result<ObjectState, OperatorError>
where
    K: Resource<DynamicType = ()> + Clone + Debug + DeserializeOwned,
{
    let is_deleting = object.meta().deletion_timestamp.is_some();
    let (is_wanted, is_there) = (desired == Finalizer::Present, has(object, finalizer));
    let state =
        if is_deleting && !(is_there && is_wanted) { ObjectState::Gone } else { ObjectState::Present };
    // The API server accepts no new finalizer on an object that is being deleted.
    if is_wanted == is_there || (is_wanted && is_deleting) {
        return Ok(state);
    }
    let patch = patch(object, finalizer, desired);
    let name = object.name_any();
    match api.patch(&name, &PatchParams::default(), &Patch::Merge(&patch)).await {
        Ok(_) => context.metrics.record_write(kind_of::<K>(), Write::Finalizers),
        Err(kube::Error::Api(status)) if status.code == NOT_FOUND => return Ok(ObjectState::Gone),
        Err(error) => {
            return Err(OperatorError::api(format!("change finalizer {finalizer} of {name}"))(error));
        }
    }
    Ok(state)
}
