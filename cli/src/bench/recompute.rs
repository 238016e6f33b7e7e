//! Hits that are slower than computing their blocks by more than the bound (ADR 14), at every source under load.
//!
//! ```text
//! engine:  match ─▶ policy: leading blocks to load, limit ─▶ load ─▶ compute the rest (emulated) ─▶ slower?
//! ```
//!
//! Four engines on one node run at the same time, with computations of different speeds, each with its own policy and
//! transfers. Their prefixes are on their node and on another one, three times as many as fit into the DRAM of each. So
//! blocks come from DRAM and NVMe of both nodes. A writer saves blocks meanwhile.
//!
//! The computation is emulated: the engine sleeps for the time that it takes by its rate. A hit takes the time until its
//! load has ended, as measured, and the time of computing the missing blocks by that rate. Without the policy, a tenth as
//! many hits load everything without a limit.
//!
//! Then one engine loads a longer prefix from NVMe, in two windows of the client. The limit of the wait would end within
//! the second one, and grows when the first has arrived: no block may be missing.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow, ensure};
use reprise_client::{
    Client, ConnectOptions, LoadOptions, LoadedBlocks, Outcome, PagedMemory, PhysicalBlock, Scope,
    SessionKeeper, Source, TransferOptions, Transfers,
};
use reprise_policy::recompute::{
    BlockSize, Chain, EndedLoad, LoadPolicy, Reason, SourceCounts, Step, WaitBound, WaitLimit,
};
use reprise_policy::{BlockKey, Layout, Tick};
use reprise_testkit::bench::fixture::{self, Fixture, PATIENCE, keys, payload, sizes};
use reprise_testkit::bench::report::{Figure, Target};
use reprise_testkit::bench::{Settings, quarter_mib};
use reprise_testkit::{engine, kv_function::mix};

/// Sizes of each agent. The prefixes of a node take 192 MiB.
pub(super) const ARENA_MIB: u64 = 64;
pub(super) const POOL_MIB: u64 = 1024;

/// Blocks of a prefix; of each, an engine finds between 1 and all.
const PREFIX_BLOCKS: usize = 16;

/// Prefixes of each node.
const PREFIXES: usize = 48;

/// Blocks of a longer prefix, and of the first of its two windows of 32 MiB.
const LONG_BLOCKS: usize = 224;
const WINDOW_BLOCKS: usize = 128;

/// Loads of the longer prefix, and the time of the computation of one of its blocks.
const LONG_LOADS: usize = 8;
const LONG_BLOCK_TIME: Duration = Duration::from_millis(10);

/// Seconds of a token in each engine, and of a token for each one before it.
const ENGINES: [(f64, f64); 4] = [(5e-6, 1e-10), (5e-5, 1e-9), (1e-4, 1e-9), (5e-4, 1e-9)];

/// Largest number of tokens before a prefix.
const CONTEXT_MAX: u64 = 4096;

/// Bound of the wait: the default of the engines' adapters.
const BOUND: WaitBound = WaitBound {
    cap: Duration::from_secs(1),
    base: Duration::from_millis(50),
    per_token: Duration::from_micros(100),
};

/// Blocks that the writer saves at a time, and its pause.
const WRITTEN_BLOCKS: usize = 4;
const WRITER_PAUSE: Duration = Duration::from_millis(100);

/// Time limit of an engine.
const TIME_MAX: Duration = Duration::from_secs(600);

/// Whether the policy decides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mode {
    Off,
    On,
}

/// Memory of an engine, one lock for each block.
#[derive(Debug)]
struct EngineMemory {
    layout: Layout,
    blocks: Vec<Mutex<Vec<u8>>>,
}

/// Results of an engine.
#[derive(Clone, Copy, Debug, Default)]
struct Counted {
    hits: u64,
    /// Hits whose chain has blocks of each source.
    by_source: [u64; 4],
    slower: u64,
    slower_by_source: [u64; 4],
    computed: u64,
    parts: u64,
    /// Largest time that a hit took longer than computing, in seconds.
    excess_max: f64,
}

/// Loads of the longer prefix whose first window has arrived.
#[derive(Clone, Copy, Debug, Default)]
struct LongLoads {
    loads: u64,
    /// Loads that have lost blocks of the second window.
    cut: u64,
}

/// An emulated engine with its own session.
struct Engine<'a> {
    client: Client,
    transfers: Transfers,
    policy: LoadPolicy,
    rate: (f64, f64),
    prefixes: &'a [Vec<BlockKey>],
    began: Instant,
    random: u64,
    counted: Counted,
}

