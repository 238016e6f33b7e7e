//! `kill -9` of the agent at any moment under load, more than 200 times.
//!
//! Two engines save, one loads, the agent is killed after a random while, sometimes once more while it starts. Then the
//! agent starts on what is left, and the books are compared with it:
//! * a block for which a durable notice was received is found by match and loads byte-exact (unless it was evicted);
//! * any other block is byte-exact or a clean miss;
//! * the pool's bytes in use are those of the blocks that are found: no slot leaks.
//!
//! What is found after a start was read from the journal, so it counts as durable from then on.

use std::collections::{BTreeSet, VecDeque};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use reprise_client::{BlockStatus, ClientError, CommitStatus, Scope, Source, Ticket};
use reprise_e2e::agent::Signal;
use reprise_e2e::content::{device_slot_bytes, small};
use reprise_e2e::seed::{say, seeded};
use reprise_e2e::{Agent, AgentConfig, Engine, Loading, Outcome, PATIENCE, World};
use reprise_policy::ByteSize;

/// Kills of pools in which nothing is evicted: phases on a fresh pool each.
const PHASES: usize = 4;
const KILLS_PER_PHASE: usize = 40;

/// Kills of a pool that evicts all the time.
const KILLS_WHILE_EVICTING: usize = 60;

const _: () = assert!(PHASES * KILLS_PER_PHASE + KILLS_WHILE_EVICTING >= 200);

/// The pool of a phase: about 3,500 slots of 36 KiB.
const POOL: ByteSize = ByteSize(128 << 20);

/// Blocks that a phase saves at the most, some 80 % of the slots: below the share that an agent keeps free.
const BLOCKS_PER_PHASE: u64 = 2800;

/// The pool that evicts: about 400 slots.
const SMALL_POOL: ByteSize = ByteSize(16 << 20);

/// A kill comes so long after the engines have begun, in microseconds. A save is durable after some 40 ms.
const KILL_AFTER_US: std::ops::Range<u64> = 500..160_000;

/// A kill during a start comes so long after it has begun: a start takes some 50 ms.
const KILL_START_AFTER_US: std::ops::Range<u64> = 0..60_000;

/// How often a start is killed, too.
const KILL_START_ODDS: f64 = 0.2;

/// So many fewer may fit than in a pool that was never killed. A pool evicts when too few bytes are free. A segment that no
/// block has used yet counts whole, one that is cut into slots without the 8 pages at its end: with the two or three
/// segments that may be either, a block or two more or less fit.
const SLACK_BLOCKS: u64 = 2 + FILL_BLOCKS_NEAR_THE_END;

/// Blocks saved at a time where the first eviction is near.
const FILL_BLOCKS_NEAR_THE_END: u64 = 4;

/// Recent blocks that the test of the evicting pool must have looked for.
const CHECKED_MIN: usize = 100;

/// Blocks that three engines may touch at once after all have seen that they may touch no more.
const MARGIN_BLOCKS: usize = 3 * 16;

/// Blocks of one load: a quarter of the arena.
const LOAD_BLOCKS: usize = 128;

/// What an outsider knows of the blocks.
#[derive(Debug)]
struct Books {
    accounts: Mutex<Accounts>,
    /// The next block that nobody has saved yet.
    next: AtomicU64,
    /// Where numbers end.
    end: u64,
    /// So many blocks are touched in a run; when they are, engines go on with those.
    touched_max: AtomicUsize,
}

#[derive(Debug, Default)]
struct Accounts {
    /// Handed to a commit at any time.
    tried: BTreeSet<u64>,
    /// Announced as durable, or found after a start.
    durable: BTreeSet<u64>,
    /// Announced as durable since the last start.
    recent: BTreeSet<u64>,
    /// Tried or loaded since the last start.
    touched: BTreeSet<u64>,
}

/// What a start has brought back.
#[derive(Debug)]
struct Survivors {
    found: BTreeSet<u64>,
    /// Durable blocks that were not found.
    lost: BTreeSet<u64>,
    /// Blocks announced as durable in the run before the kill.
    recent: BTreeSet<u64>,
    /// Blocks of which the agent knew that somebody used them in that run.
    touched: usize,
}

impl Books {
    fn new(end: u64) -> Books {
        let touched_max = AtomicUsize::new(usize::MAX);
        Books { accounts: Mutex::default(), next: AtomicU64::new(0), end, touched_max }
    }

