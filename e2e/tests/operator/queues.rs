//! Queue pairs that are lent to GPUs: counted within the controllers' budgets, waited for, ended and given back.

use std::collections::BTreeMap;
use std::time::Duration;

use k8s_openapi::jiff::{SignedDuration, Timestamp};
use kube::ResourceExt;
use kube::api::{DynamicObject, Patch, PatchParams};
use rand::RngExt;
use reprise_e2e::{Operator, PATIENCE, seed, wait_until};
use serde_json::{Value, json};

use crate::convergence::settle;
use crate::lab::{Lab, SETTLED};

pub(crate) const KIND: &str = "GPUQueueAllocation";
/// Queue pairs of each controller, of which half may be lent.
const PAIRS: u64 = 32;
/// Kills of the operator.
const KILLS: usize = 6;

/// A lab with a pool of devices on both nodes, of which the agent of the first has told these controllers.
pub(crate) fn lab_with(controllers: &[&str]) -> (Lab, Operator) {
    let lab = Lab::new();
    let operator = lab.operator();
    has_pool(&lab);
    agent_says(&lab, "n1", controllers, &[], json!({}));
    (lab, operator)
}

fn has_pool(lab: &Lab) {
    lab.apply(&json!({
        "apiVersion": "reprise.dev/v1alpha1", "kind": "SSDPool", "metadata": { "name": "p" },
        "spec": { "devices": { "globs": ["/dev/disk/by-id/nvme-*"] } },
    }));
    lab.cluster(json!({ "pools": [{ "name": "p" }] }));
    for node in ["n1", "n2"] {
        wait_until("the node has its claim", PATIENCE, || {
            lab.get("CacheNode", node)?.data["spec"]["claims"].is_array().then_some(())
        });
    }
}

/// Plays the agent: what it has found, and of which allocations it has made how many queue pairs.
pub(crate) fn agent_says(lab: &Lab, node: &str, controllers: &[&str], queues: &[(&str, u32)], more: Value) {
    let controller = |serial: &&str| json!({ "serial": serial, "pciAddress": "0000:01:00.0", "pool": "p", "queuePairs": PAIRS, "queuePairsLent": 0 });
    let controllers: Vec<Value> = controllers.iter().map(controller).collect();
    let made = |(name, pairs): &(&str, u32)| {
        let uid = lab.get(KIND, name).and_then(|allocation| allocation.uid());
        json!({ "uid": uid.expect("it is there"), "queuePairs": pairs })
    };
    let queues: Vec<Value> = queues.iter().map(made).collect();
    let mut status = json!({
        // Whatever it is told to keep: it has seen it.
        "observedGeneration": 1 << 30,
        // However slow the machine is, the agent does not go silent while the test looks.
        "lastUpdated": (Timestamp::now() + SignedDuration::from_hours(1)).to_string(),
        "controllers": controllers,
        "applied": { "queues": queues },
    });
    status.as_object_mut().expect("made above").extend(more.as_object().expect("fields").clone());
    let body = json!({
        "apiVersion": "reprise.dev/v1alpha1", "kind": "CacheNode", "metadata": { "name": node }, "status": status,
    });
    let (api, params) = (lab.api("CacheNode"), PatchParams::apply("reprise-agent").force());
    lab.server.block_on(api.patch_status(node, &params, &Patch::Apply(&body))).expect("a status is taken");
}

pub(crate) fn ask(lab: &Lab, name: &str, more: Value) {
    let mut spec =
        json!({ "nodeName": "n1", "gpuUuid": "GPU-0", "poolRef": { "name": "p" }, "queuePairs": 8 });
    spec.as_object_mut().expect("made above").extend(more.as_object().expect("fields").clone());
    lab.apply(&json!({
        "apiVersion": "reprise.dev/v1alpha1", "kind": KIND, "metadata": { "name": name }, "spec": spec,
    }));
}

/// Changes a status as somebody else.
fn status(lab: &Lab, name: &str, fields: Value) {
    let (api, params) = (lab.api(KIND), PatchParams::default());
    let body = json!({ "status": fields });
    lab.server.block_on(api.patch_status(name, &params, &Patch::Merge(&body))).expect("a status is taken");
}

pub(crate) fn wait_gone(lab: &Lab, name: &str) {
    wait_until(&format!("{name} is gone"), PATIENCE, || lab.get(KIND, name).is_none().then_some(()));
}

pub(crate) fn grants(allocation: &DynamicObject) -> Vec<Value> {
    allocation.data["status"]["allocations"].as_array().cloned().unwrap_or_default()
}

