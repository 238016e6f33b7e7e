//! The demo: a two-node cluster on this machine serves a real trace, every byte checked; then one agent is
//! killed and comes back.

use std::path::PathBuf;

use anyhow::{Context, bail};
use reprise_policy::ByteSize;
use serde::Serialize;

use crate::cluster::{AgentSizes, Cluster, cache_directory};
use crate::engine::{DurableCheck, EngineSettings};
use crate::engine_process::EngineProcess;
use crate::http;
use crate::model::llama_3_8b_scaled;
use crate::output::{Audience, bytes_text};
use crate::replay::{self, Subject, Summary, Totals};
use crate::trace::Trace;

/// Nodes of the demo's cluster.
const NODES: usize = 2;

/// The node that is killed.
const VICTIM: usize = 0;

/// Requests that are replayed again after the restart.
const REQUESTS_AFTER_RESTART: usize = 200;

/// Arguments of `reprise demo`.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct DemoArgs {
    /// Trace to replay (JSON lines); the conversation trace by default.
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
    /// Requests to replay before the kill.
    #[arg(long, default_value_t = 1500)]
    requests: usize,
    /// Scale of the model: bytes of Llama-3-8B's KV cache divided by this (a power of two).
    #[arg(long, default_value_t = crate::model::SCALE_DEFAULT)]
    scale: u32,
    /// DRAM arena of each agent.
    #[arg(long, default_value = "192MiB")]
    arena: ByteSize,
    /// NVMe pool of each agent.
    #[arg(long, default_value = "3GiB")]
    pool: ByteSize,
    /// Where the cluster keeps its data [default: the cache folder's demo].
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
    /// Keep the cluster running after the demo, until Ctrl-C.
    #[arg(long)]
    hold: bool,
}

/// The last line of `reprise demo --json`.
#[derive(Clone, Debug, Serialize)]
struct DemoSummary {
    #[serde(flatten)]
    replay: Summary,
    /// Evictions of all agents, by tier.
    evictions_dram: u64,
    evictions_nvme: u64,
    /// Durable blocks of the killed node, present before the kill.
    durable_before_kill: u64,
    /// Of those, present with the right bytes after the restart.
    durable_after_restart: u64,
    /// Seconds from the restart of the killed agent until it was ready.
    restart_seconds: f64,
    /// The part of the trace that was replayed again.
    after_restart: Summary,
}

/// Evictions of all agents.
#[derive(Clone, Copy, Debug, Default)]
struct Evictions {
    dram: u64,
    nvme: u64,
}

/// What killing and restarting an agent showed.
#[derive(Clone, Copy, Debug)]
struct KillOutcome {
    before: DurableCheck,
    after: DurableCheck,
    restart_seconds: f64,
}

