//! A store's content in memory, and what a transaction does to it. Pure: no file, no lock, no async.
//!
//! A transaction is first *planned* against the state (checked, turned into events of the next revision), then made
//! durable by whoever keeps the file, then *applied*. A plan that is never applied has changed nothing.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use crate::contract::{Condition, Event, KeyValue, Range, Revision, Transaction, WatchBatch, Write};
use crate::error::StoreError;

/// Bytes of a key at the most; none is empty.
pub const KEY_BYTES_MAX: usize = 1024;
/// Bytes of a value at the most: facts, not data.
pub const VALUE_BYTES_MAX: usize = 64 << 10;
/// Conditions and writes of one transaction at the most; etcd's default is the same.
pub const OPERATIONS_MAX: usize = 128;
/// Revisions of history kept for watches. 10,000 × (≈ 300 bytes of a node's record) = 3 MB; older ones are
/// compacted away as new ones come.
pub const HISTORY_REVISIONS_MAX: u64 = 10_000;
/// Events of one batch of a watch, exceeded only by a single revision's own (at most [`OPERATIONS_MAX`]).
const BATCH_EVENTS_MAX: usize = 1024;

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct State {
    pub(crate) revision: u64,
    /// History up to and including this revision is gone.
    pub(crate) compacted: u64,
    pub(crate) entries: BTreeMap<Vec<u8>, KeyValue>,
    /// Events after `compacted`, in order.
    pub(crate) history: VecDeque<Event>,
}

/// What a transaction is going to do.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Plan {
    /// A condition does not hold.
    Conflict,
    /// Nothing changes.
    Nothing,
    /// These events, all of revision `state.revision + 1`, and the history up to `compact_to` goes.
    Commit { events: Vec<Event>, compact_to: u64 },
}

impl State {
    pub(crate) fn plan(&self, transaction: &Transaction) -> Result<Plan, StoreError> {
        check(transaction)?;
        if !transaction.conditions.iter().all(|condition| self.holds(condition)) {
            return Ok(Plan::Conflict);
        }
        let revision = self.revision + 1;
        let events: Vec<Event> =
            transaction.writes.iter().filter_map(|write| self.event(write, Revision(revision))).collect();
        if events.is_empty() {
            return Ok(Plan::Nothing);
        }
        let compact_to = revision.saturating_sub(HISTORY_REVISIONS_MAX).max(self.compacted);
        Ok(Plan::Commit { events, compact_to })
    }

    /// Applies the events of the next revision.
    pub(crate) fn apply(&mut self, events: Vec<Event>, compact_to: u64) {
        self.revision += 1;
        for event in &events {
            match event {
                Event::Put(entry) => self.entries.insert(entry.key.clone(), entry.clone()),
                Event::Deleted { key, .. } => self.entries.remove(key),
            };
        }
        self.history.extend(events);
        self.compact(compact_to);
    }

    /// Forgets the history up to and including `revision`.
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

    /// Changes from revision `from` on: a batch (possibly empty) and the revision to go on with.
    pub(crate) fn changes(&self, prefix: &[u8], from: u64) -> Result<(WatchBatch, u64), StoreError> {
        if from <= self.compacted {
            return Err(StoreError::Compacted { oldest: Revision(self.compacted + 1) });
        }
        let first = self.history.partition_point(|event| event.revision().0 < from);
        let mut batch = WatchBatch { revision: Revision(self.revision), events: Vec::new() };
        for event in self.history.range(first..) {
            // Only between revisions: a reader never sees half a transaction.
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

    /// What a write does, if anything.
    fn event(&self, write: &Write, revision: Revision) -> Option<Event> {
        match write {
            Write::Put { key, value } => {
                let known = self.entries.get(key);
                Some(Event::Put(KeyValue {
                    key: key.clone(),
                    value: value.clone(),
                    created: known.map_or(revision, |entry| entry.created),
                    modified: revision,
                    version: known.map_or(0, |entry| entry.version) + 1,
                }))
            }
            Write::Delete { key } => {
                self.entries.contains_key(key).then(|| Event::Deleted { key: key.clone(), revision })
            }
        }
    }
}

/// Refuses what no store takes.
pub(crate) fn check(transaction: &Transaction) -> Result<(), StoreError> {
    let invalid = |text: String| Err(StoreError::Invalid(text));
    let operations = transaction.conditions.len() + transaction.writes.len();
    if operations > OPERATIONS_MAX {
        return invalid(format!(
            "{operations} conditions and writes in one transaction: at most {OPERATIONS_MAX}"
        ));
    }
    let mut written = BTreeSet::new();
    for write in &transaction.writes {
        let (key, value_bytes) = match write {
            Write::Put { key, value } => (key, value.len()),
            Write::Delete { key } => (key, 0),
        };
        if value_bytes > VALUE_BYTES_MAX {
            return invalid(format!("a value of {value_bytes} bytes: at most {VALUE_BYTES_MAX}"));
        }
        if !written.insert(key) {
            return invalid("one key is written twice in a transaction".to_owned());
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
        Some(bytes) => invalid(format!("a key of {bytes} bytes: 1 to {KEY_BYTES_MAX}")),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn put(key: &str) -> Transaction {
        let write = Write::Put { key: key.into(), value: Vec::new() };
        Transaction { conditions: Vec::new(), writes: vec![write] }
    }

    fn commit(state: &mut State, transaction: &Transaction) {
        match state.plan(transaction).expect("valid") {
            Plan::Commit { events, compact_to } => state.apply(events, compact_to),
            other => panic!("not committed: {other:?}"),
        }
    }

    #[test]
    fn history_is_bounded_and_what_it_lost_is_told() {
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
    fn a_batch_of_changes_ends_between_revisions() {
        let mut state = State::default();
        let writes = (0..100u8).map(|number| Write::Put { key: vec![number], value: Vec::new() }).collect();
        let transaction = Transaction { conditions: Vec::new(), writes };
        for _ in 0..30 {
            commit(&mut state, &transaction);
        }
        let mut from = 1;
        let mut events = 0;
        while events < 3000 {
            let (batch, next) = state.changes(b"", from).expect("kept");
            assert!(!batch.events.is_empty() && batch.events.len() % 100 == 0, "{}", batch.events.len());
            assert!(batch.events.len() < BATCH_EVENTS_MAX + OPERATIONS_MAX);
            assert_eq!(batch.events.last().map(Event::revision), Some(batch.revision));
            events += batch.events.len();
            from = next;
        }
        assert_eq!(from, 31);
        assert!(state.changes(b"", from).expect("kept").0.events.is_empty());
    }
}
