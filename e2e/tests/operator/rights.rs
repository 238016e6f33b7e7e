//! What the operator and its hooks do with the rights that the chart gives them, and with fewer.

use kube::api::{Api, ApiResource, DynamicObject, Patch, PatchParams};
use kube::core::GroupVersionKind;
use reprise_e2e::kubernetes::User;
use reprise_e2e::{Operator, PATIENCE, tree, wait_until};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::in_use::{
    BLOCKED, FINALIZER, LATE, TOO_SHORT, UNUSED, holds, running, sessions, wait_gone, wait_held,
};
use crate::lab::{Lab, SETTLED, SPACE, SYSTEM};

const RIGHTS: &str = "rbac.authorization.k8s.io";
/// The chart as it is rendered with nothing set, in [`SYSTEM`].
const CHART: &str = "e2e/tests/chart/golden/default.yaml";

/// Applies roles and bindings of the chart by this name, each changed first. Whom they are given to.
fn grant(lab: &Lab, name: &str, change: impl Fn(&mut Value)) -> String {
    let text = std::fs::read_to_string(tree().join(CHART)).expect("it is in the tree");
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
            Api::all_with(lab.client(), &resource)
        } else {
            Api::namespaced_with(lab.client(), SYSTEM, &resource)
        };
        let params = PatchParams::apply("helm").force();
        lab.server.block_on(api.patch(name, &params, &Patch::Apply(&object))).expect("rights can be given");
        count += 1;
    }
    assert_eq!(count, 4, "both roles of {name} and their bindings");
    format!("system:serviceaccount:{SYSTEM}:{name}")
}

/// The operator with the chart's rights, changed.
fn start(lab: &Lab, change: impl Fn(&mut Value)) -> Operator {
    lab.world.allow(TOO_SHORT);
    let name = grant(lab, "reprise-operator", change);
    let user = User { name: &name, group: None };
    let files = lab.operator_files("operator").as_user(&lab.server, &user).unused_for(UNUSED);
    files.start().unwrap_or_else(|refused| panic!("the operator does not start: {refused:?}"))
}

/// Takes the right to change finalizers of clusters and pools away.
fn without_finalizers(role: &mut Value) {
    for rule in role.get_mut("rules").and_then(Value::as_array_mut).into_iter().flatten() {
        if rule["verbs"] == json!(["patch"]) && rule["resources"][0] == "kvcacheclusters" {
            rule["resources"] = json!(["gpuqueueallocations", "cachetenants"]);
        }
    }
}

#[test]
fn what_lacks_the_right_to_finalizers_is_said_and_everything_else_works() {
    let lab = Lab::new();
    lab.world.require("a finalizer may not be changed");
    let operator = start(&lab, without_finalizers);
    running(&lab, json!({}));
    lab.pool("wiped", "/var/lib/wiped", json!({ "deletionPolicy": "Wipe" }));
    sessions(&lab, "n1", 1);
    let unknown = ["DeletionBlocked", "Unknown", "Forbidden"];
    for (kind, name) in [("KVCacheCluster", "c"), ("SSDPool", "p"), ("SSDPool", "wiped")] {
        let said = lab.wait_condition(kind, name, unknown);
        assert!(said.contains("rights of this version's chart"), "{said}");
    }
    lab.wait_condition("SSDPool", "p", ["Ready", "True", "AsDesired"]);
    let ended = |result: &str| operator.metric("reprise_operator_reconciles_total", result);
    assert_eq!(ended("failed"), 0.0, "it is said, and no error of a reconcile");
    assert!(ended("done") > 0.0);
    operator.kill();

    // As an upgrade of the chart does.
    let operator = start(&lab, |_| ());
    wait_held(&lab, "SSDPool", "p");
    wait_held(&lab, "KVCacheCluster", "c");
    wait_held(&lab, "SSDPool", "wiped");
    wait_until("nothing is said any more", PATIENCE, || {
        let pool = lab.get("SSDPool", "p")?;
        let conditions = pool.data["status"]["conditions"].as_array()?;
        (!conditions.iter().any(|one| one["type"] == "DeletionBlocked")).then_some(())
    });
    operator.kill();
}

