//! Mooncake's master beside our member: its wheel from the package index, in an environment of its own under the cache
//! folder, asked through the client that comes with it.
//!
//! The master is recorded among the cluster's processes and ends with them; the client ends with its standard input.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Output, Stdio};
use std::sync::mpsc::{Receiver, sync_channel};
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use serde::Deserialize;

use crate::cluster::{Cluster, Launch, cache_directory, stop};
use crate::output::Audience;

/// The wheel; the one without CUDA in its name wants libcuda.
const WHEEL: &str = "mooncake-transfer-engine-non-cuda";
pub(super) const VERSION: &str = "0.3.13.post1";

/// What the client runs.
const CLIENT: &str = include_str!("mooncake/existence.py");

/// Keys that the client puts, and asks for.
const KEYS: usize = 2000;

/// Until the master answers and the keys are put.
const READY_WITHIN: Duration = Duration::from_secs(60);

/// One measurement: 2,000 calls of 200 µs take 0.4 s.
const ANSWER_WITHIN: Duration = Duration::from_secs(60);

/// Lines of a failed installation's last words.
const WORDS_MAX: usize = 5;

/// A master and a client of it.
pub(super) struct Mooncake {
    client: Child,
    requests: Option<ChildStdin>,
    answers: Receiver<Answer>,
    master: Child,
    /// Where both say what is wrong.
    log: PathBuf,
}

/// Lines of the client.
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
    /// Installs it where it is not yet, and starts it in the cluster's directory.
    pub(super) fn start(cluster: &mut Cluster, audience: Audience) -> anyhow::Result<Mooncake> {
        let python = environment().join("bin/python");
        let package = match package(&python) {
            Ok(package) => package,
            Err(_) => install(&python, audience)?,
        };
        let folder = cluster.path().to_owned();
        let log = folder.join("mooncake.log");
        let address = free_address()?;
        let flags = folder.join("mooncake.flags");
        write(&flags, &master_flags(&address)?)?;
        // Not by the package's name, which Python would find in its place.
        let script = folder.join("existence.py");
        write(&script, CLIENT)?;

        let launch = Launch {
            program: &package.join("mooncake_master"),
            argument: "--flagfile",
            config: &flags,
            log: &log,
        };
        let master = cluster.spawn(&launch)?;
        await_listening(&address)?;
        let mut client = Command::new(&python)
            .arg(&script)
            .args([&address, &KEYS.to_string()])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(fs::File::options().append(true).open(&log).context("Mooncake's log")?)
            .spawn()
            .with_context(|| format!("cannot start {}", python.display()))?;
        let output = BufReader::new(client.stdout.take().expect("piped above"));
        let (sender, answers) = sync_channel(1);
        std::thread::spawn(move || {
            let answers = output.lines().map_while(Result::ok);
            // The library may print lines of its own.
            answers
                .filter_map(|line| serde_json::from_str(&line).ok())
                .try_for_each(|answer| sender.send(answer))
        });
        let requests = client.stdin.take();
        let mooncake = Mooncake { client, requests, answers, master, log };
        mooncake.answer(READY_WITHIN)?;
        Ok(mooncake)
    }

    /// The median time of calls that ask for this many keys each, in microseconds.
    pub(super) fn exists(&mut self, keys: usize, calls: usize) -> anyhow::Result<f64> {
        let requests = self.requests.as_mut().expect("taken only when dropped");
        writeln!(requests, "{keys} {calls}").context("asking Mooncake's client")?;
        match self.answer(ANSWER_WITHIN)? {
            Answer::Median { median_us } => Ok(median_us),
            Answer::Ready { .. } => bail!("Mooncake's client is ready twice"),
        }
    }

    fn answer(&self, within: Duration) -> anyhow::Result<Answer> {
        self.answers
            .recv_timeout(within)
            .with_context(|| format!("Mooncake's client does not answer: see {}", self.log.display()))
    }
}

impl Drop for Mooncake {
    fn drop(&mut self) {
        // The end of its input ends the client by itself; it is not waited for longer than any process.
        drop(self.requests.take());
        stop(&mut self.client);
        stop(&mut self.master);
    }
}

