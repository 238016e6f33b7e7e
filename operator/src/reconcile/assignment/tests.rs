//! Assignments for sets of clusters, pools and nodes.

#![allow(clippy::needless_pass_by_value, reason = "specs are made where they are passed")]

use serde_json::{Value, json};

use super::*;
use crate::reconcile::test_objects::{merged, resource};

/// An object that was created this many days before the youngest.
fn object<K>(name: &str, age: u32, metadata: Value, parts: Value) -> Arc<K>
where
    K: Resource<DynamicType = ()> + serde::de::DeserializeOwned,
{
    let own = json!({
        "name": name, "uid": format!("uid-{name}"), "generation": 1,
        "creationTimestamp": format!("2026-01-{:02}T00:00:00Z", 28 - age),
    });
    Arc::new(resource(merged(own, metadata), parts))
}

/// A cluster whose spec is accepted.
fn cluster(name: &str, age: u32, spec: Value) -> Arc<KVCacheCluster> {
    cluster_with(name, age, spec, ("True", "AsDesired", 1))
}

fn cluster_with(
    name: &str,
    age: u32,
    spec: Value,
    (status, reason, generation): (&str, &str, i64),
) -> Arc<KVCacheCluster> {
    let accepted = json!({
        "type": "Accepted", "status": status, "reason": reason, "message": "", "observedGeneration": generation,
        "lastTransitionTime": "2026-01-01T00:00:00Z",
    });
    let parts = json!({ "spec": spec, "status": { "conditions": [accepted] } });
    object(name, age, json!({ "namespace": "n" }), parts)
}

fn on(label: &str, value: &str) -> Value {
    json!({ "agents": { "nodeSelector": { label: value } } })
}

fn naming(pools: &[&str]) -> Value {
    let pools: Vec<Value> = pools.iter().map(|name| json!({ "name": name })).collect();
    json!({ "pools": pools })
}

fn pool(name: &str, age: u32, spec: Value) -> Arc<SSDPool> {
    object(name, age, json!({}), json!({ "spec": spec }))
}

fn directory(path: &str, more: Value) -> Value {
    merged(json!({ "directory": { "path": path, "size": "1Gi" } }), more)
}

fn devices(glob: &str, more: Value) -> Value {
    merged(json!({ "devices": { "globs": [format!("/dev/disk/by-id/{glob}")] } }), more)
}

fn selecting(label: &str, value: &str) -> Value {
    json!({ "nodeSelector": { "matchLabels": { label: value } } })
}

fn nodes() -> Vec<Arc<Node>> {
    let node = |name: &str, disk: &str| {
        object(name, 0, json!({ "labels": { "disk": disk, "name": name } }), json!({}))
    };
    // Not sorted, as in a store.
    vec![node("n3", "slow"), node("n1", "fast"), node("n2", "fast")]
}

/// The `CacheNode` of a node of this cluster.
fn cache_node(node: &str, cluster: &str) -> Arc<CacheNode> {
    let spec = json!({ "nodeName": node, "clusterRef": { "namespace": "n", "name": cluster } });
    let labels = json!({ "labels": { MANAGED_BY: OPERATOR } });
    object(node, 0, labels, json!({ "spec": spec }))
}

fn message(refusal: Option<&Refusal>) -> &str {
    refusal.map(|refusal| refusal.message.as_str()).unwrap_or_default()
}

/// The assignment of these pools in one cluster that names all of them.
fn of_pools(pools: &[Arc<SSDPool>]) -> Assignment {
    let names: Vec<String> = pools.iter().map(|pool| pool.name_any()).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    Assignment::compute(&[cluster("c", 9, naming(&names))], pools, &nodes(), &[])
}

