//! Deletions of what engines use: held, said, and let go.

use std::time::{Duration, Instant};

use k8s_openapi::jiff::{SignedDuration, Timestamp};
use kube::ResourceExt;
use reprise_e2e::{Operator, PATIENCE, wait_until};
use serde_json::{Value, json};

use crate::lab::{Lab, SETTLED};
use crate::pools::wait_claims;

pub(crate) const FINALIZER: &str = "reprise.dev/in-use";
pub(crate) const BLOCKED: [&str; 3] = ["DeletionBlocked", "True", "InUse"];

/// Seconds for which nothing must be heard of sessions: agents are played, and say nothing by themselves.
pub(crate) const UNUSED: u64 = 20;
/// Less, by what a busy machine may take to hear of something: what is let go sooner was let go too soon.
const EARLY: Duration = Duration::from_secs(UNUSED - 8);
/// And longer, on a busy machine.
pub(crate) const LATE: Duration = Duration::from_secs(UNUSED + 45);

/// What the operator says of a time that is shorter than agents are silent.
pub(crate) const TOO_SHORT: &str = "give --unused-seconds more than";

fn start(lab: &Lab) -> Operator {
    lab.world.allow(TOO_SHORT);
    let started = lab.operator_files("operator").unused_for(UNUSED).start();
    started.unwrap_or_else(|refused| panic!("the operator does not start: {refused:?}"))
}

/// Plays the agent of a node with so many sessions.
pub(crate) fn sessions(lab: &Lab, node: &str, count: u32) {
    lab.agent_says(node, "Open", |status| status["sessions"] = json!(count));
}

pub(crate) fn holds(lab: &Lab, kind: &str, name: &str) -> bool {
    lab.get(kind, name).is_some_and(|found| found.finalizers().iter().any(|one| one == FINALIZER))
}

pub(crate) fn wait_held(lab: &Lab, kind: &str, name: &str) {
    wait_until(&format!("{kind} {name} has the finalizer"), PATIENCE, || {
        holds(lab, kind, name).then_some(())
    });
}

pub(crate) fn wait_gone(lab: &Lab, kind: &str, name: &str) {
    wait_until(&format!("{kind} {name} goes"), LATE, || lab.get(kind, name).is_none().then_some(()));
}

fn confirm(lab: &Lab, kind: &str, name: &str) {
    let yes = json!({ "metadata": { "annotations": { "reprise.dev/delete-in-use": "yes" } } });
    lab.merge(kind, name, &yes);
}

/// A cluster with a pool on both nodes, whose agents have no sessions.
pub(crate) fn running(lab: &Lab, pool: Value) {
    lab.pool("p", "/var/lib/pool", pool);
    lab.cluster(json!({ "pools": [{ "name": "p" }] }));
    for node in ["n1", "n2"] {
        wait_claims(lab, node, &["p"]);
        sessions(lab, node, 0);
    }
    lab.wait_condition("SSDPool", "p", ["Ready", "True", "AsDesired"]);
}

