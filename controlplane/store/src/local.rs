//! What the local stores have in common: the state, the clock, and what makes changes durable.
//!
//! A change is planned against the state, made durable, then applied; one after the other, while readers go on. Watches
//! read the history at their own pace instead of being sent copies: nothing is buffered for them, and when one falls behind
//! the history it is told so.
//!
//! Nothing runs in the background. Leases that have expired are ended by whoever looks next, and by the watches, which
//! sleep no longer than until the next expiry: nobody sees an entry whose lease has expired. The clock is tokio's, so
//! a runtime with a paused clock passes the time of leases at once.

use std::fmt;
use std::future::{pending, ready};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::time::Duration;

use reprise_policy::Tick;
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until};

use crate::contract::{
    KeyValue, Outcome, Range, Revision, Store, StoreFuture, Transaction, Watch, WatchBatch, WatchSource,
};
use crate::error::StoreError;
use crate::lease::{Lease, LeaseId, TimeToLive};
use crate::state::{Change, Plan, State};

/// What makes changes durable.
pub(crate) trait Durable: Send + fmt::Debug + 'static {
    /// Whether saving waits for a device: then changes are made on the runtime's blocking threads.
    const WAITS: bool;

    /// Makes a change durable that is about to be applied to the state.
    fn save(&mut self, next: &Next<'_>) -> Result<(), StoreError>;
}

/// A change, and between what it lies.
pub(crate) struct Next<'a> {
    pub(crate) change: &'a Change,
    /// The revision after it.
    pub(crate) revision: u64,
    /// History up to here is gone before it.
    pub(crate) compacted: u64,
}

/// See the module. Locks of the state are held for memory accesses only, never across a disk write or an await.
#[derive(Debug)]
pub(crate) struct Local<D> {
    /// For words; empty where there is no file.
    path: PathBuf,
    start: Instant,
    state: RwLock<State>,
    /// Held from plan to apply.
    durable: Mutex<D>,
    /// Wakes the watches: there is a later revision, or another lease to wait for.
    moved: watch::Sender<()>,
}

impl<D: Durable> Local<D> {
    /// A state whose leases, if any, live from now on.
    pub(crate) fn new(path: PathBuf, durable: D, state: State) -> Arc<Local<D>> {
        Arc::new(Local {
            path,
            start: Instant::now(),
            state: RwLock::new(state),
            durable: Mutex::new(durable),
            moved: watch::Sender::new(()),
        })
    }

    fn now(&self) -> Tick {
        Tick(0).after(self.start.elapsed())
    }

    /// The state. Every change of it is whole, so a poisoned lock is as good as any.
    fn read(&self) -> RwLockReadGuard<'_, State> {
        self.state.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, State> {
        self.state.write().unwrap_or_else(PoisonError::into_inner)
    }

    fn lock(&self) -> Result<MutexGuard<'_, D>, StoreError> {
        self.durable
            .lock()
            .map_err(|_| self.failed("an earlier write panicked: restart the control plane".to_owned()))
    }

    fn failed(&self, reason: String) -> StoreError {
        StoreError::Io { path: self.path.clone(), action: "write", reason }
    }

    fn commit(&self, transaction: &Transaction) -> Result<Outcome, StoreError> {
        let mut durable = self.lock()?;
        let now = self.expire(&mut durable)?;
        let (plan, current) = {
            let state = self.read();
            (state.plan(transaction, now)?, state.revision)
        };
        match plan {
            Plan::Conflict => Ok(Outcome::Conflict),
            Plan::Nothing => Ok(Outcome::Committed(Revision(current))),
            Plan::Commit(change) => self.make(&mut durable, change).map(Outcome::Committed),
        }
    }

    fn grant(&self, time_to_live: TimeToLive) -> Result<Lease, StoreError> {
        let mut durable = self.lock()?;
        self.expire(&mut durable)?;
        let (lease, change) = self.read().plan_grant(time_to_live)?;
        self.make(&mut durable, change)?;
        Ok(lease)
    }

    fn revoke(&self, lease: LeaseId) -> Result<(), StoreError> {
        let mut durable = self.lock()?;
        let now = self.expire(&mut durable)?;
        let change = self.read().plan_revoke(lease, now)?;
        self.make(&mut durable, change)?;
        Ok(())
    }

    fn compact(&self, to: u64) -> Result<(), StoreError> {
        let mut durable = self.lock()?;
        let compact_to = to.min(self.read().revision);
        if compact_to > self.read().compacted {
            self.make(&mut durable, Change { events: Vec::new(), lease: None, compact_to })?;
        }
        Ok(())
    }

    /// Ends the leases that have expired, in the order of their expiry; at which instant that was.
    fn expire(&self, durable: &mut D) -> Result<Tick, StoreError> {
        let now = self.now();
        loop {
            let Some(change) = self.read().plan_expiry(now) else { return Ok(now) };
            self.make(durable, change)?;
        }
    }

    /// Makes a change durable and applies it; the revision after it.
    fn make(&self, durable: &mut D, change: Change) -> Result<Revision, StoreError> {
        let (revision, compacted) = {
            let state = self.read();
            (change.revision(&state), state.compacted)
        };
        durable.save(&Next { change: &change, revision, compacted })?;
        let now = self.now();
        self.write().apply(change, now);
        self.moved.send_replace(());
        Ok(Revision(revision))
    }

    /// Runs a change to its end, even when the caller has gone.
    async fn run<T: Send + 'static>(
        self: &Arc<Self>,
        change: impl FnOnce(&Local<D>) -> Result<T, StoreError> + Send + 'static,
    ) -> Result<T, StoreError> {
        if !D::WAITS {
            return change(self);
        }
        let local = self.clone();
        let done = tokio::task::spawn_blocking(move || change(&local)).await;
        done.unwrap_or_else(|error| Err(self.failed(error.to_string())))
    }

    /// Returns when no lease that has expired is left.
    async fn settle(self: &Arc<Self>) -> Result<(), StoreError> {
        if self.read().leases.expired(self.now()).is_none() {
            return Ok(());
        }
        self.run(|local| local.expire(&mut *local.lock()?).map(drop)).await
    }

    fn watch(self: &Arc<Self>, prefix: &[u8], from: Revision) -> Result<Watch, StoreError> {
        self.read().changes(prefix, from.0)?;
        let moved = self.moved.subscribe();
        let source = Source { local: self.clone(), prefix: prefix.to_vec(), next: from.0, moved };
        Ok(Watch::new(Box::new(source)))
    }

    async fn reached(&self, instant: Option<Tick>) {
        match instant {
            Some(Tick(microseconds)) => sleep_until(self.start + Duration::from_micros(microseconds)).await,
            None => pending().await,
        }
    }
}

