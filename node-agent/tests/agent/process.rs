//! A `reprise-agent` process and the directory it lives in.
//!
//! Nothing waits by sleeping: readiness is the line on standard output, the end is the exit status. Every wait has a
//! bound. A process is killed when its handle is dropped.

use std::fs::{self, File};
use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::sync_channel;
use std::thread;
use std::time::{Duration, Instant};

use tempfile::TempDir;

/// An agent of 64 MiB is ready within a tenth of a second; a loaded machine takes longer.
const READY_WITHIN: Duration = Duration::from_secs(30);

/// The flush of a stopping agent takes 5 s at the most.
const EXIT_WITHIN: Duration = Duration::from_secs(15);

/// A directory for one agent: configuration, socket, pool, log.
pub(crate) struct Home {
    directory: TempDir,
}

/// What a test wants to be different from the usual.
pub(crate) struct Config {
    pub(crate) arena: &'static str,
    pub(crate) pool: Option<&'static str>,
    pub(crate) session: String,
    pub(crate) extra: String,
}

/// A running agent.
pub(crate) struct Agent {
    child: Child,
    pub(crate) socket: PathBuf,
    pub(crate) admin: String,
}

/// An agent that did not become ready.
#[derive(Debug)]
pub(crate) struct Refused {
    pub(crate) code: Option<i32>,
    /// All of standard error.
    pub(crate) text: String,
}

impl Default for Config {
    fn default() -> Self {
        Config { arena: "32MiB", pool: Some("64MiB"), session: String::new(), extra: String::new() }
    }
}

impl Home {
    pub(crate) fn new() -> Home {
        Home { directory: tempfile::tempdir().expect("a temporary directory") }
    }

    pub(crate) fn path(&self) -> &Path {
        self.directory.path()
    }

    pub(crate) fn pool(&self) -> PathBuf {
        self.path().join("pool")
    }

    fn log(&self) -> PathBuf {
        self.path().join("log")
    }

    /// Everything that the agents of this home have logged.
    pub(crate) fn log_text(&self) -> String {
        fs::read_to_string(self.log()).unwrap_or_default()
    }

    /// Lines of the log that say WARN or ERROR.
    pub(crate) fn complaints(&self) -> Vec<String> {
        let complains = |line: &&str| line.contains(" WARN ") || line.contains("ERROR ");
        self.log_text().lines().filter(complains).map(str::to_owned).collect()
    }

    /// Writes a configuration file and gives its path.
    pub(crate) fn write_config(&self, config: &Config) -> PathBuf {
        let device = config.pool.map_or(String::new(), |bytes| {
            format!("[[pool.devices]]\npath = \"{}\"\nbytes = \"{bytes}\"\n", self.pool().display())
        });
        let text = format!(
            "[node]\nname = \"test\"\n[session]\nsocket = \"{socket}\"\n{session}\n[arena]\nbytes = \"{arena}\"\n\
             region_bytes = \"16MiB\"\n[pool]\nsegment_bytes = \"2MiB\"\n{device}[cache]\narena_session_permille = 1000\n[peers]\nlisten = \"127.0.0.1:0\"\n\
             [admin]\nlisten = \"127.0.0.1:0\"\n{extra}\n",
            socket = self.path().join("agent.sock").display(),
            session = config.session,
            arena = config.arena,
            extra = config.extra,
        );
        let path = self.path().join("agent.toml");
        fs::write(&path, text).expect("the configuration is written");
        path
    }

    /// Starts an agent and waits until it is ready.
    pub(crate) fn start(&self, config: &Config) -> Agent {
        self.try_start(config).unwrap_or_else(|refused| panic!("the agent did not start: {refused:?}"))
    }

    /// Starts an agent; gives what it said when it did not become ready.
    pub(crate) fn try_start(&self, config: &Config) -> Result<Agent, Refused> {
        let config = self.write_config(config);
        self.launch(Command::new(env!("CARGO_BIN_EXE_reprise-agent")).arg("--config").arg(config))
    }

