//! Deletion of pools in use: blocked by a finalizer, reported, and released after the last session. Clusters are
//! deleted at once.

use std::time::{Duration, Instant};

use k8s_openapi::jiff::{SignedDuration, Timestamp};
use kube::ResourceExt;
use reprise_e2e::{Operator, PATIENCE, wait_until};
use serde_json::{Value, json};

use crate::operator::pools::wait_claims;
use crate::operator::test_cluster::{QUIET_PERIOD, TestCluster};

pub(crate) const FINALIZER: &str = "reprise.dev/in-use";
pub(crate) const BLOCKED: [&str; 3] = ["DeletionBlocked", "True", "InUse"];

/// Seconds without a session report after which an object counts as unused. Simulated agents report only on
/// demand.
pub(crate) const UNUSED_SECONDS: u64 = 20;
/// Earliest allowed release. It is shorter by the delay of reports on a busy machine.
const EARLIEST: Duration = Duration::from_secs(UNUSED_SECONDS - 8);
/// Latest expected release on a busy machine.
pub(crate) const LATEST: Duration = Duration::from_secs(UNUSED_SECONDS + 45);

/// Part of the operator's warning that the unused time is shorter than the report interval of agents.
pub(crate) const TOO_SHORT: &str = "--unused-seconds is below the report interval";

fn start_operator(k8s: &TestCluster) -> Operator {
    k8s.env.allow(TOO_SHORT);
    let started = k8s.operator_files("operator").unused_for(UNUSED_SECONDS).start();
    started.unwrap_or_else(|error| panic!("the operator does not start: {error:?}"))
}

/// Simulates a report of a node's agent with `count` sessions.
pub(crate) fn report_sessions(k8s: &TestCluster, node: &str, count: u32) {
    k8s.agent_reports_with(node, "Open", |status| status["sessions"] = json!(count));
}

fn has_finalizer(k8s: &TestCluster, pool: &str) -> bool {
    k8s.get("SSDPool", pool).is_some_and(|found| found.finalizers().iter().any(|one| one == FINALIZER))
}

pub(crate) fn wait_finalizer(k8s: &TestCluster, pool: &str) {
    wait_until(&format!("pool {pool} has the finalizer"), PATIENCE, || {
        has_finalizer(k8s, pool).then_some(())
    });
}

/// Waits until the claims of pool `p` request the wipe; both agents report it, and the pool is deleted.
fn wipe_everywhere(k8s: &TestCluster) {
    for node in ["n1", "n2"] {
        wait_until("the claim requests the wipe", PATIENCE, || {
            (wait_claims(k8s, node, &["p"])[0]["wipe"] == true).then_some(())
        });
        k8s.agent_reports(node, "Wiped");
    }
    wait_deleted(k8s, "SSDPool", "p");
}

pub(crate) fn wait_deleted(k8s: &TestCluster, kind: &str, name: &str) {
    wait_until(&format!("{kind} {name} is deleted"), LATEST, || k8s.get(kind, name).is_none().then_some(()));
}

fn allow_deletion(k8s: &TestCluster, pool: &str) {
    let yes = json!({ "metadata": { "annotations": { "reprise.dev/delete-in-use": "yes" } } });
    k8s.merge("SSDPool", pool, &yes);
}

/// Creates a cluster with a pool on both nodes, whose agents report no sessions.
pub(crate) fn create_running_cluster(k8s: &TestCluster, pool: Value) {
    k8s.pool("p", "/var/lib/pool", pool);
    k8s.cluster(json!({ "pools": [{ "name": "p" }] }));
    for node in ["n1", "n2"] {
        wait_claims(k8s, node, &["p"]);
        report_sessions(k8s, node, 0);
    }
    k8s.wait_condition("SSDPool", "p", ["Ready", "True", "AsDesired"]);
}

#[test]
fn deletion_waits_for_engine_sessions_and_keeps_claims() {
    let k8s = TestCluster::new();
    let _operator = start_operator(&k8s);
    create_running_cluster(&k8s, json!({}));
    assert!(!has_finalizer(&k8s, "p"), "unused pools have no finalizer");
    report_sessions(&k8s, "n1", 2);
    wait_finalizer(&k8s, "p");

    k8s.delete("SSDPool", "p");
    k8s.wait_message("SSDPool", "p", BLOCKED, &["n1 (2)", "reprise.dev/delete-in-use"]);
    // Agents repeat their report even without a change.
    report_sessions(&k8s, "n1", 2);
    std::thread::sleep(QUIET_PERIOD);
    wait_claims(&k8s, "n1", &["p"]);
    wait_claims(&k8s, "n2", &["p"]);
    // A restarted agent has no sessions until its engines reconnect.
    report_sessions(&k8s, "n1", 0);
    std::thread::sleep(EARLIEST);
    wait_claims(&k8s, "n1", &["p"]);
    report_sessions(&k8s, "n1", 2);
    std::thread::sleep(EARLIEST);
    wait_claims(&k8s, "n1", &["p"]);
    let none = Instant::now();
    report_sessions(&k8s, "n1", 0);
    wait_deleted(&k8s, "SSDPool", "p");
    assert!(none.elapsed() >= EARLIEST, "{:?}", none.elapsed());
    wait_claims(&k8s, "n1", &[]);
}

