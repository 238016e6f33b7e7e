//! The agents: a DaemonSet with one pod on each selected node.
//!
//! Every pod mounts the directories of all pools of the cluster. On nodes that a pool does not select the
//! directory is created but stays unused. A new pool therefore restarts the agents one by one, but selecting
//! another node changes no pod.
//!
//! Profile files are mounted next to the agents' configuration ([`crate::reconcile::profile::files`]). The kubelet
//! provides them, so agents need no permission to read ConfigMaps. They restart no agent: the digest in the
//! pod template covers only the configuration.
//!
//! The agent runs as root without capabilities. The kubelet creates the directories as root, and a root
//! process without capabilities can access only root's files. It shares nothing with the node except these
//! directories, and raw devices.

use std::collections::BTreeSet;

use reprise_crds::KVCacheCluster;
use reprise_crds::cluster::{DeviceAccess, DeviceAccessMode, SeccompMode, UpdateType};
use serde_json::{Value, json};

use super::certificates::{self, Process};
use super::configuration::{
    AGENT_FILE, FOLDER, KEYS_FOLDER, SALTS_FOLDER, agent, agent_digest, state_directory,
};
use super::identities;
use super::metadata::{config_map, metadata, role_binding, service_account};
use super::pods::{
    DefaultResources, MIN_READY_SECONDS, Volumes, container_ports, field_variable, probe, pull, resources,
    service_ports, startup_probe, unprivileged, without_empty,
};
use crate::framework::child::{Child, ChildKind};
use crate::reconcile::cluster::inputs::ClusterInputs;
use crate::reconcile::names::{CONFIGURATION, Component};

/// ClusterRole of all agents, which the chart creates.
const AGENT_ROLE: &str = "reprise-agent";
/// Default CPU (1 core), and memory in addition to the arena (1 GiB for indexes, device and peer buffers).
const CPU_MILLIS: u64 = 1000;
const OVERHEAD_BYTES: u64 = 1 << 30;
/// Queue pairs of a node for which the memory limit has room: the most of one GPUQueueAllocation. The limit is the same for
/// all nodes and does not follow allocations, because its change restarts all agents, which lose their blocks in memory.
const LIMIT_QUEUE_PAIRS: u64 = 128;
/// Entries of such a queue pair: the default depth of an allocation.
const LIMIT_QUEUE_ENTRIES: u64 = 1024;
/// Page size of NVMe controllers and of the agents' mappings.
const PAGE_BYTES: u64 = 4096;
/// Time in which an agent flushes and exits when it is stopped.
const GRACE_SECONDS: u32 = 30;
/// Time in which an agent allocates its arena and replays its journals. It opens the node's devices
/// afterwards.
const STARTS_SECONDS: u32 = 300;
/// Device files, including stable names.
const DEVICES_FOLDER: &str = "/dev";

pub(super) fn build(cluster: &KVCacheCluster, inputs: &ClusterInputs) -> Vec<Child> {
    let names = &inputs.agent_config.names;
    let name = names.agent();
    let meta = |name: &str| metadata(cluster, names, Component::Agent, name);
    let mut files = json!(inputs.profiles);
    files[AGENT_FILE] = json!(agent(cluster, &inputs.agent_config));
    let service = json!({
        "spec": {
            "clusterIP": "None",
            "selector": names.selector(Component::Agent),
            "ports": service_ports(&[("admin", cluster.spec.agents.admin_port)]),
        },
    });
    vec![
        service_account(meta(&name)),
        role_binding(names, Component::Agent, &names.agent_binding(), AGENT_ROLE, &[names.agent()]),
        config_map(meta(&name), &files),
        Child::new(ChildKind::Service, meta(&name), &service),
        Child::new(ChildKind::DaemonSet, meta(&name), &daemon_set(cluster, inputs)),
    ]
}

