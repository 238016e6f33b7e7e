//! `reprise-agent`: the node agent of Reprise.
//!
//! Standard output gets one line when the agent is ready (JSON: ports and socket), standard error the log.
//! Exit codes: 0 after SIGTERM or SIGINT, 1 configuration, 2 pool device, 3 memory, sockets or ports, 70
//! internal error.
//!
//! A panic on any thread or task ends the process with SIGABRT: recovery from the journal takes a second,
//! and a partly working agent would be worse. The rest of the agent therefore need not check whether a
//! thread still runs.
//!
//! Without the feature `kubernetes`, the agent refuses `--in-cluster`. `make demo` builds it so, because the Kubernetes
//! client is a third of all code to compile.

// What only an agent on a Kubernetes node uses is compiled, but not reached.
#![cfg_attr(not(feature = "kubernetes"), allow(dead_code, unused_imports))]

mod admin;
mod bindings;
mod block_copier;
mod checker;
mod config;
mod core_loop;
mod descriptors;
mod device;
#[cfg(feature = "kubernetes")]
mod device_reconciler;
mod directory;
mod encryption;
mod error;
mod executor;
#[cfg(test)]
mod fuzz;
mod in_cluster;
#[cfg(feature = "kubernetes")]
mod kubernetes;
mod metrics;
mod modes;
mod peer;
mod public_tenant;
mod queue_grants;
mod recorder;
mod region_renewer;
mod runtime;
mod secret_file;
mod session;
mod slack;

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;
use tokio::signal::unix::{SignalKind, signal};
use tracing::level_filters::LevelFilter;
use tracing_subscriber::fmt::format::FmtSpan;

use config::{Config, LogFormat, LogSettings, Settings};
use error::{AgentError, ErrorKind};
use in_cluster::ClusterSettings;
use reprise_daemon::log;
use runtime::Runtime;

/// Signal for exceeding the file size limit; see setrlimit(2), "RLIMIT_FSIZE", and signal(7).
const SIGXFSZ: SignalKind = SignalKind::from_raw(25);

/// Cache KV blocks of this node's engines and share them with peers
#[derive(Debug, Parser)]
#[command(name = "reprise-agent", version)]
struct Arguments {
    /// Read this configuration file (TOML); omitted values keep their defaults
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Print the default configuration, with comments, and exit
    #[arg(long)]
    print_default_config: bool,
    /// Run as the agent of a Kubernetes node
    ///
    /// The agent reads devices and mode from the node's CacheNode and writes its own status to that object.
    /// Requires NODE_NAME and POD_IP in the environment, and a configuration file that sets neither node name
    /// nor devices.
    #[arg(long, requires = "config")]
    in_cluster: bool,
    /// With --in-cluster: use this kubeconfig instead of the service account
    #[arg(long, value_name = "FILE", requires = "in_cluster")]
    kubeconfig: Option<PathBuf>,
    /// With --in-cluster: mount point of the node's root file system
    ///
    /// Device names are resolved below this directory.
    #[arg(long, value_name = "DIR", default_value = "/", requires = "in_cluster")]
    node_root: PathBuf,
}

fn main() -> ExitCode {
    reprise_buffers::fix_mmap_threshold();
    let arguments = Arguments::parse();
    if arguments.print_default_config {
        return print(&Config::default_text());
    }
    match run(&arguments) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // The log may not be initialised yet, so the error goes to standard error directly.
            let _ = writeln!(std::io::stderr(), "reprise-agent: {}", error.chain());
            ExitCode::from(error.exit_code())
        }
    }
}

