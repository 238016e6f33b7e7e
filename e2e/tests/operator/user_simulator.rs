//! Simulates users and engines: creates, changes, uses and deletes objects of all user kinds at random.
//!
//! A deletion may wait for engine sessions, a pod with queues, a wipe, or an unreachable control plane. While
//! engines block a deletion, the simulator checks that the object still exists. At the end of a test all
//! users release their objects, and then no deletion may remain blocked.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use kube::ResourceExt;
use kube::api::{DynamicObject, Patch, PatchParams};
use rand::RngExt;
use rand::rngs::StdRng;
use reprise_e2e::wait_until;
use serde_json::{Value, json};

use crate::operator::agents::{Agents, PRODUCT};
use crate::operator::deletion_guard::FINALIZER;
use crate::operator::queues::{KIND as ALLOCATION, create_allocation};
use crate::operator::test_cluster::{NAMESPACE, TestCluster, sha256};
use crate::operator::test_control_plane::TestControlPlane;

/// SSD limit of tenants that have one.
const LIMIT: &str = "1Gi";
pub(crate) const LIMIT_BYTES: u64 = 1 << 30;

/// All objects that users create: kind and name.
const USER_OBJECTS: [(&str, &str); 10] = [
    ("KVCacheCluster", "c"),
    ("SSDPool", "p"),
    ("SSDPool", "q"),
    ("SSDPool", "r"),
    ("CacheTenant", "t"),
    ("CacheTenant", "u"),
    ("SlackProfile", "s"),
    ("SlackProfile", "v"),
    (ALLOCATION, "a"),
    (ALLOCATION, "b"),
];

/// Upper bound for a deletion after its last blocker is gone: two waits for engines plus time for busy
/// operators.
const DELETION_TIMEOUT: Duration = Duration::from_secs(60);

/// Operators have seen a session after this time. They do not wait for one that starts during a deletion.
const SESSION_VISIBLE_AFTER: Duration = Duration::from_secs(2);

/// Users, the agents of their nodes, and the cluster's control plane.
pub(crate) struct UserSimulator {
    pub(crate) control_plane: TestControlPlane,
    pub(crate) agents: Agents,
    /// Time of the last change of a node's session count.
    sessions_since: BTreeMap<String, Instant>,
    /// UIDs of objects whose deletion must stay blocked, by kind and name.
    blocked: BTreeMap<(String, String), Option<String>>,
    /// Number of checks that found a blocked object still present.
    pub(crate) blocked_checks: usize,
    pub(crate) deletions: usize,
    /// Number of budgets that were removed manually.
    pub(crate) budgets_removed: usize,
    /// Whether children of a deleted cluster may exist.
    has_deleted_clusters: bool,
}

impl UserSimulator {
    pub(crate) fn new(control_plane: TestControlPlane) -> UserSimulator {
        UserSimulator {
            control_plane,
            agents: Agents::default(),
            sessions_since: BTreeMap::new(),
            blocked: BTreeMap::new(),
            blocked_checks: 0,
            deletions: 0,
            budgets_removed: 0,
            has_deleted_clusters: false,
        }
    }

    /// Applies all objects with random specs. Existing objects get a new spec if their spec is mutable.
    pub(crate) fn apply_all(&mut self, k8s: &TestCluster, random: &mut StdRng) {
        for object in USER_OBJECTS {
            self.apply_random(k8s, object, random);
        }
    }

    /// Sets the number of engine sessions on a node.
    pub(crate) fn set_sessions(&mut self, node: &str, sessions: u32) {
        if self.agents.sessions.insert(node.to_owned(), sessions) != Some(sessions) {
            self.blocked.clear();
            self.sessions_since.insert(node.to_owned(), Instant::now());
        }
    }

