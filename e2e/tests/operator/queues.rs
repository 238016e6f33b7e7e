//! Queue-pair grants to GPUs: budgets of controllers, waiting allocations, expiry and release.

use std::collections::BTreeMap;
use std::time::Duration;

use k8s_openapi::jiff::{SignedDuration, Timestamp};
use kube::ResourceExt;
use kube::api::{DynamicObject, Patch, PatchParams};
use rand::RngExt;
use reprise_e2e::{Operator, PATIENCE, seed, wait_until};
use serde_json::{Value, json};

use crate::operator::test_cluster::TestCluster;

pub(crate) const KIND: &str = "GPUQueueAllocation";
/// Queue pairs of each controller, half of which may be granted.
const PAIRS: u64 = 32;
/// Number of operator kills.
const KILLS: usize = 6;

/// Starts a cluster with a pool on both nodes; the agent of `n1` reports these controllers.
pub(crate) fn cluster_with_controllers(controllers: &[&str]) -> (TestCluster, Operator) {
    let (k8s, operator) = TestCluster::with_operator();
    create_pool(&k8s);
    report_queues(&k8s, "n1", controllers, &[], json!({}));
    (k8s, operator)
}

fn create_pool(k8s: &TestCluster) {
    k8s.apply_resource("SSDPool", "p", json!({ "devices": { "globs": ["/dev/disk/by-id/nvme-*"] } }));
    k8s.cluster(json!({ "pools": [{ "name": "p" }] }));
    for node in ["n1", "n2"] {
        wait_until("the node has its claim", PATIENCE, || {
            k8s.get("CacheNode", node)?.data["spec"]["claims"].is_array().then_some(())
        });
    }
}

/// Simulates a report of an agent: its controllers, and the created queue pairs by allocation.
pub(crate) fn report_queues(
    k8s: &TestCluster,
    node: &str,
    controllers: &[&str],
    queues: &[(&str, u32)],
    more: Value,
) {
    let controller = |serial: &&str| json!({ "serial": serial, "pciAddress": "0000:01:00.0", "pool": "p", "queuePairs": PAIRS, "queuePairsLent": 0 });
    let controllers: Vec<Value> = controllers.iter().map(controller).collect();
    let queue = |(name, pairs): &(&str, u32)| {
        let uid = k8s.get(KIND, name).and_then(|allocation| allocation.uid());
        json!({ "uid": uid.expect("the object exists"), "queuePairs": pairs })
    };
    let queues: Vec<Value> = queues.iter().map(queue).collect();
    let mut status = json!({
        // Higher than any generation: the agent has seen every spec.
        "observedGeneration": 1 << 30,
        // A time in the future, so that the agent does not count as silent on a slow machine.
        "lastUpdated": (Timestamp::now() + SignedDuration::from_hours(1)).to_string(),
        "controllers": controllers,
        "applied": { "queues": queues },
    });
    status.as_object_mut().expect("an object").extend(more.as_object().expect("fields").clone());
    let body = json!({
        "apiVersion": "reprise.dev/v1alpha1", "kind": "CacheNode", "metadata": { "name": node }, "status": status,
    });
    let (api, params) = (k8s.api("CacheNode"), PatchParams::apply("reprise-agent").force());
    k8s.server
        .block_on(api.patch_status(node, &params, &Patch::Apply(&body)))
        .expect("the status is accepted");
}

pub(crate) fn create_allocation(k8s: &TestCluster, name: &str, more: Value) {
    let mut spec =
        json!({ "nodeName": "n1", "gpuUuid": "GPU-0", "poolRef": { "name": "p" }, "queuePairs": 8 });
    spec.as_object_mut().expect("an object").extend(more.as_object().expect("fields").clone());
    k8s.apply_resource(KIND, name, spec);
}

/// Changes a status with the default field manager.
fn status(k8s: &TestCluster, name: &str, fields: Value) {
    let (api, params) = (k8s.api(KIND), PatchParams::default());
    let body = json!({ "status": fields });
    k8s.server
        .block_on(api.patch_status(name, &params, &Patch::Merge(&body)))
        .expect("the status is accepted");
}

/// Creates an allocation, and waits until it has its queue pairs.
pub(crate) fn grant(k8s: &TestCluster, name: &str, more: Value) {
    create_allocation(k8s, name, more);
    k8s.wait_condition(KIND, name, GRANTED);
}

