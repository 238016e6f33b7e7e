//! A cluster's directory: claimed by one command at a time, with a record of the processes that work in it.
//!
//! The claim is a file lock, which the kernel gives up with the process that holds it. The record outlives a command
//! that was killed: whoever claims the directory next ends what is recorded there, after a look at `/proc` that the
//! process is the recorded one. It is held by a pidfd meanwhile, so a reused process id is never signalled.

use std::fs::{self, File, TryLockError};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use serde::{Deserialize, Serialize};

use super::etcd::DATA as ETCD_DATA;
use super::process::STOP_WITHIN;
use super::{CLUSTER_FILE, POOL_FILE, remove_directory_if_there, remove_if_there};

/// File that is locked while a command uses the directory.
const LOCK_FILE: &str = "cluster.lock";

/// How long a lock may be held by nobody in particular: a process that is being started has a copy of every descriptor of
/// the one that starts it, until it runs its own program.
const CLAIM_WITHIN: Duration = Duration::from_millis(500);

/// Between two looks.
const CLAIM_PAUSE: Duration = Duration::from_millis(10);

/// File with the processes that were started in the directory.
const PROCESSES_FILE: &str = "processes.json";

/// A directory that is this command's own.
#[derive(Debug)]
pub(super) struct ClusterDirectory {
    path: PathBuf,
    _lock: File,
    processes: Vec<Recorded>,
}

/// A process as it was started.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Recorded {
    pid: u32,
    /// File name of its binary.
    program: String,
    /// Its configuration, as it stands in its arguments.
    config: PathBuf,
}

impl ClusterDirectory {
    /// Takes the directory, and ends what a killed command has left in it.
    pub(super) fn claim(path: &Path) -> anyhow::Result<ClusterDirectory> {
        fs::create_dir_all(path).with_context(|| format!("cannot create {}", path.display()))?;
        let lock_path = path.join(LOCK_FILE);
        let lock = File::options()
            .create(true)
            .truncate(false)
            .write(true)
            .open(&lock_path)
            .with_context(|| format!("cannot write {}", lock_path.display()))?;
        let give_up = Instant::now() + CLAIM_WITHIN;
        loop {
            match lock.try_lock() {
                Ok(()) => break,
                Err(TryLockError::WouldBlock) if Instant::now() < give_up => sleep(CLAIM_PAUSE),
                Err(TryLockError::WouldBlock) => bail!(
                    "{} is in use by another demo or bench: end that one, or choose another directory with --dir",
                    path.display()
                ),
                Err(TryLockError::Error(error)) => {
                    return Err(error).with_context(|| format!("cannot lock {}", lock_path.display()));
                }
            }
        }
        end_recorded(path)?;
        Ok(ClusterDirectory { path: path.to_owned(), _lock: lock, processes: Vec::new() })
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Records a process that was just started.
    pub(super) fn record(&mut self, pid: u32, program: &str, config: &Path) -> anyhow::Result<()> {
        // A restarted process takes the place of the one before.
        self.processes.retain(|process| process.config != config);
        self.processes.push(Recorded { pid, program: program.to_owned(), config: config.to_owned() });
        let path = self.path.join(PROCESSES_FILE);
        let text = serde_json::to_string_pretty(&self.processes).context("encoding the list of processes")?;
        fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))
    }
}

/// Ends the processes recorded in a directory, and removes what is of no use without them.
pub(crate) fn end_recorded(directory: &Path) -> anyhow::Result<()> {
    let record = directory.join(PROCESSES_FILE);
    let text = match fs::read_to_string(&record) {
        Ok(text) => text,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error).with_context(|| format!("cannot read {}", record.display())),
    };
    // Cut short by a kill while it was written: the process that it was written for ends by hand.
    let processes: Vec<Recorded> = serde_json::from_str(&text).unwrap_or_default();
    // etcd and the control plane were started first and end last: agents take their leave of members, members of etcd.
    for process in processes.iter().rev() {
        process.end()?;
        drop(fs::remove_file(process.config.with_extension("").join(POOL_FILE)));
    }
    remove_directory_if_there(&directory.join(ETCD_DATA))?;
    remove_if_there(&directory.join(CLUSTER_FILE))?;
    remove_if_there(&record)
}

impl Recorded {
    /// Ends the process if it still runs; first kindly.
    fn end(&self) -> anyhow::Result<()> {
        let pid = i32::try_from(self.pid).ok().and_then(Pid::from_raw).context("not a process id")?;
        // An error says that there is no such process.
        let Ok(process) = pidfd_open(pid, PidfdFlags::empty()) else { return Ok(()) };
        if !self.runs() {
            return Ok(());
        }
        for signal in [Signal::TERM, Signal::KILL] {
            // Fails when it has just ended, which the wait shows.
            let _ = pidfd_send_signal(&process, signal);
            if has_ended(&process, STOP_WITHIN)? {
                return Ok(());
            }
        }
        bail!("{} (process {}) does not end", self.program, self.pid)
    }

    /// Whether the process of this id is the one that was started.
    fn runs(&self) -> bool {
        let proc = PathBuf::from(format!("/proc/{}", self.pid));
        let Ok(binary) = fs::read_link(proc.join("exe")) else { return false };
        let Ok(arguments) = fs::read(proc.join("cmdline")) else { return false };
        let name = binary.file_name().unwrap_or_default().to_string_lossy();
        // What the kernel appends when the binary was replaced meanwhile: proc_pid_exe(5).
        let name = name.strip_suffix(" (deleted)").unwrap_or(&name);
        let config = self.config.as_os_str().as_encoded_bytes();
        name == self.program && arguments.split(|byte| *byte == 0).any(|argument| argument == config)
    }
}

/// Waits until the process has ended: its pidfd is readable from then on, pidfd_open(2).
fn has_ended(process: &OwnedFd, within: Duration) -> anyhow::Result<bool> {
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
    fn a_directory_belongs_to_one_command_at_a_time() {
        let folder = folder("claims");
        let first = ClusterDirectory::claim(&folder).expect("nobody has it");
        let error = ClusterDirectory::claim(&folder).expect_err("the first one has it").to_string();
        assert!(error.contains("--dir"), "{error}");
        drop(first);
        ClusterDirectory::claim(&folder).expect("it was given up");
        fs::remove_dir_all(&folder).expect("it is ours");
    }

    #[test]
    fn who_claims_a_directory_ends_what_was_left_in_it_and_nothing_else() {
        let folder = folder("leftovers");
        let mut claimed = ClusterDirectory::claim(&folder).expect("nobody has it");
        let cat = || Command::new("cat").arg("-").stdin(Stdio::piped()).spawn().expect("cat is everywhere");
        let (mut left, mut stranger) = (cat(), cat());
        claimed.record(left.id(), "cat", Path::new("-")).expect("writable");
        claimed.record(stranger.id(), "cat", Path::new("other.toml")).expect("writable");
        drop(claimed);
        ClusterDirectory::claim(&folder).expect("the claim of the dead is void");
        assert!(!left.wait().expect("one's own child").success(), "it was ended by a signal");
        assert!(stranger.try_wait().expect("one's own child").is_none(), "it has other arguments");
        stranger.kill().expect("one's own child");
        stranger.wait().expect("one's own child");
        fs::remove_dir_all(&folder).expect("it is ours");
    }
}
