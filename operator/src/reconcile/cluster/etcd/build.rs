//! The objects of a managed etcd.
//!
//! Its volumes are deleted with the cluster: their contents can be rebuilt from agents and resources, and a
//! new cluster of the same name must not find old data. The StatefulSet becomes the owner of its volume
//! claims once a member is ready. While claims are being bound, its controller would conflict with their
//! other writers, which would cause warning events in each install.

use kube::api::DynamicObject;
use reprise_crds::KVCacheCluster;
use reprise_identity::Role;
use reprise_identity::authority::server_name;
use reprise_identity::credentials::{AUTHORITIES_FILE, CERTIFICATE_FILE, KEY_FILE};
use serde_json::{Value, json};

use super::{CERTIFICATES_FOLDER, DATA_FOLDER, DATA_VOLUME};
use crate::framework::child::{Child, ChildKind};
use crate::framework::digest;
use crate::reconcile::cluster::build::certificates::{self, Process};
use crate::reconcile::cluster::build::metadata::{metadata, service_account};
use crate::reconcile::cluster::build::pods::{
    DefaultResources, container_ports, disruption_budget, field_variable, headless, probe, pull, resources,
    restricted, spread_over, unprivileged, without_empty,
};
use crate::reconcile::cluster::inputs::ClusterInputs;
use crate::reconcile::names::{ClusterNames, Component};

/// Standard ports of etcd.
const CLIENT_PORT: u16 = 2379;
const PEER_PORT: u16 = 2380;
const METRICS_PORT: u16 = 2381;
/// The ports that its service has.
const PORTS: [(&str, u16); 2] = [("client", CLIENT_PORT), ("peer", PEER_PORT)];
/// Default CPU and memory of a member.
const CPU_MILLIS: u64 = 100;
const MEMORY_BYTES: u64 = 256 << 20;
/// Store size at which etcd rejects writes. We store some hundred bytes per node.
const QUOTA_BYTES: u64 = 512 << 20;
/// Time of a normal start of a single member, and of one of several.
const STARTS_ALONE_SECONDS: u32 = 5;
const STARTS_SECONDS: u32 = 10;
/// Number of startup probes, each 2 s apart. Replaying the log or waiting for other members may take long.
const START_PROBES: u32 = 300;
/// Pod annotation with the digest of the authorities that the pod trusts.
const AUTHORITIES: &str = "reprise.dev/authorities";

/// `host:port` of a member for clients.
pub(crate) fn address(names: &ClusterNames, index: u8) -> String {
    format!("{}:{CLIENT_PORT}", host(names, &format!("{}-{index}", names.etcd())))
}

fn host(names: &ClusterNames, pod: &str) -> String {
    let [host, _] = names.etcd_hosts(pod);
    host
}

pub(crate) fn build(cluster: &KVCacheCluster, inputs: &ClusterInputs) -> Vec<Child> {
    let names = &inputs.agent_config.names;
    let name = names.etcd();
    let meta = || metadata(cluster, names, Component::Etcd, &name);
    let selector = names.selector(Component::Etcd);
    vec![
        service_account(meta()),
        Child::new(ChildKind::Service, meta(), &headless(&selector, &PORTS)),
        disruption_budget(meta(), &selector),
        Child::new(ChildKind::StatefulSet, meta(), &stateful_set(cluster, inputs)),
    ]
}

/// Whether volume claims are deleted with the StatefulSet: always after the first member was ready.
fn owns_claims(live: Option<&DynamicObject>) -> bool {
    live.is_some_and(|live| {
        let policy = &live.data["spec"]["persistentVolumeClaimRetentionPolicy"];
        live.data["status"]["readyReplicas"].as_u64() > Some(0) || policy["whenDeleted"] == "Delete"
    })
}

/// Digest of the trusted authorities, so that a change of them replaces the pods one by one. While the authority cannot
/// be read, the pods stay as they are.
fn authorities(inputs: &ClusterInputs) -> Option<String> {
    let running = || {
        let annotations = &inputs.etcd.as_ref()?.data["spec"]["template"]["metadata"]["annotations"];
        annotations[AUTHORITIES].as_str().map(str::to_owned)
    };
    inputs.certificates.trusted().map(|trusted| digest::of(&trusted)).or_else(running)
}

fn stateful_set(cluster: &KVCacheCluster, inputs: &ClusterInputs) -> Value {
    let names = &inputs.agent_config.names;
    let managed = cluster.spec.etcd.managed.clone().unwrap_or_default();
    let mut metadata = json!({ "labels": names.labels(Component::Etcd) });
    if let Some(authorities) = authorities(inputs) {
        metadata["annotations"] = json!({ AUTHORITIES: authorities });
    }
    let mut claim = json!({
        "accessModes": ["ReadWriteOnce"],
        "resources": { "requests": { "storage": managed.storage.size } },
    });
    if let Some(class) = &managed.storage.storage_class_name {
        claim["storageClassName"] = json!(class);
    }
    json!({
        "spec": {
            "replicas": managed.replicas,
            "serviceName": names.etcd(),
            "podManagementPolicy": "Parallel",
            "updateStrategy": { "type": "RollingUpdate" },
            "persistentVolumeClaimRetentionPolicy": {
                "whenDeleted": if owns_claims(inputs.etcd.as_deref()) { "Delete" } else { "Retain" },
                "whenScaled": "Retain",
            },
            "selector": { "matchLabels": names.selector(Component::Etcd) },
            "template": {
                "metadata": metadata,
                "spec": pod(cluster, inputs),
            },
            "volumeClaimTemplates": [{ "metadata": { "name": DATA_VOLUME }, "spec": claim }],
        },
    })
}

