//! What a watch event changes of an object: what is wanted of it, what the operator has written itself, or something else.

use std::collections::HashMap;

use k8s_openapi::api::core::v1::{Namespace, Node};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ManagedFieldsEntry, ObjectMeta};
use kube::api::DynamicObject;
use kube::{Resource, ResourceExt};
use reprise_crds::status::{Condition, ConditionStatus, ConditionType, find};
use reprise_crds::{
    CacheNode, CacheTenant, GPUQueueAllocation, GPUQueueAllocationStatus, KVCacheCluster,
    OPERATOR_FIELD_MANAGER, SSDPool, SlackProfile,
};
use serde::Serialize;

use super::own::{Digest, OwnWrites};
use crate::in_use;
use crate::names::AGENT_READY;

/// What has changed of an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum News {
    /// What is wanted of it, or whether it exists.
    Spec,
    /// At most what this process has written itself.
    Own,
    /// Something else.
    Other,
}

/// An object in two parts.
pub(super) struct Parts {
    /// What the reconcile of the object itself writes.
    own: Digest,
    /// All else, without its version.
    rest: Digest,
}

/// A kind that is watched.
pub(super) trait Watched: Resource {
    /// What others depend on, in addition to the spec.
    fn more(&self) -> Option<String> {
        None
    }

    /// The object in two parts; none of a kind whose reconcile writes nothing back.
    fn parts(&self) -> Option<Parts> {
        None
    }
}

macro_rules! parts_of_status {
    () => {
        fn parts(&self) -> Option<Parts> {
            Some(Parts { own: Digest::of(&self.status), rest: Digest::of(&rest(&self.metadata)) })
        }
    };
}

impl Watched for KVCacheCluster {
    /// Nodes wait until the spec is accepted. Tenants are of one that goes no more, once engines hold its deletion no more.
    fn more(&self) -> Option<String> {
        let accepted = find(&self.status.as_ref()?.conditions, ConditionType::Accepted)?;
        Some(format!("{} {} {}", accepted.status, accepted.observed_generation, in_use::goes(self)))
    }

    parts_of_status!();
}

impl Watched for SSDPool {
    /// A pool that is to be wiped is, once engines no longer block its deletion. Before a deletion nothing depends on that. Nodes of one that is refused, or is
    /// refused no more, may be many, and a label of one of them may have done it.
    fn more(&self) -> Option<String> {
        let goes = self.metadata.deletion_timestamp.as_ref().map(|_| in_use::holds(self));
        let conditions = self.status.as_ref().map(|status| status.conditions.as_slice()).unwrap_or_default();
        let accepted = find(conditions, ConditionType::Accepted);
        let is_refused = accepted.is_some_and(|accepted| accepted.status == ConditionStatus::False);
        (goes.is_some() || is_refused).then(|| format!("{goes:?} {is_refused}"))
    }

    parts_of_status!();
}

impl Watched for CacheTenant {
    parts_of_status!();
}

impl Watched for SlackProfile {
    parts_of_status!();
}

impl Watched for GPUQueueAllocation {
    /// The pod that uses it stands in the status, and others write it.
    fn parts(&self) -> Option<Parts> {
        let status = self.status.as_ref();
        let pod = status.and_then(|status| status.reserved_for.as_ref());
        Some(Parts { own: Digest::of(&own_of(status)), rest: Digest::of(&(rest(&self.metadata), pod)) })
    }
}

impl Watched for CacheNode {
    /// Profiles go to nodes with their GPU, and on when these say that they have them; tenants wait until nodes know whose pods are whose.
    fn more(&self) -> Option<String> {
        let status = self.status.as_ref()?;
        let applied = status.applied.as_ref().map(|applied| (&applied.profiles, &applied.tenants_digest));
        Some(format!("{:?} {applied:?}", status.gpus))
    }

    /// One condition is the operator's, all else of the status is the agent's.
    fn parts(&self) -> Option<Parts> {
        let is_own = |condition: &Condition| condition.kind == ConditionType::ModeApplied.as_str();
        let mut theirs = self.status.clone();
        let all = theirs.as_mut().map(|status| std::mem::take(&mut status.conditions)).unwrap_or_default();
        let (own, others): (Vec<Condition>, Vec<Condition>) = all.into_iter().partition(is_own);
        let rest = (rest(&self.metadata), theirs, others);
        Some(Parts { own: Digest::of(&own.first()), rest: Digest::of(&rest) })
    }
}

impl Watched for Node {
    /// One condition is the operator's.
    fn parts(&self) -> Option<Parts> {
        let mut theirs = self.status.clone();
        let all = theirs.as_mut().and_then(|status| status.conditions.take()).unwrap_or_default();
        let (own, others): (Vec<_>, Vec<_>) =
            all.into_iter().partition(|condition| condition.type_ == AGENT_READY);
        let rest = (rest(&self.metadata), &self.spec, theirs, others);
        Some(Parts { own: Digest::of(&own.first()), rest: Digest::of(&rest) })
    }
}

impl Watched for Namespace {}
impl Watched for DynamicObject {}

/// What the operator writes of the status of an allocation.
pub(crate) fn own_of(status: Option<&GPUQueueAllocationStatus>) -> impl Serialize {
    status.map(|status| {
        (&status.observed_generation, &status.allocations, &status.expires_at, &status.conditions)
    })
}

