//! The agents: a DaemonSet with one pod on each selected node.
//!
//! Every pod mounts the directories of all pools of the cluster, so a new pool restarts the agents one by one, and
//! selecting another node changes no pod. Profile files are mounted next to the configuration and restart no agent: the
//! digest in the pod template covers only the configuration.
//!
//! The agent runs as root without capabilities: the kubelet creates the directories as root. It shares nothing with the
//! node except these directories, and raw devices.

use std::collections::BTreeSet;

use reprise_crds::KVCacheCluster;
use reprise_crds::cluster::{DeviceAccess, DeviceAccessMode, UpdateType};
use serde_json::{Value, json};

use super::certificates;
use super::configuration::{
    AGENT_FILE, FOLDER, KEYS_FOLDER, SALTS_FOLDER, agent, agent_digest, state_directory,
};
use super::identities;
use super::metadata::{config_map, metadata, role_binding, service_account};
use super::pods::{
    DefaultResources, MIN_READY_SECONDS, Volumes, container_ports, field_variable, headless, probe, pull,
    resources, startup_probe, template, unprivileged, without_empty,
};
use crate::framework::child::{Child, ChildKind};
use crate::reconcile::cluster::dereference::ClusterInputs;
use crate::reconcile::names::{CONFIGURATION, Component};

/// ClusterRole of all agents, which the chart creates.
const AGENT_ROLE: &str = "reprise-agent";
/// Default memory in addition to the arena: 1 GiB for indexes, device and peer buffers.
const OVERHEAD_BYTES: u64 = 1 << 30;
/// Memory for queue pairs that engines drive, which agents allocate when a session gets them: 128 pairs, the most of one
/// GPUQueueAllocation, of 1,024 entries, the default depth. Each has whole pages of submissions (64 bytes each) and
/// completions (16 bytes each), and for drives with PRPs only, a page for each command in flight. The limit is the same
/// for all nodes and does not follow allocations, because its change restarts all agents, which lose their blocks in memory.
const QUEUE_PAIR_BYTES: u64 = 522 << 20;
/// Time in which an agent flushes and exits when it is stopped.
const GRACE_SECONDS: u32 = 30;
/// Time in which an agent allocates its arena and replays its journals. It opens the node's devices
/// afterwards.
const STARTS_SECONDS: u32 = 300;

pub(super) fn build(cluster: &KVCacheCluster, inputs: &ClusterInputs) -> Vec<Child> {
    let names = &inputs.agent_config.names;
    let name = names.agent();
    let meta = || metadata(cluster, names, Component::Agent, &name);
    let mut files = json!(inputs.profiles);
    files[AGENT_FILE] = json!(agent(cluster, &inputs.agent_config));
    let service = headless(&names.selector(Component::Agent), &[("admin", cluster.spec.agents.admin_port)]);
    vec![
        service_account(meta()),
        role_binding(names, Component::Agent, &names.agent_binding(), AGENT_ROLE, &[names.agent()]),
        config_map(meta(), &files),
        Child::new(ChildKind::Service, meta(), &service),
        Child::new(ChildKind::DaemonSet, meta(), &daemon_set(cluster, inputs)),
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
    let names = &inputs.agent_config.names;
    let annotations = json!({ CONFIGURATION: agent_digest(cluster, &inputs.agent_config) });
    json!({
        "spec": {
            "selector": { "matchLabels": names.selector(Component::Agent) },
            "updateStrategy": strategy,
            "minReadySeconds": MIN_READY_SECONDS,
            "template": template(names, Component::Agent, &annotations, pod(cluster, inputs)),
        },
    })
}

/// Adds the access to raw devices to the agent's container. Modes for GPUs and RDMA are rejected before
/// ([`crate::reconcile::cluster::validate`]).
fn add_access(container: &mut Value, access: &DeviceAccess) {
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
    let (agents, names) = (&cluster.spec.agents, &inputs.agent_config.names);
    let access = Some(&agents.device_access).filter(|_| inputs.agent_config.has_raw_pools());
    // Only privileged agents drive NVMe controllers themselves.
    let drives = access.is_some_and(|access| access.mode == DeviceAccessMode::Privileged);
    let (policy, pull_secrets) = pull(&cluster.spec.images);
    let mut volumes = volumes(cluster, inputs);
    let sidecar = certificates::sidecar(cluster, inputs, Component::Agent, &mut volumes);
    let defaults = DefaultResources {
        cpu: "1",
        memory: OVERHEAD_BYTES,
        extra_memory: cluster.spec.cache.dram.bytes().unwrap_or_default(),
        extra_limit: if drives { QUEUE_PAIR_BYTES } else { 0 },
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
            json!({ "name": "CLUSTER", "value": names.key() }),
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
    if let Some(access) = access {
        add_access(&mut container, access);
    }
    let seccomp =
        json!({ "type": agents.seccomp.mode, "localhostProfile": agents.seccomp.localhost_profile });
    json!({
        "serviceAccountName": names.agent(),
        "automountServiceAccountToken": true,
        "terminationGracePeriodSeconds": GRACE_SECONDS,
        "priorityClassName": agents.priority_class_name,
        "nodeSelector": agents.node_selector,
        "affinity": affinity(inputs),
        "tolerations": agents.tolerations,
        "imagePullSecrets": pull_secrets,
        "securityContext": { "runAsUser": 0, "runAsGroup": 0, "seccompProfile": without_empty(seccomp) },
        "initContainers": [sidecar],
        "containers": [container],
        "volumes": volumes.volumes,
    })
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

/// Volumes of the pod. Directories of the node are mounted at their own paths.
fn volumes(cluster: &KVCacheCluster, inputs: &ClusterInputs) -> Volumes {
    let names = &inputs.agent_config.names;
    let mut volumes = Volumes::default();
    volumes.add("config", json!({ "configMap": { "name": names.agent() } }), FOLDER);
    identities::add_volume(&mut volumes, names);
    // The operator creates both with the first salt or key. Agents read a salt when a session needs it, and the folder of
    // keys once a second.
    for (name, secret, folder) in
        [("salts", names.salts(), SALTS_FOLDER), ("keys", names.keys(), KEYS_FOLDER)]
    {
        let secret = json!({ "secretName": secret, "defaultMode": 0o400, "optional": true });
        volumes.add(name, json!({ "secret": secret }), folder);
    }
    let mut folders =
        BTreeSet::from([cluster.spec.agents.socket.directory.to_string(), state_directory(names)]);
    for (_, pool) in inputs.agent_config.bound_pools() {
        folders.extend(pool.spec.directory.iter().map(|directory| directory.path.to_string()));
    }
    for (index, folder) in folders.iter().enumerate() {
        volumes.add_of_node(&format!("node-{index}"), folder, "DirectoryOrCreate");
    }
    if inputs.agent_config.has_raw_pools() {
        volumes.add_of_node("devices", "/dev", "Directory");
    }
    volumes
}
