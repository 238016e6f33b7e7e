//! A pool of one file: claimed, used, closed, found again, destroyed.

use std::fs;
use std::process::Command;

use reprise_client::{Scope, Source};
use reprise_e2e::content::small;
use reprise_e2e::control_plane::Store;
use reprise_e2e::process::binary;
use reprise_e2e::{Admin, ApiServer, LoadParams, PATIENCE, TestEnv, wait_until};
use serde_json::{Value, json};

use crate::in_cluster::node::{Node, Setup, condition, device, file_claim, has_state, state};

fn blocks() -> Vec<u64> {
    (0..40).collect()
}

pub(crate) fn a_pool_is_opened_and_closed_while_engines_continue(server: &ApiServer) {
    let node = Node::launch(server, TestEnv::new(), &Setup::of("comes-and-goes"));
    let engine = node.agent.engine(small());
    assert!(!node.is_ready(), "the node has no spec yet");
    node.apply_spec(json!({}));
    node.wait_ready();
    let status = node.wait_status("a node without a pool is ready", |status| {
        condition(status, "AgentReady") == ("True", "AsDesired")
    });
    assert_eq!(condition(&status, "DevicesReady"), ("True", "AsDesired"));
    assert_eq!(status["agent"]["version"], env!("CARGO_PKG_VERSION"));
    assert_eq!(status["agent"]["podName"], "reprise-agent-x");
    assert_eq!(
        (&status["capacity"]["dramTotal"], &status["capacity"]["ssdTotal"]),
        (&json!("16Mi"), &json!("0"))
    );
    let committed = engine.save(&blocks()).expect("there is room in memory");
    let outcome = engine.client().wait_durable(committed.ticket, PATIENCE).expect("a durability notice");
    assert_eq!(outcome.durable, 0, "without a pool nothing is durable");

    let claims = json!({ "claims": [file_claim("p1")] });
    let status = node.apply_and_wait("the pool is open", claims.clone(), has_state("/p1-file", "Open"));
    assert_eq!(device(&status, "/p1-file").expect("reported")["engine"], "Plain");
    assert_eq!(status["applied"]["pools"][0]["uid"], "uid-of-p1");
    assert_eq!(condition(&status, "DevicesReady"), ("True", "AsDesired"));
    let more: Vec<u64> = (100..140).collect();
    engine.save_durably(&more);
    node.wait_status("the used bytes of the pool are reported", |status| {
        device(status, "/p1-file").is_some_and(|device| device["used"] != "0")
    });

    node.apply_and_wait("the pool is closed", json!({}), |status| status["devices"].is_null());
    engine.trim();
    let in_memory = engine.matches(&more, Scope::Local);
    assert!(
        in_memory.iter().all(|source| *source == Source::OwnDram),
        "no block is on a device: {in_memory:?}"
    );

    node.apply_and_wait("the pool is open again", claims, has_state("/p1-file", "Open"));
    engine.trim();
    assert_eq!(engine.load_all(&more, &LoadParams::LOCAL), vec![Source::OwnNvme; 40]);
}

pub(crate) fn a_killed_agent_finds_its_blocks_again(server: &ApiServer) {
    let mut node = Node::start(server, "killed");
    node.open_pool();
    node.agent.engine(small()).save_durably(&blocks());
    node.agent.kill();
    node.agent.start();
    node.wait_ready();
    let engine = node.agent.engine(small());
    assert_eq!(engine.load_all(&blocks(), &LoadParams::LOCAL), vec![Source::OwnNvme; 40]);
    node.wait_status("the pool is reported as open", has_state("/p1-file", "Open"));
}

pub(crate) fn a_missing_file_is_recreated_only_after_its_claim_was_removed(server: &ApiServer) {
    let mut node = Node::start(server, "unmounted");
    node.env.require("a claimed device is not used");
    let (file, elsewhere) = (node.root().join("p1-file"), node.root().join("elsewhere"));
    let mut claims = node.open_pool();
    node.agent.engine(small()).save_durably(&blocks());

    // The machine reboots, and the file system is not mounted.
    node.agent.stop();
    fs::rename(&file, &elsewhere).expect("moved");
    node.agent.start();
    node.wait_ready();
    let refused = |status: &Value| state(status, "/p1-file") == Some("Refused");
    let status = node.wait_status("the missing file is reported", refused);
    let reported = device(&status, "/p1-file").expect("reported");
    assert_eq!(reported["reason"], "DeviceFailed", "{reported}");
    assert!(reported["message"].as_str().unwrap_or_default().contains("mount its file system"), "{reported}");
    assert_eq!(condition(&status, "DevicesReady"), ("False", "DeviceFailed"));
    // A new generation alone does not permit a blank file.
    claims["claims"][0]["generation"] = json!(2);
    node.apply_and_wait("the generation is applied", claims.clone(), |status| {
        refused(status) && status["applied"]["pools"][0]["generation"] == 2
    });
    assert!(!file.exists(), "the agent creates no blank file");

    fs::rename(&elsewhere, &file).expect("moved");
    node.wait_status("the file is open again", has_state("/p1-file", "Open"));
    let engine = node.agent.engine(small());
    assert_eq!(engine.load_all(&blocks(), &LoadParams::LOCAL), vec![Source::OwnNvme; 40]);
    drop(engine);

    // The disk is replaced: the node is removed from the pool and added again.
    node.agent.stop();
    fs::rename(&file, &elsewhere).expect("moved");
    node.agent.start();
    node.wait_status("the missing file is reported again", refused);
    node.apply_and_wait("the claim is removed", json!({}), |status| status["devices"].is_null());
    node.apply_and_wait("a blank file is open", claims, has_state("/p1-file", "Open"));
    let found = node.agent.engine(small()).matches(&blocks(), Scope::Local);
    assert!(!found.contains(&Source::OwnNvme), "the blocks are on the old disk: {found:?}");
}

