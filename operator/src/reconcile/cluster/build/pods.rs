//! Parts that the pods of all components share.

use reprise_crds::KVCacheCluster;
use reprise_crds::cluster::Images;
use reprise_crds::fields::{Amounts, PullPolicy, Quantity, Resources};
use serde_json::{Value, json};

use super::certificates;
use crate::framework::child::{Child, ChildKind};
use crate::reconcile::cluster::dereference::ClusterInputs;
use crate::reconcile::names::{ClusterNames, Component};

/// Time for which a pod must be ready before the next one is replaced. By then agents have reported again to
/// a new member, and members have their shards and know the blocks of a new agent. It also covers a pod that fails its
/// readiness probe once more.
pub(crate) const MIN_READY_SECONDS: u32 = 5;

/// Uid and gid in our images.
const USER: u32 = 65_532;
/// Time after which our programs listen.
const LISTENS_SECONDS: u32 = 2;
/// Number of probes, and thus the multiple of the expected start time, after which a start has failed.
const START_ATTEMPTS: u32 = 2;

/// Parts in which the StatefulSets of members and of etcd differ.
pub(crate) struct StatefulSet {
    /// Name of the set and of the service account.
    pub(crate) name: String,
    /// Name of the headless service.
    pub(crate) service: String,
    pub(crate) replicas: u32,
    pub(crate) annotations: Value,
    pub(crate) container: Value,
    pub(crate) volumes: Volumes,
    /// Further fields of the pod.
    pub(crate) pod: Value,
}

/// Default CPU and memory of a container.
#[derive(Default)]
pub(crate) struct DefaultResources {
    pub(crate) cpu: &'static str,
    /// Amount of memory in bytes.
    pub(crate) memory: u64,
    /// Memory in bytes that is added to the specified or default amount: the arena.
    pub(crate) extra_memory: u64,
    /// Memory in bytes that is added to the limit only, because it is allocated on demand: queue pairs.
    pub(crate) extra_limit: u64,
}

/// Returns requests and limits, with defaults for unspecified amounts. Without `extra_limit`, the memory limit defaults to
/// the request, since processes allocate their memory up front.
pub(crate) fn resources(specified: Option<&Resources>, defaults: &DefaultResources) -> Value {
    let nothing = Amounts::default();
    let requests = specified.and_then(|specified| specified.requests.as_ref()).unwrap_or(&nothing);
    let limits = specified.and_then(|specified| specified.limits.as_ref()).unwrap_or(&nothing);
    let bytes = |amount: &Option<Quantity>| amount.as_ref().and_then(|amount| amount.bytes().ok());
    let memory = bytes(&requests.memory).unwrap_or(defaults.memory);
    // The API server rejects a limit below the request.
    let most = bytes(&limits.memory).unwrap_or(memory).max(memory);
    let most = Quantity::of_bytes(most + defaults.extra_memory + defaults.extra_limit);
    json!({
        "requests": {
            "cpu": requests.cpu.as_ref().map_or_else(|| defaults.cpu.to_owned(), |cpu| as_stored(cpu.as_str())),
            "memory": Quantity::of_bytes(memory + defaults.extra_memory),
        },
        "limits": without_empty(json!({ "cpu": limits.cpu.as_ref().map(|cpu| as_stored(cpu.as_str())), "memory": most })),
    })
}

/// Formats CPU as the API server stores it: whole cores without `m`. Otherwise, the child never equals the stored one.
fn as_stored(cpu: &str) -> String {
    let millis = cpu.strip_suffix('m').and_then(|millis| millis.parse::<u64>().ok());
    match millis {
        Some(millis) if millis % 1000 == 0 => (millis / 1000).to_string(),
        _ => cpu.to_owned(),
    }
}

/// Pull policy of the container, and pull secrets of the pod.
pub(crate) fn pull(images: &Images) -> (PullPolicy, Value) {
    (images.pull_policy, images.pull_secrets.iter().map(|secret| json!({ "name": secret.name })).collect())
}

/// Ports of a container, by name.
pub(crate) fn container_ports(ports: &[(&str, u16)]) -> Value {
    let port = |(name, port): &(&str, u16)| json!({ "name": name, "containerPort": port, "protocol": "TCP" });
    ports.iter().map(port).collect()
}

/// Ports of a service, which are the named ports of its pods.
pub(crate) fn service_ports(ports: &[(&str, u16)]) -> Value {
    let port = |(name, port): &(&str, u16)| json!({ "name": name, "port": port, "targetPort": name, "protocol": "TCP" });
    ports.iter().map(port).collect()
}

/// A headless service that gives pods names, also before they are ready: members find one another before any is ready.
pub(crate) fn headless(selector: &Value, ports: &[(&str, u16)]) -> Value {
    json!({ "spec": {
        "clusterIP": "None",
        "publishNotReadyAddresses": true,
        "selector": selector,
        "ports": service_ports(ports),
    } })
}

/// Lets drains evict one pod at a time.
pub(crate) fn disruption_budget(metadata: Value, selector: &Value) -> Child {
    let rest = json!({ "spec": { "maxUnavailable": 1, "selector": { "matchLabels": selector } } });
    Child::new(ChildKind::PodDisruptionBudget, metadata, &rest)
}

