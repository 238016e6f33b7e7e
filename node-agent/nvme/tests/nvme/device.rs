//! A namespace as a block device, and what its engine makes of faults. The conformance suite of I/O engines, in the
//! crate `reprise-io`, holds for it too.

use std::time::{Duration, Instant};

use reprise_buffers::PageBuffer;
use reprise_io::{
    BlockDevice, CloseOutcome, Completion, EngineSettings, FileAccess, IoEngine, IoErrorKind, Op,
    Preallocation, Reserve, Submission, Token, Wait,
};
use reprise_nvme::emulated::{EmulatedController, Emulation, Fault, FaultRule, Selection, Storage};
use reprise_nvme::spec::{FLUSH, Status, WRITE, WRITE_ZEROES};
use reprise_nvme::{DeviceSettings, NvmeDevice, NvmeError, OpenController};

use crate::bench_rig::{LONG, emulation, pattern, settings};

const PAGE: usize = 4096;
/// Deadline of commands in tests that let it pass.
const SHORT: Duration = Duration::from_millis(50);

fn open(emulation: Emulation, command_timeout: Duration) -> NvmeDevice<EmulatedController> {
    let controller = EmulatedController::start(emulation).expect("it starts");
    let settings = DeviceSettings { driver: settings(), command_timeout, ..DeviceSettings::default() };
    NvmeDevice::open(controller, &settings).expect("one namespace")
}

/// Starts an engine on a controller with one fault on its I/O queue.
fn engine(on: Selection, fault: Fault, command_timeout: Duration) -> Box<dyn IoEngine> {
    let on = Selection { queue: Some(1), ..on };
    let faults = vec![FaultRule { on, fault }];
    let device = open(Emulation { faults, ..emulation() }, command_timeout);
    Box::new(device).start_engine(&EngineSettings::default()).expect("a queue pair")
}

fn once() -> Selection {
    Selection { times: Some(1), ..Selection::default() }
}

fn submit(engine: &mut dyn IoEngine, token: u64, op: Op) {
    engine.submit(Submission { token: Token(token), op }).expect("there is room");
}

fn read(engine: &mut dyn IoEngine, token: u64) {
    let into = vec![PageBuffer::new(PAGE).expect("a page").span()];
    submit(engine, token, Op::Read { offset: token * PAGE as u64, into });
}

/// Waits for an operation; returns its error.
fn error_of(engine: &mut dyn IoEngine, token: u64) -> Option<IoErrorKind> {
    let done = wait(engine, 1);
    assert_eq!(done[0].token, Token(token));
    done[0].result.as_ref().err().map(reprise_io::IoError::kind)
}

fn wait(engine: &mut dyn IoEngine, count: usize) -> Vec<Completion> {
    let (start, mut done) = (Instant::now(), Vec::new());
    while done.len() < count {
        engine.reap(Wait::Until(LONG), &mut done).expect("the engine works");
        assert!(start.elapsed() < LONG);
    }
    done
}

/// Waits until the engine no longer works.
fn lost(engine: &mut dyn IoEngine) -> String {
    let (start, mut done) = (Instant::now(), Vec::new());
    loop {
        match engine.reap(Wait::Until(SHORT), &mut done) {
            Ok(()) => assert!(start.elapsed() < LONG && done.is_empty(), "{done:?}"),
            Err(error) => {
                assert_eq!(error.kind(), IoErrorKind::Lost);
                return error.to_string();
            }
        }
    }
}

#[test]
fn a_device_has_the_size_of_its_namespace_and_is_read_and_erased() {
    for write_zeroes in [true, false] {
        let contents = pattern(8 << 20, 5);
        let namespaces = vec![Storage::Memory(contents.clone())];
        let mut device = open(Emulation { namespaces, write_zeroes, ..emulation() }, LONG);
        assert_eq!(device.size(), 8 << 20);
        let mut page = PageBuffer::new(PAGE).expect("a page");
        device.read(4096, &mut page).expect("inside");
        assert!(page[..] == contents[4096..8192]);
        let error = device.read(8 << 20, &mut page).expect_err("beyond the end");
        assert_eq!(error.kind(), IoErrorKind::ShortTransfer);
        device.erase_ends(PAGE as u64).expect("erased");
        for (offset, expected) in [(0, None), (4096, Some(4096..8192)), ((8 << 20) - 4096, None)] {
            device.read(offset, &mut page).expect("inside");
            let zeroes = vec![0; PAGE];
            assert!(page[..] == *expected.map_or(&zeroes[..], |range| &contents[range]), "{offset}");
        }
        device.erase().expect("erased");
        device.read(4096, &mut page).expect("inside");
        assert!(page.iter().all(|byte| *byte == 0));
    }
}

