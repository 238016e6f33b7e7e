//! `reprise` as its users run it: the demo, a replay against a cluster that it keeps up, status, doctor, a benchmark.

use std::io::{BufRead, BufReader, Lines};
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Stdio};

use reprise_e2e::World;
use reprise_e2e::process::binary;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

/// An arena this small keeps a part of what 300 requests need: every tier is hit.
const DEMO: [&str; 9] =
    ["--json", "demo", "--requests", "300", "--arena", "64MiB", "--pool", "1GiB", "--dir"];

fn reprise(arguments: &[&str]) -> Command {
    let mut command = Command::new(binary("reprise"));
    command.args(arguments).stdin(Stdio::null());
    command
}

/// Runs a command to its end; the JSON objects that it prints.
fn objects(arguments: &[&str]) -> Vec<Value> {
    let output = reprise(arguments).output().expect("reprise can be run");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{arguments:?} failed: {said}");
    let text = String::from_utf8(output.stdout).expect("output is UTF-8");
    text.lines().map(|line| serde_json::from_str(line).expect("every line is an object")).collect()
}

fn number(object: &Value, path: &str) -> u64 {
    object.pointer(path).and_then(Value::as_u64).unwrap_or_else(|| panic!("no number at {path} in {object}"))
}

fn assert_demo(summary: &Value) {
    assert_eq!(number(summary, "/requests"), 300);
    assert_eq!(number(summary, "/mismatches"), 0);
    assert!(number(summary, "/blocks_saved") > 0 && number(summary, "/bytes_verified") > 0);
    for tier in ["own_dram", "own_nvme", "peer_dram", "peer_nvme"] {
        assert!(number(summary, &format!("/hits/{tier}")) > 0, "no hit in {tier}: {summary}");
    }
    let before = number(summary, "/durable_before_kill");
    assert!(before > 1000, "the killed node held something: {summary}");
    assert_eq!(number(summary, "/durable_after_restart"), before);
}

/// A demo that keeps its cluster up, until it is dropped.
struct Held {
    child: Child,
    lines: Lines<BufReader<ChildStdout>>,
}

impl Held {
    fn start(folder: &str) -> Held {
        let mut child = reprise(&DEMO)
            .args([folder, "--hold"])
            .stdout(Stdio::piped())
            .spawn()
            .expect("reprise can be run");
        let lines = BufReader::new(child.stdout.take().expect("piped above")).lines();
        Held { child, lines }
    }

    fn summary(&mut self) -> Value {
        let line = self.lines.next().expect("a demo ends with a line").expect("which can be read");
        serde_json::from_str(&line).expect("and is an object")
    }

    fn end(mut self) {
        kill_process(Pid::from_child(&self.child), Signal::TERM).expect("one's own child takes signals");
        let status = self.child.wait().expect("one's own child can be waited for");
        assert!(status.success(), "the demo ends well: {status}");
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        // Fails when it has ended, which is as good.
        let _ = kill_process(Pid::from_child(&self.child), Signal::TERM);
        let _ = self.child.wait();
    }
}

#[test]
fn the_demo_hits_every_tier_loses_nothing_and_serves_who_comes_after() {
    let world = World::new();
    let folder = world.folder().to_str().expect("our folders have plain names");
    let mut held = Held::start(folder);
    assert_demo(&held.summary());

    let replayed = objects(&["replay", "--requests", "100", "--cluster", folder, "--json"]);
    let summary = replayed.last().expect("a replay says what it saw");
    assert_eq!((number(summary, "/requests"), number(summary, "/mismatches")), (100, 0));
    assert!(number(summary, "/hits/own_nvme") + number(summary, "/hits/own_dram") > 0, "{summary}");

    let status = objects(&["status", "--cluster", folder, "--json"]).remove(0);
    let nodes = status["nodes"].as_array().expect("a list of nodes");
    assert_eq!(nodes.len(), 2);
    assert!(nodes.iter().all(|node| node["alive"] == true), "{status}");
    assert!(number(&status, "/directory_replicas") > 1000, "{status}");

    held.end();
    assert!(Path::new(folder).join("node-1").is_dir(), "pools outlive their cluster");
}

#[test]
fn doctor_names_what_it_found_and_what_follows() {
    let findings = objects(&["doctor", "--json"]);
    for name in ["io_uring", "registered buffers", "huge pages", "RDMA", "GPU", "NVMe"] {
        let finding = findings
            .iter()
            .find(|finding| finding["name"] == name)
            .unwrap_or_else(|| panic!("nothing about {name} in {findings:?}"));
        assert!(["good", "fair", "absent", "bad"].contains(&finding["verdict"].as_str().unwrap_or("")));
        assert!(finding["consequence"].as_str().is_some_and(|text| !text.is_empty()), "{finding}");
    }
    assert!(
        findings.iter().any(|finding| finding["found"].as_str().is_some_and(|text| text.contains("memlock")))
    );
}

#[test]
fn a_benchmark_reports_figures_in_the_one_form() {
    let world = World::new();
    let folder = world.folder().to_str().expect("our folders have plain names");
    let figures = objects(&["bench", "match", "--repetitions", "1", "--dir", folder, "--json"]);
    let median = figures.iter().find(|figure| figure["name"] == "match.8192_keys_p50").expect("the median");
    assert!(median["value"].as_f64().is_some_and(|value| value > 0.0), "{median}");
    assert_eq!(median["unit"], "ms");
    for figure in &figures {
        for field in ["name", "value", "unit", "reference", "reference_value", "ratio", "target", "met"] {
            assert!(figure.get(field).is_some(), "no {field} in {figure}");
        }
    }
}

#[test]
fn commands_that_cannot_work_say_why() {
    let world = World::new();
    let folder = world.folder().to_str().expect("our folders have plain names");
    let cases: [(&[&str], &str); 4] = [
        (&["replay", "--cluster", folder], "cluster.json"),
        (&["status", "--cluster", folder], "cluster.json"),
        (&["demo", "--trace", "/nowhere/trace.jsonl", "--dir", folder], "/nowhere/trace.jsonl"),
        (&["bench", "match", "--repetitions", "0"], "--repetitions"),
    ];
    for (arguments, words) in cases {
        let output = reprise(arguments).output().expect("reprise can be run");
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success(), "{arguments:?} worked");
        assert!(said.contains(words), "{arguments:?} says: {said}");
    }
}
