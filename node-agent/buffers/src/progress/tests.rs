//! Progress entries through two mappings of one page, as in agent and engine.

use std::os::fd::OwnedFd;
use std::sync::atomic::AtomicBool;
use std::thread;

use super::*;
use crate::shared::FutexOutcome;

/// Longer than any test takes: a wait that reaches it has failed.
const LONG: Duration = Duration::from_secs(60);

fn received(fd: BorrowedFd<'_>) -> OwnedFd {
    fd.try_clone_to_owned().expect("a descriptor")
}

fn page() -> (ProgressWriter, ProgressReader) {
    let writer = ProgressWriter::create().expect("a page");
    let reader = ProgressReader::map(received(writer.readonly_fd())).expect("a mapping");
    (writer, reader)
}

/// Returns when a waiter was asleep on the entry (and has been woken to check again).
fn wake_sleeper(writer: &ProgressWriter, entry: u16) {
    while writer.shared.futex_wake(writer_base(entry) + CHANGES) == 0 {
        thread::yield_now();
    }
}

#[test]
fn a_fresh_page_has_free_entries_only() {
    let (_writer, reader) = page();
    for entry in 0..PROGRESS_ENTRIES {
        assert_eq!((reader.load(entry), reader.layers(entry), reader.failed_count(entry)), (0, 0, 0));
        assert!(!reader.is_done(entry) && !reader.is_failed(entry, 0));
    }
}

#[test]
fn an_entry_shows_its_values_and_its_neighbours_stay_empty() {
    let (writer, reader) = page();
    writer.begin(5, 77);
    writer.fail_block(5, 0);
    writer.fail_block(5, 8191);
    writer.fail_block(5, 8191);
    writer.set_layers(5, 3);
    assert_eq!((reader.load(5), reader.layers(5), reader.failed_count(5)), (77, 3, 2));
    let failed: Vec<usize> = (0..PROGRESS_BLOCKS_MAX).filter(|block| reader.is_failed(5, *block)).collect();
    assert_eq!(failed, [0, 8191]);
    assert!(!reader.is_done(5));
    writer.done(5);
    assert!(reader.is_done(5));
    for entry in [4, 6] {
        assert_eq!((reader.load(entry), reader.layers(entry), reader.is_done(entry)), (0, 0, false));
        assert!((0..PROGRESS_BLOCKS_MAX).all(|block| !reader.is_failed(entry, block)));
    }
}

#[test]
fn the_next_load_of_an_entry_starts_from_nothing() {
    let (writer, reader) = page();
    writer.begin(63, 1);
    for block in 0..PROGRESS_BLOCKS_MAX {
        writer.fail_block(63, block);
    }
    writer.set_layers(63, 32);
    writer.done(63);
    writer.begin(63, 2);
    assert_eq!((reader.load(63), reader.layers(63), reader.failed_count(63)), (2, 0, 0));
    assert!(!reader.is_done(63) && (0..PROGRESS_BLOCKS_MAX).all(|block| !reader.is_failed(63, block)));
}

#[test]
fn invalid_entries_read_as_done_and_failed_instead_of_panicking() {
    let (writer, reader) = page();
    writer.begin(0, 9);
    for entry in [PROGRESS_ENTRIES, u16::MAX] {
        assert_eq!((reader.load(entry), reader.layers(entry), reader.failed_count(entry)), (0, 0, 0));
        assert!(reader.is_done(entry) && reader.is_failed(entry, 0));
        assert_eq!(reader.wait_layers(entry, 0, 1, LONG), WaitOutcome::Superseded);
    }
    assert!(reader.is_failed(0, PROGRESS_BLOCKS_MAX) && reader.is_failed(0, usize::MAX));
}

#[test]
fn a_wait_ends_at_once_when_its_condition_holds() {
    let (writer, reader) = page();
    writer.begin(1, 10);
    writer.set_layers(1, 4);
    assert_eq!(reader.wait_layers(1, 10, 4, Duration::ZERO), WaitOutcome::Ready);
    assert_eq!(reader.wait_layers(1, 10, 5, Duration::ZERO), WaitOutcome::Timeout);
    assert_eq!(reader.wait_layers(1, 10, 5, Duration::from_micros(200)), WaitOutcome::Timeout);
    assert_eq!(reader.wait_layers(1, 11, 1, LONG), WaitOutcome::Superseded);
    writer.done(1);
    assert_eq!(reader.wait_layers(1, 10, 4, Duration::ZERO), WaitOutcome::Ready);
    assert_eq!(reader.wait_layers(1, 10, 5, LONG), WaitOutcome::Done);
}

#[test]
fn layers_the_end_and_the_next_load_wake_a_waiter() {
    type Change = fn(&ProgressWriter);
    let cases: [(Change, WaitOutcome); 3] = [
        (|writer| writer.set_layers(2, 5), WaitOutcome::Ready),
        (|writer| writer.done(2), WaitOutcome::Done),
        (|writer| writer.begin(2, 21), WaitOutcome::Superseded),
    ];
    for (change, expected) in cases {
        let (writer, reader) = page();
        writer.begin(2, 20);
        writer.set_layers(2, 4);
        let outcome = thread::scope(|scope| {
            let sleeper = scope.spawn(|| reader.wait_layers(2, 20, 5, LONG));
            wake_sleeper(&writer, 2);
            change(&writer);
            sleeper.join().expect("no panic")
        });
        assert_eq!(outcome, expected);
    }
}