    fn lock(&self) -> MutexGuard<'_, Accounts> {
        self.accounts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Blocks to save next: fresh ones while there are any, then such as were tried before.
    fn draw(&self, count: u64, rng: &mut StdRng) -> Vec<u64> {
        if let Some(touched) = self.touched_enough(&self.lock(), count as usize, rng) {
            return touched;
        }
        let first = self.next.fetch_add(count, Ordering::Relaxed);
        let numbers: BTreeSet<u64> = if first + count <= self.end {
            (first..first + count).collect()
        } else {
            (0..count).map(|_| rng.random_range(0..self.end)).collect()
        };
        let mut accounts = self.lock();
        accounts.tried.extend(&numbers);
        accounts.touched.extend(&numbers);
        numbers.into_iter().collect()
    }

    fn note_durable(&self, numbers: impl IntoIterator<Item = u64>) {
        let mut accounts = self.lock();
        for number in numbers {
            accounts.durable.insert(number);
            accounts.recent.insert(number);
        }
    }

    /// Those of some blocks that must be found by whoever asks now: nothing durable is evicted before the numbers end.
    fn certain(&self, numbers: &[u64]) -> BTreeSet<u64> {
        let is_evicting = self.end == u64::MAX;
        let accounts = self.lock();
        numbers.iter().copied().filter(|number| !is_evicting && accounts.durable.contains(number)).collect()
    }

    /// Some of the blocks that this run has touched, when it may not touch others.
    fn touched_enough(&self, accounts: &Accounts, count: usize, rng: &mut StdRng) -> Option<Vec<u64>> {
        if accounts.touched.len() + count <= self.touched_max.load(Ordering::Relaxed) {
            return None;
        }
        let from = rng.random_range(0..=accounts.touched.len() - count.min(accounts.touched.len()));
        Some(accounts.touched.iter().skip(from).take(count).copied().collect())
    }

    /// Some blocks that were tried.
    fn pick(&self, count: usize, rng: &mut StdRng) -> Vec<u64> {
        let mut accounts = self.lock();
        if let Some(touched) = self.touched_enough(&accounts, count, rng) {
            return touched;
        }
        let Some(last) = accounts.tried.last().copied() else { return Vec::new() };
        let from = rng.random_range(0..=last);
        let picked: Vec<u64> = accounts.tried.range(from..).take(count).copied().collect();
        accounts.touched.extend(&picked);
        picked
    }
}

/// Whether an error is the agent's death as an engine sees it.
fn is_death(error: &ClientError) -> bool {
    matches!(error, ClientError::AgentLost { .. } | ClientError::AgentAbsent { .. })
}

fn assert_death(error: &ClientError) {
    assert!(is_death(error), "an engine sees a kill as the end of its session, not as: {error}");
}

/// Saves blocks and notes durable notices until the agent is gone.
fn save_until_killed(agent: &Agent, books: &Books, mut rng: StdRng) {
    let engine = match agent.connect(small()) {
        Ok(engine) => engine,
        Err(error) => return assert_death(&error),
    };
    let mut open: VecDeque<(Ticket, Vec<u64>)> = VecDeque::new();
    let error = loop {
        let numbers = books.draw(rng.random_range(1..12), &mut rng);
        match engine.save(&numbers) {
            Ok(committed) => {
                let fine = [CommitStatus::Committed, CommitStatus::Duplicate];
                let fine = |status: &CommitStatus| fine.contains(status);
                assert!(committed.statuses.iter().all(fine), "{:?}", committed.statuses);
                open.push_back((committed.ticket, numbers));
            }
            Err(error) => break error,
        }
        if open.len() < 3 {
            continue;
        }
        let (ticket, numbers) = open.pop_front().expect("three are open");
        if let Err(error) = note_outcome(&engine, books, ticket, &numbers, PATIENCE) {
            break error;
        }
    };
    assert_death(&error);
    // A notice that was received counts, even if nobody has asked for it before the agent died.
    for (ticket, numbers) in open {
        let _ = note_outcome(&engine, books, ticket, &numbers, Duration::ZERO);
    }
}

fn note_outcome(
    engine: &Engine,
    books: &Books,
    ticket: Ticket,
    numbers: &[u64],
    patience: Duration,
) -> Result<(), ClientError> {
    let outcome = engine.client().wait_durable(ticket, patience)?;
    assert_eq!(outcome.durable as usize + outcome.lost_keys.len(), numbers.len());
    let is_lost = |number: &u64| outcome.lost_keys.contains(&reprise_e2e::content::key(*number));
    books.note_durable(numbers.iter().copied().filter(|number| !is_lost(number)));
    Ok(())
}

