//! Conditions of draining pools, and of pools with slow, worn or refused devices.

#![allow(clippy::needless_pass_by_value, reason = "statuses are made where they are passed")]

use std::sync::Arc;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::SignedDuration;
use serde_json::{Value, json};

use super::*;
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
    let node = |node: Value| PoolNode::of(&pool(), Arc::new(test_objects::object(node)));
    let mut inputs = PoolInputs { nodes: nodes.into_iter().map(node).collect(), ..PoolInputs::default() };
    inputs.assignment.cluster = Some("n/c".to_owned());
    inputs.assignment.nodes = assigned.iter().map(|name| (*name).to_owned()).collect();
    inputs
}

fn one(kind: Type, pool: &SSDPool, inputs: &PoolInputs) -> Finding {
    let findings = compute(pool, inputs, &Guard::default()).1;
    findings.into_iter().find(|finding| finding.kind == kind).unwrap_or_else(|| panic!("no condition {kind}"))
}

#[test]
fn pool_is_drained_once_every_assigned_node_has_reported_it() {
    let drained = |inputs: &PoolInputs| one(Type::Drained, &pool(), inputs);
    let both = found(&["n1", "n2"], vec![empty("n1"), empty("n2")]);
    assert_eq!(drained(&both).status, ConditionStatus::True);

    let unknown = drained(&found(&["n1", "n2"], vec![empty("n1")]));
    assert_eq!((unknown.status, unknown.reason), (ConditionStatus::False, Reason::Draining));
    assert!(unknown.message.starts_with("1 of 2 nodes are not empty yet"), "{}", unknown.message);
    assert!(unknown.message.ends_with(": n2"), "{}", unknown.message);

    let mut active = pool();
    active.spec.mode = NodeMode::Active;
    let findings = compute(&active, &both, &Guard::default()).1;
    assert!(!findings.iter().any(|finding| finding.kind == Type::Drained), "the pool is not draining");

    let excluded = |conflict: Option<Refusal>| {
        let mut nowhere = found(&[], Vec::new());
        nowhere.assignment.conflict = conflict;
        let finding = drained(&nowhere);
        (finding.status, finding.reason)
    };
    assert_eq!(excluded(None), (ConditionStatus::Unknown, Reason::NoNodes));
    let conflict = Refusal::new(Reason::Conflict, "SSDPool older has the devices on node n2");
    assert_eq!(excluded(Some(conflict)), (ConditionStatus::Unknown, Reason::Conflict));

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
        let degraded = one(Type::Degraded, &pool(), &inputs);
        assert_eq!(degraded.reason, reason, "{device}");
        assert_eq!(degraded.status == ConditionStatus::True, reason != Reason::AsDesired, "{device}");
        assert!(words.iter().all(|word| degraded.message.contains(word)), "{device}: {}", degraded.message);
        let names_access = words.contains(&access);
        assert_eq!(degraded.message.contains("deviceAccess"), names_access, "{device}: {}", degraded.message);
        let is_ready = one(Type::Ready, &pool(), &inputs).status == ConditionStatus::True;
        assert_eq!(is_ready, device["state"] == "Open", "a slow or worn device remains in use: {device}");
    }
}
