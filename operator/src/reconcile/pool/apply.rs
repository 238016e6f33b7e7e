//! Adds or removes a pool's finalizer.

use kube::Api;
use reprise_crds::SSDPool;

use crate::framework::error::OperatorError;
use crate::framework::finalizers::{Finalizer, FinalizerOutcome, try_set};
use crate::reconcile::context::Context;
use crate::reconcile::names::WIPE_FINALIZER;

/// Adds or removes a pool's finalizer.
///
/// # Errors
/// The API server rejected the write, other than by a missing permission.
pub async fn apply(
    pool: &SSDPool,
    wanted: Finalizer,
    context: &Context,
) -> Result<FinalizerOutcome, OperatorError> {
    let api: Api<SSDPool> = Api::all(context.client.clone());
    try_set(context, pool, &api, WIPE_FINALIZER, wanted).await
}
