//! Assignments for sets of clusters, pools and nodes.

#![allow(clippy::needless_pass_by_value, reason = "specs are made where they are passed")]

use reprise_crds::CacheNode;
use serde_json::{Value, json};

use super::*;
use crate::framework::labels::{MANAGED_BY, OPERATOR};

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

/// Names of the refused pools that a node keeps.
fn kept<'a>(assignment: &'a Assignment, node: &str) -> Vec<&'a str> {
    assignment.nodes[node].retained.iter().map(|kept| kept.name.as_str()).collect()
}

fn refusal(assignment: &Assignment, pool: &str) -> String {
    let refused = assignment.pools[pool].refused.as_ref();
    refused.map(|refused| refused.message.clone()).unwrap_or_default()
}

#[test]
fn assigns_pool_to_selected_nodes_of_its_cluster() {
    let clusters = [cluster("c", 5, json!({ "pools": [{ "name": "p" }, { "name": "q" }] }))];
    let pools = [
        pool("p", 4, directory("/p", json!({ "nodeSelector": { "matchLabels": { "disk": "fast" } } }))),
        pool("q", 3, directory("/q", json!({}))),
        pool("unnamed", 2, directory("/u", json!({}))),
    ];
    let assignment = Assignment::compute(&clusters, &pools, &nodes(), &CurrentAssignment::default());
    assert_eq!(assignment.pools["p"].nodes, ["n1", "n2"]);
    assert_eq!(assignment.nodes["n1"].pools, ["p", "q"]);
    assert_eq!(assignment.nodes["n3"].pools, ["q"]);
    assert_eq!(assignment.nodes["n3"].cluster.as_deref(), Some("n/c"));
    assert_eq!(assignment.pools["unnamed"], PoolAssignment::default());
}

#[test]
fn refuses_younger_of_two_clusters_that_select_one_node() {
    let selector = json!({ "agents": { "nodeSelector": { "name": "n1" } } });
    let clusters = [cluster("young", 1, json!({})), cluster("old", 9, selector)];
    let assignment = Assignment::compute(&clusters, &[], &nodes(), &CurrentAssignment::default());
    assert_eq!(assignment.clusters["n/old"].nodes, ["n1"]);
    let young = &assignment.clusters["n/young"];
    assert!(young.nodes.is_empty());
    let refused = young.refused.as_ref().expect("it selects n1 as well");
    assert!(refused.message.contains("n1") && refused.message.contains("n/old"), "{}", refused.message);
    assert_eq!(assignment.nodes["n2"].cluster, None);
}

#[test]
fn refuses_younger_of_two_conflicting_pools() {
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
        (directory("/p", json!({ "admission": "SecondUse" })), directory("/q", json!({})), "admission is"),
        (
            directory("/p", json!({ "dailyWriteBudget": "1Ti" })),
            directory("/q", json!({})),
            "dailyWriteBudget is unlimited here and 1Ti",
        ),
        (
            directory("/p", json!({ "dailyWriteBudget": "1Ti" })),
            directory("/q", json!({ "dailyWriteBudget": "1024Gi" })),
            "",
        ),
        (
            globs("/dev/disk/by-id/nvme-*"),
            globs("/dev/disk/by-id/*-data"),
            "devices /dev/disk/by-id/*-data on node n1",
        ),
        (globs("/dev/disk/by-id/nvme-*"), globs("/dev/disk/by-id/ata-*"), ""),
    ] {
        // Ordered by age, independently of the order in the list.
        let pools = [pool("young", 1, young.clone()), pool("old", 5, old.clone())];
        let assignment = Assignment::compute(&clusters, &pools, &nodes(), &CurrentAssignment::default());
        assert_eq!(refusal(&assignment, "old"), "", "{old} {young}");
        let message = refusal(&assignment, "young");
        assert!(
            if words.is_empty() { message.is_empty() } else { message.contains(words) },
            "{old} {young}: '{message}'"
        );
        let on_nodes = assignment.nodes.values().any(|node| node.pools.iter().any(|name| name == "young"));
        assert_eq!(on_nodes, words.is_empty(), "a refused pool is assigned to no node");
    }
}

