//! A child: a desired object, as a value.
//!
//! A child is written if the live object does not contain it ([`contains_desired`]) or other content was
//! applied last. An annotation holds the digest of the applied content, so fields that are no longer desired
//! are removed. Both checks use the local store only.

use kube::ResourceExt;
use kube::api::{ApiResource, DynamicObject};
use kube::core::GroupVersionKind;
use serde_json::{Value, json};

use crate::framework::digest;
use crate::framework::field_ownership::extra_fields;
use crate::framework::field_ownership::restore::Extras;
use crate::framework::labels::APPLIED;

/// Kinds of objects that can be children.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum ChildKind {
    ServiceAccount,
    ClusterRoleBinding,
    ConfigMap,
    /// The authority of the cluster's certificates, and secrets of tenants.
    Secret,
    Service,
    StatefulSet,
    DaemonSet,
    PodDisruptionBudget,
    MutatingAdmissionPolicy,
    MutatingAdmissionPolicyBinding,
    PodMonitor,
}

/// An object that the operator wants to exist.
#[derive(Clone, Debug, PartialEq)]
pub struct Child {
    pub kind: ChildKind,
    pub name: String,
    pub namespace: Option<String>,
    /// The complete object, with the digest annotation.
    pub body: Value,
    /// Digest of metadata and fields.
    pub digest: String,
}

impl ChildKind {
    /// All kinds, in the order in which they are applied: objects that pods refer to come first.
    pub const ALL: [ChildKind; 11] = [
        ChildKind::ServiceAccount,
        ChildKind::ClusterRoleBinding,
        ChildKind::ConfigMap,
        ChildKind::Secret,
        ChildKind::Service,
        ChildKind::PodDisruptionBudget,
        ChildKind::StatefulSet,
        ChildKind::DaemonSet,
        ChildKind::MutatingAdmissionPolicy,
        ChildKind::MutatingAdmissionPolicyBinding,
        ChildKind::PodMonitor,
    ];

    /// The name of the kind.
    pub fn as_str(self) -> &'static str {
        self.row().1
    }

    /// Whether objects of the kind have a namespace.
    pub fn is_namespaced(self) -> bool {
        self.row().2
    }

    /// Whether an API server may lack the kind, or the operator may lack permission to list it, and thus to write it.
    /// A cluster that needs such a kind is refused until then.
    pub fn is_optional(self) -> bool {
        self.row().3
    }

    /// API resource of the kind.
    pub fn resource(self) -> ApiResource {
        ApiResource::from_gvk(&GroupVersionKind::gvk(self.row().0, "v1", self.as_str()))
    }

    /// Group and name of a kind, and whether it is namespaced and optional. All kinds have version `v1`.
    fn row(self) -> (&'static str, &'static str, bool, bool) {
        let admission = "admissionregistration.k8s.io";
        match self {
            Self::ServiceAccount => ("", "ServiceAccount", true, false),
            Self::ClusterRoleBinding => ("rbac.authorization.k8s.io", "ClusterRoleBinding", false, false),
            Self::ConfigMap => ("", "ConfigMap", true, false),
            Self::Secret => ("", "Secret", true, false),
            Self::Service => ("", "Service", true, false),
            Self::StatefulSet => ("apps", "StatefulSet", true, false),
            Self::DaemonSet => ("apps", "DaemonSet", true, false),
            Self::PodDisruptionBudget => ("policy", "PodDisruptionBudget", true, false),
            Self::MutatingAdmissionPolicy => (admission, "MutatingAdmissionPolicy", false, true),
            Self::MutatingAdmissionPolicyBinding => {
                (admission, "MutatingAdmissionPolicyBinding", false, true)
            }
            Self::PodMonitor => ("monitoring.coreos.com", "PodMonitor", true, true),
        }
    }
}

impl Child {
    /// Creates a child from its metadata (name, namespace, labels, owner) and its other fields.
    ///
    /// # Panics
    /// Panics if `metadata` or `rest` is not a JSON object.
    pub fn new(kind: ChildKind, mut metadata: Value, rest: &Value) -> Child {
        let resource = kind.resource();
        let digest = digest::of(&format!("{metadata}{rest}"));
        metadata["annotations"] = json!({ APPLIED: digest });
        let text = |key: &str| metadata[key].as_str().map(str::to_owned);
        let (name, namespace) = (text("name").expect("a child has a name"), text("namespace"));
        let mut body = json!({
            "apiVersion": resource.api_version,
            "kind": resource.kind,
            "metadata": metadata,
        });
        let fields = body.as_object_mut().expect("made above");
        fields.extend(rest.as_object().expect("fields of an object").clone());
        Child { kind, name, namespace, body, digest }
    }

