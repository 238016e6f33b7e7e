//! Queue pairs that are lent, with a real agent: it is told what is granted, and nobody gets what it has not let go of.

use std::time::Duration;

use reprise_e2e::config::StartedWith;
use reprise_e2e::kubernetes::User;
use reprise_e2e::{Agent, AgentConfig, NvmeController, Operator, PATIENCE, wait_until};
use serde_json::{Value, json};

use crate::lab::{Lab, SETTLED, SPACE};
use crate::queues::{GRANTED, KIND, WAITS, ask, wait_gone};

/// Bytes of the node's device.
const DEVICE_BYTES: usize = 64 << 20;
/// Queue pairs of its controller, of which half may be lent.
const PAIRS: u32 = 32;

/// A lab with a pool of devices on its nodes, and the agent of the first one.
fn lab_with_agent() -> (Lab, Operator, Agent) {
    let lab = Lab::new();
    let operator = lab.operator();
    lab.raw_pool("p", json!({ "engine": "Plain" }));
    lab.cluster(json!({ "pools": [{ "name": "p" }] }));
    let agent = agent(&lab);
    (lab, operator, agent)
}

/// The agent of `n1`, which has one NVMe device. It sees a root of its own, and is the cluster's as in a pod.
fn agent(lab: &Lab) -> Agent {
    let root = lab.world.folder().join("n1-root");
    let names = root.join("dev/disk/by-id");
    std::fs::create_dir_all(&names).expect("a folder");
    std::fs::write(root.join("dev/drive"), vec![0; DEVICE_BYTES]).expect("a device can be made");
    std::os::unix::fs::symlink("../../drive", names.join("nvme-drive")).expect("a link can be made");
    NvmeController { number: 0, serial: "S1", pairs: PAIRS, device: "drive" }.show(&root);
    let state = lab.world.folder().join("n1-state");
    let config = AgentConfig {
        pool: None,
        extra: format!("[kubernetes]\nstate_directory = \"{}\"\nstatus_every = \"1s\"\n", state.display()),
        ..AgentConfig::named("n1")
    };
    let text = |path: &std::path::Path| path.to_str().expect("folders of tests are UTF-8").to_owned();
    let kubeconfig = text(&lab.server.kubeconfig(&User::ADMIN));
    let arguments = ["--in-cluster", "--kubeconfig", &kubeconfig, "--node-root", &text(&root)];
    let cluster = format!("{SPACE}/c");
    let environment =
        [("NODE_NAME", "n1"), ("POD_IP", "127.0.0.1"), ("POD_NAME", "c-agent-x"), ("CLUSTER", &cluster)];
    let start = StartedWith {
        launcher: Vec::new(),
        arguments: arguments.map(ToOwned::to_owned).to_vec(),
        environment: environment.map(|(name, value)| (name.to_owned(), value.to_owned())).to_vec(),
    };
    lab.world.agent_with(&config, start)
}

/// What the agent says of allocations, and what it is told of them.
fn queues(lab: &Lab) -> (Value, Value) {
    let node = lab.get("CacheNode", "n1").expect("it is there");
    (node.data["status"]["applied"]["queues"].clone(), node.data["spec"]["queues"].clone())
}

/// Asks for queue pairs, and waits until the agent keeps them.
fn keep(lab: &Lab, name: &str, pairs: u32) {
    ask(lab, name, json!({ "queuePairs": pairs }));
    lab.wait_condition(KIND, name, GRANTED);
    let said = lab.wait_condition(KIND, name, ["Programmed", "False", "Unsupported"]);
    assert!(said.contains(&format!("n1 keeps {pairs} queue pairs")), "{said}");
}

