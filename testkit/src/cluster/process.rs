//! Starts, records and stops the processes of a local cluster.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, bail};
use serde::Deserialize;

use super::work_directory::WorkDirectory;
use crate::process::{ChildProcess, StartingProcess, read_log, sibling_binary};

/// Time limit until a process is ready, including formatting or recovering a pool, and touching the arena.
pub(super) const READY_WITHIN: Duration = Duration::from_secs(60);

/// Time limit until a process ends after SIGTERM, including writing blocks that are not durable yet.
pub const STOP_WITHIN: Duration = Duration::from_secs(10);

/// Lines at the end of a log that are shown if its process does not start.
const TAIL_LINES: usize = 15;

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

impl Process {
    /// Starts a binary next to this one with a configuration, and waits until it is ready.
    pub(super) fn start(
        program: &str,
        config: &Path,
        log: &Path,
        directory: &mut WorkDirectory,
    ) -> anyhow::Result<Process> {
        let mut command = Command::new(sibling_binary(program)?);
        command.arg("--config").arg(config);
        let starting = directory.recorded(program, config, || {
            let starting = StartingProcess::try_spawn(command, log)?;
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
fn tail(log: &Path) -> String {
    let text = read_log(log);
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(TAIL_LINES)..].join("\n")
}
