//! Starts, records and stops the processes of a local cluster.

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use serde::Deserialize;

use super::work_directory::WorkDirectory;
use crate::interrupt;

/// Time limit until a process is ready, including formatting or recovering a pool, and touching the arena.
pub(super) const READY_WITHIN: Duration = Duration::from_secs(60);

/// Time limit until a process ends after SIGTERM, including writing blocks that are not durable yet.
pub(super) const STOP_WITHIN: Duration = Duration::from_secs(10);

/// Lines at the end of a log that are shown if its process does not start.
const TAIL_LINES: usize = 15;

/// Program to start, with its configuration and log.
#[derive(Clone, Copy, Debug)]
pub struct Launch<'a> {
    /// The binary.
    pub program: &'a Path,
    /// Flag for the configuration path, such as `--config`.
    pub argument: &'a str,
    /// Path of its configuration, which identifies the process.
    pub config: &'a Path,
    /// File for its standard error.
    pub log: &'a Path,
}

/// Child process that has reported that it is ready.
#[derive(Debug)]
pub(super) struct Process {
    pub(super) child: Child,
    pub(super) ready: ReadyLine,
}

/// Line that a process prints when it is ready.
///
/// `grpc` and `socket` are empty if the process has none; unknown fields are ignored.
#[derive(Clone, Debug, Deserialize)]
pub(super) struct ReadyLine {
    ready: bool,
    pub(super) admin: String,
    #[serde(default)]
    pub(super) grpc: String,
    #[serde(default)]
    pub(super) socket: PathBuf,
}

impl Launch<'_> {
    /// Starts the process and adds its pid to the work directory.
    pub(super) fn spawn(&self, output: Stdio, directory: &mut WorkDirectory) -> anyhow::Result<Child> {
        let file = fs::File::options()
            .create(true)
            .append(true)
            .open(self.log)
            .with_context(|| format!("cannot write {}", self.log.display()))?;
        let deferred_interrupts = interrupt::defer();
        let child = Command::new(self.program)
            .arg(self.argument)
            .arg(self.config)
            .stdin(Stdio::null())
            .stdout(output)
            .stderr(file)
            .spawn()
            .with_context(|| format!("cannot start {}", self.program.display()))?;
        let name = self.program.file_name().unwrap_or_default().to_string_lossy();
        directory.record(child.id(), &name, self.config)?;
        drop(deferred_interrupts);
        Ok(child)
    }
}

impl Process {
    /// Starts a binary next to this one, and waits until it is ready.
    pub(super) fn start(
        program: &str,
        config: &Path,
        log: &Path,
        directory: &mut WorkDirectory,
    ) -> anyhow::Result<Process> {
        let path = binary(program)?;
        let launch = Launch { program: &path, argument: "--config", config, log };
        let mut child = launch.spawn(Stdio::piped(), directory)?;
        let output = child.stdout.take().expect("piped above");
        let (sender, receiver) = mpsc::sync_channel(1);
        // The thread ends after the first line, or when the process closes its output.
        std::thread::spawn(move || {
            let mut line = String::new();
            let read = BufReader::new(output).read_line(&mut line).map(|_| line);
            drop(sender.send(read));
        });
        let line = receiver.recv_timeout(READY_WITHIN);
        let ready = match line {
            Ok(Ok(line)) => serde_json::from_str::<ReadyLine>(&line).ok().filter(|ready| ready.ready),
            Ok(Err(_)) | Err(_) => None,
        };
        let Some(ready) = ready else {
            drop(child.kill());
            drop(child.wait());
            bail!(
                "{program} did not become ready within {READY_WITHIN:?}, or exited; last lines of {}:\n{}",
                log.display(),
                tail(log)
            );
        };
        Ok(Process { child, ready })
    }
}

/// Returns the path of a binary next to this one.
pub fn binary(program: &str) -> anyhow::Result<PathBuf> {
    let own = std::env::current_exe().context("cannot find the path of this program")?;
    let path = own.with_file_name(program);
    if !path.exists() {
        bail!("{} is missing: build the workspace with the same profile as this program", path.display());
    }
    Ok(path)
}

/// Ends a process with SIGKILL.
pub(super) fn kill(child: &mut Child) -> anyhow::Result<()> {
    child.kill().context("cannot kill the process")?;
    child.wait().context("cannot wait for the killed process")?;
    Ok(())
}

/// Ends a process with SIGTERM, then with SIGKILL.
pub fn stop(child: &mut Child) {
    if matches!(child.try_wait(), Ok(Some(_))) {
        return;
    }
    terminate(child);
    let deadline = Instant::now() + STOP_WITHIN;
    while Instant::now() < deadline {
        if matches!(child.try_wait(), Ok(Some(_))) {
            return;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    drop(child.kill());
    drop(child.wait());
}

fn terminate(child: &Child) {
    let pid = rustix::process::Pid::from_child(child);
    if let Err(error) = rustix::process::kill_process(pid, rustix::process::Signal::TERM) {
        tracing::debug!(pid = child.id(), %error, "cannot send SIGTERM to the process");
    }
}

/// Returns the last lines of a log.
pub(super) fn tail(log: &Path) -> String {
    let text = fs::read_to_string(log).unwrap_or_default();
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(TAIL_LINES)..].join("\n")
}
