//! Behaviour specific to the etcd store: prefixes, outages, restarts, replaced clusters and schema versions.

use std::sync::Arc;
use std::time::{Duration, Instant};

use etcd_client::Client;
use reprise_controlplane_store::{
    Condition, EtcdSettings, EtcdStore, Event, LeaseGuard, LeaseLoss, Outcome, Revision, Store, StoreError,
    TimeToLive, Transaction, VALUE_BYTES_MAX, Write,
};
use reprise_testkit::etcd::Etcd;
use reprise_testkit::process::LaunchOptions;

use crate::every_store::settings;

/// Time limit for any event that must happen. A busy machine delays events by seconds.
const PATIENCE: Duration = Duration::from_secs(60);

fn put(key: &str, value: &str) -> Transaction {
    let write = Write::Put { key: key.into(), value: value.into(), lease: None };
    Transaction { conditions: Vec::new(), writes: vec![write] }
}

/// Starts an etcd in a new folder, with a store.
async fn started() -> (tempfile::TempDir, Etcd, EtcdStore) {
    let folder = tempfile::tempdir().expect("a folder");
    let server = Etcd::start_in(folder.path());
    let store = connect(&server, "/a/").await;
    (folder, server, store)
}

async fn connect(server: &Etcd, prefix: &str) -> EtcdStore {
    EtcdStore::connect(&settings(server, prefix)).await.expect("etcd answers")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn installations_with_different_prefixes_do_not_see_each_other() {
    let folder = tempfile::tempdir().expect("a folder");
    let server = Etcd::start_in(folder.path());
    let (ours, theirs) = (connect(&server, "/a/").await, connect(&server, "/b/").await);
    let from = ours.revision().await.expect("a revision");
    let mut watch = ours.watch(b"", from).await.expect("a watch");
    theirs.transact(put("x", "theirs")).await.expect("committed");
    let absent = Condition::Absent { key: b"x".to_vec() };
    let ours_first = Transaction { conditions: vec![absent], ..put("x", "ours") };
    assert!(matches!(ours.transact(ours_first).await.expect("committed"), Outcome::Committed(_)));
    let batch = watch.next().await.expect("changes");
    let [Event::Put(entry)] = batch.events.as_slice() else { panic!("{batch:?}") };
    assert_eq!((entry.key.as_slice(), entry.value.as_slice()), (b"x".as_slice(), b"ours".as_slice()));
    assert_eq!(theirs.range(b"", 10).await.expect("a range").entries.len(), 1);
}

#[tokio::test]
async fn calls_fail_within_their_deadline_without_etcd() {
    let (_folder, mut server, store) = started().await;
    server.kill();
    // No process answers from now on, so time passes as soon as all calls wait.
    tokio::time::pause();
    let started = tokio::time::Instant::now();
    let refused = store.get(b"x").await.expect_err("etcd is stopped");
    assert!(matches!(refused, StoreError::Unavailable { .. }), "{refused}");
    let refused = EtcdStore::connect(&settings(&server, "/a/")).await.expect_err("etcd is stopped");
    assert!(refused.to_string().contains("store.endpoints"), "{refused}");
    assert!(started.elapsed() < Duration::from_secs(12), "two calls of five seconds");
    let nowhere = EtcdSettings { endpoints: Vec::new(), ..settings(&server, "/a/") };
    assert!(matches!(EtcdStore::connect(&nowhere).await, Err(StoreError::Setting(_))));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_watch_survives_etcd_restarts_without_losing_changes() {
    let (_folder, mut server, store) = started().await;
    let from = store.revision().await.expect("a revision");
    let mut watch = store.watch(b"", from).await.expect("a watch");
    let mut seen = Vec::new();
    for round in 0..3 {
        for number in 0..4 {
            store.transact(put(&format!("{round}/{number}"), "")).await.expect("committed");
        }
        server.kill();
        server.restart();
        // The client reconnects to the new process after a pause.
        let give_up = Instant::now() + PATIENCE;
        while store.revision().await.is_err() {
            assert!(Instant::now() < give_up, "the store does not reconnect to etcd");
        }
    }
    while seen.len() < 12 {
        let batch = tokio::time::timeout(PATIENCE, watch.next()).await.expect("changes arrive");
        seen.extend(batch.expect("history is available").events.iter().map(|event| event.key().to_vec()));
    }
    let expected: Vec<Vec<u8>> =
        (0..3).flat_map(|round| (0..4).map(move |number| format!("{round}/{number}").into_bytes())).collect();
    assert_eq!(seen, expected);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_watch_of_an_emptied_etcd_ends_instead_of_waiting() {
    let (_folder, mut server, store) = started().await;
    for number in 0..9 {
        store.transact(put(&number.to_string(), "")).await.expect("committed");
    }
    let from = reprise_controlplane_store::Revision(store.revision().await.expect("a revision").0 + 1);
    let mut watch = store.watch(b"", from).await.expect("a watch");
    server.kill();
    server.wipe();
    server.restart();
    let ended = tokio::time::timeout(PATIENCE, watch.next()).await.expect("the watch ends");
    assert!(matches!(ended, Err(StoreError::Replaced { .. })), "{ended:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_call_detects_an_etcd_restored_to_an_earlier_revision() {
    let (_folder, mut server, store) = started().await;
    store.transact(put("x", "before")).await.expect("committed");
    server.kill();
    server.back_up();
    server.restart();
    // A client that has seen no more than the backup contains cannot detect the restore.
    let other = connect(&server, "/a/").await;
    let mut seen = other.watch(b"", Revision(1)).await.expect("a watch");
    seen.next().await.expect("the put");
    for number in 0..3 {
        store.transact(put("x", &number.to_string())).await.expect("committed");
    }
    let mut watch = store.watch(b"x", Revision(1)).await.expect("a watch");
    watch.next().await.expect("the put");
    server.kill();
    server.restore();
    server.restart();
    let of_watch = tokio::time::timeout(PATIENCE, watch.next()).await.expect("the watch ends");
    let answers = [
        of_watch.err(),
        store.get(b"x").await.err(),
        store.range(b"", 10).await.err(),
        store.revision().await.err(),
        store.transact(put("y", "")).await.err(),
        store.watch(b"", Revision(1)).await.err(),
    ];
    for (call, outcome) in answers.into_iter().enumerate() {
        assert!(matches!(outcome, Some(StoreError::Replaced { .. })), "call {call}: {outcome:?}");
    }
    let fresh = connect(&server, "/a/").await;
    let entry = fresh.get(b"x").await.expect("readable").expect("it was in the backup");
    assert_eq!(entry.value, b"before");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn detects_another_cluster_at_the_same_address() {
    let (folder, elsewhere) =
        (tempfile::tempdir().expect("a folder"), tempfile::tempdir().expect("a folder"));
    let mut server = Etcd::start_in(folder.path());
    let store = connect(&server, "/a/").await;
    store.transact(put("x", "")).await.expect("committed");
    server.kill();
    let arguments = ["--initial-cluster-token", "another"].map(str::to_owned).to_vec();
    let another = LaunchOptions { arguments, ..LaunchOptions::default() };
    let mut other = server.replace(elsewhere.path(), another);
    let fresh = connect(&other, "/a/").await;
    for number in 0..20 {
        fresh.transact(put(&number.to_string(), "")).await.expect("committed");
    }
    let outcome = store.get(b"x").await.expect_err("another cluster");
    assert!(matches!(outcome, StoreError::Replaced { .. }), "{outcome}");
    other.kill();
}

/// A stopped server keeps its connections but does not answer, so only the deadline ends a call.
#[tokio::test]
async fn calls_fail_within_their_deadline_while_etcd_is_stopped() {
    let (_folder, server, store) = started().await;
    let time_to_live = TimeToLive::new(Duration::from_secs(60)).expect("valid");
    let lease = store.grant(time_to_live).await.expect("granted").id;
    server.pause();
    // No process answers from now on, so time passes as soon as all calls wait.
    tokio::time::pause();
    let started = tokio::time::Instant::now();
    let settings = settings(&server, "/a/");
    let (get, range, transact, watch, compact, grant, keep_alive, revoke, connect) = tokio::join!(
        store.get(b"x"),
        store.range(b"", 10),
        store.transact(put("x", "")),
        store.watch(b"", Revision(1)),
        store.compact(Revision(2)),
        store.grant(time_to_live),
        store.keep_alive(lease),
        store.revoke(lease),
        EtcdStore::connect(&settings),
    );
    assert!(started.elapsed() < Duration::from_secs(15), "{:?}", started.elapsed());
    let answers = [
        get.err(),
        range.err(),
        transact.err(),
        watch.err(),
        compact.err(),
        grant.err(),
        keep_alive.err(),
        revoke.err(),
        connect.err(),
    ];
    for (call, refused) in answers.into_iter().enumerate() {
        assert!(matches!(refused, Some(StoreError::Unavailable { .. })), "call {call}: {refused:?}");
    }
}

#[tokio::test]
async fn a_kept_lease_is_lost_by_its_deadline_while_etcd_is_stopped() {
    let (_folder, server, store) = started().await;
    let held = LeaseGuard::grant(Arc::new(store), TimeToLive::new(Duration::from_secs(2)).expect("valid"));
    let held = held.await.expect("granted");
    server.pause();
    tokio::time::pause();
    let started = tokio::time::Instant::now();
    let loss = tokio::time::timeout(PATIENCE, held.wait_lost()).await.expect("the loss is reported");
    assert!(matches!(loss, LeaseLoss::Unconfirmed { .. }), "{loss}");
    let bound = held.time_to_live().duration();
    assert!(started.elapsed() <= bound, "{:?} for {}", started.elapsed(), held.time_to_live());
    assert!(!held.is_held());
    held.release().await.expect("releasing a lost lease succeeds");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_kept_lease_survives_a_restart_of_etcd() {
    let (_folder, mut server, store) = started().await;
    let time_to_live = TimeToLive::new(Duration::from_secs(60)).expect("valid");
    let held = LeaseGuard::grant(Arc::new(store.clone()), time_to_live).await.expect("granted");
    let write = Write::Put { key: b"member".to_vec(), value: Vec::new(), lease: Some(held.id()) };
    store.transact(Transaction { conditions: Vec::new(), writes: vec![write] }).await.expect("committed");
    server.kill();
    server.restart();
    let give_up = Instant::now() + PATIENCE;
    while let Err(error) = store.keep_alive(held.id()).await {
        assert!(matches!(error, StoreError::Unavailable { .. }), "{error}");
        assert!(Instant::now() < give_up, "the store does not reconnect to etcd");
    }
    assert!(held.is_held());
    assert_eq!(store.range(b"", 10).await.expect("a range").entries.len(), 1);
    held.release().await.expect("released");
    assert!(store.range(b"", 10).await.expect("a range").entries.is_empty());
}

/// The watch loses its connection while it is not read. It reopens after its last reported revision, which is
/// compacted by then.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reconnected_watch_reports_compacted_history() {
    let (_folder, mut server, store) = started().await;
    let from = Revision(store.revision().await.expect("a revision").0 + 1);
    let mut watch = store.watch(b"", from).await.expect("a watch");
    store.transact(put("a", "1")).await.expect("committed");
    assert_eq!(watch.next().await.expect("changes").events.len(), 1);
    server.kill();
    server.restart();
    let other = connect(&server, "/a/").await;
    for value in ["2", "3", "4"] {
        other.transact(put("a", value)).await.expect("committed");
    }
    let now = other.revision().await.expect("a revision");
    other.compact(now).await.expect("compacted");
    let outcome = tokio::time::timeout(PATIENCE, watch.next()).await.expect("the watch reports it");
    assert!(matches!(outcome, Err(StoreError::Compacted { oldest }) if oldest == now), "{outcome:?}");
    let range = other.range(b"", 10).await.expect("a range");
    assert_eq!(range.entries[0].value, b"4", "the range has the current value");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rejects_another_schema_version_without_changing_keys() {
    let folder = tempfile::tempdir().expect("a folder");
    let server = Etcd::start_in(folder.path());
    let settings = settings(&server, "/a/");
    let store = connect(&server, "/a/").await;
    store.transact(put("x", "1")).await.expect("committed");
    let mut raw = Client::connect(&settings.endpoints, None).await.expect("etcd answers");
    let all = raw.get("/a/", Some(etcd_client::GetOptions::new().with_prefix())).await.expect("a range");
    let keys: Vec<_> = all.kvs().iter().map(|entry| entry.key_str().expect("text").to_owned()).collect();
    assert_eq!(keys, ["/a/entries/x", "/a/schema"]);
    raw.put("/a/schema", "2", None).await.expect("put");
    let refused = EtcdStore::connect(&settings).await.expect_err("another version");
    assert!(matches!(refused, StoreError::Schema { found: 2, supported: 1, .. }), "{refused}");
    assert!(refused.to_string().contains("/a/schema"), "{refused}");
    raw.put("/a/schema", "hello", None).await.expect("put");
    let refused = EtcdStore::connect(&settings).await.expect_err("invalid version");
    assert!(refused.to_string().contains("store.prefix"), "{refused}");
    raw.put("/a/schema", "1", None).await.expect("put");
    let store = connect(&server, "/a/").await;
    assert_eq!(store.get(b"x").await.expect("a read").expect("an entry").value, b"1");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn concurrent_first_connections_agree_on_the_schema() {
    let folder = tempfile::tempdir().expect("a folder");
    let server = Etcd::start_in(folder.path());
    let tasks: Vec<_> = (0..4)
        .map(|_| {
            let settings = settings(&server, "/a/");
            tokio::spawn(async move { EtcdStore::connect(&settings).await.map(drop) })
        })
        .collect();
    for task in tasks {
        task.await.expect("no panic").expect("connected");
    }
}

/// Sizes beyond the default message limit of a gRPC client (4 MiB), which it would report as out of range.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reads_ranges_and_watches_of_the_largest_values_completely() {
    const WRITES: usize = 20;
    const TRANSACTIONS: usize = 5;
    let (_folder, _server, store) = started().await;
    let from = Revision(store.revision().await.expect("a revision").0 + 1);
    for transaction in 0..TRANSACTIONS {
        let write = |number| Write::Put {
            key: format!("{transaction}/{number:02}").into_bytes(),
            value: vec![b'v'; VALUE_BYTES_MAX],
            lease: None,
        };
        let writes = (0..WRITES).map(write).collect();
        store.transact(Transaction { conditions: Vec::new(), writes }).await.expect("committed");
    }
    let range = store.range(b"", 1000).await.expect("a range");
    assert_eq!((range.entries.len(), range.more), (WRITES * TRANSACTIONS, false));
    let mut watch = store.watch(b"", from).await.expect("a watch");
    let mut events = 0;
    while events < WRITES * TRANSACTIONS {
        events += watch.next().await.expect("changes").events.len();
    }
    assert_eq!(events, WRITES * TRANSACTIONS);
}
