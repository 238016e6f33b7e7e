//! A Kubernetes cluster as the operator sees it: an API server with the Reprise definitions, two nodes, and
//! simulated kubelets and agents. No controller of Kubernetes runs.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use k8s_openapi::ByteString;
use k8s_openapi::jiff::{SignedDuration, Timestamp};
use kube::api::{Api, ApiResource, DeleteParams, DynamicObject, ListParams, Patch, PatchParams};
use kube::core::GroupVersionKind;
use kube::{Client, ResourceExt};
use reprise_e2e::{ApiServer, Etcd, Operator, OperatorFiles, PATIENCE, TestEnv, wait_until};
use reprise_identity::credentials::AUTHORITIES_FILE;
use serde::Serialize;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use crate::operator::server_pool::{API_SERVERS, ETCDS, Lent};

/// Namespace of the KVCacheClusters.
pub(crate) const NAMESPACE: &str = "cache";
/// Namespace of the operator.
pub(crate) const OPERATOR_NAMESPACE: &str = "reprise-system";
/// Address without a listener: test processes never get ports below 1024.
pub(crate) const UNREACHABLE_ADDRESS: &str = "127.0.0.1:9";
/// Field manager of objects that tests apply.
pub(crate) const OTHER_MANAGER: &str = "other-writer";
/// Time without a reconcile after which operators have followed all changes. On an idle machine one follows within 20 ms.
const SETTLED_AFTER: Duration = Duration::from_millis(400);

/// Group of admission policies.
const ADMISSION: &str = "admissionregistration.k8s.io";

/// HTTP status for missing objects and for kinds that are not served.
const NOT_FOUND: u16 = 404;

/// Reprise kinds that users create: kind, plural, and whether the kind is namespaced.
pub(crate) const USER_KINDS: [(&str, &str, bool); 5] = [
    ("KVCacheCluster", "kvcacheclusters", true),
    ("SSDPool", "ssdpools", false),
    ("CacheTenant", "cachetenants", false),
    ("SlackProfile", "slackprofiles", true),
    ("GPUQueueAllocation", "gpuqueueallocations", true),
];

/// All kinds that the operator creates: group, kind, plural, and whether the kind is namespaced. Some API
/// servers do not serve the last one.
pub(crate) const OPERATOR_KINDS: [(&str, &str, &str, bool); 12] = [
    ("", "ServiceAccount", "serviceaccounts", true),
    ("rbac.authorization.k8s.io", "ClusterRoleBinding", "clusterrolebindings", false),
    ("", "ConfigMap", "configmaps", true),
    ("", "Secret", "secrets", true),
    ("", "Service", "services", true),
    ("policy", "PodDisruptionBudget", "poddisruptionbudgets", true),
    ("apps", "StatefulSet", "statefulsets", true),
    ("apps", "DaemonSet", "daemonsets", true),
    (ADMISSION, "MutatingAdmissionPolicy", "mutatingadmissionpolicies", false),
    (ADMISSION, "MutatingAdmissionPolicyBinding", "mutatingadmissionpolicybindings", false),
    ("reprise.dev", "CacheNode", "cachenodes", false),
    ("monitoring.coreos.com", "PodMonitor", "podmonitors", true),
];

/// Objects keyed by `kind/name`.
pub(crate) type Objects = BTreeMap<String, DynamicObject>;

/// Processes and the folder of their clients. Fields drop in this order, so the environment sees all log lines.
pub(crate) struct TestCluster {
    pub(crate) server: Lent<ApiServer>,
    pub(crate) etcd: Lent<Etcd>,
    pub(crate) env: TestEnv,
}

/// Applies an object by force as [`OTHER_MANAGER`].
fn apply_to(server: &ApiServer, api: &Api<DynamicObject>, object: &Value) -> DynamicObject {
    let name = object["metadata"]["name"].as_str().expect("a name");
    let params = PatchParams::apply(OTHER_MANAGER).force();
    let applied = server.block_on(api.patch(name, &params, &Patch::Apply(object)));
    applied.unwrap_or_else(|error| panic!("cannot apply {object}: {error}"))
}

