//! Configuration files of agents, made of what a test wants to be different from the usual.
//!
//! The usual is small: an agent with 16 MiB of arena and a pool of 64 MiB is ready within some tens of milliseconds.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use reprise_policy::{ByteSize, Interval};

use crate::host::Host;

/// What an agent is configured with. Fields that a test does not name are the usual ones.
#[derive(Clone, Debug)]
pub struct AgentConfig {
    /// Node name; also names the files of the agent.
    pub node: String,
    /// Memory for blocks.
    pub arena: ByteSize,
    /// One file of shared memory.
    pub region: ByteSize,
    /// Size of the pool's file; `None`: blocks live in memory only.
    pub pool: Option<ByteSize>,
    /// Where the pool's file is; `None`: beside the agent's other files.
    pub pool_folder: Option<PathBuf>,
    /// Delay of write-back.
    pub writeback_delay: Duration,
    /// Silence after which a peer is lost.
    pub stall_timeout: Duration,
    /// Members of the control plane, `host:port`; none: stand-alone.
    pub control_plane: Vec<String>,
    /// Where it runs.
    pub host: Host,
    /// Lines of the `[session]` section.
    pub session: String,
    /// Lines at the end, with their section.
    pub extra: String,
}

/// The files of one agent.
#[derive(Clone, Debug)]
pub struct AgentFiles {
    /// Its configuration.
    pub config: PathBuf,
    /// The socket of its sessions.
    pub socket: PathBuf,
    /// Its pool.
    pub pool: PathBuf,
    /// What it writes to standard error.
    pub log: PathBuf,
    /// Where it runs.
    pub host: Host,
    /// What it is started with besides.
    pub start: StartedWith,
}

/// What an agent is started with besides its configuration file.
#[derive(Clone, Debug, Default)]
pub struct StartedWith {
    /// A command that becomes the agent's, in front of it.
    pub launcher: Vec<String>,
    /// Arguments behind its own.
    pub arguments: Vec<String>,
    /// Variables of its environment.
    pub environment: Vec<(String, String)>,
}

impl StartedWith {
    /// The command that runs a program so, without the arguments that it is started with besides.
    pub fn command(&self, program: &Path) -> Command {
        let mut words = self.launcher.iter().map(OsStr::new).chain([program.as_os_str()]);
        let mut command = Command::new(words.next().expect("the program at least"));
        command.args(words).envs(self.environment.iter().map(|(name, value)| (name, value)));
        command
    }
}

impl AgentConfig {
    /// The usual agent of this name.
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

    /// The file's text. One engine may have all that engines may have: tests fill an arena with one.
    pub fn text(&self, files: &AgentFiles) -> String {
        let device = self.pool.map_or(String::new(), |bytes| {
            format!("devices = [{{ path = {}, bytes = \"{bytes}\" }}]\n", quoted(&files.pool))
        });
        let control_plane: Vec<String> =
            self.control_plane.iter().map(|address| format!("\"{address}\"")).collect();
        let control_plane = control_plane.join(", ");
        format!(
            "[node]\nname = \"{node}\"\n[session]\nsocket = {socket}\n{session}\n[arena]\nbytes = \"{arena}\"\n\
             region_bytes = \"{region}\"\n[pool]\nsegment_bytes = \"2MiB\"\n{device}[cache]\narena_session_permille = \
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
    /// Files in a folder, of an agent on loopback.
    pub fn within(folder: &Path, node: &str) -> AgentFiles {
        AgentFiles {
            config: folder.join(format!("{node}.toml")),
            socket: folder.join(format!("{node}.sock")),
            pool: folder.join(format!("{node}.pool")),
            log: folder.join(format!("{node}.log")),
            host: Host::LOOPBACK,
            start: StartedWith::default(),
        }
    }
}

/// A path as a TOML string.
pub fn quoted(path: &Path) -> String {
    toml::Value::String(path.to_string_lossy().into_owned()).to_string()
}
