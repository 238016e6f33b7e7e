//! Other writers of fields that only the operator owns. The operator restores, reports and counts each such
//! edit, and restores one object at most once a minute after five edits.

use k8s_openapi::api::core::v1::Event;
use kube::Api;
use kube::api::{ListParams, Patch, PatchParams};
use reprise_e2e::{Operator, PATIENCE, wait_until};
use serde_json::{Value, json};

use crate::operator::agreement::reconciles;
use crate::operator::convergence::annotate;
use crate::operator::test_cluster::TestCluster;

/// Field manager of a user with an editor.
const EDITOR: &str = "kubectl-edit";

/// Changes fields as `kubectl edit` does: the editor owns them from then on.
pub(crate) fn edit(k8s: &TestCluster, kind: &str, name: &str, fields: &Value) {
    let params = PatchParams { field_manager: Some(EDITOR.to_owned()), ..PatchParams::default() };
    let patched = k8s.server.block_on(k8s.api(kind).patch(name, &params, &Patch::Merge(fields)));
    patched.unwrap_or_else(|error| panic!("cannot patch {kind} {name} with {fields}: {error}"));
}

/// Messages of warning events about an object with this reason.
fn warnings(k8s: &TestCluster, kind: &str, name: &str, reason: &str) -> Vec<String> {
    let events: Api<Event> = Api::all(k8s.client());
    let events = k8s.server.block_on(events.list(&ListParams::default())).expect("the API server answers");
    let is_it = |event: &Event| {
        let about = &event.involved_object;
        about.kind.as_deref() == Some(kind)
            && about.name.as_deref() == Some(name)
            && event.reason.as_deref() == Some(reason)
            && event.type_.as_deref() == Some("Warning")
    };
    events.items.into_iter().filter(is_it).filter_map(|event| event.message).collect()
}

/// Waits for a warning event whose message contains these words.
pub(crate) fn wait_warning(k8s: &TestCluster, about: (&str, &str), reason: &str, words: &[&str]) {
    let what = format!("{about:?} has an event {reason} with {words:?}");
    wait_until(&what, PATIENCE, || {
        let notes = warnings(k8s, about.0, about.1, reason);
        notes.iter().any(|note| words.iter().all(|word| note.contains(word))).then_some(())
    });
}

fn put_backs(operator: &Operator, kind: &str) -> f64 {
    operator.metric("reprise_operator_put_backs_total", &format!("kind=\"{kind}\""))
}

/// Waits until a field of an object has its original value.
pub(crate) fn wait_restored(
    k8s: &TestCluster,
    kind: &str,
    name: &str,
    pointer: &str,
    wanted: Option<&Value>,
) {
    wait_until(&format!("{kind} {name}: {pointer} is restored"), PATIENCE, || {
        (k8s.get(kind, name)?.data.pointer(pointer) == wanted).then_some(())
    });
}

#[test]
fn edits_of_owned_fields_are_restored_and_their_manager_named() {
    let (k8s, operator) = TestCluster::with_operator();
    k8s.cluster(json!({}));
    let (binding, node) = ("reprise-cache-c-agent", "n1");
    let configuration = k8s.wait_for("ConfigMap", "c-agent").data["data"].clone();
    let subjects = k8s.wait_for("ClusterRoleBinding", binding).data["subjects"].clone();
    k8s.wait_for("CacheNode", node);
    assert_eq!(
        ["ConfigMap", "ClusterRoleBinding", "CacheNode"].map(|kind| put_backs(&operator, kind)),
        [0.0; 3]
    );

    edit(&k8s, "ConfigMap", "c-agent", &json!({ "data": { "agent.toml": "# mine now" } }));
    wait_restored(&k8s, "ConfigMap", "c-agent", "/data", Some(&configuration));
    wait_warning(&k8s, ("KVCacheCluster", "c"), "SetBack", &[EDITOR, "c-agent", "agent.toml"]);
    assert!(put_backs(&operator, "ConfigMap") >= 1.0);

    // Role bindings.
    let mine =
        json!({ "subjects": [{ "kind": "User", "name": "me", "apiGroup": "rbac.authorization.k8s.io" }] });
    edit(&k8s, "ClusterRoleBinding", binding, &mine);
    wait_restored(&k8s, "ClusterRoleBinding", binding, "/subjects", Some(&subjects));
    wait_warning(&k8s, ("KVCacheCluster", "c"), "SetBack", &[EDITOR, binding, "subjects"]);
    assert!(put_backs(&operator, "ClusterRoleBinding") >= 1.0);

    // A removed field has no manager. It is restored nevertheless.
    edit(&k8s, "ConfigMap", "c-connection", &json!({ "data": { "socket": null } }));
    let socket = json!("/run/reprise/agent.sock");
    wait_restored(&k8s, "ConfigMap", "c-connection", "/data/socket", Some(&socket));
    wait_warning(&k8s, ("KVCacheCluster", "c"), "SetBack", &["removed", "c-connection"]);

    edit(&k8s, "CacheNode", node, &json!({ "spec": { "mode": "Draining" } }));
    wait_restored(&k8s, "CacheNode", node, "/spec/mode", Some(&json!("Active")));
    wait_warning(&k8s, ("CacheNode", node), "SetBack", &[EDITOR, "spec.mode"]);
    assert!(put_backs(&operator, "CacheNode") >= 1.0);

    // Status fields: the manager that wrote another value is named.
    let status = json!({ "apiVersion": "reprise.dev/v1alpha1", "kind": "KVCacheCluster", "metadata": { "name": "c" },
        "status": { "clusterID": "mine" } });
    let params = PatchParams::apply(EDITOR).force();
    let clusters = k8s.api("KVCacheCluster");
    let written = k8s.server.block_on(clusters.patch_status("c", &params, &Patch::Apply(&status)));
    let uid = json!(written.expect("a forced apply is accepted").metadata.uid);
    wait_restored(&k8s, "KVCacheCluster", "c", "/status/clusterID", Some(&uid));
    wait_warning(&k8s, ("KVCacheCluster", "c"), "SetBack", &[EDITOR, "status.clusterID"]);
    assert!(put_backs(&operator, "KVCacheCluster") >= 1.0);
}

