//! Assignments of nodes and pools: of contradicting objects the older one is in effect, and a paused cluster is
//! unchanged.

use reprise_e2e::{PATIENCE, wait_until};
use serde_json::{Value, json};

use crate::operator::deletion_guard::TOO_SHORT;
use crate::operator::pools::wait_claims;
use crate::operator::test_cluster::TestCluster;

/// Applies a cluster of the nodes with a label, with one pool.
fn cluster(k8s: &TestCluster, name: &str, label: &str, pool: &str) {
    k8s.apply_resource(
        "KVCacheCluster",
        name,
        json!({
            "etcd": { "mode": "External", "external": { "endpoints": [k8s.etcd.endpoint()] } },
            "cache": { "dram": "64Mi", "regionSize": "2Mi" },
            "agents": { "nodeSelector": { label: "yes" } },
            "pools": [{ "name": pool }],
        }),
    );
}

fn label(k8s: &TestCluster, node: &str, label: &str, value: Value) {
    k8s.merge("Node", node, &json!({ "metadata": { "labels": { label: value } } }));
}

#[test]
fn failure_domain_of_a_node_follows_the_label_that_its_cluster_names() {
    let (k8s, _operator) = TestCluster::with_operator();
    label(&k8s, "n1", "topology.kubernetes.io/zone", json!("zone-a"));
    label(&k8s, "n2", "rack", json!("r7"));
    k8s.cluster(json!({}));
    let wait_domains = |expected: [Value; 2]| {
        wait_until("both CacheNodes have their failure domains", PATIENCE, || {
            let domain = |node| Some(k8s.get("CacheNode", node)?.data["spec"]["failureDomain"].clone());
            ([domain("n1")?, domain("n2")?] == expected).then_some(())
        });
    };
    wait_domains([json!("zone-a"), Value::Null]);
    label(&k8s, "n1", "topology.kubernetes.io/zone", json!("zone-b"));
    wait_domains([json!("zone-b"), Value::Null]);
    k8s.cluster(json!({ "agents": { "failureDomainLabel": "rack" } }));
    wait_domains([Value::Null, json!("r7")]);
}

#[test]
fn node_belongs_to_oldest_cluster_that_selects_it_unless_its_cluster_is_paused() {
    let (k8s, _operator) = TestCluster::with_operator();
    for node in ["n1", "n2"] {
        label(&k8s, node, "two", json!("yes"));
    }
    k8s.pool("p", "/var/lib/pool", json!({}));
    k8s.pool("q", "/var/lib/pool", json!({}));
    cluster(&k8s, "one", "one", "p");
    k8s.wait_for_next_second();
    cluster(&k8s, "two", "two", "q");
    wait_claims(&k8s, "n1", &["q"]);
    wait_claims(&k8s, "n2", &["q"]);
    let accepted = |cluster: &str| {
        k8s.wait_condition("KVCacheCluster", cluster, ["Accepted", "True", "AsDesired"]);
    };
    accepted("two");
    k8s.settle();
    let generation = |kind: &str, name: &str| k8s.wait_for(kind, name).metadata.generation;
    let excluded = || {
        let set = k8s.wait_for("DaemonSet", "two-agent");
        let affinity = &set.data["spec"]["template"]["spec"]["affinity"]["nodeAffinity"];
        let terms = &affinity["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"];
        terms[0]["matchFields"][0]["values"][0].as_str().map(str::to_owned)
    };
    assert_eq!(excluded(), None);
    let before = (generation("CacheNode", "n1"), generation("DaemonSet", "one-agent"));

    // A label lets the older cluster select a node of the younger one, which keeps the other node.
    label(&k8s, "n2", "one", json!("yes"));
    wait_claims(&k8s, "n2", &["p"]);
    k8s.wait_message(
        "KVCacheCluster",
        "two",
        ["Accepted", "False", "Conflict"],
        &["KVCacheCluster cache/one", "node n2", "agents.nodeSelector"],
    );
    wait_until("the younger cluster runs no agent on n2", PATIENCE, || {
        (excluded().as_deref() == Some("n2")).then_some(())
    });
    k8s.settle();
    let after = (generation("CacheNode", "n1"), generation("DaemonSet", "one-agent"));
    assert_eq!(after, before, "the other node and the older cluster are unchanged");
    assert!(k8s.has_condition(("KVCacheCluster", "one"), ["Accepted", "True", "AsDesired"]));
    label(&k8s, "n2", "one", Value::Null);
    accepted("two");
    wait_claims(&k8s, "n2", &["q"]);
    wait_until("the younger cluster may use all nodes", PATIENCE, || excluded().is_none().then_some(()));

    // A paused cluster keeps its nodes.
    let pause = |paused: bool| {
        k8s.merge("KVCacheCluster", "two", &json!({ "spec": { "paused": paused } }));
    };
    pause(true);
    k8s.wait_condition("KVCacheCluster", "two", ["Progressing", "False", "Paused"]);
    let before = generation("CacheNode", "n2");
    label(&k8s, "n2", "one", json!("yes"));
    k8s.wait_message(
        "KVCacheCluster",
        "one",
        ["Accepted", "False", "Conflict"],
        &["KVCacheCluster cache/two has node n2", "no agent there"],
    );
    k8s.settle();
    assert_eq!(generation("CacheNode", "n2"), before);
    pause(false);
    wait_claims(&k8s, "n2", &["p"]);
    accepted("one");
}

