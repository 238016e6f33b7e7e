//! Other writers of fields that only the operator owns: the operator puts them back, reports and counts it, and paces itself.

use std::time::Duration;

use k8s_openapi::api::core::v1::Event;
use kube::Api;
use kube::api::{ListParams, Patch, PatchParams};
use reprise_e2e::{Operator, PATIENCE, wait_until};
use serde_json::{Value, json};

use crate::agreement::reconciles;
use crate::convergence::{mark, settle};
use crate::lab::{Lab, SETTLED};

/// Somebody with an editor.
const EDITOR: &str = "kubectl-edit";

/// Changes fields as `kubectl edit` does: the editor owns them from then on.
pub(crate) fn edit(lab: &Lab, kind: &str, name: &str, fields: &Value) {
    let params = PatchParams { field_manager: Some(EDITOR.to_owned()), ..PatchParams::default() };
    let patched = lab.server.block_on(lab.api(kind).patch(name, &params, &Patch::Merge(fields)));
    patched.unwrap_or_else(|error| panic!("{kind} {name} does not take {fields}: {error}"));
}

/// Notes of warnings about an object for a reason.
fn warnings(lab: &Lab, kind: &str, name: &str, reason: &str) -> Vec<String> {
    let events: Api<Event> = Api::all(lab.client());
    let events = lab.server.block_on(events.list(&ListParams::default())).expect("the API server answers");
    let is_it = |event: &Event| {
        let about = &event.involved_object;
        about.kind.as_deref() == Some(kind)
            && about.name.as_deref() == Some(name)
            && event.reason.as_deref() == Some(reason)
            && event.type_.as_deref() == Some("Warning")
    };
    events.items.into_iter().filter(is_it).filter_map(|event| event.message).collect()
}

/// Waits for a warning with these words.
fn wait_warning(lab: &Lab, about: (&str, &str), reason: &str, words: &[&str]) {
    let what = format!("{about:?} has an event {reason} with {words:?}");
    wait_until(&what, PATIENCE, || {
        std::thread::sleep(Duration::from_millis(50));
        let notes = warnings(lab, about.0, about.1, reason);
        notes.iter().any(|note| words.iter().all(|word| note.contains(word))).then_some(())
    });
}

fn counted(operator: &Operator, kind: &str) -> f64 {
    operator.metric("reprise_operator_put_backs_total", &format!("kind=\"{kind}\""))
}

/// Waits until something of an object is so again.
pub(crate) fn wait_again(lab: &Lab, kind: &str, name: &str, pointer: &str, wanted: Option<&Value>) {
    wait_until(&format!("{kind} {name}: {pointer} is put back"), PATIENCE, || {
        std::thread::sleep(Duration::from_millis(20));
        (lab.get(kind, name)?.data.pointer(pointer) == wanted).then_some(())
    });
}

#[test]
fn an_edit_of_what_is_the_operators_alone_is_put_back_and_its_editor_is_named() {
    let lab = Lab::new();
    let operator = lab.operator();
    lab.cluster(json!({}));
    let (binding, node) = ("reprise-cache-c-agent", "n1");
    let configuration = lab.wait_for("ConfigMap", "c-agent").data["data"].clone();
    let subjects = lab.wait_for("ClusterRoleBinding", binding).data["subjects"].clone();
    lab.wait_for("CacheNode", node);
    assert_eq!(
        ["ConfigMap", "ClusterRoleBinding", "CacheNode"].map(|kind| counted(&operator, kind)),
        [0.0; 3]
    );

    edit(&lab, "ConfigMap", "c-agent", &json!({ "data": { "agent.toml": "# mine now" } }));
    wait_again(&lab, "ConfigMap", "c-agent", "/data", Some(&configuration));
    wait_warning(&lab, ("KVCacheCluster", "c"), "SetBack", &[EDITOR, "c-agent", "agent.toml"]);
    assert!(counted(&operator, "ConfigMap") >= 1.0);

    // Rights above all.
    let mine =
        json!({ "subjects": [{ "kind": "User", "name": "me", "apiGroup": "rbac.authorization.k8s.io" }] });
    edit(&lab, "ClusterRoleBinding", binding, &mine);
    wait_again(&lab, "ClusterRoleBinding", binding, "/subjects", Some(&subjects));
    wait_warning(&lab, ("KVCacheCluster", "c"), "SetBack", &[EDITOR, binding, "subjects"]);
    assert!(counted(&operator, "ClusterRoleBinding") >= 1.0);

    // What is removed is nobody's any more, and comes back all the same.
    edit(&lab, "ConfigMap", "c-connection", &json!({ "data": { "socket": null } }));
    let socket = json!("/run/reprise/agent.sock");
    wait_again(&lab, "ConfigMap", "c-connection", "/data/socket", Some(&socket));
    wait_warning(&lab, ("KVCacheCluster", "c"), "SetBack", &["removed", "c-connection"]);

    edit(&lab, "CacheNode", node, &json!({ "spec": { "mode": "Draining" } }));
    wait_again(&lab, "CacheNode", node, "/spec/mode", Some(&json!("Active")));
    wait_warning(&lab, ("CacheNode", node), "SetBack", &[EDITOR, "spec.mode"]);
    assert!(counted(&operator, "CacheNode") >= 1.0);

    // A status is made of what is: somebody who writes something else there is named.
    let status = json!({ "apiVersion": "reprise.dev/v1alpha1", "kind": "KVCacheCluster", "metadata": { "name": "c" },
        "status": { "clusterID": "mine" } });
    let params = PatchParams::apply(EDITOR).force();
    let clusters = lab.api("KVCacheCluster");
    let written = lab.server.block_on(clusters.patch_status("c", &params, &Patch::Apply(&status)));
    let uid = json!(written.expect("by force everything is taken").metadata.uid);
    wait_again(&lab, "KVCacheCluster", "c", "/status/clusterID", Some(&uid));
    wait_warning(&lab, ("KVCacheCluster", "c"), "SetBack", &[EDITOR, "status.clusterID"]);
    assert!(counted(&operator, "KVCacheCluster") >= 1.0);
    operator.kill();
}