/// A `CacheNode` with claims: pool, generation, and device pattern. Without a pattern the claim is the
/// directory named like the pool.
fn having(node: &str, cluster: &str, claims: &[(&str, i64, Option<&str>)]) -> Arc<CacheNode> {
    let claim = |(name, generation, glob): &(&str, i64, Option<&str>)| {
        let mut claim = json!({ "pool": name, "uid": format!("uid-{name}"), "generation": generation });
        match glob {
            Some(glob) => claim["globs"] = json!([glob]),
            None => claim["file"] = json!(format!("/{name}/pool")),
        }
        claim
    };
    let claims: Vec<Value> = claims.iter().map(claim).collect();
    let spec = json!({
        "nodeName": node, "clusterRef": { "namespace": "n", "name": cluster }, "claims": claims,
    });
    object("CacheNode", node, 0, spec, json!({ "labels": { MANAGED_BY: OPERATOR } }))
}

/// A pool with this generation.
fn pool_of(name: &str, age: u32, generation: i64, spec: Value) -> Arc<SSDPool> {
    object("SSDPool", name, age, spec, json!({ "generation": generation }))
}

#[test]
fn node_stays_with_its_cluster_and_other_clusters_that_select_it_keep_their_nodes() {
    let on = |label: &str, value: &str| json!({ "agents": { "nodeSelector": { label: value } } });
    let clusters = [cluster("old", 9, json!({})), cluster("young", 1, on("name", "n2"))];
    let current =
        CurrentAssignment::from_cache_nodes(&[having("n1", "old", &[]), having("n2", "young", &[])]);
    let assignment = Assignment::compute(&clusters, &[], &nodes(), &current);
    let old = &assignment.clusters["n/old"];
    let refused = old.refused.as_ref().expect("it selects n2 as well");
    assert!(refused.message.contains("n2") && refused.message.contains("n/young"), "{}", refused.message);
    assert_eq!(old.nodes, ["n1"], "keeps its node and gets no new one");
    assert_eq!(
        assignment.clusters["n/young"],
        ClusterAssignment { nodes: vec!["n2".to_owned()], refused: None }
    );
    assert_eq!(assignment.nodes["n3"].cluster, None);
    assert!(assignment.is_contested);
    // Both selectors were edited to match a node of the other cluster: both keep their nodes.
    let clusters = [cluster("old", 9, json!({})), cluster("young", 1, on("disk", "fast"))];
    let assignment = Assignment::compute(&clusters, &[], &nodes(), &current);
    for (key, node) in [("n/old", "n1"), ("n/young", "n2")] {
        assert!(assignment.clusters[key].refused.is_some(), "{key}");
        assert_eq!(assignment.clusters[key].nodes, [node]);
        assert_eq!(assignment.nodes[node].cluster.as_deref(), Some(key));
    }
    // A refused edit takes no node away from the edited cluster.
    let clusters = [cluster("old", 9, on("name", "n2")), cluster("young", 1, on("name", "n2"))];
    let assignment = Assignment::compute(&clusters, &[], &nodes(), &current);
    assert!(assignment.clusters["n/old"].refused.is_some());
    assert_eq!(assignment.clusters["n/old"].nodes, ["n1"]);
    for (first, second) in [(9, 1), (1, 9)] {
        // A cluster refused for a third cluster's node keeps nodes it no longer selects, also from an older
        // cluster.
        let clusters = [
            cluster("old", first, on("name", "n2")),
            cluster("young", 5, on("name", "n2")),
            cluster(
                "third",
                second,
                json!({ "agents": { "nodeSelector": { "disk": "fast", "name": "n1" } } }),
            ),
        ];
        let assignment = Assignment::compute(&clusters, &[], &nodes(), &current);
        assert_eq!(assignment.clusters["n/old"].nodes, ["n1"]);
        assert!(
            assignment.clusters["n/third"].refused.is_some()
                && assignment.clusters["n/third"].nodes.is_empty()
        );
        assert_eq!(assignment.clusters["n/young"].nodes, ["n2"]);
    }
    // A node that its cluster no longer selects is free.
    let clusters = [cluster("old", 9, json!({})), cluster("young", 1, on("name", "none"))];
    let assignment = Assignment::compute(&clusters, &[], &nodes(), &current);
    assert_eq!(assignment.clusters["n/old"].nodes, ["n1", "n2", "n3"]);
    // So is a node of a deleted cluster, and a CacheNode created by another writer does not count.
    let by_hand: Arc<CacheNode> = object(
        "CacheNode",
        "n1",
        0,
        json!({
            "nodeName": "n1", "clusterRef": { "namespace": "n", "name": "young" },
        }),
        json!({}),
    );
    let current = CurrentAssignment::from_cache_nodes(&[by_hand, having("n2", "gone", &[])]);
    let assignment = Assignment::compute(
        &[cluster("old", 9, json!({})), cluster("young", 1, json!({}))],
        &[],
        &nodes(),
        &current,
    );
    assert_eq!(assignment.clusters["n/old"].nodes, ["n1", "n2", "n3"]);
    assert!(assignment.clusters["n/young"].nodes.is_empty());
}

