//! The objects of a managed etcd.
//!
//! Its volumes are deleted with the cluster: agents and resources have the same contents, and a new cluster of the same name
//! must not find old data. The StatefulSet owns the volume claims once a member is ready: while they are being bound, its
//! controller would conflict with other writers, with warning events in each install.

use kube::api::DynamicObject;
use reprise_crds::KVCacheCluster;
use reprise_crds::cluster::ManagedEtcd;
use reprise_identity::Role;
use reprise_identity::authority::server_name;
use reprise_identity::credentials::{AUTHORITIES_FILE, CERTIFICATE_FILE, KEY_FILE};
use serde_json::{Value, json};

use super::{CERTIFICATES_FOLDER, DATA_FOLDER, DATA_VOLUME, managed};
use crate::framework::child::{Child, ChildKind};
use crate::framework::digest;
use crate::reconcile::cluster::build::metadata::{metadata, service_account};
use crate::reconcile::cluster::build::pods::{
    self, DefaultResources, StatefulSet, Volumes, container_ports, disruption_budget, field_variable,
    headless, probe, resources, without_empty,
};
use crate::reconcile::cluster::dereference::ClusterInputs;
use crate::reconcile::names::{ClusterNames, Component};

/// Standard ports of etcd.
const CLIENT_PORT: u16 = 2379;
const PEER_PORT: u16 = 2380;
const METRICS_PORT: u16 = 2381;
/// The ports that its service has.
const PORTS: [(&str, u16); 2] = [("client", CLIENT_PORT), ("peer", PEER_PORT)];
/// Default memory of a member.
const MEMORY_BYTES: u64 = 256 << 20;
/// Store size at which etcd rejects writes. We store some hundred bytes per node.
const QUOTA_BYTES: u64 = 512 << 20;
/// Number of startup probes, each 2 s apart. Replaying the log or waiting for other members may take long.
const START_PROBES: u32 = 300;
/// Pod annotation with the digest of the authorities that the pod trusts.
const AUTHORITIES: &str = "reprise.dev/authorities";

/// Addresses of all members for clients.
pub(crate) fn endpoints(cluster: &KVCacheCluster, names: &ClusterNames) -> Vec<String> {
    let address = |pod: String| format!("https://{}:{CLIENT_PORT}", host(names, &pod));
    pod_names(names, managed(cluster).map_or(0, |managed| managed.replicas)).map(address).collect()
}

/// Returns the names of the pods of all members.
fn pod_names(names: &ClusterNames, replicas: u8) -> impl Iterator<Item = String> {
    let etcd = names.etcd();
    (0..replicas).map(move |index| format!("{etcd}-{index}"))
}

fn host(names: &ClusterNames, pod: &str) -> String {
    let [host, _] = names.etcd_hosts(pod);
    host
}

/// Returns the children of a managed etcd; none if etcd is external.
pub(crate) fn build(cluster: &KVCacheCluster, inputs: &ClusterInputs) -> Vec<Child> {
    let Some(managed) = managed(cluster) else { return Vec::new() };
    let names = &inputs.agent_config.names;
    let name = names.etcd();
    let meta = || metadata(cluster, names, Component::Etcd, &name);
    let selector = names.selector(Component::Etcd);
    vec![
        service_account(meta()),
        Child::new(ChildKind::Service, meta(), &headless(&selector, &PORTS)),
        disruption_budget(meta(), &selector),
        Child::new(ChildKind::StatefulSet, meta(), &stateful_set(cluster, &managed, inputs)),
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

fn stateful_set(cluster: &KVCacheCluster, managed: &ManagedEtcd, inputs: &ClusterInputs) -> Value {
    let names = &inputs.agent_config.names;
    let defaults = DefaultResources { cpu: "100m", memory: MEMORY_BYTES, ..DefaultResources::default() };
    // Unlike our programs, etcd answers before it is ready, so the first probe is sent after a normal start: a single
    // member becomes leader at once; several first resolve each other's new DNS names.
    let mut startup_probe = probe("/readyz", "metrics", 2, START_PROBES);
    startup_probe["initialDelaySeconds"] = json!(if managed.replicas == 1 { 5 } else { 10 });
    let container = json!({
        "name": "etcd",
        "image": inputs.images.etcd,
        "args": arguments(names, managed.replicas),
        "env": [field_variable("POD_NAME", "metadata.name")],
        "ports": container_ports(&[PORTS[0], PORTS[1], ("metrics", METRICS_PORT)]),
        "resources": resources(managed.resources.as_ref(), &defaults),
        "startupProbe": startup_probe,
        "livenessProbe": probe("/livez", "metrics", 5, 6),
        "readinessProbe": probe("/readyz", "metrics", 2, 2),
    });
    let data = json!({ "name": DATA_VOLUME, "mountPath": DATA_FOLDER });
    let set = StatefulSet {
        name: names.etcd(),
        service: names.etcd(),
        replicas: u32::from(managed.replicas),
        annotations: without_empty(json!({ AUTHORITIES: authorities(inputs) })),
        container,
        volumes: Volumes { mounts: vec![data], ..Volumes::default() },
        pod: json!({}),
    };
    let mut set = pods::stateful_set(cluster, inputs, Component::Etcd, set);
    let claim = without_empty(json!({
        "accessModes": ["ReadWriteOnce"],
        "resources": { "requests": { "storage": managed.storage.size } },
        "storageClassName": managed.storage.storage_class_name,
    }));
    set["spec"]["volumeClaimTemplates"] = json!([{ "metadata": { "name": DATA_VOLUME }, "spec": claim }]);
    set["spec"]["persistentVolumeClaimRetentionPolicy"] = json!({
        "whenDeleted": if owns_claims(inputs.etcd.as_deref()) { "Delete" } else { "Retain" },
        "whenScaled": "Retain",
    });
    set
}

/// All processes of the cluster have certificates of its authority, so etcd admits only members as clients, and only
/// etcd as peers. Its gateway from JSON to gRPC would connect with the certificate of etcd, so it is off.
fn arguments(names: &ClusterNames, replicas: u8) -> Vec<String> {
    let own = host(names, "$(POD_NAME)");
    let peer = |pod: String| format!("{pod}=https://{}:{PEER_PORT}", host(names, &pod));
    let peers: Vec<String> = pod_names(names, replicas).map(peer).collect();
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
