//! etcd of the cluster: one process on loopback, with fresh data in the cluster's directory.
//!
//! `e2e/etcd/build.sh` builds the binary from etcd's Go module into the cache directory.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};

use super::process::{Launch, STOP_WITHIN, tail};
use super::work_directory::WorkDirectory;
use super::{cache_directory, remove_directory_if_exists};
use crate::etcd::{Ports, is_healthy};
use crate::process::ChildProcess;

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
    child: ChildProcess,
    ports: Ports,
}

impl Etcd {
    /// Starts an etcd and waits until it is healthy.
    pub(super) fn start(directory: &mut WorkDirectory) -> anyhow::Result<Etcd> {
        let program = binary()?;
        for _ in 0..ATTEMPTS_MAX {
            remove_directory_if_exists(&directory.path().join(DATA))?;
            let ports = Ports::free().context("no free port on loopback")?;
            let text = config(ports, &directory.path().join(DATA))?;
            let (config, log) = (directory.path().join(CONFIG), directory.path().join(LOG));
            fs::write(&config, text).with_context(|| format!("cannot write {}", config.display()))?;
            let launch = Launch { program: &program, argument: "--config-file", config: &config, log: &log };
            let mut etcd = Etcd { child: launch.spawn(directory)?, ports };
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
        self.child.stop(STOP_WITHIN);
    }

    /// Waits until it is healthy; returns false if it ends instead.
    fn await_healthy(&mut self, log: &Path) -> anyhow::Result<bool> {
        let deadline = Instant::now() + READY_WITHIN;
        while Instant::now() < deadline {
            if !self.child.is_alive() {
                return Ok(false);
            }
            if is_healthy(&self.metrics()) {
                return Ok(true);
            }
            std::thread::sleep(READY_PAUSE);
        }
        self.child.kill();
        bail!("etcd did not become healthy within {READY_WITHIN:?}; the end of its log:\n{}", tail(log))
    }
}

/// Returns etcd's configuration as JSON, which is valid YAML.
fn config(ports: Ports, data: &Path) -> anyhow::Result<String> {
    let config = serde_json::json!({
        "name": "reprise",
        "data-dir": data,
        "listen-client-urls": url(ports.client),
        "advertise-client-urls": url(ports.client),
        "listen-peer-urls": url(ports.peer),
        "initial-advertise-peer-urls": url(ports.peer),
        "initial-cluster": format!("reprise={}", url(ports.peer)),
        "listen-metrics-urls": url(ports.metrics),
        "log-level": "warn",
    });
    serde_json::to_string_pretty(&config).context("encoding etcd's configuration")
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
