//! Node modes and tenant budgets at a real control plane with a real agent.

use std::time::Duration;

use reprise_client::Scope;
use reprise_e2e::content::{device_slot_bytes, small};
use reprise_e2e::{LoadParams, PATIENCE, wait_until};
use serde_json::{Value, json};

use crate::operator::test_cluster::TestCluster;
use crate::operator::test_control_plane::TestControlPlane;

/// Upper bound for a resync: applied state is polled every 30 s, an unreachable control plane at most every
/// 30 s.
const RESYNC_TIMEOUT: Duration = Duration::from_secs(100);

/// A cluster whose control plane and first agent are real processes. The agent has no access to the API
/// server: the test simulates the statuses of CacheNodes.
struct Cluster {
    control_plane: TestControlPlane,
    k8s: TestCluster,
}

impl Cluster {
    fn new() -> Cluster {
        let k8s = TestCluster::new();
        let control_plane = TestControlPlane::new(&k8s, &["n1"]);
        k8s.cluster(json!({}));
        Cluster { control_plane, k8s }
    }

    fn operator(&self) -> reprise_e2e::Operator {
        let files = self.k8s.operator_with("operator", self.control_plane.members.address());
        files.start().expect("the operator starts")
    }

    /// The mode of the node at the control plane.
    fn mode(&self) -> String {
        self.control_plane.modes().remove("n1").expect("the node has registered")
    }

    fn wait_mode(&self, mode: &str, within: Duration) {
        wait_until(&format!("the control plane has {mode}"), within, || (self.mode() == mode).then_some(()));
    }

    /// The SSD limit of a tenant at the control plane, in bytes.
    fn limit(&self, tenant: &str) -> Option<u64> {
        self.control_plane.budgets().get(tenant)?["limit"]["nvme"].as_u64()
    }

    /// Waits until a member has this limit: budgets reach other members with a delay.
    fn wait_limit(&self, tenant: &str, limit: Option<u64>) {
        wait_until(&format!("the limit of {tenant} is {limit:?}"), RESYNC_TIMEOUT, || {
            (self.limit(tenant) == limit).then_some(())
        });
    }

    fn tenant(&self, name: &str, spec: Value) {
        self.k8s.apply_resource("CacheTenant", name, spec);
    }

    fn unschedulable(&self, whether: Value) {
        self.k8s.merge("Node", "n1", &json!({ "spec": { "unschedulable": whether } }));
    }
}

#[test]
fn node_mode_is_applied_and_restored_at_control_plane() {
    let mut cluster = Cluster::new();
    let _operator = cluster.operator();
    let message = |reason| {
        let wanted = ["ModeApplied", "True", reason];
        cluster.k8s.wait_condition_within(RESYNC_TIMEOUT, ("CacheNode", "n1"), wanted)
    };
    assert!(message("AsDesired").contains("Active"));
    cluster.unschedulable(json!(true));
    cluster.wait_mode("draining", PATIENCE);
    wait_until("the condition reports the mode", PATIENCE, || {
        message("AsDesired").contains("Draining").then_some(())
    });
    // The control plane does not know n2, and an unregistered active node needs no condition.
    let other = cluster.k8s.wait_for("CacheNode", "n2");
    assert_eq!(other.data["status"]["conditions"], Value::Null);

    // The operator restores the mode after a manual change at the control plane.
    cluster.control_plane.reprise(&["uncordon", "n1"]);
    let message = message("SetBack");
    assert_eq!(cluster.mode(), "draining");
    assert!(message.contains("Active") && message.contains("kubectl drain"), "{message}");

    // Applied state is not written again.
    let version = || cluster.k8s.get("CacheNode", "n1").expect("the object exists").metadata.resource_version;
    cluster.k8s.settle();
    let before = version();
    cluster.k8s.settle();
    assert_eq!(version(), before);

    // A change waits for an unreachable control plane, and is applied when it is back.
    cluster.control_plane.members.kill();
    cluster.unschedulable(Value::Null);
    let message =
        cluster.k8s.wait_condition("CacheNode", "n1", ["ModeApplied", "False", "ControlPlaneUnreachable"]);
    assert!(message.contains("Active") && message.contains("refused"), "{message}");
    cluster.control_plane.members.restart();
    cluster.wait_mode("active", RESYNC_TIMEOUT);
    let wanted = ["ModeApplied", "True", "AsDesired"];
    cluster.k8s.wait_condition_within(RESYNC_TIMEOUT, ("CacheNode", "n1"), wanted);
    assert!(cluster.control_plane.agents[0].admin().get("/healthz").is_ok());
}