#[test]
fn additions_to_owned_lists_and_maps_are_removed_and_their_manager_named() {
    let (k8s, operator) = TestCluster::with_operator();
    k8s.pool("p", "/var/lib/p", json!({}));
    k8s.cluster(json!({ "pools": [{ "name": "p" }] }));
    let (binding, node) = ("reprise-cache-c-agent", "n1");
    let subjects = k8s.wait_for("ClusterRoleBinding", binding).data["subjects"].clone();
    let configuration = k8s.wait_for("ConfigMap", "c-agent").data["data"].clone();
    let claims = wait_until("n1 to have its claim", PATIENCE, || {
        let claims = k8s.get("CacheNode", node)?.data["spec"]["claims"].clone();
        claims.as_array().is_some_and(|claims| claims.len() == 1).then_some(claims)
    });

    // An additional subject gets the rights of agents.
    let mut more = subjects.as_array().expect("subjects").clone();
    more.push(json!({ "kind": "User", "name": "me", "apiGroup": "rbac.authorization.k8s.io" }));
    edit(&k8s, "ClusterRoleBinding", binding, &json!({ "subjects": more }));
    wait_restored(&k8s, "ClusterRoleBinding", binding, "/subjects", Some(&subjects));
    wait_warning(&k8s, ("KVCacheCluster", "c"), "SetBack", &[EDITOR, binding, "subjects"]);

    // In a map, the writer of each entry owns it.
    edit(&k8s, "ConfigMap", "c-agent", &json!({ "data": { "mine": "x" } }));
    wait_restored(&k8s, "ConfigMap", "c-agent", "/data", Some(&configuration));
    wait_warning(&k8s, ("KVCacheCluster", "c"), "SetBack", &[EDITOR, "c-agent", "data.mine"]);

    // In a list with map semantics, the writer of each item owns it.
    let foreign =
        json!({ "pool": "foreign", "uid": "0", "generation": 1, "file": "/data/foreign", "size": "1Gi" });
    let mut more = claims.as_array().expect("claims").clone();
    more.push(foreign);
    edit(&k8s, "CacheNode", node, &json!({ "spec": { "claims": more } }));
    wait_restored(&k8s, "CacheNode", node, "/spec/claims", Some(&claims));
    wait_warning(&k8s, ("CacheNode", node), "SetBack", &[EDITOR, "spec.claims"]);

    // The operator does not write again.
    let writes = || ["ConfigMap", "ClusterRoleBinding", "CacheNode"].map(|kind| put_backs(&operator, kind));
    let before = writes();
    assert!(before.iter().all(|count| *count >= 1.0), "{before:?}");
    k8s.settle();
    assert_eq!(writes(), before);
}

