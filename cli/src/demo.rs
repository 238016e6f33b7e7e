//! `reprise demo`: a local cluster replays a real trace and verifies every byte, then loses and restarts one
//! agent. Then requests of the trace wait in a queue, with and without hints about it, and load their blocks from NVMe.
//! All ports of agents and control plane use TLS, with an authority and certificates in the cluster's directory.
//!
//! With `--etcd` the control plane has several members. The demo kills one of them during the replay and
//! restarts it afterwards. The demo succeeds only if the directory finally equals the blocks that the agents
//! hold.
//!
//! With `--engine-path rings`, agents emulate NVMe controllers, and rings of the engines move blocks between KV memory
//! and the controllers. The demo states the backend, and counts the blocks that rings cannot reach.

mod completeness;
mod engine_path;
mod faults;
mod prefetch;

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use clap::builder::{PossibleValuesParser, TypedValueParser};
use indicatif::ProgressBar;
use reprise_policy::{ByteSize, Layout, TenantName};
use serde::Serialize;

use crate::config::{Config, DemoConfig};
use crate::engine_process::EngineProcess;
use crate::replay::{self, Subject, Summary, Totals};
use completeness::{ReplicaTotals, await_complete};
use engine_path::RingReport;
use faults::{KillOutcome, LostMember, demand_durable, kill_and_restart};
use prefetch::PrefetchReport;
use reprise_testkit::cluster::{
    AgentAddresses, AgentSizes, Cluster, ClusterFile, Connections, ControlPlanes,
};
use reprise_testkit::configuration::provide_salt;
use reprise_testkit::engine::{EnginePath, EngineSettings};
use reprise_testkit::interrupt;
use reprise_testkit::model::llama_3_8b_scaled;
use reprise_testkit::output::{Audience, bytes_text};
use reprise_testkit::trace::{Trace, TraceRequest};

/// Default and largest number of nodes; all of them share this machine.
const NODES: usize = 2;
/// Default number of nodes with rings. A node takes blocks from DRAM of another one only if a third node has caused the
/// copy, because rings bypass DRAM.
const NODES_WITH_RINGS: usize = 4;
const NODES_MAX: usize = 16;

/// Default and largest number of control-plane members with `--etcd`.
const MEMBERS: usize = 3;
const MEMBERS_MAX: usize = 16;

/// Refresh interval of the displayed evictions; reading them from the agents takes about 1 ms.
const EVICTIONS_EVERY: Duration = Duration::from_millis(500);

/// Number of requests that the demo replays again after the restart.
const REQUESTS_AFTER_RESTART: usize = 200;

/// Arguments of `reprise demo`.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct DemoArgs {
    /// Replay this trace (JSON lines).
    ///
    /// The default is `../shared/data/conversation_trace.jsonl` if it exists, otherwise a built-in sample of
    /// 400 requests.
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
    /// Replay at most this many requests before the kill [default: 1500].
    ///
    /// The default with `--engine-path rings` is 750.
    #[arg(long)]
    requests: Option<usize>,
    /// Divide the bytes of Llama-3-8B's KV cache by SCALE [default: 1024].
    ///
    /// Must be a power of two. The default and the maximum with `--engine-path rings` is 256.
    #[arg(long)]
    scale: Option<u32>,
    /// Set the size of each agent's DRAM arena [default: 192MiB].
    #[arg(long)]
    arena: Option<ByteSize>,
    /// Set the size of each agent's NVMe pool [default: 3GiB].
    #[arg(long)]
    pool: Option<ByteSize>,
    /// Store data in this directory [default: ~/.cache/reprise/demo].
    ///
    /// `$REPRISE_CACHE` replaces `~/.cache/reprise`. Logs and configurations remain after the demo; pools are
    /// removed.
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
    /// Save blocks for this tenant: 1 to 63 of a-z, 0-9 and '-'.
    #[arg(long, value_name = "NAME", default_value = "default")]
    tenant: TenantName,
    /// Move blocks between engines and nodes on this path.
    ///
    /// With `arena`, engines copy blocks from and to the agent's arena. With `rings`, rings move them between registered
    /// KV memory and extents of an NVMe controller, which the agent emulates; only blocks in DRAM and on other nodes take
    /// the arena.
    #[arg(
        long,
        value_name = "PATH",
        default_value_t,
        value_parser = PossibleValuesParser::new(EnginePath::NAMES).try_map(|name| name.parse::<EnginePath>())
    )]
    engine_path: EnginePath,
    /// Keep the cluster running after the demo, until Ctrl-C.
    #[arg(long)]
    hold: bool,
    /// Start this many nodes, each with an agent and an engine [default: 2].
    ///
    /// The default with `--engine-path rings` is 4.
    #[arg(long, value_parser = clap::value_parser!(u8).range(2..=NODES_MAX as i64))]
    nodes: Option<u8>,
    /// Run several control-plane members on etcd, and kill one of them.
    ///
    /// Needs the etcd binary (`make etcd`).
    #[arg(long)]
    etcd: bool,
    /// Start this many control-plane members [default: 3].
    #[arg(long, requires = "etcd", value_parser = clap::value_parser!(u8).range(1..=MEMBERS_MAX as i64))]
    members: Option<u8>,
}