/// Result of a load.
struct Ended {
    loaded: LoadedBlocks,
    seconds: f64,
    ran: f64,
}

pub(super) fn run(hits: usize, settings: &Settings) -> anyhow::Result<Vec<Figure>> {
    ensure!(hits >= ENGINES.len(), "invalid --hits {hits}: expected at least {}", ENGINES.len());
    let layout = quarter_mib();
    let fixture = Fixture::start(settings, 2, &layout, sizes(ARENA_MIB, POOL_MIB))?;
    let mut prefixes = Vec::new();
    for (node, client) in fixture.clients.iter().enumerate() {
        for prefix in 0..PREFIXES {
            let prefix = keys(1 + (node * PREFIXES + prefix) as u64, PREFIX_BLOCKS);
            fixture::save_durable(client, &prefix, PREFIX_BLOCKS, &payload(&layout))?;
            prefixes.push(prefix);
        }
    }
    let socket = &fixture.cluster.file().agents[0].socket;
    let load = |mode, hits| under_load(&fixture.clients[0], mode, || engines(socket, &prefixes, mode, hits));
    let off = load(Mode::Off, hits.div_ceil(10))?;
    let on = load(Mode::On, hits)?;
    let mut figures = figures(&on, &off);
    let long = long_loads(&fixture.clients[0], socket)?;
    figures.push(Figure::absolute("recompute.long_loads", long.loads as f64, "loads", Target::None));
    figures.push(Figure::absolute("recompute.long_loads_cut", long.cut as f64, "loads", Target::AtMost(0.0)));
    Ok(figures)
}

/// Loads the longer prefix with a limit that the second window reaches, if the first does not extend it.
fn long_loads(client: &Client, socket: &Path) -> anyhow::Result<LongLoads> {
    let prefix = keys(1 << 22, LONG_BLOCKS);
    fixture::save_durable(client, &prefix, PREFIX_BLOCKS, &payload(client.layout()))?;
    let engine = Engine::start(socket, &[], ENGINES[0], 0)?;
    let mut counted = LongLoads::default();
    for _ in 0..LONG_LOADS {
        client.trim().context("trim")?;
        let first = engine.load(&prefix[..WINDOW_BLOCKS], None)?.seconds;
        client.trim().context("trim")?;
        let limit = WaitLimit { bound: Duration::from_secs_f64(1.25 * first), per_block: LONG_BLOCK_TIME };
        let leading = engine.load(&prefix, Some(limit))?.loaded.leading();
        counted.loads += u64::from(leading >= WINDOW_BLOCKS);
        counted.cut += u64::from((WINDOW_BLOCKS..LONG_BLOCKS).contains(&leading));
    }
    Ok(counted)
}

fn figures(on: &Counted, off: &Counted) -> Vec<Figure> {
    let count = |name: &str, value: u64| Figure::absolute(name, value as f64, "hits", Target::None);
    let mut figures = vec![
        Figure::absolute("recompute.slower_hits", on.slower as f64, "hits", Target::AtMost(0.0)),
        count("recompute.hits", on.hits),
    ];
    for (at, source) in ["own_dram", "own_nvme", "peer_dram", "peer_nvme"].into_iter().enumerate() {
        figures.push(count(&format!("recompute.hits_{source}"), on.by_source[at]));
        figures.push(count(&format!("recompute.slower_hits_{source}"), on.slower_by_source[at]));
    }
    figures.push(count("recompute.hits_computed", on.computed));
    figures.push(count("recompute.hits_loaded_in_part", on.parts));
    let millis = |name: &str, seconds: f64| Figure::absolute(name, seconds * 1e3, "ms", Target::None);
    figures.push(millis("recompute.excess_max", on.excess_max));
    figures.push(count("recompute.slower_hits_off", off.slower));
    figures.push(count("recompute.hits_off", off.hits));
    figures.push(millis("recompute.excess_max_off", off.excess_max));
    figures
}

/// Measures while a writer saves blocks.
fn under_load(
    writer: &Client,
    mode: Mode,
    measure: impl FnOnce() -> anyhow::Result<Counted>,
) -> anyhow::Result<Counted> {
    let (done, payload) = (AtomicBool::new(false), payload(writer.layout()));
    let first = if mode == Mode::On { 1 << 20 } else { 1 << 21 };
    thread::scope(|scope| {
        let saves = scope.spawn(|| {
            for round in first.. {
                if done.load(Ordering::Relaxed) {
                    break;
                }
                let keys = keys(round, WRITTEN_BLOCKS);
                fixture::commit(writer, fixture::fill(writer, &keys, &payload)?)?;
                thread::sleep(WRITER_PAUSE);
            }
            anyhow::Ok(())
        });
        let counted = measure();
        done.store(true, Ordering::Relaxed);
        saves.join().map_err(|_| anyhow!("the writer panicked"))?.context("saving blocks")?;
        counted
    })
}

