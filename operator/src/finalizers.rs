//! Puts a finalizer of ours on an object, or takes it away.

use std::fmt::Debug;

use kube::api::{Api, Patch, PatchParams};
use kube::{Resource, ResourceExt};
use serde::de::DeserializeOwned;
use serde_json::json;

use crate::context::Context;
use crate::error::OperatorError;
use crate::metrics::Write;
use crate::status::kind_of;

/// HTTP's code for what is not there.
const NOT_FOUND: u16 = 404;

/// Whether a finalizer is wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finalizer {
    /// The object must not go yet.
    Wanted,
    /// Nothing has to be undone.
    Unwanted,
}

/// What is left of the object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Left {
    /// It is there.
    Object,
    /// It is gone, or goes now.
    Nothing,
}

/// Makes an object have the finalizer, or not have it. An object that is being deleted gets none.
///
/// # Errors
/// The API server did not take it; somebody may have changed the object meanwhile.
pub async fn set<K>(
    context: &Context,
    object: &K,
    api: &Api<K>,
    finalizer: &str,
    wanted: Finalizer,
) -> Result<Left, OperatorError>
where
    K: Resource<DynamicType = ()> + Clone + Debug + DeserializeOwned,
{
    let goes = object.meta().deletion_timestamp.is_some();
    let has = object.finalizers().iter().any(|one| one == finalizer);
    let left = if goes && (!has || wanted == Finalizer::Unwanted) { Left::Nothing } else { Left::Object };
    let change = match wanted {
        Finalizer::Wanted => !has && !goes,
        Finalizer::Unwanted => has,
    };
    if !change {
        return Ok(left);
    }
    let mut finalizers = object.finalizers().to_vec();
    finalizers.retain(|one| one != finalizer);
    if wanted == Finalizer::Wanted {
        finalizers.push(finalizer.to_owned());
    }
    // The version makes the server refuse when somebody else has changed the list meanwhile.
    let patch = json!({
        "metadata": { "finalizers": finalizers, "resourceVersion": object.resource_version() },
    });
    let name = object.name_any();
    match api.patch(&name, &PatchParams::default(), &Patch::Merge(&patch)).await {
        Ok(_) => context.metrics.wrote(kind_of::<K>(), Write::Finalizers),
        Err(kube::Error::Api(status)) if status.code == NOT_FOUND => return Ok(Left::Nothing),
        Err(error) => return Err(OperatorError::api(format!("change finalizers of {name}"))(error)),
    }
    Ok(left)
}
