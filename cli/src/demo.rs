//! The demo: a cluster on this machine serves a real trace, every byte checked; then one agent is killed and comes back.
//! With etcd the control plane has several members, one of which is killed while the trace is replayed, and comes back when
//! it has ended. In the end the directory is complete.

mod completeness;
mod faults;

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use indicatif::ProgressBar;
use reprise_policy::{ByteSize, TenantName};
use serde::Serialize;

use crate::cluster::{AgentAddresses, AgentSizes, Cluster, ControlPlanes};
use crate::config::{Config, DemoConfig};
use crate::engine::EngineSettings;
use crate::engine_process::EngineProcess;
use crate::http;
use crate::interrupt;
use crate::model::llama_3_8b_scaled;
use crate::output::{Audience, bytes_text};
use crate::replay::{self, Subject, Summary, Totals};
use crate::trace::{Trace, TraceRequest};
use completeness::{Complete, await_complete};
use faults::{LostMember, demand_durable, kill_and_restart};

/// Nodes of the demo's cluster, unless told otherwise; and at the most, which share this machine.
const NODES: usize = 2;
const NODES_MAX: usize = 16;

/// Members of the control plane on etcd, unless told otherwise; and at the most.
const MEMBERS: usize = 3;
const MEMBERS_MAX: usize = 16;

/// How old the evictions on the screen may be: asking the agents takes about a millisecond.
const EVICTIONS_EVERY: Duration = Duration::from_millis(500);

/// Requests that are replayed again after the restart.
const REQUESTS_AFTER_RESTART: usize = 200;

/// Arguments of `reprise demo`.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct DemoArgs {
    /// Trace to replay (JSON lines); the conversation trace by default.
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
    /// Requests to replay before the kill [default: 1500].
    #[arg(long)]
    requests: Option<usize>,
    /// Scale of the model: bytes of Llama-3-8B's KV cache divided by this, a power of two [default: 1024].
    #[arg(long)]
    scale: Option<u32>,
    /// DRAM arena of each agent [default: 192MiB].
    #[arg(long)]
    arena: Option<ByteSize>,
    /// NVMe pool of each agent [default: 3GiB].
    #[arg(long)]
    pool: Option<ByteSize>,
    /// Where the cluster keeps its data [default: the cache folder's demo].
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
    /// Tenant whose blocks these are: 1 to 63 of a-z, 0-9 and '-'.
    #[arg(long, value_name = "NAME", default_value = "default")]
    tenant: TenantName,
    /// Keep the cluster running after the demo, until Ctrl-C.
    #[arg(long, visible_alias = "keep")]
    hold: bool,
    /// Nodes, each with an agent and an engine [default: 2].
    #[arg(long, value_parser = clap::value_parser!(u8).range(2..=NODES_MAX as i64))]
    nodes: Option<u8>,
    /// Members of the control plane that share an etcd, one of which is killed on the way; needs its binary (`make etcd`).
    #[arg(long)]
    etcd: bool,
    /// How many members [default: 3].
    #[arg(long, requires = "etcd", value_parser = clap::value_parser!(u8).range(1..=MEMBERS_MAX as i64))]
    members: Option<u8>,
}

/// The last line of `reprise demo --json`.
#[derive(Clone, Debug, Serialize)]
struct DemoSummary {
    #[serde(flatten)]
    replay: Summary,
    /// Evictions of all agents, by tier.
    evictions_dram: u64,
    evictions_nvme: u64,
    /// Tiers without a hit; empty, unless sizes were chosen that leave a tier unused.
    tiers_without_hits: Vec<&'static str>,
    /// Blocks that the killed node had announced durable before the kill.
    durable_announced: u64,
    /// Of those, blocks that had left it again: evicted from NVMe by its policy, or moved to another node.
    durable_evicted: u64,
    /// The rest: all present, with the right bytes, before the kill.
    durable_before_kill: u64,
    /// Of those, present with the right bytes after the restart.
    durable_after_restart: u64,
    /// Of those, at the most so many may have left it meanwhile: their copy on NVMe was evicted or moved to another node.
    durable_left: u64,
    /// Seconds from the restart of the killed agent until it was ready.
    restart_seconds: f64,
    /// Members of the control plane, and how many of them were killed on the way.
    members: usize,
    members_killed: usize,
    /// What the directory knows in the end, which is what the agents hold.
    #[serde(flatten)]
    complete: Complete,
    /// The part of the trace that was replayed again.
    after_restart: Summary,
}

/// Copies of blocks that agents have dropped, to have room or because the blocks have moved.
#[derive(Clone, Copy, Debug, Default)]
struct Evictions {
    dram: u64,
    nvme: u64,
    /// From NVMe, to another node's.
    moved: u64,
}

/// What a person sees while the demo replays: bar, totals, and what the agents evict meanwhile.
struct Live<'a> {
    bar: ProgressBar,
    cluster: &'a Cluster,
    evictions: Evictions,
    /// When the agents were asked; `None`: not yet.
    asked: Option<Instant>,
}

