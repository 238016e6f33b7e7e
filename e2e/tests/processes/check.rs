//! `reprise check` and `reprise keep-file` as the chart's pods run them: nodes exchange blocks, and a
//! participant that cannot take part fails within the bound, with the reason.

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};

use reprise_e2e::control_plane::Store;
use reprise_e2e::process::{ChildProcess, binary};
use reprise_e2e::{AgentConfig, PATIENCE, TestEnv, wait_until};
use serde_json::Value;

/// Size of the block that each participant saves, in bytes.
const BLOCK_BYTES: u64 = 64 << 10;

fn start(socket: &Path, arguments: &[&str]) -> Child {
    let mut command = Command::new(binary("reprise"));
    command.args(["--json", "check", "--socket"]).arg(socket).args(arguments);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command.spawn().expect("reprise can be run")
}

fn wait(child: Child) -> Output {
    child.wait_with_output().expect("a child can be waited for")
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn result(output: &Output) -> Value {
    assert!(output.status.success(), "{}", stderr(output));
    serde_json::from_slice(&output.stdout).expect("one object")
}

#[test]
fn a_check_of_two_participants_needs_two_nodes() {
    let env = TestEnv::new();
    let plane = env.control_plane(Store::Embedded);
    let of = |node: &str| AgentConfig {
        control_plane: vec![plane.address().to_owned()],
        ..AgentConfig::named(node)
    };
    let agents = [env.agent(&of("first")), env.agent(&AgentConfig { pool: None, ..of("second") })];
    for node in ["first", "second"] {
        wait_until("both agents are known", PATIENCE, || plane.offers(node)?.then_some(()));
    }

    let both = ["0", "1"].map(|index| {
        let at = usize::from(index == "1");
        start(&agents[at].files().socket, &["--run", "a", "--of", "2", "--index", index])
    });
    for (index, child) in both.into_iter().enumerate() {
        let result = result(&wait(child));
        assert_eq!(result["node"], ["first", "second"][index]);
        assert_eq!(result["saved"]["saved_by"], index);
        assert_eq!(result["saved"]["durable"], index == 0, "the second has no pool: {result}");
        let loaded = &result["loaded"][0];
        assert_eq!(loaded["saved_by"], 1 - index);
        assert_eq!(loaded["bytes_verified"], BLOCK_BYTES);
        assert!(loaded["from"].as_str().is_some_and(|from| from.starts_with("peer ")), "{loaded}");
    }

    // A second run with the same name is rejected.
    let repeated = wait(start(&agents[0].files().socket, &["--run", "a", "--of", "2"]));
    assert!(
        !repeated.status.success() && stderr(&repeated).contains("--run used before"),
        "{}",
        stderr(&repeated)
    );

    // Two participants on one node prove nothing about the exchange between nodes.
    let same_node = ["0", "1"]
        .map(|index| start(&agents[0].files().socket, &["--run", "b", "--of", "2", "--index", index]));
    let same_node = same_node.map(wait);
    for output in &same_node {
        assert!(!output.status.success() && stderr(output).contains("on its own node"), "{}", stderr(output));
    }

    // A single participant loads its own block.
    let single = result(&wait(start(&agents[0].files().socket, &["--run", "c"])));
    assert!(single["loaded"][0]["from"].as_str().is_some_and(|from| from.starts_with("own ")), "{single}");

    // The other participant never starts.
    let waiting = start(&agents[0].files().socket, &["--run", "d", "--of", "2", "--within", "300ms"]);
    let waited = wait(waiting);
    let stderr = stderr(&waited);
    assert!(!waited.status.success() && stderr.contains("was not found within 300ms"), "{stderr}");
    assert!(stderr.contains("of participant 1"), "{stderr}");
}

#[test]
fn a_repeated_check_prints_hits_and_can_be_restarted() {
    let (_env, agent) = TestEnv::with_agent("first");
    // The second process finds the block of the first one.
    for _ in 0..2 {
        let output = wait(start(&agent.files().socket, &["--run", "a", "--again-for", "2500ms"]));
        assert!(output.status.success(), "{}", stderr(&output));
        let text = String::from_utf8_lossy(&output.stdout);
        let lines: Vec<Value> =
            text.lines().map(|line| serde_json::from_str(line).expect("an object a line")).collect();
        let [result, counts @ ..] = lines.as_slice() else { panic!("no line") };
        assert_eq!(result["node"], "first");
        let last = counts.last().expect("a line a second");
        assert!(last["hits"]["own DRAM"].as_u64().is_some_and(|hits| hits > 0), "{text}");
        assert_eq!((&last["own_missed"], &last["sessions"]), (&Value::from(0), &Value::from(0)), "{text}");
    }
}

#[test]
fn a_check_under_load_fails_no_request_when_its_agent_is_replaced() {
    let (_env, mut agent) = TestEnv::with_agent("first");
    let mut child = start(&agent.files().socket, &["--run", "a", "--requests-for", "60s"]);
    let lines = BufReader::new(child.stdout.take().expect("piped above")).lines();
    let mut lines = lines
        .map(|line| serde_json::from_str::<Value>(&line.expect("text")).expect("an object a line"))
        .filter(|line| line["requests"].is_u64());
    let from = |line: &Value, tier: &str| line["hits"][tier].as_u64().unwrap_or_default();
    let before = lines.find(|line| from(line, "own DRAM") > 0).expect("a line with hits");
    assert_eq!(before["sessions"], 0, "{before}");
    agent.stop();
    agent.start();
    let is_back = |line: &Value| line["sessions"] == 1 && from(line, "own NVMe") > 0;
    let after = lines.find(is_back).expect("the new agent has the old one's blocks");
    child.kill().expect("a child can be killed");
    child.wait().expect("a child can be waited for");
    assert_eq!((&after["failed"], &after["wrong_words"]), (&Value::from(0), &Value::from(0)), "{after}");
    let count = |line: &Value, name: &str| line[name].as_u64().unwrap_or_default();
    let hits: u64 = ["own DRAM", "own NVMe"].map(|tier| from(&after, tier)).iter().sum();
    assert_eq!(
        hits + count(&after, "computed"),
        count(&after, "requests"),
        "every request was hit or computed: {after}"
    );
}

#[test]
fn a_check_that_cannot_start_reports_the_reason() {
    let env = TestEnv::new();
    let nowhere = env.folder().join("agent.sock");
    let output = wait(start(&nowhere, &["--run", "a", "--within", "200ms"]));
    assert!(!output.status.success() && stderr(&output).contains("no agent at"), "{}", stderr(&output));
    let output = wait(start(&nowhere, &["--run", "a", "--of", "2", "--index", "2"]));
    assert!(!output.status.success() && stderr(&output).contains("invalid --index"), "{}", stderr(&output));
}

#[test]
fn keep_file_writes_a_file_and_runs_until_it_is_terminated() {
    let env = TestEnv::new();
    let (from, to) = (env.folder().join("profile.json"), env.folder().join("kept.json"));
    fs::write(&from, "{}").expect("written");
    let mut command = Command::new(binary("reprise"));
    command.args(["--json", "keep-file", "--from"]).arg(&from).arg("--to").arg(&to).stdout(Stdio::null());
    let mut keeper = ChildProcess::spawn(command);
    wait_until("the file is written", PATIENCE, || (fs::read_to_string(&to).ok()? == "{}").then_some(()));
    assert!(keeper.is_alive());
    assert!(keeper.terminate().success());
    assert!(to.exists(), "the file stays for pods that restart");
}
