//! A trace, served by production cores on hardware of a profile.

use std::collections::{BTreeMap, BTreeSet};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use reprise_agent_core::Settings;
use reprise_agent_core::limits::MATCH_KEYS_MAX;
use reprise_policy::admission::AdmissionMode;
use reprise_policy::eviction::EvictionPolicy;
use reprise_policy::{Layout, SessionId, TenantId, Tick};

use super::Timed;
use super::channels::{Channels, Path};
use super::serving::{Outcome, ServeStep, Serving, Turn};
use crate::audit::finish;
use crate::disk::Disk;
use crate::environment::Environment;
use crate::panic_message;
use crate::replay::Trace;
use crate::rng::mix;
use crate::scale::is_whole;
use crate::serving::channel::Totals;
use crate::serving::costs::Costs;
use crate::serving::profiles::{Hardware, Model};
use crate::setup::{LOOKUP_TIMEOUT, Limits, Setup, trace_key};
use crate::simulation::{Action, Simulation};
use crate::trace::Recording;

/// Bytes of a region of the arena, and of a segment of a pool: the agent's defaults.
const REGION_BYTES: u64 = 256 << 20;
const SEGMENT_BYTES: u64 = 64 << 20;
const SEGMENT_ALIGNMENT: u64 = 2 << 20;
/// Bytes of the header page of a block on a device.
const HEADER_BYTES: u64 = 4096;
/// Share of the accelerator's memory for weights and KV cache: vLLM's default.
const MEMORY_SHARE: f64 = 0.9;
/// Maximum time until all members know all nodes, and until requests end after the last arrival.
const START_MAX: Duration = Duration::from_secs(60);
const REST_MAX: Duration = Duration::from_secs(6 * 3600);
/// Interval of the checks whether all requests have ended.
const POLL_EVERY: Duration = Duration::from_secs(1);

/// What serves a trace.
#[derive(Clone, Debug)]
pub struct CoreSettings {
    /// Number of nodes, each with an agent and an engine.
    pub nodes: u16,
    /// Number of members of the control plane.
    pub members: u16,
    /// Hardware of a node.
    pub hardware: Hardware,
    /// Model of all engines.
    pub model: Model,
    /// DRAM of a node in blocks; rounded up to whole regions.
    pub dram_blocks: u64,
    /// NVMe of a node in blocks; rounded up to whole segments; 0: none.
    pub nvme_blocks: u64,
    /// Eviction policy of both tiers.
    pub policy: EvictionPolicy,
    /// Admission to NVMe.
    pub admission: AdmissionMode,
    /// Bytes per second for replicas that agents place on other nodes; 0: none.
    pub placement_bandwidth: u64,
    /// Seed of the delays of calls and of the clocks.
    pub seed: u64,
}

/// Number of checks that a run has passed, by kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Checks {
    /// Audits of the whole state of a core.
    pub audits: u64,
    /// Answers to lookups: the member may answer, names only nodes that live, and claims no knowledge that it lacks.
    pub lookups: u64,
    /// Blocks that engines have read and compared with their committed content.
    pub blocks_read: u64,
    /// Pieces of blocks that agents have received from peers and compared.
    pub pieces_received: u64,
    /// Answers to requests for the targets of further replicas.
    pub placements: u64,
    /// Replicas of the directory at the end, which are those that the agents have.
    pub replicas: u64,
}

/// Why a trace was not served to its end.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CoresError {
    /// Trace or settings are not possible; with the remedy.
    #[error("{0}")]
    Impossible(String),
    /// The first violated invariant.
    #[error("{0}")]
    Violation(String),
}

