//! The operator and its hooks with the RBAC rights of the chart, and with fewer rights.

use kube::api::{Api, ApiResource, DynamicObject, ListParams, Patch, PatchParams};
use kube::core::GroupVersionKind;
use reprise_e2e::kubernetes::User;
use reprise_e2e::{Operator, OperatorFiles, PATIENCE, tree, wait_until};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::operator::deletion_guard::{
    BLOCKED, FINALIZER, LATEST, TOO_SHORT, UNUSED_SECONDS, create_running_cluster, report_sessions,
    wait_deleted, wait_finalizer,
};
use crate::operator::test_cluster::{NAMESPACE, OPERATOR_NAMESPACE, OTHER_MANAGER, TestCluster};

const RIGHTS: &str = "rbac.authorization.k8s.io";
/// The chart rendered with default values in [`OPERATOR_NAMESPACE`].
const CHART: &str = "e2e/tests/chart/golden/default.yaml";

/// Applies the chart's roles and bindings of this name after `change` has edited each. Returns the user name.
fn apply_rights(k8s: &TestCluster, name: &str, change: impl Fn(&mut Value)) -> String {
    let text = std::fs::read_to_string(tree().join(CHART)).expect("the file is in the tree");
    let all = serde_yaml_ng::Deserializer::from_str(&text).map(|one| Value::deserialize(one).expect("YAML"));
    let mut count = 0;
    for mut object in all.filter(|one| one["metadata"]["name"] == name) {
        let kind = object["kind"].as_str().expect("a kind").to_owned();
        let plural = match kind.as_str() {
            "ClusterRole" => "clusterroles",
            "ClusterRoleBinding" => "clusterrolebindings",
            "Role" => "roles",
            "RoleBinding" => "rolebindings",
            _ => continue,
        };
        change(&mut object);
        let resource = ApiResource::from_gvk_with_plural(&GroupVersionKind::gvk(RIGHTS, "v1", &kind), plural);
        let api: Api<DynamicObject> = if kind.starts_with("Cluster") {
            Api::all_with(k8s.client(), &resource)
        } else {
            Api::namespaced_with(k8s.client(), OPERATOR_NAMESPACE, &resource)
        };
        let params = PatchParams::apply("helm").force();
        k8s.server
            .block_on(api.patch(name, &params, &Patch::Apply(&object)))
            .expect("the rights are accepted");
        count += 1;
    }
    assert_eq!(count, 4, "both roles of {name} and their bindings");
    format!("system:serviceaccount:{OPERATOR_NAMESPACE}:{name}")
}

/// Applies a ClusterRole of the chart, which the operator binds.
pub(crate) fn apply_cluster_role(k8s: &TestCluster, name: &str) {
    let text = std::fs::read_to_string(tree().join(CHART)).expect("the file is in the tree");
    let all = serde_yaml_ng::Deserializer::from_str(&text).map(|one| Value::deserialize(one).expect("YAML"));
    let is_it = |one: &Value| one["metadata"]["name"] == name && one["kind"] == "ClusterRole";
    let role = all.into_iter().find(is_it).expect("the chart has the role");
    let resource = ApiResource::from_gvk_with_plural(
        &GroupVersionKind::gvk(RIGHTS, "v1", "ClusterRole"),
        "clusterroles",
    );
    let api: Api<DynamicObject> = Api::all_with(k8s.client(), &resource);
    let params = PatchParams::apply("helm").force();
    k8s.server.block_on(api.patch(name, &params, &Patch::Apply(&role))).expect("the role is accepted");
}

/// Grants the operator the Secrets of cluster `c`, as the chart does for its own cluster.
fn apply_secret_rights(k8s: &TestCluster) {
    let text = std::fs::read_to_string(tree().join(CHART)).expect("the file is in the tree");
    let all = serde_yaml_ng::Deserializer::from_str(&text).map(|one| Value::deserialize(one).expect("YAML"));
    let mut count = 0;
    for object in all.filter(|one| one["metadata"]["name"] == "reprise-operator-reprise") {
        let mut object = object;
        object["metadata"]["namespace"] = json!(NAMESPACE);
        let named = object.pointer_mut("/rules/1/resourceNames").and_then(Value::as_array_mut);
        for name in named.into_iter().flatten() {
            let renamed = name.as_str().expect("a name").replacen("reprise-", "c-", 1);
            *name = json!(renamed);
        }
        let kind = object["kind"].as_str().expect("a kind").to_owned();
        let plural = if kind == "Role" { "roles" } else { "rolebindings" };
        let resource = ApiResource::from_gvk_with_plural(&GroupVersionKind::gvk(RIGHTS, "v1", &kind), plural);
        let api: Api<DynamicObject> = Api::namespaced_with(k8s.client(), NAMESPACE, &resource);
        let (name, params) = ("reprise-operator-reprise", PatchParams::apply("helm").force());
        k8s.server
            .block_on(api.patch(name, &params, &Patch::Apply(&object)))
            .expect("the rights are accepted");
        count += 1;
    }
    assert_eq!(count, 2, "a role and its binding");
}