    /// Performs a random action on user objects, on the operator's objects, or on their users.
    pub(crate) fn random_action(&mut self, k8s: &TestCluster, random: &mut StdRng) {
        let object = USER_OBJECTS[random.random_range(0..USER_OBJECTS.len())];
        match random.random_range(0..18) {
            0..6 => self.change(k8s, object, random),
            6..12 => self.delete(k8s, object),
            12..15 => {
                // Selected by the hash of the name: the current number of objects does not depend on the
                // seed.
                let drawn: u64 = random.random();
                let selected = k8s
                    .operator_objects()
                    .into_iter()
                    .min_by_key(|(key, _)| sha256(format!("{drawn} {key}").as_bytes()));
                if let Some((key, object)) = selected {
                    self.blocked.clear();
                    k8s.delete_if_exists(key.split_once('/').expect("kind and name").0, &object.name_any());
                }
            }
            15 => {
                self.blocked.clear();
                let value = if random.random_bool(0.5) { "fast" } else { "slow" };
                k8s.merge("Node", "n2", &json!({ "metadata": { "labels": { "disk": value } } }));
                let is_cordoned = random.random_bool(0.5);
                k8s.merge("Node", "n1", &json!({ "spec": { "unschedulable": is_cordoned } }));
            }
            _ => {
                let node = if random.random_bool(0.5) { "n1" } else { "n2" };
                self.set_sessions(node, if random.random_bool(0.6) { 2 } else { 0 });
            }
        }
    }

    /// Lets agents and kubelets report, then asserts that objects with blocked deletions still exist.
    pub(crate) fn check_blocked(&mut self, k8s: &TestCluster) {
        self.agents.report_again(k8s);
        k8s.make_stateful_sets_ready();
        if self.has_deleted_clusters {
            k8s.collect_garbage();
        }
        for ((kind, name), uid) in &self.blocked {
            let found = k8s.get(kind, name);
            assert!(found.is_some_and(|found| found.uid() == *uid), "{kind} {name} was deleted while in use");
            self.blocked_checks += 1;
        }
    }

    /// Lets agents, kubelets and the garbage collector catch up, and takes the manual actions that conditions
    /// ask for.
    pub(crate) fn sync_agents(&mut self, k8s: &TestCluster) {
        self.agents.sync(k8s);
        k8s.make_stateful_sets_ready();
        k8s.collect_garbage();
        // A delayed request of one operator may arrive after the other operator has removed the budget.
        for tenant in ["t", "u"] {
            let has_conflict =
                k8s.has_condition(("CacheTenant", tenant), ["BudgetApplied", "False", "Conflict"]);
            if has_conflict && self.control_plane.budgets().contains_key(tenant) {
                self.control_plane.reprise(&["tenant", "remove", tenant]);
                self.budgets_removed += 1;
            }
        }
    }

    /// Stops checking blocked deletions, because operators may have missed session reports.
    pub(crate) fn clear_blocked(&mut self) {
        self.blocked.clear();
    }

    fn change(&mut self, k8s: &TestCluster, object: (&str, &str), random: &mut StdRng) {
        if object.0 == "KVCacheCluster" {
            self.blocked.clear();
        }
        self.apply_random(k8s, object, random);
    }

    /// Creates an object with a random spec, or changes its spec.
    fn apply_random(&mut self, k8s: &TestCluster, object: (&str, &str), random: &mut StdRng) {
        if object.0 == "KVCacheCluster" && has_managed_store(k8s).is_none() {
            // The store was deleted with the previous cluster.
            self.control_plane.clear();
        }
        apply_random(k8s, object, random);
    }

    fn delete(&mut self, k8s: &TestCluster, (kind, name): (&str, &str)) {
        let Some(found) = k8s.get(kind, name) else { return };
        self.deletions += 1;
        self.has_deleted_clusters |= kind == "KVCacheCluster";
        k8s.delete_if_exists(kind, name);
        match kind {
            // Nodes lose the pools of a deleted cluster, and operators see that with a delay.
            "KVCacheCluster" => {
                self.blocked.clear();
                self.sessions_since.values_mut().for_each(|since| *since = Instant::now());
            }
            "SSDPool" => self.blocked.retain(|(kind, _), _| kind != ALLOCATION),
            _ => {}
        }
        if self.is_in_use(k8s, &found) {
            self.blocked.insert((kind.to_owned(), name.to_owned()), found.uid());
        }
    }

    /// Whether the operators have known for [`SESSION_VISIBLE_AFTER`] that engines use a pool.
    fn is_in_use(&self, k8s: &TestCluster, object: &DynamicObject) -> bool {
        if !object.finalizers().iter().any(|one| one == FINALIZER) {
            return false;
        }
        let has_it = |node: &DynamicObject| {
            let mut claims = node.data["spec"]["claims"].as_array().into_iter().flatten();
            claims.any(|claim| claim["uid"].as_str() == object.uid().as_deref())
        };
        let is_busy = |node: &str| {
            self.agents.sessions.get(node).is_some_and(|sessions| *sessions > 0)
                && self
                    .sessions_since
                    .get(node)
                    .is_some_and(|sessions_since| sessions_since.elapsed() > SESSION_VISIBLE_AFTER)
        };
        k8s.list("CacheNode").iter().any(|node| has_it(node) && is_busy(&node.name_any()))
    }