/// Queue pairs that are lent of each controller.
fn lent(lab: &Lab) -> BTreeMap<String, u64> {
    let mut lent = BTreeMap::new();
    for grant in lab.list(KIND).iter().flat_map(grants) {
        let serial = grant["serial"].as_str().expect("a serial number").to_owned();
        *lent.entry(serial).or_default() += grant["queuePairs"].as_u64().expect("a number");
    }
    lent
}

pub(crate) const GRANTED: [&str; 3] = ["Allocated", "True", "AsDesired"];
pub(crate) const WAITS: [&str; 3] = ["Allocated", "False", "OverBudget"];

#[test]
fn queue_pairs_are_lent_within_the_budget_and_who_waits_gets_them_when_there_is_room() {
    let (lab, operator) = lab_with(&["S1", "S2"]);
    ask(&lab, "a", json!({ "queuePairs": 12 }));
    lab.wait_condition(KIND, "a", GRANTED);
    let said = lab.wait_condition(KIND, "a", ["Programmed", "False", "Progressing"]);
    assert!(said.contains("n1 has not said yet"), "{said}");
    let a = lab.get(KIND, "a").expect("it is there");
    let grant = |serial: &str| json!({ "serial": serial, "pciAddress": "0000:01:00.0", "queuePairs": 12 });
    assert_eq!(grants(&a), [grant("S1"), grant("S2")]);
    assert_eq!(a.finalizers(), ["reprise.dev/queues"]);
    ask(&lab, "b", json!({}));
    let said = lab.wait_condition(KIND, "b", WAITS);
    assert!(said.contains("8 queue pairs") && said.contains("S1 (lends 16; held by cache/a 12)"), "{said}");
    let b = lab.get(KIND, "b").expect("it is there");
    assert!(b.finalizers().is_empty() && grants(&b).is_empty(), "nothing has to be undone of it");
    wait_until("an event says that it waits", PATIENCE, || {
        let is_it = |event: &DynamicObject| {
            event.data["action"] == "Allocated" && event.data["involvedObject"]["name"] == "b"
        };
        lab.list("Event").iter().any(is_it).then_some(())
    });

    // What has been said is not written again.
    settle(&lab);
    let writes = || operator.metric("reprise_operator_writes_total", &format!("kind=\"{KIND}\""));
    let reconciles = || operator.metric("reprise_operator_reconciles_total", &format!("kind=\"{KIND}\""));
    let (written, reconciled) = (writes(), reconciles());
    assert!(written > 0.0);
    lab.merge(KIND, "b", &json!({ "metadata": { "annotations": { "test/look": "again" } } }));
    wait_until("it is looked at again", PATIENCE, || (reconciles() > reconciled).then_some(()));
    std::thread::sleep(SETTLED);
    assert_eq!(writes(), written);

    lab.delete(KIND, "a");
    wait_gone(&lab, "a");
    lab.wait_condition(KIND, "b", GRANTED);
    lab.delete(KIND, "b");
    wait_gone(&lab, "b");
    operator.kill();
}

#[test]
fn what_is_not_there_is_named_and_the_allocation_accepted_once_it_is() {
    let lab = Lab::new();
    let operator = lab.operator();
    let missing = ["Accepted", "False", "ReferenceNotFound"];
    ask(&lab, "elsewhere", json!({ "nodeName": "n9" }));
    let said = lab.wait_condition(KIND, "elsewhere", missing);
    assert!(said.contains("node n9 is not there"), "{said}");
    ask(&lab, "x", json!({ "tenantRef": { "name": "t" }, "slackProfileRef": { "name": "s" } }));
    let said = lab.wait_condition(KIND, "x", missing);
    assert!(said.contains("no KVCacheCluster has node n1"), "{said}");
    let wait_words = |words: &str| {
        wait_until(words, PATIENCE, || lab.wait_condition(KIND, "x", missing).contains(words).then_some(()));
    };
    lab.cluster(json!({ "pools": [{ "name": "p" }] }));
    wait_words("SSDPool p is not there");
    has_pool(&lab);
    let gpus = |uuid: &str| json!({ "gpus": [{ "uuid": uuid, "product": "H200" }] });
    agent_says(&lab, "n1", &["S1"], &[], gpus("GPU-1"));
    wait_words("has no GPU GPU-0: name one of GPU-1");
    agent_says(&lab, "n1", &["S1"], &[], gpus("GPU-0"));
    wait_words("CacheTenant t is not there");
    lab.apply(&json!({
        "apiVersion": "reprise.dev/v1alpha1", "kind": "CacheTenant", "metadata": { "name": "t" }, "spec": {},
    }));
    wait_words("SlackProfile s is not there in namespace cache");
    let profile = |product: &str, windows: Value| {
        let spec = json!({
            "subject": { "model": "m", "gpuProduct": product, "engineVersion": "e" },
            "windows": windows,
        });
        lab.apply(&json!({
            "apiVersion": "reprise.dev/v1alpha1", "kind": "SlackProfile", "metadata": { "name": "s" }, "spec": spec,
        }));
    };
    let window = |least: u32, most: u32| json!({ "phase": "Decode", "minTokens": least, "maxTokens": most, "slackMicros": 40, "maxIoSms": 4 });
    profile("L4", json!([window(0, 64)]));
    let said = lab.wait_condition(KIND, "x", ["Accepted", "False", "WrongGpu"]);
    assert!(said.contains("measured on L4") && said.contains("is H200"), "{said}");
    lab.delete("SlackProfile", "s");
    wait_words("SlackProfile s is not there in namespace cache");
    profile("H200", json!([window(0, 64), window(32, 96)]));
    let said = lab.wait_condition(KIND, "x", ["Accepted", "False", "ProfileInvalid"]);
    assert!(said.contains("overlap"), "{said}");
    // Its status tells that it is one now, and nothing else has changed.
    profile("H200", json!([window(0, 64)]));
    lab.wait_condition(KIND, "x", ["Accepted", "True", "AsDesired"]);
    lab.wait_condition(KIND, "x", GRANTED);
    // A pool of a directory has no controllers to lend of.
    lab.pool("d", "/var/lib/pool", json!({}));
    ask(&lab, "y", json!({ "poolRef": { "name": "d" } }));
    let said = lab.wait_condition(KIND, "y", ["Accepted", "False", "InvalidSpec"]);
    assert!(said.contains("not made of raw devices"), "{said}");
    operator.kill();
}