/// Metadata without what every write changes.
fn rest(metadata: &ObjectMeta) -> ObjectMeta {
    ObjectMeta { resource_version: None, managed_fields: None, ..metadata.clone() }
}

/// What was seen last of the objects of one kind.
#[derive(Debug, Default)]
pub(super) struct Seen {
    /// Fingerprint and digest of all that is not ours, by namespace and name.
    last: HashMap<String, (String, Option<Digest>)>,
}

impl Seen {
    /// What an event changes of an object.
    pub(super) fn see<K: Watched>(&mut self, object: &K, own: &OwnWrites) -> News {
        let (print, parts) = (fingerprint(object), object.parts());
        let rest = parts.as_ref().map(|parts| parts.rest);
        let is_own = parts.is_some_and(|parts| own.is_in(object.meta().uid.as_ref(), parts.own));
        match self.last.insert(key(object), (print.clone(), rest)) {
            Some((before, _)) if before != print => News::Spec,
            None => News::Spec,
            Some((_, before)) if is_own && before == rest => News::Own,
            Some(_) => News::Other,
        }
    }

    /// Forgets an object that is gone.
    pub(super) fn forget<K: Watched>(&mut self, object: &K, own: &OwnWrites) {
        self.last.remove(&key(object));
        own.forget(object.meta().uid.as_ref());
    }
}

/// Drops managed fields, which are kilobytes, except that the operator is among the managers.
pub(super) fn strip<K: Resource>(object: &mut K) {
    let kept = object.managed_fields().iter().filter(|entry| is_by_operator(entry)).take(1);
    let kept = kept.map(|entry| ManagedFieldsEntry { fields_v1: None, ..entry.clone() });
    let kept: Vec<ManagedFieldsEntry> = kept.collect();
    object.meta_mut().managed_fields = (!kept.is_empty()).then_some(kept);
}

/// Whether an entry says that the operator manages fields of the object, other than of its status.
pub(crate) fn is_by_operator(entry: &ManagedFieldsEntry) -> bool {
    entry.manager.as_deref() == Some(OPERATOR_FIELD_MANAGER) && entry.subresource.is_none()
}

fn key<K: Resource>(object: &K) -> String {
    format!("{}/{}", object.meta().namespace.as_deref().unwrap_or_default(), object.name_any())
}

/// Changes with what is wanted of an object. Nodes have no generation; their names and labels are what the plan depends on.
fn fingerprint<K: Watched>(object: &K) -> String {
    let (meta, more) = (object.meta(), object.more());
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
    fn a_status_that_this_process_wrote_is_its_own_news_until_something_else_changes() {
        let (mut seen, own) = (Seen::default(), OwnWrites::default());
        let nothing = json!({});
        let status = json!({ "nodes": { "selected": 2, "ready": 1, "refused": 0 } });
        let mut see = |object: SSDPool| seen.see(&object, &own);
        assert_eq!(see(pool(1, &nothing, &nothing)), News::Spec, "it is new");
        assert_eq!(see(pool(2, &nothing, &status)), News::Other, "another writer wrote it");
        own.expect(Some(&"u".to_owned()), &pool(0, &nothing, &status).status);
        assert_eq!(see(pool(3, &nothing, &status)), News::Own);
        let annotated = json!({ "annotations": { "a": "b" } });
        assert_eq!(see(pool(4, &annotated, &status)), News::Other, "an annotation came with it");
        assert_eq!(see(pool(5, &annotated, &status)), News::Own);
        let other = json!({ "nodes": { "selected": 9, "ready": 1, "refused": 0 } });
        assert_eq!(see(pool(6, &annotated, &other)), News::Other, "another writer changed it");
        let edited = json!({ "annotations": { "a": "b" }, "generation": 2 });
        assert_eq!(see(pool(7, &edited, &status)), News::Spec);
        seen.forget(&pool(8, &edited, &status), &own);
        assert_eq!(
            seen.see(&pool(9, &edited, &status), &own),
            News::Spec,
            "it is another object of that name"
        );
        assert_eq!(seen.see(&pool(9, &edited, &status), &own), News::Other, "and nothing was written of it");
    }

    #[test]
    fn of_a_cache_node_only_one_condition_is_own_news() {
        let (mut seen, own) = (Seen::default(), OwnWrites::default());
        let [ready, applied] = ["AgentReady", "ModeApplied"].map(|kind| condition(kind, "True"));
        assert_eq!(seen.see(&node(&json!([ready])), &own), News::Spec);
        let both = node(&json!([ready, applied]));
        let written: Condition = serde_json::from_value(applied.clone()).expect("a condition");
        own.expect(Some(&"u".to_owned()), &Some(&written));
        assert_eq!(seen.see(&both, &own), News::Own);
        let away = condition("AgentReady", "False");
        assert_eq!(
            seen.see(&node(&json!([away, applied])), &own),
            News::Other,
            "the agent reports something"
        );
        assert_eq!(seen.see(&node(&json!([away])), &own), News::Other, "another writer removed ours");
    }

    #[test]
    fn of_managed_fields_only_that_the_operator_has_some_is_kept() {
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
