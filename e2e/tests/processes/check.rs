//! `reprise check` and `reprise keep-file` as the chart's pods run them: blocks go around between nodes, and whoever cannot take part
//! is told why, within the bound.

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};

use reprise_e2e::control_plane::Store;
use reprise_e2e::process::{Running, binary};
use reprise_e2e::{AgentConfig, PATIENCE, World, wait_until};
use serde_json::Value;

/// Bytes of the block that each saves.
const BLOCK_BYTES: u64 = 64 << 10;

fn start(socket: &Path, arguments: &[&str]) -> Child {
    let mut command = Command::new(binary("reprise"));
    command.args(["--json", "check", "--socket"]).arg(socket).args(arguments);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command.spawn().expect("reprise can be run")
}

fn ended(child: Child) -> Output {
    child.wait_with_output().expect("one's own child can be waited for")
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn checked(output: &Output) -> Value {
    assert!(output.status.success(), "{}", said(output));
    serde_json::from_slice(&output.stdout).expect("one object")
}

#[test]
fn blocks_go_around_between_two_nodes_and_not_within_one() {
    let world = World::new();
    let plane = world.control_plane(Store::Embedded);
    let of = |node: &str| AgentConfig {
        control_plane: vec![plane.address().to_owned()],
        ..AgentConfig::named(node)
    };
    let agents = [world.agent(&of("first")), world.agent(&AgentConfig { pool: None, ..of("second") })];
    for node in ["first", "second"] {
        wait_until("both agents are known", PATIENCE, || plane.offers(node)?.then_some(()));
    }

    let both = ["0", "1"].map(|index| {
        let at = usize::from(index == "1");
        start(&agents[at].files().socket, &["--run", "a", "--of", "2", "--index", index])
    });
    for (index, child) in both.into_iter().enumerate() {
        let checked = checked(&ended(child));
        assert_eq!(checked["node"], ["first", "second"][index]);
        assert_eq!(checked["saved"]["saved_by"], index);
        assert_eq!(checked["saved"]["durable"], index == 0, "the second has no pool: {checked}");
        let loaded = &checked["loaded"][0];
        assert_eq!(loaded["saved_by"], 1 - index);
        assert_eq!(loaded["bytes_verified"], BLOCK_BYTES);
        assert!(loaded["from"].as_str().is_some_and(|from| from.starts_with("peer ")), "{loaded}");
    }

    // Once more under the same name is no new check.
    let again = ended(start(&agents[0].files().socket, &["--run", "a", "--of", "2"]));
    assert!(!again.status.success() && said(&again).contains("--run used before"), "{}", said(&again));

    // Two that meet on one node have shown nothing.
    let near = ["0", "1"]
        .map(|index| start(&agents[0].files().socket, &["--run", "b", "--of", "2", "--index", index]));
    let near = near.map(ended);
    for output in &near {
        assert!(!output.status.success() && said(output).contains("nodes of their own"), "{}", said(output));
    }

    // One alone loads what it has saved.
    let alone = checked(&ended(start(&agents[0].files().socket, &["--run", "c"])));
    assert!(alone["loaded"][0]["from"].as_str().is_some_and(|from| from.starts_with("own ")), "{alone}");

    // The other never comes.
    let waiting = start(&agents[0].files().socket, &["--run", "d", "--of", "2", "--within", "300ms"]);
    let waited = ended(waiting);
    let words = said(&waited);
    assert!(!waited.status.success() && words.contains("was not found within 300ms"), "{words}");
    assert!(words.contains("saved by number 1"), "{words}");
}

#[test]
fn who_goes_on_says_what_was_hit_and_may_be_started_again() {
    let world = World::new();
    let agent = world.agent(&AgentConfig::named("first"));
    // The second process finds what the first one has saved.
    for _ in 0..2 {
        let output = ended(start(&agent.files().socket, &["--run", "a", "--again-for", "2500ms"]));
        assert!(output.status.success(), "{}", said(&output));
        let text = String::from_utf8_lossy(&output.stdout);
        let lines: Vec<Value> =
            text.lines().map(|line| serde_json::from_str(line).expect("an object a line")).collect();
        let [checked, counts @ ..] = lines.as_slice() else { panic!("no line") };
        assert_eq!(checked["node"], "first");
        let last = counts.last().expect("a line a second");
        assert!(last["hits"]["own DRAM"].as_u64().is_some_and(|hits| hits > 0), "{text}");
        assert_eq!((&last["own_missed"], &last["sessions"]), (&Value::from(0), &Value::from(0)), "{text}");
    }
}

#[test]
fn who_serves_requests_fails_none_when_its_agent_is_replaced() {
    let world = World::new();
    let mut agent = world.agent(&AgentConfig::named("first"));
    let mut child = start(&agent.files().socket, &["--run", "a", "--requests-for", "60s"]);
    let lines = BufReader::new(child.stdout.take().expect("piped above")).lines();
    let mut lines = lines
        .map(|line| serde_json::from_str::<Value>(&line.expect("text")).expect("an object a line"))
        .filter(|line| line["requests"].is_u64());
    let from = |line: &Value, tier: &str| line["hits"][tier].as_u64().unwrap_or_default();
    let before = lines.find(|line| from(line, "own DRAM") > 0).expect("it asks for what it has saved");
    assert_eq!(before["sessions"], 0, "{before}");
    agent.stop();
    agent.start();
    let is_back = |line: &Value| line["sessions"] == 1 && from(line, "own NVMe") > 0;
    let after = lines.find(is_back).expect("the new agent has what the old one has kept");
    child.kill().expect("one's own child can be ended");
    child.wait().expect("one's own child can be waited for");
    assert_eq!((&after["failed"], &after["wrong_words"]), (&Value::from(0), &Value::from(0)), "{after}");
    let count = |line: &Value, name: &str| line[name].as_u64().unwrap_or_default();
    let hits: u64 = ["own DRAM", "own NVMe"].map(|tier| from(&after, tier)).iter().sum();
    assert_eq!(hits + count(&after, "computed"), count(&after, "requests"), "each had bytes: {after}");
}

#[test]
fn who_cannot_begin_is_told_why() {
    let world = World::new();
    let nowhere = world.folder().join("agent.sock");
    let output = ended(start(&nowhere, &["--run", "a", "--within", "200ms"]));
    assert!(!output.status.success() && said(&output).contains("no agent at"), "{}", said(&output));
    let output = ended(start(&nowhere, &["--run", "a", "--of", "2", "--index", "2"]));
    assert!(!output.status.success() && said(&output).contains("--index is below --of"), "{}", said(&output));
}

#[test]
fn a_file_is_kept_until_somebody_ends_it() {
    let world = World::new();
    let (from, to) = (world.folder().join("profile.json"), world.folder().join("kept.json"));
    fs::write(&from, "{}").expect("written");
    let mut command = Command::new(binary("reprise"));
    command.args(["--json", "keep-file", "--from"]).arg(&from).arg("--to").arg(&to).stdout(Stdio::null());
    let mut keeper = Running::spawn(command);
    wait_until("the file is written", PATIENCE, || (fs::read_to_string(&to).ok()? == "{}").then_some(()));
    assert!(keeper.is_alive());
    assert!(keeper.terminate().success());
    assert!(to.exists(), "pods that need it may start again");
}