#[test]
fn a_tenant_whose_finalizer_may_not_be_put_on_says_so() {
    let lab = Lab::new();
    lab.world.require("a finalizer may not be changed");
    let operator = start(&lab, |role| {
        for rule in role.get_mut("rules").and_then(Value::as_array_mut).into_iter().flatten() {
            if rule["verbs"] == json!(["patch"]) && rule["resources"][0] == "kvcacheclusters" {
                rule["resources"] = json!(["kvcacheclusters", "ssdpools", "gpuqueueallocations"]);
            }
        }
    });
    lab.apply(&json!({
        "apiVersion": "reprise.dev/v1alpha1", "kind": "CacheTenant", "metadata": { "name": "t" },
        "spec": { "budget": { "ssd": { "limit": "1Gi" } } },
    }));
    let said = lab.wait_condition("CacheTenant", "t", ["DeletionBlocked", "Unknown", "Forbidden"]);
    assert!(said.contains("may not be put on") && said.contains("rights of this version's chart"), "{said}");
    lab.wait_condition("CacheTenant", "t", ["Accepted", "True", "AsDesired"]);
    assert_eq!(
        operator.metric("reprise_operator_reconciles_total", "failed"),
        0.0,
        "it is said, and no error"
    );
    operator.kill();
}

#[test]
fn a_finalizer_that_may_not_be_taken_away_is_said_once_and_goes_with_the_right() {
    let lab = Lab::new();
    lab.world.require("a finalizer may not be changed");
    let operator = start(&lab, |_| ());
    running(&lab, json!({ "deletionPolicy": "Wipe", "wipeConfirmation": "yes-really-destroy-the-data" }));
    wait_held(&lab, "SSDPool", "p");
    sessions(&lab, "n1", 1);
    lab.delete("SSDPool", "p");
    lab.wait_condition("SSDPool", "p", BLOCKED);
    grant(&lab, "reprise-operator", without_finalizers);
    sessions(&lab, "n1", 0);
    let said = lab.wait_condition_within(LATE, ("SSDPool", "p"), ["DeletionBlocked", "True", "Forbidden"]);
    assert!(said.contains(FINALIZER) && said.contains("may not be taken away"), "{said}");
    let let_go = |event: &DynamicObject| {
        event.data["note"].as_str().is_some_and(|note| note.contains("no engine has a session any more"))
    };
    assert!(!lab.list("Event").iter().any(let_go), "it is not so");
    operator.kill();

    let operator = start(&lab, |_| ());
    lab.wait_condition_within(LATE, ("SSDPool", "p"), ["DeletionBlocked", "True", "Releasing"]);
    for node in ["n1", "n2"] {
        lab.agent_reports(node, "Wiped");
    }
    wait_gone(&lab, "SSDPool", "p");
    operator.kill();
}

