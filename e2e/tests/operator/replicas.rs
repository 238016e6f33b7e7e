//! Replicas of the operator: one works, another takes over; what the chart runs before and after.

use std::time::Duration;

use k8s_openapi::api::coordination::v1::Lease;
use kube::api::Api;
use reprise_e2e::{Fault, PATIENCE, wait_until};
use serde_json::json;

use crate::lab::{Lab, SYSTEM};

/// A lease that nobody renews runs out after 15 s, which is looked at every 3 s.
const TAKES_OVER_WITHIN: Duration = Duration::from_secs(60);

#[test]
fn one_replica_works_and_another_takes_over_when_it_is_killed_or_stops() {
    let lab = Lab::new();
    let is_leader = |operator: &reprise_e2e::Operator| operator.metric("reprise_operator_leader", "") > 0.0;
    let started = |name: &str| {
        let operator = lab.operator_files(name).start().expect("the operator starts");
        wait_until("it is ready", PATIENCE, || {
            (operator.admin().get("/readyz").ok()?.0 == 200).then_some(())
        });
        assert_eq!(operator.admin().get("/healthz").expect("it is served").0, 200);
        operator
    };
    let first = started("first");
    wait_until("the first one works", PATIENCE, || is_leader(&first).then_some(()));
    let second = started("second");
    lab.cluster(json!({}));
    lab.wait_for("DaemonSet", "c-agent");
    assert!(!is_leader(&second));
    assert!(second.metric("reprise_operator_writes_total", "") < 1.0);
    first.kill();
    wait_until("the second one works", TAKES_OVER_WITHIN, || is_leader(&second).then_some(()));
    lab.delete("DaemonSet", "c-agent");
    lab.wait_for("DaemonSet", "c-agent");
    // One that stops gives the lease up, and nobody waits for it to run out.
    let third = started("third");
    assert!(second.terminate().success());
    let leases: Api<Lease> = Api::namespaced(lab.client(), SYSTEM);
    let lease = lab.server.block_on(leases.get("reprise-operator")).expect("it was held");
    let holder = lease.spec.and_then(|spec| spec.holder_identity).unwrap_or_default();
    assert!(holder.is_empty() || holder == "third", "the lease is still held by {holder}");
    wait_until("the third one works", PATIENCE, || is_leader(&third).then_some(()));
    third.kill();
}

#[test]
fn a_renewal_that_is_refused_or_not_answered_costs_nobody_the_lease() {
    let lab = Lab::new();
    // An answer that is lost is an error of that attempt.
    lab.world.allow("the lease cannot be");
    let gate = lab.world.interposer(&lab.server);
    let operator = lab.operator_files("operator").through(&gate).start().expect("the operator starts");
    let works = || operator.metric("reprise_operator_leader", "") > 0.0;
    wait_until("it works", PATIENCE, || works().then_some(()));
    let leases: Api<Lease> = Api::namespaced(lab.client(), SYSTEM);
    let renewed = || {
        let lease = lab.server.block_on(leases.get("reprise-operator")).expect("the operator has it");
        lease.spec.and_then(|spec| spec.renew_time)
    };
    for fault in [Fault::Conflict, Fault::TimedOut, Fault::Unanswered] {
        gate.fail_next("/leases/", fault, 1);
        wait_until("a renewal has failed", PATIENCE, || gate.has_failed().then_some(()));
        let before = renewed();
        wait_until("the lease is renewed", PATIENCE, || (renewed() != before).then_some(()));
    }
    assert!(works(), "it is the same process, with the lease that it had");
    lab.cluster(json!({}));
    lab.wait_for("DaemonSet", "c-agent");
    assert!(operator.terminate().success());
}

#[test]
fn objects_of_a_chart_are_applied_and_others_refused_with_words() {
    let lab = Lab::new();
    let files = lab.operator_files("apply");
    let apply = |text: &str| {
        let path = lab.world.folder().join("objects.yaml");
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
    assert!(lab.get("KVCacheCluster", "c").is_some() && lab.get("SSDPool", "p").is_some());
    for (text, words) in [
        ("apiVersion: v1\nkind: Secret\nmetadata: {name: s}\n", "only kinds of reprise.dev/v1alpha1"),
        (
            "apiVersion: reprise.dev/v1alpha1\nkind: SSDPool\nmetadata: {name: q}\nspec: {}\n",
            "exactly one of devices",
        ),
        (
            "apiVersion: reprise.dev/v1alpha1\nkind: SSDPool\nmetadata: {name: q}\nspec: {directry: {}}\n",
            "directry",
        ),
        ("kind: [", "not YAML"),
    ] {
        let output = apply(text);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success() && said.contains(words), "{text}: {said}");
    }
}
