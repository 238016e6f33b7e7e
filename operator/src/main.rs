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
use clap::{Args, Parser, Subcommand, ValueEnum};
use kube::{Client, Config};
use reprise_daemon::log;
use reprise_identity::Identity;
use reprise_operator::definitions::{apply_definitions, apply_objects};
use reprise_operator::framework::api_client::{self, ApiRequests};
use reprise_operator::run::{ListenAddresses, run};
use reprise_operator::settings::{ControlPlaneAddress, DefaultImages, Settings};
use reprise_operator::signing::certificate::{self, PodCertificate};
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
    Run(RunArguments),
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
    Delete(DeleteArguments),
    /// Keep the certificate of a pod's process, as a sidecar
    ///
    /// It creates a key, requests a certificate through the API server, and renews it.
    Certificate(CertificateArguments),
}

#[derive(Debug, Args)]
struct CertificateArguments {
    /// Identity of the process, like reprise://CLUSTER.NAMESPACE/agent/NODE
    #[arg(long, env = "REPRISE_IDENTITY", value_parser = certificate::identity)]
    identity: Identity,
    /// Folder for ca.crt, tls.crt and tls.key
    #[arg(long)]
    folder: PathBuf,
    /// File with the certificates of the trusted authorities
    #[arg(long)]
    authorities: PathBuf,
    /// Only check that the folder has a valid certificate
    #[arg(long)]
    check: bool,
}

#[derive(Debug, Args)]
struct DeleteArguments {
    /// Name of the release
    #[arg(long)]
    release: String,
    /// Namespace of the release's clusters
    #[arg(long, env = "POD_NAMESPACE", default_value = "default")]
    namespace: String,
    /// Timeout in seconds; on expiry, print the remaining objects and fail
    #[arg(long, default_value_t = 300)]
    timeout_seconds: u64,
}

#[derive(Debug, Args)]
struct RunArguments {
    /// Agent image, for clusters that do not name one
    #[arg(long, default_value = concat!("reprise-agent:", env!("CARGO_PKG_VERSION")))]
    image_agent: String,
    /// Control plane image, for clusters that do not name one
    #[arg(long, default_value = concat!("reprise-controlplane:", env!("CARGO_PKG_VERSION")))]
    image_control_plane: String,
    /// etcd image, for clusters that do not name one
    #[arg(long, default_value = concat!("reprise-etcd:", env!("CARGO_PKG_VERSION")))]
    image_etcd: String,
    /// Image of this program, for the pods' sidecars that keep certificates
    #[arg(long, default_value = concat!("reprise-operator:", env!("CARGO_PKG_VERSION")))]
    image_operator: String,
    /// Listen address for metrics and health checks
    #[arg(long, default_value = "127.0.0.1:7421")]
    admin_listen: SocketAddr,
    /// Serve metrics without TLS and credentials; on a loopback address only
    #[arg(long)]
    admin_plain: bool,
    /// Reach a KVCacheCluster's control plane at this address
    ///
    /// For an operator outside Kubernetes. Repeat for several clusters. plain://127.0.0.1:PORT reaches members without
    /// certificates on this machine.
    #[arg(long = "control-plane-address", value_name = "NAMESPACE/NAME=HOST:PORT", value_parser = control_plane)]
    control_planes: Vec<(String, ControlPlaneAddress)>,
    /// Continue a deletion after this many seconds without reported sessions
    ///
    /// Sessions of engines block a deletion. Agents report them at least every 25 s; allow 5 s for delivery.
    /// With less than 30, a deletion may continue while engines still run.
    #[arg(long, default_value_t = 60)]
    unused_seconds: u64,
    /// Name of this replica, its identity in the lease
    #[arg(long, env = "POD_NAME")]
    pod_name: String,
    /// Namespace of the lease and of this replica
    #[arg(long, env = "POD_NAMESPACE")]
    pod_namespace: String,
    /// Service account of this replica, set as owner of the lease
    #[arg(long, env = "POD_SERVICE_ACCOUNT")]
    pod_service_account: Option<String>,
}

