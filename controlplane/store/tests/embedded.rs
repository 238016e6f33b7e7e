//! What only a store in a file must do: come back, and refuse files that it must not touch.

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

/// Changes one number of the `meta` table behind the store's back.
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
async fn entries_history_and_revision_come_back() {
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
async fn leases_come_back_with_their_whole_time_and_end_for_good() {
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
        let entry = store.get(b"short").await.expect("a read").expect("nine of ten seconds have passed");
        assert_eq!(entry.lease, Some(short));
        assert!(matches!(store.keep_alive(revoked).await, Err(StoreError::LeaseGone)));
        store.keep_alive(long).await.expect("alive");
        tokio::time::advance(Duration::from_secs(1)).await;
        assert_eq!(store.get(b"short").await.expect("a read"), None);
        let fourth = store.grant(seconds(10)).await.expect("granted").id;
        assert!(![long, short, revoked].contains(&fourth), "no id is given out again");
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
async fn a_lease_that_was_said_to_be_gone_does_not_come_back() {
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

/// The file as a crash would leave it: copied while the store is open and between writes that were answered.
#[tokio::test]
async fn what_was_answered_as_committed_survives_a_crash() {
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
        let after = EmbeddedStore::open(&crashed).expect("a crash is no damage");
        assert_eq!(after.revision().await.expect("a read"), Revision(number));
        let latest = after.get(b"latest").await.expect("a read").expect("an entry");
        assert_eq!(latest.value, number.to_string().into_bytes());
        assert_eq!(after.range(b"n/", 100).await.expect("a range").entries.len() as u64, number);
    }
}

#[test]
fn a_store_that_is_open_is_refused_with_words() {
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
fn a_store_of_another_schema_is_refused_with_words_and_left_alone() {
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
fn files_that_are_no_store_are_refused_with_words_and_left_alone() {
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
fn a_damaged_store_is_an_error_and_never_a_panic() {
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
fn a_flipped_bit_is_detected_or_harmless_and_never_a_panic() {
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
                assert_eq!(found, expected, "bit {} of byte {place} changed what is read", trial % 8);
            }
        }
    }
    assert!(detected > 0, "none of {TRIALS} flipped bits was noticed");
}

#[test]
fn a_path_that_cannot_be_created_is_refused_with_words() {
    let directory = tempfile::tempdir().expect("a directory");
    let refused = refused(&directory.path().join("missing").join("store"));
    assert!(matches!(refused, StoreError::Io { .. }), "{refused}");
    assert!(refused.to_string().contains("create"), "{refused}");
}

#[test]
fn what_a_crash_during_creation_left_behind_is_no_obstacle() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("store");
    let leftover = directory.path().join(format!("store.creating-{}", std::process::id()));
    std::fs::write(&leftover, [0; 4096]).expect("written");
    EmbeddedStore::open(&path).expect("a new store");
    let names: Vec<_> = std::fs::read_dir(directory.path()).expect("listed").collect();
    assert_eq!(names.len(), 1, "{names:?}");
}