/// Creates what each test finds: namespaces, definitions and two nodes.
fn fill(env: &TestEnv, server: &ApiServer) {
    let api = |kind: &str, plural: &str| {
        let resource = ApiResource::from_gvk_with_plural(&GroupVersionKind::gvk("", "v1", kind), plural);
        Api::all_with(server.admin(), &resource)
    };
    for space in [NAMESPACE, OPERATOR_NAMESPACE] {
        let object = json!({ "apiVersion": "v1", "kind": "Namespace", "metadata": { "name": space } });
        apply_to(server, &api("Namespace", "namespaces"), &object);
    }
    let files = env.operator(server, "definitions", OPERATOR_NAMESPACE);
    let output = files.command(&["apply-definitions"]).output().expect("the operator can be started");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    for node in ["n1", "n2"] {
        let object = json!({
            "apiVersion": "v1", "kind": "Node",
            "metadata": { "name": node, "labels": { "disk": "fast", "name": node } },
        });
        apply_to(server, &api("Node", "nodes"), &object);
    }
}

/// Returns a window of a profile for an input length in tokens, with `micros` microseconds of slack.
pub(crate) fn window(phase: &str, [least, end]: [u32; 2], micros: u32) -> Value {
    json!({
        "phase": phase, "minInputTokens": least, "maxInputTokens": end, "minPrefixTokens": 0,
        "maxPrefixTokens": 65536, "layerMicros": 1000, "slackMicros": micros, "freeSms": 4,
    })
}

/// Returns a measurement with these windows.
pub(crate) fn measurement(windows: &Value) -> Value {
    let kernels = json!([{ "iocbs": 1, "micros": 30, "sms": 2 }, { "iocbs": 4, "micros": 90, "sms": 4 }]);
    json!({
        "stepTokens": 32, "iocbBytes": 1_048_576, "windows": windows, "reads": kernels, "writes": kernels,
    })
}

impl TestCluster {
    /// Returns an API server with the Reprise definitions and two nodes.
    pub(crate) fn new() -> TestCluster {
        TestCluster::with_server(true)
    }

    /// Does the same with an API server that no other test uses. On one that had an admission policy before, pods got
    /// parameters of an earlier policy.
    pub(crate) fn with_own_server() -> TestCluster {
        TestCluster::with_server(false)
    }

    fn with_server(reuse: bool) -> TestCluster {
        let env = TestEnv::new();
        let server = API_SERVERS.lend(&env, reuse, TestEnv::api_server, |server| fill(&env, server));
        let etcd = ETCDS.lend(&env, true, TestEnv::etcd, |_| ());
        // On a busy machine one request may take three seconds. The operator has ten to renew its lease.
        env.allow("lease request failed");
        TestCluster { server, etcd, env }
    }

    /// Starts a test cluster and its operator.
    pub(crate) fn with_operator() -> (TestCluster, Operator) {
        let k8s = TestCluster::new();
        let operator = k8s.operator();
        (k8s, operator)
    }

    /// Files of an operator, not started, whose control plane is unreachable.
    pub(crate) fn operator_files(&self, name: &str) -> OperatorFiles {
        self.operator_with(name, UNREACHABLE_ADDRESS)
    }

    /// Files of an operator, not started, with this control-plane address for cluster `c`.
    pub(crate) fn operator_with(&self, name: &str, control_plane: &str) -> OperatorFiles {
        let files = self.env.operator(&self.server, name, OPERATOR_NAMESPACE);
        files.control_plane(&format!("{NAMESPACE}/c"), control_plane)
    }

    /// Starts the operator, or panics.
    pub(crate) fn operator(&self) -> Operator {
        let started = self.operator_files("operator").start();
        started.unwrap_or_else(|error| panic!("the operator does not start: {error:?}"))
    }

    /// Waits until the operators have followed all changes, and reconcile nothing.
    pub(crate) fn settle(&self) {
        let activity = || self.env.operators().activity();
        let (mut last, mut since) = (activity(), Instant::now());
        wait_until("operators have followed all changes", PATIENCE, || {
            let now = activity();
            if now != last {
                (last, since) = (now, Instant::now());
            }
            (since.elapsed() >= SETTLED_AFTER).then_some(())
        });
    }

