//! Whatever happens, it ends in the same objects; and then nothing is written.

use std::time::Duration;

use kube::ResourceExt;
use kube::api::{Api, DeleteParams, DynamicObject};
use rand::RngExt;
use rand::rngs::StdRng;
use reprise_e2e::{PATIENCE, seed, wait_until};
use serde_json::json;

use crate::lab::{Lab, SETTLED, SYSTEM, essence, versions};

/// Reconciles without a change that are looked at.
const RESYNCS: usize = 10;
/// Random events of the test of faults.
const EVENTS: usize = 25;

/// Waits until nothing that the operator makes is written for a while.
fn settle(lab: &Lab) {
    let mut before = versions(&lab.made());
    wait_until("nothing is written any more", 3 * PATIENCE, || {
        std::thread::sleep(SETTLED);
        let now = versions(&lab.made());
        let same = now == before;
        before = now;
        same.then_some(())
    });
}

#[test]
fn a_converged_cluster_is_not_written_to() {
    let lab = Lab::new();
    let operator = lab.operator();
    lab.pool("p", "/var/lib/pool", json!({}));
    // With an etcd of its own as well: certificates are drawn once.
    let spec = json!({ "pools": [{ "name": "p" }], "etcd": { "mode": "Managed" } });
    lab.cluster(spec);
    lab.wait_for("Secret", "c-etcd-tls");
    lab.wait_for("StatefulSet", "c-etcd");
    lab.members_are_ready();
    for node in ["n1", "n2"] {
        wait_until("the node has its claim", PATIENCE, || {
            let found = lab.get("CacheNode", node)?;
            found.data["spec"]["claims"].is_array().then_some(())
        });
        lab.agent_reports(node, "Open");
    }
    lab.wait_condition("SSDPool", "p", ["Ready", "True", "AsDesired"]);
    lab.wait_condition("KVCacheCluster", "c", ["AgentsReady", "True", "AsDesired"]);
    settle(&lab);
    // Sums of a status may wait for 10 s after the last write.
    std::thread::sleep(Duration::from_secs(11));
    let whole = || {
        let mut all = versions(&lab.made());
        for (kind, name) in [("KVCacheCluster", "c"), ("SSDPool", "p")] {
            let object = lab.get(kind, name).expect("it is there");
            all.insert(format!("{kind}/{name}/status"), object.data["status"].to_string());
        }
        all
    };
    let (before, written) = (whole(), operator.metric("reprise_operator_writes_total", ""));
    let reconciled =
        |kind: &str| operator.metric("reprise_operator_reconciles_total", &format!("kind=\"{kind}\""));
    let first = reconciled("KVCacheCluster");
    for resync in 0..RESYNCS {
        let already = reconciled("KVCacheCluster");
        // An annotation changes nothing that is wanted, and makes everything be looked at.
        let mark = json!({ "metadata": { "annotations": { "test/resync": resync.to_string() } } });
        for (kind, name) in [("KVCacheCluster", "c"), ("SSDPool", "p"), ("Node", "n1")] {
            lab.merge(kind, name, &mark);
        }
        wait_until("it is reconciled", PATIENCE, || (reconciled("KVCacheCluster") > already).then_some(()));
    }
    std::thread::sleep(SETTLED);
    assert!(reconciled("KVCacheCluster") - first >= 10.0);
    assert_eq!(whole(), before);
    assert_eq!(operator.metric("reprise_operator_writes_total", ""), written);
    assert!(operator.terminate().success());
}

/// Something that may happen to what the operator makes.
fn disturb(lab: &Lab, random: &mut StdRng) {
    let made: Vec<(String, DynamicObject)> = lab.made().into_iter().collect();
    let specs = [
        json!({}),
        json!({ "pools": [{ "name": "p" }] }),
        json!({ "pools": [{ "name": "p" }, { "name": "q" }], "controlPlane": { "replicas": 3 } }),
        json!({ "cache": { "dram": "128Mi", "regionSize": "2Mi" } }),
        json!({ "agents": { "nodeSelector": { "name": "n1" } }, "pools": [{ "name": "q" }] }),
    ];
    let label = |value: &str| json!({ "metadata": { "labels": { "disk": value } } });
    match random.random_range(0..10) {
        0..4 => lab.cluster(specs[random.random_range(0..specs.len())].clone()),
        4..8 if !made.is_empty() => {
            let (key, object) = &made[random.random_range(0..made.len())];
            let api: Api<DynamicObject> = lab.api(key.split_once('/').expect("kind and name").0);
            // It may be gone by now.
            let _ = lab.server.block_on(api.delete(&object.name_any(), &DeleteParams::background()));
        }
        8 => {
            let value = if random.random_bool(0.5) { "fast" } else { "slow" };
            lab.merge("Node", "n2", &label(value));
        }
        _ => {
            let depth = if random.random_bool(0.5) { 64 } else { 128 };
            lab.pool("p", "/var/lib/pool", json!({ "queueDepth": depth }));
        }
    }
}