#[test]
fn node_belongs_to_the_oldest_cluster_that_selects_it_or_to_the_frozen_one_that_has_it() {
    let all = || json!({});
    let old_and_young = |old: Value, young: Value| [cluster("old", 9, old), cluster("young", 1, young)];
    let paused = |spec: Value| merged(spec, json!({ "paused": true }));
    let refused = |name: &str, spec: Value| cluster_with(name, 1, spec, ("False", "Unsupported", 1));
    let edited = |name: &str, spec: Value| cluster_with(name, 1, spec, ("True", "AsDesired", 0));
    let contested = |name: &str, spec: Value| cluster_with(name, 1, spec, ("False", "Conflict", 1));
    let old = |spec: Value| cluster("old", 9, spec);
    let of_young = || vec![cache_node("n1", "young")];
    for (clusters, cache_nodes, nodes_of_old, nodes_of_young, contested_of_young) in [
        (old_and_young(on("name", "n1"), all()), vec![], "n1", "n2 n3", "n1"),
        (old_and_young(all(), on("name", "n1")), vec![], "n1 n2 n3", "", "n1"),
        (old_and_young(on("disk", "slow"), on("disk", "fast")), vec![], "n3", "n1 n2", ""),
        // What nodes have now does not count.
        (old_and_young(on("name", "n1"), all()), of_young(), "n1", "n2 n3", "n1"),
        ([old(on("name", "n1")), contested("young", all())], of_young(), "n1", "n2 n3", "n1"),
        // A frozen cluster keeps its nodes, also those that it no longer selects, and gets no contested ones.
        ([old(all()), cluster("young", 1, paused(on("disk", "fast")))], of_young(), "n2 n3", "n1", "n2"),
        ([old(all()), cluster("young", 1, paused(on("disk", "slow")))], of_young(), "n2 n3", "n1", "n3"),
        ([old(all()), refused("young", on("disk", "slow"))], of_young(), "n2 n3", "n1", "n3"),
        ([old(all()), edited("young", on("disk", "slow"))], of_young(), "n2 n3", "n1", "n3"),
        (old_and_young(paused(all()), on("name", "n1")), of_young(), "n2 n3", "n1", ""),
        // Nodes that no other cluster selects are free.
        (old_and_young(paused(on("name", "n2")), on("name", "n1")), vec![], "n2", "n1", ""),
    ] {
        let case = format!("{:?}", clusters.each_ref().map(|cluster| &cluster.spec.agents.node_selector));
        let assignment = Assignment::compute(&clusters, &[], &nodes(), &cache_nodes);
        let [old, young] = ["n/old", "n/young"].map(|key| &assignment.clusters[key]);
        assert_eq!(
            (old.nodes.join(" "), young.nodes.join(" ")),
            (nodes_of_old.into(), nodes_of_young.into())
        );
        let names: Vec<&str> = young.contested.keys().map(String::as_str).collect();
        assert_eq!(names.join(" "), contested_of_young, "{case}");
        let text = message(young.conflict.as_ref());
        let named = ["KVCacheCluster n/old", "agents.nodeSelector"].iter().all(|word| text.contains(word));
        assert_eq!(named, !contested_of_young.is_empty(), "{case}: {text}");
    }
    // A CacheNode that another component created does not count.
    let mut by_hand = CacheNode::clone(&cache_node("n1", "young"));
    by_hand.metadata.labels = None;
    let clusters = [old(all()), cluster("young", 1, paused(all()))];
    let assignment = Assignment::compute(&clusters, &[], &nodes(), &[Arc::new(by_hand)]);
    assert_eq!(assignment.clusters["n/old"].nodes, ["n1", "n2", "n3"]);
}

#[test]
fn equal_creation_times_are_ordered_by_uid() {
    let clusters = [cluster("b", 1, json!({})), cluster("a", 1, json!({}))];
    let assignment = Assignment::compute(&clusters, &[], &nodes(), &[]);
    assert_eq!(assignment.nodes["n1"].cluster.as_deref(), Some("n/a"));
}

#[test]
fn pool_belongs_to_the_oldest_cluster_that_names_it() {
    let with_pool = |value: &str| merged(on("name", value), naming(&["p"]));
    let clusters = [cluster("young", 1, with_pool("n2")), cluster("old", 9, with_pool("n1"))];
    let pools = [pool("p", 5, directory("/p", json!({})))];
    let of_young = [cache_node("n2", "young")];
    let assignment = Assignment::compute(&clusters, &pools, &nodes(), &of_young);
    assert_eq!(assignment.pools["p"].cluster.as_deref(), Some("n/old"));
    assert_eq!(assignment.pools["p"].nodes, ["n1"]);
}

#[test]
fn younger_pool_with_other_shared_settings_is_refused_as_a_whole() {
    let q = |more: Value| directory("/q", more);
    for (old, young, words) in [
        (selecting("disk", "fast"), q(json!({ "queueDepth": 8 })), "queueDepth is 8 here and 128"),
        (json!({ "segmentSize": "1Gi" }), q(json!({})), "segmentSize is 64Mi"),
        (json!({ "segmentSize": "65536Ki" }), q(json!({})), ""),
        (json!({ "eviction": "Lfu" }), q(json!({})), "eviction is"),
        (json!({ "admission": "SecondUse" }), q(json!({})), "admission is"),
        (json!({ "watermarks": { "freePermille": 900 } }), q(json!({})), "watermarks.freePermille is"),
        (json!({ "dailyWriteBudget": "1Ti" }), q(json!({})), "dailyWriteBudget is unlimited here and 1Ti"),
        (json!({ "dailyWriteBudget": "1Ti" }), q(json!({ "dailyWriteBudget": "1024Gi" })), ""),
        // A rejected pool sets no settings.
        (json!({ "engine": "Gds", "queueDepth": 8 }), q(json!({})), ""),
    ] {
        // Ordered by age, independently of the order in the store.
        let pools = [pool("young", 1, young.clone()), pool("old", 5, directory("/p", old.clone()))];
        let assignment = of_pools(&pools);
        let own = &assignment.pools["young"];
        let text = message(own.refused.as_ref());
        assert!(text.is_empty() == words.is_empty() && text.contains(words), "{old} {young}: {text}");
        assert!(text.is_empty() || text.contains("older SSDPool old"), "{text}");
        assert_eq!(own.nodes.len(), if words.is_empty() { 3 } else { 0 }, "a refused pool is on no node");
    }
}

