//! Checks that the directory is complete: the control-plane members together know exactly the blocks that the
//! agents hold.
//!
//! The check has two steps:
//!
//! 1. The number of replicas must be equal in directory and agent, for each node and tier.
//! 2. The members' keys are read as `reprise events` reads them. Each node's engine then looks up the keys
//!    that the directory lists for the node, and must find all of them.
//!
//! Equal numbers and no missing key mean equal sets, except in one case. The check misses one difference: the
//! directory lists a key on both tiers, the node holds it only in DRAM, and another block balances the NVMe
//! count.

use std::fmt;
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use reprise_policy::{NodeId, Tier};
use serde::Serialize;

use crate::engine_process::EngineProcess;
use crate::events::{Replicas, snapshot};
use crate::members::Members;
use crate::status::whole_directory;
use reprise_testkit::cluster::{AgentAddresses, ClusterFile};

/// Time limit for the directory to become complete. A restarted member is complete only after agents
/// announced their blocks again.
const COMPLETE_WITHIN: Duration = Duration::from_secs(20);

/// Pause between two checks.
const PAUSE: Duration = Duration::from_millis(50);

/// Number of replicas on which directory and agents agree.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub(super) struct ReplicaTotals {
    /// Replicas in DRAM.
    pub(super) directory_dram: u64,
    /// Replicas on NVMe.
    pub(super) directory_nvme: u64,
    /// Replicas whose keys were read from the members and looked up at their nodes.
    pub(super) directory_compared: u64,
}

/// Number of replicas by tier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct ReplicaCounts {
    dram: u64,
    nvme: u64,
}

/// Replicas that the agent of a node holds.
#[derive(Clone, Debug)]
struct NodeCounts {
    name: String,
    node: NodeId,
    counts: ReplicaCounts,
}

/// Waits until the directory is complete. `engines` must be idle and in the same order as the cluster's
/// agents.
pub(super) fn await_complete(
    cluster: &ClusterFile,
    engines: &mut [EngineProcess],
) -> anyhow::Result<ReplicaTotals> {
    let runtime = crate::members::runtime()?;
    let deadline = Instant::now() + COMPLETE_WITHIN;
    loop {
        let counts = cluster
            .agents
            .iter()
            .map(|agent| agent_counts(cluster, agent))
            .collect::<anyhow::Result<Vec<_>>>()?;
        let mut compared = compare_counts(cluster, &counts);
        if compared.is_ok() {
            let listed = runtime.block_on(snapshot(&Members::of_cluster(cluster)?))?;
            compared = compare_keys(&listed, &counts, engines);
        }
        match compared {
            Ok(()) => return Ok(ReplicaTotals::of(&counts)),
            Err(error) if Instant::now() >= deadline => {
                return Err(
                    error.context(format!("the directory was not complete within {COMPLETE_WITHIN:?}"))
                );
            }
            Err(_) => std::thread::sleep(PAUSE),
        }
    }
}

/// Returns an error if a member lacks an inventory, or if the members' summed counts differ from a node's
/// counts.
fn compare_counts(cluster: &ClusterFile, counts: &[NodeCounts]) -> anyhow::Result<()> {
    let parts = whole_directory(cluster).context("cannot read the directory of all members")?;
    let partial: u32 = parts.iter().map(|part| part.slots_partial).sum();
    ensure!(partial == 0, "{partial} hash slots lack the inventory of a node");
    for node_counts in counts {
        let number = u32::from(node_counts.node.0);
        let listed = parts.iter().flat_map(|part| &part.nodes).filter(|node| node.node == number);
        let (dram, nvme) = listed.fold((0, 0), |(dram, nvme), node| (dram + node.dram, nvme + node.nvme));
        node_counts.demand_equal("directory lists", ReplicaCounts { dram, nvme })?;
    }
    Ok(())
}

/// Returns an error unless each node holds all keys that the directory lists for it, in equal number.
fn compare_keys(
    listed: &Replicas,
    counts: &[NodeCounts],
    engines: &mut [EngineProcess],
) -> anyhow::Result<()> {
    for (node_counts, engine) in counts.iter().zip(engines) {
        let [dram, nvme] = [Tier::Dram, Tier::Nvme].map(|tier| listed.of(node_counts.node, tier));
        let keys = ReplicaCounts { dram: dram.len() as u64, nvme: nvme.len() as u64 };
        node_counts.demand_equal("members list", keys)?;
        let only_nvme = nvme.difference(&dram).copied().collect();
        let [in_dram, on_nvme] = [engine.own(&dram)?.own_dram, engine.own(&only_nvme)?.own_nvme];
        let missing = dram.len() as u64 - in_dram + (only_nvme.len() as u64 - on_nvme);
        ensure!(
            missing == 0,
            "{}: the members list {missing} blocks that the node does not hold",
            node_counts.name
        );
    }
    let all: u64 = counts.iter().map(|node_counts| node_counts.counts.total()).sum();
    ensure!(listed.len() as u64 == all, "the members list {} replicas, the nodes hold {all}", listed.len());
    Ok(())
}

/// Reads the number of blocks that an agent holds.
fn agent_counts(cluster: &ClusterFile, agent: &AgentAddresses) -> anyhow::Result<NodeCounts> {
    let status: serde_json::Value = serde_json::from_str(&cluster.page(agent, "/status")?)?;
    let gauge = |name: &str| {
        status["counters"][name]
            .as_u64()
            .with_context(|| format!("counter '{name}' is missing from an agent's status"))
    };
    let node = status["controlplane"]["node"].as_u64().and_then(|node| u16::try_from(node).ok());
    let Some(node) = node else { bail!("{} is not registered", agent.node) };
    let counts = ReplicaCounts { dram: gauge("dram_blocks")?, nvme: gauge("nvme_blocks")? };
    Ok(NodeCounts { name: agent.node.clone(), node: NodeId(node), counts })
}

impl ReplicaCounts {
    fn total(&self) -> u64 {
        self.dram + self.nvme
    }
}

impl fmt::Display for ReplicaCounts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} DRAM and {} NVMe replicas", self.dram, self.nvme)
    }
}

impl NodeCounts {
    /// Returns an error if `listed` differs from the counts of the node's agent; `source` names the list.
    fn demand_equal(&self, source: &str, listed: ReplicaCounts) -> anyhow::Result<()> {
        let NodeCounts { name, counts, .. } = self;
        ensure!(listed == *counts, "{name}: the {source} {listed}, the agent holds {counts}");
        Ok(())
    }
}

impl ReplicaTotals {
    fn of(counts: &[NodeCounts]) -> ReplicaTotals {
        let sum = |of: fn(&ReplicaCounts) -> u64| counts.iter().map(|node| of(&node.counts)).sum();
        ReplicaTotals {
            directory_dram: sum(|replicas| replicas.dram),
            directory_nvme: sum(|replicas| replicas.nvme),
            directory_compared: sum(ReplicaCounts::total),
        }
    }
}