    /// Ends all use of objects and waits until all blocked deletions complete.
    pub(crate) fn release_all(&mut self, k8s: &TestCluster) {
        self.blocked.clear();
        self.agents.sessions.clear();
        let begun = Instant::now();
        loop {
            let deleting: Vec<(String, String)> = deleting(k8s);
            if deleting.is_empty() {
                return;
            }
            assert!(
                begun.elapsed() < DELETION_TIMEOUT,
                "deletion of unused objects does not complete: {:#?}",
                k8s.user_objects()
            );
            self.sync_agents(k8s);
            // A pool that contradicts an older one is not wiped. Its condition asks for `Retain`.
            for (_, name) in deleting.iter().filter(|(kind, _)| kind == "SSDPool") {
                if k8s.has_condition(("SSDPool", name), ["DeletionBlocked", "True", "Conflict"]) {
                    let retained =
                        json!({ "spec": { "deletionPolicy": "Retain", "wipeConfirmation": null } });
                    merge_if_exists(k8s, "SSDPool", name, &retained);
                }
            }
            // The agents of a pool's cluster wipe it, so the pool needs a cluster that accepts it.
            if deleting.iter().any(|(kind, _)| kind == "SSDPool") {
                pool(k8s, "q", 64);
                merge_if_exists(k8s, "SSDPool", "p", &json!({ "spec": { "queueDepth": 64 } }));
                let pools = json!({ "pools": [{ "name": "p" }, { "name": "q" }, { "name": "r" }] });
                k8s.cluster(with_store(pools, has_managed_store(k8s).unwrap_or_default()));
            }
            std::thread::sleep(Duration::from_millis(100));
        }
    }

    /// Re-creates allocations whose grant has ended, or whose grant remains although a new one would be
    /// refused.
    ///
    /// A grant keeps its history, which a fresh operator cannot reproduce. Returns whether there were any.
    pub(crate) fn recreate_ended_allocations(&mut self, k8s: &TestCluster, random: &mut StdRng) -> bool {
        let is_over = |name: &&str| {
            let found = k8s.get(ALLOCATION, name).expect("all allocations exist");
            let conditions = found.data["status"]["conditions"].as_array().cloned().unwrap_or_default();
            let is = |kind: &str| conditions.iter().any(|one| one["type"] == kind && one["status"] == "True");
            is("Released") || (!found.finalizers().is_empty() && !is("Allocated"))
        };
        let over: Vec<&str> = ["a", "b"].into_iter().filter(is_over).collect();
        for name in &over {
            k8s.delete(ALLOCATION, name);
            wait_until("the allocation is deleted", DELETION_TIMEOUT, || {
                self.agents.sync(k8s);
                k8s.get(ALLOCATION, name).is_none().then_some(())
            });
            self.apply_random(k8s, (ALLOCATION, name), random);
        }
        !over.is_empty()
    }
}

/// Kinds and names of user objects that are being deleted.
fn deleting(k8s: &TestCluster) -> Vec<(String, String)> {
    let goes = |object: &DynamicObject| object.metadata.deletion_timestamp.is_some();
    let all = k8s.user_objects().into_iter().filter(|(_, object)| goes(object));
    all.map(|(key, object)| (key.split_once('/').expect("kind and name").0.to_owned(), object.name_any()))
        .collect()
}

/// Changes some fields of an object that may not exist.
fn merge_if_exists(k8s: &TestCluster, kind: &str, name: &str, fields: &Value) {
    let (api, params) = (k8s.api(kind), PatchParams::default());
    match k8s.server.block_on(api.patch(name, &params, &Patch::Merge(fields))) {
        Ok(_) => {}
        Err(kube::Error::Api(status)) if status.is_not_found() => {}
        Err(error) => panic!("cannot patch {kind} {name} with {fields}: {error}"),
    }
}

