//! Conditions depend only on objects: concurrent and successive operators report the same conditions.

use std::collections::BTreeMap;

use kube::ResourceExt;
use kube::api::{Patch, PatchParams};
use reprise_e2e::{Operator, PATIENCE, wait_until};
use serde_json::{Value, json};

use crate::operator::convergence::annotate;
use crate::operator::field_ownership::{edit, wait_restored};
use crate::operator::test_cluster::{NAMESPACE, TestCluster, UNREACHABLE_ADDRESS};

/// Number of edits after which an operator limits its write-backs.
const EDITS: usize = 5;
/// Number of reconciles of each operator that the test waits for.
const ROUNDS: usize = 5;

/// Number of successful reconciles of a kind.
pub(crate) fn reconciles(operator: &Operator, kind: &str) -> f64 {
    operator.metric("reprise_operator_reconciles_total", &format!("kind=\"{kind}\",result=\"done\""))
}

/// Conditions by type: status, reason and message.
fn conditions(k8s: &TestCluster, kind: &str, name: &str) -> BTreeMap<String, [Value; 3]> {
    let object = k8s.wait_for(kind, name);
    let all = object.data["status"]["conditions"].as_array().cloned().unwrap_or_default();
    let of = |one: Value| {
        let kind = one["type"].as_str().unwrap_or_default().to_owned();
        (kind, ["status", "reason", "message"].map(|field| one[field].clone()))
    };
    all.into_iter().map(of).collect()
}

/// Edits the same fields until operators limit their write-backs. An operator restores each edit.
fn dispute(k8s: &TestCluster) {
    let configuration = k8s.wait_for("ConfigMap", "c-agent").data["data"].clone();
    k8s.wait_for("CacheNode", "n1");
    for round in 0..EDITS {
        edit(k8s, "ConfigMap", "c-agent", &json!({ "data": { "agent.toml": format!("# {round}") } }));
        wait_restored(k8s, "ConfigMap", "c-agent", "/data", Some(&configuration));
        edit(k8s, "CacheNode", "n1", &json!({ "spec": { "mode": "Draining" } }));
        wait_restored(k8s, "CacheNode", "n1", "/spec/mode", Some(&json!("Active")));
    }
}

/// Asserts that no operator writes anything while each reconciles the cluster several times.
fn assert_agree(k8s: &TestCluster, operators: &[&Operator]) {
    k8s.settle();
    let conditions_before = conditions(k8s, "KVCacheCluster", "c");
    for round in 0..ROUNDS {
        let before: Vec<f64> = operators.iter().map(|one| reconciles(one, "KVCacheCluster")).collect();
        let version = annotate(k8s, "KVCacheCluster/c", &round.to_string());
        wait_until("each operator reconciles the cluster", PATIENCE, || {
            let again = |(one, before): (&&Operator, &f64)| reconciles(one, "KVCacheCluster") > *before;
            operators.iter().zip(&before).all(again).then_some(())
        });
        let found = k8s.wait_for("KVCacheCluster", "c");
        assert_eq!(
            found.resource_version(),
            Some(version),
            "an operator wrote another status: {conditions_before:#?} {:#?}",
            conditions(k8s, "KVCacheCluster", "c")
        );
    }
    assert_eq!(conditions(k8s, "KVCacheCluster", "c"), conditions_before);
}

#[test]
fn operators_with_different_write_back_history_write_same_conditions() {
    let k8s = TestCluster::new();
    let first = k8s.operator();
    k8s.cluster(json!({}));
    dispute(&k8s);
    wait_until("a write-back of each edit is counted", PATIENCE, || {
        (first.metric("reprise_operator_put_backs_total", "") >= 2.0 * EDITS as f64).then_some(())
    });
    // Its lease is in another namespace, so that both operators are active.
    let files = k8s
        .env
        .operator(&k8s.server, "second", NAMESPACE)
        .control_plane(&format!("{NAMESPACE}/c"), UNREACHABLE_ADDRESS);
    let second = files.start().expect("the operator starts");
    wait_until("the second operator is active", PATIENCE, || {
        (reconciles(&second, "KVCacheCluster") >= 1.0).then_some(())
    });
    assert_agree(&k8s, &[&first, &second]);
    first.kill();
    second.kill();
}

