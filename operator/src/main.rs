//! `reprise-operator`: the operator as a process, and what a chart has to apply before and after it.
//!
//! `run` prints one JSON line with its admin address to standard output, logs to standard error, ends cleanly on SIGTERM and
//! SIGINT, and with an error when it loses the lease.

use std::io::{IsTerminal, Write};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::Context;
use clap::{Args, Parser, Subcommand, ValueEnum};
use kube::{Client, Config};
use reprise_daemon::log;
use reprise_operator::definitions::{apply_definitions, apply_objects};
use reprise_operator::requests::{self, ApiRequests};
use reprise_operator::run::{Listening, run};
use reprise_operator::settings::{DefaultImages, Settings};
use reprise_operator::uninstall::{Release, delete};
use serde_json::json;
use tokio::signal::unix::{SignalKind, signal};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::format::FmtSpan;

/// A call that gets no byte for so long has failed. Watches are renewed every 290 s and have bookmarks in between.
const READ_TIMEOUT: Duration = Duration::from_secs(295);

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
        /// Release of the chart that they are of, by which `delete` finds them
        #[arg(long)]
        release: Option<String>,
    },
    /// Delete what `apply` has applied of a release, and wait until what was made of it is gone
    Delete(DeleteArguments),
}

#[derive(Debug, Args)]
struct DeleteArguments {
    /// The release
    #[arg(long)]
    release: String,
    /// Namespace of its clusters
    #[arg(long, env = "POD_NAMESPACE", default_value = "default")]
    namespace: String,
    /// Seconds until it gives up and says what remains
    #[arg(long, default_value_t = 300)]
    timeout_seconds: u64,
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
    /// Where the control plane of a cluster is reached, when not by its service: for an operator outside of the Kubernetes cluster
    #[arg(long = "control-plane-address", value_name = "NAMESPACE/NAME=HOST:PORT", value_parser = control_plane)]
    control_planes: Vec<(String, String)>,
    /// Seconds without a sign of a session after which a deletion that waited for engines goes on. Agents report at least every 25 s, so that
    /// with less than 30 engines that still run may not be waited for
    #[arg(long, default_value_t = 60)]
    unused_seconds: u64,
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

/// So long agents may have nothing to report, and the report may take.
const USUAL_SILENCE_SECONDS: u64 = 30;

/// A cluster and an address.
fn control_plane(text: &str) -> Result<(String, String), String> {
    let said = || format!("'{text}' is not NAMESPACE/NAME=HOST:PORT, like cache/main=127.0.0.1:7400");
    let (cluster, address) = text.split_once('=').ok_or_else(said)?;
    let is_cluster = cluster.split('/').filter(|part| !part.is_empty()).count() == 2;
    let is_address =
        address.rsplit_once(':').is_some_and(|(host, port)| !host.is_empty() && port.parse::<u16>().is_ok());
    if !is_cluster || cluster.matches('/').count() != 1 || !is_address {
        return Err(said());
    }
    Ok((cluster.to_owned(), address.to_owned()))
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
    let _log = start_log(&arguments)?;
    reprise_daemon::descriptors::raise_limit()
        .context("cannot raise the soft limit on open files to the hard limit")?;
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let obeyed = runtime.block_on(obey(arguments.command));
    // Without a wait for names that are still being looked up.
    runtime.shutdown_background();
    obeyed
}

async fn obey(command: Command) -> anyhow::Result<()> {
    match command {
        Command::Run(arguments) => work(arguments).await,
        Command::ApplyDefinitions => apply_definitions(&client().await?.0).await,
        Command::Apply { namespace, files, release } => {
            let (client, _) = client().await?;
            for file in files {
                let text = std::fs::read_to_string(&file);
                let text = text.with_context(|| format!("cannot read {}", file.display()))?;
                let applied = apply_objects(&client, &text, &namespace, release.as_deref()).await;
                applied.with_context(|| format!("in {}", file.display()))?;
            }
            Ok(())
        }
        Command::Delete(arguments) => {
            let release = Release { name: arguments.release, namespace: arguments.namespace };
            delete(&client().await?.0, &release, Duration::from_secs(arguments.timeout_seconds)).await
        }
    }
}

/// As a pod or, outside, by the kubeconfig of whoever starts it; and the count of what it asks.
async fn client() -> anyhow::Result<(Client, ApiRequests)> {
    let mut config = Config::infer().await.context("neither in a pod nor with a kubeconfig")?;
    config.read_timeout = Some(READ_TIMEOUT);
    requests::client(config).context("the API server's address or certificates cannot be used")
}

async fn work(arguments: RunArguments) -> anyhow::Result<()> {
    // Before the ready line: whoever reads it may send a signal at once.
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    if arguments.unused_seconds < USUAL_SILENCE_SECONDS {
        tracing::warn!(
            seconds = arguments.unused_seconds,
            "agents are silent for longer while engines work: a deletion may go on that should wait; give --unused-seconds more than \
             {USUAL_SILENCE_SECONDS}"
        );
    }
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
        control_planes: arguments.control_planes.into_iter().collect(),
        unused_for: Duration::from_secs(arguments.unused_seconds),
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

fn start_log(arguments: &Arguments) -> anyhow::Result<log::Log> {
    let level = &arguments.log_level;
    let filter = EnvFilter::try_new(level).with_context(|| format!("--log-level '{level}' is no filter"))?;
    let format = match arguments.log_format {
        LogFormat::Text => log::Format::Text { colours: std::io::stderr().is_terminal() },
        LogFormat::Json => log::Format::Json,
    };
    let settings = log::Settings { filter, format, spans: FmtSpan::NONE };
    log::start(settings).context("cannot start the log")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_of_control_planes_name_a_cluster_and_a_port() {
        let read = control_plane("cache/c=127.0.0.1:7400").expect("as it should be");
        assert_eq!(read, ("cache/c".to_owned(), "127.0.0.1:7400".to_owned()));
        for wrong in
            ["cache/c", "c=127.0.0.1:7400", "a/b/c=h:1", "/c=h:1", "cache/c=h", "cache/c=:1", "cache/c=h:x"]
        {
            assert!(control_plane(wrong).expect_err(wrong).contains("NAMESPACE/NAME"));
        }
    }
}
