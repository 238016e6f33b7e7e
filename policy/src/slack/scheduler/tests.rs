//! Decisions of the scheduler in single situations, and their invariants in random ones.

use proptest::prelude::*;

use super::super::tests::{content, kernel, window};
use super::super::{Content, Measurement, Phase, Window};
use super::*;

/// Window for inputs of 0 to 8 tokens; no window from 8 tokens.
fn profile(slack_micros: u32, fallback: Fallback) -> Arc<Profile> {
    let windows = Phase::ALL.map(|phase| Window { slack_micros, ..window(phase, 0, 8) }).to_vec();
    let whole = content(windows);
    let measurement = Measurement {
        reads: vec![kernel(1, 10, 2), kernel(2, 20, 2), kernel(4, 40, 4)],
        writes: vec![kernel(1, 20, 2), kernel(2, 40, 2), kernel(4, 80, 4)],
        ..whole.measurement
    };
    let whole = Content { usable_percent: 100, fallback, measurement, ..whole };
    Arc::new(Profile::new(whole).expect("a profile"))
}

fn layer(layer: u32) -> Moment {
    Moment::Layer { computation: prefill(4), layer }
}

fn prefill(input_tokens: u32) -> Computation {
    Computation { phase: Phase::Prefill, input_tokens, prefix_tokens: 0 }
}

fn scheduler(slack_micros: u32, fallback: Fallback) -> Scheduler {
    Scheduler::new(profile(slack_micros, fallback), Limits { reads_max: 64, writes_max: 8, deferrals_max: 5 })
}

/// Direction, number and reason of a launch.
fn brief(launch: Option<&Launch>) -> Option<(Direction, usize, Reason)> {
    launch.map(|launch| (launch.direction, launch.tickets.len(), launch.reason))
}

fn decide(scheduler: &mut Scheduler, moment: Moment) -> Option<(Direction, usize, Reason)> {
    let launch = scheduler.decide(moment);
    for ticket in launch.iter().flat_map(|launch| &launch.tickets) {
        assert!(scheduler.complete(*ticket));
    }
    brief(launch.as_ref())
}

use Direction::{Read, Write};
use Fallback::{Ignore, PauseIo, ThrottleWrites};

#[test]
fn reads_fill_the_window_before_writes_and_never_share_it() {
    let mut scheduler = scheduler(25, ThrottleWrites);
    for due in [1, 2, 3] {
        scheduler.push_read(due).expect("room");
    }
    scheduler.push_write().expect("room");
    assert_eq!(
        decide(&mut scheduler, layer(0)),
        Some((Read, 2, Reason::InWindow)),
        "a later layer's as well"
    );
    assert_eq!(decide(&mut scheduler, layer(1)), Some((Read, 1, Reason::InWindow)));
    assert_eq!(decide(&mut scheduler, layer(2)), Some((Write, 1, Reason::InWindow)));
    assert_eq!(decide(&mut scheduler, layer(3)), None);
    assert_eq!((scheduler.counters().deferred, scheduler.counters().overlapped), (2, 0));
}

#[test]
fn due_reads_start_at_once_without_a_fitting_window() {
    // Three reads are due, and two fit.
    let mut small = scheduler(25, ThrottleWrites);
    let mut none = scheduler(5, ThrottleWrites);
    for scheduler in [&mut small, &mut none] {
        for due in [0, 1, 1, 2] {
            scheduler.push_read(due).expect("room");
        }
    }
    assert_eq!(decide(&mut small, layer(0)), Some((Read, 3, Reason::Bottleneck)));
    assert_eq!(decide(&mut none, layer(0)), Some((Read, 3, Reason::NothingFits)));
    let count = small.counters().launched(Read, Reason::Bottleneck);
    assert_eq!(count, LaunchCount { launches: 1, iocbs: 3 });
}

