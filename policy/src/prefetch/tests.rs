//! Laws of the planner.

use proptest::prelude::*;

use super::*;

const MIB: u64 = 1 << 20;

fn path(bytes_per_second: u64) -> Path {
    Path { latency: Duration::from_micros(80), bytes_per_second }
}

/// One idle channel of 1 GB/s and a large reserve; an iteration takes 20 ms.
fn pass(channels: &[ChannelState]) -> Pass<'_> {
    Pass {
        iteration: Duration::from_millis(20),
        window: 16,
        channels,
        reserve_bytes: 1 << 40,
        high_water_permille: HIGH_WATER_PERMILLE,
    }
}

fn idle() -> [ChannelState; 1] {
    [ChannelState { path: path(1_000_000_000), queued_bytes: 0 }]
}

fn candidate(iterations: u32, blocks: u32) -> Candidate {
    Candidate { iterations, confidence: CONFIDENCE_MAX, channel: 0, blocks, block_bytes: MIB }
}

fn planned(pass: &Pass<'_>, candidates: &[Candidate]) -> Vec<(usize, u32)> {
    let mut plan = Plan::default();
    plan.make(pass, candidates);
    plan.reads.iter().map(|read| (read.candidate, read.blocks)).collect()
}

#[test]
fn paper_example_of_an_nvme_block_takes_its_time() {
    let nvme = path(7_000_000_000);
    assert_eq!(nvme.transfer_time(8_000_000), Duration::from_micros(80 + 1143));
    assert_eq!(nvme.bytes_within(Duration::from_micros(80)), 0);
    assert_eq!(nvme.bytes_within(Duration::from_micros(1080)), 7_000_000);
}

#[test]
fn reads_the_head_of_a_chain_that_does_not_arrive_in_time_as_a_whole() {
    // 20 ms minus 80 µs at 1 GB/s are 18 whole blocks; at k = 1 the whole bandwidth may be used.
    let mut plan = Plan::default();
    plan.make(&pass(&idle()), &[candidate(1, 40)]);
    assert_eq!(plan.reads, [Planned { candidate: 0, blocks: 18 }]);
    assert_eq!((plan.late_blocks, plan.deferred_blocks, plan.unstaged_blocks), (22, 0, 0));
}

#[test]
fn later_requests_use_eighty_percent_of_a_channel() {
    // 16 MB of 20 MB.
    assert_eq!(planned(&pass(&idle()), &[candidate(4, 40)]), [(0, 15)]);
    assert_eq!(planned(&pass(&idle()), &[candidate(4, 40), candidate(1, 10)]), [(1, 10), (0, 5)]);
}

#[test]
fn busy_channel_defers_all_but_the_next_iteration() {
    let busy = [ChannelState { path: path(1_000_000_000), queued_bytes: 16 * MIB }];
    assert_eq!(planned(&pass(&busy), &[candidate(2, 4), candidate(1, 4)]), [(1, 2)]);
}

#[test]
fn urgent_and_certain_requests_come_first() {
    let half = Candidate { confidence: 500, ..candidate(2, 1) };
    let order = planned(&pass(&idle()), &[candidate(8, 1), half, candidate(2, 1), candidate(1, 1)]);
    assert_eq!(order, [(3, 1), (2, 1), (1, 1), (0, 1)], "2 iterations at 50 % count as 4");
}

#[test]
fn uncertain_requests_wait_until_they_are_near() {
    let unlikely = |iterations| Candidate { confidence: 250, ..candidate(iterations, 1) };
    assert_eq!(planned(&pass(&idle()), &[unlikely(4)]), [(0, 1)]);
    assert_eq!(planned(&pass(&idle()), &[unlikely(5)]), []);
    assert_eq!(planned(&pass(&idle()), &[Candidate { confidence: 0, ..candidate(1, 1) }]), []);
}

#[test]
fn block_that_takes_longer_than_an_iteration_is_read_alone() {
    let pass = Pass { iteration: Duration::from_millis(1), ..pass(&[]) };
    let (idle, busy) = (idle(), [ChannelState { queued_bytes: 1, ..idle()[0] }]);
    let alone = Pass { channels: &idle, ..pass };
    assert_eq!(planned(&alone, &[candidate(8, 4), candidate(9, 4)]), [(0, 1)]);
    assert_eq!(planned(&Pass { channels: &busy, ..pass }, &[candidate(8, 4)]), []);
}

