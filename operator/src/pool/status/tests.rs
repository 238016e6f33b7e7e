//! What is said of a pool that is being drained, and of one whose devices are slow or worn.

#![allow(clippy::needless_pass_by_value, reason = "statuses are made where they are passed")]

use std::sync::Arc;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::{SignedDuration, Timestamp};
use reprise_crds::CacheNode;
use reprise_crds::fields::Percent;
use reprise_crds::status::ConditionStatus;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use super::*;
use crate::in_use::Usage;
use crate::plan::PoolPlan;

/// Of the pool's spec that says `Draining`.
const GENERATION: i64 = 3;
/// Of the `CacheNode` that the operator made of it.
const SPEC: i64 = 7;

fn object<K: DeserializeOwned>(value: Value) -> K {
    serde_json::from_value(value).expect("an object")
}

fn pool() -> SSDPool {
    object(json!({
        "apiVersion": "reprise.dev/v1alpha1", "kind": "SSDPool",
        "metadata": { "name": "p", "uid": "u", "generation": GENERATION },
        "spec": { "directory": { "path": "/p", "size": "1Gi" }, "mode": "Draining" },
    }))
}

/// A node that is empty, and says so now.
fn empty(name: &str) -> Value {
    json!({
        "apiVersion": "reprise.dev/v1alpha1", "kind": "CacheNode",
        "metadata": { "name": name, "generation": SPEC },
        "spec": {
            "nodeName": name,
            "mode": "Draining",
            "claims": [{ "pool": "p", "uid": "u", "generation": GENERATION, "file": "/p/pool", "size": "1Gi" }],
        },
        "status": {
            "observedGeneration": SPEC,
            "lastUpdated": crate::clock::now(),
            "drain": { "drained": true, "walkedBlocks": 4, "durableBlocks": 4, "nowhereBlocks": 0 },
        },
    })
}

/// The same with something else at a place of it.
fn with(mut node: Value, place: &str, other: Value) -> Value {
    *node.pointer_mut(place).expect("it is there") = other;
    node
}

/// What the plan has, and what is known of its nodes.
fn found(planned: &[&str], nodes: Vec<Value>) -> Found {
    let node = |node: Value| PoolNode {
        node: Arc::new(object::<CacheNode>(node)),
        pool_uid: "u".to_owned(),
        pool: "p".to_owned(),
    };
    let plan = PoolPlan {
        cluster: Some("n/c".to_owned()),
        nodes: planned.iter().map(|name| (*name).to_owned()).collect(),
        refused: None,
    };
    Found {
        plan,
        cluster: None,
        nodes: nodes.into_iter().map(node).collect(),
        reserved: 0,
        usage: Usage::default(),
    }
}

fn said(found: &Found, refused: Option<&Refusal>) -> Finding {
    let (_, findings) = of(&pool(), found, refused);
    findings.into_iter().find(|finding| finding.kind == Type::Drained).expect("somebody waits for it")
}

#[test]
fn a_pool_is_drained_when_every_node_of_the_plan_has_said_so() {
    let both = found(&["n1", "n2"], vec![empty("n1"), empty("n2")]);
    assert_eq!(said(&both, None).status, ConditionStatus::True);

    let unknown = said(&found(&["n1", "n2"], vec![empty("n1")]), None);
    assert_eq!((unknown.status, unknown.reason), (ConditionStatus::False, Reason::Draining));
    assert!(unknown.message.starts_with("1 of 2 nodes are not empty yet"), "{}", unknown.message);
    assert!(unknown.message.ends_with(": n2"), "{}", unknown.message);

    let mut active = pool();
    active.spec.mode = NodeMode::Active;
    let (_, findings) = of(&active, &both, None);
    assert!(!findings.iter().any(|finding| finding.kind == Type::Drained), "nobody waits for it");
}

