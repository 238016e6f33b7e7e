//! SSD pools: claims on nodes, device reports, conflicts, and wipes.

use reprise_e2e::{PATIENCE, wait_until};
use serde_json::{Value, json};

use crate::operator::deletion_guard::TOO_SHORT;
use crate::operator::test_cluster::TestCluster;

/// Waits until a node has exactly these claims.
pub(crate) fn wait_claims(k8s: &TestCluster, node: &str, pools: &[&str]) -> Vec<Value> {
    wait_until(&format!("{node} has claims of {pools:?}"), PATIENCE, || {
        let claims =
            k8s.get("CacheNode", node)?.data["spec"]["claims"].as_array().cloned().unwrap_or_default();
        let names: Vec<&str> = claims.iter().filter_map(|claim| claim["pool"].as_str()).collect();
        (names == pools).then_some(claims)
    })
}

#[test]
fn pool_is_claimed_on_its_nodes_and_ready_after_their_reports() {
    let (k8s, _operator) = TestCluster::with_operator();
    k8s.pool("p", "/var/lib/pool", json!({ "nodeSelector": { "matchLabels": { "name": "n1" } } }));
    k8s.wait_condition("SSDPool", "p", ["Accepted", "False", "ReferenceNotFound"]);
    k8s.cluster(json!({ "pools": [{ "name": "p" }] }));
    let claims = wait_claims(&k8s, "n1", &["p"]);
    wait_claims(&k8s, "n2", &[]);
    assert_eq!(claims[0]["file"], "/var/lib/pool/pool");
    assert_eq!(claims[0]["size"], "64Mi");
    k8s.wait_condition("SSDPool", "p", ["Ready", "False", "Progressing"]);
    k8s.agent_reports("n1", "Open");
    k8s.wait_condition("SSDPool", "p", ["Ready", "True", "AsDesired"]);
    let status = k8s.get("SSDPool", "p").expect("the object exists").data["status"].clone();
    assert_eq!(status["nodes"], json!({ "selected": 1, "ready": 1, "refused": 0 }));
    assert_eq!(status["effectiveEngines"], json!([{ "engine": "IoUring", "nodes": 1 }]));

    // A failed device is lost capacity.
    k8s.agent_reports("n1", "Faulted");
    k8s.wait_message("SSDPool", "p", ["Degraded", "True", "DeviceFailed"], &["n1", "simulated state"]);
    k8s.wait_condition("SSDPool", "p", ["Ready", "False", "DeviceFailed"]);

    // The pool selects both nodes and is cordoned. A node that Kubernetes drains is in mode Draining.
    k8s.pool("p", "/var/lib/pool", json!({ "mode": "Cordoned" }));
    wait_claims(&k8s, "n2", &["p"]);
    k8s.wait_condition("SSDPool", "p", ["Cordoned", "True", "SetByOperator"]);
    let mode = |node: &str| k8s.get("CacheNode", node).map(|found| found.data["spec"]["mode"].clone());
    wait_until("both are cordoned", PATIENCE, || {
        (mode("n1") == Some(json!("Cordoned")) && mode("n2") == Some(json!("Cordoned"))).then_some(())
    });
    k8s.apply(&json!({
        "apiVersion": "v1", "kind": "Node",
        "metadata": { "name": "n2", "labels": { "disk": "fast", "name": "n2" } }, "spec": { "unschedulable": true },
    }));
    wait_until("n2 is drained", PATIENCE, || (mode("n2") == Some(json!("Draining"))).then_some(()));
}

#[test]
fn slow_or_worn_device_degrades_pool_and_stays_in_use() {
    let (k8s, _operator) = TestCluster::with_operator();
    let on_one = json!({ "matchLabels": { "name": "n1" } });
    k8s.pool("p", "/var/lib/pool", json!({ "nodeSelector": on_one, "health": { "maxReadLatency": "50ms", "maxMediaErrors": 10, "minSparePercent": 5 } }));
    k8s.cluster(json!({ "pools": [{ "name": "p" }] }));
    let claim = wait_claims(&k8s, "n1", &["p"])[0].clone();
    assert_eq!(
        (&claim["maxReadLatency"], &claim["maxMediaErrors"], &claim["minSparePercent"]),
        (&json!("50ms"), &json!(10), &json!(5))
    );
    k8s.agent_reports("n1", "Open");
    k8s.wait_condition("SSDPool", "p", ["Ready", "True", "AsDesired"]);
    k8s.wait_condition("SSDPool", "p", ["Degraded", "False", "AsDesired"]);
    k8s.agent_reports_with("n1", "Open", |status| {
        let device = &mut status["devices"][0];
        device["slow"] = json!(true);
        device["readLatencyP99Micros"] = json!(81_919);
        device["message"] = json!("99 of 100 reads took up to 82 ms");
    });
    k8s.wait_message("SSDPool", "p", ["Degraded", "True", "DeviceSlow"], &["n1", "82 ms", "maxReadLatency"]);
    k8s.wait_condition("SSDPool", "p", ["Ready", "True", "AsDesired"]);
    k8s.agent_reports_with("n1", "Open", |status| {
        let device = &mut status["devices"][0];
        (device["worn"], device["mediaErrors"], device["sparePercent"]) = (json!(true), json!(11), json!(90));
        device["message"] = json!("it has met 11 media errors");
    });
    k8s.wait_message(
        "SSDPool",
        "p",
        ["Degraded", "True", "DeviceWorn"],
        &["11 media errors", "maxMediaErrors"],
    );
    k8s.wait_condition("SSDPool", "p", ["Ready", "True", "AsDesired"]);
    k8s.agent_reports("n1", "Open");
    k8s.wait_condition("SSDPool", "p", ["Degraded", "False", "AsDesired"]);
    // Removed limits take effect at once.
    k8s.pool("p", "/var/lib/pool", json!({ "nodeSelector": on_one }));
    wait_until("the claim has no limits", PATIENCE, || {
        wait_claims(&k8s, "n1", &["p"])[0].get("maxReadLatency").is_none().then_some(())
    });
}

