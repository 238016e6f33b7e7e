//! An agent of a test: its files, its process, the ways to it.

use std::process::{Command, ExitStatus};

use reprise_client::ClientError;
use reprise_policy::Layout;
pub use rustix::process::Signal;

use crate::admin::Admin;
use crate::config::{AgentFiles, StartedWith};
use crate::engine::Engine;
use crate::process::{Refused, Running, Starting, binary};

/// An agent that runs, or was killed and can be started again.
#[derive(Debug)]
pub struct Agent {
    files: AgentFiles,
    running: Option<Running>,
    admin: Admin,
}

/// The command that runs an agent with the configuration of these files.
pub fn command(files: &AgentFiles) -> Command {
    let mut command = files.start.command(&binary("reprise-agent"));
    command.arg("--config").arg(&files.config).args(&files.start.arguments);
    files.host.command(command)
}

impl Agent {
    /// Waits until a started agent is ready.
    ///
    /// # Errors
    /// `Refused`: it ended instead.
    pub fn when_ready(files: AgentFiles, starting: Starting) -> Result<Agent, Refused> {
        let (running, ready) = starting.ready()?;
        let admin = Admin::at(ready["admin"].as_str().expect("the ready line names the admin port"));
        assert_eq!(ready["socket"].as_str(), files.socket.to_str(), "the ready line names the socket");
        Ok(Agent { files, running: Some(running), admin })
    }

    /// Its files.
    pub fn files(&self) -> &AgentFiles {
        &self.files
    }

    /// Starts it with something else from the next start on.
    pub fn set_start(&mut self, start: StartedWith) {
        self.files.start = start;
    }

    /// Its admin port.
    pub fn admin(&self) -> &Admin {
        &self.admin
    }

    /// Its process.
    ///
    /// # Panics
    /// When it was killed.
    pub fn running(&mut self) -> &mut Running {
        self.running.as_mut().expect("the agent runs")
    }

    /// SIGKILL.
    pub fn kill(&mut self) {
        self.running().kill();
        self.running = None;
    }

    /// Sends a signal while others use the agent.
    ///
    /// # Panics
    /// When it was killed.
    pub fn signal(&self, signal: Signal) {
        self.running.as_ref().expect("the agent runs").signal(signal);
    }

    /// SIGTERM; gives the exit status.
    pub fn terminate(&mut self) -> ExitStatus {
        let status = self.running().terminate();
        self.running = None;
        status
    }

    /// SIGTERM, which must end it in good order.
    pub fn stop(&mut self) {
        let status = self.terminate();
        assert!(status.success(), "an agent that is asked to stop ends with {status}");
    }

    /// SIGSTOP: its sockets stay open and nothing answers.
    pub fn freeze(&self) {
        self.running.as_ref().expect("the agent runs").pause();
    }

    /// SIGCONT.
    pub fn thaw(&self) {
        self.signal(Signal::CONT);
    }

    /// Starts the killed or stopped agent again on what it left behind, without waiting.
    pub fn begin_start(&self) -> Starting {
        assert!(self.running.is_none(), "one process at a time");
        Starting::spawn(command(&self.files), &self.files.log)
    }

    /// Starts the killed or stopped agent again.
    ///
    /// # Errors
    /// `Refused`: it does not want to.
    pub fn try_start(&mut self) -> Result<(), Refused> {
        *self = Agent::when_ready(self.files.clone(), self.begin_start())?;
        Ok(())
    }

    /// Starts the killed or stopped agent again; it must be able to.
    pub fn start(&mut self) {
        self.try_start().unwrap_or_else(|refused| panic!("the agent does not start again: {refused:?}"));
    }

    /// A session.
    ///
    /// # Errors
    /// As `Client::connect`.
    pub fn connect(&self, layout: Layout) -> Result<Engine, ClientError> {
        Engine::connect(&self.files.socket, layout)
    }

    /// A session of a tenant; there must be one.
    pub fn engine_of(&self, layout: Layout, tenant: &str) -> Engine {
        Engine::connect_as(&self.files.socket, layout, tenant)
            .unwrap_or_else(|error| panic!("the agent takes no session of {tenant}: {error}"))
    }

    /// A session; there must be one.
    pub fn engine(&self, layout: Layout) -> Engine {
        self.connect(layout).unwrap_or_else(|error| panic!("the agent takes no session: {error}"))
    }
}
