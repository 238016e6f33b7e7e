//! Directory of a cluster: claimed by one command at a time, with a record of the processes that use it.
//!
//! The claim is a file lock, which the kernel releases at the end of the process that holds it. The record
//! outlives a killed command: the next claim ends the recorded processes, after checking their identity in
//! `/proc`. A pidfd refers to the process during the check, so a reused process id is never signalled.

use std::fs::{self, File, TryLockError};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use serde::{Deserialize, Serialize};

use super::process::STOP_WITHIN;
use super::{CLUSTER_FILE, POOL_FILE, ignore_not_found, remove_if_exists};
use crate::{etcd, interrupt};

/// File that is locked while a command uses the directory.
const LOCK_FILE: &str = "cluster.lock";

/// Time limit for a transient lock: a starting process has copies of its parent's descriptors until it
/// executes its own program.
const CLAIM_WITHIN: Duration = Duration::from_millis(500);

const CLAIM_PAUSE: Duration = Duration::from_millis(10);

/// File with the processes started in the directory.
const PROCESSES_FILE: &str = "processes.json";

/// Directory claimed by this command.
#[derive(Debug)]
pub(super) struct WorkDirectory {
    path: PathBuf,
    _lock: File,
    processes: Vec<ProcessRecord>,
}

/// Identity of a started process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct ProcessRecord {
    pid: u32,
    /// File name of its binary.
    program: String,
    /// Path of its configuration or its data, as in its arguments.
    config: PathBuf,
}

impl WorkDirectory {
    /// Claims the directory, and ends processes left by a killed command.
    pub(super) fn claim(path: &Path) -> anyhow::Result<WorkDirectory> {
        fs::create_dir_all(path).with_context(|| format!("cannot create {}", path.display()))?;
        let lock_path = path.join(LOCK_FILE);
        let lock = File::options()
            .create(true)
            .truncate(false)
            .write(true)
            .open(&lock_path)
            .with_context(|| format!("cannot write {}", lock_path.display()))?;
        let deadline = Instant::now() + CLAIM_WITHIN;
        loop {
            match lock.try_lock() {
                Ok(()) => break,
                Err(TryLockError::WouldBlock) if Instant::now() < deadline => sleep(CLAIM_PAUSE),
                Err(TryLockError::WouldBlock) => bail!(
                    "{} is in use by another demo or bench: end it, or set another directory with --dir",
                    path.display()
                ),
                Err(TryLockError::Error(error)) => {
                    return Err(error).with_context(|| format!("cannot lock {}", lock_path.display()));
                }
            }
        }
        end_recorded(path)?;
        Ok(WorkDirectory { path: path.to_owned(), _lock: lock, processes: Vec::new() })
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Starts a process and records it, as one step for the handler of signals. `config` is one of its arguments.
    pub(super) fn recorded<T>(
        &mut self,
        program: &str,
        config: &Path,
        start: impl FnOnce() -> anyhow::Result<(u32, T)>,
    ) -> anyhow::Result<T> {
        let _deferred_interrupts = interrupt::defer();
        let (pid, started) = start()?;
        self.record(pid, program, config)?;
        Ok(started)
    }

    /// Records a started process.
    fn record(&mut self, pid: u32, program: &str, config: &Path) -> anyhow::Result<()> {
        // A restarted process replaces its previous record.
        self.processes.retain(|process| process.config != config);
        self.processes.push(ProcessRecord { pid, program: program.to_owned(), config: config.to_owned() });
        let path = self.path.join(PROCESSES_FILE);
        let text = serde_json::to_string_pretty(&self.processes).context("encoding the list of processes")?;
        fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))
    }
}

/// Ends the processes recorded in a directory, and removes their temporary files.
pub fn end_recorded(directory: &Path) -> anyhow::Result<()> {
    let record = directory.join(PROCESSES_FILE);
    let text = match fs::read_to_string(&record) {
        Ok(text) => text,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error).with_context(|| format!("cannot read {}", record.display())),
    };
    // Truncated because the command was killed during the write; its last process must be ended manually.
    let processes: Vec<ProcessRecord> = serde_json::from_str(&text).unwrap_or_default();
    // etcd and the control plane started first and end last: agents deregister from members, members from
    // etcd.
    for process in processes.iter().rev() {
        process.end()?;
        drop(fs::remove_file(process.config.with_extension("").join(POOL_FILE)));
    }
    let data = directory.join(etcd::DATA);
    ignore_not_found(fs::remove_dir_all(&data))
        .with_context(|| format!("cannot remove {}", data.display()))?;
    remove_if_exists(&directory.join(CLUSTER_FILE))?;
    remove_if_exists(&record)
}

