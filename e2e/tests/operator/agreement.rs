//! Conditions are derived from objects alone: two operators at once, and two one after the other, report the same.

use std::collections::BTreeMap;

use kube::ResourceExt;
use kube::api::{Patch, PatchParams};
use reprise_e2e::{Operator, PATIENCE, wait_until};
use serde_json::{Value, json};

use crate::convergence::{mark, settle};
use crate::lab::{Lab, NOBODY, SPACE};
use crate::put_back::{edit, wait_again};

/// Edits after which an operator paces its write-backs.
const EDITS: usize = 5;
/// Reconciles of each operator that the test waits for.
const ROUNDS: usize = 5;

/// Reconciles of a kind that have succeeded.
pub(crate) fn reconciles(operator: &Operator, kind: &str) -> f64 {
    operator.metric("reprise_operator_reconciles_total{", &format!("kind=\"{kind}\",result=\"done\""))
}

/// Conditions by type: status, reason and message.
fn conditions(lab: &Lab, kind: &str, name: &str) -> BTreeMap<String, [Value; 3]> {
    let object = lab.wait_for(kind, name);
    let all = object.data["status"]["conditions"].as_array().cloned().unwrap_or_default();
    let of = |one: Value| {
        let kind = one["type"].as_str().unwrap_or_default().to_owned();
        (kind, ["status", "reason", "message"].map(|field| one[field].clone()))
    };
    all.into_iter().map(of).collect()
}

/// Another writer changes the same fields until operators pace themselves. Each time an operator puts them back.
fn dispute(lab: &Lab) {
    let configuration = lab.wait_for("ConfigMap", "c-agent").data["data"].clone();
    lab.wait_for("CacheNode", "n1");
    for round in 0..EDITS {
        edit(lab, "ConfigMap", "c-agent", &json!({ "data": { "agent.toml": format!("# {round}") } }));
        wait_again(lab, "ConfigMap", "c-agent", "/data", Some(&configuration));
        edit(lab, "CacheNode", "n1", &json!({ "spec": { "mode": "Draining" } }));
        wait_again(lab, "CacheNode", "n1", "/spec/mode", Some(&json!("Active")));
    }
}

/// Each of these operators reconciles the cluster again and again, and none of them writes anything.
fn assert_agree(lab: &Lab, operators: &[&Operator]) {
    settle(lab);
    let conditions_before = conditions(lab, "KVCacheCluster", "c");
    for round in 0..ROUNDS {
        let before: Vec<f64> = operators.iter().map(|one| reconciles(one, "KVCacheCluster")).collect();
        let version = mark(lab, "KVCacheCluster/c", &round.to_string());
        wait_until("each operator reconciles the cluster", PATIENCE, || {
            let again = |(one, before): (&&Operator, &f64)| reconciles(one, "KVCacheCluster") > *before;
            operators.iter().zip(&before).all(again).then_some(())
        });
        let found = lab.wait_for("KVCacheCluster", "c");
        assert_eq!(
            found.resource_version(),
            Some(version),
            "an operator has written another status: {conditions_before:#?} {:#?}",
            conditions(lab, "KVCacheCluster", "c")
        );
    }
    assert_eq!(conditions(lab, "KVCacheCluster", "c"), conditions_before);
}

#[test]
fn two_operators_of_which_one_has_put_back_fields_write_the_same_conditions() {
    let lab = Lab::new();
    let first = lab.operator();
    lab.cluster(json!({}));
    dispute(&lab);
    let put_back = first.metric("reprise_operator_put_backs_total", "");
    assert!(put_back >= 2.0 * EDITS as f64, "it has put back each edit, not {put_back}");
    // With a lease of its own, so that both work at once; and without the memory of the first.
    let files = lab.world.operator(&lab.server, "second", SPACE).control_plane(&format!("{SPACE}/c"), NOBODY);
    let second = files.start().expect("the operator starts");
    wait_until("the second one works", PATIENCE, || {
        (reconciles(&second, "KVCacheCluster") >= 1.0).then_some(())
    });
    assert_agree(&lab, &[&first, &second]);
    first.kill();
    second.kill();
}

