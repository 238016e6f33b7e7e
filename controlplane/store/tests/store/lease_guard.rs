//! Tests of `LeaseGuard` with a store that fails on demand. The clock is paused and advances automatically.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use reprise_controlplane_store::{
    KeyValue, Lease, LeaseGuard, LeaseId, LeaseLoss, MemoryStore, Outcome, Range, Revision, Store,
    StoreError, StoreFuture, TimeToLive, Transaction, Watch,
};
use tokio::time::{Instant, sleep};

const TIME_TO_LIVE: Duration = Duration::from_secs(12);

/// How the store replies to keep-alives.
#[derive(Clone, Copy, Debug)]
enum KeepAliveBehavior {
    /// Every n-th call succeeds, all others fail.
    Every(u64),
    /// No call is ever answered.
    Silent,
}

/// A memory store with configurable keep-alive failures.
#[derive(Debug)]
struct FaultyStore {
    inner: MemoryStore,
    behavior: KeepAliveBehavior,
    asked: AtomicU64,
}

impl FaultyStore {
    async fn hold(behavior: KeepAliveBehavior) -> (Arc<FaultyStore>, LeaseGuard) {
        let store = Arc::new(FaultyStore { inner: MemoryStore::new(), behavior, asked: AtomicU64::new(0) });
        let time_to_live = TimeToLive::new(TIME_TO_LIVE).expect("within the limits");
        let held = LeaseGuard::grant(store.clone(), time_to_live).await.expect("granted");
        (store, held)
    }

    fn asked(&self) -> u64 {
        self.asked.load(Ordering::Relaxed)
    }
}

impl Store for FaultyStore {
    fn get(&self, key: &[u8]) -> StoreFuture<'_, Option<KeyValue>> {
        self.inner.get(key)
    }

    fn range(&self, prefix: &[u8], limit: usize) -> StoreFuture<'_, Range> {
        self.inner.range(prefix, limit)
    }

    fn transact(&self, transaction: Transaction) -> StoreFuture<'_, Outcome> {
        self.inner.transact(transaction)
    }

    fn watch(&self, prefix: &[u8], from: Revision) -> StoreFuture<'_, Watch> {
        self.inner.watch(prefix, from)
    }

    fn compact(&self, oldest: Revision) -> StoreFuture<'_, ()> {
        self.inner.compact(oldest)
    }

    fn revision(&self) -> StoreFuture<'_, Revision> {
        self.inner.revision()
    }

    fn grant(&self, time_to_live: TimeToLive) -> StoreFuture<'_, Lease> {
        self.inner.grant(time_to_live)
    }

    fn keep_alive(&self, lease: LeaseId) -> StoreFuture<'_, ()> {
        let asked = self.asked.fetch_add(1, Ordering::Relaxed) + 1;
        match self.behavior {
            KeepAliveBehavior::Every(count) if asked.is_multiple_of(count) => self.inner.keep_alive(lease),
            KeepAliveBehavior::Every(_) => {
                Box::pin(async { Err(StoreError::Unavailable { reason: "injected failure".to_owned() }) })
            }
            KeepAliveBehavior::Silent => Box::pin(std::future::pending()),
        }
    }

    fn revoke(&self, lease: LeaseId) -> StoreFuture<'_, ()> {
        self.inner.revoke(lease)
    }
}

#[tokio::test(start_paused = true)]
async fn sends_three_keep_alives_per_time_to_live() {
    let (store, held) = FaultyStore::hold(KeepAliveBehavior::Every(1)).await;
    sleep(TIME_TO_LIVE * 10 + Duration::from_secs(1)).await;
    assert!(held.is_held());
    assert_eq!(store.asked(), 30);
}

#[tokio::test(start_paused = true)]
async fn retries_failed_keep_alives_before_the_lease_is_lost() {
    let (store, held) = FaultyStore::hold(KeepAliveBehavior::Every(5)).await;
    sleep(TIME_TO_LIVE * 10).await;
    assert!(held.is_held(), "{} keep-alives", store.asked());
    held.release().await.expect("released");
}

#[tokio::test(start_paused = true)]
async fn loses_the_lease_at_its_deadline_when_keep_alives_fail() {
    let start = Instant::now();
    let (store, held) = FaultyStore::hold(KeepAliveBehavior::Every(u64::MAX)).await;
    let loss = held.wait_lost().await;
    assert!(matches!(&loss, LeaseLoss::Unconfirmed { last } if last.contains("injected failure")), "{loss}");
    assert_eq!(start.elapsed(), TIME_TO_LIVE);
    assert_eq!(store.asked(), 8, "after a third of the time to live, one per twelfth");
}

#[tokio::test(start_paused = true)]
async fn loses_the_lease_at_its_deadline_when_the_store_is_silent() {
    let start = Instant::now();
    let (store, held) = FaultyStore::hold(KeepAliveBehavior::Silent).await;
    let early = held.status();
    assert!(!early.has_changed().expect("the lease is held"));
    assert!(matches!(held.wait_lost().await, LeaseLoss::Unconfirmed { .. }));
    assert_eq!(start.elapsed(), TIME_TO_LIVE);
    assert!(!held.is_held() && early.has_changed().unwrap_or(true));
    held.release().await.expect("releasing a lost lease succeeds");
    assert_eq!(store.asked(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_silent_store_does_not_delay_the_release() {
    let (_, held) = FaultyStore::hold(KeepAliveBehavior::Silent).await;
    sleep(TIME_TO_LIVE / 2).await;
    let start = Instant::now();
    held.release().await.expect("released");
    assert_eq!(start.elapsed(), Duration::ZERO);
}