#[test]
fn iteration_time_follows_a_step_within_its_window() {
    let mut time = IterationTime::default();
    assert_eq!(time.expected(), None);
    time.add(Duration::from_millis(10));
    assert_eq!(time.expected(), Some(Duration::from_millis(10)));
    for _ in 0..16 {
        time.add(Duration::from_millis(30));
    }
    let expected = time.expected().expect("measured");
    // (1 - 2/17)^16 = 13 % of the difference remain.
    assert!((27_200..27_600).contains(&expected.as_micros()), "{expected:?}");
}

#[test]
fn bandwidth_follows_measurements_and_ignores_short_ones() {
    let mut channel = Channel::default();
    let before = channel.path().bytes_per_second;
    assert!(!channel.observe(4096, Duration::from_micros(100)));
    assert_eq!(channel.path().bytes_per_second, before);
    assert!(channel.observe(30_000_000, Duration::from_millis(10)));
    assert_eq!(channel.path().bytes_per_second, 3_000_000_000);
    for _ in 0..64 {
        channel.observe(10_000_000, Duration::from_millis(10));
    }
    assert_eq!(channel.path().bytes_per_second, 1_000_000_000);
}

#[test]
fn window_widens_with_misses_and_narrows_with_waste() {
    let mut window = LookaheadWindow::default();
    assert_eq!(window.iterations(), WINDOW_MIN);
    window.cover(Duration::from_millis(90), Duration::from_millis(20));
    assert_eq!(window.iterations(), 6);
    window.missed();
    window.missed();
    assert_eq!(window.iterations(), 9);
    window.used(100 * MIB);
    window.wasted(MIB);
    assert_eq!(window.iterations(), 9, "1 % of waste is accepted");
    window.wasted(9 * MIB);
    assert_eq!(window.iterations(), 7);
    for _ in 0..40 {
        window.missed();
    }
    assert_eq!(window.iterations(), WINDOW_MAX);
}

prop_compose! {
    fn candidates()(
        list in prop::collection::vec((0u32..80, 0u16..=1000, 0u8..3, 0u32..200, 1u64..9), 0..80)
    ) -> Vec<Candidate> {
        let to_candidate = |(iterations, confidence, channel, blocks, mib)| Candidate {
            iterations, confidence, channel, blocks, block_bytes: mib * MIB,
        };
        list.into_iter().map(to_candidate).collect()
    }
}