#[test]
fn outside_of_windows_the_fallback_decides() {
    let outside = Moment::Layer { computation: prefill(8), layer: 0 };
    let read = |count| Some((Read, count, Reason::NoWindow));
    let write = Some((Write, 2, Reason::NoWindow));
    // Due reads first, then those of one later layer at a time, so that none waits for the launch of a later one.
    for (fallback, launches) in [
        (ThrottleWrites, [read(2), read(2), read(1), None]),
        (PauseIo, [read(2), None, None, None]),
        (Ignore, [read(2), read(2), read(1), write]),
    ] {
        let mut scheduler = scheduler(25, fallback);
        for due in [0, 1, 2, 2, 3] {
            scheduler.push_read(due).expect("room");
        }
        for _ in 0..2 {
            scheduler.push_write().expect("room");
        }
        for expected in launches {
            let launch = scheduler.decide(outside);
            for ticket in launch.iter().flat_map(|launch| &launch.tickets) {
                scheduler.complete(*ticket);
            }
            let found = launch.map(|launch| (launch.direction, launch.tickets.len(), launch.reason));
            assert_eq!(found, expected, "{fallback:?}");
        }
    }
}

#[test]
fn writes_wait_for_reads_in_flight_and_flush_in_decode_or_when_idle() {
    let mut scheduler = scheduler(80, ThrottleWrites);
    let read = scheduler.push_read(1).expect("room");
    let launch = scheduler.decide(layer(0)).expect("a launch");
    assert_eq!(launch.tickets, [read]);
    scheduler.push_write().expect("room");
    assert_eq!(scheduler.decide(layer(1)), None, "the read is in flight");
    assert!(scheduler.complete(read) && !scheduler.complete(read));
    let computation = Computation { phase: Phase::Decode, input_tokens: 3, prefix_tokens: 0 };
    let decode = Moment::Layer { computation, layer: 0 };
    assert_eq!(decide(&mut scheduler, decode), Some((Write, 1, Reason::InWindow)));
    for _ in 0..8 {
        scheduler.push_write().expect("room");
    }
    assert_eq!(scheduler.push_write(), Err(Full { pending: 8 }));
    assert_eq!(decide(&mut scheduler, Moment::Idle), Some((Write, 8, Reason::Idle)));
}

#[test]
fn overdue_writes_take_every_second_decision_and_full_queues_count_as_overdue() {
    let mut scheduler = scheduler(25, ThrottleWrites);
    scheduler.push_write().expect("room");
    let mut launches = Vec::new();
    for number in 0..8 {
        scheduler.push_read(0).expect("room");
        launches.push(decide(&mut scheduler, layer(number)));
    }
    let written: Vec<usize> =
        (0..8).filter(|index| launches[*index].is_some_and(|(direction, ..)| direction == Write)).collect();
    assert_eq!(written, [5], "{launches:?}");
    assert_eq!(launches[5], Some((Write, 1, Reason::Overdue)));
    for _ in 0..8 {
        scheduler.push_write().expect("room");
    }
    for _ in 0..2 {
        scheduler.push_read(0).expect("room");
    }
    assert_eq!(decide(&mut scheduler, layer(9)), Some((Write, 1, Reason::Overdue)), "the queue is full");
    assert_eq!(decide(&mut scheduler, layer(9)).map(|(direction, ..)| direction), Some(Read));
}

#[test]
fn cancelled_iocbs_are_never_launched() {
    let mut scheduler = scheduler(80, ThrottleWrites);
    let (read, write) = (scheduler.push_read(0).expect("room"), scheduler.push_write().expect("room"));
    assert!(scheduler.cancel(read) && scheduler.cancel(write) && !scheduler.cancel(read));
    assert_eq!(scheduler.decide(Moment::Idle), None);
}

