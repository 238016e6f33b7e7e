//! `reprise` as its users run it: the demo, a replay against a cluster that it keeps up, status, doctor, a benchmark.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::sync::mpsc::{Receiver, sync_channel};
use std::time::{Duration, Instant};

use reprise_e2e::World;
use reprise_e2e::process::{binary, pause};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

/// How long a command may take: the demo on a busy machine.
const PATIENCE: Duration = Duration::from_secs(240);

/// An arena this small keeps a part of what 300 requests need: every tier is hit.
const DEMO: [&str; 9] =
    ["--json", "demo", "--requests", "300", "--arena", "64MiB", "--pool", "1GiB", "--dir"];

fn reprise(arguments: &[&str]) -> Command {
    let mut command = Command::new(binary("reprise"));
    command.args(arguments).stdin(Stdio::null());
    command
}

/// Runs a command to its end, which must come within [`PATIENCE`].
fn run(arguments: &[&str]) -> Output {
    let child =
        reprise(arguments).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("reprise can be run");
    let pid = Pid::from_child(&child);
    let (sender, ended) = sync_channel(1);
    std::thread::spawn(move || sender.send(child.wait_with_output()));
    let output = ended.recv_timeout(PATIENCE).unwrap_or_else(|_| {
        let _ = kill_process(pid, Signal::KILL);
        panic!("{arguments:?} did not end within {PATIENCE:?}")
    });
    output.expect("output can be read")
}

/// Runs a command to its end; the JSON objects that it prints.
fn objects(arguments: &[&str]) -> Vec<Value> {
    let output = run(arguments);
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
    let after = number(summary, "/durable_after_restart");
    assert!((before.saturating_sub(number(summary, "/durable_left"))..=before).contains(&after), "{summary}");
    let announced = number(summary, "/durable_announced");
    assert_eq!(before + number(summary, "/durable_evicted"), announced, "none is unaccounted for: {summary}");
    assert_eq!(summary["tiers_without_hits"], serde_json::json!([]));
}

/// Builds etcd where it is not there yet: the commands only say that it is missing.
fn build_etcd() {
    let script = reprise_e2e::tree().join("e2e/etcd/build.sh");
    let built = Command::new(script).stdout(Stdio::null()).status().expect("bash is there");
    assert!(built.success(), "etcd cannot be built");
}

/// A demo that keeps its cluster up, until it is dropped.
struct Held {
    child: Child,
    lines: Receiver<String>,
}

impl Held {
    fn start(folder: &str) -> Held {
        let mut child = reprise(&DEMO)
            .args([folder, "--hold"])
            .stdout(Stdio::piped())
            .spawn()
            .expect("reprise can be run");
        let output = BufReader::new(child.stdout.take().expect("piped above"));
        let (sender, lines) = sync_channel(16);
        std::thread::spawn(move || {
            output.lines().map_while(Result::ok).try_for_each(|line| sender.send(line))
        });
        Held { child, lines }
    }

    fn summary(&mut self) -> Value {
        let line = self.lines.recv_timeout(PATIENCE).expect("a demo ends with a line");
        serde_json::from_str(&line).expect("and is an object")
    }

