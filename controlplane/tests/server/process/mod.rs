//! A control-plane member as a separate process.

use std::io::{BufRead, BufReader, Read, Seek};
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use reprise_proto::controlplane::membership_client::MembershipClient;
use tonic::transport::Channel;

/// Time limit for any event that must happen.
pub(crate) const PATIENCE: Duration = Duration::from_secs(10);

/// A running process; killed when dropped.
pub(crate) struct Process {
    pub(crate) child: Child,
    pub(crate) grpc: String,
}

impl Process {
    /// Starts it and waits for the ready line.
    pub(crate) fn start(config: &Path) -> Process {
        Process::start_command(command(config))
    }

    pub(crate) fn start_command(mut command: Command) -> Process {
        let mut log = tempfile::tempfile().expect("a file");
        let errors = log.try_clone().expect("a descriptor");
        let mut child = command.stdout(Stdio::piped()).stderr(errors).spawn().expect("spawned");
        let mut line = String::new();
        BufReader::new(child.stdout.take().expect("piped")).read_line(&mut line).expect("a line");
        let ready: serde_json::Value = serde_json::from_str(&line).unwrap_or_else(|_| {
            let mut words = String::new();
            log.rewind().and_then(|()| log.read_to_string(&mut words)).expect("the log reads");
            panic!("invalid ready line {line:?}; log of the process: {words}")
        });
        assert_eq!(ready["ready"], true, "{line}");
        assert!(ready["admin"].as_str().is_some_and(|address| address.starts_with("127.0.0.1:")), "{line}");
        let grpc = ready["grpc"].as_str().expect("an address").to_owned();
        Process { child, grpc }
    }

    pub(crate) fn signal(&self, name: &str) {
        let pid = self.child.id().to_string();
        let status = Command::new("kill").args([format!("-{name}"), pid]).status().expect("kill runs");
        assert!(status.success());
    }

    /// Waits until the process exits by itself.
    pub(crate) fn end(&mut self) -> ExitStatus {
        let give_up = Instant::now() + PATIENCE;
        loop {
            if let Some(status) = self.child.try_wait().expect("own child process") {
                return status;
            }
            assert!(Instant::now() < give_up, "the process did not exit");
            std::thread::yield_now();
        }
    }

    pub(crate) async fn client(&self) -> MembershipClient<Channel> {
        MembershipClient::connect(format!("http://{}", self.grpc)).await.expect("connected")
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
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
    let text = format!("listen = '127.0.0.1:0'\nadmin = '127.0.0.1:0'\n[store]\n{store}\n");
    std::fs::write(&path, text).expect("written");
    path
}
