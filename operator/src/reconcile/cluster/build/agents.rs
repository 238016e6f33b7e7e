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
//! directories, and raw devices ([`super::access`]).

use std::collections::BTreeSet;

use reprise_crds::KVCacheCluster;
use reprise_crds::cluster::{SeccompMode, UpdateType};
use serde_json::{Value, json};

use super::access;
use super::certificates::{self, Process};
use super::configuration::{
    AGENT_FILE, FOLDER, KEYS_FOLDER, SALTS_FOLDER, agent, agent_digest, state_directory,
};
use super::identities;
use super::metadata::{config_map, metadata};
use super::pods::{
    DefaultResources, MIN_READY_SECONDS, container_ports, field_variable, probe, pull, resources,
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
    let service = json!({
        "spec": {
            "clusterIP": "None",
            "selector": names.selector(Component::Agent),
            "ports": service_ports(&[("admin", cluster.spec.agents.admin_port)]),
        },
    });
    vec![
        super::metadata::service_account(meta(&name)),
        binding(inputs),
        config_map(meta(&name), &files(cluster, inputs)),
        Child::new(ChildKind::Service, meta(&name), &service),
        Child::new(ChildKind::DaemonSet, meta(&name), &daemon_set(cluster, inputs)),
    ]
}

/// The agents' configuration and profile files.
fn files(cluster: &KVCacheCluster, inputs: &ClusterInputs) -> Value {
    let mut files = json!(inputs.profiles);
    files[AGENT_FILE] = json!(agent(cluster, &inputs.agent_config));
    files
}

/// Binding of the agents' permissions. It is not namespaced, so the cluster cannot own it (`crate::reconcile::orphans`).
fn binding(inputs: &ClusterInputs) -> Child {
    let names = &inputs.agent_config.names;
    let metadata = json!({ "name": names.agent_binding(), "labels": names.labels(Component::Agent) });
    let rest = json!({
        "roleRef": { "apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": AGENT_ROLE },
        "subjects": [{ "kind": "ServiceAccount", "name": names.agent(), "namespace": names.namespace }],
    });
    Child::new(ChildKind::ClusterRoleBinding, metadata, &rest)
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

/// Returns the memory for queue pairs that engines drive, which agents allocate when a session gets them.
fn queue_pair_limit(drives_controllers: bool) -> u64 {
    match drives_controllers {
        true => (LIMIT_QUEUE_PAIRS * queue_pair_bytes(LIMIT_QUEUE_ENTRIES)).next_multiple_of(1 << 20),
        false => 0,
    }
}

fn pod(cluster: &KVCacheCluster, inputs: &ClusterInputs) -> Value {
    let agents = &cluster.spec.agents;
    let access = access::of(cluster, &inputs.agent_config);
    let (policy, pull_secrets) = pull(&cluster.spec.images);
    let (volumes, mounts) = volumes(cluster, inputs);
    let arena = cluster.spec.cache.dram.bytes().unwrap_or_default();
    let defaults = DefaultResources {
        cpu_millis: CPU_MILLIS,
        memory: OVERHEAD_BYTES,
        extra_memory: arena,
        extra_limit: queue_pair_limit(access::drives_controllers(access)),
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
        "volumeMounts": mounts,
    });
    access::add_to(&mut container, access);
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
        "volumes": volumes,
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

/// Volumes of the pod and their mounts. Directories of the node are mounted at their own paths.
fn volumes(cluster: &KVCacheCluster, inputs: &ClusterInputs) -> (Value, Value) {
    let key = inputs.agent_config.names.key();
    let mut folders: BTreeSet<String> = BTreeSet::new();
    folders.insert(cluster.spec.agents.socket.directory.to_string());
    folders.insert(state_directory(&inputs.agent_config.names));
    for pool in inputs.agent_config.pools.iter().filter_map(|named| named.bound_pool(&key)) {
        folders.extend(pool.spec.directory.iter().map(|directory| directory.path.to_string()));
    }
    let config = json!({ "name": "config", "configMap": { "name": inputs.agent_config.names.agent() } });
    let mut volumes = vec![config, identities::volume(inputs)];
    let mut mounts =
        vec![json!({ "name": "config", "mountPath": FOLDER, "readOnly": true }), identities::mount()];
    // The operator creates both with the first salt or key. Agents read a salt when a session needs it, and the folder of
    // keys once a second.
    let names = &inputs.agent_config.names;
    for (name, secret, folder) in
        [("salts", names.salts(), SALTS_FOLDER), ("keys", names.keys(), KEYS_FOLDER)]
    {
        let secret = json!({ "secretName": secret, "defaultMode": 0o400, "optional": true });
        volumes.push(json!({ "name": name, "secret": secret }));
        mounts.push(json!({ "name": name, "mountPath": folder, "readOnly": true }));
    }
    for (index, folder) in folders.iter().enumerate() {
        let name = format!("node-{index}");
        volumes.push(json!({ "name": name, "hostPath": { "path": folder, "type": "DirectoryOrCreate" } }));
        mounts.push(json!({ "name": name, "mountPath": folder }));
    }
    if inputs.agent_config.raw_pools().next().is_some() {
        volumes
            .push(json!({ "name": "devices", "hostPath": { "path": DEVICES_FOLDER, "type": "Directory" } }));
        mounts.push(json!({ "name": "devices", "mountPath": DEVICES_FOLDER }));
    }
    (json!(volumes), json!(mounts))
}