/// Last line of `reprise demo --json`.
#[derive(Clone, Debug, Serialize)]
struct DemoSummary {
    #[serde(flatten)]
    replay: Summary,
    evictions_dram: u64,
    evictions_nvme: u64,
    /// Tiers without a hit; always empty with the default trace and sizes.
    tiers_without_hits: Vec<&'static str>,
    /// Blocks that the killed node had announced durable before the kill.
    durable_announced: u64,
    /// Announced blocks that had left the node before the kill: evicted from NVMe, or moved to another node.
    durable_evicted: u64,
    /// Announced blocks present with the right bytes before the kill.
    durable_before_kill: u64,
    /// Announced blocks present with the right bytes after the restart.
    durable_after_restart: u64,
    /// Upper bound of the blocks that may be gone: their copy on NVMe was evicted or moved to another node.
    durable_left: u64,
    /// Seconds from the restart of the killed agent until it was ready.
    restart_seconds: f64,
    members: usize,
    members_killed: usize,
    /// Final contents of the directory, equal to the blocks that the agents hold.
    #[serde(flatten)]
    complete: ReplicaTotals,
    /// Figures of the requests that were replayed again.
    after_restart: Summary,
    /// Requests that waited in a queue, with and without hints.
    prefetch: PrefetchReport,
    /// Path of blocks between engines and nodes.
    engine_path: String,
    /// Traffic of rings, if the engines have them.
    #[serde(skip_serializing_if = "Option::is_none")]
    rings: Option<RingReport>,
}

/// Line of `reprise demo --hold --json` after the summary, while the cluster runs.
#[derive(Debug, Serialize)]
struct Held {
    /// Commands that work until the demo ends.
    commands: Vec<String>,
}

/// Copies of blocks that agents have dropped, for space or because the blocks were moved.
#[derive(Clone, Copy, Debug, Default)]
struct Evictions {
    dram: u64,
    nvme: u64,
    /// Blocks moved from NVMe to another node.
    moved: u64,
}

/// Progress display of a replay: bar, totals and the agents' evictions.
struct ProgressView<'a> {
    bar: ProgressBar,
    cluster: &'a Cluster,
    evictions: Evictions,
    /// Time of the last read of the agents' counters; `None` before the first read.
    last_read: Option<Instant>,
}

impl ProgressView<'_> {
    fn new(bar: ProgressBar, cluster: &Cluster) -> ProgressView<'_> {
        ProgressView { bar, cluster, evictions: Evictions::default(), last_read: None }
    }

    fn served(&mut self, totals: &Totals) {
        self.bar.inc(1);
        if self.bar.is_hidden() {
            return;
        }
        if self.last_read.is_none_or(|last_read| last_read.elapsed() >= EVICTIONS_EVERY) {
            self.last_read = Some(Instant::now());
            // Display only: if an agent does not respond, a later required call fails the demo.
            self.evictions = evictions(self.cluster).unwrap_or(self.evictions);
        }
        let Evictions { dram, nvme, .. } = self.evictions;
        self.bar.set_message(format!("{}; evicted from DRAM {dram}, from NVMe {nvme}", totals.live()));
    }

    fn end(self) {
        self.bar.finish_and_clear();
    }
}

