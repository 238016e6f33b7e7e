//! Classifies what a watch event changes of an object: its spec, the operator's own last write, or something
//! else.

use std::collections::HashMap;

use k8s_openapi::api::core::v1::{Namespace, Node};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ManagedFieldsEntry, ObjectMeta};
use kube::api::DynamicObject;
use kube::{Resource, ResourceExt};
use reprise_crds::status::{Condition, ConditionStatus, ConditionType, find};
use reprise_crds::{
    CacheNode, CacheTenant, GPUQueueAllocation, KVCacheCluster, OPERATOR_FIELD_MANAGER, SSDPool, SlackProfile,
};

use crate::framework::own_writes::{Digest, OwnWrites};
use crate::reconcile::deletion_guard;
use crate::reconcile::names::AGENT_READY;

/// Kind of change of an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Change {
    /// The desired state changed, or the object was created or deleted.
    Spec,
    /// At most the part that this process wrote last has changed.
    OwnWrite,
    /// Another part has changed.
    Other,
}

/// Digests of the two parts of an object.
pub(super) struct DigestParts {
    /// Part that the reconcile of the object itself writes.
    own: Digest,
    /// The rest, without the resource version.
    rest: Digest,
}

/// A kind of objects that is watched.
pub(super) trait WatchedKind: Resource {
    /// Returns state outside the spec whose change counts as [`Change::Spec`], because other objects depend
    /// on it.
    fn dependencies(&self) -> Option<String> {
        None
    }

    /// Returns digests of the object's parts, or `None` if reconciles write nothing back to this kind.
    fn parts(&self) -> Option<DigestParts> {
        None
    }
}

macro_rules! parts_of_status {
    () => {
        fn parts(&self) -> Option<DigestParts> {
            Some(DigestParts { own: Digest::of(&self.status), rest: Digest::of(&rest(&self.metadata)) })
        }
    };
}

impl WatchedKind for KVCacheCluster {
    /// Nodes wait until the spec is accepted. Tenants stop applying to a deleted cluster once its deletion is
    /// not blocked.
    fn dependencies(&self) -> Option<String> {
        let accepted = find(&self.status.as_ref()?.conditions, ConditionType::Accepted)?;
        Some(format!(
            "{} {} {}",
            accepted.status,
            accepted.observed_generation,
            deletion_guard::is_released(self)
        ))
    }

    parts_of_status!();
}

impl WatchedKind for SSDPool {
    /// A pool is wiped once engines no longer block its deletion. Before a deletion nothing depends on that.
    ///
    /// When a refusal starts or ends, many nodes may be affected, and a label of a single node may cause it.
    fn dependencies(&self) -> Option<String> {
        let is_deleting = self.metadata.deletion_timestamp.as_ref().map(|_| deletion_guard::has_guard(self));
        let conditions = self.status.as_ref().map(|status| status.conditions.as_slice()).unwrap_or_default();
        let accepted = find(conditions, ConditionType::Accepted);
        let is_refused = accepted.is_some_and(|accepted| accepted.status == ConditionStatus::False);
        (is_deleting.is_some() || is_refused).then(|| format!("{is_deleting:?} {is_refused}"))
    }

    parts_of_status!();
}

impl WatchedKind for CacheTenant {
    parts_of_status!();
}

impl WatchedKind for SlackProfile {
    parts_of_status!();
}

impl WatchedKind for GPUQueueAllocation {
    parts_of_status!();
}

impl WatchedKind for CacheNode {
    /// Profiles depend on the GPUs of nodes and on the revisions that nodes report. Tenants depend on the
    /// applied tenants.
    fn dependencies(&self) -> Option<String> {
        let status = self.status.as_ref()?;
        let applied = status.applied.as_ref().map(|applied| (&applied.profiles, &applied.tenants_digest));
        Some(format!("{:?} {applied:?}", status.gpus))
    }

    /// The operator writes one condition, the agent writes the rest of the status.
    fn parts(&self) -> Option<DigestParts> {
        let is_own = |condition: &Condition| condition.kind == ConditionType::ModeApplied.as_str();
        let mut theirs = self.status.clone();
        let all = theirs.as_mut().map(|status| std::mem::take(&mut status.conditions)).unwrap_or_default();
        let (own, others): (Vec<Condition>, Vec<Condition>) = all.into_iter().partition(is_own);
        let rest = (rest(&self.metadata), theirs, others);
        Some(DigestParts { own: Digest::of(&own.first()), rest: Digest::of(&rest) })
    }
}

