//! Tests specific to the simulated device: crashes, faults, determinism, virtual time.

use std::num::NonZeroU32;
use std::time::{Duration, Instant};

use proptest::prelude::*;
use reprise_buffers::{PageBuffer, Span};
use reprise_io::simulated::{
    CrashMode, Fault, FaultKind, Image, SimulatedClock, SimulatedDevice, SimulatedEngine, SimulatedLatency,
    SimulatedSettings, Trigger,
};
use reprise_io::{CloseOutcome, Completion, IoEngine, IoErrorKind, Op, Submission, Token, Wait};

const PAGE: usize = 4096;
const PAGES: u64 = 64;
const FOREVER: Duration = Duration::from_secs(60);

fn settings(seed: u64) -> SimulatedSettings {
    SimulatedSettings { seed, ..SimulatedSettings::default() }
}

fn device(settings: SimulatedSettings) -> (SimulatedDevice, SimulatedEngine) {
    let device = SimulatedDevice::new(Image::new(PAGES * PAGE as u64), settings).expect("sane settings");
    let engine = device.open_engine().expect("a free device");
    (device, engine)
}

/// Creates pages filled with one byte.
fn filled(byte: u8, pages: usize) -> Span {
    let mut buffer = PageBuffer::new(pages * PAGE).expect("whole pages");
    buffer.fill(byte);
    buffer.span()
}

fn write(engine: &mut SimulatedEngine, page: u64, span: Span) {
    let op = Op::Write { offset: page * PAGE as u64, from: vec![span] };
    engine.submit(Submission { token: Token(page), op }).expect("there is room");
}

fn read(engine: &mut SimulatedEngine, page: u64, pages: usize) -> Completion {
    let op = Op::Read { offset: page * PAGE as u64, into: vec![filled(0xEE, pages)] };
    engine.submit(Submission { token: Token(page), op }).expect("there is room");
    finish(engine).remove(0)
}

fn sync(engine: &mut SimulatedEngine) {
    engine.submit(Submission { token: Token(u64::MAX), op: Op::Sync }).expect("there is room");
}

fn finish(engine: &mut SimulatedEngine) -> Vec<Completion> {
    let mut done = Vec::new();
    while engine.in_flight() > 0 {
        engine.reap(Wait::Until(FOREVER), &mut done).expect("a working engine");
    }
    done
}

fn kind(completion: &Completion) -> Option<IoErrorKind> {
    completion.result.as_ref().err().map(|error| error.kind())
}

fn page_of(image: &Image, page: u64) -> Vec<u8> {
    let mut bytes = vec![0; PAGE];
    image.read(page * PAGE as u64, &mut bytes);
    bytes
}

/// Returns the byte that fills a page; `None` when it is torn.
fn byte_of(image: &Image, page: u64) -> Option<u8> {
    let bytes = page_of(image, page);
    bytes.iter().all(|byte| *byte == bytes[0]).then_some(bytes[0])
}

#[test]
fn a_synced_write_survives_every_crash_and_an_unsynced_one_a_process_kill() {
    for seed in 0..50 {
        for mode in [CrashMode::ProcessKilled, CrashMode::PowerLost, CrashMode::UnsyncedDropped] {
            let (device, mut engine) = device(settings(seed));
            write(&mut engine, 1, filled(7, 4));
            finish(&mut engine);
            sync(&mut engine);
            finish(&mut engine);
            write(&mut engine, 8, filled(9, 1));
            finish(&mut engine);
            let image = device.crash(mode);
            assert!((1..5).all(|page| byte_of(&image, page) == Some(7)), "seed {seed} {mode:?}");
            match mode {
                CrashMode::ProcessKilled => assert_eq!(byte_of(&image, 8), Some(9), "seed {seed}"),
                CrashMode::UnsyncedDropped => assert_eq!(byte_of(&image, 8), Some(0), "seed {seed}"),
                CrashMode::PowerLost => {}
            }
        }
    }
}