impl Live<'_> {
    fn new(bar: ProgressBar, cluster: &Cluster) -> Live<'_> {
        Live { bar, cluster, evictions: Evictions::default(), asked: None }
    }

    fn served(&mut self, totals: &Totals) {
        self.bar.inc(1);
        if self.bar.is_hidden() {
            return;
        }
        if self.asked.is_none_or(|asked| asked.elapsed() >= EVICTIONS_EVERY) {
            self.asked = Some(Instant::now());
            // Shown for information: an agent that does not answer now fails the demo where it matters.
            self.evictions = evictions(self.cluster).unwrap_or(self.evictions);
        }
        let Evictions { dram, nvme, .. } = self.evictions;
        self.bar.set_message(format!("{}; evicted from DRAM {dram}, from NVMe {nvme}", totals.live()));
    }

    fn end(self) {
        self.bar.finish_and_clear();
    }
}

/// `reprise demo`.
pub(crate) fn command(args: &DemoArgs, config: &Config, audience: Audience) -> anyhow::Result<()> {
    let trace = Trace::open(args.trace.as_deref())?;
    let chosen = args.over(&config.demo);
    let layout = llama_3_8b_scaled(chosen.scale)?;
    let directory = config.cluster.directory(args.dir.as_deref());
    audience.say(format!(
        "Llama-3-8B's KV cache at 1/{}: one trace block of 512 tokens is {} in {} objects of {}.",
        chosen.scale,
        bytes_text(layout.block_bytes()),
        layout.objects(),
        bytes_text(layout.object_bytes())
    ));
    let (control, nodes) = (args.control(), args.nodes());
    audience.say(match control {
        ControlPlanes::Embedded => {
            format!("Starting a control plane and {nodes} agents in {} …", directory.display())
        }
        ControlPlanes::Etcd { members } => format!(
            "Starting etcd, {members} members of the control plane and {nodes} agents in {} …",
            directory.display()
        ),
    });
    let sizes = AgentSizes { arena: chosen.arena, pool: chosen.pool, moves: None };
    let mut cluster = Cluster::start_controlplane(&directory, control)?;
    cluster.start_agents(nodes, sizes)?;
    for agent in cluster.file().agents {
        audience.say(format!("  {}: status and metrics at http://{}/status", agent.node, agent.admin));
    }
    let settings: Vec<EngineSettings> = cluster
        .file()
        .agents
        .iter()
        .map(|agent| EngineSettings { socket: agent.socket.clone(), layout, tenant: args.tenant.clone() })
        .collect();
    let mut engines = settings.iter().map(EngineProcess::start).collect::<anyhow::Result<Vec<_>>>()?;

    let subject =
        Subject { trace: trace.name.clone(), scale: chosen.scale, block_bytes: layout.block_bytes() };
    let requests = &trace.requests[..chosen.requests.min(trace.requests.len())];
    audience.say(format!("Replaying {} requests of {} …", requests.len(), trace.name));
    let mut totals = Totals::new();
    let (first, rest) = match control {
        ControlPlanes::Embedded => (requests, [].as_slice()),
        ControlPlanes::Etcd { .. } => requests.split_at(requests.len() / 2),
    };
    serve(first, &mut engines, &mut totals, (&cluster, audience))?;
    let mut lost = LostMember::None;
    if let ControlPlanes::Etcd { members } = control {
        lost = LostMember::kill(&mut cluster, members, audience)?;
        serve(rest, &mut engines, &mut totals, (&cluster, audience))?;
    }
    let summary = totals.summary("demo", &subject);
    let evictions = evictions(&cluster)?;
    audience.say(format!(
        "\n{}evictions: {} from DRAM, {} from NVMe\n",
        totals.table(),
        evictions.dram,
        evictions.nvme
    ));

    let killed = kill_and_restart(&mut cluster, &mut engines, audience)?;
    lost.bring_back(&mut cluster, audience)?;
    let again = &requests[..REQUESTS_AFTER_RESTART.min(requests.len())];
    audience.say(format!("Replaying the first {} requests again …", again.len()));
    let mut after = Totals::new();
    serve(again, &mut engines, &mut after, (&cluster, audience))?;
    audience.say(after.table());
    for engine in &mut engines {
        engine.settle()?;
    }
    let complete = await_complete(&cluster.file(), &mut engines)?;
    audience.say(format!(
        "The directory is complete: {} blocks in DRAM and {} on NVMe, key by key those that the agents hold.",
        complete.directory_dram, complete.directory_nvme
    ));

    let mismatches =
        totals.mismatches + after.mismatches + killed.before.mismatches + killed.after.mismatches;
    let mut replay = summary;
    replay.mismatches = mismatches;
    replay.bytes_verified +=
        after.bytes_verified + killed.before.bytes_verified + killed.after.bytes_verified;
    let unused = totals.hits.tiers_without_hits();
    audience.emit(&DemoSummary {
        replay,
        tiers_without_hits: unused.clone(),
        durable_announced: killed.before.announced,
        durable_evicted: killed.before.missed,
        evictions_dram: evictions.dram,
        evictions_nvme: evictions.nvme,
        durable_before_kill: killed.before.present,
        durable_after_restart: killed.after.present,
        durable_left: killed.left,
        restart_seconds: killed.restart_seconds,
        members: cluster.file().members.len(),
        members_killed: lost.count(),
        complete,
        after_restart: after.summary("after_restart", &subject),
    });
    if mismatches > 0 {
        bail!("{mismatches} words differed from what was saved");
    }
    demand_calls(totals.errors + after.errors)?;
    demand_durable(&killed.after, killed.left).context("after the restart")?;
    demand_tiers(args.sizes(&chosen), &unused, audience)?;
    audience.say(format!("Every byte was right: {mismatches} mismatches."));
    if args.hold {
        hold(&cluster, audience)?;
    }
    Ok(())
}

