//! Faults of the demo: it kills and restarts an agent and a control-plane member.

use anyhow::{Context, bail};

use super::{Evictions, evictions_of};
use crate::engine_process::EngineProcess;
use reprise_testkit::cluster::Cluster;
use reprise_testkit::engine::DurableCheck;
use reprise_testkit::output::Audience;

/// Index of the node whose agent is killed.
const VICTIM: usize = 0;

/// Index of the member that is killed: the first in the agents' configuration.
const VICTIM_MEMBER: usize = 0;

/// Durable blocks of an agent before the kill and after the restart.
#[derive(Clone, Copy, Debug)]
pub(super) struct KillOutcome {
    pub(super) before: DurableCheck,
    pub(super) after: DurableCheck,
    /// Upper bound of the blocks that may be gone after the restart: their copy on NVMe was evicted or moved,
    /// before the kill while a copy in DRAM remained, or since the restart.
    pub(super) left: u64,
    pub(super) restart_seconds: f64,
}

/// Whether a control-plane member was killed, and whether it is running again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LostMember {
    None,
    Down,
    Restarted,
}

impl LostMember {
    /// Kills a member with SIGKILL. Restarts it at once if it is the only one, because no other can take
    /// over.
    pub(super) fn kill(
        cluster: &mut Cluster,
        members: usize,
        audience: Audience,
    ) -> anyhow::Result<LostMember> {
        audience.print_line("Killing a control-plane member with SIGKILL while requests continue …");
        cluster.kill_member(VICTIM_MEMBER);
        if members > 1 {
            return Ok(LostMember::Down);
        }
        cluster.restart_member(VICTIM_MEMBER)?;
        Ok(LostMember::Restarted)
    }

    /// Restarts the member if it is down.
    pub(super) fn restart(&mut self, cluster: &mut Cluster, audience: Audience) -> anyhow::Result<()> {
        if *self == LostMember::Down {
            cluster.restart_member(VICTIM_MEMBER)?;
            *self = LostMember::Restarted;
        }
        if *self == LostMember::Restarted {
            cluster.await_membership()?;
            audience.print_line("The killed control-plane member is running again.");
        }
        Ok(())
    }

    pub(super) fn count(self) -> usize {
        usize::from(self != LostMember::None)
    }
}

/// Kills an agent with SIGKILL, restarts it, and compares its durable blocks before and after.
pub(super) fn kill_and_restart(
    cluster: &mut Cluster,
    engines: &mut [EngineProcess],
    audience: Audience,
) -> anyhow::Result<KillOutcome> {
    engines[VICTIM].await_durable()?;
    let before = engines[VICTIM].check_durable().context("checking durable blocks before the kill")?;
    let left_before = evictions_of_victim(cluster)?.left_nvme();
    demand_durable(&before, left_before)?;
    let state = match before.missed {
        0 => format!("all {} are present", before.present),
        missed => format!(
            "{missed} of them were evicted or moved since, and the other {} are present",
            before.present
        ),
    };
    audience.print_line(format!(
        "node-{} has announced {} blocks as durable; {state}. Killing its agent with SIGKILL …",
        VICTIM + 1,
        before.announced,
    ));
    cluster.kill_agent(VICTIM);
    let restart_seconds = cluster.restart_agent(VICTIM)?;
    engines[VICTIM].reconnect()?;
    let after = engines[VICTIM].check_durable().context("checking durable blocks after the restart")?;
    audience.print_line(format!(
        "… ready again after {restart_seconds:.2} s: {} of {} durable blocks recovered, every byte verified.",
        after.present, before.present
    ));
    let left_after = evictions_of_victim(cluster)?.left_nvme();
    let left = left_before - before.missed + left_after;
    Ok(KillOutcome { before, after, left, restart_seconds })
}

fn evictions_of_victim(cluster: &Cluster) -> anyhow::Result<Evictions> {
    let file = cluster.file();
    evictions_of(&file, &file.agents[VICTIM])
}

impl Evictions {
    /// Number of blocks whose copy on NVMe was dropped on purpose.
    fn left_nvme(self) -> u64 {
        self.nvme + self.moved
    }
}

/// Returns an error unless each block announced as durable is readable, or was evicted or moved.
pub(super) fn demand_durable(check: &DurableCheck, left: u64) -> anyhow::Result<()> {
    if check.failed > 0 {
        bail!("cannot read {} of {} durable blocks", check.failed, check.announced);
    }
    if check.missed > left {
        bail!(
            "{} of {} durable blocks are missing, but only {left} were evicted or moved to another node",
            check.missed,
            check.announced
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_durable_block_without_an_eviction_fails_the_demo() {
        let check = DurableCheck { announced: 10, present: 8, missed: 2, ..DurableCheck::default() };
        assert!(demand_durable(&check, 2).is_ok());
        let error = demand_durable(&check, 1).expect_err("one block is lost").to_string();
        assert!(error.contains("2 of 10"), "{error}");
    }

    #[test]
    fn unreadable_durable_block_fails_the_demo_regardless_of_evictions() {
        let check = DurableCheck { announced: 10, present: 9, failed: 1, ..DurableCheck::default() };
        assert!(demand_durable(&check, 1000).is_err());
    }
}