/// Result of a run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CoreReplay {
    /// Number of requests.
    pub requests: u64,
    /// Blocks of all prompts.
    pub references: u64,
    /// Loaded blocks by source: own DRAM, own NVMe, DRAM of peers, NVMe of peers.
    pub hits: [u64; 4],
    /// Blocks that were found and could not be loaded.
    pub unloaded: u64,
    /// Blocks that found no slot in time.
    pub unsaved: u64,
    /// Sorted times to the first token, in microseconds.
    pub first_tokens: Vec<u64>,
    /// Sorted times for each further token, in microseconds, one for each request.
    pub other_tokens: Vec<u64>,
    /// Totals of channels over all nodes.
    pub channels: Vec<(Path, Totals)>,
    /// Capacity of a node in blocks: DRAM and NVMe.
    pub capacity: [u64; 2],
    /// Simulated time from the first arrival to the end of the last request.
    pub elapsed: Duration,
    /// Steps of all accelerators.
    pub steps: u64,
    /// Actions of the simulation.
    pub events: u64,
    /// Digest of all actions: equal for equal arguments.
    pub digest: u64,
    /// Occurrences by name, and counters of the cores.
    pub seen: BTreeMap<&'static str, u64>,
    /// Checks that the run has passed.
    pub checks: Checks,
}

/// Serves a trace and checks all invariants.
///
/// # Errors
/// A trace or settings that are not possible, or the first violated invariant.
pub fn replay_cores(trace: &Trace, settings: &CoreSettings) -> Result<CoreReplay, CoresError> {
    let (setup, layout, kv_tokens) = prepare(trace, settings).map_err(CoresError::Impossible)?;
    play_checked(trace, settings, setup, (layout, kv_tokens)).map_err(CoresError::Violation)
}

fn prepare(trace: &Trace, settings: &CoreSettings) -> Result<(Setup, Layout, u64), String> {
    let kv_tokens = kv_tokens(settings)?;
    let tokens = u16::try_from(trace.block_tokens()).map_err(|_| {
        format!("blocks of {} tokens: an agent has blocks of at most {}", trace.block_tokens(), u16::MAX)
    })?;
    let layout = settings.model.layout(tokens).map_err(|error| error.to_string())?;
    check_prompts(trace)?;
    Ok((setup(settings, layout)?, layout, kv_tokens))
}

/// Refuses prompts that an engine cannot match, save or commit with one request to its agent.
fn check_prompts(trace: &Trace) -> Result<(), String> {
    let blocks = |request| trace.len_of(request);
    let long = trace.requests().iter().position(|request| blocks(request) > MATCH_KEYS_MAX);
    let Some(at) = long else { return Ok(()) };
    Err(format!(
        "request {} of the trace has a prompt of {} blocks, an agent takes at most {MATCH_KEYS_MAX}: use a trace with \
         larger blocks, or only the requests before it",
        at + 1,
        blocks(&trace.requests()[at])
    ))
}

/// Serves a trace; a violated invariant is an error.
fn play_checked(
    trace: &Trace,
    settings: &CoreSettings,
    setup: Setup,
    (layout, kv_tokens): (Layout, u64),
) -> Result<CoreReplay, String> {
    catch_unwind(AssertUnwindSafe(|| play(trace, settings, setup, (layout, kv_tokens))))
        .unwrap_or_else(|cause| Err(panic_message(cause.as_ref())))
}

/// Tokens whose KV cache the accelerator holds besides the weights.
fn kv_tokens(settings: &CoreSettings) -> Result<u64, String> {
    let CoreSettings { hardware, model, .. } = settings;
    let memory = (hardware.hbm_bytes as f64 * MEMORY_SHARE) as u64;
    let room = memory.saturating_sub(model.weight_bytes());
    match room / model.kv_bytes_per_token().max(1) {
        0 => Err(format!(
            "the weights of {} do not fit into the memory of {}: choose a smaller model or another accelerator",
            model.name, hardware.name
        )),
        tokens => Ok(tokens),
    }
}

