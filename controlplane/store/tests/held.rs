//! A held lease over a store that fails in ways that real ones do not on demand; the clock is paused and leaps.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use reprise_controlplane_store::{
    HeldLease, KeyValue, Lease, LeaseId, Loss, MemoryStore, Outcome, Range, Revision, Store, StoreError,
    StoreFuture, TimeToLive, Transaction, Watch,
};
use tokio::time::{Instant, sleep};

const TIME_TO_LIVE: Duration = Duration::from_secs(12);

/// What becomes of keep-alives.
#[derive(Clone, Copy, Debug)]
enum Mood {
    /// Every so many is answered, all others fail.
    Every(u64),
    /// They are never answered.
    Silent,
}

/// A memory store that is moody about keep-alives.
#[derive(Debug)]
struct Moody {
    inner: MemoryStore,
    mood: Mood,
    asked: AtomicU64,
}

impl Moody {
    async fn hold(mood: Mood) -> (Arc<Moody>, HeldLease) {
        let store = Arc::new(Moody { inner: MemoryStore::new(), mood, asked: AtomicU64::new(0) });
        let time_to_live = TimeToLive::new(TIME_TO_LIVE).expect("within the limits");
        let held = HeldLease::grant(store.clone(), time_to_live).await.expect("granted");
        (store, held)
    }

    fn asked(&self) -> u64 {
        self.asked.load(Ordering::Relaxed)
    }
}

impl Store for Moody {
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
        match self.mood {
            Mood::Every(count) if asked.is_multiple_of(count) => self.inner.keep_alive(lease),
            Mood::Every(_) => {
                Box::pin(async { Err(StoreError::Unavailable { reason: "it is moody".to_owned() }) })
            }
            Mood::Silent => Box::pin(std::future::pending()),
        }
    }

    fn revoke(&self, lease: LeaseId) -> StoreFuture<'_, ()> {
        self.inner.revoke(lease)
    }
}

#[tokio::test(start_paused = true)]
async fn a_store_that_answers_asks_for_three_keep_alives_in_a_time_to_live() {
    let (store, held) = Moody::hold(Mood::Every(1)).await;
    sleep(TIME_TO_LIVE * 10 + Duration::from_secs(1)).await;
    assert!(held.is_held());
    assert_eq!(store.asked(), 30);
}

#[tokio::test(start_paused = true)]
async fn keep_alives_that_fail_are_tried_again_before_the_lease_is_lost() {
    let (store, held) = Moody::hold(Mood::Every(5)).await;
    sleep(TIME_TO_LIVE * 10).await;
    assert!(held.is_held(), "{} keep-alives", store.asked());
    held.release().await.expect("released");
}

#[tokio::test(start_paused = true)]
async fn a_store_that_keeps_failing_loses_the_lease_at_its_deadline() {
    let start = Instant::now();
    let (store, held) = Moody::hold(Mood::Every(u64::MAX)).await;
    let loss = held.lost().await;
    assert!(matches!(&loss, Loss::Unconfirmed { last } if last.contains("it is moody")), "{loss}");
    assert_eq!(start.elapsed(), TIME_TO_LIVE);
    assert_eq!(store.asked(), 8, "from a third of its time on, one in each twelfth");
}

#[tokio::test(start_paused = true)]
async fn a_store_that_never_answers_loses_the_lease_at_its_deadline() {
    let start = Instant::now();
    let (store, held) = Moody::hold(Mood::Silent).await;
    let early = held.holding();
    assert!(!early.has_changed().expect("the lease is held"));
    assert!(matches!(held.lost().await, Loss::Unconfirmed { .. }));
    assert_eq!(start.elapsed(), TIME_TO_LIVE);
    assert!(!held.is_held() && early.has_changed().unwrap_or(true));
    held.release().await.expect("nothing is left to release");
    assert_eq!(store.asked(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_silent_store_does_not_hold_up_the_release() {
    let (_, held) = Moody::hold(Mood::Silent).await;
    sleep(TIME_TO_LIVE / 2).await;
    let start = Instant::now();
    held.release().await.expect("released");
    assert_eq!(start.elapsed(), Duration::ZERO);
}