/// Starts the operator with the chart's rights after `change` has edited them.
pub(crate) fn start_operator(k8s: &TestCluster, change: impl Fn(&mut Value)) -> Operator {
    apply_secret_rights(k8s);
    start_operator_with(k8s, change, |files| files)
}

/// Starts the operator, with `options`, without the right to read Secrets of cluster `c`.
pub(crate) fn start_operator_with(
    k8s: &TestCluster,
    change: impl Fn(&mut Value),
    options: impl FnOnce(OperatorFiles) -> OperatorFiles,
) -> Operator {
    k8s.env.allow(TOO_SHORT);
    let name = apply_rights(k8s, "reprise-operator", change);
    let user = User { name: &name, group: None };
    let files = k8s.operator_files("operator").as_user(&k8s.server, &user).unused_for(UNUSED_SECONDS);
    options(files).start().unwrap_or_else(|error| panic!("the operator does not start: {error:?}"))
}

/// Removes the right to change finalizers of a kind.
fn remove_finalizer_right(role: &mut Value, plural: &str) {
    for rule in role.get_mut("rules").and_then(Value::as_array_mut).into_iter().flatten() {
        let is_it = rule["verbs"] == json!(["patch"])
            && rule["resources"].as_array().is_some_and(|all| all.contains(&json!(plural)));
        if let Some(resources) = rule["resources"].as_array_mut().filter(|_| is_it) {
            resources.retain(|one| *one != plural);
        }
    }
}

/// Events of all namespaces. Those of cluster-scoped objects are in namespace `default`.
fn events(k8s: &TestCluster) -> Vec<DynamicObject> {
    let resource = ApiResource::from_gvk(&GroupVersionKind::gvk("events.k8s.io", "v1", "Event"));
    let api: Api<DynamicObject> = Api::all_with(k8s.client(), &resource);
    k8s.server.block_on(api.list(&ListParams::default())).expect("events can be listed").items
}

/// Waits for the event about a missing right to change the finalizer of an object.
fn wait_forbidden_event(k8s: &TestCluster, name: &str, finalizer: &str) {
    let is_it = |event: &DynamicObject| {
        let note = event.data["note"].as_str().unwrap_or_default();
        event.data["regarding"]["name"] == name
            && event.data["reason"] == "Forbidden"
            && note.contains(finalizer)
            && note.contains("permissions of this version's chart")
    };
    wait_until(&format!("an event about the finalizer of {name}"), LATEST, || {
        events(k8s).iter().any(is_it).then_some(())
    });
}

#[test]
fn missing_finalizer_right_is_an_event_until_it_is_granted() {
    let k8s = TestCluster::new();
    k8s.env.require("reconcile failed; retrying");
    let operator = start_operator(&k8s, |role| {
        remove_finalizer_right(role, "ssdpools");
        remove_finalizer_right(role, "cachetenants");
    });
    create_running_cluster(&k8s, json!({}));
    k8s.pool("wiped", "/var/lib/wiped", json!({ "deletionPolicy": "Wipe" }));
    k8s.apply_resource("CacheTenant", "t", json!({ "budget": { "ssd": { "limit": "1Gi" } } }));
    report_sessions(&k8s, "n1", 1);
    for (name, finalizer) in [("p", FINALIZER), ("wiped", FINALIZER), ("t", "reprise.dev/budget")] {
        wait_forbidden_event(&k8s, name, finalizer);
    }
    assert!(operator.metric("reprise_operator_reconciles_total", "failed") > 0.0);
    k8s.wait_condition("KVCacheCluster", "c", ["Accepted", "True", "AsDesired"]);
    operator.kill();

    // An upgrade of the chart adds the right.
    let _operator = start_operator(&k8s, |_| ());
    wait_finalizer(&k8s, "p");
    wait_finalizer(&k8s, "wiped");
}

