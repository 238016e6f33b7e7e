//! Plays people and engines: objects of all kinds that are theirs, made, changed, used and deleted at random.
//!
//! A deletion may wait: for engines with sessions, for a pod with queues, for a wipe, for a control plane that does not answer. What waits for engines
//! or a pod is looked at while it does: it must not go before they have gone. In the end everybody lets go, and then nothing may wait any more.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use k8s_openapi::ByteString;
use kube::ResourceExt;
use kube::api::{DynamicObject, Patch, PatchParams};
use rand::RngExt;
use rand::rngs::StdRng;
use reprise_e2e::wait_until;
use serde_json::{Value, json};

use crate::agents::{Agents, PRODUCT};
use crate::in_use::FINALIZER;
use crate::lab::{Lab, SPACE, sha256};
use crate::plane::Plane;
use crate::queues::{KIND as ALLOCATION, ask};

/// What a tenant may have, where that is limited.
const LIMIT: &str = "1Gi";
/// The same in bytes.
pub(crate) const LIMIT_BYTES: u64 = 1 << 30;

/// All that they make.
const OBJECTS: [(&str, &str); 10] = [
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

/// What the operator draws for an etcd that it runs.
const AUTHORITY: &str = "c-etcd-ca";
const CERTIFICATES: &str = "c-etcd-tls";
/// What a key is replaced by.
const SPOILED: &str = "spoiled";

/// Everything that waits rightly is gone so long after nothing holds it any more: twice what is waited for engines, and what operators that are busy take.
const GOES_WITHIN: Duration = Duration::from_secs(60);

/// A session is known to operators by then: one that begins at the moment of a deletion is not waited for.
const KNOWN_AFTER: Duration = Duration::from_secs(2);

/// People, the agents of their nodes, and the control plane that a cluster has.
pub(crate) struct People {
    pub(crate) plane: Plane,
    pub(crate) agents: Agents,
    /// Since when engines have had sessions, or none, by node.
    since: BTreeMap<String, Instant>,
    /// What is being deleted and must not go, by kind and name: the unique id.
    held: BTreeMap<(String, String), Option<String>>,
    /// How often something was seen to wait.
    pub(crate) waited: usize,
    pub(crate) deleted: usize,
    /// How many budgets were removed by hand.
    pub(crate) removed: usize,
    /// Whether something may be left of a cluster that is gone.
    clusters_deleted: bool,
}

impl People {
    pub(crate) fn new(plane: Plane) -> People {
        People {
            plane,
            agents: Agents::default(),
            since: BTreeMap::new(),
            held: BTreeMap::new(),
            waited: 0,
            deleted: 0,
            removed: 0,
            clusters_deleted: false,
        }
    }

    /// Makes all objects, of specs that are drawn. Those that are there get another spec, as far as they can be changed.
    pub(crate) fn make_all(&mut self, lab: &Lab, random: &mut StdRng) {
        for object in OBJECTS {
            self.make(lab, object, random);
        }
    }

    /// Engines of a node have so many sessions.
    pub(crate) fn connect(&mut self, node: &str, sessions: u32) {
        if self.agents.sessions.insert(node.to_owned(), sessions) != Some(sessions) {
            self.held.clear();
            self.since.insert(node.to_owned(), Instant::now());
        }
    }

    /// Something that may happen to what is theirs, to what the operator makes of it, and to who uses it.
    pub(crate) fn act(&mut self, lab: &Lab, random: &mut StdRng) {
        let object = OBJECTS[random.random_range(0..OBJECTS.len())];
        match random.random_range(0..21) {
            0..6 => self.change(lab, object, random),
            6..12 => self.delete(lab, object),
            12..15 => {
                // By name: how many objects there are at this moment is not the seed's doing.
                let drawn: u64 = random.random();
                let made =
                    lab.made().into_iter().min_by_key(|(key, _)| sha256(format!("{drawn} {key}").as_bytes()));
                if let Some((key, object)) = made {
                    self.held.clear();
                    lab.delete_if_there(key.split_once('/').expect("kind and name").0, &object.name_any());
                }
            }
            15 => {
                self.held.clear();
                let value = if random.random_bool(0.5) { "fast" } else { "slow" };
                lab.merge("Node", "n2", &json!({ "metadata": { "labels": { "disk": value } } }));
                let is_cordoned = random.random_bool(0.5);
                lab.merge("Node", "n1", &json!({ "spec": { "unschedulable": is_cordoned } }));
            }
            16..18 => {
                let node = if random.random_bool(0.5) { "n1" } else { "n2" };
                self.connect(node, if random.random_bool(0.6) { 2 } else { 0 });
            }
            18 => {
                let secret = if random.random_bool(0.5) { AUTHORITY } else { CERTIFICATES };
                let entry = if secret == AUTHORITY { "tls.key" } else { "server.key" };
                merge_if_there(lab, "Secret", secret, &json!({ "stringData": { entry: SPOILED } }));
            }
            _ => {
                let pod = random.random_bool(0.7).then(|| json!({ "name": "engine", "uid": "u-1" }));
                self.held.retain(|(kind, _), _| kind != ALLOCATION);
                reserve(lab, if random.random_bool(0.5) { "a" } else { "b" }, &json!(pod));
            }
        }
    }

    /// The agents do and say what is new, or again what sessions there are, and what must not go is there.
    pub(crate) fn look(&mut self, lab: &Lab) {
        self.agents.repeat(lab);
        lab.play_stateful_sets();
        if self.clusters_deleted {
            lab.collect_garbage();
        }
        for ((kind, name), uid) in &self.held {
            let found = lab.get(kind, name);
            assert!(
                found.is_some_and(|found| found.uid() == *uid),
                "{kind} {name} has gone although somebody uses it"
            );
            self.waited += 1;
        }
    }

    /// Agents and pods of others do what is wanted of them, and people what they are told to: an authority that is lost for good is given up.
    pub(crate) fn attend(&mut self, lab: &Lab) {
        self.agents.obey(lab);
        lab.play_stateful_sets();
        lab.collect_garbage();
        // Without its certificates as well it is drawn anew.
        let entry = lab.get("Secret", AUTHORITY).map(|found| found.data["data"]["tls.key"].clone());
        if entry.is_none_or(|key| key == json!(ByteString(SPOILED.into()))) {
            lab.delete_if_there("Secret", CERTIFICATES);
        }
        // What one operator has asked for may come after another one has taken it back.
        for tenant in ["t", "u"] {
            let is_said = lab.says(("CacheTenant", tenant), ["BudgetApplied", "False", "Conflict"]);
            if is_said && self.plane.budgets().contains_key(tenant) {
                self.plane.reprise(&["tenant", "remove", tenant]);
                self.removed += 1;
            }
        }
    }

    /// Those who use something were not heard for a while, as when the API server was away.
    pub(crate) fn were_not_heard(&mut self) {
        self.held.clear();
    }

    fn change(&mut self, lab: &Lab, object: (&str, &str), random: &mut StdRng) {
        if object.0 == "KVCacheCluster" {
            self.held.clear();
        }
        self.make(lab, object, random);
    }

    /// Makes an object with a spec that is drawn, or gives it another one.
    fn make(&mut self, lab: &Lab, object: (&str, &str), random: &mut StdRng) {
        if object.0 == "KVCacheCluster" && has_managed_store(lab).is_none() {
            // The store went with the cluster of before.
            self.plane.clear();
        }
        make(lab, object, random);
    }

    fn delete(&mut self, lab: &Lab, (kind, name): (&str, &str)) {
        let Some(found) = lab.get(kind, name) else { return };
        self.deleted += 1;
        self.clusters_deleted |= kind == "KVCacheCluster";
        lab.delete_if_there(kind, name);
        if kind == "KVCacheCluster" || kind == "SSDPool" {
            self.held.retain(|(kind, _), _| kind != ALLOCATION);
        }
        if self.is_used(lab, kind, &found) {
            self.held.insert((kind.to_owned(), name.to_owned()), found.uid());
        }
    }

    /// Whether operators have known for a while that somebody uses an object.
    fn is_used(&self, lab: &Lab, kind: &str, object: &DynamicObject) -> bool {
        if !object.finalizers().iter().any(|one| one == FINALIZER) {
            return false;
        }
        let has_it = |node: &DynamicObject| match kind {
            "KVCacheCluster" => node.data["spec"]["clusterRef"]["name"] == object.name_any(),
            _ => {
                let claims = node.data["spec"]["claims"].as_array().into_iter().flatten();
                claims.into_iter().any(|claim| claim["uid"].as_str() == object.uid().as_deref())
            }
        };
        let is_busy = |node: &str| {
            self.agents.sessions.get(node).is_some_and(|sessions| *sessions > 0)
                && self.since.get(node).is_some_and(|since| since.elapsed() > KNOWN_AFTER)
        };
        lab.list("CacheNode").iter().any(|node| has_it(node) && is_busy(&node.name_any()))
    }

    /// Nobody uses anything any more, and everything that waited goes.
    pub(crate) fn let_go(&mut self, lab: &Lab) {
        self.held.clear();
        self.agents.sessions.clear();
        let begun = Instant::now();
        loop {
            let leaving: Vec<(String, String)> = leaving(lab);
            if leaving.is_empty() {
                return;
            }
            assert!(begun.elapsed() < GOES_WITHIN, "what nobody holds does not go: {:#?}", lab.theirs());
            self.attend(lab);
            for (_, name) in leaving.iter().filter(|(kind, _)| kind == ALLOCATION) {
                reserve(lab, name, &Value::Null);
            }
            // Of one that was refused on all nodes there is nothing to wipe, and people are told what to do.
            for (_, name) in leaving.iter().filter(|(kind, _)| kind == "SSDPool") {
                if lab.says(("SSDPool", name), ["DeletionBlocked", "True", "Conflict"]) {
                    let retained =
                        json!({ "spec": { "deletionPolicy": "Retain", "wipeConfirmation": null } });
                    merge_if_there(lab, "SSDPool", name, &retained);
                }
            }
            // A pool is wiped by the agents of its cluster, and refused it would have none.
            if leaving.iter().any(|(kind, _)| kind == "SSDPool") {
                pool(lab, "q", 64);
                merge_if_there(lab, "SSDPool", "p", &json!({ "spec": { "queueDepth": 64 } }));
                let pools = json!({ "pools": [{ "name": "p" }, { "name": "q" }, { "name": "r" }] });
                lab.cluster(with_store(pools, has_managed_store(lab).unwrap_or_default()));
            }
            std::thread::sleep(Duration::from_millis(100));
        }
    }

    /// Of pools that nodes have and that contradict each other those are refused that were edited last. Who looks at all of it for the first time goes by their
    /// ages, so all but the oldest are made anew, as they are.
    pub(crate) fn agree(&mut self, lab: &Lab) {
        let mut pools = lab.list("SSDPool");
        let depths: BTreeSet<String> =
            pools.iter().map(|pool| pool.data["spec"]["queueDepth"].to_string()).collect();
        if depths.len() == 1 {
            return;
        }
        pools.sort_by_key(|pool| (pool.creation_timestamp(), pool.name_any()));
        let younger: Vec<DynamicObject> = pools.into_iter().skip(1).collect();
        for pool in &younger {
            let retained = json!({ "spec": { "deletionPolicy": "Retain", "wipeConfirmation": null } });
            lab.merge("SSDPool", &pool.name_any(), &retained);
            lab.delete("SSDPool", &pool.name_any());
        }
        wait_until("they go", GOES_WITHIN, || {
            self.attend(lab);
            younger.iter().all(|pool| lab.get("SSDPool", &pool.name_any()).is_none()).then_some(())
        });
        for pool in &younger {
            // Times of making are whole seconds, and who comes first is by them.
            std::thread::sleep(Duration::from_millis(1100));
            lab.apply(&json!({
                "apiVersion": "reprise.dev/v1alpha1", "kind": "SSDPool", "metadata": { "name": pool.name_any() },
                "spec": pool.data["spec"],
            }));
        }
    }

    /// Makes those allocations anew whose grant is over for good, or stands although a new one would not be granted: what a grant has lived through stays
    /// with it. Whether there were some.
    pub(crate) fn renew_allocations(&mut self, lab: &Lab, random: &mut StdRng) -> bool {
        let is_over = |name: &&str| {
            let found = lab.get(ALLOCATION, name).expect("all were made");
            let conditions = found.data["status"]["conditions"].as_array().cloned().unwrap_or_default();
            let is = |kind: &str| conditions.iter().any(|one| one["type"] == kind && one["status"] == "True");
            is("Released") || (!found.finalizers().is_empty() && !is("Allocated"))
        };
        let over: Vec<&str> = ["a", "b"].into_iter().filter(is_over).collect();
        for name in &over {
            lab.delete(ALLOCATION, name);
            wait_until("it goes", GOES_WITHIN, || {
                self.agents.obey(lab);
                lab.get(ALLOCATION, name).is_none().then_some(())
            });
            self.make(lab, (ALLOCATION, name), random);
        }
        !over.is_empty()
    }
}

/// What is being deleted and is there.
fn leaving(lab: &Lab) -> Vec<(String, String)> {
    let goes = |object: &DynamicObject| object.metadata.deletion_timestamp.is_some();
    let all = lab.theirs().into_iter().filter(|(_, object)| goes(object));
    all.map(|(key, object)| (key.split_once('/').expect("kind and name").0.to_owned(), object.name_any()))
        .collect()
}

/// Changes some fields of an object that may be gone.
fn merge_if_there(lab: &Lab, kind: &str, name: &str, fields: &Value) {
    let (api, params) = (lab.api(kind), PatchParams::default());
    match lab.server.block_on(api.patch(name, &params, &Patch::Merge(fields))) {
        Ok(_) => {}
        Err(kube::Error::Api(status)) if status.is_not_found() => {}
        Err(error) => panic!("{kind} {name} does not take {fields}: {error}"),
    }
}

/// Says that a pod uses an allocation, or none; it may be gone.
fn reserve(lab: &Lab, name: &str, pod: &Value) {
    let body = Patch::Merge(json!({ "status": { "reservedFor": pod } }));
    let _ = lab.server.block_on(lab.api(ALLOCATION).patch_status(name, &PatchParams::default(), &body));
}

fn make(lab: &Lab, (kind, name): (&str, &str), random: &mut StdRng) {
    match (kind, name) {
        ("KVCacheCluster", _) => {
            // It is drawn again for another cluster of this name.
            let managed = has_managed_store(lab).unwrap_or_else(|| random.random_bool(0.5));
            lab.cluster(with_store(cluster(random), managed));
        }
        ("SSDPool", "p") => {
            let depth = if random.random_bool(0.2) { 128 } else { 64 };
            let wiped =
                json!({ "deletionPolicy": "Wipe", "wipeConfirmation": "yes-really-destroy-the-data" });
            let mut more = if random.random_bool(0.5) { wiped } else { json!({}) };
            more["queueDepth"] = json!(depth);
            lab.pool(name, "/var/lib/pool", more);
        }
        ("SSDPool", "q") => pool(lab, name, if random.random_bool(0.2) { 128 } else { 64 }),
        ("SSDPool", _) => {
            let percent = if random.random_bool(0.5) { 50 } else { 75 };
            lab.raw_pool(
                name,
                json!({ "queueDepth": 64, "devices": {
                "globs": ["/dev/disk/by-id/nvme-*"], "maxGpuQueuePercent": percent,
            } }),
            );
        }
        ("CacheTenant", _) => lab.tenant(name, tenant(name, random)),
        ("SlackProfile", "s") => lab.profile(name, PRODUCT, random.random_range(60..90)),
        ("SlackProfile", _) => lab.profile(name, "NVIDIA L4", random.random_range(60..90)),
        // Nothing of an allocation can be changed.
        _ if lab.get(kind, name).is_some() => {}
        (_, "a") => ask(lab, name, json!({ "poolRef": { "name": "r" }, "queuePairs": 4 })),
        _ => {
            let tenant = if random.random_bool(0.5) { "t" } else { "u" };
            let mut more =
                json!({ "poolRef": { "name": "r" }, "queuePairs": 4, "tenantRef": { "name": tenant } });
            if random.random_bool(0.5) {
                more["slackProfileRef"] = json!({ "name": "s" });
            }
            ask(lab, name, more);
        }
    }
}

/// Whether the operator runs the etcd of the cluster, if there is a cluster.
fn has_managed_store(lab: &Lab) -> Option<bool> {
    Some(lab.get("KVCacheCluster", "c")?.data["spec"]["etcd"]["mode"] == "Managed")
}

/// The spec of a cluster with an etcd that the operator runs, or without.
fn with_store(mut spec: Value, managed: bool) -> Value {
    if managed {
        spec["etcd"] = json!({ "mode": "Managed" });
    }
    spec
}

/// The pool of nodes with fast disks.
fn pool(lab: &Lab, name: &str, depth: u32) {
    let selected = json!({ "matchLabels": { "disk": "fast" } });
    lab.pool(name, "/var/lib/other", json!({ "queueDepth": depth, "nodeSelector": selected }));
}

/// What the spec of the cluster may be: each choice decides whether there are objects of some kind.
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
        agents["gpuAccess"] = json!({ "mode": "Dra", "deviceClassName": "gpu.example.com" });
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
            json!({ "namespaceSelector": { "matchLabels": { "kubernetes.io/metadata.name": SPACE } } })
        }
        2 => json!({ "serviceAccounts": [{ "namespace": SPACE, "name": "batch" }] }),
        _ => json!({ "budget": { "ssd": { "limit": LIMIT } } }),
    }
}
