//! Parts of objects that this process has written last, by which it recognises their watch events.
//!
//! A status is written at the end of a reconcile, and comes back as a watch event. That event must not trigger the same reconcile again: it would
//! change nothing. Events of statuses that another writer has changed must trigger it, because the operator puts them back.
//!
//! The digest is recorded before the request is sent, so the event never comes before it. A digest decides only whether a reconcile is repeated: a
//! process without this memory repeats it once and finds nothing to do.

use std::collections::HashMap;
use std::collections::hash_map::DefaultHasher;
use std::hash::{Hash, Hasher};
use std::sync::{Mutex, PoisonError};

use serde::Serialize;

/// Digest of a part of an object, within one process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Digest(u64);

impl Digest {
    /// Digest of a part as JSON.
    pub(crate) fn of(part: &impl Serialize) -> Digest {
        let mut hasher = DefaultHasher::new();
        serde_json::to_string(part).expect("parts of objects are JSON").hash(&mut hasher);
        Digest(hasher.finish())
    }
}

/// What this process has written last of each object, by the object's unique id.
#[derive(Debug, Default)]
pub(crate) struct OwnWrites {
    written: Mutex<HashMap<String, Digest>>,
}

impl OwnWrites {
    /// Records what is about to be written of an object.
    pub(crate) fn expect(&self, uid: Option<&String>, own: &impl Serialize) {
        if let Some(uid) = uid {
            let mut written = self.written.lock().unwrap_or_else(PoisonError::into_inner);
            written.insert(uid.clone(), Digest::of(own));
        }
    }

    /// Whether an object has what this process has written last of it.
    pub(super) fn is_in(&self, uid: Option<&String>, own: Digest) -> bool {
        let written = self.written.lock().unwrap_or_else(PoisonError::into_inner);
        uid.is_some_and(|uid| written.get(uid) == Some(&own))
    }

    /// Forgets an object that is gone.
    pub(super) fn forget(&self, uid: Option<&String>) {
        if let Some(uid) = uid {
            self.written.lock().unwrap_or_else(PoisonError::into_inner).remove(uid);
        }
    }
}