/// A StatefulSet whose pods start without waiting for each other, and are replaced one by one. They are at Pod Security
/// level `restricted`, and only their sidecars have a token for the API server.
pub(crate) fn stateful_set(
    cluster: &KVCacheCluster,
    inputs: &ClusterInputs,
    component: Component,
    StatefulSet { name, service, replicas, annotations, mut container, mut volumes, mut pod }: StatefulSet,
) -> Value {
    let names = &inputs.agent_config.names;
    let (policy, pull_secrets) = pull(&cluster.spec.images);
    let sidecar = certificates::sidecar(cluster, inputs, component, &mut volumes);
    container["imagePullPolicy"] = json!(policy);
    container["securityContext"] = unprivileged();
    container["volumeMounts"] = json!(volumes.mounts);
    pod["serviceAccountName"] = json!(name);
    pod["automountServiceAccountToken"] = json!(false);
    pod["imagePullSecrets"] = pull_secrets;
    pod["securityContext"] = json!({
        "runAsNonRoot": true,
        "runAsUser": USER,
        "runAsGroup": USER,
        "fsGroup": USER,
        "seccompProfile": { "type": "RuntimeDefault" },
    });
    // Two on one node are better than a pending one.
    pod["topologySpreadConstraints"] = json!([{
        "maxSkew": 1,
        "topologyKey": cluster.spec.control_plane.spread_over,
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": { "matchLabels": names.selector(component) },
    }]);
    pod["initContainers"] = json!([sidecar]);
    pod["containers"] = json!([container]);
    pod["volumes"] = json!(volumes.volumes);
    json!({ "spec": {
        "replicas": replicas,
        "serviceName": service,
        "podManagementPolicy": "Parallel",
        "updateStrategy": { "type": "RollingUpdate" },
        "minReadySeconds": MIN_READY_SECONDS,
        "selector": { "matchLabels": names.selector(component) },
        "template": template(names, component, &annotations, pod),
    } })
}

/// Template of the pods of a component.
pub(crate) fn template(names: &ClusterNames, component: Component, annotations: &Value, pod: Value) -> Value {
    let metadata = without_empty(json!({ "labels": names.labels(component), "annotations": annotations }));
    json!({ "metadata": metadata, "spec": without_empty(pod) })
}

/// An environment variable with a field of the pod.
pub(crate) fn field_variable(name: &str, path: &str) -> Value {
    json!({ "name": name, "valueFrom": { "fieldRef": { "apiVersion": "v1", "fieldPath": path } } })
}

/// Removes empty fields, which the API server does not store.
pub(crate) fn without_empty(mut fields: Value) -> Value {
    if let Some(fields) = fields.as_object_mut() {
        fields.retain(|_, value| match value {
            Value::Null => false,
            Value::Array(items) => !items.is_empty(),
            Value::Object(items) => !items.is_empty(),
            _ => true,
        });
    }
    fields
}

/// Volumes of a pod, and their mounts in its first container.
#[derive(Default)]
pub(crate) struct Volumes {
    pub(crate) volumes: Vec<Value>,
    pub(crate) mounts: Vec<Value>,
}

impl Volumes {
    /// Adds a volume of a source, such as `{ "configMap": … }`, which is read at a folder.
    pub(crate) fn add(&mut self, name: &str, mut source: Value, folder: &str) {
        source["name"] = json!(name);
        self.volumes.push(source);
        self.mounts.push(json!({ "name": name, "mountPath": folder, "readOnly": true }));
    }

    /// Adds a folder of the node, which is written at the same path.
    pub(crate) fn add_of_node(&mut self, name: &str, path: &str, kind: &str) {
        self.volumes.push(json!({ "name": name, "hostPath": { "path": path, "type": kind } }));
        self.mounts.push(json!({ "name": name, "mountPath": path }));
    }
}

/// Security context of a container without any privileges.
pub(crate) fn unprivileged() -> Value {
    json!({
        "allowPrivilegeEscalation": false,
        "readOnlyRootFilesystem": true,
        "capabilities": { "drop": ["ALL"] },
    })
}

/// An HTTP probe of a container.
pub(crate) fn probe(path: &str, port: &str, every_seconds: u32, failures: u32) -> Value {
    json!({
        "httpGet": { "path": path, "port": port, "scheme": "HTTP" },
        "periodSeconds": every_seconds,
        "timeoutSeconds": 2,
        "failureThreshold": failures,
    })
}

/// An HTTP startup probe whose request is answered once the process has started.
///
/// A failed probe causes a warning event, also during a start. Our programs therefore listen before slow
/// initialization, and the kubelet waits for the response: in a normal start the first probe succeeds.
pub(crate) fn startup_probe(path: &str, port: &str, starts_within_seconds: u32) -> Value {
    let mut probe = probe(path, port, 2, START_ATTEMPTS);
    probe["initialDelaySeconds"] = json!(LISTENS_SECONDS);
    probe["timeoutSeconds"] = json!(starts_within_seconds);
    probe
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unspecified_memory_has_a_default_the_arena_is_added_and_memory_on_demand_raises_the_limit() {
        let (memory, extra_memory) = (1 << 30, 4 << 30);
        let specified: Resources = serde_json::from_value(json!({
            "requests": { "memory": "512Mi", "cpu": "250m" }, "limits": { "memory": "2Gi", "cpu": "2" },
        }))
        .expect("resources");
        for (specified, extra_limit, requests, limits) in [
            (None, 0, json!({ "cpu": "1", "memory": "5Gi" }), json!({ "memory": "5Gi" })),
            (None, 512 << 20, json!({ "cpu": "1", "memory": "5Gi" }), json!({ "memory": "5632Mi" })),
            (
                Some(&specified),
                0,
                json!({ "cpu": "250m", "memory": "4608Mi" }),
                json!({ "memory": "6Gi", "cpu": "2" }),
            ),
        ] {
            let defaults = DefaultResources { cpu: "1", memory, extra_memory, extra_limit };
            let expected = json!({ "requests": requests, "limits": limits });
            assert_eq!(resources(specified, &defaults), expected);
        }
    }
}
