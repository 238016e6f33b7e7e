//! Power loss and kills at any moment: every block that was reported durable is recovered, nothing else
//! is recovered wrongly, and no slot leaks. Slots that clients write or read themselves are not reused before
//! the clients have ended.

use crate::pool_harness::clients::LendState;
use crate::pool_harness::offsets::{DEVICE_BYTES, bank_headers, is_in_bank, log_page};
use crate::pool_harness::random::SeedGuard;
use crate::pool_harness::{Harness, layout, params};
use crate::rng::{has_fixed_seeds, seeds};
use reprise_agent_core::pool::{DeviceError, DeviceOpKind, RecoveryReport};
use reprise_policy::Layout;

/// Crashes of each harness in the random test.
const CRASHES: u64 = 8;

/// Harnesses of the random test.
const HARNESSES: u64 = 500;

/// Slots of 4 pages (128 per segment), 16 (32) and 31 (16) on five segments, so that segments change
/// their slot size often.
fn layouts() -> [Layout; 3] {
    [layout(3), layout(15), layout(30)]
}

/// The situations that the crashes of a test covered. The test asserts that every one of them occurred.
#[derive(Debug, Default)]
struct Coverage {
    crashes: u64,
    torn_appends: u64,
    repairs: u64,
    bank_switches: u64,
    quarantines: u64,
    allocations_refused: u64,
    /// Leases whose records, headers or free records were being written at a crash.
    leases_in_flight: u64,
    commits_in_flight: u64,
    returns_in_flight: u64,
    /// Removals of pinned blocks that were being recorded at a crash.
    withdrawals_in_flight: u64,
    /// Writes of clients that a power loss interrupted, and that outlived the agent.
    client_writes_lost: u64,
    late_client_writes: u64,
    leases_recovered: u64,
    pins: u64,
}

impl Coverage {
    /// Counts of the situations of extents.
    fn of_extents(&self) -> [u64; 8] {
        [
            self.leases_in_flight,
            self.commits_in_flight,
            self.returns_in_flight,
            self.withdrawals_in_flight,
            self.client_writes_lost,
            self.late_client_writes,
            self.leases_recovered,
            self.pins,
        ]
    }

    fn report(&mut self, report: &RecoveryReport) {
        self.crashes += 1;
        self.torn_appends += u64::from(report.torn_pages > 0);
        self.repairs += u64::from(report.repair_due);
        self.quarantines += u64::from(report.slots_quarantined > 0);
    }

    /// Counts what clients do when the harness crashes.
    fn clients(&mut self, harness: &Harness) {
        let count = |fits: fn(LendState) -> bool| harness.model.lends.pages(fits).len() as u64;
        self.leases_in_flight += count(|state| state == LendState::Lending);
        self.commits_in_flight += count(|state| state == LendState::Committing);
        self.returns_in_flight += count(|state| state == LendState::Returning);
        self.withdrawals_in_flight += count(|state| state == LendState::Withdrawn);
        self.client_writes_lost += count(|state| matches!(state, LendState::Writing(_)));
        self.pins += harness.pins.len() as u64;
    }

    /// Counts what clients left behind in the crash.
    fn recovered(&mut self, harness: &Harness) {
        let count = |fits: fn(LendState) -> bool| harness.model.lends.pages(fits).len() as u64;
        self.leases_recovered += count(|state| state == LendState::Earlier);
        self.late_client_writes += count(|state| state == LendState::LateWrite);
    }
}

/// An action of clients that write and read slots themselves.
fn random_client_action(harness: &mut Harness) {
    match harness.random.below(100) {
        0..20 => {
            let (count, layouts) = (harness.random.below(6), layouts());
            let layout = layouts[harness.random.index(layouts.len())];
            harness.lease(count, layout);
        }
        20..40 => {
            let count = harness.random.below(6);
            harness.begin_client_writes(count);
        }
        40..65 => (0..harness.random.below(4)).for_each(|_| harness.end_client_write()),
        65..80 => harness.commit_written(),
        80..84 => harness.return_idle(),
        84..91 => harness.pin_one(),
        91..96 => harness.unpin_one(),
        _ => harness.end_earlier_leases(),
    }
}

fn random_action(harness: &mut Harness, coverage: &mut Coverage) {
    if harness.random.chance(1, 3) {
        return random_client_action(harness);
    }
    match harness.random.below(100) {
        0..30 => {
            if harness.pool.can_start_batch() {
                let count = harness.random.below(12);
                let started = harness.start_batch(count, &layouts()) as u64;
                coverage.allocations_refused += u64::from(started < count);
            }
        }
        30..45 => (0..harness.random.below(20)).for_each(|_| harness.free_one()),
        // Appends of many pages, and segments that become empty.
        45..48 => (0..harness.model.stored_pages().len()).for_each(|_| harness.free_one()),
        48..50 => harness.flush(),
        50 if harness.random.chance(1, 12) => harness.quarantine_one(),
        _ => {
            let steps = harness.random.below(12);
            for _ in 0..steps {
                harness.step_with(|random, kind| match kind {
                    DeviceOpKind::WriteBlock { .. } | DeviceOpKind::WriteHeader { .. }
                        if random.chance(1, 6000) =>
                    {
                        Err(DeviceError::Media)
                    }
                    _ => Ok(()),
                });
            }
        }
    }
}