#[test]
fn nodes_that_found_nothing_are_said_with_what_to_do_about_it() {
    let mut node = empty("n1");
    node["status"]["applied"] = json!({ "pools": [{ "pool": "p", "uid": "u", "generation": GENERATION }] });
    let nothing = found(&["n1"], vec![node.clone()]);
    let discovered = |pool: &SSDPool, found: &Found| {
        let (_, findings) = of(pool, found, None);
        findings.into_iter().find(|finding| finding.kind == Type::DevicesDiscovered).expect("always said")
    };
    let mut devices = pool();
    (devices.spec.directory, devices.spec.devices) =
        (None, Some(object(json!({ "globs": ["/dev/disk/by-id/nvme-*"] }))));
    for (pool, words, others) in [(devices, "devices.globs", "/p"), (pool(), "/p", "globs")] {
        let said = discovered(&pool, &nothing);
        assert_eq!((said.status, said.reason), (ConditionStatus::False, Reason::NoDevices));
        assert!(said.message.contains(words) && !said.message.contains(others), "{}", said.message);
    }
    // One that has not looked yet has not found nothing.
    let early = discovered(&pool(), &found(&["n1", "n2"], vec![node.clone()]));
    assert_eq!((early.status, early.reason), (ConditionStatus::False, Reason::Progressing));
    node["status"]["devices"] = json!([{ "path": "/p/pool", "pool": "p", "state": "Opening" }]);
    assert_eq!(discovered(&pool(), &found(&["n1"], vec![node])).status, ConditionStatus::True);
}

#[test]
fn what_a_node_said_too_long_ago_or_of_another_spec_does_not_count() {
    let ago = Time(Timestamp::now() - SignedDuration::from_mins(5));
    for (place, other) in [
        ("/status/drain/drained", json!(false)),
        ("/status/drain", Value::Null),
        ("/status/lastUpdated", json!(ago)),
        ("/status/lastUpdated", Value::Null),
        ("/status/observedGeneration", json!(SPEC - 1)),
        ("/spec/claims/0/generation", json!(GENERATION - 1)),
        ("/spec/claims/0/uid", json!("another")),
        ("/spec/claims", json!([])),
        ("/status", Value::Null),
    ] {
        let node = with(empty("n2"), place, other.clone());
        let finding = said(&found(&["n1", "n2"], vec![empty("n1"), node]), None);
        assert_eq!(finding.status, ConditionStatus::False, "{place} {other}");
        assert!(finding.message.contains("n2"), "{place} {other}: {}", finding.message);
    }
}

#[test]
fn a_worn_device_is_said_before_a_slow_one_and_keeps_no_pool_from_being_ready() {
    let devices = |worn: bool, slow: bool| {
        let message = "it has met 11 media errors, and its pool allows 10";
        let device = json!({ "path": "/p/pool", "pool": "p", "state": "Open", "worn": worn, "slow": slow, "message": message });
        let mut node = empty("n1");
        node["status"]["devices"] = json!([device]);
        node["status"]["applied"] =
            json!({ "pools": [{ "pool": "p", "uid": "u", "generation": GENERATION }] });
        let (_, findings) = of(&pool(), &found(&["n1"], vec![node]), None);
        let one = |kind| findings.iter().find(|finding| finding.kind == kind).expect("it is said").clone();
        (one(Type::Degraded), one(Type::Ready))
    };
    for (worn, slow, reason) in [
        (false, false, Reason::AsDesired),
        (false, true, Reason::DeviceSlow),
        (true, false, Reason::DeviceWorn),
        (true, true, Reason::DeviceWorn),
    ] {
        let (degraded, ready) = devices(worn, slow);
        assert_eq!(degraded.reason, reason);
        assert_eq!(degraded.status == ConditionStatus::True, worn || slow);
        assert_eq!(ready.status, ConditionStatus::True, "it is used all the same");
    }
    let said = devices(true, true).0.message;
    for words in ["n1", "/p/pool", "11 media errors", "health.maxMediaErrors", "health.minSparePercent"] {
        assert!(said.contains(words), "{said}");
    }
}