#[test]
fn refuses_edited_one_of_two_conflicting_pools_and_nodes_keep_it_unchanged() {
    let clusters = [cluster("c", 9, json!({ "pools": [{ "name": "old" }, { "name": "young" }] }))];
    let current =
        CurrentAssignment::from_cache_nodes(&[having("n1", "c", &[("old", 1, None), ("young", 1, None)])]);
    let both = |old: (i64, u32), young: (i64, u32)| {
        let spec = |name: &str, depth: u32| directory(&format!("/{name}"), json!({ "queueDepth": depth }));
        let pools = [
            pool_of("old", 5, old.0, spec("old", old.1)),
            pool_of("young", 1, young.0, spec("young", young.1)),
        ];
        Assignment::compute(&clusters, &pools, &nodes(), &current)
    };
    let assignment = both((2, 8), (1, 128));
    assert!(
        refusal(&assignment, "old").contains("queueDepth is 8 here and 128 in SSDPool young"),
        "{assignment:?}"
    );
    assert!(refusal(&assignment, "old").ends_with("nodes keep the pool as it was"));
    assert_eq!(assignment.pools["old"].nodes, ["n1"], "no new nodes");
    assert!(assignment.pools["old"].is_used());
    assert_eq!(
        (&assignment.nodes["n1"].pools, kept(&assignment, "n1")),
        (&vec!["young".to_owned()], vec!["old"])
    );
    assert_eq!(assignment.pools["young"].nodes, ["n1", "n2", "n3"]);
    assert!(!refusal(&both((1, 128), (2, 8)), "young").is_empty());
    // Once all pools agree, both edits are applied.
    let assignment = both((2, 8), (2, 8));
    assert!(!assignment.is_contested && assignment.nodes["n1"].retained.is_empty(), "{assignment:?}");
    // If both were edited, the older pool has precedence.
    let assignment = both((2, 8), (2, 16));
    assert!(refusal(&assignment, "old").is_empty() && !refusal(&assignment, "young").is_empty());
}

#[test]
fn refused_edit_does_not_win_when_the_other_pool_is_edited() {
    let clusters = [cluster("c", 9, json!({ "pools": [{ "name": "old" }, { "name": "young" }] }))];
    let current =
        CurrentAssignment::from_cache_nodes(&[having("n1", "c", &[("old", 1, None), ("young", 1, None)])]);
    let refused = json!({
        "conditions": [{
            "type": "Accepted", "status": "False", "reason": "Conflict", "message": "", "lastTransitionTime": "2026-01-01T00:00:00Z",
        }],
    });
    let mut old = serde_json::to_value(&*pool_of("old", 5, 2, directory("/old", json!({ "queueDepth": 8 }))))
        .expect("JSON");
    old["status"] = refused;
    let old: Arc<SSDPool> = Arc::new(serde_json::from_value(old).expect("a pool"));
    let young = |more: Value| pool_of("young", 1, 2, directory("/young", more));
    let assignment = Assignment::compute(
        &clusters,
        &[old.clone(), young(json!({ "mode": "Cordoned" }))],
        &nodes(),
        &current,
    );
    assert!(
        !refusal(&assignment, "old").is_empty() && refusal(&assignment, "young").is_empty(),
        "{assignment:?}"
    );
    let assignment =
        Assignment::compute(&clusters, &[old, young(json!({ "queueDepth": 8 }))], &nodes(), &current);
    assert!(!assignment.is_contested, "all agree: {assignment:?}");
}

/// A pool that was refused for a conflict.
fn was_refused_before(pool: Arc<SSDPool>, deleted: bool) -> Arc<SSDPool> {
    let mut pool = serde_json::to_value(&*pool).expect("JSON");
    pool["status"] = json!({
        "conditions": [{
            "type": "Accepted", "status": "False", "reason": "Conflict", "message": "", "lastTransitionTime": "2026-01-01T00:00:00Z",
        }],
    });
    if deleted {
        pool["metadata"]["deletionTimestamp"] = json!("2026-01-02T00:00:00Z");
        pool["metadata"]["finalizers"] = json!(["reprise.dev/wipe"]);
    }
    Arc::new(serde_json::from_value(pool).expect("a pool"))
}

