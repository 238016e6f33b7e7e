//! What a watch event changes of an object: its desired state, the operator's own last write, or another part.
//!
//! A reconcile ends by writing a status, which comes back as a watch event. [`Change::OwnWrite`] keeps it from
//! triggering the same reconcile again. Reconciles of dependent objects are triggered.

use std::collections::HashMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ManagedFieldsEntry, ObjectMeta};
use kube::api::DynamicObject;
use kube::{Resource, ResourceExt};
use reprise_crds::OPERATOR_FIELD_MANAGER;

use crate::framework::own_writes::{Digest, OwnWrites};

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

impl Change {
    /// Whether the object itself must be reconciled.
    pub fn is_foreign(self) -> bool {
        self != Change::OwnWrite
    }

    /// Whether the desired state changed.
    pub fn is_spec(self) -> bool {
        self == Change::Spec
    }

    /// Whether anything changed, which is always so.
    pub fn is_any(self) -> bool {
        true
    }
}

/// Digests of the two parts of an object.
pub struct DigestParts {
    /// Part that the reconcile of the object itself writes.
    pub own: Digest,
    /// The rest, without the resource version ([`rest`]).
    pub rest: Digest,
}

/// A kind of objects that is watched.
pub trait WatchedKind: Resource {
    /// Returns the digest of state outside the spec whose change counts as [`Change::Spec`], because other objects
    /// depend on it.
    fn dependencies(&self) -> Option<Digest> {
        None
    }

    /// Returns digests of the object's parts, or `None` if reconciles write nothing back to this kind.
    fn parts(&self) -> Option<DigestParts> {
        None
    }
}

impl WatchedKind for DynamicObject {}

/// Implements [`WatchedKind::parts`] for a kind whose whole status is written by its reconcile.
macro_rules! status_is_own {
    () => {
        fn parts(&self) -> Option<$crate::framework::change::DigestParts> {
            use $crate::framework::{change, own_writes::Digest};
            let own = Digest::of(&self.status);
            Some(change::DigestParts { own, rest: Digest::of(&change::rest(&self.metadata)) })
        }
    };
}
pub(crate) use status_is_own;

/// Returns metadata without the fields that every write changes.
pub(crate) fn rest(metadata: &ObjectMeta) -> ObjectMeta {
    ObjectMeta { resource_version: None, managed_fields: None, ..metadata.clone() }
}

/// Latest state of the objects of one kind.
#[derive(Debug, Default)]
pub(crate) struct LastSeen {
    /// Digest of the desired state, and of the part that the operator does not write, by namespace and name.
    last: HashMap<(Option<String>, String), (Digest, Option<Digest>)>,
}

impl LastSeen {
    /// Records an object and classifies the change since its last event.
    pub(crate) fn record<K: WatchedKind>(&mut self, object: &K, own: &OwnWrites) -> Change {
        let (desired, parts) = (desired_state(object), object.parts());
        let rest = parts.as_ref().map(|parts| parts.rest);
        let is_own = parts.is_some_and(|parts| own.is_last_write(object.meta().uid.as_ref(), parts.own));
        match self.last.insert(key(object), (desired, rest)) {
            Some((before, _)) if before != desired => Change::Spec,
            None => Change::Spec,
            Some((_, before)) if is_own && before == rest => Change::OwnWrite,
            Some(_) => Change::Other,
        }
    }

    /// Forgets a deleted object.
    pub(crate) fn forget<K: WatchedKind>(&mut self, object: &K, own: &OwnWrites) {
        self.last.remove(&key(object));
        own.forget(object.meta().uid.as_ref());
    }
}

fn key<K: Resource>(object: &K) -> (Option<String>, String) {
    (object.meta().namespace.clone(), object.name_any())
}

/// Returns a digest that changes with the desired state of an object. Nodes have no generation; their desired state is
/// their labels.
fn desired_state<K: WatchedKind>(object: &K) -> Digest {
    let (meta, more) = (object.meta(), object.dependencies());
    Digest::of(&(&meta.uid, meta.generation, &meta.deletion_timestamp, &meta.labels, more))
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
mod tests;