#[test]
fn a_power_loss_keeps_drops_or_tears_an_unsynced_write_by_sectors() {
    for sector in [512, 4096] {
        let (mut whole, mut dropped, mut torn) = (0, 0, 0);
        for seed in 0..100 {
            let (device, mut engine) = device(SimulatedSettings { sector_bytes: sector, ..settings(seed) });
            write(&mut engine, 0, filled(7, 2));
            finish(&mut engine);
            let image = device.crash(CrashMode::PowerLost);
            let mut bytes = vec![0; 2 * PAGE];
            image.read(0, &mut bytes);
            let mut survived = 0;
            for piece in bytes.chunks(sector as usize) {
                assert!(
                    piece.iter().all(|byte| *byte == piece[0]),
                    "a sector of {sector} bytes is torn, seed {seed}"
                );
                survived += usize::from(piece[0] == 7);
            }
            match survived * sector as usize {
                0 => dropped += 1,
                bytes if bytes == 2 * PAGE => whole += 1,
                _ => torn += 1,
            }
        }
        assert!(
            whole > 10 && dropped > 10 && torn > 10,
            "{sector}: {whole} whole, {dropped} dropped, {torn} torn"
        );
    }
}

#[test]
fn a_power_loss_reorders_unsynced_writes() {
    let (mut later_only, mut earlier_wins) = (0, 0);
    for seed in 0..200 {
        let (device, mut engine) = device(settings(seed));
        for (page, byte) in [(0, 1), (1, 2), (5, 3), (5, 4)] {
            write(&mut engine, page, filled(byte, 1));
            finish(&mut engine);
        }
        let image = device.crash(CrashMode::PowerLost);
        later_only += usize::from(byte_of(&image, 0) == Some(0) && byte_of(&image, 1) == Some(2));
        earlier_wins += usize::from(byte_of(&image, 5) == Some(3));
    }
    assert!(later_only > 10, "a later write survives an earlier one: {later_only} of 200");
    assert!(earlier_wins > 10, "of two writes to one place the earlier stays: {earlier_wins} of 200");
}

#[test]
fn a_sync_covers_only_writes_completed_before_its_submission() {
    let slow_write = SimulatedLatency {
        write: Duration::from_secs(1)..Duration::from_secs(1),
        sync: Duration::from_secs(5)..Duration::from_secs(5),
        ..SimulatedSettings::default().latency
    };
    let (device, mut engine) = device(SimulatedSettings { latency: slow_write, ..settings(1) });
    write(&mut engine, 1, filled(7, 1));
    finish(&mut engine);
    write(&mut engine, 2, filled(8, 1));
    sync(&mut engine);
    let done = finish(&mut engine);
    assert_eq!(
        done.iter().map(|done| done.token.0).collect::<Vec<_>>(),
        [2, u64::MAX],
        "the write ends first"
    );
    let image = device.crash(CrashMode::UnsyncedDropped);
    assert_eq!((byte_of(&image, 1), byte_of(&image, 2)), (Some(7), Some(0)));
}

#[test]
fn a_write_in_flight_may_survive_a_crash_or_not() {
    for mode in [CrashMode::ProcessKilled, CrashMode::PowerLost] {
        let (mut whole, mut dropped, mut torn) = (0, 0, 0);
        for seed in 0..100 {
            let (device, mut engine) = device(settings(seed));
            write(&mut engine, 0, filled(7, 1));
            match byte_of(&device.crash(mode), 0) {
                Some(7) => whole += 1,
                Some(0) => dropped += 1,
                _ => torn += 1,
            }
        }
        assert!(
            whole > 10 && dropped > 10 && torn > 10,
            "{mode:?}: {whole} whole, {dropped} dropped, {torn} torn"
        );
    }
}

