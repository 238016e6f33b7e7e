//! One process of Reprise: started, ready, stopped, killed.
//!
//! ```text
//! StartingProcess ── ready line ──► ChildProcess ── kill, terminate, drop ──► exited
//!     └── exits first ──► NotReady::Exited(StartError) (exit code and standard error)
//! ```
//!
//! The exit is awaited on the pid descriptor, and readiness on standard output, both without polling. Only
//! the stop of all threads after SIGSTOP is polled.

use std::ffi::OsStr;
use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, ExitStatus, Stdio};
use std::sync::OnceLock;
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::time::{Duration, Instant, SystemTime};

use anyhow::{Context, ensure};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
pub use rustix::process::Signal;
use rustix::process::{Pid, PidfdFlags, kill_process, pidfd_open};
use serde_json::Value;

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

/// A process that answers lines of its standard input with lines of its standard output. It exits when its input
/// is closed, and is killed if it does not.
#[derive(Debug)]
pub struct Conversation {
    child: ChildProcess,
    requests: Option<ChildStdin>,
    answers: Receiver<String>,
    exits_within: Duration,
}

/// A start that failed because the process exited.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StartError {
    /// Exit code; `None` if a signal ended the process.
    pub code: Option<i32>,
    /// Standard error of the process.
    pub text: String,
}

/// Result of a start that did not succeed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NotReady {
    /// The process exited.
    Exited(StartError),
    /// The process is silent; its standard error so far.
    Silent(String),
    /// The process printed another line first.
    Invalid(String),
}

/// How a process is launched, in addition to its own arguments.
#[derive(Clone, Debug, Default)]
pub struct LaunchOptions {
    /// A command that executes the program, put in front of it.
    pub launcher: Vec<String>,
    /// Arguments after the program's own arguments.
    pub arguments: Vec<String>,
    /// Environment variables to set.
    pub environment: Vec<(String, String)>,
}

/// Time of the first start of a program by this process.
static STARTED: OnceLock<SystemTime> = OnceLock::new();

/// What to do about a missing or outdated program.
const BUILD_FIRST: &str = "run `cargo build --locked --workspace --bins --test e2e` first";

/// Returns the text of a log; empty if the file does not exist.
pub fn read_log(file: &Path) -> String {
    std::fs::read(file).map_or(String::new(), |bytes| String::from_utf8_lossy(&bytes).into_owned())
}

/// Opens a log for appending.
///
/// # Errors
/// The file cannot be written.
pub fn append(log: &Path) -> anyhow::Result<File> {
    let file = File::options().create(true).append(true).open(log);
    file.with_context(|| format!("cannot write {}", log.display()))
}

/// Returns the path of a binary next to this one.
///
/// # Errors
/// The binary does not exist.
pub fn sibling_binary(program: &str) -> anyhow::Result<PathBuf> {
    let own = std::env::current_exe().context("cannot find the path of this program")?;
    let folder = own.parent().context("an executable is in a folder")?;
    // Tests run from <target>/<profile>/deps; the programs are one folder above.
    let folder = if folder.ends_with("deps") { folder.parent().context("a parent folder")? } else { folder };
    let path = folder.join(program);
    ensure!(
        path.exists(),
        "{} is missing: build the workspace with the same profile as this program",
        path.display()
    );
    Ok(path)
}

