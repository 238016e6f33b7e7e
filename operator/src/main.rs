//! `reprise-operator`: the operator process, and the commands that the chart runs before installation and
//! removal.
//!
//! `run` prints one JSON line with its admin address to standard output and logs to standard error. It exits
//! with status 0 on SIGTERM and SIGINT, and with an error when it loses the lease.

use std::io::{IsTerminal, Write};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::Context;
use clap::{Parser, Subcommand, ValueEnum};
use kube::{Client, Config};
use reprise_daemon::log;
use reprise_operator::definitions::{apply_definitions, apply_objects};
use reprise_operator::framework::api_client::{self, ApiRequests};
use reprise_operator::run::run;
use reprise_operator::settings::Settings;
use reprise_operator::signing::certificate::PodCertificate;
use reprise_operator::uninstall::{Release, delete};
use serde_json::json;
use tokio::signal::unix::{SignalKind, signal};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::format::FmtSpan;

/// Read timeout of API server calls. Watches are renewed every 290 s and receive bookmarks in between.
const READ_TIMEOUT: Duration = Duration::from_secs(295);

/// Default log filter. It silences the API server client, which logs each failed attempt as an error; the
/// caller logs failures instead.
const LOG_LEVEL: &str = "info,kube_client=off";

/// The Reprise operator: reconciles the custom resources of Reprise
#[derive(Debug, Parser)]
#[command(version)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
    /// Format of the log on standard error
    #[arg(long, value_enum, default_value_t = LogFormat::Text, global = true)]
    log_format: LogFormat,
    /// Log filter: a level (`info`) or directives (`info,kube_client=off`)
    ///
    /// Directives have the syntax of EnvFilter in the Rust crate tracing-subscriber.
    #[arg(long, default_value = LOG_LEVEL, global = true)]
    log_level: String,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Reconcile the resources while this replica holds the lease
    Run(Settings),
    /// Apply the resource definitions and wait until they are served
    ApplyDefinitions,
    /// Apply Reprise objects from YAML files
    Apply {
        /// Namespace of objects that do not name one
        #[arg(long, env = "POD_NAMESPACE", default_value = "default")]
        namespace: String,
        /// YAML files with the objects
        #[arg(required = true)]
        files: Vec<PathBuf>,
        /// Label the objects with this release; `delete` finds them by the label
        #[arg(long)]
        release: Option<String>,
    },
    /// Delete a release's objects and wait until they are gone
    ///
    /// These are the objects that `apply` labelled with the release, and their children.
    Delete(Release),
    /// Keep the certificate of a pod's process, as a sidecar
    ///
    /// It creates a key, requests a certificate through the API server, and renews it.
    Certificate {
        #[command(flatten)]
        pod: PodCertificate,
        /// Only check that the folder has a valid certificate
        #[arg(long)]
        check: bool,
    },
}

/// Longest time between two reports of an agent, including delivery.
const REPORT_INTERVAL: Duration = Duration::from_secs(30);

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum LogFormat {
    /// One line of text per event
    Text,
    /// One JSON object per event
    Json,
}

fn main() -> anyhow::Result<()> {
    let arguments = Arguments::parse();
    let _log = start_log(&arguments)?;
    reprise_daemon::descriptors::raise_limit()
        .context("cannot raise the soft limit on open files to the hard limit")?;
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let outcome = runtime.block_on(dispatch(arguments.command));
    // Does not wait for blocking tasks: a DNS lookup under way may take long.
    runtime.shutdown_background();
    outcome
}

async fn dispatch(command: Command) -> anyhow::Result<()> {
    match command {
        Command::Run(settings) => run_operator(settings).await,
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
        Command::Certificate { pod, check: true } => pod.check().await,
        Command::Certificate { pod, check: false } => {
            let stop = stop_signal()?;
            let (client, _) = client().await?;
            tokio::select! {
                () = pod.keep(&client) => {}
                () = stop => {}
            }
            Ok(())
        }
        Command::Delete(release) => delete(&client().await?.0, &release).await,
    }
}

/// Waits for SIGTERM or SIGINT, which are handled from this call on. The first process of a container has no default
/// actions for signals.
fn stop_signal() -> anyhow::Result<impl Future<Output = ()>> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    Ok(async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
    })
}

/// Creates the API server client, from the pod's service account or from the kubeconfig, and its request
/// counters.
async fn client() -> anyhow::Result<(Client, ApiRequests)> {
    let mut config = Config::infer()
        .await
        .context("cannot configure the API server client: neither in a pod nor with a kubeconfig")?;
    config.read_timeout = Some(READ_TIMEOUT);
    api_client::client(config).context("cannot use the address or certificates of the API server")
}

async fn run_operator(settings: Settings) -> anyhow::Result<()> {
    // Before the ready line is printed: its reader may send a signal at once.
    let stop = stop_signal()?;
    if settings.unused_for < REPORT_INTERVAL {
        tracing::warn!(
            seconds = settings.unused_for.as_secs(),
            "--unused-seconds is below the report interval of agents: deletions may continue while engines \
             still run; set it to at least {}",
            REPORT_INTERVAL.as_secs()
        );
    }
    let print_ready = |admin: SocketAddr| {
        let (mut output, ready) = (std::io::stdout().lock(), json!({ "ready": true, "admin": admin }));
        writeln!(output, "{ready}").and_then(|()| output.flush()).context("cannot write to standard output")
    };
    run(client().await?, settings, print_ready, stop).await
}

fn start_log(arguments: &Arguments) -> anyhow::Result<log::Log> {
    let level = &arguments.log_level;
    let filter = EnvFilter::try_new(level)
        .with_context(|| format!("invalid --log-level \"{level}\": expected a level or a tracing filter"))?;
    let format = match arguments.log_format {
        LogFormat::Text => log::Format::Text { colours: std::io::stderr().is_terminal() },
        LogFormat::Json => log::Format::Json,
    };
    let settings = log::Settings { filter, format, spans: FmtSpan::NONE };
    log::start(settings).context("cannot start the log")
}
