//! What a watch event changes of an object: its desired state, the operator's own last write, or another part.
//!
//! A reconcile ends by writing a status, which comes back as a watch event. [`Change::OwnWrite`] keeps it from triggering
//! the same reconcile again. The digest of a write is recorded before the request is sent, so the event cannot arrive
//! first. A process without this memory repeats the reconcile once, without effect.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ManagedFieldsEntry;
use kube::api::DynamicObject;
use kube::{Resource, ResourceExt};
use reprise_crds::OPERATOR_FIELD_MANAGER;
use serde::Serialize;
use serde_json::{Value, json};

use crate::framework::digest;

/// Kind of change of an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// The desired state changed, or the object was created or deleted.
    Spec,
    /// At most the part that this process wrote last has changed.
    OwnWrite,
    /// Another part has changed, or a reconcile was requested.
    Other,
}

/// Part of an object that the reconcile of the object itself writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OwnPart {
    Status,
    /// The condition of this type in the status.
    Condition(&'static str),
}

/// A kind of objects that is watched.
pub trait WatchedKind: Resource + Serialize {
    /// Part that the reconcile of the object itself writes, if it writes any.
    const OWN_PART: Option<OwnPart> = None;

    /// Returns state outside the spec whose change counts as [`Change::Spec`], because other objects depend on it.
    fn dependencies(&self) -> Value {
        Value::Null
    }
}

impl WatchedKind for DynamicObject {}

/// Digests of the last writes of this process, by unique id.
#[derive(Debug, Default)]
pub struct OwnWrites(Mutex<HashMap<Option<String>, String>>);

impl OwnWrites {
    /// Records the own part of an object that is about to be written.
    pub(crate) fn record(&self, object: &impl Resource, own: &impl Serialize) {
        let mut written = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        written.insert(object.meta().uid.clone(), digest_of(own));
    }

    fn is_last(&self, object: &impl Resource, own: &Value) -> bool {
        let written = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        written.get(&object.meta().uid).is_some_and(|last| *last == digest_of(own))
    }
}

/// Digests of the desired states of the objects of one kind, and of the parts that reconciles do not write, by namespace
/// and name.
#[derive(Debug, Default)]
pub(crate) struct LastSeen(HashMap<(Option<String>, String), (String, String)>);

impl LastSeen {
    /// Records an object and classifies the change since its last event.
    pub(crate) fn record<K: WatchedKind>(&mut self, object: &K, own_writes: &OwnWrites) -> Change {
        let (own, rest) = parts(object);
        let (desired, rest) = (desired_state(object), digest_of(&rest));
        match self.0.insert(key(object), (desired.clone(), rest.clone())) {
            Some((before, _)) if before != desired => Change::Spec,
            None => Change::Spec,
            Some((_, before)) if before == rest && own_writes.is_last(object, &own) => Change::OwnWrite,
            Some(_) => Change::Other,
        }
    }

    /// Forgets a deleted object.
    pub(crate) fn forget<K: WatchedKind>(&mut self, object: &K, own_writes: &OwnWrites) {
        self.0.remove(&key(object));
        own_writes.0.lock().unwrap_or_else(PoisonError::into_inner).remove(&object.meta().uid);
    }
}

/// Divides an object into the part that its reconcile writes, and the rest without the fields that every write changes.
/// Both are null if its reconcile writes no part.
fn parts<K: WatchedKind>(object: &K) -> (Value, Value) {
    let Some(part) = K::OWN_PART else { return (Value::Null, Value::Null) };
    let mut rest = serde_json::to_value(object).expect("objects serialise to JSON");
    if let Some(metadata) = rest["metadata"].as_object_mut() {
        metadata.retain(|field, _| !["resourceVersion", "managedFields"].contains(&field.as_str()));
    }
    let own = match part {
        OwnPart::Status => rest.as_object_mut().and_then(|fields| fields.remove("status")),
        OwnPart::Condition(kind) => {
            let conditions = rest.pointer_mut("/status/conditions").and_then(Value::as_array_mut);
            conditions.and_then(|all| {
                let index = all.iter().position(|condition| condition["type"] == kind)?;
                Some(all.remove(index))
            })
        }
    };
    (own.unwrap_or_default(), rest)
}

fn digest_of(part: &impl Serialize) -> String {
    digest::of(&json!(part).to_string())
}

