//! What every store must do, run over each of them: the sentences of the `Store` trait, one test each.

use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use reprise_controlplane_store::{
    Condition, EmbeddedStore, Event, KEY_BYTES_MAX, MemoryStore, OPERATIONS_MAX, Outcome, Revision, Store,
    StoreError, Transaction, VALUE_BYTES_MAX, Write,
};

fn put(key: &str, value: &str) -> Write {
    Write::Put { key: key.into(), value: value.into() }
}

fn delete(key: &str) -> Write {
    Write::Delete { key: key.into() }
}

fn write(writes: Vec<Write>) -> Transaction {
    Transaction { conditions: Vec::new(), writes }
}

async fn commit(store: &dyn Store, transaction: Transaction) -> Revision {
    match store.transact(transaction).await.expect("valid") {
        Outcome::Committed(revision) => revision,
        Outcome::Conflict => panic!("conflict"),
    }
}

fn names(events: &[Event]) -> Vec<String> {
    let name = |event: &Event| {
        let sign = if matches!(event, Event::Put(_)) { '+' } else { '-' };
        format!("{sign}{}@{}", String::from_utf8_lossy(event.key()), event.revision())
    };
    events.iter().map(name).collect()
}

async fn an_entry_carries_its_revisions_and_version(store: Arc<dyn Store>) {
    assert_eq!(store.get(b"a").await.expect("a read"), None);
    assert_eq!(store.revision().await.expect("a read"), Revision(0));
    assert_eq!(commit(&*store, write(vec![put("a", "1")])).await, Revision(1));
    assert_eq!(commit(&*store, write(vec![put("b", "1")])).await, Revision(2));
    assert_eq!(commit(&*store, write(vec![put("a", "2")])).await, Revision(3));
    let entry = store.get(b"a").await.expect("a read").expect("an entry");
    assert_eq!((entry.key.as_slice(), entry.value.as_slice()), (b"a".as_slice(), b"2".as_slice()));
    assert_eq!((entry.created, entry.modified, entry.version), (Revision(1), Revision(3), 2));
    commit(&*store, write(vec![delete("a")])).await;
    assert_eq!(commit(&*store, write(vec![put("a", "3")])).await, Revision(5));
    let again = store.get(b"a").await.expect("a read").expect("an entry");
    assert_eq!((again.created, again.version), (Revision(5), 1));
}

async fn a_transaction_commits_all_or_nothing(store: Arc<dyn Store>) {
    let create = |key: &str| Transaction {
        conditions: vec![Condition::Absent { key: key.into() }],
        writes: vec![put(key, "new"), put("side", key)],
    };
    assert_eq!(store.transact(create("a")).await.expect("valid"), Outcome::Committed(Revision(1)));
    assert_eq!(store.transact(create("b")).await.expect("valid"), Outcome::Committed(Revision(2)));
    assert_eq!(store.transact(create("a")).await.expect("valid"), Outcome::Conflict);
    assert_eq!(store.revision().await.expect("a read"), Revision(2));
    assert_eq!(store.get(b"side").await.expect("a read").expect("an entry").value, b"b");

    let swap = |revision| Transaction {
        conditions: vec![Condition::Modified { key: b"a".to_vec(), revision }],
        writes: vec![put("a", "swapped")],
    };
    assert_eq!(store.transact(swap(Revision(2))).await.expect("valid"), Outcome::Conflict);
    assert_eq!(store.transact(swap(Revision(1))).await.expect("valid"), Outcome::Committed(Revision(3)));
    assert_eq!(store.transact(swap(Revision(1))).await.expect("valid"), Outcome::Conflict);
    let absent = Transaction {
        conditions: vec![Condition::Modified { key: b"no".to_vec(), revision: Revision(0) }],
        writes: vec![put("no", "")],
    };
    assert_eq!(store.transact(absent).await.expect("valid"), Outcome::Conflict);
}

