//! What control planes are told: modes of nodes and budgets of tenants, by a real one with a real node.

use std::time::Duration;

use reprise_client::Scope;
use reprise_e2e::content::{device_slot_bytes, small};
use reprise_e2e::{Loading, PATIENCE, wait_until};
use serde_json::{Value, json};

use crate::convergence::settle;
use crate::lab::{Lab, SETTLED};
use crate::plane::Plane;

/// What holds is looked at again after 30 s, and a control plane that was away after 30 s at the most.
const LOOKED_AT_WITHIN: Duration = Duration::from_secs(100);

/// A cluster whose control plane and first node are real processes. The agent is not in the cluster: the test plays what agents tell
/// the API server.
struct Cluster {
    plane: Plane,
    lab: Lab,
}

impl Cluster {
    fn new() -> Cluster {
        let lab = Lab::new();
        let plane = Plane::new(&lab, &["n1"]);
        lab.cluster(json!({}));
        Cluster { plane, lab }
    }

    fn operator(&self) -> reprise_e2e::Operator {
        let files = self.lab.operator_with("operator", self.plane.members.address());
        files.start().expect("the operator starts")
    }

    /// The mode that the control plane has for the node.
    fn mode(&self) -> String {
        self.plane.modes().remove("n1").expect("it has registered")
    }

    fn wait_mode(&self, mode: &str, within: Duration) {
        wait_until(&format!("the control plane has {mode}"), within, || {
            std::thread::sleep(Duration::from_millis(50));
            (self.mode() == mode).then_some(())
        });
    }

    /// The limit of devices that the control plane has for a tenant.
    fn limit(&self, tenant: &str) -> Option<u64> {
        self.plane.budgets().get(tenant)?["limit"]["nvme"].as_u64()
    }

    /// A member hears of a budget a little after it was set at another, or by itself.
    fn wait_limit(&self, tenant: &str, limit: Option<u64>) {
        wait_until(&format!("the limit of {tenant} is {limit:?}"), LOOKED_AT_WITHIN, || {
            std::thread::sleep(Duration::from_millis(100));
            (self.limit(tenant) == limit).then_some(())
        });
    }

    fn tenant(&self, name: &str, spec: Value) {
        self.lab.apply(&json!({
            "apiVersion": "reprise.dev/v1alpha1", "kind": "CacheTenant", "metadata": { "name": name }, "spec": spec,
        }));
    }

    fn unschedulable(&self, whether: Value) {
        self.lab.merge("Node", "n1", &json!({ "spec": { "unschedulable": whether } }));
    }
}

#[test]
fn a_mode_of_the_resources_is_that_of_the_control_plane_whoever_changes_it_there() {
    let mut cluster = Cluster::new();
    let operator = cluster.operator();
    let said = |reason| {
        let wanted = ["ModeApplied", "True", reason];
        cluster.lab.wait_condition_within(LOOKED_AT_WITHIN, ("CacheNode", "n1"), wanted)
    };
    assert!(said("AsDesired").contains("Active"));
    cluster.unschedulable(json!(true));
    cluster.wait_mode("draining", PATIENCE);
    wait_until("it is said", PATIENCE, || said("AsDesired").contains("Draining").then_some(()));
    // A node that is not there has nothing to be told, and nothing is said of it.
    let other = cluster.lab.wait_for("CacheNode", "n2");
    assert_eq!(other.data["status"]["conditions"], Value::Null);

    // Somebody takes the node back by hand, and the resource holds.
    cluster.plane.reprise(&["uncordon", "n1"]);
    let message = said("SetBack");
    assert_eq!(cluster.mode(), "draining");
    assert!(message.contains("Active") && message.contains("kubectl drain"), "{message}");

    // What is as it should be is written no more.
    let version = || cluster.lab.get("CacheNode", "n1").expect("it is there").metadata.resource_version;
    settle(&cluster.lab);
    let before = version();
    std::thread::sleep(SETTLED);
    assert_eq!(version(), before);

    // While the control plane is away the change is said to wait, and comes when it is back.
    cluster.plane.members.kill();
    cluster.unschedulable(Value::Null);
    let untold =
        cluster.lab.wait_condition("CacheNode", "n1", ["ModeApplied", "False", "ControlPlaneUnreachable"]);
    assert!(untold.contains("Active") && untold.contains("refused"), "{untold}");
    cluster.plane.members.restart();
    cluster.wait_mode("active", LOOKED_AT_WITHIN);
    let wanted = ["ModeApplied", "True", "AsDesired"];
    cluster.lab.wait_condition_within(LOOKED_AT_WITHIN, ("CacheNode", "n1"), wanted);
    assert!(cluster.plane.agents[0].admin().get("/healthz").is_ok());
    operator.kill();
}

