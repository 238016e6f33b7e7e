//! `reprise-operator`: the operator as a process, and what a chart has to apply before and after it.
//!
//! `run` prints one JSON line with its admin address to standard output, logs to standard error, ends cleanly on SIGTERM and
//! SIGINT, and with an error when it loses the lease.

use std::io::{IsTerminal, Write};
use std::net::SocketAddr;
use std::path::PathBuf;

use anyhow::Context;
use clap::{Args, Parser, Subcommand, ValueEnum};
use kube::{Client, Config};
use reprise_operator::definitions::{apply_definitions, apply_objects};
use reprise_operator::run::{Listening, run};
use reprise_operator::settings::{DefaultImages, Settings};
use serde_json::json;
use tokio::signal::unix::{SignalKind, signal};
use tracing_subscriber::EnvFilter;

/// A call that gets no byte for so long has failed. Watches are renewed every 290 s and have bookmarks in between.
const READ_TIMEOUT: std::time::Duration = std::time::Duration::from_secs(295);

/// What is logged unless somebody wants something else. The client of the API server logs every failed attempt as an error; what fails is logged where
/// it is handled.
const LOG_LEVEL: &str = "info,kube_client=off";

/// The Reprise operator: makes its custom resources be so.
#[derive(Debug, Parser)]
#[command(version)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
    /// Format of the log on standard error
    #[arg(long, value_enum, default_value_t = LogFormat::Text, global = true)]
    log_format: LogFormat,
    /// What is logged: a level, or a filter of `tracing`
    #[arg(long, default_value = LOG_LEVEL, global = true)]
    log_level: String,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Work, while no other replica does
    Run(RunArguments),
    /// Apply the definitions of the resources, and wait until they are served
    ApplyDefinitions,
    /// Apply objects of our kinds
    Apply {
        /// Namespace of those that name none
        #[arg(long, env = "POD_NAMESPACE", default_value = "default")]
        namespace: String,
        /// YAML files
        #[arg(required = true)]
        files: Vec<PathBuf>,
    },
}

#[derive(Debug, Args)]
struct RunArguments {
    /// Image of agents, for clusters that name none
    #[arg(long, default_value = concat!("reprise-agent:", env!("CARGO_PKG_VERSION")))]
    image_agent: String,
    /// Image of the control plane's members, for clusters that name none
    #[arg(long, default_value = concat!("reprise-controlplane:", env!("CARGO_PKG_VERSION")))]
    image_control_plane: String,
    /// Image of etcd, for clusters that name none
    #[arg(long, default_value = concat!("reprise-etcd:", env!("CARGO_PKG_VERSION")))]
    image_etcd: String,
    /// Where metrics and health are served
    #[arg(long, default_value = "127.0.0.1:7421")]
    admin_listen: SocketAddr,
    /// Name of this replica, in the lease
    #[arg(long, env = "POD_NAME")]
    pod_name: String,
    /// Namespace of the lease
    #[arg(long, env = "POD_NAMESPACE")]
    pod_namespace: String,
    /// Service account of this replica, to which the lease belongs
    #[arg(long, env = "POD_SERVICE_ACCOUNT")]
    pod_service_account: Option<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum LogFormat {
    /// One readable line an event
    Text,
    /// One JSON object an event
    Json,
}

fn main() -> anyhow::Result<()> {
    let arguments = Arguments::parse();
    start_log(&arguments)?;
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    runtime.block_on(obey(arguments.command))
}

async fn obey(command: Command) -> anyhow::Result<()> {
    match command {
        Command::Run(arguments) => work(arguments).await,
        Command::ApplyDefinitions => apply_definitions(&client().await?).await,
        Command::Apply { namespace, files } => {
            let client = client().await?;
            for file in files {
                let text = std::fs::read_to_string(&file);
                let text = text.with_context(|| format!("cannot read {}", file.display()))?;
                let applied = apply_objects(&client, &text, &namespace).await;
                applied.with_context(|| format!("in {}", file.display()))?;
            }
            Ok(())
        }
    }
}

/// As a pod or, outside, by the kubeconfig of whoever starts it.
async fn client() -> anyhow::Result<Client> {
    let mut config = Config::infer().await.context("neither in a pod nor with a kubeconfig")?;
    config.read_timeout = Some(READ_TIMEOUT);
    Client::try_from(config).context("the API server's address or certificates cannot be used")
}

async fn work(arguments: RunArguments) -> anyhow::Result<()> {
    // Before the ready line: whoever reads it may send a signal at once.
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let settings = Settings {
        images: DefaultImages {
            agent: arguments.image_agent,
            control_plane: arguments.image_control_plane,
            etcd: arguments.image_etcd,
        },
        identity: arguments.pod_name,
        namespace: arguments.pod_namespace,
        service_account: arguments.pod_service_account,
        admin: arguments.admin_listen,
    };
    let say =
        |listening: Listening| print(&format!("{}\n", json!({ "ready": true, "admin": listening.admin })));
    let stop = async {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
    };
    run(client().await?, settings, say, stop).await
}

fn print(text: &str) -> anyhow::Result<()> {
    let mut output = std::io::stdout().lock();
    output.write_all(text.as_bytes()).and_then(|()| output.flush()).context("cannot write to standard output")
}

fn start_log(arguments: &Arguments) -> anyhow::Result<()> {
    let level = &arguments.log_level;
    let filter = EnvFilter::try_new(level).with_context(|| format!("--log-level '{level}' is no filter"))?;
    let colours = std::io::stderr().is_terminal();
    let builder =
        tracing_subscriber::fmt().with_env_filter(filter).with_ansi(colours).with_writer(std::io::stderr);
    match arguments.log_format {
        LogFormat::Text => builder.init(),
        LogFormat::Json => builder.json().init(),
    }
    Ok(())
}
