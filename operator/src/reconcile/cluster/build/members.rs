//! The members of the control plane: a StatefulSet, so that a member keeps its pod's name.
//!
//! Each member has a configuration file named after its pod, with its name and address. The pod template
//! contains a digest of what all files share, so that adding a member restarts no other.

use reprise_crds::KVCacheCluster;
use serde_json::{Value, json};

use super::certificates::{self, Process};
use super::configuration::{CLIENT_FOLDER, FOLDER, TLS_FOLDER, USER_FOLDER, member, members};
use super::metadata::{config_map, metadata, service_account};
use super::pods::{
    DefaultResources, MIN_READY_SECONDS, Volumes, container_ports, disruption_budget, field_variable,
    headless, probe, pull, resources, restricted, service_ports, spread_over, startup_probe, unprivileged,
    without_empty,
};
use crate::framework::child::{Child, ChildKind};
use crate::framework::digest;
use crate::reconcile::cluster::MEMBER_ADMIN_PORT;
use crate::reconcile::cluster::inputs::ClusterInputs;
use crate::reconcile::names::{CONFIGURATION, ClusterNames, Component, GRPC_PORT, SECRETS};

/// Default CPU of a member.
const CPU_MILLIS: u64 = 250;
/// Memory without any blocks: code, connections of 1,000 nodes, the event stream. It is not a power of two:
/// up to a million blocks per member fit below the next one, so the first reports of nodes restart no member.
const BASE_BYTES: u64 = 384 << 20;
/// Memory of a block's directory entry in bytes (DESIGN §10).
const BLOCK_ENTRY_BYTES: u64 = 64;
/// Size of a small common block in bytes: 16 tokens of an 8B model.
const BLOCK_BYTES: u64 = 2 << 20;
/// Time in which a stopping member hands over its shards and exits.
const GRACE_SECONDS: u32 = 15;
/// Time in which a member waits for its store at its start; it exits before this elapses.
const STARTS_SECONDS: u32 = 60;
/// Placeholder name for the digest of the settings that all members share.
const ANY_MEMBER: &str = "any";

pub(super) fn build(cluster: &KVCacheCluster, inputs: &ClusterInputs) -> Vec<Child> {
    let names = &inputs.agent_config.names;
    let name = names.control_plane();
    let meta = |name: &str| metadata(cluster, names, Component::ControlPlane, name);
    let selector = names.selector(Component::ControlPlane);
    let ports = named_ports(cluster);
    let service = json!({ "spec": { "selector": selector, "ports": service_ports(&ports) } });
    vec![
        service_account(meta(&name)),
        config_map(meta(&name), &json!(members(cluster, names))),
        Child::new(ChildKind::Service, meta(&names.members()), &headless(&selector, &ports)),
        Child::new(ChildKind::Service, meta(&name), &service),
        disruption_budget(meta(&name), &selector),
        Child::new(ChildKind::StatefulSet, meta(&name), &stateful_set(cluster, inputs)),
    ]
}

/// Container ports by name.
fn named_ports(cluster: &KVCacheCluster) -> Vec<(&'static str, u16)> {
    let mut ports = vec![("grpc", GRPC_PORT), ("admin", MEMBER_ADMIN_PORT)];
    if let Some(publish) = &cluster.spec.control_plane.events.publish {
        ports.extend([("events", publish.port), ("replay", publish.replay_port)]);
    }
    ports
}

fn stateful_set(cluster: &KVCacheCluster, inputs: &ClusterInputs) -> Value {
    let names = &inputs.agent_config.names;
    let mut annotations = json!({ CONFIGURATION: digest::of(&member(cluster, names, ANY_MEMBER)) });
    if let Some(check) = &inputs.store {
        annotations[SECRETS] = json!(check.secrets.clone().unwrap_or_default());
    }
    json!({
        "spec": {
            "replicas": cluster.spec.control_plane.replicas,
            "serviceName": names.members(),
            // Members start without waiting for each other.
            "podManagementPolicy": "Parallel",
            "updateStrategy": { "type": "RollingUpdate" },
            // In a rolling update the next member is replaced once this one has received its shards again.
            "minReadySeconds": MIN_READY_SECONDS,
            "selector": { "matchLabels": names.selector(Component::ControlPlane) },
            "template": {
                "metadata": { "labels": names.labels(Component::ControlPlane), "annotations": annotations },
                "spec": pod(cluster, inputs),
            },
        },
    })
}