/// Returns the path of a binary of the workspace, next to the test's own. Cargo does not build it for the test, because
/// no crate depends on it.
///
/// # Panics
/// If the binary was not built, or if one of its sources has changed since.
pub fn binary(program: &str) -> PathBuf {
    let path = sibling_binary(program).unwrap_or_else(|error| panic!("{error:#}: {BUILD_FIRST}"));
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

impl LaunchOptions {
    /// Returns the command that launches a program, without [`LaunchOptions::arguments`].
    pub fn command(&self, program: &Path) -> Command {
        let mut words = self.launcher.iter().map(OsStr::new).chain([program.as_os_str()]);
        let mut command = Command::new(words.next().expect("at least the program"));
        command.args(words).envs(self.environment.iter().map(|(name, value)| (name, value)));
        command
    }
}

impl StartingProcess {
    /// Starts a command, and appends its standard error to `log`.
    ///
    /// # Panics
    /// If the command cannot be started.
    pub fn spawn(command: Command, log: &Path) -> StartingProcess {
        StartingProcess::try_spawn(command, log).unwrap_or_else(|error| panic!("{error:#}"))
    }

    /// Starts a command, and appends its standard error to `log`.
    ///
    /// # Errors
    /// The command cannot be started, or the log cannot be written.
    pub fn try_spawn(mut command: Command, log: &Path) -> anyhow::Result<StartingProcess> {
        let log_before = read_log(log).len();
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(append(log)?);
        let mut running = ChildProcess::try_spawn(command)?;
        let output = running.child.stdout.take().expect("piped above");
        let (sender, line) = sync_channel(1);
        // The thread ends with the line or with the process.
        std::thread::spawn(move || {
            let mut line = String::new();
            let read = BufReader::new(output).read_line(&mut line);
            // Fails if the process was killed before it was ready; then no receiver is left.
            let _ = sender.send(read.map_or(String::new(), |_| line));
        });
        Ok(StartingProcess { running, line, log_before, log: log.to_owned() })
    }

    /// Waits for the ready line, and returns the process and the line's object.
    ///
    /// # Errors
    /// `StartError` if the process exited instead.
    ///
    /// # Panics
    /// If neither happens in time, or the line is not a ready line.
    pub fn ready(self) -> Result<(ChildProcess, Value), StartError> {
        self.ready_within(PATIENCE).map_err(|reason| match reason {
            NotReady::Exited(error) => error,
            NotReady::Silent(text) => panic!("not ready within {PATIENCE:?}: {text}"),
            NotReady::Invalid(line) => panic!("not a ready line: {line}"),
        })
    }

    /// Waits for the ready line, and returns the process and the line's object.
    ///
    /// # Errors
    /// The reason for which the process is not ready. The process is then killed.
    pub fn ready_within(mut self, within: Duration) -> Result<(ChildProcess, Value), NotReady> {
        let line = match self.line.recv_timeout(within) {
            Ok(line) => line,
            Err(RecvTimeoutError::Timeout) => return Err(NotReady::Silent(self.stderr())),
            Err(RecvTimeoutError::Disconnected) => unreachable!("the reading thread always sends"),
        };
        if line.is_empty() {
            let Some(status) = self.running.wait(within) else { return Err(NotReady::Silent(self.stderr())) };
            return Err(NotReady::Exited(StartError { code: status.code(), text: self.stderr() }));
        }
        match serde_json::from_str::<Value>(&line) {
            Ok(ready) if ready["ready"] == true => Ok((self.running, ready)),
            _ => Err(NotReady::Invalid(line)),
        }
    }

    /// Returns the process id.
    pub fn id(&self) -> u32 {
        self.running.id()
    }

    /// Kills the process, ready or not.
    pub fn kill(mut self) {
        self.running.kill();
    }

    fn stderr(&self) -> String {
        read_log(&self.log).split_off(self.log_before)
    }
}

impl StartError {
    /// Checks the exit code, and that the text contains these words.
    ///
    /// # Panics
    /// If the exit code or the text differs.
    pub fn assert_reports(&self, code: i32, words: &[&str]) {
        assert_eq!(self.code, Some(code), "exit code of: {}", self.text);
        for word in words {
            assert!(self.text.contains(word), "no '{word}' in: {}", self.text);
        }
    }
}

impl ChildProcess {
    /// Starts a command without waiting.
    ///
    /// # Panics
    /// If the command cannot be started.
    pub fn spawn(command: Command) -> ChildProcess {
        ChildProcess::try_spawn(command).unwrap_or_else(|error| panic!("{error:#}"))
    }

    /// Starts a command without waiting.
    ///
    /// # Errors
    /// The command cannot be started.
    pub fn try_spawn(mut command: Command) -> anyhow::Result<ChildProcess> {
        let child = command.spawn().with_context(|| format!("cannot start {command:?}"))?;
        let end =
            pidfd_open(Pid::from_child(&child), PidfdFlags::empty()).expect("the child was not waited for");
        Ok(ChildProcess { child, end })
    }

    /// Takes the pipe to standard input, if there is one.
    pub fn take_input(&mut self) -> Option<ChildStdin> {
        self.child.stdin.take()
    }

    /// Takes the pipe from standard output, if there is one.
    pub fn take_output(&mut self) -> Option<ChildStdout> {
        self.child.stdout.take()
    }

    /// Returns the lines of standard output, a pipe, which another thread reads. It reads at most `ahead` lines
    /// that are not received yet.
    pub fn read_lines(&mut self, ahead: usize) -> Receiver<String> {
        let output = BufReader::new(self.take_output().expect("standard output is a pipe"));
        let (sender, lines) = sync_channel(ahead);
        std::thread::spawn(move || {
            output.lines().map_while(Result::ok).try_for_each(|line| sender.send(line))
        });
        lines
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

    /// Sends SIGTERM, and SIGKILL if the process still runs after the bound.
    pub fn stop(&mut self, within: Duration) {
        if self.is_alive() {
            self.signal(Signal::TERM);
            if self.wait(within).is_none() {
                self.kill();
            }
        }
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

impl Conversation {
    /// Starts a process that exits within a bound of the end of its input.
    ///
    /// # Errors
    /// The command cannot be started.
    pub fn start(mut command: Command, exits_within: Duration) -> anyhow::Result<Conversation> {
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = ChildProcess::try_spawn(command)?;
        let (requests, answers) = (child.child.stdin.take(), child.read_lines(1));
        Ok(Conversation { child, requests, answers, exits_within })
    }

    /// Returns the process id.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Sends a line.
    ///
    /// # Errors
    /// The process has exited.
    pub fn send(&mut self, line: &str) -> std::io::Result<()> {
        let requests = self.requests.as_mut().expect("taken only when dropped");
        writeln!(requests, "{line}").and_then(|()| requests.flush())
    }

    /// Waits for the next line; `None` if the process exits or is silent.
    pub fn receive(&self, within: Duration) -> Option<String> {
        self.answers.recv_timeout(within).ok()
    }

    /// Closes the input, and waits for the process to exit within its bound.
    pub fn end(&mut self) {
        drop(self.requests.take());
        self.child.wait(self.exits_within);
    }
}

impl Drop for Conversation {
    fn drop(&mut self) {
        self.end();
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
