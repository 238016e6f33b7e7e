//! A converged cluster causes no writes, and changes during an API-server outage are applied afterwards.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use kube::ResourceExt;
use kube::api::{Patch, PatchParams};
use reprise_e2e::{Operator, PATIENCE, wait_until};
use serde_json::json;

use crate::operator::agents::{Agents, PRODUCT};
use crate::operator::queues::{WAITING, create_allocation};
use crate::operator::test_cluster::{TestCluster, USER_KINDS, versions};

/// Log line of the operator when it loses the API server.
const WATCH_LOST: &str = "watch lost; restarting it";

/// Number of reconciles without a change.
const RESYNCS: usize = 10;

/// Triggers reconciles of all objects, and asserts that they cause no writes and no requests except periodic
/// ones.
pub(crate) fn assert_writes_nothing(k8s: &TestCluster, operator: &Operator) {
    wait_no_writes(operator);
    let (mut wanted, begun) = (all_versions(k8s), ApiUsage::of(operator));
    let keys: Vec<String> = wanted.keys().filter(|key| is_reconciled(key)).cloned().collect();
    let kinds: BTreeSet<&str> = keys.iter().map(|key| split_key(key).0).collect();
    let reconciled = |kind: &str| {
        operator.metric("reprise_operator_reconciles_total", &format!("kind=\"{kind}\",result=\"done\""))
    };
    let first: BTreeMap<&str, f64> = kinds.iter().map(|kind| (*kind, reconciled(kind))).collect();
    for resync in 0..RESYNCS {
        let already: Vec<f64> = kinds.iter().map(|kind| reconciled(kind)).collect();
        // An annotation triggers a reconcile without changing the desired state.
        for key in &keys {
            wanted.insert(key.clone(), annotate(k8s, key, &resync.to_string()));
        }
        wait_until("each kind is reconciled", PATIENCE, || {
            kinds.iter().zip(&already).all(|(kind, already)| reconciled(kind) > *already).then_some(())
        });
    }
    k8s.settle();
    for (kind, first) in first {
        assert!(reconciled(kind) - first >= RESYNCS as f64, "{kind}");
    }
    assert_eq!(all_versions(k8s), wanted, "only the test writes objects");
    begun.assert_only_periodic(operator);
}

/// Waits until delayed writes are done: totals of a status are written at most every 10 s.
fn wait_no_writes(operator: &Operator) {
    let written = || operator.metric("reprise_operator_writes_total", "");
    let (mut last, mut since) = (written(), Instant::now());
    wait_until("nothing is written for 11 s", 4 * PATIENCE, || {
        let now = written();
        if now > last {
            (last, since) = (now, Instant::now());
        }
        (since.elapsed() > Duration::from_secs(11)).then_some(())
    });
}

/// Splits a key into kind and name.
fn split_key(key: &str) -> (&str, &str) {
    key.split_once('/').expect("kind and name")
}

/// Whether the operator reconciles objects of this kind.
fn is_reconciled(key: &str) -> bool {
    split_key(key).0 == "Node" || USER_KINDS.iter().any(|(kind, ..)| *kind == split_key(key).0)
}

/// Resource versions of all objects that the operator writes or watches.
fn all_versions(k8s: &TestCluster) -> BTreeMap<String, String> {
    let nodes =
        k8s.list("Node").into_iter().map(|node| (format!("Node/{}", node.name_any()), node)).collect();
    [k8s.operator_objects(), k8s.user_objects(), nodes].iter().flat_map(versions).collect()
}

/// Sets an annotation that no component reads. Returns the new resource version.
pub(crate) fn annotate(k8s: &TestCluster, key: &str, value: &str) -> String {
    let (kind, name) = split_key(key);
    let mark = json!({ "metadata": { "annotations": { "test/resync": value } } });
    let (api, params) = (k8s.api(kind), PatchParams::default());
    let marked = k8s.server.block_on(api.patch(name, &params, &Patch::Merge(&mark)));
    marked.expect("the object exists").resource_version().expect("stored objects have a version")
}

/// Counters of an operator: requests by verb, resource and code, writes, and failed reconciles.
struct ApiUsage {
    requests: BTreeMap<String, f64>,
    written: f64,
    failed: f64,
}

impl ApiUsage {
    fn of(operator: &Operator) -> ApiUsage {
        ApiUsage {
            requests: operator.samples("reprise_operator_api_requests_total"),
            written: operator.metric("reprise_operator_writes_total", ""),
            failed: operator.metric("reprise_operator_reconciles_total", "result=\"failed\""),
        }
    }