fn pod(cluster: &KVCacheCluster, inputs: &ClusterInputs) -> Value {
    let (names, spec) = (&inputs.agent_config.names, &cluster.spec.control_plane);
    let (policy, pull_secrets) = pull(&cluster.spec.images);
    let volumes = volumes(cluster, names);
    let memory = memory(cluster, inputs);
    let defaults = DefaultResources { cpu_millis: CPU_MILLIS, memory, ..DefaultResources::default() };
    let container = json!({
        "name": "controlplane",
        "image": inputs.images.control_plane,
        "imagePullPolicy": policy,
        "args": ["--config", format!("{FOLDER}/$(POD_NAME).toml")],
        "env": [field_variable("POD_NAME", "metadata.name")],
        "ports": container_ports(&named_ports(cluster)),
        "resources": resources(spec.resources.as_ref(), &defaults),
        "securityContext": unprivileged(),
        "startupProbe": startup_probe("/readyz", "admin", STARTS_SECONDS),
        "livenessProbe": probe("/healthz", "admin", 5, 6),
        "readinessProbe": probe("/readyz", "admin", 2, 2),
        "volumeMounts": volumes.mounts,
    });
    let mut pod = without_empty(json!({
        "serviceAccountName": names.control_plane(),
        "automountServiceAccountToken": false,
        "terminationGracePeriodSeconds": GRACE_SECONDS,
        "nodeSelector": spec.node_selector,
        "tolerations": spec.tolerations,
        "imagePullSecrets": pull_secrets,
        "securityContext": restricted(),
        "topologySpreadConstraints": spread_over(&json!(spec.spread_over), &names.selector(Component::ControlPlane)),
        "containers": [container],
        "volumes": volumes.volumes,
    }));
    certificates::add_to(&mut pod, cluster, inputs, Process::Member);
    pod
}

/// Memory for the directory entries of all blocks that fit on the nodes, doubled because the remaining
/// members take over from a failed one. Rounded up to a power of two: restarting members for every additional
/// node would cost more than the memory.
fn memory(cluster: &KVCacheCluster, inputs: &ClusterInputs) -> u64 {
    let room = inputs.cache_nodes.iter().filter_map(|node| {
        let capacity = node.status.as_ref()?.capacity.as_ref()?;
        Some(capacity.ssd_total.bytes().ok()?.saturating_add(capacity.dram_total.bytes().ok()?))
    });
    let blocks = room.fold(0_u64, u64::saturating_add) / BLOCK_BYTES;
    let share = blocks * BLOCK_ENTRY_BYTES * 2 / u64::from(cluster.spec.control_plane.replicas.max(1));
    (BASE_BYTES + share).next_power_of_two()
}

/// Volumes of the pod: configuration, and Secrets for an external etcd.
fn volumes(cluster: &KVCacheCluster, names: &ClusterNames) -> Volumes {
    let mut volumes = Volumes::default();
    volumes.add(("config", json!({ "configMap": { "name": names.control_plane() } }), FOLDER));
    let mut secret = |name: &str, folder: &str, of: &str, items: &[(&str, &str)]| {
        let items: Vec<Value> = items.iter().map(|(key, path)| json!({ "key": key, "path": path })).collect();
        let secret = json!({ "secretName": of, "defaultMode": 0o440, "items": items });
        volumes.add((name, json!({ "secret": secret }), folder));
    };
    let external = cluster.spec.etcd.external.as_ref();
    if let Some(tls) = external.and_then(|external| external.tls.as_ref()) {
        let authority = &tls.ca_secret_ref;
        secret("etcd-tls", TLS_FOLDER, authority.name.as_str(), &[(authority.key.as_str(), "ca.crt")]);
        if let Some(client) = &tls.client_secret_ref {
            let items = [("tls.crt", "tls.crt"), ("tls.key", "tls.key")];
            secret("etcd-client", CLIENT_FOLDER, client.name.as_str(), &items);
        }
    }
    if let Some(user) = external.and_then(|external| external.user.as_ref()) {
        let password = &user.password_secret_ref;
        secret("etcd-user", USER_FOLDER, password.name.as_str(), &[(password.key.as_str(), "password")]);
    }
    volumes
}
