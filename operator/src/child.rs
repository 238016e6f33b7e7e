//! A child: an object that the operator wants to be there, as a value.
//!
//! A child is written when what is there does not hold it ([`held_by`]) or when something else was applied last (its digest
//! stands in an annotation, so a field that is wanted no more is taken away). Both are found without asking the API server.

use kube::ResourceExt;
use kube::api::{ApiResource, DynamicObject};
use serde_json::{Value, json};

use crate::digest;
use crate::names::APPLIED;
use crate::surplus;

/// Group of admission policies.
const ADMISSION: &str = "admissionregistration.k8s.io";

/// Kinds of children.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum ChildKind {
    /// Whom agents are to the API server.
    ServiceAccount,
    /// What agents may.
    ClusterRoleBinding,
    /// Configurations.
    ConfigMap,
    /// Certificates.
    Secret,
    /// Names and addresses of pods.
    Service,
    /// Members and etcd.
    StatefulSet,
    /// Agents.
    DaemonSet,
    /// How many members may be away.
    PodDisruptionBudget,
    /// What devices agents' pods claim.
    ResourceClaimTemplate,
    /// What pods get that ask for it.
    MutatingAdmissionPolicy,
    /// That they get it.
    MutatingAdmissionPolicyBinding,
    /// Where Prometheus finds metrics.
    PodMonitor,
}

/// Whose the fields of a child are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ownership {
    /// Nobody else has any business there: what somebody writes is put back.
    OursAlone,
    /// People and other controllers may take fields (replicas, resources): then the conflict is reported, and they are left alone.
    Shared,
}

/// An object that is wanted.
#[derive(Clone, Debug, PartialEq)]
pub struct Child {
    /// Its kind.
    pub kind: ChildKind,
    /// Its name.
    pub name: String,
    /// Its namespace, if the kind has one.
    pub namespace: Option<String>,
    /// Whose its fields are.
    pub ownership: Ownership,
    /// The whole of it, with the annotation.
    pub body: Value,
    /// Digest of the body.
    pub digest: String,
}

impl ChildKind {
    /// All kinds, in the order in which they are applied: what pods refer to first.
    pub const ALL: [ChildKind; 12] = [
        ChildKind::ServiceAccount,
        ChildKind::ClusterRoleBinding,
        ChildKind::ConfigMap,
        ChildKind::Secret,
        ChildKind::Service,
        ChildKind::PodDisruptionBudget,
        ChildKind::ResourceClaimTemplate,
        ChildKind::StatefulSet,
        ChildKind::DaemonSet,
        ChildKind::MutatingAdmissionPolicy,
        ChildKind::MutatingAdmissionPolicyBinding,
        ChildKind::PodMonitor,
    ];

    /// The kind's name.
    pub fn as_str(self) -> &'static str {
        self.parts().2
    }

    /// Whether objects of it have a namespace.
    pub fn is_namespaced(self) -> bool {
        use ChildKind::{ClusterRoleBinding, MutatingAdmissionPolicy, MutatingAdmissionPolicyBinding};
        !matches!(self, ClusterRoleBinding | MutatingAdmissionPolicy | MutatingAdmissionPolicyBinding)
    }

    /// Whether there are API servers without the kind, or operators that may not write it ([`crate::optional`]).
    pub fn is_optional(self) -> bool {
        use ChildKind::{
            MutatingAdmissionPolicy, MutatingAdmissionPolicyBinding, PodMonitor, ResourceClaimTemplate,
        };
        matches!(
            self,
            MutatingAdmissionPolicy | MutatingAdmissionPolicyBinding | PodMonitor | ResourceClaimTemplate
        )
    }

    /// As clients have it.
    pub fn resource(self) -> ApiResource {
        let (group, version, kind, plural) = self.parts();
        let api_version = if group.is_empty() { version.to_owned() } else { format!("{group}/{version}") };
        ApiResource {
            group: group.to_owned(),
            version: version.to_owned(),
            api_version,
            kind: kind.to_owned(),
            plural: plural.to_owned(),
        }
    }

    fn parts(self) -> (&'static str, &'static str, &'static str, &'static str) {
        match self {
            ChildKind::ServiceAccount => ("", "v1", "ServiceAccount", "serviceaccounts"),
            ChildKind::ClusterRoleBinding => {
                ("rbac.authorization.k8s.io", "v1", "ClusterRoleBinding", "clusterrolebindings")
            }
            ChildKind::ConfigMap => ("", "v1", "ConfigMap", "configmaps"),
            ChildKind::Secret => ("", "v1", "Secret", "secrets"),
            ChildKind::Service => ("", "v1", "Service", "services"),
            ChildKind::StatefulSet => ("apps", "v1", "StatefulSet", "statefulsets"),
            ChildKind::DaemonSet => ("apps", "v1", "DaemonSet", "daemonsets"),
            ChildKind::PodDisruptionBudget => ("policy", "v1", "PodDisruptionBudget", "poddisruptionbudgets"),
            ChildKind::ResourceClaimTemplate => {
                ("resource.k8s.io", "v1", "ResourceClaimTemplate", "resourceclaimtemplates")
            }
            ChildKind::MutatingAdmissionPolicy => {
                (ADMISSION, "v1", "MutatingAdmissionPolicy", "mutatingadmissionpolicies")
            }
            ChildKind::MutatingAdmissionPolicyBinding => {
                (ADMISSION, "v1", "MutatingAdmissionPolicyBinding", "mutatingadmissionpolicybindings")
            }
            ChildKind::PodMonitor => ("monitoring.coreos.com", "v1", "PodMonitor", "podmonitors"),
        }
    }
}

