//! Reprise compared with an engine without a connector: two nodes with an agent each; engines on the first
//! and, for loads from a peer, on the second.
//!
//! In this order, save and load of a prompt are as close to each other as for other caches, with nothing
//! between them:
//!
//! ```text
//! three engines start ─ misses, back to back: other prompts ─ recompute, own cache
//!   ─ memory of second node used ─ DRAM of first node empty
//!   ─ save ─ own DRAM ─ DRAM of the peer ─ engine of the peer ends, memory held
//!   ─ NVMe ─ restart of agent and engine
//! ```
//!
//! NVMe follows the legs that need DRAM, because it empties DRAM. Between save and loads, there is a wait
//! until everything is durable, as for the files of other caches.
//!
//! The agents' counters show the source of each block: a load from DRAM in the NVMe leg does not count as
//! found.

use std::collections::BTreeMap;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use reprise_client::Client;
use reprise_policy::ByteSize;
use serde_json::json;

use super::engine::{Answer, Engine, OwnCacheAnswers};
use super::peer_legs::{save, warm_up};
use super::samples::{Leg, Percentiles, Samples, System};
use super::{BenchContext, WARM_UP};
use reprise_testkit::bench::fixture;
use reprise_testkit::bench::one_page;
use reprise_testkit::bench::process_memory::{ProcessMemory, reset_peaks};
use reprise_testkit::bench::reference_pool::payload_read_rate;
use reprise_testkit::cluster::{AgentSizes, Cluster};

/// Numbers of the nodes.
const FIRST: usize = 0;
const SECOND: usize = 1;

/// Time limit until blocks are durable, or dropped from DRAM.
const PATIENCE: Duration = Duration::from_secs(60);

/// Interval between checks of an agent's counters.
const LOOK_PAUSE: Duration = Duration::from_millis(10);

/// Blocks per request of the scheduler's steps, and number of steps, half of each kind.
const SCHEDULER_BLOCKS: u64 = 1024;
const SCHEDULER_STEPS: u64 = 1000;

/// Nodes with separate sessions for the agents' counters.
struct Nodes<'a> {
    context: &'a BenchContext,
    cluster: Cluster,
    clients: Vec<Client>,
}

/// Measures Reprise and the recompute with new engines and agents.
pub(super) fn measure(context: &BenchContext, samples: &mut Samples) -> anyhow::Result<()> {
    let bytes = ByteSize(context.sizes.store_bytes());
    // No placement, which would move blocks to the empty second node.
    let sizes = AgentSizes { arena: bytes, pool: ByteSize(bytes.0 * 2), moves: Some(ByteSize(0)) };
    let cluster = Cluster::start(&context.folder.join("cluster"), 2, sizes)?;
    let mut nodes = Nodes { context, clients: Vec::new(), cluster };
    nodes.connect()?;
    // Start concurrently to save time; nothing is measured yet.
    let plain = Engine::launch(&context.engine_environment("recompute"), &context.first_line(None))?;
    let (engine, peer) = (nodes.launch(FIRST)?, nodes.launch(SECOND)?);
    let (mut plain, mut engine, mut peer) = (plain.ready()?, engine.ready()?, peer.ready()?);
    samples.started(System::Recompute, 1);
    samples.started(System::Reprise, 2);
    plain.measure(&[WARM_UP, WARM_UP], context.sizes.tokens())?;
    warm_up(&mut engine, context)?;
    misses(&nodes, (&mut plain, &mut engine), samples)?;
    back_to_back(&nodes, (&mut plain, &mut engine), samples)?;
    recompute(context, &mut plain, samples)?;
    drop(plain);
    touch_memory(&nodes, &mut peer)?;
    nodes.empty_dram()?;
    reset_peaks(&[engine.pid(), nodes.agent()?])?;
    saves(&nodes, &mut engine, samples)?;
    hits_in_dram(&nodes, &mut engine, samples)?;
    hits_from_peer(&nodes, &mut peer, samples)?;
    drop(peer);
    memory_held(&mut nodes, &engine, samples)?;
    hits_on_nvme(&nodes, &mut engine, samples)?;
    drop(engine);
    hits_after_restart(&mut nodes, samples)?;
    samples.device_ms.push(nodes.device_ms()?);
    for (call, times) in nodes.scheduler_calls()? {
        samples.scheduler.entry(call).or_default().push(times);
    }
    Ok(())
}