    fn end(mut self) {
        kill_process(Pid::from_child(&self.child), Signal::TERM).expect("one's own child takes signals");
        let give_up = Instant::now() + PATIENCE;
        let status = loop {
            if let Some(status) = self.child.try_wait().expect("one's own child can be waited for") {
                break status;
            }
            assert!(Instant::now() < give_up, "the demo did not end within {PATIENCE:?}");
            std::thread::yield_now();
        };
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
    assert_explained(folder);
    assert_modes_are_set(folder);

    let refused = run(&["bench", "match", "--repetitions", "1", "--dir", folder]);
    let said = String::from_utf8_lossy(&refused.stderr);
    assert!(!refused.status.success() && said.contains("in use by another"), "{said}");
    assert_eq!(processes(folder).len(), 3, "a refused command touches nothing");

    assert_frozen_control_plane_is_reported(folder);

    held.end();
    assert!(processes(folder).is_empty(), "no process outlives the command");
    for gone in ["cluster.json", "processes.json", "node-1/device-0.pool", "node-2/device-0.pool"] {
        assert!(!Path::new(folder).join(gone).exists(), "{gone} is of no use without its cluster");
    }
    assert!(Path::new(folder).join("node-1.log").is_file(), "logs outlive their cluster");
}

/// A node is cordoned and taken back, and a name that nobody has is refused with those that there are.
fn assert_modes_are_set(folder: &str) {
    let set = |command: &str| objects(&[command, "node-2", "--cluster", folder, "--json"]).remove(0);
    let cordoned = set("cordon");
    assert_eq!((&cordoned["mode"], &cordoned["before"]), (&"cordoned".into(), &"active".into()));
    let status = objects(&["status", "--cluster", folder, "--json"]).remove(0);
    let nodes = status["nodes"].as_array().expect("a list of nodes");
    let modes: Vec<&Value> = nodes.iter().map(|node| &node["mode"]).collect();
    assert_eq!(modes, ["active", "cordoned"], "{status}");
    assert!(nodes.iter().all(|node| number(node, "/usage/nvme_used_bytes") > 0), "nodes report: {status}");
    assert_eq!(set("uncordon")["before"], "cordoned");
    let refused = run(&["cordon", "node-9", "--cluster", folder]);
    let said = String::from_utf8_lossy(&refused.stderr);
    assert!(!refused.status.success() && said.contains("there are node-1, node-2"), "{said}");
}

/// Processes that have a configuration in this folder among their arguments.
/// Each block of a prompt has its line, and a key says the same as the line that it was taken from.
fn assert_explained(folder: &str) {
    let blocks = objects(&["--json", "explain", "1", "--cluster", folder]);
    assert!(!blocks.is_empty());
    for (at, block) in (0..).zip(&blocks) {
        assert_eq!(number(block, "/block"), at);
        assert!(number(block, "/slot") < 4096 && block["member"].is_string(), "{block}");
        let (node, load) = block["loads"].as_object().and_then(|loads| loads.iter().next()).expect("a node");
        let replicas = block["replicas"].as_array().expect("a list");
        let here = |tier: &str| replicas.iter().any(|held| held["node"] == *node && held["tier"] == tier);
        let own = if here("DRAM") {
            "own DRAM"
        } else if here("NVMe") {
            "own NVMe"
        } else if replicas.is_empty() {
            "recompute"
        } else {
            "of node-2"
        };
        assert!(load.as_str().is_some_and(|load| load.contains(own)), "{block}");
        assert!(replicas.iter().all(|held| held["why"].is_string()), "{block}");
    }
    let held = |block: &Value| block["replicas"].as_array().cloned().unwrap_or_default();
    let reasons: Vec<Value> = blocks.iter().flat_map(held).map(|held| held["why"].clone()).collect();
    let reasons: Vec<&str> = reasons.iter().filter_map(Value::as_str).collect();
    let known = ["saved by an engine", "fetched from a peer", "copied here", "found on a device"];
    assert!(reasons.iter().all(|why| known.iter().any(|words| why.starts_with(words))), "{reasons:?}");
    // The demo has killed an agent on the way.
    assert!(reasons.contains(&"found on a device when the agent started"), "{reasons:?}");
    let key = blocks[0]["key"].as_str().expect("a key");
    let again = objects(&["--json", "explain", key, "--cluster", folder]);
    assert_eq!(again, [blocks[0].clone()]);
}

fn processes(folder: &str) -> Vec<Pid> {
    let in_folder = |arguments: &[u8]| {
        String::from_utf8_lossy(arguments).split('\0').any(|argument| {
            argument.starts_with(folder) && [".toml", ".yaml"].iter().any(|end| argument.ends_with(end))
        })
    };
    std::fs::read_dir("/proc")
        .expect("/proc is mounted")
        .filter_map(|entry| {
            let entry = entry.ok()?;
            let pid = entry.file_name().to_str()?.parse().ok()?;
            let arguments = std::fs::read(entry.path().join("cmdline")).ok()?;
            in_folder(&arguments).then(|| Pid::from_raw(pid))?
        })
        .collect()
}

fn control_plane(folder: &str) -> Pid {
    let path = Path::new(folder).join("processes.json");
    let text = std::fs::read_to_string(path).expect("a running cluster records its processes");
    let recorded: Value = serde_json::from_str(&text).expect("as JSON");
    assert_eq!(recorded[0]["program"], "reprise-controlplane");
    i32::try_from(number(&recorded, "/0/pid")).ok().and_then(Pid::from_raw).expect("a process id")
}

fn assert_frozen_control_plane_is_reported(folder: &str) {
    let frozen = control_plane(folder);
    pause(frozen);
    let output = run(&["status", "--cluster", folder]);
    kill_process(frozen, Signal::CONT).expect("our user's process");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && said.contains("did not answer within 5s"), "{said}");
}

#[test]
fn a_command_that_was_killed_leaves_nothing_to_the_next_one_in_its_directory() {
    let world = World::new();
    let folder = world.folder().to_str().expect("our folders have plain names");
    let mut held = Held::start(folder);
    held.summary();
    let left = processes(folder);
    assert_eq!(left.len(), 3);
    held.child.kill().expect("one's own child can be killed");
    held.child.wait().expect("and waited for");
    assert_eq!(processes(folder), left, "SIGKILL leaves no time to end them");

    objects(&["bench", "match", "--repetitions", "1", "--dir", folder, "--json"]);
    assert!(processes(folder).is_empty());
}

