//! An agent of a test: its files, its process, its sessions and its admin port.

use std::process::{Command, ExitStatus};

use reprise_client::ClientError;
use reprise_identity::Expected;
use reprise_policy::Layout;
pub use rustix::process::Signal;

use crate::admin::Admin;
use crate::config::AgentFiles;
use crate::engine::Engine;
use crate::process::{ChildProcess, LaunchOptions, StartError, StartingProcess, binary};

/// An agent that runs, or that was killed and can be started again.
#[derive(Debug)]
pub struct Agent {
    files: AgentFiles,
    running: Option<ChildProcess>,
    admin: Admin,
}

/// The command that runs an agent with the configuration of these files.
pub fn command(files: &AgentFiles) -> Command {
    let launch = files.host.launch(files.start.clone());
    let mut command = launch.command(&binary("reprise-agent"));
    command.arg("--config").arg(&files.config).args(&launch.arguments);
    command
}

impl Agent {
    /// Waits until a started agent is ready.
    ///
    /// # Errors
    /// `StartError`: the agent exited instead.
    pub fn when_ready(files: AgentFiles, starting: StartingProcess) -> Result<Agent, StartError> {
        let (running, ready) = starting.ready()?;
        let admin = Admin::at(ready["admin"].as_str().expect("the ready line names the admin port"));
        let admin = match &files.client_tls {
            Some(folder) => admin.with_certificates(folder.clone(), Expected::AnyAgent),
            None => admin,
        };
        assert_eq!(ready["socket"].as_str(), files.socket.to_str(), "the ready line names the socket");
        Ok(Agent { files, running: Some(running), admin })
    }

    /// Returns the paths of the agent's files.
    pub fn files(&self) -> &AgentFiles {
        &self.files
    }

    /// Sets the launch options that take effect at the next start.
    pub fn set_launch_options(&mut self, start: LaunchOptions) {
        self.files.start = start;
    }

    /// Returns the agent's admin port.
    pub fn admin(&self) -> &Admin {
        &self.admin
    }

    /// Returns the agent's process.
    ///
    /// # Panics
    /// If the agent was killed.
    pub fn running(&mut self) -> &mut ChildProcess {
        self.running.as_mut().expect("the agent runs")
    }

    /// Sends SIGKILL and waits for the process to exit.
    pub fn kill(&mut self) {
        self.running().kill();
        self.running = None;
    }

    /// Sends a signal to the agent; other threads may be using it.
    ///
    /// # Panics
    /// If the agent was killed.
    pub fn signal(&self, signal: Signal) {
        self.running.as_ref().expect("the agent runs").signal(signal);
    }

    /// Sends SIGTERM, waits for the process to exit, and returns its exit status.
    pub fn terminate(&mut self) -> ExitStatus {
        let status = self.running().terminate();
        self.running = None;
        status
    }

    /// Sends SIGTERM; the agent must exit with status 0.
    pub fn stop(&mut self) {
        let status = self.terminate();
        assert!(status.success(), "the agent exited after SIGTERM with {status}");
    }

    /// Sends SIGSTOP: the sockets stay open and nothing responds.
    pub fn freeze(&self) {
        self.running.as_ref().expect("the agent runs").pause();
    }

    /// Sends SIGCONT to the stopped agent.
    pub fn thaw(&self) {
        self.signal(Signal::CONT);
    }

    /// Starts the killed or stopped agent again with its existing files, without waiting.
    pub fn begin_start(&self) -> StartingProcess {
        assert!(self.running.is_none(), "the process is already running");
        StartingProcess::spawn(command(&self.files), &self.files.log)
    }

    /// Starts the killed or stopped agent again and waits until it is ready.
    ///
    /// # Errors
    /// `StartError`: the agent exited instead of becoming ready.
    pub fn try_start(&mut self) -> Result<(), StartError> {
        *self = Agent::when_ready(self.files.clone(), self.begin_start())?;
        Ok(())
    }

    /// Starts the killed or stopped agent again; it must become ready.
    pub fn start(&mut self) {
        self.try_start().unwrap_or_else(|refused| panic!("the agent does not start again: {refused:?}"));
    }

    /// Opens a session with the agent.
    ///
    /// # Errors
    /// As `Client::connect`.
    pub fn connect(&self, layout: Layout) -> Result<Engine, ClientError> {
        Engine::connect(&self.files.socket, layout)
    }

    /// Opens a session of a tenant, which must succeed.
    pub fn engine_of(&self, layout: Layout, tenant: &str) -> Engine {
        Engine::connect_as(&self.files.socket, layout, tenant)
            .unwrap_or_else(|error| panic!("cannot open a session of {tenant}: {error}"))
    }

    /// Opens a session, which must succeed.
    pub fn engine(&self, layout: Layout) -> Engine {
        self.connect(layout).unwrap_or_else(|error| panic!("cannot open a session: {error}"))
    }
}
