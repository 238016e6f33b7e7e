//! A test that starts itself again as a client process, which a test can kill.

use std::collections::BTreeSet;
use std::io::{BufRead, BufReader};
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use rand::SeedableRng;
use rand::rngs::StdRng;
use reprise_e2e::Agent;

const SIGKILL: i32 = 9;

/// The name of a test, and the variable that makes a process of it a client.
#[derive(Clone, Copy)]
pub(super) struct ClientTest {
    pub(super) name: &'static str,
    pub(super) variable: &'static str,
}

/// What a client process was started with: the agent's socket, its first block, and its random numbers.
pub(super) struct ClientParameters {
    pub(super) socket: PathBuf,
    pub(super) first: u64,
    pub(super) rng: StdRng,
}

/// A client process. It prints `durable N` for each block that is durable.
pub(super) struct ClientProcess {
    child: Child,
}

impl ClientTest {
    /// Returns the parameters if this process is a client.
    pub(super) fn parameters(&self) -> Option<ClientParameters> {
        let parameters = std::env::var(self.variable).ok()?;
        let mut words = parameters.splitn(3, ' ');
        let mut next = || words.next().expect("three parameters");
        let rng = StdRng::seed_from_u64(next().parse().expect("a seed"));
        let first = next().parse().expect("a block");
        Some(ClientParameters { socket: PathBuf::from(next()), first, rng })
    }

    /// Starts a client of an agent.
    pub(super) fn start(&self, agent: &Agent, seed: u64, first: u64) -> ClientProcess {
        let socket = agent.files().socket.to_str().expect("a path in UTF-8");
        let child = Command::new(std::env::current_exe().expect("this executable"))
            .args(["--exact", self.name, "--nocapture"])
            .env(self.variable, format!("{seed} {first} {socket}"))
            .stdout(Stdio::piped())
            .spawn()
            .expect("a client can be started");
        ClientProcess { child }
    }
}

impl ClientProcess {
    /// Sends SIGKILL to the process.
    pub(super) fn kill(&mut self) {
        self.child.kill().expect("killed");
    }

    /// Waits until the process exits; returns the blocks that it reported.
    pub(super) fn finish(mut self) -> BTreeSet<u64> {
        let output = BufReader::new(self.child.stdout.take().expect("piped"));
        let line = |line: std::io::Result<String>| line.ok()?.strip_prefix("durable ")?.parse().ok();
        let durable = output.lines().filter_map(line).collect();
        let status = self.child.wait().expect("the client exits");
        assert!(status.success() || status.signal() == Some(SIGKILL), "the client failed: {status}");
        durable
    }
}