#[test]
fn a_pool_that_is_drained_says_when_the_control_plane_does_not_know_the_node() {
    let cluster = Cluster::new();
    let operator = cluster.operator();
    let only = json!({ "nodeSelector": { "matchLabels": { "name": "n2" } }, "mode": "Draining" });
    cluster.lab.pool("p", "/var/lib/pool", only);
    cluster.lab.cluster(json!({ "pools": [{ "name": "p" }] }));
    cluster.lab.wait_condition("CacheNode", "n2", ["ModeApplied", "False", "NotReported"]);
    let said = || cluster.lab.wait_condition("SSDPool", "p", ["Drained", "False", "Draining"]);
    wait_until("the pool says so", PATIENCE, || {
        std::thread::sleep(Duration::from_millis(50));
        said().contains("n2: the node has not registered").then_some(())
    });
    operator.kill();
}

#[test]
fn a_budget_is_told_kept_and_taken_back_with_its_tenant() {
    let cluster = Cluster::new();
    let operator = cluster.operator();
    let limited = |limit: &str| json!({ "budget": { "ssd": { "limit": limit } } });
    cluster.tenant("team-a", limited("1Gi"));
    cluster.lab.wait_condition("CacheTenant", "team-a", ["BudgetApplied", "True", "AsDesired"]);
    cluster.wait_limit("team-a", Some(1 << 30));
    cluster.tenant("team-a", limited("2Gi"));
    cluster.wait_limit("team-a", Some(2 << 30));
    cluster.lab.wait_condition("CacheTenant", "team-a", ["BudgetApplied", "True", "AsDesired"]);

    // What somebody changes there is set back; what somebody has set for one without a budget is his, and said.
    cluster.plane.reprise(&["tenant", "set", "team-a", "--nvme", "5GiB"]);
    cluster.plane.reprise(&["tenant", "set", "team-b", "--nvme", "5GiB"]);
    cluster.wait_limit("team-b", Some(5 << 30));
    cluster.wait_limit("team-a", Some(2 << 30));
    cluster.tenant("team-b", json!({}));
    let wanted = ["BudgetApplied", "False", "Conflict"];
    let said = cluster.lab.wait_condition_within(LOOKED_AT_WITHIN, ("CacheTenant", "team-b"), wanted);
    assert!(said.contains("reprise tenant remove"), "{said}");
    assert_eq!(cluster.limit("team-b"), Some(5 << 30));

    // More than the nodes have is refused, in the control plane's words, and what was there stays.
    cluster.tenant("team-a", json!({ "budget": { "ssd": { "reserved": "10Ti", "limit": "20Ti" } } }));
    let said =
        cluster.lab.wait_condition("CacheTenant", "team-a", ["BudgetApplied", "False", "OverCapacity"]);
    assert!(said.contains("cache/c") && said.contains("team-a"), "{said}");
    cluster.lab.wait_condition("CacheTenant", "team-a", ["QuotaFeasible", "False", "OverCapacity"]);
    cluster.lab.wait_condition("CacheTenant", "team-a", ["Ready", "False", "OverCapacity"]);
    assert_eq!(cluster.limit("team-a"), Some(2 << 30));
    cluster.tenant("team-a", limited("1Gi"));
    cluster.lab.wait_condition("CacheTenant", "team-a", ["BudgetApplied", "True", "AsDesired"]);

    cluster.lab.delete("CacheTenant", "team-a");
    wait_until("the tenant is gone", PATIENCE, || {
        std::thread::sleep(Duration::from_millis(50));
        cluster.lab.get("CacheTenant", "team-a").is_none().then_some(())
    });
    cluster.wait_limit("team-a", None);
    assert_eq!(cluster.limit("team-b"), Some(5 << 30));
    operator.kill();
}

