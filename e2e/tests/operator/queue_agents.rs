//! Queue-pair grants with a real agent: pairs are not granted again before the agent has released them.

use std::time::Duration;

use reprise_e2e::kubernetes::User;
use reprise_e2e::process::LaunchOptions;
use reprise_e2e::{Agent, AgentConfig, NvmeController, Operator, PATIENCE, wait_until};
use serde_json::{Value, json};

use crate::operator::queues::{GRANTED, KIND, WAITING, create_allocation, delete_and_wait, wait_deleted};
use crate::operator::test_cluster::{NAMESPACE, TestCluster};

/// Bytes of the node's device.
const DEVICE_BYTES: usize = 64 << 20;
/// Queue pairs of its controller, half of which may be granted.
const PAIRS: u32 = 32;

/// Starts a cluster with a pool of raw devices and the agent of `n1`.
fn lab_with_agent() -> (TestCluster, Operator, Agent) {
    let (k8s, operator) = TestCluster::with_operator();
    k8s.raw_pool("p", json!({ "engine": "Plain" }));
    k8s.cluster(json!({ "pools": [{ "name": "p" }] }));
    let agent = agent(&k8s);
    (k8s, operator, agent)
}

/// Starts the agent of `n1`, configured as in a pod, with a private root directory that has one NVMe device.
fn agent(k8s: &TestCluster) -> Agent {
    let root = k8s.env.folder().join("n1-root");
    let names = root.join("dev/disk/by-id");
    std::fs::create_dir_all(&names).expect("a folder");
    std::fs::write(root.join("dev/drive"), vec![0; DEVICE_BYTES]).expect("a device file can be written");
    std::os::unix::fs::symlink("../../drive", names.join("nvme-drive")).expect("a link can be created");
    NvmeController { number: 0, serial: "S1", pairs: PAIRS, device: "drive" }.create_under(&root);
    agent_at(k8s, &root)
}

/// Starts the agent of `n1`, configured as in a pod, with this root directory of its node.
pub(crate) fn agent_at(k8s: &TestCluster, root: &std::path::Path) -> Agent {
    let state = k8s.env.folder().join("n1-state");
    let config = AgentConfig {
        pool: None,
        extra: format!("[kubernetes]\nstate_directory = \"{}\"\nstatus_every = \"1s\"\n", state.display()),
        ..AgentConfig::named("n1")
    };
    let text = |path: &std::path::Path| path.to_str().expect("folders of tests are UTF-8").to_owned();
    let kubeconfig = text(&k8s.server.kubeconfig(&User::ADMIN));
    let arguments = ["--in-cluster", "--kubeconfig", &kubeconfig, "--node-root", &text(root)];
    let cluster = format!("{NAMESPACE}/c");
    let environment =
        [("NODE_NAME", "n1"), ("POD_IP", "127.0.0.1"), ("POD_NAME", "c-agent-x"), ("CLUSTER", &cluster)];
    let start = LaunchOptions {
        launcher: Vec::new(),
        arguments: arguments.map(ToOwned::to_owned).to_vec(),
        environment: environment.map(|(name, value)| (name.to_owned(), value.to_owned())).to_vec(),
    };
    k8s.env.agent_with(&config, start)
}

/// Allocations in the agent's status, and those in the CacheNode's spec.
fn queues(k8s: &TestCluster) -> (Value, Value) {
    let node = k8s.get("CacheNode", "n1").expect("the object exists");
    (node.data["status"]["applied"]["queues"].clone(), node.data["spec"]["queues"].clone())
}

/// Creates an allocation, and waits until the agent has set its queue pairs aside.
fn allocate_and_wait(k8s: &TestCluster, name: &str, pairs: u32) {
    create_allocation(k8s, name, json!({ "queuePairs": pairs }));
    k8s.wait_condition(KIND, name, GRANTED);
    k8s.wait_message(
        KIND,
        name,
        ["Programmed", "False", "Unsupported"],
        &[&format!("n1 has set {pairs} queue pairs aside")],
    );
}

