//! The command line, as a person or a program at a terminal uses it beside a cluster.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, sync_channel};
use std::time::Duration;

use reprise_policy::BlockKey;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use crate::ControlPlane;
use crate::process::binary;
use crate::wait::PATIENCE;

/// Runs a command with a member; the objects that it prints.
///
/// # Panics
/// When it fails.
pub fn reprise(member: &ControlPlane, arguments: &[&str]) -> Vec<Value> {
    let mut command = Command::new(binary("reprise"));
    command.arg("--json").args(arguments).args(["--controlplane", member.address()]);
    let output = command.output().expect("reprise can be run");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{arguments:?} failed: {said}");
    let text = String::from_utf8(output.stdout).expect("output is UTF-8");
    text.lines().map(|line| serde_json::from_str(line).expect("every line is an object")).collect()
}

/// A running `reprise events --json`, and its lines.
#[derive(Debug)]
pub struct Events {
    child: Child,
    lines: Receiver<Value>,
}

impl Events {
    /// Starts one that asks the member at this address.
    ///
    /// # Panics
    /// When it cannot be run.
    pub fn start(address: &str, arguments: &[&str]) -> Events {
        let mut child = Command::new(binary("reprise"))
            .args(["--json", "events", "--controlplane", address])
            .args(arguments)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .expect("reprise can be run");
        let output = BufReader::new(child.stdout.take().expect("its output is a pipe"));
        let (sender, lines) = sync_channel(0);
        std::thread::spawn(move || {
            for line in output.lines().map_while(Result::ok) {
                let object = serde_json::from_str(&line).expect("every line is an object");
                if sender.send(object).is_err() {
                    return;
                }
            }
        });
        Events { child, lines }
    }

    /// Lines up to one of this kind.
    ///
    /// # Panics
    /// When none comes.
    pub fn until(&self, event: &str) -> Vec<Value> {
        let mut lines = Vec::new();
        loop {
            let line =
                self.lines.recv_timeout(PATIENCE).unwrap_or_else(|_| panic!("no '{event}' after {lines:?}"));
            let ends = line["event"] == event;
            lines.push(line);
            if ends {
                return lines;
            }
        }
    }

    /// Takes lines until this many replicas were added on NVMe; the last line.
    ///
    /// # Panics
    /// When no more come before.
    pub fn added(&self, count: usize) -> Value {
        let on_nvme = |line: &Value| line["event"] == "added" && line["tier"] == "nvme";
        let lines = std::iter::from_fn(|| self.lines.recv_timeout(PATIENCE).ok());
        lines.filter(on_nvme).nth(count - 1).expect("as many as were saved")
    }

    /// The lines that have come, once no more come for so long.
    pub fn quiet_for(&self, time: Duration) -> Vec<Value> {
        std::iter::from_fn(|| self.lines.recv_timeout(time).ok()).collect()
    }

    /// Asks it to end, as Ctrl-C does.
    ///
    /// # Panics
    /// When it has ended.
    pub fn interrupt(&self) {
        kill_process(Pid::from_child(&self.child), Signal::INT).expect("it runs");
    }

    /// Waits for its end, which is a success.
    ///
    /// # Panics
    /// When it is none.
    pub fn end(mut self) {
        // Whoever reads no more must not keep it from writing its last lines.
        self.lines = sync_channel(0).1;
        let status = self.child.wait().expect("one's own child");
        assert!(status.success(), "{status}");
    }
}

impl Drop for Events {
    fn drop(&mut self) {
        // Fails when it has ended, which is as good.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// What somebody knows who reads lines of `reprise events`: replicas of each member, as node, tier and key.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Replay(BTreeMap<String, BTreeSet<(u64, String, String)>>);

impl Replay {
    /// Takes more lines.
    ///
    /// # Panics
    /// When one is not as it is written in `docs/PROTOCOL.md`.
    pub fn take(&mut self, lines: &[Value]) {
        for line in lines {
            let text = |field: &str| line[field].as_str().expect("text").to_owned();
            let held = self.0.entry(text("member")).or_default();
            let replica = || (line["node"].as_u64().expect("a number"), text("tier"), text("key"));
            match line["event"].as_str().expect("a line says what it is") {
                "current" => {}
                "snapshot" | "gone" => held.clear(),
                "added" => {
                    held.insert(replica());
                }
                "withdrawn" => {
                    held.remove(&replica());
                }
                "cleared" => {
                    let slots = line["slots"].as_array().expect("a list");
                    held.retain(|(node, _, key)| {
                        let slot = BlockKey::from_hex(key).expect("a key").hash_slot();
                        let of_node = line["node"].is_null() || line["node"] == *node;
                        let of_slot = slots.is_empty() || slots.iter().any(|cleared| *cleared == slot);
                        !(of_node && of_slot)
                    });
                }
                other => panic!("'{other}' is no event: {line}"),
            }
        }
    }

    /// All replicas, whoever knows them.
    pub fn replicas(&self) -> BTreeSet<&(u64, String, String)> {
        self.0.values().flatten().collect()
    }
}
