//! Fields that are the operator's alone, and others who write them.
//!
//! They are put back: a right, an admission policy or an agent's configuration that an edit could change would protect nobody. But nobody who
//! edits is undone in silence, and no fight is fought at full speed.
//!
//! ```text
//!  applied without force ──nobody else has them──▶ written
//!        └──another manager has some──▶ applied by force; an event names manager and fields, and it is counted
//!                                             └──the fifth within 10 min──▶ contested: once a minute, and a condition says so
//! ```
//!
//! * Without force first: only then the API server says whose the fields are. By force it takes them without a word.
//! * What somebody has added is no field of ours, and an apply leaves it: it is taken away afterwards ([`crate::surplus`]).
//! * A field that somebody has removed is nobody's, so it comes back without a conflict. Whoever applies sees it, and says so by
//!   [`Taken::removed`].
//! * Once a minute, and not more and more seldom: who writes again and again may be an attacker, and so long his right would hold. A write a
//!   minute is nothing to the API server.
//! * A status cannot say of itself that it is contested: there the event is all that is said.
//! * What is remembered is this process's. The next one counts from nothing, which costs a few writes.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::fmt::Debug;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use kube::Api;
use kube::api::PatchParams;
use kube::core::Status;
use reprise_crds::status::Reason;
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::conflict::{self, Part};
use crate::plan::Refusal;

/// Put back so often within [`WITHIN`], something is contested.
pub(crate) const MANY: usize = 5;
const WITHIN: Duration = Duration::from_secs(600);
/// What is contested is put back so far apart.
const SPACED: Duration = Duration::from_secs(60);
/// Fields that an event names.
const FIELDS_MAX: usize = 5;

/// Something to be written, of which each field is ours.
pub(crate) struct Ours<'a, K> {
    /// Where objects of its kind are.
    pub api: &'a Api<K>,
    /// `kind/namespace/name`.
    pub key: &'a str,
    /// Its name.
    pub name: &'a str,
    /// Which part of it.
    pub part: Part,
    /// The manager, and how strictly it is read; without force.
    pub params: PatchParams,
    /// What is applied.
    pub body: &'a Value,
}

/// What came of writing it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Outcome<K> {
    /// It is written, and was nobody else's.
    Written(K),
    /// It is written over what somebody else had written.
    PutBack(K, Taken),
    /// It is contested, and its turn comes then.
    Waits(Duration),
}

/// Who had written which fields of ours.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Taken {
    /// Managers, as the API server names them.
    pub by: String,
    /// Paths of the fields.
    pub fields: String,
}

impl Taken {
    /// As the API server says when it refuses.
    pub(crate) fn of(status: &Status) -> Taken {
        let causes: Vec<_> = status.details.iter().flat_map(|details| &details.causes).collect();
        let managers: BTreeSet<&str> =
            causes.iter().map(|cause| cause.message.trim_start_matches("conflict with ")).collect();
        let fields: BTreeSet<&str> = causes.iter().map(|cause| cause.field.as_str()).collect();
        let mut named: Vec<String> =
            fields.iter().take(FIELDS_MAX).map(|field| (*field).to_owned()).collect();
        if fields.len() > FIELDS_MAX {
            named.push(format!("{} more", fields.len() - FIELDS_MAX));
        }
        Taken { by: managers.into_iter().collect::<Vec<_>>().join(", "), fields: named.join(", ") }
    }

    /// What was added, by one of these.
    pub(crate) fn added(by: &[&str], fields: &str) -> Taken {
        let by = if by.is_empty() { "somebody".to_owned() } else { by.join(" or ") };
        Taken { by, fields: fields.to_owned() }
    }

    /// What was removed has no manager any more.
    pub(crate) fn removed(fields: &str) -> Taken {
        Taken { by: "somebody who has removed them".to_owned(), fields: fields.to_owned() }
    }
}

