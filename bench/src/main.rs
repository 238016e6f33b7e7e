//! `reprise-bench`: benchmarks that compare Reprise with other systems, install them, or need programs that Reprise
//! does not ship: etcd, Kubernetes' API server, vLLM, Mooncake, LMCache. It is not part of images.
//!
//! Benchmarks of Reprise alone are in `reprise bench`. Both share the reports and the launcher of clusters.

mod etcd;
mod failover;
mod helper_process;
mod mooncake;
mod mooncake_directory;
mod operator;
mod rebuild;
mod vllm;

use std::io::IsTerminal;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, bail};
use clap::{Parser, Subcommand};
use reprise_daemon::{descriptors, log};
use reprise_testkit::bench::directory_service::ENTRIES_MAX;
use reprise_testkit::bench::preflight::{self, CLUSTER_PROGRAMS, Readiness, Requirements};
use reprise_testkit::bench::report::{self, Figure};
use reprise_testkit::bench::{REPETITIONS, Settings};
use reprise_testkit::cluster::cache_directory;
use reprise_testkit::output::{Audience, JsonFlag};
use tracing_subscriber::fmt::format::FmtSpan;

/// Benchmarks of Reprise next to other systems.
#[derive(Debug, Parser)]
#[command(name = "reprise-bench", version, arg_required_else_help = true)]
struct Arguments {
    #[command(subcommand)]
    which: Benchmark,
    /// Print one JSON object per line instead of tables and progress bars.
    #[arg(long, global = true)]
    json: bool,
    /// Repeat each measurement; report the median [default: 11; vllm: 5].
    #[arg(long, global = true)]
    repetitions: Option<usize>,
    /// Store files in this directory [default: ~/.cache/reprise/bench].
    ///
    /// `$REPRISE_CACHE` replaces `~/.cache/reprise`.
    #[arg(long, global = true, value_name = "DIR")]
    dir: Option<PathBuf>,
}

#[derive(Clone, Debug, Subcommand)]
enum Benchmark {
    /// Measure etcd's database size for 1,000 and for ENTRIES blocks.
    ///
    /// The target is at most 2 MiB at both sizes.
    Etcd {
        /// Use this many blocks in the larger measurement.
        #[arg(long, default_value_t = 1_000_000)]
        entries: usize,
    },
    /// Measure misses after the loss of one control-plane member, or of all.
    ///
    /// Measures how long the keys of one killed member of three are not found, and, after all three are
    /// killed, how long the directory takes to be complete.
    Failover {
        /// Rebuild this many replica entries; at most ten million.
        #[arg(long, default_value_t = ENTRIES_MAX)]
        entries: usize,
    },
    /// Compare look-ups in the directory with Mooncake's metadata server.
    ///
    /// Installs Mooncake into its own environment in `~/.cache/reprise` (or `$REPRISE_CACHE`).
    Mooncake {
        /// Use this many replica entries; at most ten million.
        #[arg(long, default_value_t = ENTRIES_MAX)]
        entries: usize,
    },
    /// Measure the operator's reconciles, memory and writes at scale.
    ///
    /// Runs a real API server with simulated agents. Needs `make etcd kubernetes`.
    Operator {
        /// Create this many nodes, each with a simulated agent.
        #[arg(long, default_value_t = 1000)]
        nodes: usize,
        /// Create this many SSDPool objects, each with an equal share of nodes.
        #[arg(long, default_value_t = 20)]
        pools: usize,
    },
    /// Measure vLLM's time to first token with Reprise and other caches.
    ///
    /// Installs vLLM and the other caches into `~/.cache/reprise` (or `$REPRISE_CACHE`): 6.4 GB or more.
    Vllm(vllm::VllmArgs),
    /// Run all benchmarks that can run on this machine, except vllm.
    ///
    /// The command installs nothing. It first lists which benchmarks will run, what the others lack, and how to
    /// provide it.
    All,
}

fn main() -> ExitCode {
    let outcome = start_log().and_then(|log| {
        // Child processes inherit the limit, and some benchmarks open thousands of connections.
        descriptors::raise_limit().context("cannot raise the soft limit on open files to the hard limit")?;
        run(&Arguments::parse())?;
        drop(log);
        Ok(())
    });
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            report_error(&error);
            ExitCode::FAILURE
        }
    }
}

fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let repetitions = arguments.repetitions.unwrap_or(REPETITIONS);
    if repetitions == 0 {
        bail!("invalid --repetitions 0: expected at least 1");
    }
    let audience = Audience::of(JsonFlag(arguments.json));
    let directory = arguments.dir.clone().unwrap_or_else(|| cache_directory().join("bench"));
    let settings = Settings { directory, repetitions, audience };
    match &arguments.which {
        Benchmark::All => run_all(&settings),
        which => {
            report::print(audience, &which.run(arguments.repetitions, &settings)?);
            Ok(())
        }
    }
}

fn run_all(settings: &Settings) -> anyhow::Result<()> {
    let all = [
        Benchmark::Etcd { entries: 1_000_000 },
        Benchmark::Failover { entries: ENTRIES_MAX },
        Benchmark::Mooncake { entries: ENTRIES_MAX },
        Benchmark::Operator { nodes: 1000, pools: 20 },
    ];
    let requirements: Vec<_> = all.iter().map(Benchmark::requirements).collect();
    let mut checked = preflight::check(&requirements, &settings.directory);
    checked.push(Readiness::excluded(
        "vllm",
        "installs up to 12 GB and takes half an hour",
        "run `reprise-bench vllm` in a checkout",
    ));
    preflight::report(settings.audience, &checked)?;
    for (which, _) in all.iter().zip(&checked).filter(|(_, readiness)| readiness.runs) {
        report::print(settings.audience, &which.run(None, settings)?);
    }
    Ok(())
}

impl Benchmark {
    fn run(&self, repetitions: Option<usize>, settings: &Settings) -> anyhow::Result<Vec<Figure>> {
        match self {
            Benchmark::Etcd { entries } => etcd::run(*entries, settings),
            Benchmark::Failover { entries } => {
                let mut figures = failover::run(settings)?;
                figures.extend(rebuild::run((*entries).min(ENTRIES_MAX), settings)?);
                Ok(figures)
            }
            Benchmark::Mooncake { entries } => mooncake_directory::run((*entries).min(ENTRIES_MAX), settings),
            Benchmark::Operator { nodes, pools } => {
                operator::run(operator::Scale { nodes: *nodes, pools: *pools }, settings)
            }
            Benchmark::Vllm(args) => vllm::run(args, repetitions, settings),
            Benchmark::All => bail!("not one benchmark"),
        }
    }

    /// Returns the requirements of the benchmark. Simulated nodes and members use some 150 bytes for each entry.
    fn requirements(&self) -> Requirements {
        let etcd = (reprise_testkit::etcd::binary(), "make etcd");
        let cluster =
            Requirements { programs: CLUSTER_PROGRAMS, disk_bytes: 1 << 30, ..Requirements::default() };
        let memory = |entries: usize| (entries as u64 * 150).max(1 << 30);
        match self {
            Benchmark::Etcd { entries } => {
                Requirements { name: "etcd", files: vec![etcd], memory_bytes: memory(*entries), ..cluster }
            }
            Benchmark::Failover { entries } => Requirements {
                name: "failover",
                files: vec![etcd],
                memory_bytes: memory(*entries),
                ..cluster
            },
            Benchmark::Mooncake { entries } => Requirements {
                name: "mooncake",
                files: vec![(mooncake::python(), "reprise-bench mooncake")],
                memory_bytes: memory(*entries),
                ..cluster
            },
            Benchmark::Operator { .. } => Requirements {
                name: "operator",
                programs: &["reprise-controlplane", "reprise-operator"],
                files: vec![etcd, (operator::api_server(), "make kubernetes")],
                memory_bytes: 2 << 30,
                ..cluster
            },
            Benchmark::Vllm(_) | Benchmark::All => cluster,
        }
    }
}

fn start_log() -> anyhow::Result<log::Log> {
    let filter = tracing_subscriber::EnvFilter::try_from_default_env()
        .unwrap_or_else(|_| tracing_subscriber::EnvFilter::new("warn"));
    let format = log::Format::Text { colours: std::io::stderr().is_terminal() };
    let settings = log::Settings { filter, format, spans: FmtSpan::NONE };
    log::start(settings).context("cannot start the log")
}

#[allow(clippy::print_stderr)] // the only place that prints the error of a failed command
fn report_error(error: &anyhow::Error) {
    eprintln!("reprise-bench: {error:#}");
}