#[test]
fn after_a_crash_everything_fails_and_the_surviving_image_opens() {
    let (device, mut engine) = device(settings(3));
    write(&mut engine, 0, filled(7, 1));
    let image = device.crash(CrashMode::UnsyncedDropped);
    write(&mut engine, 1, filled(7, 1));
    let done = finish(&mut engine);
    assert_eq!(done.iter().map(kind).collect::<Vec<_>>(), [Some(IoErrorKind::Lost); 2]);
    drop(engine);
    assert_eq!(device.open_engine().err().map(|error| error.kind()), Some(IoErrorKind::Lost));
    let next = SimulatedDevice::new(image, settings(4)).expect("sane settings");
    assert!(kind(&read(&mut next.open_engine().expect("a free device"), 0, 1)).is_none());
}

#[test]
fn one_device_has_one_engine() {
    let (device, engine) = device(settings(0));
    assert_eq!(device.open_engine().err().map(|error| error.kind()), Some(IoErrorKind::InUse));
    drop(engine);
    device.open_engine().expect("free again");
}

#[test]
fn a_media_error_hits_its_range_and_its_direction_until_healed() {
    let (device, mut engine) = device(settings(5));
    device.inject(Fault::at(FaultKind::ReadError, 8192..8193));
    assert_eq!(kind(&read(&mut engine, 2, 1)), Some(IoErrorKind::Media));
    assert_eq!(kind(&read(&mut engine, 0, 8)), Some(IoErrorKind::Media));
    assert_eq!(kind(&read(&mut engine, 3, 1)), None);
    assert_eq!(kind(&read(&mut engine, 0, 2)), None);
    write(&mut engine, 2, filled(1, 1));
    assert_eq!(kind(&finish(&mut engine)[0]), None);
    device.heal();
    assert_eq!(kind(&read(&mut engine, 2, 1)), None);
}

#[test]
fn a_fault_can_strike_a_number_of_times_or_by_chance() {
    let (device, mut engine) = device(settings(5));
    device.inject(Fault { trigger: Trigger::Times(2), ..Fault::everywhere(FaultKind::ReadError) });
    let outcomes: Vec<_> = (0..4).map(|page| kind(&read(&mut engine, page, 1)).is_some()).collect();
    assert_eq!(outcomes, [true, true, false, false]);
    let chance = Trigger::OneIn(NonZeroU32::new(4).expect("not zero"));
    device.inject(Fault { trigger: chance, ..Fault::everywhere(FaultKind::ReadError) });
    let failed = (0..400).filter(|index| kind(&read(&mut engine, index % PAGES, 1)).is_some()).count();
    assert!((50..150).contains(&failed), "{failed} of 400");
}

#[test]
fn a_failed_write_may_have_changed_any_of_its_sectors() {
    let mut torn = 0;
    for seed in 0..20 {
        let (device, mut engine) = device(settings(seed));
        device.inject(Fault::everywhere(FaultKind::WriteError));
        write(&mut engine, 1, filled(7, 2));
        assert_eq!(kind(&finish(&mut engine)[0]), Some(IoErrorKind::Media));
        let image = device.image();
        assert_eq!((byte_of(&image, 0), byte_of(&image, 3)), (Some(0), Some(0)), "outside");
        torn += usize::from(byte_of(&image, 1).is_none());
    }
    assert!(torn > 10, "{torn} of 20");
}

#[test]
fn each_other_fault_has_its_documented_result() {
    let cases = [
        (FaultKind::Full, Some(IoErrorKind::NoSpace), 0),
        (FaultKind::Gone, Some(IoErrorKind::Lost), 0),
        (FaultKind::LostWrite, None, 0),
        (FaultKind::SyncError, None, 7),
    ];
    for (fault, expected, byte) in cases {
        let (device, mut engine) = device(settings(2));
        device.inject(Fault::everywhere(fault));
        write(&mut engine, 0, filled(7, 1));
        assert_eq!(kind(&finish(&mut engine)[0]), expected, "{fault:?}");
        assert_eq!(byte_of(&device.image(), 0), Some(byte), "{fault:?}");
    }
}

