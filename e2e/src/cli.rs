//! Runs the `reprise` command line against a cluster.

use std::collections::{BTreeMap, BTreeSet};
use std::process::{Command, Stdio};
use std::sync::mpsc::Receiver;
use std::time::Duration;

use reprise_policy::BlockKey;
use serde_json::Value;

use crate::ControlPlane;
use crate::process::{ChildProcess, Signal, binary};
use crate::wait::PATIENCE;

/// Runs a command against a member and returns the objects that it prints.
///
/// # Panics
/// If the command fails.
pub fn reprise(member: &ControlPlane, arguments: &[&str]) -> Vec<Value> {
    let mut command = Command::new(binary("reprise"));
    command.arg("--json").args(arguments).args(["--controlplane", member.address()]);
    if let Some(folder) = member.client_tls() {
        command.arg("--tls").arg(folder);
    }
    let output = command.output().expect("reprise can be run");
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{arguments:?} failed: {stderr}");
    let text = String::from_utf8(output.stdout).expect("output is UTF-8");
    text.lines().map(|line| serde_json::from_str(line).expect("every line is an object")).collect()
}

/// A running `reprise events --json`, and the lines that it prints.
#[derive(Debug)]
pub struct Events {
    child: ChildProcess,
    lines: Receiver<String>,
}

impl Events {
    /// Starts `reprise events` against the member at this address.
    ///
    /// # Panics
    /// If the command cannot be started.
    pub fn start(address: &str, arguments: &[&str]) -> Events {
        let mut command = Command::new(binary("reprise"));
        command.args(["--json", "events", "--controlplane", address]).args(arguments);
        command.stdin(Stdio::null()).stdout(Stdio::piped());
        let mut child = ChildProcess::spawn(command);
        let lines = child.read_lines(0);
        Events { child, lines }
    }

    /// Returns the next line, if one arrives within `time`.
    fn next(&self, time: Duration) -> Option<Value> {
        let line = self.lines.recv_timeout(time).ok()?;
        Some(serde_json::from_str(&line).expect("every line is an object"))
    }

    /// Returns the lines up to and including the first one of this kind.
    ///
    /// # Panics
    /// If no such line arrives.
    pub fn read_until(&self, event: &str) -> Vec<Value> {
        let mut lines: Vec<Value> = Vec::new();
        while lines.last().is_none_or(|line| line["event"] != event) {
            let line = self.next(PATIENCE).unwrap_or_else(|| panic!("no '{event}' after {lines:?}"));
            lines.push(line);
        }
        lines
    }

    /// Reads lines until this many replicas were added on NVMe, and returns the last line.
    ///
    /// # Panics
    /// If fewer replicas are added.
    pub fn read_until_added(&self, count: usize) -> Value {
        let on_nvme = |line: &Value| line["event"] == "added" && line["tier"] == "nvme";
        let lines = std::iter::from_fn(|| self.next(PATIENCE));
        lines.filter(on_nvme).nth(count - 1).expect("one line for each saved block")
    }

    /// Returns the pending lines, once no further line arrives for `time`.
    pub fn drain(&self, time: Duration) -> Vec<Value> {
        std::iter::from_fn(|| self.next(time)).collect()
    }

    /// Sends SIGINT, as Ctrl-C does.
    ///
    /// # Panics
    /// If the command has exited.
    pub fn interrupt(&self) {
        self.child.signal(Signal::INT);
    }

    /// Waits for the command to exit with success.
    ///
    /// # Panics
    /// If the command fails.
    pub fn end(mut self) {
        // With the receiver gone, the reading thread cannot block the command from writing its last lines.
        drop(self.lines);
        let status = self.child.wait(PATIENCE);
        assert!(status.is_some_and(|status| status.success()), "{status:?}");
    }
}

/// State that a reader of `reprise events` accumulates: for each member its replicas, as node, tier and key.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Replay(BTreeMap<String, BTreeSet<(u64, String, String)>>);

impl Replay {
    /// Applies further lines in order.
    ///
    /// # Panics
    /// If a line does not match `docs/PROTOCOL.md`.
    pub fn apply(&mut self, lines: &[Value]) {
        for line in lines {
            let text = |field: &str| line[field].as_str().expect("text").to_owned();
            let replicas = self.0.entry(text("member")).or_default();
            let replica = || (line["node"].as_u64().expect("a number"), text("tier"), text("key"));
            match line["event"].as_str().expect("a line has its event") {
                "current" => {}
                "snapshot" | "gone" => replicas.clear(),
                "added" => {
                    replicas.insert(replica());
                }
                "withdrawn" => {
                    replicas.remove(&replica());
                }
                "cleared" => {
                    let slots = line["slots"].as_array().expect("a list");
                    replicas.retain(|(node, _, key)| {
                        let slot = BlockKey::from_hex(key).expect("a key").hash_slot();
                        let of_node = line["node"].is_null() || line["node"] == *node;
                        let of_slot = slots.is_empty() || slots.iter().any(|cleared| *cleared == slot);
                        !(of_node && of_slot)
                    });
                }
                other => panic!("unknown event '{other}': {line}"),
            }
        }
    }

    /// Returns all replicas, of all members.
    pub fn replicas(&self) -> BTreeSet<&(u64, String, String)> {
        self.0.values().flatten().collect()
    }
}
