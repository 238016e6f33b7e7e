//! Mooncake's master for the comparison with a control plane member: its wheel from the package index, in a
//! separate environment in the cache directory, queried with its own client.
//!
//! The master is recorded with the cluster's processes and ends with them; the client ends with its standard
//! input.

use std::fs;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use serde::Deserialize;

use reprise_testkit::cluster::{Cluster, STOP_WITHIN, cache_directory};
use reprise_testkit::output::Audience;
use reprise_testkit::process::{ChildProcess, Conversation, append};

/// Name of the wheel; the wheel without CUDA in its name needs libcuda.
const WHEEL: &str = "mooncake-transfer-engine-non-cuda";
pub(crate) const VERSION: &str = "0.3.13.post1";

/// Program of the client.
const CLIENT: &str = include_str!("mooncake/existence.py");

/// Keys that the client stores and queries.
const KEYS: usize = 2000;

/// Time limit until the master answers and the keys are stored.
const READY_WITHIN: Duration = Duration::from_secs(60);

/// Time limit of a measurement: 2,000 calls of 200 µs take 0.4 s.
const ANSWER_WITHIN: Duration = Duration::from_secs(60);

/// Shown last lines of a failed installation's output.
const LINES_MAX: usize = 5;

/// A running master and its client.
pub(crate) struct Mooncake {
    client: Conversation,
    master: ChildProcess,
    /// Log of both.
    log: PathBuf,
}

/// Line printed by the client.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum Answer {
    Ready {
        #[serde(rename = "ready")]
        _ready: bool,
    },
    Median {
        median_us: f64,
    },
}

impl Mooncake {
    /// Installs Mooncake if needed, and starts it in the cluster's directory.
    pub(crate) fn start(cluster: &mut Cluster, audience: Audience) -> anyhow::Result<Mooncake> {
        let python = python();
        let package = match package(&python) {
            Ok(package) => package,
            Err(_) => install(&python, audience)?,
        };
        let folder = cluster.path().to_owned();
        let log = folder.join("mooncake.log");
        let address = free_address()?;
        let flags = folder.join("mooncake.flags");
        write(&flags, &master_flags(&address)?)?;
        // Not named like the package, because Python would import the script instead.
        let script = folder.join("existence.py");
        write(&script, CLIENT)?;

        let mut command = Command::new(package.join("mooncake_master"));
        command.arg("--flagfile").arg(&flags);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(append(&log)?);
        let master = cluster.spawn(command, &flags)?;
        await_listening(&address)?;
        let mut command = Command::new(&python);
        command.arg(&script).args([&address, &KEYS.to_string()]);
        command.stderr(append(&log)?);
        let client = Conversation::start(command, STOP_WITHIN)?;
        let mooncake = Mooncake { client, master, log };
        mooncake.answer(READY_WITHIN)?;
        Ok(mooncake)
    }

    /// Returns the median time of calls with this many keys, in microseconds.
    pub(crate) fn exists(&mut self, keys: usize, calls: usize) -> anyhow::Result<f64> {
        self.client.send(&format!("{keys} {calls}")).context("asking Mooncake's client")?;
        match self.answer(ANSWER_WITHIN)? {
            Answer::Median { median_us } => Ok(median_us),
            Answer::Ready { .. } => bail!("Mooncake's client is ready twice"),
        }
    }

    fn answer(&self, within: Duration) -> anyhow::Result<Answer> {
        let deadline = Instant::now() + within;
        while let Some(line) = self.client.receive(deadline.saturating_duration_since(Instant::now())) {
            // The library may print other lines.
            if let Ok(answer) = serde_json::from_str(&line) {
                return Ok(answer);
            }
        }
        bail!("Mooncake's client does not answer: see {}", self.log.display())
    }
}

impl Drop for Mooncake {
    fn drop(&mut self) {
        self.master.stop(STOP_WITHIN);
    }
}

/// Returns the path of its interpreter, which exists once Mooncake is installed.
pub(crate) fn python() -> PathBuf {
    environment().join("bin/python")
}

