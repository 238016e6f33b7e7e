//! Reprise beside an engine without a connector: two nodes, on each an agent; engines on the first and, for loads from a peer,
//! on the second.
//!
//! Order, so that save and load of a prompt are as near to each other as with other caches, and nothing else is between them:
//!
//! ```text
//! three engines start ─ misses, trains: other prompts ─ recompute, own cache ─ memory of second node is used, DRAM of first empty
//!   ─ save ─ own DRAM ─ DRAM of the peer ─ engine of the peer ends, memory held ─ NVMe ─ agent and engine anew: restart
//! ```
//!
//! NVMe comes after what wants DRAM, for it empties that. A wait until everything is durable lies between save and loads, for
//! the others' files too.
//!
//! Where each block came from is asked of the agents: a load from DRAM that was to come from NVMe does not count as found.

use std::collections::BTreeMap;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use reprise_client::Client;
use reprise_policy::ByteSize;
use serde_json::json;

use super::super::fixture;
use super::super::one_page;
use super::super::resident::{Held, begin_peaks};
use super::super::store::payload_read_rate;
use super::engine::{Answer, Engine, Twice};
use super::peers::{save, warm_up};
use super::samples::{Leg, Percentiles, Samples, System};
use super::{WARM_UP, World};
use crate::cluster::{AgentSizes, Cluster};

/// The nodes.
const FIRST: usize = 0;
const SECOND: usize = 1;

/// How long blocks may take until they are durable, or out of DRAM.
const PATIENCE: Duration = Duration::from_secs(60);

/// Between two looks at an agent's counters.
const LOOK_PAUSE: Duration = Duration::from_millis(10);

/// Blocks of the requests of the scheduler's steps, and steps, half of each kind.
const SCHEDULER_BLOCKS: u64 = 1024;
const SCHEDULER_STEPS: u64 = 1000;

/// Looks at agents from beside the engines.
struct Nodes<'a> {
    world: &'a World,
    cluster: Cluster,
    clients: Vec<Client>,
}

