//! One process of Reprise: started, ready, stopped, killed.
//!
//! ```text
//! StartingProcess ── ready line ──► ChildProcess ── kill, terminate, drop ──► exited
//!     └── exits first ──► StartError (exit code and standard error)
//! ```
//!
//! The exit is awaited on the pid descriptor, and readiness on standard output, both without polling. Only
//! the stop of all threads after SIGSTOP is polled.

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::OnceLock;
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::time::{Duration, Instant, SystemTime};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, kill_process, pidfd_open};
use serde_json::Value;

use crate::logs;
use crate::wait::PATIENCE;

/// Interval between polls for stopped threads.
const STOP_PAUSE: Duration = Duration::from_millis(1);

/// Sends SIGSTOP to a process, and waits until none of its threads runs. On a busy machine this takes a
/// while.
///
/// # Panics
/// If this user has no such process, or it does not stop in time.
pub fn pause(pid: Pid) {
    kill_process(pid, Signal::STOP).expect("a process of this user can be signalled");
    let deadline = Instant::now() + PATIENCE;
    while !has_stopped(pid) {
        assert!(Instant::now() < deadline, "SIGSTOP stops a process within a bound");
        std::thread::sleep(STOP_PAUSE);
    }
}

/// Returns whether all threads are stopped; see proc_pid_stat(5).
fn has_stopped(pid: Pid) -> bool {
    let tasks = std::fs::read_dir(format!("/proc/{}/task", pid.as_raw_nonzero()))
        .expect("the process has not exited");
    tasks.flatten().all(|task| {
        let stat = std::fs::read_to_string(task.path().join("stat")).unwrap_or_default();
        // The program's name, in parentheses before the state, may contain any character. A thread that has
        // exited has no line.
        stat.rsplit(") ").next().is_some_and(|state| state.is_empty() || state.starts_with('T'))
    })
}

/// A process that was started and has not printed its ready line yet.
#[derive(Debug)]
pub struct StartingProcess {
    running: ChildProcess,
    line: Receiver<String>,
    /// Length of the log before this start.
    log_before: usize,
    log: PathBuf,
}

/// A child process. It is killed when dropped.
#[derive(Debug)]
pub struct ChildProcess {
    child: Child,
    end: OwnedFd,
}

/// A start that failed because the process exited.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StartError {
    /// Exit code; `None` if a signal ended the process.
    pub code: Option<i32>,
    /// Standard error of the process.
    pub text: String,
}

/// Time of the first start of a program by this process.
static STARTED: OnceLock<SystemTime> = OnceLock::new();

/// What to do about a missing or outdated program.
const BUILD_FIRST: &str = "run `cargo build --locked --workspace --bins --test e2e` first";

/// Returns the path of a binary of the workspace, next to the test's own. Cargo does not build it for the test, because
/// no crate depends on it.
///
/// # Panics
/// If the binary was not built, or if one of its sources has changed since.
pub fn binary(program: &str) -> PathBuf {
    let own = std::env::current_exe().expect("a process knows its executable");
    let folder = own.parent().expect("an executable is in a folder");
    // Tests run from <target>/<profile>/deps; the programs are one folder above.
    let folder = if folder.ends_with("deps") { folder.parent().expect("a parent folder") } else { folder };
    let path = folder.join(program);
    assert!(path.exists(), "{} is missing: {BUILD_FIRST}", path.display());
    if let Some(source) = newer_source(&path) {
        panic!("{} is older than {}: {BUILD_FIRST}", path.display(), source.display());
    }
    path
}

/// Returns a source file that has changed between the build of the program and the start of this process. Cargo
/// lists the sources of `PROGRAM` in `PROGRAM.d`; programs from elsewhere have no such file.
fn newer_source(program: &Path) -> Option<PathBuf> {
    let changed = |path: &Path| std::fs::metadata(path).and_then(|data| data.modified()).ok();
    let started = *STARTED.get_or_init(SystemTime::now);
    let built = changed(program)?;
    let list = std::fs::read_to_string(program.with_extension("d")).ok()?;
    let (_, sources) = list.split_once(": ")?;
    let mut sources = sources.split_whitespace().map(PathBuf::from);
    sources.find(|source| changed(source).is_some_and(|changed| changed > built && changed < started))
}

/// Copies a binary of the workspace, to be run from elsewhere.
///
/// Another process copies it. Otherwise a child that another test starts meanwhile would inherit the
/// descriptor that is open for writing, and executing the copy would fail until that child calls `exec`.
///
/// # Panics
/// If the binary cannot be copied.
pub fn copy_binary(program: &str, to: &Path) {
    let copied = Command::new("cp").arg(binary(program)).arg(to).status();
    assert!(copied.is_ok_and(|status| status.success()), "{program} can be copied to {}", to.display());
}

