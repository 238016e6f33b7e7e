//! What a watch event changes of an object: its desired state or another part.

use std::collections::HashMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ManagedFieldsEntry;
use kube::api::DynamicObject;
use kube::{Resource, ResourceExt};
use reprise_crds::OPERATOR_FIELD_MANAGER;
use serde_json::{Value, json};

use crate::framework::digest;

/// Kind of change of an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// The desired state changed, or the object was created or deleted.
    Spec,
    /// Another part has changed, or a reconcile was requested.
    Other,
}

impl Change {
    /// Whether the desired state changed.
    pub fn is_spec(self) -> bool {
        self == Change::Spec
    }
}

/// A kind of objects that is watched.
pub trait WatchedKind: Resource {
    /// Returns state outside the spec whose change counts as [`Change::Spec`], because other objects depend on it.
    fn dependencies(&self) -> Value {
        Value::Null
    }
}

impl WatchedKind for DynamicObject {}

/// Digests of the desired state of the objects of one kind, by namespace and name.
#[derive(Debug, Default)]
pub(crate) struct LastSeen(HashMap<(Option<String>, String), String>);

impl LastSeen {
    /// Records an object and classifies the change since its last event.
    pub(crate) fn record<K: WatchedKind>(&mut self, object: &K) -> Change {
        let desired = desired_state(object);
        let before = self.0.insert(key(object), desired.clone());
        if before == Some(desired) { Change::Other } else { Change::Spec }
    }

    /// Forgets a deleted object.
    pub(crate) fn forget<K: WatchedKind>(&mut self, object: &K) {
        self.0.remove(&key(object));
    }
}

fn key<K: Resource>(object: &K) -> (Option<String>, String) {
    (object.meta().namespace.clone(), object.name_any())
}

/// Returns a digest that changes with the desired state of an object. Nodes have no generation; their desired state is
/// their labels.
fn desired_state<K: WatchedKind>(object: &K) -> String {
    let (meta, more) = (object.meta(), object.dependencies());
    digest::of(&json!([meta.uid, meta.generation, meta.deletion_timestamp, meta.labels, more]).to_string())
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
    use kube::api::ApiResource;

    use super::*;

    #[test]
    fn new_labels_and_generations_are_changes_of_the_desired_state_and_annotations_are_not() {
        let resource = ApiResource::erase::<reprise_crds::CacheNode>(&());
        let (mut seen, mut object) = (LastSeen::default(), DynamicObject::new("n1", &resource));
        assert_eq!(seen.record(&object), Change::Spec, "a new object");
        object.annotations_mut().insert("a".to_owned(), "b".to_owned());
        assert_eq!(seen.record(&object), Change::Other);
        object.labels_mut().insert("a".to_owned(), "b".to_owned());
        assert_eq!(seen.record(&object), Change::Spec);
        object.metadata.generation = Some(2);
        assert_eq!(seen.record(&object), Change::Spec);
        seen.forget(&object);
        assert_eq!(seen.record(&object), Change::Spec, "another object of that name");
    }
}
