//! Laws of the write budget and of the admission, on random loads.

use std::time::Duration;

use proptest::prelude::*;

use super::budget::{DailyBudget, WriteBudget};
use super::{Admission, AdmissionMode, Candidate, Reuse, Verdict};
use crate::Tick;
use crate::eviction::Group;

const DAY: Duration = Duration::from_secs(86_400);
const GIB: u64 = 1 << 30;

/// Writes of a load: time and bytes.
type Writes = Vec<(Tick, u64)>;

/// Largest sum of bytes in any window of 24 hours.
fn busiest_day(writes: &Writes) -> u64 {
    let (mut first, mut sum, mut most) = (0, 0, 0);
    for (at, bytes) in writes {
        sum += bytes;
        while at.since(writes[first].0) >= DAY {
            sum -= writes[first].1;
            first += 1;
        }
        most = most.max(sum);
    }
    most
}

/// A load of bursts: pauses in seconds, and offered blocks of 2 MiB after each.
fn bursts() -> impl Strategy<Value = Vec<(u64, u32)>> {
    prop::collection::vec((0_u64..7200, 0_u32..4000), 20..120)
}

/// Size of the blocks of a load with one size.
const BLOCK: u64 = 2 << 20;

/// Largest block that a device takes.
const BLOCK_MAX: u64 = 64 << 20;

/// Offers blocks of these sizes in turn to a budget; returns its writes. Restarts it before the bursts with these
/// numbers.
fn run_sizes(limits: DailyBudget, load: &[(u64, u32)], sizes: &[u64], restarts: &[usize]) -> Writes {
    let block_max = sizes.iter().copied().max().unwrap_or(BLOCK);
    let mut now = Tick(0);
    let mut budget = WriteBudget::new(limits, block_max, now);
    let mut writes = Vec::new();
    for (at, (pause, blocks)) in load.iter().enumerate() {
        now = now.after(Duration::from_secs(*pause));
        if restarts.contains(&at) {
            budget = WriteBudget::new(limits, block_max, now);
        }
        for block in sizes.iter().copied().cycle().take(*blocks as usize) {
            if budget.admits(now, block) {
                budget.charge(now, block);
                writes.push((now, block));
            }
        }
    }
    writes
}

/// Offers blocks of 2 MiB.
fn run(limits: DailyBudget, load: &[(u64, u32)], restarts: &[usize]) -> Writes {
    run_sizes(limits, load, &[BLOCK], restarts)
}

proptest! {
    #[test]
    fn no_day_exceeds_the_budget_with_any_load_and_restarts(
        load in bursts(),
        gib in 1_u64..200,
        burst_percent in 1_u64..50,
        restarts in prop::collection::vec(0_usize..120, 0..8),
    ) {
        let bytes = gib * GIB;
        let limits = DailyBudget { bytes, burst: (bytes * burst_percent / 100).max(2 << 20) };
        let most = busiest_day(&run(limits, &load, &restarts));
        prop_assert!(most <= bytes, "{most} bytes in a day, {bytes} allowed");
    }

    #[test]
    fn no_day_exceeds_the_budget_with_blocks_of_two_sizes_and_restarts(
        load in bursts(),
        gib in 1_u64..200,
        small in 4096_u64..(4 << 20),
        large in 4096_u64..BLOCK_MAX,
        restarts in prop::collection::vec(0_usize..120, 0..8),
    ) {
        let limits = DailyBudget::new(gib * GIB);
        let most = busiest_day(&run_sizes(limits, &load, &[small, large], &restarts));
        prop_assert!(most <= limits.bytes, "{most} bytes in a day, {} allowed", limits.bytes);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(8))]

    #[test]
    fn load_without_pauses_uses_the_budget_to_one_percent(gib in 20_u64..2000) {
        let limits = DailyBudget::new(gib * GIB);
        // An offer every ten seconds for two days; the second day has no start.
        let load: Vec<(u64, u32)> = (0..17_280).map(|_| (10, 400)).collect();
        let writes = run(limits, &load, &[]);
        let second = writes.iter().filter(|(at, _)| at.since(Tick(0)) >= DAY).map(|(_, bytes)| bytes).sum::<u64>();
        prop_assert!(second >= limits.bytes / 1000 * 989, "{second} of {}", limits.bytes);
        prop_assert!(busiest_day(&writes) <= limits.bytes);
    }

    #[test]
    fn large_blocks_get_their_part_of_the_budget_next_to_small_ones(
        gib in 20_u64..2000, small in (64_u64 << 10)..BLOCK, large in (2 * BLOCK)..BLOCK_MAX, order: u64,
    ) {
        let limits = DailyBudget::new(gib * GIB);
        let mut budget = WriteBudget::new(limits, large, Tick(0));
        let (mut now, mut order, mut of_large) = (Tick(0), order, 0);
        // Each second, a small and a large block in any order.
        for _ in 0..86_400 {
            now = now.after(Duration::from_secs(1));
            order = order.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let offered = if order >> 63 == 0 { [small, large] } else { [large, small] };
            for block in offered {
                if budget.admits(now, block) {
                    budget.charge(now, block);
                    of_large += if block == large { block } else { 0 };
                }
            }
        }
        // As many large blocks as small ones are two thirds of the bytes, or more.
        let used = (86_400 * (small + large)).min(limits.bytes);
        prop_assert!(of_large >= used / 2, "{of_large} bytes of {used} in large blocks");
    }
}

