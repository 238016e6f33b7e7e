//! Loads in layer order next to saves, with the agent's writes at once and in the slack of layers (Tutti, figure 6).
//!
//! ```text
//!  step:  commit ── load, layer by layer ── compute (no reads) ── next step
//!  coupled:    writes start with the loads, and share the device with them
//!  decoupled:  the engine reports its computation: writes wait for the loads, then fill the windows
//! ```
//!
//! Both modes run the same steps against one agent and one pool file; they alternate in each round. A round ends when
//! all of its blocks are durable. The computation is a pause, so that the benchmark needs no GPU. The agent's counters
//! show which path the writes took.

use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use reprise_client::{Client, LoadRequest, Scope, Source};
use reprise_policy::BlockKey;
use reprise_policy::session::LayerReport;
use reprise_policy::slack::content::TOKENS_MAX;
use reprise_policy::slack::{
    Computation, Content, Fallback, KernelTime, Measurement, Phase, Profile, Subject, Window,
};

use reprise_testkit::bench::fixture::{self, PATIENCE, fill, keys, payload, sizes};
use reprise_testkit::bench::report::{Figure, Paired, Target, median};
use reprise_testkit::bench::{Settings, llama_3_8b};
use reprise_testkit::cluster::{Cluster, ControlPlanes};

/// Steps of a round.
const STEPS: usize = 8;

/// Blocks that each step loads: 32 MiB.
const LOAD_BLOCKS: usize = 16;

/// Blocks that each step saves: 16 MiB.
const SAVE_BLOCKS: usize = 8;

/// Bytes of a block.
const BLOCK_BYTES: u32 = 2 << 20;

/// Bytes of an object, which is one read.
const OBJECT_BYTES: u64 = 32 << 10;

/// Computation of a step after its loads.
const COMPUTE: Duration = Duration::from_millis(40);

/// Time of one emulated layer, whose window admits the blocks of one step.
const LAYER_MICROS: u32 = 10_000;

/// Arena of the agent: far more than a round has unsaved, so that memory never forces writes.
pub(super) const ARENA_MIB: u64 = 640;

/// Pool of the agent: the loaded blocks, and those of the last rounds.
pub(super) const POOL_MIB: u64 = 1536;

/// Model of the profile, and a model without one.
const MODEL: &str = "bench";
const OTHER_MODEL: &str = "without-profile";

/// Whether the engine reports computations for which the agent has a profile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mode {
    Coupled,
    Decoupled,
}

/// Measurement of one round.
#[derive(Clone, Copy, Debug)]
struct Round {
    /// Median time from the begin of a load until one of its layers is readable, in milliseconds.
    p50_ms: f64,
    p99_ms: f64,
    /// Loaded bytes per second of loading.
    read_gbps: f64,
    /// Loaded and saved bytes per second of the round.
    total_gbps: f64,
}

pub(super) fn run(settings: &Settings) -> anyhow::Result<Vec<Figure>> {
    let layout = llama_3_8b();
    let mut cluster = Cluster::start_controlplane(&settings.directory, ControlPlanes::Embedded)?;
    let path = settings.directory.join("bench-profile.json");
    let text = serde_json::to_string(profile()?.content()).context("encoding the profile")?;
    std::fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))?;
    // Writes are due at once, and wait for slack longer than any load takes.
    let profiles = serde_json::to_string(&[&path]).context("encoding the path of the profile")?;
    cluster.configure_agents(&format!(
        "slack.profiles = {profiles}\nwriteback.delay = \"1ms\"\nwriteback.slack_delay = \"20s\""
    ));
    cluster.start_agents(1, sizes(ARENA_MIB, POOL_MIB))?;
    let client = fixture::connect(&cluster.file().agents[0].socket, &layout)?;
    let cold = keys(1, STEPS * LOAD_BLOCKS);
    let engine = Engine { client, payload: payload(&layout), cold };
    fixture::save_durable(&engine.client, &engine.cold, STEPS * SAVE_BLOCKS, &engine.payload)?;
    engine.measure(settings)
}

/// Returns a profile with one window for all lengths, in both phases.
fn profile() -> anyhow::Result<Profile> {
    let window = |phase| Window {
        phase,
        min_input_tokens: 0,
        max_input_tokens: TOKENS_MAX,
        min_prefix_tokens: 0,
        max_prefix_tokens: TOKENS_MAX,
        layer_micros: LAYER_MICROS,
        slack_micros: LAYER_MICROS,
        free_sms: 1,
    };
    let kernel = KernelTime { iocbs: SAVE_BLOCKS as u32, micros: LAYER_MICROS, sms: 1 };
    let content = Content {
        subject: Subject {
            model: MODEL.to_owned(),
            gpu_product: "none".to_owned(),
            tensor_parallel: 1,
            engine_version: "bench".to_owned(),
        },
        usable_percent: 100,
        fallback: Fallback::ThrottleWrites,
        max_error_percent: 100,
        measurement: Measurement {
            step_tokens: 1,
            iocb_bytes: BLOCK_BYTES,
            windows: vec![window(Phase::Prefill), window(Phase::Decode)],
            reads: vec![kernel],
            writes: vec![kernel],
        },
    };
    Profile::new(content).context("the profile of the benchmark")
}

/// Emulated engine with its session and blocks.
struct Engine {
    client: Client,
    payload: Vec<u8>,
    /// Blocks that each round loads.
    cold: Vec<BlockKey>,
}

