//! A store that forgets with its process: for tests and throw-away clusters.

use std::future::ready;
use std::sync::Arc;

use crate::contract::{KeyValue, Outcome, Range, Revision, Store, StoreFuture, Transaction, Watch};
use crate::error::StoreError;
use crate::shared::Shared;
use crate::state::{Plan, State};

/// See the module. Clones are the same store.
#[derive(Clone, Debug)]
pub struct MemoryStore {
    shared: Arc<Shared>,
}

impl MemoryStore {
    /// An empty store.
    pub fn new() -> MemoryStore {
        MemoryStore { shared: Shared::new(State::default()) }
    }

    fn commit(&self, transaction: &Transaction) -> Result<Outcome, StoreError> {
        // Planned and applied under one lock; the watches are woken after it.
        let mut state = self.shared.write();
        let plan = state.plan(transaction)?;
        let current = Revision(state.revision);
        match plan {
            Plan::Conflict => Ok(Outcome::Conflict),
            Plan::Nothing => Ok(Outcome::Committed(current)),
            Plan::Commit { events, compact_to } => {
                state.apply(events, compact_to);
                let revision = state.revision;
                drop(state);
                self.shared.moved(revision);
                Ok(Outcome::Committed(Revision(revision)))
            }
        }
    }
}

impl Default for MemoryStore {
    fn default() -> MemoryStore {
        MemoryStore::new()
    }
}

impl Store for MemoryStore {
    fn get(&self, key: &[u8]) -> StoreFuture<'_, Option<KeyValue>> {
        Box::pin(ready(Ok(self.shared.read().entries.get(key).cloned())))
    }

    fn range(&self, prefix: &[u8], limit: usize) -> StoreFuture<'_, Range> {
        Box::pin(ready(Ok(self.shared.read().range(prefix, limit))))
    }

    fn transact(&self, transaction: Transaction) -> StoreFuture<'_, Outcome> {
        Box::pin(async move { self.commit(&transaction) })
    }

    fn watch(&self, prefix: &[u8], from: Revision) -> StoreFuture<'_, Watch> {
        Box::pin(ready(self.shared.watch(prefix, from)))
    }

    fn compact(&self, oldest: Revision) -> StoreFuture<'_, ()> {
        Box::pin(async move {
            self.shared.write().compact(oldest.0.saturating_sub(1));
            Ok(())
        })
    }

    fn revision(&self) -> StoreFuture<'_, Revision> {
        Box::pin(ready(Ok(Revision(self.shared.read().revision))))
    }
}
