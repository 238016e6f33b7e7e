//! Laws about time and ownership: capacity, ownership of memory, waking, dropping.

use std::time::{Duration, Instant};

use reprise_buffers::PageBuffer;
use reprise_io::{CloseOutcome, IO_ALIGN, IoEngine, Wait};

use crate::conformance::fixture::{
    CAPACITY, DEVICE_BYTES, FOREVER, Fixture, buffer, finish, page, pattern, read, submit, sync, write,
};

pub(crate) fn capacity_is_enforced_and_the_submission_returned(fixture: &Fixture) {
    let mut engine = fixture.open();
    assert_eq!((engine.capacity(), engine.in_flight()), (CAPACITY, 0));
    let page_of = |index: usize| fixture.registered(index * IO_ALIGN, IO_ALIGN);
    for token in 0..CAPACITY {
        submit(engine.as_mut(), read(token as u64, 0, vec![page_of(token)]));
    }
    let refused = engine.submit(read(99, 4096, vec![page_of(99)])).expect_err("it is full");
    assert_eq!((refused.token.0, refused.op.offset(), refused.op.spans().len()), (99, 4096, 1));
    let mut done = Vec::new();
    while done.is_empty() {
        engine.reap(Wait::Until(FOREVER), &mut done).expect("a working engine");
    }
    submit(engine.as_mut(), refused);
    done.extend(finish(engine.as_mut()));
    let mut tokens: Vec<u64> = done.iter().map(|done| done.token.0).collect();
    tokens.sort_unstable();
    assert_eq!(tokens, (0..CAPACITY as u64).chain([99]).collect::<Vec<_>>());
}

pub(crate) fn rejected_operations_count_as_in_flight_until_reaped(fixture: &Fixture) {
    let mut engine = fixture.open();
    for token in 0..CAPACITY as u64 {
        submit(engine.as_mut(), read(token, DEVICE_BYTES, vec![fixture.registered(0, IO_ALIGN)]));
    }
    assert_eq!(engine.in_flight(), CAPACITY);
    engine.submit(sync(99)).expect_err("it is full");
    let mut done = Vec::new();
    engine.reap(Wait::No, &mut done).expect("a working engine");
    assert_eq!((done.len(), engine.in_flight()), (CAPACITY, 0));
}

pub(crate) fn spans_are_held_until_the_completion_is_dropped(fixture: &Fixture) {
    let mut engine = fixture.open();
    let mut target = PageBuffer::new(IO_ALIGN).expect("a page");
    submit(engine.as_mut(), read(1, 0, vec![target.span()]));
    assert!(target.is_lent());
    let done = finish(engine.as_mut());
    assert!(target.is_lent());
    drop(done);
    assert!(!target.is_lent());
}

pub(crate) fn dropping_the_engine_ends_operations_that_never_started(fixture: &Fixture) {
    let mut engine = fixture.open();
    let mut buffers = submit_writes(engine.as_mut());
    assert!(buffers.iter().all(PageBuffer::is_lent));
    drop(engine);
    assert_written(fixture, &mut buffers);
}

pub(crate) fn dropping_the_engine_ends_operations_in_flight(fixture: &Fixture) {
    for _ in 0..20 {
        let mut engine = fixture.open();
        let mut done = Vec::new();
        let mut buffers = submit_writes(engine.as_mut());
        engine.reap(Wait::No, &mut done).expect("a working engine");
        submit(engine.as_mut(), sync(99));
        engine.reap(Wait::No, &mut done).expect("a working engine");
        drop(engine);
        drop(done);
        assert_written(fixture, &mut buffers);
    }
}

pub(crate) fn closing_the_engine_reports_that_all_operations_ended(fixture: &Fixture) {
    let mut engine = fixture.open();
    let mut buffers = submit_writes(engine.as_mut());
    engine.reap(Wait::No, &mut Vec::new()).expect("a working engine");
    assert_eq!(engine.close(), CloseOutcome::Drained);
    assert_written(fixture, &mut buffers);
    assert_eq!(fixture.open().close(), CloseOutcome::Drained, "nothing was in flight");
}