#[test]
fn cluster_whose_secrets_are_forbidden_names_the_value_of_the_chart_until_it_is_set() {
    let k8s = TestCluster::new();
    k8s.env.require("no permission for a Secret");
    // The client of the API server logs each attempt.
    k8s.env.allow("watch list error with 403");
    let operator = start_operator_with(&k8s, |_| (), |files| files);
    k8s.cluster(json!({ "etcd": { "mode": "Managed" } }));
    let words = ["{namespace: cache, name: c}", "rbac.clusters", "upgrade the release"];
    for (condition, status) in [("Degraded", "True"), ("Ready", "False"), ("CertificatesReady", "False")] {
        k8s.wait_message("KVCacheCluster", "c", [condition, status, "Forbidden"], &words);
    }
    assert!(k8s.get("StatefulSet", "c-controlplane").is_none(), "its pods would wait for certificates");
    let failed = operator.metric("reprise_operator_reconciles_total", "failed");
    assert_eq!(failed, 0.0, "the missing right is a condition, not a failed reconcile");

    apply_secret_rights(&k8s);
    k8s.wait_condition("KVCacheCluster", "c", ["CertificatesReady", "True", "AsDesired"]);
    k8s.wait_condition("KVCacheCluster", "c", ["Degraded", "False", "AsDesired"]);
    for (kind, name) in [("Secret", "c-console"), ("StatefulSet", "c-controlplane")] {
        k8s.wait_for(kind, name);
    }
}

#[test]
fn finalizer_is_removed_once_right_is_granted() {
    let k8s = TestCluster::new();
    k8s.env.require("reconcile failed; retrying");
    let operator = start_operator(&k8s, |_| ());
    create_running_cluster(
        &k8s,
        json!({ "deletionPolicy": "Wipe", "wipeConfirmation": "yes-really-destroy-the-data" }),
    );
    wait_finalizer(&k8s, "p");
    report_sessions(&k8s, "n1", 1);
    k8s.delete("SSDPool", "p");
    k8s.wait_condition("SSDPool", "p", BLOCKED);
    apply_rights(&k8s, "reprise-operator", |role| remove_finalizer_right(role, "ssdpools"));
    report_sessions(&k8s, "n1", 0);
    wait_forbidden_event(&k8s, "p", FINALIZER);
    let is_release_event = |event: &DynamicObject| {
        event.data["note"].as_str().is_some_and(|note| note.contains("no engine has a session"))
    };
    assert!(!events(&k8s).iter().any(is_release_event), "the deletion is not released yet");
    operator.kill();

    let _operator = start_operator(&k8s, |_| ());
    k8s.wait_condition_within(LATEST, ("SSDPool", "p"), ["DeletionBlocked", "True", "Releasing"]);
    for node in ["n1", "n2"] {
        k8s.agent_reports(node, "Wiped");
    }
    wait_deleted(&k8s, "SSDPool", "p");
}

/// Admission policy and binding that reject DaemonSets, like policies against host directories.
fn deny_policy() -> [Value; 2] {
    let (version, name) = ("admissionregistration.k8s.io/v1", "no-daemonsets");
    let rule = json!({ "apiGroups": ["apps"], "apiVersions": ["v1"], "operations": ["CREATE", "UPDATE"], "resources": ["daemonsets"] });
    [
        json!({
            "apiVersion": version, "kind": "ValidatingAdmissionPolicy", "metadata": { "name": name },
            "spec": {
                "failurePolicy": "Fail", "matchConstraints": { "resourceRules": [rule] },
                "validations": [{ "expression": "false", "message": "no folders of nodes here", "reason": "Forbidden" }],
            },
        }),
        json!({
            "apiVersion": version, "kind": "ValidatingAdmissionPolicyBinding", "metadata": { "name": name },
            "spec": { "policyName": name, "validationActions": ["Deny"] },
        }),
    ]
}

