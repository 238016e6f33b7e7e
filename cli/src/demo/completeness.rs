//! Whether the directory is complete: what the control plane's members know together is what the agents hold.
//!
//! First their numbers must agree, node by node and tier by tier. Then the members' keys are read as `reprise events` reads
//! them, and each node's engine asks its agent for those that are told of it: all must be there. So neither holds a key that the other one
//! has not, unless a block that is only on NVMe took the place of one in DRAM that is told there.

use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use reprise_policy::{NodeId, Tier};
use serde::Serialize;

use crate::cluster::{AgentAddresses, ClusterFile};
use crate::engine_process::EngineProcess;
use crate::events::{Replicas, snapshot};
use crate::http;
use crate::status::whole_directory;

/// Until announcements have arrived: a member that has come back is told of its slots' blocks anew.
const COMPLETE_WITHIN: Duration = Duration::from_secs(20);

/// Between two looks.
const PAUSE: Duration = Duration::from_millis(50);

/// What both sides have when they agree.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub(super) struct Complete {
    /// Replicas in DRAM, by the directory and by the agents.
    pub(super) directory_dram: u64,
    /// On NVMe.
    pub(super) directory_nvme: u64,
    /// Replicas whose keys were read from the members and asked for at their nodes.
    pub(super) directory_compared: u64,
}

/// Replicas of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Held {
    node: NodeId,
    dram: u64,
    nvme: u64,
}

/// Waits until the directory is complete. Nobody may save or load meanwhile; engines are those of the agents, in their order.
pub(super) fn await_complete(
    cluster: &ClusterFile,
    engines: &mut [EngineProcess],
) -> anyhow::Result<Complete> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let give_up = Instant::now() + COMPLETE_WITHIN;
    loop {
        let held = cluster.agents.iter().map(held).collect::<anyhow::Result<Vec<_>>>()?;
        let mut compared = counted(cluster, &held);
        if compared.is_ok() {
            let told = runtime.block_on(snapshot(&cluster.grpc_addresses()))?;
            compared = compare(&told, &held, engines);
        }
        match compared {
            Ok(()) => return Ok(Complete::of(&held)),
            Err(error) if Instant::now() >= give_up => {
                return Err(
                    error.context(format!("the directory is not complete within {COMPLETE_WITHIN:?}"))
                );
            }
            Err(_) => std::thread::sleep(PAUSE),
        }
    }
}

/// The members' parts are whole, and have as many replicas of each node as that holds.
fn counted(cluster: &ClusterFile, held: &[Held]) -> anyhow::Result<()> {
    let parts = whole_directory(cluster).context("the directory is not whole")?;
    let partial: u32 = parts.iter().map(|part| part.slots_partial).sum();
    ensure!(partial == 0, "{partial} slots are partial");
    for of_node in held {
        let told =
            parts.iter().flat_map(|part| &part.nodes).filter(|told| told.node == u32::from(of_node.node.0));
        let (dram, nvme) = told.fold((0, 0), |(dram, nvme), told| (dram + told.dram, nvme + told.nvme));
        let told = Held { node: of_node.node, dram, nvme };
        ensure!(told == *of_node, "the members know {told:?}, the agent has {of_node:?}");
    }
    Ok(())
}

/// All keys that are told of a node are there, and as many are told as it has.
fn compare(told: &Replicas, held: &[Held], engines: &mut [EngineProcess]) -> anyhow::Result<()> {
    for (of_node, engine) in held.iter().zip(engines) {
        let [dram, nvme] = [Tier::Dram, Tier::Nvme].map(|tier| told.of(of_node.node, tier));
        let keys = Held { node: of_node.node, dram: dram.len() as u64, nvme: nvme.len() as u64 };
        ensure!(keys == *of_node, "the members tell of {keys:?}, the agent has {of_node:?}");
        let only_nvme = nvme.difference(&dram).copied().collect();
        let [in_dram, on_nvme] = [engine.own(&dram)?.own_dram, engine.own(&only_nvme)?.own_nvme];
        let absent = dram.len() as u64 - in_dram + (only_nvme.len() as u64 - on_nvme);
        ensure!(absent == 0, "{absent} blocks that the members tell of are not on {:?}", of_node.node);
    }
    let all: u64 = held.iter().map(|of_node| of_node.dram + of_node.nvme).sum();
    ensure!(told.len() as u64 == all, "{} replicas are told, and nodes have {all}", told.len());
    Ok(())
}

/// What an agent says that it has.
fn held(agent: &AgentAddresses) -> anyhow::Result<Held> {
    let status: serde_json::Value = serde_json::from_str(&http::get(&agent.admin, "/status")?)?;
    let gauge = |name: &str| {
        status["counters"][name].as_u64().with_context(|| format!("an agent's status has no '{name}'"))
    };
    let node = status["controlplane"]["node"].as_u64().and_then(|node| u16::try_from(node).ok());
    let Some(node) = node else { bail!("{} is not registered", agent.node) };
    Ok(Held { node: NodeId(node), dram: gauge("dram_blocks")?, nvme: gauge("nvme_blocks")? })
}

impl Complete {
    fn of(held: &[Held]) -> Complete {
        let sum = |of: fn(&Held) -> u64| held.iter().map(of).sum();
        Complete {
            directory_dram: sum(|held| held.dram),
            directory_nvme: sum(|held| held.nvme),
            directory_compared: sum(|held| held.dram + held.nvme),
        }
    }
}
