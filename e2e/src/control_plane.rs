//! A member of the control plane, as a process of a test.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use reprise_identity::{Expected, Role};
use reprise_testkit::configuration::{MemberConfig, StoreChoice};
use rustix::process::Signal;

use crate::admin::Admin;
use crate::host::Host;
use crate::process::{ChildProcess, LaunchOptions, StartError, StartingProcess, binary};
use crate::wait::PATIENCE;

/// Name of the program.
const PROGRAM: &str = "reprise-controlplane";

/// Store of a control plane with one member.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Store {
    /// A file, which survives a restart.
    Embedded,
    /// Memory, which is lost with the process.
    Memory,
}

/// A control plane that runs, or that was killed and can be started again with the same addresses.
#[derive(Debug)]
pub struct ControlPlane {
    host: Host,
    started: LaunchOptions,
    config: PathBuf,
    log: PathBuf,
    running: Option<ChildProcess>,
    grpc: String,
    admin: Admin,
    tls: Connections,
}

/// Certificates of a member and of the test's clients.
#[derive(Clone, Debug, Default)]
pub struct Connections {
    /// Folder of the member; `None`: it serves plain connections.
    pub own: Option<PathBuf>,
    /// Folder of the clients of its ports; `None`: the test's default clients are plain.
    pub client: Option<PathBuf>,
}

/// Returns the command that runs a control plane with a configuration.
pub fn command(config: &Path) -> Command {
    let mut command = Command::new(binary(PROGRAM));
    command.arg("--config").arg(config);
    command
}

impl ControlPlane {
    /// Starts a control plane with its files in `folder`.
    ///
    /// # Panics
    /// If it does not start.
    pub fn start_in(folder: &Path, started: LaunchOptions, store: Store) -> ControlPlane {
        let store = match store {
            Store::Embedded => StoreChoice::Embedded(folder.join("controlplane.store")),
            Store::Memory => StoreChoice::Memory,
        };
        ControlPlane::start(folder, (&Host::LOOPBACK, started), None, &store, Connections::default())
    }

    /// Starts a control plane with its store in memory and the certificates in `tls`.
    ///
    /// # Panics
    /// If it does not start.
    pub fn start_with_tls(folder: &Path, tls: &Path) -> ControlPlane {
        let tls = Connections { own: Some(tls.to_owned()), client: None };
        let launch = (&Host::LOOPBACK, LaunchOptions::default());
        ControlPlane::start(folder, launch, None, &StoreChoice::Memory, tls)
    }

    /// Starts a member on a host, with launch options, its files in `folder`, and an etcd as its store.
    ///
    /// # Panics
    /// If it does not start.
    pub fn member(
        folder: &Path,
        launch: (&Host, LaunchOptions),
        name: &str,
        etcd: &str,
        tls: Connections,
    ) -> ControlPlane {
        ControlPlane::start(folder, launch, Some(name), &StoreChoice::Etcd(etcd.to_owned()), tls)
    }

    /// Starts a member of this name with its files in `folder`.
    fn start(
        folder: &Path,
        (host, started): (&Host, LaunchOptions),
        name: Option<&str>,
        store: &StoreChoice,
        tls: Connections,
    ) -> ControlPlane {
        let file = name.unwrap_or("controlplane");
        let (config, log) = (folder.join(format!("{file}.toml")), folder.join(format!("{file}.log")));
        let text = |listen: &str, admin: &str| {
            MemberConfig { listen, admin, store, name, tls: tls.own.as_deref() }.text("")
        };
        let any_port = format!("{}:0", host.address());
        fs::write(&config, text(&any_port, &any_port)).expect("a configuration can be written");
        let (running, grpc, admin) = start(host, &started, &config, &log)
            .unwrap_or_else(|refused| panic!("the control plane does not start: {refused:?}"));
        // Fixes the ports, so that clients find the member again after a restart.
        fs::write(&config, text(&grpc, &admin)).expect("a configuration can be written");
        let admin = Admin::at(&admin);
        let admin = match &tls.client {
            Some(folder) => admin.with_certificates(folder.clone(), Expected::Role(Role::Member)),
            None => admin,
        };
        ControlPlane { host: host.clone(), started, config, log, running: Some(running), grpc, admin, tls }
    }

    /// Returns `host:port` of the gRPC services.
    pub fn address(&self) -> &str {
        &self.grpc
    }

    /// Returns the folder of certificates with which a command asks the member; `None`: plain connections.
    pub fn client_tls(&self) -> Option<&Path> {
        self.tls.client.as_deref()
    }

    /// Returns the member's admin port.
    pub fn admin(&self) -> &Admin {
        &self.admin
    }

    /// Sets the launch options that take effect at the next start.
    pub fn set_launch_options(&mut self, started: LaunchOptions) {
        self.started = started;
    }

    /// Sends SIGKILL and waits for the process to exit.
    pub fn kill(&mut self) {
        self.running.as_mut().expect("the control plane runs").kill();
        self.running = None;
    }

    /// Returns whether the process was started and not killed.
    pub fn is_running(&self) -> bool {
        self.running.is_some()
    }

    /// Waits until the process exits by itself with an error.
    ///
    /// # Panics
    /// If it does not exit, or exits with success.
    pub fn wait_for_end(&mut self) {
        let status = self.running.as_mut().expect("the control plane runs").wait(PATIENCE);
        assert!(
            status.is_some_and(|status| !status.success()),
            "the member still runs, or exited with success"
        );
        self.running = None;
    }

    /// Sends SIGSTOP: connections stay open and nothing responds.
    pub fn pause(&self) {
        self.running.as_ref().expect("the control plane runs").pause();
    }

    /// Sends SIGCONT to the stopped process.
    pub fn resume(&self) {
        self.running.as_ref().expect("the control plane runs").signal(Signal::CONT);
    }

    /// Starts the killed member again with its addresses.
    ///
    /// # Panics
    /// If it does not start.
    pub fn restart(&mut self) {
        assert!(self.running.is_none(), "the process is already running");
        let (running, grpc, _) = start(&self.host, &self.started, &self.config, &self.log)
            .unwrap_or_else(|refused| panic!("the control plane does not start again: {refused:?}"));
        assert_eq!(grpc, self.grpc, "the configured addresses are used");
        self.running = Some(running);
    }

    /// Returns whether the member offers a node to others; `None` if it does not know the name.
    pub fn offers(&self, node: &str) -> Option<bool> {
        let nodes = self.admin.json("/nodes");
        let nodes = nodes.as_array().expect("a list of nodes");
        nodes.iter().find(|found| found["name"] == node).and_then(|found| found["alive"].as_bool())
    }
}

fn start(
    host: &Host,
    started: &LaunchOptions,
    config: &Path,
    log: &Path,
) -> Result<(ChildProcess, String, String), StartError> {
    let launch = host.launch(started.clone());
    let mut command = launch.command(&binary(PROGRAM));
    command.arg("--config").arg(config).args(&launch.arguments);
    let (running, ready) = StartingProcess::spawn(command, log).ready()?;
    let text = |field: &str| ready[field].as_str().expect("the ready line names its ports").to_owned();
    Ok((running, text("grpc"), text("admin")))
}
