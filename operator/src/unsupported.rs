//! Kinds that this release has definitions of and does nothing for: that is said on each object, so that nobody waits for it.

use std::fmt::Debug;
use std::sync::Arc;

use kube::runtime::controller::Action;
use kube::{Api, Resource, ResourceExt};
use reprise_crds::GPUQueueAllocation;
use reprise_crds::status::{ConditionType, Finding, Reason};
use serde::de::DeserializeOwned;

use crate::context::Context;
use crate::error::OperatorError;
use crate::status::{Found, Status, write};

/// Says so of an allocation.
///
/// # Errors
/// The API server did not take it; tried again.
pub async fn allocation(
    allocation: Arc<GPUQueueAllocation>,
    context: Arc<Context>,
) -> Result<Action, OperatorError> {
    let message = "queue pairs are not lent by this release: nothing was set aside, and it may be removed";
    refuse(&*allocation, allocation.status.as_ref(), message, &context).await
}

async fn refuse<K, S>(
    object: &K,
    before: Option<&S>,
    message: &str,
    context: &Context,
) -> Result<Action, OperatorError>
where
    K: Resource<DynamicType = (), Scope = kube::core::NamespaceResourceScope>
        + Clone
        + Debug
        + DeserializeOwned,
    S: Status,
{
    let api: Api<K> = Api::namespaced(context.client.clone(), &object.namespace().unwrap_or_default());
    let findings = [Finding::no(ConditionType::Accepted, Reason::Unsupported, message)];
    write(context, Found { object, api: &api, before, findings: &findings }, S::default()).await?;
    Ok(Action::await_change())
}
