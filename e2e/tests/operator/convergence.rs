//! What has converged is not written to, and what changes while the API server is away is done when it is back.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use kube::ResourceExt;
use kube::api::{Patch, PatchParams};
use reprise_e2e::{Operator, PATIENCE, wait_until};
use serde_json::json;

use crate::agents::{Agents, PRODUCT};
use crate::lab::{Lab, SETTLED, THEIRS, versions};
use crate::queues::{WAITS, ask};
use crate::stores::lose_the_authority;

/// What the operator says when the API server goes away.
const WATCH_LOST: &str = "a watch was lost and begins again";

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

/// Looks at everything again and again, and at the end nothing has been written, and nothing asked for but by the clock.
pub(crate) fn assert_writes_nothing(lab: &Lab, operator: &Operator) {
    wait_written(operator);
    let (mut wanted, begun) = (everything(lab), Asked::of(operator));
    let looked_at: Vec<String> = wanted.keys().filter(|key| reconciles(key)).cloned().collect();
    let kinds: BTreeSet<&str> = looked_at.iter().map(|key| split(key).0).collect();
    let reconciled = |kind: &str| {
        operator.metric("reprise_operator_reconciles_total{", &format!("kind=\"{kind}\",result=\"done\""))
    };
    let first: BTreeMap<&str, f64> = kinds.iter().map(|kind| (*kind, reconciled(kind))).collect();
    for resync in 0..RESYNCS {
        let already: Vec<f64> = kinds.iter().map(|kind| reconciled(kind)).collect();
        // An annotation changes nothing that is wanted, and makes everything be looked at.
        for key in &looked_at {
            wanted.insert(key.clone(), mark(lab, key, &resync.to_string()));
        }
        wait_until("each kind is reconciled", PATIENCE, || {
            kinds.iter().zip(&already).all(|(kind, already)| reconciled(kind) > *already).then_some(())
        });
    }
    std::thread::sleep(SETTLED);
    for (kind, first) in first {
        assert!(reconciled(kind) - first >= RESYNCS as f64, "{kind}");
    }
    assert_eq!(everything(lab), wanted, "nothing is written but by the test");
    begun.assert_is_all(operator);
}

/// Waits until all is written that may wait: sums of a status do so for 10 s after the last write.
fn wait_written(operator: &Operator) {
    let written = || operator.metric("reprise_operator_writes_total{", "");
    let (mut last, mut since) = (written(), Instant::now());
    wait_until("nothing is written for 11 s", 4 * PATIENCE, || {
        std::thread::sleep(Duration::from_millis(100));
        let now = written();
        if now > last {
            (last, since) = (now, Instant::now());
        }
        (since.elapsed() > Duration::from_secs(11)).then_some(())
    });
}

/// Kind and name.
fn split(key: &str) -> (&str, &str) {
    key.split_once('/').expect("kind and name")
}

/// Whether the operator reconciles objects of this kind.
fn reconciles(key: &str) -> bool {
    split(key).0 == "Node" || THEIRS.iter().any(|(kind, ..)| *kind == split(key).0)
}

/// Versions of all that an operator makes, looks at or says something of.
fn everything(lab: &Lab) -> BTreeMap<String, String> {
    let nodes =
        lab.list("Node").into_iter().map(|node| (format!("Node/{}", node.name_any()), node)).collect();
    [lab.made(), lab.theirs(), nodes].iter().flat_map(versions).collect()
}

/// Changes what nobody goes by; the version that comes of it.
pub(crate) fn mark(lab: &Lab, key: &str, value: &str) -> String {
    let (kind, name) = split(key);
    let mark = json!({ "metadata": { "annotations": { "test/resync": value } } });
    let (api, params) = (lab.api(kind), PatchParams::default());
    let marked = lab.server.block_on(api.patch(name, &params, &Patch::Merge(&mark)));
    marked.expect("it is there").resource_version().expect("stored objects have one")
}

/// What an operator has asked of the API server, written and failed at.
struct Asked {
    requests: BTreeMap<String, f64>,
    written: f64,
    failed: f64,
}

impl Asked {
    fn of(operator: &Operator) -> Asked {
        Asked {
            requests: operator.samples("reprise_operator_api_requests_total"),
            written: operator.metric("reprise_operator_writes_total{", ""),
            failed: operator.metric("reprise_operator_reconciles_total{", "result=\"failed\""),
        }
    }