/// Loads what others save, from DRAM and from the device, until the agent is gone.
fn load_until_killed(agent: &Agent, books: &Books, mut rng: StdRng) {
    let engine = match agent.connect(small()) {
        Ok(engine) => engine,
        Err(error) => return assert_death(&error),
    };
    loop {
        let numbers = books.pick(rng.random_range(1..16), &mut rng);
        let certain = books.certain(&numbers);
        let loaded = match numbers.is_empty() {
            true => engine.client().stats().map(drop),
            false => engine.load(&numbers, &Loading::LOCAL).map(|outcomes| {
                assert!(outcomes.iter().all(|outcome| is_clean(*outcome)), "{outcomes:?}");
                let is_miss = |outcome: &Outcome| *outcome == Outcome::Missing(BlockStatus::Miss);
                let missed = numbers.iter().zip(&outcomes).filter(|(_, outcome)| is_miss(outcome));
                let gone: Vec<&u64> =
                    missed.map(|(number, _)| number).filter(|number| certain.contains(number)).collect();
                assert!(gone.is_empty(), "announced as durable before the load, and missed: {gone:?}");
            }),
        };
        let trimmed = loaded.and_then(|()| match rng.random_bool(0.2) {
            true => engine.client().trim().map(drop),
            false => Ok(()),
        });
        if let Err(error) = trimmed {
            return assert_death(&error);
        }
    }
}

/// Whether a block is right or cleanly missing: nothing is damaged by a kill.
fn is_clean(outcome: Outcome) -> bool {
    matches!(outcome, Outcome::Right(_) | Outcome::Missing(BlockStatus::Miss | BlockStatus::NoSpace))
}

/// Runs engines against the agent until it is killed.
fn run_and_kill(agent: &mut Agent, books: &Books, rng: &mut StdRng) {
    let moment = Duration::from_micros(rng.random_range(KILL_AFTER_US));
    let seeds: [u64; 3] = rng.random();
    let rngs = seeds.map(StdRng::seed_from_u64);
    let shared: &Agent = agent;
    std::thread::scope(|scope| {
        let [first, second, third] = rngs;
        scope.spawn(|| save_until_killed(shared, books, first));
        scope.spawn(|| save_until_killed(shared, books, second));
        scope.spawn(|| load_until_killed(shared, books, third));
        // Not synchronisation: the random moment of the kill.
        std::thread::sleep(moment);
        shared.signal(Signal::KILL);
    });
    agent.kill();
}

/// Starts the agent again, perhaps killing it while it starts; how many kills that took.
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

/// Compares the books with what the agent has.
fn take_stock(agent: &Agent, books: &Books) -> Survivors {
    let engine = agent.engine(small());
    let accounts = std::mem::take(&mut *books.lock());
    let tried: Vec<u64> = accounts.tried.iter().copied().collect();
    let durable: Vec<u64> = accounts.durable.iter().copied().collect();
    let mut found = BTreeSet::new();
    for numbers in tried.chunks(LOAD_BLOCKS) {
        let outcomes = engine.load(numbers, &Loading::LOCAL).expect("a load of a fresh agent");
        for (number, outcome) in numbers.iter().zip(outcomes) {
            match outcome {
                Outcome::Right(source) => {
                    assert_eq!(source, Source::OwnNvme, "the DRAM of a killed agent is gone");
                    found.insert(*number);
                }
                Outcome::Missing(BlockStatus::Miss) => {}
                other => panic!("block {number} is neither right nor a clean miss: {other:?}"),
            }
        }
    }
    let lost: BTreeSet<u64> = accounts.durable.difference(&found).copied().collect();
    if lost.is_empty() {
        let matched = engine.matches(&durable, Scope::Local);
        assert_eq!(matched.len(), durable.len(), "what loads is found by match");
    }
    drop(engine);
    assert_no_leak(agent, found.len() as u64);
    let (touched, recent) = (accounts.touched.len(), accounts.recent);
    *books.lock() = Accounts { tried: found.clone(), durable: found.clone(), ..Accounts::default() };
    Survivors { found, lost, recent, touched }
}

/// Every slot in use holds a block that is found.
fn assert_no_leak(agent: &Agent, blocks: u64) {
    let counters = agent.admin().wait_quiet(PATIENCE);
    assert_eq!(counters.get("nvme_blocks"), blocks, "blocks on the device");
    assert_eq!(counters.get("pool_used_bytes"), blocks * device_slot_bytes(&small()), "bytes of their slots");
    let in_dram = counters.get("dram_blocks") * small().slot_bytes();
    assert_eq!(counters.get("arena_used_bytes"), in_dram, "bytes of slots in the arena");
    assert_eq!(counters.get("pool_quarantined_slots"), 0, "a kill damages nothing");
    assert_eq!(counters.get("corrupt_blocks"), 0, "a kill damages nothing");
}

