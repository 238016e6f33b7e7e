//! Command line of Reprise.
//!
//! This crate starts processes, drives engines through the client library and prints results. Policy and
//! protocol code lives in the crates that it calls.

mod admin;
mod bench;
mod certs;
mod check;
mod config;
mod demo;
mod doctor;
mod encryption_keys;
mod engine_process;
mod engine_profile;
mod events;
mod explain;
mod forget;
mod keep_file;
mod members;
mod node_mode;
mod plan;
#[cfg(feature = "gpu")]
mod profile;
mod profile_files;
mod replay;
mod salts;
mod sim;
mod status;
mod tenant;
mod trace;
mod vllm_engine;
mod vllm_node;
mod waiting_queue;

use std::io::IsTerminal;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context;
use clap::{Parser, Subcommand};
use reprise_daemon::{descriptors, log};
use reprise_testkit::engine::{EnginePath, EngineSettings};
use reprise_testkit::output::{self, Audience, JsonFlag};
use tracing_subscriber::fmt::format::FmtSpan;

use crate::config::Config;

/// Cluster-wide KV cache for LLM inference engines.
#[derive(Debug, Parser)]
#[command(name = "reprise", version, arg_required_else_help = true)]
struct Arguments {
    /// Print one JSON object per line instead of tables and progress bars.
    #[arg(long, global = true)]
    json: bool,
    /// Read this configuration file (TOML); flags override it.
    #[arg(long, global = true, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Show the certificate in this folder to members and agents.
    ///
    /// The folder has ca.crt, tls.crt and tls.key, as `reprise certs issue` writes them. Default: $REPRISE_TLS.
    #[arg(long, global = true, value_name = "FOLDER")]
    tls: Option<PathBuf>,
    /// Print the default configuration with comments, and exit.
    #[arg(long)]
    print_default_config: bool,
    #[command(subcommand)]
    command: Option<Command>,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Run a local cluster on a trace, kill an agent, prefetch, verify every byte.
    Demo(demo::DemoArgs),
    /// Replay a trace against running agents.
    Replay(replay::ReplayArgs),
    /// Measure Reprise against the limits of this machine.
    Bench(bench::BenchArgs),
    /// Measure the slack of a model's layers, and print a SlackProfile.
    ///
    /// Without --gpu or --timings, measures the reference engine on this CPU. With --vllm, measures steps and loads of
    /// a vLLM engine instead, and prints a profile for the simulator.
    #[cfg(feature = "gpu")]
    Profile(profile::ProfileArgs),
    /// Simulate a cluster under faults, reproducibly from a seed.
    Sim(sim::SimArgs),
    /// Plan nodes, DRAM, SSDs and policy for a trace and a budget.
    ///
    /// States which configuration, why, and what the next dollar buys.
    Plan(plan::PlanArgs),
    /// Show members, nodes, tiers and health of a running cluster.
    Status(status::StatusArgs),
    /// List, set and remove the cluster-wide budgets of tenants.
    Tenant(tenant::TenantArgs),
    /// Pin, prefetch, demote or delete blocks of nodes.
    Admin(admin::AdminArgs),
    /// Show where a block is, why, and how each node would load it.
    Explain(explain::ExplainArgs),
    /// Print the replicas in the directory and, on request, each change.
    Events(events::EventsArgs),
    /// Record what engines ask of agents, as a trace that can be replayed.
    Trace(trace::TraceArgs),
    /// Stop placing new replicas on a node; its engines keep working.
    Cordon(node_mode::ModeArgs),
    /// Return a cordoned or draining node to normal use.
    Uncordon(node_mode::ModeArgs),
    /// Copy blocks that exist only on NODE to other nodes.
    ///
    /// A draining node also receives no new replicas.
    Drain(node_mode::DrainArgs),
    /// Remove a dead node permanently; rejected while it is alive.
    Forget(node_mode::ModeArgs),
    /// Save a block on this node, load other nodes' blocks, verify all bytes.
    Check(check::CheckArgs),
    /// Create, renew and show certificates of a cluster without Kubernetes.
    Certs(certs::CertsArgs),
    /// Report what this machine supports, and what Reprise will use.
    Doctor(doctor::DoctorArgs),
    /// Keep a copy of a file up to date; the chart runs it for seccomp.
    #[command(hide = true)]
    KeepFile(keep_file::KeepFileArgs),
    /// Run the reference engine; `demo` and `replay` start it.
    #[command(hide = true)]
    Engine {
        /// Connect to the agent at this Unix socket.
        #[arg(long)]
        socket: PathBuf,
        /// Use this encoded layout: 32 hexadecimal digits.
        #[arg(long, value_parser = reprise_testkit::model::layout_from_hex)]
        layout: reprise_policy::Layout,
        /// Save and load blocks of this tenant.
        #[arg(long, default_value = "default")]
        tenant: reprise_policy::TenantName,
        /// Move blocks on this path: `arena` or `rings`.
        #[arg(long, default_value_t, value_name = "PATH")]
        engine_path: EnginePath,
    },
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let level = match arguments.command {
        // The demo kills agents on purpose and reports it, so lost connections are not worth a warning.
        Some(Command::Engine { .. }) => "warn,reprise_client::connection=error",
        _ => "warn",
    };
    let outcome = start_log(level).and_then(|log| {
        // Child processes inherit the limit, and some benchmarks open thousands of connections.
        descriptors::raise_limit().context("cannot raise the soft limit on open files to the hard limit")?;
        run(arguments)?;
        drop(log);
        Ok(())
    });
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            report(&error);
            ExitCode::FAILURE
        }
    }
}