#[test]
fn a_deletion_waits_for_the_agent_and_what_is_given_back_is_lent_after_it() {
    let (lab, operator) = lab_with(&["S1"]);
    ask(&lab, "a", json!({ "queuePairs": 12 }));
    lab.wait_condition(KIND, "a", GRANTED);
    agent_says(&lab, "n1", &["S1"], &[("a", 12)], json!({}));
    lab.wait_condition(KIND, "a", ["Programmed", "True", "AsDesired"]);
    ask(&lab, "b", json!({}));
    lab.wait_condition(KIND, "b", WAITS);
    lab.delete(KIND, "a");
    let said = lab.wait_condition(KIND, "a", ["DeletionBlocked", "True", "Releasing"]);
    assert!(said.contains("n1") && said.contains("12 queue pairs"), "{said}");
    std::thread::sleep(SETTLED);
    assert!(lab.get(KIND, "a").is_some());
    lab.wait_condition(KIND, "b", WAITS);
    agent_says(&lab, "n1", &["S1"], &[], json!({}));
    wait_gone(&lab, "a");
    lab.wait_condition(KIND, "b", GRANTED);

    // A pod that uses it keeps it.
    status(&lab, "b", json!({ "reservedFor": { "name": "engine", "uid": "u-1" } }));
    lab.delete(KIND, "b");
    let said = lab.wait_condition(KIND, "b", ["DeletionBlocked", "True", "InUse"]);
    assert!(said.contains("engine"), "{said}");
    lab.wait_condition(KIND, "b", GRANTED);
    status(&lab, "b", json!({ "reservedFor": null }));
    wait_gone(&lab, "b");
    operator.kill();
}

#[test]
fn a_grant_ends_with_its_time_and_its_room_is_lent_again() {
    let (lab, operator) = lab_with(&["S1"]);
    ask(&lab, "a", json!({ "queuePairs": 12, "ttl": "1h" }));
    lab.wait_condition(KIND, "a", GRANTED);
    let a = lab.get(KIND, "a").expect("it is there");
    let ends: Timestamp = a.data["status"]["expiresAt"].as_str().expect("a time").parse().expect("a time");
    let left = ends.duration_since(Timestamp::now());
    assert!(left > SignedDuration::from_mins(55) && left <= SignedDuration::from_mins(60), "{left:?}");
    ask(&lab, "b", json!({}));
    lab.wait_condition(KIND, "b", WAITS);
    // The shortest time is a minute: it is moved to a moment from now, of which nothing tells.
    let soon = Timestamp::now() + SignedDuration::from_secs(2);
    status(&lab, "a", json!({ "expiresAt": soon.to_string() }));
    lab.wait_condition(KIND, "a", ["Released", "True", "Expired"]);
    lab.wait_condition(KIND, "a", ["Allocated", "False", "Expired"]);
    lab.wait_condition(KIND, "b", GRANTED);
    // It is over for good.
    lab.delete(KIND, "b");
    wait_gone(&lab, "b");
    std::thread::sleep(SETTLED);
    let a = lab.get(KIND, "a").expect("it is there");
    assert!(grants(&a).is_empty() && a.finalizers().is_empty());
    operator.kill();
}