fn apply_random(k8s: &TestCluster, (kind, name): (&str, &str), random: &mut StdRng) {
    match (kind, name) {
        ("KVCacheCluster", _) => {
            // Chosen once for each cluster, because the mode is immutable.
            let managed = has_managed_store(k8s).unwrap_or_else(|| random.random_bool(0.5));
            k8s.cluster(with_store(cluster(random), managed));
        }
        ("SSDPool", "p") => {
            let depth = if random.random_bool(0.2) { 128 } else { 64 };
            let wiped =
                json!({ "deletionPolicy": "Wipe", "wipeConfirmation": "yes-really-destroy-the-data" });
            let mut more = if random.random_bool(0.5) { wiped } else { json!({}) };
            more["queueDepth"] = json!(depth);
            k8s.pool(name, "/var/lib/pool", more);
        }
        ("SSDPool", "q") => pool(k8s, name, if random.random_bool(0.2) { 128 } else { 64 }),
        ("SSDPool", _) => {
            let percent = if random.random_bool(0.5) { 50 } else { 75 };
            k8s.raw_pool(
                name,
                json!({ "queueDepth": 64, "devices": {
                "globs": ["/dev/disk/by-id/nvme-*"], "maxGpuQueuePercent": percent,
            } }),
            );
        }
        ("CacheTenant", _) => k8s.tenant(name, tenant(name, random)),
        ("SlackProfile", "s") => k8s.profile(name, PRODUCT, random.random_range(60..90)),
        ("SlackProfile", _) => k8s.profile(name, "NVIDIA L4", random.random_range(60..90)),
        // The spec of an allocation is immutable.
        _ if k8s.get(kind, name).is_some() => {}
        (_, "a") => create_allocation(k8s, name, json!({ "poolRef": { "name": "r" }, "queuePairs": 4 })),
        _ => {
            let mut more = json!({ "poolRef": { "name": "r" }, "queuePairs": 4 });
            if random.random_bool(0.5) {
                more["slackProfileRef"] = json!({ "name": "s" });
            }
            create_allocation(k8s, name, more);
        }
    }
}

/// Whether the cluster has a managed etcd; none if there is no cluster.
fn has_managed_store(k8s: &TestCluster) -> Option<bool> {
    Some(k8s.get("KVCacheCluster", "c")?.data["spec"]["etcd"]["mode"] == "Managed")
}

/// Adds a managed etcd to the spec of a cluster if `managed` is set.
fn with_store(mut spec: Value, managed: bool) -> Value {
    if managed {
        spec["etcd"] = json!({ "mode": "Managed" });
    }
    spec
}

/// Applies the pool for nodes with fast disks.
fn pool(k8s: &TestCluster, name: &str, depth: u32) {
    let selected = json!({ "matchLabels": { "disk": "fast" } });
    k8s.pool(name, "/var/lib/other", json!({ "queueDepth": depth, "nodeSelector": selected }));
}

/// Returns a random cluster spec. Each choice decides whether objects of some kind exist.
fn cluster(random: &mut StdRng) -> Value {
    let pools: Vec<Value> = ["p", "q", "r"]
        .into_iter()
        .filter(|_| random.random_bool(0.75))
        .map(|name| json!({ "name": name }))
        .collect();
    let dram = if random.random_bool(0.5) { "64Mi" } else { "128Mi" };
    let replicas = if random.random_bool(0.5) { 1 } else { 3 };
    let mut agents = json!({});
    if random.random_bool(0.25) {
        agents["nodeSelector"] = json!({ "name": "n1" });
    }
    if random.random_bool(0.5) {
        agents["deviceAccess"] = json!({ "mode": "DevicePlugin", "resourceName": "example.com/nvme" });
    }
    let mut spec = json!({
        "pools": pools, "cache": { "dram": dram, "regionSize": "2Mi" }, "controlPlane": { "replicas": replicas },
        "agents": agents,
    });
    if random.random_bool(0.5) {
        let selector = json!({ "matchLabels": { "engines": "yes" } });
        spec["injection"] = json!({ "mode": "AdmissionPolicy", "namespaceSelector": selector });
    }
    if random.random_bool(0.5) {
        spec["monitoring"] = json!({ "mode": "PodMonitor" });
    }
    if random.random_bool(0.75) {
        spec["slackProfiles"] = json!({});
    }
    spec
}

fn tenant(name: &str, random: &mut StdRng) -> Value {
    match random.random_range(0..4) {
        0 => json!({}),
        1 => json!({ "perNode": { "ssd": { "reserved": "16Mi" } } }),
        2 if name == "t" => {
            json!({ "namespaceSelector": { "matchLabels": { "kubernetes.io/metadata.name": NAMESPACE } } })
        }
        2 => json!({ "serviceAccounts": [{ "namespace": NAMESPACE, "name": "batch" }] }),
        _ => json!({ "budget": { "ssd": { "limit": LIMIT } } }),
    }
}