pub(crate) fn command(args: &DemoArgs, config: &Config, audience: Audience) -> anyhow::Result<()> {
    let trace = Trace::open(args.trace.as_deref())?;
    let chosen = args.over(&config.demo);
    let layout = llama_3_8b_scaled(chosen.scale)?;
    args.engine_path.ensure_built()?;
    engine_path::check_objects(args.engine_path, chosen.scale, &layout)?;
    let directory = config.cluster.directory(args.dir.as_deref());
    let control = args.control();
    let mut cluster = start_cluster(args, &chosen, (&layout, &directory), audience)?;
    let mut engines = start_engines(args, layout, &cluster)?;
    if let Some(backend) = engines[0].backend() {
        audience.print_line(format!(
            "Engine path: rings, backend {backend}: threads stand in for GPUs, and agents emulate their NVMe controllers."
        ));
    }

    let subject =
        Subject { trace: trace.name.clone(), scale: chosen.scale, block_bytes: layout.block_bytes() };
    let requests = &trace.requests[..chosen.requests.min(trace.requests.len())];
    let part = if requests.len() == trace.requests.len() { "all of " } else { "" };
    audience.print_line(format!("Replaying {} requests ({part}{}) …", requests.len(), trace.name));
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
    audience.print_line(format!(
        "\n{}evictions: {} from DRAM, {} from NVMe\n",
        totals.table(),
        evictions.dram,
        evictions.nvme
    ));

    let killed = kill_and_restart(&mut cluster, &mut engines, audience)?;
    lost.restart(&mut cluster, audience)?;
    let again = &requests[..REQUESTS_AFTER_RESTART.min(requests.len())];
    audience.print_line(format!("Replaying the first {} requests again …", again.len()));
    let mut after = Totals::new();
    serve(again, &mut engines, &mut after, (&cluster, audience))?;
    audience.print_line(after.table());
    let waiting = prefetch::Subject {
        cluster: &cluster.file(),
        requests,
        layout: &layout,
        tenant: &args.tenant,
        path: args.engine_path,
        arena_bytes: chosen.arena.0,
    };
    let (prefetch, checked) = measure_prefetch(waiting, &mut engines[0], audience)?;
    for engine in &mut engines {
        engine.await_durable()?;
    }
    let complete = await_complete(&cluster.file(), &mut engines)?;
    audience.print_line(format!(
        "The directory is complete: {} blocks in DRAM and {} on NVMe. The directory and the agents agree on every \
         block.",
        complete.directory_dram, complete.directory_nvme
    ));

    let mut replay = summary;
    for again in [&after.sum, &checked.sum] {
        replay.mismatches += again.mismatches;
        replay.bytes_verified += again.bytes_verified;
    }
    for check in [&killed.before, &killed.after] {
        replay.mismatches += check.mismatches;
        replay.bytes_verified += check.bytes_verified;
    }
    let mismatches = replay.mismatches;
    let rings = engines[0].backend().map(|backend| ring_report(backend, (&totals, &after), &killed));
    if let Some(report) = &rings {
        audience.print_line(report.text());
    }
    let unused = totals.sum.hits.tiers_without_hits();
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
        prefetch,
        engine_path: args.engine_path.to_string(),
        rings: rings.clone(),
    });
    if mismatches > 0 {
        bail!("{mismatches} loaded words differ from the saved ones");
    }
    demand_calls(totals.sum.errors + after.sum.errors + checked.sum.errors)?;
    demand_durable(&killed.after, killed.left).context("after the restart")?;
    demand_tiers(args.sizes(&chosen), &unused, audience)?;
    rings.map_or(Ok(()), |report| report.demand_traffic())?;
    audience.print_line(format!("All bytes verified: {mismatches} mismatches."));
    if args.hold {
        hold(&cluster, audience)?;
    }
    Ok(())
}

