//! What every store must do about leases, run over each of them: the sentences of the `Store` trait, one test each.
//!
//! The local stores run on a paused clock, which leaps whenever everybody waits for it: their leases expire at once. etcd's
//! take the seconds that they take; nobody sleeps, everybody waits for what shall happen.

mod etcd_server;

use std::future::Future;
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use etcd_server::Server;
use reprise_controlplane_store::{
    Condition, EmbeddedStore, EtcdStore, Event, HeldLease, Holding, Lease, LeaseId, Loss, MemoryStore,
    Outcome, Revision, Store, StoreError, TimeToLive, Transaction, Watch, Write,
};
use tokio::time::{Instant, timeout};

/// As short as etcd grants: one and a half of its election timeouts.
const SHORT: Duration = Duration::from_secs(2);
/// Beyond the time of any test.
const LONG: Duration = Duration::from_secs(600);
/// Nothing takes longer: etcd looks for expired leases twice a second.
const SOON: Duration = Duration::from_secs(30);

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

/// The keys of the next changes, all of which are deletions of one revision.
async fn deleted(watch: &mut Watch) -> Vec<String> {
    let batch = timeout(SOON, watch.next()).await.expect("changes come").expect("changes");
    assert!(batch.events.iter().all(|event| event.revision() == batch.revision), "{batch:?}");
    let name = |event: &Event| match event {
        Event::Deleted { key, .. } => String::from_utf8_lossy(key).into_owned(),
        Event::Put(entry) => panic!("{entry:?}"),
    };
    batch.events.iter().map(name).collect()
}

fn assert_gone<T: std::fmt::Debug>(answer: Result<T, StoreError>) {
    let refused = answer.expect_err("the lease is gone");
    assert!(matches!(refused, StoreError::LeaseGone), "{refused}");
    assert!(refused.to_string().contains("have another granted"), "{refused}");
}

async fn what_belongs_to_a_lease_vanishes_in_one_revision_when_it_expires(store: Arc<dyn Store>) {
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

async fn what_belongs_to_a_lease_is_gone_when_its_revocation_returns(store: Arc<dyn Store>) {
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
    store.keep_alive(other.id).await.expect("the other lives");
}

async fn a_lease_without_entries_ends_without_a_revision(store: Arc<dyn Store>) {
    let base = store.revision().await.expect("a read");
    let lease = grant(&*store, LONG).await;
    store.keep_alive(lease.id).await.expect("alive");
    store.revoke(lease.id).await.expect("revoked");
    assert_eq!(store.revision().await.expect("a read"), base);
}

/// The one that is kept alive outlives, by more than its own time, others that expire one after the other.
async fn a_lease_outlives_any_number_of_its_times_while_it_is_kept_alive(store: Arc<dyn Store>) {
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
                store.keep_alive(kept.id).await.expect("it is kept alive");
                tokio::time::sleep(SHORT / 8).await;
            }
        };
        tokio::select! {
            () = gone => {}
            () = beats => {}
        }
    }
    assert_eq!(keys(&*store).await, ["kept"]);
    assert_eq!(deleted(&mut watch).await, ["kept"], "and then it expires like any other");
}

