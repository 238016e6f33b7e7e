//! The members of the control plane: a StatefulSet, so that a member keeps its name, which is its pod's.
//!
//! Each member has a file of its own, named after its pod, with its name and address in it. The pods' template has a digest of what all
//! files share, so that one member more restarts none.

use reprise_crds::KVCacheCluster;
use reprise_crds::cluster::EtcdMode;
use serde_json::{Value, json};

use super::configuration::{CLIENT_FOLDER, FOLDER, TLS_FOLDER, USER_FOLDER, member, members};
use super::pods::{
    Reckoned, SETTLED_SECONDS, confined, probe, pull, resources, restricted, startup_probe, tolerations,
    without_empty,
};
use super::{config_map, metadata, service_account};
use crate::child::{Child, ChildKind, Ownership};
use crate::cluster::dereference::Found;
use crate::cluster::{GRPC_PORT, MEMBER_ADMIN_PORT};
use crate::digest;
use crate::names::{CONFIGURATION, Component, SECRETS};

/// CPU of a member that the cluster says nothing about.
const CPU_MILLIS: u64 = 250;
/// Memory without any block: code, connections of 1,000 nodes, the stream of changes. Not a power of two: up to a million blocks a member
/// fit below the next one, so that the first words of nodes restart nobody.
const BASE_BYTES: u64 = 384 << 20;
/// Memory of a block in the directory (DESIGN §10).
const BLOCK_ENTRY_BYTES: u64 = 64;
/// The smallest block that is common, 16 tokens of an 8B model.
const BLOCK_BYTES: u64 = 2 << 20;
/// A member that is told to stop hands over and ends.
const GRACE_SECONDS: u32 = 15;
/// A member waits for its store when it starts, and ends itself before this.
const STARTS_SECONDS: u32 = 60;
/// A digest over what members share is made of the file of this one.
const ANY_MEMBER: &str = "any";

pub(super) fn build(cluster: &KVCacheCluster, found: &Found, etcd_certificates: Option<&str>) -> Vec<Child> {
    let names = &found.referred.names;
    let name = names.control_plane();
    let meta = |name: &str| metadata(cluster, names, Component::ControlPlane, name);
    let selector = names.selector(Component::ControlPlane);
    let budget = json!({ "spec": { "maxUnavailable": 1, "selector": { "matchLabels": selector } } });
    // A member is known by its name before it is ready: it is ready once others have found it.
    let headless = json!({ "spec": {
        "clusterIP": "None", "publishNotReadyAddresses": true, "selector": selector, "ports": ports(cluster),
    } });
    let service = json!({ "spec": { "selector": selector, "ports": ports(cluster) } });
    vec![
        service_account(meta(&name)),
        config_map(meta(&name), &json!(members(cluster, names))),
        Child::new(ChildKind::Service, Ownership::Shared, meta(&names.members()), &headless),
        Child::new(ChildKind::Service, Ownership::Shared, meta(&name), &service),
        Child::new(ChildKind::PodDisruptionBudget, Ownership::Shared, meta(&name), &budget),
        Child::new(
            ChildKind::StatefulSet,
            Ownership::Shared,
            meta(&name),
            &stateful_set(cluster, found, etcd_certificates),
        ),
    ]
}

/// Ports by name.
fn named_ports(cluster: &KVCacheCluster) -> Vec<(&'static str, u16)> {
    let mut ports = vec![("grpc", GRPC_PORT), ("admin", MEMBER_ADMIN_PORT)];
    if let Some(publish) = &cluster.spec.control_plane.events.publish {
        ports.extend([("events", publish.port), ("replay", publish.replay_port)]);
    }
    ports
}

fn ports(cluster: &KVCacheCluster) -> Value {
    let port = |(name, port)| json!({ "name": name, "port": port, "targetPort": name, "protocol": "TCP" });
    named_ports(cluster).into_iter().map(port).collect()
}

fn stateful_set(cluster: &KVCacheCluster, found: &Found, etcd_certificates: Option<&str>) -> Value {
    let names = &found.referred.names;
    let secrets = match &found.store {
        Some(look) => look.secrets.clone().unwrap_or_default(),
        None => etcd_certificates.unwrap_or_default().to_owned(),
    };
    let annotations = json!({
        CONFIGURATION: digest::of(&member(cluster, names, ANY_MEMBER)),
        SECRETS: secrets,
    });
    json!({
        "spec": {
            "replicas": cluster.spec.control_plane.replicas,
            "serviceName": names.members(),
            // Members need not wait for one another.
            "podManagementPolicy": "Parallel",
            "updateStrategy": { "type": "RollingUpdate" },
            // But when they are replaced, the next one while this has its part of the directory again.
            "minReadySeconds": SETTLED_SECONDS,
            "selector": { "matchLabels": names.selector(Component::ControlPlane) },
            "template": {
                "metadata": { "labels": names.labels(Component::ControlPlane), "annotations": annotations },
                "spec": pod(cluster, found),
            },
        },
    })
}

