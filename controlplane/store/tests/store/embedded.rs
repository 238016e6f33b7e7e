//! Behaviour specific to the store in a file: restarts, crashes, damage and foreign files.

use std::path::Path;
use std::time::Duration;

use redb::{Database, TableDefinition};
use reprise_controlplane_store::{
    EmbeddedStore, Event, LeaseId, Outcome, Revision, Store, StoreError, TimeToLive, Transaction, Write,
};

fn transaction(number: u64) -> Transaction {
    let put = |key: String| Write::Put {
        key: key.into_bytes(),
        value: number.to_string().into_bytes(),
        lease: None,
    };
    Transaction { conditions: Vec::new(), writes: vec![put("latest".to_owned()), put(format!("n/{number}"))] }
}

fn refused(path: &Path) -> StoreError {
    EmbeddedStore::open(path).expect_err("refused")
}

/// Changes a number in the `meta` table directly in the file.
fn set_meta(path: &Path, name: &str, value: u64) {
    let database = Database::open(path).expect("a database");
    let write = database.begin_write().expect("a transaction");
    write
        .open_table(TableDefinition::<&str, u64>::new("meta"))
        .expect("the table")
        .insert(name, value)
        .expect("an insert");
    write.commit().expect("committed");
}

#[tokio::test]
async fn entries_history_and_revision_survive_a_restart() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("store");
    {
        let store = EmbeddedStore::open(&path).expect("a new store");
        for number in 1..=5 {
            store.transact(transaction(number)).await.expect("committed");
        }
        store
            .transact(Transaction {
                writes: vec![Write::Delete { key: b"n/2".to_vec() }],
                ..Default::default()
            })
            .await
            .expect("committed");
        store.compact(Revision(3)).await.expect("compacted");
    }
    let store = EmbeddedStore::open(&path).expect("the store");
    assert_eq!(store.revision().await.expect("a read"), Revision(6));
    let latest = store.get(b"latest").await.expect("a read").expect("an entry");
    assert_eq!((latest.value.as_slice(), latest.created, latest.version), (b"5".as_slice(), Revision(1), 5));
    assert_eq!(store.range(b"n/", 100).await.expect("a range").entries.len(), 4);
    let lost = store.watch(b"", Revision(2)).await.expect_err("compacted");
    assert!(matches!(lost, StoreError::Compacted { oldest: Revision(3) }), "{lost}");
    let mut watch = store.watch(b"", Revision(5)).await.expect("a watch");
    let batch = watch.next().await.expect("changes");
    assert_eq!(batch.events.len(), 3);
    assert_eq!(batch.events[2], Event::Deleted { key: b"n/2".to_vec(), revision: Revision(6) });
}

async fn put_under(store: &EmbeddedStore, key: &str, lease: LeaseId) {
    let write = Write::Put { key: key.into(), value: Vec::new(), lease: Some(lease) };
    store.transact(Transaction { conditions: Vec::new(), writes: vec![write] }).await.expect("committed");
}

fn seconds(number: u64) -> TimeToLive {
    TimeToLive::new(Duration::from_secs(number)).expect("within the limits")
}

#[tokio::test(start_paused = true)]
async fn leases_restart_their_time_to_live_after_reopening_and_then_expire() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("store");
    let (long, short, revoked) = {
        let store = EmbeddedStore::open(&path).expect("a new store");
        let long = store.grant(seconds(100)).await.expect("granted").id;
        let short = store.grant(seconds(10)).await.expect("granted").id;
        let revoked = store.grant(seconds(10)).await.expect("granted").id;
        put_under(&store, "long", long).await;
        put_under(&store, "short", short).await;
        put_under(&store, "revoked", revoked).await;
        store.revoke(revoked).await.expect("revoked");
        tokio::time::advance(Duration::from_secs(9)).await;
        (long, short, revoked)
    };
    {
        let store = EmbeddedStore::open(&path).expect("the store");
        tokio::time::advance(Duration::from_secs(9)).await;
        let entry = store.get(b"short").await.expect("a read").expect("9 of 10 seconds have passed");
        assert_eq!(entry.lease, Some(short));
        assert!(matches!(store.keep_alive(revoked).await, Err(StoreError::LeaseGone)));
        store.keep_alive(long).await.expect("alive");
        tokio::time::advance(Duration::from_secs(1)).await;
        assert_eq!(store.get(b"short").await.expect("a read"), None);
        let fourth = store.grant(seconds(10)).await.expect("granted").id;
        assert!(![long, short, revoked].contains(&fourth), "ids are not reused");
    }
    let store = EmbeddedStore::open(&path).expect("the store");
    let keys: Vec<_> = store.range(b"", 10).await.expect("a range").entries;
    assert_eq!(keys.iter().map(|entry| entry.key.as_slice()).collect::<Vec<_>>(), [b"long".as_slice()]);
    let mut watch = store.watch(b"short", Revision(1)).await.expect("a watch");
    let events = watch.next().await.expect("changes").events;
    assert!(matches!(events.as_slice(), [Event::Put(_), Event::Deleted { .. }]), "{events:?}");
    tokio::time::advance(Duration::from_secs(100)).await;
    assert!(store.range(b"", 10).await.expect("a range").entries.is_empty());
}