fn daemon_set(cluster: &KVCacheCluster, inputs: &ClusterInputs) -> Value {
    let strategy = &cluster.spec.agents.update_strategy;
    let strategy = match strategy.kind {
        UpdateType::OnDelete => json!({ "type": "OnDelete" }),
        UpdateType::RollingUpdate => json!({
            "type": "RollingUpdate",
            "rollingUpdate": { "maxUnavailable": strategy.max_unavailable },
        }),
    };
    let labels = inputs.agent_config.names.labels(Component::Agent);
    let annotations = json!({ CONFIGURATION: agent_digest(cluster, &inputs.agent_config) });
    json!({
        "spec": {
            "selector": { "matchLabels": inputs.agent_config.names.selector(Component::Agent) },
            "updateStrategy": strategy,
            // The controller may replace an unavailable old pod in addition to any other. A pod that has just
            // become ready may fail its probe once more; wait until that is over.
            "minReadySeconds": MIN_READY_SECONDS,
            "template": {
                "metadata": { "labels": labels, "annotations": annotations },
                "spec": pod(cluster, inputs),
            },
        },
    })
}

/// Returns the bytes of a queue pair in the agent's memory, as the agent allocates them: whole pages of submissions (64
/// bytes each) and completions (16 bytes each), and for drives with PRPs only, a page of a list for each command in flight.
const fn queue_pair_bytes(entries: u64) -> u64 {
    let submissions = (entries * 64).next_multiple_of(PAGE_BYTES);
    let completions = (entries * 16).next_multiple_of(PAGE_BYTES);
    submissions + completions + (entries - 1) * PAGE_BYTES
}

/// Returns the memory for queue pairs that engines drive, which agents allocate when a session gets them. Only privileged
/// agents drive NVMe controllers themselves.
fn queue_pair_limit(access: Option<&DeviceAccess>) -> u64 {
    match access.map(|access| access.mode) {
        Some(DeviceAccessMode::Privileged) => {
            (LIMIT_QUEUE_PAIRS * queue_pair_bytes(LIMIT_QUEUE_ENTRIES)).next_multiple_of(1 << 20)
        }
        _ => 0,
    }
}

/// Adds the access to raw devices to the agent's container. Modes for GPUs and RDMA are rejected before
/// ([`crate::reconcile::cluster::validate`]).
fn add_access(container: &mut Value, access: Option<&DeviceAccess>) {
    let Some(access) = access else { return };
    match access.mode {
        DeviceAccessMode::None => {}
        // The device plugin adds all devices to a container that requests one unit.
        DeviceAccessMode::DevicePlugin => {
            if let Some(name) = &access.resource_name {
                for bound in ["requests", "limits"] {
                    container["resources"][bound][name.to_string()] = json!("1");
                }
            }
        }
        // A privileged container has every device and capability and runs without a seccomp profile. The rest of the
        // security context is omitted: the API server rejects `allowPrivilegeEscalation: false` together with
        // `privileged`, and dropped capabilities would not be dropped.
        DeviceAccessMode::Privileged => {
            container["securityContext"] = json!({ "privileged": true, "readOnlyRootFilesystem": true });
        }
    }
}