fn setup(settings: &CoreSettings, layout: Layout) -> Result<Setup, String> {
    let slot = layout.slot_bytes();
    let per_region = (REGION_BYTES / slot).max(1);
    let stored = slot + HEADER_BYTES;
    let segment_bytes = SEGMENT_BYTES.max(stored.next_multiple_of(SEGMENT_ALIGNMENT));
    let segments = settings.nvme_blocks.div_ceil(segment_bytes / stored);
    let regions = settings.dram_blocks.div_ceil(per_region);
    let regions = u16::try_from(regions).map_err(|_| {
        format!(
            "{} blocks of DRAM need {regions} regions, an agent has at most {}: use at most {} blocks",
            settings.dram_blocks,
            u16::MAX,
            u64::from(u16::MAX) * per_region
        )
    })?;
    Ok(Setup {
        nodes: usize::from(settings.nodes),
        members: usize::from(settings.members),
        regions,
        region_bytes: REGION_BYTES.max(slot),
        disks: usize::from(segments > 0),
        disk_bytes: disk_bytes(segments, segment_bytes),
        segment_bytes,
        layout: Some(layout),
        names: BTreeSet::from([TenantId::DEFAULT]),
        limits: Limits::Drawn,
        settings: Settings {
            lookup_timeout: LOOKUP_TIMEOUT,
            dram_eviction: settings.policy,
            nvme_eviction: settings.policy,
            admission: settings.admission,
            placement_bandwidth: settings.placement_bandwidth,
            ..Settings::default()
        },
        ..Setup::large(usize::from(settings.nodes), usize::from(settings.members))
    })
}

/// Bytes of a device whose pool has this many segments, besides superblock and journal.
fn disk_bytes(segments: u64, segment_bytes: u64) -> u64 {
    let wanted = segments * segment_bytes;
    let mut bytes = wanted;
    if segments == 0 {
        return 0;
    }
    loop {
        let (pool, ..) = Disk::format((bytes, segment_bytes), 0, 0).recover();
        match wanted.saturating_sub(pool.usage().capacity_bytes) {
            0 => return bytes,
            missing => bytes += missing,
        }
    }
}

fn play(
    trace: &Trace,
    settings: &CoreSettings,
    setup: Setup,
    (layout, kv_tokens): (Layout, u64),
) -> Result<CoreReplay, String> {
    let hardware = &settings.hardware;
    let timed = Timed {
        channels: Channels::new(setup.nodes, hardware),
        latency: Duration::from_nanos(hardware.network.latency_nanos),
        events: 0,
        checks: Checks::default(),
    };
    let mut simulation = Simulation::timed(setup, timed, settings.seed, Recording::Digest);
    let start_by = simulation.env.now.after(START_MAX);
    while !is_whole(&simulation) {
        if simulation.env.now > start_by {
            return Err(format!("the directories are not complete after {START_MAX:?}"));
        }
        simulation.run_until(simulation.env.now.after(Duration::from_millis(20)));
    }
    let sessions: Vec<SessionId> = open_sessions(&mut simulation, layout);
    let began = simulation.env.now;
    let turns = arrivals(&mut simulation.env, trace, settings.nodes);
    let last = turns.last().map_or(began, |turn| turn.arrived);
    let costs = Costs::new(hardware, &settings.model, 1);
    simulation.serving = Some(Box::new(Serving::new(costs, layout, kv_tokens, &sessions, turns)));
    while simulation.serving.as_ref().is_some_and(|serving| serving.open > 0) {
        if simulation.env.now > last.after(REST_MAX) {
            return Err(format!("requests have not ended {REST_MAX:?} after the last arrival"));
        }
        simulation.run_until(simulation.env.now.after(POLL_EVERY));
    }
    let outcome = simulation.serving.take().map(|serving| serving.outcome).unwrap_or_default();
    let capacity = capacity(&simulation, layout);
    finish(&mut simulation);
    Ok(result(simulation, trace, outcome, (began, capacity)))
}

/// Opens the session of each engine.
fn open_sessions(simulation: &mut Simulation, layout: Layout) -> Vec<SessionId> {
    let Simulation { env, nodes, .. } = simulation;
    nodes.iter_mut().map(|node| node.open_session_of(env, 0, TenantId::DEFAULT, layout)).collect()
}