#[test]
fn killed_at_any_moment_and_two_at_once_they_end_in_what_a_fresh_one_makes() {
    let lab = Lab::new();
    let mut random = seed::seeded("killed_at_any_moment_and_two_at_once_they_end_in_what_a_fresh_one_makes");
    // A watch of a killed operator ends in the middle of a line; two that write at once are refused and try again.
    for words in
        ["a reconcile failed and is tried again", "a watch was lost and begins again", "the lease cannot be"]
    {
        lab.world.allow(words);
    }
    let selected = json!({ "nodeSelector": { "matchLabels": { "disk": "fast" } } });
    lab.pool("p", "/var/lib/pool", json!({}));
    lab.pool("q", "/var/lib/other", selected);
    lab.cluster(json!({}));
    let files = [
        lab.operator_files("first"),
        // With a lease of its own, so that both work at once.
        lab.world.operator(&lab.server, "second", "cache"),
    ];
    let start = |index: usize| files[index].start().expect("the operator starts");
    let mut operators = [Some(start(0)), Some(start(1))];
    for _ in 0..EVENTS {
        disturb(&lab, &mut random);
        if random.random_bool(0.4) {
            let index = random.random_range(0..2);
            if let Some(operator) = operators[index].take() {
                operator.kill();
            }
            operators[index] = Some(start(index));
        }
        std::thread::sleep(Duration::from_millis(random.random_range(0..150)));
    }
    lab.pool("p", "/var/lib/pool", json!({}));
    lab.cluster(json!({ "pools": [{ "name": "p" }, { "name": "q" }] }));
    lab.wait_condition("KVCacheCluster", "c", ["PoolsBound", "True", "AsDesired"]);
    settle(&lab);
    let after_faults = essence(&lab.made());
    for operator in operators.into_iter().flatten() {
        operator.kill();
    }
    for (key, object) in lab.made() {
        lab.delete(key.split_once('/').expect("kind and name").0, &object.name_any());
    }
    wait_until("all of it is gone", PATIENCE, || lab.made().is_empty().then_some(()));
    // The lease of the killed one has to run out first.
    let api: Api<k8s_openapi::api::coordination::v1::Lease> = Api::namespaced(lab.client(), SYSTEM);
    lab.server.block_on(api.delete("reprise-operator", &DeleteParams::default())).expect("it was held");
    let fresh = lab.operator();
    lab.wait_for("CacheNode", "n1");
    settle(&lab);
    let anew = essence(&lab.made());
    let (left, right): (Vec<_>, Vec<_>) = (after_faults.keys().collect(), anew.keys().collect());
    assert_eq!(left, right);
    for (key, object) in &anew {
        assert_eq!(after_faults[key], *object, "{key}");
    }
    fresh.kill();
}

#[test]
fn an_api_server_that_was_away_finds_everything_brought_up_to_date() {
    let mut lab = Lab::new();
    // The operator says that it has lost its watches, and may fail to renew.
    for words in ["a watch was lost and begins again", "a reconcile failed", "the lease cannot be"] {
        lab.world.allow(words);
    }
    let operator = lab.operator();
    lab.cluster(json!({}));
    lab.wait_for("DaemonSet", "c-agent");
    settle(&lab);
    lab.server.kill();
    std::thread::sleep(Duration::from_secs(3));
    lab.server.restart();
    // Something is gone, and something new is wanted.
    lab.delete("ConfigMap", "c-agent");
    lab.pool("p", "/var/lib/pool", json!({}));
    lab.cluster(json!({ "pools": [{ "name": "p" }] }));
    lab.wait_for("ConfigMap", "c-agent");
    wait_until("the claim is there", PATIENCE, || {
        lab.get("CacheNode", "n1")?.data["spec"]["claims"].is_array().then_some(())
    });
    lab.wait_condition("KVCacheCluster", "c", ["PoolsBound", "True", "AsDesired"]);
    // It is the same process, with the lease that it had.
    assert_eq!(operator.metric("reprise_operator_leader", ""), 1.0);
    assert!(operator.terminate().success());
}