impl ProcessRecord {
    /// Ends the process if it still runs: with SIGTERM, then with SIGKILL.
    fn end(&self) -> anyhow::Result<()> {
        let pid = i32::try_from(self.pid).ok().and_then(Pid::from_raw).context("not a process id")?;
        // An error means that the process does not exist.
        let Ok(process) = pidfd_open(pid, PidfdFlags::empty()) else { return Ok(()) };
        if !self.runs() {
            return Ok(());
        }
        for signal in [Signal::TERM, Signal::KILL] {
            // Fails if the process has just ended, which the wait detects.
            let _ = pidfd_send_signal(&process, signal);
            if wait_for_end(&process, STOP_WITHIN)? {
                return Ok(());
            }
        }
        bail!("{} (process {}) did not end", self.program, self.pid)
    }

    /// Returns whether the process with this id is the recorded one.
    fn runs(&self) -> bool {
        let proc = PathBuf::from(format!("/proc/{}", self.pid));
        let Ok(binary) = fs::read_link(proc.join("exe")) else { return false };
        let Ok(arguments) = fs::read(proc.join("cmdline")) else { return false };
        let name = binary.file_name().unwrap_or_default().to_string_lossy();
        // Appended by the kernel if the binary was replaced: proc_pid_exe(5).
        let name = name.strip_suffix(" (deleted)").unwrap_or(&name);
        let config = self.config.as_os_str().as_encoded_bytes();
        name == self.program && arguments.split(|byte| *byte == 0).any(|argument| argument == config)
    }
}

/// Waits until the process has ended: its pidfd is then readable, pidfd_open(2).
fn wait_for_end(process: &OwnedFd, within: Duration) -> anyhow::Result<bool> {
    let timeout = Timespec::try_from(within).context("a bounded wait")?;
    let mut fds = [PollFd::new(process, PollFlags::IN)];
    Ok(poll(&mut fds, Some(&timeout)).context("waiting for a process")? > 0)
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};

    use super::*;

    fn folder(name: &str) -> PathBuf {
        let folder = std::env::temp_dir().join(format!("reprise-{name}-{}", std::process::id()));
        drop(fs::remove_dir_all(&folder));
        folder
    }

    #[test]
    fn directory_is_claimed_by_one_command_at_a_time() {
        let folder = folder("claims");
        let first = WorkDirectory::claim(&folder).expect("it is free");
        let error = WorkDirectory::claim(&folder).expect_err("it is claimed").to_string();
        assert!(error.contains("--dir"), "{error}");
        drop(first);
        WorkDirectory::claim(&folder).expect("it was released");
        fs::remove_dir_all(&folder).expect("the folder exists");
    }

    #[test]
    fn claim_ends_only_recorded_processes_of_an_earlier_command() {
        let folder = folder("leftovers");
        let mut claimed = WorkDirectory::claim(&folder).expect("it is free");
        let cat = || Command::new("cat").arg("-").stdin(Stdio::piped()).spawn().expect("cat is installed");
        let (mut left, mut other) = (cat(), cat());
        claimed.record(left.id(), "cat", Path::new("-")).expect("writable");
        claimed.record(other.id(), "cat", Path::new("other.toml")).expect("writable");
        drop(claimed);
        WorkDirectory::claim(&folder).expect("the earlier claim has ended");
        assert!(
            !left.wait().expect("a child of this process").success(),
            "the recorded process was signalled"
        );
        assert!(
            other.try_wait().expect("a child of this process").is_none(),
            "the other process has different arguments"
        );
        other.kill().expect("a child of this process");
        other.wait().expect("a child of this process");
        fs::remove_dir_all(&folder).expect("the folder exists");
    }
}