#[test]
fn granted_queue_pairs_are_not_reused_before_agent_releases_them() {
    let (k8s, _operator, mut agent) = lab_with_agent();
    allocate_and_wait(&k8s, "a", 12);
    let uid = k8s.get(KIND, "a").expect("the object exists").metadata.uid.expect("stored objects have a UID");
    let (reported, requested) = queues(&k8s);
    let unavailable = "the agent does not drive controller S1: engines get queue pairs of open devices of engine UserNvme only";
    assert_eq!(reported, json!([{ "uid": uid, "queuePairs": 0, "kept": 12, "unavailable": unavailable }]));
    assert_eq!(requested[0]["allocation"], "cache/a");
    assert_eq!(requested[0]["depth"], 1024);
    assert_eq!(requested[0]["controllers"], json!([{ "serial": "S1", "queuePairs": 12 }]));

    // An unresponsive agent may still use the queue pairs.
    agent.freeze();
    create_allocation(&k8s, "b", json!({ "queuePairs": 8 }));
    k8s.wait_condition(KIND, "b", WAITING);
    k8s.delete(KIND, "a");
    k8s.wait_condition(KIND, "a", ["DeletionBlocked", "True", "Releasing"]);
    wait_until("the spec no longer has the allocation", PATIENCE, || queues(&k8s).1.is_null().then_some(()));
    k8s.settle();
    assert!(k8s.get(KIND, "a").is_some());
    k8s.wait_condition(KIND, "b", WAITING);
    agent.thaw();
    wait_deleted(&k8s, "a");
    k8s.wait_condition(KIND, "b", ["Programmed", "False", "Unsupported"]);

    // A killed agent may return. Deleting its CacheNode states that it does not.
    agent.kill();
    k8s.delete(KIND, "b");
    k8s.wait_condition(KIND, "b", ["DeletionBlocked", "True", "Releasing"]);
    k8s.settle();
    assert!(k8s.get(KIND, "b").is_some());
    agent.start();
    wait_deleted(&k8s, "b");
    allocate_and_wait(&k8s, "c", 4);
    agent.kill();
    k8s.delete(KIND, "c");
    k8s.wait_condition(KIND, "c", ["DeletionBlocked", "True", "Releasing"]);
    wait_until("the spec has no allocation", PATIENCE, || queues(&k8s).1.is_null().then_some(()));
    k8s.delete("CacheNode", "n1");
    wait_deleted(&k8s, "c");

    // An agent that stops gracefully reports that it holds nothing.
    agent.start();
    allocate_and_wait(&k8s, "d", 16);
    agent.stop();
    delete_and_wait(&k8s, "d");
}

/// Removes `n1` from the cluster, and adds it to cluster `next` if there is one.
fn unassign_n1(k8s: &TestCluster, next: Option<&str>) {
    let of = |node: &str| json!({ "nodeSelector": { "name": node } });
    k8s.cluster(json!({ "pools": [{ "name": "p" }], "agents": of("n2") }));
    if let Some(next) = next {
        let etcd = json!({ "mode": "External", "keyPrefix": "/next/", "external": { "endpoints": [k8s.etcd.endpoint()] } });
        k8s.apply_resource(
            "KVCacheCluster",
            next,
            json!({ "etcd": etcd, "cache": { "dram": "64Mi", "regionSize": "2Mi" }, "agents": of("n1") }),
        );
    }
}

fn n1_cluster(k8s: &TestCluster) -> Value {
    let node = k8s.get("CacheNode", "n1");
    node.map(|node| node.data["spec"]["clusterRef"]["name"].clone()).unwrap_or_default()
}

#[test]
fn node_leaves_cluster_after_its_agent_releases_queue_pairs() {
    for next in [None, Some("d")] {
        let (k8s, operator, agent) = lab_with_agent();
        // The agent logs the loss of its node once and keeps running.
        k8s.env.allow("the CacheNode of this node was deleted");
        k8s.env.allow("KVCacheCluster cache/d owns this node");
        allocate_and_wait(&k8s, "a", 16);
        agent.freeze();
        unassign_n1(&k8s, next);
        k8s.wait_condition(KIND, "a", ["Released", "False", "Releasing"]);
        k8s.settle();
        assert!(queues(&k8s).0.is_array(), "the CacheNode remains while the agent has not released");
        assert_eq!(n1_cluster(&k8s), "c");
        agent.thaw();
        k8s.wait_message(
            KIND,
            "a",
            ["Released", "True", "AgentGone"],
            &["node n1 no longer belongs to KVCacheCluster cache/c"],
        );
        wait_until("the next cluster has the node", PATIENCE, || {
            (n1_cluster(&k8s) == json!(next)).then_some(())
        });
        operator.kill();
    }
}

#[test]
fn vanished_agent_is_waited_for_one_minute() {
    let (k8s, _operator, mut agent) = lab_with_agent();
    allocate_and_wait(&k8s, "a", 16);
    agent.kill();
    unassign_n1(&k8s, Some("d"));
    k8s.wait_message(KIND, "a", ["Released", "False", "Releasing"], &["reports nothing for a minute"]);
    let silent = Duration::from_secs(90);
    k8s.wait_condition_within(silent, (KIND, "a"), ["Released", "True", "AgentGone"]);
    wait_until("the next cluster has the node", PATIENCE, || (n1_cluster(&k8s) == "d").then_some(()));
    delete_and_wait(&k8s, "a");
}
