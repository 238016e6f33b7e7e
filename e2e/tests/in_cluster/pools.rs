//! A pool of one file: claimed, used, closed, found again, destroyed.

use std::fs;
use std::process::Command;

use reprise_client::{Scope, Source};
use reprise_e2e::content::small;
use reprise_e2e::control_plane::Store;
use reprise_e2e::process::binary;
use reprise_e2e::{Admin, ApiServer, Loading, PATIENCE, World, wait_until};
use serde_json::{Value, json};

use crate::node::{Node, Setup, condition, device, file_claim, state};

fn blocks() -> Vec<u64> {
    (0..40).collect()
}

pub(crate) fn a_pool_comes_and_goes_while_engines_go_on(server: &ApiServer) {
    let node = Node::launch(server, World::new(), &Setup::of("comes-and-goes"));
    let engine = node.agent.engine(small());
    assert!(!node.is_ready(), "nobody has said yet what the node is for");
    node.want(json!({}));
    node.wait_ready();
    let status = node.wait_status("a node without a pool says so", |status| {
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
    let outcome = engine.client().wait_durable(committed.ticket, PATIENCE).expect("a notice");
    assert_eq!(outcome.durable, 0, "without a pool nothing is durable");

    let claims = json!({ "claims": [file_claim("p1")] });
    let status =
        node.bring("the pool is open", claims.clone(), |status| state(status, "/p1-file") == Some("Open"));
    assert_eq!(device(&status, "/p1-file").expect("there")["engine"], "Plain");
    assert_eq!(status["applied"]["pools"][0]["uid"], "uid-of-p1");
    assert_eq!(condition(&status, "DevicesReady"), ("True", "AsDesired"));
    let more: Vec<u64> = (100..140).collect();
    engine.save_durably(&more);
    node.wait_status("what is used of the pool is told", |status| {
        device(status, "/p1-file").is_some_and(|device| device["used"] != "0")
    });

    node.bring("the pool is closed", json!({}), |status| status["devices"].is_null());
    engine.trim();
    let in_memory = engine.matches(&more, Scope::Local);
    assert!(
        in_memory.iter().all(|source| *source == Source::OwnDram),
        "nothing is on a device: {in_memory:?}"
    );

    node.bring("the pool is back", claims, |status| state(status, "/p1-file") == Some("Open"));
    engine.trim();
    assert_eq!(engine.load_all(&more, &Loading::LOCAL), vec![Source::OwnNvme; 40]);
}

pub(crate) fn a_killed_agent_finds_its_blocks_again(server: &ApiServer) {
    let mut node = Node::start(server, "killed");
    let claims = json!({ "claims": [file_claim("p1")] });
    node.bring("the pool is open", claims, |status| state(status, "/p1-file") == Some("Open"));
    node.agent.engine(small()).save_durably(&blocks());
    node.agent.kill();
    node.agent.start();
    node.wait_ready();
    let engine = node.agent.engine(small());
    assert_eq!(engine.load_all(&blocks(), &Loading::LOCAL), vec![Source::OwnNvme; 40]);
    node.wait_status("the pool is told to be open", |status| state(status, "/p1-file") == Some("Open"));
}

pub(crate) fn a_file_that_is_not_there_at_the_start_is_waited_for_and_made_anew_only_by_a_pool_that_begins_anew(
    server: &ApiServer,
) {
    let mut node = Node::start(server, "unmounted");
    node.world.require("a device of a claim is not used");
    let (file, elsewhere) = (node.root().join("p1-file"), node.root().join("elsewhere"));
    let mut claims = json!({ "claims": [file_claim("p1")] });
    node.bring("the pool is open", claims.clone(), |status| state(status, "/p1-file") == Some("Open"));
    node.agent.engine(small()).save_durably(&blocks());

    // The machine boots, and the file system is not mounted.
    node.agent.stop();
    fs::rename(&file, &elsewhere).expect("moved");
    node.agent.start();
    node.wait_ready();
    let refused = |status: &Value| state(status, "/p1-file") == Some("Refused");
    let status = node.wait_status("the file is missed", refused);
    let told = device(&status, "/p1-file").expect("there");
    assert_eq!(told["reason"], "DeviceFailed", "{told}");
    assert!(told["message"].as_str().unwrap_or_default().contains("mount its file system"), "{told}");
    assert_eq!(condition(&status, "DevicesReady"), ("False", "DeviceFailed"));
    // Another generation alone is no reason to begin anew.
    claims["claims"][0]["generation"] = json!(2);
    node.bring("the generation is applied", claims.clone(), |status| {
        refused(status) && status["applied"]["pools"][0]["generation"] == 2
    });
    assert!(!file.exists(), "no blank one is in its place");

    fs::rename(&elsewhere, &file).expect("moved");
    node.wait_status("the file is used again", |status| state(status, "/p1-file") == Some("Open"));
    let engine = node.agent.engine(small());
    assert_eq!(engine.load_all(&blocks(), &Loading::LOCAL), vec![Source::OwnNvme; 40]);
    drop(engine);

    // Its disk is replaced: the node is taken out of the pool and put back.
    node.agent.stop();
    fs::rename(&file, &elsewhere).expect("moved");
    node.agent.start();
    node.wait_status("the file is missed again", refused);
    node.bring("the claim is gone", json!({}), |status| status["devices"].is_null());
    node.bring("a blank file is used", claims, |status| state(status, "/p1-file") == Some("Open"));
    let left = node.agent.engine(small()).matches(&blocks(), Scope::Local);
    assert!(!left.contains(&Source::OwnNvme), "the blocks are on the old disk: {left:?}");
}

pub(crate) fn a_wiped_pool_is_destroyed_and_said_so(server: &ApiServer) {
    let mut node = Node::start(server, "wiped");
    node.world.allow("destroying the data of a device, as was confirmed");
    node.world.require("a device of a claim is not used");
    let (file, elsewhere) = (node.root().join("p1-file"), node.root().join("elsewhere"));
    let claims = json!({ "claims": [file_claim("p1")] });
    node.bring("the pool is open", claims.clone(), |status| state(status, "/p1-file") == Some("Open"));
    let engine = node.agent.engine(small());
    engine.save_durably(&blocks());
    assert!(file.exists());

    // While its file system is not mounted nobody can destroy it, nor say so.
    drop(engine);
    node.agent.stop();
    fs::rename(&file, &elsewhere).expect("moved");
    node.agent.start();
    node.wait_ready();
    let mut wiped = claims.clone();
    wiped["claims"][0]["wipe"] = json!(true);
    node.bring("the file is missed", wiped.clone(), |status| {
        let told = device(status, "/p1-file").and_then(|told| told["message"].as_str());
        told.is_some_and(|told| told.contains("nobody can destroy its data"))
    });
    fs::rename(&elsewhere, &file).expect("moved");
    node.wait_status("the pool is wiped", |status| state(status, "/p1-file") == Some("Wiped"));
    assert!(!file.exists(), "the file is gone with its data");
    // Whether it was there when the agent comes back makes no difference.
    node.agent.stop();
    node.agent.start();
    wiped["claims"][0]["generation"] = json!(2);
    node.bring("the pool is wiped still", wiped, |status| {
        state(status, "/p1-file") == Some("Wiped") && status["applied"]["pools"][0]["generation"] == 2
    });
    node.bring("the claim is gone", json!({}), |status| status["devices"].is_null());

    node.bring("a new pool is open", claims, |status| state(status, "/p1-file") == Some("Open"));
    let engine = node.agent.engine(small());
    let left = engine.matches(&blocks(), Scope::Local);
    assert!(!left.contains(&Source::OwnNvme), "nothing of the old pool is left: {left:?}");
}

pub(crate) fn a_pool_that_changes_its_engine_is_opened_again_with_its_blocks(server: &ApiServer) {
    let node = Node::start(server, "reopened");
    let mut claims = json!({ "claims": [file_claim("p1")] });
    node.bring("the pool is open", claims.clone(), |status| state(status, "/p1-file") == Some("Open"));
    let engine = node.agent.engine(small());
    engine.save_durably(&blocks());
    // Another generation alone is no reason to open anything again.
    claims["claims"][0]["generation"] = json!(2);
    node.bring("the generation is applied", claims.clone(), |status| {
        status["applied"]["pools"][0]["generation"] == 2
    });
    let opened = |node: &Node<'_>| {
        let log = std::fs::read_to_string(&node.agent.files().log).expect("a log");
        log.matches("pool device ready").count()
    };
    assert_eq!(opened(&node), 1);
    claims["claims"][0]["engine"] = json!("IoUring");
    claims["claims"][0]["fallbackEngine"] = json!("Plain");
    node.bring("the pool is open again", claims, |status| {
        state(status, "/p1-file") == Some("Open") && status["applied"]["pools"][0]["generation"] == 2
    });
    assert_eq!(opened(&node), 2);
    engine.trim();
    assert_eq!(engine.load_all(&blocks(), &Loading::LOCAL), vec![Source::OwnNvme; 40]);
}

/// The NVMe capacity of the only node, as a member reports it.
fn nvme_bytes(member: &Admin) -> Option<u64> {
    member.json("/nodes")[0]["nvme_bytes"].as_u64()
}

/// What `reprise status` prints.
fn status(member: &str) -> String {
    let command = Command::new(binary("reprise")).args(["status", "--controlplane", member]).output();
    let command = command.expect("reprise starts");
    assert!(command.status.success(), "{}", String::from_utf8_lossy(&command.stderr));
    String::from_utf8(command.stdout).expect("text")
}

pub(crate) fn the_capacity_that_is_reported_is_that_of_the_pools_that_are_open_now(server: &ApiServer) {
    let world = World::new();
    let member = world.control_plane(Store::Memory);
    let address = member.address().to_owned();
    let setup = Setup { control_plane: vec![address.clone()], ..Setup::of("grows") };
    let node = Node::launch(server, world, &setup);
    let wait_for = |what: &str, is_right: fn(u64) -> bool| {
        wait_until(what, PATIENCE, || nvme_bytes(member.admin()).filter(|bytes| is_right(*bytes)))
    };
    node.bring("the node is registered", json!({}), |status| condition(status, "Connected").0 == "True");
    wait_for("a node without a pool", |bytes| bytes == 0);
    assert!(status(&address).contains("% of 0 B"), "{}", status(&address));

    let claims = json!({ "claims": [file_claim("p1")] });
    node.bring("the pool is open", claims, |status| state(status, "/p1-file") == Some("Open"));
    let capacity = wait_for("the capacity of the pool", |bytes| bytes > 0);
    let device = &node.agent.admin().json("/status")["devices"][0];
    assert_eq!(Some(capacity), device["slot_bytes"].as_u64());
    assert!(!status(&address).contains("of 0 B"), "{}", status(&address));

    node.bring("the pool is closed", json!({}), |status| status["devices"].is_null());
    wait_for("a node without a pool again", |bytes| bytes == 0);
    drop(node.agent);
    drop(member);
}