#[test]
fn what_somebody_adds_to_what_is_the_operators_alone_is_taken_away_and_named() {
    let lab = Lab::new();
    let operator = lab.operator();
    lab.pool("p", "/var/lib/p", json!({}));
    lab.cluster(json!({ "pools": [{ "name": "p" }] }));
    let (binding, node) = ("reprise-cache-c-agent", "n1");
    let subjects = lab.wait_for("ClusterRoleBinding", binding).data["subjects"].clone();
    let configuration = lab.wait_for("ConfigMap", "c-agent").data["data"].clone();
    let claims = wait_until("n1 to have its claim", PATIENCE, || {
        let claims = lab.get("CacheNode", node)?.data["spec"]["claims"].clone();
        claims.as_array().is_some_and(|claims| claims.len() == 1).then_some(claims)
    });

    // One more may do what agents may.
    let mut more = subjects.as_array().expect("subjects").clone();
    more.push(json!({ "kind": "User", "name": "me", "apiGroup": "rbac.authorization.k8s.io" }));
    edit(&lab, "ClusterRoleBinding", binding, &json!({ "subjects": more }));
    wait_again(&lab, "ClusterRoleBinding", binding, "/subjects", Some(&subjects));
    wait_warning(&lab, ("KVCacheCluster", "c"), "SetBack", &[EDITOR, binding, "subjects"]);

    // Of a map each entry is its writer's.
    edit(&lab, "ConfigMap", "c-agent", &json!({ "data": { "mine": "x" } }));
    wait_again(&lab, "ConfigMap", "c-agent", "/data", Some(&configuration));
    wait_warning(&lab, ("KVCacheCluster", "c"), "SetBack", &[EDITOR, "c-agent", "data.mine"]);

    // And of a list that is merged by names each item.
    let theirs =
        json!({ "pool": "theirs", "uid": "0", "generation": 1, "file": "/data/theirs", "size": "1Gi" });
    let mut more = claims.as_array().expect("claims").clone();
    more.push(theirs);
    edit(&lab, "CacheNode", node, &json!({ "spec": { "claims": more } }));
    wait_again(&lab, "CacheNode", node, "/spec/claims", Some(&claims));
    wait_warning(&lab, ("CacheNode", node), "SetBack", &[EDITOR, "spec.claims"]);

    // Nobody writes any more.
    let writes = || ["ConfigMap", "ClusterRoleBinding", "CacheNode"].map(|kind| counted(&operator, kind));
    let before = writes();
    assert!(before.iter().all(|count| *count >= 1.0), "{before:?}");
    std::thread::sleep(SETTLED);
    assert_eq!(writes(), before);
    operator.kill();
}

