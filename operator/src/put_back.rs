//! Puts back fields that only the operator owns, and reports who had written them.
//!
//! A right, an admission policy or an agent's configuration that an edit could change would protect nothing. So the operator writes these fields
//! again. Each time it emits an event, counts the write-back in a metric, and paces itself when the other writer does not stop.
//!
//! ```text
//!  apply without force ──no other manager owns the fields──▶ written
//!        └──another manager owns some──▶ apply with force; event with manager and fields; metric
//!                                             └──fifth time within 10 min──▶ paced: at most once a minute
//! ```
//!
//! * Without force first: only then the API server names the owner of the fields. With force it takes them silently.
//! * A field that another writer added is not ours, and an apply leaves it. It is removed afterwards ([`crate::surplus`]).
//! * A field that another writer removed has no owner, so it comes back without a conflict. The caller detects that and reports
//!   [`Taken::removed`].
//! * The pace does not slow down further than once a minute: the other writer may be an attacker, whose right would hold that long. One write
//!   a minute costs the API server nothing.
//! * No condition depends on what is remembered here. It is the memory of one process, so another replica, or the next process, would report
//!   the opposite. A condition reports what any process derives from objects. Here the event and the metric are the report.
//! * A new process starts without memory, which costs a few writes.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::fmt::Debug;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use kube::Api;
use kube::api::PatchParams;
use kube::core::Status;
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::conflict::{self, Part};

/// Write-backs of one object within [`WITHIN`] from which on it is paced.
pub(crate) const MANY: usize = 5;
const WITHIN: Duration = Duration::from_secs(600);
/// Pause between two write-backs of an object that is paced.
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
    /// It is paced, and not written before this time has passed.
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
            disputes.put_back(key, Instant::now());
            Ok(Outcome::PutBack(written, taken))
        }
        answer => answer.map(Outcome::Written),
    }
}

/// Memory of one process about other writers. It decides when something is written and which event is new, never what a condition reports.
#[derive(Debug, Default)]
pub(crate) struct Disputes {
    /// When an object was put back, the earliest first, by its key.
    of_fields: Mutex<HashMap<String, VecDeque<Instant>>>,
    /// Unique ids of objects that are left to another maker, by their keys.
    left: Mutex<HashMap<String, String>>,
    /// What agents have said last, by node.
    heard: Mutex<HashMap<String, String>>,
}

impl Disputes {
    /// Records that an object was put back.
    pub(crate) fn put_back(&self, key: &str, now: Instant) {
        let mut all = self.of_fields.lock().unwrap_or_else(PoisonError::into_inner);
        all.retain(|_, times| lately(times, now) > 0);
        all.entry(key.to_owned()).or_default().push_back(now);
    }

    /// How long an object is still left as another writer wants it.
    pub(crate) fn waits(&self, key: &str, now: Instant) -> Option<Duration> {
        let mut all = self.of_fields.lock().unwrap_or_else(PoisonError::into_inner);
        let times = all.get_mut(key)?;
        if lately(times, now) < MANY {
            return None;
        }
        let passed = now.duration_since(*times.back()?);
        SPACED.checked_sub(passed).filter(|rest| !rest.is_zero())
    }

    /// Records that an object is left to its maker. Returns whether that is new, so that the event is emitted once.
    pub(crate) fn leave(&self, key: &str, uid: &str) -> bool {
        let mut left = self.left.lock().unwrap_or_else(PoisonError::into_inner);
        left.insert(key.to_owned(), uid.to_owned()).as_deref() != Some(uid)
    }

    /// Forgets an object that is gone or is ours by now.
    pub(crate) fn take(&self, key: &str) {
        self.left.lock().unwrap_or_else(PoisonError::into_inner).remove(key);
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

/// Number of times within [`WITHIN`]; drops the older ones.
fn lately(times: &mut VecDeque<Instant>, now: Instant) -> usize {
    while times.front().is_some_and(|first| now.duration_since(*first) > WITHIN) {
        times.pop_front();
    }
    times.len()
}

#[cfg(test)]
mod tests;
