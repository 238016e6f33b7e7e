//! Replicas of the operator: one works, another takes over; what the chart runs before and after.

use std::time::Duration;

use reprise_e2e::{PATIENCE, wait_until};
use serde_json::json;

use crate::lab::Lab;

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
    wait_until("the third one works", Duration::from_secs(12), || is_leader(&third).then_some(()));
    third.kill();
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