fn run_and_crash(seed: u64, coverage: &mut Coverage) {
    let _guard = SeedGuard { run: "run_and_crash", seed };
    let mut harness = Harness::new(&params(DEVICE_BYTES), seed);
    for _ in 0..CRASHES {
        let actions = harness.random.below(220);
        for _ in 0..actions {
            random_action(&mut harness, coverage);
        }
        if harness.random.chance(1, 2) {
            // Crash in the middle of an append of many pages.
            (0..harness.model.stored_pages().len()).for_each(|_| harness.free_one());
            harness.flush();
            for _ in 0..harness.random.below(6) {
                harness.step();
            }
        }
        harness.check_usage();
        coverage.bank_switches += harness.pool.usage().checkpoints;
        coverage.clients(&harness);
        let report = if harness.random.chance(1, 4) { harness.kill() } else { harness.lose_power() };
        coverage.report(&report);
        coverage.recovered(&harness);
    }
    assert_all_blocks_can_be_freed(&mut harness);
}

/// Frees every block and asserts that only quarantined slots remain in use, that is, that no slot has
/// leaked.
fn assert_all_blocks_can_be_freed(harness: &mut Harness) {
    harness.end_clients();
    for page in harness.model.stored_pages() {
        harness.model.free_requested(page);
        harness.pool.free(page);
    }
    harness.flush();
    harness.run_to_completion();
    let usage = harness.pool.usage();
    assert_eq!(
        (usage.slot_bytes_used, usage.pending_frees_bytes, usage.blocks_stored),
        (0, 0, 0),
        "{usage:?}"
    );
    harness.check_usage();
    let report = harness.lose_power();
    assert_eq!(report.blocks_stored, 0);
    if harness.pool.usage().slots_quarantined == 0 {
        assert_eq!(harness.pool.usage().slot_bytes_free, harness.pool.usage().capacity_bytes);
    }
}

#[test]
fn durable_blocks_survive_thousands_of_crashes_and_no_other_block_is_recovered_wrongly() {
    let mut coverage = Coverage::default();
    for seed in seeds(HARNESSES) {
        run_and_crash(seed, &mut coverage);
    }
    println!("{coverage:?}");
    assert_eq!(coverage.crashes, HARNESSES * CRASHES);
    let of_extents = coverage.of_extents();
    let counts = [
        coverage.torn_appends,
        coverage.repairs,
        coverage.bank_switches,
        coverage.quarantines,
        coverage.allocations_refused,
    ];
    if has_fixed_seeds() {
        let mut counts = counts.iter().chain(&of_extents);
        assert!(counts.all(|count| *count > 20), "not every situation is covered: {coverage:?}");
    }
}

/// Runs a script with several bank switches, up to `steps` executed operations. Returns whether the
/// script finished.
fn bank_switch_script(harness: &mut Harness, steps: u64) -> bool {
    let small = [layout(7)];
    let mut round = 0;
    while harness.pool.usage().checkpoints < 3 {
        if harness.pool.can_start_batch() {
            harness.start_batch(1 + round % 3, &small);
        }
        if round % 2 == 0 {
            harness.free_one();
        }
        round += 1;
        for _ in 0..3 {
            if harness.executed == steps {
                return false;
            }
            harness.step();
        }
    }
    true
}

fn crash_after(steps: u64, seed: u64) -> bool {
    let _guard = SeedGuard { run: "crash_after (seed = steps * 1000 + seed)", seed: steps * 1000 + seed };
    let mut harness = Harness::new(&params(DEVICE_BYTES), seed);
    let ended = bank_switch_script(&mut harness, steps);
    harness.lose_power();
    // Crash again while the repairs after the first crash are being written.
    harness.random = crate::pool_harness::random::Random::new(steps * 1000 + seed);
    let more = harness.random.below(60);
    let steps = harness.executed + more;
    bank_switch_script(&mut harness, steps);
    harness.lose_power();
    ended
}

#[test]
fn a_crash_after_any_operation_of_a_bank_switch_loses_nothing() {
    let mut steps = 0;
    while !crash_after(steps, 1) {
        for seed in seeds(2) {
            crash_after(steps, seed);
        }
        steps += 1;
    }
    assert!(steps > 300, "the script is long enough for a bank switch: {steps}");
}

/// Runs a script of clients that lease, write, commit and pin slots, with bank switches, up to `steps` executed
/// operations. Returns whether the script finished.
fn client_script(harness: &mut Harness, steps: u64) -> bool {
    let mut round = 0_u64;
    while harness.pool.usage().checkpoints < 3 {
        match round % 9 {
            0 => drop(harness.lease(1 + round % 3, layout(7))),
            1 => harness.begin_client_writes(2),
            2 | 3 => harness.end_client_write(),
            4 => harness.commit_written(),
            5 => harness.pin_one(),
            6 => harness.free_one(),
            7 if round.is_multiple_of(2) => harness.unpin_one(),
            7 => harness.return_idle(),
            _ => harness.end_earlier_leases(),
        }
        round += 1;
        if round.is_multiple_of(4) {
            harness.flush();
        }
        for _ in 0..2 {
            if harness.executed == steps {
                return false;
            }
            harness.step();
        }
    }
    true
}