impl Engine {
    fn measure(&self, settings: &Settings) -> anyhow::Result<Vec<Figure>> {
        self.round(Mode::Coupled, 0)?;
        self.round(Mode::Decoupled, 1)?;
        let (mut coupled, mut decoupled) = (Vec::new(), Vec::new());
        let before = self.written_in_windows()?;
        for number in (2..).step_by(2).zip(settings.rounds("slack.layer_p99")).map(|(number, _)| number) {
            coupled.push(self.round(Mode::Coupled, number)?);
            decoupled.push(self.round(Mode::Decoupled, number + 1)?);
        }
        let in_windows = (self.written_in_windows()? - before) as f64;
        let share = in_windows / (decoupled.len() * STEPS * SAVE_BLOCKS) as f64;
        let figure = |name, unit, of: fn(&Round) -> f64| {
            let values = |rounds: &[Round]| rounds.iter().map(of).collect::<Vec<f64>>();
            let (reference, subject) = (values(&coupled), values(&decoupled));
            let ratios = reference.iter().zip(&subject).map(|(reference, subject)| subject / reference);
            let ratio = median(ratios.collect());
            let paired = Paired { reference: median(reference), subject: median(subject), ratio };
            Figure::relative(name, paired, unit, ("the same steps with writes at once", Target::None))
        };
        Ok(vec![
            figure("slack.layer_p50", "ms", |round| round.p50_ms),
            figure("slack.layer_p99", "ms", |round| round.p99_ms),
            figure("slack.read", "GB/s", |round| round.read_gbps),
            figure("slack.read_and_write", "GB/s", |round| round.total_gbps),
            Figure::absolute("slack.written_in_windows", 100.0 * share, "%", Target::None),
        ])
    }

    /// Runs the steps of one round, whose saved blocks have their own keys.
    fn round(&self, mode: Mode, number: u64) -> anyhow::Result<Round> {
        self.client.trim().context("trim")?;
        let saved = keys(1000 + number, STEPS * SAVE_BLOCKS);
        let before = self.written_in_windows()?;
        let (mut layers, mut loading, mut tickets) = (Vec::new(), Duration::ZERO, Vec::new());
        let started = Instant::now();
        for (cold, saved) in self.cold.chunks(LOAD_BLOCKS).zip(saved.chunks(SAVE_BLOCKS)) {
            let filled = fill(&self.client, saved, &self.payload)?;
            self.report(mode)?;
            tickets.push(fixture::commit(&self.client, filled)?);
            loading += self.load(cold, &mut layers)?;
            std::thread::sleep(COMPUTE);
        }
        for ticket in tickets {
            let outcome = self.client.wait_durable(ticket, PATIENCE).context("waiting until durable")?;
            ensure!(outcome.lost_keys.is_empty(), "{} blocks were lost", outcome.lost_keys.len());
        }
        let took = started.elapsed();
        let in_windows = self.written_in_windows()? - before;
        ensure!((in_windows > 0) == (mode == Mode::Decoupled), "{mode:?}: {in_windows} blocks in windows");
        layers.sort_by(f64::total_cmp);
        let quantile = |percent: usize| layers[(layers.len() - 1) * percent / 100];
        let bytes = |keys: &[BlockKey]| keys.len() as f64 * f64::from(BLOCK_BYTES);
        Ok(Round {
            p50_ms: quantile(50),
            p99_ms: quantile(99),
            read_gbps: bytes(&self.cold) / loading.as_secs_f64() / 1e9,
            total_gbps: (bytes(&self.cold) + bytes(&saved)) / took.as_secs_f64() / 1e9,
        })
    }

    /// Reports the computation of a step.
    fn report(&self, mode: Mode) -> anyhow::Result<()> {
        let model = if mode == Mode::Decoupled { MODEL } else { OTHER_MODEL };
        let computation = Computation { phase: Phase::Prefill, input_tokens: 512, prefix_tokens: 4096 };
        let report = LayerReport {
            model: model.to_owned(),
            computation: Some(computation),
            previous_layer_micros: None,
        };
        let guidance = self.client.report_layer(&report).context("report layer")?;
        ensure!((guidance.write_iocbs > 0) == (mode == Mode::Decoupled), "{mode:?}: {guidance:?}");
        Ok(())
    }

    /// Loads blocks in layer order. Returns the time, and appends the milliseconds after which each layer was
    /// readable.
    fn load(&self, keys: &[BlockKey], layers: &mut Vec<f64>) -> anyhow::Result<Duration> {
        let (deadline, read_bytes, scope) = (PATIENCE, OBJECT_BYTES, Scope::Local);
        let request = LoadRequest { keys: keys.to_vec(), deadline, read_bytes, scope, inputs: None };
        let started = Instant::now();
        let load = self.client.load(&request).context("load")?;
        for layer in 0..self.client.layout().layers() {
            load.wait_layer(layer, PATIENCE).context("waiting for a layer")?;
            layers.push(started.elapsed().as_secs_f64() * 1e3);
        }
        let took = started.elapsed();
        let cold = load.blocks().iter().filter(|block| block.source() == Some(Source::OwnNvme)).count();
        ensure!(cold == keys.len(), "{cold} of {} blocks came from the device", keys.len());
        Ok(took)
    }

    /// Returns the number of blocks that the agent has written in windows so far.
    fn written_in_windows(&self) -> anyhow::Result<u64> {
        let stats = self.client.stats().context("stats")?;
        let in_windows = ["writeback_slack_blocks", "writeback_decode_blocks"];
        let counted = stats.iter().filter(|(name, _)| in_windows.contains(&name.as_str()));
        Ok(counted.map(|(_, value)| value).sum())
    }
}
