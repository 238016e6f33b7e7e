//! Pools: claims on nodes, what nodes say of them, contradictions, wiping.

use reprise_e2e::{PATIENCE, wait_until};
use serde_json::{Value, json};

use crate::in_use::TOO_SHORT;
use crate::lab::{Lab, SETTLED};

/// Waits until a node has exactly these claims.
pub(crate) fn wait_claims(lab: &Lab, node: &str, pools: &[&str]) -> Vec<Value> {
    wait_until(&format!("{node} has claims of {pools:?}"), PATIENCE, || {
        let claims =
            lab.get("CacheNode", node)?.data["spec"]["claims"].as_array().cloned().unwrap_or_default();
        let names: Vec<&str> = claims.iter().filter_map(|claim| claim["pool"].as_str()).collect();
        (names == pools).then_some(claims)
    })
}

#[test]
fn a_pool_is_claimed_on_its_nodes_and_ready_when_they_say_so() {
    let lab = Lab::new();
    let operator = lab.operator();
    lab.pool("p", "/var/lib/pool", json!({ "nodeSelector": { "matchLabels": { "name": "n1" } } }));
    lab.wait_condition("SSDPool", "p", ["Accepted", "False", "ReferenceNotFound"]);
    lab.cluster(json!({ "pools": [{ "name": "p" }] }));
    let claims = wait_claims(&lab, "n1", &["p"]);
    wait_claims(&lab, "n2", &[]);
    assert_eq!(claims[0]["file"], "/var/lib/pool/pool");
    assert_eq!(claims[0]["size"], "64Mi");
    lab.wait_condition("SSDPool", "p", ["Ready", "False", "Progressing"]);
    lab.agent_reports("n1", "Open");
    lab.wait_condition("SSDPool", "p", ["Ready", "True", "AsDesired"]);
    let status = lab.get("SSDPool", "p").expect("it is there").data["status"].clone();
    assert_eq!(status["nodes"], json!({ "selected": 1, "ready": 1, "refused": 0 }));
    assert_eq!(status["effectiveEngines"], json!([{ "engine": "IoUring", "nodes": 1 }]));

    // A device that fails is lost capacity; a pool that wants another engine than there is says so.
    lab.agent_reports("n1", "Faulted");
    let said = lab.wait_condition("SSDPool", "p", ["Degraded", "True", "DeviceFailed"]);
    assert!(said.contains("n1") && said.contains("as the test says"), "{said}");
    lab.wait_condition("SSDPool", "p", ["Ready", "False", "DeviceFailed"]);

    // Another node is selected, and one that is drained by Kubernetes gives its blocks away.
    lab.pool("p", "/var/lib/pool", json!({ "mode": "Cordoned" }));
    wait_claims(&lab, "n2", &["p"]);
    lab.wait_condition("SSDPool", "p", ["Cordoned", "True", "SetByOperator"]);
    let mode = |node: &str| lab.get("CacheNode", node).map(|found| found.data["spec"]["mode"].clone());
    wait_until("both are cordoned", PATIENCE, || {
        (mode("n1") == Some(json!("Cordoned")) && mode("n2") == Some(json!("Cordoned"))).then_some(())
    });
    lab.apply(&json!({
        "apiVersion": "v1", "kind": "Node",
        "metadata": { "name": "n2", "labels": { "disk": "fast", "name": "n2" } }, "spec": { "unschedulable": true },
    }));
    wait_until("n2 is drained", PATIENCE, || (mode("n2") == Some(json!("Draining"))).then_some(()));
    operator.kill();
}

