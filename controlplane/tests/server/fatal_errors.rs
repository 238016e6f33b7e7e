//! A member whose background task fails must fail as a whole.

use std::sync::Arc;

use reprise_controlplane::server::ControlPlane;
use reprise_controlplane_store::{
    KeyValue, Lease, LeaseId, MemoryStore, Outcome, Range, Revision, Store, StoreFuture, TimeToLive,
    Transaction, Watch,
};
use tokio::time::timeout;

use crate::harness::{PATIENCE, config};

/// A memory store that panics when this prefix is watched.
#[derive(Debug)]
struct FaultyStore {
    store: MemoryStore,
    watched: &'static [u8],
}

impl Store for FaultyStore {
    fn watch(&self, prefix: &[u8], from: Revision) -> StoreFuture<'_, Watch> {
        assert_ne!(prefix, self.watched, "injected failure");
        self.store.watch(prefix, from)
    }

    fn get(&self, key: &[u8]) -> StoreFuture<'_, Option<KeyValue>> {
        self.store.get(key)
    }

    fn range(&self, prefix: &[u8], limit: usize) -> StoreFuture<'_, Range> {
        self.store.range(prefix, limit)
    }

    fn transact(&self, transaction: Transaction) -> StoreFuture<'_, Outcome> {
        self.store.transact(transaction)
    }

    fn compact(&self, oldest: Revision) -> StoreFuture<'_, ()> {
        self.store.compact(oldest)
    }

    fn revision(&self) -> StoreFuture<'_, Revision> {
        self.store.revision()
    }

    fn grant(&self, time_to_live: TimeToLive) -> StoreFuture<'_, Lease> {
        self.store.grant(time_to_live)
    }

    fn keep_alive(&self, lease: LeaseId) -> StoreFuture<'_, ()> {
        self.store.keep_alive(lease)
    }

    fn revoke(&self, lease: LeaseId) -> StoreFuture<'_, ()> {
        self.store.revoke(lease)
    }
}

#[tokio::test]
async fn a_member_fails_when_a_task_that_follows_the_store_panics() {
    for (watched, task) in
        [("members/", "members"), ("nodes/", "nodes"), ("modes/", "modes"), ("tenants/", "budgets")]
    {
        let store = Arc::new(FaultyStore { store: MemoryStore::new(), watched: watched.as_bytes() });
        let mut member = ControlPlane::start_with_store(store, config()).await.expect("started");
        let failed = timeout(PATIENCE, member.failed()).await.expect("the member fails");
        let message = format!("{failed:#}");
        assert!(
            message.contains(&format!("task '{task}'")) && message.contains("injected failure"),
            "{message}"
        );
        member.shutdown().await;
    }
}
