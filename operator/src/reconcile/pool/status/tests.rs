//! Conditions of draining pools, and of pools with slow, worn or refused devices.

#![allow(clippy::needless_pass_by_value, reason = "statuses are made where they are passed")]

use std::sync::Arc;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::SignedDuration;
use reprise_crds::CacheNode;
use reprise_crds::fields::Percent;
use reprise_crds::status::ConditionStatus;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use super::*;
use crate::reconcile::assignment::PoolAssignment;
use crate::reconcile::deletion_guard::DeletionGuard;

/// Generation of the pool spec with mode `Draining`.
const GENERATION: i64 = 3;
/// Generation of the `CacheNode` spec that the operator wrote for it.
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

/// A node that is empty and has just reported so.
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
            "lastUpdated": crate::framework::clock::now(),
            "drain": { "drained": true, "walkedBlocks": 4, "durableBlocks": 4, "nowhereBlocks": 0 },
        },
    })
}

/// Replaces the value at a JSON pointer.
fn with(mut node: Value, place: &str, other: Value) -> Value {
    *node.pointer_mut(place).expect("a value") = other;
    node
}

/// Inputs with these assigned nodes and these `CacheNode`s.
fn found(planned: &[&str], nodes: Vec<Value>) -> PoolInputs {
    let node = |node: Value| PoolNode {
        node: Arc::new(object::<CacheNode>(node)),
        pool_uid: "u".to_owned(),
        pool: "p".to_owned(),
    };
    let assignment = PoolAssignment {
        cluster: Some("n/c".to_owned()),
        nodes: planned.iter().map(|name| (*name).to_owned()).collect(),
        refused: None,
    };
    PoolInputs {
        assignment,
        cluster: None,
        nodes: nodes.into_iter().map(node).collect(),
        reserved: 0,
        guard: DeletionGuard::default(),
    }
}

fn drained(found: &PoolInputs, refused: Option<&Refusal>) -> Finding {
    let (_, findings) = compute(&pool(), found, refused);
    findings.into_iter().find(|finding| finding.kind == Type::Drained).expect("condition Drained")
}

#[test]
fn pool_is_drained_once_every_assigned_node_has_reported_it() {
    let both = found(&["n1", "n2"], vec![empty("n1"), empty("n2")]);
    assert_eq!(drained(&both, None).status, ConditionStatus::True);

    let unknown = drained(&found(&["n1", "n2"], vec![empty("n1")]), None);
    assert_eq!((unknown.status, unknown.reason), (ConditionStatus::False, Reason::Draining));
    assert!(unknown.message.starts_with("1 of 2 nodes are not empty yet"), "{}", unknown.message);
    assert!(unknown.message.ends_with(": n2"), "{}", unknown.message);

    let mut active = pool();
    active.spec.mode = NodeMode::Active;
    let (_, findings) = compute(&active, &both, None);
    assert!(!findings.iter().any(|finding| finding.kind == Type::Drained), "the pool is not draining");
}

#[test]
fn reports_nodes_without_devices_with_the_remedy() {
    let mut node = empty("n1");
    node["status"]["applied"] = json!({ "pools": [{ "pool": "p", "uid": "u", "generation": GENERATION }] });
    let nothing = found(&["n1"], vec![node.clone()]);
    let discovered = |pool: &SSDPool, found: &PoolInputs| {
        let (_, findings) = compute(pool, found, None);
        findings
            .into_iter()
            .find(|finding| finding.kind == Type::DevicesDiscovered)
            .expect("condition DevicesDiscovered")
    };
    let mut devices = pool();
    (devices.spec.directory, devices.spec.devices) =
        (None, Some(object(json!({ "globs": ["/dev/disk/by-id/nvme-*"] }))));
    for (pool, words, others) in [(devices, "devices.globs", "/p"), (pool(), "/p", "globs")] {
        let condition = discovered(&pool, &nothing);
        assert_eq!((condition.status, condition.reason), (ConditionStatus::False, Reason::NoDevices));
        assert!(
            condition.message.contains(words) && !condition.message.contains(others),
            "{}",
            condition.message
        );
    }
    // A node that has not reported yet does not count as a node without devices.
    let early = discovered(&pool(), &found(&["n1", "n2"], vec![node.clone()]));
    assert_eq!((early.status, early.reason), (ConditionStatus::False, Reason::Progressing));
    node["status"]["devices"] = json!([{ "path": "/p/pool", "pool": "p", "state": "Opening" }]);
    assert_eq!(discovered(&pool(), &found(&["n1"], vec![node])).status, ConditionStatus::True);
}

