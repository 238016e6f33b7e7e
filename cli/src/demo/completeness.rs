//! Checks that the directory is complete: the control-plane members together know exactly the blocks that the
//! agents hold.
//!
//! The check has two steps:
//!
//! 1. The number of replicas must be equal in directory and agent, for each node and tier.
//! 2. The members' keys are read as `reprise events` reads them. Each node's engine then looks up the keys
//!    that the directory lists for the node, and must find all of them.
//!
//! Equal numbers and no missing key mean equal sets. One difference stays undetected: a key that the
//! directory lists in DRAM but the node holds only on NVMe, if another block makes up for it in the counts.

use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use reprise_policy::{NodeId, Tier};
use serde::Serialize;

use crate::cluster::{AgentAddresses, ClusterFile};
use crate::engine_process::EngineProcess;
use crate::events::{Replicas, snapshot};
use crate::http;
use crate::status::whole_directory;

/// Time limit for the directory to become complete: agents announce their blocks to a restarted member again.
const COMPLETE_WITHIN: Duration = Duration::from_secs(20);

/// Pause between two checks.
const PAUSE: Duration = Duration::from_millis(50);

/// Number of replicas on which directory and agents agree.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub(super) struct Complete {
    /// Replicas in DRAM.
    pub(super) directory_dram: u64,
    /// Replicas on NVMe.
    pub(super) directory_nvme: u64,
    /// Replicas whose keys were read from the members and looked up at their nodes.
    pub(super) directory_compared: u64,
}

/// Number of replicas on one node, by tier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct ReplicaCounts {
    node: NodeId,
    dram: u64,
    nvme: u64,
}

/// Waits until the directory is complete. Engines must be idle, and in the order of the agents.
pub(super) fn await_complete(
    cluster: &ClusterFile,
    engines: &mut [EngineProcess],
) -> anyhow::Result<Complete> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let deadline = Instant::now() + COMPLETE_WITHIN;
    loop {
        let held = cluster.agents.iter().map(agent_counts).collect::<anyhow::Result<Vec<_>>>()?;
        let mut compared = compare_counts(cluster, &held);
        if compared.is_ok() {
            let listed = runtime.block_on(snapshot(&cluster.grpc_addresses()))?;
            compared = compare_keys(&listed, &held, engines);
        }
        match compared {
            Ok(()) => return Ok(Complete::of(&held)),
            Err(error) if Instant::now() >= deadline => {
                return Err(
                    error.context(format!("the directory was not complete within {COMPLETE_WITHIN:?}"))
                );
            }
            Err(_) => std::thread::sleep(PAUSE),
        }
    }
}

/// Returns an error unless each member has all inventories, and the same counts as the agents for each node.
fn compare_counts(cluster: &ClusterFile, held: &[ReplicaCounts]) -> anyhow::Result<()> {
    let parts = whole_directory(cluster).context("cannot read the directory of all members")?;
    let partial: u32 = parts.iter().map(|part| part.slots_partial).sum();
    ensure!(partial == 0, "{partial} hash slots lack the inventory of a node");
    for of_node in held {
        let listed =
            parts.iter().flat_map(|part| &part.nodes).filter(|node| node.node == u32::from(of_node.node.0));
        let (dram, nvme) = listed.fold((0, 0), |(dram, nvme), node| (dram + node.dram, nvme + node.nvme));
        let listed = ReplicaCounts { node: of_node.node, dram, nvme };
        ensure!(listed == *of_node, "the directory lists {listed:?}, the agent holds {of_node:?}");
    }
    Ok(())
}

/// Returns an error unless each node holds all keys that the directory lists for it, in equal number.
fn compare_keys(
    listed: &Replicas,
    held: &[ReplicaCounts],
    engines: &mut [EngineProcess],
) -> anyhow::Result<()> {
    for (of_node, engine) in held.iter().zip(engines) {
        let [dram, nvme] = [Tier::Dram, Tier::Nvme].map(|tier| listed.of(of_node.node, tier));
        let keys = ReplicaCounts { node: of_node.node, dram: dram.len() as u64, nvme: nvme.len() as u64 };
        ensure!(keys == *of_node, "the members list {keys:?}, the agent holds {of_node:?}");
        let only_nvme = nvme.difference(&dram).copied().collect();
        let [in_dram, on_nvme] = [engine.own(&dram)?.own_dram, engine.own(&only_nvme)?.own_nvme];
        let missing = dram.len() as u64 - in_dram + (only_nvme.len() as u64 - on_nvme);
        ensure!(missing == 0, "{missing} blocks that the members list are not on {:?}", of_node.node);
    }
    let all: u64 = held.iter().map(|of_node| of_node.dram + of_node.nvme).sum();
    ensure!(listed.len() as u64 == all, "the members list {} replicas, the nodes hold {all}", listed.len());
    Ok(())
}

/// Reads the number of blocks that an agent holds.
fn agent_counts(agent: &AgentAddresses) -> anyhow::Result<ReplicaCounts> {
    let status: serde_json::Value = serde_json::from_str(&http::get(&agent.admin, "/status")?)?;
    let gauge = |name: &str| {
        status["counters"][name]
            .as_u64()
            .with_context(|| format!("counter '{name}' is missing from an agent's status"))
    };
    let node = status["controlplane"]["node"].as_u64().and_then(|node| u16::try_from(node).ok());
    let Some(node) = node else { bail!("{} is not registered", agent.node) };
    Ok(ReplicaCounts { node: NodeId(node), dram: gauge("dram_blocks")?, nvme: gauge("nvme_blocks")? })
}

impl Complete {
    fn of(held: &[ReplicaCounts]) -> Complete {
        let sum = |of: fn(&ReplicaCounts) -> u64| held.iter().map(of).sum();
        Complete {
            directory_dram: sum(|held| held.dram),
            directory_nvme: sum(|held| held.nvme),
            directory_compared: sum(|held| held.dram + held.nvme),
        }
    }
}