#[test]
fn draining_pool_reports_unregistered_node() {
    let cluster = Cluster::new();
    let _operator = cluster.operator();
    let only = json!({ "nodeSelector": { "matchLabels": { "name": "n2" } }, "mode": "Draining" });
    cluster.k8s.pool("p", "/var/lib/pool", only);
    cluster.k8s.cluster(json!({ "pools": [{ "name": "p" }] }));
    cluster.k8s.wait_condition("CacheNode", "n2", ["ModeApplied", "False", "NotReported"]);
    let message = || cluster.k8s.wait_condition("SSDPool", "p", ["Drained", "False", "Draining"]);
    wait_until("the pool reports the node", PATIENCE, || {
        message().contains("n2: the node has not registered").then_some(())
    });
}

#[test]
fn tenant_budget_is_applied_restored_and_removed_with_tenant() {
    let cluster = Cluster::new();
    let _operator = cluster.operator();
    let limited = |limit: &str| json!({ "budget": { "ssd": { "limit": limit } } });
    cluster.tenant("team-a", limited("1Gi"));
    cluster.k8s.wait_condition("CacheTenant", "team-a", ["BudgetApplied", "True", "AsDesired"]);
    cluster.wait_limit("team-a", Some(1 << 30));
    cluster.tenant("team-a", limited("2Gi"));
    cluster.wait_limit("team-a", Some(2 << 30));
    cluster.k8s.wait_condition("CacheTenant", "team-a", ["BudgetApplied", "True", "AsDesired"]);

    // A manual change of a tenant's budget is restored. A manual budget of a tenant without one in its spec
    // is kept and reported.
    cluster.control_plane.reprise(&["tenant", "set", "team-a", "--nvme", "5GiB"]);
    cluster.control_plane.reprise(&["tenant", "set", "team-b", "--nvme", "5GiB"]);
    cluster.wait_limit("team-b", Some(5 << 30));
    cluster.wait_limit("team-a", Some(2 << 30));
    cluster.tenant("team-b", json!({}));
    let wanted = ["BudgetApplied", "False", "Conflict"];
    let message = cluster.k8s.wait_condition_within(RESYNC_TIMEOUT, ("CacheTenant", "team-b"), wanted);
    assert!(message.contains("reprise tenant remove"), "{message}");
    assert_eq!(cluster.limit("team-b"), Some(5 << 30));

    // A budget above the nodes' capacity is rejected with the control plane's message; the old one remains.
    cluster.tenant("team-a", json!({ "budget": { "ssd": { "reserved": "10Ti", "limit": "20Ti" } } }));
    let message =
        cluster.k8s.wait_condition("CacheTenant", "team-a", ["BudgetApplied", "False", "OverCapacity"]);
    assert!(message.contains("cache/c") && message.contains("team-a"), "{message}");
    cluster.k8s.wait_condition("CacheTenant", "team-a", ["QuotaFeasible", "False", "OverCapacity"]);
    cluster.k8s.wait_condition("CacheTenant", "team-a", ["Ready", "False", "OverCapacity"]);
    assert_eq!(cluster.limit("team-a"), Some(2 << 30));
    cluster.tenant("team-a", limited("1Gi"));
    cluster.k8s.wait_condition("CacheTenant", "team-a", ["BudgetApplied", "True", "AsDesired"]);

    cluster.k8s.delete("CacheTenant", "team-a");
    wait_until("the tenant is deleted", PATIENCE, || {
        cluster.k8s.get("CacheTenant", "team-a").is_none().then_some(())
    });
    cluster.wait_limit("team-a", None);
    assert_eq!(cluster.limit("team-b"), Some(5 << 30));
}

