//! Leader election of operator replicas, and the `apply` command that the chart runs.

use std::time::Duration;

use k8s_openapi::api::coordination::v1::Lease;
use kube::api::Api;
use reprise_e2e::{Fault, PATIENCE, wait_until};
use serde_json::json;

use crate::operator::test_cluster::{OPERATOR_NAMESPACE, TestCluster};

/// Upper bound for a takeover: a lease expires after 15 s without renewal, and replicas read it every 3 s.
const TAKES_OVER_WITHIN: Duration = Duration::from_secs(60);

#[test]
fn standby_replica_takes_over_when_leader_is_killed_or_stops() {
    let k8s = TestCluster::new();
    let is_leader = |operator: &reprise_e2e::Operator| operator.metric("reprise_operator_leader", "") > 0.0;
    let started = |name: &str| {
        let operator = k8s.operator_files(name).start().expect("the operator starts");
        wait_until("the operator is ready", PATIENCE, || {
            (operator.admin().get("/readyz").ok()?.0 == 200).then_some(())
        });
        assert_eq!(operator.admin().get("/healthz").expect("the operator serves /healthz").0, 200);
        operator
    };
    let first = started("first");
    wait_until("the first operator is the leader", PATIENCE, || is_leader(&first).then_some(()));
    let second = started("second");
    k8s.cluster(json!({}));
    k8s.wait_for("DaemonSet", "c-agent");
    assert!(!is_leader(&second));
    assert!(second.metric("reprise_operator_writes_total", "") < 1.0);
    first.kill();
    wait_until("the second operator is the leader", TAKES_OVER_WITHIN, || is_leader(&second).then_some(()));
    k8s.delete("DaemonSet", "c-agent");
    k8s.wait_for("DaemonSet", "c-agent");
    // An operator that stops releases its lease, so its successor does not wait for the expiry.
    let third = started("third");
    assert!(second.terminate().success());
    let leases: Api<Lease> = Api::namespaced(k8s.client(), OPERATOR_NAMESPACE);
    let lease = k8s.server.block_on(leases.get("reprise-operator")).expect("the lease exists");
    let holder = lease.spec.and_then(|spec| spec.holder_identity).unwrap_or_default();
    assert!(holder.is_empty() || holder == "third", "the lease is still held by {holder}");
    wait_until("the third operator is the leader", PATIENCE, || is_leader(&third).then_some(()));
    third.kill();
}

#[test]
fn failed_lease_renewal_is_retried_without_losing_lease() {
    let k8s = TestCluster::new();
    // A lost answer fails only one attempt.
    k8s.env.allow("lease request failed");
    let proxy = k8s.env.fault_proxy(&k8s.server);
    let operator = k8s.operator_files("operator").via_proxy(&proxy).start().expect("the operator starts");
    let is_leader = || operator.metric("reprise_operator_leader", "") > 0.0;
    wait_until("the operator is the leader", PATIENCE, || is_leader().then_some(()));
    let leases: Api<Lease> = Api::namespaced(k8s.client(), OPERATOR_NAMESPACE);
    let renewed = || {
        let lease = k8s.server.block_on(leases.get("reprise-operator")).expect("the lease exists");
        lease.spec.and_then(|spec| spec.renew_time)
    };
    for fault in [Fault::Conflict, Fault::TimedOut, Fault::Unanswered] {
        proxy.fail_next("/leases/", fault, 1);
        wait_until("a renewal has failed", PATIENCE, || proxy.has_injected_all().then_some(()));
        let before = renewed();
        wait_until("the lease is renewed", PATIENCE, || (renewed() != before).then_some(()));
    }
    assert!(is_leader(), "the process has kept its lease throughout");
    k8s.cluster(json!({}));
    k8s.wait_for("DaemonSet", "c-agent");
    assert!(operator.terminate().success());
}

#[test]
fn chart_objects_are_applied_and_invalid_ones_rejected() {
    let k8s = TestCluster::new();
    let files = k8s.operator_files("apply");
    let apply = |text: &str| {
        let path = k8s.env.folder().join("objects.yaml");
        std::fs::write(&path, text).expect("a file can be written");
        let path = path.to_str().expect("folders of tests are UTF-8");
        files.command(&["apply", "--namespace", "cache", path]).output().expect("the operator can be started")
    };
    let good = "apiVersion: reprise.dev/v1alpha1\nkind: KVCacheCluster\nmetadata: {name: c}\nspec: {}\n---\n\
                apiVersion: reprise.dev/v1alpha1\nkind: SSDPool\nmetadata: {name: p}\nspec: {directory: {path: /p, size: 1Gi}}\n";
    for _ in 0..2 {
        let output = apply(good);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }
    assert!(k8s.get("KVCacheCluster", "c").is_some() && k8s.get("SSDPool", "p").is_some());
    for (text, words) in [
        ("apiVersion: v1\nkind: Secret\nmetadata: {name: s}\n", "expected a kind of reprise.dev/v1alpha1"),
        (
            "apiVersion: reprise.dev/v1alpha1\nkind: SSDPool\nmetadata: {name: q}\nspec: {}\n",
            "exactly one of devices",
        ),
        (
            "apiVersion: reprise.dev/v1alpha1\nkind: SSDPool\nmetadata: {name: q}\nspec: {directry: {}}\n",
            "directry",
        ),
        ("kind: [", "as YAML"),
    ] {
        let output = apply(text);
        let message = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success() && message.contains(words), "{text}: {message}");
    }
}