#[test]
fn an_agent_keeps_what_is_granted_and_nobody_else_gets_it_before_it_has_let_go() {
    let (lab, operator, mut agent) = lab_with_agent();
    keep(&lab, "a", 12);
    let uid = lab.get(KIND, "a").expect("it is there").metadata.uid.expect("all have one");
    let (says, told) = queues(&lab);
    assert_eq!(says, json!([{ "uid": uid, "queuePairs": 0, "kept": 12 }]));
    assert_eq!(told[0]["allocation"], "cache/a");
    assert_eq!(told[0]["controllers"], json!([{ "serial": "S1", "queuePairs": 12 }]));

    // One that does not answer may have it still.
    agent.freeze();
    ask(&lab, "b", json!({ "queuePairs": 8 }));
    lab.wait_condition(KIND, "b", WAITS);
    lab.delete(KIND, "a");
    lab.wait_condition(KIND, "a", ["DeletionBlocked", "True", "Releasing"]);
    wait_until("the agent is told to let go of it", PATIENCE, || queues(&lab).1.is_null().then_some(()));
    std::thread::sleep(SETTLED);
    assert!(lab.get(KIND, "a").is_some());
    lab.wait_condition(KIND, "b", WAITS);
    agent.thaw();
    wait_gone(&lab, "a");
    lab.wait_condition(KIND, "b", ["Programmed", "False", "Unsupported"]);

    // So may one that was killed: whoever knows that it does not come back says so by deleting the CacheNode.
    agent.kill();
    lab.delete(KIND, "b");
    lab.wait_condition(KIND, "b", ["DeletionBlocked", "True", "Releasing"]);
    std::thread::sleep(SETTLED);
    assert!(lab.get(KIND, "b").is_some());
    agent.start();
    wait_gone(&lab, "b");
    keep(&lab, "c", 4);
    agent.kill();
    lab.delete(KIND, "c");
    lab.wait_condition(KIND, "c", ["DeletionBlocked", "True", "Releasing"]);
    wait_until("the agent would be told", PATIENCE, || queues(&lab).1.is_null().then_some(()));
    lab.delete("CacheNode", "n1");
    wait_gone(&lab, "c");

    // One that was told to stop has said that it has nothing.
    agent.start();
    keep(&lab, "d", 16);
    agent.stop();
    lab.delete(KIND, "d");
    wait_gone(&lab, "d");
    operator.kill();
}

/// The cluster has `n2` only, and `n1` nobody or another one.
fn leave_n1(lab: &Lab, next: Option<&str>) {
    let of = |node: &str| json!({ "nodeSelector": { "name": node } });
    lab.cluster(json!({ "pools": [{ "name": "p" }], "agents": of("n2") }));
    if let Some(next) = next {
        let etcd = json!({ "mode": "External", "keyPrefix": "/next/", "external": { "endpoints": [lab.etcd.endpoint()] } });
        lab.apply(&json!({
            "apiVersion": "reprise.dev/v1alpha1", "kind": "KVCacheCluster", "metadata": { "name": next },
            "spec": { "etcd": etcd, "cache": { "dram": "64Mi", "regionSize": "2Mi" }, "agents": of("n1") },
        }));
    }
}

fn cluster_of_n1(lab: &Lab) -> Value {
    let node = lab.get("CacheNode", "n1");
    node.map(|node| node.data["spec"]["clusterRef"]["name"].clone()).unwrap_or_default()
}

#[test]
fn a_node_that_leaves_its_cluster_is_left_once_its_agent_has_let_go() {
    for next in [None, Some("d")] {
        let (lab, operator, agent) = lab_with_agent();
        // It says so once, and goes on.
        lab.world.allow("this node's CacheNode was deleted");
        lab.world.allow("KVCacheCluster cache/d has this node");
        keep(&lab, "a", 16);
        agent.freeze();
        leave_n1(&lab, next);
        lab.wait_condition(KIND, "a", ["Released", "False", "Releasing"]);
        std::thread::sleep(SETTLED);
        assert!(queues(&lab).0.is_array(), "the CacheNode is there, and the agent has not answered");
        assert_eq!(cluster_of_n1(&lab), "c");
        agent.thaw();
        let said = lab.wait_condition(KIND, "a", ["Released", "True", "AgentGone"]);
        assert!(said.contains("KVCacheCluster cache/c has node n1 no more"), "{said}");
        wait_until("the next one has it", PATIENCE, || (cluster_of_n1(&lab) == json!(next)).then_some(()));
        operator.kill();
    }
}

#[test]
fn an_agent_that_is_gone_with_its_cluster_is_waited_for_a_minute() {
    let (lab, operator, mut agent) = lab_with_agent();
    keep(&lab, "a", 16);
    agent.kill();
    leave_n1(&lab, Some("d"));
    let said = lab.wait_condition(KIND, "a", ["Released", "False", "Releasing"]);
    assert!(said.contains("says nothing for a minute"), "{said}");
    let silent = Duration::from_secs(90);
    lab.wait_condition_within(silent, (KIND, "a"), ["Released", "True", "AgentGone"]);
    wait_until("the next one has it", PATIENCE, || (cluster_of_n1(&lab) == "d").then_some(()));
    lab.delete(KIND, "a");
    wait_gone(&lab, "a");
    operator.kill();
}
