//! Common part of the local stores: state, clock, durability and leases.
//!
//! A change is planned against the state, made durable, then applied. Changes are serialized, but do not
//! block readers. Watches read the history at their own pace, so nothing is buffered for them. A watch that
//! falls behind the history gets an error.
//!
//! There are no background tasks. Each access expires due leases first, and a waiting watch wakes at the next
//! expiry, so no caller sees an entry of an expired lease. The clock is tokio's: a runtime with a paused
//! clock can advance leases instantly.

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

pub(crate) trait Durable: Send + fmt::Debug + 'static {
    /// Whether `save` blocks on a device. If so, changes run on the runtime's blocking threads.
    const BLOCKS: bool;

    /// Makes a change durable that is about to be applied to the state.
    fn save(&mut self, next: &PendingChange<'_>) -> Result<(), StoreError>;
}

/// A change with its context.
pub(crate) struct PendingChange<'a> {
    pub(crate) change: &'a Change,
    /// Revision after the change.
    pub(crate) revision: u64,
    /// End of the compacted history before the change.
    pub(crate) compacted: u64,
}

/// A local store. The state's lock is held for memory accesses only, never across a disk write or an await.
#[derive(Debug)]
pub(crate) struct Local<D> {
    /// Path for error messages; empty without a file.
    path: PathBuf,
    start: Instant,
    state: RwLock<State>,
    /// Locked from plan to apply, which serializes changes.
    durable: Mutex<D>,
    /// Wakes watches after a new revision or a change of the next expiry.
    changed: watch::Sender<()>,
}

impl<D: Durable> Local<D> {
    /// Creates a store; existing leases get their whole time to live.
    pub(crate) fn new(path: PathBuf, durable: D, state: State) -> Arc<Local<D>> {
        Arc::new(Local {
            path,
            start: Instant::now(),
            state: RwLock::new(state),
            durable: Mutex::new(durable),
            changed: watch::Sender::new(()),
        })
    }

    fn now(&self) -> Tick {
        Tick(0).after(self.start.elapsed())
    }

    /// Locks the state. A poisoned lock is usable, because a panic cannot leave a change half applied.
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
            Plan::Commit(change) => self.apply_durably(&mut durable, change).map(Outcome::Committed),
        }
    }

    fn grant(&self, time_to_live: TimeToLive) -> Result<Lease, StoreError> {
        let mut durable = self.lock()?;
        self.expire(&mut durable)?;
        let (lease, change) = self.read().plan_grant(time_to_live)?;
        self.apply_durably(&mut durable, change)?;
        Ok(lease)
    }

    fn revoke(&self, lease: LeaseId) -> Result<(), StoreError> {
        let mut durable = self.lock()?;
        let now = self.expire(&mut durable)?;
        let change = self.read().plan_revoke(lease, now)?;
        self.apply_durably(&mut durable, change)?;
        Ok(())
    }

    fn compact(&self, to: u64) -> Result<(), StoreError> {
        let mut durable = self.lock()?;
        let compact_to = to.min(self.read().revision);
        if compact_to > self.read().compacted {
            self.apply_durably(&mut durable, Change { events: Vec::new(), lease: None, compact_to })?;
        }
        Ok(())
    }

    /// Expires due leases in order of their expiry; returns the current time.
    fn expire(&self, durable: &mut D) -> Result<Tick, StoreError> {
        let now = self.now();
        loop {
            let Some(change) = self.read().plan_expiry(now) else { return Ok(now) };
            self.apply_durably(durable, change)?;
        }
    }

    /// Makes a change durable and applies it; returns the revision after it.
    fn apply_durably(&self, durable: &mut D, change: Change) -> Result<Revision, StoreError> {
        let (revision, compacted) = {
            let state = self.read();
            (change.revision(&state), state.compacted)
        };
        durable.save(&PendingChange { change: &change, revision, compacted })?;
        let now = self.now();
        self.write().apply(change, now);
        self.changed.send_replace(());
        Ok(Revision(revision))
    }

    /// Runs a change to completion, even if the caller is cancelled.
    async fn run<T: Send + 'static>(
        self: &Arc<Self>,
        change: impl FnOnce(&Local<D>) -> Result<T, StoreError> + Send + 'static,
    ) -> Result<T, StoreError> {
        if !D::BLOCKS {
            return change(self);
        }
        let local = self.clone();
        let done = tokio::task::spawn_blocking(move || change(&local)).await;
        done.unwrap_or_else(|error| Err(self.failed(error.to_string())))
    }

    /// Expires all due leases.
    async fn expire_leases(self: &Arc<Self>) -> Result<(), StoreError> {
        if self.read().leases.expired(self.now()).is_none() {
            return Ok(());
        }
        self.run(|local| local.expire(&mut *local.lock()?).map(drop)).await
    }

    fn watch(self: &Arc<Self>, prefix: &[u8], from: Revision) -> Result<Watch, StoreError> {
        self.read().changes(prefix, from.0)?;
        let changed = self.changed.subscribe();
        let source = LocalWatch { local: self.clone(), prefix: prefix.to_vec(), next: from.0, changed };
        Ok(Watch::new(Box::new(source)))
    }

    async fn reached(&self, instant: Option<Tick>) {
        match instant {
            Some(Tick(microseconds)) => sleep_until(self.start + Duration::from_micros(microseconds)).await,
            None => pending().await,
        }
    }
}

/// A store that consists of a [`Local`].
pub(crate) trait LocalStore: Send + Sync + fmt::Debug {
    type Durable: Durable;

    fn local(&self) -> &Arc<Local<Self::Durable>>;
}

impl<S: LocalStore> Store for S {
    fn get(&self, key: &[u8]) -> StoreFuture<'_, Option<KeyValue>> {
        let (local, key) = (self.local(), key.to_vec());
        Box::pin(async move {
            local.expire_leases().await?;
            Ok(local.read().entries.get(&key).cloned())
        })
    }

    fn range(&self, prefix: &[u8], limit: usize) -> StoreFuture<'_, Range> {
        let (local, prefix) = (self.local(), prefix.to_vec());
        Box::pin(async move {
            local.expire_leases().await?;
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
            local.expire_leases().await?;
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
            // Keep-alives are not persisted: after a restart every lease has its whole time anyway.
            if local.write().leases.renew(lease, now) {
                return Ok(());
            }
            // Persist the expiry before reporting it, so that the lease stays gone after a restart.
            local.expire_leases().await?;
            Err(StoreError::LeaseGone)
        })
    }

    fn revoke(&self, lease: LeaseId) -> StoreFuture<'_, ()> {
        Box::pin(self.local().run(move |local| local.revoke(lease)))
    }
}

struct LocalWatch<D> {
    local: Arc<Local<D>>,
    prefix: Vec<u8>,
    /// First revision that was not reported yet.
    next: u64,
    changed: watch::Receiver<()>,
}

impl<D: Durable> WatchSource for LocalWatch<D> {
    fn next(&mut self) -> StoreFuture<'_, WatchBatch> {
        Box::pin(async move {
            loop {
                self.local.expire_leases().await?;
                // Mark before reading the state, so that a later change wakes the wait below.
                self.changed.mark_unchanged();
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
                    changed = self.changed.changed() => {
                        changed.expect("`local`, which this watch holds, owns the sender");
                    }
                    () = self.local.reached(expiry) => {}
                }
            }
        })
    }
}