#[test]
fn older_pool_has_the_devices_and_the_younger_its_other_nodes() {
    let everywhere = |path: &str| directory(path, json!({}));
    let fast = |path: &str| directory(path, selecting("disk", "fast"));
    let slow = |path: &str| directory(path, selecting("disk", "slow"));
    let raw = |glob: &str| devices(glob, json!({}));
    let raw_slow = devices("nvme-*", selecting("disk", "slow"));
    let rejected = merged(slow("/p"), json!({ "engine": "Gds" }));
    for (old, young, nodes_of_young, contested, words) in [
        (everywhere("/p"), everywhere("/p"), "", "n1 n2 n3", "directory /p on nodes n1, n2, n3"),
        (fast("/p"), everywhere("/p/inner"), "n3", "n1 n2", "directory /p/inner on nodes n1, n2"),
        (slow("/p/inner"), everywhere("/p"), "n1 n2", "n3", "directory /p on node n3"),
        (everywhere("/p"), everywhere("/pq"), "n1 n2 n3", "", ""),
        (fast("/p"), slow("/p"), "n3", "", ""),
        (everywhere("/p"), raw("*"), "n1 n2 n3", "", ""),
        (raw_slow, raw("*-data"), "n1 n2", "n3", "devices /dev/disk/by-id/*-data on node n3"),
        (raw("nvme-*"), raw("ata-*"), "n1 n2 n3", "", ""),
        // A pool that is rejected for another reason has no node, but the devices stay contested.
        (rejected, everywhere("/p"), "n1 n2 n3", "n3", ""),
    ] {
        let case = format!("{old} {young}");
        let assignment = of_pools(&[pool("young", 1, young), pool("old", 5, old)]);
        let own = &assignment.pools["young"];
        assert_eq!((own.nodes.join(" ").as_str(), &own.refused), (nodes_of_young, &None), "{case}");
        let text = message(own.conflict.as_ref());
        assert!(text.is_empty() == words.is_empty() && text.contains(words), "{case}: {text}");
        assert!(text.is_empty() || text.contains("SSDPool old, which is older"), "{case}: {text}");
        assert_eq!(assignment.pools["old"].conflict, None, "{case}");
        // Neither pool is wiped where both name the devices.
        for name in ["old", "young"] {
            let nodes: Vec<&str> = assignment.pools[name].contested.keys().map(String::as_str).collect();
            assert_eq!(nodes.join(" "), contested, "{case}: {name}");
        }
    }
}

#[test]
fn node_has_the_eight_oldest_pools() {
    let names: Vec<String> = (0..9).map(|index| format!("p{index}")).collect();
    let pool_of = |(name, age): (&String, u32)| {
        let more = if age == 1 { json!({}) } else { selecting("name", "n1") };
        pool(name, age, directory(&format!("/{name}"), more))
    };
    let pools: Vec<Arc<SSDPool>> = names.iter().zip(1..).map(pool_of).collect();
    let assignment = of_pools(&pools);
    assert_eq!(assignment.nodes["n1"].pools.len(), POOLS_PER_NODE_MAX);
    assert_eq!(assignment.pools["p0"].nodes, ["n2", "n3"]);
    let text = message(assignment.pools["p0"].conflict.as_ref());
    assert!(text.contains("8 older pools are on node n1"), "{text}");
}

#[test]
fn deleted_pool_has_its_devices_while_a_finalizer_holds_it() {
    let deleted = |finalizers: Value| {
        let metadata = json!({ "deletionTimestamp": "2026-01-02T00:00:00Z", "finalizers": finalizers });
        object::<SSDPool>("old", 5, metadata, json!({ "spec": directory("/p", json!({})) }))
    };
    for (finalizers, has_young) in [(json!(["reprise.dev/wipe"]), false), (json!([]), true)] {
        let assignment = of_pools(&[deleted(finalizers), pool("young", 1, directory("/p", json!({})))]);
        assert_eq!(!assignment.pools["young"].nodes.is_empty(), has_young);
    }
}

#[test]
fn patterns_overlap_if_some_name_matches_both() {
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
        assert_eq!(conflicts::globs_overlap(one, other), expected, "{one} {other}");
        assert_eq!(conflicts::globs_overlap(other, one), expected, "{other} {one}");
    }
}