#[test]
fn a_failed_sync_makes_nothing_durable() {
    let (device, mut engine) = device(settings(2));
    device.inject(Fault { trigger: Trigger::Times(1), ..Fault::everywhere(FaultKind::SyncError) });
    write(&mut engine, 0, filled(7, 1));
    finish(&mut engine);
    sync(&mut engine);
    assert_eq!(kind(&finish(&mut engine)[0]), Some(IoErrorKind::Lost));
    assert_eq!(byte_of(&device.crash(CrashMode::UnsyncedDropped), 0), Some(0));
}

#[test]
fn bit_rot_is_read_without_an_error_and_survives_crashes() {
    let (device, mut engine) = device(settings(2));
    write(&mut engine, 0, filled(0, 1));
    finish(&mut engine);
    device.corrupt(|image| image.flip_bit(100, 0));
    let done = read(&mut engine, 0, 1);
    assert!(done.result.is_ok());
    let mut found = vec![0; PAGE];
    done.op.spans()[0].copy_out(&mut found);
    assert_eq!((found[100], found.iter().filter(|byte| **byte != 0).count()), (1, 1));
    assert_eq!(page_of(&device.crash(CrashMode::UnsyncedDropped), 0)[100], 1);
}

#[test]
fn virtual_latencies_take_no_real_time_and_are_counted() {
    let hour = Duration::from_secs(3600);
    let latency = SimulatedLatency { read: hour..hour, write: hour..hour, sync: hour..hour };
    let (device, mut engine) = device(SimulatedSettings { latency, partial_one_in: None, ..settings(1) });
    let start = Instant::now();
    write(&mut engine, 0, filled(1, 1));
    assert_eq!(device.next_due(), Some(hour));
    let mut done = Vec::new();
    engine.reap(Wait::Until(hour / 2), &mut done).expect("a working engine");
    assert_eq!((done.len(), device.now()), (0, hour / 2));
    device.advance(hour / 4);
    engine.reap(Wait::No, &mut done).expect("a working engine");
    assert_eq!(done.len(), 0);
    engine.reap(Wait::Until(hour), &mut done).expect("a working engine");
    assert_eq!((done.len(), device.now(), device.next_due()), (1, hour, None));
    assert!(start.elapsed() < Duration::from_secs(30));
}

#[test]
fn real_latencies_take_their_time_and_a_wake_cuts_the_wait() {
    let latency = Duration::from_millis(30);
    let range = || latency..latency;
    let settings = SimulatedSettings {
        latency: SimulatedLatency { read: range(), write: range(), sync: range() },
        clock: SimulatedClock::Real,
        ..settings(1)
    };
    let (_, mut engine) = device(settings);
    let start = Instant::now();
    write(&mut engine, 0, filled(1, 1));
    engine.waker().wake();
    let mut done = Vec::new();
    engine.reap(Wait::Until(FOREVER), &mut done).expect("a working engine");
    assert!(done.is_empty());
    assert_eq!(finish(&mut engine).len(), 1);
    assert!(start.elapsed() >= latency);
}

#[test]
fn rejects_invalid_settings() {
    for bad in [
        SimulatedSettings { capacity: 0, ..settings(0) },
        SimulatedSettings { sector_bytes: 0, ..settings(0) },
        SimulatedSettings { sector_bytes: 1000, ..settings(0) },
    ] {
        let error = SimulatedDevice::new(Image::new(4096), bad).expect_err("refused");
        assert_eq!(error.kind(), IoErrorKind::Invalid);
    }
}

/// A completion: token, virtual time, outcome, and the memory of the operation.
type CompletionRecord = (u64, Duration, Option<IoErrorKind>, Vec<u8>);