fn environment() -> PathBuf {
    cache_directory().join("bench").join(format!("mooncake-{VERSION}"))
}

/// Where the package lies, when it can be used.
fn package(python: &Path) -> anyhow::Result<PathBuf> {
    let program = "import mooncake.store, os; print(os.path.dirname(mooncake.__file__))";
    let output = Command::new(python).args(["-c", program]).output()?;
    let errors = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{}", errors.lines().last().unwrap_or_default());
    let folder = PathBuf::from(String::from_utf8(output.stdout)?.trim());
    ensure!(folder.join("mooncake_master").is_file(), "{} has no master", folder.display());
    Ok(folder)
}

fn install(python: &Path, audience: Audience) -> anyhow::Result<PathBuf> {
    let environment = environment();
    audience.print_line(format!("Installing {WHEEL} {VERSION} into {} …", environment.display()));
    let made = Command::new("python3").args(["-m", "venv", "--clear"]).arg(&environment).output();
    succeeded(made, "it needs python3 with its venv module (Debian's python3-venv)")?;
    let wheel = format!("{WHEEL}=={VERSION}");
    let installed = Command::new(python).args(["-m", "pip", "install", "--quiet", &wheel]).output();
    succeeded(installed, "pip needs access to a package index, or the wheel in its cache")?;
    package(python).with_context(|| {
        format!(
            "{WHEEL} {VERSION} is installed in {} but does not work on this machine (it needs libibverbs, Debian's libibverbs1)",
            environment.display()
        )
    })
}

fn succeeded(output: std::io::Result<Output>, needed: &str) -> anyhow::Result<()> {
    let output = output.with_context(|| format!("Mooncake cannot be installed: {needed}"))?;
    if output.status.success() {
        return Ok(());
    }
    let errors = String::from_utf8_lossy(&output.stderr);
    let lines: Vec<&str> = errors.lines().collect();
    let last = lines[lines.len().saturating_sub(LINES_MAX)..].join("\n");
    bail!("Mooncake cannot be installed: {needed}. The last lines of output are:\n{last}")
}

fn write(path: &Path, text: &str) -> anyhow::Result<()> {
    fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))
}

fn free_address() -> anyhow::Result<String> {
    let listener = TcpListener::bind("127.0.0.1:0").context("no free port on loopback")?;
    Ok(listener.local_addr()?.to_string())
}

/// Returns the master's flags, one per line; host and port are separate flags.
fn master_flags(address: &str) -> anyhow::Result<String> {
    let split =
        |address: &str| address.rsplit_once(':').map(|(host, port)| (host.to_owned(), port.to_owned()));
    let (host, port) = split(address).context("the address has no port")?;
    let (_, metrics) = split(&free_address()?).context("the address has no port")?;
    Ok(format!(
        "--rpc_address={host}\n--rpc_port={port}\n--metrics_host={host}\n--metrics_port={metrics}\n--logtostderr\n"
    ))
}

/// Waits until the master listens.
fn await_listening(address: &str) -> anyhow::Result<()> {
    let give_up = Instant::now() + READY_WITHIN;
    while std::net::TcpStream::connect(address).is_err() {
        if Instant::now() >= give_up {
            bail!("Mooncake's master did not listen on {address} within {READY_WITHIN:?}");
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failed_installation_is_reported_with_its_requirement() {
        let output = Command::new("sh").args(["-c", "echo no such wheel >&2; exit 1"]).output();
        let error = succeeded(output, "a network").expect_err("it failed").to_string();
        assert!(error.contains("a network") && error.contains("no such wheel"), "{error}");
        let error =
            succeeded(Command::new("/nowhere").output(), "python").expect_err("the program does not exist");
        assert!(error.to_string().contains("python"), "{error}");
    }

    #[test]
    fn master_only_listens_on_loopback() {
        let flags = master_flags("127.0.0.1:5").expect("an address");
        assert!(flags.contains("--rpc_address=127.0.0.1\n--rpc_port=5\n"), "{flags}");
        assert!(flags.contains("--metrics_host=127.0.0.1\n"), "{flags}");
    }
}
