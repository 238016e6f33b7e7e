//! The agents: one on each selected node.
//!
//! A pod has the directories of all pools of the cluster, also on nodes that a pool does not select: an empty directory there is made
//! and not used. So a new pool restarts the agents one after the other, and a node that is selected later needs no other pod.
//!
//! Beside the agents' configuration lie the contents of their profiles ([`crate::profile::files`]): the kubelet brings them, so an agent needs
//! no right to read a ConfigMap, and they restart none, since only the configuration itself is in the digest of the pods.
//!
//! The agent runs as root without any capability: the directories that the kubelet makes are root's, and a process without
//! capabilities can use what is its user's and nothing else. Nothing is shared with the node but these directories. What modes of the
//! cluster add to that is in [`super::access`].

use std::collections::BTreeSet;

use reprise_crds::KVCacheCluster;
use reprise_crds::cluster::{SeccompMode, UpdateType};
use serde_json::{Value, json};

use super::access::Access;
use super::configuration::{AGENT_FILE, FOLDER, agent, agent_digest, state_directory};
use super::identities;
use super::pods::{
    Reckoned, SETTLED_SECONDS, confined, probe, pull, resources, startup_probe, tolerations, without_empty,
};
use super::{config_map, metadata};
use crate::child::{Child, ChildKind, Ownership};
use crate::cluster::dereference::Found;
use crate::names::{CONFIGURATION, Component};

/// The agent's container.
pub(super) const CONTAINER: &str = "agent";
/// Rights of all agents: the chart's.
const AGENT_ROLE: &str = "reprise-agent";
/// CPU and memory beside the arena, when the cluster says nothing: 1 core, 1 GiB for indexes and buffers of devices and peers.
const CPU_MILLIS: u64 = 1000;
const OVERHEAD_BYTES: u64 = 1 << 30;
/// An agent that is told to stop flushes, says so and ends.
const GRACE_SECONDS: u32 = 30;
/// An agent that starts takes its whole arena and reads its journals, and then opens what its node claims.
const STARTS_SECONDS: u32 = 300;
/// Raw devices and their stable names.
const DEVICES_FOLDER: &str = "/dev";

pub(super) fn build(cluster: &KVCacheCluster, found: &Found) -> Vec<Child> {
    let names = &found.referred.names;
    let name = names.agent();
    let meta = |name: &str| metadata(cluster, names, Component::Agent, name);
    let service = json!({
        "spec": {
            "clusterIP": "None",
            "selector": names.selector(Component::Agent),
            "ports": [{ "name": "admin", "port": cluster.spec.agents.admin_port, "targetPort": "admin", "protocol": "TCP" }],
        },
    });
    let access = Access::of(cluster, &found.referred);
    let set = daemon_set(cluster, found, &access);
    let mut children = vec![
        super::service_account(meta(&name)),
        binding(found),
        config_map(meta(&name), &files(cluster, found)),
        Child::new(ChildKind::Service, Ownership::Shared, meta(&name), &service),
        Child::new(ChildKind::DaemonSet, Ownership::Shared, meta(&name), &set),
    ];
    children.extend(access.templates(cluster, names));
    children
}

/// Their configuration, and the contents of their profiles.
fn files(cluster: &KVCacheCluster, found: &Found) -> Value {
    let mut files = json!(found.profiles);
    files[AGENT_FILE] = json!(agent(cluster, &found.referred));
    files
}

/// The agents' rights. It has no namespace, so it cannot have the cluster as its owner (`crate::sweep`).
fn binding(found: &Found) -> Child {
    let names = &found.referred.names;
    let metadata = json!({ "name": names.agent_binding(), "labels": names.labels(Component::Agent) });
    let rest = json!({
        "roleRef": { "apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": AGENT_ROLE },
        "subjects": [{ "kind": "ServiceAccount", "name": names.agent(), "namespace": names.namespace }],
    });
    Child::new(ChildKind::ClusterRoleBinding, Ownership::OursAlone, metadata, &rest)
}