async fn a_transaction_that_changes_nothing_makes_no_revision(store: Arc<dyn Store>) {
    commit(&*store, write(vec![put("a", "1")])).await;
    assert_eq!(commit(&*store, write(vec![delete("absent")])).await, Revision(1));
    assert_eq!(commit(&*store, Transaction::default()).await, Revision(1));
    assert_eq!(commit(&*store, write(vec![put("a", "1")])).await, Revision(2), "a put is a change");
}

async fn wrong_requests_are_refused_with_words_and_change_nothing(store: Arc<dyn Store>) {
    let many = (0..=OPERATIONS_MAX).map(|number| put(&number.to_string(), "")).collect();
    for (transaction, word) in [
        (write(vec![put("", "x")]), "1 to"),
        (write(vec![put(&"k".repeat(KEY_BYTES_MAX + 1), "x")]), "1 to"),
        (write(vec![put("k", &"v".repeat(VALUE_BYTES_MAX + 1))]), "at most"),
        (write(vec![put("k", "1"), delete("k")]), "twice"),
        (write(many), "at most"),
        (Transaction { conditions: vec![Condition::Absent { key: Vec::new() }], writes: Vec::new() }, "1 to"),
    ] {
        let refused = store.transact(transaction).await.expect_err("invalid");
        assert!(matches!(refused, StoreError::Invalid(_)), "{refused}");
        assert!(refused.to_string().contains(word), "{refused}");
    }
    assert_eq!(store.revision().await.expect("a read"), Revision(0));
    let largest = write(vec![put(&"k".repeat(KEY_BYTES_MAX), &"v".repeat(VALUE_BYTES_MAX))]);
    assert_eq!(commit(&*store, largest).await, Revision(1));
}

async fn a_range_is_ordered_bounded_and_of_one_revision(store: Arc<dyn Store>) {
    commit(
        &*store,
        write(vec![put("n/2", "b"), put("n/1", "a"), put("m/9", ""), put("o", ""), put("n/10", "c")]),
    )
    .await;
    let all = store.range(b"n/", 10).await.expect("a range");
    let keys: Vec<_> = all.entries.iter().map(|entry| entry.key.as_slice()).collect();
    assert_eq!(keys, [b"n/1".as_slice(), b"n/10", b"n/2"]);
    assert_eq!((all.more, all.revision), (false, Revision(1)));
    let some = store.range(b"n/", 2).await.expect("a range");
    assert_eq!((some.entries.len(), some.more), (2, true));
    assert_eq!(store.range(b"", 10).await.expect("a range").entries.len(), 5);
    assert!(store.range(b"x", 10).await.expect("a range").entries.is_empty());
}

async fn a_watch_reports_past_and_future_changes_under_its_prefix_in_order(store: Arc<dyn Store>) {
    commit(&*store, write(vec![put("n/1", "a")])).await;
    commit(&*store, write(vec![put("x", ""), put("n/2", "b")])).await;
    commit(&*store, write(vec![put("x", "")])).await;
    let mut watch = store.watch(b"n/", Revision(2)).await.expect("a watch");
    let first = watch.next().await.expect("changes");
    assert_eq!(names(&first.events), ["+n/2@2"]);
    {
        let mut waiting = pin!(watch.next());
        let mut context = Context::from_waker(Waker::noop());
        assert!(matches!(waiting.as_mut().poll(&mut context), Poll::Pending), "nothing more yet");
        commit(&*store, write(vec![put("x", "other")])).await;
        commit(&*store, write(vec![delete("n/1"), put("n/3", "c")])).await;
        let second = waiting.await.expect("changes");
        assert_eq!(names(&second.events), ["-n/1@5", "+n/3@5"]);
        assert_eq!(second.revision, Revision(5));
    }
    commit(&*store, write(vec![delete("n/3")])).await;
    assert_eq!(names(&watch.next().await.expect("changes").events), ["-n/3@6"]);
}

