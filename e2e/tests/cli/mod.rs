//! The `reprise` command: the demo, a replay against a running cluster, status, doctor, and benchmarks.

mod admin;
mod generated_pages;
mod plan;
mod sim_cores;
mod sim_replay;
mod tls;
mod trace;
mod user_nvme;

use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::sync::mpsc::{Receiver, sync_channel};
use std::time::Duration;

use reprise_e2e::TestEnv;
use reprise_e2e::process::{ChildProcess, Signal, binary, copy_binary, pause};
use reprise_testkit::etcd::built_binary;
use rustix::process::{Pid, kill_process};
use serde_json::Value;

/// Bound on the duration of a command: the demo on a busy machine.
const PATIENCE: Duration = Duration::from_secs(240);

/// With this arena, 300 requests need more blocks than fit into DRAM, so that every tier gets hits.
const DEMO: [&str; 9] =
    ["--json", "demo", "--requests", "300", "--arena", "64MiB", "--pool", "1GiB", "--dir"];

fn reprise(arguments: &[&str]) -> Command {
    let mut command = Command::new(binary("reprise"));
    command.args(arguments).stdin(Stdio::null());
    command
}

fn run(arguments: &[&str]) -> Output {
    output_of(reprise(arguments))
}

/// Runs a command, which must exit within [`PATIENCE`].
fn output_of(mut command: Command) -> Output {
    let child =
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the program can be run");
    let pid = Pid::from_child(&child);
    let (sender, ended) = sync_channel(1);
    std::thread::spawn(move || sender.send(child.wait_with_output()));
    let output = ended.recv_timeout(PATIENCE).unwrap_or_else(|_| {
        let _ = kill_process(pid, Signal::KILL);
        panic!("{command:?} did not exit within {PATIENCE:?}")
    });
    output.expect("output can be read")
}

/// Runs a command, which must succeed, and returns the JSON objects that it prints.
fn objects(arguments: &[&str]) -> Vec<Value> {
    objects_of(run(arguments))
}

/// Like [`objects`], for the benchmarks that are not shipped.
fn bench_objects(arguments: &[&str]) -> Vec<Value> {
    let mut command = Command::new(binary("reprise-bench"));
    command.args(arguments).stdin(Stdio::null());
    objects_of(output_of(command))
}

fn objects_of(output: Output) -> Vec<Value> {
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "the command failed: {stderr}");
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
    assert!(before > 1000, "the killed node had durable blocks: {summary}");
    let after = number(summary, "/durable_after_restart");
    assert!((before.saturating_sub(number(summary, "/durable_left"))..=before).contains(&after), "{summary}");
    let announced = number(summary, "/durable_announced");
    assert_eq!(
        before + number(summary, "/durable_evicted"),
        announced,
        "every announced block is durable or evicted: {summary}"
    );
    assert_eq!(summary["tiers_without_hits"], serde_json::json!([]));
    assert_prefetch(&summary["prefetch"]);
}

/// Checks that requests that waited found their blocks in DRAM, and that little was read in vain. Times depend on the load
/// of the machine.
fn assert_prefetch(prefetch: &Value) {
    let share = |name: &str| prefetch[name].as_f64().unwrap_or_else(|| panic!("no {name} in {prefetch}"));
    assert!(share("nvme_percent_off") > 50.0, "blocks are on NVMe: {prefetch}");
    assert!(share("nvme_percent_on") < share("nvme_percent_off") / 2.0, "blocks are read ahead: {prefetch}");
    for figure in ["first_layer_us_p50_off", "first_layer_us_p50_on", "blocks", "pairs"] {
        assert!(number(prefetch, &format!("/{figure}")) > 0, "{prefetch}");
    }
    assert!(number(prefetch, "/requests") >= 8 && share("ratio") > 0.0, "{prefetch}");
    // One request of each round is aborted before it runs.
    let (read, wasted) = (number(prefetch, "/bytes_read_ahead"), number(prefetch, "/wasted_bytes"));
    assert!(wasted > 0 && 4 * wasted < read, "{prefetch}");
}

/// A demo whose cluster runs until this is dropped.
struct RunningDemo {
    child: ChildProcess,
    lines: Receiver<String>,
}

impl RunningDemo {
    fn start(folder: &str) -> RunningDemo {
        let mut command = reprise(&DEMO);
        command.args([folder, "--hold"]).stdout(Stdio::piped());
        let mut child = ChildProcess::spawn(command);
        let lines = child.read_lines(16);
        RunningDemo { child, lines }
    }