fn pod(cluster: &KVCacheCluster, inputs: &ClusterInputs) -> Value {
    let (policy, pull_secrets) = pull(&cluster.spec.images);
    let managed = cluster.spec.etcd.managed.clone().unwrap_or_default();
    let names = &inputs.agent_config.names;
    let defaults =
        DefaultResources { cpu_millis: CPU_MILLIS, memory: MEMORY_BYTES, ..DefaultResources::default() };
    let container = json!({
        "name": "etcd",
        "image": inputs.images.etcd,
        "imagePullPolicy": policy,
        "args": arguments(names, managed.replicas),
        "env": [field_variable("POD_NAME", "metadata.name")],
        "ports": container_ports(&[PORTS[0], PORTS[1], ("metrics", METRICS_PORT)]),
        "resources": resources(managed.resources.as_ref(), &defaults),
        "securityContext": unprivileged(),
        "startupProbe": startup(managed.replicas),
        "livenessProbe": probe("/livez", "metrics", 5, 6),
        "readinessProbe": probe("/readyz", "metrics", 2, 2),
        "volumeMounts": [{ "name": DATA_VOLUME, "mountPath": DATA_FOLDER }],
    });
    let mut pod = without_empty(json!({
        "serviceAccountName": names.etcd(),
        "automountServiceAccountToken": false,
        "imagePullSecrets": pull_secrets,
        "securityContext": restricted(),
        "topologySpreadConstraints":
            spread_over(&json!(cluster.spec.control_plane.spread_over), &names.selector(Component::Etcd)),
        "containers": [container],
    }));
    certificates::add_to(&mut pod, cluster, inputs, Process::Etcd);
    pod
}

/// The startup probe. Unlike our programs, etcd answers before it is ready, so the first probe is sent after
/// a normal start: a single member becomes leader at once; several first resolve each other's new DNS names.
fn startup(replicas: u8) -> Value {
    let mut probe = probe("/readyz", "metrics", 2, START_PROBES);
    probe["initialDelaySeconds"] = json!(if replicas == 1 { STARTS_ALONE_SECONDS } else { STARTS_SECONDS });
    probe
}

/// All processes of the cluster have certificates of its authority, so etcd admits only members as clients, and only
/// etcd as peers. Its gateway from JSON to gRPC would connect with the certificate of etcd, so it is off.
fn arguments(names: &ClusterNames, replicas: u8) -> Vec<String> {
    let own = host(names, "$(POD_NAME)");
    let peers: Vec<String> = (0..replicas)
        .map(|index| {
            let pod = format!("{}-{index}", names.etcd());
            format!("{pod}=https://{}:{PEER_PORT}", host(names, &pod))
        })
        .collect();
    let mut arguments = vec![
        "--name=$(POD_NAME)".to_owned(),
        format!("--data-dir={DATA_FOLDER}/data"),
        format!("--listen-client-urls=https://0.0.0.0:{CLIENT_PORT}"),
        format!("--advertise-client-urls=https://{own}:{CLIENT_PORT}"),
        format!("--listen-peer-urls=https://0.0.0.0:{PEER_PORT}"),
        format!("--initial-advertise-peer-urls=https://{own}:{PEER_PORT}"),
        format!("--listen-metrics-urls=http://0.0.0.0:{METRICS_PORT}"),
        format!("--initial-cluster={}", peers.join(",")),
        format!("--initial-cluster-token={}", names.uid),
        "--initial-cluster-state=new".to_owned(),
        "--auto-compaction-mode=periodic".to_owned(),
        "--auto-compaction-retention=1h".to_owned(),
        format!("--quota-backend-bytes={QUOTA_BYTES}"),
        "--enable-grpc-gateway=false".to_owned(),
        format!("--client-cert-allowed-hostname={}", server_name(&Role::Member)),
        format!("--peer-cert-allowed-hostname={}", server_name(&Role::Etcd)),
    ];
    for side in ["", "peer-"] {
        arguments.push(format!("--{side}client-cert-auth=true"));
        arguments.push(format!("--{side}trusted-ca-file={CERTIFICATES_FOLDER}/{AUTHORITIES_FILE}"));
        arguments.push(format!("--{side}cert-file={CERTIFICATES_FOLDER}/{CERTIFICATE_FILE}"));
        arguments.push(format!("--{side}key-file={CERTIFICATES_FOLDER}/{KEY_FILE}"));
    }
    arguments
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn owns_volume_claims_once_a_member_was_ready() {
        let set = |policy: &str, ready: Option<u32>| -> DynamicObject {
            serde_json::from_value(json!({
                "metadata": { "name": "c-etcd" },
                "spec": { "persistentVolumeClaimRetentionPolicy": { "whenDeleted": policy } },
                "status": { "readyReplicas": ready },
            }))
            .expect("an object")
        };
        assert!(!owns_claims(None));
        assert!(!owns_claims(Some(&set("Retain", None))) && !owns_claims(Some(&set("Retain", Some(0)))));
        assert!(owns_claims(Some(&set("Retain", Some(1)))));
        assert!(owns_claims(Some(&set("Delete", None))), "all members are temporarily absent");
    }
}