#[test]
fn tenant_deletion_waits_for_unreachable_control_plane() {
    let mut cluster = Cluster::new();
    let _operator = cluster.operator();
    cluster.tenant("team-a", json!({ "budget": { "ssd": { "limit": "1Gi" } } }));
    cluster.k8s.wait_condition("CacheTenant", "team-a", ["BudgetApplied", "True", "AsDesired"]);
    // The operator must notice the outage first, because it caches the last answer.
    cluster.control_plane.members.kill();
    cluster.tenant("team-a", json!({ "budget": { "ssd": { "limit": "2Gi" } } }));
    cluster.k8s.wait_condition(
        "CacheTenant",
        "team-a",
        ["BudgetApplied", "False", "ControlPlaneUnreachable"],
    );
    cluster.k8s.delete("CacheTenant", "team-a");
    let message =
        cluster.k8s.wait_condition("CacheTenant", "team-a", ["DeletionBlocked", "True", "Releasing"]);
    assert!(message.contains("cache/c") && message.contains("reprise.dev/budget"), "{message}");
    cluster.control_plane.members.restart();
    wait_until("the tenant is deleted", RESYNC_TIMEOUT, || {
        cluster.k8s.get("CacheTenant", "team-a").is_none().then_some(())
    });
    cluster.wait_limit("team-a", None);
}

#[test]
fn purged_tenant_is_deleted_after_every_node_reports_no_blocks() {
    let cluster = Cluster::new();
    let _operator = cluster.operator();
    cluster.tenant("team-a", json!({ "deletionPolicy": "Purge" }));
    wait_until("the tenant has the finalizers of budget and purge", PATIENCE, || {
        let finalizers = cluster.k8s.get("CacheTenant", "team-a")?.metadata.finalizers?;
        let has = |one: &str| finalizers.iter().any(|has| has == one);
        (has("reprise.dev/budget") && has("reprise.dev/purge")).then_some(())
    });
    let (of_a, of_b): (Vec<u64>, Vec<u64>) = ((0..16).collect(), (100..116).collect());
    let [a, b] =
        ["team-a", "team-b"].map(|tenant| cluster.control_plane.agents[0].engine_of(small(), tenant));
    a.save_durably(&of_a);
    b.save_durably(&of_b);

    // The cluster's second node has never registered, so its blocks are unknown.
    cluster.k8s.delete("CacheTenant", "team-a");
    wait_until("the blocks are purged", RESYNC_TIMEOUT, || {
        a.matches(&of_a[..1], Scope::Local).is_empty().then_some(())
    });
    let message = || {
        let wanted = ["DeletionBlocked", "True", "Releasing"];
        cluster.k8s.wait_condition_within(RESYNC_TIMEOUT, ("CacheTenant", "team-a"), wanted)
    };
    wait_until("the condition names only the missing node", RESYNC_TIMEOUT, || {
        let message = message();
        (message.contains("n2 has not registered") && !message.contains("n1 ")).then_some(())
    });
    for block in &of_a {
        assert!(a.matches(std::slice::from_ref(block), Scope::Local).is_empty(), "block {block}");
    }
    let refused = a.client().reserve(1, Duration::from_millis(50)).expect("the agent answers");
    assert!(refused.is_empty(), "no new blocks during the purge");
    b.load_all(&of_b, &LoadParams::LOCAL);

    // Without that node in the cluster, the tenant and its budget of zero are deleted.
    cluster.k8s.cluster(json!({ "agents": { "nodeSelector": { "name": "n1" } } }));
    wait_until("the tenant is deleted", RESYNC_TIMEOUT, || {
        cluster.k8s.get("CacheTenant", "team-a").is_none().then_some(())
    });
    wait_until("a tenant without a budget can reserve again", RESYNC_TIMEOUT, || {
        let reserved = a.client().reserve(1, Duration::from_millis(50)).expect("the agent answers");
        (!reserved.is_empty()).then_some(())
    });
    assert!(a.matches(&of_a[..1], Scope::Local).is_empty());
    b.load_all(&of_b, &LoadParams::LOCAL);
}

