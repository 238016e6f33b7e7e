//! The members of the control plane: a StatefulSet, so that a member keeps its pod's name.
//!
//! Each member has a configuration file named after its pod, with its name and address. The pod template
//! contains a digest of what all files share, so that adding a member restarts no other.

use reprise_crds::KVCacheCluster;
use serde_json::{Map, Value, json};

use super::configuration::{ETCD_FOLDER, FOLDER, member};
use super::metadata::{config_map, metadata, service_account};
use super::pods::{
    self, DefaultResources, StatefulSet, Volumes, container_ports, disruption_budget, field_variable,
    headless, probe, resources, service_ports, startup_probe,
};
use crate::framework::child::{Child, ChildKind};
use crate::framework::digest;
use crate::reconcile::cluster::MEMBER_ADMIN_PORT;
use crate::reconcile::cluster::dereference::ClusterInputs;
use crate::reconcile::cluster::etcd::external::{SecretEntry, secret_entries};
use crate::reconcile::names::{CONFIGURATION, ClusterNames, Component, GRPC_PORT, SECRETS};

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
    let file = |index: u32| {
        let member_name = names.member(index);
        (format!("{member_name}.toml"), json!(member(cluster, names, &member_name)))
    };
    let files: Map<String, Value> = (0..cluster.spec.control_plane.replicas).map(file).collect();
    vec![
        service_account(meta(&name)),
        config_map(meta(&name), &Value::Object(files)),
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
    let (names, spec) = (&inputs.agent_config.names, &cluster.spec.control_plane);
    let mut annotations = json!({ CONFIGURATION: digest::of(&member(cluster, names, ANY_MEMBER)) });
    if let Some(check) = &inputs.store {
        annotations[SECRETS] = json!(check.secrets.clone().unwrap_or_default());
    }
    let defaults =
        DefaultResources { cpu: "250m", memory: memory(cluster, inputs), ..DefaultResources::default() };
    let container = json!({
        "name": "controlplane",
        "image": inputs.images.control_plane,
        "args": ["--config", format!("{FOLDER}/$(POD_NAME).toml")],
        "env": [field_variable("POD_NAME", "metadata.name")],
        "ports": container_ports(&named_ports(cluster)),
        "resources": resources(spec.resources.as_ref(), &defaults),
        "startupProbe": startup_probe("/readyz", "admin", STARTS_SECONDS),
        "livenessProbe": probe("/healthz", "admin", 5, 6),
        "readinessProbe": probe("/readyz", "admin", 2, 2),
    });
    let set = StatefulSet {
        name: names.control_plane(),
        service: names.members(),
        replicas: spec.replicas,
        annotations,
        container,
        volumes: volumes(cluster, names),
        pod: json!({
            "terminationGracePeriodSeconds": GRACE_SECONDS,
            "nodeSelector": spec.node_selector,
            "tolerations": spec.tolerations,
        }),
    };
    pods::stateful_set(cluster, inputs, Component::ControlPlane, set)
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
    volumes.add("config", json!({ "configMap": { "name": names.control_plane() } }), FOLDER);
    let entries = cluster.spec.etcd.external.as_ref().map(secret_entries).unwrap_or_default();
    if !entries.is_empty() {
        let item = |entry: &SecretEntry<'_>| json!({ "key": entry.key, "path": entry.file });
        let source = |entry: &SecretEntry<'_>| json!({ "name": entry.secret, "items": [item(entry)] });
        let sources: Vec<Value> = entries.iter().map(|entry| json!({ "secret": source(entry) })).collect();
        let projected = json!({ "defaultMode": 0o440, "sources": sources });
        volumes.add("etcd", json!({ "projected": projected }), ETCD_FOLDER);
    }
    volumes
}
