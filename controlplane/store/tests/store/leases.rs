//! Lease behaviour of every store, one test for each statement of the `Store` trait.
//!
//! The local stores run on a paused clock that advances when all tasks wait, so leases expire at once. Leases
//! in etcd take real seconds; the tests wait for events, not for fixed times.

use std::sync::Arc;
use std::time::Duration;

use reprise_controlplane_store::{
    Condition, Event, Lease, LeaseGuard, LeaseId, LeaseLoss, LeaseStatus, Outcome, Revision, Store,
    StoreError, TimeToLive, Transaction, Watch, Write,
};
use tokio::time::{Instant, timeout};

use crate::every_store::on_every_store;

/// Shortest time to live that etcd grants: 1.5 of its election timeouts.
const SHORT: Duration = Duration::from_secs(2);
/// A time to live beyond the duration of any test.
const LONG: Duration = Duration::from_secs(600);
/// Upper bound for any wait; etcd checks for expired leases twice a second.
const SOON: Duration = Duration::from_secs(60);

fn put(key: &str, value: &str, lease: impl Into<Option<LeaseId>>) -> Write {
    Write::Put { key: key.into(), value: value.into(), lease: lease.into() }
}

fn delete(key: &str) -> Write {
    Write::Delete { key: key.into() }
}

async fn grant(store: &dyn Store, time_to_live: Duration) -> Lease {
    store.grant(TimeToLive::new(time_to_live).expect("within the limits")).await.expect("granted")
}

async fn commit(store: &dyn Store, writes: Vec<Write>) -> Revision {
    match store.transact(Transaction { conditions: Vec::new(), writes }).await.expect("valid") {
        Outcome::Committed(revision) => revision,
        Outcome::Conflict => panic!("conflict"),
    }
}

async fn keys(store: &dyn Store) -> Vec<String> {
    let range = store.range(b"", 100).await.expect("a range");
    range.entries.iter().map(|entry| String::from_utf8_lossy(&entry.key).into_owned()).collect()
}

async fn watch(store: &dyn Store) -> Watch {
    let now = store.revision().await.expect("a read");
    store.watch(b"", Revision(now.0 + 1)).await.expect("a watch")
}

/// Keys of the next changes, which must be deletions of one revision.
async fn deleted(watch: &mut Watch) -> Vec<String> {
    let batch = timeout(SOON, watch.next()).await.expect("changes arrive").expect("changes");
    assert!(batch.events.iter().all(|event| event.revision() == batch.revision), "{batch:?}");
    let name = |event: &Event| match event {
        Event::Deleted { key, .. } => String::from_utf8_lossy(key).into_owned(),
        Event::Put(entry) => panic!("{entry:?}"),
    };
    batch.events.iter().map(name).collect()
}

fn assert_gone<T: std::fmt::Debug>(answer: Result<T, StoreError>) {
    let refused = answer.expect_err("the lease has ended");
    assert!(matches!(refused, StoreError::LeaseGone), "{refused}");
    assert!(refused.to_string().contains("get a new lease"), "{refused}");
}

async fn expiry_deletes_the_entries_of_a_lease_in_one_revision(store: Arc<dyn Store>) {
    let lease = grant(&*store, SHORT).await;
    assert!(lease.time_to_live.duration() >= SHORT);
    commit(&*store, vec![put("b", "", lease.id), put("a", "", lease.id), put("stays", "", None)]).await;
    let written = store.get(b"a").await.expect("a read").expect("an entry");
    assert_eq!(written.lease, Some(lease.id));
    let mut watch = watch(&*store).await;
    assert_eq!(deleted(&mut watch).await, ["a", "b"]);
    assert_eq!(keys(&*store).await, ["stays"]);
    assert_gone(store.keep_alive(lease.id).await);
    assert_gone(store.revoke(lease.id).await);
}

