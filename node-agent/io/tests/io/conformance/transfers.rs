//! Laws about bytes: places of writes, rejected operations, errors.

use reprise_buffers::{Access, MappedRegion, PageBuffer, Span};
use reprise_io::{Completion, IO_ALIGN, IOVECS_MAX, IoErrorKind, Submission, Token};

use crate::conformance::fixture::{
    CAPACITY, DEVICE_BYTES, Fixture, buffer, bytes_of, finish, page, pattern, read, run, submit, sync, write,
};

pub(crate) fn written_bytes_are_read_back(fixture: &Fixture) {
    let mut engine = fixture.open();
    let (source, target) = (fixture.registered(0, 1 << 20), fixture.registered(1 << 20, 1 << 20));
    for (seed, offset) in [(1, 0), (2, 12_288), (3, DEVICE_BYTES - (1 << 20))] {
        let data = pattern(seed, 1 << 20);
        source.copy_in(&data).expect("writable");
        run(engine.as_mut(), write(1, offset, vec![source.clone()]));
        run(engine.as_mut(), read(2, offset, vec![target.clone()]));
        assert!(bytes_of(&target) == data, "offset {offset}");
        assert!(fixture.seen(offset, 1 << 20) == data, "offset {offset}");
    }
}

pub(crate) fn every_registered_region_can_be_read_and_written(fixture: &Fixture) {
    let mut engine = fixture.open();
    for (index, region) in (0..).zip(fixture.arena().regions()) {
        let last = region.span(region.bytes() - 8192, 8192).expect("inside");
        last.copy_in(&pattern(index + 1, 8192)).expect("writable");
        run(engine.as_mut(), write(1, index * 8192, vec![last.clone()]));
        last.copy_in(&[0; 8192]).expect("writable");
        run(engine.as_mut(), read(2, index * 8192, vec![last.clone()]));
        assert!(bytes_of(&last) == pattern(index + 1, 8192), "region {index}");
    }
}

/// Also before the engine knows the new memory, and if it has not released the old one.
pub(crate) fn new_memory_of_a_region_is_read_and_written_and_the_old_is_untouched(fixture: &Fixture) {
    let mut engine = fixture.open();
    let old = fixture.arena().region(0).expect("the first region");
    for (round, releases, adds) in
        [(1, true, true), (2, false, true), (3, true, false), (4, false, false), (5, true, true)]
    {
        let before = fixture.registered(8192, 8192);
        before.copy_in(&pattern(round, 8192)).expect("writable");
        run(engine.as_mut(), write(1, 0, vec![before.clone()]));
        if releases {
            engine.release_region(0);
        }
        let renewed = fixture.arena().renew(0).expect("4 MiB");
        for _ in 0..2 {
            if adds {
                engine.add_region(&renewed);
            }
        }
        let after = fixture.registered(8192, 8192);
        assert!(bytes_of(&after) == [0; 8192] && bytes_of(&before) == [0; 8192], "round {round}");
        run(engine.as_mut(), read(2, 0, vec![after.clone()]));
        assert!(bytes_of(&after) == pattern(round, 8192), "round {round}");
        after.copy_in(&pattern(round + 10, 8192)).expect("writable");
        run(engine.as_mut(), write(3, 16_384, vec![after]));
        assert!(fixture.seen(16_384, 8192) == pattern(round + 10, 8192), "round {round}");
        assert_eq!(bytes_of(&before), [0; 8192], "round {round}");
    }
    assert_eq!(bytes_of(&old.span(0, old.bytes()).expect("all of it")), vec![0; 4 << 20]);
}

pub(crate) fn memory_outside_the_registered_regions_works_too(fixture: &Fixture) {
    let mut engine = fixture.open();
    let mut source = buffer(&pattern(5, 64 << 10));
    let mut target = PageBuffer::new(64 << 10).expect("whole pages");
    run(engine.as_mut(), write(1, 8192, vec![source.span()]));
    run(engine.as_mut(), read(2, 8192, vec![target.span()]));
    assert!(target[..] == source[..]);
}

