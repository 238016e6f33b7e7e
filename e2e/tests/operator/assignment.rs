//! Assignments of nodes and pools are stable: an edit or a label that causes a conflict is rejected, and
//! existing assignments remain.

use kube::api::DynamicObject;
use reprise_e2e::{PATIENCE, wait_until};
use serde_json::{Value, json};

use crate::operator::convergence::wait_until_idle;
use crate::operator::pools::wait_claims;
use crate::operator::test_cluster::{QUIET_PERIOD, TestCluster};

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

/// Generations of both CacheNodes and of both clusters' DaemonSets.
fn specs(k8s: &TestCluster) -> Vec<Option<i64>> {
    let generation = |object: DynamicObject| object.metadata.generation;
    let nodes = ["n1", "n2"].map(|node| generation(k8s.wait_for("CacheNode", node)));
    let sets = ["one-agent", "two-agent"].map(|name| generation(k8s.wait_for("DaemonSet", name)));
    [nodes, sets].concat()
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
fn node_stays_assigned_to_its_cluster() {
    let (k8s, _operator) = TestCluster::with_operator();
    label(&k8s, "n1", "one", json!("yes"));
    label(&k8s, "n2", "two", json!("yes"));
    k8s.pool("p", "/var/lib/pool", json!({}));
    k8s.pool("q", "/var/lib/pool", json!({}));
    cluster(&k8s, "one", "one", "p");
    // Creation times have a resolution of one second.
    std::thread::sleep(QUIET_PERIOD);
    cluster(&k8s, "two", "two", "q");
    wait_claims(&k8s, "n1", &["p"]);
    wait_claims(&k8s, "n2", &["q"]);
    let accepted = |cluster: &str| {
        k8s.wait_condition("KVCacheCluster", cluster, ["Accepted", "True", "AsDesired"]);
    };
    accepted("two");
    wait_until_idle(&k8s);
    let before = specs(&k8s);

    // A label lets the older cluster select the younger cluster's node.
    label(&k8s, "n2", "one", json!("yes"));
    k8s.wait_message(
        "KVCacheCluster",
        "one",
        ["Accepted", "False", "Conflict"],
        &["node n2 already runs the agent of KVCacheCluster cache/two"],
    );
    std::thread::sleep(QUIET_PERIOD);
    assert_eq!(specs(&k8s), before, "both clusters are unchanged");
    assert!(k8s.has_condition(("KVCacheCluster", "two"), ["Accepted", "True", "AsDesired"]));
    assert!(k8s.has_condition(("SSDPool", "p"), ["Accepted", "True", "AsDesired"]));
    label(&k8s, "n2", "one", Value::Null);
    accepted("one");

    // An edit of the cluster selects the node.
    cluster(&k8s, "one", "two", "p");
    k8s.wait_condition("KVCacheCluster", "one", ["Accepted", "False", "Conflict"]);
    std::thread::sleep(QUIET_PERIOD);
    assert_eq!(specs(&k8s), before, "the cluster keeps the node that it no longer selects");
    assert!(k8s.has_condition(("KVCacheCluster", "two"), ["Accepted", "True", "AsDesired"]));
    // The node moves once its current cluster no longer selects it.
    cluster(&k8s, "two", "three", "q");
    accepted("one");
    wait_claims(&k8s, "n2", &["p"]);
}

#[test]
fn conflicting_pool_edit_is_rejected_and_closes_no_pool() {
    let (k8s, _operator) = TestCluster::with_operator();
    let depth = |pool: &str, depth: u32| {
        k8s.pool(pool, &format!("/var/lib/{pool}"), json!({ "queueDepth": depth }));
    };
    depth("old", 128);
    k8s.cluster(json!({ "pools": [{ "name": "old" }, { "name": "young" }] }));
    wait_claims(&k8s, "n1", &["old"]);
    std::thread::sleep(QUIET_PERIOD);
    depth("young", 128);
    wait_claims(&k8s, "n2", &["old", "young"]);
    k8s.wait_condition("KVCacheCluster", "c", ["PoolsBound", "True", "AsDesired"]);
    wait_until_idle(&k8s);
    let parts = || {
        let claims = ["n1", "n2"].map(|node| k8s.wait_for("CacheNode", node).data["spec"].clone());
        let configuration = k8s.wait_for("ConfigMap", "c-agent").data["data"].clone();
        (claims, configuration, k8s.wait_for("DaemonSet", "c-agent").metadata.generation)
    };
    let before = parts();

    depth("old", 64);
    let message = k8s.wait_condition("SSDPool", "old", ["Accepted", "False", "Conflict"]);
    for words in ["queueDepth is 64 here and 128 in SSDPool young", "nodes keep the pool as it was"] {
        assert!(message.contains(words), "{message}");
    }
    std::thread::sleep(QUIET_PERIOD);
    assert_eq!(parts(), before, "claims and configuration are unchanged");
    assert!(k8s.has_condition(("SSDPool", "young"), ["Accepted", "True", "AsDesired"]));
    k8s.wait_condition("KVCacheCluster", "c", ["PoolsBound", "False", "Conflict"]);

    depth("young", 64);
    for pool in ["old", "young"] {
        k8s.wait_condition("SSDPool", pool, ["Accepted", "True", "AsDesired"]);
    }
    wait_until("the agents' configuration has the new depth", PATIENCE, || {
        parts().1["agent.toml"].as_str()?.contains("queue_depth = 64").then_some(())
    });
    let generation = |pool: &str| k8s.wait_for("SSDPool", pool).metadata.generation;
    wait_until("claims have the pools' current generations", PATIENCE, || {
        let claims = wait_claims(&k8s, "n1", &["old", "young"]);
        let is_current = |(claim, pool): (&Value, &str)| claim["generation"].as_i64() == generation(pool);
        claims.iter().zip(["old", "young"]).all(is_current).then_some(())
    });
}

#[test]
fn pool_gets_node_after_conflicting_pool_leaves_it() {
    let (k8s, _operator) = TestCluster::with_operator();
    let on = |pool: &str, node: &str| {
        let selected = json!({ "matchLabels": { "name": node } });
        k8s.pool(pool, "/var/lib/pool", json!({ "nodeSelector": selected }));
    };
    on("old", "n1");
    k8s.cluster(json!({ "pools": [{ "name": "old" }, { "name": "young" }] }));
    wait_claims(&k8s, "n1", &["old"]);
    std::thread::sleep(QUIET_PERIOD);
    on("young", "n2");
    wait_claims(&k8s, "n2", &["young"]);
    on("old", "n2");
    k8s.wait_message(
        "SSDPool",
        "old",
        ["Accepted", "False", "Conflict"],
        &["directory /var/lib/pool on node n2 may already belong to SSDPool young"],
    );
    std::thread::sleep(QUIET_PERIOD);
    wait_claims(&k8s, "n1", &["old"]);
    wait_claims(&k8s, "n2", &["young"]);
    on("young", "none");
    k8s.wait_condition("SSDPool", "old", ["Accepted", "True", "AsDesired"]);
    wait_claims(&k8s, "n1", &[]);
    wait_claims(&k8s, "n2", &["old"]);
}
