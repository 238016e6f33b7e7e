//! The store: keys with revisions, conditional transactions, leases, and changes for watches. One machine,
//! with the guarantees that etcd gives its clients: acknowledged writes survive every crash, until an
//! operator wipes the disk.
//!
//! It mirrors the contract of `controlplane/store/src/contract.rs` as far as members use it. Its process and
//! its faults are in `store_process.rs`.

use std::collections::BTreeMap;
use std::time::Duration;

use reprise_controlplane_core::{Budget, NodeRecord};
use reprise_policy::{NodeMode, TenantId, Tick};

/// Number of a change of the store.
pub(crate) type Revision = u64;

/// Identifies a lease; never reused, even after the store's disk was wiped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct LeaseId(pub(crate) u64);

/// The keys that members use (`controlplane/src/{identity,registry,shards,modes,tenants}.rs`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Key {
    /// Stored at the key `identity`.
    Identity,
    /// Stored at the key `identities/<number>`.
    IdentityOf(u32),
    /// Stored at the key `next_node`.
    NextNode,
    /// Stored at the key `nodes/<name>`.
    Node(usize),
    /// Stored at the key `members/<name>`.
    Member(usize),
    /// Stored at the key `modes/<node name>`.
    Mode(usize),
    /// Stored at the key `tenants/<name>`.
    Tenant(TenantId),
}

/// Keys that are read or watched together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Prefix {
    IdentityOf(u32),
    Nodes,
    Members,
    Modes,
    Tenants,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Value {
    Nothing,
    Number(u32),
    Node(Box<NodeRecord>),
    Mode(NodeMode),
    Budget(Budget),
}

#[derive(Clone, Debug)]
pub(crate) struct Entry {
    pub(crate) value: Value,
    pub(crate) created: Revision,
    pub(crate) modified: Revision,
    lease: Option<LeaseId>,
}

/// A change of a key: its new entry, or `None` if it was deleted.
#[derive(Clone, Debug)]
pub(crate) struct Change {
    pub(crate) revision: Revision,
    pub(crate) key: Key,
    pub(crate) entry: Option<Entry>,
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum Condition {
    Absent(Key),
    Modified(Key, Revision),
}

#[derive(Clone, Debug)]
pub(crate) struct Write {
    pub(crate) key: Key,
    pub(crate) value: Value,
    pub(crate) lease: Option<LeaseId>,
}

/// Reason for which a transaction was not committed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TransactionError {
    Conflict,
    LeaseGone,
}

/// Error for a watch from a revision whose later changes were compacted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Compacted;

#[derive(Clone, Copy, Debug)]
struct Lease {
    time_to_live: Duration,
    expires: Tick,
    /// The lease ends sooner than reported_durable: the store's clock has jumped since.
    shortened: bool,
}

impl Lease {
    /// Creates a lease with its full time to live.
    fn renewed(now: Tick, time_to_live: Duration) -> Lease {
        Lease { time_to_live, expires: now.after(time_to_live), shortened: false }
    }
}

/// Contents of the store; see the module.
#[derive(Debug, Default)]
pub(crate) struct Store {
    /// Number of times that the disk was wiped; for the audit.
    pub(crate) wiped: u64,
    revision: Revision,
    /// Changes up to this revision were compacted.
    compacted: Revision,
    entries: BTreeMap<Key, Entry>,
    changes: Vec<Change>,
    leases: BTreeMap<LeaseId, Lease>,
    leases_begun: u64,
    /// Expiry of leases by the simulation's time, unless the store's clock had jumped; for the audit.
    pub(crate) ended: BTreeMap<LeaseId, Tick>,
}

impl Prefix {
    pub(crate) fn has(self, key: Key) -> bool {
        match self {
            Prefix::IdentityOf(number) => key == Key::IdentityOf(number),
            Prefix::Nodes => matches!(key, Key::Node(_)),
            Prefix::Members => matches!(key, Key::Member(_)),
            Prefix::Modes => matches!(key, Key::Mode(_)),
            Prefix::Tenants => matches!(key, Key::Tenant(_)),
        }
    }
}