proptest! {
    #[test]
    fn refunded_bytes_never_raise_the_level_above_that_without_their_charge(
        gib in 1_u64..100, spent in 0_u64..(64 << 20), lent in 1_u64..(64 << 20), held in 0_u64..86_400,
    ) {
        let mut budget = WriteBudget::new(DailyBudget::new(gib * GIB), BLOCK_MAX, Tick(0));
        let start = Tick(0).after(DAY);
        budget.charge(start, spent);
        let mut other = budget.clone();
        let end = start.after(Duration::from_secs(held));
        other.charge(start, lent);
        other.refund(end, lent);
        prop_assert!(other.left(end) <= budget.left(end));
        if held == 0 {
            prop_assert_eq!(other.left(end), budget.left(end), "nothing was gained meanwhile");
        }
    }

    #[test]
    fn wait_is_the_time_after_which_a_write_is_admitted(
        gib in 1_u64..100, spent in 0_u64..GIB, block in 1_u64..(1 << 30), block_max in 0_u64..BLOCK_MAX,
    ) {
        let mut budget = WriteBudget::new(DailyBudget::new(gib * GIB), block_max, Tick(0));
        budget.charge(Tick(0), spent);
        let wait = budget.wait(Tick(0), block);
        prop_assert!(budget.admits(Tick(0).after(wait), block));
        let before = wait.checked_sub(Duration::from_micros(2));
        prop_assert!(before.is_none_or(|before| !budget.admits(Tick(0).after(before), block)));
    }

    #[test]
    fn admission_never_refuses_a_used_block_that_is_worth_reading_and_is_monotonous_in_the_budget(
        key_hash: u64, tenant: u16, position: Option<u32>, commits in 0_u32..500, uses in 0_u32..500, left in 0_u16..=1000,
    ) {
        for mode in AdmissionMode::ALL {
            let mut admission = Admission::new(mode);
            let tenant = Group(tenant % 1024);
            (0..commits).for_each(|_| admission.committed(tenant, position));
            (0..uses).for_each(|_| admission.reused(tenant, position));
            let block = Candidate {
                key_hash, tenant, position, reuse: Reuse::Used, bytes: 2 << 20, tokens: 16, budget_left_permille: 1000,
            };
            prop_assert_eq!(admission.decide(&block), Verdict::Admit);
            let unused = Candidate { reuse: Reuse::None, budget_left_permille: left, ..block };
            if admission.decide_again(&unused) == Verdict::Admit {
                let richer = Candidate { budget_left_permille: 1000, ..unused };
                prop_assert_eq!(admission.decide_again(&richer), Verdict::Admit);
            }
        }
    }
}

#[test]
fn budget_without_its_refill_limit_would_break_the_law() {
    // The law can fail: a bucket of a whole day, full at the start of the window, admits almost two budgets.
    let limits = DailyBudget { bytes: 100 * GIB, burst: 99 * GIB };
    let day: Vec<(u64, u32)> =
        std::iter::once((86_400, 60_000)).chain((0..24).map(|_| (3_600, 60_000))).collect();
    let unlimited: Writes = day
        .iter()
        .scan(Tick(0), |now, (pause, blocks)| {
            *now = now.after(Duration::from_secs(*pause));
            Some((*now, u64::from(*blocks) * (2 << 20)))
        })
        .collect();
    assert!(busiest_day(&unlimited) > 20 * limits.bytes, "the load offers far more than the budget");
    assert!(busiest_day(&run(limits, &day, &[])) <= limits.bytes);
}
