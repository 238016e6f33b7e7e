//! An etcd of the cluster's own: one process on loopback, with fresh data in the cluster's directory.
//!
//! The binary is not part of this program: `e2e/etcd/build.sh` builds it from etcd's Go module into the cache folder.

use std::fs;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};

use super::directory::ClusterDirectory;
use super::process::{Launch, kill, stop, tail};
use super::{cache_directory, remove_directory_if_there};
use crate::http;

/// What the script builds, by the version in its go.mod.
const BINARY: &str = "etcd-v3.6.11";

/// A start takes some 300 ms.
const READY_WITHIN: Duration = Duration::from_secs(20);

/// Between two looks whether it is ready.
const READY_PAUSE: Duration = Duration::from_millis(10);

/// Attempts to find ports: another process may take one between our look and etcd's.
const ATTEMPTS_MAX: usize = 5;

/// Its files in the cluster's directory.
const CONFIG: &str = "etcd.yaml";
const LOG: &str = "etcd.log";
pub(super) const DATA: &str = "etcd.data";

/// A running etcd.
#[derive(Debug)]
pub(super) struct Etcd {
    child: Child,
    ports: Ports,
}

#[derive(Clone, Copy, Debug)]
struct Ports {
    client: u16,
    peer: u16,
    /// Health.
    metrics: u16,
}

impl Etcd {
    /// Starts one and waits until it is healthy.
    pub(super) fn start(directory: &mut ClusterDirectory) -> anyhow::Result<Etcd> {
        let program = binary()?;
        for _ in 0..ATTEMPTS_MAX {
            remove_directory_if_there(&directory.path().join(DATA))?;
            let ports = Ports::free()?;
            let (config, log) = (directory.path().join(CONFIG), directory.path().join(LOG));
            let text = ports.config(&directory.path().join(DATA))?;
            fs::write(&config, text).with_context(|| format!("cannot write {}", config.display()))?;
            let launch = Launch { program: &program, argument: "--config-file", config: &config, log: &log };
            let mut etcd = Etcd { child: launch.spawn(Stdio::null(), directory)?, ports };
            if etcd.becomes_healthy(&log)? {
                return Ok(etcd);
            }
        }
        let log = directory.path().join(LOG);
        bail!("etcd does not start; the end of its log {}:\n{}", log.display(), tail(&log))
    }

    /// Where its clients reach it, as a URL.
    pub(super) fn endpoint(&self) -> String {
        url(self.ports.client)
    }

    /// Where it tells its health and metrics, `host:port`.
    pub(super) fn metrics(&self) -> String {
        format!("127.0.0.1:{}", self.ports.metrics)
    }

    /// Asks it to end, and ends it.
    pub(super) fn stop(&mut self) {
        stop(&mut self.child);
    }

    /// Waits until it answers; false when it ends instead.
    fn becomes_healthy(&mut self, log: &Path) -> anyhow::Result<bool> {
        let give_up = Instant::now() + READY_WITHIN;
        while Instant::now() < give_up {
            if self.child.try_wait().context("looking after etcd")?.is_some() {
                return Ok(false);
            }
            if http::get(&self.metrics(), "/health").is_ok_and(|said| said.contains("\"health\":\"true\"")) {
                return Ok(true);
            }
            std::thread::sleep(READY_PAUSE);
        }
        kill(&mut self.child)?;
        bail!("etcd is not healthy within {READY_WITHIN:?}; the end of its log:\n{}", tail(log))
    }
}

impl Ports {
    /// Ports that nobody has just now.
    fn free() -> anyhow::Result<Ports> {
        let bind = || TcpListener::bind("127.0.0.1:0").context("no free port on loopback");
        let listeners = [bind()?, bind()?, bind()?];
        let port = |at: usize| anyhow::Ok(listeners[at].local_addr()?.port());
        Ok(Ports { client: port(0)?, peer: port(1)?, metrics: port(2)? })
    }

    /// etcd's configuration, in YAML, of which JSON is a part.
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

fn binary() -> anyhow::Result<PathBuf> {
    let path = cache_directory().join("bin").join(BINARY);
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
    fn the_binary_that_is_looked_for_is_the_one_that_the_script_builds() {
        // Where the tests run, not where they were compiled: one folder of build results may serve several trees.
        let package =
            std::env::var_os("CARGO_MANIFEST_DIR").unwrap_or_else(|| env!("CARGO_MANIFEST_DIR").into());
        let module = Path::new(&package).join("../e2e/etcd/go.mod");
        let module = fs::read_to_string(module).expect("it is in this repository");
        let version = BINARY.strip_prefix("etcd-").expect("the script names it so");
        assert!(module.contains(&format!("require go.etcd.io/etcd/server/v3 {version}\n")), "{module}");
    }
}
