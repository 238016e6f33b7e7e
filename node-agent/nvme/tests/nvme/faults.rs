//! Every fault of the emulated controller: what the driver reports, and that nothing is lost or doubled.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use reprise_nvme::emulated::{Emulation, Fault, FaultRule, Selection};
use reprise_nvme::spec::{Command, DataPointer, READ, Status, WRITE};
use reprise_nvme::{Backing, DmaMemory, NvmeError, was_aborted};

use crate::bench_rig::{LONG, Queue, Rig, emulation, run, wait};

const PAGE: u64 = 4096;

/// Starts a controller with one fault on its first I/O queue.
fn rig(on: Selection, fault: Fault) -> (Rig, Queue) {
    let on = Selection { queue: Some(1), ..on };
    let mut rig = Rig::new(Emulation { faults: vec![FaultRule { on, fault }], ..emulation() });
    let queue = rig.controller.create_queue_pair(16).expect("granted");
    (rig, queue)
}

fn once() -> Selection {
    Selection { times: Some(1), ..Selection::default() }
}

fn submit(queue: &mut Queue, tokens: std::ops::Range<u64>) {
    for token in tokens {
        queue.submit(&Command::flush(1), token, Instant::now() + LONG).expect("room");
    }
    queue.ring();
}

#[test]
fn late_and_reordered_completions_reach_their_commands() {
    for fault in [Fault::Late(Duration::from_millis(3)), Fault::Reorder] {
        let (_rig, mut queue) = rig(once(), fault);
        submit(&mut queue, 0..5);
        let order: Vec<_> = wait(&mut queue, 5).into_iter().map(|one| one.token).collect();
        assert_ne!(order[0], 0, "{fault:?}: the first command does not end first");
        let mut sorted = order.clone();
        sorted.sort_unstable();
        assert_eq!(sorted, [0, 1, 2, 3, 4], "{fault:?}");
    }
}

#[test]
fn an_error_of_one_place_does_not_harm_others() {
    let on = Selection { blocks: Some((19, 19)), opcode: Some(READ), ..Selection::default() };
    let (rig, mut queue) = rig(on, Fault::Status(Status::READ_ERROR));
    assert!(rig.write(&mut queue, 16, 0, PAGE).is_success());
    let status = rig.read(&mut queue, 16, 0, PAGE);
    assert!(status.is_media() && !status.is_success());
    assert!(rig.read(&mut queue, 24, 0, PAGE).is_success());
}

#[test]
fn a_lost_command_is_overdue_and_its_slot_stays_in_use() {
    let (_rig, mut queue) = rig(once(), Fault::Lost);
    let free = queue.free();
    let id = queue.submit(&Command::flush(1), 5, Instant::now()).expect("room");
    queue.ring();
    assert_eq!(queue.overdue(Instant::now()), [id]);
    assert_eq!(queue.give_up(id), Some(5));
    assert_eq!(queue.give_up(id), None, "it is given up once");
    assert_eq!((queue.in_flight(), queue.given_up(), queue.free()), (0, 1, free - 1));
    assert!(run(&mut queue, &Command::flush(1)).is_success(), "other commands run");
}

#[test]
fn a_late_command_that_was_given_up_frees_its_slot_without_a_report() {
    let (_rig, mut queue) = rig(once(), Fault::Late(Duration::from_millis(20)));
    let id = queue.submit(&Command::flush(1), 5, Instant::now()).expect("room");
    queue.ring();
    assert_eq!(queue.give_up(id), Some(5));
    let (start, mut ended) = (Instant::now(), Vec::new());
    while queue.given_up() > 0 {
        queue.poll(&mut ended).expect("no violation");
        assert!(start.elapsed() < LONG);
    }
    assert_eq!(ended, []);
}

