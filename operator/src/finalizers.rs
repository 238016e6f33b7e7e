//! Puts a finalizer of ours on an object, or takes it away.
//!
//! Rights to do so may lack: a chart of an older version gives fewer. All else of the object is done then, and what lacks is said. Rights are given by people, so
//! it is not tried at every change ([`Refusals`]).

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

/// HTTP's code for what is not there.
const NOT_FOUND: u16 = 404;
/// HTTP's code for what one may not do.
const FORBIDDEN: u16 = 403;

/// A refusal stands so long before it is tried again.
const STANDS: Duration = Duration::from_secs(60);

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
    if !is_change(object, finalizer, wanted) {
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

/// Whether there is something to do. An object that is being deleted takes no finalizer.
fn is_change<K: Resource>(object: &K, finalizer: &str, wanted: Finalizer) -> bool {
    let has = object.finalizers().iter().any(|one| one == finalizer);
    match wanted {
        Finalizer::Wanted => !has && object.meta().deletion_timestamp.is_none(),
        Finalizer::Unwanted => has,
    }
}

/// What came of an attempt.
#[derive(Debug)]
pub enum Attempt {
    /// It is as it is wanted.
    Done(Left),
    /// The API server does not let us.
    Forbidden(Forbidden),
}

/// A change that the API server does not let us make.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Forbidden {
    /// What was to become of the finalizer.
    pub wanted: Finalizer,
    /// The server's words.
    pub words: String,
}

/// Changes that the API server has forbidden.
#[derive(Debug, Default)]
pub struct Refusals {
    /// When and how, by the object's unique id and the finalizer. Of what is refused for all objects of a kind the id is empty.
    by_object: Mutex<HashMap<(String, String), (Instant, String)>>,
}

impl Refusals {
    /// What the API server said, if it is too early to try again.
    pub fn standing<K: Resource>(&self, object: &K, finalizer: &str) -> Option<String> {
        self.look(&object.uid().unwrap_or_default(), finalizer, Instant::now())
    }

    /// Whether something was forbidden lately that is forbidden of one object as of all.
    pub fn of_all(&self, what: &str) -> bool {
        self.look("", what, Instant::now()).is_some()
    }

    /// Something was forbidden that is of all objects alike.
    pub fn add_of_all(&self, what: &str, words: &str) {
        self.add(String::new(), what, words.to_owned(), Instant::now());
    }

    fn look(&self, uid: &str, finalizer: &str, now: Instant) -> Option<String> {
        let mut all = self.by_object.lock().unwrap_or_else(PoisonError::into_inner);
        all.retain(|_, (when, _)| now.duration_since(*when) < STANDS);
        all.get(&(uid.to_owned(), finalizer.to_owned())).map(|(_, words)| words.clone())
    }

    fn add(&self, uid: String, finalizer: &str, words: String, now: Instant) {
        let mut all = self.by_object.lock().unwrap_or_else(PoisonError::into_inner);
        all.insert((uid, finalizer.to_owned()), (now, words));
    }
}

/// [`set`], unless it was forbidden lately.
///
/// # Errors
/// The API server did not take it, and has not forbidden it.
pub async fn try_set<K>(
    context: &Context,
    object: &K,
    api: &Api<K>,
    finalizer: &str,
    wanted: Finalizer,
) -> Result<Attempt, OperatorError>
where
    K: Resource<DynamicType = ()> + Clone + Debug + DeserializeOwned,
{
    // Where nothing is to be done, nothing is forbidden, whatever was before.
    let standing = context.refusals.standing(object, finalizer);
    if let Some(words) = standing.filter(|_| is_change(object, finalizer, wanted)) {
        return Ok(Attempt::Forbidden(Forbidden { wanted, words }));
    }
    match set(context, object, api, finalizer, wanted).await {
        Ok(left) => Ok(Attempt::Done(left)),
        Err(error) if error.code() == Some(FORBIDDEN) => {
            let words = error.words();
            tracing::warn!(
                kind = kind_of::<K>(),
                name = object.name_any(),
                finalizer,
                words,
                "a finalizer may not be changed"
            );
            context.refusals.add(object.uid().unwrap_or_default(), finalizer, words.clone(), Instant::now());
            Ok(Attempt::Forbidden(Forbidden { wanted, words }))
        }
        Err(error) => Err(error),
    }
}

/// That an object's finalizer is not as it should be; `for_whom`: what a deletion should wait for.
pub fn forbidden<K: Resource>(object: &K, finalizer: &str, for_whom: &str, refused: &Forbidden) -> Finding {
    let kind = ConditionType::DeletionBlocked;
    let rights = format!("give the operator the rights of this version's chart ({})", refused.words);
    match refused.wanted {
        Finalizer::Wanted => {
            let message = format!(
                "a deletion would not wait for {for_whom}, since the finalizer {finalizer} may not be put on the object: {rights}"
            );
            Finding::unknown(kind, Reason::Forbidden, message)
        }
        Finalizer::Unwanted if object.meta().deletion_timestamp.is_some() => {
            let message = format!(
                "it waits for nothing but the finalizer {finalizer}, which may not be taken away: {rights}"
            );
            Finding::yes(kind, Reason::Forbidden, message)
        }
        Finalizer::Unwanted => {
            let message = format!(
                "a deletion would wait for ever, since the finalizer {finalizer} may not be taken away: {rights}"
            );
            Finding::unknown(kind, Reason::Forbidden, message)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_stands_for_its_object_and_finalizer_until_it_is_tried_again() {
        let (refusals, begun) = (Refusals::default(), Instant::now());
        refusals.add("u".to_owned(), "f", "no".to_owned(), begun);
        assert_eq!(refusals.look("u", "f", begun + STANDS / 2), Some("no".to_owned()));
        assert_eq!(refusals.look("u", "g", begun), None);
        assert_eq!(refusals.look("v", "f", begun), None);
        assert_eq!(refusals.look("u", "f", begun + STANDS), None);
        assert!(refusals.by_object.lock().expect("nobody panicked").is_empty(), "and is forgotten");
    }
}