    /// Whether the live object contains the child, and the child was applied last.
    pub fn is_applied(&self, live: &DynamicObject) -> bool {
        let applied = live.annotations().get(APPLIED).is_some_and(|applied| *applied == self.digest);
        let is_it = |live: Value| {
            contains_desired(&live, &self.body)
                && !(self.extras() == Extras::Removed && extra_fields::has_any(&live, &self.body))
        };
        applied && serde_json::to_value(live).is_ok_and(is_it)
    }

    /// Entries that other managers add are removed from objects that grant access and from configuration. Other
    /// components add to the rest: OpenShift adds Secrets to service accounts.
    pub(crate) fn extras(&self) -> Extras {
        match self.kind {
            ChildKind::ClusterRoleBinding
            | ChildKind::ConfigMap
            | ChildKind::MutatingAdmissionPolicy
            | ChildKind::MutatingAdmissionPolicyBinding => Extras::Removed,
            _ => Extras::Kept,
        }
    }
}

/// Whether `live` contains everything that is desired. In a list of objects each desired one must be
/// contained in a live one, since other writers may add objects; other lists must be equal.
pub fn contains_desired(live: &Value, desired: &Value) -> bool {
    match (live, desired) {
        (Value::Object(live), Value::Object(desired)) => desired
            .iter()
            .all(|(key, desired)| live.get(key).is_some_and(|live| contains_desired(live, desired))),
        (Value::Array(live), Value::Array(desired)) if desired.iter().all(Value::is_object) => {
            desired.iter().all(|desired| live.iter().any(|live| contains_desired(live, desired)))
        }
        _ => live == desired,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn child(rest: &Value) -> Child {
        let metadata = json!({ "name": "a", "namespace": "n", "labels": { "of": "c" } });
        Child::new(ChildKind::ConfigMap, metadata, rest)
    }

    fn live(child: &Child, change: impl FnOnce(&mut Value)) -> DynamicObject {
        let mut live = child.body.clone();
        live["metadata"]["resourceVersion"] = json!("7");
        live["metadata"]["labels"]["added"] = json!("by another writer");
        change(&mut live);
        serde_json::from_value(live).expect("an object")
    }

    #[test]
    fn child_is_applied_if_it_was_written_last_and_no_desired_field_differs() {
        let rest = json!({ "data": { "k": "v" } });
        let closed = child(&rest);
        let metadata = json!({ "name": "a", "namespace": "n", "labels": { "of": "c" } });
        let open = Child::new(ChildKind::ServiceAccount, metadata, &rest);
        for (desired, pointer, value, expected) in [
            (&closed, "/metadata/resourceVersion", json!("8"), true),
            (&closed, "/data/k", json!("other"), false),
            (&closed, "/data", json!({}), false),
            (&closed, "/data", json!({ "k": "v", "l": "added" }), false),
            (&open, "/data", json!({ "k": "v", "l": "added" }), true),
            (&closed, "/metadata/labels", json!({}), false),
        ] {
            let found = live(desired, |live| *live.pointer_mut(pointer).expect("a field") = value.clone());
            assert_eq!(desired.is_applied(&found), expected, "{:?}: {pointer} is {value}", desired.kind);
        }
        let less = child(&json!({ "data": {} }));
        assert!(!less.is_applied(&live(&closed, |_| {})), "a key that is no longer desired is still present");
    }

    #[test]
    fn other_writers_may_add_to_lists_of_objects_only() {
        let containers = json!([{ "name": "agent", "args": ["a", "b"] }]);
        let more = json!([{ "name": "sidecar" }, { "name": "agent", "args": ["a", "b"], "tty": false }]);
        assert!(contains_desired(&more, &containers));
        let other = json!([{ "name": "agent", "args": ["a", "b", "c"] }]);
        assert!(!contains_desired(&other, &containers));
    }
}