#[test]
fn restarted_operator_reports_same_conditions() {
    let k8s = TestCluster::new();
    // Another writer has created the CacheNode of one node.
    k8s.apply_resource("CacheNode", "n2", json!({ "nodeName": "n2", "mode": "Cordoned" }));
    let operator = k8s.operator();
    k8s.cluster(json!({}));
    k8s.wait_condition("KVCacheCluster", "c", ["Ready", "False", "Conflict"]);
    dispute(&k8s);
    assert_agree(&k8s, &[&operator]);
    let reported = conditions(&k8s, "KVCacheCluster", "c");
    let version = k8s.wait_for("KVCacheCluster", "c").resource_version();
    assert!(operator.terminate().success());

    let next = k8s.operator();
    wait_until("the new operator reconciles the cluster and the nodes", PATIENCE, || {
        ["KVCacheCluster", "Node"].iter().all(|kind| reconciles(&next, kind) >= 1.0).then_some(())
    });
    assert_agree(&k8s, &[&next]);
    assert_eq!(conditions(&k8s, "KVCacheCluster", "c"), reported);
    let marked = k8s.wait_for("KVCacheCluster", "c").resource_version();
    assert_ne!(marked, version, "the annotation was written");
    next.kill();
}

#[test]
fn own_status_write_triggers_no_reconcile_but_foreign_write_does() {
    let (k8s, operator) = TestCluster::with_operator();
    k8s.pool("p", "/var/lib/pool", json!({}));
    k8s.cluster(json!({ "pools": [{ "name": "p" }], "agents": { "nodeSelector": { "name": "n1" } } }));
    wait_until("n1 has its claim", PATIENCE, || {
        k8s.get("CacheNode", "n1")?.data["spec"]["claims"].is_array().then_some(())
    });
    k8s.agent_reports("n1", "Open");
    k8s.wait_condition("SSDPool", "p", ["Ready", "True", "AsDesired"]);
    k8s.make_stateful_sets_ready();
    k8s.wait_condition("KVCacheCluster", "c", ["AgentsReady", "True", "AsDesired"]);
    k8s.settle();
    // The next periodic reconcile is a minute after this one, so none happens during the test.
    let before = reconciles(&operator, "SSDPool");
    annotate(&k8s, "SSDPool/p", "begun");
    wait_until("the pool is reconciled", PATIENCE, || {
        (reconciles(&operator, "SSDPool") > before).then_some(())
    });
    k8s.settle();

    // One report causes one reconcile. The status that it writes causes none.
    let before = reconciles(&operator, "SSDPool");
    k8s.agent_reports("n1", "Faulted");
    k8s.wait_condition("SSDPool", "p", ["Ready", "False", "DeviceFailed"]);
    k8s.settle();
    assert_eq!(reconciles(&operator, "SSDPool") - before, 1.0);

    // A status that another writer changes is restored.
    let before = reconciles(&operator, "SSDPool");
    let written = k8s.wait_for("SSDPool", "p").data["status"]["nodes"].clone();
    let status = json!({ "apiVersion": "reprise.dev/v1alpha1", "kind": "SSDPool", "metadata": { "name": "p" },
        "status": { "nodes": { "selected": 77, "ready": 0, "refused": 0 } } });
    let params = PatchParams::apply("kubectl-edit").force();
    let edited = k8s.server.block_on(k8s.api("SSDPool").patch_status("p", &params, &Patch::Apply(&status)));
    edited.expect("a forced apply is accepted");
    wait_restored(&k8s, "SSDPool", "p", "/status/nodes", Some(&written));
    assert!(reconciles(&operator, "SSDPool") > before);
}