#[test]
fn a_waiter_sleeps_until_enough_layers_are_ready() {
    let (writer, reader) = page();
    writer.begin(3, 30);
    thread::scope(|scope| {
        let sleeper = scope.spawn(|| {
            let outcome = reader.wait_layers(3, 30, 3, LONG);
            (outcome, reader.layers(3))
        });
        for layers in 1..=3 {
            wake_sleeper(&writer, 3);
            writer.set_layers(3, layers);
        }
        assert_eq!(sleeper.join().expect("no panic"), (WaitOutcome::Ready, 3));
    });
}

#[test]
fn a_reader_that_sees_a_layer_sees_every_failure_before_it() {
    const LAYERS: u32 = 2000;
    let (writer, reader) = page();
    writer.begin(0, 1);
    thread::scope(|scope| {
        scope.spawn(|| {
            for layers in 1..=LAYERS {
                writer.fail_block(0, layers as usize);
                writer.set_layers(0, layers);
            }
        });
        let mut seen = 0;
        while seen < LAYERS {
            assert_eq!(reader.wait_layers(0, 1, seen + 1, LONG), WaitOutcome::Ready);
            seen = reader.layers(0);
            assert!((1..=seen as usize).all(|block| reader.is_failed(0, block)), "{seen} layers");
            assert!(reader.failed_count(0) >= seen);
        }
    });
}

#[test]
fn values_of_a_later_load_are_never_attributed_to_an_earlier_one() {
    const LOADS: u64 = 20_000;
    // Load n uses layers 10 n + 1 .. 10 n + 9, so every value identifies its load.
    let (writer, reader) = page();
    let over = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            for load in 1..=LOADS {
                writer.begin(0, load);
                for layer in 1..10 {
                    writer.set_layers(0, load as u32 * 10 + layer);
                }
                writer.done(0);
            }
            over.store(true, Ordering::Release);
        });
        let mut looks = 0u64;
        while !over.load(Ordering::Acquire) || looks == 0 {
            let load = reader.load(0);
            if load != 0
                && let EntrySnapshot::Progress { layers, state } = reader.snapshot(0, load)
            {
                let expected = load as u32 * 10;
                assert!(
                    layers == 0 || (expected..expected + 10).contains(&layers),
                    "{layers} in load {load}"
                );
                assert!(state != STATE_DONE || layers == expected + 9, "done with {layers} in load {load}");
            }
            looks += 1;
        }
    });
}

#[test]
fn rejects_a_page_of_the_wrong_size() {
    let small = SharedMemory::create(4096).expect("a page of memory");
    let fd = received(small.readonly_fd().expect("created here"));
    assert!(ProgressReader::map(fd).is_err());
}

#[test]
fn shared_words_are_seen_through_a_readonly_mapping_which_cannot_store() {
    let shared = SharedMemory::create(4096).expect("a page of memory");
    let other = SharedMemory::map_readonly(received(shared.readonly_fd().expect("created here")), 4096)
        .expect("a mapping");
    shared.atomic_u32(4).store(6, Ordering::Release);
    shared.atomic_u64(8).store(u64::MAX - 1, Ordering::Release);
    assert_eq!((other.load_u32(4), other.load_u64(8)), (6, u64::MAX - 1));
    assert!(std::panic::catch_unwind(|| other.atomic_u32(4).load(Ordering::Relaxed)).is_err());
    for offset in [1, 2, 4094, 4096, usize::MAX - 3] {
        assert!(std::panic::catch_unwind(|| other.load_u32(offset)).is_err(), "{offset}");
    }
    assert!(std::panic::catch_unwind(|| other.load_u64(4)).is_err(), "not aligned");
}

#[test]
fn shared_memory_need_not_be_whole_pages() {
    let shared = SharedMemory::create(100).expect("100 bytes");
    shared.atomic_u32(96).store(5, Ordering::Release);
    let fd = received(shared.readonly_fd().expect("created here"));
    assert!(SharedMemory::map_readonly(fd.try_clone().expect("a descriptor"), 101).is_err());
    assert_eq!(SharedMemory::map_readonly(fd, 100).expect("a mapping").load_u32(96), 5);
    assert!(SharedMemory::create(0).is_err());
}

#[test]
fn a_wait_on_a_readonly_mapping_is_woken_through_the_other_mapping() {
    let shared = SharedMemory::create(4096).expect("a page of memory");
    let other = SharedMemory::map_readonly(received(shared.readonly_fd().expect("created here")), 4096)
        .expect("a mapping");
    // The kernel checks the timeout before the value, so this also shows that it accepts the longest one.
    assert_eq!(other.futex_wait(0, 1, Duration::MAX).expect("mapped"), FutexOutcome::Changed);
    assert_eq!(other.futex_wait(0, 0, Duration::from_micros(100)).expect("mapped"), FutexOutcome::TimedOut);
    thread::scope(|scope| {
        let sleeper = scope.spawn(|| other.futex_wait(0, 0, LONG).expect("mapped"));
        while shared.futex_wake(0) == 0 {
            thread::yield_now();
        }
        assert_eq!(sleeper.join().expect("no panic"), FutexOutcome::Woken);
    });
}