fn pod(cluster: &KVCacheCluster, found: &Found) -> Value {
    let (names, spec) = (&found.referred.names, &cluster.spec.control_plane);
    let (policy, pull_secrets) = pull(&cluster.spec.images);
    let (volumes, mounts) = volumes(cluster, found);
    let container_ports: Vec<Value> = named_ports(cluster)
        .into_iter()
        .map(|(name, port)| json!({ "name": name, "containerPort": port, "protocol": "TCP" }))
        .collect();
    let reckoned = Reckoned { cpu_millis: CPU_MILLIS, memory: memory(cluster, found), beside: 0 };
    let container = json!({
        "name": "controlplane",
        "image": found.images.control_plane,
        "imagePullPolicy": policy,
        "args": ["--config", format!("{FOLDER}/$(POD_NAME).toml")],
        "env": [{
            "name": "POD_NAME",
            "valueFrom": { "fieldRef": { "apiVersion": "v1", "fieldPath": "metadata.name" } },
        }],
        "ports": container_ports,
        "resources": resources(spec.resources.as_ref(), &reckoned),
        "securityContext": confined(),
        "startupProbe": startup_probe("/readyz", "admin", STARTS_SECONDS),
        "livenessProbe": probe("/healthz", "admin", 5, 6),
        "readinessProbe": probe("/readyz", "admin", 2, 2),
        "volumeMounts": mounts,
    });
    without_empty(json!({
        "serviceAccountName": names.control_plane(),
        "automountServiceAccountToken": false,
        "terminationGracePeriodSeconds": GRACE_SECONDS,
        "nodeSelector": spec.node_selector,
        "tolerations": tolerations(&spec.tolerations),
        "imagePullSecrets": pull_secrets,
        "securityContext": restricted(),
        "topologySpreadConstraints": [{
            "maxSkew": 1,
            "topologyKey": spec.spread_over,
            "whenUnsatisfiable": "ScheduleAnyway",
            "labelSelector": { "matchLabels": names.selector(Component::ControlPlane) },
        }],
        "containers": [container],
        "volumes": volumes,
    }))
}

/// Memory for the entries of all blocks that the nodes have room for, twice, since members that are left take over. In powers of two:
/// a restart of the members for every node that comes would cost more than the memory.
fn memory(cluster: &KVCacheCluster, found: &Found) -> u64 {
    let room = found.cache_nodes.iter().filter_map(|node| {
        let capacity = node.status.as_ref()?.capacity.as_ref()?;
        Some(capacity.ssd_total.bytes().ok()?.saturating_add(capacity.dram_total.bytes().ok()?))
    });
    let blocks = room.fold(0_u64, u64::saturating_add) / BLOCK_BYTES;
    let share = blocks * BLOCK_ENTRY_BYTES * 2 / u64::from(cluster.spec.control_plane.replicas.max(1));
    (BASE_BYTES + share).next_power_of_two()
}

/// Volumes of the pod and where they are mounted: configuration, and secrets for etcd.
fn volumes(cluster: &KVCacheCluster, found: &Found) -> (Value, Value) {
    let names = &found.referred.names;
    let mut volumes = vec![json!({ "name": "config", "configMap": { "name": names.control_plane() } })];
    let mut mounts = vec![json!({ "name": "config", "mountPath": FOLDER, "readOnly": true })];
    let mut secret = |name: &str, folder: &str, of: &str, items: &[(&str, &str)]| {
        let items: Vec<Value> = items.iter().map(|(key, path)| json!({ "key": key, "path": path })).collect();
        volumes.push(
            json!({ "name": name, "secret": { "secretName": of, "defaultMode": 0o440, "items": items } }),
        );
        mounts.push(json!({ "name": name, "mountPath": folder, "readOnly": true }));
    };
    match (cluster.spec.etcd.mode, &cluster.spec.etcd.external) {
        (EtcdMode::External, Some(external)) => {
            if let Some(tls) = &external.tls {
                let authority = &tls.ca_secret_ref;
                secret(
                    "etcd-tls",
                    TLS_FOLDER,
                    authority.name.as_str(),
                    &[(authority.key.as_str(), "ca.crt")],
                );
                if let Some(client) = &tls.client_secret_ref {
                    let items = [("tls.crt", "tls.crt"), ("tls.key", "tls.key")];
                    secret("etcd-client", CLIENT_FOLDER, client.name.as_str(), &items);
                }
            }
            if let Some(user) = &external.user {
                let password = &user.password_secret_ref;
                secret(
                    "etcd-user",
                    USER_FOLDER,
                    password.name.as_str(),
                    &[(password.key.as_str(), "password")],
                );
            }
        }
        _ => {
            let items = ["ca.crt", "client.crt", "client.key"].map(|file| (file, file));
            secret("etcd-tls", TLS_FOLDER, &names.etcd_tls(), &items);
        }
    }
    (json!(volumes), json!(mounts))
}