#[test]
fn younger_pool_is_rejected_while_its_settings_differ_from_the_oldest() {
    let (k8s, _operator) = TestCluster::with_operator();
    let depth = |pool: &str, depth: u32| {
        k8s.pool(pool, &format!("/var/lib/{pool}"), json!({ "queueDepth": depth }));
    };
    depth("old", 128);
    k8s.cluster(json!({ "pools": [{ "name": "old" }, { "name": "young" }] }));
    wait_claims(&k8s, "n1", &["old"]);
    k8s.settle();
    k8s.wait_for_next_second();
    depth("young", 128);
    wait_claims(&k8s, "n2", &["old", "young"]);
    k8s.wait_condition("KVCacheCluster", "c", ["PoolsBound", "True", "AsDesired"]);
    k8s.settle();
    let parts = || {
        let configuration = k8s.wait_for("ConfigMap", "c-agent").data["data"].clone();
        (configuration, k8s.wait_for("DaemonSet", "c-agent").metadata.generation)
    };
    let (before, claim) = (parts(), wait_claims(&k8s, "n1", &["old", "young"])[0].clone());

    depth("young", 64);
    k8s.wait_message(
        "SSDPool",
        "young",
        ["Accepted", "False", "Conflict"],
        &["queueDepth is 64 here and 128 in the older SSDPool old"],
    );
    k8s.wait_condition("KVCacheCluster", "c", ["PoolsBound", "False", "Conflict"]);
    assert_eq!(wait_claims(&k8s, "n1", &["old"]), [claim], "the older pool is unchanged");
    k8s.settle();
    assert_eq!(parts(), before, "no agent restarts");
    assert!(k8s.has_condition(("SSDPool", "old"), ["Accepted", "True", "AsDesired"]));

    depth("old", 64);
    for pool in ["old", "young"] {
        k8s.wait_condition("SSDPool", pool, ["Accepted", "True", "AsDesired"]);
    }
    wait_claims(&k8s, "n1", &["old", "young"]);
    wait_until("the agents' configuration has the new depth", PATIENCE, || {
        parts().0["agent.toml"].as_str()?.contains("queue_depth = 64").then_some(())
    });
}

#[test]
fn older_pool_has_a_node_and_the_younger_gets_it_afterwards() {
    let (k8s, _operator) = TestCluster::with_operator();
    let on = |pool: &str, node: &str| {
        let selected = json!({ "matchLabels": { "name": node } });
        k8s.pool(pool, "/var/lib/pool", json!({ "nodeSelector": selected }));
    };
    on("old", "n1");
    k8s.cluster(json!({ "pools": [{ "name": "old" }, { "name": "young" }] }));
    wait_claims(&k8s, "n1", &["old"]);
    k8s.settle();
    k8s.wait_for_next_second();
    k8s.pool("young", "/var/lib/pool", json!({}));
    wait_claims(&k8s, "n2", &["young"]);
    let conflict_on = |node: &str| {
        let words = format!("directory /var/lib/pool on node {node} may already belong to SSDPool old");
        wait_until(&words, PATIENCE, || {
            let message = k8s.wait_condition("SSDPool", "young", ["Accepted", "False", "Conflict"]);
            message.contains(&words).then_some(())
        });
        assert!(k8s.has_condition(("SSDPool", "old"), ["Accepted", "True", "AsDesired"]));
    };
    conflict_on("n1");
    wait_claims(&k8s, "n1", &["old"]);
    // An edit moves the older pool to the younger one's node.
    on("old", "n2");
    wait_claims(&k8s, "n2", &["old"]);
    wait_claims(&k8s, "n1", &["young"]);
    conflict_on("n2");
    on("old", "none");
    k8s.wait_condition("SSDPool", "young", ["Accepted", "True", "AsDesired"]);
    wait_claims(&k8s, "n2", &["young"]);
}

#[test]
fn pool_is_not_wiped_where_another_pool_names_its_devices() {
    let k8s = TestCluster::new();
    k8s.env.allow(TOO_SHORT);
    let started = k8s.operator_files("operator").unused_for(1).start();
    let _operator = started.unwrap_or_else(|error| panic!("the operator does not start: {error:?}"));
    let on = |pool: &str, node: &str, mut more: Value| {
        more["nodeSelector"] = json!({ "matchLabels": { "name": node } });
        k8s.pool(pool, "/var/lib/pool", more);
    };
    on("old", "n1", json!({ "deletionPolicy": "Wipe", "wipeConfirmation": "yes-really-destroy-the-data" }));
    k8s.cluster(json!({ "pools": [{ "name": "old" }, { "name": "young" }] }));
    wait_claims(&k8s, "n1", &["old"]);
    k8s.settle();
    k8s.wait_for_next_second();
    on("young", "n1", json!({}));
    k8s.wait_condition("SSDPool", "young", ["Accepted", "False", "Conflict"]);
    k8s.delete("SSDPool", "old");
    k8s.wait_message(
        "SSDPool",
        "old",
        ["DeletionBlocked", "True", "Conflict"],
        &["SSDPool young names the same devices on node n1", "Retain"],
    );
    k8s.settle();
    assert_eq!(wait_claims(&k8s, "n1", &["old"])[0]["wipe"], false);
    on("young", "n2", json!({}));
    wait_until("the claim requests the wipe", PATIENCE, || {
        (wait_claims(&k8s, "n1", &["old"])[0]["wipe"] == true).then_some(())
    });
    k8s.agent_reports("n1", "Wiped");
    wait_until("the pool is deleted", PATIENCE, || k8s.get("SSDPool", "old").is_none().then_some(()));
}