async fn many_keep_alives_at_once_are_each_answered(store: Arc<dyn Store>) {
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

async fn an_entry_that_is_put_again_without_the_lease_stays(store: Arc<dyn Store>) {
    let lease = grant(&*store, LONG).await;
    commit(&*store, vec![put("a", "1", lease.id), put("b", "1", lease.id)]).await;
    commit(&*store, vec![put("a", "2", None)]).await;
    store.revoke(lease.id).await.expect("revoked");
    let entry = store.get(b"a").await.expect("a read").expect("it stays");
    assert_eq!((entry.value.as_slice(), entry.lease), (b"2".as_slice(), None));
    assert_eq!(keys(&*store).await, ["a"]);
}

async fn an_entry_that_is_put_again_under_another_lease_belongs_to_that(store: Arc<dyn Store>) {
    let (first, second) = (grant(&*store, LONG).await, grant(&*store, LONG).await);
    commit(&*store, vec![put("a", "1", first.id)]).await;
    commit(&*store, vec![put("a", "2", second.id)]).await;
    store.revoke(first.id).await.expect("revoked");
    assert_eq!(store.get(b"a").await.expect("a read").expect("it stays").lease, Some(second.id));
    store.revoke(second.id).await.expect("revoked");
    assert_eq!(store.get(b"a").await.expect("a read"), None);
}

async fn an_entry_that_was_deleted_and_created_anew_has_nothing_to_do_with_the_lease(store: Arc<dyn Store>) {
    let lease = grant(&*store, LONG).await;
    commit(&*store, vec![put("a", "1", lease.id)]).await;
    commit(&*store, vec![delete("a")]).await;
    commit(&*store, vec![put("a", "2", None)]).await;
    store.revoke(lease.id).await.expect("revoked");
    assert_eq!(keys(&*store).await, ["a"]);
}

async fn a_transaction_under_a_lease_that_is_gone_changes_nothing(store: Arc<dyn Store>) {
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

async fn a_watch_tells_under_which_lease_an_entry_was_put(store: Arc<dyn Store>) {
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

async fn a_held_lease_lives_until_it_is_released(store: Arc<dyn Store>) {
    let held =
        HeldLease::grant(store.clone(), TimeToLive::new(SHORT).expect("valid")).await.expect("granted");
    commit(&*store, vec![put("member", "", held.id())]).await;
    let mut watch = watch(&*store).await;
    let early = timeout(held.time_to_live().duration() * 3, watch.next()).await;
    assert!(early.is_err(), "{early:?}");
    assert!(held.is_held());
    let holding = held.holding();
    held.release().await.expect("released");
    assert_eq!(*holding.borrow(), Holding::Lost(Loss::Released));
    assert!(keys(&*store).await.is_empty(), "its entries are gone when this returns");
    assert_eq!(deleted(&mut watch).await, ["member"]);
}

async fn a_held_lease_that_is_dropped_is_revoked(store: Arc<dyn Store>) {
    let held = HeldLease::grant(store.clone(), TimeToLive::new(LONG).expect("valid")).await.expect("granted");
    commit(&*store, vec![put("member", "", held.id())]).await;
    let mut watch = watch(&*store).await;
    drop(held);
    assert_eq!(deleted(&mut watch).await, ["member"]);
}

async fn the_holder_is_told_when_the_store_has_ended_its_lease(store: Arc<dyn Store>) {
    let held =
        HeldLease::grant(store.clone(), TimeToLive::new(SHORT).expect("valid")).await.expect("granted");
    store.revoke(held.id()).await.expect("revoked");
    assert_eq!(timeout(SOON, held.lost()).await.expect("it is told"), Loss::Gone);
    assert!(!held.is_held());
    held.release().await.expect("nothing is left to release");
}

/// A fresh store in a folder, and what has to live as long as it.
type Opened = (Arc<dyn Store>, Option<Server>);
type AsyncOpen = fn(PathBuf) -> Pin<Box<dyn Future<Output = Opened> + Send>>;

/// One module for each store, one test for each sentence above; the brackets hold the runtime's arguments.
macro_rules! conformance {
    ($($name:ident [$($runtime:tt)*]: $open:expr;)*) => { $(
        mod $name {
            use super::*;

            conformance!(@tests [$($runtime)*] $open;
                what_belongs_to_a_lease_vanishes_in_one_revision_when_it_expires,
                what_belongs_to_a_lease_is_gone_when_its_revocation_returns,
                a_lease_without_entries_ends_without_a_revision,
                a_lease_outlives_any_number_of_its_times_while_it_is_kept_alive,
                many_keep_alives_at_once_are_each_answered,
                an_entry_that_is_put_again_without_the_lease_stays,
                an_entry_that_is_put_again_under_another_lease_belongs_to_that,
                an_entry_that_was_deleted_and_created_anew_has_nothing_to_do_with_the_lease,
                a_transaction_under_a_lease_that_is_gone_changes_nothing,
                a_watch_tells_under_which_lease_an_entry_was_put,
                a_held_lease_lives_until_it_is_released,
                a_held_lease_that_is_dropped_is_revoked,
                the_holder_is_told_when_the_store_has_ended_its_lease,
            );
        }
    )* };
    (@tests $runtime:tt $open:expr; $($test:ident,)*) => { $(
        conformance!(@test $runtime $open; $test);
    )* };
    (@test [$($runtime:tt)*] $open:expr; $test:ident) => {
        #[tokio::test($($runtime)*)]
        async fn $test() {
            let directory = tempfile::tempdir().expect("a directory");
            let open: AsyncOpen = $open;
            let (store, _server) = open(directory.path().to_owned()).await;
            super::$test(store).await;
        }
    };
}

conformance! {
    memory [start_paused = true]: |_| Box::pin(async { (Arc::new(MemoryStore::new()) as Arc<dyn Store>, None) });
    embedded [start_paused = true]: |directory| Box::pin(async move {
        let store = EmbeddedStore::open(&directory.join("store")).expect("a new store");
        (Arc::new(store) as Arc<dyn Store>, None)
    });
    etcd [flavor = "multi_thread", worker_threads = 2]: |directory| Box::pin(async move {
        let server = Server::start(&directory);
        let store = EtcdStore::connect(&server.settings("/reprise/")).await.expect("etcd answers");
        (Arc::new(store) as Arc<dyn Store>, Some(server))
    });
}