    /// Returns the next line: the summary, then the commands that the user may try.
    fn line(&mut self) -> Value {
        let line = self.lines.recv_timeout(PATIENCE).expect("the demo prints a line");
        serde_json::from_str(&line).expect("each line is an object")
    }

    fn end(mut self) {
        self.child.signal(Signal::TERM);
        let status = self.child.wait(PATIENCE);
        assert!(status.is_some_and(|status| status.success()), "the demo exited with {status:?}");
    }
}

impl Drop for RunningDemo {
    fn drop(&mut self) {
        self.child.stop(PATIENCE);
    }
}

#[test]
fn the_demo_hits_every_tier_loses_nothing_and_serves_other_commands() {
    let env = TestEnv::new();
    let folder = env.folder().to_str().expect("our folders have plain names");
    let mut demo = RunningDemo::start(folder);
    assert_demo(&demo.line());
    tls::assert_all_ports_use_tls(folder);

    let replayed = objects(&["replay", "--requests", "100", "--cluster", folder, "--json"]);
    let summary = replayed.last().expect("a replay prints a summary");
    assert_eq!((number(summary, "/requests"), number(summary, "/mismatches")), (100, 0));
    assert!(number(summary, "/hits/own_nvme") + number(summary, "/hits/own_dram") > 0, "{summary}");

    let status = objects(&["status", "--cluster", folder, "--json"]).remove(0);
    let nodes = status["nodes"].as_array().expect("a list of nodes");
    assert_eq!(nodes.len(), 2);
    assert!(nodes.iter().all(|node| node["alive"] == true), "{status}");
    assert!(number(&status, "/directory_replicas") > 1000, "{status}");
    assert_explained(folder);
    admin::assert_commands_change_blocks(folder);
    // It begins with the deleted blocks, which an engine computes again.
    trace::assert_a_recording_replays(folder);
    trace::assert_a_recording_ends_by_itself(folder);
    assert_modes_are_set(folder);
    tls::assert_printed_commands_succeed(&demo.line(), folder);

    let refused = run(&["bench", "match", "--repetitions", "1", "--dir", folder]);
    let stderr = String::from_utf8_lossy(&refused.stderr);
    assert!(!refused.status.success() && stderr.contains("in use by another"), "{stderr}");
    assert_eq!(processes(folder).len(), 3, "a rejected command ends no process");

    assert_frozen_control_plane_is_reported(folder);

    demo.end();
    assert!(processes(folder).is_empty(), "no process outlives the command");
    for removed in ["cluster.json", "processes.json", "node-1/device-0.pool", "node-2/device-0.pool"] {
        assert!(!Path::new(folder).join(removed).exists(), "{removed} is removed with its cluster");
    }
    assert!(Path::new(folder).join("node-1.log").is_file(), "logs outlive their cluster");
}

/// Checks that a node can be cordoned and uncordoned, and that an unknown name is rejected with a list of the
/// nodes.
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
    let stderr = String::from_utf8_lossy(&refused.stderr);
    assert!(!refused.status.success() && stderr.contains("known nodes are node-1, node-2"), "{stderr}");
}

/// Checks that each block of a prompt has a line, and that its key is explained by the same line.
fn assert_explained(folder: &str) {
    let blocks = objects(&["--json", "explain", "1", "--cluster", folder]);
    assert!(!blocks.is_empty());
    for (at, block) in (0..).zip(&blocks) {
        assert_eq!(number(block, "/block"), at);
        assert!(number(block, "/slot") < 4096 && block["member"].is_string(), "{block}");
        let (node, load) = block["loads"].as_object().and_then(|loads| loads.iter().next()).expect("a node");
        let replicas = block["replicas"].as_array().expect("a list");
        let here =
            |tier: &str| replicas.iter().any(|replica| replica["node"] == *node && replica["tier"] == tier);
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
        assert!(replicas.iter().all(|replica| replica["why"].is_string()), "{block}");
    }
    let replicas = |block: &Value| block["replicas"].as_array().cloned().unwrap_or_default();
    let reasons: Vec<Value> =
        blocks.iter().flat_map(replicas).map(|replica| replica["why"].clone()).collect();
    let reasons: Vec<&str> = reasons.iter().filter_map(Value::as_str).collect();
    let known = ["saved by an engine", "fetched from a peer", "copied here", "found on a device"];
    assert!(reasons.iter().all(|why| known.iter().any(|words| why.starts_with(words))), "{reasons:?}");
    // The demo has killed and restarted an agent.
    assert!(reasons.contains(&"found on a device when the agent started"), "{reasons:?}");
    let key = blocks[0]["key"].as_str().expect("a key");
    let again = objects(&["--json", "explain", key, "--cluster", folder]);
    assert_eq!(again, [blocks[0].clone()]);
}

