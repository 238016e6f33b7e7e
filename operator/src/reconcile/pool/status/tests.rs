//! Conditions of draining pools, and of pools with slow, worn or refused devices.

#![allow(clippy::needless_pass_by_value, reason = "statuses are made where they are passed")]

use std::sync::Arc;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::SignedDuration;
use reprise_crds::CacheNode;
use reprise_crds::fields::Percent;
use serde_json::{Value, json};

use super::*;
use crate::reconcile::assignment::PoolAssignment;
use crate::reconcile::pool::guard::Guard;
use crate::reconcile::test_objects::{self, merged, resource};

/// Generation of the pool spec with mode `Draining`.
const GENERATION: i64 = 3;
/// Generation of the `CacheNode` spec that the operator wrote for it.
const SPEC: i64 = 7;

fn pool() -> SSDPool {
    test_objects::pool(json!({ "generation": GENERATION }), json!({ "mode": "Draining" }))
}

/// A node that follows the pool's spec, is empty, and has just reported so.
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
            "applied": { "pools": [{ "pool": "p", "uid": "u", "generation": GENERATION }] },
            "drain": { "drained": true, "walkedBlocks": 4, "durableBlocks": 4, "nowhereBlocks": 0 },
        },
    })
}

/// A node with one device in this state.
fn with_device(device: Value) -> Value {
    let mut node = empty("n1");
    node["status"]["devices"] = json!([merged(json!({ "path": "/p/pool", "pool": "p" }), device)]);
    node
}

/// Inputs with these assigned nodes and these `CacheNode`s.
fn found(assigned: &[&str], nodes: Vec<Value>) -> PoolInputs {
    let node = |node: Value| PoolNode {
        node: Arc::new(test_objects::object::<CacheNode>(node)),
        pool_uid: "u".to_owned(),
        pool: "p".to_owned(),
    };
    PoolInputs {
        assignment: PoolAssignment {
            cluster: Some("n/c".to_owned()),
            nodes: assigned.iter().map(|name| (*name).to_owned()).collect(),
            ..PoolAssignment::default()
        },
        cluster: None,
        nodes: nodes.into_iter().map(node).collect(),
        reserved: 0,
        guard: Guard::default(),
    }
}

fn one(kind: Type, pool: &SSDPool, inputs: &PoolInputs, refused: Option<&Refusal>) -> Finding {
    let findings = compute(pool, inputs, refused).1;
    findings.into_iter().find(|finding| finding.kind == kind).unwrap_or_else(|| panic!("no condition {kind}"))
}

#[test]
fn pool_is_drained_once_every_assigned_node_has_reported_it() {
    let drained = |inputs: &PoolInputs| one(Type::Drained, &pool(), inputs, None);
    let both = found(&["n1", "n2"], vec![empty("n1"), empty("n2")]);
    assert_eq!(drained(&both).status, ConditionStatus::True);

    let unknown = drained(&found(&["n1", "n2"], vec![empty("n1")]));
    assert_eq!((unknown.status, unknown.reason), (ConditionStatus::False, Reason::Draining));
    assert!(unknown.message.starts_with("1 of 2 nodes are not empty yet"), "{}", unknown.message);
    assert!(unknown.message.ends_with(": n2"), "{}", unknown.message);

    let mut active = pool();
    active.spec.mode = NodeMode::Active;
    let findings = compute(&active, &both, None).1;
    assert!(!findings.iter().any(|finding| finding.kind == Type::Drained), "the pool is not draining");

    // Reports that are old or of another spec do not count.
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
        let mut node = empty("n2");
        *node.pointer_mut(place).expect("a value") = other.clone();
        let finding = drained(&found(&["n1", "n2"], vec![empty("n1"), node]));
        assert_eq!(finding.status, ConditionStatus::False, "{place} {other}");
        assert!(finding.message.contains("n2"), "{place} {other}: {}", finding.message);
    }
}