#[test]
fn a_pool_larger_than_the_namespace_is_refused_with_both_sizes() {
    let mut device = open(emulation(), LONG);
    let fits = device.preallocate(8 << 20, Reserve::Bytes(0)).expect("it fits");
    assert_eq!(fits, Preallocation::Device);
    let error = device.preallocate((8 << 20) + 1, Reserve::Bytes(0)).expect_err("too large");
    assert_eq!(error.kind(), IoErrorKind::NoSpace);
    assert!(error.to_string().contains("8388609") && error.to_string().contains("8388608"), "{error}");
}

#[test]
fn one_of_several_namespaces_must_be_chosen() {
    let namespaces = || vec![Storage::memory(1 << 20), Storage::memory(2 << 20)];
    let start = || EmulatedController::start(Emulation { namespaces: namespaces(), ..emulation() });
    let error =
        NvmeDevice::open(start().expect("it starts"), &DeviceSettings::default()).expect_err("ambiguous");
    assert!(error.to_string().contains("2 usable namespaces (1, 2)"), "{error}");
    let chosen = DeviceSettings { namespace: Some(2), ..DeviceSettings::default() };
    assert_eq!(NvmeDevice::open(start().expect("it starts"), &chosen).expect("chosen").size(), 2 << 20);
}

#[test]
fn the_status_of_a_command_decides_the_kind_of_the_error() {
    for (status, expected) in [
        (Status::WRITE_FAULT, IoErrorKind::Media),
        (Status::WRITE_PROTECTED, IoErrorKind::ReadOnly),
        (Status::CAPACITY, IoErrorKind::NoSpace),
        (Status::INVALID_NAMESPACE, IoErrorKind::Lost),
    ] {
        let on = Selection { opcode: Some(WRITE), ..once() };
        let mut engine = engine(on, Fault::Status(status), LONG);
        let from = vec![PageBuffer::new(PAGE).expect("a page").span()];
        submit(engine.as_mut(), 1, Op::Write { offset: 0, from: from.clone() });
        assert_eq!(error_of(engine.as_mut(), 1), Some(expected), "{status}");
        submit(engine.as_mut(), 2, Op::Write { offset: 0, from });
        assert_eq!(error_of(engine.as_mut(), 2), None, "the engine continues");
    }
    let on = Selection { opcode: Some(FLUSH), ..once() };
    let mut engine = engine(on, Fault::Status(Status::INTERNAL), LONG);
    submit(engine.as_mut(), 1, Op::Sync);
    assert_eq!(
        error_of(engine.as_mut(), 1),
        Some(IoErrorKind::Lost),
        "it is unknown which writes are durable"
    );
}

#[test]
fn a_command_after_its_deadline_is_aborted_and_others_continue() {
    let mut engine = engine(once(), Fault::Late(LONG), SHORT);
    read(engine.as_mut(), 1);
    assert_eq!(error_of(engine.as_mut(), 1), Some(IoErrorKind::Media));
    read(engine.as_mut(), 2);
    assert_eq!(error_of(engine.as_mut(), 2), None);
    assert_eq!(engine.close(), CloseOutcome::Drained);
}

#[test]
fn a_command_that_an_abort_does_not_end_loses_the_engine_but_not_its_memory() {
    let mut engine = engine(once(), Fault::Lost, SHORT);
    let mut page = PageBuffer::new(PAGE).expect("a page");
    submit(engine.as_mut(), 1, Op::Read { offset: 0, into: vec![page.span()] });
    let text = lost(engine.as_mut());
    assert!(text.contains("an aborted command has not ended within 50ms: reset the controller"), "{text}");
    assert!(page.is_lent(), "the controller may still write to it");
    assert_eq!(engine.close(), CloseOutcome::Drained, "the reset ends the command");
    assert!(!page.is_lent());
}

#[test]
fn a_lost_doorbell_is_made_up_for_by_the_next_operation() {
    let mut engine = engine(once(), Fault::DropDoorbell, LONG);
    read(engine.as_mut(), 1);
    let mut done = Vec::new();
    engine.reap(Wait::Until(SHORT), &mut done).expect("the engine works");
    assert!(done.is_empty(), "{done:?}");
    read(engine.as_mut(), 2);
    assert!(wait(engine.as_mut(), 2).iter().all(|completion| completion.result.is_ok()));
}

