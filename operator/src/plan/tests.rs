//! Tables of clusters, pools and nodes, and what is decided of them.

#![allow(clippy::needless_pass_by_value, reason = "specs are made where they are passed")]

use serde_json::{Value, json};

use super::*;

fn object<K: serde::de::DeserializeOwned>(
    kind: &str,
    name: &str,
    age: u32,
    spec: Value,
    more: Value,
) -> Arc<K> {
    let mut metadata = json!({
        "name": name,
        "uid": format!("uid-{name}"),
        "generation": 1,
        "creationTimestamp": format!("2026-01-{:02}T00:00:00Z", 28 - age),
    });
    metadata.as_object_mut().expect("made above").extend(more.as_object().expect("fields").clone());
    let api = if kind == "Node" { "v1" } else { "reprise.dev/v1alpha1" };
    let whole = json!({ "apiVersion": api, "kind": kind, "metadata": metadata, "spec": spec });
    Arc::new(serde_json::from_value(whole).expect("an object"))
}

fn cluster(name: &str, age: u32, spec: Value) -> Arc<KVCacheCluster> {
    object("KVCacheCluster", name, age, spec, json!({ "namespace": "n" }))
}

fn pool(name: &str, age: u32, spec: Value) -> Arc<SSDPool> {
    object("SSDPool", name, age, spec, json!({}))
}

fn directory(path: &str, more: Value) -> Value {
    let mut spec = json!({ "directory": { "path": path, "size": "1Gi" } });
    spec.as_object_mut().expect("made above").extend(more.as_object().expect("fields").clone());
    spec
}

fn nodes() -> Vec<Arc<Node>> {
    let node = |name: &str, disk: &str| {
        object("Node", name, 0, json!({}), json!({ "labels": { "disk": disk, "name": name } }))
    };
    vec![node("n1", "fast"), node("n2", "fast"), node("n3", "slow")]
}

fn refusal(plan: &Plan, pool: &str) -> String {
    let refused = plan.pools[pool].refused.as_ref();
    refused.map(|refused| refused.message.clone()).unwrap_or_default()
}

#[test]
fn a_pool_is_on_the_nodes_of_its_cluster_that_it_selects() {
    let clusters = [cluster("c", 5, json!({ "pools": [{ "name": "p" }, { "name": "q" }] }))];
    let pools = [
        pool("p", 4, directory("/p", json!({ "nodeSelector": { "matchLabels": { "disk": "fast" } } }))),
        pool("q", 3, directory("/q", json!({}))),
        pool("unnamed", 2, directory("/u", json!({}))),
    ];
    let plan = Plan::make(&clusters, &pools, &nodes());
    assert_eq!(plan.pools["p"].nodes, ["n1", "n2"]);
    assert_eq!(plan.nodes["n1"].pools, ["p", "q"]);
    assert_eq!(plan.nodes["n3"].pools, ["q"]);
    assert_eq!(plan.nodes["n3"].cluster.as_deref(), Some("n/c"));
    assert_eq!(plan.pools["unnamed"], PoolPlan::default());
}

#[test]
fn of_two_clusters_on_one_node_the_younger_is_refused_whole() {
    let selector = json!({ "agents": { "nodeSelector": { "name": "n1" } } });
    let plan = Plan::make(&[cluster("young", 1, json!({})), cluster("old", 9, selector)], &[], &nodes());
    assert_eq!(plan.clusters["n/old"].nodes, ["n1"]);
    let young = &plan.clusters["n/young"];
    assert!(young.nodes.is_empty());
    let refused = young.refused.as_ref().expect("it selects n1 as well");
    assert!(refused.message.contains("n1") && refused.message.contains("n/old"), "{}", refused.message);
    assert_eq!(plan.nodes["n2"].cluster, None);
}

#[test]
fn of_two_pools_that_contradict_each_other_the_younger_is_refused() {
    let clusters = [cluster("c", 9, json!({ "pools": [{ "name": "old" }, { "name": "young" }] }))];
    let fast = json!({ "nodeSelector": { "matchLabels": { "disk": "fast" } } });
    let slow = json!({ "nodeSelector": { "matchLabels": { "disk": "slow" } } });
    let globs = |glob: &str| json!({ "devices": { "globs": [glob] } });
    for (old, young, words) in [
        (directory("/p", json!({})), directory("/p", json!({})), "directory /p on node n1"),
        (directory("/p", json!({})), directory("/p/inner", json!({})), "directory /p/inner"),
        (directory("/p", json!({})), directory("/pq", json!({})), ""),
        (directory("/p", fast.clone()), directory("/p", slow), ""),
        (directory("/p", fast), directory("/q", json!({ "queueDepth": 8 })), "queueDepth is 8 here and 128"),
        (directory("/p", json!({ "segmentSize": "1Gi" })), directory("/q", json!({})), "segmentSize is 64Mi"),
        (directory("/p", json!({ "segmentSize": "65536Ki" })), directory("/q", json!({})), ""),
        (
            globs("/dev/disk/by-id/nvme-*"),
            globs("/dev/disk/by-id/*-data"),
            "devices /dev/disk/by-id/*-data on node n1",
        ),
        (globs("/dev/disk/by-id/nvme-*"), globs("/dev/disk/by-id/ata-*"), ""),
    ] {
        // In the order of their ages, whatever the order of the list is.
        let pools = [pool("young", 1, young.clone()), pool("old", 5, old.clone())];
        let plan = Plan::make(&clusters, &pools, &nodes());
        assert_eq!(refusal(&plan, "old"), "", "{old} {young}");
        let said = refusal(&plan, "young");
        assert!(
            if words.is_empty() { said.is_empty() } else { said.contains(words) },
            "{old} {young}: '{said}'"
        );
        let on_nodes = plan.nodes.values().any(|node| node.pools.iter().any(|name| name == "young"));
        assert_eq!(on_nodes, words.is_empty(), "a refused pool is on no node");
    }
}

#[test]
fn patterns_overlap_when_a_name_matches_both() {
    for (one, other, expected) in [
        ("a", "a", true),
        ("a", "b", false),
        ("a*", "*b", true),
        ("a*", "b*", false),
        ("a?c", "abc", true),
        ("a?c", "ac", false),
        ("*", "", true),
        ("a*c*e", "abcde", true),
        ("nvme-*-1", "nvme-*-2", false),
        ("nvme-?", "nvme-??", false),
    ] {
        assert_eq!(globs_overlap(one, other), expected, "{one} {other}");
        assert_eq!(globs_overlap(other, one), expected, "{other} {one}");
    }
}