#[test]
fn deleted_pool_that_was_refused_gets_no_devices_when_they_become_free() {
    let clusters = [cluster("c", 9, json!({ "pools": [{ "name": "p" }, { "name": "kept" }] }))];
    let all = json!({ "devices": { "globs": ["/dev/disk/by-id/nvme-1"] } });
    let pools = [was_refused_before(pool("p", 1, all.clone()), true)];
    let assignment = Assignment::compute(&clusters, &pools, &nodes(), &CurrentAssignment::default());
    assert!(!refusal(&assignment, "p").is_empty() && !assignment.pools["p"].is_used(), "{assignment:?}");
    // Nor does a pool that is on some nodes and whose edit was refused.
    let current = CurrentAssignment::from_cache_nodes(&[having("n1", "c", &[("kept", 1, None)])]);
    let pools = [was_refused_before(pool_of("kept", 1, 3, directory("/kept", json!({}))), true)];
    let assignment = Assignment::compute(&clusters, &pools, &nodes(), &current);
    assert_eq!(
        (&assignment.pools["kept"].nodes, kept(&assignment, "n1")),
        (&vec!["n1".to_owned()], vec!["kept"])
    );
    // An accepted pool is wiped on all nodes that it selects.
    let accepted = pool_of("kept", 1, 3, directory("/kept", json!({})));
    let assignment = Assignment::compute(&clusters, &[accepted], &nodes(), &current);
    assert_eq!(assignment.pools["kept"].nodes, ["n1", "n2", "n3"]);
}

#[test]
fn pool_decisions_do_not_depend_on_earlier_conditions() {
    // Each edit selects the other pool's device. The cluster is paused, so nodes do not change.
    let clusters =
        [cluster("c", 9, json!({ "pools": [{ "name": "old" }, { "name": "young" }], "paused": true }))];
    let glob = |disk: &str| format!("/dev/disk/by-id/{disk}");
    let current = CurrentAssignment::from_cache_nodes(&[having(
        "n1",
        "c",
        &[("old", 1, Some(&glob("a"))), ("young", 1, Some(&glob("b")))],
    )]);
    let edited = |name: &str, age: u32, disk: &str| {
        pool_of(name, age, 2, json!({ "devices": { "globs": [glob(disk)] } }))
    };
    for was_refused in [false, true] {
        let old = edited("old", 5, "b");
        let old = if was_refused { was_refused_before(old, false) } else { old };
        let assignment = Assignment::compute(&clusters, &[old, edited("young", 1, "d")], &nodes(), &current);
        assert!(!refusal(&assignment, "old").is_empty(), "young still has the device: {was_refused}");
        assert!(refusal(&assignment, "young").is_empty(), "{was_refused}");
    }
}

#[test]
fn cluster_whose_spec_is_not_in_effect_keeps_nodes_it_no_longer_selects() {
    let current = CurrentAssignment::from_cache_nodes(&[having("n1", "c", &[])]);
    let of = |paused: bool, accepted: i64| -> Arc<KVCacheCluster> {
        let spec = json!({ "agents": { "nodeSelector": { "name": "n2" } }, "paused": paused });
        let mut whole = serde_json::to_value(&*cluster("c", 1, spec)).expect("JSON");
        whole["status"] = json!({
            "conditions": [{
                "type": "Accepted", "status": "True", "reason": "AsDesired", "message": "", "observedGeneration": accepted,
                "lastTransitionTime": "2026-01-01T00:00:00Z",
            }],
        });
        Arc::new(serde_json::from_value(whole).expect("a cluster"))
    };
    let older = cluster("older", 9, json!({ "agents": { "nodeSelector": { "name": "n1" } } }));
    let nodes_of = |cluster: Arc<KVCacheCluster>| {
        let assignment = Assignment::compute(&[older.clone(), cluster], &[], &nodes(), &current);
        (assignment.clusters["n/c"].nodes.clone(), assignment.clusters["n/older"].nodes.clone())
    };
    let (one, two, none): (Vec<String>, Vec<String>, Vec<String>) =
        (vec!["n1".into()], vec!["n2".into()], Vec::new());
    let both = vec!["n1".to_owned(), "n2".to_owned()];
    assert_eq!(nodes_of(of(true, 1)), (both.clone(), none.clone()), "paused");
    assert_eq!(nodes_of(of(false, 0)), (both, none), "edited");
    assert_eq!(nodes_of(of(false, 1)), (two, one));
}