#[test]
fn many_commands_after_their_deadlines_are_aborted_and_the_engine_continues() {
    let on = Selection { times: Some(20), ..Selection::default() };
    let mut engine = engine(on, Fault::Late(LONG), SHORT);
    (0..20).for_each(|token| read(engine.as_mut(), token));
    let done = wait(engine.as_mut(), 20);
    assert!(done.iter().all(|completion| completion.result.is_err()));
    read(engine.as_mut(), 20);
    assert_eq!(error_of(engine.as_mut(), 20), None);
}

#[test]
fn a_device_that_was_opened_read_only_is_not_erased() {
    for write_zeroes in [true, false] {
        let contents = pattern(1 << 20, 5);
        let emulation =
            Emulation { namespaces: vec![Storage::Memory(contents)], write_zeroes, ..emulation() };
        let controller = EmulatedController::start(emulation).expect("it starts");
        let access = FileAccess::ReadOnly;
        let settings = DeviceSettings { driver: settings(), access, ..DeviceSettings::default() };
        let mut device = NvmeDevice::open(controller, &settings).expect("one namespace");
        assert_eq!(device.erase().expect_err("read-only").kind(), IoErrorKind::Invalid);
        assert_eq!(device.erase_ends(4096).expect_err("read-only").kind(), IoErrorKind::Invalid);
        let mut page = PageBuffer::new(PAGE).expect("a page");
        device.read(0, &mut page).expect("inside");
        assert!(page[..] == pattern(PAGE, 5)[..], "nothing was erased");
    }
}

#[test]
fn a_rejected_write_zeroes_is_replaced_by_writes() {
    let on = Selection { opcode: Some(WRITE_ZEROES), ..Selection::default() };
    let faults = vec![FaultRule { on, fault: Fault::Status(Status::INVALID_FIELD) }];
    let namespaces = vec![Storage::Memory(pattern(1 << 20, 5))];
    let mut device = open(Emulation { namespaces, faults, ..emulation() }, LONG);
    device.erase().expect("erased");
    let mut page = PageBuffer::new(PAGE).expect("a page");
    device.read(8192, &mut page).expect("inside");
    assert!(page.iter().all(|byte| *byte == 0));
}

#[test]
fn a_controller_that_fails_or_vanishes_loses_the_engine_at_once() {
    for (fault, text, close) in
        [(Fault::Fail, "fatal error", CloseOutcome::Drained), (Fault::Vanish, "gone", CloseOutcome::Leaked)]
    {
        let mut engine = engine(once(), fault, LONG);
        let start = Instant::now();
        read(engine.as_mut(), 1);
        let error = lost(engine.as_mut());
        assert!(error.contains(text), "{error}");
        assert!(start.elapsed() < LONG / 2, "before the deadline of the command");
        assert_eq!(engine.close(), close);
    }
}

#[test]
fn others_use_the_controller_next_to_its_engine_until_the_engine_ends() {
    let device = open(emulation(), LONG);
    let controller = std::sync::Arc::clone(device.controller());
    assert_eq!(device.namespace().id, 1);
    let mut engine = Box::new(device).start_engine(&EngineSettings::default()).expect("a queue pair");
    let pair = controller.with(|one| one.create_queue_pair(16)).expect("a second pair");
    read(engine.as_mut(), 1);
    controller.health().expect("the admin queue is free");
    assert_eq!(error_of(engine.as_mut(), 1), None);
    let deleted = controller.with(|one| one.delete_queue_pair(pair)).expect("deleted");
    assert!(deleted.ended.is_empty() && deleted.unfinished.is_empty());
    assert_eq!(engine.close(), CloseOutcome::Drained);
    assert!(matches!(controller.health(), Err(NvmeError::Closed)));
}

#[test]
fn an_overdue_command_is_aborted_after_another_user_has_left_the_admin_queue() {
    let device = open(
        Emulation {
            faults: vec![FaultRule { on: once_of_queue(), fault: Fault::Late(LONG) }],
            ..emulation()
        },
        SHORT,
    );
    let controller = std::sync::Arc::clone(device.controller());
    let mut engine = Box::new(device).start_engine(&EngineSettings::default()).expect("a queue pair");
    read(engine.as_mut(), 1);
    let mut done = Vec::new();
    controller
        .with(|_| {
            let start = Instant::now();
            while start.elapsed() < 4 * SHORT {
                engine.reap(Wait::Until(SHORT), &mut done).expect("it does not wait for the other user");
            }
            Ok(())
        })
        .expect("open");
    assert!(done.is_empty(), "no abort was requested");
    assert_eq!(error_of(engine.as_mut(), 1), Some(IoErrorKind::Media));
}

fn once_of_queue() -> Selection {
    Selection { queue: Some(1), ..once() }
}
