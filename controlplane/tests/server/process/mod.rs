//! A control-plane member as a separate process.

use std::path::Path;
use std::process::{Command, ExitStatus};
use std::time::Duration;

use reprise_proto::controlplane::membership_client::MembershipClient;
use reprise_testkit::process::{ChildProcess, StartingProcess};
use tonic::transport::Channel;

/// Time limit for any event that must happen. A busy machine delays events by seconds.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// A running process; killed when dropped.
pub(crate) struct Process {
    pub(crate) child: ChildProcess,
    pub(crate) grpc: String,
}

impl Process {
    /// Starts it and waits for the ready line.
    pub(crate) fn start(config: &Path) -> Process {
        Process::start_command(command(config))
    }

    pub(crate) fn start_command(command: Command) -> Process {
        let log = tempfile::NamedTempFile::new().expect("a file");
        let started = StartingProcess::spawn(command, log.path()).ready();
        let (child, ready) = started.unwrap_or_else(|error| panic!("the member does not start: {error:?}"));
        assert!(ready["admin"].as_str().is_some_and(|address| address.starts_with("127.0.0.1:")), "{ready}");
        Process { child, grpc: ready["grpc"].as_str().expect("an address").to_owned() }
    }

    /// Waits until the process exits by itself.
    pub(crate) fn end(&mut self) -> ExitStatus {
        self.child.wait(PATIENCE).expect("the process exits")
    }

    pub(crate) async fn client(&self) -> MembershipClient<Channel> {
        MembershipClient::connect(format!("http://{}", self.grpc)).await.expect("connected")
    }
}

/// Command that runs a member.
pub(crate) fn command(config: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_reprise-controlplane"));
    command.arg("--config").arg(config);
    command
}

/// Writes a configuration with this `[store]`, on free ports.
pub(crate) fn write_config(directory: &Path, store: &str) -> std::path::PathBuf {
    let path = directory.join("config.toml");
    let text = format!("listen = '127.0.0.1:0'\nadmin = '127.0.0.1:0'\ntls.plain = true\n[store]\n{store}\n");
    std::fs::write(&path, text).expect("written");
    path
}