/// Schedules the arrivals of all requests. The session decides the node, as in the replay without time.
fn arrivals(env: &mut Environment, trace: &Trace, nodes: u16) -> Vec<Turn> {
    let first_ms = trace.requests().first().map_or(0, |request| request.at_ms);
    let mut chain = Vec::new();
    let mut turns = Vec::new();
    for (number, request) in (0..).zip(trace.requests()) {
        trace.chain(request, &mut chain);
        let keys = chain.iter().map(|block| trace_key(*block)).collect();
        let arrived = env.now.after(Duration::from_millis(request.at_ms - first_ms));
        let node = (mix(u64::from(request.session) + 1) % u64::from(nodes)) as usize;
        env.queue.push(arrived, Action::Serve { node, what: ServeStep::Arrive(number) });
        turns.push(Turn::new(arrived, keys, request.input_tokens, request.output_tokens));
    }
    turns
}

/// Capacity of a node in blocks.
fn capacity(simulation: &Simulation, layout: Layout) -> [u64; 2] {
    let process = simulation.nodes.first().and_then(|node| node.process.as_ref());
    let counters = process.expect("agents run").core.counters();
    let (slot, segment_bytes) = (layout.slot_bytes(), simulation.env.setup.segment_bytes);
    let per_segment = segment_bytes / (slot + HEADER_BYTES);
    [counters.arena_bytes / slot, counters.pool_capacity_bytes / segment_bytes * per_segment]
}

fn result(
    mut simulation: Simulation,
    trace: &Trace,
    outcome: Outcome,
    (began, capacity): (Tick, [u64; 2]),
) -> CoreReplay {
    let members = simulation.members.iter().flatten();
    let replicas = members.map(|member| member.directory.size().replicas).sum();
    let timed = simulation.env.timed.take().expect("the simulation has hardware");
    let sorted = |mut times: Vec<u64>| {
        times.sort_unstable();
        times
    };
    CoreReplay {
        requests: trace.requests().len() as u64,
        references: outcome.references,
        hits: outcome.hits,
        unloaded: outcome.unloaded,
        unsaved: outcome.unsaved,
        first_tokens: sorted(outcome.first_tokens),
        other_tokens: sorted(outcome.other_tokens),
        channels: Path::ALL.map(|path| (path, timed.channels.totals(path))).to_vec(),
        capacity,
        elapsed: outcome.ended.since(began),
        steps: outcome.steps,
        events: simulation.env.trace.steps(),
        digest: simulation.env.trace.digest(),
        seen: std::mem::take(&mut simulation.env.seen),
        checks: Checks { replicas, ..timed.checks },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::replay::{ReadOptions, TraceBuilder, read_lines};
    use crate::setup::Variant;

    #[test]
    fn injected_flaw_of_an_agent_is_a_violation() {
        let sample = include_str!("../../../testkit/data/conversation_sample.jsonl");
        let text: String = sample.lines().take(40).flat_map(|line| [line, "\n"]).collect();
        let mut builder = TraceBuilder::new(ReadOptions::default());
        read_lines(text.as_bytes(), &mut builder).expect("lines of the format");
        let trace = builder.finish("sample").expect("a trace");
        let settings = CoreSettings {
            nodes: 2,
            members: 1,
            hardware: Hardware::named("h100").expect("valid"),
            model: Model::named("llama-3-8b").expect("valid"),
            dram_blocks: 100,
            nvme_blocks: 0,
            policy: EvictionPolicy::default(),
            admission: AdmissionMode::Always,
            placement_bandwidth: 0,
            seed: 1,
        };
        let layout = settings.model.layout(512).expect("valid");
        let play = |variant| {
            let setup = Setup { variant, ..setup(&settings, layout).expect("possible") };
            play_checked(&trace, &settings, setup, (layout, 100_000))
        };
        assert!(play(Variant::Production).is_ok_and(|served| served.seen["dram_evictions"] > 0));
        let flawed = play(Variant::EvictionsNotAnnounced).expect_err("the directory is wrong at the end");
        assert!(flawed.contains("the directory lists missing replicas"), "{flawed}");
    }
}