pub(crate) fn delete_and_wait(k8s: &TestCluster, name: &str) {
    k8s.delete(KIND, name);
    wait_deleted(k8s, name);
}

pub(crate) fn wait_deleted(k8s: &TestCluster, name: &str) {
    wait_until(&format!("{name} is deleted"), PATIENCE, || k8s.get(KIND, name).is_none().then_some(()));
}

pub(crate) fn grants(allocation: &DynamicObject) -> Vec<Value> {
    allocation.data["status"]["allocations"].as_array().cloned().unwrap_or_default()
}

/// Number of granted queue pairs by controller.
fn granted_pairs(k8s: &TestCluster) -> BTreeMap<String, u64> {
    let mut lent = BTreeMap::new();
    for grant in k8s.list(KIND).iter().flat_map(grants) {
        let serial = grant["serial"].as_str().expect("a serial number").to_owned();
        *lent.entry(serial).or_default() += grant["queuePairs"].as_u64().expect("a number");
    }
    lent
}

pub(crate) const GRANTED: [&str; 3] = ["Allocated", "True", "AsDesired"];
pub(crate) const WAITING: [&str; 3] = ["Allocated", "False", "OverBudget"];

#[test]
fn queue_pairs_are_granted_within_budget_and_waiting_allocation_gets_freed_ones() {
    let (k8s, operator) = cluster_with_controllers(&["S1", "S2"]);
    grant(&k8s, "a", json!({ "queuePairs": 12 }));
    k8s.wait_message(KIND, "a", ["Programmed", "False", "Progressing"], &["n1 has not reported yet"]);
    let a = k8s.get(KIND, "a").expect("the object exists");
    let grant = |serial: &str| json!({ "serial": serial, "pciAddress": "0000:01:00.0", "queuePairs": 12 });
    assert_eq!(grants(&a), [grant("S1"), grant("S2")]);
    assert_eq!(a.finalizers(), ["reprise.dev/queues"]);
    create_allocation(&k8s, "b", json!({}));
    k8s.wait_message(KIND, "b", WAITING, &["8 queue pairs", "S1 (budget 16; held by cache/a 12)"]);
    let b = k8s.get(KIND, "b").expect("the object exists");
    assert!(b.finalizers().is_empty() && grants(&b).is_empty(), "a waiting allocation needs no cleanup");
    wait_until("an event reports that the allocation waits", PATIENCE, || {
        let is_it = |event: &DynamicObject| {
            event.data["action"] == "Allocated" && event.data["involvedObject"]["name"] == "b"
        };
        k8s.list("Event").iter().any(is_it).then_some(())
    });

    // An unchanged status is not written again.
    k8s.settle();
    let writes = || operator.metric("reprise_operator_writes_total", &format!("kind=\"{KIND}\""));
    let reconciles = || operator.metric("reprise_operator_reconciles_total", &format!("kind=\"{KIND}\""));
    let (written, reconciled) = (writes(), reconciles());
    assert!(written > 0.0);
    k8s.merge(KIND, "b", &json!({ "metadata": { "annotations": { "test/resync": "1" } } }));
    wait_until("the allocation is reconciled", PATIENCE, || (reconciles() > reconciled).then_some(()));
    k8s.settle();
    assert_eq!(writes(), written);

    delete_and_wait(&k8s, "a");
    k8s.wait_condition(KIND, "b", GRANTED);
    delete_and_wait(&k8s, "b");
}