    /// Asserts that all later requests are periodic: lease renewals, restarted watches, and probes for a kind
    /// that is not served. Rejected writes count as requests, too.
    fn assert_only_periodic(&self, operator: &Operator) {
        let (now, lease) =
            (ApiUsage::of(operator), ["get", "update"].map(|verb| labels(verb, "leases", "200")));
        let by_time = |asked: &String| {
            let watches = asked.starts_with("verb=\"watch\"") && asked.ends_with("code=\"200\"");
            // A renewal that fails or times out on a busy machine is retried.
            let of_lease = |verb| asked.starts_with(&format!("verb=\"{verb}\",resource=\"leases\""));
            let renewals = of_lease("get") || of_lease("update");
            watches || renewals || *asked == labels("list", "podmonitors", "404")
        };
        let before = |asked: &String| self.requests.get(asked).copied().unwrap_or_default();
        let new = now.requests.iter().filter(|(asked, count)| **count > before(asked) && !by_time(asked));
        assert_eq!(new.collect::<Vec<_>>(), [], "only periodic requests");
        // Proves that the operator counts requests: it renews its lease about every 5 s.
        wait_until("a lease renewal is counted", PATIENCE, || {
            let now = ApiUsage::of(operator).requests;
            lease.iter().all(|asked| now.get(asked) > self.requests.get(asked)).then_some(())
        });
        assert_eq!((now.written, now.failed), (self.written, self.failed));
    }
}

/// Labels of a request sample in the Prometheus text format.
fn labels(verb: &str, resource: &str, code: &str) -> String {
    format!("verb=\"{verb}\",resource=\"{resource}\",code=\"{code}\"")
}

#[test]
fn converged_cluster_causes_no_writes() {
    let (k8s, operator) = TestCluster::with_operator();
    k8s.pool("p", "/var/lib/pool", json!({}));
    k8s.raw_pool("r", json!({}));
    k8s.tenant("t", json!({ "perNode": { "ssd": { "reserved": "16Mi" } }, "namespaceSelector": {} }));
    k8s.profile("s", PRODUCT, 60);
    // With a managed etcd.
    let pools = json!([{ "name": "p" }, { "name": "r" }]);
    k8s.cluster(json!({ "pools": pools, "etcd": { "mode": "Managed" }, "slackProfiles": {} }));
    k8s.make_pods_ready("c-etcd");
    k8s.make_members_ready();
    // One allocation is granted and the other waits: each status is written once.
    for (name, pairs) in [("a", 12), ("b", 8)] {
        create_allocation(&k8s, name, json!({ "poolRef": { "name": "r" }, "queuePairs": pairs }));
    }
    let mut agents = Agents::default();
    for (kind, name, wanted) in [
        ("SSDPool", "p", ["Ready", "True", "AsDesired"]),
        ("SSDPool", "r", ["Ready", "True", "AsDesired"]),
        ("KVCacheCluster", "c", ["AgentsReady", "True", "AsDesired"]),
        ("CacheTenant", "t", ["PodsBound", "True", "AsDesired"]),
        ("SlackProfile", "s", ["Distributed", "True", "AsDesired"]),
        ("GPUQueueAllocation", "a", ["Programmed", "True", "AsDesired"]),
        ("GPUQueueAllocation", "b", WAITING),
    ] {
        agents.sync_until(&k8s, (kind, name), wanted);
    }
    k8s.settle();
    assert!(!agents.sync(&k8s), "agents have nothing new to report");
    assert_writes_nothing(&k8s, &operator);
    assert!(operator.terminate().success());
}

#[test]
fn rejected_cluster_causes_no_requests() {
    let (k8s, operator) = TestCluster::with_operator();
    // A rejected cluster has no objects of an etcd, and the operator does not read them.
    k8s.cluster(json!({ "etcd": { "mode": "Managed" }, "injection": { "mode": "Webhook" } }));
    k8s.wait_condition("KVCacheCluster", "c", ["Accepted", "False", "Unsupported"]);
    k8s.settle();
    assert_writes_nothing(&k8s, &operator);
}

#[test]
fn operator_catches_up_after_api_server_outage() {
    let mut k8s = TestCluster::new();
    // The operator logs lost watches, and its lease renewals may fail.
    for words in [WATCH_LOST, "reconcile failed", "lease request failed"] {
        k8s.env.allow(words);
    }
    let files = k8s.operator_files("operator");
    let operator = files.start().expect("the operator starts");
    k8s.cluster(json!({}));
    k8s.wait_for("DaemonSet", "c-agent");
    k8s.settle();
    let lost =
        || std::fs::read_to_string(files.log()).expect("the operator has a log").matches(WATCH_LOST).count();
    let before = lost();
    k8s.server.kill();
    // As short as possible: after ten seconds without its lease the operator exits.
    wait_until("the operator has lost its watches", PATIENCE, || (lost() > before).then_some(()));
    k8s.server.restart();
    // One child is missing and the spec has a new pool.
    k8s.delete("ConfigMap", "c-agent");
    k8s.pool("p", "/var/lib/pool", json!({}));
    k8s.cluster(json!({ "pools": [{ "name": "p" }] }));
    k8s.wait_for("ConfigMap", "c-agent");
    wait_until("the node has a claim", PATIENCE, || {
        k8s.get("CacheNode", "n1")?.data["spec"]["claims"].is_array().then_some(())
    });
    k8s.wait_condition("KVCacheCluster", "c", ["PoolsBound", "True", "AsDesired"]);
    // The process has kept its lease throughout.
    assert_eq!(operator.metric("reprise_operator_leader", ""), 1.0);
    assert!(operator.terminate().success());
}
