//! The condition of draining pools.

#![allow(clippy::needless_pass_by_value, reason = "statuses are made where they are passed")]

use std::sync::Arc;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::SignedDuration;
use serde_json::{Value, json};

use super::*;
use crate::reconcile::test_objects;

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

/// Inputs with these assigned nodes and these `CacheNode`s.
fn found(assigned: &[&str], nodes: Vec<Value>) -> PoolInputs {
    let node = |node: Value| PoolNode::of(&pool(), Arc::new(test_objects::object(node)));
    let mut inputs = PoolInputs { nodes: nodes.into_iter().map(node).collect(), ..PoolInputs::default() };
    inputs.assignment.cluster = Some("n/c".to_owned());
    inputs.assignment.nodes = assigned.iter().map(|name| (*name).to_owned()).collect();
    inputs
}

#[test]
fn pool_is_drained_once_every_assigned_node_has_reported_it() {
    let find = |pool: &SSDPool, inputs: &PoolInputs| {
        let findings = compute(pool, inputs, &Guard::default()).1;
        findings.into_iter().find(|finding| finding.kind == Type::Drained)
    };
    let drained = |inputs: &PoolInputs| find(&pool(), inputs).expect("the pool is draining");
    let both = found(&["n1", "n2"], vec![empty("n1"), empty("n2")]);
    assert_eq!(drained(&both).status, ConditionStatus::True);

    let unknown = drained(&found(&["n1", "n2"], vec![empty("n1")]));
    assert_eq!((unknown.status, unknown.reason), (ConditionStatus::False, Reason::Draining));
    assert!(unknown.message.starts_with("1 of 2 nodes are not empty yet"), "{}", unknown.message);
    assert!(unknown.message.ends_with(": n2"), "{}", unknown.message);

    let mut active = pool();
    active.spec.mode = NodeMode::Active;
    assert_eq!(find(&active, &both), None);

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
