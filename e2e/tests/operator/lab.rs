//! A cluster of Kubernetes as far as the operator sees it: an API server with our definitions, nodes, and somebody who plays kubelet and
//! agents.

use std::collections::BTreeMap;
use std::time::Duration;

use k8s_openapi::ByteString;
use k8s_openapi::jiff::{SignedDuration, Timestamp};
use kube::api::{Api, ApiResource, DeleteParams, DynamicObject, ListParams, Patch, PatchParams};
use kube::core::GroupVersionKind;
use kube::{Client, ResourceExt};
use reprise_e2e::{ApiServer, Etcd, Operator, OperatorFiles, PATIENCE, World, wait_until};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

/// Namespace of the clusters.
pub(crate) const SPACE: &str = "cache";
/// Namespace of the operator.
pub(crate) const SYSTEM: &str = "reprise-system";
/// Where nobody listens: ports below 1024 are not given to processes of tests.
pub(crate) const NOBODY: &str = "127.0.0.1:9";
/// The manager of what tests write.
pub(crate) const SOMEBODY: &str = "somebody";
/// A few reconciles have passed by then.
pub(crate) const SETTLED: Duration = Duration::from_millis(1500);

/// Group of admission policies.
const ADMISSION: &str = "admissionregistration.k8s.io";

/// HTTP's code for what is not there, kinds as well as objects.
const NOT_FOUND: u16 = 404;

/// Kinds that people make: ours, each with whether it has a namespace.
pub(crate) const THEIRS: [(&str, &str, bool); 5] = [
    ("KVCacheCluster", "kvcacheclusters", true),
    ("SSDPool", "ssdpools", false),
    ("CacheTenant", "cachetenants", false),
    ("SlackProfile", "slackprofiles", true),
    ("GPUQueueAllocation", "gpuqueueallocations", true),
];

/// Kinds that the operator makes, all of them: there are API servers without the last.
pub(crate) const MADE: [(&str, &str, &str, bool); 13] = [
    ("", "ServiceAccount", "serviceaccounts", true),
    ("rbac.authorization.k8s.io", "ClusterRoleBinding", "clusterrolebindings", false),
    ("", "ConfigMap", "configmaps", true),
    ("", "Secret", "secrets", true),
    ("", "Service", "services", true),
    ("policy", "PodDisruptionBudget", "poddisruptionbudgets", true),
    ("apps", "StatefulSet", "statefulsets", true),
    ("apps", "DaemonSet", "daemonsets", true),
    ("resource.k8s.io", "ResourceClaimTemplate", "resourceclaimtemplates", true),
    (ADMISSION, "MutatingAdmissionPolicy", "mutatingadmissionpolicies", false),
    (ADMISSION, "MutatingAdmissionPolicyBinding", "mutatingadmissionpolicybindings", false),
    ("reprise.dev", "CacheNode", "cachenodes", false),
    ("monitoring.coreos.com", "PodMonitor", "podmonitors", true),
];

/// Objects by `kind/name`.
pub(crate) type Objects = BTreeMap<String, DynamicObject>;

/// In the order in which it ends: processes, then their folder.
pub(crate) struct Lab {
    pub(crate) server: ApiServer,
    pub(crate) etcd: Etcd,
    pub(crate) world: World,
}

impl Lab {
    /// An API server with our definitions and two nodes.
    pub(crate) fn new() -> Lab {
        let world = World::new();
        let server = world.api_server();
        let etcd = world.etcd();
        let lab = Lab { server, etcd, world };
        // An API server or an etcd that a busy machine holds up for three seconds: the operator has ten to renew its lease.
        lab.world.allow("the lease cannot be renewed");
        for space in [SPACE, SYSTEM] {
            lab.apply(&json!({ "apiVersion": "v1", "kind": "Namespace", "metadata": { "name": space } }));
        }
        let files = lab.operator_files("definitions");
        let output = files.command(&["apply-definitions"]).output().expect("the operator can be started");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        for node in ["n1", "n2"] {
            lab.apply(&json!({
                "apiVersion": "v1", "kind": "Node",
                "metadata": { "name": node, "labels": { "disk": "fast", "name": node } },
            }));
        }
        lab
    }

    /// An operator of this name, not started, that finds nobody where the control plane should be.
    pub(crate) fn operator_files(&self, name: &str) -> OperatorFiles {
        self.operator_with(name, NOBODY)
    }

    /// An operator of this name, not started, and the address of the control plane of cluster `c`.
    pub(crate) fn operator_with(&self, name: &str, control_plane: &str) -> OperatorFiles {
        let files = self.world.operator(&self.server, name, SYSTEM);
        files.control_plane(&format!("{SPACE}/c"), control_plane)
    }

