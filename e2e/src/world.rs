//! Where one test happens: a folder on a real disk, the processes in it, and what their logs may say.
//!
//! The folder lies under `$REPRISE_CACHE/e2e` (by default `~/.cache/reprise/e2e`) and not in `/tmp`, which may be memory: the
//! agents' direct I/O is part of what is tested. It is removed at the end. A world that is dropped checks the logs; so
//! it is made before, and therefore dropped after, the agents in it.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, MutexGuard, PoisonError};

use tempfile::TempDir;

use crate::agent::{self, Agent};
use crate::config::{AgentConfig, AgentFiles, StartedWith};
use crate::control_plane::{ControlPlane, Store};
use crate::etcd::Etcd;
use crate::failure;
use crate::host::Host;
use crate::interposer::Interposer;
use crate::kubernetes::{self, ApiServer};
use crate::logs::Logs;
use crate::operator::OperatorFiles;
use crate::process::{Refused, Starting};
use crate::seed::say;

/// The surroundings of one test.
#[derive(Debug)]
pub struct World {
    folder: TempDir,
    logs: Mutex<Logs>,
}

/// Where this machine's clusters, downloads and builds live.
pub(crate) fn cache() -> PathBuf {
    let home =
        || std::env::var_os("HOME").map_or_else(std::env::temp_dir, PathBuf::from).join(".cache/reprise");
    std::env::var_os("REPRISE_CACHE").map_or_else(home, PathBuf::from)
}

impl World {
    /// An empty world on a real disk.
    pub fn new() -> World {
        World::under(&cache().join("e2e"))
    }

    /// An empty world in a folder that every user of the machine may enter.
    pub fn for_every_user() -> World {
        let world = World::under(&std::env::temp_dir());
        let open = std::os::unix::fs::PermissionsExt::from_mode(0o755);
        fs::set_permissions(world.folder(), open).expect("one's own folder takes permissions");
        world
    }

    fn under(parent: &Path) -> World {
        failure::remember_panics();
        fs::create_dir_all(parent).expect("a folder for tests can be made");
        let folder = tempfile::Builder::new().prefix("w").tempdir_in(parent).expect("a folder for a test");
        World { folder, logs: Mutex::default() }
    }

    /// The folder.
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// Warnings and errors with these words may be logged.
    pub fn allow(&self, words: &str) {
        self.logs().allow(words);
    }

    /// A line with these words must be logged; it may be a warning or error.
    pub fn require(&self, words: &str) {
        self.logs().require(words);
    }

    /// Writes an agent's configuration.
    pub fn configure(&self, config: &AgentConfig) -> AgentFiles {
        let mut files =
            AgentFiles { host: config.host.clone(), ..AgentFiles::within(self.folder(), &config.node) };
        if let Some(folder) = &config.pool_folder {
            files.pool = folder.join(format!("{}.pool", config.node));
        }
        fs::write(&files.config, config.text(&files)).expect("a configuration can be written");
        files
    }

    /// Starts an agent; it must start.
    pub fn agent(&self, config: &AgentConfig) -> Agent {
        let files = self.configure(config);
        self.launch(&files, agent::command(&files))
            .unwrap_or_else(|refused| panic!("the agent does not start: {refused:?}"))
    }

    /// Starts an agent that is started with something besides; it must start.
    pub fn agent_with(&self, config: &AgentConfig, start: StartedWith) -> Agent {
        let files = AgentFiles { start, ..self.configure(config) };
        self.launch(&files, agent::command(&files))
            .unwrap_or_else(|refused| panic!("the agent does not start: {refused:?}"))
    }

    /// Runs a command that is an agent with these files.
    ///
    /// # Errors
    /// `Refused`: it ended instead of becoming ready.
    pub fn launch(&self, files: &AgentFiles, command: Command) -> Result<Agent, Refused> {
        self.logs().add(files.log.clone());
        Agent::when_ready(files.clone(), Starting::spawn(command, &files.log))
    }

    /// Starts an agent that must refuse to.
    pub fn refusal(&self, config: &AgentConfig) -> Refused {
        let files = self.configure(config);
        self.refusal_of(&files, agent::command(&files))
    }