#[test]
fn missing_references_are_named_until_allocation_is_accepted() {
    let (k8s, _operator) = TestCluster::with_operator();
    let missing = ["Accepted", "False", "ReferenceNotFound"];
    create_allocation(&k8s, "elsewhere", json!({ "nodeName": "n9" }));
    k8s.wait_message(KIND, "elsewhere", missing, &["node n9 does not exist"]);
    create_allocation(&k8s, "x", json!({ "slackProfileRef": { "name": "s" } }));
    k8s.wait_message(KIND, "x", missing, &["node n1 belongs to no KVCacheCluster"]);
    let wait_words = |words: &str| {
        wait_until(words, PATIENCE, || k8s.wait_condition(KIND, "x", missing).contains(words).then_some(()));
    };
    k8s.cluster(json!({ "pools": [{ "name": "p" }] }));
    wait_words("SSDPool p does not exist");
    create_pool(&k8s);
    let gpus = |uuid: &str| json!({ "gpus": [{ "uuid": uuid, "product": "H200" }] });
    report_queues(&k8s, "n1", &["S1"], &[], gpus("GPU-1"));
    wait_words("has no GPU GPU-0: create a GPUQueueAllocation that names one of GPU-1");
    report_queues(&k8s, "n1", &["S1"], &[], gpus("GPU-0"));
    // A profile that the node does not have delays no grant.
    k8s.wait_message(KIND, "x", ["Accepted", "True", "AsDesired"], &["SlackProfile s has no effect"]);
    k8s.wait_condition(KIND, "x", GRANTED);
    // A pool in a directory has no controllers.
    k8s.pool("d", "/var/lib/pool", json!({}));
    create_allocation(&k8s, "y", json!({ "poolRef": { "name": "d" } }));
    k8s.wait_message(KIND, "y", ["Accepted", "False", "InvalidSpec"], &["does not use raw devices"]);
}

#[test]
fn deletion_waits_for_agent_and_released_pairs_are_granted_again() {
    let (k8s, _operator) = cluster_with_controllers(&["S1"]);
    grant(&k8s, "a", json!({ "queuePairs": 12 }));
    report_queues(&k8s, "n1", &["S1"], &[("a", 12)], json!({}));
    k8s.wait_condition(KIND, "a", ["Programmed", "True", "AsDesired"]);
    create_allocation(&k8s, "b", json!({}));
    k8s.wait_condition(KIND, "b", WAITING);
    k8s.delete(KIND, "a");
    k8s.wait_message(KIND, "a", ["DeletionBlocked", "True", "Releasing"], &["n1", "12 queue pairs"]);
    k8s.settle();
    assert!(k8s.get(KIND, "a").is_some());
    k8s.wait_condition(KIND, "b", WAITING);
    report_queues(&k8s, "n1", &["S1"], &[], json!({}));
    wait_deleted(&k8s, "a");
    k8s.wait_condition(KIND, "b", GRANTED);
}

#[test]
fn grant_expires_and_its_pairs_are_granted_again() {
    let (k8s, _operator) = cluster_with_controllers(&["S1"]);
    grant(&k8s, "a", json!({ "queuePairs": 12, "ttl": "1h" }));
    let a = k8s.get(KIND, "a").expect("the object exists");
    let ends: Timestamp = a.data["status"]["expiresAt"].as_str().expect("a time").parse().expect("a time");
    let left = ends.duration_since(Timestamp::now());
    assert!(left > SignedDuration::from_mins(55) && left <= SignedDuration::from_mins(60), "{left:?}");
    create_allocation(&k8s, "b", json!({}));
    k8s.wait_condition(KIND, "b", WAITING);
    // The shortest TTL is a minute, so the test moves the expiry. The expiry itself causes no event.
    let soon = Timestamp::now() + SignedDuration::from_secs(2);
    status(&k8s, "a", json!({ "expiresAt": soon.to_string() }));
    k8s.wait_condition(KIND, "a", ["Released", "True", "Expired"]);
    k8s.wait_condition(KIND, "a", ["Allocated", "False", "Expired"]);
    k8s.wait_condition(KIND, "b", GRANTED);
    // An expired allocation is not granted again.
    delete_and_wait(&k8s, "b");
    k8s.settle();
    let a = k8s.get(KIND, "a").expect("the object exists");
    assert!(grants(&a).is_empty() && a.finalizers().is_empty());
}

#[test]
fn guaranteed_allocation_reclaims_best_effort_pairs() {
    let (k8s, _operator) = cluster_with_controllers(&["S1"]);
    grant(&k8s, "effort", json!({ "qos": "BestEffort", "ttl": "1h" }));
    report_queues(&k8s, "n1", &["S1"], &[("effort", 8)], json!({}));
    k8s.wait_condition(KIND, "effort", ["Programmed", "True", "AsDesired"]);
    create_allocation(&k8s, "own", json!({ "qos": "Guaranteed", "isolation": "ExclusiveController" }));
    k8s.wait_message(KIND, "effort", ["Allocated", "False", "TakenBack"], &["cache/own"]);
    k8s.wait_condition(KIND, "effort", ["Released", "False", "Releasing"]);
    k8s.wait_message(KIND, "own", ["Allocated", "False", "Releasing"], &["cache/effort 8"]);
    report_queues(&k8s, "n1", &["S1"], &[], json!({}));
    k8s.wait_condition(KIND, "effort", ["Released", "True", "TakenBack"]);
    k8s.wait_condition(KIND, "own", GRANTED);
    // An exclusive controller has no queue pairs for other allocations.
    create_allocation(&k8s, "small", json!({ "queuePairs": 1 }));
    k8s.wait_condition(KIND, "small", WAITING);
    assert_eq!(granted_pairs(&k8s), BTreeMap::from([("S1".to_owned(), 8)]));
}

