//! Writes a pool's finalizer, if it is not as it is wanted.

use kube::Api;
use reprise_crds::SSDPool;

use crate::context::Context;
use crate::error::OperatorError;
use crate::finalizers::{Finalizer, Left, set};
use crate::names::WIPE_FINALIZER;

/// Makes the pool have its finalizer, or not have it.
///
/// # Errors
/// The API server did not take it.
pub async fn apply(pool: &SSDPool, wanted: Finalizer, context: &Context) -> Result<Left, OperatorError> {
    let api: Api<SSDPool> = Api::all(context.client.clone());
    set(context, pool, &api, WIPE_FINALIZER, wanted).await
}