impl Store {
    pub(crate) fn revision(&self) -> Revision {
        self.revision
    }

    pub(crate) fn get(&self, key: Key) -> Option<&Entry> {
        self.entries.get(&key)
    }

    pub(crate) fn range(&self, prefix: Prefix) -> Vec<(Key, Entry)> {
        let of = self.entries.iter().filter(|(key, _)| prefix.has(**key));
        of.map(|(key, entry)| (*key, entry.clone())).collect()
    }

    /// Applies all writes if all conditions hold.
    pub(crate) fn transact(
        &mut self,
        conditions: &[Condition],
        writes: Vec<Write>,
    ) -> Result<Revision, TransactionError> {
        let lives = |write: &Write| write.lease.is_none_or(|lease| self.leases.contains_key(&lease));
        if !self.hold(conditions) {
            return Err(TransactionError::Conflict);
        }
        if !writes.iter().all(lives) {
            return Err(TransactionError::LeaseGone);
        }
        self.revision += 1;
        let revision = self.revision;
        for Write { key, value, lease } in writes {
            let created = self.get(key).map_or(revision, |entry| entry.created);
            let entry = Entry { value, created, modified: revision, lease };
            self.entries.insert(key, entry.clone());
            self.changes.push(Change { revision, key, entry: Some(entry) });
        }
        Ok(revision)
    }

    fn hold(&self, conditions: &[Condition]) -> bool {
        conditions.iter().all(|condition| match *condition {
            Condition::Absent(key) => !self.entries.contains_key(&key),
            Condition::Modified(key, revision) => {
                self.get(key).is_some_and(|entry| entry.modified == revision)
            }
        })
    }

    /// Deletes a key, if it exists and all conditions hold.
    pub(crate) fn delete(
        &mut self,
        conditions: &[Condition],
        key: Key,
    ) -> Result<Revision, TransactionError> {
        if !self.hold(conditions) {
            return Err(TransactionError::Conflict);
        }
        if self.entries.remove(&key).is_some() {
            self.revision += 1;
            self.changes.push(Change { revision: self.revision, key, entry: None });
        }
        Ok(self.revision)
    }

    pub(crate) fn grant(&mut self, now: Tick, time_to_live: Duration) -> LeaseId {
        self.leases_begun += 1;
        let id = LeaseId(self.leases_begun);
        self.leases.insert(id, Lease::renewed(now, time_to_live));
        id
    }

    /// Renews a lease; returns whether it lives.
    pub(crate) fn keep_alive(&mut self, now: Tick, id: LeaseId) -> bool {
        let lease = self.leases.get_mut(&id);
        lease.map(|lease| *lease = Lease::renewed(now, lease.time_to_live)).is_some()
    }

    /// Ends a lease and deletes its keys.
    pub(crate) fn revoke(&mut self, id: LeaseId) {
        if self.leases.remove(&id).is_none() {
            return;
        }
        let under = self.entries.iter().filter(|(_, entry)| entry.lease == Some(id));
        let keys: Vec<Key> = under.map(|(key, _)| *key).collect();
        if !keys.is_empty() {
            self.revision += 1;
        }
        for key in keys {
            self.entries.remove(&key);
            self.changes.push(Change { revision: self.revision, key, entry: None });
        }
    }

    /// Ends the leases that have expired when the store's clock shows `now`; `seen` is the simulation's time.
    pub(crate) fn expire(&mut self, now: Tick, seen: Tick) {
        let over = self.leases.iter().filter(|(_, lease)| lease.expires <= now);
        let over: Vec<(LeaseId, bool)> = over.map(|(id, lease)| (*id, lease.shortened)).collect();
        for (id, shortened) in over {
            self.revoke(id);
            if !shortened {
                self.ended.insert(id, seen);
            }
        }
    }

    /// Returns the time of the next expiry, by the store's clock.
    pub(crate) fn next_expiry(&self) -> Option<Tick> {
        self.leases.values().map(|lease| lease.expires).min()
    }

