//! Deadlines, cancellation, parking, and queues that are reclaimed.

use std::time::Duration;

use reprise_cuda::ring::{BatchSettings, ContextStatus, HostRunner, Reclaimed};
use reprise_nvme::emulated::{Emulation, Fault, FaultRule, Selection};

use super::rig::{LONG, Rig, emulation, reads};

const SHORT: Duration = Duration::from_millis(5);
/// A deadline that only lost and late commands miss.
const LATER: Duration = Duration::from_millis(300);

/// A fault of all commands of the first queue after some others.
fn faulty(fault: Fault, skip: u64, times: Option<u64>) -> Emulation {
    let on = Selection { queue: Some(1), skip, times, ..Selection::default() };
    Emulation { faults: vec![FaultRule { on, fault }], ..emulation() }
}

fn soon() -> BatchSettings {
    BatchSettings { timeout: Some(SHORT), ..reads() }
}

fn later() -> BatchSettings {
    BatchSettings { timeout: Some(LATER), ..reads() }
}

/// Issues contexts of a block each to queue 0, and returns the statuses.
fn run(rig: &mut Rig, settings: &BatchSettings, count: u64) -> Vec<ContextStatus> {
    let all: Vec<_> = (0..count).map(|index| rig.transfer(index * 512, index * 512, 512)).collect();
    rig.run(settings, &all)
}

#[test]
fn a_batch_whose_commands_are_lost_times_out_and_the_others_are_done() {
    let mut rig = Rig::new(faulty(Fault::Lost, 10, Some(3)), 1, 64);
    let statuses = run(&mut rig, &later(), 40);
    for (index, status) in statuses.iter().enumerate() {
        let lost = (10..13).contains(&index);
        let expected = if lost { ContextStatus::TimedOut } else { ContextStatus::Done };
        assert_eq!(*status, expected, "context {index}");
    }
    assert_eq!(rig.ring.given_up(0), 3);
    assert!(run(&mut rig, &reads(), 200).iter().all(|one| *one == ContextStatus::Done), "others run");
    assert_eq!(rig.ring.take_given_up(0).len(), 3);
    assert_eq!(rig.ring.take_given_up(0), [], "each is reported once");
    rig.stop();
}

#[test]
fn late_commands_are_aborted_and_their_slots_are_free_again() {
    let mut rig = Rig::new(faulty(Fault::Late(LONG), 0, Some(20)), 1, 32);
    // The controller has all commands before the deadline: only those can be aborted.
    assert!(run(&mut rig, &later(), 20).iter().all(|one| *one == ContextStatus::TimedOut));
    assert_eq!(rig.ring.given_up(0), 20);
    let outcome = rig.reclaim(0, LONG);
    assert_eq!((outcome, rig.ring.given_up(0)), (Reclaimed::Aborted, 0));
    assert!(run(&mut rig, &reads(), 100).iter().all(|one| *one == ContextStatus::Done));
    assert_eq!(rig.reclaim(0, LONG), Reclaimed::Nothing);
    rig.stop();
}

#[test]
fn late_commands_that_end_by_themselves_free_their_slots_without_a_report() {
    let mut rig = Rig::new(faulty(Fault::Late(LATER), 0, Some(4)), 1, 8);
    assert!(run(&mut rig, &soon(), 4).iter().all(|one| *one == ContextStatus::TimedOut));
    rig.await_given_up(0, 0);
    assert_eq!(rig.ring.poll_cqe(), None, "the batch has ended before");
    rig.stop();
}

#[test]
fn lost_commands_leak_nothing_over_many_queue_pairs() {
    let mut rig = Rig::new(faulty(Fault::Lost, 0, None), 1, 8);
    let free = rig.controller.free_queue_pairs();
    // Fewer slots than contexts: those without a command time out too.
    for round in 0..12 {
        assert!(run(&mut rig, &soon(), 20).iter().all(|one| *one == ContextStatus::TimedOut), "{round}");
        assert_eq!(rig.ring.given_up(0), 7);
        assert_eq!(rig.reclaim(0, Duration::from_millis(1)), Reclaimed::Recreated);
        assert_eq!((rig.ring.given_up(0), rig.ring.free_iocbs()), (0, 8));
        assert_eq!(rig.controller.free_queue_pairs(), free);
    }
    let (counters, _) = rig.stop();
    // A queue pair may be deleted before the controller has taken all of its commands.
    assert!((7..=12 * 7).contains(&counters.commands) && counters.bad_addresses == 0, "{counters:?}");
}