fn run(arguments: Arguments) -> anyhow::Result<()> {
    let audience = Audience::of(JsonFlag(arguments.json));
    if arguments.print_default_config {
        output::print(config::DEFAULT_CONFIG);
        return Ok(());
    }
    let mut config = Config::read(arguments.config.as_deref())?;
    let folder = arguments.tls.or_else(|| std::env::var_os("REPRISE_TLS").map(PathBuf::from));
    config.tls.folder = folder.or(config.tls.folder);
    match arguments.command {
        Some(Command::Demo(args)) => demo::command(&args, &config, audience),
        Some(Command::Replay(args)) => replay::command(&args, &config, audience),
        Some(Command::Bench(args)) => bench::command(&args, &config, audience),
        #[cfg(feature = "gpu")]
        Some(Command::Profile(args)) => profile::command(&args, &config, audience),
        Some(Command::Sim(args)) => sim::command(&args, &config, audience),
        Some(Command::Plan(args)) => plan::command(&args, audience),
        Some(Command::Status(args)) => status::command(&args, &config, audience),
        Some(Command::Tenant(args)) => tenant::command(&args, &config, audience),
        Some(Command::Admin(args)) => admin::command(&args, &config, audience),
        Some(Command::Explain(args)) => explain::command(&args, &config, audience),
        Some(Command::Events(args)) => events::command(&args, &config, audience),
        Some(Command::Trace(args)) => trace::command(&args, &config, audience),
        Some(Command::Cordon(args)) => node_mode::cordon(&args, &config, audience),
        Some(Command::Uncordon(args)) => node_mode::uncordon(&args, &config, audience),
        Some(Command::Drain(args)) => node_mode::drain(&args, &config, audience),
        Some(Command::Forget(args)) => forget::command(&args, &config, audience),
        Some(Command::Check(args)) => check::command(&args, audience),
        Some(Command::Certs(args)) => certs::command(&args, audience),
        Some(Command::KeepFile(args)) => keep_file::command(&args, audience),
        Some(Command::Doctor(args)) => doctor::command(&args, audience),
        Some(Command::Engine { socket, layout, tenant, engine_path }) => {
            engine_process::serve(&EngineSettings { socket, layout, tenant, path: engine_path })
        }
        None => anyhow::bail!("no command given: `reprise --help` lists the commands"),
    }
}

fn start_log(level: &str) -> anyhow::Result<log::Log> {
    let filter = tracing_subscriber::EnvFilter::try_from_default_env()
        .unwrap_or_else(|_| tracing_subscriber::EnvFilter::new(level));
    let format = log::Format::Text { colours: std::io::stderr().is_terminal() };
    let settings = log::Settings { filter, format, spans: FmtSpan::NONE };
    log::start(settings).context("cannot start the log")
}

#[allow(clippy::print_stderr)] // the only place that prints the error of a failed command
fn report(error: &anyhow::Error) {
    eprintln!("reprise: {error:#}");
}