/// Longest time between two reports of an agent, in seconds, including delivery.
const REPORT_INTERVAL_SECONDS: u64 = 30;

/// Parses a cluster and the address of its control plane.
fn control_plane(text: &str) -> Result<(String, ControlPlaneAddress), String> {
    let invalid = || {
        format!(
            "invalid control plane address \"{text}\": expected NAMESPACE/NAME=HOST:PORT, like \
             cache/main=127.0.0.1:7400"
        )
    };
    let (cluster, address) = text.split_once('=').ok_or_else(invalid)?;
    let is_cluster = cluster.split('/').filter(|part| !part.is_empty()).count() == 2;
    if !is_cluster || cluster.matches('/').count() != 1 {
        return Err(invalid());
    }
    let address = address.parse().map_err(|error| format!("{}; {error}", invalid()))?;
    Ok((cluster.to_owned(), address))
}

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
        Command::Run(arguments) => run_operator(arguments).await,
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
        Command::Certificate(arguments) => keep_certificate(arguments).await,
        Command::Delete(arguments) => {
            let release = Release { name: arguments.release, namespace: arguments.namespace };
            delete(&client().await?.0, &release, Duration::from_secs(arguments.timeout_seconds)).await
        }
    }
}

async fn keep_certificate(arguments: CertificateArguments) -> anyhow::Result<()> {
    let CertificateArguments { identity, folder, authorities, check } = arguments;
    let pod = PodCertificate { identity, folder, authorities };
    if check {
        return pod.check().await;
    }
    // The first process of a container has no default actions for signals.
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let (client, _) = client().await?;
    tokio::select! {
        () = pod.keep(&client) => {}
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
    }
    Ok(())
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

async fn run_operator(arguments: RunArguments) -> anyhow::Result<()> {
    // Installed before the ready line is printed: its reader may send a signal at once.
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    if arguments.unused_seconds < REPORT_INTERVAL_SECONDS {
        tracing::warn!(
            seconds = arguments.unused_seconds,
            "--unused-seconds is below the report interval of agents: deletions may continue while engines \
             still run; set it to at least {REPORT_INTERVAL_SECONDS}"
        );
    }
    let settings = Settings {
        images: DefaultImages {
            agent: arguments.image_agent,
            control_plane: arguments.image_control_plane,
            etcd: arguments.image_etcd,
            operator: arguments.image_operator,
        },
        identity: arguments.pod_name,
        namespace: arguments.pod_namespace,
        service_account: arguments.pod_service_account,
        admin: arguments.admin_listen,
        admin_plain: arguments.admin_plain,
        control_planes: arguments.control_planes.into_iter().collect(),
        unused_for: Duration::from_secs(arguments.unused_seconds),
    };
    let print_ready = |listening: ListenAddresses| {
        print(&format!("{}\n", json!({ "ready": true, "admin": listening.admin })))
    };
    let stop = async {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
    };
    run(client().await?, settings, print_ready, stop).await
}

fn print(text: &str) -> anyhow::Result<()> {
    let mut output = std::io::stdout().lock();
    output.write_all(text.as_bytes()).and_then(|()| output.flush()).context("cannot write to standard output")
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parses_control_plane_address_with_cluster_and_port() {
        let read = control_plane("cache/c=127.0.0.1:7400").expect("a valid address");
        let address = ControlPlaneAddress::Tls("127.0.0.1:7400".to_owned());
        assert_eq!(read, ("cache/c".to_owned(), address));
        let (_, plain) = control_plane("cache/c=plain://127.0.0.1:7400").expect("loopback");
        assert_eq!(plain, ControlPlaneAddress::Plain("127.0.0.1:7400".parse().expect("an address")));
        for wrong in [
            "cache/c",
            "c=127.0.0.1:7400",
            "a/b/c=h:1",
            "/c=h:1",
            "cache/c=h",
            "cache/c=:1",
            "cache/c=h:x",
            "cache/c=plain://10.0.0.1:7400",
            "cache/c=plain://localhost:7400",
        ] {
            assert!(control_plane(wrong).expect_err(wrong).contains("NAMESPACE/NAME"));
        }
    }
}
