//! Comparable snapshots of a cluster: the operator's objects and the conditions of user objects.

use std::collections::BTreeMap;

use kube::ResourceExt;
use kube::api::{DynamicObject, Patch, PatchParams};
use reprise_e2e::{PATIENCE, wait_until};
use serde_json::{Value, json};

use crate::operator::test_cluster::{Objects, TestCluster, USER_KINDS, normalize};

/// Suffix of the key that holds an object's conditions.
const CONDITIONS: &str = " conditions";

/// Objects by kind and name, and their conditions and finalizers under keys with a suffix.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct ClusterSnapshot {
    parts: BTreeMap<String, Value>,
    /// Names of user objects whose status is older than their spec.
    outdated: Vec<String>,
}

impl ClusterSnapshot {
    /// Whether all statuses are of the current specs.
    pub(crate) fn is_current(&self) -> bool {
        self.outdated.is_empty()
    }

    /// Adds a part under its own name.
    pub(crate) fn with(mut self, name: &str, part: Value) -> ClusterSnapshot {
        self.parts.insert(name.to_owned(), part);
        self
    }

    /// Whether any condition has this reason.
    pub(crate) fn has_condition_reason(&self, reason: &str) -> bool {
        let parts = self.parts.iter().filter(|(key, _)| key.ends_with(CONDITIONS));
        let mut conditions =
            parts.flat_map(|(_, part)| part.as_object().into_iter().flat_map(|all| all.values()));
        conditions.any(|condition| condition[1] == reason)
    }
}

/// Takes a snapshot. It contains conditions without messages and times; the reasons stand for the messages.
pub(crate) fn snapshot(k8s: &TestCluster) -> ClusterSnapshot {
    let (operator_objects, user_objects) = (k8s.operator_objects(), k8s.user_objects());
    let nodes: Objects =
        k8s.list("Node").into_iter().map(|node| (format!("Node/{}", node.name_any()), node)).collect();
    let mut parts = normalize(&operator_objects);
    let cache_nodes = operator_objects.iter().filter(|(key, _)| key.starts_with("CacheNode/"));
    for (key, object) in user_objects.iter().chain(&nodes).chain(cache_nodes) {
        parts.insert(format!("{key}{CONDITIONS}"), conditions_of(object));
        parts.insert(format!("{key} finalizers"), json!(object.finalizers()));
    }
    let is_old = |object: &&DynamicObject| {
        let seen = object.data["status"]["observedGeneration"].as_i64();
        seen != object.metadata.generation
    };
    let outdated = user_objects.values().filter(is_old).map(ResourceExt::name_any).collect();
    ClusterSnapshot { parts, outdated }
}

/// Status and reason of an object's conditions, by type.
fn conditions_of(object: &DynamicObject) -> Value {
    let conditions = object.data["status"]["conditions"].as_array().cloned().unwrap_or_default();
    let of = |one: Value| {
        (one["type"].as_str().unwrap_or_default().to_owned(), json!([one["status"], one["reason"]]))
    };
    json!(conditions.into_iter().map(of).collect::<BTreeMap<String, Value>>())
}

/// Asserts that two snapshots are equal; prints only their differences.
pub(crate) fn assert_same(one: &ClusterSnapshot, other: &ClusterSnapshot) {
    let keys = one.parts.keys().chain(other.parts.keys());
    let differs = keys.filter(|key| one.parts.get(*key) != other.parts.get(*key));
    let differs: BTreeMap<_, _> =
        differs.map(|key| (key, (one.parts.get(key), other.parts.get(key)))).collect();
    assert!(differs.is_empty(), "the snapshots differ: {differs:#?}");
}

/// Deletes all objects and statuses that an operator has written. Finalizers remain, because they record
/// state outside of Kubernetes.
pub(crate) fn delete_operator_objects(k8s: &TestCluster) {
    for (key, object) in k8s.operator_objects() {
        k8s.delete(key.split_once('/').expect("kind and name").0, &object.name_any());
    }
    let patch = Patch::Merge(json!({ "status": null }));
    for (kind, ..) in USER_KINDS {
        for object in k8s.list(kind) {
            let (api, params) = (k8s.api(kind), PatchParams::default());
            k8s.server
                .block_on(api.patch_status(&object.name_any(), &params, &patch))
                .expect("a status can be removed");
        }
    }
    wait_until("all objects of the operator are deleted", PATIENCE, || {
        k8s.operator_objects().is_empty().then_some(())
    });
}