#[test]
fn tenant_status_reports_usage_and_over_quota_without_rewrites() {
    let mut cluster = Cluster::new();
    let operator = cluster.operator();
    let (of_a, of_b): (Vec<u64>, Vec<u64>) = ((0..32).collect(), (100..116).collect());
    let [a, b] =
        ["team-a", "team-b"].map(|tenant| cluster.control_plane.agents[0].engine_of(small(), tenant));
    b.save_durably(&of_b);
    a.save_durably(&of_a);
    // The control plane knows all blocks once it knows the blocks that were saved last.
    cluster.control_plane.reprise(&["tenant", "set", "team-a", "--nvme", "1GiB"]);
    let bytes = of_a.len() as u64 * device_slot_bytes(&small());
    wait_until("the node has reported its blocks", PATIENCE, || {
        let listed = cluster.control_plane.reprise(&["tenant", "list"]);
        (listed["tenants"][0]["ledger"]["used"]["nvme"] == bytes).then_some(())
    });
    let limited = |limit: &str| json!({ "budget": { "ssd": { "limit": limit } } });
    cluster.tenant("team-a", limited("1Gi"));
    cluster.tenant("team-b", json!({}));
    let usage = |tenant: &str| {
        cluster.k8s.wait_condition("CacheTenant", tenant, ["UsageKnown", "True", "AsDesired"]);
        cluster.k8s.get("CacheTenant", tenant).expect("the object exists").data["status"]["usage"].clone()
    };
    let (used_a, used_b) = (usage("team-a"), usage("team-b"));
    assert_eq!((&used_a["ssd"], &used_a["ssdBlocks"]), (&json!("2Mi"), &json!(32)), "32 × 36 Ki: {used_a}");
    assert_eq!((&used_b["ssd"], &used_b["ssdBlocks"]), (&json!("1Mi"), &json!(16)), "16 × 36 Ki: {used_b}");
    cluster.k8s.wait_condition("CacheTenant", "team-a", ["OverQuota", "False", "AsDesired"]);
    cluster.k8s.wait_condition("CacheTenant", "team-a", ["BudgetApplied", "True", "AsDesired"]);

    // Further reconciles do not write the status again.
    let of_tenants = |metric: &str| operator.metric(metric, "kind=\"CacheTenant\"");
    cluster.k8s.settle();
    let written = of_tenants("reprise_operator_writes_total");
    for resync in 0..10 {
        let already = of_tenants("reprise_operator_reconciles_total");
        let mark = json!({ "metadata": { "annotations": { "test/resync": resync.to_string() } } });
        cluster.k8s.merge("CacheTenant", "team-a", &mark);
        let again = || (of_tenants("reprise_operator_reconciles_total") > already).then_some(());
        wait_until("the tenant is reconciled", PATIENCE, again);
    }
    assert_eq!(of_tenants("reprise_operator_writes_total"), written);
    assert_eq!(usage("team-a"), used_a);

    // A limit below the usage, then one above it.
    cluster.tenant("team-a", limited("1Mi"));
    let message = cluster.k8s.wait_condition("CacheTenant", "team-a", ["OverQuota", "True", "AboveLimit"]);
    assert!(message.contains("cache/c") && message.contains("budget.ssd.limit (1Mi)"), "{message}");
    cluster.tenant("team-a", limited("2Gi"));
    cluster.k8s.wait_condition("CacheTenant", "team-a", ["OverQuota", "False", "AsDesired"]);

    // With an unreachable control plane the usage is absent, not zero.
    cluster.control_plane.members.kill();
    cluster.tenant("team-c", json!({}));
    let wanted = ["UsageKnown", "Unknown", "ControlPlaneUnreachable"];
    let message = cluster.k8s.wait_condition("CacheTenant", "team-c", wanted);
    assert!(message.contains("cache/c") && message.contains("refused"), "{message}");
    let status = cluster.k8s.get("CacheTenant", "team-c").expect("the object exists").data["status"].clone();
    assert_eq!(status["usage"], Value::Null);
}
