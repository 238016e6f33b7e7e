//! SIGKILL of the agent at random moments under load, more than 200 times.
//!
//! Two engines save, one loads, the agent is killed after a random time, sometimes again while it starts.
//! Then the agent starts with the remaining data, which are compared with the ledger:
//! * a block with a received durability notice is found by match and loads byte-exact, unless it was evicted;
//! * any other block is byte-exact or a miss;
//! * the used bytes of the pool are those of the blocks that are found: no slot leaks.
//!
//! A block that is found after a start was read from the journal, so it counts as durable from then on.

use std::collections::{BTreeSet, VecDeque};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use reprise_client::{BlockStatus, ClientError, CommitStatus, Scope, Source, Ticket};
use reprise_e2e::agent::Signal;
use reprise_e2e::content::{device_slot_bytes, small};
use reprise_e2e::seed::{print_line, seeded};
use reprise_e2e::{Agent, AgentConfig, Engine, LoadParams, Outcome, PATIENCE, TestEnv};
use reprise_policy::ByteSize;

/// Number of phases without evictions, each with a new pool, and the kills of each phase.
const PHASES: usize = 4;
const KILLS_PER_PHASE: usize = 40;

/// Number of kills of a pool that evicts all the time.
const KILLS_WHILE_EVICTING: usize = 60;

const _: () = assert!(PHASES * KILLS_PER_PHASE + KILLS_WHILE_EVICTING >= 200);

/// Pool of a phase: about 3,500 slots of 36 KiB.
const POOL: ByteSize = ByteSize(128 << 20);

/// Maximum number of blocks of a phase, some 80 % of the slots: below the level at which an agent evicts.
const BLOCKS_PER_PHASE: u64 = 2800;

/// Pool with evictions: about 400 slots.
const SMALL_POOL: ByteSize = ByteSize(16 << 20);

/// Microseconds from the engines' start to a kill. A save is durable after some 40 ms.
const KILL_AFTER_US: std::ops::Range<u64> = 500..160_000;

/// Microseconds from an agent's start to its kill. A start takes some 50 ms.
const KILL_START_AFTER_US: std::ops::Range<u64> = 0..60_000;

/// Probability that a start is killed.
const KILL_START_ODDS: f64 = 0.2;

/// Number of blocks by which the capacity may appear lower than that of a pool that was never killed. A pool
/// evicts when too few bytes are free. An unused segment counts as a whole, but one that is cut into slots
/// without the 8 pages at its end. Two or three segments may be in either state, which changes the capacity
/// by a block or two.
const SLACK_BLOCKS: u64 = 2 + FILL_BLOCKS_NEAR_THE_END;

/// Blocks of one save shortly before the first eviction.
const FILL_BLOCKS_NEAR_THE_END: u64 = 4;

/// Minimum number of recent blocks that the test with evictions must have checked.
const CHECKED_MIN: usize = 100;

/// Blocks that three engines may still touch after all of them have passed the check of the limit.
const MARGIN_BLOCKS: usize = 3 * 16;

/// Blocks of one load: a quarter of the arena.
const LOAD_BLOCKS: usize = 128;

/// Knowledge about the blocks that an engine can have.
#[derive(Debug)]
struct BlockLedger {
    sets: Mutex<BlockSets>,
    /// The next block that was never saved.
    next: AtomicU64,
    /// The end of the range of block numbers.
    end: u64,
    /// Limit on the blocks touched in a run; beyond it, engines reuse touched blocks.
    touched_max: AtomicUsize,
}

#[derive(Debug, Default)]
struct BlockSets {
    /// Blocks that were ever part of a commit.
    attempted: BTreeSet<u64>,
    /// Blocks with a durability notice, or found after a start.
    durable: BTreeSet<u64>,
    /// Blocks with a durability notice since the last start.
    recent: BTreeSet<u64>,
    /// Blocks saved or loaded since the last start.
    touched: BTreeSet<u64>,
}