impl WatchedKind for Node {
    /// The operator writes one condition.
    fn parts(&self) -> Option<DigestParts> {
        let mut theirs = self.status.clone();
        let all = theirs.as_mut().and_then(|status| status.conditions.take()).unwrap_or_default();
        let (own, others): (Vec<_>, Vec<_>) =
            all.into_iter().partition(|condition| condition.type_ == AGENT_READY);
        let rest = (rest(&self.metadata), &self.spec, theirs, others);
        Some(DigestParts { own: Digest::of(&own.first()), rest: Digest::of(&rest) })
    }
}

impl WatchedKind for Namespace {}
impl WatchedKind for DynamicObject {}

/// Returns metadata without the fields that every write changes.
fn rest(metadata: &ObjectMeta) -> ObjectMeta {
    ObjectMeta { resource_version: None, managed_fields: None, ..metadata.clone() }
}

/// Latest state of the objects of one kind.
#[derive(Debug, Default)]
pub(super) struct LastSeen {
    /// Fingerprint, and digest of the part that the operator does not write, by namespace and name.
    last: HashMap<String, (String, Option<Digest>)>,
}

impl LastSeen {
    /// Records an object and classifies the change since its last event.
    pub(super) fn record<K: WatchedKind>(&mut self, object: &K, own: &OwnWrites) -> Change {
        let (print, parts) = (fingerprint(object), object.parts());
        let rest = parts.as_ref().map(|parts| parts.rest);
        let is_own = parts.is_some_and(|parts| own.is_last_write(object.meta().uid.as_ref(), parts.own));
        match self.last.insert(key(object), (print.clone(), rest)) {
            Some((before, _)) if before != print => Change::Spec,
            None => Change::Spec,
            Some((_, before)) if is_own && before == rest => Change::OwnWrite,
            Some(_) => Change::Other,
        }
    }

    /// Forgets a deleted object.
    pub(super) fn forget<K: WatchedKind>(&mut self, object: &K, own: &OwnWrites) {
        self.last.remove(&key(object));
        own.forget(object.meta().uid.as_ref());
    }
}

/// Drops managed fields, which take kilobytes per object. One entry without fields remains if the operator is
/// a manager.
pub(super) fn strip<K: Resource>(object: &mut K) {
    let kept = object.managed_fields().iter().filter(|entry| is_by_operator(entry)).take(1);
    let kept = kept.map(|entry| ManagedFieldsEntry { fields_v1: None, ..entry.clone() });
    let kept: Vec<ManagedFieldsEntry> = kept.collect();
    object.meta_mut().managed_fields = (!kept.is_empty()).then_some(kept);
}

/// Returns whether an entry shows the operator as manager of fields outside the status.
pub(crate) fn is_by_operator(entry: &ManagedFieldsEntry) -> bool {
    entry.manager.as_deref() == Some(OPERATOR_FIELD_MANAGER) && entry.subresource.is_none()
}

fn key<K: Resource>(object: &K) -> String {
    format!("{}/{}", object.meta().namespace.as_deref().unwrap_or_default(), object.name_any())
}

/// Returns a string that changes with the desired state of an object. Nodes have no generation; the
/// assignment depends on their names and labels.
fn fingerprint<K: WatchedKind>(object: &K) -> String {
    let (meta, more) = (object.meta(), object.dependencies());
    format!("{:?} {:?} {:?} {:?} {more:?}", meta.uid, meta.generation, meta.deletion_timestamp, meta.labels)
}

#[cfg(test)]
mod tests {
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
        assert_eq!(
            seen.record(&pool(9, &edited, &status), &own),
            Change::Spec,
            "another object of that name"
        );
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

    #[test]
    fn keeps_one_managed_fields_entry_if_the_operator_is_a_manager() {
        let entry = |manager: &str, subresource: Option<&str>| json!({ "manager": manager, "operation": "Apply", "subresource": subresource, "fieldsV1": { "f:spec": {} } });
        let stripped = |entries: Value| {
            let mut found = pool(1, &json!({ "managedFields": entries }), &json!({}));
            strip(&mut found);
            found.metadata.managed_fields
        };
        let status = entry(OPERATOR_FIELD_MANAGER, Some("status"));
        assert_eq!(stripped(json!([entry("kubectl", None), status])), None);
        let kept = stripped(json!([status, entry(OPERATOR_FIELD_MANAGER, None), entry("kubectl", None)]));
        let kept = kept.expect("the operator has fields");
        assert!(matches!(&kept[..], [one] if one.fields_v1.is_none() && is_by_operator(one)), "{kept:?}");
    }
}
