//! What has converged is not written to, and what changes while the API server is away is done when it is back.

use std::time::Duration;

use reprise_e2e::{Operator, PATIENCE, wait_until};
use serde_json::json;

use crate::lab::{Lab, SETTLED, versions};

/// Reconciles without a change that are looked at.
const RESYNCS: usize = 10;

/// Waits until nothing that the operator makes is written for a while.
pub(crate) fn settle(lab: &Lab) {
    let mut before = versions(&lab.made());
    wait_until("nothing is written any more", 3 * PATIENCE, || {
        std::thread::sleep(SETTLED);
        let now = versions(&lab.made());
        let same = now == before;
        before = now;
        same.then_some(())
    });
}

/// Looks at everything again and again, and at the end nothing has been written.
pub(crate) fn assert_writes_nothing(lab: &Lab, operator: &Operator) {
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
    assert_writes_nothing(&lab, &operator);
    assert!(operator.terminate().success());
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