    /// Since then only what time alone asks for has been: renewals of the lease, watches that begin again, and whether a kind is served by now that was
    /// not. A refused write would be here as well.
    fn assert_is_all(&self, operator: &Operator) {
        let (now, lease) = (Asked::of(operator), ["get", "update"].map(|verb| labels(verb, "leases", "200")));
        let by_time = |asked: &String| {
            let watches = asked.starts_with("verb=\"watch\"") && asked.ends_with("code=\"200\"");
            // A renewal that is refused or not answered in time, as on a busy machine, is made again.
            let of_lease = |verb| asked.starts_with(&format!("verb=\"{verb}\",resource=\"leases\""));
            let renewals = of_lease("get") || of_lease("update");
            watches || renewals || *asked == labels("list", "podmonitors", "404")
        };
        let before = |asked: &String| self.requests.get(asked).copied().unwrap_or_default();
        let new = now.requests.iter().filter(|(asked, count)| **count > before(asked) && !by_time(asked));
        assert_eq!(new.collect::<Vec<_>>(), [], "what is so is not asked for");
        // Every 5 s or so: without it nothing would be counted here.
        wait_until("the lease is renewed, and that is counted", PATIENCE, || {
            let now = Asked::of(operator).requests;
            lease.iter().all(|asked| now.get(asked) > self.requests.get(asked)).then_some(())
        });
        assert_eq!((now.written, now.failed), (self.written, self.failed));
    }
}

/// Labels of a sample, as they are served.
fn labels(verb: &str, resource: &str, code: &str) -> String {
    format!("verb=\"{verb}\",resource=\"{resource}\",code=\"{code}\"")
}

#[test]
fn a_converged_cluster_is_not_written_to() {
    let lab = Lab::new();
    let operator = lab.operator();
    lab.pool("p", "/var/lib/pool", json!({}));
    lab.raw_pool("r", json!({}));
    lab.tenant("t", json!({ "perNode": { "ssd": { "reserved": "16Mi" } }, "namespaceSelector": {} }));
    lab.profile("s", PRODUCT, 60);
    // With an etcd of its own as well: certificates are drawn once.
    let pools = json!([{ "name": "p" }, { "name": "r" }]);
    lab.cluster(json!({ "pools": pools, "etcd": { "mode": "Managed" }, "slackProfiles": {} }));
    lab.wait_for("Secret", "c-etcd-tls");
    lab.all_are_ready("c-etcd");
    lab.members_are_ready();
    // One is granted and the other waits: that is said once.
    for (name, pairs) in [("a", 12), ("b", 8)] {
        ask(&lab, name, json!({ "poolRef": { "name": "r" }, "queuePairs": pairs }));
    }
    let mut agents = Agents::default();
    for (kind, name, wanted) in [
        ("SSDPool", "p", ["Ready", "True", "AsDesired"]),
        ("SSDPool", "r", ["Ready", "True", "AsDesired"]),
        ("KVCacheCluster", "c", ["AgentsReady", "True", "AsDesired"]),
        ("CacheTenant", "t", ["PodsBound", "True", "AsDesired"]),
        ("SlackProfile", "s", ["Distributed", "True", "AsDesired"]),
        ("GPUQueueAllocation", "a", ["Programmed", "True", "AsDesired"]),
        ("GPUQueueAllocation", "b", WAITS),
    ] {
        agents.obey_until(&lab, (kind, name), wanted);
    }
    settle(&lab);
    assert!(!agents.obey(&lab), "nothing new is wanted of them");
    assert_writes_nothing(&lab, &operator);
    assert!(operator.terminate().success());
}

#[test]
fn a_managed_store_that_is_refused_or_has_lost_its_authority_is_not_asked_about() {
    let lab = Lab::new();
    let operator = lab.operator();
    // What it would have is not there, and is not looked for.
    lab.cluster(json!({ "etcd": { "mode": "Managed" }, "injection": { "mode": "Webhook" } }));
    lab.wait_condition("KVCacheCluster", "c", ["Accepted", "False", "Unsupported"]);
    settle(&lab);
    assert_writes_nothing(&lab, &operator);
    lab.cluster(json!({ "etcd": { "mode": "Managed" } }));
    lab.wait_for("Secret", "c-etcd-tls");
    lab.all_are_ready("c-etcd");
    lab.members_are_ready();
    lose_the_authority(&lab);
    settle(&lab);
    assert_writes_nothing(&lab, &operator);
    operator.kill();
}

#[test]
fn an_api_server_that_was_away_finds_everything_brought_up_to_date() {
    let mut lab = Lab::new();
    // The operator says that it has lost its watches, and may fail to renew.
    for words in [WATCH_LOST, "a reconcile failed", "the lease cannot be"] {
        lab.world.allow(words);
    }
    let files = lab.operator_files("operator");
    let operator = files.start().expect("the operator starts");
    lab.cluster(json!({}));
    lab.wait_for("DaemonSet", "c-agent");
    settle(&lab);
    let lost = || std::fs::read_to_string(files.log()).expect("it logs").matches(WATCH_LOST).count();
    let before = lost();
    lab.server.kill();
    // No longer than it takes: after ten seconds without its lease it would end.
    wait_until("the operator has lost its watches", PATIENCE, || (lost() > before).then_some(()));
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