/// Starts the control plane and the agents, and prints their addresses.
fn start_cluster(
    args: &DemoArgs,
    chosen: &DemoConfig,
    (layout, directory): (&Layout, &Path),
    audience: Audience,
) -> anyhow::Result<Cluster> {
    audience.print_line(format!(
        "Llama-3-8B KV cache at scale 1/{}: one trace block of 512 tokens is {} in {} objects of {}.",
        chosen.scale,
        bytes_text(layout.block_bytes()),
        layout.objects(),
        bytes_text(layout.object_bytes())
    ));
    let (control, nodes) = (args.control(), args.nodes());
    audience.print_line(match control {
        ControlPlanes::Embedded => {
            format!("Starting a control plane and {nodes} agents in {} …", directory.display())
        }
        ControlPlanes::Etcd { members } => format!(
            "Starting etcd, {members} control-plane members and {nodes} agents in {} …",
            directory.display()
        ),
    });
    let sizes = AgentSizes { arena: chosen.arena, pool: chosen.pool, moves: None };
    let mut cluster = Cluster::start_connected(directory, control, Connections::Tls)?;
    cluster.start_agents_on(engine_path::device(args.engine_path), nodes, sizes)?;
    for agent in cluster.file().agents {
        audience.print_line(format!("  {}: admin port {}", agent.node, agent.admin));
    }
    audience.print_line(format!(
        "All ports of agents and control plane use TLS 1.3, with certificates of the demo's own authority; those of an \
         administrator are in {}.",
        administrator(&cluster)?.display()
    ));
    Ok(cluster)
}

/// Returns the folder of the administrator's certificates, for commands in any working directory.
fn administrator(cluster: &Cluster) -> anyhow::Result<PathBuf> {
    let folder = cluster.file().tls.context("the cluster has no certificates")?;
    folder.canonicalize().with_context(|| format!("cannot read {}", folder.display()))
}

/// Starts an engine for each agent.
fn start_engines(args: &DemoArgs, layout: Layout, cluster: &Cluster) -> anyhow::Result<Vec<EngineProcess>> {
    let settings =
        |socket| EngineSettings { socket, layout, tenant: args.tenant.clone(), path: args.engine_path };
    let start = |socket: PathBuf| {
        provide_salt(&socket, &args.tenant).context("the tenant's salt")?;
        EngineProcess::start(&settings(socket))
    };
    cluster.file().agents.into_iter().map(|agent| start(agent.socket)).collect()
}

/// Measures requests that wait with and without hints; returns the check of their bytes too.
fn measure_prefetch(
    waiting: prefetch::Subject<'_>,
    engine: &mut EngineProcess,
    audience: Audience,
) -> anyhow::Result<(PrefetchReport, Totals)> {
    audience.print_line("Letting requests wait in a queue, with and without hints about their order …");
    let mut checked = Totals::new();
    let report = waiting.measure(engine, &mut checked)?;
    audience.print_line(report.text());
    Ok((report, checked))
}

/// Sums the traffic of rings in both replays and in the checks of durable blocks.
fn ring_report(backend: &str, (first, again): (&Totals, &Totals), killed: &KillOutcome) -> RingReport {
    let (mut traffic, mut hits) = (first.sum.rings, first.sum.hits);
    for other in [again.sum.rings, killed.before.rings, killed.after.rings] {
        traffic.merge(&other);
    }
    hits.merge(&again.sum.hits);
    RingReport::new(backend, traffic, &hits)
}

/// Replays requests on the engines, with a progress bar on a terminal.
fn serve(
    requests: &[TraceRequest],
    engines: &mut [EngineProcess],
    totals: &mut Totals,
    (cluster, audience): (&Cluster, Audience),
) -> anyhow::Result<()> {
    let bar = audience.progress(requests.len() as u64, "replay");
    let mut view = ProgressView::new(bar, cluster);
    replay::run(requests, engines, totals, |totals| view.served(totals))?;
    view.end();
    Ok(())
}

/// Returns an error if a call to an agent failed: the engine computed those blocks instead of loading them.
fn demand_calls(failed: u64) -> anyhow::Result<()> {
    if failed > 0 {
        bail!("{failed} calls to the agents failed: see the warnings above and the agents' logs");
    }
    Ok(())
}