fn crash_clients_after(steps: u64, seed: u64, coverage: &mut Coverage) -> bool {
    let run = "crash_clients_after (seed = steps * 1000 + seed)";
    let _guard = SeedGuard { run, seed: steps * 1000 + seed };
    let mut harness = Harness::new(&params(DEVICE_BYTES), seed);
    let ended = client_script(&mut harness, steps);
    coverage.clients(&harness);
    if seed.is_multiple_of(2) {
        harness.kill()
    } else {
        harness.lose_power()
    };
    coverage.recovered(&harness);
    // Crash again while the script continues, and clients of the killed agent still write.
    harness.random = crate::pool_harness::random::Random::new(steps * 1000 + seed);
    let more = harness.random.below(60);
    let steps = harness.executed + more;
    client_script(&mut harness, steps);
    harness.lose_power();
    assert_all_blocks_can_be_freed(&mut harness);
    ended
}

#[test]
fn a_crash_after_any_operation_of_clients_loses_nothing_and_reuses_no_slot_too_early() {
    let (mut coverage, mut steps) = (Coverage::default(), 0);
    while !crash_clients_after(steps, 1, &mut coverage) {
        for seed in seeds(4) {
            crash_clients_after(steps, seed, &mut coverage);
        }
        steps += 1;
    }
    assert!(steps > 200, "the script is long enough for three bank switches: {steps}");
    println!("{coverage:?}");
    for count in coverage.of_extents() {
        assert!(count > 10, "the crashes did not cover every situation: {coverage:?}");
    }
}

/// Runs a harness until bank 1 is being written and no operation of the bank switch has been executed.
fn begin_bank_switch(harness: &mut Harness) {
    let outside = |kind: &DeviceOpKind| !matches!(kind, DeviceOpKind::WritePages { offset, .. } if is_in_bank(1, *offset));
    loop {
        harness.run_matching(outside);
        if !harness.in_flight.is_empty() {
            return;
        }
        harness.start_batch(1, &[layout(1)]);
    }
}

#[test]
fn pages_left_by_an_interrupted_bank_switch_are_never_read() {
    let outside = |kind: &DeviceOpKind| !matches!(kind, DeviceOpKind::WritePages { offset, .. } if is_in_bank(1, *offset));
    let no_header = |kind: &DeviceOpKind| !matches!(kind, DeviceOpKind::WritePages { offset, .. } if bank_headers(1).contains(offset));
    let mut harness = Harness::new(&params(DEVICE_BYTES), 1);
    begin_bank_switch(&mut harness);
    // Six pages of records are committed while the checkpoint is copied, so the new log starts with six
    // pages.
    let pages: Vec<_> = (0..350).map(|_| harness.allocate(layout(1))).collect();
    harness.write(&pages, layout(1));
    harness.run_matching(outside);
    harness.run_matching(no_header);
    assert_eq!(harness.in_flight.len(), 2, "both copies of the header: {:?}", harness.in_flight);
    let report = harness.lose_power_and_all_volatile_writes();
    assert_eq!(report.bank_epoch, 1);
    // Crash once more, with a single page this time. The other five pages are still behind it.
    harness.flush();
    harness.run_to_completion();
    assert_eq!(harness.pool.usage().journal_bytes_used, 4096);
    for page in &pages[340..] {
        harness.model.free_requested(*page);
        harness.pool.free(*page);
    }
    harness.flush();
    harness.run_to_completion();
    let report = harness.lose_power();
    assert_eq!((report.bank_epoch, report.log_pages), (2, 2), "{report:?}");
}

#[test]
fn an_append_torn_in_its_middle_is_repaired_before_the_next_append() {
    for lost in 0..4u64 {
        let mut harness = Harness::new(&params(DEVICE_BYTES), lost);
        let pages: Vec<_> = (0..220).map(|_| harness.allocate(layout(1))).collect();
        harness.write(&pages, layout(1));
        harness.run_to_completion();
        let used = harness.pool.usage().journal_bytes_used / 4096;
        for page in &pages {
            harness.model.free_requested(*page);
            harness.pool.free(*page);
        }
        harness.flush();
        // 220 frees take four pages, of which one is not written.
        let report = harness.lose_power_and_keep(|offset| offset != log_page(0, used + lost));
        let inside = lost < 3;
        assert_eq!((report.torn_pages, report.repair_due), (1, inside), "{report:?}");
        assert_eq!(report.blocks_stored, if inside { 63 } else { 220 - 3 * 63 });
        // More records are appended, then the pool crashes again: the torn page must no longer be found.
        for round in 0..3 {
            harness.start_batch(2, &[layout(1)]);
            harness.run_to_completion();
            let report = harness.lose_power();
            assert_eq!((report.torn_pages, report.repair_due), (0, false), "round {round}: {report:?}");
            assert_eq!(report.bank_epoch, if inside { 2 } else { 1 });
        }
    }
}
