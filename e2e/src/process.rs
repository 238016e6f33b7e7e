//! One process of Reprise: started, ready, stopped, killed.
//!
//! ```text
//! Starting ── ready line ──► Running ── kill, terminate, drop ──► gone
//!     └── ends first ──► Refused (exit code and what it said)
//! ```
//!
//! The end of a process is waited for on its pid descriptor, its readiness on its standard output: no polling. Only that all of its
//! threads stand still after SIGSTOP has to be looked for.

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, kill_process, pidfd_open};
use serde_json::Value;

use crate::logs;
use crate::wait::PATIENCE;

/// Between two looks whether a process has stopped.
const STOP_PAUSE: Duration = Duration::from_millis(1);

/// Sends SIGSTOP to a process, and waits until no thread of it runs: on a busy machine some go on for a while.
///
/// # Panics
/// When there is no such process of this user, or it does not stop in time.
pub fn pause(pid: Pid) {
    kill_process(pid, Signal::STOP).expect("a process of this user takes signals");
    let give_up = Instant::now() + PATIENCE;
    while !has_stopped(pid) {
        assert!(Instant::now() < give_up, "SIGSTOP stops a process within a bound");
        std::thread::sleep(STOP_PAUSE);
    }
}

/// Whether all of its threads stand still, as proc_pid_stat(5) has it.
fn has_stopped(pid: Pid) -> bool {
    let tasks = std::fs::read_dir(format!("/proc/{}/task", pid.as_raw_nonzero())).expect("it has not ended");
    tasks.flatten().all(|task| {
        let stat = std::fs::read_to_string(task.path().join("stat")).unwrap_or_default();
        // The name of a program, in parentheses before it, may have any character. A thread that is gone has no line.
        stat.rsplit(") ").next().is_some_and(|state| state.is_empty() || state.starts_with('T'))
    })
}

/// A process that has not said yet that it is ready.
#[derive(Debug)]
pub struct Starting {
    running: Running,
    line: Receiver<String>,
    /// Bytes of the log before this start.
    log_before: usize,
    log: PathBuf,
}

/// A process. Killed when dropped.
#[derive(Debug)]
pub struct Running {
    child: Child,
    end: OwnedFd,
}

/// A start that failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refused {
    /// Exit code; `None` when a signal ended it.
    pub code: Option<i32>,
    /// All that it wrote to standard error.
    pub text: String,
}

/// A binary of the workspace, beside this test's own.
///
/// # Panics
/// When it has not been built.
pub fn binary(program: &str) -> PathBuf {
    let own = std::env::current_exe().expect("a process knows its executable");
    let folder = own.parent().expect("an executable lies in a folder");
    // Tests are run from <target>/<profile>/deps, programs from above it.
    let folder = if folder.ends_with("deps") { folder.parent().expect("a folder above") } else { folder };
    let path = folder.join(program);
    assert!(
        path.exists(),
        "{} is missing: run `cargo build --workspace --bins --tests` first",
        path.display()
    );
    path
}

/// Copies a binary of the workspace, to be run from elsewhere.
///
/// By another process: a child that some other test starts meanwhile would inherit our descriptor of the copy, open for
/// writing, and nobody could run it until that child has become something else.
///
/// # Panics
/// When it cannot be copied.
pub fn copy_binary(program: &str, to: &Path) {
    let copied = Command::new("cp").arg(binary(program)).arg(to).status();
    assert!(copied.is_ok_and(|status| status.success()), "{program} can be copied to {}", to.display());
}

impl Starting {
    /// Starts a command; its standard error is appended to `log`.
    ///
    /// # Panics
    /// When the system cannot start it.
    pub fn spawn(mut command: Command, log: &Path) -> Starting {
        let log_before = logs::read(log).len();
        let file = File::options().create(true).append(true).open(log).expect("a log file can be written");
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(file);
        let mut running = Running::spawn(command);
        let output = running.child.stdout.take().expect("piped above");
        let (sender, line) = sync_channel(1);
        // Ends with the line or with the process.
        std::thread::spawn(move || {
            let mut line = String::new();
            let read = BufReader::new(output).read_line(&mut line);
            // Nobody waits when the process was killed before it was ready.
            let _ = sender.send(read.map_or(String::new(), |_| line));
        });
        Starting { running, line, log_before, log: log.to_owned() }
    }

    /// Waits for the ready line.
    ///
    /// # Errors
    /// `Refused` when the process ended instead.
    ///
    /// # Panics
    /// When it did neither in time, or said something else.
    pub fn ready(mut self) -> Result<(Running, Value), Refused> {
        let line = match self.line.recv_timeout(PATIENCE) {
            Ok(line) => line,
            Err(RecvTimeoutError::Timeout) => panic!("not ready within {PATIENCE:?}: {}", self.said()),
            Err(RecvTimeoutError::Disconnected) => unreachable!("the reading thread always sends"),
        };
        if line.is_empty() {
            let status = self.running.wait(PATIENCE).expect("a process that closed its output ends");
            return Err(Refused { code: status.code(), text: self.said() });
        }
        let ready: Value = serde_json::from_str(&line).expect("the ready line is JSON");
        assert_eq!(ready["ready"], true, "the ready line says so: {line}");
        Ok((self.running, ready))
    }

    /// Ends it by SIGKILL, ready or not.
    pub fn kill(mut self) {
        self.running.kill();
    }

    fn said(&self) -> String {
        logs::read(&self.log).split_off(self.log_before)
    }
}

impl Running {
    /// Starts a command.
    ///
    /// # Panics
    /// When the system cannot start it.
    pub fn spawn(mut command: Command) -> Running {
        let child = command.spawn().unwrap_or_else(|error| panic!("cannot start {command:?}: {error}"));
        let end = pidfd_open(Pid::from_child(&child), PidfdFlags::empty())
            .expect("a child that was not waited for");
        Running { child, end }
    }

    /// Process id.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// SIGKILL, and waits for the end.
    pub fn kill(&mut self) {
        self.child.kill().expect("one's own child can be killed");
        self.child.wait().expect("a killed child ends");
    }

    /// Sends a signal.
    pub fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).expect("one's own child takes signals");
    }

    /// SIGSTOP, and waits until no thread of it runs.
    ///
    /// # Panics
    /// When it does not stop in time.
    pub fn pause(&self) {
        pause(Pid::from_child(&self.child));
    }

    /// SIGTERM, and waits for the end.
    ///
    /// # Panics
    /// When it does not end in time.
    pub fn terminate(&mut self) -> ExitStatus {
        self.signal(Signal::TERM);
        self.wait(PATIENCE).expect("SIGTERM ends a process within a bound")
    }

    /// Whether it has not ended.
    pub fn is_alive(&mut self) -> bool {
        self.child.try_wait().expect("one's own child can be waited for").is_none()
    }

    /// The exit status; `None` when it has not ended within the bound.
    pub fn wait(&mut self, within: Duration) -> Option<ExitStatus> {
        let timeout = Timespec::try_from(within).expect("bounds are seconds");
        let mut ends = [PollFd::new(&self.end, PollFlags::IN)];
        poll(&mut ends, Some(&timeout)).expect("a pid descriptor can be polled");
        self.child.try_wait().expect("one's own child can be waited for")
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // Fails when it has ended, which is as good.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