/// Returns an error if a tier served no hit with the default trace and sizes; prints a notice with others.
fn demand_tiers(sizes: Sizes, unused: &[&str], audience: Audience) -> anyhow::Result<()> {
    if unused.is_empty() {
        return Ok(());
    }
    if sizes == Sizes::Default {
        bail!("no hits in {}: with the default sizes, every tier must serve hits", unused.join(", "));
    }
    audience.print_line(format!("No hits in {}: these sizes leave a tier unused.", unused.join(", ")));
    Ok(())
}

/// Whether trace, topology and sizes are the defaults, with which every tier serves hits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Sizes {
    Default,
    Custom,
}

impl DemoArgs {
    /// Returns the configuration with the flags applied over the file.
    fn over(&self, file: &DemoConfig) -> DemoConfig {
        let file = engine_path::over(self.engine_path, file);
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
        self.nodes.map_or(self.nodes_default(), usize::from)
    }

    fn nodes_default(&self) -> usize {
        match self.engine_path {
            EnginePath::Arena => NODES,
            EnginePath::Rings => NODES_WITH_RINGS,
        }
    }

    fn sizes(&self, chosen: &DemoConfig) -> Sizes {
        let is_default = self.trace.is_none() && self.nodes() == self.nodes_default() && !self.etcd;
        if is_default && *chosen == engine_path::defaults(self.engine_path) {
            Sizes::Default
        } else {
            Sizes::Custom
        }
    }
}

fn evictions(cluster: &Cluster) -> anyhow::Result<Evictions> {
    let mut sum = Evictions::default();
    let file = cluster.file();
    for agent in &file.agents {
        let of_agent = evictions_of(&file, agent)?;
        sum.dram += of_agent.dram;
        sum.nvme += of_agent.nvme;
        sum.moved += of_agent.moved;
    }
    Ok(sum)
}

fn evictions_of(cluster: &ClusterFile, agent: &AgentAddresses) -> anyhow::Result<Evictions> {
    let status: serde_json::Value = serde_json::from_str(&cluster.page(agent, "/status")?)?;
    let counter = |name: &str| {
        status["counters"][name]
            .as_u64()
            .with_context(|| format!("counter '{name}' is missing from the agent's status"))
    };
    Ok(Evictions {
        dram: counter("dram_evictions")?,
        nvme: counter("nvme_evictions")?,
        moved: counter("moved_blocks")?,
    })
}

/// Prints how to reach the cluster, and waits for Ctrl-C.
fn hold(cluster: &Cluster, audience: Audience) -> anyhow::Result<()> {
    let (sender, interrupted) = std::sync::mpsc::sync_channel(1);
    interrupt::notify(sender);
    for agent in cluster.file().agents {
        audience.print_line(format!("{}: engines connect to {}.", agent.node, agent.socket.display()));
    }
    let commands = commands(cluster.path(), &administrator(cluster)?);
    audience.print_line(format!(
        "The cluster is running. Press Ctrl-C to stop it, or try in another terminal:\n  {}",
        commands.join("\n  ")
    ));
    audience.emit(&Held { commands });
    interrupted.recv().context("waiting for Ctrl-C")
}

/// Returns commands that the user may try. `admin` and `replay` use unix sockets, which need no certificate.
fn commands(directory: &Path, administrator: &Path) -> Vec<String> {
    let cluster = std::path::absolute(directory).unwrap_or_else(|_| directory.to_owned());
    let (cluster, tls) = (cluster.display(), administrator.display());
    vec![
        format!("reprise status --cluster {cluster} --tls {tls}"),
        format!("reprise explain 1 --cluster {cluster} --tls {tls}"),
        format!("reprise trace record --for 10s --out recorded.jsonl --cluster {cluster} --tls {tls}"),
        format!("reprise replay --requests 100 --cluster {cluster}"),
        format!("reprise admin demote --trace-line 1 --cluster {cluster}"),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn demo_fails_with_the_number_of_failed_agent_calls() {
        assert!(demand_calls(0).is_ok());
        let error = demand_calls(3).expect_err("three calls failed").to_string();
        assert!(error.contains("3 calls"), "{error}");
    }
}
