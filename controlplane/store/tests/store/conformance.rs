//! Conformance of every store to the `Store` trait, one test for each of its statements.

use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use reprise_controlplane_store::{
    Condition, Event, KEY_BYTES_MAX, OPERATIONS_MAX, Outcome, Revision, Store, StoreError, Transaction,
    VALUE_BYTES_MAX, Watch, Write,
};

use crate::every_store::on_every_store;

fn put(key: &str, value: &str) -> Write {
    Write::Put { key: key.into(), value: value.into(), lease: None }
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

/// The events, with revisions relative to `base`, because a shared store does not start at 0.
fn names(events: &[Event], base: Revision) -> Vec<String> {
    let name = |event: &Event| {
        let sign = if matches!(event, Event::Put(_)) { '+' } else { '-' };
        format!("{sign}{}@{}", String::from_utf8_lossy(event.key()), event.revision().0 - base.0)
    };
    events.iter().map(name).collect()
}

/// The `number`th revision after `base`.
fn after(base: Revision, number: u64) -> Revision {
    Revision(base.0 + number)
}

/// Waits for a number of events; stores differ in the size of batches.
async fn gather(watch: &mut Watch, count: usize) -> Vec<Event> {
    let mut events = Vec::new();
    while events.len() < count {
        events.extend(watch.next().await.expect("changes").events);
    }
    events
}

async fn entries_have_revisions_and_a_version(store: Arc<dyn Store>) {
    let base = store.revision().await.expect("a read");
    assert_eq!(store.get(b"a").await.expect("a read"), None);
    assert_eq!(commit(&*store, write(vec![put("a", "1")])).await, after(base, 1));
    assert_eq!(commit(&*store, write(vec![put("b", "1")])).await, after(base, 2));
    assert_eq!(commit(&*store, write(vec![put("a", "2")])).await, after(base, 3));
    let entry = store.get(b"a").await.expect("a read").expect("an entry");
    assert_eq!((entry.key.as_slice(), entry.value.as_slice()), (b"a".as_slice(), b"2".as_slice()));
    assert_eq!((entry.created, entry.modified, entry.version), (after(base, 1), after(base, 3), 2));
    commit(&*store, write(vec![delete("a")])).await;
    assert_eq!(commit(&*store, write(vec![put("a", "3")])).await, after(base, 5));
    let again = store.get(b"a").await.expect("a read").expect("an entry");
    assert_eq!((again.created, again.version), (after(base, 5), 1));
}

async fn transactions_are_atomic(store: Arc<dyn Store>) {
    let base = store.revision().await.expect("a read");
    let create = |key: &str| Transaction {
        conditions: vec![Condition::Absent { key: key.into() }],
        writes: vec![put(key, "new"), put("side", key)],
    };
    assert_eq!(store.transact(create("a")).await.expect("valid"), Outcome::Committed(after(base, 1)));
    assert_eq!(store.transact(create("b")).await.expect("valid"), Outcome::Committed(after(base, 2)));
    assert_eq!(store.transact(create("a")).await.expect("valid"), Outcome::Conflict);
    assert_eq!(store.revision().await.expect("a read"), after(base, 2));
    assert_eq!(store.get(b"side").await.expect("a read").expect("an entry").value, b"b");

    let swap = |revision| Transaction {
        conditions: vec![Condition::Modified { key: b"a".to_vec(), revision }],
        writes: vec![put("a", "swapped")],
    };
    assert_eq!(store.transact(swap(after(base, 2))).await.expect("valid"), Outcome::Conflict);
    assert_eq!(
        store.transact(swap(after(base, 1))).await.expect("valid"),
        Outcome::Committed(after(base, 3))
    );
    assert_eq!(store.transact(swap(after(base, 1))).await.expect("valid"), Outcome::Conflict);
    let absent = Transaction {
        conditions: vec![Condition::Modified { key: b"no".to_vec(), revision: Revision(0) }],
        writes: vec![put("no", "")],
    };
    assert_eq!(store.transact(absent).await.expect("valid"), Outcome::Conflict);
}

async fn transactions_without_changes_create_no_revision(store: Arc<dyn Store>) {
    let base = store.revision().await.expect("a read");
    commit(&*store, write(vec![put("a", "1")])).await;
    assert_eq!(commit(&*store, write(vec![delete("absent")])).await, after(base, 1));
    assert_eq!(commit(&*store, Transaction::default()).await, after(base, 1));
    assert_eq!(
        commit(&*store, write(vec![put("a", "1")])).await,
        after(base, 2),
        "a put of the same value is a change"
    );
}

async fn rejects_invalid_requests_without_changes(store: Arc<dyn Store>) {
    let base = store.revision().await.expect("a read");
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
    assert_eq!(store.revision().await.expect("a read"), base);
    let largest = write(vec![put(&"k".repeat(KEY_BYTES_MAX), &"v".repeat(VALUE_BYTES_MAX))]);
    assert_eq!(commit(&*store, largest).await, after(base, 1));
}

async fn ranges_are_ordered_limited_and_of_one_revision(store: Arc<dyn Store>) {
    let base = store.revision().await.expect("a read");
    commit(
        &*store,
        write(vec![put("n/2", "b"), put("n/1", "a"), put("m/9", ""), put("o", ""), put("n/10", "c")]),
    )
    .await;
    let all = store.range(b"n/", 10).await.expect("a range");
    let keys: Vec<_> = all.entries.iter().map(|entry| entry.key.as_slice()).collect();
    assert_eq!(keys, [b"n/1".as_slice(), b"n/10", b"n/2"]);
    assert_eq!((all.more, all.revision), (false, after(base, 1)));
    let some = store.range(b"n/", 2).await.expect("a range");
    assert_eq!((some.entries.len(), some.more), (2, true));
    assert_eq!(store.range(b"", 10).await.expect("a range").entries.len(), 5);
    assert!(store.range(b"x", 10).await.expect("a range").entries.is_empty());
    let none = store.range(b"n/", 0).await.expect("a range");
    assert_eq!((none.entries.len(), none.more, none.revision), (0, true, after(base, 1)));
    assert!(!store.range(b"x", 0).await.expect("a range").more);
}

async fn reads_long_ranges_completely(store: Arc<dyn Store>) {
    let name = |number: usize| format!("n/{number:04}");
    for batch in 0..11 {
        let writes = (batch * 100..(batch + 1) * 100).map(|number| put(&name(number), "x")).collect();
        commit(&*store, write(writes)).await;
    }
    let base = commit(&*store, write(vec![put("o", "")])).await;
    for limit in [511, 512, 513, 1024, 1025, 1099, 1100, 2000] {
        let range = store.range(b"n/", limit).await.expect("a range");
        let keys: Vec<_> = range.entries.iter().map(|entry| entry.key.clone()).collect();
        let expected: Vec<_> = (0..limit.min(1100)).map(|number| name(number).into_bytes()).collect();
        assert_eq!(keys, expected, "limit {limit}");
        assert_eq!((range.more, range.revision), (limit < 1100, base), "limit {limit}");
    }
}

/// The usual way to read: a range, then a watch of the changes since.
async fn a_range_and_a_watch_after_it_show_each_change_once(store: Arc<dyn Store>) {
    const CHANGES: usize = 60;
    let writer = {
        let store = store.clone();
        tokio::spawn(async move {
            for number in 0..CHANGES {
                commit(&*store, write(vec![put(&format!("n/{number}"), "")])).await;
            }
        })
    };
    let mut starts = Vec::new();
    while starts.len() < 5 {
        let range = store.range(b"n/", 100).await.expect("a range");
        let watch = store.watch(b"n/", after(range.revision, 1)).await.expect("a watch");
        starts.push((range, watch));
    }
    writer.await.expect("no panic");
    for (range, mut watch) in starts {
        let mut keys: Vec<_> = range.entries.iter().map(|entry| entry.key.clone()).collect();
        keys.extend(gather(&mut watch, CHANGES - keys.len()).await.iter().map(|event| event.key().to_vec()));
        keys.sort();
        keys.dedup();
        assert_eq!(keys.len(), CHANGES, "from revision {}", range.revision);
    }
}

async fn a_reader_of_compacted_history_continues_after_reading_the_range(store: Arc<dyn Store>) {
    let base = store.revision().await.expect("a read");
    for value in ["1", "2", "3"] {
        commit(&*store, write(vec![put("a", value)])).await;
    }
    store.compact(after(base, 3)).await.expect("compacted");
    let lost = match store.watch(b"", after(base, 1)).await {
        Err(lost) => lost,
        Ok(mut watch) => watch.next().await.expect_err("compacted"),
    };
    assert!(lost.to_string().contains("read the range again"), "{lost}");
    let range = store.range(b"", 10).await.expect("a range");
    assert_eq!(range.entries[0].value, b"3");
    let mut watch = store.watch(b"", after(range.revision, 1)).await.expect("a watch");
    commit(&*store, write(vec![put("a", "4")])).await;
    assert_eq!(names(&gather(&mut watch, 1).await, base), ["+a@4"]);
}

async fn watches_report_past_and_future_changes_under_their_prefix_in_order(store: Arc<dyn Store>) {
    let base = store.revision().await.expect("a read");
    commit(&*store, write(vec![put("n/1", "a")])).await;
    commit(&*store, write(vec![put("x", ""), put("n/2", "b")])).await;
    commit(&*store, write(vec![put("x", "")])).await;
    let mut watch = store.watch(b"n/", after(base, 2)).await.expect("a watch");
    let first = watch.next().await.expect("changes");
    assert_eq!(names(&first.events, base), ["+n/2@2"]);
    {
        let mut waiting = pin!(watch.next());
        let mut context = Context::from_waker(Waker::noop());
        assert!(matches!(waiting.as_mut().poll(&mut context), Poll::Pending), "no further changes yet");
        commit(&*store, write(vec![put("x", "other")])).await;
        commit(&*store, write(vec![delete("n/1"), put("n/3", "c")])).await;
        let second = waiting.await.expect("changes");
        assert_eq!(names(&second.events, base), ["-n/1@5", "+n/3@5"], "a revision is not split");
        assert_eq!(second.revision, after(base, 5));
    }
    commit(&*store, write(vec![delete("n/3")])).await;
    assert_eq!(names(&gather(&mut watch, 1).await, base), ["-n/3@6"]);
}

async fn a_dropped_wait_loses_no_changes(store: Arc<dyn Store>) {
    let base = store.revision().await.expect("a read");
    let mut watch = store.watch(b"", after(base, 1)).await.expect("a watch");
    {
        let mut waiting = pin!(watch.next());
        assert!(waiting.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
    }
    commit(&*store, write(vec![put("a", "1")])).await;
    commit(&*store, write(vec![put("b", "1")])).await;
    assert_eq!(names(&gather(&mut watch, 2).await, base), ["+a@1", "+b@2"]);
}

async fn watches_may_start_at_a_future_revision(store: Arc<dyn Store>) {
    let base = store.revision().await.expect("a read");
    let mut watch = store.watch(b"", after(base, 3)).await.expect("a watch");
    for value in ["1", "2", "3", "4"] {
        commit(&*store, write(vec![put("a", value)])).await;
    }
    assert_eq!(names(&gather(&mut watch, 2).await, base), ["+a@3", "+a@4"]);
}

async fn compacted_history_is_an_error_with_the_oldest_revision(store: Arc<dyn Store>) {
    let base = store.revision().await.expect("a read");
    for value in ["1", "2", "3", "4"] {
        commit(&*store, write(vec![put("a", value)])).await;
    }
    let mut timely = store.watch(b"", after(base, 4)).await.expect("a watch");
    store.compact(after(base, 4)).await.expect("compacted");
    store.compact(after(base, 3)).await.expect("compacted further already");
    // A store may report this on opening the watch or on the first wait.
    let refused = match store.watch(b"", after(base, 2)).await {
        Err(refused) => refused,
        Ok(mut watch) => watch.next().await.expect_err("compacted"),
    };
    match refused {
        StoreError::Compacted { oldest } => assert_eq!(oldest, after(base, 4)),
        other => panic!("{other}"),
    }
    assert_eq!(names(&gather(&mut timely, 1).await, base), ["+a@4"]);
    assert_eq!(store.get(b"a").await.expect("a read").expect("entries stay").value, b"4");
}

async fn concurrent_conditional_writes_each_take_effect_once(store: Arc<dyn Store>) {
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

on_every_store! {
    [flavor = "multi_thread", worker_threads = 2];
    entries_have_revisions_and_a_version,
    transactions_are_atomic,
    transactions_without_changes_create_no_revision,
    rejects_invalid_requests_without_changes,
    ranges_are_ordered_limited_and_of_one_revision,
    reads_long_ranges_completely,
    a_range_and_a_watch_after_it_show_each_change_once,
    a_reader_of_compacted_history_continues_after_reading_the_range,
    watches_report_past_and_future_changes_under_their_prefix_in_order,
    a_dropped_wait_loses_no_changes,
    watches_may_start_at_a_future_revision,
    compacted_history_is_an_error_with_the_oldest_revision,
    concurrent_conditional_writes_each_take_effect_once,
}