/// Measures Reprise and the recompute with fresh engines and agents.
pub(super) fn measure(world: &World, samples: &mut Samples) -> anyhow::Result<()> {
    let bytes = ByteSize(world.sizes.store_bytes());
    // Blocks stay where each leg looks for them: the second node is empty, and would be given some.
    let sizes = AgentSizes { arena: bytes, pool: ByteSize(bytes.0 * 2), moves: Some(ByteSize(0)) };
    let cluster = Cluster::start(&world.folder.join("cluster"), 2, sizes)?;
    let mut nodes = Nodes { world, clients: Vec::new(), cluster };
    nodes.connect()?;
    // Together, which takes less than one after the other: nothing is measured meanwhile.
    let plain = Engine::launch(&world.surroundings("recompute"), &world.first_line(None))?;
    let (engine, peer) = (nodes.launch(FIRST)?, nodes.launch(SECOND)?);
    let (mut plain, mut engine, mut peer) = (plain.ready()?, engine.ready()?, peer.ready()?);
    samples.started(System::Recompute, 1);
    samples.started(System::Reprise, 2);
    plain.measure(&[WARM_UP, WARM_UP], world.sizes.tokens())?;
    warm_up(&mut engine, world)?;
    misses(&nodes, (&mut plain, &mut engine), samples)?;
    back_to_back(&nodes, (&mut plain, &mut engine), samples)?;
    recompute(world, &mut plain, samples)?;
    drop(plain);
    use_memory(&nodes, &mut peer)?;
    nodes.empty_dram()?;
    begin_peaks(&[engine.pid(), nodes.agent()?])?;
    saves(&nodes, &mut engine, samples)?;
    hits_in_dram(&nodes, &mut engine, samples)?;
    hits_of_a_peer(&nodes, &mut peer, samples)?;
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

/// Each prompt without and with the connector, in alternating order.
fn misses(nodes: &Nodes<'_>, pair: (&mut Engine, &mut Engine), samples: &mut Samples) -> anyhow::Result<()> {
    let (plain, engine) = pair;
    let world = nodes.world;
    let (seeds, tokens) = (world.sizes.misses(), world.sizes.tokens());
    let (mut without, mut with) = (Vec::new(), Vec::new());
    for (index, seed) in seeds.iter().enumerate() {
        if index % 2 == 0 {
            without.extend(plain.measure(&[*seed], tokens)?);
        }
        with.extend(engine.measure(&[*seed], tokens)?);
        // The rest of the save and its way to the device are not part of the next prompt's time. The warm-up is there, too.
        let blocks = (index as u64 + 2) * world.sizes.prompt_blocks();
        nodes
            .until(FIRST, |counters| counters["nvme_blocks"] >= blocks && counters["unsaved_blocks"] == 0)?;
        if index % 2 == 1 {
            without.extend(plain.measure(&[*seed], tokens)?);
        }
    }
    samples.missed(&seeds, &without, &with);
    Ok(())
}

/// Trains of prompts without a pause, without and with the connector, the other first in each: what is still done for the save of a
/// prompt, here and on its way to the device, is part of the next prompt's time.
fn back_to_back(
    nodes: &Nodes<'_>,
    pair: (&mut Engine, &mut Engine),
    samples: &mut Samples,
) -> anyhow::Result<()> {
    let (plain, engine) = pair;
    let sizes = &nodes.world.sizes;
    let tokens = sizes.tokens();
    for (index, train) in sizes.trains().iter().enumerate() {
        let mut without = Vec::new();
        if index % 2 == 0 {
            without = plain.back_to_back(train, tokens)?;
        }
        let with = engine.back_to_back(train, tokens)?;
        engine.settle(train, tokens, sizes.cached_tokens)?;
        nodes.until(FIRST, |counters| counters["unsaved_blocks"] == 0)?;
        if index % 2 == 1 {
            without = plain.back_to_back(train, tokens)?;
        }
        // In front of the first there is nothing to save.
        samples.back_to_back(&train[1..], &without[1..], &with[1..]);
    }
    Ok(())
}

/// What computing takes, what vLLM's own cache takes, and the memory of an engine that has no other.
fn recompute(world: &World, plain: &mut Engine, samples: &mut Samples) -> anyhow::Result<()> {
    let seeds = world.seeds();
    begin_peaks(&[plain.pid()])?;
    let Twice { answers, again } = plain.own_cache(&seeds, world.sizes.tokens())?;
    samples.answered((System::Recompute, Leg::Cold), &seeds, &answers, 0.0);
    samples.answered((System::Recompute, Leg::OwnCache), &seeds, &again, 1.0);
    samples.held(System::Recompute, Held::by(&[plain.pid()])?);
    Ok(())
}

/// Has the second node's engine and agent use what memory loads of the measured prompts will have. The engines of other systems have
/// filled all of theirs when they load, and a store of theirs that is reached over TCP has it copied through the same buffers.
fn use_memory(nodes: &Nodes<'_>, peer: &mut Engine) -> anyhow::Result<()> {
    let (world, sizes) = (nodes.world, nodes.world.sizes);
    warm_up(peer, world)?;
    // From the first node, which has them.
    peer.measure(&sizes.trains().concat(), sizes.tokens())?;
    let before = nodes.counters(SECOND)?["dram_blocks"];
    // Computed here: blocks that are saved can be dropped when they are durable, and what comes next gets their slots.
    peer.measure(&sizes.touches(), sizes.tokens())?;
    peer.settle(&sizes.touches(), sizes.tokens(), sizes.cached_tokens)?;
    nodes.until(SECOND, |counters| counters["unsaved_blocks"] == 0)?;
    nodes.until(SECOND, |counters| {
        let _ = nodes.clients[SECOND].trim();
        counters["dram_blocks"] <= before
    })
}

/// Puts the prompts into the first node, where they are nowhere.
fn saves(nodes: &Nodes<'_>, engine: &mut Engine, samples: &mut Samples) -> anyhow::Result<()> {
    let cold = save(engine, nodes.world)?;
    samples.answered((System::Reprise, Leg::Cold), &nodes.world.seeds(), &cold, 0.0);
    nodes.until(FIRST, |counters| counters["unsaved_blocks"] == 0)
}

fn hits_in_dram(nodes: &Nodes<'_>, engine: &mut Engine, samples: &mut Samples) -> anyhow::Result<()> {
    let (seeds, sizes) = (nodes.world.seeds(), &nodes.world.sizes);
    let before = nodes.counters(FIRST)?["hit_bytes_own_dram"];
    let answers = engine.measure(&seeds, sizes.tokens())?;
    let found = nodes.share(nodes.counters(FIRST)?["hit_bytes_own_dram"] - before);
    samples.answered((System::Reprise, Leg::Hit), &seeds, &answers, found);
    Ok(())
}

/// An engine on the second node loads what is in the DRAM of the first.
fn hits_of_a_peer(nodes: &Nodes<'_>, engine: &mut Engine, samples: &mut Samples) -> anyhow::Result<()> {
    let (seeds, tokens) = (nodes.world.seeds(), nodes.world.sizes.tokens());
    let before = nodes.counters(SECOND)?["hit_bytes_peer_dram"];
    let answers = engine.measure(&seeds, tokens)?;
    let found = nodes.share(nodes.counters(SECOND)?["hit_bytes_peer_dram"] - before);
    samples.answered((System::Reprise, Leg::Peer), &seeds, &answers, found);
    Ok(())
}

/// What engine and agent of the first node hold.
fn memory_held(nodes: &mut Nodes<'_>, engine: &Engine, samples: &mut Samples) -> anyhow::Result<()> {
    // This process may have the arena mapped, too, and would take a share of its pages.
    nodes.clients.clear();
    let agent = nodes.agent()?;
    samples.held(System::Reprise, Held::by(&[engine.pid(), agent])?);
    nodes.connect()
}

fn hits_on_nvme(nodes: &Nodes<'_>, engine: &mut Engine, samples: &mut Samples) -> anyhow::Result<()> {
    let (seeds, tokens) = (nodes.world.seeds(), nodes.world.sizes.tokens());
    let before = nodes.counters(FIRST)?["hit_bytes_own_nvme"];
    // Once: no prompt is asked for twice.
    nodes.empty_dram()?;
    let answers = engine.measure(&seeds, tokens)?;
    let found = nodes.share(nodes.counters(FIRST)?["hit_bytes_own_nvme"] - before);
    samples.answered((System::Reprise, Leg::Nvme), &seeds, &answers, found);
    Ok(())
}

/// Agent and engine are started anew; nothing had time to end well but what was durable.
fn hits_after_restart(nodes: &mut Nodes<'_>, samples: &mut Samples) -> anyhow::Result<()> {
    let (seeds, tokens) = (nodes.world.seeds(), nodes.world.sizes.tokens());
    nodes.until(FIRST, |counters| counters["unsaved_blocks"] == 0)?;
    nodes.clients.clear();
    nodes.cluster.kill_agent(FIRST)?;
    nodes.cluster.restart_agent(FIRST)?;
    nodes.connect()?;
    let mut engine = nodes.launch(FIRST)?.ready()?;
    samples.started(System::Reprise, 1);
    warm_up(&mut engine, nodes.world)?;
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

    /// A fresh engine on a node, not ready yet.
    fn launch(&self, node: usize) -> anyhow::Result<Engine> {
        let name = ["reprise", "reprise-peer"][node];
        let socket = &self.cluster.file().agents[node].socket;
        let transfer = json!({
            "kv_connector": "RepriseConnector",
            "kv_connector_module_path": "reprise.vllm",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": { "socket": socket },
        });
        Engine::launch(&self.world.surroundings(name), &self.world.first_line(Some(&transfer)))
    }

    /// The process of the first node's agent.
    fn agent(&self) -> anyhow::Result<u32> {
        self.cluster.agent_pids().nth(FIRST).context("the first node's agent")
    }

    fn counters(&self, node: usize) -> anyhow::Result<BTreeMap<String, u64>> {
        Ok(self.clients[node].stats().context("an agent's counters")?.into_iter().collect())
    }

    /// Waits until an agent's counters say something.
    fn until(&self, node: usize, holds: impl Fn(&BTreeMap<String, u64>) -> bool) -> anyhow::Result<()> {
        let give_up = Instant::now() + PATIENCE;
        loop {
            let counters = self.counters(node)?;
            if holds(&counters) {
                return Ok(());
            }
            ensure!(
                Instant::now() < give_up,
                "an agent did not come to rest within {PATIENCE:?}; it counts {counters:?}"
            );
            std::thread::sleep(LOOK_PAUSE);
        }
    }

    /// Leaves the first node's blocks on its device alone.
    fn empty_dram(&self) -> anyhow::Result<()> {
        self.until(FIRST, |counters| {
            let _ = self.clients[FIRST].trim();
            counters["dram_blocks"] == 0
        })
    }

    /// The share of a leg's bytes that came from where they were to come from.
    fn share(&self, bytes: u64) -> f64 {
        let prompts = self.world.seeds().len() as u64;
        bytes as f64 / (prompts * self.world.sizes.prompt_bytes()) as f64
    }

    /// What the first node's device takes for the bytes of a prompt.
    fn device_ms(&self) -> anyhow::Result<f64> {
        let sizes = self.world.sizes;
        // As many as are measured.
        let blocks = (sizes.prompts * sizes.prompt_blocks()) as usize;
        let rate = payload_read_rate(&self.cluster.pool_path(FIRST), sizes.block_bytes(), blocks)?;
        Ok(sizes.prompt_bytes() as f64 / rate * 1e3)
    }

    /// Percentiles of the scheduler's calls, by their names.
    fn scheduler_calls(&self) -> anyhow::Result<BTreeMap<String, Percentiles>> {
        let environments = &self.world.environments;
        let output = Command::new(&environments.vllm)
            .arg("-P")
            .arg(environments.scheduler_script())
            .arg(&self.cluster.file().agents[FIRST].socket)
            .args([SCHEDULER_BLOCKS.to_string(), SCHEDULER_STEPS.to_string()])
            .env("PYTHONPATH", &environments.package)
            .output()
            .context("cannot run the scheduler's calls")?;
        let words = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "the scheduler's calls have failed: {words}");
        let said = String::from_utf8_lossy(&output.stdout);
        let line = said.lines().last().unwrap_or_default();
        serde_json::from_str(line).with_context(|| format!("the scheduler's calls have said {said}"))
    }
}