/// Writes it, unless its turn comes later.
///
/// # Errors
/// The API server did not take it.
pub(crate) async fn apply<K>(disputes: &Disputes, ours: &Ours<'_, K>) -> Result<Outcome<K>, kube::Error>
where
    K: Clone + DeserializeOwned + Debug,
{
    let Ours { api, key, name, part, params, body } = ours;
    if let Some(wait) = disputes.waits(key, Instant::now()) {
        return Ok(Outcome::Waits(wait));
    }
    match conflict::apply(api, name, *part, params, body).await {
        Err(kube::Error::Api(status)) if conflict::is_of_fields(&status) => {
            let taken = Taken::of(&status);
            let written = conflict::apply(api, name, *part, &params.clone().force(), body).await?;
            disputes.put_back(key, &taken, Instant::now());
            Ok(Outcome::PutBack(written, taken))
        }
        answer => answer.map(Outcome::Written),
    }
}

/// What was put back lately, what is not ours although it has a name of ours, and what agents have said of the like.
#[derive(Debug, Default)]
pub(crate) struct Disputes {
    of_fields: Mutex<HashMap<String, Dispute>>,
    /// Unique ids of objects that are left to whoever made them, by their keys.
    left: Mutex<HashMap<String, String>>,
    /// What agents have said last, by node.
    heard: Mutex<HashMap<String, String>>,
}

/// Of one object.
#[derive(Debug)]
struct Dispute {
    /// When it was put back, the earliest first.
    times: VecDeque<Instant>,
    last: Taken,
}

impl Disputes {
    /// It was put back.
    pub(crate) fn put_back(&self, key: &str, taken: &Taken, now: Instant) {
        let mut all = self.of_fields.lock().unwrap_or_else(PoisonError::into_inner);
        all.retain(|_, dispute| dispute.lately(now) > 0);
        let dispute = all
            .entry(key.to_owned())
            .or_insert_with(|| Dispute { times: VecDeque::new(), last: taken.clone() });
        dispute.times.push_back(now);
        dispute.last = taken.clone();
    }

    /// How long it is left as somebody else wants it.
    pub(crate) fn waits(&self, key: &str, now: Instant) -> Option<Duration> {
        let mut all = self.of_fields.lock().unwrap_or_else(PoisonError::into_inner);
        let dispute = all.get_mut(key)?;
        if dispute.lately(now) < MANY {
            return None;
        }
        let passed = now.duration_since(*dispute.times.back()?);
        SPACED.checked_sub(passed).filter(|rest| !rest.is_zero())
    }

    /// What to say of something that is contested, also between two turns.
    pub(crate) fn contested(&self, key: &str, now: Instant) -> Option<Refusal> {
        let mut all = self.of_fields.lock().unwrap_or_else(PoisonError::into_inner);
        let dispute = all.get_mut(key)?;
        let count = dispute.lately(now);
        if count < MANY {
            return None;
        }
        let Taken { by, fields } = &dispute.last;
        let message = format!(
            "{fields} of {key} are the operator's alone, and were put back {MANY} times and more within 10 min: from now on once a minute. \
             Make {by} stop"
        );
        Some(Refusal::new(Reason::FieldConflict, message))
    }

    /// An object is left to whoever made it. Whether that is new.
    pub(crate) fn leave(&self, key: &str, uid: &str) -> bool {
        let mut left = self.left.lock().unwrap_or_else(PoisonError::into_inner);
        left.insert(key.to_owned(), uid.to_owned()).as_deref() != Some(uid)
    }

    /// It is gone, or is ours. Whether that is new.
    pub(crate) fn take(&self, key: &str) -> bool {
        self.left.lock().unwrap_or_else(PoisonError::into_inner).remove(key).is_some()
    }

    /// Whether it is left to whoever made it.
    pub(crate) fn is_left(&self, key: &str) -> bool {
        self.left.lock().unwrap_or_else(PoisonError::into_inner).contains_key(key)
    }

    /// An agent says this, or nothing. Whether it is news.
    pub(crate) fn hear(&self, node: &str, said: Option<String>) -> bool {
        let mut heard = self.heard.lock().unwrap_or_else(PoisonError::into_inner);
        match said {
            Some(said) => heard.insert(node.to_owned(), said.clone()).as_ref() != Some(&said),
            None => {
                heard.remove(node);
                false
            }
        }
    }
}

impl Dispute {
    /// How often it was put back within the time that counts.
    fn lately(&mut self, now: Instant) -> usize {
        while self.times.front().is_some_and(|first| now.duration_since(*first) > WITHIN) {
            self.times.pop_front();
        }
        self.times.len()
    }
}

#[cfg(test)]
mod tests;