/// Its Python environment.
fn environment() -> PathBuf {
    cache_directory().join("bench").join(format!("mooncake-{VERSION}"))
}

/// Where the package lies, when it can be used.
fn package(python: &Path) -> anyhow::Result<PathBuf> {
    let program = "import mooncake.store, os; print(os.path.dirname(mooncake.__file__))";
    let output = Command::new(python).args(["-c", program]).output()?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{}", said.lines().last().unwrap_or_default());
    let folder = PathBuf::from(String::from_utf8(output.stdout)?.trim());
    ensure!(folder.join("mooncake_master").is_file(), "{} has no master", folder.display());
    Ok(folder)
}

fn install(python: &Path, audience: Audience) -> anyhow::Result<PathBuf> {
    let environment = environment();
    audience.say(format!("Installing {WHEEL} {VERSION} into {} …", environment.display()));
    let made = Command::new("python3").args(["-m", "venv", "--clear"]).arg(&environment).output();
    succeeded(made, "python3 with its venv module is needed (Debian has it in python3-venv)")?;
    let wheel = format!("{WHEEL}=={VERSION}");
    let installed = Command::new(python).args(["-m", "pip", "install", "--quiet", &wheel]).output();
    succeeded(installed, "pip must reach a package index, or the wheel must be in its cache")?;
    package(python).with_context(|| {
        format!(
            "{WHEEL} {VERSION} is installed in {} and cannot be used on this machine (it needs libibverbs, Debian's libibverbs1)",
            environment.display()
        )
    })
}

fn succeeded(output: std::io::Result<Output>, needed: &str) -> anyhow::Result<()> {
    let output = output.with_context(|| format!("Mooncake cannot be installed: {needed}"))?;
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr);
    let lines: Vec<&str> = said.lines().collect();
    let last = lines[lines.len().saturating_sub(WORDS_MAX)..].join("\n");
    bail!("Mooncake cannot be installed: {needed}. The last words were:\n{last}")
}

fn write(path: &Path, text: &str) -> anyhow::Result<()> {
    fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))
}

fn free_address() -> anyhow::Result<String> {
    let listener = TcpListener::bind("127.0.0.1:0").context("no free port on loopback")?;
    Ok(listener.local_addr()?.to_string())
}

/// The master's flags, one a line; it takes host and port apart.
fn master_flags(address: &str) -> anyhow::Result<String> {
    let split =
        |address: &str| address.rsplit_once(':').map(|(host, port)| (host.to_owned(), port.to_owned()));
    let (host, port) = split(address).context("an address without a port")?;
    let (_, metrics) = split(&free_address()?).context("an address without a port")?;
    Ok(format!(
        "--rpc_address={host}\n--rpc_port={port}\n--metrics_host={host}\n--metrics_port={metrics}\n--logtostderr\n"
    ))
}

/// Waits until somebody listens.
fn await_listening(address: &str) -> anyhow::Result<()> {
    let give_up = Instant::now() + READY_WITHIN;
    while std::net::TcpStream::connect(address).is_err() {
        if Instant::now() >= give_up {
            bail!("Mooncake's master does not listen on {address} within {READY_WITHIN:?}");
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_failed_to_be_installed_is_told_with_what_is_needed() {
        let output = Command::new("sh").args(["-c", "echo no such wheel >&2; exit 1"]).output();
        let error = succeeded(output, "a network").expect_err("it failed").to_string();
        assert!(error.contains("a network") && error.contains("no such wheel"), "{error}");
        let error = succeeded(Command::new("/nowhere").output(), "python").expect_err("it is not there");
        assert!(error.to_string().contains("python"), "{error}");
    }

    #[test]
    fn the_master_listens_on_loopback_only() {
        let flags = master_flags("127.0.0.1:5").expect("an address");
        assert!(flags.contains("--rpc_address=127.0.0.1\n--rpc_port=5\n"), "{flags}");
        assert!(flags.contains("--metrics_host=127.0.0.1\n"), "{flags}");
    }
}