#[test]
fn a_guaranteed_allocation_takes_back_what_others_have_of_its_controller() {
    let (lab, operator) = lab_with(&["S1"]);
    ask(&lab, "effort", json!({ "qos": "BestEffort", "ttl": "1h" }));
    lab.wait_condition(KIND, "effort", GRANTED);
    agent_says(&lab, "n1", &["S1"], &[("effort", 8)], json!({}));
    lab.wait_condition(KIND, "effort", ["Programmed", "True", "AsDesired"]);
    ask(&lab, "own", json!({ "qos": "Guaranteed", "isolation": "ExclusiveController" }));
    let said = lab.wait_condition(KIND, "effort", ["Allocated", "False", "TakenBack"]);
    assert!(said.contains("cache/own"), "{said}");
    lab.wait_condition(KIND, "effort", ["Released", "False", "Releasing"]);
    let said = lab.wait_condition(KIND, "own", ["Allocated", "False", "Releasing"]);
    assert!(said.contains("cache/effort 8"), "{said}");
    agent_says(&lab, "n1", &["S1"], &[], json!({}));
    lab.wait_condition(KIND, "effort", ["Released", "True", "TakenBack"]);
    lab.wait_condition(KIND, "own", GRANTED);
    // Nobody else on it, however little he asks for.
    ask(&lab, "small", json!({ "queuePairs": 1 }));
    lab.wait_condition(KIND, "small", WAITS);
    assert_eq!(lent(&lab), BTreeMap::from([("S1".to_owned(), 8)]));
    operator.kill();
}

#[test]
fn with_its_node_the_grants_of_a_node_end() {
    let (lab, operator) = lab_with(&["S1"]);
    for name in ["stays", "goes"] {
        ask(&lab, name, json!({ "queuePairs": 4 }));
        lab.wait_condition(KIND, name, GRANTED);
    }
    agent_says(&lab, "n1", &["S1"], &[("stays", 4), ("goes", 4)], json!({}));
    lab.wait_condition(KIND, "goes", ["Programmed", "True", "AsDesired"]);
    lab.delete(KIND, "goes");
    lab.wait_condition(KIND, "goes", ["DeletionBlocked", "True", "Releasing"]);
    lab.delete("Node", "n1");
    wait_gone(&lab, "goes");
    let said = lab.wait_condition(KIND, "stays", ["Released", "True", "AgentGone"]);
    assert!(said.contains("n1"), "{said}");
    lab.delete(KIND, "stays");
    wait_gone(&lab, "stays");
    operator.kill();
}

#[test]
fn an_operator_that_is_killed_again_and_again_lends_nothing_twice() {
    let lab = Lab::new();
    let mut random = seed::seeded("an_operator_that_is_killed_again_and_again_lends_nothing_twice");
    // A watch of a killed operator ends in the middle of a line.
    for words in
        ["a reconcile failed and is tried again", "a watch was lost and begins again", "the lease cannot be"]
    {
        lab.world.allow(words);
    }
    // Of one name, so that none waits for the lease of the one before.
    let files = lab.operator_files("killed");
    let start = || files.start().expect("the operator starts");
    let mut operator = start();
    has_pool(&lab);
    agent_says(&lab, "n1", &["S1", "S2", "S3"], &[], json!({}));
    let mut names: Vec<String> = Vec::new();
    let mut seen: BTreeMap<String, Vec<Value>> = BTreeMap::new();
    let mut look = |lab: &Lab| {
        for (serial, pairs) in lent(lab) {
            assert!(pairs <= PAIRS / 2, "{serial} lends {pairs}");
        }
        for allocation in lab.list(KIND) {
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
            ask(&lab, &name, if random.random_bool(0.25) { own } else { shared });
            names.push(name);
        }
        for _ in 0..2 {
            let name = names.swap_remove(random.random_range(0..names.len()));
            lab.delete(KIND, &name);
        }
        std::thread::sleep(Duration::from_millis(random.random_range(0..400)));
        operator.kill();
        look(&lab);
        operator = start();
    }
    let is_settled = |allocation: &DynamicObject| {
        let conditions = allocation.data["status"]["conditions"].as_array().cloned().unwrap_or_default();
        conditions.iter().any(|one| one["type"] == "Allocated")
            && allocation.metadata.deletion_timestamp.is_none()
    };
    wait_until("everybody is answered", 2 * PATIENCE, || {
        look(&lab);
        lab.list(KIND).iter().all(is_settled).then_some(())
    });
    let granted = lab.list(KIND).iter().filter(|allocation| !grants(allocation).is_empty()).count();
    assert!(granted > 0);
    // All of it is given back.
    for name in &names {
        lab.delete(KIND, name);
    }
    wait_until("all are gone", PATIENCE, || lab.list(KIND).is_empty().then_some(()));
    operator.kill();
}
