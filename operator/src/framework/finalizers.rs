//! Adds or removes one of the operator's finalizers.
//!
//! The operator may lack the permission to do so, for example with a chart of an older version. Then it
//! reconciles the rest of the object and sets a condition. The operator retries a forbidden write at most
//! once a minute ([`ForbiddenWrites`]), because only an administrator can grant the permission.

use std::collections::HashMap;
use std::fmt::Debug;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use kube::api::{Api, Patch, PatchParams};
use kube::{Resource, ResourceExt};
use reprise_crds::status::{ConditionType, Finding, Reason};
use serde::de::DeserializeOwned;
use serde_json::json;
use tokio::time::Instant;

use crate::framework::error::OperatorError;
use crate::framework::events::kind_of;
use crate::framework::metrics::Write;
use crate::framework::services::Services;

/// HTTP status code: the object does not exist.
const NOT_FOUND: u16 = 404;
/// HTTP status code: the operator lacks the permission for the request.
const FORBIDDEN: u16 = 403;

/// Time before a forbidden write is tried again.
const RETRY_AFTER: Duration = Duration::from_secs(60);

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
    let has = object.finalizers().iter().any(|one| one == finalizer);
    let state = if is_deleting && (!has || desired == Finalizer::Absent) {
        ObjectState::Gone
    } else {
        ObjectState::Present
    };
    if !is_change(object, finalizer, desired) {
        return Ok(state);
    }
    let mut finalizers = object.finalizers().to_vec();
    finalizers.retain(|one| one != finalizer);
    if desired == Finalizer::Present {
        finalizers.push(finalizer.to_owned());
    }
    // With the resource version the API server rejects the write if another writer changed the list
    // meanwhile.
    let patch = json!({
        "metadata": { "finalizers": finalizers, "resourceVersion": object.resource_version() },
    });
    let name = object.name_any();
    match api.patch(&name, &PatchParams::default(), &Patch::Merge(&patch)).await {
        Ok(_) => context.metrics.record_write(kind_of::<K>(), Write::Finalizers),
        Err(kube::Error::Api(status)) if status.code == NOT_FOUND => return Ok(ObjectState::Gone),
        Err(error) => return Err(OperatorError::api(format!("change finalizers of {name}"))(error)),
    }
    Ok(state)
}

/// Returns whether a write is needed. The API server accepts no new finalizer on an object that is being
/// deleted.
fn is_change<K: Resource>(object: &K, finalizer: &str, desired: Finalizer) -> bool {
    let has = object.finalizers().iter().any(|one| one == finalizer);
    match desired {
        Finalizer::Present => !has && object.meta().deletion_timestamp.is_none(),
        Finalizer::Absent => has,
    }
}

/// Result of setting a finalizer.
#[derive(Debug)]
pub enum FinalizerOutcome {
    /// The finalizer is in its desired state.
    Done(ObjectState),
    /// The operator is not allowed to change it.
    Forbidden(Forbidden),
}

/// A change of a finalizer that the API server forbids.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Forbidden {
    /// The desired state of the finalizer.
    pub desired: Finalizer,
    /// Message of the API server.
    pub message: String,
}

/// Writes that the API server recently rejected as forbidden.
#[derive(Debug, Default)]
pub struct ForbiddenWrites {
    /// Time and message, by object uid and finalizer; for a whole kind, by an empty uid and the operation
    /// (`what`).
    by_object: Mutex<HashMap<(String, String), (Instant, String)>>,
}

impl ForbiddenWrites {
    /// Returns the API server's message if the write was rejected too recently to retry it.
    pub fn recent<K: Resource>(&self, object: &K, finalizer: &str) -> Option<String> {
        self.recent_message(&object.uid().unwrap_or_default(), finalizer, Instant::now())
    }

    /// Returns whether a write was recently forbidden for all objects of a kind.
    pub fn recent_for_kind(&self, what: &str) -> bool {
        self.recent_message("", what, Instant::now()).is_some()
    }

    /// Records that a write is forbidden for all objects of a kind.
    pub fn add_for_kind(&self, what: &str, message: &str) {
        self.add(String::new(), what, message.to_owned(), Instant::now());
    }