#[test]
fn an_operator_that_starts_reports_what_the_one_before_it_reported() {
    let lab = Lab::new();
    // Another writer has made the CacheNode of one node.
    lab.apply(&json!({
        "apiVersion": "reprise.dev/v1alpha1", "kind": "CacheNode", "metadata": { "name": "n2" },
        "spec": { "nodeName": "n2", "mode": "Cordoned" },
    }));
    let operator = lab.operator();
    lab.cluster(json!({}));
    lab.wait_condition("KVCacheCluster", "c", ["Ready", "False", "Conflict"]);
    dispute(&lab);
    assert_agree(&lab, &[&operator]);
    let reported = conditions(&lab, "KVCacheCluster", "c");
    let version = lab.wait_for("KVCacheCluster", "c").resource_version();
    assert!(operator.terminate().success());

    let next = lab.operator();
    wait_until("it reconciles the cluster and the nodes", PATIENCE, || {
        ["KVCacheCluster", "Node"].iter().all(|kind| reconciles(&next, kind) >= 1.0).then_some(())
    });
    assert_agree(&lab, &[&next]);
    assert_eq!(conditions(&lab, "KVCacheCluster", "c"), reported);
    let marked = lab.wait_for("KVCacheCluster", "c").resource_version();
    assert_ne!(marked, version, "it was marked");
    next.kill();
}

#[test]
fn a_status_that_a_reconcile_writes_does_not_trigger_it_again_and_one_of_another_writer_does() {
    let lab = Lab::new();
    let operator = lab.operator();
    lab.pool("p", "/var/lib/pool", json!({}));
    lab.cluster(json!({ "pools": [{ "name": "p" }], "agents": { "nodeSelector": { "name": "n1" } } }));
    wait_until("n1 has its claim", PATIENCE, || {
        lab.get("CacheNode", "n1")?.data["spec"]["claims"].is_array().then_some(())
    });
    lab.agent_reports("n1", "Open");
    lab.wait_condition("SSDPool", "p", ["Ready", "True", "AsDesired"]);
    lab.play_stateful_sets();
    lab.wait_condition("KVCacheCluster", "c", ["AgentsReady", "True", "AsDesired"]);
    quiet(&operator);
    // So that no reconcile by the clock comes in between: the next one is a minute away.
    let before = reconciles(&operator, "SSDPool");
    mark(&lab, "SSDPool/p", "begun");
    wait_until("the pool is reconciled", PATIENCE, || {
        (reconciles(&operator, "SSDPool") > before).then_some(())
    });
    quiet(&operator);

    // One report, one reconcile, and the status that it writes is no reason for another one.
    let before = reconciles(&operator, "SSDPool");
    lab.agent_reports("n1", "Faulted");
    lab.wait_condition("SSDPool", "p", ["Ready", "False", "DeviceFailed"]);
    quiet(&operator);
    assert_eq!(reconciles(&operator, "SSDPool") - before, 1.0);

    // A status that another writer has changed is put back.
    let before = reconciles(&operator, "SSDPool");
    let written = lab.wait_for("SSDPool", "p").data["status"]["nodes"].clone();
    let status = json!({ "apiVersion": "reprise.dev/v1alpha1", "kind": "SSDPool", "metadata": { "name": "p" },
        "status": { "nodes": { "selected": 77, "ready": 0, "refused": 0 } } });
    let params = PatchParams::apply("kubectl-edit").force();
    let edited = lab.server.block_on(lab.api("SSDPool").patch_status("p", &params, &Patch::Apply(&status)));
    edited.expect("a forced apply is accepted");
    wait_again(&lab, "SSDPool", "p", "/status/nodes", Some(&written));
    assert!(reconciles(&operator, "SSDPool") > before);
    operator.kill();
}

/// Waits until no pool is reconciled for a while.
fn quiet(operator: &Operator) {
    let mut before = reconciles(operator, "SSDPool");
    wait_until("no pool is reconciled any more", PATIENCE, || {
        std::thread::sleep(crate::lab::SETTLED);
        let now = reconciles(operator, "SSDPool");
        let same = now == before;
        before = now;
        same.then_some(())
    });
}