async fn revocation_deletes_the_entries_of_a_lease_before_it_returns(store: Arc<dyn Store>) {
    let lease = grant(&*store, LONG).await;
    let other = grant(&*store, LONG).await;
    assert_ne!(lease.id, other.id);
    commit(&*store, vec![put("b", "", lease.id), put("a", "", lease.id), put("other", "", other.id)]).await;
    let before = store.revision().await.expect("a read");
    let mut watch = watch(&*store).await;
    store.revoke(lease.id).await.expect("revoked");
    assert_eq!(keys(&*store).await, ["other"]);
    assert_eq!(store.revision().await.expect("a read"), Revision(before.0 + 1));
    assert_eq!(deleted(&mut watch).await, ["a", "b"]);
    assert_gone(store.revoke(lease.id).await);
    assert_gone(store.keep_alive(lease.id).await);
    store.keep_alive(other.id).await.expect("the other is alive");
}

async fn the_end_of_a_lease_without_entries_creates_no_revision(store: Arc<dyn Store>) {
    let base = store.revision().await.expect("a read");
    let lease = grant(&*store, LONG).await;
    store.keep_alive(lease.id).await.expect("alive");
    store.revoke(lease.id).await.expect("revoked");
    assert_eq!(store.revision().await.expect("a read"), base);
}

/// Keeps one lease alive for longer than its time to live, measured by others that expire one after another.
async fn a_lease_lives_as_long_as_it_is_kept_alive(store: Arc<dyn Store>) {
    let kept = grant(&*store, SHORT).await;
    commit(&*store, vec![put("kept", "", kept.id)]).await;
    let mut watch = watch(&*store).await;
    let start = Instant::now();
    while start.elapsed() < SHORT * 3 {
        let pace = grant(&*store, Duration::from_secs(1)).await;
        commit(&*store, vec![put("pace", "", pace.id)]).await;
        let paced = watch.next().await.expect("changes").events;
        assert!(matches!(paced.as_slice(), [Event::Put(_)]), "{paced:?}");
        let gone = async { while deleted(&mut watch).await != ["pace"] {} };
        let beats = async {
            loop {
                store.keep_alive(kept.id).await.expect("alive");
                tokio::time::sleep(SHORT / 8).await;
            }
        };
        tokio::select! {
            () = gone => {}
            () = beats => {}
        }
    }
    assert_eq!(keys(&*store).await, ["kept"]);
    assert_eq!(deleted(&mut watch).await, ["kept"], "without keep-alives it expires");
}

async fn answers_concurrent_keep_alives(store: Arc<dyn Store>) {
    let lease = grant(&*store, LONG).await;
    commit(&*store, vec![put("a", "", lease.id)]).await;
    let beat = |store: Arc<dyn Store>| async move {
        for _ in 0..50 {
            store.keep_alive(lease.id).await.expect("alive");
        }
    };
    let tasks: Vec<_> = (0..4).map(|_| tokio::spawn(beat(store.clone()))).collect();
    for task in tasks {
        task.await.expect("no panic");
    }
    assert_eq!(keys(&*store).await, ["a"]);
}

async fn an_entry_put_again_without_a_lease_outlives_the_lease(store: Arc<dyn Store>) {
    let lease = grant(&*store, LONG).await;
    commit(&*store, vec![put("a", "1", lease.id), put("b", "1", lease.id)]).await;
    commit(&*store, vec![put("a", "2", None)]).await;
    store.revoke(lease.id).await.expect("revoked");
    let entry = store.get(b"a").await.expect("a read").expect("an entry");
    assert_eq!((entry.value.as_slice(), entry.lease), (b"2".as_slice(), None));
    assert_eq!(keys(&*store).await, ["a"]);
}

async fn an_entry_put_again_under_another_lease_belongs_to_the_new_lease(store: Arc<dyn Store>) {
    let (first, second) = (grant(&*store, LONG).await, grant(&*store, LONG).await);
    commit(&*store, vec![put("a", "1", first.id)]).await;
    commit(&*store, vec![put("a", "2", second.id)]).await;
    store.revoke(first.id).await.expect("revoked");
    assert_eq!(store.get(b"a").await.expect("a read").expect("an entry").lease, Some(second.id));
    store.revoke(second.id).await.expect("revoked");
    assert_eq!(store.get(b"a").await.expect("a read"), None);
}

async fn an_entry_recreated_without_a_lease_outlives_the_old_lease(store: Arc<dyn Store>) {
    let lease = grant(&*store, LONG).await;
    commit(&*store, vec![put("a", "1", lease.id)]).await;
    commit(&*store, vec![delete("a")]).await;
    commit(&*store, vec![put("a", "2", None)]).await;
    store.revoke(lease.id).await.expect("revoked");
    assert_eq!(keys(&*store).await, ["a"]);
}