pub(crate) fn many_operations_in_flight_each_reach_their_own_place(fixture: &Fixture) {
    const BLOCK: usize = 32 << 10;
    let mut engine = fixture.open();
    let slot = |index: usize| fixture.registered(index % CAPACITY * BLOCK, BLOCK);
    let place = |index: usize| (index * 37 % 128 * BLOCK) as u64;
    for round in 0..8 {
        for index in round * CAPACITY..(round + 1) * CAPACITY {
            slot(index).copy_in(&pattern(index as u64 + 1, BLOCK)).expect("writable");
            submit(engine.as_mut(), write(index as u64, place(index), vec![slot(index)]));
        }
        assert_eq!(engine.in_flight(), CAPACITY);
        assert!(finish(engine.as_mut()).iter().all(|done| done.result.is_ok()));
    }
    for round in 0..8 {
        for index in round * CAPACITY..(round + 1) * CAPACITY {
            submit(engine.as_mut(), read(index as u64, place(index), vec![slot(index)]));
        }
        for done in finish(engine.as_mut()) {
            assert!(bytes_of(&done.op.spans()[0]) == pattern(done.token.0 + 1, BLOCK), "{:?}", done.token);
        }
    }
}

pub(crate) fn scattered_spans_are_read_and_written_in_order(fixture: &Fixture) {
    let mut engine = fixture.open();
    let mut header = buffer(&page(1));
    let payload =
        [fixture.registered(3 << 20, 8192), fixture.registered(0, 4096), fixture.registered(2 << 20, 12_288)];
    let mut whole = page(1);
    for (seed, span) in (2..).zip(&payload) {
        let data = pattern(seed, span.len());
        span.copy_in(&data).expect("writable");
        whole.extend(data);
    }
    let mut from = vec![header.span()];
    from.extend(payload);
    run(engine.as_mut(), write(1, 40_960, from));
    assert!(fixture.seen(40_960, whole.len()) == whole);

    let mut pieces: Vec<PageBuffer> =
        [4096, 16_384, 8192].map(|bytes| PageBuffer::new(bytes).expect("whole pages")).into();
    let into = pieces.iter_mut().map(PageBuffer::span).collect();
    run(engine.as_mut(), read(2, 40_960, into));
    let found: Vec<u8> = pieces.iter().flat_map(|piece| piece.to_vec()).collect();
    assert!(found == whole);
}

pub(crate) fn the_largest_number_of_spans_works(fixture: &Fixture) {
    let mut engine = fixture.open();
    // Each page of the span separately, last page first.
    let pages = |count: usize| -> Vec<Span> {
        (0..count).rev().map(|index| fixture.registered(index * IO_ALIGN, IO_ALIGN)).collect()
    };
    for (index, span) in pages(IOVECS_MAX).iter().enumerate() {
        span.copy_in(&page(index as u64)).expect("writable");
    }
    run(engine.as_mut(), write(1, 0, pages(IOVECS_MAX)));
    let whole: Vec<u8> = (0..IOVECS_MAX as u64).flat_map(page).collect();
    assert!(fixture.seen(0, whole.len()) == whole);
    fixture.registered(0, 4 << 20).copy_in(&vec![0; 4 << 20]).expect("writable");
    run(engine.as_mut(), read(2, 0, pages(IOVECS_MAX)));
    for (index, span) in pages(IOVECS_MAX).iter().enumerate() {
        assert!(bytes_of(span) == page(index as u64), "span {index}");
    }
}

pub(crate) fn a_synced_write_is_durable(fixture: &Fixture) {
    let mut engine = fixture.open();
    let mut buffer = buffer(&page(9));
    run(engine.as_mut(), write(1, 4096, vec![buffer.span()]));
    run(engine.as_mut(), sync(2));
    assert!(fixture.durable(4096, IO_ALIGN) == page(9));
}