#[test]
fn grants_end_when_node_is_deleted() {
    let (k8s, _operator) = cluster_with_controllers(&["S1"]);
    for name in ["stays", "goes"] {
        grant(&k8s, name, json!({ "queuePairs": 4 }));
    }
    report_queues(&k8s, "n1", &["S1"], &[("stays", 4), ("goes", 4)], json!({}));
    k8s.wait_condition(KIND, "goes", ["Programmed", "True", "AsDesired"]);
    k8s.delete(KIND, "goes");
    k8s.wait_condition(KIND, "goes", ["DeletionBlocked", "True", "Releasing"]);
    k8s.delete("Node", "n1");
    wait_deleted(&k8s, "goes");
    k8s.wait_message(KIND, "stays", ["Released", "True", "AgentGone"], &["n1"]);
    delete_and_wait(&k8s, "stays");
}

#[test]
fn repeatedly_killed_operator_grants_no_queue_pair_twice() {
    let k8s = TestCluster::new();
    let mut random = seed::seeded("repeatedly_killed_operator_grants_no_queue_pair_twice");
    // A watch of a killed operator ends in the middle of a line.
    for words in ["reconcile failed; retrying", "watch lost; restarting it", "lease request failed"] {
        k8s.env.allow(words);
    }
    // All processes have one name, so that none waits for the lease of a killed one.
    let files = k8s.operator_files("killed");
    let start = || files.start().expect("the operator starts");
    let mut operator = start();
    create_pool(&k8s);
    report_queues(&k8s, "n1", &["S1", "S2", "S3"], &[], json!({}));
    let mut names: Vec<String> = Vec::new();
    let mut seen: BTreeMap<String, Vec<Value>> = BTreeMap::new();
    let mut check_grants = |k8s: &TestCluster| {
        for (serial, pairs) in granted_pairs(k8s) {
            assert!(pairs <= PAIRS / 2, "{serial} has {pairs} granted pairs");
        }
        for allocation in k8s.list(KIND) {
            let (name, now) = (allocation.name_any(), grants(&allocation));
            let before = seen.entry(name.clone()).or_default();
            assert!(
                before.is_empty() || *before == now,
                "the grant of {name} has changed: {before:?} {now:?}"
            );
            *before = now;
        }
    };
    for round in 0..KILLS {
        for index in 0..4 {
            let name = format!("x{round}-{index}");
            let own =
                json!({ "isolation": "ExclusiveController", "queuePairs": random.random_range(1..16_u32) });
            let shared = json!({ "queuePairs": random.random_range(1..12_u32) });
            create_allocation(&k8s, &name, if random.random_bool(0.25) { own } else { shared });
            names.push(name);
        }
        for _ in 0..2 {
            let name = names.swap_remove(random.random_range(0..names.len()));
            k8s.delete(KIND, &name);
        }
        std::thread::sleep(Duration::from_millis(random.random_range(0..400)));
        operator.kill();
        check_grants(&k8s);
        operator = start();
    }
    let is_settled = |allocation: &DynamicObject| {
        let conditions = allocation.data["status"]["conditions"].as_array().cloned().unwrap_or_default();
        conditions.iter().any(|one| one["type"] == "Allocated")
            && allocation.metadata.deletion_timestamp.is_none()
    };
    wait_until("every allocation has a decision", 2 * PATIENCE, || {
        check_grants(&k8s);
        k8s.list(KIND).iter().all(is_settled).then_some(())
    });
    let granted = k8s.list(KIND).iter().filter(|allocation| !grants(allocation).is_empty()).count();
    assert!(granted > 0);
    // All grants are released.
    for name in &names {
        k8s.delete(KIND, name);
    }
    wait_until("all allocations are deleted", PATIENCE, || k8s.list(KIND).is_empty().then_some(()));
}
