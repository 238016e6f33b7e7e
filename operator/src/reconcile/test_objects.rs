//! Objects for the tests of reconcilers.

#![allow(clippy::needless_pass_by_value, reason = "parts are made where they are passed")]

use kube::Resource;
use reprise_crds::SSDPool;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use crate::reconcile::names::ClusterNames;

pub(crate) fn object<K: DeserializeOwned>(value: Value) -> K {
    serde_json::from_value(value).expect("an object")
}

/// Adds fields to an object, or replaces them.
pub(crate) fn merged(mut value: Value, more: Value) -> Value {
    value.as_object_mut().expect("an object").extend(more.as_object().expect("fields").clone());
    value
}

/// Names of a cluster `c` in namespace `n`.
pub(crate) fn names() -> ClusterNames {
    ClusterNames { namespace: "n".to_owned(), name: "c".to_owned(), uid: "u".to_owned() }
}

/// A resource with this metadata and these other parts.
pub(crate) fn resource<K>(metadata: Value, parts: Value) -> K
where
    K: Resource<DynamicType = ()> + DeserializeOwned,
{
    let head = json!({ "apiVersion": K::api_version(&()), "kind": K::kind(&()), "metadata": metadata });
    object(merged(head, parts))
}

/// A pool with a directory, and with more metadata and fields of the spec.
pub(crate) fn pool(metadata: Value, spec: Value) -> SSDPool {
    let metadata = merged(json!({ "name": "p", "uid": "u", "generation": 3 }), metadata);
    let spec = merged(json!({ "directory": { "path": "/p", "size": "1Gi" } }), spec);
    resource(metadata, json!({ "spec": spec }))
}