/// Result of the comparison after a start.
#[derive(Debug)]
struct Survivors {
    found: BTreeSet<u64>,
    /// Durable blocks that were not found.
    lost: BTreeSet<u64>,
    /// Blocks with a durability notice in the run before the kill.
    recent: BTreeSet<u64>,
    /// Number of blocks that were used in that run.
    touched: usize,
}

impl BlockLedger {
    fn new(end: u64) -> BlockLedger {
        let touched_max = AtomicUsize::new(usize::MAX);
        BlockLedger { sets: Mutex::default(), next: AtomicU64::new(0), end, touched_max }
    }

    fn lock(&self) -> MutexGuard<'_, BlockSets> {
        self.sets.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the blocks of the next save: new ones while there are any, then blocks of earlier attempts.
    fn next_to_save(&self, count: u64, rng: &mut StdRng) -> Vec<u64> {
        if let Some(touched) = self.reuse_touched(&self.lock(), count as usize, rng) {
            return touched;
        }
        let first = self.next.fetch_add(count, Ordering::Relaxed);
        let numbers: BTreeSet<u64> = if first + count <= self.end {
            (first..first + count).collect()
        } else {
            (0..count).map(|_| rng.random_range(0..self.end)).collect()
        };
        let mut sets = self.lock();
        sets.attempted.extend(&numbers);
        sets.touched.extend(&numbers);
        numbers.into_iter().collect()
    }

    fn mark_durable(&self, numbers: impl IntoIterator<Item = u64>) {
        let mut sets = self.lock();
        for number in numbers {
            sets.durable.insert(number);
            sets.recent.insert(number);
        }
    }

    /// Returns the blocks of `numbers` that a load must find: before the range ends, no durable block is
    /// evicted.
    fn certain(&self, numbers: &[u64]) -> BTreeSet<u64> {
        let is_evicting = self.end == u64::MAX;
        let sets = self.lock();
        numbers.iter().copied().filter(|number| !is_evicting && sets.durable.contains(number)).collect()
    }

    /// Returns some touched blocks if the limit of this run is reached.
    fn reuse_touched(&self, sets: &BlockSets, count: usize, rng: &mut StdRng) -> Option<Vec<u64>> {
        if sets.touched.len() + count <= self.touched_max.load(Ordering::Relaxed) {
            return None;
        }
        let from = rng.random_range(0..=sets.touched.len() - count.min(sets.touched.len()));
        Some(sets.touched.iter().skip(from).take(count).copied().collect())
    }

    /// Returns some blocks of earlier attempts, to be loaded.
    fn next_to_load(&self, count: usize, rng: &mut StdRng) -> Vec<u64> {
        let mut sets = self.lock();
        if let Some(touched) = self.reuse_touched(&sets, count, rng) {
            return touched;
        }
        let Some(last) = sets.attempted.last().copied() else { return Vec::new() };
        let from = rng.random_range(0..=last);
        let picked: Vec<u64> = sets.attempted.range(from..).take(count).copied().collect();
        sets.touched.extend(&picked);
        picked
    }
}

/// Returns whether an engine sees this error when the agent dies.
fn is_agent_loss(error: &ClientError) -> bool {
    matches!(error, ClientError::AgentLost { .. } | ClientError::AgentAbsent { .. })
}

fn assert_agent_lost(error: &ClientError) {
    assert!(is_agent_loss(error), "unexpected error after a kill: {error}");
}

/// Saves blocks and records durability notices until the agent is gone.
fn save_until_killed(agent: &Agent, ledger: &BlockLedger, mut rng: StdRng) {
    let engine = match agent.connect(small()) {
        Ok(engine) => engine,
        Err(error) => return assert_agent_lost(&error),
    };
    let mut open: VecDeque<(Ticket, Vec<u64>)> = VecDeque::new();
    let error = loop {
        let numbers = ledger.next_to_save(rng.random_range(1..12), &mut rng);
        match engine.save(&numbers) {
            Ok(committed) => {
                let expected = [CommitStatus::Committed, CommitStatus::Duplicate];
                let is_expected = |status: &CommitStatus| expected.contains(status);
                assert!(committed.statuses.iter().all(is_expected), "{:?}", committed.statuses);
                open.push_back((committed.ticket, numbers));
            }
            Err(error) => break error,
        }
        if open.len() < 3 {
            continue;
        }
        let (ticket, numbers) = open.pop_front().expect("three tickets are open");
        if let Err(error) = record_outcome(&engine, ledger, ticket, &numbers, PATIENCE) {
            break error;
        }
    };
    assert_agent_lost(&error);
    // A notice that was received before the agent died counts as well.
    for (ticket, numbers) in open {
        let _ = record_outcome(&engine, ledger, ticket, &numbers, Duration::ZERO);
    }
}

