//! In-memory contents of a local store, and the effects of transactions. Pure: no files, locks or async.
//!
//! A transaction is first *planned*: checked, and turned into events of the next revision. The plan is made
//! durable, then *applied*. A plan that is not applied has no effect.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use reprise_policy::Tick;

use crate::contract::{Condition, Event, KeyValue, Range, Revision, Transaction, WatchBatch, Write};
use crate::error::StoreError;
use crate::lease::{Lease, LeaseId, TimeToLive};

mod leases;

pub(crate) use leases::Leases;

/// Maximum size of a key in bytes; keys are not empty.
pub const KEY_BYTES_MAX: usize = 1024;
/// Maximum size of a value in bytes.
pub const VALUE_BYTES_MAX: usize = 64 << 10;
/// Maximum number of conditions and writes of a transaction, equal to etcd's default.
pub const OPERATIONS_MAX: usize = 128;
/// Revisions of history kept for watches; older ones are compacted. 10,000 × ≈ 300 bytes (a node record) = 3
/// MB.
pub const HISTORY_REVISIONS_MAX: u64 = 10_000;
/// Maximum number of leases of a local store: 65,536 × ≈ 200 bytes = 13 MB plus keys. A member holds a few.
pub const LEASES_MAX: usize = 1 << 16;
/// Maximum number of events in a watch batch, unless a single revision has more.
const BATCH_EVENTS_MAX: usize = 1024;

/// Contents of a local store.
#[derive(Debug, Default)]
pub(crate) struct State {
    pub(crate) revision: u64,
    /// Last compacted revision.
    pub(crate) compacted: u64,
    pub(crate) entries: BTreeMap<Vec<u8>, KeyValue>,
    /// Events after `compacted`, in order.
    pub(crate) history: VecDeque<Event>,
    /// Leases and their attached keys.
    pub(crate) leases: Leases,
    /// Number of the last granted lease.
    pub(crate) last_lease: u64,
}

/// Planned effect of a transaction.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Plan {
    /// A condition does not hold.
    Conflict,
    /// The writes change nothing.
    Nothing,
    /// The change to persist and apply.
    Commit(Change),
}

/// A change that is persisted and applied atomically.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Change {
    /// Events of revision `state.revision + 1`; without events the revision stays.
    pub(crate) events: Vec<Event>,
    /// Start or end of a lease, if any.
    pub(crate) lease: Option<LeaseChange>,
    /// Revision up to which history is compacted.
    pub(crate) compact_to: u64,
}

/// Start or end of a lease.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum LeaseChange {
    /// Granted; its time starts when the change is applied.
    Granted(Lease),
    /// Expired or revoked; the events of the change delete its entries.
    Gone(LeaseId),
}

impl Change {
    /// Revision after this change.
    pub(crate) fn revision(&self, state: &State) -> u64 {
        state.revision + u64::from(!self.events.is_empty())
    }
}

impl State {
    pub(crate) fn plan(&self, transaction: &Transaction, now: Tick) -> Result<Plan, StoreError> {
        check(transaction)?;
        if !transaction.conditions.iter().all(|condition| self.holds(condition)) {
            return Ok(Plan::Conflict);
        }
        let is_alive = |write: &Write| match write {
            Write::Put { lease: Some(lease), .. } => self.leases.is_alive(*lease, now),
            Write::Put { lease: None, .. } | Write::Delete { .. } => true,
        };
        if !transaction.writes.iter().all(is_alive) {
            return Err(StoreError::LeaseGone);
        }
        let revision = Revision(self.revision + 1);
        let events: Vec<Event> =
            transaction.writes.iter().filter_map(|write| self.event(write, revision)).collect();
        match events.is_empty() {
            true => Ok(Plan::Nothing),
            false => Ok(Plan::Commit(self.change(events, None))),
        }
    }

    pub(crate) fn plan_grant(&self, time_to_live: TimeToLive) -> Result<(Lease, Change), StoreError> {
        if self.leases.count() >= LEASES_MAX {
            return Err(StoreError::Invalid(format!(
                "the maximum of {LEASES_MAX} leases is reached: revoke unused leases or wait until they expire"
            )));
        }
        let id = LeaseId::new(self.last_lease + 1).expect("a successor is not 0");
        let lease = Lease { id, time_to_live };
        Ok((lease, self.change(Vec::new(), Some(LeaseChange::Granted(lease)))))
    }

    pub(crate) fn plan_revoke(&self, lease: LeaseId, now: Tick) -> Result<Change, StoreError> {
        match self.leases.is_alive(lease, now) {
            true => Ok(self.end(lease)),
            false => Err(StoreError::LeaseGone),
        }
    }