/// Measures each prompt without and with the connector, in alternating order.
fn misses(nodes: &Nodes<'_>, pair: (&mut Engine, &mut Engine), samples: &mut Samples) -> anyhow::Result<()> {
    let (plain, engine) = pair;
    let context = nodes.context;
    let (seeds, tokens) = (context.sizes.misses(), context.sizes.tokens());
    let (mut without, mut with) = (Vec::new(), Vec::new());
    for (index, seed) in seeds.iter().enumerate() {
        if index % 2 == 0 {
            without.extend(plain.measure(&[*seed], tokens)?);
        }
        with.extend(engine.measure(&[*seed], tokens)?);
        // The next prompt's time must not include the rest of the save. The counters include the warm-up.
        let blocks = (index as u64 + 2) * context.sizes.prompt_blocks();
        nodes.wait_until(FIRST, |counters| {
            counters["nvme_blocks"] >= blocks && counters["unsaved_blocks"] == 0
        })?;
        if index % 2 == 1 {
            without.extend(plain.measure(&[*seed], tokens)?);
        }
    }
    samples.missed(&seeds, &without, &with);
    Ok(())
}

/// Measures series of prompts without a pause, without and with the connector, in alternating order: the
/// remaining save of a prompt, including its write to the device, is part of the next prompt's time.
fn back_to_back(
    nodes: &Nodes<'_>,
    pair: (&mut Engine, &mut Engine),
    samples: &mut Samples,
) -> anyhow::Result<()> {
    let (plain, engine) = pair;
    let sizes = &nodes.context.sizes;
    let tokens = sizes.tokens();
    for (index, train) in sizes.trains().iter().enumerate() {
        let mut without = Vec::new();
        if index % 2 == 0 {
            without = plain.back_to_back(train, tokens)?;
        }
        let with = engine.back_to_back(train, tokens)?;
        engine.await_saved(train, tokens, sizes.cached_tokens)?;
        nodes.wait_until(FIRST, |counters| counters["unsaved_blocks"] == 0)?;
        if index % 2 == 1 {
            without = plain.back_to_back(train, tokens)?;
        }
        // No save precedes the first prompt.
        samples.back_to_back(&train[1..], &without[1..], &with[1..]);
    }
    Ok(())
}

/// Measures the recompute, vLLM's own cache, and the memory of an engine without a connector.
fn recompute(context: &BenchContext, plain: &mut Engine, samples: &mut Samples) -> anyhow::Result<()> {
    let seeds = context.seeds();
    reset_peaks(&[plain.pid()])?;
    let OwnCacheAnswers { answers, again } = plain.own_cache(&seeds, context.sizes.tokens())?;
    samples.answered((System::Recompute, Leg::Cold), &seeds, &answers, 0.0);
    samples.answered((System::Recompute, Leg::OwnCache), &seeds, &again, 1.0);
    samples.held(System::Recompute, ProcessMemory::by(&[plain.pid()])?);
    Ok(())
}

/// Lets the second node's engine and agent touch the memory of later loads. Engines of other caches have
/// touched all their memory when they load, and their stores over TCP use the same buffers.
fn touch_memory(nodes: &Nodes<'_>, peer: &mut Engine) -> anyhow::Result<()> {
    let (context, sizes) = (nodes.context, nodes.context.sizes);
    warm_up(peer, context)?;
    // Loaded from the first node, which has the blocks.
    peer.measure(&sizes.trains().concat(), sizes.tokens())?;
    let before = nodes.counters(SECOND)?["dram_blocks"];
    // Computed here: saved blocks can be dropped when they are durable, and the next blocks reuse their
    // slots.
    peer.measure(&sizes.touches(), sizes.tokens())?;
    peer.await_saved(&sizes.touches(), sizes.tokens(), sizes.cached_tokens)?;
    nodes.wait_until(SECOND, |counters| counters["unsaved_blocks"] == 0)?;
    nodes.wait_until(SECOND, |counters| {
        let _ = nodes.clients[SECOND].trim();
        counters["dram_blocks"] <= before
    })
}