#[test]
fn reports_why_a_pool_has_no_nodes_or_lacks_some() {
    let conflict = Refusal::new(Reason::Conflict, "SSDPool older has the devices on node n2");
    let unlisted = Refusal::new(Reason::ReferenceNotFound, "no KVCacheCluster lists this pool");
    let nowhere = found(&[], Vec::new());
    let mut excluded = nowhere.clone();
    excluded.assignment.conflict = Some(conflict.clone());
    for (inputs, refused, reason) in [
        (&nowhere, None, Reason::NoNodes),
        (&nowhere, Some(&unlisted), Reason::ReferenceNotFound),
        (&excluded, None, Reason::Conflict),
    ] {
        let status_of = |kind| {
            let finding = one(kind, &pool(), inputs, refused);
            assert_eq!(finding.reason, reason, "{kind}");
            finding.status
        };
        assert_eq!(status_of(Type::Drained), ConditionStatus::Unknown);
        for kind in [Type::DevicesDiscovered, Type::Ready] {
            assert_eq!(status_of(kind), ConditionStatus::False);
        }
    }
    // Other nodes have the pool.
    let mut some = found(&["n1"], vec![with_device(json!({ "state": "Open" }))]);
    some.assignment.conflict = Some(conflict.clone());
    for kind in [Type::Accepted, Type::Ready] {
        let finding = one(kind, &pool(), &some, None);
        assert_eq!((finding.status, finding.reason), (ConditionStatus::False, Reason::Conflict));
        assert_eq!(finding.message, conflict.message);
    }
    assert_eq!(one(Type::Drained, &pool(), &some, None).status, ConditionStatus::True);
    assert_eq!(one(Type::DevicesDiscovered, &pool(), &some, None).status, ConditionStatus::True);
}

#[test]
fn degraded_names_the_most_severe_problem_with_the_remedy() {
    let refused =
        |reason: &str, message: &str| json!({ "state": "Refused", "reason": reason, "message": message });
    let denied = "cannot read it: Operation not permitted (os error 1)";
    let not_permitted = refused("DeviceNotPermitted", denied);
    let errors = "it has met 11 media errors";
    let beyond =
        |worn: bool, slow: bool| json!({ "state": "Open", "worn": worn, "slow": slow, "message": errors });
    let access = "set agents.deviceAccess of the cluster";
    for (device, mode, reason, words) in [
        (beyond(false, false), "None", Reason::AsDesired, &[][..]),
        (beyond(true, true), "None", Reason::DeviceWorn, &["n1", errors, "health.maxMediaErrors"][..]),
        (not_permitted.clone(), "None", Reason::DeviceNotPermitted, &[denied, access][..]),
        (not_permitted, "Privileged", Reason::DeviceNotPermitted, &[denied][..]),
        (refused("ForeignSignature", "a file"), "None", Reason::ForeignSignature, &["a file"][..]),
        (refused("EngineUnavailable", "forbidden"), "None", Reason::EngineUnavailable, &["forbidden"][..]),
        (json!({ "state": "Refused", "message": "older" }), "None", Reason::Refused, &["older"][..]),
    ] {
        let mut inputs = found(&["n1"], vec![with_device(device.clone())]);
        let spec = json!({ "agents": { "deviceAccess": { "mode": mode } } });
        let metadata = json!({ "name": "c", "namespace": "n" });
        inputs.cluster = Some(Arc::new(resource(metadata, json!({ "spec": spec }))));
        let degraded = one(Type::Degraded, &pool(), &inputs, None);
        assert_eq!(degraded.reason, reason, "{device}");
        assert_eq!(degraded.status == ConditionStatus::True, reason != Reason::AsDesired, "{device}");
        assert!(words.iter().all(|word| degraded.message.contains(word)), "{device}: {}", degraded.message);
        let names_access = words.contains(&access);
        assert_eq!(degraded.message.contains("deviceAccess"), names_access, "{device}: {}", degraded.message);
        let is_ready = one(Type::Ready, &pool(), &inputs, None).status == ConditionStatus::True;
        assert_eq!(is_ready, device["state"] == "Open", "a slow or worn device remains in use: {device}");
    }
}

#[test]
fn notes_unreported_spare_capacity_if_the_pool_requires_some() {
    for (required, reported, words) in [
        (Some(10), None, &["minSparePercent is not checked on 1 nodes", "n1", "deviceAccess"][..]),
        (None, None, &[][..]),
        (Some(10), Some(90), &[][..]),
    ] {
        let mut pool = pool();
        pool.spec.health.min_spare_percent = required.map(Percent);
        let inputs = found(&["n1"], vec![with_device(json!({ "state": "Open", "sparePercent": reported }))]);
        let degraded = one(Type::Degraded, &pool, &inputs, None);
        assert_eq!((degraded.status, degraded.reason), (ConditionStatus::False, Reason::AsDesired));
        assert_eq!(degraded.message.is_empty(), words.is_empty(), "{}", degraded.message);
        assert!(words.iter().all(|word| degraded.message.contains(word)), "{}", degraded.message);
    }
}