fn record_outcome(
    engine: &Engine,
    ledger: &BlockLedger,
    ticket: Ticket,
    numbers: &[u64],
    timeout: Duration,
) -> Result<(), ClientError> {
    let outcome = engine.client().wait_durable(ticket, timeout)?;
    assert_eq!(outcome.durable as usize + outcome.lost_keys.len(), numbers.len());
    let is_lost = |number: &u64| outcome.lost_keys.contains(&reprise_e2e::content::key(*number));
    ledger.mark_durable(numbers.iter().copied().filter(|number| !is_lost(number)));
    Ok(())
}

/// Loads blocks that the others save, from DRAM and from the device, until the agent is gone.
fn load_until_killed(agent: &Agent, ledger: &BlockLedger, mut rng: StdRng) {
    let engine = match agent.connect(small()) {
        Ok(engine) => engine,
        Err(error) => return assert_agent_lost(&error),
    };
    loop {
        let numbers = ledger.next_to_load(rng.random_range(1..16), &mut rng);
        let certain = ledger.certain(&numbers);
        let loaded = match numbers.is_empty() {
            true => engine.client().stats().map(drop),
            false => engine.load(&numbers, &LoadParams::LOCAL).map(|outcomes| {
                assert!(outcomes.iter().all(|outcome| is_clean(*outcome)), "{outcomes:?}");
                let is_miss = |outcome: &Outcome| *outcome == Outcome::Missing(BlockStatus::Miss);
                let missed = numbers.iter().zip(&outcomes).filter(|(_, outcome)| is_miss(outcome));
                let lost: Vec<&u64> =
                    missed.map(|(number, _)| number).filter(|number| certain.contains(number)).collect();
                assert!(lost.is_empty(), "durable before the load, but missed: {lost:?}");
            }),
        };
        let trimmed = loaded.and_then(|()| match rng.random_bool(0.2) {
            true => engine.client().trim().map(drop),
            false => Ok(()),
        });
        if let Err(error) = trimmed {
            return assert_agent_lost(&error);
        }
    }
}

/// Returns whether a block is right or a miss: a kill must not corrupt blocks.
fn is_clean(outcome: Outcome) -> bool {
    matches!(outcome, Outcome::Verified(_) | Outcome::Missing(BlockStatus::Miss | BlockStatus::NoSpace))
}

/// Runs engines against the agent until it is killed.
fn run_and_kill(agent: &mut Agent, ledger: &BlockLedger, rng: &mut StdRng) {
    let moment = Duration::from_micros(rng.random_range(KILL_AFTER_US));
    let seeds: [u64; 3] = rng.random();
    let rngs = seeds.map(StdRng::seed_from_u64);
    let shared: &Agent = agent;
    std::thread::scope(|scope| {
        let [first, second, third] = rngs;
        scope.spawn(|| save_until_killed(shared, ledger, first));
        scope.spawn(|| save_until_killed(shared, ledger, second));
        scope.spawn(|| load_until_killed(shared, ledger, third));
        // Not a synchronisation: the sleep selects the random moment of the kill.
        std::thread::sleep(moment);
        shared.signal(Signal::KILL);
    });
    agent.kill();
}

/// Starts the agent again, and perhaps kills it while it starts. Returns the number of these kills.
fn start_again(agent: &mut Agent, rng: &mut StdRng) -> usize {
    let mut kills = 0;
    while rng.random_bool(KILL_START_ODDS) {
        let starting = agent.begin_start();
        std::thread::sleep(Duration::from_micros(rng.random_range(KILL_START_AFTER_US)));
        starting.kill();
        kills += 1;
    }
    agent.start();
    kills
}