#[test]
fn a_tenant_waits_for_a_control_plane_that_is_away_and_does_not_go_before_it_is_told() {
    let mut cluster = Cluster::new();
    let operator = cluster.operator();
    cluster.tenant("team-a", json!({ "budget": { "ssd": { "limit": "1Gi" } } }));
    cluster.lab.wait_condition("CacheTenant", "team-a", ["BudgetApplied", "True", "AsDesired"]);
    // Once it has noticed that the control plane is away: what it saw last holds for a time.
    cluster.plane.members.kill();
    cluster.tenant("team-a", json!({ "budget": { "ssd": { "limit": "2Gi" } } }));
    cluster.lab.wait_condition(
        "CacheTenant",
        "team-a",
        ["BudgetApplied", "False", "ControlPlaneUnreachable"],
    );
    cluster.lab.delete("CacheTenant", "team-a");
    let said = cluster.lab.wait_condition("CacheTenant", "team-a", ["DeletionBlocked", "True", "Releasing"]);
    assert!(said.contains("cache/c") && said.contains("reprise.dev/budget"), "{said}");
    cluster.plane.members.restart();
    wait_until("the tenant is gone", LOOKED_AT_WITHIN, || {
        std::thread::sleep(Duration::from_millis(50));
        cluster.lab.get("CacheTenant", "team-a").is_none().then_some(())
    });
    cluster.wait_limit("team-a", None);
    operator.kill();
}

#[test]
fn a_purged_tenant_goes_when_every_node_has_said_that_it_holds_nothing_of_it() {
    let cluster = Cluster::new();
    let operator = cluster.operator();
    cluster.tenant("team-a", json!({ "deletionPolicy": "Purge" }));
    wait_until("the tenant not to go before its blocks", PATIENCE, || {
        std::thread::sleep(Duration::from_millis(50));
        let finalizers = cluster.lab.get("CacheTenant", "team-a")?.metadata.finalizers?;
        let has = |one: &str| finalizers.iter().any(|has| has == one);
        (has("reprise.dev/budget") && has("reprise.dev/purge")).then_some(())
    });
    let (of_a, of_b): (Vec<u64>, Vec<u64>) = ((0..16).collect(), (100..116).collect());
    let [a, b] = ["team-a", "team-b"].map(|tenant| cluster.plane.agents[0].engine_of(small(), tenant));
    a.save_durably(&of_a);
    b.save_durably(&of_b);

    // The cluster's second node has never come: nobody can say what is on it.
    cluster.lab.delete("CacheTenant", "team-a");
    wait_until("the blocks to go", LOOKED_AT_WITHIN, || {
        std::thread::sleep(Duration::from_millis(50));
        a.matches(&of_a[..1], Scope::Local).is_empty().then_some(())
    });
    let said = || {
        let wanted = ["DeletionBlocked", "True", "Releasing"];
        cluster.lab.wait_condition_within(LOOKED_AT_WITHIN, ("CacheTenant", "team-a"), wanted)
    };
    wait_until("the node that is waited for to be named, and no other", LOOKED_AT_WITHIN, || {
        std::thread::sleep(Duration::from_millis(50));
        let said = said();
        (said.contains("n2 has not registered") && !said.contains("n1 ")).then_some(())
    });
    for block in &of_a {
        assert!(a.matches(std::slice::from_ref(block), Scope::Local).is_empty(), "block {block}");
    }
    let refused = a.client().reserve(1, Duration::from_millis(50)).expect("the agent answers");
    assert!(refused.is_empty(), "and nothing new comes meanwhile");
    b.load_all(&of_b, &Loading::LOCAL);

    // It is no node of the cluster any more: the tenant goes, and its budget of nothing with it.
    cluster.lab.cluster(json!({ "agents": { "nodeSelector": { "name": "n1" } } }));
    wait_until("the tenant is gone", LOOKED_AT_WITHIN, || {
        std::thread::sleep(Duration::from_millis(50));
        cluster.lab.get("CacheTenant", "team-a").is_none().then_some(())
    });
    wait_until("it may save again, as one without a budget", LOOKED_AT_WITHIN, || {
        let reserved = a.client().reserve(1, Duration::from_millis(50)).expect("the agent answers");
        (!reserved.is_empty()).then_some(())
    });
    assert!(a.matches(&of_a[..1], Scope::Local).is_empty());
    b.load_all(&of_b, &Loading::LOCAL);
    operator.kill();
}

