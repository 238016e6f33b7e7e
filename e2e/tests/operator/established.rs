//! What nodes have stays with them: who is edited, or comes to it by a label, so that two contradict each other, is refused and left as it is.

use kube::api::DynamicObject;
use reprise_e2e::{PATIENCE, wait_until};
use serde_json::{Value, json};

use crate::convergence::settle;
use crate::lab::{Lab, SETTLED};
use crate::pools::wait_claims;

/// A cluster of nodes with a label, and of one pool.
fn cluster(lab: &Lab, name: &str, label: &str, pool: &str) {
    lab.apply(&json!({
        "apiVersion": "reprise.dev/v1alpha1", "kind": "KVCacheCluster", "metadata": { "name": name },
        "spec": {
            "etcd": { "mode": "External", "external": { "endpoints": [lab.etcd.endpoint()] } },
            "cache": { "dram": "64Mi", "regionSize": "2Mi" },
            "agents": { "nodeSelector": { label: "yes" } },
            "pools": [{ "name": pool }],
        },
    }));
}

fn label(lab: &Lab, node: &str, label: &str, value: Value) {
    lab.merge("Node", node, &json!({ "metadata": { "labels": { label: value } } }));
}

/// Specs of both nodes, by their generations, and of what is made of a cluster.
fn specs(lab: &Lab) -> Vec<Option<i64>> {
    let generation = |object: DynamicObject| object.metadata.generation;
    let nodes = ["n1", "n2"].map(|node| generation(lab.wait_for("CacheNode", node)));
    let sets = ["one-agent", "two-agent"].map(|name| generation(lab.wait_for("DaemonSet", name)));
    [nodes, sets].concat()
}

#[test]
fn a_node_stays_with_the_cluster_that_has_it() {
    let lab = Lab::new();
    let operator = lab.operator();
    label(&lab, "n1", "one", json!("yes"));
    label(&lab, "n2", "two", json!("yes"));
    lab.pool("p", "/var/lib/pool", json!({}));
    lab.pool("q", "/var/lib/pool", json!({}));
    cluster(&lab, "one", "one", "p");
    // Times of making are whole seconds.
    std::thread::sleep(SETTLED);
    cluster(&lab, "two", "two", "q");
    wait_claims(&lab, "n1", &["p"]);
    wait_claims(&lab, "n2", &["q"]);
    let accepted = |cluster: &str| {
        lab.wait_condition("KVCacheCluster", cluster, ["Accepted", "True", "AsDesired"]);
    };
    accepted("two");
    settle(&lab);
    let before = specs(&lab);

    // The older one selects the younger one's node by a label.
    label(&lab, "n2", "one", json!("yes"));
    let said = lab.wait_condition("KVCacheCluster", "one", ["Accepted", "False", "Conflict"]);
    assert!(said.contains("node n2 has the agent of KVCacheCluster cache/two already"), "{said}");
    std::thread::sleep(SETTLED);
    assert_eq!(specs(&lab), before, "both go on as they are");
    assert!(lab.says(("KVCacheCluster", "two"), ["Accepted", "True", "AsDesired"]));
    assert!(lab.says(("SSDPool", "p"), ["Accepted", "True", "AsDesired"]));
    label(&lab, "n2", "one", Value::Null);
    accepted("one");

    // And by an edit.
    cluster(&lab, "one", "two", "p");
    lab.wait_condition("KVCacheCluster", "one", ["Accepted", "False", "Conflict"]);
    std::thread::sleep(SETTLED);
    assert_eq!(specs(&lab), before, "it keeps what it selects no more");
    assert!(lab.says(("KVCacheCluster", "two"), ["Accepted", "True", "AsDesired"]));
    // Who gives the node up leaves it to the other.
    cluster(&lab, "two", "three", "q");
    accepted("one");
    wait_claims(&lab, "n2", &["p"]);
    operator.kill();
}

#[test]
fn an_edit_of_a_pool_that_contradicts_another_one_closes_neither() {
    let lab = Lab::new();
    let operator = lab.operator();
    let depth = |pool: &str, depth: u32| {
        lab.pool(pool, &format!("/var/lib/{pool}"), json!({ "queueDepth": depth }));
    };
    depth("old", 128);
    lab.cluster(json!({ "pools": [{ "name": "old" }, { "name": "young" }] }));
    wait_claims(&lab, "n1", &["old"]);
    std::thread::sleep(SETTLED);
    depth("young", 128);
    wait_claims(&lab, "n2", &["old", "young"]);
    lab.wait_condition("KVCacheCluster", "c", ["PoolsBound", "True", "AsDesired"]);
    settle(&lab);
    let parts = || {
        let claims = ["n1", "n2"].map(|node| lab.wait_for("CacheNode", node).data["spec"].clone());
        let configuration = lab.wait_for("ConfigMap", "c-agent").data["data"].clone();
        (claims, configuration, lab.wait_for("DaemonSet", "c-agent").metadata.generation)
    };
    let before = parts();

    depth("old", 64);
    let said = lab.wait_condition("SSDPool", "old", ["Accepted", "False", "Conflict"]);
    for words in ["queueDepth is 64 here and 128 in SSDPool young", "nodes keep the pool as it was"] {
        assert!(said.contains(words), "{said}");
    }
    std::thread::sleep(SETTLED);
    assert_eq!(parts(), before, "no agent hears of it");
    assert!(lab.says(("SSDPool", "young"), ["Accepted", "True", "AsDesired"]));
    lab.wait_condition("KVCacheCluster", "c", ["PoolsBound", "False", "Conflict"]);

    depth("young", 64);
    for pool in ["old", "young"] {
        lab.wait_condition("SSDPool", pool, ["Accepted", "True", "AsDesired"]);
    }
    wait_until("agents are told", PATIENCE, || {
        parts().1["agent.toml"].as_str()?.contains("queue_depth = 64").then_some(())
    });
    let generation = |pool: &str| lab.wait_for("SSDPool", pool).metadata.generation;
    wait_until("claims are of what the pools say", PATIENCE, || {
        let claims = wait_claims(&lab, "n1", &["old", "young"]);
        let is_current = |(claim, pool): (&Value, &str)| claim["generation"].as_i64() == generation(pool);
        claims.iter().zip(["old", "young"]).all(is_current).then_some(())
    });
    operator.kill();
}

#[test]
fn a_pool_gets_a_node_when_the_one_that_had_its_device_there_has_gone() {
    let lab = Lab::new();
    let operator = lab.operator();
    let on = |pool: &str, node: &str| {
        let selected = json!({ "matchLabels": { "name": node } });
        lab.pool(pool, "/var/lib/pool", json!({ "nodeSelector": selected }));
    };
    on("old", "n1");
    lab.cluster(json!({ "pools": [{ "name": "old" }, { "name": "young" }] }));
    wait_claims(&lab, "n1", &["old"]);
    std::thread::sleep(SETTLED);
    on("young", "n2");
    wait_claims(&lab, "n2", &["young"]);
    on("old", "n2");
    let said = lab.wait_condition("SSDPool", "old", ["Accepted", "False", "Conflict"]);
    assert!(said.contains("directory /var/lib/pool on node n2 may be those of SSDPool young"), "{said}");
    std::thread::sleep(SETTLED);
    wait_claims(&lab, "n1", &["old"]);
    wait_claims(&lab, "n2", &["young"]);
    on("young", "none");
    lab.wait_condition("SSDPool", "old", ["Accepted", "True", "AsDesired"]);
    wait_claims(&lab, "n1", &[]);
    wait_claims(&lab, "n2", &["old"]);
    operator.kill();
}
