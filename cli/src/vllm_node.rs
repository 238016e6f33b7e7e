//! Agents and a vLLM engine on this machine, for measurements.

use std::collections::BTreeMap;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use reprise_client::Client;
use reprise_policy::ByteSize;
use reprise_testkit::bench::{fixture, one_page};
use reprise_testkit::cluster::{AgentSizes, Cluster};
use serde_json::json;

use crate::vllm_engine::{Engine, EngineLimits, EngineRequest, VllmArgs};

/// Sizes of an agent. Prefixes of all measurements take 0.6 GiB with the default model.
const ARENA_MIB: u64 = 1024;
const POOL_MIB: u64 = 2048;

/// Time limit until blocks are durable, or dropped from DRAM.
const PATIENCE: Duration = Duration::from_secs(60);

/// Interval between reads of an agent's counters.
const PAUSE: Duration = Duration::from_millis(10);

/// An engine, its agent, perhaps other agents, and sessions for the agents' counters.
pub(crate) struct VllmNode {
    // Declared first, so that sessions end before their agents.
    pub(crate) engine: Engine,
    clients: Vec<Client>,
    cluster: Cluster,
    /// Number of the agent that the engine uses.
    agent: usize,
    start: EngineStart,
}

/// How the node's engines start.
#[derive(Clone, Debug)]
struct EngineStart {
    args: VllmArgs,
    limits: EngineLimits,
    loading: Loading,
}

/// Blocks that the connector loads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Loading {
    /// All blocks that are found.
    All,
    /// Blocks that are expected to arrive faster than the engine computes them, within a limit.
    Policy,
}

impl VllmNode {
    /// Starts an agent and an engine in a folder.
    pub(crate) fn start(
        args: &VllmArgs,
        limits: EngineLimits,
        loading: Loading,
        folder: &Path,
    ) -> anyhow::Result<VllmNode> {
        VllmNode::start_on(args, limits, loading, (folder, 1, 0))
    }

    /// Starts some agents in a folder, and an engine on one of them.
    pub(crate) fn start_on(
        args: &VllmArgs,
        limits: EngineLimits,
        loading: Loading,
        (folder, agents, agent): (&Path, usize, usize),
    ) -> anyhow::Result<VllmNode> {
        // No placement, which would move blocks between nodes.
        let sizes = AgentSizes { moves: Some(ByteSize(0)), ..fixture::sizes(ARENA_MIB, POOL_MIB) };
        let cluster = Cluster::start(folder, agents, sizes)?;
        let file = cluster.file();
        let clients = file.agents.iter().map(|agent| fixture::connect(&agent.socket, &one_page()));
        let clients = clients.collect::<anyhow::Result<Vec<_>>>()?;
        let start = EngineStart { args: args.clone(), limits, loading };
        let engine = start.engine(&cluster, agent)?;
        Ok(VllmNode { engine, clients, cluster, agent, start })
    }

    /// Ends the engine, after a new one has started on another agent.
    pub(crate) fn move_engine(&mut self, agent: usize) -> anyhow::Result<()> {
        self.engine = self.start.engine(&self.cluster, agent)?;
        self.agent = agent;
        Ok(())
    }

    /// Computes the prefixes of requests and waits until they are durable. They are in DRAM then.
    pub(crate) fn save(&mut self, requests: &[EngineRequest]) -> anyhow::Result<()> {
        let stored =
            |request: &EngineRequest| EngineRequest { at: 0.0, output: 1, is_stored: true, ..*request };
        self.engine.serve(&requests.iter().map(stored).collect::<Vec<_>>())?;
        self.engine.finish_saves()?;
        self.wait_until(self.agent, "save all blocks", |counters| counters["unsaved_blocks"] == 0)
    }

    /// Drops all blocks from the DRAM of the engine's agent, so that they are on its device only.
    pub(crate) fn empty_dram(&self) -> anyhow::Result<()> {
        self.empty_dram_of(self.agent)
    }

    /// Drops all blocks from the DRAM of an agent.
    pub(crate) fn empty_dram_of(&self, agent: usize) -> anyhow::Result<()> {
        self.wait_until(agent, "drop all blocks from DRAM", |counters| {
            // The counters show whether blocks are left.
            let _ = self.clients[agent].trim();
            counters["dram_blocks"] == 0
        })
    }

    /// Counters of the engine's agent.
    pub(crate) fn counters(&self) -> anyhow::Result<BTreeMap<String, u64>> {
        self.counters_of(self.agent)
    }

    fn counters_of(&self, agent: usize) -> anyhow::Result<BTreeMap<String, u64>> {
        Ok(self.clients[agent].stats().context("counters of the agent")?.into_iter().collect())
    }

    /// Folder of the cluster.
    pub(crate) fn folder(&self) -> &Path {
        self.cluster.path()
    }

    fn wait_until(
        &self,
        agent: usize,
        what: &str,
        holds: impl Fn(&BTreeMap<String, u64>) -> bool,
    ) -> anyhow::Result<()> {
        let give_up = Instant::now() + PATIENCE;
        loop {
            let counters = self.counters_of(agent)?;
            if holds(&counters) {
                return Ok(());
            }
            ensure!(Instant::now() < give_up, "the agent did not {what} within {PATIENCE:?}: {counters:?}");
            thread::sleep(PAUSE);
        }
    }
}

impl EngineStart {
    fn engine(&self, cluster: &Cluster, agent: usize) -> anyhow::Result<Engine> {
        let socket = &cluster.file().agents[agent].socket;
        let connector = json!({
            "socket": socket,
            "load_or_recompute": self.loading == Loading::Policy,
            // The engines of all agents have the same model, each in its own folder.
            "model_id": "measured",
        });
        let folder = cluster.path().join(format!("engine-{}", agent + 1));
        Engine::start(&self.args, self.limits, &connector, &folder)
    }
}