#[test]
fn cluster_in_use_is_deleted_at_once_and_releases_its_pool() {
    let k8s = TestCluster::new();
    let _operator = start_operator(&k8s);
    create_running_cluster(&k8s, json!({}));
    report_sessions(&k8s, "n2", 1);
    wait_finalizer(&k8s, "p");
    k8s.delete("KVCacheCluster", "c");
    assert!(k8s.get("KVCacheCluster", "c").is_none(), "a cluster has no finalizer");
    wait_until("its CacheNode is deleted", PATIENCE, || k8s.get("CacheNode", "n2").is_none().then_some(()));
    wait_until("the pool that no node has loses its finalizer", LATEST, || {
        (!has_finalizer(&k8s, "p")).then_some(())
    });
}

#[test]
fn pool_in_use_is_wiped_only_after_sessions_or_override() {
    let k8s = TestCluster::new();
    let _operator = start_operator(&k8s);
    create_running_cluster(
        &k8s,
        json!({ "deletionPolicy": "Wipe", "wipeConfirmation": "yes-really-destroy-the-data" }),
    );
    wait_finalizer(&k8s, "p");
    report_sessions(&k8s, "n1", 1);
    k8s.delete("SSDPool", "p");
    k8s.wait_condition("SSDPool", "p", BLOCKED);
    std::thread::sleep(QUIET_PERIOD);
    for node in ["n1", "n2"] {
        assert_eq!(
            wait_claims(&k8s, node, &["p"])[0]["wipe"],
            false,
            "{node}: no wipe while engines have sessions"
        );
    }
    allow_deletion(&k8s, "p");
    k8s.wait_condition("SSDPool", "p", ["DeletionBlocked", "True", "Releasing"]);
    wipe_everywhere(&k8s);
}

#[test]
fn session_before_wipe_confirmation_blocks_wipe() {
    let k8s = TestCluster::new();
    let _operator = start_operator(&k8s);
    create_running_cluster(&k8s, json!({ "deletionPolicy": "Wipe" }));
    wait_finalizer(&k8s, "p");
    k8s.delete("SSDPool", "p");
    k8s.wait_message(
        "SSDPool",
        "p",
        ["DeletionBlocked", "True", "ConfirmationMissing"],
        &["yes-really-destroy-the-data"],
    );
    report_sessions(&k8s, "n2", 1);
    k8s.wait_message("SSDPool", "p", BLOCKED, &["n2 (1)"]);
    k8s.merge("SSDPool", "p", &json!({ "spec": { "wipeConfirmation": "yes-really-destroy-the-data" } }));
    k8s.wait_condition("SSDPool", "p", BLOCKED);
    std::thread::sleep(QUIET_PERIOD);
    assert_eq!(wait_claims(&k8s, "n2", &["p"])[0]["wipe"], false, "no wipe while an engine has a session");
    report_sessions(&k8s, "n2", 0);
    k8s.wait_condition_within(LATEST, ("SSDPool", "p"), ["DeletionBlocked", "True", "Releasing"]);
    wipe_everywhere(&k8s);
}

#[test]
fn stalled_watch_does_not_release_deletion() {
    const SHORT: u64 = 10;
    let k8s = TestCluster::new();
    k8s.env.allow(TOO_SHORT);
    let proxy = k8s.env.fault_proxy(&k8s.server);
    let files = k8s.operator_files("operator").via_proxy(&proxy).unused_for(SHORT);
    let _operator = files.start().unwrap_or_else(|error| panic!("the operator does not start: {error:?}"));
    create_running_cluster(&k8s, json!({}));
    report_sessions(&k8s, "n1", 1);
    wait_finalizer(&k8s, "p");
    report_sessions(&k8s, "n1", 1);
    k8s.delete("SSDPool", "p");
    k8s.wait_condition("SSDPool", "p", BLOCKED);
    report_sessions(&k8s, "n1", 1);
    proxy.stall_watches(Some("/cachenodes"));
    report_sessions(&k8s, "n1", 1);
    // The operator has seen one report. It checks twice before it removes the finalizer.
    std::thread::sleep(Duration::from_secs(2 * SHORT + 2));
    assert!(has_finalizer(&k8s, "p"), "the API server has a newer report of n1");
    proxy.stall_watches(None);
    report_sessions(&k8s, "n1", 0);
    wait_deleted(&k8s, "SSDPool", "p");
}

#[test]
fn stale_finalizers_and_silent_agents_do_not_block_deletion() {
    let k8s = TestCluster::new();
    // Finalizer of an earlier operator that had seen sessions, which have ended.
    k8s.apply(&json!({
        "apiVersion": "reprise.dev/v1alpha1", "kind": "SSDPool",
        "metadata": { "name": "left", "finalizers": [FINALIZER] },
        "spec": { "directory": { "path": "/left", "size": "64Mi" } },
    }));
    k8s.delete("SSDPool", "left");
    assert!(k8s.get("SSDPool", "left").is_some(), "it waits for an operator to remove the finalizer");
    let _operator = start_operator(&k8s);
    wait_deleted(&k8s, "SSDPool", "left");

    create_running_cluster(&k8s, json!({}));
    // The agent's clock is an hour late. The arrival of a report counts, not its timestamp.
    let last_updated = (Timestamp::now() - SignedDuration::from_hours(1)).to_string();
    k8s.agent_reports_with("n1", "Open", |status| {
        status["sessions"] = json!(3);
        status["lastUpdated"] = json!(last_updated);
    });
    wait_finalizer(&k8s, "p");
    k8s.delete("SSDPool", "p");
    k8s.wait_message("SSDPool", "p", BLOCKED, &["n1 (3)", &format!("for {UNUSED_SECONDS} s")]);
    wait_deleted(&k8s, "SSDPool", "p");
}
