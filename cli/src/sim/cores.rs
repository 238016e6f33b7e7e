//! `reprise sim cores`: production cores of agents and control plane serve a trace, with the times of hardware.
//!
//! The output depends on the trace, the arguments and the seed alone. Times of this machine are logged only.

mod report;

use std::fs::File;
use std::io::{BufRead, BufReader, Cursor};
use std::num::NonZero;
use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Context, anyhow, ensure};
use reprise_policy::ByteSize;
use reprise_policy::admission::AdmissionMode;
use reprise_policy::eviction::EvictionKind;
use reprise_simulator::replay::{Cluster, NodeSettings, ReadOptions, Trace, TraceBuilder, read_lines};
use reprise_simulator::timed::{CoreReplay, CoreSettings, CoresError, replay_cores};
use reprise_testkit::output::Audience;

use crate::profile_files;
use report::{Comparison, Outcome};

/// Arguments of `reprise sim cores`.
#[derive(Clone, Debug, clap::Args)]
pub(super) struct CoresArgs {
    /// Serve this trace: JSON lines in Mooncake's format.
    #[arg(long, value_name = "FILE")]
    trace: PathBuf,
    /// Serve at most this many requests of the trace [default: all].
    #[arg(long, value_name = "NUMBER")]
    requests: Option<NonZero<u32>>,
    /// Simulate this many nodes, each with an agent and an engine. All requests of a session go to one node.
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u16).range(1..=1024))]
    nodes: u16,
    /// Simulate this many control-plane members.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u16).range(1..=64))]
    members: u16,
    /// Hardware of a node: an accelerator, and parts that replace its usual ones, as in h100+cxl; or files.
    #[arg(long, value_name = "EXPRESSION", default_value = "h100")]
    hardware: String,
    /// Model of all engines: a name, or a file.
    #[arg(long, value_name = "NAME", default_value = "llama-3-8b")]
    model: String,
    /// DRAM of a node in blocks, rounded up to whole regions [default: that of the hardware].
    #[arg(long, value_name = "BLOCKS", value_parser = clap::value_parser!(u64).range(1..=200_000))]
    dram: Option<u64>,
    /// NVMe of a node in blocks, rounded up to whole segments; 0: no NVMe [default: that of the hardware].
    #[arg(long, value_name = "BLOCKS", value_parser = clap::value_parser!(u64).range(0..=1_000_000))]
    nvme: Option<u64>,
    /// Evict by this policy in both tiers.
    #[arg(long, value_parser = parse_policy, default_value = "lru")]
    policy: EvictionKind,
    /// Admit blocks to NVMe by this rule: always, second_use or expected_reuse.
    #[arg(long, value_parser = parse_admission, default_value = "always")]
    admission: AdmissionMode,
    /// Bytes per second for replicas that agents place on other nodes; 0: no placement.
    #[arg(long, value_name = "BYTES", default_value = "256MiB")]
    placement_bandwidth: ByteSize,
    /// Tokens of a block, if the trace does not state them [default: 512].
    #[arg(long, value_name = "TOKENS")]
    block_tokens: Option<u64>,
    /// Sort requests by time instead of refusing unsorted ones.
    #[arg(long)]
    sort: bool,
    /// Compare the hits with those of `sim replay` with the same capacities.
    #[arg(long)]
    compare: bool,
    /// Derive the delays of calls and the clocks from this seed.
    #[arg(long, default_value_t = 0)]
    seed: u64,
}

fn parse_policy(text: &str) -> Result<EvictionKind, String> {
    let names = || EvictionKind::ALL.map(EvictionKind::name).join(", ");
    let found = EvictionKind::ALL.into_iter().find(|kind| kind.name() == text);
    found.ok_or_else(|| format!("expected one of {}", names()))
}

