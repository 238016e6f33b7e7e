//! Every fault of the emulated controller: no context is lost or ends twice, and data is right or reported.

use std::time::{Duration, Instant};

use reprise_cuda::ring::{BatchSettings, ContextStatus};
use reprise_nvme::emulated::{Emulation, Fault, FaultRule, Selection};
use reprise_nvme::spec::{READ, Status};

use super::rig::{LONG, Rig, emulation, reads, writes};

const SHORT: Duration = Duration::from_millis(5);
/// A deadline that only lost commands miss.
const LATER: Duration = Duration::from_millis(400);
const COUNT: u64 = 300;
const SIZE: u64 = 4608;

/// Starts a ring with a fault of every seventh read at least, and data on the device.
fn rig(fault: Fault, sgl: bool) -> Rig {
    let rule = |skip| {
        let on =
            Selection { queue: Some(1), opcode: Some(READ), skip, times: Some(1), ..Selection::default() };
        FaultRule {
            on: if fault == Fault::DropDoorbell { Selection { opcode: None, ..on } } else { on },
            fault,
        }
    };
    let faults = (0..COUNT / 7).map(|index| rule(index * 7)).collect();
    let mut rig = Rig::new(Emulation { sgl, faults, ..emulation() }, 1, 32);
    if fault != Fault::DropDoorbell {
        rig.fill(0, (COUNT * SIZE) as usize, 3);
        let all: Vec<_> = (0..COUNT).map(|index| rig.transfer(index * SIZE, index * SIZE, SIZE)).collect();
        rig.succeed(&writes(), &all);
    }
    rig
}

/// Reads all data to another place. Returns the statuses, after a check of the bytes of all contexts that are done.
fn read(rig: &mut Rig, settings: &BatchSettings) -> Vec<ContextStatus> {
    let to = COUNT * SIZE;
    rig.fill(to as usize, (COUNT * SIZE) as usize, 4);
    let all: Vec<_> = (0..COUNT).map(|index| rig.transfer(to + index * SIZE, index * SIZE, SIZE)).collect();
    let statuses = rig.run(settings, &all);
    for (index, status) in statuses.iter().enumerate() {
        let at = index * SIZE as usize;
        let same = rig.contents(to as usize + at, SIZE as usize) == rig.contents(at, SIZE as usize);
        assert!(same || *status != ContextStatus::Done, "context {index} is done");
    }
    statuses
}

fn count(statuses: &[ContextStatus], wanted: ContextStatus) -> usize {
    statuses.iter().filter(|one| **one == wanted).count()
}

#[test]
fn late_and_reordered_completions_end_their_own_contexts() {
    for fault in [Fault::Late(Duration::from_micros(300)), Fault::Reorder] {
        for sgl in [true, false] {
            let mut rig = rig(fault, sgl);
            assert_eq!(count(&read(&mut rig, &reads()), ContextStatus::Done), COUNT as usize, "{fault:?}");
            let (counters, _) = rig.stop();
            assert!(counters.faults.iter().sum::<u64>() > 30, "{fault:?}");
        }
    }
}

#[test]
fn errors_reach_their_contexts_only() {
    let mut rig = rig(Fault::Status(Status::READ_ERROR), true);
    let statuses = read(&mut rig, &reads());
    let failed = count(&statuses, ContextStatus::Failed(Status::READ_ERROR));
    assert_eq!(failed + count(&statuses, ContextStatus::Done), COUNT as usize);
    let (counters, _) = rig.stop();
    assert_eq!(failed as u64, counters.faults.iter().sum::<u64>());
}

#[test]
fn the_first_error_of_a_split_context_is_its_status() {
    let on = Selection { blocks: Some((16, 16)), ..Selection::default() };
    let faults = vec![FaultRule { on, fault: Fault::Status(Status::WRITE_FAULT) }];
    let transfer_max = Some(4096);
    let mut rig = Rig::new(Emulation { faults, transfer_max, ..emulation() }, 1, 4);
    let all = [rig.transfer(0, 0, 16 * 4096), rig.transfer(65_536, 65_536, 4096)];
    assert_eq!(rig.run(&writes(), &all), [ContextStatus::Failed(Status::WRITE_FAULT), ContextStatus::Done]);
    rig.stop();
}

#[test]
fn a_corrupt_list_is_an_error_and_not_another_place() {
    // An SGL of one piece lies in the command, so it has no list.
    for (sgl, harmed) in [(false, true), (true, false)] {
        let mut rig = rig(Fault::CorruptList, sgl);
        let all: Vec<_> =
            (0..COUNT / 8).map(|index| rig.transfer(index * 16_384, index * 16_384, 16_384)).collect();
        let statuses = rig.run(&reads(), &all);
        let failed = count(&statuses, ContextStatus::Failed(Status::DATA_TRANSFER));
        assert_eq!(failed > 0, harmed, "SGL {sgl}: {statuses:?}");
        assert_eq!(failed + count(&statuses, ContextStatus::Done), all.len());
        rig.stop();
    }
}

#[test]
fn lost_completions_time_out_and_nothing_else_does() {
    let mut rig = rig(Fault::Lost, true);
    let statuses = read(&mut rig, &BatchSettings { timeout: Some(LATER), ..reads() });
    let late = count(&statuses, ContextStatus::TimedOut);
    assert!(late > 0);
    assert_eq!(late + count(&statuses, ContextStatus::Done), COUNT as usize);
    rig.reclaim(0, Duration::from_millis(1));
    assert_eq!(rig.ring.given_up(0), 0);
    rig.stop();
}

#[test]
fn doubled_completions_are_violations_and_end_no_context_twice() {
    for fault in [Fault::Twice, Fault::TwiceLate(Duration::from_micros(500))] {
        let mut rig = rig(fault, true);
        for _ in 0..3 {
            let statuses = read(&mut rig, &reads());
            let bad = count(&statuses, ContextStatus::Violation);
            assert_eq!(bad + count(&statuses, ContextStatus::Done), COUNT as usize, "{fault:?}");
            assert_eq!(rig.ring.poll_cqe(), None, "{fault:?}: the batch ends once");
            rig.reclaim(0, LONG);
        }
        rig.stop();
    }
}

#[test]
fn commands_of_a_dropped_doorbell_time_out_or_run_with_the_next_one() {
    let mut rig = rig(Fault::DropDoorbell, true);
    let soon = BatchSettings { timeout: Some(LATER), ..reads() };
    let one = rig.transfer(0, 0, 512);
    assert_eq!(rig.run(&soon, &[one]), [ContextStatus::TimedOut]);
    // The next doorbell announces both commands.
    assert_eq!(rig.run(&reads(), &[one]), [ContextStatus::Done]);
    rig.await_given_up(0, 0);
    rig.stop();
}

#[test]
fn a_controller_that_fails_or_vanishes_ends_batches_by_their_deadline() {
    for fault in [Fault::Fail, Fault::Vanish] {
        let mut rig = rig(fault, true);
        let soon = BatchSettings { timeout: Some(SHORT), ..reads() };
        let statuses = read(&mut rig, &soon);
        let late = count(&statuses, ContextStatus::TimedOut);
        assert_eq!(late + count(&statuses, ContextStatus::Done), COUNT as usize, "{fault:?}");
        assert!(late > 0, "{fault:?}");
        let start = Instant::now();
        while rig.controller.check_alive().is_ok() {
            assert!(start.elapsed() < LONG, "{fault:?}");
        }
        // Nothing can be reclaimed: the error is the driver's, and no memory of the controller has another use.
        rig.fail_to_reclaim(0);
    }
}