fn pod(cluster: &KVCacheCluster, inputs: &ClusterInputs) -> Value {
    let agents = &cluster.spec.agents;
    let is_raw = inputs.agent_config.raw_pools().next().is_some();
    let access = Some(&agents.device_access).filter(|_| is_raw);
    let (policy, pull_secrets) = pull(&cluster.spec.images);
    let volumes = volumes(cluster, inputs);
    let arena = cluster.spec.cache.dram.bytes().unwrap_or_default();
    let defaults = DefaultResources {
        cpu_millis: CPU_MILLIS,
        memory: OVERHEAD_BYTES,
        extra_memory: arena,
        extra_limit: queue_pair_limit(access),
    };
    let mut container = json!({
        "name": "agent",
        "image": inputs.images.agent,
        "imagePullPolicy": policy,
        "args": ["--config", format!("{FOLDER}/{AGENT_FILE}"), "--in-cluster"],
        "env": [
            field_variable("NODE_NAME", "spec.nodeName"),
            field_variable("POD_IP", "status.podIP"),
            field_variable("POD_NAME", "metadata.name"),
            json!({ "name": "CLUSTER", "value": inputs.agent_config.names.key() }),
            identities::variable(),
        ],
        "ports": container_ports(&[("peers", agents.peers.port), ("admin", agents.admin_port)]),
        "resources": resources(agents.resources.as_ref(), &defaults),
        "securityContext": unprivileged(),
        "startupProbe": startup_probe("/startz", "admin", STARTS_SECONDS),
        "livenessProbe": probe("/healthz", "admin", 5, 6),
        "readinessProbe": probe("/readyz", "admin", 2, 2),
        "volumeMounts": volumes.mounts,
    });
    add_access(&mut container, access);
    let mut pod = without_empty(json!({
        "serviceAccountName": inputs.agent_config.names.agent(),
        "automountServiceAccountToken": true,
        "terminationGracePeriodSeconds": GRACE_SECONDS,
        "priorityClassName": agents.priority_class_name,
        "nodeSelector": agents.node_selector,
        "affinity": affinity(inputs),
        "tolerations": agents.tolerations,
        "imagePullSecrets": pull_secrets,
        "securityContext": {
            "runAsUser": 0,
            "runAsGroup": 0,
            "seccompProfile": seccomp(cluster),
        },
        "containers": [container],
        "volumes": volumes.volumes,
    }));
    certificates::add_to(&mut pod, cluster, inputs, Process::Agent);
    pod
}

/// Excludes nodes of other clusters that the selector matches as well, so that no node runs two agents. Without such
/// nodes there is no affinity, because a change of the template restarts all agents.
fn affinity(inputs: &ClusterInputs) -> Value {
    if inputs.assignment.contested.is_empty() {
        return Value::Null;
    }
    // The API server accepts one name for each term.
    let other = |node: &String| json!({ "key": "metadata.name", "operator": "NotIn", "values": [node] });
    let fields: Vec<Value> = inputs.assignment.contested.keys().map(other).collect();
    json!({
        "nodeAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": { "nodeSelectorTerms": [{ "matchFields": fields }] },
        },
    })
}

fn seccomp(cluster: &KVCacheCluster) -> Value {
    let seccomp = &cluster.spec.agents.seccomp;
    match seccomp.mode {
        SeccompMode::RuntimeDefault => json!({ "type": "RuntimeDefault" }),
        SeccompMode::Unconfined => json!({ "type": "Unconfined" }),
        SeccompMode::Localhost => {
            json!({ "type": "Localhost", "localhostProfile": seccomp.localhost_profile })
        }
    }
}

/// Volumes of the pod. Directories of the node are mounted at their own paths.
fn volumes(cluster: &KVCacheCluster, inputs: &ClusterInputs) -> Volumes {
    let names = &inputs.agent_config.names;
    let mut volumes = Volumes::default();
    volumes.add(("config", json!({ "configMap": { "name": names.agent() } }), FOLDER));
    volumes.add(identities::volume(inputs));
    // The operator creates both with the first salt or key. Agents read a salt when a session needs it, and the folder of
    // keys once a second.
    for (name, secret, folder) in
        [("salts", names.salts(), SALTS_FOLDER), ("keys", names.keys(), KEYS_FOLDER)]
    {
        let secret = json!({ "secretName": secret, "defaultMode": 0o400, "optional": true });
        volumes.add((name, json!({ "secret": secret }), folder));
    }
    let key = names.key();
    let mut folders =
        BTreeSet::from([cluster.spec.agents.socket.directory.to_string(), state_directory(names)]);
    for pool in inputs.agent_config.pools.iter().filter_map(|named| named.bound_pool(&key)) {
        folders.extend(pool.spec.directory.iter().map(|directory| directory.path.to_string()));
    }
    for (index, folder) in folders.iter().enumerate() {
        volumes.add_of_node(&format!("node-{index}"), folder, "DirectoryOrCreate");
    }
    if inputs.agent_config.raw_pools().next().is_some() {
        volumes.add_of_node("devices", DEVICES_FOLDER, "Directory");
    }
    volumes
}