#[test]
fn a_violation_ends_the_batches_and_a_new_queue_pair_works() {
    let mut rig = Rig::new(faulty(Fault::Twice, 5, Some(1)), 1, 16);
    let statuses = run(&mut rig, &reads(), 100);
    let bad = statuses.iter().filter(|one| **one == ContextStatus::Violation).count();
    assert!(bad > 0 && statuses.len() - bad >= 5, "{statuses:?}");
    assert!(rig.ring.is_broken(0));
    // A broken queue ends batches at once.
    assert!(run(&mut rig, &reads(), 3).iter().all(|one| *one == ContextStatus::Violation));
    assert_eq!(rig.reclaim(0, LONG), Reclaimed::Recreated);
    assert!(!rig.ring.is_broken(0));
    assert!(run(&mut rig, &reads(), 100).iter().all(|one| *one == ContextStatus::Done));
    rig.stop();
}

#[test]
fn a_cancelled_batch_ends_what_has_commands_and_cancels_the_rest() {
    let mut rig = Rig::new(faulty(Fault::Late(SHORT), 0, None), 1, 8);
    let all: Vec<_> = (0..500).map(|index| rig.transfer(index * 512, index * 512, 512)).collect();
    let ticket = rig.issue(0, &reads(), &all);
    rig.ring.cancel(ticket);
    let cqe = rig.wait();
    let statuses: Vec<_> = rig.ring.statuses(cqe.ticket).collect();
    let done = statuses.iter().filter(|one| **one == ContextStatus::Done).count();
    let cancelled = statuses.iter().filter(|one| **one == ContextStatus::Cancelled).count();
    assert_eq!((done + cancelled, cqe.failed, cqe.given_up), (500, cancelled, 0));
    assert!(cancelled > 0, "{done} of 500 contexts have ended");
    // A batch that has ended is not harmed, and neither is the next use of its memory.
    rig.ring.cancel(ticket);
    assert!(run(&mut rig, &reads(), 5).iter().all(|one| *one == ContextStatus::Done));
    rig.stop();
}

#[test]
fn a_parked_queue_ends_its_batches_and_keeps_those_that_wait() {
    let on = Selection { blocks: Some((0, 0)), ..Selection::default() };
    let faults = vec![FaultRule { on, fault: Fault::Late(LONG) }];
    let mut rig = Rig::new(Emulation { faults, ..emulation() }, 1, 8);
    let (late, other) = (rig.transfer(0, 0, 512), rig.transfer(0, 4096, 512));
    let first = rig.issue(0, &reads(), &vec![late; 50]);
    let second = rig.issue(0, &reads(), &[other]);
    // The first batch fills the queue.
    let start = std::time::Instant::now();
    while rig.ring.counters(0).commands < 7 {
        assert!(start.elapsed() < LONG);
        std::thread::yield_now();
    }
    rig.ring.park(0).expect("it stops");
    let cqe = rig.wait();
    assert_eq!((cqe.ticket, cqe.failed, cqe.given_up), (first, 50, 7));
    assert!(rig.ring.statuses(first).all(|one| one == ContextStatus::Parked));
    assert_eq!(rig.ring.poll_cqe(), None);
    rig.recreate(0);
    let cqe = rig.wait();
    assert_eq!((cqe.ticket, cqe.failed), (second, 0));
    rig.stop();
}

#[test]
fn a_queue_that_runs_is_not_replaced_and_has_one_thread() {
    let mut rig = Rig::new(emulation(), 1, 8);
    // The thread drives the queue when it has run a batch.
    assert_eq!(run(&mut rig, &reads(), 1), [ContextStatus::Done]);
    let pair = rig.owned[0].for_host().expect("registers");
    let refused = rig.ring.init_queue(0, pair).expect_err("it is driven");
    assert!(refused.to_string().contains("park it first"), "{refused}");
    let refused = HostRunner::start(&rig.ring, [0]).expect_err("it has a thread");
    assert!(refused.to_string().contains("has a thread already"), "{refused}");
    assert_eq!(run(&mut rig, &reads(), 1), [ContextStatus::Done]);
    rig.stop();
}
