//! Whether the directory is complete: what the control plane's members know together is what the agents hold.

use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use serde::Serialize;

use crate::cluster::ClusterFile;
use crate::http;
use crate::status::whole_directory;

/// Until announcements have arrived: a member that has come back is told of its slots' blocks anew.
const COMPLETE_WITHIN: Duration = Duration::from_secs(20);

/// Between two looks.
const PAUSE: Duration = Duration::from_millis(50);

/// What both sides count when they agree.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub(super) struct Complete {
    /// Replicas in DRAM, by the directory and by the agents.
    pub(super) directory_dram: u64,
    /// On NVMe.
    pub(super) directory_nvme: u64,
}

/// Waits until the directory is complete.
pub(super) fn await_complete(cluster: &ClusterFile) -> anyhow::Result<Complete> {
    let give_up = Instant::now() + COMPLETE_WITHIN;
    loop {
        let (directory, agents) = (directory(cluster), agents(cluster)?);
        if let Ok(directory) = &directory
            && *directory == agents
        {
            return Ok(agents);
        }
        if Instant::now() >= give_up {
            let directory = directory.context("the directory is not whole")?;
            bail!(
                "the directory is not complete within {COMPLETE_WITHIN:?}: {directory:?}, the agents hold {agents:?}"
            );
        }
        std::thread::sleep(PAUSE);
    }
}

fn directory(cluster: &ClusterFile) -> anyhow::Result<Complete> {
    let parts = whole_directory(cluster)?;
    let partial: u32 = parts.iter().map(|part| part.slots_partial).sum();
    ensure!(partial == 0, "{partial} slots are partial");
    let nodes = || parts.iter().flat_map(|part| &part.nodes);
    Ok(Complete {
        directory_dram: nodes().map(|node| node.dram).sum(),
        directory_nvme: nodes().map(|node| node.nvme).sum(),
    })
}

fn agents(cluster: &ClusterFile) -> anyhow::Result<Complete> {
    let mut sum = Complete { directory_dram: 0, directory_nvme: 0 };
    for agent in &cluster.agents {
        let status: serde_json::Value = serde_json::from_str(&http::get(&agent.admin, "/status")?)?;
        let gauge = |name: &str| {
            status["counters"][name].as_u64().with_context(|| format!("an agent's status has no '{name}'"))
        };
        sum.directory_dram += gauge("dram_blocks")?;
        sum.directory_nvme += gauge("nvme_blocks")?;
    }
    Ok(sum)
}
