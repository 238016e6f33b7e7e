//! `reprise replay`: replays a trace on reference engines, one per node, and sums their results.

use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Context, bail};
use hdrhistogram::Histogram;
use reprise_policy::TenantName;
use serde::Serialize;

use crate::config::Config;
use crate::engine_process::EngineProcess;
use reprise_testkit::cluster::ClusterFile;
use reprise_testkit::engine::{EnginePath, EngineSettings, HitCounts, RequestOutcome};
use reprise_testkit::model::llama_3_8b_scaled;
use reprise_testkit::output::{Audience, Table, bytes_text, latency_text, transfer_text};
use reprise_testkit::trace::{Trace, TraceRequest};

/// Largest recorded latency in microseconds (60 s); the histograms keep three significant digits.
const LATENCY_US_MAX: u64 = 60_000_000;

/// Arguments of `reprise replay`.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct ReplayArgs {
    /// Replay this trace (JSON lines).
    ///
    /// The default is `../shared/data/conversation_trace.jsonl` if it exists, otherwise a built-in sample of
    /// 400 requests.
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
    /// Connect to the agent at this socket; repeat for several agents.
    ///
    /// Requests alternate between the agents. By default the command uses all agents of the running cluster.
    #[arg(long, value_name = "PATH")]
    socket: Vec<PathBuf>,
    /// Read the agents' addresses from this directory.
    ///
    /// By default the command reads the directory of `reprise demo --hold`.
    #[arg(long, value_name = "DIR")]
    cluster: Option<PathBuf>,
    /// Replay at most this many requests [default: all].
    #[arg(long)]
    requests: Option<usize>,
    /// Divide the bytes of Llama-3-8B's KV cache by SCALE [default: 1024].
    ///
    /// Must be a power of two.
    #[arg(long)]
    scale: Option<u32>,
    /// Save blocks for this tenant: 1 to 63 of a-z, 0-9 and '-'.
    #[arg(long, value_name = "NAME", default_value = "default")]
    tenant: TenantName,
}

/// Running totals of a replay.
pub(crate) struct Totals {
    pub(crate) requests: u64,
    pub(crate) sum: RequestOutcome,
    match_us: Histogram<u64>,
    first_layer_us: Histogram<u64>,
    started: Instant,
}

/// The JSON form of [`Totals`].
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Summary {
    pub(crate) event: &'static str,
    pub(crate) trace: String,
    pub(crate) scale: u32,
    pub(crate) block_bytes: u64,
    pub(crate) requests: u64,
    pub(crate) blocks: u64,
    pub(crate) blocks_saved: u64,
    pub(crate) duplicates: u64,
    pub(crate) unsaved: u64,
    pub(crate) lost: u64,
    pub(crate) errors: u64,
    pub(crate) hits: HitCounts,
    pub(crate) hit_ratio: f64,
    pub(crate) bytes_loaded: u64,
    pub(crate) bytes_verified: u64,
    pub(crate) bytes_saved: u64,
    pub(crate) mismatches: u64,
    pub(crate) load_gb_per_s: f64,
    pub(crate) save_gb_per_s: f64,
    pub(crate) match_us_p50: u64,
    pub(crate) match_us_p99: u64,
    pub(crate) first_layer_us_p50: u64,
    pub(crate) first_layer_us_p99: u64,
    pub(crate) seconds: f64,
}

/// Description of the replay for the summary.
#[derive(Clone, Debug)]
pub(crate) struct Subject {
    pub(crate) trace: String,
    pub(crate) scale: u32,
    pub(crate) block_bytes: u64,
}

impl Totals {
    pub(crate) fn new() -> Totals {
        let histogram = || Histogram::new_with_max(LATENCY_US_MAX, 3).expect("the bounds are valid");
        Totals {
            requests: 0,
            sum: RequestOutcome::default(),
            match_us: histogram(),
            first_layer_us: histogram(),
            started: Instant::now(),
        }
    }

    pub(crate) fn add(&mut self, outcome: &RequestOutcome) {
        self.requests += 1;
        self.sum.merge(outcome);
        self.match_us.saturating_record(outcome.match_us.max(1));
        if outcome.first_layer_us > 0 {
            self.first_layer_us.saturating_record(outcome.first_layer_us);
        }
    }

    fn load_seconds(&self) -> f64 {
        self.sum.load_us as f64 / 1e6
    }

    fn save_seconds(&self) -> f64 {
        self.sum.save_us as f64 / 1e6
    }

    pub(crate) fn summary(&self, event: &'static str, subject: &Subject) -> Summary {
        let rate = |bytes: u64, seconds: f64| if seconds > 0.0 { bytes as f64 / seconds / 1e9 } else { 0.0 };
        Summary {
            event,
            trace: subject.trace.clone(),
            scale: subject.scale,
            block_bytes: subject.block_bytes,
            requests: self.requests,
            blocks: self.sum.blocks,
            blocks_saved: self.sum.saved,
            duplicates: self.sum.duplicates,
            unsaved: self.sum.unsaved,
            lost: self.sum.lost,
            errors: self.sum.errors,
            hits: self.sum.hits,
            hit_ratio: if self.sum.blocks == 0 {
                0.0
            } else {
                self.sum.hits.total() as f64 / self.sum.blocks as f64
            },
            bytes_loaded: self.sum.bytes_loaded,
            bytes_verified: self.sum.bytes_verified,
            bytes_saved: self.sum.bytes_saved,
            mismatches: self.sum.mismatches,
            load_gb_per_s: rate(self.sum.bytes_loaded, self.load_seconds()),
            save_gb_per_s: rate(self.sum.bytes_saved, self.save_seconds()),
            match_us_p50: self.match_us.value_at_quantile(0.50),
            match_us_p99: self.match_us.value_at_quantile(0.99),
            first_layer_us_p50: self.first_layer_us.value_at_quantile(0.50),
            first_layer_us_p99: self.first_layer_us.value_at_quantile(0.99),
            seconds: self.started.elapsed().as_secs_f64(),
        }
    }