#[test]
fn child_forbidden_by_policy_is_a_condition_and_others_are_created() {
    let k8s = TestCluster::new();
    let of = |kind: &str, plural: &str| {
        let group = GroupVersionKind::gvk("admissionregistration.k8s.io", "v1", kind);
        let resource = ApiResource::from_gvk_with_plural(&group, plural);
        Api::<DynamicObject>::all_with(k8s.client(), &resource)
    };
    let (policies, bindings) = (
        of("ValidatingAdmissionPolicy", "validatingadmissionpolicies"),
        of("ValidatingAdmissionPolicyBinding", "validatingadmissionpolicybindings"),
    );
    let params = PatchParams::apply(OTHER_MANAGER);
    for (api, object) in [&policies, &bindings].into_iter().zip(deny_policy()) {
        let name = object["metadata"]["name"].as_str().expect("a name").to_owned();
        k8s.server
            .block_on(api.patch(&name, &params, &Patch::Apply(&object)))
            .expect("the policy is accepted");
    }
    // A policy takes effect with a delay.
    let probe = json!({
        "apiVersion": "apps/v1", "kind": "DaemonSet", "metadata": { "name": "probe", "namespace": NAMESPACE },
        "spec": {
            "selector": { "matchLabels": { "a": "b" } },
            "template": { "metadata": { "labels": { "a": "b" } }, "spec": { "containers": [{ "name": "c", "image": "i" }] } },
        },
    });
    let dry = PatchParams { dry_run: true, ..PatchParams::apply(OTHER_MANAGER) };
    wait_until("the policy is in effect", PATIENCE, || {
        let taken = k8s.server.block_on(k8s.api("DaemonSet").patch("probe", &dry, &Patch::Apply(&probe)));
        taken.is_err().then_some(())
    });
    let operator = start_operator(&k8s, |_| ());
    k8s.cluster(json!({}));
    k8s.wait_message(
        "KVCacheCluster",
        "c",
        ["Degraded", "True", "Forbidden"],
        &["DaemonSet/cache/c-agent", "no folders of nodes here"],
    );
    k8s.wait_condition("KVCacheCluster", "c", ["Ready", "False", "Forbidden"]);
    for (kind, name) in
        [("ConfigMap", "c-connection"), ("Service", "c-controlplane"), ("StatefulSet", "c-controlplane")]
    {
        k8s.wait_for(kind, name);
    }
    assert!(k8s.get("DaemonSet", "c-agent").is_none());
    let failed = operator.metric("reprise_operator_reconciles_total", "failed");
    assert_eq!(failed, 0.0, "the rejected child is a condition, not a failed reconcile");

    let deleted = k8s.server.block_on(bindings.delete("no-daemonsets", &kube::api::DeleteParams::default()));
    deleted.expect("the binding can be deleted");
    k8s.wait_for("DaemonSet", "c-agent");
    k8s.wait_condition("KVCacheCluster", "c", ["Accepted", "True", "AsDesired"]);
}

#[test]
fn children_in_terminating_namespace_are_a_condition() {
    let k8s = TestCluster::new();
    let _operator = start_operator(&k8s, |_| ());
    create_running_cluster(&k8s, json!({}));
    // Simulates the namespace controller. The terminating namespace accepts no new objects.
    k8s.delete("Namespace", NAMESPACE);
    k8s.delete("ConfigMap", "c-agent");
    k8s.wait_message(
        "KVCacheCluster",
        "c",
        ["Degraded", "True", "Forbidden"],
        &["ConfigMap/cache/c-agent", "being terminated"],
    );
    k8s.delete("KVCacheCluster", "c");
    wait_until("its CacheNode is deleted", PATIENCE, || k8s.get("CacheNode", "n1").is_none().then_some(()));
}

#[test]
fn delete_hook_names_pools_in_use() {
    let k8s = TestCluster::new();
    let _operator = start_operator(&k8s, |_| ());
    create_running_cluster(&k8s, json!({}));
    report_sessions(&k8s, "n1", 1);
    wait_finalizer(&k8s, "p");
    let name = apply_rights(&k8s, "reprise-delete", |_| ());
    let files = k8s.operator_files("hook").as_user(&k8s.server, &User { name: &name, group: None });
    let mut command = files.command(&[
        "delete",
        "--release",
        "r",
        "--namespace",
        OPERATOR_NAMESPACE,
        "--timeout-seconds",
        "30",
    ]);
    let output = command.output().expect("the operator can be started");
    let words = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{words}");
    for named in ["SSDPool", FINALIZER] {
        assert!(words.contains(named), "{named}: {words}");
    }
}