/// Runs all engines at the same time; returns the sum of their results.
fn engines(socket: &Path, prefixes: &[Vec<BlockKey>], mode: Mode, hits: usize) -> anyhow::Result<Counted> {
    thread::scope(|scope| {
        let engines: Vec<_> = ENGINES
            .iter()
            .enumerate()
            .map(|(number, rate)| {
                let hits = hits / ENGINES.len() + usize::from(number < hits % ENGINES.len());
                scope.spawn(move || {
                    let mut engine = Engine::start(socket, prefixes, *rate, number as u64)?;
                    while engine.counted.hits < hits as u64 {
                        ensure!(
                            engine.began.elapsed() < TIME_MAX,
                            "{:?} within {TIME_MAX:?}",
                            engine.counted
                        );
                        engine.request(mode)?;
                    }
                    anyhow::Ok(engine.counted)
                })
            })
            .collect();
        let mut all = Counted::default();
        for engine in engines {
            all.add(&engine.join().map_err(|_| anyhow!("an engine panicked"))??);
        }
        Ok(all)
    })
}

impl<'a> Engine<'a> {
    fn start(
        socket: &Path,
        prefixes: &'a [Vec<BlockKey>],
        rate: (f64, f64),
        seed: u64,
    ) -> anyhow::Result<Engine<'a>> {
        let layout = quarter_mib();
        let client = fixture::connect(socket, &layout)?;
        let namespace = engine::namespace(&layout);
        let options = ConnectOptions::new(socket, namespace, layout).client_name("engine");
        let keeper = SessionKeeper::new(options).context("a session")?;
        ensure!(keeper.wait_until_connected(PATIENCE), "no session: {:?}", keeper.status());
        let blocks = (0..PREFIX_BLOCKS).map(|_| Mutex::new(vec![0; block_bytes(&layout)])).collect();
        let load = LoadOptions { deadline: PATIENCE, ..LoadOptions::default() };
        let options = TransferOptions { load, ..TransferOptions::default() };
        let transfers = Transfers::new(Arc::new(keeper), Arc::new(EngineMemory { layout, blocks }), options)?;
        let block = BlockSize { tokens: layout.spec().tokens_per_block.into(), bytes: layout.block_bytes() };
        let (policy, counted) = (LoadPolicy::new(BOUND, block), Counted::default());
        let mut engine = Engine {
            client,
            transfers,
            policy,
            rate,
            prefixes,
            began: Instant::now(),
            random: seed,
            counted,
        };
        // The prompts that an engine has computed before, of two lengths.
        for (prefix, tokens) in [(0, 1024), (CONTEXT_MAX, 1024)] {
            engine.note_step(prefix, tokens);
        }
        Ok(engine)
    }

    /// Serves a request; counts it as a hit if a block of its prefix is found.
    fn request(&mut self, mode: Mode) -> anyhow::Result<()> {
        let prefix = &self.prefixes[self.next(self.prefixes.len() as u64) as usize];
        let found = 1 + self.next(PREFIX_BLOCKS as u64) as usize;
        let context = self.next(CONTEXT_MAX);
        let sources = self.client.match_keys(&prefix[..found], Scope::Cluster).context("match")?;
        if sources.is_empty() {
            return Ok(());
        }
        let chain = Chain { sources: &sources, prefix_tokens: context, is_computing: false };
        let decision = self.policy.decide(&chain, self.now());
        let blocks = if mode == Mode::On { decision.blocks as usize } else { sources.len() };
        let (mut seconds, mut leading) = (0.0, 0);
        if blocks > 0 {
            self.policy.load_started(&decision.requested, self.now());
            let limit = decision.limit.filter(|_| mode == Mode::On);
            let ended = self.load(&prefix[..blocks], limit)?;
            let loaded = counts(ended.loaded.sources.iter().flatten());
            let sample = EndedLoad { requested: decision.requested, loaded, seconds: ended.ran };
            if ended.ran > 0.0 && mode == Mode::On {
                self.policy.observe_load(&sample, self.now());
            }
            self.policy.load_ended(&decision.requested);
            (seconds, leading) = (ended.seconds, ended.loaded.leading());
        }
        let tokens = self.client.layout().tokens();
        let computed = tokens * (sources.len() - leading) as u64;
        let rest = self.compute(context + tokens * leading as u64, computed);
        thread::sleep(Duration::from_secs_f64(rest));
        let excess = seconds + rest - self.compute(context, tokens * sources.len() as u64);
        let bound = BOUND.of_tokens(tokens * blocks as u64).as_secs_f64();
        self.counted.note(&sources, excess, bound);
        self.counted.computed += u64::from(mode == Mode::On && decision.reason == Reason::Compute);
        self.counted.parts += u64::from(mode == Mode::On && decision.reason == Reason::Part);
        Ok(())
    }

    fn load(&self, keys: &[BlockKey], limit: Option<WaitLimit>) -> anyhow::Result<Ended> {
        // Nothing reads the blocks, so those of a long prefix share their places.
        let places = (0..PREFIX_BLOCKS).cycle().map(PhysicalBlock);
        let blocks = keys.iter().copied().zip(places).collect();
        let submitted = Instant::now();
        let id = match limit {
            Some(limit) => self.transfers.submit_load_within(blocks, limit),
            None => self.transfers.submit_load(blocks),
        };
        ensure!(self.transfers.wait(&[id.context("load")?], 2 * PATIENCE), "a load did not end");
        let seconds = submitted.elapsed().as_secs_f64();
        let finished = self.transfers.finished().pop().context("a finished load")?;
        let ran = finished.ran.as_secs_f64();
        match finished.outcome {
            Outcome::Loaded(loaded) => Ok(Ended { loaded, seconds, ran }),
            Outcome::Saved(_) => Err(anyhow!("a load ended as a save")),
        }
    }

    /// Seconds of computing tokens behind a prefix.
    fn compute(&self, prefix: u64, tokens: u64) -> f64 {
        let (token, per_context) = self.rate;
        tokens as f64 * (token + per_context * (prefix as f64 + tokens as f64 / 2.0))
    }

    fn note_step(&mut self, prefix: u64, tokens: u64) {
        let (context, seconds) = (prefix as f64 + tokens as f64 / 2.0, self.compute(prefix, tokens));
        self.policy.observe_step(&Step { tokens, context, seconds });
    }

    fn now(&self) -> Tick {
        Tick::default().after(self.began.elapsed())
    }

    /// Next number below a limit, from a fixed sequence.
    fn next(&mut self, limit: u64) -> u64 {
        self.random = self.random.wrapping_add(4);
        mix(self.random) % limit
    }
}