#[test]
fn pool_moves_to_the_oldest_cluster_that_names_it_once_no_node_has_it() {
    let named = json!([{ "name": "p" }]);
    let on = |name: &str| json!({ "agents": { "nodeSelector": { "name": name } }, "pools": named });
    let clusters = [cluster("old", 9, on("n1")), cluster("young", 1, on("n2"))];
    let pools =
        [pool("p", 5, directory("/p", json!({ "nodeSelector": { "matchLabels": { "name": "n1" } } })))];
    let assignment = Assignment::compute(
        &clusters,
        &pools,
        &nodes(),
        &CurrentAssignment::from_cache_nodes(&[having("n2", "young", &[("p", 1, None)])]),
    );
    assert_eq!(assignment.pools["p"].cluster.as_deref(), Some("n/young"));
    assert!(assignment.is_contested, "computed again when n2 no longer has the pool");
    let assignment = Assignment::compute(
        &clusters,
        &pools,
        &nodes(),
        &CurrentAssignment::from_cache_nodes(&[having("n2", "young", &[])]),
    );
    assert_eq!(assignment.pools["p"].cluster.as_deref(), Some("n/old"));
}

#[test]
fn full_node_gets_no_pool_that_has_precedence_on_another_node() {
    let names: Vec<String> = (0..9).map(|index| format!("p{index}")).collect();
    let named: Vec<Value> = names.iter().map(|name| json!({ "name": name })).collect();
    let clusters = [cluster("c", 9, json!({ "pools": named }))];
    let of_n1 = json!({ "nodeSelector": { "matchLabels": { "name": "n1" } } });
    let pools: Vec<Arc<SSDPool>> = names
        .iter()
        .enumerate()
        .map(|(index, name)| {
            let more = if index == 0 { json!({}) } else { of_n1.clone() };
            pool(name, 20 - u32::try_from(index).expect("few"), directory(&format!("/{name}"), more))
        })
        .collect();
    let on_n1: Vec<(&str, i64, Option<&str>)> =
        names[1..].iter().map(|name| (name.as_str(), 1, None)).collect();
    let current = CurrentAssignment::from_cache_nodes(&[
        having("n1", "c", &on_n1),
        having("n3", "c", &[("p0", 1, None)]),
    ]);
    let assignment = Assignment::compute(&clusters, &pools, &nodes(), &current);
    assert_eq!(assignment.nodes["n1"].pools, names[1..]);
    assert!(
        refusal(&assignment, "p0").contains("node n1 already has 8 pools"),
        "{}",
        refusal(&assignment, "p0")
    );
    assert_eq!(assignment.pools["p0"].nodes, ["n3"]);
}

#[test]
fn device_that_a_node_has_for_one_pool_is_assigned_to_no_other() {
    let clusters = [cluster("c", 9, json!({ "pools": [{ "name": "a" }, { "name": "b" }] }))];
    let on = |glob: &str, disk: &str| {
        json!({
            "devices": { "globs": [glob] }, "nodeSelector": { "matchLabels": { "disk": disk } },
        })
    };
    let nvme = "/dev/disk/by-id/nvme-1";
    // The older pool was on slow nodes. Now a label also puts it on a node of the other pool.
    let current = CurrentAssignment::from_cache_nodes(&[
        having("n1", "c", &[("b", 1, Some(nvme))]),
        having("n3", "c", &[("a", 1, Some(nvme))]),
    ]);
    let pools = [pool("a", 5, json!({ "devices": { "globs": [nvme] } })), pool("b", 1, on(nvme, "fast"))];
    let assignment = Assignment::compute(&clusters, &pools, &nodes(), &current);
    assert!(
        refusal(&assignment, "a").contains("on node n1 may already belong to SSDPool b"),
        "{assignment:?}"
    );
    assert_eq!((&assignment.pools["a"].nodes, kept(&assignment, "n3")), (&vec!["n3".to_owned()], vec!["a"]));
    assert_eq!(assignment.pools["b"].nodes, ["n1", "n2"]);
    // A refused pool still has its devices, so no other pool gets them.
    let broken = json!({
        "devices": { "globs": ["/dev/disk/by-id/nvme-2"] }, "engine": "Gds",
        "nodeSelector": { "matchLabels": { "disk": "fast" } },
    });
    let pools = [pool_of("b", 1, 2, broken), pool("a", 5, on(nvme, "fast"))];
    let current = CurrentAssignment::from_cache_nodes(&[having("n1", "c", &[("b", 1, Some(nvme))])]);
    let assignment = Assignment::compute(&clusters, &pools, &nodes(), &current);
    assert_eq!(kept(&assignment, "n1"), ["b"]);
    assert!(
        refusal(&assignment, "a").contains("on node n1 may already belong to SSDPool b"),
        "{assignment:?}"
    );
    assert!(!assignment.pools["a"].is_used());
}

