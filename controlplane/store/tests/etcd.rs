//! What is etcd's own: its prefix, its absence, its restarts, its other users.

mod etcd_server;

use std::time::{Duration, Instant};

use etcd_server::Server;
use reprise_controlplane_store::{
    Condition, EtcdSettings, EtcdStore, Event, Outcome, Store, StoreError, Transaction, Write,
};

fn put(key: &str, value: &str) -> Transaction {
    let write = Write::Put { key: key.into(), value: value.into() };
    Transaction { conditions: Vec::new(), writes: vec![write] }
}

async fn connect(server: &Server, prefix: &str) -> EtcdStore {
    EtcdStore::connect(&server.settings(prefix)).await.expect("etcd answers")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn installations_with_different_prefixes_do_not_see_each_other() {
    let folder = tempfile::tempdir().expect("a folder");
    let server = Server::start(folder.path());
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

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_etcd_every_call_ends_within_its_bound_and_with_words() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut server = Server::start(folder.path());
    let store = connect(&server, "/a/").await;
    server.kill();
    let started = Instant::now();
    let refused = store.get(b"x").await.expect_err("nobody is there");
    assert!(matches!(refused, StoreError::Unavailable { .. }), "{refused}");
    let refused = EtcdStore::connect(&server.settings("/a/")).await.expect_err("nobody is there");
    assert!(refused.to_string().contains("store.endpoints"), "{refused}");
    assert!(started.elapsed() < Duration::from_secs(12), "two calls of five seconds");
    let nowhere = EtcdSettings { endpoints: Vec::new(), ..server.settings("/a/") };
    assert!(matches!(EtcdStore::connect(&nowhere).await, Err(StoreError::Invalid(_))));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_watch_outlives_etcd_and_loses_nothing() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut server = Server::start(folder.path());
    let store = connect(&server, "/a/").await;
    let from = store.revision().await.expect("a revision");
    let mut watch = store.watch(b"", from).await.expect("a watch");
    let mut seen = Vec::new();
    for round in 0..3 {
        for number in 0..4 {
            store.transact(put(&format!("{round}/{number}"), "")).await.expect("committed");
        }
        server.kill();
        server.restart();
        // The client finds the new process by itself, after a pause of its own.
        let give_up = Instant::now() + Duration::from_secs(20);
        while store.revision().await.is_err() {
            assert!(Instant::now() < give_up, "etcd is back and the store does not find it");
        }
    }
    while seen.len() < 12 {
        let batch = tokio::time::timeout(Duration::from_secs(20), watch.next()).await.expect("changes come");
        seen.extend(batch.expect("nothing is compacted").events.iter().map(|event| event.key().to_vec()));
    }
    let expected: Vec<Vec<u8>> =
        (0..3).flat_map(|round| (0..4).map(move |number| format!("{round}/{number}").into_bytes())).collect();
    assert_eq!(seen, expected);
}
