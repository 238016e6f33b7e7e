//! Profiles of the node that are in effect: what whoever does I/O beside a GPU's compute is to ask.
//!
//! The thread of the claims puts them here when it has found them right; the admin port answers from them. Deliberately absent: anybody on the
//! data path who asks. Engines do not tell an agent what they compute (PROTOCOL has no word for it), so no budget is known to hold at any
//! moment; reads and writes of devices go on as without a profile.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use reprise_policy::slack::Profile;

/// All of them, by name.
#[derive(Clone, Debug, Default)]
pub(crate) struct InEffect {
    profiles: Arc<Mutex<BTreeMap<String, Arc<Effective>>>>,
}

/// One of them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Effective {
    /// Digest of its revision.
    pub(crate) digest: String,
    /// What it says.
    pub(crate) profile: Profile,
}

impl InEffect {
    /// A profile by its name.
    pub(crate) fn get(&self, name: &str) -> Option<Arc<Effective>> {
        self.profiles.lock().unwrap_or_else(PoisonError::into_inner).get(name).cloned()
    }

    /// Puts one in the place of the revision before.
    pub(crate) fn put(&self, name: &str, effective: Effective) {
        let mut profiles = self.profiles.lock().unwrap_or_else(PoisonError::into_inner);
        profiles.insert(name.to_owned(), Arc::new(effective));
    }

    /// Ends all others.
    pub(crate) fn keep_only(&self, is_kept: impl Fn(&str) -> bool) {
        let mut profiles = self.profiles.lock().unwrap_or_else(PoisonError::into_inner);
        profiles.retain(|name, _| is_kept(name));
    }
}