/// Saves the uncached prompts on the first node.
fn saves(nodes: &Nodes<'_>, engine: &mut Engine, samples: &mut Samples) -> anyhow::Result<()> {
    let cold = save(engine, nodes.context)?;
    samples.answered((System::Reprise, Leg::Cold), &nodes.context.seeds(), &cold, 0.0);
    nodes.wait_until(FIRST, |counters| counters["unsaved_blocks"] == 0)
}

fn hits_in_dram(nodes: &Nodes<'_>, engine: &mut Engine, samples: &mut Samples) -> anyhow::Result<()> {
    let (seeds, sizes) = (nodes.context.seeds(), &nodes.context.sizes);
    let before = nodes.counters(FIRST)?["hit_bytes_own_dram"];
    let answers = engine.measure(&seeds, sizes.tokens())?;
    let found = nodes.share(nodes.counters(FIRST)?["hit_bytes_own_dram"] - before);
    samples.answered((System::Reprise, Leg::Hit), &seeds, &answers, found);
    Ok(())
}

/// Measures loads on the second node from the DRAM of the first.
fn hits_from_peer(nodes: &Nodes<'_>, engine: &mut Engine, samples: &mut Samples) -> anyhow::Result<()> {
    let (seeds, tokens) = (nodes.context.seeds(), nodes.context.sizes.tokens());
    let before = nodes.counters(SECOND)?["hit_bytes_peer_dram"];
    let answers = engine.measure(&seeds, tokens)?;
    let found = nodes.share(nodes.counters(SECOND)?["hit_bytes_peer_dram"] - before);
    samples.answered((System::Reprise, Leg::Peer), &seeds, &answers, found);
    Ok(())
}

/// Measures the memory of engine and agent of the first node.
fn memory_held(nodes: &mut Nodes<'_>, engine: &Engine, samples: &mut Samples) -> anyhow::Result<()> {
    // This process may also have mapped the arena, and would reduce the share of the others.
    nodes.clients.clear();
    let agent = nodes.agent()?;
    samples.held(System::Reprise, ProcessMemory::by(&[engine.pid(), agent])?);
    nodes.connect()
}

fn hits_on_nvme(nodes: &Nodes<'_>, engine: &mut Engine, samples: &mut Samples) -> anyhow::Result<()> {
    let (seeds, tokens) = (nodes.context.seeds(), nodes.context.sizes.tokens());
    let before = nodes.counters(FIRST)?["hit_bytes_own_nvme"];
    // Only once, because no prompt is repeated.
    nodes.empty_dram()?;
    let answers = engine.measure(&seeds, tokens)?;
    let found = nodes.share(nodes.counters(FIRST)?["hit_bytes_own_nvme"] - before);
    samples.answered((System::Reprise, Leg::Nvme), &seeds, &answers, found);
    Ok(())
}

/// Measures loads after a kill and restart of agent and engine; only durable blocks remain.
fn hits_after_restart(nodes: &mut Nodes<'_>, samples: &mut Samples) -> anyhow::Result<()> {
    let (seeds, tokens) = (nodes.context.seeds(), nodes.context.sizes.tokens());
    nodes.wait_until(FIRST, |counters| counters["unsaved_blocks"] == 0)?;
    nodes.clients.clear();
    nodes.cluster.kill_agent(FIRST);
    nodes.cluster.restart_agent(FIRST)?;
    nodes.connect()?;
    let mut engine = nodes.launch(FIRST)?.ready()?;
    samples.started(System::Reprise, 1);
    warm_up(&mut engine, nodes.context)?;
    let before = nodes.counters(FIRST)?["hit_bytes_own_nvme"];
    let answers: Vec<Answer> = engine.measure(&seeds, tokens)?;
    let found = nodes.share(nodes.counters(FIRST)?["hit_bytes_own_nvme"] - before);
    samples.answered((System::Reprise, Leg::Restart), &seeds, &answers, found);
    Ok(())
}