#[test]
fn a_device_that_is_slower_or_more_worn_than_its_pool_allows_is_said_and_used_all_the_same() {
    let lab = Lab::new();
    let operator = lab.operator();
    let on_one = json!({ "matchLabels": { "name": "n1" } });
    lab.pool("p", "/var/lib/pool", json!({ "nodeSelector": on_one, "health": { "maxReadLatency": "50ms", "maxMediaErrors": 10, "minSparePercent": 5 } }));
    lab.cluster(json!({ "pools": [{ "name": "p" }] }));
    let claim = wait_claims(&lab, "n1", &["p"])[0].clone();
    assert_eq!(
        (&claim["maxReadLatency"], &claim["maxMediaErrors"], &claim["minSparePercent"]),
        (&json!("50ms"), &json!(10), &json!(5))
    );
    lab.agent_reports("n1", "Open");
    lab.wait_condition("SSDPool", "p", ["Ready", "True", "AsDesired"]);
    lab.wait_condition("SSDPool", "p", ["Degraded", "False", "AsDesired"]);
    lab.agent_says("n1", "Open", |status| {
        let device = &mut status["devices"][0];
        device["slow"] = json!(true);
        device["readLatencyP99Micros"] = json!(81_919);
        device["message"] = json!("99 of 100 reads took up to 82 ms");
    });
    let said = lab.wait_condition("SSDPool", "p", ["Degraded", "True", "DeviceSlow"]);
    assert!(said.contains("n1") && said.contains("82 ms") && said.contains("maxReadLatency"), "{said}");
    lab.wait_condition("SSDPool", "p", ["Ready", "True", "AsDesired"]);
    lab.agent_says("n1", "Open", |status| {
        let device = &mut status["devices"][0];
        (device["worn"], device["mediaErrors"], device["sparePercent"]) = (json!(true), json!(11), json!(90));
        device["message"] = json!("it has met 11 media errors");
    });
    let said = lab.wait_condition("SSDPool", "p", ["Degraded", "True", "DeviceWorn"]);
    assert!(said.contains("11 media errors") && said.contains("maxMediaErrors"), "{said}");
    lab.wait_condition("SSDPool", "p", ["Ready", "True", "AsDesired"]);
    lab.agent_reports("n1", "Open");
    lab.wait_condition("SSDPool", "p", ["Degraded", "False", "AsDesired"]);
    // Allowed more, or anything: agents are told at once.
    lab.pool("p", "/var/lib/pool", json!({ "nodeSelector": on_one }));
    wait_until("nothing is compared", PATIENCE, || {
        wait_claims(&lab, "n1", &["p"])[0].get("maxReadLatency").is_none().then_some(())
    });
    operator.kill();
}

#[test]
fn the_younger_of_two_pools_that_contradict_each_other_is_refused_and_changes_nothing() {
    let lab = Lab::new();
    let operator = lab.operator();
    lab.pool("old", "/var/lib/pool", json!({}));
    lab.cluster(json!({ "pools": [{ "name": "old" }, { "name": "young" }] }));
    wait_claims(&lab, "n1", &["old"]);
    let said = lab.wait_condition("KVCacheCluster", "c", ["PoolsBound", "False", "ReferenceNotFound"]);
    assert!(said.contains("young"), "{said}");
    // Times of making are whole seconds.
    std::thread::sleep(SETTLED);
    lab.pool("young", "/var/lib/pool/inner", json!({}));
    let said = lab.wait_condition("SSDPool", "young", ["Accepted", "False", "Conflict"]);
    assert!(said.contains("SSDPool old") && said.contains("nodeSelector"), "{said}");
    lab.wait_condition("SSDPool", "old", ["Accepted", "True", "AsDesired"]);
    wait_claims(&lab, "n1", &["old"]);
    lab.wait_condition("KVCacheCluster", "c", ["PoolsBound", "False", "Conflict"]);
    // With the older one gone it is not refused any more.
    lab.delete("SSDPool", "old");
    lab.wait_condition("SSDPool", "young", ["Accepted", "True", "AsDesired"]);
    wait_claims(&lab, "n1", &["young"]);
    operator.kill();
}

