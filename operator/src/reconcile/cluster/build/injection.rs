//! Admission policy that connects engine pods to the agent's socket (`injection.yaml`). The API server evaluates it
//! (CEL), so no pod depends on a webhook.
//!
//! A pod requests this with a label that names the cluster, in a namespace that the cluster selects. An
//! annotation records the result: the connected cluster, or why the pod was not connected. Pods that have the
//! annotation already are not changed.
//!
//! Pods of a tenant also get its name, and a token by which the agent authenticates them. The policy looks up
//! their namespace and service account in the ConfigMap that the operator maintains ([`super::identities`]).

use reprise_crds::KVCacheCluster;
use reprise_crds::cluster::InjectionMode;
use reprise_crds::fields::LabelSelector;
use reprise_policy::identity::TOKEN_AUDIENCE;
use serde_json::{Value, json};

use super::connection::{in_host_memory, offloading, socket};
use crate::framework::child::{Child, ChildKind};
use crate::reconcile::names::{ClusterNames, Component, INJECT};

/// Parts of the policy that all clusters share.
const POLICY: &str = include_str!("injection.yaml");

/// Returns the policy and its binding; nothing if no namespace is selected.
pub(super) fn build(cluster: &KVCacheCluster, names: &ClusterNames) -> Vec<Child> {
    let injection = &cluster.spec.injection;
    if injection.mode != InjectionMode::AdmissionPolicy
        || injection.namespace_selector == LabelSelector::default()
    {
        return Vec::new();
    }
    // They are not namespaced, so the cluster cannot own them (`crate::reconcile::orphans`).
    let metadata = || json!({ "name": names.injection(), "labels": names.labels(Component::Agent) });
    let parameters =
        json!({ "name": names.tenants(), "namespace": names.namespace, "parameterNotFoundAction": "Allow" });
    let binding = json!({ "spec": { "policyName": names.injection(), "paramRef": parameters } });
    vec![
        Child::new(ChildKind::MutatingAdmissionPolicy, metadata(), &policy(cluster, names)),
        Child::new(ChildKind::MutatingAdmissionPolicyBinding, metadata(), &binding),
    ]
}

fn policy(cluster: &KVCacheCluster, names: &ClusterNames) -> Value {
    let mut policy: Value = serde_yaml_ng::from_str(POLICY).expect("a valid manifest");
    let constraints = &mut policy["spec"]["matchConstraints"];
    constraints["namespaceSelector"] = json!(cluster.spec.injection.namespace_selector);
    constraints["objectSelector"] = json!({ "matchLabels": { INJECT: names.name } });
    let socket = socket(cluster);
    let values = [
        ("directory", cluster.spec.agents.socket.directory.to_string()),
        ("config", in_host_memory(&socket).to_string()),
        ("gpuConfig", offloading(&socket).to_string()),
        ("socket", socket),
        ("cluster", names.key()),
        ("audience", TOKEN_AUDIENCE.to_owned()),
    ];
    // A JSON string is a valid literal of CEL. Expressions may use variables that come before them.
    let variable = |(name, value)| json!({ "name": name, "expression": json!(value).to_string() });
    let variables = policy["spec"]["variables"].as_array_mut().expect("a list");
    variables.splice(0..0, values.map(variable));
    policy
}