#[test]
fn an_aborted_command_ends_as_aborted() {
    let (mut rig, mut queue) = rig(once(), Fault::Late(LONG));
    let id = queue.submit(&Command::flush(1), 5, Instant::now()).expect("room");
    queue.ring();
    // The controller has the command when a later one has ended.
    assert!(run(&mut queue, &Command::flush(1)).is_success());
    assert!(rig.controller.request_abort(queue.id(), id).expect("accepted"));
    let ended = wait(&mut queue, 1);
    assert_eq!(ended[0].token, 5);
    assert!(was_aborted(ended[0].status));
    // An abort of a command that has ended does not harm the next one.
    assert!(rig.controller.request_abort(queue.id(), id).expect("accepted"));
    assert!(run(&mut queue, &Command::flush(1)).is_success());
}

#[test]
fn a_command_that_ends_twice_is_a_violation_after_which_the_queue_is_not_used() {
    let (_rig, mut queue) = rig(once(), Fault::Twice);
    submit(&mut queue, 0..1);
    let (start, mut ended) = (Instant::now(), Vec::new());
    let error = loop {
        match queue.poll(&mut ended) {
            Ok(()) => assert!(start.elapsed() < LONG),
            Err(error) => break error,
        }
    };
    assert!(
        error.to_string().ends_with("queue 1: a completion of command 0, which is not in flight"),
        "{error}"
    );
    assert_eq!(ended.len(), 1, "it is reported once");
    let next = queue.submit(&Command::flush(1), 1, Instant::now() + LONG);
    assert!(matches!(next, Err(NvmeError::Violation(_))), "{next:?}");
}

#[test]
fn a_doubled_completion_does_not_end_the_next_command_of_its_slot() {
    // One slot: the second completion arrives when the slot has another command.
    let on = Selection { queue: Some(1), times: Some(1), ..Selection::default() };
    let faults = vec![FaultRule { on, fault: Fault::TwiceLate(Duration::from_millis(10)) }];
    let mut rig = Rig::new(Emulation { faults, ..emulation() });
    let mut queue = rig.controller.create_queue_pair(2).expect("granted");
    submit(&mut queue, 0..1);
    assert_eq!(wait(&mut queue, 1)[0].token, 0);
    // The doorbell of the second command is not rung, so that only the doubled completion can arrive.
    queue.submit(&Command::flush(1), 1, Instant::now() + LONG).expect("room");
    let (start, mut ended) = (Instant::now(), Vec::new());
    let error = loop {
        match queue.poll(&mut ended) {
            Ok(()) => assert!(start.elapsed() < LONG && ended.is_empty(), "{ended:?}"),
            Err(error) => break error,
        }
    };
    assert!(error.to_string().ends_with("a completion of command 0, which is not in flight"), "{error}");
}

#[test]
fn memory_of_a_queue_that_was_dropped_is_not_accessed() {
    let (mut rig, mut queue) = rig(once(), Fault::Late(Duration::from_millis(5)));
    submit(&mut queue, 0..1);
    let other = rig.controller.create_queue_pair(8).expect("granted");
    drop(queue);
    std::thread::sleep(Duration::from_millis(20));
    rig.controller.health().expect("the controller works");
    let (counters, _) = rig.stop(other);
    assert_eq!(counters.bad_addresses, 1, "the access of the completion has failed");
}

#[test]
fn an_invalid_head_doorbell_fails_the_controller() {
    let (rig, mut queue) = rig(Selection { skip: 99, ..once() }, Fault::Lost);
    rig.controller.backing().write(reprise_nvme::spec::offset::cq_head(1, 4), 9999);
    submit(&mut queue, 0..1);
    let start = Instant::now();
    while rig.controller.check_alive().is_ok() {
        assert!(start.elapsed() < LONG);
    }
    assert!(matches!(rig.controller.check_alive(), Err(NvmeError::Fatal)));
}