impl Child {
    /// A child with this metadata (name, namespace, labels, owner) and the rest of its fields.
    ///
    /// # Panics
    /// When metadata or the rest are no JSON objects: they are made by us.
    pub fn new(kind: ChildKind, ownership: Ownership, mut metadata: Value, rest: &Value) -> Child {
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
        Child { kind, name, namespace, ownership, body, digest }
    }

    /// Whether what is there is what is wanted.
    pub fn is_held_by(&self, live: &DynamicObject) -> bool {
        let applied = live.annotations().get(APPLIED).is_some_and(|applied| *applied == self.digest);
        let is_it = |live: Value| {
            held_by(&live, &self.body) && !(self.is_closed() && surplus::is_in(&live, &self.body))
        };
        applied && serde_json::to_value(live).is_ok_and(is_it)
    }

    /// Whether nobody else may add anything to it. Others add to service accounts: OpenShift gives each some Secrets.
    pub fn is_closed(&self) -> bool {
        use ChildKind::{
            ClusterRoleBinding, ConfigMap, MutatingAdmissionPolicy, MutatingAdmissionPolicyBinding,
        };
        let closed = [ClusterRoleBinding, ConfigMap, MutatingAdmissionPolicy, MutatingAdmissionPolicyBinding];
        self.ownership == Ownership::OursAlone && closed.contains(&self.kind)
    }
}

/// Whether `live` has everything that is wanted, and perhaps more. Of a list of objects every wanted one must be held by one
/// that is there, since others may add theirs; other lists must be equal.
pub fn held_by(live: &Value, wanted: &Value) -> bool {
    match (live, wanted) {
        (Value::Object(live), Value::Object(wanted)) => {
            wanted.iter().all(|(key, wanted)| live.get(key).is_some_and(|live| held_by(live, wanted)))
        }
        (Value::Array(live), Value::Array(wanted)) if wanted.iter().all(Value::is_object) => {
            wanted.iter().all(|wanted| live.iter().any(|live| held_by(live, wanted)))
        }
        _ => live == wanted,
    }
}

/// The paths of what is wanted and not there, or is there otherwise. Of lists it says that, and not what.
pub(crate) fn missing(live: &DynamicObject, wanted: &Value) -> Vec<String> {
    let mut paths = Vec::new();
    if let Ok(live) = serde_json::to_value(live) {
        differences(&live, wanted, "", &mut paths);
    }
    paths
}

fn differences(live: &Value, wanted: &Value, at: &str, paths: &mut Vec<String>) {
    match (live, wanted) {
        (Value::Object(live), Value::Object(wanted)) => {
            for (key, wanted) in wanted {
                differences(live.get(key).unwrap_or(&Value::Null), wanted, &format!("{at}.{key}"), paths);
            }
        }
        _ if held_by(live, wanted) => {}
        _ => paths.push(at.to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn child(rest: &Value) -> Child {
        let metadata = json!({ "name": "a", "namespace": "n", "labels": { "of": "c" } });
        Child::new(ChildKind::ConfigMap, Ownership::OursAlone, metadata, rest)
    }

    fn live(child: &Child, change: impl FnOnce(&mut Value)) -> DynamicObject {
        let mut live = child.body.clone();
        live["metadata"]["resourceVersion"] = json!("7");
        live["metadata"]["labels"]["added"] = json!("by somebody");
        change(&mut live);
        serde_json::from_value(live).expect("an object")
    }

    #[test]
    fn an_entry_more_is_not_held_where_nobody_else_may_add_any() {
        let rest = json!({ "data": { "k": "v" } });
        let wanted = child(&rest);
        assert!(!wanted.is_held_by(&live(&wanted, |live| live["data"]["l"] = json!("mine"))));
        let metadata = json!({ "name": "a", "namespace": "n", "labels": { "of": "c" } });
        let open = Child::new(ChildKind::ServiceAccount, Ownership::OursAlone, metadata, &rest);
        assert!(open.is_held_by(&live(&open, |live| live["data"]["l"] = json!("mine"))));
    }

    #[test]
    fn what_is_there_is_held_and_any_change_of_ours_is_not() {
        let wanted = child(&json!({ "data": { "k": "v" } }));
        assert!(wanted.is_held_by(&live(&wanted, |_| {})));
        assert!(!wanted.is_held_by(&live(&wanted, |live| live["data"]["k"] = json!("other"))));
        assert!(!wanted.is_held_by(&live(&wanted, |live| live["data"] = json!({}))));
        assert!(!wanted.is_held_by(&live(&wanted, |live| live["metadata"]["labels"] = json!({}))));
        let less = child(&json!({ "data": {} }));
        assert!(!less.is_held_by(&live(&wanted, |_| {})), "a key that is wanted no more is there still");
    }

    #[test]
    fn what_somebody_has_removed_is_named_by_its_path() {
        let wanted = child(&json!({ "data": { "k": "v", "l": "w" }, "list": [{ "name": "a" }] }));
        let without = live(&wanted, |live| {
            live["data"] = json!({ "l": "w", "more": "x" });
            live["list"] = json!([{ "name": "b" }]);
        });
        assert_eq!(missing(&without, &wanted.body), [".data.k", ".list"]);
        assert_eq!(missing(&live(&wanted, |_| {}), &wanted.body), Vec::<String>::new());
    }

    #[test]
    fn others_may_add_to_lists_of_objects_and_not_to_lists_of_words() {
        let containers = json!([{ "name": "agent", "args": ["a", "b"] }]);
        let more = json!([{ "name": "sidecar" }, { "name": "agent", "args": ["a", "b"], "tty": false }]);
        assert!(held_by(&more, &containers));
        let other = json!([{ "name": "agent", "args": ["a", "b", "c"] }]);
        assert!(!held_by(&other, &containers));
    }
}
