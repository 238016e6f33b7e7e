//! Classification of changes, and the managed fields that are kept.

use reprise_crds::status::Condition;
use reprise_crds::{CacheNode, SSDPool};
use serde_json::{Value, json};

use super::*;

fn pool(version: u32, metadata: &Value, status: &Value) -> SSDPool {
    let mut whole = json!({
        "apiVersion": "reprise.dev/v1alpha1", "kind": "SSDPool",
        "metadata": { "name": "p", "uid": "u", "generation": 1, "resourceVersion": version.to_string() },
        "spec": { "directory": { "path": "/p", "size": "1Gi" } }, "status": status,
    });
    let fields = metadata.as_object().expect("fields").clone();
    whole["metadata"].as_object_mut().expect("fields").extend(fields);
    serde_json::from_value(whole).expect("a pool")
}

fn node(conditions: &Value) -> CacheNode {
    serde_json::from_value(json!({
        "apiVersion": "reprise.dev/v1alpha1", "kind": "CacheNode", "metadata": { "name": "n1", "uid": "u" },
        "spec": { "nodeName": "n1" }, "status": { "conditions": conditions },
    }))
    .expect("a CacheNode")
}

fn condition(kind: &str, status: &str) -> Value {
    json!({ "type": kind, "status": status, "reason": "AsDesired", "lastTransitionTime": "2026-01-01T00:00:00Z" })
}

#[test]
fn own_status_write_is_recognised_until_another_part_changes() {
    let (mut seen, own) = (LastSeen::default(), OwnWrites::default());
    let nothing = json!({});
    let status = json!({ "nodes": { "selected": 2, "ready": 1, "refused": 0 } });
    let mut see = |object: SSDPool| seen.record(&object, &own);
    assert_eq!(see(pool(1, &nothing, &nothing)), Change::Spec, "a new object");
    assert_eq!(see(pool(2, &nothing, &status)), Change::Other, "another writer wrote it");
    own.record(Some(&"u".to_owned()), &pool(0, &nothing, &status).status);
    assert_eq!(see(pool(3, &nothing, &status)), Change::OwnWrite);
    let annotated = json!({ "annotations": { "a": "b" } });
    assert_eq!(see(pool(4, &annotated, &status)), Change::Other, "an annotation was added");
    assert_eq!(see(pool(5, &annotated, &status)), Change::OwnWrite);
    let other = json!({ "nodes": { "selected": 9, "ready": 1, "refused": 0 } });
    assert_eq!(see(pool(6, &annotated, &other)), Change::Other, "another writer changed it");
    let edited = json!({ "annotations": { "a": "b" }, "generation": 2 });
    assert_eq!(see(pool(7, &edited, &status)), Change::Spec);
    seen.forget(&pool(8, &edited, &status), &own);
    assert_eq!(seen.record(&pool(9, &edited, &status), &own), Change::Spec, "another object of that name");
    assert_eq!(seen.record(&pool(9, &edited, &status), &own), Change::Other, "own writes were forgotten");
}

#[test]
fn only_one_condition_of_a_cache_node_is_an_own_write() {
    let (mut seen, own) = (LastSeen::default(), OwnWrites::default());
    let [ready, applied] = ["AgentReady", "ModeApplied"].map(|kind| condition(kind, "True"));
    assert_eq!(seen.record(&node(&json!([ready])), &own), Change::Spec);
    let both = node(&json!([ready, applied]));
    let written: Condition = serde_json::from_value(applied.clone()).expect("a condition");
    own.record(Some(&"u".to_owned()), &Some(&written));
    assert_eq!(seen.record(&both, &own), Change::OwnWrite);
    let away = condition("AgentReady", "False");
    assert_eq!(
        seen.record(&node(&json!([away, applied])), &own),
        Change::Other,
        "the agent reports something"
    );
    assert_eq!(
        seen.record(&node(&json!([away])), &own),
        Change::Other,
        "another writer removed the condition"
    );
}