#[test]
fn what_engines_use_waits_until_they_have_gone_and_keeps_what_it_has() {
    let lab = Lab::new();
    let operator = start(&lab);
    running(&lab, json!({}));
    assert!(!holds(&lab, "SSDPool", "p") && !holds(&lab, "KVCacheCluster", "c"), "nobody uses them");
    sessions(&lab, "n1", 2);
    wait_held(&lab, "SSDPool", "p");
    wait_held(&lab, "KVCacheCluster", "c");

    lab.delete("SSDPool", "p");
    let said = lab.wait_condition("SSDPool", "p", BLOCKED);
    assert!(said.contains("n1 (2)") && said.contains("reprise.dev/delete-in-use"), "{said}");
    // As agents do, whether it has changed or not.
    sessions(&lab, "n1", 2);
    std::thread::sleep(SETTLED);
    wait_claims(&lab, "n1", &["p"]);
    wait_claims(&lab, "n2", &["p"]);
    // An agent that restarts has none until its engines are back.
    sessions(&lab, "n1", 0);
    std::thread::sleep(EARLY);
    wait_claims(&lab, "n1", &["p"]);
    sessions(&lab, "n1", 2);
    std::thread::sleep(EARLY);
    wait_claims(&lab, "n1", &["p"]);
    let none = Instant::now();
    sessions(&lab, "n1", 0);
    wait_gone(&lab, "SSDPool", "p");
    assert!(none.elapsed() >= EARLY, "{:?}", none.elapsed());
    wait_claims(&lab, "n1", &[]);
    wait_until("the cluster has its finalizer no more", LATE, || {
        (!holds(&lab, "KVCacheCluster", "c")).then_some(())
    });

    // A cluster that waits keeps its nodes; who says yes has it gone at once.
    sessions(&lab, "n2", 1);
    wait_held(&lab, "KVCacheCluster", "c");
    lab.delete("KVCacheCluster", "c");
    let said = lab.wait_condition("KVCacheCluster", "c", BLOCKED);
    assert!(said.contains("n2 (1)"), "{said}");
    sessions(&lab, "n2", 1);
    std::thread::sleep(SETTLED);
    assert!(lab.get("CacheNode", "n2").is_some(), "its agents are told nothing else");
    // It works as before: what is changed of it is done.
    let configured = || {
        let found = lab.wait_for("ConfigMap", "c-agent");
        let files = found.data["data"].as_object().cloned().unwrap_or_default();
        files.values().any(|file| {
            let text = file.as_str().unwrap_or_default();
            text.lines().any(|line| line == "bytes = \"128MiB\"")
        })
    };
    assert!(!configured(), "it is not so yet");
    lab.merge("KVCacheCluster", "c", &json!({ "spec": { "cache": { "dram": "128Mi" } } }));
    wait_until("agents are told", PATIENCE, || configured().then_some(()));
    sessions(&lab, "n2", 1);
    confirm(&lab, "KVCacheCluster", "c");
    wait_gone(&lab, "KVCacheCluster", "c");
    wait_until("its nodes are nobody's", PATIENCE, || lab.get("CacheNode", "n2").is_none().then_some(()));
    operator.kill();
}

#[test]
fn a_pool_in_use_is_wiped_after_engines_have_gone_and_not_before() {
    let lab = Lab::new();
    let operator = start(&lab);
    running(&lab, json!({ "deletionPolicy": "Wipe", "wipeConfirmation": "yes-really-destroy-the-data" }));
    wait_held(&lab, "SSDPool", "p");
    assert!(!holds(&lab, "KVCacheCluster", "c"), "what destroys nothing is held by engines alone");
    sessions(&lab, "n1", 1);
    lab.delete("SSDPool", "p");
    lab.wait_condition("SSDPool", "p", BLOCKED);
    std::thread::sleep(SETTLED);
    for node in ["n1", "n2"] {
        assert_eq!(wait_claims(&lab, node, &["p"])[0]["wipe"], false, "{node}: nothing is destroyed before");
    }
    confirm(&lab, "SSDPool", "p");
    lab.wait_condition("SSDPool", "p", ["DeletionBlocked", "True", "Releasing"]);
    for node in ["n1", "n2"] {
        wait_until("the claim says so", PATIENCE, || {
            (wait_claims(&lab, node, &["p"])[0]["wipe"] == true).then_some(())
        });
        lab.agent_reports(node, "Wiped");
    }
    wait_gone(&lab, "SSDPool", "p");
    operator.kill();
}

