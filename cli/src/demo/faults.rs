//! What the demo does to its cluster: an agent and a member of the control plane are killed, and come back.

use anyhow::{Context, bail};

use super::{Evictions, evictions_of};
use crate::cluster::Cluster;
use crate::engine::DurableCheck;
use crate::engine_process::EngineProcess;
use crate::output::Audience;

/// The node that is killed.
const VICTIM: usize = 0;

/// The member that is killed: the one that agents are told of first.
const VICTIM_MEMBER: usize = 0;

/// What killing and restarting an agent showed.
#[derive(Clone, Copy, Debug)]
pub(super) struct KillOutcome {
    pub(super) before: DurableCheck,
    pub(super) after: DurableCheck,
    /// Blocks that were there before and may be gone after: those whose copy on NVMe was evicted or moved while one in DRAM
    /// was left, and those that have moved since the restart.
    pub(super) left: u64,
    pub(super) restart_seconds: f64,
}

/// A member of the control plane that was killed, and whether it is still away.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LostMember {
    None,
    Away,
    Back,
}

impl LostMember {
    /// Kills a member with SIGKILL. The only one is started again at once: there is nobody to take its place.
    pub(super) fn kill(
        cluster: &mut Cluster,
        members: usize,
        audience: Audience,
    ) -> anyhow::Result<LostMember> {
        audience.say("Killing a member of the control plane with SIGKILL; the requests go on …");
        cluster.kill_member(VICTIM_MEMBER)?;
        if members > 1 {
            return Ok(LostMember::Away);
        }
        cluster.restart_member(VICTIM_MEMBER)?;
        Ok(LostMember::Back)
    }

    /// Starts the member again if it is away.
    pub(super) fn bring_back(&mut self, cluster: &mut Cluster, audience: Audience) -> anyhow::Result<()> {
        if *self == LostMember::Away {
            cluster.restart_member(VICTIM_MEMBER)?;
            *self = LostMember::Back;
        }
        if *self == LostMember::Back {
            cluster.members_know_each_other()?;
            audience.say("The killed member of the control plane is back.");
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
    engines[VICTIM].settle()?;
    let before = engines[VICTIM].check_durable().context("checking durable blocks before the kill")?;
    let left_before = evictions_of(&cluster.file().agents[VICTIM])?.left_nvme();
    demand_durable(&before, left_before)?;
    audience.say(format!(
        "node-{} has announced {} blocks durable so far, of which {} have left it again (evicted, or moved); all other \
         {} are there. Killing its agent with SIGKILL …",
        VICTIM + 1,
        before.announced,
        before.missed,
        before.present,
    ));
    cluster.kill_agent(VICTIM)?;
    let restart_seconds = cluster.restart_agent(VICTIM)?;
    engines[VICTIM].reconnect()?;
    let after = engines[VICTIM].check_durable().context("checking durable blocks after the restart")?;
    audience.say(format!(
        "… ready again after {restart_seconds:.2} s: {} of {} durable blocks came back, every byte compared.",
        after.present, before.present
    ));
    let left_after = evictions_of(&cluster.file().agents[VICTIM])?.left_nvme();
    let left = left_before - before.missed + left_after;
    Ok(KillOutcome { before, after, left, restart_seconds })
}

impl Evictions {
    /// Blocks whose copy on NVMe is no longer there, and should not be.
    fn left_nvme(self) -> u64 {
        self.nvme + self.moved
    }
}

/// Every block that was announced durable is there and right, or is one of those that were evicted or moved.
pub(super) fn demand_durable(check: &DurableCheck, left: u64) -> anyhow::Result<()> {
    if check.failed > 0 {
        bail!("{} of {} durable blocks could not be read back", check.failed, check.announced);
    }
    if check.missed > left {
        bail!(
            "{} of {} durable blocks are gone, and only {left} were evicted or moved to another node: the rest is lost",
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
    fn a_durable_block_that_is_gone_without_an_eviction_fails_the_demo() {
        let check = DurableCheck { announced: 10, present: 8, missed: 2, ..DurableCheck::default() };
        assert!(demand_durable(&check, 2).is_ok());
        let error = demand_durable(&check, 1).expect_err("one block is lost").to_string();
        assert!(error.contains("2 of 10"), "{error}");
    }

    #[test]
    fn a_durable_block_that_cannot_be_read_fails_the_demo_however_many_were_evicted() {
        let check = DurableCheck { announced: 10, present: 9, failed: 1, ..DurableCheck::default() };
        assert!(demand_durable(&check, 1000).is_err());
    }
}