prop_compose! {
    fn channels()(
        list in prop::collection::vec((1u64..8_000, 0u64..100), 2)
    ) -> Vec<ChannelState> {
        let to_state = |(mb_per_second, mib)| ChannelState {
            path: path(mb_per_second * 1_000_000), queued_bytes: mib * MIB,
        };
        list.into_iter().map(to_state).collect()
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn every_planned_block_arrives_in_time_within_bandwidth_and_memory(
        candidates in candidates(), channels in channels(),
        millis in 1u64..60, window in 0u32..64, reserve_mib in 0u64..300,
    ) {
        let iteration = Duration::from_millis(millis);
        let reserve_bytes = reserve_mib * MIB;
        let pass = Pass { iteration, window, channels: &channels, reserve_bytes, high_water_permille: HIGH_WATER_PERMILLE };
        let mut plan = Plan::default();
        plan.make(&pass, &candidates);
        let mut queued: Vec<u64> = channels.iter().map(|channel| channel.queued_bytes).collect();
        let (mut staged, mut urgency) = (0, 0);
        let mut seen = std::collections::BTreeSet::new();
        for Planned { candidate, blocks } in &plan.reads {
            prop_assert!(seen.insert(*candidate), "a candidate is planned once");
            let wanted = candidates[*candidate];
            prop_assert!(*blocks > 0 && *blocks <= wanted.blocks);
            prop_assert!(wanted.iterations >= 1);
            prop_assert!(wanted.iterations <= weighted_window(window, wanted.confidence));
            prop_assert!(super::urgency(&wanted) >= urgency, "the most urgent first");
            urgency = super::urgency(&wanted);
            let channel = &channels[usize::from(wanted.channel)];
            let before = queued[usize::from(wanted.channel)];
            let bytes = u64::from(*blocks) * wanted.block_bytes;
            let after = before + bytes;
            queued[usize::from(wanted.channel)] = after;
            staged += bytes;
            // The division of a transfer's time rounds up by at most 1 µs.
            let time = channel.path.transfer_time(after);
            prop_assert!(time <= iteration * wanted.iterations + Duration::from_micros(1));
            let capacity = channel.path.bytes_in(iteration);
            let limit = if wanted.iterations == 1 { capacity } else { capacity * HIGH_WATER_PERMILLE / 1000 };
            prop_assert!(after <= limit || (before == 0 && *blocks == 1), "{after} of {limit}");
        }
        prop_assert!(staged <= reserve_mib * MIB);
    }

    #[test]
    fn every_block_within_the_window_is_planned_or_counted(
        candidates in candidates(), channels in channels(), window in 0u32..64, reserve_mib in 0u64..300,
    ) {
        let iteration = Duration::from_millis(20);
        let reserve_bytes = reserve_mib * MIB;
        let pass = Pass { iteration, window, channels: &channels, reserve_bytes, high_water_permille: HIGH_WATER_PERMILLE };
        let mut plan = Plan::default();
        plan.make(&pass, &candidates);
        let within = |wanted: &&Candidate| {
            (1..=weighted_window(window, wanted.confidence)).contains(&wanted.iterations)
                && usize::from(wanted.channel) < channels.len()
        };
        let all: u64 = candidates.iter().filter(within).map(|wanted| u64::from(wanted.blocks)).sum();
        let read: u64 = plan.reads.iter().map(|read| u64::from(read.blocks)).sum();
        prop_assert_eq!(read + plan.late_blocks + plan.deferred_blocks + plan.unstaged_blocks, all);
        for held in &plan.held {
            let parts = held.admitted + held.unstaged + held.deferred + held.late;
            prop_assert_eq!(parts, candidates[held.candidate].blocks);
        }
        prop_assert_eq!(plan.held.iter().map(|held| u64::from(held.late)).sum::<u64>(), plan.late_blocks);
        prop_assert_eq!(plan.held.iter().map(|held| u64::from(held.deferred)).sum::<u64>(), plan.deferred_blocks);
        prop_assert_eq!(plan.held.iter().map(|held| u64::from(held.unstaged)).sum::<u64>(), plan.unstaged_blocks);
    }

    #[test]
    fn more_time_bandwidth_or_memory_never_plans_less_for_a_request(
        k in 2u32..16, blocks in 1u32..200, mb in 1u64..8_000, queued in 0u64..50, reserve in 0u64..300,
    ) {
        let state = |mb: u64, queued: u64| [ChannelState { path: path(mb * 1_000_000), queued_bytes: queued * MIB }];
        let of = |iterations, channels: &[ChannelState], reserve: u64| {
            let pass = Pass { reserve_bytes: reserve * MIB, ..pass(channels) };
            planned(&pass, &[candidate(iterations, blocks)]).first().map_or(0, |(_, blocks)| *blocks)
        };
        let base = of(k, &state(mb, queued), reserve);
        prop_assert!(of(k, &state(mb * 2, queued), reserve) >= base);
        prop_assert!(of(k, &state(mb, queued), reserve + 10) >= base);
        prop_assert!(of(k, &state(mb, queued / 2), reserve) >= base);
        prop_assert!(of(k + 1, &state(mb, queued), reserve) >= base || k == 16);
    }

    #[test]
    fn average_of_iterations_stays_between_the_extremes(times in prop::collection::vec(1u64..60_000_000, 1..200)) {
        let mut average = IterationTime::default();
        for time in &times {
            average.add(Duration::from_micros(*time));
        }
        let (least, most) = (times.iter().min().copied(), times.iter().max().copied());
        let expected = average.expected().expect("measured").as_micros() as u64;
        prop_assert!(Some(expected + 1) >= least && Some(expected) <= most, "{expected}");
    }
}
