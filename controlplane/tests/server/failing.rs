//! A member whose background work fails: it does not go on without it.

use std::sync::Arc;

use reprise_controlplane::server::ControlPlane;
use reprise_controlplane_store::{
    KeyValue, Lease, LeaseId, MemoryStore, Outcome, Range, Revision, Store, StoreFuture, TimeToLive,
    Transaction, Watch,
};
use tokio::time::timeout;

use crate::harness::{PATIENCE, config};

/// A store in memory; whoever watches this prefix of it panics.
#[derive(Debug)]
struct Broken {
    store: MemoryStore,
    watched: &'static [u8],
}

impl Store for Broken {
    fn watch(&self, prefix: &[u8], from: Revision) -> StoreFuture<'_, Watch> {
        assert_ne!(prefix, self.watched, "broken on purpose");
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
async fn a_member_whose_follower_of_the_store_panics_says_that_it_cannot_go_on() {
    for (watched, task) in
        [("members/", "members"), ("nodes/", "nodes"), ("modes/", "modes"), ("tenants/", "budgets")]
    {
        let store = Arc::new(Broken { store: MemoryStore::new(), watched: watched.as_bytes() });
        let mut member = ControlPlane::start_on(store, config()).await.expect("started");
        let failed = timeout(PATIENCE, member.failed()).await.expect("it does not go on");
        let told = format!("{failed:#}");
        assert!(told.contains(&format!("task '{task}'")) && told.contains("broken on purpose"), "{told}");
        member.shutdown().await;
    }
}