    /// Marks all leases after a jump of the store's clock: they end sooner than reported_durable.
    pub(crate) fn clock_jumped(&mut self) {
        self.leases.values_mut().for_each(|lease| lease.shortened = true);
    }

    /// Restarts the store: every lease gets its full time to live, as in etcd after a change of the leader.
    pub(crate) fn restarted(&mut self, now: Tick) {
        self.leases.values_mut().for_each(|lease| *lease = Lease::renewed(now, lease.time_to_live));
    }

    /// Returns the changes from a revision on.
    pub(crate) fn changes(&self, prefix: Prefix, from: Revision) -> Result<Vec<Change>, Compacted> {
        if from <= self.compacted {
            return Err(Compacted);
        }
        let of = self.changes.iter().rev().take_while(|change| change.revision >= from);
        let mut of: Vec<Change> = of.filter(|change| prefix.has(change.key)).cloned().collect();
        of.reverse();
        Ok(of)
    }

    /// Discards the history of changes.
    pub(crate) fn compact(&mut self) {
        self.compacted = self.revision;
        self.changes.clear();
    }

    /// Empties the disk: revisions start from the beginning.
    pub(crate) fn wipe(&mut self) {
        let (wiped, leases_begun) = (self.wiped + 1, self.leases_begun);
        *self = Store { wiped, leases_begun, ..Store::default() };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn put(store: &mut Store, key: Key, lease: Option<LeaseId>) -> Result<Revision, TransactionError> {
        store.transact(&[Condition::Absent(key)], vec![Write { key, value: Value::Nothing, lease }])
    }

    #[test]
    fn keys_are_deleted_with_their_lease_and_watches_see_it() {
        let mut store = Store::default();
        let lease = store.grant(Tick(0), Duration::from_secs(2));
        assert_eq!(put(&mut store, Key::Member(1), Some(lease)), Ok(1));
        assert_eq!(put(&mut store, Key::Member(1), None), Err(TransactionError::Conflict));
        assert!(store.keep_alive(Tick(1_000_000), lease));
        store.expire(Tick(2_999_999), Tick(7));
        assert_eq!((store.next_expiry(), store.ended.len()), (Some(Tick(3_000_000)), 0));
        store.expire(Tick(3_000_000), Tick(8));
        assert_eq!((store.next_expiry(), store.ended.get(&lease)), (None, Some(&Tick(8))));
        assert!(!store.keep_alive(Tick(3_000_000), lease));
        assert_eq!(put(&mut store, Key::Member(1), Some(lease)), Err(TransactionError::LeaseGone));
        let changes = store.changes(Prefix::Members, 1).expect("not compacted");
        assert_eq!(changes.iter().map(|change| change.entry.is_some()).collect::<Vec<_>>(), [true, false]);
        assert!(store.changes(Prefix::Nodes, 1).expect("not compacted").is_empty());
    }

    #[test]
    fn leases_from_before_a_clock_jump_have_no_recorded_end() {
        let mut store = Store::default();
        let [lost, renewed] = [(); 2].map(|()| store.grant(Tick(0), Duration::from_secs(2)));
        store.clock_jumped();
        assert!(store.keep_alive(Tick(1_900_000), renewed));
        store.expire(Tick(20_000_000), Tick(5));
        assert_eq!(store.ended.keys().collect::<Vec<_>>(), [&renewed]);
        assert!(!store.keep_alive(Tick(20_000_000), lost));
    }

    #[test]
    fn compacted_changes_cannot_be_watched_and_a_wiped_store_starts_over() {
        let mut store = Store::default();
        assert_eq!(put(&mut store, Key::Node(1), None), Ok(1));
        store.compact();
        assert_eq!(store.changes(Prefix::Nodes, 1).expect_err("gone"), Compacted);
        assert!(store.changes(Prefix::Nodes, 2).expect("to come").is_empty());
        store.wipe();
        assert_eq!((store.revision(), store.range(Prefix::Nodes).len()), (0, 0));
    }
}