/// Somebody's policy that takes no DaemonSets, as policies against folders of nodes do not.
fn policy() -> [Value; 2] {
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
fn a_child_that_a_policy_of_somebody_forbids_is_a_condition_and_everything_else_is_made() {
    let lab = Lab::new();
    let of = |kind: &str, plural: &str| {
        let group = GroupVersionKind::gvk("admissionregistration.k8s.io", "v1", kind);
        let resource = ApiResource::from_gvk_with_plural(&group, plural);
        Api::<DynamicObject>::all_with(lab.client(), &resource)
    };
    let (policies, bindings) = (
        of("ValidatingAdmissionPolicy", "validatingadmissionpolicies"),
        of("ValidatingAdmissionPolicyBinding", "validatingadmissionpolicybindings"),
    );
    let params = PatchParams::apply("somebody");
    for (api, object) in [&policies, &bindings].into_iter().zip(policy()) {
        let name = object["metadata"]["name"].as_str().expect("a name").to_owned();
        lab.server.block_on(api.patch(&name, &params, &Patch::Apply(&object))).expect("policies can be made");
    }
    // Policies are in effect a little later.
    let probe = json!({
        "apiVersion": "apps/v1", "kind": "DaemonSet", "metadata": { "name": "probe", "namespace": SPACE },
        "spec": {
            "selector": { "matchLabels": { "a": "b" } },
            "template": { "metadata": { "labels": { "a": "b" } }, "spec": { "containers": [{ "name": "c", "image": "i" }] } },
        },
    });
    let dry = PatchParams { dry_run: true, ..PatchParams::apply("somebody") };
    wait_until("the policy to be in effect", PATIENCE, || {
        std::thread::sleep(std::time::Duration::from_millis(100));
        let taken = lab.server.block_on(lab.api("DaemonSet").patch("probe", &dry, &Patch::Apply(&probe)));
        taken.is_err().then_some(())
    });
    let operator = start(&lab, |_| ());
    lab.cluster(json!({}));
    let said = lab.wait_condition("KVCacheCluster", "c", ["Degraded", "True", "Forbidden"]);
    assert!(said.contains("DaemonSet/cache/c-agent") && said.contains("no folders of nodes here"), "{said}");
    lab.wait_condition("KVCacheCluster", "c", ["Ready", "False", "Forbidden"]);
    for (kind, name) in
        [("ConfigMap", "c-connection"), ("Service", "c-controlplane"), ("StatefulSet", "c-controlplane")]
    {
        lab.wait_for(kind, name);
    }
    assert!(lab.get("DaemonSet", "c-agent").is_none());
    let failed = operator.metric("reprise_operator_reconciles_total", "failed");
    assert_eq!(failed, 0.0, "it is said, and no error of a reconcile");

    let deleted = lab.server.block_on(bindings.delete("no-daemonsets", &kube::api::DeleteParams::default()));
    deleted.expect("whoever made it takes it back");
    lab.wait_for("DaemonSet", "c-agent");
    lab.wait_condition("KVCacheCluster", "c", ["Accepted", "True", "AsDesired"]);
    operator.kill();
}

#[test]
fn a_cluster_in_a_namespace_that_goes_is_held_said_so_and_let_go() {
    let lab = Lab::new();
    let operator = start(&lab, |_| ());
    running(&lab, json!({}));
    sessions(&lab, "n1", 1);
    wait_held(&lab, "KVCacheCluster", "c");
    // Plays the controller of namespaces; from then on nothing new is taken there.
    lab.delete("Namespace", SPACE);
    lab.delete("KVCacheCluster", "c");
    lab.delete("ConfigMap", "c-agent");
    sessions(&lab, "n1", 1);
    let said = lab.wait_condition("KVCacheCluster", "c", BLOCKED);
    assert!(said.contains("n1 (1)"), "{said}");
    let said = lab.wait_condition("KVCacheCluster", "c", ["Degraded", "True", "Forbidden"]);
    assert!(said.contains("ConfigMap/cache/c-agent") && said.contains("being terminated"), "{said}");
    sessions(&lab, "n1", 1);
    std::thread::sleep(SETTLED);
    assert!(lab.get("ConfigMap", "c-agent").is_none(), "it cannot be made again");
    assert!(lab.get("CacheNode", "n1").is_some(), "its agents are told nothing else");
    sessions(&lab, "n1", 0);
    wait_gone(&lab, "KVCacheCluster", "c");
    operator.kill();
}

#[test]
fn what_engines_hold_is_named_by_the_hook_with_its_rights() {
    let lab = Lab::new();
    let operator = start(&lab, |_| ());
    running(&lab, json!({}));
    sessions(&lab, "n1", 1);
    wait_held(&lab, "KVCacheCluster", "c");
    wait_held(&lab, "SSDPool", "p");
    let name = grant(&lab, "reprise-delete", |_| ());
    let files = lab.operator_files("hook").as_user(&lab.server, &User { name: &name, group: None });
    let mut command =
        files.command(&["delete", "--release", "r", "--namespace", SYSTEM, "--timeout-seconds", "30"]);
    let output = command.output().expect("the operator can be started");
    let words = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{words}");
    for named in [&format!("{SPACE}/c"), "SSDPool", FINALIZER] {
        assert!(words.contains(named), "{named}: {words}");
    }
    assert!(holds(&lab, "KVCacheCluster", "c"), "it is somebody else's");
    operator.kill();
}