/// A store that is a [`Local`] and nothing else.
pub(crate) trait LocalStore: Send + Sync + fmt::Debug {
    type Durable: Durable;

    fn local(&self) -> &Arc<Local<Self::Durable>>;
}

impl<S: LocalStore> Store for S {
    fn get(&self, key: &[u8]) -> StoreFuture<'_, Option<KeyValue>> {
        let (local, key) = (self.local(), key.to_vec());
        Box::pin(async move {
            local.settle().await?;
            Ok(local.read().entries.get(&key).cloned())
        })
    }

    fn range(&self, prefix: &[u8], limit: usize) -> StoreFuture<'_, Range> {
        let (local, prefix) = (self.local(), prefix.to_vec());
        Box::pin(async move {
            local.settle().await?;
            Ok(local.read().range(&prefix, limit))
        })
    }

    fn transact(&self, transaction: Transaction) -> StoreFuture<'_, Outcome> {
        Box::pin(self.local().run(move |local| local.commit(&transaction)))
    }

    fn watch(&self, prefix: &[u8], from: Revision) -> StoreFuture<'_, Watch> {
        Box::pin(ready(self.local().watch(prefix, from)))
    }

    fn compact(&self, oldest: Revision) -> StoreFuture<'_, ()> {
        Box::pin(self.local().run(move |local| local.compact(oldest.0.saturating_sub(1))))
    }

    fn revision(&self) -> StoreFuture<'_, Revision> {
        let local = self.local();
        Box::pin(async move {
            local.settle().await?;
            Ok(Revision(local.read().revision))
        })
    }

    fn grant(&self, time_to_live: TimeToLive) -> StoreFuture<'_, Lease> {
        Box::pin(self.local().run(move |local| local.grant(time_to_live)))
    }

    fn keep_alive(&self, lease: LeaseId) -> StoreFuture<'_, ()> {
        let local = self.local();
        Box::pin(async move {
            let now = local.now();
            // Not made durable: after a restart every lease has its whole time anyway.
            if local.write().leases.renew(lease, now) {
                return Ok(());
            }
            // What is said to be gone is gone, also after a restart.
            local.settle().await?;
            Err(StoreError::LeaseGone)
        })
    }

    fn revoke(&self, lease: LeaseId) -> StoreFuture<'_, ()> {
        Box::pin(self.local().run(move |local| local.revoke(lease)))
    }
}

struct Source<D> {
    local: Arc<Local<D>>,
    prefix: Vec<u8>,
    /// The first revision not yet reported.
    next: u64,
    moved: watch::Receiver<()>,
}

impl<D: Durable> WatchSource for Source<D> {
    fn next(&mut self) -> StoreFuture<'_, WatchBatch> {
        Box::pin(async move {
            loop {
                self.local.settle().await?;
                // Marked as seen before the state is read: a change in between wakes the wait below.
                self.moved.mark_unchanged();
                let (changes, expiry) = {
                    let state = self.local.read();
                    (state.changes(&self.prefix, self.next)?, state.leases.next_expiry())
                };
                let (batch, next) = changes;
                self.next = next;
                if !batch.events.is_empty() {
                    return Ok(batch);
                }
                tokio::select! {
                    moved = self.moved.changed() => {
                        moved.expect("the sender lives in `local`, which this source holds");
                    }
                    () = self.local.reached(expiry) => {}
                }
            }
        })
    }
}