#[test]
fn ignores_reports_that_are_old_or_of_another_spec() {
    let ago = Time(crate::framework::clock::now().0 - SignedDuration::from_mins(5));
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
        let finding = drained(&found(&["n1", "n2"], vec![empty("n1"), node]), None);
        assert_eq!(finding.status, ConditionStatus::False, "{place} {other}");
        assert!(finding.message.contains("n2"), "{place} {other}: {}", finding.message);
    }
}

#[test]
fn reports_worn_before_slow_devices_and_the_pool_stays_ready() {
    let devices = |worn: bool, slow: bool| {
        let message = "it has met 11 media errors, and its pool allows 10";
        let device = json!({ "path": "/p/pool", "pool": "p", "state": "Open", "worn": worn, "slow": slow, "message": message });
        let mut node = empty("n1");
        node["status"]["devices"] = json!([device]);
        node["status"]["applied"] =
            json!({ "pools": [{ "pool": "p", "uid": "u", "generation": GENERATION }] });
        let (_, findings) = compute(&pool(), &found(&["n1"], vec![node]), None);
        let one = |kind| findings.iter().find(|finding| finding.kind == kind).expect("the condition").clone();
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
        assert_eq!(ready.status, ConditionStatus::True, "the device remains in use");
    }
    let message = devices(true, true).0.message;
    for words in ["n1", "/p/pool", "11 media errors", "health.maxMediaErrors", "health.minSparePercent"] {
        assert!(message.contains(words), "{message}");
    }
}

#[test]
fn notes_unreported_spare_capacity_if_the_pool_requires_some() {
    let note = |required: Option<u8>, reported: Option<u8>| {
        let mut pool = pool();
        pool.spec.health.min_spare_percent = required.map(Percent);
        let mut node = empty("n1");
        node["status"]["devices"] =
            json!([{ "path": "/dev/a", "pool": "p", "state": "Open", "sparePercent": reported }]);
        let (_, findings) = compute(&pool, &found(&["n1"], vec![node]), None);
        let degraded =
            findings.into_iter().find(|finding| finding.kind == Type::Degraded).expect("condition Degraded");
        assert_eq!((degraded.status, degraded.reason), (ConditionStatus::False, Reason::AsDesired));
        degraded.message
    };
    let words = note(Some(10), None);
    assert!(words.contains("minSparePercent is not checked on 1 nodes") && words.contains("n1"), "{words}");
    assert!(words.contains("deviceAccess"), "the remedy: {words}");
    for (required, reported) in [(None, None), (Some(10), Some(90))] {
        assert_eq!(note(required, reported), "");
    }
}

#[test]
fn drained_is_unknown_for_a_pool_without_nodes() {
    let nowhere = drained(&found(&[], Vec::new()), None);
    assert_eq!((nowhere.status, nowhere.reason), (ConditionStatus::Unknown, Reason::NoNodes));

    let refusal = Refusal::new(Reason::ReferenceNotFound, "no KVCacheCluster lists this pool");
    for nodes in [&["n1"][..], &[]] {
        let refused = drained(&found(nodes, vec![empty("n1")]), Some(&refusal));
        assert_eq!((refused.status, refused.reason), (ConditionStatus::Unknown, Reason::ReferenceNotFound));
    }
}

#[test]
fn inaccessible_device_message_names_the_field_that_grants_access() {
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
        let (_, findings) = compute(&pool(), &found, None);
        let condition =
            findings.into_iter().find(|finding| finding.kind == Type::Degraded).expect("condition Degraded");
        (condition.reason, condition.message)
    };
    let forbidden = "cannot read it: Operation not permitted (os error 1)";
    let (reason, message) = degraded("None", Some(Reason::DeviceNotPermitted), forbidden);
    assert_eq!(reason, Reason::DeviceNotPermitted);
    assert!(
        message.contains(forbidden) && message.contains("set agents.deviceAccess of the cluster"),
        "{message}"
    );
    for (mode, why, words) in [
        ("Privileged", Reason::DeviceNotPermitted, forbidden),
        ("None", Reason::ForeignSignature, "it contains a file system"),
        ("None", Reason::EngineUnavailable, "io_uring is forbidden"),
    ] {
        let (reason, message) = degraded(mode, Some(why), words);
        assert_eq!(reason, why);
        assert!(message.contains(words) && !message.contains("deviceAccess"), "{message}");
    }
    let (reason, message) = degraded("None", None, "message of an older agent");
    assert_eq!(reason, Reason::Refused, "{message}");
}