fn key<K: Resource>(object: &K) -> (Option<String>, String) {
    (object.meta().namespace.clone(), object.name_any())
}

/// Returns a digest that changes with the desired state of an object. Nodes have no generation; their desired state is
/// their labels.
fn desired_state<K: WatchedKind>(object: &K) -> String {
    let (meta, more) = (object.meta(), object.dependencies());
    digest_of(&json!([meta.uid, meta.generation, meta.deletion_timestamp, meta.labels, more]))
}

/// Drops managed fields, which take kilobytes per object. One entry without fields remains if the operator is
/// a manager.
pub(crate) fn strip<K: Resource>(object: &mut K) {
    let kept = object.managed_fields().iter().filter(|entry| is_by_operator(entry)).take(1);
    let kept = kept.map(|entry| ManagedFieldsEntry { fields_v1: None, ..entry.clone() });
    let kept: Vec<ManagedFieldsEntry> = kept.collect();
    object.meta_mut().managed_fields = (!kept.is_empty()).then_some(kept);
}

/// Returns whether an entry shows the operator as manager of fields outside the status.
pub(crate) fn is_by_operator(entry: &ManagedFieldsEntry) -> bool {
    entry.manager.as_deref() == Some(OPERATOR_FIELD_MANAGER) && entry.subresource.is_none()
}

#[cfg(test)]
mod tests {
    use reprise_crds::CacheNode;

    use super::*;

    /// A `CacheNode` with a resource version and conditions, each a type and a status.
    fn node(version: u32, metadata: &Value, conditions: &[(&str, &str)]) -> CacheNode {
        let condition = |(kind, status): &(&str, &str)| json!({ "type": kind, "status": status, "reason": "AsDesired", "lastTransitionTime": "2026-01-01T00:00:00Z" });
        let conditions: Vec<Value> = conditions.iter().map(condition).collect();
        let mut whole = json!({
            "apiVersion": "reprise.dev/v1alpha1", "kind": "CacheNode", "spec": { "nodeName": "n1" },
            "metadata": { "name": "n1", "uid": "u", "generation": 1, "resourceVersion": version.to_string() },
            "status": { "conditions": conditions },
        });
        let fields = metadata.as_object().expect("fields").clone();
        whole["metadata"].as_object_mut().expect("fields").extend(fields);
        serde_json::from_value(whole).expect("a CacheNode")
    }

    #[test]
    fn own_write_is_recognised_until_another_part_changes() {
        let (mut seen, own) = (LastSeen::default(), OwnWrites::default());
        let (ready, applied, none) = (("AgentReady", "True"), ("ModeApplied", "True"), json!({}));
        let written = node(0, &none, &[applied]).status.map(|status| status.conditions[0].clone());
        let annotated = json!({ "annotations": { "a": "b" } });
        let labelled = json!({ "annotations": { "a": "b" }, "labels": { "a": "b" } });
        assert_eq!(seen.record(&node(1, &none, &[ready]), &own), Change::Spec, "a new object");
        assert_eq!(seen.record(&node(2, &none, &[ready, applied]), &own), Change::Other, "another writer");
        own.record(&node(2, &none, &[]), &written);
        for (version, metadata, conditions, expected) in [
            (3, &none, &[ready, applied][..], Change::OwnWrite),
            (4, &annotated, &[ready, applied], Change::Other),
            (5, &annotated, &[ready, applied], Change::OwnWrite),
            // The agent reports another state.
            (6, &annotated, &[("AgentReady", "False"), applied], Change::Other),
            // Another writer changes the operator's condition, then removes it.
            (7, &annotated, &[("AgentReady", "False"), ("ModeApplied", "False")], Change::Other),
            (8, &annotated, &[("AgentReady", "False")], Change::Other),
            (9, &labelled, &[("AgentReady", "False"), applied], Change::Spec),
            (10, &json!({ "generation": 2 }), &[("AgentReady", "False"), applied], Change::Spec),
        ] {
            assert_eq!(
                seen.record(&node(version, metadata, conditions), &own),
                expected,
                "version {version}"
            );
        }
        let last = node(11, &none, &[applied]);
        seen.forget(&last, &own);
        assert_eq!(seen.record(&last, &own), Change::Spec, "another object of that name");
        assert_eq!(seen.record(&last, &own), Change::Other, "own writes were forgotten");
    }
}