impl StartingProcess {
    /// Starts a command, and appends its standard error to `log`.
    ///
    /// # Panics
    /// If the command cannot be started.
    pub fn spawn(mut command: Command, log: &Path) -> StartingProcess {
        let log_before = logs::read(log).len();
        let file = File::options().create(true).append(true).open(log).expect("a log file can be written");
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(file);
        let mut running = ChildProcess::spawn(command);
        let output = running.child.stdout.take().expect("piped above");
        let (sender, line) = sync_channel(1);
        // The thread ends with the line or with the process.
        std::thread::spawn(move || {
            let mut line = String::new();
            let read = BufReader::new(output).read_line(&mut line);
            // Fails if the process was killed before it was ready; then no receiver is left.
            let _ = sender.send(read.map_or(String::new(), |_| line));
        });
        StartingProcess { running, line, log_before, log: log.to_owned() }
    }

    /// Waits for the ready line, and returns the process and the line's object.
    ///
    /// # Errors
    /// `StartError` if the process exited instead.
    ///
    /// # Panics
    /// If neither happens in time, or the line is not a ready line.
    pub fn ready(mut self) -> Result<(ChildProcess, Value), StartError> {
        let line = match self.line.recv_timeout(PATIENCE) {
            Ok(line) => line,
            Err(RecvTimeoutError::Timeout) => panic!("not ready within {PATIENCE:?}: {}", self.stderr()),
            Err(RecvTimeoutError::Disconnected) => unreachable!("the reading thread always sends"),
        };
        if line.is_empty() {
            let status = self.running.wait(PATIENCE).expect("a process that closed its output ends");
            return Err(StartError { code: status.code(), text: self.stderr() });
        }
        let ready: Value = serde_json::from_str(&line).expect("the ready line is JSON");
        assert_eq!(ready["ready"], true, "not a ready line: {line}");
        Ok((self.running, ready))
    }

    /// Kills the process, ready or not.
    pub fn kill(mut self) {
        self.running.kill();
    }

    fn stderr(&self) -> String {
        logs::read(&self.log).split_off(self.log_before)
    }
}

impl ChildProcess {
    /// Starts a command without waiting.
    ///
    /// # Panics
    /// If the command cannot be started.
    pub fn spawn(mut command: Command) -> ChildProcess {
        let child = command.spawn().unwrap_or_else(|error| panic!("cannot start {command:?}: {error}"));
        let end =
            pidfd_open(Pid::from_child(&child), PidfdFlags::empty()).expect("the child was not waited for");
        ChildProcess { child, end }
    }

    /// Returns the process id.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Sends SIGKILL and waits for the process to exit.
    pub fn kill(&mut self) {
        self.child.kill().expect("a child can be killed");
        self.child.wait().expect("a killed child exits");
    }

    /// Sends a signal to the process.
    pub fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).expect("a child can be signalled");
    }

    /// Sends SIGSTOP, and waits until none of its threads runs.
    ///
    /// # Panics
    /// If it does not stop in time.
    pub fn pause(&self) {
        pause(Pid::from_child(&self.child));
    }

    /// Sends SIGTERM and waits for the process to exit.
    ///
    /// # Panics
    /// If it does not exit in time.
    pub fn terminate(&mut self) -> ExitStatus {
        self.signal(Signal::TERM);
        self.wait(PATIENCE).expect("SIGTERM ends the process in time")
    }

    /// Returns whether the process is still running.
    pub fn is_alive(&mut self) -> bool {
        self.child.try_wait().expect("a child can be waited for").is_none()
    }

    /// Returns the exit status, or `None` if the process still runs after the bound.
    pub fn wait(&mut self, within: Duration) -> Option<ExitStatus> {
        let timeout = Timespec::try_from(within).expect("the bound is a few seconds");
        let mut ends = [PollFd::new(&self.end, PollFlags::IN)];
        poll(&mut ends, Some(&timeout)).expect("a pid descriptor can be polled");
        self.child.try_wait().expect("a child can be waited for")
    }
}

impl Drop for ChildProcess {
    fn drop(&mut self) {
        // Fails if the process has exited, which is fine.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn program_is_outdated_once_a_source_changes_after_its_build() {
        let folder = tempfile::tempdir().expect("a folder");
        let (program, source) = (folder.path().join("program"), folder.path().join("lib.rs"));
        let list =
            format!("{}: {} {}/gone.rs\n", program.display(), source.display(), folder.path().display());
        std::fs::write(folder.path().join("program.d"), list).expect("the folder is writable");
        let now = SystemTime::now();
        let touch = |path: &Path, at: SystemTime| {
            let file = File::create(path).expect("the folder is writable");
            file.set_modified(at).expect("the time can be set");
        };
        let age = Duration::from_secs;
        touch(&program, now - age(10));
        touch(&source, now - age(20));
        assert_eq!(newer_source(&program), None);
        touch(&source, now - age(5));
        assert_eq!(newer_source(&program), Some(source.clone()));
        touch(&source, now + age(60));
        assert_eq!(newer_source(&program), None, "changes during the tests are ignored");
        assert_eq!(newer_source(&folder.path().join("other")), None, "unknown programs are not checked");
    }
}