async fn a_transaction_with_an_ended_lease_changes_nothing(store: Arc<dyn Store>) {
    let (gone, alive) = (grant(&*store, LONG).await, grant(&*store, LONG).await);
    commit(&*store, vec![put("a", "1", None)]).await;
    store.revoke(gone.id).await.expect("revoked");
    let before = store.revision().await.expect("a read");
    let writes = vec![put("b", "", alive.id), put("c", "", gone.id), delete("a")];
    assert_gone(store.transact(Transaction { conditions: Vec::new(), writes: writes.clone() }).await);
    assert_eq!(
        (keys(&*store).await, store.revision().await.expect("a read")),
        (vec!["a".to_owned()], before)
    );
    let absent = vec![Condition::Absent { key: b"a".to_vec() }];
    let conflict = store.transact(Transaction { conditions: absent, writes }).await.expect("valid");
    assert_eq!(conflict, Outcome::Conflict, "conditions come first");
}

async fn a_watch_reports_the_lease_of_an_entry(store: Arc<dyn Store>) {
    let lease = grant(&*store, LONG).await;
    let mut watch = watch(&*store).await;
    commit(&*store, vec![put("a", "1", lease.id)]).await;
    commit(&*store, vec![put("a", "2", None)]).await;
    let mut leases = Vec::new();
    while leases.len() < 2 {
        for event in watch.next().await.expect("changes").events {
            let Event::Put(entry) = event else { panic!("{event:?}") };
            leases.push(entry.lease);
        }
    }
    assert_eq!(leases, [Some(lease.id), None]);
}

async fn a_kept_lease_lives_until_it_is_released(store: Arc<dyn Store>) {
    let held =
        LeaseGuard::grant(store.clone(), TimeToLive::new(SHORT).expect("valid")).await.expect("granted");
    commit(&*store, vec![put("member", "", held.id())]).await;
    let mut watch = watch(&*store).await;
    let early = timeout(held.time_to_live().duration() * 3, watch.next()).await;
    assert!(early.is_err(), "{early:?}");
    assert!(held.is_held());
    let holding = held.status();
    held.release().await.expect("released");
    assert_eq!(*holding.borrow(), LeaseStatus::Lost(LeaseLoss::Released));
    assert!(keys(&*store).await.is_empty(), "entries are deleted before it returns");
    assert_eq!(deleted(&mut watch).await, ["member"]);
}

async fn dropping_the_guard_revokes_the_lease(store: Arc<dyn Store>) {
    let held =
        LeaseGuard::grant(store.clone(), TimeToLive::new(LONG).expect("valid")).await.expect("granted");
    commit(&*store, vec![put("member", "", held.id())]).await;
    let mut watch = watch(&*store).await;
    drop(held);
    assert_eq!(deleted(&mut watch).await, ["member"]);
}

async fn the_guard_reports_that_the_store_ended_the_lease(store: Arc<dyn Store>) {
    let held =
        LeaseGuard::grant(store.clone(), TimeToLive::new(SHORT).expect("valid")).await.expect("granted");
    store.revoke(held.id()).await.expect("revoked");
    assert_eq!(timeout(SOON, held.wait_lost()).await.expect("reported"), LeaseLoss::Expired);
    assert!(!held.is_held());
    held.release().await.expect("releasing a lost lease succeeds");
}

on_every_store! {
    [start_paused = true];
    expiry_deletes_the_entries_of_a_lease_in_one_revision,
    revocation_deletes_the_entries_of_a_lease_before_it_returns,
    the_end_of_a_lease_without_entries_creates_no_revision,
    a_lease_lives_as_long_as_it_is_kept_alive,
    answers_concurrent_keep_alives,
    an_entry_put_again_without_a_lease_outlives_the_lease,
    an_entry_put_again_under_another_lease_belongs_to_the_new_lease,
    an_entry_recreated_without_a_lease_outlives_the_old_lease,
    a_transaction_with_an_ended_lease_changes_nothing,
    a_watch_reports_the_lease_of_an_entry,
    a_kept_lease_lives_until_it_is_released,
    dropping_the_guard_revokes_the_lease,
    the_guard_reports_that_the_store_ended_the_lease,
}
