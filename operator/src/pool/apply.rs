//! Writes a pool's finalizer, if it is not as it is wanted.

use kube::Api;
use reprise_crds::SSDPool;

use crate::context::Context;
use crate::error::OperatorError;
use crate::finalizers::{Attempt, Finalizer, try_set};
use crate::names::WIPE_FINALIZER;

/// Makes the pool have its finalizer, or not have it.
///
/// # Errors
/// The API server did not take it, and has not forbidden it.
pub async fn apply(pool: &SSDPool, wanted: Finalizer, context: &Context) -> Result<Attempt, OperatorError> {
    let api: Api<SSDPool> = Api::all(context.client.clone());
    try_set(context, pool, &api, WIPE_FINALIZER, wanted).await
}