#[test]
fn a_corrupt_list_is_an_error_and_not_another_place() {
    for sgl in [false, true] {
        let on = Selection { queue: Some(1), opcode: Some(WRITE), ..once() };
        let faults = vec![FaultRule { on, fault: Fault::CorruptList }];
        let mut rig = Rig::new(Emulation { faults, sgl, ..emulation() });
        let mut queue = rig.controller.create_queue_pair(16).expect("granted");
        // Two pieces, so that the SGL has a segment too.
        let pieces = [rig.piece(0, 4 * PAGE), rig.piece(8 * PAGE, 4 * PAGE)];
        let command = rig.transfer(&queue, WRITE, 0, &pieces);
        assert_eq!(run(&mut queue, &command), Status::DATA_TRANSFER, "SGL: {sgl}");
        let again = rig.transfer(&queue, WRITE, 0, &pieces);
        assert!(run(&mut queue, &again).is_success());
    }
}

#[test]
fn a_dropped_doorbell_is_made_up_for_by_the_next_command() {
    let on = Selection { queue: Some(1), times: Some(1), ..Selection::default() };
    let (_rig, mut queue) = rig(on, Fault::DropDoorbell);
    submit(&mut queue, 0..1);
    let mut ended = Vec::new();
    std::thread::sleep(Duration::from_millis(2));
    queue.poll(&mut ended).expect("no violation");
    assert_eq!(ended, []);
    // A controller that is late sees several doorbells as one, and drops that.
    let mut submitted = 1;
    while ended.len() < submitted {
        assert!(submitted < 8, "no further doorbell is dropped");
        submit(&mut queue, submitted as u64..submitted as u64 + 1);
        submitted += 1;
        let start = Instant::now();
        while ended.len() < submitted && start.elapsed() < LONG / 10 {
            queue.poll(&mut ended).expect("no violation");
            std::thread::yield_now();
        }
    }
}

#[test]
fn a_failed_controller_is_reported_and_works_after_a_reset() {
    let (rig, mut queue) = rig(once(), Fault::Fail);
    submit(&mut queue, 0..1);
    let Rig { mut controller, .. } = rig;
    let start = Instant::now();
    let error = loop {
        match controller.health() {
            Ok(_) => assert!(start.elapsed() < LONG, "it fails in time"),
            Err(error) => break error,
        }
    };
    assert!(matches!(error, NvmeError::Fatal), "{error}");
    let backing = std::sync::Arc::clone(controller.backing());
    drop((controller, queue));
    let backing = std::sync::Arc::into_inner(backing).expect("the only owner");
    let mut again =
        reprise_nvme::Controller::start(backing, crate::bench_rig::settings()).expect("it starts");
    let mut queue = again.create_queue_pair(16).expect("granted");
    assert!(run(&mut queue, &Command::flush(1)).is_success());
}

#[test]
fn a_vanished_controller_is_gone() {
    let (mut rig, mut queue) = rig(once(), Fault::Vanish);
    submit(&mut queue, 0..1);
    let start = Instant::now();
    while rig.controller.health().is_ok() {
        assert!(start.elapsed() < LONG);
    }
    assert!(matches!(rig.controller.health(), Err(NvmeError::Gone)));
}

#[test]
fn lists_that_lead_to_each_other_end_as_an_error() {
    let mut rig = Rig::new(Emulation { sgl: false, ..emulation() });
    let mut queue = rig.controller.create_queue_pair(16).expect("granted");
    let lists = rig.controller.backing().allocate(2 * PAGE as usize).expect("two pages");
    let last = PAGE as usize - 8;
    for (first, other) in [(last, PAGE as usize + last), (PAGE as usize + last, last)] {
        lists.word(first).store((lists.address() + other as u64).to_le(), Ordering::Release);
    }
    let pieces = [rig.piece(0, 4 * PAGE)];
    let mut command = rig.transfer(&queue, WRITE, 0, &pieces);
    command.data = DataPointer::prp(pieces[0].address, lists.address() + last as u64);
    assert_eq!(run(&mut queue, &command), Status::INVALID_FIELD);
}