    /// Starts the operator; it must start.
    pub(crate) fn operator(&self) -> Operator {
        let started = self.operator_files("operator").start();
        started.unwrap_or_else(|refused| panic!("the operator does not start: {refused:?}"))
    }

    pub(crate) fn client(&self) -> Client {
        self.server.admin()
    }

    /// Where objects of a kind are, in the clusters' namespace.
    pub(crate) fn api(&self, kind: &str) -> Api<DynamicObject> {
        let (group, kind, plural, spaced) = match kind {
            "Node" => ("", kind.to_owned(), "nodes".to_owned(), false),
            "Namespace" => ("", kind.to_owned(), "namespaces".to_owned(), false),
            "CustomResourceDefinition" => {
                ("apiextensions.k8s.io", kind.to_owned(), "customresourcedefinitions".to_owned(), false)
            }
            "StorageClass" => ("storage.k8s.io", kind.to_owned(), "storageclasses".to_owned(), false),
            "PersistentVolumeClaim" => ("", kind.to_owned(), "persistentvolumeclaims".to_owned(), true),
            "Event" => ("", kind.to_owned(), "events".to_owned(), true),
            _ => {
                let theirs =
                    THEIRS.iter().map(|(kind, plural, spaced)| ("reprise.dev", *kind, *plural, *spaced));
                let all = theirs.chain(MADE);
                let found = all.into_iter().find(|(_, one, ..)| *one == kind).expect("a kind of the lab");
                (found.0, found.1.to_owned(), found.2.to_owned(), found.3)
            }
        };
        let version = if group == "reprise.dev" { "v1alpha1" } else { "v1" };
        let gvk = GroupVersionKind::gvk(group, version, &kind);
        let resource = ApiResource::from_gvk_with_plural(&gvk, &plural);
        if spaced {
            Api::namespaced_with(self.client(), SPACE, &resource)
        } else {
            Api::all_with(self.client(), &resource)
        }
    }

    /// Applies an object as somebody who takes what he wants.
    pub(crate) fn apply(&self, object: &Value) -> DynamicObject {
        let api = self.api(object["kind"].as_str().expect("a kind"));
        let name = object["metadata"]["name"].as_str().expect("a name");
        let params = PatchParams::apply(SOMEBODY).force();
        let applied = self.server.block_on(api.patch(name, &params, &Patch::Apply(object)));
        applied.unwrap_or_else(|error| panic!("{object} is not taken: {error}"))
    }

    /// A cluster `c` whose store is the lab's etcd, with more in its spec.
    pub(crate) fn cluster(&self, more: Value) {
        let mut spec = json!({
            "etcd": { "mode": "External", "external": { "endpoints": [self.etcd.endpoint()] } },
            "cache": { "dram": "64Mi", "regionSize": "2Mi" },
        });
        spec.as_object_mut().expect("made above").extend(more.as_object().expect("fields").clone());
        self.ours("KVCacheCluster", "c", spec);
    }

    /// A pool in a directory, with more in its spec.
    pub(crate) fn pool(&self, name: &str, directory: &str, more: Value) {
        let mut spec = json!({ "directory": { "path": directory, "size": "64Mi" } });
        spec.as_object_mut().expect("made above").extend(more.as_object().expect("fields").clone());
        self.ours("SSDPool", name, spec);
    }

    /// A pool of raw devices, with more in its spec.
    pub(crate) fn raw_pool(&self, name: &str, more: Value) {
        let mut spec = json!({ "devices": { "globs": ["/dev/disk/by-id/nvme-*"] } });
        spec.as_object_mut().expect("made above").extend(more.as_object().expect("fields").clone());
        self.ours("SSDPool", name, spec);
    }

    /// A tenant.
    pub(crate) fn tenant(&self, name: &str, spec: Value) {
        self.ours("CacheTenant", name, spec);
    }

    /// A profile of a GPU, with one window of so many microseconds.
    pub(crate) fn profile(&self, name: &str, product: &str, micros: u32) {
        let window = json!({ "phase": "Decode", "minTokens": 0, "maxTokens": 512, "slackMicros": micros, "maxIoSms": 4 });
        let subject = json!({ "model": "llama", "gpuProduct": product, "engineVersion": "vllm 0.33" });
        self.ours("SlackProfile", name, json!({ "subject": subject, "windows": [window] }));
    }

