//! Environment of one test: a folder on a real disk, the processes in it, and rules for their logs.
//!
//! The folder is below `$REPRISE_CACHE/e2e` (default `~/.cache/reprise/e2e`) and not in `/tmp`, which may be
//! memory: the tests cover direct I/O. It is removed at the end. Dropping the environment checks the logs, so
//! it must be created before, and therefore dropped after, the processes in it.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use reprise_identity::Role;
use reprise_testkit::certificates::Certificates;
use reprise_testkit::cluster::cache_directory;
use reprise_testkit::etcd::{self, Etcd, Setup};
use tempfile::TempDir;

use crate::agent::{self, Agent};
use crate::config::{AgentConfig, AgentFiles};
use crate::control_plane::{Connections, ControlPlane, Store};
use crate::failure_report;
use crate::fault_proxy::FaultProxy;
use crate::host::Host;
use crate::kubernetes::{self, ApiServer};
use crate::logs::Logs;
use crate::operator::{OperatorFiles, StartedOperators};
use crate::process::{LaunchOptions, StartError, StartingProcess};
use crate::seed::print_line;

/// The environment of one test.
#[derive(Debug)]
pub struct TestEnv {
    folder: TempDir,
    logs: Mutex<Logs>,
    /// Certificates of processes on other hosts than loopback.
    certificates: OnceLock<Certificates>,
    operators: StartedOperators,
}

/// Starts an etcd of a test on a host, with its files in `folder`.
pub(crate) fn start_etcd(folder: &Path, host: &Host, launch: &LaunchOptions) -> Etcd {
    let launch = host.launch(launch.clone());
    let setup = Setup::on_loopback(etcd::built_binary(), folder);
    Etcd::start(Setup { address: host.address(), log_level: "error", launch, ..setup })
}

impl TestEnv {
    /// Creates an environment on a real disk.
    pub fn new() -> TestEnv {
        TestEnv::under(&cache_directory().join("e2e"))
    }

    /// Creates an environment with an agent of this name.
    pub fn with_agent(node: &str) -> (TestEnv, Agent) {
        let env = TestEnv::new();
        let agent = env.agent(&AgentConfig::named(node));
        (env, agent)
    }

    /// Creates an environment in a folder that every user of the machine may enter.
    pub fn for_every_user() -> TestEnv {
        let env = TestEnv::under(&std::env::temp_dir());
        let open = std::os::unix::fs::PermissionsExt::from_mode(0o755);
        fs::set_permissions(env.folder(), open).expect("the test's folder can be changed");
        env
    }

    fn under(parent: &Path) -> TestEnv {
        failure_report::remember_panics();
        fs::create_dir_all(parent).expect("a folder can be created");
        let folder = tempfile::Builder::new().prefix("w").tempdir_in(parent).expect("a folder for a test");
        TestEnv {
            folder,
            logs: Mutex::default(),
            certificates: OnceLock::new(),
            operators: StartedOperators::default(),
        }
    }

    /// Returns the path of the folder.
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// Allows warnings and errors that contain these words.
    pub fn allow(&self, words: &str) {
        self.logs().allow(words);
    }

    /// Requires a log line with these words, which may be a warning or error.
    pub fn require(&self, words: &str) {
        self.logs().require(words);
    }

    /// Writes the configuration of an agent.
    pub fn configure(&self, config: &AgentConfig) -> AgentFiles {
        let mut files =
            AgentFiles { host: config.host.clone(), ..AgentFiles::within(self.folder(), &config.node) };
        if let Some(folder) = &config.pool_folder {
            files.pool = folder.join(format!("{}.pool", config.node));
        }
        let mut config = config.clone();
        if config.host.needs_certificates() && config.tls.is_none() {
            config.tls = Some(self.issue(&Role::Agent(config.node.clone())));
            files.client_tls = Some(self.issue(&Role::Admin));
        }
        fs::write(&files.config, config.text(&files)).expect("the folder is writable");
        files
    }

    /// Issues a certificate for a process on another host than loopback, or for a client of it.
    fn issue(&self, role: &Role) -> PathBuf {
        let created = || Certificates::create(&self.folder().join("hosts")).expect("an authority");
        self.certificates.get_or_init(created).issue(role).expect("the folder is writable")
    }

    /// Starts an agent, which must become ready.
    pub fn agent(&self, config: &AgentConfig) -> Agent {
        let files = self.configure(config);
        self.launch(&files, agent::command(&files))
            .unwrap_or_else(|refused| panic!("cannot start the agent: {refused:?}"))
    }

    /// Starts an agent with launch options, which must become ready.
    pub fn agent_with(&self, config: &AgentConfig, start: LaunchOptions) -> Agent {
        let files = AgentFiles { start, ..self.configure(config) };
        self.launch(&files, agent::command(&files))
            .unwrap_or_else(|refused| panic!("cannot start the agent: {refused:?}"))
    }

    /// Runs a command that starts an agent with these files, and waits until it is ready.
    ///
    /// # Errors
    /// `StartError`: the agent exited instead of becoming ready.
    pub fn launch(&self, files: &AgentFiles, command: Command) -> Result<Agent, StartError> {
        self.logs().add(files.log.clone());
        Agent::when_ready(files.clone(), StartingProcess::spawn(command, &files.log))
    }