#[test]
fn repeated_edits_are_restored_once_a_minute_without_condition_changes() {
    let (k8s, operator) = TestCluster::with_operator();
    k8s.cluster(json!({}));
    let before = k8s.wait_for("ConfigMap", "c-agent").data["data"].clone();
    let conditions = || k8s.wait_for("KVCacheCluster", "c").data["status"]["conditions"].clone();
    k8s.wait_condition("KVCacheCluster", "c", ["Ready", "False", "Progressing"]);
    k8s.settle();
    let reported = conditions();
    for round in 0..5 {
        edit(&k8s, "ConfigMap", "c-agent", &json!({ "data": { "agent.toml": format!("# {round}") } }));
        wait_restored(&k8s, "ConfigMap", "c-agent", "/data", Some(&before));
    }
    wait_warning(&k8s, ("KVCacheCluster", "c"), "SetBack", &[EDITOR, "c-agent", "once a minute"]);
    wait_until("five write-backs are counted", PATIENCE, || {
        (put_backs(&operator, "ConfigMap") >= 5.0).then_some(())
    });
    // The sixth edit remains until a minute has passed. Other objects and reconciles do not wait for it.
    edit(&k8s, "ConfigMap", "c-agent", &json!({ "data": { "agent.toml": "# at last" } }));
    edit(&k8s, "ConfigMap", "c-connection", &json!({ "data": { "socket": "/mine" } }));
    wait_restored(&k8s, "ConfigMap", "c-connection", "/data/socket", Some(&json!("/run/reprise/agent.sock")));
    let already = reconciles(&operator, "KVCacheCluster");
    annotate(&k8s, "KVCacheCluster/c", "resync");
    wait_until("the cluster is reconciled", PATIENCE, || {
        (reconciles(&operator, "KVCacheCluster") > already).then_some(())
    });
    assert_eq!(k8s.wait_for("ConfigMap", "c-agent").data["data"]["agent.toml"], "# at last");
    assert_eq!(conditions(), reported);
    // A new process restores it as well, although it does not know the earlier edits.
    assert!(operator.terminate().success());
    let next = k8s.operator();
    wait_restored(&k8s, "ConfigMap", "c-agent", "/data", Some(&before));
    wait_until("one write-back is counted", PATIENCE, || {
        (put_backs(&next, "ConfigMap") >= 1.0).then_some(())
    });
    assert_eq!(conditions(), reported);
    next.kill();
}

#[test]
fn foreign_cache_node_is_a_conflict_until_deleted() {
    let k8s = TestCluster::new();
    let foreign = json!({
        "apiVersion": "reprise.dev/v1alpha1", "kind": "CacheNode", "metadata": { "name": "n1" },
        "spec": { "nodeName": "n1", "mode": "Cordoned" },
    });
    k8s.apply(&foreign);
    let _operator = k8s.operator();
    k8s.cluster(json!({}));
    k8s.wait_for("CacheNode", "n2");
    k8s.wait_message(
        "KVCacheCluster",
        "c",
        ["Ready", "False", "Conflict"],
        &["CacheNode n1", "kubectl delete cachenode n1"],
    );
    let found = k8s.wait_for("CacheNode", "n1");
    assert_eq!(found.data["spec"], foreign["spec"]);
    k8s.delete("CacheNode", "n1");
    wait_restored(&k8s, "CacheNode", "n1", "/spec/clusterRef/name", Some(&json!("c")));
    k8s.wait_condition("KVCacheCluster", "c", ["Ready", "False", "Progressing"]);

    // A CacheNode without its label still belongs to the operator.
    edit(&k8s, "CacheNode", "n1", &json!({ "metadata": { "labels": null } }));
    wait_until("the label is restored", PATIENCE, || {
        k8s.get("CacheNode", "n1")?.metadata.labels.filter(|labels| !labels.is_empty()).map(|_| ())
    });
    wait_warning(&k8s, ("CacheNode", "n1"), "SetBack", &["removed"]);
}

#[test]
fn contested_agent_status_keeps_conditions_of_agent_and_operator() {
    let (k8s, _operator) = TestCluster::with_operator();
    k8s.cluster(json!({}));
    k8s.wait_for("CacheNode", "n1");
    // The unreachable control plane makes the operator add a condition.
    k8s.merge("Node", "n1", &json!({ "spec": { "unschedulable": true } }));
    k8s.wait_condition("CacheNode", "n1", ["ModeApplied", "False", "ControlPlaneUnreachable"]);
    k8s.agent_reports_with("n1", "Open", |status| {
        let mut contested = status["conditions"][0].clone();
        (contested["type"], contested["reason"]) = (json!("StatusContested"), json!("FieldConflict"));
        status["conditions"].as_array_mut().expect("an array").push(contested);
    });
    k8s.settle();
    let status = k8s.wait_for("CacheNode", "n1").data["status"].clone();
    let conditions = status["conditions"].as_array().expect("conditions").iter();
    let kinds: Vec<&str> = conditions.filter_map(|one| one["type"].as_str()).collect();
    for kind in ["AgentReady", "ModeApplied", "StatusContested"] {
        assert!(kinds.contains(&kind), "operator and agent keep their own conditions: {kinds:?}");
    }
}
