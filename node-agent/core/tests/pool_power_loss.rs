//! Power loss and kills at any moment: what was reported durable is there, nothing else comes back wrong, no slot leaks.

mod pool_world;

use pool_world::places::{DEVICE_BYTES, bank_headers, is_in_bank, log_page};
use pool_world::random::SeedGuard;
use pool_world::{World, layout, params};
use reprise_agent_core::pool::{DeviceError, DeviceOpKind, RecoveryReport};
use reprise_policy::Layout;

/// Lives of one world: each ends in a crash.
const LIVES: u64 = 8;

/// Worlds of the random test: 8 crashes each.
const WORLDS: u64 = 500;

/// Slots of 4 pages (128 a segment), 16 (32) and 31 (16) on five segments, so that these change size often.
fn layouts() -> [Layout; 3] {
    [layout(3), layout(15), layout(30)]
}

/// What the crashes of a test have met. A test that does not meet everything proves less than it says.
#[derive(Debug, Default)]
struct Met {
    crashes: u64,
    torn_appends: u64,
    repairs: u64,
    bank_changes: u64,
    quarantines: u64,
    allocations_refused: u64,
}

impl Met {
    fn report(&mut self, report: &RecoveryReport) {
        self.crashes += 1;
        self.torn_appends += u64::from(report.torn_pages > 0);
        self.repairs += u64::from(report.repair_due);
        self.quarantines += u64::from(report.slots_quarantined > 0);
    }
}

fn act(world: &mut World, met: &mut Met) {
    match world.random.below(100) {
        0..30 => {
            if world.pool.can_start_batch() {
                let count = world.random.below(12);
                let started = world.start_batch(count, &layouts()) as u64;
                met.allocations_refused += u64::from(started < count);
            }
        }
        30..45 => (0..world.random.below(20)).for_each(|_| world.free_one()),
        // Appends of many pages, and segments that become empty.
        45..48 => (0..world.model.stored_pages().len()).for_each(|_| world.free_one()),
        48..50 => world.flush(),
        50 if world.random.chance(1, 12) => world.quarantine_one(),
        _ => {
            let steps = world.random.below(12);
            for _ in 0..steps {
                world.step_with(|random, kind| match kind {
                    DeviceOpKind::WriteBlock { .. } if random.chance(1, 6000) => Err(DeviceError::Media),
                    _ => Ok(()),
                });
            }
        }
    }
}

fn live_and_crash(seed: u64, met: &mut Met) {
    let _guard = SeedGuard { run: "live_and_crash", seed };
    let mut world = World::new(&params(DEVICE_BYTES), seed);
    for _ in 0..LIVES {
        let actions = world.random.below(220);
        for _ in 0..actions {
            act(&mut world, met);
        }
        if world.random.chance(1, 2) {
            // Crash in the middle of an append of many pages.
            (0..world.model.stored_pages().len()).for_each(|_| world.free_one());
            world.flush();
            for _ in 0..world.random.below(6) {
                world.step();
            }
        }
        world.check_usage();
        met.bank_changes += world.pool.usage().checkpoints;
        let report = if world.random.chance(1, 4) { world.kill() } else { world.lose_power() };
        met.report(&report);
    }
    everything_can_be_freed(&mut world);
}

/// After freeing every block, nothing is used but quarantined slots: nothing has leaked.
fn everything_can_be_freed(world: &mut World) {
    for page in world.model.stored_pages() {
        world.model.free_requested(page);
        world.pool.free(page);
    }
    world.flush();
    world.settle();
    let usage = world.pool.usage();
    assert_eq!(
        (usage.slot_bytes_used, usage.pending_frees_bytes, usage.blocks_stored),
        (0, 0, 0),
        "{usage:?}"
    );
    world.check_usage();
    let report = world.lose_power();
    assert_eq!(report.blocks_stored, 0);
    if world.pool.usage().slots_quarantined == 0 {
        assert_eq!(world.pool.usage().slot_bytes_free, world.pool.usage().capacity_bytes);
    }
}

#[test]
fn durable_blocks_survive_thousands_of_crashes_and_nothing_else_comes_back_wrong() {
    let mut met = Met::default();
    for seed in 0..WORLDS {
        live_and_crash(seed, &mut met);
    }
    println!("{met:?}");
    assert_eq!(met.crashes, WORLDS * LIVES);
    for count in [met.torn_appends, met.repairs, met.bank_changes, met.quarantines, met.allocations_refused] {
        assert!(count > 20, "the crashes have not met everything: {met:?}");
    }
}

