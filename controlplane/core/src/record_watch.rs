//! Following records of the store: the next call after each answer, and the contents after each update.
//!
//! ```text
//!   list ──────────► watch from the next revision ──► changes …
//!    ▲                 │ changes were compacted: at once
//!    └─────────────────┴ a call failed: after a pause
//! ```
//!
//! A listing replaces everything that was known, so no change is missed. The identity of the store is followed in
//! the same way, but any change of it ends the member ([`IdentityCall`]).
//!
//! Pure: the caller lists, watches and waits.

use std::collections::BTreeMap;
use std::time::Duration;

/// Pause after a failed call to the store.
pub const STORE_RETRY_AFTER: Duration = Duration::from_millis(250);

/// The next call for records that are followed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RecordCall {
    /// List all records after a pause, which may be zero.
    List(Duration),
    /// Watch changes from this revision on.
    Watch(u64),
}

/// Why records can no longer be followed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WatchEnd {
    /// Changes were compacted before they arrived.
    Compacted,
    /// The store did not answer, or the connection was lost.
    Failed,
}

/// The next call for the identity of the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IdentityCall {
    /// Read the identity after a pause.
    Read(Duration),
    /// Watch changes from this revision on; any change means that the store was replaced.
    Watch(u64),
    /// The store was replaced: the member must end.
    End,
    /// The store was restored from a backup and still has the identity: delete it, so that all members end.
    DeleteAndEnd,
}

/// The answer to a call for the identity of the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IdentityAnswer {
    /// At this revision, the store has the identity, unmodified.
    Unchanged(u64),
    /// The store has another identity, or it changed during the watch.
    Changed,
    /// The store has an older revision than before.
    Restored,
    /// The call failed, or changes were compacted.
    Failed,
}

/// An update of the records of one family. A value is `None` if it cannot be decoded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RecordUpdate<K, V> {
    /// All records; all others are gone.
    All(Vec<(K, Option<V>)>),
    /// Changes since the last update, in order.
    Changes(Vec<RecordChange<K, V>>),
}

/// A change of one record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RecordChange<K, V> {
    /// The record was written. `None` if it cannot be decoded.
    Put(K, Option<V>),
    /// The record was deleted at this revision.
    Deleted(K, u64),
}

impl RecordCall {
    /// Returns the first call.
    pub fn first() -> RecordCall {
        RecordCall::List(Duration::ZERO)
    }

    /// Returns the call after a listing at a revision.
    pub fn after_list(revision: u64) -> RecordCall {
        RecordCall::Watch(revision + 1)
    }

    /// Returns the call after a failure.
    pub fn after(end: WatchEnd) -> RecordCall {
        match end {
            WatchEnd::Compacted => RecordCall::List(Duration::ZERO),
            WatchEnd::Failed => RecordCall::List(STORE_RETRY_AFTER),
        }
    }
}

impl IdentityCall {
    /// Returns the call after an answer.
    pub fn after(answer: IdentityAnswer) -> IdentityCall {
        match answer {
            IdentityAnswer::Unchanged(revision) => IdentityCall::Watch(revision + 1),
            IdentityAnswer::Changed => IdentityCall::End,
            IdentityAnswer::Restored => IdentityCall::DeleteAndEnd,
            IdentityAnswer::Failed => IdentityCall::Read(STORE_RETRY_AFTER),
        }
    }
}

impl<K: Ord, V> RecordUpdate<K, V> {
    /// Returns all records that exist or were written, without those that cannot be decoded.
    pub fn written(self) -> impl Iterator<Item = (K, V)> {
        let (all, changes) = match self {
            RecordUpdate::All(all) => (all, Vec::new()),
            RecordUpdate::Changes(changes) => (Vec::new(), changes),
        };
        let put = changes.into_iter().filter_map(|change| match change {
            RecordChange::Put(key, value) => Some((key, value)),
            RecordChange::Deleted(..) => None,
        });
        all.into_iter().chain(put).filter_map(|(key, value)| Some((key, value?)))
    }

    /// Applies the update to a map of the records. Records that cannot be decoded change nothing.
    pub fn apply_to(self, records: &mut BTreeMap<K, V>) {
        match self {
            RecordUpdate::All(all) => {
                *records = all.into_iter().filter_map(|(key, value)| Some((key, value?))).collect();
            }
            RecordUpdate::Changes(changes) => {
                for change in changes {
                    match change {
                        RecordChange::Put(key, value) => records.extend(value.map(|value| (key, value))),
                        RecordChange::Deleted(key, _) => drop(records.remove(&key)),
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn watch_begins_after_the_listing_and_a_failure_lists_again() {
        assert_eq!(RecordCall::first(), RecordCall::List(Duration::ZERO));
        assert_eq!(RecordCall::after_list(7), RecordCall::Watch(8));
        assert_eq!(RecordCall::after(WatchEnd::Compacted), RecordCall::first(), "at once");
        assert_eq!(RecordCall::after(WatchEnd::Failed), RecordCall::List(STORE_RETRY_AFTER));
    }

    #[test]
    fn identity_is_watched_until_the_store_is_replaced() {
        let after = IdentityCall::after;
        assert_eq!(after(IdentityAnswer::Unchanged(7)), IdentityCall::Watch(8));
        assert_eq!(after(IdentityAnswer::Failed), IdentityCall::Read(STORE_RETRY_AFTER));
        assert_eq!(after(IdentityAnswer::Changed), IdentityCall::End);
        assert_eq!(after(IdentityAnswer::Restored), IdentityCall::DeleteAndEnd, "others must end as well");
    }

    #[test]
    fn listing_replaces_records_and_changes_apply_in_order() {
        let mut records = BTreeMap::from([("gone", 1)]);
        RecordUpdate::All(vec![("a", Some(1)), ("b", Some(2)), ("c", None)]).apply_to(&mut records);
        assert_eq!(records, BTreeMap::from([("a", 1), ("b", 2)]));
        let changes = vec![
            RecordChange::Put("a", Some(3)),
            RecordChange::Put("b", None),
            RecordChange::Put("d", Some(4)),
            RecordChange::Deleted("d", 9),
        ];
        RecordUpdate::Changes(changes).apply_to(&mut records);
        assert_eq!(records, BTreeMap::from([("a", 3), ("b", 2)]), "an invalid record changes nothing");
    }
}