    /// Waits for the next second: creation times have a resolution of one second.
    pub(crate) fn wait_for_next_second(&self) {
        let rest = 1000 - Timestamp::now().subsec_millisecond();
        std::thread::sleep(Duration::from_millis(rest.unsigned_abs().into()));
    }

    pub(crate) fn client(&self) -> Client {
        self.server.admin()
    }

    /// Returns the API for a kind, in [`NAMESPACE`] if the kind is namespaced.
    pub(crate) fn api(&self, kind: &str) -> Api<DynamicObject> {
        let (group, kind, plural, is_namespaced) = match kind {
            "Node" => ("", kind.to_owned(), "nodes".to_owned(), false),
            "Namespace" => ("", kind.to_owned(), "namespaces".to_owned(), false),
            "CustomResourceDefinition" => {
                ("apiextensions.k8s.io", kind.to_owned(), "customresourcedefinitions".to_owned(), false)
            }
            "StorageClass" => ("storage.k8s.io", kind.to_owned(), "storageclasses".to_owned(), false),
            "PersistentVolumeClaim" => ("", kind.to_owned(), "persistentvolumeclaims".to_owned(), true),
            "Event" => ("", kind.to_owned(), "events".to_owned(), true),
            _ => {
                let user_kinds = USER_KINDS
                    .iter()
                    .map(|(kind, plural, is_namespaced)| ("reprise.dev", *kind, *plural, *is_namespaced));
                let all = user_kinds.chain(OPERATOR_KINDS);
                let found = all.into_iter().find(|(_, one, ..)| *one == kind).expect("a known kind");
                (found.0, found.1.to_owned(), found.2.to_owned(), found.3)
            }
        };
        let version = if group == "reprise.dev" { "v1alpha1" } else { "v1" };
        let gvk = GroupVersionKind::gvk(group, version, &kind);
        let resource = ApiResource::from_gvk_with_plural(&gvk, &plural);
        if is_namespaced {
            Api::namespaced_with(self.client(), NAMESPACE, &resource)
        } else {
            Api::all_with(self.client(), &resource)
        }
    }

    /// Applies an object by force as [`OTHER_MANAGER`].
    pub(crate) fn apply(&self, object: &Value) -> DynamicObject {
        apply_to(&self.server, &self.api(object["kind"].as_str().expect("a kind")), object)
    }

    /// Applies cluster `c`, stored in this test's etcd, with additional spec fields.
    pub(crate) fn cluster(&self, more: Value) {
        let mut spec = json!({
            "etcd": { "mode": "External", "external": { "endpoints": [self.etcd.endpoint()] } },
            "cache": { "dram": "64Mi", "regionSize": "2Mi" },
        });
        spec.as_object_mut().expect("an object").extend(more.as_object().expect("fields").clone());
        self.apply_resource("KVCacheCluster", "c", spec);
    }

    /// Applies a pool in a directory, with additional spec fields.
    pub(crate) fn pool(&self, name: &str, directory: &str, more: Value) {
        let mut spec = json!({ "directory": { "path": directory, "size": "64Mi" } });
        spec.as_object_mut().expect("an object").extend(more.as_object().expect("fields").clone());
        self.apply_resource("SSDPool", name, spec);
    }

    /// Applies a pool of raw devices, with additional spec fields.
    pub(crate) fn raw_pool(&self, name: &str, more: Value) {
        let mut spec = json!({ "devices": { "globs": ["/dev/disk/by-id/nvme-*"] } });
        spec.as_object_mut().expect("an object").extend(more.as_object().expect("fields").clone());
        self.apply_resource("SSDPool", name, spec);
    }

    pub(crate) fn tenant(&self, name: &str, spec: Value) {
        self.apply_resource("CacheTenant", name, spec);
    }