impl Counted {
    fn note(&mut self, sources: &[Source], excess: f64, bound: f64) {
        let is_slower = excess > bound;
        self.hits += 1;
        self.slower += u64::from(is_slower);
        self.excess_max = self.excess_max.max(excess);
        for (at, count) in counts(sources).into_iter().enumerate() {
            self.by_source[at] += u64::from(count > 0);
            self.slower_by_source[at] += u64::from(count > 0 && is_slower);
        }
    }

    fn add(&mut self, other: &Counted) {
        self.hits += other.hits;
        self.slower += other.slower;
        self.computed += other.computed;
        self.parts += other.parts;
        self.excess_max = self.excess_max.max(other.excess_max);
        for at in 0..4 {
            self.by_source[at] += other.by_source[at];
            self.slower_by_source[at] += other.slower_by_source[at];
        }
    }
}

impl PagedMemory for EngineMemory {
    fn layout(&self) -> &Layout {
        &self.layout
    }

    fn blocks(&self) -> usize {
        self.blocks.len()
    }

    fn read_object(&self, block: PhysicalBlock, object: u32, read: &mut dyn FnMut(&[u8])) {
        self.with_object(block, object, |bytes| read(bytes));
    }

    fn write_object(&self, block: PhysicalBlock, object: u32, write: &mut dyn FnMut(&mut [u8])) {
        self.with_object(block, object, write);
    }
}

impl EngineMemory {
    fn with_object(&self, block: PhysicalBlock, object: u32, act: impl FnOnce(&mut [u8])) {
        let mut bytes = self.blocks[block.0].lock().unwrap_or_else(PoisonError::into_inner);
        let size = bytes.len() / self.layout.objects() as usize;
        act(&mut bytes[object as usize * size..][..size]);
    }
}

fn block_bytes(layout: &Layout) -> usize {
    usize::try_from(layout.block_bytes()).expect("blocks fit in memory")
}

fn counts<'a>(sources: impl IntoIterator<Item = &'a Source>) -> SourceCounts {
    let mut counts = SourceCounts::default();
    for source in sources {
        counts[*source as usize - 1] += 1;
    }
    counts
}