impl Nodes<'_> {
    fn connect(&mut self) -> anyhow::Result<()> {
        let agents = self.cluster.file().agents;
        self.clients = agents
            .iter()
            .map(|agent| fixture::connect(&agent.socket, &one_page()))
            .collect::<anyhow::Result<_>>()?;
        Ok(())
    }

    /// Starts a new engine on a node without waiting until it is ready.
    fn launch(&self, node: usize) -> anyhow::Result<Engine> {
        let name = ["reprise", "reprise-peer"][node];
        let socket = &self.cluster.file().agents[node].socket;
        let transfer = json!({
            "kv_connector": "RepriseConnector",
            "kv_connector_module_path": "reprise.vllm",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            // Small models on a CPU may compute faster than they load, but loads are measured here.
            "kv_connector_extra_config": { "socket": socket, "load_or_recompute": false },
        });
        Engine::launch(&self.context.engine_environment(name), &self.context.first_line(Some(&transfer)))
    }

    /// Returns the process id of the first node's agent.
    fn agent(&self) -> anyhow::Result<u32> {
        self.cluster.agent_pids().nth(FIRST).context("the first node's agent")
    }

    fn counters(&self, node: usize) -> anyhow::Result<BTreeMap<String, u64>> {
        Ok(self.clients[node].stats().context("an agent's counters")?.into_iter().collect())
    }

    /// Waits until an agent's counters satisfy a condition.
    fn wait_until(&self, node: usize, holds: impl Fn(&BTreeMap<String, u64>) -> bool) -> anyhow::Result<()> {
        let give_up = Instant::now() + PATIENCE;
        loop {
            let counters = self.counters(node)?;
            if holds(&counters) {
                return Ok(());
            }
            ensure!(
                Instant::now() < give_up,
                "an agent did not reach the expected state within {PATIENCE:?}; its counters are {counters:?}"
            );
            std::thread::sleep(LOOK_PAUSE);
        }
    }

    /// Drops the first node's blocks from DRAM, so that they are only on the device.
    fn empty_dram(&self) -> anyhow::Result<()> {
        self.wait_until(FIRST, |counters| {
            let _ = self.clients[FIRST].trim();
            counters["dram_blocks"] == 0
        })
    }

    /// Returns the share of a leg's bytes that came from the expected source.
    fn share(&self, bytes: u64) -> f64 {
        let prompts = self.context.seeds().len() as u64;
        bytes as f64 / (prompts * self.context.sizes.prompt_bytes()) as f64
    }

    /// Returns the time of the first node's device for the bytes of a prompt.
    fn device_ms(&self) -> anyhow::Result<f64> {
        let sizes = self.context.sizes;
        // As many blocks as are measured.
        let blocks = (sizes.prompts * sizes.prompt_blocks()) as usize;
        let rate = payload_read_rate(&self.cluster.pool_path(FIRST), sizes.block_bytes(), blocks)?;
        Ok(sizes.prompt_bytes() as f64 / rate * 1e3)
    }

    /// Returns percentiles of the scheduler's calls, by name.
    fn scheduler_calls(&self) -> anyhow::Result<BTreeMap<String, Percentiles>> {
        let environments = &self.context.environments;
        let output = Command::new(&environments.vllm)
            .arg("-P")
            .arg(environments.scheduler_script())
            .arg(&self.cluster.file().agents[FIRST].socket)
            .args([SCHEDULER_BLOCKS.to_string(), SCHEDULER_STEPS.to_string()])
            .env("PYTHONPATH", &environments.package)
            .output()
            .context("cannot run the script of the scheduler's calls")?;
        let words = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "the script of the scheduler's calls failed: {words}");
        let output_text = String::from_utf8_lossy(&output.stdout);
        let line = output_text.lines().last().unwrap_or_default();
        serde_json::from_str(line)
            .with_context(|| format!("invalid output of the script of the scheduler's calls: {output_text}"))
    }
}