/// Compares the ledger with the blocks that the agent has.
fn compare_ledger(agent: &Agent, ledger: &BlockLedger) -> Survivors {
    let engine = agent.engine(small());
    let sets = std::mem::take(&mut *ledger.lock());
    let attempted: Vec<u64> = sets.attempted.iter().copied().collect();
    let durable: Vec<u64> = sets.durable.iter().copied().collect();
    let mut found = BTreeSet::new();
    for numbers in attempted.chunks(LOAD_BLOCKS) {
        let outcomes = engine.load(numbers, &LoadParams::LOCAL).expect("the agent is running");
        for (number, outcome) in numbers.iter().zip(outcomes) {
            match outcome {
                Outcome::Verified(source) => {
                    assert_eq!(source, Source::OwnNvme, "DRAM does not survive a kill");
                    found.insert(*number);
                }
                Outcome::Missing(BlockStatus::Miss) => {}
                other => panic!("block {number} is neither right nor a miss: {other:?}"),
            }
        }
    }
    let lost: BTreeSet<u64> = sets.durable.difference(&found).copied().collect();
    if lost.is_empty() {
        let matched = engine.matches(&durable, Scope::Local);
        assert_eq!(matched.len(), durable.len(), "a match finds every block that loads");
    }
    drop(engine);
    assert_no_leak(agent, found.len() as u64);
    let (touched, recent) = (sets.touched.len(), sets.recent);
    *ledger.lock() = BlockSets { attempted: found.clone(), durable: found.clone(), ..BlockSets::default() };
    Survivors { found, lost, recent, touched }
}

/// Checks that every used slot holds a block that is found.
fn assert_no_leak(agent: &Agent, blocks: u64) {
    let counters = agent.admin().wait_quiet(PATIENCE);
    assert_eq!(counters.get("nvme_blocks"), blocks, "blocks on the device");
    assert_eq!(counters.get("pool_used_bytes"), blocks * device_slot_bytes(&small()), "bytes of their slots");
    let in_dram = counters.get("dram_blocks") * small().slot_bytes();
    assert_eq!(counters.get("arena_used_bytes"), in_dram, "bytes of slots in the arena");
    assert_eq!(counters.get("pool_quarantined_slots"), 0, "a kill damages no slot");
    assert_eq!(counters.get("corrupt_blocks"), 0, "a kill corrupts no block");
}

/// Saves new blocks until the pool evicts. Returns the number of blocks that it held before.
fn fill_up(agent: &Agent, from: u64) -> u64 {
    let engine = agent.engine(small());
    let before = agent.admin().counter("nvme_evictions");
    let mut number = from;
    loop {
        let counters = agent.admin().counters();
        let evicted = counters.get("nvme_evictions") - before;
        if evicted > 0 {
            drop(engine);
            let counters = agent.admin().wait_quiet(PATIENCE);
            return counters.get("nvme_blocks") + counters.get("nvme_evictions") - before;
        }
        // Small batches near the end, since blocks that are saved together with the first eviction count as
        // well.
        let is_near = counters.get("pool_free_bytes") * 8 < counters.get("pool_capacity_bytes");
        let count = if is_near { FILL_BLOCKS_NEAR_THE_END } else { 64 };
        let numbers: Vec<u64> = (number..number + count).collect();
        engine.save_durably(&numbers);
        number += count;
        assert!(number - from < 100_000, "the pool never fills");
    }
}

fn config(pool: ByteSize) -> AgentConfig {
    AgentConfig {
        pool: Some(pool),
        writeback_delay: Duration::from_millis(5),
        ..AgentConfig::named("victim")
    }
}

/// Returns the number of blocks in a full pool that was never killed.
fn capacity(env: &TestEnv, pool: ByteSize) -> u64 {
    let mut agent = env.agent(&AgentConfig { node: "fresh".to_owned(), ..config(pool) });
    let blocks = fill_up(&agent, 0);
    agent.stop();
    blocks
}