#[test]
fn an_object_that_is_edited_again_and_again_is_put_back_once_a_minute_and_no_condition_changes() {
    let lab = Lab::new();
    let operator = lab.operator();
    lab.cluster(json!({}));
    let before = lab.wait_for("ConfigMap", "c-agent").data["data"].clone();
    let conditions = || lab.wait_for("KVCacheCluster", "c").data["status"]["conditions"].clone();
    lab.wait_condition("KVCacheCluster", "c", ["Ready", "False", "Progressing"]);
    settle(&lab);
    let reported = conditions();
    for round in 0..5 {
        edit(&lab, "ConfigMap", "c-agent", &json!({ "data": { "agent.toml": format!("# {round}") } }));
        wait_again(&lab, "ConfigMap", "c-agent", "/data", Some(&before));
    }
    wait_warning(&lab, ("KVCacheCluster", "c"), "SetBack", &[EDITOR, "c-agent", "once a minute"]);
    wait_until("five are counted", PATIENCE, || (counted(&operator, "ConfigMap") >= 5.0).then_some(()));
    // The sixth edit stays until its turn, and nothing else waits for that.
    edit(&lab, "ConfigMap", "c-agent", &json!({ "data": { "agent.toml": "# at last" } }));
    edit(&lab, "ConfigMap", "c-connection", &json!({ "data": { "socket": "/mine" } }));
    wait_again(&lab, "ConfigMap", "c-connection", "/data/socket", Some(&json!("/run/reprise/agent.sock")));
    let already = reconciles(&operator, "KVCacheCluster");
    mark(&lab, "KVCacheCluster/c", "look");
    wait_until("the cluster is reconciled", PATIENCE, || {
        (reconciles(&operator, "KVCacheCluster") > already).then_some(())
    });
    assert_eq!(lab.wait_for("ConfigMap", "c-agent").data["data"]["agent.toml"], "# at last");
    assert_eq!(conditions(), reported);
    // At its turn it is put back, and so it is by a process that knows nothing of the edits before.
    assert!(operator.terminate().success());
    let next = lab.operator();
    wait_again(&lab, "ConfigMap", "c-agent", "/data", Some(&before));
    wait_until("one is counted", PATIENCE, || (counted(&next, "ConfigMap") >= 1.0).then_some(()));
    assert_eq!(conditions(), reported);
    next.kill();
}

#[test]
fn a_cache_node_that_somebody_made_is_left_and_said_until_it_is_gone() {
    let lab = Lab::new();
    let made = json!({
        "apiVersion": "reprise.dev/v1alpha1", "kind": "CacheNode", "metadata": { "name": "n1" },
        "spec": { "nodeName": "n1", "mode": "Cordoned" },
    });
    lab.apply(&made);
    let operator = lab.operator();
    lab.cluster(json!({}));
    lab.wait_for("CacheNode", "n2");
    let said = lab.wait_condition("KVCacheCluster", "c", ["Ready", "False", "Conflict"]);
    assert!(said.contains("CacheNode n1") && said.contains("kubectl delete cachenode n1"), "{said}");
    wait_warning(&lab, ("CacheNode", "n1"), "Conflict", &["was not made by the operator"]);
    let left = lab.wait_for("CacheNode", "n1");
    assert_eq!(left.data["spec"], made["spec"]);
    lab.delete("CacheNode", "n1");
    wait_again(&lab, "CacheNode", "n1", "/spec/clusterRef/name", Some(&json!("c")));
    lab.wait_condition("KVCacheCluster", "c", ["Ready", "False", "Progressing"]);

    // One of the operator's whose label somebody has taken is still its own.
    edit(&lab, "CacheNode", "n1", &json!({ "metadata": { "labels": null } }));
    wait_until("the label is put back", PATIENCE, || {
        lab.get("CacheNode", "n1")?.metadata.labels.filter(|labels| !labels.is_empty()).map(|_| ())
    });
    wait_warning(&lab, ("CacheNode", "n1"), "SetBack", &["removed"]);
    operator.kill();
}

#[test]
fn what_an_agent_says_of_others_who_write_its_status_becomes_an_event_and_the_conditions_of_both_stay() {
    let lab = Lab::new();
    let operator = lab.operator();
    lab.cluster(json!({}));
    lab.wait_for("CacheNode", "n1");
    // Drained at a control plane that is away, of which the operator says something.
    lab.merge("Node", "n1", &json!({ "spec": { "unschedulable": true } }));
    lab.wait_condition("CacheNode", "n1", ["ModeApplied", "False", "ControlPlaneUnreachable"]);
    let words = "conflict with \"kubectl-edit\": .status.capacity.dramTotal";
    lab.agent_says("n1", "Open", |status| {
        let mut contested = status["conditions"][0].clone();
        (contested["type"], contested["reason"]) = (json!("StatusContested"), json!("FieldConflict"));
        contested["message"] = json!(words);
        status["conditions"].as_array_mut().expect("made above").push(contested);
    });
    wait_warning(&lab, ("CacheNode", "n1"), "FieldConflict", &[words]);
    wait_until("it is counted", PATIENCE, || (counted(&operator, "CacheNode") >= 1.0).then_some(()));
    let status = lab.wait_for("CacheNode", "n1").data["status"].clone();
    let conditions = status["conditions"].as_array().expect("conditions").iter();
    let kinds: Vec<&str> = conditions.filter_map(|one| one["type"].as_str()).collect();
    for kind in ["AgentReady", "ModeApplied", "StatusContested"] {
        assert!(kinds.contains(&kind), "each keeps its own: {kinds:?}");
    }
    operator.kill();
}