    /// Starts an agent, which must refuse to start.
    pub fn refusal(&self, config: &AgentConfig) -> StartError {
        let files = self.configure(config);
        self.refusal_of(&files, agent::command(&files))
    }

    /// Runs a command that starts an agent, which must refuse to start.
    pub fn refusal_of(&self, files: &AgentFiles, command: Command) -> StartError {
        match self.launch(files, command) {
            Ok(_) => panic!("the agent starts with {}", files.config.display()),
            Err(refused) => refused,
        }
    }

    /// Starts a control plane with one member.
    pub fn control_plane(&self, store: Store) -> ControlPlane {
        self.control_plane_with(LaunchOptions::default(), store)
    }

    /// Starts a control plane with one member and with launch options.
    pub fn control_plane_with(&self, launch: LaunchOptions, store: Store) -> ControlPlane {
        self.logs().add(self.folder().join("controlplane.log"));
        ControlPlane::start_in(self.folder(), launch, store)
    }

    /// Starts a control plane with its store in memory and the certificates in `tls`.
    pub fn control_plane_with_tls(&self, tls: &Path) -> ControlPlane {
        self.logs().add(self.folder().join("controlplane.log"));
        ControlPlane::start_with_tls(self.folder(), tls)
    }

    /// Starts an etcd on loopback.
    pub fn etcd(&self) -> Etcd {
        self.etcd_at(&Host::LOOPBACK)
    }

    /// Starts an etcd with launch options.
    pub fn etcd_with(&self, launch: &LaunchOptions) -> Etcd {
        start_etcd(self.folder(), &Host::LOOPBACK, launch)
    }

    /// Starts an etcd on a host.
    pub fn etcd_at(&self, host: &Host) -> Etcd {
        start_etcd(self.folder(), host, &LaunchOptions::default())
    }

    /// Starts a member of the control plane with the etcd at `endpoint`.
    pub fn member(&self, name: &str, endpoint: &str) -> ControlPlane {
        self.member_at(&Host::LOOPBACK, name, endpoint)
    }

    /// Starts a member on a host.
    pub fn member_at(&self, host: &Host, name: &str, endpoint: &str) -> ControlPlane {
        self.start_member(host, LaunchOptions::default(), name, endpoint)
    }

    /// Starts a member with launch options.
    pub fn member_with(&self, launch: LaunchOptions, name: &str, endpoint: &str) -> ControlPlane {
        self.start_member(&Host::LOOPBACK, launch, name, endpoint)
    }

    fn start_member(&self, host: &Host, launch: LaunchOptions, name: &str, endpoint: &str) -> ControlPlane {
        self.logs().add(self.folder().join(format!("{name}.log")));
        let tls =
            host.needs_certificates().then(|| [&Role::Member, &Role::Admin].map(|role| self.issue(role)));
        let [own, client] = tls.map_or([None, None], |folders| folders.map(Some));
        ControlPlane::member(self.folder(), (host, launch), name, endpoint, Connections { own, client })
    }

    /// Starts an API server of Kubernetes with its own etcd.
    pub fn api_server(&self) -> ApiServer {
        let folder = self.folder().join("kubernetes");
        for log in kubernetes::logs_in(&folder) {
            self.logs().add(log);
        }
        ApiServer::start_in(&folder, Host::LOOPBACK.address())
    }

    /// Adds the log file of a process that another program starts.
    pub fn watch_log(&self, file: PathBuf) {
        self.logs().add(file);
    }

    /// Prepares an operator for an API server, with its lease in a namespace.
    pub fn operator(&self, server: &ApiServer, name: &str, namespace: &str) -> OperatorFiles {
        let files = OperatorFiles::new(self.folder(), server, (name, namespace), self.operators.clone());
        self.logs().add(files.log().to_owned());
        files
    }

    /// Returns the operators that were started with plain metrics.
    pub fn operators(&self) -> &StartedOperators {
        &self.operators
    }

    /// Starts a proxy between an operator and an API server, open and without faults.
    pub fn fault_proxy(&self, server: &ApiServer) -> FaultProxy {
        FaultProxy::start(server, self.folder())
    }

    /// Prints the ends of all logs and the error of a test that has just panicked. For tests that share this
    /// environment: one that is dropped in a panic does it by itself.
    pub fn show_failure(&self, test: &str) {
        failure_report::print(test, &self.logs());
    }

    fn logs(&self) -> MutexGuard<'_, Logs> {
        self.logs.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Default for TestEnv {
    fn default() -> TestEnv {
        TestEnv::new()
    }
}

impl Drop for TestEnv {
    fn drop(&mut self) {
        let logs = self.logs();
        if std::thread::panicking() {
            return failure_report::print(&failure_report::test(), &logs);
        }
        let complaints = logs.violations();
        if !complaints.is_empty() {
            print_line(&logs.tails());
            panic!("unexpected or missing log lines:\n{}", complaints.join("\n"));
        }
    }
}