#[tokio::test(start_paused = true)]
async fn an_expired_lease_stays_gone_after_reopening() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("store");
    for by_transaction in [false, true] {
        {
            let store = EmbeddedStore::open(&path).expect("a store");
            let lease = store.grant(seconds(10)).await.expect("granted").id;
            put_under(&store, "a", lease).await;
            tokio::time::advance(Duration::from_secs(10)).await;
            let write = Write::Put { key: b"b".to_vec(), value: Vec::new(), lease: Some(lease) };
            let transaction = Transaction { conditions: Vec::new(), writes: vec![write] };
            let refused = match by_transaction {
                true => store.transact(transaction).await.map(drop),
                false => store.keep_alive(lease).await,
            };
            assert!(matches!(refused, Err(StoreError::LeaseGone)), "{refused:?}");
        }
        let store = EmbeddedStore::open(&path).expect("the store");
        assert!(store.range(b"", 10).await.expect("a range").entries.is_empty());
    }
}

/// Copies the file while the store is open, between answered writes, as a crash would leave it.
#[tokio::test]
async fn committed_transactions_survive_a_crash() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("store");
    let store = EmbeddedStore::open(&path).expect("a new store");
    for number in 1..=20 {
        assert_eq!(
            store.transact(transaction(number)).await.expect("valid"),
            Outcome::Committed(Revision(number))
        );
        let crashed = directory.path().join(format!("crashed-{number}"));
        std::fs::copy(&path, &crashed).expect("copied");
        let after = EmbeddedStore::open(&crashed).expect("a crash causes no damage");
        assert_eq!(after.revision().await.expect("a read"), Revision(number));
        let latest = after.get(b"latest").await.expect("a read").expect("an entry");
        assert_eq!(latest.value, number.to_string().into_bytes());
        assert_eq!(after.range(b"n/", 100).await.expect("a range").entries.len() as u64, number);
    }
}

#[test]
fn rejects_a_store_that_is_already_open() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("store");
    let first = EmbeddedStore::open(&path).expect("a new store");
    let second = refused(&path);
    assert!(matches!(second, StoreError::InUse { .. }), "{second}");
    assert!(second.to_string().contains("another process"), "{second}");
    drop(first);
    EmbeddedStore::open(&path).expect("free again");
}

#[test]
fn rejects_another_schema_version_without_changing_the_file() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("store");
    drop(EmbeddedStore::open(&path).expect("a new store"));
    for version in [0, 1, 3, 99] {
        set_meta(&path, "schema", version);
        let refused = refused(&path);
        assert!(
            matches!(refused, StoreError::Schema { found, supported: 2, .. } if found == version),
            "{refused}"
        );
        assert!(refused.to_string().contains("run the version that wrote it"), "{refused}");
    }
    set_meta(&path, "schema", 2);
    EmbeddedStore::open(&path).expect("nothing else was changed");
}

#[test]
fn rejects_foreign_files_without_changing_them() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("store");
    for content in [b"".as_slice(), b"hello", &[0; 8192], &[0xa5; 100_000]] {
        std::fs::write(&path, content).expect("written");
        let refused = refused(&path);
        assert!(matches!(refused, StoreError::Foreign { .. }), "{} bytes: {refused}", content.len());
        assert!(refused.to_string().contains("store.path"), "{refused}");
        assert_eq!(std::fs::read(&path).expect("read"), content);
    }
    std::fs::remove_file(&path).expect("removed");
    drop(Database::create(&path).expect("a database without our tables"));
    let refused = refused(&path);
    assert!(matches!(refused, StoreError::Foreign { .. }), "{refused}");
}

#[test]
fn a_damaged_store_is_an_error_and_not_a_panic() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("store");
    let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
    runtime.block_on(async {
        let store = EmbeddedStore::open(&path).expect("a new store");
        for number in 1..=50 {
            store.transact(transaction(number)).await.expect("committed");
        }
    });
    let good = std::fs::read(&path).expect("read");
    for length in [9, 64, 4096, good.len() / 2] {
        std::fs::write(&path, &good[..length]).expect("written");
        let refused = refused(&path);
        assert!(!refused.to_string().is_empty());
    }
}

#[test]
fn a_flipped_bit_is_detected_or_harmless_and_does_not_panic() {
    const TRIALS: usize = 200;
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("store");
    let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
    let expected = runtime.block_on(async {
        let store = EmbeddedStore::open(&path).expect("a new store");
        for number in 1..=50 {
            store.transact(transaction(number)).await.expect("committed");
        }
        store.range(b"", 1000).await.expect("a range")
    });
    let good = std::fs::read(&path).expect("read");
    let used: Vec<usize> = (0..good.len()).filter(|place| good[*place] != 0).collect();
    let mut detected = 0;
    for trial in 0..TRIALS {
        let place = used[trial * used.len() / TRIALS];
        let mut bad = good.clone();
        bad[place] ^= 1 << (trial % 8);
        std::fs::write(&path, &bad).expect("written");
        match EmbeddedStore::open(&path) {
            Err(_) => detected += 1,
            Ok(store) => {
                let found = runtime.block_on(store.range(b"", 1000)).expect("a range");
                assert_eq!(found, expected, "bit {} of byte {place} changed the entries", trial % 8);
            }
        }
    }
    assert!(detected > 0, "none of {TRIALS} flipped bits was detected");
}

#[test]
fn reports_a_path_that_cannot_be_created() {
    let directory = tempfile::tempdir().expect("a directory");
    let refused = refused(&directory.path().join("missing").join("store"));
    assert!(matches!(refused, StoreError::Io { .. }), "{refused}");
    assert!(refused.to_string().contains("create"), "{refused}");
}

#[test]
fn opens_despite_leftovers_of_a_crash_during_creation() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("store");
    let leftover = directory.path().join(format!("store.creating-{}", std::process::id()));
    std::fs::write(&leftover, [0; 4096]).expect("written");
    EmbeddedStore::open(&path).expect("a new store");
    let names: Vec<_> = std::fs::read_dir(directory.path()).expect("listed").collect();
    assert_eq!(names.len(), 1, "{names:?}");
}
