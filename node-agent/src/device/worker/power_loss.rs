//! Power losses during writes: the real worker and pool over a device that keeps, drops and tears unsynced
//! writes. Blocks that were reported as durable must be intact, all others intact or missing, and no slot
//! may leak.
//!
//! Everything runs on one thread in passes, so a seed reproduces its run exactly. Blocks are read only from
//! copies of the surviving image, since reads would make the order of operations depend on real time.

use reprise_agent_core::pool::{BatchId, PoolEvent};
use reprise_io::simulated::{CrashMode, Image, SimulatedDevice};

use super::test_bench::{PLACES, PoweredDevice, TestBench, layouts};
use ledger::{Block, ExpectedState, Ledger};

pub(super) use ledger::Coverage;

mod ledger;

/// Number of runs of the random test.
const RUNS: u64 = 240;

/// Lives of a run; each ends in a power loss.
const LIVES: u64 = 3;

/// Maximum number of passes of a life.
const TURNS_MAX: u64 = 300;

/// Environment variable with the seed of a single run.
const SEED_VARIABLE: &str = "REPRISE_SEED";

/// Environment variable with the first seed, if not 0.
const FIRST_SEED_VARIABLE: &str = "REPRISE_FIRST_SEED";

/// A SplitMix64 random number generator.
#[derive(Clone, Debug)]
pub(super) struct Random(pub(super) u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        mixed ^ (mixed >> 31)
    }

    pub(super) fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }
}

/// Prints the seed when a test fails.
struct SeedGuard(u64);

impl Drop for SeedGuard {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let seed = self.0;
            eprintln!(
                "seed {seed}; replay with {SEED_VARIABLE}={seed} cargo test -p reprise-agent --bins power_loss"
            );
        }
    }
}

/// A device in use between two power losses.
struct Life<D> {
    bench: TestBench<D>,
    /// Numbers of the blocks in the arena.
    places: [Option<u64>; PLACES],
    batches: u64,
}

impl<D: PoweredDevice> Life<D> {
    fn on(bench: TestBench<D>) -> Life<D> {
        Life { bench, places: [None; PLACES], batches: 0 }
    }

    /// Saves and frees blocks for some passes, then cuts the power. Returns the surviving image.
    fn run_until_power_loss(mut self, ledger: &mut Ledger, random: &mut Random) -> Image {
        self.flush();
        for _ in 0..random.below(TURNS_MAX) {
            match random.below(16) {
                0..4 => self.save(ledger, random),
                4..6 => (0..random.below(6)).for_each(|_| self.free_one(ledger, random)),
                6 => self.flush(),
                _ => {}
            }
            self.run_once(ledger);
        }
        ledger.coverage.bank_changes += self.bench.pool.usage().checkpoints;
        let mode = if random.below(4) == 0 { CrashMode::UnsyncedDropped } else { CrashMode::PowerLost };
        self.bench.device.cut_power(mode)
    }

    fn save(&mut self, ledger: &mut Ledger, random: &mut Random) {
        if !self.bench.pool.can_start_batch() {
            return;
        }
        let batch = BatchId(self.batches);
        self.batches += 1;
        let mut writes = Vec::new();
        for _ in 0..1 + random.below(4) {
            let layout = layouts()[random.below(2) as usize];
            let Some(index) = self.places.iter().position(Option::is_none) else { break };
            let Some(page) = self.bench.pool.allocate(layout.slot_bytes()) else { continue };
            let number = ledger.begin(Block { page, layout, expected: ExpectedState::Writing(batch) });
            self.places[index] = Some(number);
            writes.push(self.bench.fill(index, number, layout, page));
        }
        let ops = self.bench.pool.write_batch(batch, writes);
        self.bench.submit(ops);
    }

    fn free_one(&mut self, ledger: &mut Ledger, random: &mut Random) {
        if let Some(page) = ledger.free_one(random) {
            self.bench.pool.free(page);
        }
    }

    fn flush(&mut self) {
        let ops = self.bench.pool.flush_frees();
        self.bench.submit(ops);
    }

    fn run_once(&mut self, ledger: &mut Ledger) {
        for event in self.bench.run_once() {
            self.handle(event, ledger);
        }
        if self.bench.pool.usage().pending_frees_bytes == 0 {
            ledger.frees_are_durable();
        }
    }

    fn handle(&mut self, event: PoolEvent, ledger: &mut Ledger) {
        match event {
            PoolEvent::SpaceFreed => {}
            PoolEvent::WritesStopped { reason } => panic!("unexpected end of writing: {reason}"),
            PoolEvent::DeviceLost { reason } => panic!("unexpected device loss: {reason}"),
            PoolEvent::BatchDone { batch, stored, failed } => {
                assert!(failed.is_empty(), "unexpected failures: {failed:?}");
                for number in ledger.durable(batch, &stored) {
                    let index = self.places.iter().position(|held| *held == Some(number));
                    let index = index.expect("a block keeps its slot until it is durable");
                    self.places[index] = None;
                    self.bench.overwrite(index);
                }
            }
        }
    }
}

/// Opens the surviving image and reads every block that is found.
fn check<D: PoweredDevice>(image: Image, seed: u64, ledger: &mut Ledger) {
    let mut bench = TestBench::<D>::open(image, seed);
    ledger.verify(&bench.found);
    bench.assert_no_slot_leaks();
    assert_eq!(bench.pool.usage().slots_quarantined, 0, "no slot is quarantined");
    let found = bench.found.clone();
    bench.read_and_compare(&found);
}

/// Runs a seed to its last power loss. Returns the coverage and the surviving image.
pub(super) fn lives_of<D: PoweredDevice>(seed: u64) -> (Coverage, Image) {
    let _guard = SeedGuard(seed);
    let mut random = Random(seed);
    let mut ledger = Ledger::default();
    let mut life = Life::on(TestBench::<D>::blank(random.next()));
    for _ in 1..LIVES {
        let image = life.run_until_power_loss(&mut ledger, &mut random);
        check::<D>(image.clone(), random.next(), &mut ledger);
        life = Life::on(TestBench::open(image, random.next()));
    }
    let image = life.run_until_power_loss(&mut ledger, &mut random);
    check::<D>(image.clone(), random.next(), &mut ledger);
    (ledger.coverage, image)
}

/// Runs a seed on a simulated device.
fn run_seed(seed: u64) -> (Coverage, Image) {
    lives_of::<SimulatedDevice>(seed)
}

#[test]
fn durable_blocks_survive_power_loss_and_others_are_intact_or_missing() {
    if let Ok(seed) = std::env::var(SEED_VARIABLE) {
        println!("{:?}", run_seed(seed.parse().expect("a seed is a number")).0);
        return;
    }
    let first = std::env::var(FIRST_SEED_VARIABLE).ok();
    let first: u64 = first.map_or(0, |seed| seed.parse().expect("a seed is a number"));
    let worlds = (first..first + RUNS).map(|seed| run_seed(seed).0);
    let coverage = worlds.fold(Coverage::default(), Coverage::plus);
    println!("{coverage:?}");
    assert_eq!(coverage.power_losses, RUNS * LIVES);
    for count in [
        coverage.survived,
        coverage.early,
        coverage.missing,
        coverage.revived,
        coverage.slots_reused,
        coverage.bank_changes,
    ] {
        assert!(count > 20, "the power losses do not cover all cases: {coverage:?}");
    }
}

#[test]
fn seed_reproduces_its_run() {
    for seed in [1, 2] {
        assert!(run_seed(seed) == run_seed(seed), "seed {seed} differs from itself");
    }
}
