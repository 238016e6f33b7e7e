//! Write access to `CacheNode`s: roles of accounts, and the chart's policy that confines agents.

use std::fs;

use k8s_openapi::api::admissionregistration::v1::{
    ValidatingAdmissionPolicy, ValidatingAdmissionPolicyBinding,
};
use k8s_openapi::api::rbac::v1::{ClusterRole, ClusterRoleBinding};
use kube::Resource;
use kube::api::{Api, Patch, PatchParams};
use reprise_e2e::kubernetes::PodAccount;
use reprise_e2e::{ApiServer, tree};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

const POLICY: &str = "charts/reprise/files/confine-agents.yaml";

/// Installs the policy of the chart's file, as the chart does.
pub(crate) fn install_policy(server: &ApiServer) {
    let text = fs::read_to_string(tree().join(POLICY)).expect("the policy file exists");
    let documents: Vec<Value> = serde_yaml_ng::Deserializer::from_str(&text)
        .map(|one| Value::deserialize(one).expect("the policy is YAML"))
        .collect();
    assert_eq!(documents.len(), 2, "a policy and its binding");
    apply::<ValidatingAdmissionPolicy>(server, &documents[0]);
    apply::<ValidatingAdmissionPolicyBinding>(server, &documents[1]);
}

/// Grants an account verbs on CacheNodes and their statuses.
pub(crate) fn allow(server: &ApiServer, account: PodAccount<'_>, verbs: &[&str]) {
    grant(
        server,
        account,
        "cachenodes",
        &json!({
            "apiGroups": ["reprise.dev"], "resources": ["cachenodes", "cachenodes/status"], "verbs": verbs,
        }),
    );
}

/// Grants an account the right to review tokens.
#[allow(dead_code, reason = "the agents' tests use it")]
pub(crate) fn allow_reviews(server: &ApiServer, account: PodAccount<'_>) {
    grant(
        server,
        account,
        "tokenreviews",
        &json!({
            "apiGroups": ["authentication.k8s.io"], "resources": ["tokenreviews"], "verbs": ["create"],
        }),
    );
}

/// Grants an account the right to ask what others may do.
#[allow(dead_code, reason = "the agents' tests use it")]
pub(crate) fn allow_access_reviews(server: &ApiServer, account: PodAccount<'_>) {
    let (group, resource) = ("authorization.k8s.io", "subjectaccessreviews");
    let rule = json!({ "apiGroups": [group], "resources": [resource], "verbs": ["create"] });
    grant(server, account, resource, &rule);
}

/// Grants an account to read metrics of agents.
#[allow(dead_code, reason = "the agents' tests use it")]
pub(crate) fn allow_metrics(server: &ApiServer, account: PodAccount<'_>) {
    grant(server, account, "metrics", &json!({ "nonResourceURLs": ["/metrics"], "verbs": ["get"] }));
}

/// Grants an account a rule by a ClusterRole with a binding.
fn grant(server: &ApiServer, account: PodAccount<'_>, what: &str, rule: &Value) {
    let name = format!("{}-{what}", account.name);
    let rights = "rbac.authorization.k8s.io";
    apply::<ClusterRole>(
        server,
        &json!({
            "apiVersion": format!("{rights}/v1"), "kind": "ClusterRole", "metadata": { "name": name },
            "rules": [rule],
        }),
    );
    apply::<ClusterRoleBinding>(
        server,
        &json!({
            "apiVersion": format!("{rights}/v1"), "kind": "ClusterRoleBinding", "metadata": { "name": name },
            "roleRef": { "apiGroup": rights, "kind": "ClusterRole", "name": name },
            "subjects": [{ "kind": "ServiceAccount", "name": account.name, "namespace": account.namespace }],
        }),
    );
}

fn apply<K>(server: &ApiServer, object: &Value)
where
    K: Resource<DynamicType = ()> + Clone + std::fmt::Debug + DeserializeOwned,
{
    let name = object["metadata"]["name"].as_str().expect("a name");
    let api: Api<K> = Api::all(server.admin());
    let applied = server.block_on(api.patch(name, &PatchParams::apply("reprise-e2e"), &Patch::Apply(object)));
    applied.unwrap_or_else(|error| panic!("cannot apply {object}: {error}"));
}
