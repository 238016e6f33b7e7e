//! Adds or removes one of the operator's finalizers.
//!
//! The operator may lack the right to do so, for example with a chart of an older version. Then it reconciles
//! the rest of the object and sets a condition. A forbidden write is not retried on every change
//! ([`ForbiddenWrites`]), because only a person can add the right.

use std::collections::HashMap;
use std::fmt::Debug;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use kube::api::{Api, Patch, PatchParams};
use kube::{Resource, ResourceExt};
use reprise_crds::status::{ConditionType, Finding, Reason};
use serde::de::DeserializeOwned;
use serde_json::json;

use crate::context::Context;
use crate::error::OperatorError;
use crate::metrics::Write;
use crate::status::kind_of;

/// HTTP status code: the object does not exist.
const NOT_FOUND: u16 = 404;
/// HTTP status code: the operator lacks the right.
const FORBIDDEN: u16 = 403;

/// Time before a forbidden write is tried again.
const RETRY_AFTER: Duration = Duration::from_secs(60);

/// Desired state of a finalizer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finalizer {
    /// The object must not be removed yet.
    Present,
    /// The object has no cleanup left.
    Absent,
}

/// Whether an object still exists after its finalizer was set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ObjectState {
    /// The object still exists.
    Present,
    /// The object is gone, or is deleted now that no finalizer holds it.
    Gone,
}

/// Adds or removes a finalizer. It is not added to an object that is being deleted.
///
/// # Errors
/// The API server rejected the write, for example because another writer changed the object (409).
pub async fn set<K>(
    context: &Context,
    object: &K,
    api: &Api<K>,
    finalizer: &str,
    wanted: Finalizer,
) -> Result<ObjectState, OperatorError>
where
    K: Resource<DynamicType = ()> + Clone + Debug + DeserializeOwned,
{
    let is_deleting = object.meta().deletion_timestamp.is_some();
    let has = object.finalizers().iter().any(|one| one == finalizer);
    let state = if is_deleting && (!has || wanted == Finalizer::Absent) {
        ObjectState::Gone
    } else {
        ObjectState::Present
    };
    if !is_change(object, finalizer, wanted) {
        return Ok(state);
    }
    let mut finalizers = object.finalizers().to_vec();
    finalizers.retain(|one| one != finalizer);
    if wanted == Finalizer::Present {
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
fn is_change<K: Resource>(object: &K, finalizer: &str, wanted: Finalizer) -> bool {
    let has = object.finalizers().iter().any(|one| one == finalizer);
    match wanted {
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
    pub wanted: Finalizer,
    /// Message of the API server.
    pub words: String,
}

/// Writes that the API server recently rejected as forbidden.
#[derive(Debug, Default)]
pub struct ForbiddenWrites {
    /// Time and message, by unique id of the object and finalizer. The id is empty if a write is forbidden
    /// for a whole kind.
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
    pub fn add_for_kind(&self, what: &str, words: &str) {
        self.add(String::new(), what, words.to_owned(), Instant::now());
    }

    fn recent_message(&self, uid: &str, finalizer: &str, now: Instant) -> Option<String> {
        let mut all = self.by_object.lock().unwrap_or_else(PoisonError::into_inner);
        all.retain(|_, (when, _)| now.duration_since(*when) < RETRY_AFTER);
        all.get(&(uid.to_owned(), finalizer.to_owned())).map(|(_, words)| words.clone())
    }

    fn add(&self, uid: String, finalizer: &str, words: String, now: Instant) {
        let mut all = self.by_object.lock().unwrap_or_else(PoisonError::into_inner);
        all.insert((uid, finalizer.to_owned()), (now, words));
    }
}

/// Like [`set`], but does not send a write that was recently forbidden.
///
/// # Errors
/// The API server rejected the write for another reason than missing rights.
pub async fn try_set<K>(
    context: &Context,
    object: &K,
    api: &Api<K>,
    finalizer: &str,
    wanted: Finalizer,
) -> Result<FinalizerOutcome, OperatorError>
where
    K: Resource<DynamicType = ()> + Clone + Debug + DeserializeOwned,
{
    // A forbidden write only matters if it is still needed.
    let standing = context.forbidden_writes.recent(object, finalizer);
    if let Some(words) = standing.filter(|_| is_change(object, finalizer, wanted)) {
        return Ok(FinalizerOutcome::Forbidden(Forbidden { wanted, words }));
    }
    match set(context, object, api, finalizer, wanted).await {
        Ok(state) => Ok(FinalizerOutcome::Done(state)),
        Err(error) if error.code() == Some(FORBIDDEN) => {
            let words = error.message();
            tracing::warn!(
                kind = kind_of::<K>(),
                name = object.name_any(),
                finalizer,
                words,
                "not allowed to change a finalizer"
            );
            context.forbidden_writes.add(
                object.uid().unwrap_or_default(),
                finalizer,
                words.clone(),
                Instant::now(),
            );
            Ok(FinalizerOutcome::Forbidden(Forbidden { wanted, words }))
        }
        Err(error) => Err(error),
    }
}

/// Builds the condition for a finalizer that cannot be set. `waited_for` names what a deletion should wait
/// for.
pub fn forbidden_condition<K: Resource>(
    object: &K,
    finalizer: &str,
    waited_for: &str,
    refused: &Forbidden,
) -> Finding {
    let kind = ConditionType::DeletionBlocked;
    let rights = format!("Give the operator the rights of this version's chart ({})", refused.words);
    match refused.wanted {
        Finalizer::Present => {
            let message = format!(
                "a deletion would not wait for {waited_for}: the operator is not allowed to add the \
                 finalizer {finalizer}. {rights}"
            );
            Finding::unknown(kind, Reason::Forbidden, message)
        }
        Finalizer::Absent if object.meta().deletion_timestamp.is_some() => {
            let message = format!(
                "the deletion waits only for the finalizer {finalizer}, which the operator is not allowed to \
                 remove. {rights}"
            );
            Finding::yes(kind, Reason::Forbidden, message)
        }
        Finalizer::Absent => {
            let message = format!(
                "a deletion would wait forever: the operator is not allowed to remove the finalizer \
                 {finalizer}. {rights}"
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