#[test]
fn a_spare_capacity_that_no_drive_tells_is_said_where_the_pool_asks_for_some() {
    let said = |wanted: Option<u8>, told: Option<u8>| {
        let mut pool = pool();
        pool.spec.health.min_spare_percent = wanted.map(Percent);
        let mut node = empty("n1");
        node["status"]["devices"] =
            json!([{ "path": "/dev/a", "pool": "p", "state": "Open", "sparePercent": told }]);
        let (_, findings) = of(&pool, &found(&["n1"], vec![node]), None);
        let degraded =
            findings.into_iter().find(|finding| finding.kind == Type::Degraded).expect("it is said");
        assert_eq!((degraded.status, degraded.reason), (ConditionStatus::False, Reason::AsDesired));
        degraded.message
    };
    let words = said(Some(10), None);
    assert!(words.contains("minSparePercent is not compared on 1 nodes") && words.contains("n1"), "{words}");
    assert!(words.contains("deviceAccess"), "what to do: {words}");
    for (wanted, told) in [(None, None), (Some(10), Some(90))] {
        assert_eq!(said(wanted, told), "");
    }
}

#[test]
fn of_a_pool_that_no_node_has_nobody_knows_whether_it_is_drained() {
    let nowhere = said(&found(&[], Vec::new()), None);
    assert_eq!((nowhere.status, nowhere.reason), (ConditionStatus::Unknown, Reason::NoNodes));

    let refusal = Refusal::new(Reason::ReferenceNotFound, "no KVCacheCluster names this pool");
    for nodes in [&["n1"][..], &[]] {
        let refused = said(&found(nodes, vec![empty("n1")]), Some(&refusal));
        assert_eq!((refused.status, refused.reason), (ConditionStatus::Unknown, Reason::ReferenceNotFound));
    }
}

#[test]
fn a_device_that_the_runtime_keeps_from_agents_names_the_field_that_gives_it_to_them() {
    let cluster = |mode: &str| {
        object::<reprise_crds::KVCacheCluster>(json!({
            "apiVersion": "reprise.dev/v1alpha1", "kind": "KVCacheCluster", "metadata": { "name": "c", "namespace": "n" },
            "spec": { "agents": { "deviceAccess": { "mode": mode } } },
        }))
    };
    let degraded = |mode: &str, reason: Option<Reason>, words: &str| {
        let mut node = empty("n1");
        let device = json!({
            "path": "/dev/disk/by-id/nvme-a", "pool": "p", "state": "Refused", "reason": reason.map(Reason::as_str), "message": words,
        });
        node["status"]["devices"] = json!([device]);
        let mut found = found(&["n1"], vec![node]);
        found.cluster = Some(Arc::new(cluster(mode)));
        let (_, findings) = of(&pool(), &found, None);
        let said = findings.into_iter().find(|finding| finding.kind == Type::Degraded).expect("it is said");
        (said.reason, said.message)
    };
    let forbidden = "it cannot be read: Operation not permitted (os error 1)";
    let (reason, told) = degraded("None", Some(Reason::DeviceNotPermitted), forbidden);
    assert_eq!(reason, Reason::DeviceNotPermitted);
    assert!(told.contains(forbidden) && told.contains("set agents.deviceAccess of the cluster"), "{told}");
    for (mode, why, words) in [
        ("Privileged", Reason::DeviceNotPermitted, forbidden),
        ("None", Reason::ForeignSignature, "it carries a file system"),
        ("None", Reason::EngineUnavailable, "io_uring is forbidden"),
    ] {
        let (reason, told) = degraded(mode, Some(why), words);
        assert_eq!(reason, why);
        assert!(told.contains(words) && !told.contains("deviceAccess"), "{told}");
    }
    let (reason, told) = degraded("None", None, "as an older agent says it");
    assert_eq!(reason, Reason::Refused, "{told}");
}
