//! Configuration files of agents: small defaults, and what a test changes.
//!
//! The defaults are small: an agent with a 16 MiB arena and a 64 MiB pool is ready within tens of
//! milliseconds.

use std::path::{Path, PathBuf};
use std::time::Duration;

use reprise_policy::{ByteSize, Interval};
use reprise_testkit::configuration;

use crate::host::Host;
use crate::process::LaunchOptions;

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
    /// Maximum additional delay of writes that wait for slack of engines.
    pub slack_delay: Duration,
    /// Silence after which a peer counts as lost.
    pub stall_timeout: Duration,
    /// Members of the control plane, `host:port`; empty: stand-alone.
    pub control_plane: Vec<String>,
    /// Folder with its certificates; `None`: plain connections on loopback, and certificates of the test on other hosts.
    pub tls: Option<PathBuf>,
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
    /// Certificates with which the test asks the admin port; `None`: plain.
    pub client_tls: Option<PathBuf>,
    /// Further options of the start.
    pub start: LaunchOptions,
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
            slack_delay: Duration::from_secs(1),
            stall_timeout: Duration::from_secs(2),
            control_plane: Vec::new(),
            tls: None,
            host: Host::LOOPBACK,
            session: String::new(),
            extra: String::new(),
        }
    }

    /// Returns the text of the file.
    pub fn text(&self, files: &AgentFiles) -> String {
        let config = configuration::AgentConfig {
            node: &self.node,
            socket: &files.socket,
            address: self.host.address(),
            arena: self.arena,
            region: self.region,
            pool: self.pool.map(|bytes| (files.pool.as_path(), bytes)),
            control_plane: self.control_plane.clone(),
            tls: self.tls.as_deref(),
        };
        config.text(&format!(
            "writeback.delay = \"{delay}\"\nwriteback.slack_delay = \"{slack}\"\npeers.stall_timeout = \"{stall}\"\n[pool]\nsegment_bytes = \"2MiB\"\n\
             reserve_bytes = \"1MiB\"\n[session]\n{session}\n{extra}\n",
            delay = Interval(self.writeback_delay),
            slack = Interval(self.slack_delay),
            stall = Interval(self.stall_timeout),
            session = self.session,
            extra = self.extra,
        ))
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
            client_tls: None,
            start: LaunchOptions::default(),
        }
    }
}