/// Returns the processes that have a configuration file, or the data of etcd, in this folder among their arguments.
fn processes(folder: &str) -> Vec<Pid> {
    let in_folder = |arguments: &[u8]| {
        String::from_utf8_lossy(arguments).split('\0').any(|argument| {
            argument.starts_with(folder) && [".toml", "etcd.data"].iter().any(|end| argument.ends_with(end))
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
    let recorded: Value = serde_json::from_str(&text).expect("valid JSON");
    assert_eq!(recorded[0]["program"], "reprise-controlplane");
    i32::try_from(number(&recorded, "/0/pid")).ok().and_then(Pid::from_raw).expect("a process id")
}

fn assert_frozen_control_plane_is_reported(folder: &str) {
    let frozen = control_plane(folder);
    pause(frozen);
    let output = run(&["status", "--cluster", folder]);
    kill_process(frozen, Signal::CONT).expect("a process of this user");
    let stderr = String::from_utf8_lossy(&output.stderr);
    // The handshake and the whole answer have the same time limit.
    assert!(!output.status.success() && stderr.contains("within 5s"), "{stderr}");
}

#[test]
fn a_command_ends_the_processes_that_a_killed_command_left_in_its_directory() {
    let env = TestEnv::new();
    let folder = env.folder().to_str().expect("our folders have plain names");
    let mut demo = RunningDemo::start(folder);
    demo.line();
    let running = processes(folder);
    assert_eq!(running.len(), 3);
    demo.child.kill();
    assert_eq!(processes(folder), running, "a killed command cannot end its processes");

    objects(&["bench", "match", "--repetitions", "1", "--dir", folder, "--json"]);
    assert!(processes(folder).is_empty());
}

#[test]
fn the_demo_on_etcd_survives_the_loss_of_a_member_and_an_agent_with_a_complete_directory() {
    built_binary();
    let env = TestEnv::new();
    let folder = env.folder().to_str().expect("our folders have plain names");
    let demo = [&DEMO[..], &[folder, "--etcd", "--members", "3", "--nodes", "3"]].concat();
    let summary = objects(&demo).remove(0);
    assert_eq!((number(&summary, "/requests"), number(&summary, "/mismatches")), (300, 0));
    assert_eq!((number(&summary, "/members"), number(&summary, "/members_killed")), (3, 1));
    assert_eq!(number(&summary, "/durable_after_restart"), number(&summary, "/durable_before_kill"));
    let listed = number(&summary, "/directory_dram") + number(&summary, "/directory_nvme");
    assert!(number(&summary, "/directory_nvme") > 1000, "{summary}");
    assert_eq!(number(&summary, "/directory_compared"), listed, "every listed replica is compared");
    assert!(processes(folder).is_empty(), "no process outlives the command");
    assert!(!Path::new(folder).join("etcd.data").exists(), "etcd's data are removed");
}

#[test]
fn bench_failover_finds_all_keys_again_and_no_answer_is_wrong() {
    built_binary();
    let env = TestEnv::new();
    let folder = env.folder().to_str().expect("our folders have plain names");
    let figures =
        bench_objects(&["failover", "--repetitions", "1", "--entries", "100000", "--dir", folder, "--json"]);
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
fn bench_recovery_opens_a_pool_that_grew() {
    built_binary();
    let env = TestEnv::new();
    let folder = env.folder().to_str().expect("our folders have plain names");
    let figures =
        objects(&["bench", "recovery", "--repetitions", "1", "--entries", "5000", "--dir", folder, "--json"]);
    assert_form(&figures);
    assert_eq!(figures[0]["name"], "recovery.open_5000_entries", "{figures:?}");
}

#[test]
fn the_data_in_etcd_do_not_grow_with_the_blocks() {
    built_binary();
    let env = TestEnv::new();
    let folder = env.folder().to_str().expect("our folders have plain names");
    let figures = bench_objects(&["etcd", "--entries", "50000", "--dir", folder, "--json"]);
    assert_form(&figures);
    assert_eq!(figures.len(), 4);
    assert!(figures.iter().all(|figure| figure["met"] == true), "{figures:?}");
}

#[test]
fn bench_all_lists_missing_requirements_before_it_starts_anything() {
    let env = TestEnv::new();
    let alone = env.folder().join("reprise");
    copy_binary("reprise", &alone);
    let mut command = Command::new(alone);
    command
        .args(["bench", "all", "--repetitions", "1", "--json", "--dir"])
        .arg(env.folder().join("bench"))
        .stdin(Stdio::null());
    let output = output_of(command);
    assert!(output.status.success(), "the measurements without an agent run: {output:?}");
    let text = String::from_utf8(output.stdout).expect("output is UTF-8");
    let lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).expect("an object")).collect();
    let is_part = |line: &Value| line["runs"].is_boolean();
    let count = lines.iter().take_while(|line| is_part(line)).count();
    let (parts, figures) = lines.split_at(count);
    let names: Vec<_> = parts.iter().filter_map(|part| part["benchmark"].as_str()).collect();
    assert_eq!(
        names,
        [
            "store",
            "slack",
            "prefetch",
            "recompute",
            "local",
            "peer",
            "secure",
            "match",
            "directory",
            "recovery",
            "policy",
            "nvme",
            "gpu",
            "ring"
        ]
    );
    assert!(!figures.is_empty() && !figures.iter().any(is_part), "the list precedes all figures: {lines:?}");
    let (of_agents, others) = parts.split_at(10);
    assert!(others.iter().all(|part| part["runs"] == true), "{others:?}");
    for part in of_agents {
        assert_eq!(part["runs"], false, "{part}");
        assert!(
            part["missing"][0]["what"].as_str().is_some_and(|what| what.contains("reprise-agent")),
            "{part}"
        );
        assert_eq!(part["missing"][0]["remedy"], "run `make build`");
    }
    let left = std::fs::read_dir(env.folder().join("bench")).map_or(0, Iterator::count);
    assert_eq!(left, 0, "no agent was started, and the file of an emulated controller is removed");
}

#[test]
fn sim_chaos_prints_a_summary_without_violations() {
    let lines = objects(&["sim", "chaos", "--seeds", "4", "--start", "7", "--json"]);
    let summary = lines.last().expect("a last line");
    assert_eq!((number(summary, "/seeds"), number(summary, "/violations")), (4, 0));
    assert!(summary["seeds_per_second"].as_f64().is_some_and(|speed| speed > 0.0), "{summary}");
}

#[test]
fn doctor_reports_findings_with_their_consequences() {
    let findings = objects(&["doctor", "--json"]);
    for name in ["io_uring", "registered buffers", "huge pages", "RDMA", "GPU", "NVMe"] {
        let finding = findings
            .iter()
            .find(|finding| finding["name"] == name)
            .unwrap_or_else(|| panic!("no finding {name} in {findings:?}"));
        assert!(["good", "fair", "absent", "bad"].contains(&finding["verdict"].as_str().unwrap_or("")));
        assert!(finding["consequence"].as_str().is_some_and(|text| !text.is_empty()), "{finding}");
    }
    assert!(
        findings.iter().any(|finding| finding["found"].as_str().is_some_and(|text| text.contains("memlock")))
    );
}

#[test]
fn doctor_reports_each_step_of_user_space_nvme_and_each_item_of_a_gpu() {
    let env = TestEnv::new();
    let root = env.folder().join("root");
    let function = root.join("sys/bus/pci/devices/0000:3b:00.0");
    std::fs::create_dir_all(&function).expect("a folder");
    std::fs::write(function.join("class"), "0x010802\n").expect("written");
    let findings = objects(&[
        "doctor",
        "--gpu",
        "--root",
        root.to_str().expect("our folders have plain names"),
        "--json",
    ]);
    for (name, words) in [
        ("user NVMe: IOMMU", "intel_iommu=on"),
        ("user NVMe: vfio-pci", "modprobe vfio-pci"),
        ("user NVMe: 0000:3b:00.0", "not available to agents"),
        ("GPU: kernel driver", "install the NVIDIA driver"),
        ("GPU: driver library", "libnvidia-compute"),
        ("GPU: green contexts", "install the NVIDIA driver"),
        ("GPU: dma-buf", "open kernel modules"),
    ] {
        let finding = findings.iter().find(|finding| finding["name"] == name);
        let finding = finding.unwrap_or_else(|| panic!("no finding {name} in {findings:?}"));
        assert_eq!(finding["verdict"], "absent", "{finding}");
        assert!(finding["consequence"].as_str().is_some_and(|text| text.contains(words)), "{finding}");
    }
}

#[test]
fn benchmarks_report_figures_with_all_fields() {
    let env = TestEnv::new();
    let folder = env.folder().to_str().expect("our folders have plain names");
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

#[test]
fn bench_slack_compares_writes_in_windows_with_writes_at_once() {
    let env = TestEnv::new();
    let folder = env.folder().to_str().expect("our folders have plain names");
    let figures = objects(&["bench", "slack", "--repetitions", "1", "--dir", folder, "--json"]);
    assert_form(&figures);
    let names: Vec<_> = figures.iter().filter_map(|figure| figure["name"].as_str()).collect();
    let measured = ["layer_p50", "layer_p99", "read", "read_and_write", "written_in_windows"];
    assert_eq!(names, measured.map(|name| format!("slack.{name}")));
    let value = |figure: &Value| figure["value"].as_f64().expect("a number");
    assert!(figures.iter().all(|figure| value(figure) > 0.0), "{figures:?}");
}

#[test]
fn bench_prefetch_reads_prefixes_before_their_requests_run() {
    let env = TestEnv::new();
    let folder = env.folder().to_str().expect("our folders have plain names");
    let figures = objects(&["bench", "prefetch", "--repetitions", "1", "--dir", folder, "--json"]);
    assert_form(&figures);
    let names: Vec<_> = figures.iter().filter_map(|figure| figure["name"].as_str()).collect();
    let measured = [
        "first_layers",
        "first_layer_p50_off",
        "first_layer_p50_on",
        "device_blocks_on",
        "wasted_bytes",
        "missed_windows",
        "pass_1000",
    ];
    assert_eq!(names, measured.map(|name| format!("prefetch.{name}")));
    let value = |at: usize| figures[at]["value"].as_f64().expect("a number");
    // Without hints, all blocks come from the device. Times depend on the load of the machine.
    assert!(value(1) > 0.0 && value(2) > 0.0, "{figures:?}");
    assert!(value(3) < 50.0, "blocks are read before their requests run: {figures:?}");
    // One of 32 requests is aborted before it runs.
    assert!(value(4) > 0.0 && value(4) < 10.0, "{figures:?}");
}

#[test]
fn bench_recompute_counts_hits_of_every_source() {
    let env = TestEnv::new();
    let folder = env.folder().to_str().expect("our folders have plain names");
    let figures = objects(&["bench", "recompute", "--hits", "400", "--dir", folder, "--json"]);
    assert_form(&figures);
    let value = |name: &str| {
        let found = figures.iter().find(|figure| figure["name"] == format!("recompute.{name}").as_str());
        found
            .and_then(|figure| figure["value"].as_f64())
            .unwrap_or_else(|| panic!("no {name} in {figures:?}"))
    };
    assert_eq!((value("hits"), value("hits_off")), (400.0, 40.0));
    for source in ["own_dram", "own_nvme", "peer_dram", "peer_nvme"] {
        assert!(value(&format!("hits_{source}")) > 0.0, "{source}: {figures:?}");
    }
    // Some are slower only if this machine suspends a process for longer than the bound.
    assert!(value("slower_hits") <= 4.0, "{figures:?}");
    assert!(value("hits_computed") > 0.0 && value("hits_computed") < 400.0, "{figures:?}");
    assert_eq!(value("long_loads_cut"), 0.0, "{figures:?}");
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
fn accepts_the_printed_configuration_and_rejects_an_unknown_field() {
    let env = TestEnv::new();
    let file = env.folder().join("reprise.toml");
    let printed = reprise(&["--print-default-config"]).output().expect("reprise can be run");
    assert!(printed.status.success());
    let text = String::from_utf8(printed.stdout).expect("output is UTF-8");
    let path = file.to_str().expect("our folders have plain names");
    std::fs::write(&file, text.replace("repetitions = 11", "repetitions = 0"))
        .expect("the folder is writable");
    let accepted = reprise(&["--config", path, "bench", "match"]).output().expect("reprise can be run");
    assert!(
        String::from_utf8_lossy(&accepted.stderr).contains("--repetitions"),
        "the value of the file is used"
    );
    std::fs::write(&file, format!("{text}\nrepetition = 3\n")).expect("the folder is writable");
    let refused = reprise(&["--config", path, "status"]).output().expect("reprise can be run");
    let stderr = String::from_utf8_lossy(&refused.stderr);
    assert!(!refused.status.success() && stderr.contains("repetition") && stderr.contains(path), "{stderr}");
}

#[test]
fn commands_that_cannot_run_report_the_reason() {
    let env = TestEnv::new();
    let folder = env.folder().to_str().expect("our folders have plain names");
    let cases: [(&[&str], &str); 4] = [
        (&["replay", "--cluster", folder], "cluster.json"),
        (&["status", "--cluster", folder], "cluster.json"),
        (&["demo", "--trace", "/nowhere/trace.jsonl", "--dir", folder], "/nowhere/trace.jsonl"),
        (&["bench", "match", "--repetitions", "0"], "--repetitions"),
    ];
    for (arguments, words) in cases {
        let output = run(arguments);
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success(), "{arguments:?} succeeded");
        assert!(stderr.contains(words), "{arguments:?} printed: {stderr}");
    }
}