    fn recent_message(&self, uid: &str, finalizer: &str, now: Instant) -> Option<String> {
        let mut all = self.by_object.lock().unwrap_or_else(PoisonError::into_inner);
        all.retain(|_, (when, _)| now.duration_since(*when) < RETRY_AFTER);
        all.get(&(uid.to_owned(), finalizer.to_owned())).map(|(_, message)| message.clone())
    }

    fn add(&self, uid: String, finalizer: &str, message: String, now: Instant) {
        let mut all = self.by_object.lock().unwrap_or_else(PoisonError::into_inner);
        all.insert((uid, finalizer.to_owned()), (now, message));
    }
}

/// Like [`set`], but does not send a write that was recently forbidden.
///
/// # Errors
/// The API server rejected the write for a reason other than a missing permission.
pub async fn try_set<K>(
    context: &Services,
    object: &K,
    api: &Api<K>,
    finalizer: &str,
    desired: Finalizer,
) -> Result<FinalizerOutcome, OperatorError>
where
    K: Resource<DynamicType = ()> + Clone + Debug + DeserializeOwned,
{
    // Report the rejection only if the write is still needed.
    let recent_rejection = context.forbidden_writes.recent(object, finalizer);
    if let Some(message) = recent_rejection.filter(|_| is_change(object, finalizer, desired)) {
        return Ok(FinalizerOutcome::Forbidden(Forbidden { desired, message }));
    }
    match set(context, object, api, finalizer, desired).await {
        Ok(state) => Ok(FinalizerOutcome::Done(state)),
        Err(error) if error.code() == Some(FORBIDDEN) => {
            let message = error.message();
            tracing::warn!(
                kind = kind_of::<K>(),
                name = object.name_any(),
                finalizer,
                error = message,
                "not allowed to change a finalizer"
            );
            context.forbidden_writes.add(
                object.uid().unwrap_or_default(),
                finalizer,
                message.clone(),
                Instant::now(),
            );
            Ok(FinalizerOutcome::Forbidden(Forbidden { desired, message }))
        }
        Err(error) => Err(error),
    }
}

/// Builds the condition for a finalizer that cannot be set. `waited_for` names the users or the work that
/// delays a deletion.
pub fn forbidden_condition<K: Resource>(
    object: &K,
    finalizer: &str,
    waited_for: &str,
    forbidden: &Forbidden,
) -> Finding {
    let kind = ConditionType::DeletionBlocked;
    let remedy = format!("Give the operator the permissions of this version's chart ({})", forbidden.message);
    match forbidden.desired {
        Finalizer::Present => {
            let message = format!(
                "a deletion would not wait for {waited_for}: the operator is not allowed to add the \
                 finalizer {finalizer}. {remedy}"
            );
            Finding::unknown(kind, Reason::Forbidden, message)
        }
        Finalizer::Absent if object.meta().deletion_timestamp.is_some() => {
            let message = format!(
                "the deletion waits only for the finalizer {finalizer}, which the operator is not allowed to \
                 remove. {remedy}"
            );
            Finding::yes(kind, Reason::Forbidden, message)
        }
        Finalizer::Absent => {
            let message = format!(
                "a deletion would wait forever: the operator is not allowed to remove the finalizer \
                 {finalizer}. {remedy}"
            );
            Finding::unknown(kind, Reason::Forbidden, message)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn remembers_forbidden_write_by_object_and_finalizer_until_retry() {
        let (forbidden_writes, begun) = (ForbiddenWrites::default(), Instant::now());
        forbidden_writes.add("u".to_owned(), "f", "no".to_owned(), begun);
        assert_eq!(forbidden_writes.recent_message("u", "f", begun + RETRY_AFTER / 2), Some("no".to_owned()));
        assert_eq!(forbidden_writes.recent_message("u", "g", begun), None);
        assert_eq!(forbidden_writes.recent_message("v", "f", begun), None);
        assert_eq!(forbidden_writes.recent_message("u", "f", begun + RETRY_AFTER), None);
        assert!(
            forbidden_writes.by_object.lock().expect("no panic").is_empty(),
            "expired entries are dropped"
        );
    }
}