pub(crate) fn an_invalid_operation_is_an_error_and_not_a_hang(fixture: &Fixture) {
    let mut engine = fixture.open();
    let good = fixture.registered(0, 8192);
    let part = |offset, len| vec![good.slice(offset, len).expect("inside")];
    let end = DEVICE_BYTES;
    let cases: Vec<(&str, Submission)> = vec![
        ("beyond the end", read(1, end, part(0, 4096))),
        ("across the end", write(2, end - 4096, part(0, 8192))),
        ("beyond all numbers", read(3, u64::MAX - 4095, part(0, 8192))),
        ("misaligned offset", read(4, 512, part(0, 4096))),
        ("misaligned memory", read(5, 0, part(512, 4096))),
        ("part of a page", write(6, 0, part(0, 512))),
        ("no spans", read(7, 0, Vec::new())),
        ("an empty span", write(8, 0, part(0, 0))),
        ("too many spans", write(9, 0, vec![part(0, 4096).remove(0); IOVECS_MAX + 1])),
        ("too many bytes", read(10, 0, vec![fixture.registered(0, 4 << 20); 300])),
        ("memory that must not be written", read(11, 0, vec![read_only_span(fixture)])),
    ];
    for (what, submission) in cases {
        let token = submission.token;
        submit(engine.as_mut(), submission);
        let done = finish(engine.as_mut());
        assert_eq!(outcome(&done), [(token, Some(IoErrorKind::Invalid))], "{what}");
    }
    run(engine.as_mut(), read(12, end - 4096, part(0, 4096)));
    run(engine.as_mut(), write(13, 0, vec![read_only_span(fixture)]));
}

pub(crate) fn a_read_only_device_is_read_and_not_written(fixture: &Fixture) {
    let mut written = buffer(&page(3));
    run(fixture.open().as_mut(), write(1, 0, vec![written.span()]));
    let mut engine = fixture.open_read_only();
    let mut target = PageBuffer::new(IO_ALIGN).expect("a page");
    run(engine.as_mut(), read(1, 0, vec![target.span()]));
    assert!(target[..] == page(3));
    submit(engine.as_mut(), write(2, 0, vec![target.span()]));
    assert_eq!(outcome(&finish(engine.as_mut())), [(Token(2), Some(IoErrorKind::Invalid))]);
}

pub(crate) fn a_read_past_a_cut_end_is_a_short_transfer(fixture: &Fixture) {
    let mut engine = fixture.open();
    let span = fixture.registered(0, 16_384);
    fixture.truncate(40_960);
    for (token, offset) in [(1, 40_960), (2, 1 << 20), (3, 36_864), (4, 28_672)] {
        submit(engine.as_mut(), read(token, offset, vec![span.clone()]));
        let done = finish(engine.as_mut());
        assert_eq!(outcome(&done), [(Token(token), Some(IoErrorKind::ShortTransfer))], "offset {offset}");
    }
    run(engine.as_mut(), read(5, 24_576, vec![span]));
}

pub(crate) fn the_engine_continues_after_a_full_file_system(fixture: &Fixture) {
    let Some(mut engine) = fixture.open_half_full("the_engine_continues_after_a_full_file_system") else {
        // A separate process has tested it.
        return;
    };
    let span = fixture.registered(0, 2 << 20);
    let mut failed = 0;
    for (token, offset) in (0..).zip((0..DEVICE_BYTES).step_by(2 << 20)) {
        submit(engine.as_mut(), write(token, offset, vec![span.clone()]));
        match outcome(&finish(engine.as_mut()))[..] {
            [(_, None)] => assert_eq!(failed, 0, "the device had space at {offset}"),
            [(_, Some(IoErrorKind::NoSpace))] => failed += 1,
            ref other => panic!("{other:?}"),
        }
    }
    assert_eq!(failed, 4, "half of the device has no space");
    run(engine.as_mut(), read(100, 0, vec![span]));
}

fn read_only_span(fixture: &Fixture) -> Span {
    let region = &fixture.arena().regions()[1];
    let fd = region.readonly_fd().try_clone_to_owned().expect("a descriptor");
    let mapping = MappedRegion::map(fd, region.bytes(), Access::ReadOnly).expect("a mapping");
    mapping.span(0, 4096).expect("inside")
}

fn outcome(done: &[Completion]) -> Vec<(Token, Option<IoErrorKind>)> {
    done.iter().map(|done| (done.token, done.result.as_ref().err().map(|error| error.kind()))).collect()
}
