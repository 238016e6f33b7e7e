//! Digests of the operator's last writes, by which [`crate::framework::change`] recognises their watch events.
//!
//! The digest is recorded before the request is sent, so the event cannot arrive first. A digest only decides
//! whether a reconcile is repeated: a process without this memory repeats it once without effect.

use std::collections::HashMap;
use std::collections::hash_map::DefaultHasher;
use std::hash::{Hash, Hasher};
use std::sync::{Mutex, PoisonError};

use serde::Serialize;

/// Digest of a part of an object. It is valid only within one process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Digest(u64);

impl Digest {
    /// Computes the digest of a value's JSON form.
    pub(crate) fn of(part: &impl Serialize) -> Digest {
        let mut hasher = DefaultHasher::new();
        serde_json::to_string(part).expect("serialises to JSON").hash(&mut hasher);
        Digest(hasher.finish())
    }
}

/// Last write of this process to each object, by unique id.
#[derive(Debug, Default)]
pub struct OwnWrites {
    written: Mutex<HashMap<String, Digest>>,
}

impl OwnWrites {
    /// Records a write that is about to be sent.
    pub(crate) fn record(&self, uid: Option<&String>, own: &impl Serialize) {
        if let Some(uid) = uid {
            let mut written = self.written.lock().unwrap_or_else(PoisonError::into_inner);
            written.insert(uid.clone(), Digest::of(own));
        }
    }

    /// Returns whether an object has the part that this process wrote last.
    pub(crate) fn is_last_write(&self, uid: Option<&String>, own: Digest) -> bool {
        let written = self.written.lock().unwrap_or_else(PoisonError::into_inner);
        uid.is_some_and(|uid| written.get(uid) == Some(&own))
    }

    /// Forgets a deleted object.
    pub(crate) fn forget(&self, uid: Option<&String>) {
        if let Some(uid) = uid {
            self.written.lock().unwrap_or_else(PoisonError::into_inner).remove(uid);
        }
    }
}