/// Sends requests to the engines, with a bar for people.
fn serve(
    requests: &[TraceRequest],
    engines: &mut [EngineProcess],
    totals: &mut Totals,
    (cluster, audience): (&Cluster, Audience),
) -> anyhow::Result<()> {
    let bar = audience.progress(requests.len() as u64, "replay");
    let mut live = Live::new(bar, cluster);
    replay::run(requests, engines, totals, |totals| live.served(totals))?;
    live.end();
    Ok(())
}

/// Every call to an agent succeeded: what failed was computed, and the demo is not about that.
fn demand_calls(failed: u64) -> anyhow::Result<()> {
    if failed > 0 {
        bail!(
            "{failed} calls to the agents failed (errors); the warnings above and the agents' logs say why"
        );
    }
    Ok(())
}

/// The default trace and sizes hit every tier; others need not, which is then said.
fn demand_tiers(sizes: Sizes, unused: &[&str], audience: Audience) -> anyhow::Result<()> {
    if unused.is_empty() {
        return Ok(());
    }
    if sizes == Sizes::Default {
        bail!("no hit in {}: with the default sizes every tier serves", unused.join(", "));
    }
    audience.say(format!("No hit in {}: these sizes leave a tier unused.", unused.join(", ")));
    Ok(())
}

/// Whether anything differs from what the demo is made for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Sizes {
    Default,
    Chosen,
}

impl DemoArgs {
    /// What the flags say, and what they leave to the file.
    fn over(&self, file: &DemoConfig) -> DemoConfig {
        DemoConfig {
            requests: self.requests.unwrap_or(file.requests),
            scale: self.scale.unwrap_or(file.scale),
            arena: self.arena.unwrap_or(file.arena),
            pool: self.pool.unwrap_or(file.pool),
        }
    }

    fn control(&self) -> ControlPlanes {
        match self.etcd {
            true => ControlPlanes::Etcd { members: self.members.map_or(MEMBERS, usize::from) },
            false => ControlPlanes::Embedded,
        }
    }

    fn nodes(&self) -> usize {
        self.nodes.map_or(NODES, usize::from)
    }

    fn sizes(&self, chosen: &DemoConfig) -> Sizes {
        let ours = self.trace.is_none() && self.nodes() == NODES && !self.etcd;
        if ours && *chosen == DemoConfig::default() { Sizes::Default } else { Sizes::Chosen }
    }
}

fn evictions(cluster: &Cluster) -> anyhow::Result<Evictions> {
    let mut sum = Evictions::default();
    for agent in cluster.file().agents {
        let of_agent = evictions_of(&agent)?;
        sum.dram += of_agent.dram;
        sum.nvme += of_agent.nvme;
        sum.moved += of_agent.moved;
    }
    Ok(sum)
}

fn evictions_of(agent: &AgentAddresses) -> anyhow::Result<Evictions> {
    let status: serde_json::Value = serde_json::from_str(&http::get(&agent.admin, "/status")?)?;
    let counter = |name: &str| {
        status["counters"][name]
            .as_u64()
            .with_context(|| format!("the agent's status has no counter '{name}'"))
    };
    Ok(Evictions {
        dram: counter("dram_evictions")?,
        nvme: counter("nvme_evictions")?,
        moved: counter("moved_blocks")?,
    })
}

/// Says how to reach the cluster, and waits for Ctrl-C.
fn hold(cluster: &Cluster, audience: Audience) -> anyhow::Result<()> {
    let (sender, interrupted) = std::sync::mpsc::sync_channel(1);
    interrupt::tells(sender);
    for agent in cluster.file().agents {
        audience.say(format!("Engines reach {} at {}.", agent.node, agent.socket.display()));
    }
    audience.say("The cluster keeps running; try `reprise status` and `reprise replay`. Ctrl-C ends it.");
    interrupted.recv().context("waiting for Ctrl-C")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_that_failed_fails_the_demo_and_is_counted() {
        assert!(demand_calls(0).is_ok());
        let error = demand_calls(3).expect_err("three calls failed").to_string();
        assert!(error.contains("3 calls"), "{error}");
    }
}