    /// Runs a command that is an agent and must refuse to start.
    pub fn refusal_of(&self, files: &AgentFiles, command: Command) -> Refused {
        match self.launch(files, command) {
            Ok(_) => panic!("the agent starts with {}", files.config.display()),
            Err(refused) => refused,
        }
    }

    /// Starts a control plane.
    pub fn control_plane(&self, store: Store) -> ControlPlane {
        self.control_plane_with(StartedWith::default(), store)
    }

    /// Starts a control plane that is started with something besides.
    pub fn control_plane_with(&self, started: StartedWith, store: Store) -> ControlPlane {
        self.logs().add(self.folder().join("controlplane.log"));
        ControlPlane::start_in(self.folder(), started, store)
    }

    /// Starts an etcd.
    pub fn etcd(&self) -> Etcd {
        self.etcd_at(&Host::LOOPBACK)
    }

    /// Starts an etcd that is started with something besides.
    pub fn etcd_with(&self, started: &StartedWith) -> Etcd {
        Etcd::start_with(self.folder(), &Host::LOOPBACK, started)
    }

    /// Starts an etcd on a host.
    pub fn etcd_at(&self, host: &Host) -> Etcd {
        Etcd::start_in(self.folder(), host)
    }

    /// Starts a member of the control plane on an etcd, which is at `endpoint`.
    pub fn member(&self, name: &str, endpoint: &str) -> ControlPlane {
        self.member_at(&Host::LOOPBACK, name, endpoint)
    }

    /// Starts a member on a host.
    pub fn member_at(&self, host: &Host, name: &str, endpoint: &str) -> ControlPlane {
        self.start_member(host, StartedWith::default(), name, endpoint)
    }

    /// Starts a member that is started with something besides.
    pub fn member_with(&self, started: StartedWith, name: &str, endpoint: &str) -> ControlPlane {
        self.start_member(&Host::LOOPBACK, started, name, endpoint)
    }

    fn start_member(&self, host: &Host, started: StartedWith, name: &str, endpoint: &str) -> ControlPlane {
        self.logs().add(self.folder().join(format!("{name}.log")));
        ControlPlane::member(self.folder(), host, started, name, endpoint)
    }

    /// Starts an API server of Kubernetes, with an etcd of its own.
    pub fn api_server(&self) -> ApiServer {
        let folder = self.folder().join("kubernetes");
        for log in kubernetes::logs_in(&folder) {
            self.logs().add(log);
        }
        ApiServer::start_in(&folder, Host::LOOPBACK.address())
    }

    /// A process logs there from now on.
    pub(crate) fn watch_log(&self, file: PathBuf) {
        self.logs().add(file);
    }

    /// Files of an operator on an API server, with its lease in a namespace.
    pub fn operator(&self, server: &ApiServer, name: &str, namespace: &str) -> OperatorFiles {
        let files = OperatorFiles::new(self.folder(), server, name, namespace);
        self.logs().add(files.log().to_owned());
        files
    }

    /// Something between an operator and an API server, open and without faults.
    pub fn interposer(&self, server: &ApiServer) -> Interposer {
        Interposer::to(server, self.folder())
    }

    /// Prints the ends of all logs and the error of a test that has just panicked, for tests that share this world. A world that is dropped in a panic
    /// does so by itself.
    pub fn show_failure(&self, test: &str) {
        failure::print(test, &self.logs());
    }

    fn logs(&self) -> MutexGuard<'_, Logs> {
        self.logs.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Default for World {
    fn default() -> World {
        World::new()
    }
}

impl Refused {
    /// Checks exit code and words of the text.
    ///
    /// # Panics
    /// When they are others.
    pub fn assert_says(&self, code: i32, words: &[&str]) {
        assert_eq!(self.code, Some(code), "exit code of: {}", self.text);
        for word in words {
            assert!(self.text.contains(word), "no '{word}' in: {}", self.text);
        }
    }
}

impl Drop for World {
    fn drop(&mut self) {
        let logs = self.logs();
        if std::thread::panicking() {
            return failure::print(&failure::test(), &logs);
        }
        let complaints = logs.complaints();
        if !complaints.is_empty() {
            say(&logs.tails());
            panic!("the logs are not as they should be:\n{}", complaints.join("\n"));
        }
    }
}