#[test]
fn engines_that_come_before_a_wipe_is_confirmed_are_waited_for() {
    let lab = Lab::new();
    let operator = start(&lab);
    running(&lab, json!({ "deletionPolicy": "Wipe" }));
    wait_held(&lab, "SSDPool", "p");
    lab.delete("SSDPool", "p");
    let said = lab.wait_condition("SSDPool", "p", ["DeletionBlocked", "True", "ConfirmationMissing"]);
    assert!(said.contains("yes-really-destroy-the-data"), "{said}");
    sessions(&lab, "n2", 1);
    let said = lab.wait_condition("SSDPool", "p", BLOCKED);
    assert!(said.contains("n2 (1)"), "{said}");
    lab.merge("SSDPool", "p", &json!({ "spec": { "wipeConfirmation": "yes-really-destroy-the-data" } }));
    lab.wait_condition("SSDPool", "p", BLOCKED);
    std::thread::sleep(SETTLED);
    assert_eq!(wait_claims(&lab, "n2", &["p"])[0]["wipe"], false, "an engine reads it");
    sessions(&lab, "n2", 0);
    lab.wait_condition_within(LATE, ("SSDPool", "p"), ["DeletionBlocked", "True", "Releasing"]);
    for node in ["n1", "n2"] {
        wait_until("the claim says so", PATIENCE, || {
            (wait_claims(&lab, node, &["p"])[0]["wipe"] == true).then_some(())
        });
        lab.agent_reports(node, "Wiped");
    }
    wait_gone(&lab, "SSDPool", "p");
    operator.kill();
}

#[test]
fn what_a_stalled_watch_keeps_back_holds_a_deletion() {
    const SHORT: u64 = 10;
    let lab = Lab::new();
    lab.world.allow(TOO_SHORT);
    let interposer = lab.world.interposer(&lab.server);
    let files = lab.operator_files("operator").through(&interposer).unused_for(SHORT);
    let operator = files.start().unwrap_or_else(|refused| panic!("the operator does not start: {refused:?}"));
    running(&lab, json!({}));
    sessions(&lab, "n1", 1);
    wait_held(&lab, "SSDPool", "p");
    sessions(&lab, "n1", 1);
    lab.delete("SSDPool", "p");
    lab.wait_condition("SSDPool", "p", BLOCKED);
    sessions(&lab, "n1", 1);
    interposer.stall(Some("/cachenodes"));
    sessions(&lab, "n1", 1);
    // It was said once, and is looked at twice.
    std::thread::sleep(Duration::from_secs(2 * SHORT + 2));
    assert!(holds(&lab, "SSDPool", "p"), "the API server knows that n1 has said so again");
    interposer.stall(None);
    sessions(&lab, "n1", 0);
    wait_gone(&lab, "SSDPool", "p");
    operator.kill();
}

#[test]
fn nobody_is_held_by_agents_that_are_gone_or_by_what_another_operator_left() {
    let lab = Lab::new();
    // Of an operator that has seen sessions; there are none by now.
    for (kind, name, spec) in [
        ("SSDPool", "left", json!({ "directory": { "path": "/left", "size": "64Mi" } })),
        (
            "KVCacheCluster",
            "left",
            json!({ "paused": true, "agents": { "nodeSelector": { "disk": "none" } } }),
        ),
    ] {
        lab.apply(&json!({
            "apiVersion": "reprise.dev/v1alpha1", "kind": kind,
            "metadata": { "name": name, "finalizers": [FINALIZER] }, "spec": spec,
        }));
        lab.delete(kind, name);
        assert!(lab.get(kind, name).is_some(), "{kind} waits for an operator");
    }
    let operator = start(&lab);
    wait_gone(&lab, "SSDPool", "left");
    wait_gone(&lab, "KVCacheCluster", "left");

    running(&lab, json!({}));
    // By its own clock it is away: that it has said something counts, and not when.
    let said = (Timestamp::now() - SignedDuration::from_hours(1)).to_string();
    lab.agent_says("n1", "Open", |status| {
        status["sessions"] = json!(3);
        status["lastUpdated"] = json!(said);
    });
    wait_held(&lab, "SSDPool", "p");
    lab.delete("SSDPool", "p");
    let said = lab.wait_condition("SSDPool", "p", BLOCKED);
    assert!(said.contains("n1 (3)") && said.contains(&format!("for {UNUSED} s")), "{said}");
    wait_gone(&lab, "SSDPool", "p");
    operator.kill();
}