fn parse_admission(text: &str) -> Result<AdmissionMode, String> {
    let names = || AdmissionMode::ALL.map(AdmissionMode::name).join(", ");
    let found = AdmissionMode::ALL.into_iter().find(|mode| mode.name() == text);
    found.ok_or_else(|| format!("expected one of {}", names()))
}

/// Runs the command `reprise sim cores`.
pub(super) fn command(args: &CoresArgs, audience: Audience) -> anyhow::Result<()> {
    let began = Instant::now();
    let trace = read(args)?;
    let settings = settings(args, &trace)?;
    let served = replay_cores(&trace, &settings).map_err(|error| match error {
        CoresError::Impossible(_) => anyhow!(error),
        CoresError::Violation(violation) => anyhow!("{violation} (replay with --seed {})", args.seed),
    })?;
    let seconds = began.elapsed().as_secs_f64();
    let per_second = (served.events as f64 / seconds.max(1e-9)) as u64;
    tracing::info!(events = served.events, seconds, "events/s" = per_second, "trace served");
    let outcome = Outcome::new(args, &trace, &served);
    audience.emit(&outcome);
    audience.print_line(outcome.text());
    if args.compare {
        let comparison = compare(&trace, &settings, &served);
        audience.emit(&comparison);
        audience.print_line(comparison.table().render());
    }
    Ok(())
}

/// Reads the first requests of the trace.
fn read(args: &CoresArgs) -> anyhow::Result<Trace> {
    let name = args.trace.display().to_string();
    let file = File::open(&args.trace).with_context(|| format!("cannot open the trace {name}"))?;
    let mut reader = BufReader::new(file);
    let options = ReadOptions { block_tokens: args.block_tokens, sort: args.sort, ..ReadOptions::default() };
    let mut builder = TraceBuilder::new(options);
    match args.requests {
        None => read_lines(reader, &mut builder).with_context(|| name.clone())?,
        Some(requests) => {
            let mut lines = Vec::new();
            for _ in 0..requests.get() {
                reader.read_until(b'\n', &mut lines).with_context(|| format!("cannot read {name}"))?;
            }
            read_lines(Cursor::new(lines), &mut builder).with_context(|| name.clone())?;
        }
    }
    let trace = builder.finish(&name)?;
    ensure!(!trace.requests().is_empty(), "{name}: the trace has no request");
    Ok(trace)
}

fn settings(args: &CoresArgs, trace: &Trace) -> anyhow::Result<CoreSettings> {
    let files = profile_files::read(&[&args.hardware, &args.model])?;
    let (hardware, model) = (files.hardware(&args.hardware)?, files.model(&args.model)?);
    let block_bytes = trace.block_tokens().saturating_mul(model.kv_bytes_per_token()).max(1);
    let blocks = |wanted: Option<u64>, bytes: u64| wanted.unwrap_or(bytes / block_bytes);
    let dram_blocks = blocks(args.dram, hardware.dram_bytes);
    let nvme_blocks = blocks(args.nvme, hardware.nvme_bytes);
    let drives = hardware.drives_for(nvme_blocks.saturating_mul(block_bytes));
    Ok(CoreSettings {
        nodes: args.nodes,
        members: args.members,
        hardware: hardware.with_drives(drives),
        model,
        dram_blocks,
        nvme_blocks,
        policy: args.policy.into(),
        admission: args.admission,
        placement_bandwidth: args.placement_bandwidth.0,
        seed: args.seed,
    })
}

/// Replays the trace without time, with the capacities of the cores.
fn compare(trace: &Trace, settings: &CoreSettings, served: &CoreReplay) -> Comparison {
    let [dram_blocks, nvme_blocks] = served.capacity;
    let node = NodeSettings {
        policy: settings.policy,
        dram_blocks,
        nvme_blocks,
        admission: settings.admission,
        block_bytes: trace.block_tokens() * settings.model.kv_bytes_per_token(),
        block_tokens: trace.block_tokens(),
        tenants: 1,
    };
    Comparison::new(served, &Cluster::new(settings.nodes, node).replay(trace).counts)
}
