//! The control plane of a test.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::admin::Admin;
use crate::config::{StartedWith, quoted};
use crate::host::Host;
use crate::process::{Refused, Running, Starting, binary};
use crate::wait::PATIENCE;
use rustix::process::Signal;

/// Its program.
const PROGRAM: &str = "reprise-controlplane";

/// Where a control plane keeps node numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Store {
    /// In a file: a restart remembers.
    Embedded,
    /// A restart has forgotten everything.
    Memory,
}

/// A control plane that runs, or was killed and can be started again under the same addresses.
#[derive(Debug)]
pub struct ControlPlane {
    host: Host,
    started: StartedWith,
    config: PathBuf,
    log: PathBuf,
    running: Option<Running>,
    grpc: String,
    admin: Admin,
}

/// The command that runs a control plane with a configuration.
pub fn command(config: &Path) -> Command {
    let mut command = Command::new(binary(PROGRAM));
    command.arg("--config").arg(config);
    command
}

impl ControlPlane {
    /// Starts one with its files in `folder`.
    ///
    /// # Panics
    /// When it does not start.
    pub fn start_in(folder: &Path, started: StartedWith, store: Store) -> ControlPlane {
        let store = match store {
            Store::Embedded => {
                format!("kind = \"embedded\"\npath = {}\n", quoted(&folder.join("controlplane.store")))
            }
            Store::Memory => "kind = \"memory\"\n".to_owned(),
        };
        ControlPlane::start(folder, &Host::LOOPBACK, started, "controlplane", &store)
    }

    /// Starts a member on a host, with something besides, its files in `folder` and its store in an etcd.
    ///
    /// # Panics
    /// When it does not start.
    pub fn member(folder: &Path, host: &Host, started: StartedWith, name: &str, etcd: &str) -> ControlPlane {
        let store = format!("kind = \"etcd\"\nendpoints = [\"{etcd}\"]\n[member]\nname = \"{name}\"\n");
        ControlPlane::start(folder, host, started, name, &store)
    }

    /// `sections`: that of the store first.
    fn start(folder: &Path, host: &Host, started: StartedWith, name: &str, sections: &str) -> ControlPlane {
        let config = folder.join(format!("{name}.toml"));
        let log = folder.join(format!("{name}.log"));
        let text = |grpc: &str, admin: &str| {
            format!("listen = \"{grpc}\"\nadmin = \"{admin}\"\n[store]\n{sections}")
        };
        let any_port = format!("{}:0", host.address());
        fs::write(&config, text(&any_port, &any_port)).expect("a configuration can be written");
        let (running, grpc, admin) = start(host, &started, &config, &log)
            .unwrap_or_else(|refused| panic!("the control plane does not start: {refused:?}"));
        // Whoever knows it finds it again after a restart.
        fs::write(&config, text(&grpc, &admin)).expect("a configuration can be written");
        let (host, admin) = (host.clone(), Admin::at(&admin));
        ControlPlane { host, started, config, log, running: Some(running), grpc, admin }
    }

    /// `host:port` of its services.
    pub fn address(&self) -> &str {
        &self.grpc
    }

    /// Its admin port.
    pub fn admin(&self) -> &Admin {
        &self.admin
    }

    /// Starts it with something else from the next start on.
    pub fn set_start(&mut self, started: StartedWith) {
        self.started = started;
    }

    /// SIGKILL.
    pub fn kill(&mut self) {
        self.running.as_mut().expect("the control plane runs").kill();
        self.running = None;
    }

    /// Whether it was not killed.
    pub fn is_running(&self) -> bool {
        self.running.is_some()
    }

    /// Waits until it ends by itself, with an error.
    ///
    /// # Panics
    /// When it does not.
    pub fn wait_for_end(&mut self) {
        let status = self.running.as_mut().expect("the control plane runs").wait(PATIENCE);
        assert!(status.is_some_and(|status| !status.success()), "it goes on, or says that all is well");
        self.running = None;
    }

    /// SIGSTOP: it keeps its connections and answers nothing.
    pub fn pause(&self) {
        self.running.as_ref().expect("the control plane runs").pause();
    }

    /// SIGCONT.
    pub fn resume(&self) {
        self.running.as_ref().expect("the control plane runs").signal(Signal::CONT);
    }

    /// Starts the killed one again under its addresses.
    ///
    /// # Panics
    /// When it does not start.
    pub fn restart(&mut self) {
        assert!(self.running.is_none(), "one process at a time");
        let (running, grpc, _) = start(&self.host, &self.started, &self.config, &self.log)
            .unwrap_or_else(|refused| panic!("the control plane does not start again: {refused:?}"));
        assert_eq!(grpc, self.grpc, "configured addresses are taken");
        self.running = Some(running);
    }

    /// Whether it offers a node to others; `None` when it does not know the name.
    pub fn offers(&self, node: &str) -> Option<bool> {
        let nodes = self.admin.json("/nodes");
        let nodes = nodes.as_array().expect("a list of nodes");
        nodes.iter().find(|found| found["name"] == node).and_then(|found| found["alive"].as_bool())
    }
}

fn start(
    host: &Host,
    started: &StartedWith,
    config: &Path,
    log: &Path,
) -> Result<(Running, String, String), Refused> {
    let mut command = started.command(&binary(PROGRAM));
    command.arg("--config").arg(config).args(&started.arguments);
    let (running, ready) = Starting::spawn(host.command(command), log).ready()?;
    let text = |field: &str| ready[field].as_str().expect("the ready line names its ports").to_owned();
    Ok((running, text("grpc"), text("admin")))
}