#[test]
fn what_a_tenant_holds_is_told_once_with_or_without_a_budget_and_whether_that_is_too_much() {
    let mut cluster = Cluster::new();
    let operator = cluster.operator();
    let (of_a, of_b): (Vec<u64>, Vec<u64>) = ((0..32).collect(), (100..116).collect());
    let [a, b] = ["team-a", "team-b"].map(|tenant| cluster.plane.agents[0].engine_of(small(), tenant));
    b.save_durably(&of_b);
    a.save_durably(&of_a);
    // The control plane has heard of all of it once it has heard of the last.
    cluster.plane.reprise(&["tenant", "set", "team-a", "--nvme", "1GiB"]);
    let bytes = of_a.len() as u64 * device_slot_bytes(&small());
    wait_until("the node has reported its blocks", PATIENCE, || {
        std::thread::sleep(Duration::from_millis(50));
        let listed = cluster.plane.reprise(&["tenant", "list"]);
        (listed["tenants"][0]["ledger"]["used"]["nvme"] == bytes).then_some(())
    });
    let limited = |limit: &str| json!({ "budget": { "ssd": { "limit": limit } } });
    cluster.tenant("team-a", limited("1Gi"));
    cluster.tenant("team-b", json!({}));
    let usage = |tenant: &str| {
        cluster.lab.wait_condition("CacheTenant", tenant, ["UsageKnown", "True", "AsDesired"]);
        cluster.lab.get("CacheTenant", tenant).expect("it is there").data["status"]["usage"].clone()
    };
    let (used_a, used_b) = (usage("team-a"), usage("team-b"));
    assert_eq!((&used_a["ssd"], &used_a["ssdBlocks"]), (&json!("2Mi"), &json!(32)), "32 × 36 Ki: {used_a}");
    assert_eq!((&used_b["ssd"], &used_b["ssdBlocks"]), (&json!("1Mi"), &json!(16)), "16 × 36 Ki: {used_b}");
    cluster.lab.wait_condition("CacheTenant", "team-a", ["OverQuota", "False", "AsDesired"]);
    cluster.lab.wait_condition("CacheTenant", "team-a", ["BudgetApplied", "True", "AsDesired"]);

    // Looked at again and again, it is not written again.
    let of_tenants = |metric: &str| operator.metric(metric, "kind=\"CacheTenant\"");
    let mut written = of_tenants("reprise_operator_writes_total");
    wait_until("what is new to be told", PATIENCE, || {
        std::thread::sleep(SETTLED);
        let before = std::mem::replace(&mut written, of_tenants("reprise_operator_writes_total"));
        (before == written).then_some(())
    });
    for resync in 0..10 {
        let already = of_tenants("reprise_operator_reconciles_total");
        let mark = json!({ "metadata": { "annotations": { "test/resync": resync.to_string() } } });
        cluster.lab.merge("CacheTenant", "team-a", &mark);
        let again = || (of_tenants("reprise_operator_reconciles_total") > already).then_some(());
        wait_until("it is reconciled", PATIENCE, again);
    }
    assert_eq!(of_tenants("reprise_operator_writes_total"), written);
    assert_eq!(usage("team-a"), used_a);

    // A limit below what it holds, and one above.
    cluster.tenant("team-a", limited("1Mi"));
    let said = cluster.lab.wait_condition("CacheTenant", "team-a", ["OverQuota", "True", "AboveLimit"]);
    assert!(said.contains("cache/c") && said.contains("budget.ssd.limit (1Mi)"), "{said}");
    cluster.tenant("team-a", limited("2Gi"));
    cluster.lab.wait_condition("CacheTenant", "team-a", ["OverQuota", "False", "AsDesired"]);

    // Of whom nobody could be asked nothing is told, rather than that he holds nothing.
    cluster.plane.members.kill();
    cluster.tenant("team-c", json!({}));
    let wanted = ["UsageKnown", "Unknown", "ControlPlaneUnreachable"];
    let said = cluster.lab.wait_condition("CacheTenant", "team-c", wanted);
    assert!(said.contains("cache/c") && said.contains("refused"), "{said}");
    let status = cluster.lab.get("CacheTenant", "team-c").expect("it is there").data["status"].clone();
    assert_eq!(status["usage"], Value::Null);
    operator.kill();
}