#[test]
fn durable_blocks_survive_a_kill_at_any_moment() {
    let env = TestEnv::new();
    let mut rng = seeded("kill");
    let capacity = capacity(&env, POOL);
    assert!(capacity > BLOCKS_PER_PHASE, "a pool of {POOL} holds {capacity} blocks");
    let (mut kills, mut survived, mut unannounced) = (0, 0, 0);
    for phase in 0..PHASES {
        let mut agent = env.agent(&AgentConfig { node: format!("victim-{phase}"), ..config(POOL) });
        let ledger = BlockLedger::new(BLOCKS_PER_PHASE);
        let mut killed = 0;
        while killed < KILLS_PER_PHASE {
            run_and_kill(&mut agent, &ledger, &mut rng);
            let durable = ledger.lock().durable.len();
            killed += 1 + start_again(&mut agent, &mut rng);
            let survivors = compare_ledger(&agent, &ledger);
            assert_eq!(survivors.lost, BTreeSet::new(), "durable blocks were lost");
            survived += durable;
            unannounced += survivors.found.len() - durable;
        }
        kills += killed;
        let full = fill_up(&agent, 1_000_000);
        assert!(full + SLACK_BLOCKS >= capacity, "slots have leaked: {full} blocks fit, not {capacity}");
        agent.stop();
        std::fs::remove_file(&agent.files().pool).expect("a stopped agent's pool can be removed");
    }
    print_line(&format!(
        "{kills} kills; durable blocks found again: {survived}, other blocks found: {unannounced}"
    ));
    assert!(survived > 1000, "the kills hit agents with durable blocks");
    assert!(unannounced > 0, "no kill hit between a journal write and its notice");
}

#[test]
fn a_pool_that_evicts_survives_a_kill_at_any_moment() {
    let env = TestEnv::new();
    let mut rng = seeded("kill while evicting");
    let capacity = capacity(&env, SMALL_POOL);
    let mut agent = env.agent(&config(SMALL_POOL));
    let ledger = BlockLedger::new(u64::MAX);
    let (mut runs, mut kills, mut full, mut checked) = (0, 0, 0, 0);
    while kills < KILLS_WHILE_EVICTING {
        // In every other run, few blocks are touched, independent of the machine's speed. Then the recent
        // blocks must not have been evicted.
        let calm = (capacity / 2) as usize - MARGIN_BLOCKS;
        ledger.touched_max.store(if runs % 2 == 0 { calm } else { usize::MAX }, Ordering::Relaxed);
        runs += 1;
        run_and_kill(&mut agent, &ledger, &mut rng);
        kills += 1 + start_again(&mut agent, &mut rng);
        let survivors = compare_ledger(&agent, &ledger);
        let found = survivors.found.len() as u64;
        assert!(found <= capacity, "more blocks than slots");
        // The least recently used blocks are evicted first. If few blocks were touched, the recently saved
        // ones must remain.
        if survivors.touched as u64 * 2 <= capacity {
            let lost: Vec<&u64> = survivors.recent.intersection(&survivors.lost).collect();
            assert!(lost.is_empty(), "durable in this run, but lost: {lost:?}");
            checked += survivors.recent.len();
        }
        if !survivors.lost.is_empty() {
            full += 1;
            // An agent evicts a few per cent ahead, and up to 64 blocks when a size class has no free slot.
            assert!(found * 4 >= capacity * 3, "only {found} of {capacity} slots are in use");
        }
    }
    let holds = fill_up(&agent, 1 << 40);
    assert!(holds + SLACK_BLOCKS >= capacity, "slots have leaked: {holds} blocks fit, not {capacity}");
    agent.stop();
    print_line(&format!(
        "{kills} kills, {full} of a pool that had evicted; {checked} recent blocks found again"
    ));
    assert!(full * 2 > kills / 2, "the pool evicts most of the time");
    assert!(checked >= CHECKED_MIN, "only {checked} recent blocks were checked");
}