fn run(arguments: &Arguments) -> Result<(), AgentError> {
    let (settings, cluster) = settings(arguments)?;
    let _log = start_log(&settings.log)?;
    abort_on_panic();
    let failed =
        |what: &'static str| move |error| AgentError::new(ErrorKind::Resource, what).with_source(error);
    // Must precede everything that opens files.
    reprise_daemon::descriptors::raise_limit()
        .map_err(failed("cannot raise the soft limit on open files to the hard limit"))?;
    let signals = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(failed("cannot wait for signals"))?;
    signals.block_on(async {
        // Registered first, so that a signal during the start is not lost.
        let mut terminate = signal(SignalKind::terminate()).map_err(failed("cannot wait for SIGTERM"))?;
        let mut interrupt = signal(SignalKind::interrupt()).map_err(failed("cannot wait for SIGINT"))?;
        // The default action of this signal ends the process. With a handler, exceeding the file size limit
        // is an I/O error like a full disk.
        let _file_too_large = signal(SIGXFSZ).map_err(failed("cannot handle SIGXFSZ"))?;
        let runtime = Runtime::start(settings, cluster)?;
        let ready = serde_json::to_string(runtime.ready()).map_err(|error| {
            AgentError::new(ErrorKind::Internal, "cannot encode the ready line").with_source(error)
        })?;
        print(&format!("{ready}\n"));
        tracing::info!(version = env!("CARGO_PKG_VERSION"), "ready");
        tokio::select! {
            _ = terminate.recv() => tracing::info!("received SIGTERM, stopping"),
            _ = interrupt.recv() => tracing::info!("received SIGINT, stopping"),
        }
        runtime.stop();
        tracing::info!("stopped");
        Ok(())
    })
}

/// Reads the configuration and the settings for a cluster.
fn settings(arguments: &Arguments) -> Result<(Settings, Option<ClusterSettings>), AgentError> {
    let Some(path) = &arguments.config else { return Ok((Config::default().validate()?, None)) };
    if !arguments.in_cluster {
        return Ok((Config::read(path)?.validate()?, None));
    }
    let (settings, cluster) =
        ClusterSettings::read(path, arguments.kubeconfig.as_deref(), &arguments.node_root)?;
    Ok((settings, Some(cluster)))
}

/// Writes to standard output; a closed output is ignored.
fn print(text: &str) -> ExitCode {
    let mut output = std::io::stdout().lock();
    match output.write_all(text.as_bytes()).and_then(|()| output.flush()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(_) => ExitCode::FAILURE,
    }
}

fn start_log(settings: &LogSettings) -> Result<log::Log, AgentError> {
    // The Kubernetes client logs every failed connection as an error; this agent logs the relevant ones
    // itself.
    let mut filter = tracing_subscriber::EnvFilter::new(&settings.level);
    for quiet in ["kube_client=off", "kube_runtime=off"] {
        filter = filter.add_directive(quiet.parse().expect("a directive"));
    }
    // At debug level, each request, load and fetch logs a line with its duration.
    let spans = match filter.max_level_hint() {
        Some(level) if level < LevelFilter::DEBUG => FmtSpan::NONE,
        _ => FmtSpan::CLOSE,
    };
    let format = match settings.format {
        LogFormat::Text => log::Format::Text { colours: false },
        LogFormat::Json => log::Format::Json,
    };
    log::start(log::Settings { filter, format, spans })
        .map_err(|error| AgentError::new(ErrorKind::Internal, "cannot start the log").with_source(error))
}

fn abort_on_panic() {
    let default = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        tracing::error!(%panic, "internal error, please report it");
        default(panic);
        std::process::abort();
    }));
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    /// Environment variable that makes the test process panic.
    const TO_END: &str = "REPRISE_TEST_PANIC_OF_A_TASK";

    #[test]
    fn panic_of_a_detached_task_aborts_the_process() {
        use std::os::unix::process::ExitStatusExt;
        const NAME: &str = "tests::panic_of_a_detached_task_aborts_the_process";
        if std::env::var_os(TO_END).is_some() {
            return panic_in_a_task();
        }
        let this = std::env::current_exe().expect("the test runs");
        let output =
            Command::new(this).args(["--exact", NAME]).env(TO_END, "1").output().expect("it runs again");
        assert_eq!(output.status.signal(), Some(ABORTED), "{output:?}");
    }

    /// Number of SIGABRT; see signal(7).
    const ABORTED: i32 = 6;

    fn panic_in_a_task() {
        abort_on_panic();
        let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
        runtime.block_on(async {
            tokio::spawn(async { panic!("torn") });
            tokio::task::yield_now().await;
        });
    }
}
