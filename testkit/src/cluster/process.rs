//! Starts, records and stops the processes of a local cluster.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, bail};
use serde::Deserialize;

use super::work_directory::WorkDirectory;
use crate::interrupt;
use crate::process::{ChildProcess, StartingProcess, append, read_log, sibling_binary};

/// Time limit until a process is ready, including formatting or recovering a pool, and touching the arena.
pub(super) const READY_WITHIN: Duration = Duration::from_secs(60);

/// Time limit until a process ends after SIGTERM, including writing blocks that are not durable yet.
pub const STOP_WITHIN: Duration = Duration::from_secs(10);

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
    pub(super) child: ChildProcess,
    pub(super) ready: ReadyLine,
}

/// Line that a process prints when it is ready.
///
/// `grpc` and `socket` are empty if the process has none; unknown fields are ignored.
#[derive(Clone, Debug, Deserialize)]
pub(super) struct ReadyLine {
    pub(super) admin: String,
    #[serde(default)]
    pub(super) grpc: String,
    #[serde(default)]
    pub(super) socket: PathBuf,
}

impl Launch<'_> {
    /// Starts the process and adds its pid to the work directory.
    pub(super) fn spawn(&self, directory: &mut WorkDirectory) -> anyhow::Result<ChildProcess> {
        let mut command = self.command();
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(append(self.log)?);
        self.recorded(directory, || {
            let child = ChildProcess::try_spawn(command)?;
            Ok((child.id(), child))
        })
    }

    fn command(&self) -> Command {
        let mut command = Command::new(self.program);
        command.arg(self.argument).arg(self.config);
        command
    }

    /// Starts a process and records it, as one step for the handler of signals.
    fn recorded<T>(
        &self,
        directory: &mut WorkDirectory,
        start: impl FnOnce() -> anyhow::Result<(u32, T)>,
    ) -> anyhow::Result<T> {
        let deferred_interrupts = interrupt::defer();
        let (pid, started) = start()?;
        let name = self.program.file_name().unwrap_or_default().to_string_lossy();
        directory.record(pid, &name, self.config)?;
        drop(deferred_interrupts);
        Ok(started)
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
        let launch = Launch { program: &sibling_binary(program)?, argument: "--config", config, log };
        let starting = launch.recorded(directory, || {
            let starting = StartingProcess::try_spawn(launch.command(), log)?;
            Ok((starting.id(), starting))
        })?;
        let Ok((child, line)) = starting.ready_within(READY_WITHIN) else {
            bail!(
                "{program} did not become ready within {READY_WITHIN:?}, or exited; last lines of {}:\n{}",
                log.display(),
                tail(log)
            );
        };
        let ready = serde_json::from_value(line).with_context(|| format!("the ready line of {program}"))?;
        Ok(Process { child, ready })
    }
}

/// Returns the last lines of a log.
pub(super) fn tail(log: &Path) -> String {
    let text = read_log(log);
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(TAIL_LINES)..].join("\n")
}