async fn a_dropped_wait_loses_no_change(store: Arc<dyn Store>) {
    let mut watch = store.watch(b"", Revision(1)).await.expect("a watch");
    {
        let mut waiting = pin!(watch.next());
        assert!(waiting.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
    }
    commit(&*store, write(vec![put("a", "1")])).await;
    commit(&*store, write(vec![put("b", "1")])).await;
    assert_eq!(names(&watch.next().await.expect("changes").events), ["+a@1", "+b@2"]);
}

async fn a_watch_may_begin_in_the_future(store: Arc<dyn Store>) {
    let mut watch = store.watch(b"", Revision(3)).await.expect("a watch");
    for value in ["1", "2", "3", "4"] {
        commit(&*store, write(vec![put("a", value)])).await;
    }
    assert_eq!(names(&watch.next().await.expect("changes").events), ["+a@3", "+a@4"]);
}

async fn compacted_history_is_an_error_that_says_where_to_go_on(store: Arc<dyn Store>) {
    for value in ["1", "2", "3"] {
        commit(&*store, write(vec![put("a", value)])).await;
    }
    let mut slow = store.watch(b"", Revision(1)).await.expect("a watch");
    let mut timely = store.watch(b"", Revision(3)).await.expect("a watch");
    store.compact(Revision(3)).await.expect("compacted");
    store.compact(Revision(2)).await.expect("compacted further already");
    for refused in
        [slow.next().await.expect_err("gone"), store.watch(b"", Revision(2)).await.expect_err("gone")]
    {
        assert!(matches!(refused, StoreError::Compacted { oldest: Revision(3) }), "{refused}");
    }
    assert_eq!(names(&timely.next().await.expect("changes").events), ["+a@3"]);
    assert_eq!(store.get(b"a").await.expect("a read").expect("entries stay").value, b"3");
}

async fn concurrent_swaps_each_take_effect_once(store: Arc<dyn Store>) {
    const TASKS: u64 = 4;
    const EACH: u64 = 10;
    commit(&*store, write(vec![put("counter", "0")])).await;
    let increment = |store: Arc<dyn Store>| async move {
        let mut done = 0;
        while done < EACH {
            let entry = store.get(b"counter").await.expect("a read").expect("an entry");
            let count: u64 = String::from_utf8_lossy(&entry.value).parse().expect("a number");
            let swap = Transaction {
                conditions: vec![Condition::Modified { key: b"counter".to_vec(), revision: entry.modified }],
                writes: vec![put("counter", &(count + 1).to_string())],
            };
            if store.transact(swap).await.expect("valid") != Outcome::Conflict {
                done += 1;
            }
        }
    };
    let tasks: Vec<_> = (0..TASKS).map(|_| tokio::spawn(increment(store.clone()))).collect();
    for task in tasks {
        task.await.expect("no panic");
    }
    let count = store.get(b"counter").await.expect("a read").expect("an entry");
    assert_eq!(count.value, (TASKS * EACH).to_string().into_bytes());
    assert_eq!(count.version, TASKS * EACH + 1);
}

/// One module for each store, one test for each sentence above.
macro_rules! conformance {
    ($($name:ident: $open:expr;)*) => { $(
        mod $name {
            use super::*;

            conformance!(@tests $open;
                an_entry_carries_its_revisions_and_version,
                a_transaction_commits_all_or_nothing,
                a_transaction_that_changes_nothing_makes_no_revision,
                wrong_requests_are_refused_with_words_and_change_nothing,
                a_range_is_ordered_bounded_and_of_one_revision,
                a_watch_reports_past_and_future_changes_under_its_prefix_in_order,
                a_dropped_wait_loses_no_change,
                a_watch_may_begin_in_the_future,
                compacted_history_is_an_error_that_says_where_to_go_on,
                concurrent_swaps_each_take_effect_once,
            );
        }
    )* };
    (@tests $open:expr; $($test:ident,)*) => { $(
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn $test() {
            let directory = tempfile::tempdir().expect("a directory");
            let open: fn(&std::path::Path) -> Arc<dyn Store> = $open;
            super::$test(open(directory.path())).await;
        }
    )* };
}

conformance! {
    memory: |_| Arc::new(MemoryStore::new());
    embedded: |directory| Arc::new(EmbeddedStore::open(&directory.join("store")).expect("a new store"));
}