#[test]
fn the_demo_on_etcd_outlives_a_member_and_an_agent_and_ends_with_a_complete_directory() {
    build_etcd();
    let world = World::new();
    let folder = world.folder().to_str().expect("our folders have plain names");
    let demo = [&DEMO[..], &[folder, "--etcd", "--members", "3", "--nodes", "3"]].concat();
    let summary = objects(&demo).remove(0);
    assert_eq!((number(&summary, "/requests"), number(&summary, "/mismatches")), (300, 0));
    assert_eq!((number(&summary, "/members"), number(&summary, "/members_killed")), (3, 1));
    assert_eq!(number(&summary, "/durable_after_restart"), number(&summary, "/durable_before_kill"));
    let told = number(&summary, "/directory_dram") + number(&summary, "/directory_nvme");
    assert!(number(&summary, "/directory_nvme") > 1000, "{summary}");
    assert_eq!(number(&summary, "/directory_compared"), told, "key by key");
    assert!(processes(folder).is_empty(), "no process outlives the command");
    assert!(!Path::new(folder).join("etcd.data").exists(), "etcd's data are of no use without it");
}

#[test]
fn the_keys_of_a_killed_member_are_found_again_and_no_answer_is_wrong_meanwhile() {
    build_etcd();
    let world = World::new();
    let folder = world.folder().to_str().expect("our folders have plain names");
    let figures = objects(&[
        "bench",
        "failover",
        "--repetitions",
        "1",
        "--entries",
        "100000",
        "--dir",
        folder,
        "--json",
    ]);
    assert_form(&figures);
    for name in ["wrong_answers", "loads_compared", "wrong_loads", "evicted_before", "evicted_still_answered"]
    {
        let is_named = |figure: &&Value| figure["name"] == format!("failover.{name}");
        let figure = figures.iter().find(is_named).expect("a figure");
        assert_eq!(figure["met"], true, "{figure}");
    }
    let names = ["failover.rebuild_100000_entries_median", "etcd.in_use_at_100000_blocks"];
    assert!(names.iter().all(|name| figures.iter().any(|figure| figure["name"] == *name)), "{figures:?}");
}

#[test]
fn what_etcd_keeps_does_not_grow_with_the_blocks() {
    build_etcd();
    let world = World::new();
    let folder = world.folder().to_str().expect("our folders have plain names");
    let figures = objects(&["bench", "etcd", "--entries", "50000", "--dir", folder, "--json"]);
    assert_form(&figures);
    assert_eq!(figures.len(), 4);
    assert!(figures.iter().all(|figure| figure["met"] == true), "{figures:?}");
}

#[test]
fn sim_chaos_ends_with_its_figures_and_breaks_no_invariant() {
    let lines = objects(&["sim", "chaos", "--seeds", "4", "--start", "7", "--json"]);
    let summary = lines.last().expect("a last line");
    assert_eq!((number(summary, "/seeds"), number(summary, "/violations")), (4, 0));
    assert!(summary["seeds_per_second"].as_f64().is_some_and(|speed| speed > 0.0), "{summary}");
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
    assert_form(&figures);
    let directory =
        ["bench", "directory", "--entries", "10000", "--repetitions", "1", "--dir", folder, "--json"];
    let figures = objects(&directory);
    assert!(
        figures
            .iter()
            .all(|figure| figure["name"].as_str().is_some_and(|name| name.starts_with("directory.")))
    );
    assert_form(&figures);
}

fn assert_form(figures: &[Value]) {
    assert!(!figures.is_empty());
    for figure in figures {
        for field in ["name", "value", "unit", "reference", "reference_value", "ratio", "target", "met"] {
            assert!(figure.get(field).is_some(), "no {field} in {figure}");
        }
    }
}

#[test]
fn the_printed_configuration_is_taken_and_an_unknown_field_is_refused() {
    let world = World::new();
    let file = world.folder().join("reprise.toml");
    let printed = reprise(&["--print-default-config"]).output().expect("reprise can be run");
    assert!(printed.status.success());
    let text = String::from_utf8(printed.stdout).expect("output is UTF-8");
    let path = file.to_str().expect("our folders have plain names");
    std::fs::write(&file, text.replace("repetitions = 11", "repetitions = 0"))
        .expect("a file can be written");
    let taken = reprise(&["--config", path, "bench", "match"]).output().expect("reprise can be run");
    assert!(String::from_utf8_lossy(&taken.stderr).contains("--repetitions"), "what the file says counts");
    std::fs::write(&file, format!("{text}\nrepetition = 3\n")).expect("a file can be written");
    let refused = reprise(&["--config", path, "status"]).output().expect("reprise can be run");
    let said = String::from_utf8_lossy(&refused.stderr);
    assert!(!refused.status.success() && said.contains("repetition") && said.contains(path), "{said}");
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
        let output = run(arguments);
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success(), "{arguments:?} worked");
        assert!(said.contains(words), "{arguments:?} says: {said}");
    }
}