/// Observable result of a run: its completions in order, and the surviving contents.
fn history(seed: u64) -> (Vec<CompletionRecord>, Image) {
    let (device, mut engine) = device(settings(seed));
    let rare = Trigger::OneIn(NonZeroU32::new(10).expect("not zero"));
    for kind in [FaultKind::ReadError, FaultKind::WriteError] {
        device.inject(Fault { trigger: rare, ..Fault::everywhere(kind) });
    }
    let mut events = Vec::new();
    for round in 0..20u64 {
        for index in 0..8 {
            let page = (round * 8 + index) % (PAGES - 4);
            let (offset, span) = (page * PAGE as u64, filled(round as u8 + 1, 4));
            let op = match index % 3 {
                0 => Op::Read { offset, into: vec![span] },
                1 => Op::Write { offset, from: vec![span] },
                _ => Op::Sync,
            };
            engine.submit(Submission { token: Token(round * 8 + index), op }).expect("there is room");
        }
        let mut done = Vec::new();
        while engine.in_flight() > 20 {
            engine.reap(Wait::Until(FOREVER), &mut done).expect("a working engine");
        }
        for done in done {
            let mut bytes = vec![0; done.op.bytes() as usize];
            if let Some(span) = done.op.spans().first() {
                span.copy_out(&mut bytes);
            }
            events.push((done.token.0, device.now(), kind(&done), bytes));
        }
    }
    (events, device.crash(CrashMode::PowerLost))
}

#[test]
fn the_same_seed_gives_the_same_history_and_another_seed_another() {
    let first = history(42);
    assert!(first.0.len() > 20 && first.0.iter().any(|event| event.2.is_some()));
    assert!(first == history(42));
    assert!(first != history(43));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// The contract that the pool's journal relies on, for whole-page sectors.
    #[test]
    fn after_a_power_loss_each_page_has_its_last_synced_contents_or_later_ones(
        seed in any::<u64>(),
        steps in proptest::collection::vec((0u64..8, 0u8..4), 1..60),
    ) {
        let (device, mut engine) = device(SimulatedSettings { sector_bytes: 4096, ..settings(seed) });
        // Contents that each page may have after a crash; the first is the durable one.
        let mut admissible: Vec<Vec<u8>> = vec![vec![0]; 8];
        for (byte, (page, action)) in (1u8..).zip(steps) {
            match action {
                0 => {
                    let complete: Vec<usize> = admissible.iter().map(Vec::len).collect();
                    sync(&mut engine);
                    finish(&mut engine);
                    for (page, count) in admissible.iter_mut().zip(complete) {
                        page.drain(..count - 1);
                    }
                }
                _ => {
                    write(&mut engine, page, filled(byte, 1));
                    finish(&mut engine);
                    admissible[page as usize].push(byte);
                }
            }
        }
        let image = device.crash(CrashMode::PowerLost);
        for (page, admissible) in (0..).zip(&admissible) {
            let found = byte_of(&image, page).expect("sectors are pages here");
            prop_assert!(admissible.contains(&found), "page {page}: {found} is not in {admissible:?}");
        }
    }
}

#[test]
fn a_hung_transfer_is_leaked_and_may_write_to_memory_later() {
    let (device, engine) = device(settings(1));
    let mut engine = Box::new(engine);
    device.corrupt(|image| image.write(0, &[7; PAGE]));
    device.inject(Fault::at(FaultKind::Hang, 0..PAGE as u64));
    let mut target = PageBuffer::new(PAGE).expect("a page");
    let op = Op::Read { offset: 0, into: vec![target.span()] };
    engine.submit(Submission { token: Token(1), op }).expect("there is room");
    let mut done = Vec::new();
    engine.reap(Wait::Until(Duration::from_millis(10)), &mut done).expect("a working engine");
    assert!(done.is_empty() && engine.in_flight() == 1 && target.is_lent());
    assert_eq!(engine.close(), CloseOutcome::Leaked);
    assert!(target.is_lent(), "the memory is not released");
    device.release_hung();
    assert!(!target.is_lent() && target.iter().all(|byte| *byte == 7));
}
