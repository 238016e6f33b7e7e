//! `reprise events` against real processes: what there is, what changes, what was missed, an end on request.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, sync_channel};

use reprise_e2e::content::small;
use reprise_e2e::control_plane::Store;
use reprise_e2e::process::binary;
use reprise_e2e::{AgentConfig, PATIENCE, World};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

/// A running `reprise events --json`, and its lines.
struct Events {
    child: Child,
    lines: Receiver<Value>,
}

impl Events {
    fn start(address: &str, arguments: &[&str]) -> Events {
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
    fn until(&self, event: &str) -> Vec<Value> {
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
    fn added(&self, count: usize) -> Value {
        let on_nvme = |line: &Value| line["event"] == "added" && line["tier"] == "nvme";
        let lines = std::iter::from_fn(|| self.lines.recv_timeout(PATIENCE).ok());
        lines.filter(on_nvme).nth(count - 1).expect("as many as were saved")
    }

    /// Waits for its end, which is a success.
    fn end(mut self) {
        drop(self.lines);
        let status = self.child.wait().expect("one's own child");
        assert!(status.success(), "{status}");
    }
}

#[test]
fn events_prints_what_there_is_and_what_changes_and_goes_on_where_it_was() {
    let world = World::new();
    for words in ["the control plane is gone", "cannot register with the control plane", "registration lost"]
    {
        world.allow(words);
    }
    let mut plane = world.control_plane(Store::Embedded);
    let config =
        AgentConfig { control_plane: vec![plane.address().to_owned()], ..AgentConfig::named("first") };
    let agent = world.agent(&config);
    let engine = agent.engine(small());
    let numbers = |range: std::ops::Range<u64>| range.collect::<Vec<u64>>();

    let following = Events::start(plane.address(), &["--follow"]);
    assert_eq!(following.until("current")[0]["event"], "snapshot");
    engine.save_durably(&numbers(0..20));
    let position = following.added(20)["position"].as_str().expect("a position").to_owned();

    let there = Events::start(plane.address(), &[]);
    let lines = there.until("current");
    there.end();
    let count =
        |tier: &str| lines.iter().filter(|line| line["event"] == "added" && line["tier"] == tier).count();
    assert_eq!((count("nvme"), count("dram")), (20, 20), "{lines:?}");
    assert!(lines.iter().filter(|line| line["event"] == "added").all(|line| line["position"].is_null()));

    engine.save_durably(&numbers(20..30));
    following.added(10);
    let since = Events::start(plane.address(), &["--from", &position]);
    let lines = since.until("current");
    since.end();
    let on_nvme = lines.iter().filter(|line| line["event"] == "added" && line["tier"] == "nvme").count();
    assert!(on_nvme == 10 && lines.iter().all(|line| line["event"] != "snapshot"), "{lines:?}");

    plane.kill();
    plane.restart();
    let again = following.until("snapshot");
    assert!(again.last().expect("a line")["reason"].as_str().expect("words").contains("restarted"));
    following.added(30);
    kill_process(Pid::from_child(&following.child), Signal::INT).expect("it runs");
    following.end();
}