    /// Applies a profile of a GPU with one decode window of `micros` microseconds.
    pub(crate) fn profile(&self, name: &str, product: &str, micros: u32) {
        let measurement = measurement(&json!([window("Decode", [0, 512], micros)]));
        let subject = json!({ "model": "llama", "gpuProduct": product, "engineVersion": "vllm 0.33" });
        self.apply_resource("SlackProfile", name, json!({ "subject": subject, "measurement": measurement }));
    }

    /// Applies an object of a Reprise kind.
    pub(crate) fn apply_resource(&self, kind: &str, name: &str, spec: impl Serialize) {
        self.apply(&json!({
            "apiVersion": "reprise.dev/v1alpha1", "kind": kind, "metadata": { "name": name }, "spec": spec,
        }));
    }

    /// Whether a condition has this status and reason for the current generation.
    pub(crate) fn has_condition(
        &self,
        (kind, name): (&str, &str),
        [condition, status, reason]: [&str; 3],
    ) -> bool {
        let Some(object) = self.get(kind, name) else { return false };
        let conditions = object.data["status"]["conditions"].as_array().cloned().unwrap_or_default();
        conditions.iter().any(|one| {
            one["type"] == condition
                && one["status"] == status
                && one["reason"] == reason
                && one["observedGeneration"].as_i64() == object.metadata.generation
        })
    }

    /// Returns an object if it exists.
    pub(crate) fn get(&self, kind: &str, name: &str) -> Option<DynamicObject> {
        let api = self.api(kind);
        self.server.block_on(api.get_opt(name)).expect("the API server answers")
    }

    /// Waits until an object exists.
    pub(crate) fn wait_for(&self, kind: &str, name: &str) -> DynamicObject {
        wait_until(&format!("{kind} {name}"), PATIENCE, || self.get(kind, name))
    }

    /// Waits until a condition has this status and reason for the current generation. Returns its message.
    pub(crate) fn wait_condition(&self, kind: &str, name: &str, wanted: [&str; 3]) -> String {
        self.wait_condition_within(PATIENCE, (kind, name), wanted)
    }

    /// Does the same as [`Self::wait_condition`]; the message must contain these words.
    pub(crate) fn wait_message(&self, kind: &str, name: &str, wanted: [&str; 3], words: &[&str]) -> String {
        let message = self.wait_condition(kind, name, wanted);
        assert!(words.iter().all(|word| message.contains(word)), "no {words:?} in: {message}");
        message
    }

    /// Does the same as [`Self::wait_condition`] with another timeout.
    pub(crate) fn wait_condition_within(
        &self,
        within: Duration,
        (kind, name): (&str, &str),
        wanted: [&str; 3],
    ) -> String {
        let mut seen = Value::Null;
        let give_up = Instant::now() + within;
        while Instant::now() < give_up {
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
        panic!("{kind} {name} does not get condition {wanted:?}: {seen:#}");
    }

    /// Changes some fields of an object with a merge patch and the default field manager.
    pub(crate) fn merge(&self, kind: &str, name: &str, fields: &Value) {
        let (api, params) = (self.api(kind), PatchParams::default());
        let patched = self.server.block_on(api.patch(name, &params, &Patch::Merge(fields)));
        patched.unwrap_or_else(|error| panic!("cannot patch {kind} {name} with {fields}: {error}"));
    }

    /// Deletes an existing object. It remains while it has finalizers.
    pub(crate) fn delete(&self, kind: &str, name: &str) {
        let api = self.api(kind);
        self.server.block_on(api.delete(name, &DeleteParams::background())).expect("the object exists");
    }

    /// Deletes an object that may not exist.
    pub(crate) fn delete_if_exists(&self, kind: &str, name: &str) {
        let api = self.api(kind);
        // The only possible error is that the object no longer exists.
        let _ = self.server.block_on(api.delete(name, &DeleteParams::background()));
    }

    /// Lists all objects of a kind. The list is empty if the kind is not served.
    pub(crate) fn list(&self, kind: &str) -> Vec<DynamicObject> {
        let api = self.api(kind);
        match self.server.block_on(api.list(&ListParams::default())) {
            Ok(list) => list.items,
            Err(kube::Error::Api(status)) if status.code == NOT_FOUND => Vec::new(),
            Err(error) => panic!("{kind} cannot be listed: {error}"),
        }
    }

    /// Lists all objects of [`USER_KINDS`].
    pub(crate) fn user_objects(&self) -> Objects {
        let of = |kind: &'static str| {
            self.list(kind).into_iter().map(move |object| (format!("{kind}/{}", object.name_any()), object))
        };
        USER_KINDS.iter().flat_map(|(kind, ..)| of(kind)).collect()
    }