#[test]
fn younger_of_two_conflicting_pools_is_rejected() {
    let (k8s, _operator) = TestCluster::with_operator();
    k8s.pool("old", "/var/lib/pool", json!({}));
    k8s.cluster(json!({ "pools": [{ "name": "old" }, { "name": "young" }] }));
    wait_claims(&k8s, "n1", &["old"]);
    k8s.wait_message("KVCacheCluster", "c", ["PoolsBound", "False", "ReferenceNotFound"], &["young"]);
    k8s.wait_for_next_second();
    k8s.pool("young", "/var/lib/pool/inner", json!({}));
    k8s.wait_message("SSDPool", "young", ["Accepted", "False", "Conflict"], &["SSDPool old", "nodeSelector"]);
    k8s.wait_condition("SSDPool", "old", ["Accepted", "True", "AsDesired"]);
    wait_claims(&k8s, "n1", &["old"]);
    k8s.wait_condition("KVCacheCluster", "c", ["PoolsBound", "False", "Conflict"]);
    // After the deletion of the older pool, the younger one is accepted.
    k8s.delete("SSDPool", "old");
    k8s.wait_condition("SSDPool", "young", ["Accepted", "True", "AsDesired"]);
    wait_claims(&k8s, "n1", &["young"]);
}

#[test]
fn younger_pool_with_same_devices_is_rejected_and_missing_devices_reported() {
    let (k8s, _operator) = TestCluster::with_operator();
    let raw = |name: &str, glob: &str| {
        k8s.apply_resource(
            "SSDPool",
            name,
            json!({ "devices": { "globs": [glob] }, "nodeSelector": { "matchLabels": { "name": "n1" } } }),
        );
    };
    raw("old", "/dev/disk/by-id/nvme-*");
    k8s.cluster(json!({ "pools": [{ "name": "old" }, { "name": "young" }] }));
    wait_claims(&k8s, "n1", &["old"]);
    k8s.wait_for_next_second();
    raw("young", "/dev/disk/by-id/*-data");
    let message = k8s.wait_condition("SSDPool", "young", ["Accepted", "False", "Conflict"]);
    for words in ["SSDPool old", "/dev/disk/by-id/*-data on node n1"] {
        assert!(message.contains(words), "{message}");
    }
    k8s.wait_condition("SSDPool", "old", ["Accepted", "True", "AsDesired"]);
    let claims = wait_claims(&k8s, "n1", &["old"]);
    assert_eq!(claims[0]["globs"], json!(["/dev/disk/by-id/nvme-*"]));
    k8s.wait_condition("KVCacheCluster", "c", ["PoolsBound", "False", "Conflict"]);
    // A pattern that matches no device of the other pool.
    raw("young", "/dev/disk/by-id/ata-*");
    k8s.wait_condition("SSDPool", "young", ["Accepted", "True", "AsDesired"]);
    wait_claims(&k8s, "n1", &["old", "young"]);
    k8s.agent_reports_with("n1", "Found", |status| status["devices"] = json!([]));
    k8s.wait_message(
        "SSDPool",
        "young",
        ["DevicesDiscovered", "False", "NoDevices"],
        &["no device matches devices.globs: correct it"],
    );
}

#[test]
fn wiped_pool_is_deleted_after_confirmation_and_wipe_on_every_node() {
    let k8s = TestCluster::new();
    k8s.env.allow(TOO_SHORT);
    let started = k8s.operator_files("operator").unused_for(5).start();
    let _operator = started.unwrap_or_else(|error| panic!("the operator does not start: {error:?}"));
    let wipes = |more: Value| {
        let mut spec = json!({ "deletionPolicy": "Wipe" });
        spec.as_object_mut().expect("an object").extend(more.as_object().expect("fields").clone());
        spec
    };
    k8s.pool("p", "/var/lib/pool", wipes(json!({})));
    k8s.cluster(json!({ "pools": [{ "name": "p" }] }));
    for node in ["n1", "n2"] {
        wait_claims(&k8s, node, &["p"]);
        k8s.agent_reports(node, "Open");
    }
    k8s.wait_condition("SSDPool", "p", ["Ready", "True", "AsDesired"]);
    k8s.delete("SSDPool", "p");
    k8s.wait_message(
        "SSDPool",
        "p",
        ["DeletionBlocked", "True", "ConfirmationMissing"],
        &["yes-really-destroy-the-data"],
    );
    assert_eq!(wait_claims(&k8s, "n1", &["p"])[0]["wipe"], false, "no wipe before the confirmation");
    k8s.pool("p", "/var/lib/pool", wipes(json!({ "wipeConfirmation": "yes-really-destroy-the-data" })));
    k8s.wait_condition("SSDPool", "p", ["DeletionBlocked", "True", "Releasing"]);
    wait_until("the claim requests the wipe", PATIENCE, || {
        (wait_claims(&k8s, "n1", &["p"])[0]["wipe"] == true).then_some(())
    });
    k8s.agent_reports("n1", "Wiped");
    k8s.settle();
    assert!(k8s.get("SSDPool", "p").is_some(), "n2 has not wiped yet");
    k8s.agent_reports("n2", "Wiped");
    wait_until("the pool is deleted", PATIENCE, || k8s.get("SSDPool", "p").is_none().then_some(()));
    wait_claims(&k8s, "n1", &[]);
}