pub(crate) fn an_engine_opened_here_works_on_another_thread(fixture: &Fixture) {
    let mut engine = fixture.open();
    let waker = engine.waker();
    let mut source = buffer(&page(4));
    let worker = std::thread::spawn(move || {
        submit(engine.as_mut(), write(1, 0, vec![source.span()]));
        assert!(finish(engine.as_mut()).iter().all(|done| done.result.is_ok()));
        engine.reap(Wait::Until(FOREVER), &mut Vec::new()).expect("a working engine");
    });
    let start = Instant::now();
    waker.wake();
    while !worker.is_finished() {
        // The first wake may have been consumed while the write was in flight.
        waker.wake();
        std::thread::yield_now();
        assert!(start.elapsed() < FOREVER);
    }
    worker.join().expect("the engine works there");
    assert!(fixture.seen(0, IO_ALIGN) == page(4));
}

pub(crate) fn a_wake_ends_a_waiting_reap(fixture: &Fixture) {
    let mut engine = fixture.open();
    let waker = engine.waker();
    // The pause makes it likely, not certain, that the reap waits already; the law holds in both cases.
    let thread = std::thread::spawn(move || {
        std::thread::park_timeout(Duration::from_millis(50));
        waker.wake();
    });
    let (start, mut done) = (Instant::now(), Vec::new());
    engine.reap(Wait::Until(FOREVER), &mut done).expect("a working engine");
    assert!(done.is_empty() && start.elapsed() < FOREVER / 2);
    thread.join().expect("it woke");
}

pub(crate) fn an_early_wake_ends_the_next_waiting_reap(fixture: &Fixture) {
    let mut engine = fixture.open();
    engine.waker().wake();
    let start = Instant::now();
    engine.reap(Wait::Until(FOREVER), &mut Vec::new()).expect("a working engine");
    assert!(start.elapsed() < FOREVER / 2);
}

pub(crate) fn a_reap_that_does_not_wait_keeps_the_wake(fixture: &Fixture) {
    let mut engine = fixture.open();
    engine.waker().wake();
    engine.reap(Wait::No, &mut Vec::new()).expect("a working engine");
    let start = Instant::now();
    engine.reap(Wait::Until(FOREVER), &mut Vec::new()).expect("a working engine");
    assert!(start.elapsed() < FOREVER / 2);
}

pub(crate) fn wakes_and_completions_do_not_disturb_each_other(fixture: &Fixture) {
    let mut engine = fixture.open();
    let waker = engine.waker();
    let (stop, stopped) = std::sync::mpsc::channel::<()>();
    let thread = std::thread::spawn(move || {
        while stopped.try_recv() == Err(std::sync::mpsc::TryRecvError::Empty) {
            waker.wake();
            std::thread::yield_now();
        }
    });
    for round in 0..200u64 {
        let offset = round * IO_ALIGN as u64;
        submit(engine.as_mut(), read(round, offset, vec![fixture.registered(0, IO_ALIGN)]));
        let done = finish(engine.as_mut());
        assert_eq!(done.iter().map(|done| done.token.0).collect::<Vec<_>>(), [round]);
    }
    drop(stop);
    thread.join().expect("it stopped");
}

pub(crate) fn a_waiting_reap_returns_after_its_timeout(fixture: &Fixture) {
    let mut engine = fixture.open();
    let limit = Duration::from_millis(20);
    let (start, mut done) = (Instant::now(), Vec::new());
    engine.reap(Wait::Until(limit), &mut done).expect("a working engine");
    assert!(done.is_empty() && start.elapsed() >= limit && start.elapsed() < FOREVER / 2);
    engine.reap(Wait::Until(Duration::ZERO), &mut done).expect("a working engine");
    assert!(done.is_empty());
}

/// Fills the engine with writes of 64 KiB, each from a separate buffer.
fn submit_writes(engine: &mut dyn IoEngine) -> Vec<PageBuffer> {
    let fill = |index: usize| buffer(&pattern(index as u64 + 1, 64 << 10));
    let mut buffers: Vec<PageBuffer> = (0..CAPACITY - 1).map(fill).collect();
    for (index, buffer) in buffers.iter_mut().enumerate() {
        submit(engine, write(index as u64, (index as u64) << 16, vec![buffer.span()]));
    }
    buffers
}

fn assert_written(fixture: &Fixture, buffers: &mut [PageBuffer]) {
    for (index, buffer) in buffers.iter_mut().enumerate() {
        assert!(!buffer.is_lent());
        assert!(fixture.seen((index as u64) << 16, buffer.len()) == buffer[..], "write {index}");
        buffer.fill(0);
    }
}
