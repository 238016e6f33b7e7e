//! What a local store and its watches share: the state, and a signal that it moved.
//!
//! A watch reads the history at its own pace instead of being sent copies: nothing is buffered for it, and when it
//! falls behind the history it is told so.

use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use tokio::sync::watch;

use crate::contract::{Revision, StoreFuture, Watch, WatchBatch, WatchSource};
use crate::error::StoreError;
use crate::state::State;

/// See the module. Locks are held for memory accesses only, never across a disk write or an await.
#[derive(Debug)]
pub(crate) struct Shared {
    state: RwLock<State>,
    revision: watch::Sender<u64>,
}

impl Shared {
    pub(crate) fn new(state: State) -> Arc<Shared> {
        let revision = watch::Sender::new(state.revision);
        Arc::new(Shared { state: RwLock::new(state), revision })
    }

    /// The state. Every change of it is whole, so a poisoned lock is as good as any.
    pub(crate) fn read(&self) -> RwLockReadGuard<'_, State> {
        self.state.read().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn write(&self) -> RwLockWriteGuard<'_, State> {
        self.state.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// Wakes the watches: the state is at this revision or beyond.
    pub(crate) fn moved(&self, revision: u64) {
        self.revision.send_replace(revision);
    }

    pub(crate) fn watch(self: &Arc<Shared>, prefix: &[u8], from: Revision) -> Result<Watch, StoreError> {
        self.read().changes(prefix, from.0)?;
        let changed = self.revision.subscribe();
        let source = Source { shared: self.clone(), prefix: prefix.to_vec(), next: from.0, changed };
        Ok(Watch::new(Box::new(source)))
    }
}

struct Source {
    shared: Arc<Shared>,
    prefix: Vec<u8>,
    /// The first revision not yet reported.
    next: u64,
    changed: watch::Receiver<u64>,
}

impl WatchSource for Source {
    fn next(&mut self) -> StoreFuture<'_, WatchBatch> {
        Box::pin(async move {
            loop {
                // Marked as seen before the state is read: a change in between wakes the wait below.
                self.changed.mark_unchanged();
                let (batch, next) = self.shared.read().changes(&self.prefix, self.next)?;
                self.next = next;
                if !batch.events.is_empty() {
                    return Ok(batch);
                }
                self.changed.changed().await.expect("the sender lives in `shared`, which this source holds");
            }
        })
    }
}
