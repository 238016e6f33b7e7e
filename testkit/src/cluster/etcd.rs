//! etcd of the cluster: one process on loopback, with fresh data in the cluster's directory.
//!
//! `e2e/etcd/build.sh` builds the binary from etcd's Go module into the cache directory.

use std::fs;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};

use super::process::{Launch, kill, stop, tail};
use super::work_directory::WorkDirectory;
use super::{cache_directory, remove_directory_if_exists};
use crate::http;

/// Binary that the script builds, with the version of its go.mod.
const BINARY: &str = "etcd-v3.6.11";

/// Time limit of a start, which takes about 300 ms.
const READY_WITHIN: Duration = Duration::from_secs(20);

/// Interval between checks for readiness.
const READY_PAUSE: Duration = Duration::from_millis(10);

/// Attempts to find ports: another process may take one before etcd binds it.
const ATTEMPTS_MAX: usize = 5;

/// Files in the cluster's directory.
const CONFIG: &str = "etcd.yaml";
const LOG: &str = "etcd.log";
pub(super) const DATA: &str = "etcd.data";

#[derive(Debug)]
pub(super) struct Etcd {
    child: Child,
    ports: Ports,
}

#[derive(Clone, Copy, Debug)]
struct Ports {
    client: u16,
    peer: u16,
    /// Health and metrics.
    metrics: u16,
}

impl Etcd {
    /// Starts an etcd and waits until it is healthy.
    pub(super) fn start(directory: &mut WorkDirectory) -> anyhow::Result<Etcd> {
        let program = binary()?;
        for _ in 0..ATTEMPTS_MAX {
            remove_directory_if_exists(&directory.path().join(DATA))?;
            let ports = Ports::free()?;
            let (config, log) = (directory.path().join(CONFIG), directory.path().join(LOG));
            let text = ports.config(&directory.path().join(DATA))?;
            fs::write(&config, text).with_context(|| format!("cannot write {}", config.display()))?;
            let launch = Launch { program: &program, argument: "--config-file", config: &config, log: &log };
            let mut etcd = Etcd { child: launch.spawn(Stdio::null(), directory)?, ports };
            if etcd.await_healthy(&log)? {
                return Ok(etcd);
            }
        }
        let log = directory.path().join(LOG);
        bail!("etcd did not start; the end of its log {}:\n{}", log.display(), tail(&log))
    }

    /// Returns the URL for clients.
    pub(super) fn endpoint(&self) -> String {
        url(self.ports.client)
    }

    /// Returns the address of health and metrics, `host:port`.
    pub(super) fn metrics(&self) -> String {
        format!("127.0.0.1:{}", self.ports.metrics)
    }

    pub(super) fn stop(&mut self) {
        stop(&mut self.child);
    }

    /// Waits until it is healthy; returns false if it ends instead.
    fn await_healthy(&mut self, log: &Path) -> anyhow::Result<bool> {
        let deadline = Instant::now() + READY_WITHIN;
        while Instant::now() < deadline {
            if self.child.try_wait().context("checking the etcd process")?.is_some() {
                return Ok(false);
            }
            if http::get(&self.metrics(), "/health").is_ok_and(|body| body.contains("\"health\":\"true\"")) {
                return Ok(true);
            }
            std::thread::sleep(READY_PAUSE);
        }
        kill(&mut self.child)?;
        bail!("etcd did not become healthy within {READY_WITHIN:?}; the end of its log:\n{}", tail(log))
    }
}

impl Ports {
    /// Returns currently free ports.
    fn free() -> anyhow::Result<Ports> {
        let bind = || TcpListener::bind("127.0.0.1:0").context("no free port on loopback");
        let listeners = [bind()?, bind()?, bind()?];
        let port = |at: usize| anyhow::Ok(listeners[at].local_addr()?.port());
        Ok(Ports { client: port(0)?, peer: port(1)?, metrics: port(2)? })
    }

    /// Returns etcd's configuration as JSON, which is valid YAML.
    fn config(self, data: &Path) -> anyhow::Result<String> {
        let config = serde_json::json!({
            "name": "reprise",
            "data-dir": data,
            "listen-client-urls": url(self.client),
            "advertise-client-urls": url(self.client),
            "listen-peer-urls": url(self.peer),
            "initial-advertise-peer-urls": url(self.peer),
            "initial-cluster": format!("reprise={}", url(self.peer)),
            "listen-metrics-urls": url(self.metrics),
            "log-level": "warn",
        });
        serde_json::to_string_pretty(&config).context("encoding etcd's configuration")
    }
}

fn url(port: u16) -> String {
    format!("http://127.0.0.1:{port}")
}

/// Returns the path of the binary, which may not exist.
pub(super) fn path() -> PathBuf {
    cache_directory().join("bin").join(BINARY)
}

fn binary() -> anyhow::Result<PathBuf> {
    let path = path();
    if !path.is_file() {
        bail!(
            "{} is missing: build it with `make etcd` in the source tree (e2e/etcd/build.sh)",
            path.display()
        );
    }
    Ok(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn binary_has_the_version_that_the_script_builds() {
        // The tree in which the tests run; several trees may share one build folder.
        let package =
            std::env::var_os("CARGO_MANIFEST_DIR").unwrap_or_else(|| env!("CARGO_MANIFEST_DIR").into());
        let module = Path::new(&package).join("../e2e/etcd/go.mod");
        let module = fs::read_to_string(module).expect("the file exists");
        let version = BINARY.strip_prefix("etcd-").expect("the name has this prefix");
        assert!(module.contains(&format!("require go.etcd.io/etcd/server/v3 {version}\n")), "{module}");
    }
}