    fn ours(&self, kind: &str, name: &str, spec: Value) {
        self.apply(&json!({
            "apiVersion": "reprise.dev/v1alpha1", "kind": kind, "metadata": { "name": name }, "spec": spec,
        }));
    }

    /// Whether a condition has this status and reason by now, of the present generation.
    pub(crate) fn says(&self, (kind, name): (&str, &str), [condition, status, reason]: [&str; 3]) -> bool {
        let Some(object) = self.get(kind, name) else { return false };
        let conditions = object.data["status"]["conditions"].as_array().cloned().unwrap_or_default();
        conditions.iter().any(|one| {
            one["type"] == condition
                && one["status"] == status
                && one["reason"] == reason
                && one["observedGeneration"].as_i64() == object.metadata.generation
        })
    }

    /// An object, if it is there.
    pub(crate) fn get(&self, kind: &str, name: &str) -> Option<DynamicObject> {
        let api = self.api(kind);
        self.server.block_on(api.get_opt(name)).expect("the API server answers")
    }

    /// Waits for an object.
    pub(crate) fn wait_for(&self, kind: &str, name: &str) -> DynamicObject {
        wait_until(&format!("{kind} {name}"), PATIENCE, || {
            std::thread::sleep(Duration::from_millis(20));
            self.get(kind, name)
        })
    }

    /// Waits until a condition has this status and reason, of the present generation; its message.
    pub(crate) fn wait_condition(&self, kind: &str, name: &str, wanted: [&str; 3]) -> String {
        self.wait_condition_within(PATIENCE, (kind, name), wanted)
    }

    /// The same, for something that takes longer.
    pub(crate) fn wait_condition_within(
        &self,
        within: Duration,
        (kind, name): (&str, &str),
        wanted: [&str; 3],
    ) -> String {
        let mut seen = Value::Null;
        let give_up = std::time::Instant::now() + within;
        while std::time::Instant::now() < give_up {
            if let Some(object) = self.get(kind, name) {
                let generation = object.metadata.generation;
                let conditions = object.data["status"]["conditions"].as_array().cloned().unwrap_or_default();
                let found = conditions.iter().find(|one| one["type"] == wanted[0]);
                if let Some(found) = found
                    && found["status"] == wanted[1]
                    && found["reason"] == wanted[2]
                    && found["observedGeneration"].as_i64() == generation
                {
                    return found["message"].as_str().unwrap_or_default().to_owned();
                }
                seen = json!(conditions);
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        panic!("{kind} {name} never says {wanted:?}: {seen:#}");
    }

    /// Changes some fields of an object, as somebody who owns nothing.
    pub(crate) fn merge(&self, kind: &str, name: &str, fields: &Value) {
        let (api, params) = (self.api(kind), PatchParams::default());
        let patched = self.server.block_on(api.patch(name, &params, &Patch::Merge(fields)));
        patched.unwrap_or_else(|error| panic!("{kind} {name} does not take {fields}: {error}"));
    }

    /// Deletes an object; what waits for finalizers stays.
    pub(crate) fn delete(&self, kind: &str, name: &str) {
        let api = self.api(kind);
        self.server.block_on(api.delete(name, &DeleteParams::background())).expect("it is there");
    }

    /// The same, of what may be gone by now.
    pub(crate) fn delete_if_there(&self, kind: &str, name: &str) {
        let api = self.api(kind);
        // Nothing else than that it is gone keeps an object from being deleted here.
        let _ = self.server.block_on(api.delete(name, &DeleteParams::background()));
    }

    /// Everything of a kind: nothing where the kind is not served.
    pub(crate) fn list(&self, kind: &str) -> Vec<DynamicObject> {
        let api = self.api(kind);
        match self.server.block_on(api.list(&ListParams::default())) {
            Ok(list) => list.items,
            Err(kube::Error::Api(status)) if status.code == NOT_FOUND => Vec::new(),
            Err(error) => panic!("{kind} cannot be listed: {error}"),
        }
    }

    /// Everything of our kinds that people make.
    pub(crate) fn theirs(&self) -> Objects {
        let of = |kind: &'static str| {
            self.list(kind).into_iter().map(move |object| (format!("{kind}/{}", object.name_any()), object))
        };
        THEIRS.iter().flat_map(|(kind, ..)| of(kind)).collect()
    }

    /// Everything that the operator has made.
    pub(crate) fn made(&self) -> Objects {
        let ours = |object: &DynamicObject| {
            object.labels().get("app.kubernetes.io/managed-by").is_some_and(|by| by == "reprise-operator")
        };
        let of = |kind: &'static str| {
            let all = self.list(kind).into_iter().filter(|object| ours(object));
            all.map(move |object| (format!("{kind}/{}", object.name_any()), object))
        };
        MADE.iter().flat_map(|(_, kind, ..)| of(kind)).collect()
    }

