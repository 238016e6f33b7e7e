//! `reprise`: the command line of Reprise.
//!
//! Thin by design: it starts processes, drives engines through the client library and prints. What is
//! measured or decided lives in the crates it calls.

mod bench;
mod check;
mod cluster;
mod config;
mod demo;
mod doctor;
mod engine;
mod engine_process;
mod events;
mod explain;
mod forget;
mod http;
mod interrupt;
mod keep_file;
mod kv_function;
mod model;
mod modes;
mod output;
mod paged_kv;
mod replay;
mod sim;
mod status;
mod tenant;
mod trace;

use std::io::IsTerminal;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context;
use clap::{Parser, Subcommand};
use reprise_daemon::{descriptors, log};
use tracing_subscriber::fmt::format::FmtSpan;

use crate::config::Config;
use crate::output::{Audience, JsonFlag};

/// Cluster-wide KV cache for LLM inference engines.
#[derive(Debug, Parser)]
#[command(name = "reprise", version, about, arg_required_else_help = true)]
struct Arguments {
    /// One JSON object a line instead of tables and bars.
    #[arg(long, global = true)]
    json: bool,
    /// Configuration file (TOML); flags go before it.
    #[arg(long, global = true, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Print the default configuration, commented, and exit.
    #[arg(long)]
    print_default_config: bool,
    #[command(subcommand)]
    command: Option<Command>,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// A two-node cluster on this machine serves a trace; one agent is killed and comes back.
    Demo(demo::DemoArgs),
    /// Replay a trace against running agents.
    Replay(replay::ReplayArgs),
    /// Measure Reprise beside what the machine can do.
    Bench(bench::BenchArgs),
    /// A simulated cluster under faults, from a seed.
    Sim(sim::SimArgs),
    /// Members, nodes, tiers and health of a running cluster.
    Status(status::StatusArgs),
    /// What tenants may have in the whole cluster, and what they hold.
    Tenant(tenant::TenantArgs),
    /// Where a block is, who knows it, and what a load of it would do.
    Explain(explain::ExplainArgs),
    /// What the members of the control plane hold, and every change of it.
    Events(events::EventsArgs),
    /// Choose a node for nothing new; its engines go on as ever.
    Cordon(modes::ModeArgs),
    /// Take a cordoned or draining node back.
    Uncordon(modes::ModeArgs),
    /// Have a node that is to leave give away what only it has.
    Drain(modes::DrainArgs),
    /// Take a node that has left for good off the list; refused while it lives.
    Forget(modes::ModeArgs),
    /// Save a block on this node and load those of other nodes, every byte checked.
    Check(check::CheckArgs),
    /// What this machine can do, and what Reprise will use in consequence.
    Doctor(doctor::DoctorArgs),
    /// Keep a file of a node as it should be; started by the chart, for seccomp profiles.
    #[command(hide = true)]
    KeepFile(keep_file::KeepFileArgs),
    /// The reference engine as a process; started by demo and replay.
    #[command(hide = true)]
    Engine {
        /// The agent's socket.
        #[arg(long)]
        socket: PathBuf,
        /// Encoded layout, 32 hexadecimal digits.
        #[arg(long, value_parser = model::layout_from_hex)]
        layout: reprise_policy::Layout,
        /// Whose blocks they are.
        #[arg(long, default_value = "default")]
        tenant: reprise_policy::TenantName,
    },
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let level = match arguments.command {
        // Whoever started the engine kills agents under it, and says so.
        Some(Command::Engine { .. }) => "warn,reprise_client::connection=error",
        _ => "warn",
    };
    let done = start_log(level).and_then(|log| {
        // For the programs that it starts, and for benches with thousands of connections.
        descriptors::raise_limit().context("cannot raise the soft limit on open files to the hard limit")?;
        run(arguments)?;
        drop(log);
        Ok(())
    });
    match done {
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
    let config = Config::read(arguments.config.as_deref())?;
    match arguments.command {
        Some(Command::Demo(args)) => demo::command(&args, &config, audience),
        Some(Command::Replay(args)) => replay::command(&args, &config, audience),
        Some(Command::Bench(args)) => bench::command(&args, &config, audience),
        Some(Command::Sim(args)) => sim::command(&args, audience),
        Some(Command::Status(args)) => status::command(&args, &config, audience),
        Some(Command::Tenant(args)) => tenant::command(&args, &config, audience),
        Some(Command::Explain(args)) => explain::command(&args, &config, audience),
        Some(Command::Events(args)) => events::command(&args, &config, audience),
        Some(Command::Cordon(args)) => modes::cordon(&args, &config, audience),
        Some(Command::Uncordon(args)) => modes::uncordon(&args, &config, audience),
        Some(Command::Drain(args)) => modes::drain(&args, &config, audience),
        Some(Command::Forget(args)) => forget::command(&args, &config, audience),
        Some(Command::Check(args)) => check::command(&args, audience),
        Some(Command::KeepFile(args)) => keep_file::command(&args, audience),
        Some(Command::Doctor(args)) => doctor::command(&args, audience),
        Some(Command::Engine { socket, layout, tenant }) => {
            engine_process::serve(&engine::EngineSettings { socket, layout, tenant })
        }
        None => anyhow::bail!("name a command: `reprise --help` lists them"),
    }
}

fn start_log(level: &str) -> anyhow::Result<log::Log> {
    let filter = tracing_subscriber::EnvFilter::try_from_default_env()
        .unwrap_or_else(|_| tracing_subscriber::EnvFilter::new(level));
    let format = log::Format::Text { colours: std::io::stderr().is_terminal() };
    let settings = log::Settings { filter, format, spans: FmtSpan::NONE };
    log::start(settings).context("cannot start the log")
}

#[allow(clippy::print_stderr)] // the one place where a failed command says why
fn report(error: &anyhow::Error) {
    eprintln!("reprise: {error:#}");
}