/// Saves fresh blocks until the pool evicts; how many it held before that.
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
        // Few at a time near the end, since what is saved beside the first eviction counts, too.
        let is_near = counters.get("pool_free_bytes") * 8 < counters.get("pool_capacity_bytes");
        let count = if is_near { FILL_BLOCKS_NEAR_THE_END } else { 64 };
        let numbers: Vec<u64> = (number..number + count).collect();
        engine.save_durably(&numbers);
        number += count;
        assert!(number - from < 100_000, "a pool that never fills");
    }
}

fn config(pool: ByteSize) -> AgentConfig {
    AgentConfig {
        pool: Some(pool),
        writeback_delay: Duration::from_millis(5),
        ..AgentConfig::named("victim")
    }
}

/// What a pool that was never killed holds when it is full.
fn capacity(world: &World, pool: ByteSize) -> u64 {
    let mut agent = world.agent(&AgentConfig { node: "fresh".to_owned(), ..config(pool) });
    let blocks = fill_up(&agent, 0);
    agent.stop();
    blocks
}

#[test]
fn blocks_announced_durable_survive_a_kill_at_any_moment() {
    let world = World::new();
    let mut rng = seeded("kill");
    let capacity = capacity(&world, POOL);
    assert!(capacity > BLOCKS_PER_PHASE, "a pool of {POOL} holds {capacity} blocks");
    let (mut kills, mut survived, mut unannounced) = (0, 0, 0);
    for phase in 0..PHASES {
        let mut agent = world.agent(&AgentConfig { node: format!("victim-{phase}"), ..config(POOL) });
        let books = Books::new(BLOCKS_PER_PHASE);
        let mut killed = 0;
        while killed < KILLS_PER_PHASE {
            run_and_kill(&mut agent, &books, &mut rng);
            let announced = books.lock().durable.len();
            killed += 1 + start_again(&mut agent, &mut rng);
            let survivors = take_stock(&agent, &books);
            assert_eq!(survivors.lost, BTreeSet::new(), "durable blocks that a kill has lost");
            survived += announced;
            unannounced += survivors.found.len() - announced;
        }
        kills += killed;
        let full = fill_up(&agent, 1_000_000);
        assert!(full + SLACK_BLOCKS >= capacity, "slots have leaked: {full} blocks fit, not {capacity}");
        agent.stop();
        std::fs::remove_file(&agent.files().pool).expect("a stopped agent's pool can be removed");
    }
    say(&format!(
        "{kills} kills; {survived} times a durable block was found again, {unannounced} times another one"
    ));
    assert!(survived > 1000, "the kills hit an agent that has saved something");
    assert!(unannounced > 0, "no kill came between the journal and the notice");
}

#[test]
fn a_pool_that_evicts_survives_a_kill_at_any_moment() {
    let world = World::new();
    let mut rng = seeded("kill while evicting");
    let capacity = capacity(&world, SMALL_POOL);
    let mut agent = world.agent(&config(SMALL_POOL));
    let books = Books::new(u64::MAX);
    let (mut runs, mut kills, mut full, mut checked) = (0, 0, 0, 0);
    while kills < KILLS_WHILE_EVICTING {
        // However fast this machine is, in every other run little enough is used to tell what may not be gone.
        let calm = (capacity / 2) as usize - MARGIN_BLOCKS;
        books.touched_max.store(if runs % 2 == 0 { calm } else { usize::MAX }, Ordering::Relaxed);
        runs += 1;
        run_and_kill(&mut agent, &books, &mut rng);
        kills += 1 + start_again(&mut agent, &mut rng);
        let survivors = take_stock(&agent, &books);
        let found = survivors.found.len() as u64;
        assert!(found <= capacity, "more blocks than slots");
        // Evicted is what was used longest ago: while there is enough of that, what was saved last must be there.
        if survivors.touched as u64 * 2 <= capacity {
            let gone: Vec<&u64> = survivors.recent.intersection(&survivors.lost).collect();
            assert!(gone.is_empty(), "just announced as durable, and gone: {gone:?}");
            checked += survivors.recent.len();
        }
        if !survivors.lost.is_empty() {
            full += 1;
            // An agent frees a few per cent ahead, and up to 64 blocks when a size class has no slot.
            assert!(found * 4 >= capacity * 3, "only {found} of {capacity} slots are in use");
        }
    }
    let holds = fill_up(&agent, 1 << 40);
    assert!(holds + SLACK_BLOCKS >= capacity, "slots have leaked: {holds} blocks fit, not {capacity}");
    agent.stop();
    say(&format!("{kills} kills, {full} of a pool that had evicted; {checked} recent blocks found again"));
    assert!(full * 2 > kills / 2, "the pool evicts most of the time");
    assert!(checked >= CHECKED_MIN, "only {checked} recent blocks were looked for");
}
