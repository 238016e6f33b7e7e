//! Modes of a node, and configuration changes without a restart.

use std::process::Command;

use reprise_e2e::content::small;
use reprise_e2e::control_plane::Store;
use reprise_e2e::process::binary;
use reprise_e2e::{AgentConfig, ApiServer, TestEnv, wait_until};
use reprise_policy::ByteSize;
use serde_json::json;

use crate::in_cluster::node::{Node, REPORTED_WITHIN, Setup, condition, file_claim, state};

/// A small region, so that regions are left for a tenant that has no engines on a node yet.
const REGION: ByteSize = ByteSize(2 << 20);

fn mode(node: &Node<'_>) -> String {
    node.agent.admin().json("/status")["placement"]["mode"].as_str().expect("a mode").to_owned()
}

pub(crate) fn a_node_applies_the_mode_of_its_spec(server: &ApiServer) {
    let mut node = Node::start(server, "cordoned");
    for (wanted, is_cordoned) in [("Cordoned", "True"), ("Draining", "True"), ("Active", "False")] {
        let status = node.apply_and_wait("the mode is reported", json!({ "mode": wanted }), |status| {
            condition(status, "Cordoned").0 == is_cordoned
        });
        assert_eq!(mode(&node), wanted.to_lowercase());
        assert_eq!(status["drain"].is_null(), wanted != "Draining");
    }
    node.apply_and_wait("the node is cordoned", json!({ "mode": "Cordoned" }), |status| {
        condition(status, "Cordoned").0 == "True"
    });
    node.agent.kill();
    node.agent.start();
    node.wait_ready();
    assert_eq!(mode(&node), "cordoned", "the mode survives a restart");
}

pub(crate) fn a_node_is_drained_by_its_spec(server: &ApiServer) {
    let env = TestEnv::new();
    env.allow("node is silent");
    let member = env.control_plane(Store::Memory);
    let other = env.agent(&AgentConfig {
        control_plane: vec![member.address().to_owned()],
        region: REGION,
        ..AgentConfig::named("stays")
    });
    let setup = Setup { control_plane: vec![member.address().to_owned()], ..Setup::of("drained") };
    let node = Node::launch(server, env, &setup);
    let claims = json!({ "claims": [file_claim("p1")] });
    let status = node.apply_and_wait("the pool is open", claims.clone(), |status| {
        state(status, "/p1-file") == Some("Open") && condition(status, "Connected").0 == "True"
    });
    assert!(status["registration"]["node"].as_u64().is_some_and(|number| number > 0));
    assert_eq!(status["registration"]["membersConnected"], 1);
    node.agent.engine(small()).save_durably(&(0..60).collect::<Vec<u64>>());

    // The operator writes both: members must know which node drains, and the agent starts with its node's
    // spec.
    let drain = Command::new(binary("reprise"))
        .args(["drain", "drained", "--controlplane", member.address()])
        .output();
    let drain = drain.expect("reprise can be run");
    assert!(drain.status.success(), "{}", String::from_utf8_lossy(&drain.stderr));
    let mut draining = claims;
    draining["mode"] = json!("Draining");
    let status = node.apply_and_wait("every block is on the other node", draining, |status| {
        condition(status, "Drained") == ("True", "AsDesired")
    });
    assert_eq!(status["drain"]["drained"], true);
    assert_eq!(other.admin().counter("nvme_blocks"), 60);
    drop(node.agent);
    drop(other);
    drop(member);
}

pub(crate) fn the_free_share_of_a_pool_changes_without_a_restart(server: &ApiServer) {
    let node = Node::start(server, "reconfigured");
    let path = node.agent.files().config.clone();
    let digest = || {
        let output = Command::new("sha256sum").arg(&path).output().expect("sha256sum can be run");
        let text = String::from_utf8(output.stdout).expect("text");
        format!("sha256:{}", text.split_whitespace().next().expect("a digest"))
    };
    let before = digest();
    let claims = |digest: &str| json!({ "claims": [file_claim("p1")], "configurationDigest": digest });
    let status =
        node.apply_and_wait("the running configuration is the desired one", claims(&before), |status| {
            state(status, "/p1-file") == Some("Open") && condition(status, "ConfigurationApplied").0 == "True"
        });
    assert_eq!(status["applied"]["configurationDigest"], before);
    let engine = node.agent.engine(small());
    for start in (0..600).step_by(50) {
        engine.save_durably(&(start..start + 50).collect::<Vec<u64>>());
    }
    let used = node.agent.admin().counter("pool_used_bytes");

    let text = std::fs::read_to_string(&path).expect("a configuration");
    let changed = text.replace("[cache]", "[cache]\npool_free_permille = 900");
    assert_ne!(text, changed);
    std::fs::write(&path, &changed).expect("written");
    let after = digest();
    let status = node.apply_and_wait("the new share is in effect", claims(&after), |status| {
        status["applied"]["configurationDigest"] == after
    });
    assert_eq!(condition(&status, "ConfigurationApplied"), ("True", "AsDesired"));
    wait_until("blocks are evicted", REPORTED_WITHIN, || {
        (node.agent.admin().counter("pool_used_bytes") < used / 2).then_some(())
    });

    std::fs::write(&path, changed.replace("[limits]", "") + "[limits]\nload_hold = \"30s\"\n")
        .expect("written");
    let status = node.apply_and_wait("the rest needs a restart", claims(&digest()), |status| {
        condition(status, "ConfigurationApplied").0 == "False"
    });
    assert_eq!(
        status["applied"]["configurationDigest"], after,
        "the reported configuration is the one in effect"
    );
}
