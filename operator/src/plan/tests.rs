//! Tables of clusters, pools and nodes, and what is decided of them.

#![allow(clippy::needless_pass_by_value, reason = "specs are made where they are passed")]

use reprise_crds::CacheNode;
use serde_json::{Value, json};

use super::*;
use crate::names::{MANAGED_BY, OPERATOR};

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

/// Pools that are refused and that a node has.
fn kept<'a>(plan: &'a Plan, node: &str) -> Vec<&'a str> {
    plan.nodes[node].kept.iter().map(|kept| kept.name.as_str()).collect()
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
    let plan = Plan::make(&clusters, &pools, &nodes(), &Held::default());
    assert_eq!(plan.pools["p"].nodes, ["n1", "n2"]);
    assert_eq!(plan.nodes["n1"].pools, ["p", "q"]);
    assert_eq!(plan.nodes["n3"].pools, ["q"]);
    assert_eq!(plan.nodes["n3"].cluster.as_deref(), Some("n/c"));
    assert_eq!(plan.pools["unnamed"], PoolPlan::default());
}

#[test]
fn of_two_clusters_on_one_node_the_younger_is_refused_whole() {
    let selector = json!({ "agents": { "nodeSelector": { "name": "n1" } } });
    let clusters = [cluster("young", 1, json!({})), cluster("old", 9, selector)];
    let plan = Plan::make(&clusters, &[], &nodes(), &Held::default());
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
        let plan = Plan::make(&clusters, &pools, &nodes(), &Held::default());
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

/// What a node of a cluster has: pools by name and generation, with their globs or none, which stands for the directory of that name.
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

/// A pool whose spec is of this generation.
fn pool_of(name: &str, age: u32, generation: i64, spec: Value) -> Arc<SSDPool> {
    object("SSDPool", name, age, spec, json!({ "generation": generation }))
}

#[test]
fn a_node_stays_with_the_cluster_that_has_it_and_whoever_selects_it_too_keeps_what_it_has() {
    let on = |label: &str, value: &str| json!({ "agents": { "nodeSelector": { label: value } } });
    let clusters = [cluster("old", 9, json!({})), cluster("young", 1, on("name", "n2"))];
    let held = Held::of(&[having("n1", "old", &[]), having("n2", "young", &[])]);
    let plan = Plan::make(&clusters, &[], &nodes(), &held);
    let old = &plan.clusters["n/old"];
    let refused = old.refused.as_ref().expect("it selects n2 as well");
    assert!(refused.message.contains("n2") && refused.message.contains("n/young"), "{}", refused.message);
    assert_eq!(old.nodes, ["n1"], "what it has, and no new one");
    assert_eq!(plan.clusters["n/young"], ClusterPlan { nodes: vec!["n2".to_owned()], refused: None });
    assert_eq!(plan.nodes["n3"].cluster, None);
    assert!(plan.is_contested);
    // Both were made to select a node of the other: both go on.
    let clusters = [cluster("old", 9, json!({})), cluster("young", 1, on("disk", "fast"))];
    let plan = Plan::make(&clusters, &[], &nodes(), &held);
    for (key, node) in [("n/old", "n1"), ("n/young", "n2")] {
        assert!(plan.clusters[key].refused.is_some(), "{key}");
        assert_eq!(plan.clusters[key].nodes, [node]);
        assert_eq!(plan.nodes[node].cluster.as_deref(), Some(key));
    }
    // An edit that is refused takes no node away from who made it.
    let clusters = [cluster("old", 9, on("name", "n2")), cluster("young", 1, on("name", "n2"))];
    let plan = Plan::make(&clusters, &[], &nodes(), &held);
    assert!(plan.clusters["n/old"].refused.is_some());
    assert_eq!(plan.clusters["n/old"].nodes, ["n1"]);
    for (first, second) in [(9, 1), (1, 9)] {
        // One that is refused for a third one's node keeps what it selects no more from who is older as well.
        let clusters = [
            cluster("old", first, on("name", "n2")),
            cluster("young", 5, on("name", "n2")),
            cluster(
                "third",
                second,
                json!({ "agents": { "nodeSelector": { "disk": "fast", "name": "n1" } } }),
            ),
        ];
        let plan = Plan::make(&clusters, &[], &nodes(), &held);
        assert_eq!(plan.clusters["n/old"].nodes, ["n1"]);
        assert!(plan.clusters["n/third"].refused.is_some() && plan.clusters["n/third"].nodes.is_empty());
        assert_eq!(plan.clusters["n/young"].nodes, ["n2"]);
    }
    // One that is selected no more by who has it is free.
    let clusters = [cluster("old", 9, json!({})), cluster("young", 1, on("name", "none"))];
    let plan = Plan::make(&clusters, &[], &nodes(), &held);
    assert_eq!(plan.clusters["n/old"].nodes, ["n1", "n2", "n3"]);
    // Of a cluster that is gone as well, and what somebody wrote by hand gives nobody anything.
    let by_hand: Arc<CacheNode> = object(
        "CacheNode",
        "n1",
        0,
        json!({
            "nodeName": "n1", "clusterRef": { "namespace": "n", "name": "young" },
        }),
        json!({}),
    );
    let held = Held::of(&[by_hand, having("n2", "gone", &[])]);
    let plan =
        Plan::make(&[cluster("old", 9, json!({})), cluster("young", 1, json!({}))], &[], &nodes(), &held);
    assert_eq!(plan.clusters["n/old"].nodes, ["n1", "n2", "n3"]);
    assert!(plan.clusters["n/young"].nodes.is_empty());
}

#[test]
fn of_pools_that_contradict_each_other_who_was_edited_is_refused_and_nodes_keep_it_as_it_was() {
    let clusters = [cluster("c", 9, json!({ "pools": [{ "name": "old" }, { "name": "young" }] }))];
    let held = Held::of(&[having("n1", "c", &[("old", 1, None), ("young", 1, None)])]);
    let both = |old: (i64, u32), young: (i64, u32)| {
        let spec = |name: &str, depth: u32| directory(&format!("/{name}"), json!({ "queueDepth": depth }));
        let pools = [
            pool_of("old", 5, old.0, spec("old", old.1)),
            pool_of("young", 1, young.0, spec("young", young.1)),
        ];
        Plan::make(&clusters, &pools, &nodes(), &held)
    };
    let plan = both((2, 8), (1, 128));
    assert!(refusal(&plan, "old").contains("queueDepth is 8 here and 128 in SSDPool young"), "{plan:?}");
    assert!(refusal(&plan, "old").ends_with("nodes keep the pool as it was"));
    assert_eq!(plan.pools["old"].nodes, ["n1"], "new nodes do not get it");
    assert!(plan.pools["old"].is_used());
    assert_eq!((&plan.nodes["n1"].pools, kept(&plan, "n1")), (&vec!["young".to_owned()], vec!["old"]));
    assert_eq!(plan.pools["young"].nodes, ["n1", "n2", "n3"]);
    assert!(!refusal(&both((1, 128), (2, 8)), "young").is_empty());
    // When all agree again all of it is applied.
    let plan = both((2, 8), (2, 8));
    assert!(!plan.is_contested && plan.nodes["n1"].kept.is_empty(), "{plan:?}");
    // Both edited: the older comes first.
    let plan = both((2, 8), (2, 16));
    assert!(refusal(&plan, "old").is_empty() && !refusal(&plan, "young").is_empty());
}

#[test]
fn an_edit_that_was_refused_does_not_win_by_another_edit_of_who_was_there() {
    let clusters = [cluster("c", 9, json!({ "pools": [{ "name": "old" }, { "name": "young" }] }))];
    let held = Held::of(&[having("n1", "c", &[("old", 1, None), ("young", 1, None)])]);
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
    let plan = Plan::make(&clusters, &[old.clone(), young(json!({ "mode": "Cordoned" }))], &nodes(), &held);
    assert!(!refusal(&plan, "old").is_empty() && refusal(&plan, "young").is_empty(), "{plan:?}");
    let plan = Plan::make(&clusters, &[old, young(json!({ "queueDepth": 8 }))], &nodes(), &held);
    assert!(!plan.is_contested, "all agree: {plan:?}");
}

/// A pool of which this was said last.
fn said(pool: Arc<SSDPool>, deleted: bool) -> Arc<SSDPool> {
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
fn what_a_deleted_pool_never_had_is_not_given_to_it_when_it_becomes_free() {
    let clusters = [cluster("c", 9, json!({ "pools": [{ "name": "p" }, { "name": "kept" }] }))];
    let all = json!({ "devices": { "globs": ["/dev/disk/by-id/nvme-1"] } });
    let pools = [said(pool("p", 1, all.clone()), true)];
    let plan = Plan::make(&clusters, &pools, &nodes(), &Held::default());
    assert!(!refusal(&plan, "p").is_empty() && !plan.pools["p"].is_used(), "{plan:?}");
    // Nor to one that is on some nodes, by an edit that was refused.
    let held = Held::of(&[having("n1", "c", &[("kept", 1, None)])]);
    let pools = [said(pool_of("kept", 1, 3, directory("/kept", json!({}))), true)];
    let plan = Plan::make(&clusters, &pools, &nodes(), &held);
    assert_eq!((&plan.pools["kept"].nodes, kept(&plan, "n1")), (&vec!["n1".to_owned()], vec!["kept"]));
    // One that was accepted is wiped wherever it is selected.
    let accepted = pool_of("kept", 1, 3, directory("/kept", json!({})));
    let plan = Plan::make(&clusters, &[accepted], &nodes(), &held);
    assert_eq!(plan.pools["kept"].nodes, ["n1", "n2", "n3"]);
}

#[test]
fn what_is_decided_of_pools_does_not_depend_on_what_was_said_of_them_before() {
    // Both want the device that the other has, and nodes stay as they are, since the cluster is paused.
    let clusters =
        [cluster("c", 9, json!({ "pools": [{ "name": "old" }, { "name": "young" }], "paused": true }))];
    let glob = |disk: &str| format!("/dev/disk/by-id/{disk}");
    let held =
        Held::of(&[having("n1", "c", &[("old", 1, Some(&glob("a"))), ("young", 1, Some(&glob("b")))])]);
    let edited = |name: &str, age: u32, disk: &str| {
        pool_of(name, age, 2, json!({ "devices": { "globs": [glob(disk)] } }))
    };
    for was_refused in [false, true] {
        let old = edited("old", 5, "b");
        let old = if was_refused { said(old, false) } else { old };
        let plan = Plan::make(&clusters, &[old, edited("young", 1, "d")], &nodes(), &held);
        assert!(!refusal(&plan, "old").is_empty(), "young has it still: {was_refused}");
        assert!(refusal(&plan, "young").is_empty(), "{was_refused}");
    }
}

#[test]
fn a_cluster_whose_spec_is_not_in_effect_keeps_what_that_selects_no_more() {
    let held = Held::of(&[having("n1", "c", &[])]);
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
        let plan = Plan::make(&[older.clone(), cluster], &[], &nodes(), &held);
        (plan.clusters["n/c"].nodes.clone(), plan.clusters["n/older"].nodes.clone())
    };
    let (one, two, none): (Vec<String>, Vec<String>, Vec<String>) =
        (vec!["n1".into()], vec!["n2".into()], Vec::new());
    let both = vec!["n1".to_owned(), "n2".to_owned()];
    assert_eq!(nodes_of(of(true, 1)), (both.clone(), none.clone()), "it is paused");
    assert_eq!(nodes_of(of(false, 0)), (both, none), "it was edited");
    assert_eq!(nodes_of(of(false, 1)), (two, one));
}

#[test]
fn who_names_a_pool_that_others_have_gets_it_when_they_have_lost_it() {
    let named = json!([{ "name": "p" }]);
    let on = |name: &str| json!({ "agents": { "nodeSelector": { "name": name } }, "pools": named });
    let clusters = [cluster("old", 9, on("n1")), cluster("young", 1, on("n2"))];
    let pools =
        [pool("p", 5, directory("/p", json!({ "nodeSelector": { "matchLabels": { "name": "n1" } } })))];
    let plan =
        Plan::make(&clusters, &pools, &nodes(), &Held::of(&[having("n2", "young", &[("p", 1, None)])]));
    assert_eq!(plan.pools["p"].cluster.as_deref(), Some("n/young"));
    assert!(plan.is_contested, "it is looked at again when n2 has it no more");
    let plan = Plan::make(&clusters, &pools, &nodes(), &Held::of(&[having("n2", "young", &[])]));
    assert_eq!(plan.pools["p"].cluster.as_deref(), Some("n/old"));
}

#[test]
fn a_node_that_is_full_gets_no_pool_that_comes_first_elsewhere() {
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
    let held = Held::of(&[having("n1", "c", &on_n1), having("n3", "c", &[("p0", 1, None)])]);
    let plan = Plan::make(&clusters, &pools, &nodes(), &held);
    assert_eq!(plan.nodes["n1"].pools, names[1..]);
    assert!(refusal(&plan, "p0").contains("node n1 has 8 pools already"), "{}", refusal(&plan, "p0"));
    assert_eq!(plan.pools["p0"].nodes, ["n3"]);
}

#[test]
fn what_a_node_has_of_a_pool_is_given_to_no_other() {
    let clusters = [cluster("c", 9, json!({ "pools": [{ "name": "a" }, { "name": "b" }] }))];
    let on = |glob: &str, disk: &str| {
        json!({
            "devices": { "globs": [glob] }, "nodeSelector": { "matchLabels": { "disk": disk } },
        })
    };
    let nvme = "/dev/disk/by-id/nvme-1";
    // The older one was on slow nodes, and by a label is on a node of the other's now.
    let held =
        Held::of(&[having("n1", "c", &[("b", 1, Some(nvme))]), having("n3", "c", &[("a", 1, Some(nvme))])]);
    let pools = [pool("a", 5, json!({ "devices": { "globs": [nvme] } })), pool("b", 1, on(nvme, "fast"))];
    let plan = Plan::make(&clusters, &pools, &nodes(), &held);
    assert!(refusal(&plan, "a").contains("on node n1 may be those of SSDPool b"), "{plan:?}");
    assert_eq!((&plan.pools["a"].nodes, kept(&plan, "n3")), (&vec!["n3".to_owned()], vec!["a"]));
    assert_eq!(plan.pools["b"].nodes, ["n1", "n2"]);
    // One that is refused has its devices still: nobody else gets them.
    let broken = json!({
        "devices": { "globs": ["/dev/disk/by-id/nvme-2"] }, "engine": "Gds",
        "nodeSelector": { "matchLabels": { "disk": "fast" } },
    });
    let pools = [pool_of("b", 1, 2, broken), pool("a", 5, on(nvme, "fast"))];
    let held = Held::of(&[having("n1", "c", &[("b", 1, Some(nvme))])]);
    let plan = Plan::make(&clusters, &pools, &nodes(), &held);
    assert_eq!(kept(&plan, "n1"), ["b"]);
    assert!(refusal(&plan, "a").contains("on node n1 may be those of SSDPool b"), "{plan:?}");
    assert!(!plan.pools["a"].is_used());
}

#[test]
fn a_pool_stays_with_the_cluster_whose_nodes_have_it() {
    let named = json!([{ "name": "p" }]);
    let on = |name: &str| json!({ "agents": { "nodeSelector": { "name": name } }, "pools": named });
    let clusters = [cluster("old", 9, on("n1")), cluster("young", 1, on("n2"))];
    let pools = [pool("p", 5, directory("/p", json!({})))];
    let held = Held::of(&[having("n2", "young", &[("p", 1, None)])]);
    let plan = Plan::make(&clusters, &pools, &nodes(), &held);
    assert_eq!(plan.pools["p"].cluster.as_deref(), Some("n/young"));
    let plan = Plan::make(&clusters, &pools, &nodes(), &Held::default());
    assert_eq!(plan.pools["p"].cluster.as_deref(), Some("n/old"));
    // It names it no more.
    let clusters = [
        cluster("old", 9, on("n1")),
        cluster("young", 1, json!({ "agents": { "nodeSelector": { "name": "n2" } } })),
    ];
    let plan = Plan::make(&clusters, &pools, &nodes(), &held);
    assert_eq!(plan.pools["p"].cluster.as_deref(), Some("n/old"));
}

#[test]
fn what_nodes_have_as_it_was_planned_changes_no_plan() {
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
    let first = Plan::make(&clusters, &pools, &nodes(), &Held::default());
    assert!(!refusal(&first, "b").is_empty() && first.clusters["n/young"].refused.is_some());
    let all =
        [having("n1", "old", &[("a", 1, None), ("d", 1, None)]), having("n2", "old", &[("a", 1, None)])];
    for some in 0..=all.len() {
        assert_eq!(Plan::make(&clusters, &pools, &nodes(), &Held::of(&all[..some])), first);
    }
}

#[test]
fn a_node_has_lost_what_it_has_no_more() {
    let node = |claims: &[(&str, i64, Option<&str>)]| having("n1", "c", claims);
    let held = Held::of(&[node(&[("p", 1, None), ("q", 1, Some("/dev/q"))])]);
    for (now, lost) in [
        (Some(node(&[("p", 2, None), ("q", 1, Some("/dev/q")), ("r", 1, None)])), false),
        (Some(node(&[("p", 1, None), ("q", 1, Some("/dev/other"))])), true),
        (Some(node(&[("p", 1, None)])), true),
        (Some(having("n1", "d", &[("p", 1, None), ("q", 1, Some("/dev/q"))])), true),
        (None, true),
    ] {
        assert_eq!(held.has_lost("n1", now.as_deref()), lost, "{now:?}");
    }
    assert!(!held.has_lost("n2", None), "it had nothing");
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
