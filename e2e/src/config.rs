//! Configuration files of agents: small defaults, and what a test changes.
//!
//! The defaults are small: an agent with a 16 MiB arena and a 64 MiB pool is ready within tens of
//! milliseconds.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use reprise_policy::{ByteSize, Interval};

use crate::host::Host;

/// Configuration of an agent. Fields that a test does not set have the defaults of [`AgentConfig::named`].
#[derive(Clone, Debug)]
pub struct AgentConfig {
    /// Node name; also the base name of the agent's files.
    pub node: String,
    /// Size of the arena.
    pub arena: ByteSize,
    /// Size of one region of the arena.
    pub region: ByteSize,
    /// Size of the pool's file; `None`: blocks are in memory only.
    pub pool: Option<ByteSize>,
    /// Folder of the pool's file; `None`: next to the agent's other files.
    pub pool_folder: Option<PathBuf>,
    /// Delay before blocks are written back.
    pub writeback_delay: Duration,
    /// Silence after which a peer counts as lost.
    pub stall_timeout: Duration,
    /// Members of the control plane, `host:port`; empty: stand-alone.
    pub control_plane: Vec<String>,
    /// Host on which the agent runs.
    pub host: Host,
    /// Further lines of the `[session]` section.
    pub session: String,
    /// Further sections at the end of the file.
    pub extra: String,
}

/// The files of one agent.
#[derive(Clone, Debug)]
pub struct AgentFiles {
    /// The agent's configuration file.
    pub config: PathBuf,
    /// Socket for engine sessions.
    pub socket: PathBuf,
    /// The pool's device file.
    pub pool: PathBuf,
    /// Log: the standard error of the agent.
    pub log: PathBuf,
    /// Host on which the agent runs.
    pub host: Host,
    /// Further options of the start.
    pub start: LaunchOptions,
}

/// How a process is launched, in addition to its configuration file.
#[derive(Clone, Debug, Default)]
pub struct LaunchOptions {
    /// A command that executes the program, put in front of it.
    pub launcher: Vec<String>,
    /// Arguments after the program's own arguments.
    pub arguments: Vec<String>,
    /// Environment variables to set.
    pub environment: Vec<(String, String)>,
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

impl AgentConfig {
    /// Returns the default configuration of an agent of this name.
    pub fn named(node: &str) -> AgentConfig {
        AgentConfig {
            node: node.to_owned(),
            arena: ByteSize(16 << 20),
            region: ByteSize(8 << 20),
            pool: Some(ByteSize(64 << 20)),
            pool_folder: None,
            writeback_delay: Duration::from_millis(10),
            stall_timeout: Duration::from_secs(2),
            control_plane: Vec::new(),
            host: Host::LOOPBACK,
            session: String::new(),
            extra: String::new(),
        }
    }

    /// Returns the text of the file. One session may use the whole arena, since tests fill an arena with one
    /// session.
    pub fn text(&self, files: &AgentFiles) -> String {
        let device = self.pool.map_or(String::new(), |bytes| {
            format!("devices = [{{ path = {}, bytes = \"{bytes}\" }}]\n", quoted(&files.pool))
        });
        let control_plane: Vec<String> =
            self.control_plane.iter().map(|address| format!("\"{address}\"")).collect();
        let control_plane = control_plane.join(", ");
        format!(
            "[node]\nname = \"{node}\"\n[session]\nsocket = {socket}\n{session}\n[arena]\nbytes = \"{arena}\"\n\
             region_bytes = \"{region}\"\n[pool]\nsegment_bytes = \"2MiB\"\nreserve_bytes = \"1MiB\"\n{device}[cache]\narena_session_permille = \
             1000\n[writeback]\ndelay = \"{delay}\"\n[peers]\nlisten = \"{address}:0\"\nstall_timeout = \"{stall}\"\n[controlplane]\naddress = \
             [{control_plane}]\n[admin]\nlisten = \"{address}:0\"\n{extra}\n",
            node = self.node,
            address = self.host.address(),
            socket = quoted(&files.socket),
            session = self.session,
            arena = self.arena,
            region = self.region,
            delay = Interval(self.writeback_delay),
            stall = Interval(self.stall_timeout),
            extra = self.extra,
        )
    }
}

impl AgentFiles {
    /// Returns the files of an agent in a folder, on the loopback host.
    pub fn within(folder: &Path, node: &str) -> AgentFiles {
        AgentFiles {
            config: folder.join(format!("{node}.toml")),
            socket: folder.join(format!("{node}.sock")),
            pool: folder.join(format!("{node}.pool")),
            log: folder.join(format!("{node}.log")),
            host: Host::LOOPBACK,
            start: LaunchOptions::default(),
        }
    }
}

/// Formats a path as a TOML string.
pub fn quoted(path: &Path) -> String {
    toml::Value::String(path.to_string_lossy().into_owned()).to_string()
}