/// Input of a random run.
#[derive(Clone, Copy, Debug)]
enum Step {
    Read(u32),
    Write,
    /// A layer at an input length; from 8 tokens, it has no window.
    Layer(u32, Phase),
    Idle,
    /// Completes the oldest launch.
    Complete,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let phase = prop_oneof![Just(Phase::Prefill), Just(Phase::Decode)];
    let step = prop_oneof![
        3 => (0_u32..8).prop_map(Step::Read),
        3 => Just(Step::Write),
        6 => (0_u32..12, phase).prop_map(|(tokens, phase)| Step::Layer(tokens, phase)),
        1 => Just(Step::Idle),
        4 => Just(Step::Complete),
    ];
    proptest::collection::vec(step, 1..400)
}

/// Launches with the budget of their moment; none when idle.
type Launches = Vec<(Launch, Option<Budget>)>;

/// Runs the steps; returns all launches with the budget of their moment, and accepted IOCBs by direction.
fn run(scheduler: &mut Scheduler, steps: &[Step]) -> (Launches, [Vec<Ticket>; 2]) {
    let (mut launches, mut accepted) = (Vec::new(), [Vec::new(), Vec::new()]);
    let mut open: VecDeque<Vec<Ticket>> = VecDeque::new();
    let mut number = 0;
    for step in steps {
        let moment = match *step {
            Step::Read(ahead) => {
                accepted[0].extend(scheduler.push_read(number % 8 + ahead));
                continue;
            }
            Step::Write => {
                accepted[1].extend(scheduler.push_write());
                continue;
            }
            Step::Complete => {
                for ticket in open.pop_front().unwrap_or_default() {
                    assert!(scheduler.complete(ticket));
                }
                continue;
            }
            Step::Idle => Moment::Idle,
            Step::Layer(input_tokens, phase) => {
                number += 1;
                let computation = Computation { phase, input_tokens, prefix_tokens: 0 };
                Moment::Layer { computation, layer: number % 8 }
            }
        };
        let budget = match moment {
            Moment::Layer { computation, .. } => Some(scheduler.profile().budget(computation)),
            Moment::Idle => None,
        };
        if let Some(launch) = scheduler.decide(moment) {
            open.push_back(launch.tickets.clone());
            launches.push((launch, budget));
        }
    }
    (launches, accepted)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, ..ProptestConfig::default() })]

    #[test]
    fn launches_fit_their_window_or_count_as_at_once(
        steps in steps(),
        slack in 1_u32..=100,
        fallback in prop_oneof![Just(ThrottleWrites), Just(PauseIo), Just(Ignore)],
    ) {
        let mut scheduler = scheduler(slack, fallback);
        let (launches, _) = run(&mut scheduler, &steps);
        let mut at_once = 0;
        for (launch, budget) in &launches {
            match budget {
                Some(Budget::Window { micros, io_sms }) if !launch.reason.is_at_once() => {
                    prop_assert!(launch.predicted.micros <= u64::from(*micros), "{launch:?}");
                    prop_assert!(launch.predicted.sms <= *io_sms, "{launch:?}");
                }
                Some(Budget::Outside(fallback)) => {
                    prop_assert!(launch.reason.is_at_once());
                    let may_write = *fallback == Ignore || launch.reason == Reason::Overdue;
                    prop_assert!(launch.direction == Read || may_write, "{launch:?}");
                }
                Some(Budget::Window { .. }) => {}
                None => prop_assert_eq!(launch.reason, Reason::Idle),
            }
            at_once += u64::from(launch.reason.is_at_once());
        }
        let counted = |is_at_once: bool| -> u64 {
            let reasons = Reason::ALL.into_iter().filter(|reason| reason.is_at_once() == is_at_once);
            let both = reasons.flat_map(|reason| [(Read, reason), (Write, reason)]);
            both.map(|(direction, reason)| scheduler.counters().launched(direction, reason).launches).sum()
        };
        prop_assert_eq!(counted(true), at_once);
        prop_assert_eq!(counted(true) + counted(false), launches.len() as u64);
    }

    #[test]
    fn every_iocb_is_launched_once_and_in_order(steps in steps(), slack in 1_u32..=100) {
        let mut scheduler = scheduler(slack, ThrottleWrites);
        let (mut launches, accepted) = run(&mut scheduler, &steps);
        // The end of a session: reads first, then writes once the reads are complete.
        let open: Vec<Ticket> = scheduler.in_flight.keys().copied().collect();
        for ticket in open {
            prop_assert!(scheduler.complete(ticket));
        }
        for expected in [Read, Write] {
            if let Some(launch) = scheduler.decide(Moment::Idle) {
                prop_assert!(launch.direction == expected || accepted[0].is_empty() || expected == Read);
                for ticket in &launch.tickets {
                    prop_assert!(scheduler.complete(*ticket));
                }
                launches.push((launch, None));
            }
        }
        prop_assert_eq!((scheduler.pending(), scheduler.in_flight()), ((0, 0), 0));
        let of = |direction: Direction| -> Vec<Ticket> {
            let launched = launches.iter().filter(|(launch, _)| launch.direction == direction);
            launched.flat_map(|(launch, _)| launch.tickets.clone()).collect()
        };
        prop_assert_eq!(of(Write), accepted[1].clone(), "writes keep their order");
        let mut reads = of(Read);
        reads.sort_unstable();
        prop_assert_eq!(reads, accepted[0].clone());
    }

    #[test]
    fn writes_are_bounded_and_do_not_starve_under_endless_reads(
        slack in 1_u32..=100,
        pushes in proptest::collection::vec((0_usize..4, 0_usize..4), 200),
    ) {
        let mut scheduler = scheduler(slack, ThrottleWrites);
        let mut arrived = BTreeMap::new();
        let mut reads = BTreeMap::new();
        for (at, (reading, writing)) in pushes.into_iter().enumerate() {
            for _ in 0..=reading {
                reads.extend(scheduler.push_read(0).map(|ticket| (ticket, at)));
            }
            arrived.extend((0..writing).filter_map(|_| scheduler.push_write().ok()).map(|ticket| (ticket, at)));
            prop_assert!(scheduler.pending().1 <= scheduler.limits.writes_max);
            let launch = scheduler.decide(layer(0));
            for ticket in launch.iter().flat_map(|launch| &launch.tickets) {
                prop_assert!(scheduler.complete(*ticket));
                arrived.remove(ticket);
                reads.remove(ticket);
            }
            // Eight overdue writes leave in at most eight of every second decision.
            let oldest = arrived.values().copied().min().unwrap_or(at);
            prop_assert!(at - oldest <= 5 + 2 * 8 + 1, "a write waits since {oldest}, now {at}");
            let oldest = reads.values().copied().min().unwrap_or(at);
            prop_assert!(at - oldest <= 1, "a read waits since {oldest}, now {at}");
        }
    }

    #[test]
    fn equal_inputs_give_equal_launches(steps in steps(), slack in 1_u32..=100) {
        let once = run(&mut scheduler(slack, PauseIo), &steps);
        prop_assert_eq!(once, run(&mut scheduler(slack, PauseIo), &steps));
    }

    #[test]
    fn reads_of_the_next_layer_are_never_left_behind(steps in steps(), slack in 1_u32..=100) {
        let mut scheduler = scheduler(slack, PauseIo);
        let mut number = 0;
        for step in steps {
            match step {
                Step::Read(ahead) => drop(scheduler.push_read(number + ahead)),
                Step::Write => drop(scheduler.push_write()),
                Step::Layer(input_tokens, phase) => {
                    let computation = Computation { phase, input_tokens, prefix_tokens: 0 };
                    let launch = scheduler.decide(Moment::Layer { computation, layer: number });
                    let due = scheduler.reads.iter().filter(|(layer, _)| *layer <= number + 1).count();
                    let took = launch.is_some_and(|launch| launch.reason == Reason::Overdue);
                    prop_assert!(due == 0 || took, "{due} reads are left");
                    number += 1;
                }
                Step::Idle | Step::Complete => {}
            }
        }
    }
}