    /// Lists all objects that the operator has created.
    pub(crate) fn operator_objects(&self) -> Objects {
        let is_managed = |object: &DynamicObject| {
            object.labels().get("app.kubernetes.io/managed-by").is_some_and(|by| by == "reprise-operator")
        };
        let of = |kind: &'static str| {
            let all = self.list(kind).into_iter().filter(|object| is_managed(object));
            all.map(move |object| (format!("{kind}/{}", object.name_any()), object))
        };
        OPERATOR_KINDS.iter().flat_map(|(_, kind, ..)| of(kind)).collect()
    }

    /// Installs the PodMonitor definition of the Prometheus operator.
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

    /// Simulates the garbage collector of Kubernetes: deletes the children of deleted clusters.
    pub(crate) fn collect_garbage(&self) {
        let live: Vec<String> =
            self.list("KVCacheCluster").iter().filter_map(|cluster| cluster.uid()).collect();
        let is_orphaned = |object: &DynamicObject| {
            let mut owners = object.owner_references().iter().filter(|owner| owner.kind == "KVCacheCluster");
            owners.any(|owner| !live.contains(&owner.uid))
        };
        for (key, object) in self.operator_objects().iter().filter(|(_, object)| is_orphaned(object)) {
            self.delete_if_exists(key.split_once('/').expect("kind and name").0, &object.name_any());
        }
    }

    /// Simulates the kubelet: makes all pods of the members' StatefulSet ready.
    pub(crate) fn make_members_ready(&self) {
        self.make_pods_ready("c-controlplane");
    }

    /// Makes all pods of a StatefulSet ready.
    pub(crate) fn make_pods_ready(&self, name: &str) {
        assert!(self.set_pods_ready(&self.wait_for("StatefulSet", name)), "StatefulSet {name} was deleted");
    }

    /// Simulates the StatefulSet controller and all kubelets: makes all desired pods ready.
    pub(crate) fn make_stateful_sets_ready(&self) {
        let is_new = |set: &&DynamicObject| {
            set.data["status"]["observedGeneration"].as_i64() != set.metadata.generation
        };
        for set in self.list("StatefulSet").iter().filter(is_new) {
            self.set_pods_ready(set);
        }
    }

    /// Reports all pods of a StatefulSet as ready. Returns false if the StatefulSet no longer exists.
    fn set_pods_ready(&self, found: &DynamicObject) -> bool {
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
            Err(error) => panic!("cannot patch the status of {name}: {error}"),
        }
    }

    /// Simulates the agent of a node: it applies its CacheNode, and each claim has one device in this state.
    pub(crate) fn agent_reports(&self, node: &str, state: &str) {
        self.agent_reports_with(node, state, |_| ());
    }

    /// Does the same as [`Self::agent_reports`] after `change` has edited the status.
    pub(crate) fn agent_reports_with(&self, node: &str, state: &str, change: impl FnOnce(&mut Value)) {
        let found = self.wait_for("CacheNode", node);
        let spec = &found.data["spec"];
        let claims = spec["claims"].as_array().cloned().unwrap_or_default();
        let devices: Vec<Value> = claims.iter().map(|claim| device(claim, state)).collect();
        let pools: Vec<Value> = claims
            .iter()
            .map(|claim| json!({ "pool": claim["pool"], "uid": claim["uid"], "generation": claim["generation"] }))
            .collect();
        let now = Timestamp::now();
        // A time in the future, so that the agent does not count as silent on a slow machine.
        let (now, last_updated) = (now.to_string(), (now + SignedDuration::from_hours(1)).to_string());
        let mut status = json!({
            "apiVersion": "reprise.dev/v1alpha1", "kind": "CacheNode", "metadata": { "name": node },
            "status": {
                "observedGeneration": found.metadata.generation,
                "lastUpdated": last_updated,
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
            .expect("the status is accepted");
    }
}

fn device(claim: &Value, state: &str) -> Value {
    let mut device =
        json!({ "path": claim["file"], "pool": claim["pool"], "state": state, "message": "simulated state" });
    if state == "Open" {
        device["size"] = claim["size"].clone();
        device["used"] = json!("1Mi");
        device["engine"] = claim["engine"].clone();
    }
    device
}

/// Maps the digests of generated secrets and certificates to a description of where they are stored.
fn generated_secrets(objects: &Objects) -> BTreeMap<String, String> {
    let mut generated = BTreeMap::new();
    for (key, secret) in objects.iter().filter(|(key, _)| key.starts_with("Secret/")) {
        if let Some(applied) = secret.annotations().get(APPLIED) {
            generated.insert(applied.clone(), format!("as {key}"));
        }
        if let Ok(certificate) = serde_json::from_value::<ByteString>(secret.data["data"]["ca.crt"].clone()) {
            generated.insert(sha256(&certificate.0), format!("as ca.crt of {key}"));
        }
    }
    generated
}

/// Returns a digest in the operator's format.
pub(crate) fn sha256(bytes: &[u8]) -> String {
    let digest: String = Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect();
    format!("sha256:{digest}")
}

/// Resource versions of objects. An object with an equal version was not written.
pub(crate) fn versions(objects: &Objects) -> BTreeMap<String, String> {
    objects.iter().map(|(key, object)| (key.clone(), object.resource_version().unwrap_or_default())).collect()
}

/// Annotation of a Secret: the digest of the data that the operator wrote.
const APPLIED: &str = "reprise.dev/applied";

/// Removes from objects what differs between runs: ids, versions, times and generated keys. The digest of a
/// generated value becomes a description of where the value is stored.
pub(crate) fn normalize(objects: &Objects) -> BTreeMap<String, Value> {
    let generated = generated_secrets(objects);
    let of = |key: &str, object: &DynamicObject| {
        let mut object_json = serde_json::to_value(object).expect("objects are JSON");
        let kind = key.split_once('/').expect("kind and name").0;
        let fields = object_json.as_object_mut().expect("an object");
        fields.remove("status");
        let metadata = fields["metadata"].as_object_mut().expect("metadata");
        metadata.retain(|key, _| ["name", "namespace", "labels"].contains(&key.as_str()));
        let owners = object.owner_references().iter().map(|owner| format!("{}/{}", owner.kind, owner.name));
        metadata.insert("owners".to_owned(), owners.collect());
        if kind == "Secret" {
            let names: Vec<String> = object_json["data"].as_object().expect("data").keys().cloned().collect();
            let digest = sha256(object_json["data"].to_string().as_bytes());
            let as_applied = object.annotations().get(APPLIED).map(|applied| *applied == digest);
            object_json["data"] = json!({ "entries": names, "as applied": as_applied });
        }
        if let Some(trusted) = object_json["data"].get_mut(AUTHORITIES_FILE).filter(|_| kind == "ConfigMap") {
            *trusted = json!("certificates of authorities");
        }
        if kind == "StatefulSet" {
            let annotations = object_json["spec"]["template"]["metadata"]["annotations"].as_object_mut();
            for value in annotations.into_iter().flatten().map(|(_, value)| value) {
                if let Some(place) = value.as_str().and_then(|digest| generated.get(digest)) {
                    *value = json!(place);
                }
            }
        }
        if kind == "Service" {
            // The API server assigns addresses at random.
            for generated in ["clusterIP", "clusterIPs"] {
                let spec = object_json["spec"].as_object_mut().expect("a spec");
                if spec.get(generated).is_some_and(|value| !value.to_string().contains("None")) {
                    spec.remove(generated);
                }
            }
        }
        object_json
    };
    objects.iter().map(|(key, object)| (key.clone(), of(key, object))).collect()
}