/// `reprise demo`.
pub(crate) fn command(args: &DemoArgs, audience: Audience) -> anyhow::Result<()> {
    let trace = Trace::open(args.trace.as_deref())?;
    let layout = llama_3_8b_scaled(args.scale)?;
    let directory = args.dir.clone().unwrap_or_else(|| cache_directory().join("demo"));
    audience.say(format!(
        "Llama-3-8B's KV cache at 1/{}: one trace block of 512 tokens is {} in {} objects of {}.",
        args.scale,
        bytes_text(layout.block_bytes()),
        layout.objects(),
        bytes_text(layout.object_bytes())
    ));
    audience.say(format!("Starting a control plane and {NODES} agents in {} …", directory.display()));
    let sizes = AgentSizes { arena: args.arena, pool: args.pool };
    let mut cluster = Cluster::start(&directory, NODES, sizes)?;
    for agent in cluster.file().agents {
        audience.say(format!("  {}: status and metrics at http://{}/status", agent.node, agent.admin));
    }
    let settings: Vec<EngineSettings> = cluster
        .file()
        .agents
        .iter()
        .map(|agent| EngineSettings { socket: agent.socket.clone(), layout })
        .collect();
    let mut engines = settings.iter().map(EngineProcess::start).collect::<anyhow::Result<Vec<_>>>()?;

    let subject = Subject { trace: trace.name.clone(), scale: args.scale, block_bytes: layout.block_bytes() };
    let requests = &trace.requests[..args.requests.min(trace.requests.len())];
    audience.say(format!("Replaying {} requests of {} …", requests.len(), trace.name));
    let bar = audience.progress(requests.len() as u64, "replay");
    let mut totals = Totals::new();
    replay::run(requests, &mut engines, &mut totals, &bar)?;
    bar.finish_and_clear();
    let summary = totals.summary("demo", &subject);
    let evictions = evictions(&cluster)?;
    audience.say(format!(
        "\n{}evictions: {} from DRAM, {} from NVMe\n",
        totals.table(),
        evictions.dram,
        evictions.nvme
    ));

    let killed = kill_and_restart(&mut cluster, &mut engines, audience)?;
    let again = &requests[..REQUESTS_AFTER_RESTART.min(requests.len())];
    audience.say(format!("Replaying the first {} requests again …", again.len()));
    let mut after = Totals::new();
    replay::run(again, &mut engines, &mut after, &indicatif::ProgressBar::hidden())?;
    audience.say(after.table());

    let mismatches =
        totals.mismatches + after.mismatches + killed.before.mismatches + killed.after.mismatches;
    let mut replay = summary;
    replay.mismatches = mismatches;
    replay.bytes_verified +=
        after.bytes_verified + killed.before.bytes_verified + killed.after.bytes_verified;
    audience.emit(&DemoSummary {
        replay,
        evictions_dram: evictions.dram,
        evictions_nvme: evictions.nvme,
        durable_before_kill: killed.before.present,
        durable_after_restart: killed.after.present,
        restart_seconds: killed.restart_seconds,
        after_restart: after.summary("after_restart", &subject),
    });
    if mismatches > 0 {
        bail!("{mismatches} words differed from what was saved");
    }
    if killed.after.present != killed.before.present {
        bail!("{} durable blocks did not come back", killed.before.present - killed.after.present);
    }
    audience.say(format!("Every byte was right: {mismatches} mismatches."));
    if args.hold {
        hold(audience)?;
    }
    Ok(())
}

/// Kills an agent with SIGKILL, restarts it, and compares its durable blocks before and after.
fn kill_and_restart(
    cluster: &mut Cluster,
    engines: &mut [EngineProcess],
    audience: Audience,
) -> anyhow::Result<KillOutcome> {
    engines[VICTIM].settle()?;
    let before = engines[VICTIM].check_durable().context("checking durable blocks before the kill")?;
    audience.say(format!(
        "{} durable blocks on node-{}; killing its agent with SIGKILL …",
        before.present,
        VICTIM + 1
    ));
    cluster.kill_agent(VICTIM)?;
    let restart_seconds = cluster.restart_agent(VICTIM)?;
    engines[VICTIM].reconnect()?;
    let after = engines[VICTIM].check_durable().context("checking durable blocks after the restart")?;
    audience.say(format!(
        "… ready again after {restart_seconds:.2} s: {} of {} durable blocks came back, every byte compared.",
        after.present, before.present
    ));
    Ok(KillOutcome { before, after, restart_seconds })
}

fn evictions(cluster: &Cluster) -> anyhow::Result<Evictions> {
    let mut sum = Evictions::default();
    for agent in cluster.file().agents {
        let status: serde_json::Value = serde_json::from_str(&http::get(&agent.admin, "/status")?)?;
        let counter = |name: &str| status["counters"][name].as_u64().unwrap_or(0);
        sum.dram += counter("dram_evictions");
        sum.nvme += counter("nvme_evictions");
    }
    Ok(sum)
}

/// Waits for Ctrl-C.
fn hold(audience: Audience) -> anyhow::Result<()> {
    audience.say("The cluster keeps running; try `reprise status` and `reprise replay`. Ctrl-C ends it.");
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let mut terminate = tokio::signal::unix::signal(tokio::signal::unix::SignalKind::terminate())?;
        tokio::select! {
            interrupted = tokio::signal::ctrl_c() => interrupted,
            _ = terminate.recv() => Ok(()),
        }
    })?;
    Ok(())
}