pub(crate) fn a_wiped_pool_is_destroyed_and_reported(server: &ApiServer) {
    let mut node = Node::start(server, "wiped");
    node.env.allow("destroying the data of a device, as confirmed");
    node.env.require("a claimed device is not used");
    let (file, elsewhere) = (node.root().join("p1-file"), node.root().join("elsewhere"));
    let claims = node.open_pool();
    let engine = node.agent.engine(small());
    engine.save_durably(&blocks());
    assert!(file.exists());

    // While its file system is not mounted, the agent can neither destroy the data nor report that it has.
    drop(engine);
    node.agent.stop();
    fs::rename(&file, &elsewhere).expect("moved");
    node.agent.start();
    node.wait_ready();
    let mut wiped = claims.clone();
    wiped["claims"][0]["wipe"] = json!(true);
    node.apply_and_wait("the missing file is reported", wiped.clone(), |status| {
        let message = device(status, "/p1-file").and_then(|message| message["message"].as_str());
        message.is_some_and(|message| message.contains("its data cannot be destroyed"))
    });
    fs::rename(&elsewhere, &file).expect("moved");
    node.wait_status("the pool is wiped", has_state("/p1-file", "Wiped"));
    assert!(!file.exists(), "the file is deleted");
    // A restart of the agent changes nothing, although the file no longer exists.
    node.agent.stop();
    node.agent.start();
    wiped["claims"][0]["generation"] = json!(2);
    node.apply_and_wait("the pool is still wiped", wiped, |status| {
        state(status, "/p1-file") == Some("Wiped") && status["applied"]["pools"][0]["generation"] == 2
    });
    node.apply_and_wait("the claim is removed", json!({}), |status| status["devices"].is_null());

    node.apply_and_wait("a new pool is open", claims, has_state("/p1-file", "Open"));
    let engine = node.agent.engine(small());
    let found = engine.matches(&blocks(), Scope::Local);
    assert!(!found.contains(&Source::OwnNvme), "no block of the old pool is found: {found:?}");
}

pub(crate) fn a_pool_that_changes_its_io_engine_is_reopened_with_its_blocks(server: &ApiServer) {
    let node = Node::start(server, "reopened");
    let mut claims = node.open_pool();
    let engine = node.agent.engine(small());
    engine.save_durably(&blocks());
    // A new generation alone does not reopen the pool.
    claims["claims"][0]["generation"] = json!(2);
    node.apply_and_wait("the generation is applied", claims.clone(), |status| {
        status["applied"]["pools"][0]["generation"] == 2
    });
    let opened = |node: &Node<'_>| {
        let log = std::fs::read_to_string(&node.agent.files().log).expect("a log");
        log.matches("pool device ready").count()
    };
    assert_eq!(opened(&node), 1);
    claims["claims"][0]["engine"] = json!("IoUring");
    claims["claims"][0]["fallbackEngine"] = json!("Plain");
    node.apply_and_wait("the pool is open again", claims, |status| {
        state(status, "/p1-file") == Some("Open") && status["applied"]["pools"][0]["generation"] == 2
    });
    assert_eq!(opened(&node), 2);
    engine.trim();
    assert_eq!(engine.load_all(&blocks(), &LoadParams::LOCAL), vec![Source::OwnNvme; 40]);
}

/// Returns the NVMe capacity of the only node, as a member reports it.
fn nvme_bytes(member: &Admin) -> Option<u64> {
    member.json("/nodes")[0]["nvme_bytes"].as_u64()
}

/// Returns the output of `reprise status`.
fn status(member: &str) -> String {
    let command = Command::new(binary("reprise")).args(["status", "--controlplane", member]).output();
    let command = command.expect("reprise can be run");
    assert!(command.status.success(), "{}", String::from_utf8_lossy(&command.stderr));
    String::from_utf8(command.stdout).expect("text")
}

pub(crate) fn the_reported_capacity_is_that_of_the_open_pools(server: &ApiServer) {
    let env = TestEnv::new();
    let member = env.control_plane(Store::Memory);
    let address = member.address().to_owned();
    let setup = Setup { control_plane: vec![address.clone()], ..Setup::of("grows") };
    let node = Node::launch(server, env, &setup);
    let wait_for = |what: &str, holds: fn(u64) -> bool| {
        wait_until(what, PATIENCE, || nvme_bytes(member.admin()).filter(|bytes| holds(*bytes)))
    };
    node.apply_and_wait("the node is registered", json!({}), |status| {
        condition(status, "Connected").0 == "True"
    });
    wait_for("a node without a pool", |bytes| bytes == 0);
    assert!(status(&address).contains("% of 0 B"), "{}", status(&address));

    node.open_pool();
    let capacity = wait_for("the capacity of the pool", |bytes| bytes > 0);
    let device = &node.agent.admin().json("/status")["devices"][0];
    assert_eq!(Some(capacity), device["slot_bytes"].as_u64());
    assert!(!status(&address).contains("of 0 B"), "{}", status(&address));

    node.apply_and_wait("the pool is closed", json!({}), |status| status["devices"].is_null());
    wait_for("a node without a pool again", |bytes| bytes == 0);
    drop(node.agent);
    drop(member);
}
