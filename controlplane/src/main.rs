//! `reprise-controlplane`: one member of the control plane as a process.
//!
//! Prints one JSON line with its addresses to standard output once it serves. Logs to standard error. Shuts
//! down on SIGTERM and SIGINT.

use std::io::{IsTerminal, Write};
use std::path::PathBuf;

use anyhow::Context;
use clap::Parser;
use reprise_controlplane::config::{Config, DEFAULT_CONFIG, LogConfig, LogFormat};
use reprise_controlplane::server::ControlPlane;
use reprise_daemon::log;
use serde_json::json;
use tokio::signal::unix::{SignalKind, signal};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::format::FmtSpan;

/// Minimum number of worker threads, so that heartbeats proceed while one thread applies a batch.
const WORKERS_MIN: usize = 2;

/// The Reprise control plane: membership and replica directory.
#[derive(Debug, Parser)]
#[command(version)]
struct Arguments {
    /// Read this configuration file (TOML); omitted values keep their defaults
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Print the default configuration, with comments, and exit
    #[arg(long)]
    print_default_config: bool,
}

fn main() -> anyhow::Result<()> {
    let arguments = Arguments::parse();
    if arguments.print_default_config {
        return print(DEFAULT_CONFIG);
    }
    let config = match &arguments.config {
        None => Config::default(),
        Some(path) => {
            let text =
                std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
            Config::parse(&text).with_context(|| format!("invalid configuration {}", path.display()))?
        }
    };
    let _log = start_log(&config.log)?;
    reprise_daemon::descriptors::raise_limit()
        .context("cannot raise the soft limit on open files to the hard limit")?;
    let workers =
        std::thread::available_parallelism().map_or(WORKERS_MIN, |cores| cores.get().max(WORKERS_MIN));
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(workers).enable_all().build()?;
    runtime.block_on(serve(config))
}

async fn serve(config: Config) -> anyhow::Result<()> {
    // Install handlers before the ready line: its reader may send a signal immediately.
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    // Opening the store may block, so signals must also end the start.
    let mut member = tokio::select! {
        started = ControlPlane::start(config) => started?,
        _ = terminate.recv() => return Ok(()),
        _ = interrupt.recv() => return Ok(()),
    };
    tracing::info!(grpc = %member.grpc, admin = %member.admin, "control plane is ready");
    let (events, replay) = match &member.publisher {
        Some(publisher) => (Some(publisher.publish), publisher.replay),
        None => (None, None),
    };
    let ready = json!({
        "ready": true,
        "admin": member.admin,
        "grpc": member.grpc,
        "events": events,
        "events_replay": replay,
    });
    print(&format!("{ready}\n"))?;
    tokio::select! {
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
        error = member.failed() => return Err(error),
    }
    tracing::info!("control plane is shutting down");
    member.shutdown().await;
    Ok(())
}

fn print(text: &str) -> anyhow::Result<()> {
    let mut output = std::io::stdout().lock();
    output.write_all(text.as_bytes()).and_then(|()| output.flush()).context("cannot write to standard output")
}

fn start_log(config: &LogConfig) -> anyhow::Result<log::Log> {
    let filter = EnvFilter::try_new(&config.level).with_context(|| {
        format!("invalid log.level '{}': expected a tracing filter such as info", config.level)
    })?;
    let format = match config.format {
        LogFormat::Text => log::Format::Text { colours: std::io::stderr().is_terminal() },
        LogFormat::Json => log::Format::Json,
    };
    let settings = log::Settings { filter, format, spans: FmtSpan::NONE };
    log::start(settings).context("cannot start the log")
}