#[test]
fn pool_stays_with_the_cluster_whose_nodes_have_it() {
    let named = json!([{ "name": "p" }]);
    let on = |name: &str| json!({ "agents": { "nodeSelector": { "name": name } }, "pools": named });
    let clusters = [cluster("old", 9, on("n1")), cluster("young", 1, on("n2"))];
    let pools = [pool("p", 5, directory("/p", json!({})))];
    let current = CurrentAssignment::from_cache_nodes(&[having("n2", "young", &[("p", 1, None)])]);
    let assignment = Assignment::compute(&clusters, &pools, &nodes(), &current);
    assert_eq!(assignment.pools["p"].cluster.as_deref(), Some("n/young"));
    let assignment = Assignment::compute(&clusters, &pools, &nodes(), &CurrentAssignment::default());
    assert_eq!(assignment.pools["p"].cluster.as_deref(), Some("n/old"));
    // The cluster no longer names the pool.
    let clusters = [
        cluster("old", 9, on("n1")),
        cluster("young", 1, json!({ "agents": { "nodeSelector": { "name": "n2" } } })),
    ];
    let assignment = Assignment::compute(&clusters, &pools, &nodes(), &current);
    assert_eq!(assignment.pools["p"].cluster.as_deref(), Some("n/old"));
}

#[test]
fn applying_an_assignment_does_not_change_it() {
    let named = json!([{ "name": "a" }, { "name": "b" }, { "name": "d" }]);
    let clusters = [
        cluster("old", 9, json!({ "agents": { "nodeSelector": { "disk": "fast" } }, "pools": named })),
        cluster("young", 1, json!({})),
    ];
    let pools = [
        pool("a", 5, directory("/a", json!({}))),
        pool("b", 4, directory("/a/inner", json!({}))),
        pool("d", 3, directory("/d", json!({ "nodeSelector": { "matchLabels": { "name": "n1" } } }))),
    ];
    let first = Assignment::compute(&clusters, &pools, &nodes(), &CurrentAssignment::default());
    assert!(!refusal(&first, "b").is_empty() && first.clusters["n/young"].refused.is_some());
    let all =
        [having("n1", "old", &[("a", 1, None), ("d", 1, None)]), having("n2", "old", &[("a", 1, None)])];
    for some in 0..=all.len() {
        assert_eq!(
            Assignment::compute(
                &clusters,
                &pools,
                &nodes(),
                &CurrentAssignment::from_cache_nodes(&all[..some])
            ),
            first
        );
    }
}

#[test]
fn detects_when_a_node_no_longer_has_its_cluster_claim_or_devices() {
    let node = |claims: &[(&str, i64, Option<&str>)]| having("n1", "c", claims);
    let current = CurrentAssignment::from_cache_nodes(&[node(&[("p", 1, None), ("q", 1, Some("/dev/q"))])]);
    for (now, lost) in [
        (Some(node(&[("p", 2, None), ("q", 1, Some("/dev/q")), ("r", 1, None)])), false),
        (Some(node(&[("p", 1, None), ("q", 1, Some("/dev/other"))])), true),
        (Some(node(&[("p", 1, None)])), true),
        (Some(having("n1", "d", &[("p", 1, None), ("q", 1, Some("/dev/q"))])), true),
        (None, true),
    ] {
        assert_eq!(current.has_lost("n1", now.as_deref()), lost, "{now:?}");
    }
    assert!(!current.has_lost("n2", None), "it had nothing to lose");
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
        assert_eq!(globs_overlap(one, other), expected, "{one} {other}");
        assert_eq!(globs_overlap(other, one), expected, "{other} {one}");
    }
}