    /// Returns the lines below the progress bar, each short enough for a terminal.
    pub(crate) fn live(&self) -> String {
        format!(
            "hits: DRAM {}, NVMe {}, peer DRAM {}, peer NVMe {}\n\
             loaded {}, verified {}, mismatches {}, failed calls {}\n\
             match p50 {}, p99 {}; time to first layer p50 {}, p99 {}\n\
             {} blocks saved: {}",
            self.sum.hits.own_dram,
            self.sum.hits.own_nvme,
            self.sum.hits.peer_dram,
            self.sum.hits.peer_nvme,
            transfer_text(self.sum.bytes_loaded, self.load_seconds()),
            bytes_text(self.sum.bytes_verified),
            self.sum.mismatches,
            self.sum.errors,
            latency_text(self.match_us.value_at_quantile(0.50)),
            latency_text(self.match_us.value_at_quantile(0.99)),
            latency_text(self.first_layer_us.value_at_quantile(0.50)),
            latency_text(self.first_layer_us.value_at_quantile(0.99)),
            self.sum.saved,
            transfer_text(self.sum.bytes_saved, self.save_seconds()),
        )
    }

    /// Returns the final report as text.
    pub(crate) fn table(&self) -> String {
        let mut table = Table::new(&["", "blocks", "share"]);
        let share = |count: u64| format!("{:.1} %", 100.0 * count as f64 / self.sum.blocks.max(1) as f64);
        let computed = self.sum.blocks.saturating_sub(self.sum.hits.total());
        for (name, count) in [
            ("own DRAM", self.sum.hits.own_dram),
            ("own NVMe", self.sum.hits.own_nvme),
            ("peer DRAM", self.sum.hits.peer_dram),
            ("peer NVMe", self.sum.hits.peer_nvme),
            ("computed", computed),
            ("requested", self.sum.blocks),
        ] {
            table.row(vec![name.to_owned(), count.to_string(), share(count)]);
        }
        let quantile = |histogram: &Histogram<u64>, q: f64| latency_text(histogram.value_at_quantile(q));
        format!(
            "{}\n{} requests in {:.1} s; {} calls failed\n\
             {} blocks saved, {} matched but not loadable, {} not saved (arena full)\n\
             loaded {}, verified {}, mismatches {}; saved {}\n\
             match p50 {}, p99 {}; time to first layer p50 {}, p99 {}\n",
            table.render(),
            self.requests,
            self.started.elapsed().as_secs_f64(),
            self.sum.errors,
            self.sum.saved,
            self.sum.lost,
            self.sum.unsaved,
            transfer_text(self.sum.bytes_loaded, self.load_seconds()),
            bytes_text(self.sum.bytes_verified),
            self.sum.mismatches,
            transfer_text(self.sum.bytes_saved, self.save_seconds()),
            quantile(&self.match_us, 0.5),
            quantile(&self.match_us, 0.99),
            quantile(&self.first_layer_us, 0.5),
            quantile(&self.first_layer_us, 0.99),
        )
    }
}

/// Sends requests to the engines in turn, and calls `served` after each.
pub(crate) fn run(
    requests: &[TraceRequest],
    engines: &mut [EngineProcess],
    totals: &mut Totals,
    mut served: impl FnMut(&Totals),
) -> anyhow::Result<()> {
    for (index, request) in requests.iter().enumerate() {
        let engine = index % engines.len();
        let outcome = engines[engine]
            .run(request.full_blocks())
            .with_context(|| format!("request {index} on engine {engine}"))?;
        totals.add(&outcome);
        served(totals);
    }
    Ok(())
}

pub(crate) fn command(args: &ReplayArgs, config: &Config, audience: Audience) -> anyhow::Result<()> {
    let trace = Trace::open(args.trace.as_deref())?;
    let scale = args.scale.unwrap_or(config.demo.scale);
    let layout = llama_3_8b_scaled(scale)?;
    let sockets = if args.socket.is_empty() {
        let directory = config.cluster.directory(args.cluster.as_deref());
        ClusterFile::read(&directory)?.agents.into_iter().map(|agent| agent.socket).collect()
    } else {
        args.socket.clone()
    };
    let mut engines = sockets
        .into_iter()
        .map(|socket| {
            let (tenant, path) = (args.tenant.clone(), EnginePath::Arena);
            EngineProcess::start(&EngineSettings { socket, layout, tenant, path })
        })
        .collect::<anyhow::Result<Vec<_>>>()?;
    let requests = &trace.requests[..args.requests.unwrap_or(usize::MAX).min(trace.requests.len())];
    let subject = Subject { trace: trace.name.clone(), scale, block_bytes: layout.block_bytes() };
    let bar = audience.progress(requests.len() as u64, "replay");
    let mut totals = Totals::new();
    run(requests, &mut engines, &mut totals, |totals| {
        bar.inc(1);
        bar.set_message(totals.live());
    })?;
    bar.finish_and_clear();
    audience.print_line(totals.table());
    audience.emit(&totals.summary("replay", &subject));
    if totals.sum.mismatches > 0 {
        bail!("{} loaded words differ from the saved ones", totals.sum.mismatches);
    }
    Ok(())
}