    /// Monitors of Prometheus may be made from now on.
    pub(crate) fn serve_pod_monitors(&self) {
        let anything = json!({ "type": "object", "x-kubernetes-preserve-unknown-fields": true });
        let name = "podmonitors.monitoring.coreos.com";
        self.apply(&json!({
            "apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition", "metadata": { "name": name },
            "spec": {
                "group": "monitoring.coreos.com", "scope": "Namespaced",
                "names": { "kind": "PodMonitor", "plural": "podmonitors" },
                "versions": [{
                    "name": "v1", "served": true, "storage": true, "schema": { "openAPIV3Schema": anything },
                }],
            },
        }));
        wait_until("the kind is served", PATIENCE, || {
            let found = self.get("CustomResourceDefinition", name)?;
            let conditions = found.data["status"]["conditions"].as_array().cloned().unwrap_or_default();
            conditions.iter().any(|one| one["type"] == "Established" && one["status"] == "True").then_some(())
        });
    }

    /// Plays the garbage collector of Kubernetes: what is left of clusters that are gone goes.
    pub(crate) fn collect_garbage(&self) {
        let live: Vec<String> =
            self.list("KVCacheCluster").iter().filter_map(|cluster| cluster.uid()).collect();
        let is_left = |object: &DynamicObject| {
            let mut owners = object.owner_references().iter().filter(|owner| owner.kind == "KVCacheCluster");
            owners.any(|owner| !live.contains(&owner.uid))
        };
        for (key, object) in self.made().iter().filter(|(_, object)| is_left(object)) {
            self.delete_if_there(key.split_once('/').expect("kind and name").0, &object.name_any());
        }
    }

    /// Plays the kubelet: the members' StatefulSet has all its pods.
    pub(crate) fn members_are_ready(&self) {
        self.all_are_ready("c-controlplane");
    }

    /// The same, of any StatefulSet.
    pub(crate) fn all_are_ready(&self, name: &str) {
        assert!(self.has_its_pods(&self.wait_for("StatefulSet", name)), "StatefulSet {name} has gone");
    }

    /// Plays the controller of StatefulSets and all kubelets: every one has the pods that it wants by now.
    pub(crate) fn play_stateful_sets(&self) {
        let is_new = |set: &&DynamicObject| {
            set.data["status"]["observedGeneration"].as_i64() != set.metadata.generation
        };
        for set in self.list("StatefulSet").iter().filter(is_new) {
            self.has_its_pods(set);
        }
    }

    /// All pods of a StatefulSet are ready from now on; false when it is not there any more.
    fn has_its_pods(&self, found: &DynamicObject) -> bool {
        let name = found.name_any();
        let replicas = found.data["spec"]["replicas"].clone();
        let status = json!({ "status": {
            "observedGeneration": found.metadata.generation,
            "replicas": replicas, "readyReplicas": replicas, "updatedReplicas": replicas, "availableReplicas": replicas,
        } });
        let (api, params) = (self.api("StatefulSet"), PatchParams::default());
        match self.server.block_on(api.patch_status(&name, &params, &Patch::Merge(&status))) {
            Ok(_) => true,
            Err(kube::Error::Api(status)) if status.is_not_found() => false,
            Err(error) => panic!("the status of {name} is not taken: {error}"),
        }
    }

    /// Plays the agent of a node: it does what its CacheNode says, and each claim has one device in this state.
    pub(crate) fn agent_reports(&self, node: &str, state: &str) {
        self.agent_says(node, state, |_| ());
    }