fn daemon_set(cluster: &KVCacheCluster, found: &Found, access: &Access) -> Value {
    let strategy = &cluster.spec.agents.update_strategy;
    let strategy = match strategy.kind {
        UpdateType::OnDelete => json!({ "type": "OnDelete" }),
        UpdateType::RollingUpdate => json!({
            "type": "RollingUpdate",
            "rollingUpdate": { "maxUnavailable": strategy.max_unavailable },
        }),
    };
    let labels = found.referred.names.labels(Component::Agent);
    let annotations = json!({ CONFIGURATION: agent_digest(cluster, &found.referred) });
    let mut template =
        json!({ "metadata": { "labels": labels, "annotations": annotations }, "spec": pod(cluster, found) });
    access.add_to(&mut template);
    json!({
        "spec": {
            "selector": { "matchLabels": found.referred.names.selector(Component::Agent) },
            "updateStrategy": strategy,
            // An old pod that is not available is replaced beside any other. One that has just become ready may not be so for a moment: that is over
            // before the next one goes.
            "minReadySeconds": SETTLED_SECONDS,
            "template": template,
        },
    })
}

fn pod(cluster: &KVCacheCluster, found: &Found) -> Value {
    let agents = &cluster.spec.agents;
    let (policy, pull_secrets) = pull(&cluster.spec.images);
    let (volumes, mounts) = volumes(cluster, found);
    let field = |name: &str, path: &str| json!({ "name": name, "valueFrom": { "fieldRef": { "apiVersion": "v1", "fieldPath": path } } });
    let arena = cluster.spec.cache.dram.bytes().unwrap_or_default();
    let reckoned = Reckoned { cpu_millis: CPU_MILLIS, memory: OVERHEAD_BYTES, beside: arena };
    let container = json!({
        "name": CONTAINER,
        "image": found.images.agent,
        "imagePullPolicy": policy,
        "args": ["--config", format!("{FOLDER}/{AGENT_FILE}"), "--in-cluster"],
        "env": [
            field("NODE_NAME", "spec.nodeName"),
            field("POD_IP", "status.podIP"),
            field("POD_NAME", "metadata.name"),
            json!({ "name": "CLUSTER", "value": found.referred.names.key() }),
            identities::variable(),
        ],
        "ports": [
            { "name": "peers", "containerPort": agents.peers.port, "protocol": "TCP" },
            { "name": "admin", "containerPort": agents.admin_port, "protocol": "TCP" },
        ],
        "resources": resources(agents.resources.as_ref(), &reckoned),
        "securityContext": confined(),
        "startupProbe": startup_probe("/startz", "admin", STARTS_SECONDS),
        "livenessProbe": probe("/healthz", "admin", 5, 6),
        "readinessProbe": probe("/readyz", "admin", 2, 2),
        "volumeMounts": mounts,
    });
    without_empty(json!({
        "serviceAccountName": found.referred.names.agent(),
        "automountServiceAccountToken": true,
        "terminationGracePeriodSeconds": GRACE_SECONDS,
        "priorityClassName": agents.priority_class_name,
        "nodeSelector": agents.node_selector,
        "tolerations": tolerations(&agents.tolerations),
        "imagePullSecrets": pull_secrets,
        "securityContext": {
            "runAsUser": 0,
            "runAsGroup": 0,
            "seccompProfile": seccomp(cluster),
        },
        "containers": [container],
        "volumes": volumes,
    }))
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

/// Volumes of the pod and where they are mounted: directories of the node under their own paths.
fn volumes(cluster: &KVCacheCluster, found: &Found) -> (Value, Value) {
    let key = found.referred.names.key();
    let mut folders: BTreeSet<String> = BTreeSet::new();
    folders.insert(cluster.spec.agents.socket.directory.to_string());
    folders.insert(state_directory(&found.referred.names));
    for pool in found.referred.pools.iter().filter_map(|named| named.bound(&key)) {
        folders.extend(pool.spec.directory.iter().map(|directory| directory.path.to_string()));
    }
    let config = json!({ "name": "config", "configMap": { "name": found.referred.names.agent() } });
    let mut volumes = vec![config, identities::volume(found)];
    let mut mounts =
        vec![json!({ "name": "config", "mountPath": FOLDER, "readOnly": true }), identities::mount()];
    for (index, folder) in folders.iter().enumerate() {
        let name = format!("node-{index}");
        volumes.push(json!({ "name": name, "hostPath": { "path": folder, "type": "DirectoryOrCreate" } }));
        mounts.push(json!({ "name": name, "mountPath": folder }));
    }
    if found.referred.raw_pools().next().is_some() {
        volumes
            .push(json!({ "name": "devices", "hostPath": { "path": DEVICES_FOLDER, "type": "Directory" } }));
        mounts.push(json!({ "name": "devices", "mountPath": DEVICES_FOLDER }));
    }
    (json!(volumes), json!(mounts))
}