    /// Plans the expiry of the lease that expired first, if any.
    pub(crate) fn plan_expiry(&self, now: Tick) -> Option<Change> {
        self.leases.expired(now).map(|lease| self.end(lease))
    }

    fn end(&self, lease: LeaseId) -> Change {
        let revision = Revision(self.revision + 1);
        let events =
            self.leases.keys(lease).map(|key| Event::Deleted { key: key.clone(), revision }).collect();
        self.change(events, Some(LeaseChange::Gone(lease)))
    }

    fn change(&self, events: Vec<Event>, lease: Option<LeaseChange>) -> Change {
        let revision = self.revision + u64::from(!events.is_empty());
        let compact_to = revision.saturating_sub(HISTORY_REVISIONS_MAX).max(self.compacted);
        Change { events, lease, compact_to }
    }

    /// Applies a change that was planned against this state.
    pub(crate) fn apply(&mut self, change: Change, now: Tick) {
        self.revision = change.revision(self);
        for event in &change.events {
            let replaced = match event {
                Event::Put(entry) => self.entries.insert(entry.key.clone(), entry.clone()),
                Event::Deleted { key, .. } => self.entries.remove(key),
            };
            if let Some(lease) = replaced.and_then(|entry| entry.lease) {
                self.leases.detach(lease, event.key());
            }
            if let Event::Put(KeyValue { key, lease: Some(lease), .. }) = event {
                self.leases.attach(*lease, key.clone());
            }
        }
        match change.lease {
            None => {}
            Some(LeaseChange::Granted(lease)) => {
                self.last_lease = lease.id.number();
                self.leases.insert(lease, now);
            }
            Some(LeaseChange::Gone(lease)) => self.leases.remove(lease),
        }
        self.history.extend(change.events);
        self.compact(change.compact_to);
    }

    /// Deletes the history up to and including `revision`.
    pub(crate) fn compact(&mut self, revision: u64) {
        self.compacted = self.compacted.max(revision.min(self.revision));
        while self.history.front().is_some_and(|event| event.revision().0 <= self.compacted) {
            self.history.pop_front();
        }
    }

    pub(crate) fn range(&self, prefix: &[u8], limit: usize) -> Range {
        let mut matching = self
            .entries
            .range(prefix.to_vec()..)
            .take_while(|(key, _)| key.starts_with(prefix))
            .map(|(_, entry)| entry.clone());
        let entries: Vec<KeyValue> = matching.by_ref().take(limit).collect();
        Range { entries, more: matching.next().is_some(), revision: Revision(self.revision) }
    }

    /// Changes from revision `from` on: a batch, possibly empty, and the revision to continue from.
    pub(crate) fn changes(&self, prefix: &[u8], from: u64) -> Result<(WatchBatch, u64), StoreError> {
        if from <= self.compacted {
            return Err(StoreError::Compacted { oldest: Revision(self.compacted + 1) });
        }
        let first = self.history.partition_point(|event| event.revision().0 < from);
        let mut batch = WatchBatch { revision: Revision(self.revision), events: Vec::new() };
        for event in self.history.range(first..) {
            // Split only between revisions, so that readers never see part of a transaction.
            let last = batch.events.last().map(Event::revision);
            if batch.events.len() >= BATCH_EVENTS_MAX && last != Some(event.revision()) {
                batch.revision = last.unwrap_or(batch.revision);
                break;
            }
            if event.key().starts_with(prefix) {
                batch.events.push(event.clone());
            }
        }
        let next = from.max(batch.revision.0 + 1);
        Ok((batch, next))
    }

    fn holds(&self, condition: &Condition) -> bool {
        match condition {
            Condition::Absent { key } => !self.entries.contains_key(key),
            Condition::Modified { key, revision } => {
                self.entries.get(key).is_some_and(|entry| entry.modified == *revision)
            }
        }
    }

    /// Event of a write, if it has an effect.
    fn event(&self, write: &Write, revision: Revision) -> Option<Event> {
        match write {
            Write::Put { key, value, lease } => {
                let known = self.entries.get(key);
                Some(Event::Put(KeyValue {
                    key: key.clone(),
                    value: value.clone(),
                    created: known.map_or(revision, |entry| entry.created),
                    modified: revision,
                    version: known.map_or(0, |entry| entry.version) + 1,
                    lease: *lease,
                }))
            }
            Write::Delete { key } => {
                self.entries.contains_key(key).then(|| Event::Deleted { key: key.clone(), revision })
            }
        }
    }
}