#[test]
fn of_two_pools_that_match_the_same_devices_the_younger_is_refused_and_what_nobody_finds_is_said() {
    let lab = Lab::new();
    let operator = lab.operator();
    let raw = |name: &str, glob: &str| {
        lab.apply(&json!({
            "apiVersion": "reprise.dev/v1alpha1", "kind": "SSDPool", "metadata": { "name": name },
            "spec": { "devices": { "globs": [glob] }, "nodeSelector": { "matchLabels": { "name": "n1" } } },
        }));
    };
    raw("old", "/dev/disk/by-id/nvme-*");
    lab.cluster(json!({ "pools": [{ "name": "old" }, { "name": "young" }] }));
    wait_claims(&lab, "n1", &["old"]);
    // Times of making are whole seconds.
    std::thread::sleep(SETTLED);
    raw("young", "/dev/disk/by-id/*-data");
    let said = lab.wait_condition("SSDPool", "young", ["Accepted", "False", "Conflict"]);
    for words in ["SSDPool old", "/dev/disk/by-id/*-data on node n1"] {
        assert!(said.contains(words), "{said}");
    }
    lab.wait_condition("SSDPool", "old", ["Accepted", "True", "AsDesired"]);
    let claims = wait_claims(&lab, "n1", &["old"]);
    assert_eq!(claims[0]["globs"], json!(["/dev/disk/by-id/nvme-*"]));
    lab.wait_condition("KVCacheCluster", "c", ["PoolsBound", "False", "Conflict"]);
    // Names that no other pool matches.
    raw("young", "/dev/disk/by-id/ata-*");
    lab.wait_condition("SSDPool", "young", ["Accepted", "True", "AsDesired"]);
    wait_claims(&lab, "n1", &["old", "young"]);
    lab.agent_says("n1", "Found", |status| status["devices"] = json!([]));
    let said = lab.wait_condition("SSDPool", "young", ["DevicesDiscovered", "False", "NoDevices"]);
    assert!(said.contains("correct devices.globs"), "{said}");
    operator.kill();
}

#[test]
fn a_pool_with_wipe_goes_after_it_was_confirmed_and_every_node_has_wiped() {
    let lab = Lab::new();
    lab.world.allow(TOO_SHORT);
    let started = lab.operator_files("operator").unused_for(5).start();
    let operator = started.unwrap_or_else(|refused| panic!("the operator does not start: {refused:?}"));
    let wipes = |more: Value| {
        let mut spec = json!({ "deletionPolicy": "Wipe" });
        spec.as_object_mut().expect("made above").extend(more.as_object().expect("fields").clone());
        spec
    };
    lab.pool("p", "/var/lib/pool", wipes(json!({})));
    lab.cluster(json!({ "pools": [{ "name": "p" }] }));
    for node in ["n1", "n2"] {
        wait_claims(&lab, node, &["p"]);
        lab.agent_reports(node, "Open");
    }
    lab.wait_condition("SSDPool", "p", ["Ready", "True", "AsDesired"]);
    lab.delete("SSDPool", "p");
    let said = lab.wait_condition("SSDPool", "p", ["DeletionBlocked", "True", "ConfirmationMissing"]);
    assert!(said.contains("yes-really-destroy-the-data"), "{said}");
    assert_eq!(wait_claims(&lab, "n1", &["p"])[0]["wipe"], false, "nothing is destroyed before");
    lab.pool("p", "/var/lib/pool", wipes(json!({ "wipeConfirmation": "yes-really-destroy-the-data" })));
    lab.wait_condition("SSDPool", "p", ["DeletionBlocked", "True", "Releasing"]);
    wait_until("the claim says so", PATIENCE, || {
        (wait_claims(&lab, "n1", &["p"])[0]["wipe"] == true).then_some(())
    });
    lab.agent_reports("n1", "Wiped");
    std::thread::sleep(SETTLED);
    assert!(lab.get("SSDPool", "p").is_some(), "n2 has not wiped yet");
    lab.agent_reports("n2", "Wiped");
    wait_until("the pool goes", PATIENCE, || lab.get("SSDPool", "p").is_none().then_some(()));
    wait_claims(&lab, "n1", &[]);
    operator.kill();
}