    /// Runs a command that is an agent.
    pub(crate) fn launch(&self, command: &mut Command) -> Result<Agent, Refused> {
        let log = File::options().create(true).append(true).open(self.log()).expect("a log file");
        let before = self.log_text().len();
        command.stdout(Stdio::piped()).stderr(log);
        // A copy of the binary is busy while a process that another test forks still holds the descriptor that it was
        // written through, until that process's exec.
        let give_up = Instant::now() + Duration::from_secs(10);
        let mut child = loop {
            match command.spawn() {
                Err(error) if error.kind() == ErrorKind::ExecutableFileBusy && Instant::now() < give_up => {
                    thread::yield_now();
                }
                spawned => break spawned.expect("the agent's binary runs"),
            }
        };
        let output = child.stdout.take().expect("piped");
        let (sender, receiver) = sync_channel(1);
        thread::spawn(move || {
            let mut line = String::new();
            let read = BufReader::new(output).read_line(&mut line);
            // The test may have given up.
            let _ = sender.send(read.map(|_| line));
        });
        let line =
            receiver.recv_timeout(READY_WITHIN).expect("a line or the end within 30 s").expect("readable");
        if line.is_empty() {
            let status = wait(&mut child, EXIT_WITHIN);
            return Err(Refused { code: status.code(), text: self.log_text()[before..].to_owned() });
        }
        let ready: serde_json::Value = serde_json::from_str(&line).expect("the ready line is JSON");
        assert_eq!(ready["ready"], true, "{line}");
        let text = |field: &str| ready[field].as_str().expect("a text").to_owned();
        Ok(Agent { child, socket: text("socket").into(), admin: text("admin") })
    }
}

impl Agent {
    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// SIGKILL.
    pub(crate) fn kill(mut self) {
        self.child.kill().expect("killed");
        self.child.wait().expect("waited for");
    }

    /// SIGTERM; gives the exit status.
    pub(crate) fn terminate(mut self) -> ExitStatus {
        signal(self.pid(), "TERM");
        wait(&mut self.child, EXIT_WITHIN)
    }

    /// One GET of the admin port: status code and body.
    pub(crate) fn get(&self, path: &str) -> (u16, String) {
        let mut stream = TcpStream::connect(&self.admin).expect("the admin port answers");
        stream.set_read_timeout(Some(Duration::from_secs(10))).expect("a timeout");
        write!(stream, "GET {path} HTTP/1.0\r\nHost: test\r\n\r\n").expect("sent");
        let mut response = String::new();
        stream.read_to_string(&mut response).expect("received");
        let (head, body) = response.split_once("\r\n\r\n").expect("a head and a body");
        let code = head.split_whitespace().nth(1).expect("a code").parse().expect("a number");
        (code, body.to_owned())
    }

    /// A counter of `/status`.
    pub(crate) fn counter(&self, name: &str) -> u64 {
        self.status()["counters"][name].as_u64().unwrap_or_else(|| panic!("no counter '{name}'"))
    }

    pub(crate) fn status(&self) -> serde_json::Value {
        let (code, body) = self.get("/status");
        assert_eq!(code, 200, "{body}");
        serde_json::from_str(&body).expect("JSON")
    }

    /// Asks until a counter has a value; each question takes the core's thread a turn.
    pub(crate) fn await_counter(&self, name: &str, wanted: u64) {
        let give_up = Instant::now() + Duration::from_secs(10);
        loop {
            let value = self.counter(name);
            if value == wanted {
                return;
            }
            assert!(Instant::now() < give_up, "{name} is {value}, not {wanted}");
        }
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        // Fails when it has ended, which is as good.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Sends a signal by name; the shell knows how without a line of unsafe code.
pub(crate) fn signal(pid: u32, name: &str) {
    let status = Command::new("sh").arg("-c").arg(format!("kill -{name} {pid}")).status().expect("a shell");
    assert!(status.success());
}

/// The exit status, within a bound.
fn wait(child: &mut Child, bound: Duration) -> ExitStatus {
    let give_up = Instant::now() + bound;
    loop {
        if let Some(status) = child.try_wait().expect("waited for") {
            return status;
        }
        if Instant::now() > give_up {
            let _ = child.kill();
            panic!("the agent did not end within {bound:?}");
        }
        thread::yield_now();
    }
}