/// Rejects transactions that no store accepts.
pub(crate) fn check(transaction: &Transaction) -> Result<(), StoreError> {
    let invalid = |text: String| Err(StoreError::Invalid(text));
    let operations = transaction.conditions.len() + transaction.writes.len();
    if operations > OPERATIONS_MAX {
        return invalid(format!(
            "transaction with {operations} conditions and writes: expected at most {OPERATIONS_MAX}"
        ));
    }
    let mut written = BTreeSet::new();
    for write in &transaction.writes {
        let (key, value_bytes) = match write {
            Write::Put { key, value, .. } => (key, value.len()),
            Write::Delete { key } => (key, 0),
        };
        if value_bytes > VALUE_BYTES_MAX {
            return invalid(format!("value of {value_bytes} bytes: expected at most {VALUE_BYTES_MAX}"));
        }
        if !written.insert(key) {
            return invalid("transaction writes a key twice".to_owned());
        }
    }
    let conditioned = transaction.conditions.iter().map(|condition| match condition {
        Condition::Absent { key } | Condition::Modified { key, .. } => key,
    });
    match written
        .into_iter()
        .chain(conditioned)
        .map(Vec::len)
        .find(|bytes| !(1..=KEY_BYTES_MAX).contains(bytes))
    {
        Some(bytes) => invalid(format!("key of {bytes} bytes: expected 1 to {KEY_BYTES_MAX}")),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn put(key: &str) -> Transaction {
        let write = Write::Put { key: key.into(), value: Vec::new(), lease: None };
        Transaction { conditions: Vec::new(), writes: vec![write] }
    }

    fn commit(state: &mut State, transaction: &Transaction) {
        match state.plan(transaction, Tick(0)).expect("valid") {
            Plan::Commit(change) => state.apply(change, Tick(0)),
            other => panic!("not committed: {other:?}"),
        }
    }

    #[test]
    fn bounds_the_history_and_reports_compacted_revisions() {
        let mut state = State::default();
        for number in 0..HISTORY_REVISIONS_MAX + 5 {
            commit(&mut state, &put(if number % 2 == 0 { "a" } else { "b" }));
        }
        assert_eq!(state.history.len() as u64, HISTORY_REVISIONS_MAX);
        let lost = state.changes(b"", 5).expect_err("compacted");
        assert!(matches!(lost, StoreError::Compacted { oldest: Revision(6) }), "{lost}");
        assert!(state.changes(b"", 6).is_ok());
    }

    #[test]
    fn splits_watch_batches_only_between_revisions() {
        let mut state = State::default();
        let writes = (0..100u8)
            .map(|number| Write::Put { key: vec![number], value: Vec::new(), lease: None })
            .collect();
        let transaction = Transaction { conditions: Vec::new(), writes };
        for _ in 0..30 {
            commit(&mut state, &transaction);
        }
        let mut from = 1;
        let mut events = 0;
        while events < 3000 {
            let (batch, next) = state.changes(b"", from).expect("in the history");
            assert!(!batch.events.is_empty() && batch.events.len() % 100 == 0, "{}", batch.events.len());
            assert!(batch.events.len() < BATCH_EVENTS_MAX + OPERATIONS_MAX);
            assert_eq!(batch.events.last().map(Event::revision), Some(batch.revision));
            events += batch.events.len();
            from = next;
        }
        assert_eq!(from, 31);
        assert!(state.changes(b"", from).expect("in the history").0.events.is_empty());
    }

    #[test]
    fn rejects_leases_beyond_the_limit_and_states_the_remedy() {
        let mut state = State::default();
        let time_to_live = TimeToLive::of_seconds(1);
        for _ in 0..LEASES_MAX {
            let (_, change) = state.plan_grant(time_to_live).expect("below the limit");
            state.apply(change, Tick(0));
        }
        let refused = state.plan_grant(time_to_live).expect_err("beyond the limit");
        assert!(refused.to_string().contains("revoke"), "{refused}");
        let change = state.plan_expiry(Tick(2_000_000)).expect("an expired lease");
        state.apply(change, Tick(2_000_000));
        assert!(state.plan_grant(time_to_live).is_ok());
    }

    #[test]
    fn rejects_puts_to_an_expired_lease_before_its_end_is_applied() {
        let mut state = State::default();
        let (lease, change) = state.plan_grant(TimeToLive::of_seconds(1)).expect("granted");
        state.apply(change, Tick(0));
        let write = Write::Put { key: b"a".to_vec(), value: Vec::new(), lease: Some(lease.id) };
        let transaction = Transaction { conditions: Vec::new(), writes: vec![write] };
        assert!(matches!(state.plan(&transaction, Tick(999_999)), Ok(Plan::Commit(_))));
        assert!(matches!(state.plan(&transaction, Tick(1_000_000)), Err(StoreError::LeaseGone)));
        assert!(matches!(state.plan_revoke(lease.id, Tick(1_000_000)), Err(StoreError::LeaseGone)));
    }
}