    /// The same, with something else in its status.
    pub(crate) fn agent_says(&self, node: &str, state: &str, change: impl FnOnce(&mut Value)) {
        let found = self.wait_for("CacheNode", node);
        let spec = &found.data["spec"];
        let claims = spec["claims"].as_array().cloned().unwrap_or_default();
        let devices: Vec<Value> = claims.iter().map(|claim| device(claim, state)).collect();
        let pools: Vec<Value> = claims
            .iter()
            .map(|claim| json!({ "pool": claim["pool"], "uid": claim["uid"], "generation": claim["generation"] }))
            .collect();
        let now = Timestamp::now();
        // However slow the machine is, the agent does not go silent while the test looks.
        let (now, said) = (now.to_string(), (now + SignedDuration::from_hours(1)).to_string());
        let mut status = json!({
            "apiVersion": "reprise.dev/v1alpha1", "kind": "CacheNode", "metadata": { "name": node },
            "status": {
                "observedGeneration": found.metadata.generation,
                "lastUpdated": said,
                "agent": { "version": "0.1.0" },
                "capacity": { "dramTotal": "64Mi", "dramUsed": "0", "ssdTotal": "64Mi", "ssdUsed": "1Mi" },
                "devices": devices,
                "applied": { "configurationDigest": spec["configurationDigest"], "pools": pools },
                "conditions": [{
                    "type": "AgentReady", "status": "True", "reason": "AsDesired", "lastTransitionTime": now,
                    "observedGeneration": found.metadata.generation,
                }],
            },
        });
        change(&mut status["status"]);
        let params = PatchParams::apply("reprise-agent").force();
        let api = self.api("CacheNode");
        self.server
            .block_on(api.patch_status(node, &params, &Patch::Apply(&status)))
            .expect("a status is taken");
    }
}

fn device(claim: &Value, state: &str) -> Value {
    let mut device = json!({ "path": claim["file"], "pool": claim["pool"], "state": state, "message": "as the test says" });
    if state == "Open" {
        device["size"] = claim["size"].clone();
        device["used"] = json!("1Mi");
        device["engine"] = claim["engine"].clone();
    }
    device
}

/// Digests of what was drawn, and where it is.
fn drawn(objects: &Objects) -> BTreeMap<String, String> {
    let mut drawn = BTreeMap::new();
    for (key, secret) in objects.iter().filter(|(key, _)| key.starts_with("Secret/")) {
        if let Some(applied) = secret.annotations().get(APPLIED) {
            drawn.insert(applied.clone(), format!("as {key}"));
        }
        if let Ok(certificate) = serde_json::from_value::<ByteString>(secret.data["data"]["ca.crt"].clone()) {
            drawn.insert(sha256(&certificate.0), format!("as ca.crt of {key}"));
        }
    }
    drawn
}

/// As the operator writes digests.
pub(crate) fn sha256(bytes: &[u8]) -> String {
    let digest: String = Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect();
    format!("sha256:{digest}")
}

/// Versions of objects: equal ones have not been written.
pub(crate) fn versions(objects: &Objects) -> BTreeMap<String, String> {
    objects.iter().map(|(key, object)| (key.clone(), object.resource_version().unwrap_or_default())).collect()
}

/// Annotation of a Secret: the digest of what the operator has put into it.
const APPLIED: &str = "reprise.dev/applied";

/// What is wanted of objects, without what differs from one time to the other: ids, versions, times, keys that were drawn. Of what was drawn it
/// is told where else it is.
pub(crate) fn essence(objects: &Objects) -> BTreeMap<String, Value> {
    let drawn = drawn(objects);
    let of = |key: &str, object: &DynamicObject| {
        let mut whole = serde_json::to_value(object).expect("objects are JSON");
        let kind = key.split_once('/').expect("kind and name").0;
        let fields = whole.as_object_mut().expect("an object");
        fields.remove("status");
        let metadata = fields["metadata"].as_object_mut().expect("metadata");
        metadata.retain(|key, _| ["name", "namespace", "labels"].contains(&key.as_str()));
        let owners = object.owner_references().iter().map(|owner| format!("{}/{}", owner.kind, owner.name));
        metadata.insert("owners".to_owned(), owners.collect());
        if kind == "Secret" {
            let names: Vec<String> = whole["data"].as_object().expect("data").keys().cloned().collect();
            let digest = sha256(whole["data"].to_string().as_bytes());
            let as_applied = object.annotations().get(APPLIED).map(|applied| *applied == digest);
            whole["data"] = json!({ "entries": names, "as applied": as_applied });
        }
        if kind == "StatefulSet" {
            let annotations = whole["spec"]["template"]["metadata"]["annotations"].as_object_mut();
            for value in annotations.into_iter().flatten().map(|(_, value)| value) {
                if let Some(place) = value.as_str().and_then(|digest| drawn.get(digest)) {
                    *value = json!(place);
                }
            }
        }
        if kind == "Service" {
            // Drawn by the API server.
            for drawn in ["clusterIP", "clusterIPs"] {
                let spec = whole["spec"].as_object_mut().expect("a spec");
                if spec.get(drawn).is_some_and(|value| !value.to_string().contains("None")) {
                    spec.remove(drawn);
                }
            }
        }
        whole
    };
    objects.iter().map(|(key, object)| (key.clone(), of(key, object))).collect()
}