/// Runs a script that changes banks several times, up to `steps` executed operations; says whether it came to its end.
fn flip_script(world: &mut World, steps: u64) -> bool {
    let small = [layout(7)];
    let mut round = 0;
    while world.pool.usage().checkpoints < 3 {
        if world.pool.can_start_batch() {
            world.start_batch(1 + round % 3, &small);
        }
        if round % 2 == 0 {
            world.free_one();
        }
        round += 1;
        for _ in 0..3 {
            if world.executed == steps {
                return false;
            }
            world.step();
        }
    }
    true
}

fn crash_after(steps: u64, seed: u64) -> bool {
    let _guard = SeedGuard { run: "crash_after (seed = steps * 1000 + seed)", seed: steps * 1000 + seed };
    let mut world = World::new(&params(DEVICE_BYTES), seed);
    let ended = flip_script(&mut world, steps);
    world.lose_power();
    // And again while the consequences of the first crash are being written.
    world.random = pool_world::random::Random::new(steps * 1000 + seed);
    let more = world.random.below(60);
    let steps = world.executed + more;
    flip_script(&mut world, steps);
    world.lose_power();
    ended
}

#[test]
fn a_crash_after_any_operation_of_a_change_of_banks_loses_nothing() {
    let mut steps = 0;
    while !crash_after(steps, 1) {
        for seed in 2..4 {
            crash_after(steps, seed);
        }
        steps += 1;
    }
    assert!(steps > 300, "the script is long enough to change banks: {steps}");
}

/// Brings a world to where bank 1 is being written and nothing of that has been executed.
fn begin_change_of_banks(world: &mut World) {
    let outside = |kind: &DeviceOpKind| !matches!(kind, DeviceOpKind::WritePages { offset, .. } if is_in_bank(1, *offset));
    loop {
        world.settle_where(outside);
        if !world.in_flight.is_empty() {
            return;
        }
        world.start_batch(1, &[layout(1)]);
    }
}

#[test]
fn what_a_change_of_banks_left_behind_when_it_was_cut_off_is_never_read_again() {
    let outside = |kind: &DeviceOpKind| !matches!(kind, DeviceOpKind::WritePages { offset, .. } if is_in_bank(1, *offset));
    let no_header = |kind: &DeviceOpKind| !matches!(kind, DeviceOpKind::WritePages { offset, .. } if bank_headers(1).contains(offset));
    let mut world = World::new(&params(DEVICE_BYTES), 1);
    begin_change_of_banks(&mut world);
    // Six pages of records are committed while the checkpoint is copied, so the new log begins with six pages.
    let pages: Vec<_> = (0..350).map(|_| world.allocate(layout(1))).collect();
    world.write(&pages, layout(1));
    world.settle_where(outside);
    world.settle_where(no_header);
    assert_eq!(world.in_flight.len(), 2, "both copies of the header: {:?}", world.in_flight);
    let report = world.lose_power_and_all_that_is_volatile();
    assert_eq!(report.bank_epoch, 1);
    // Once more, with a single page this time. Behind it the other five still lie there.
    world.flush();
    world.settle();
    assert_eq!(world.pool.usage().journal_bytes_used, 4096);
    for page in &pages[340..] {
        world.model.free_requested(*page);
        world.pool.free(*page);
    }
    world.flush();
    world.settle();
    let report = world.lose_power();
    assert_eq!((report.bank_epoch, report.log_pages), (2, 2), "{report:?}");
}

#[test]
fn an_append_torn_in_its_middle_is_repaired_before_anything_follows_it() {
    for lost in 0..4u64 {
        let mut world = World::new(&params(DEVICE_BYTES), lost);
        let pages: Vec<_> = (0..220).map(|_| world.allocate(layout(1))).collect();
        world.write(&pages, layout(1));
        world.settle();
        let used = world.pool.usage().journal_bytes_used / 4096;
        for page in &pages {
            world.model.free_requested(*page);
            world.pool.free(*page);
        }
        world.flush();
        // 220 frees are four pages; one of them does not make it.
        let report = world.lose_power_and_keep(|offset| offset != log_page(0, used + lost));
        let inside = lost < 3;
        assert_eq!((report.torn_pages, report.repair_due), (1, inside), "{report:?}");
        assert_eq!(report.blocks_stored, if inside { 63 } else { 220 - 3 * 63 });
        // Something follows, and another crash: by then there is no trace of it.
        for round in 0..3 {
            world.start_batch(2, &[layout(1)]);
            world.settle();
            let report = world.lose_power();
            assert_eq!((report.torn_pages, report.repair_due), (0, false), "round {round}: {report:?}");
            assert_eq!(report.bank_epoch, if inside { 2 } else { 1 });
        }
    }
}
