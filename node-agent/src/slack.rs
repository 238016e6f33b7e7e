//! Active slack profiles of the node: I/O budgets next to the compute of GPUs.
//!
//! The reconciler thread adds validated profiles; the admin port reads them. The data path does not use
//! them yet: the protocol does not report which computation an engine runs, so no budget is known to apply
//! at a given moment. Device I/O runs as without a profile.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use reprise_policy::slack::Profile;

/// All active profiles by name; clones share them.
#[derive(Clone, Debug, Default)]
pub(crate) struct ActiveProfiles {
    profiles: Arc<Mutex<BTreeMap<String, Arc<ActiveProfile>>>>,
}

/// An active slack profile.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ActiveProfile {
    /// Digest of its revision.
    pub(crate) digest: String,
    pub(crate) profile: Profile,
}

impl ActiveProfiles {
    /// Returns a profile by name.
    pub(crate) fn get(&self, name: &str) -> Option<Arc<ActiveProfile>> {
        self.profiles.lock().unwrap_or_else(PoisonError::into_inner).get(name).cloned()
    }

    /// Adds a profile, or replaces its previous revision.
    pub(crate) fn put(&self, name: &str, effective: ActiveProfile) {
        let mut profiles = self.profiles.lock().unwrap_or_else(PoisonError::into_inner);
        profiles.insert(name.to_owned(), Arc::new(effective));
    }

    /// Removes all other profiles.
    pub(crate) fn keep_only(&self, is_kept: impl Fn(&str) -> bool) {
        let mut profiles = self.profiles.lock().unwrap_or_else(PoisonError::into_inner);
        profiles.retain(|name, _| is_kept(name));
    }
}
