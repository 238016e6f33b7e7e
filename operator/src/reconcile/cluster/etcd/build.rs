//! A managed etcd: a StatefulSet of 1, 3 or 5 members, with TLS for clients and between members.
//!
//! Its volumes are deleted with the cluster: their contents can be rebuilt from agents and resources, and a
//! new cluster of the same name must not find old data. The StatefulSet becomes the owner of its volume
//! claims once a member is ready. While claims are being bound, its controller would conflict with their
//! other writers, which would cause warning events in each install.
//!
//! etcd reads the CA once, when it starts, and members with different CAs cannot communicate. A member that
//! is replaced alone would never become ready, and a StatefulSet replaces no second one before that.
//! Therefore all members are stopped before any is started again:
//!
//! ```text
//! N members ──CA changes──▶ 0 replicas, old template ──all pods gone──▶ N replicas, new template
//! ```
//!
//! The StatefulSet itself records the step, so another operator can continue after a crash. Volumes are kept.
//! `maxUnavailable` in the update strategy would do this in one step, but needs Kubernetes 1.35 and would
//! also restart all members at once in upgrades. If a StatefulSet has no CA annotation yet, its members are
//! replaced one by one.

use kube::api::DynamicObject;
use reprise_crds::KVCacheCluster;
use serde_json::{Value, json};

use super::metadata::{metadata, service_account};
use super::pods::{DefaultResources, probe, pull, resources, restricted, unprivileged, without_empty};
use crate::framework::child::{Child, ChildKind};
use crate::reconcile::cluster::certificates::CertificateDigests;
use crate::reconcile::cluster::inputs::ClusterInputs;
use crate::reconcile::names::{ClusterNames, Component};

/// Standard ports of etcd.
const CLIENT_PORT: u16 = 2379;
const PEER_PORT: u16 = 2380;
const METRICS_PORT: u16 = 2381;
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
/// Volume name in pods. The claims are named after it, the StatefulSet and the member's number.
pub(in crate::reconcile::cluster) const ETCD_CLAIM: &str = "data";
/// Pod annotation with the digest of the CA that the pod trusts.
const AUTHORITY: &str = "reprise.dev/etcd-authority";
/// Directories of data and certificates.
const DATA_FOLDER: &str = "/var/lib/etcd";
const TLS_FOLDER: &str = "/etc/etcd/tls";

/// `host:port` of a member for clients.
pub(super) fn address(names: &ClusterNames, index: u8) -> String {
    format!("{}:{CLIENT_PORT}", host(names, &format!("{}-{index}", names.etcd())))
}

fn host(names: &ClusterNames, pod: &str) -> String {
    format!("{pod}.{}.{}.svc", names.etcd(), names.namespace)
}

/// Desired replicas and CA in one step of a CA change.
#[derive(Debug, PartialEq, Eq)]
struct MembershipStep {
    replicas: u8,
    authority: Option<String>,
}

pub(super) fn build(
    cluster: &KVCacheCluster,
    inputs: &ClusterInputs,
    certificates: Option<&CertificateDigests>,
) -> Vec<Child> {
    let names = &inputs.agent_config.names;
    let name = names.etcd();
    let meta = || metadata(cluster, names, Component::Etcd, &name);
    let selector = names.selector(Component::Etcd);
    let budget = json!({ "spec": { "maxUnavailable": 1, "selector": { "matchLabels": selector } } });
    let port =
        |name: &str, port: u16| json!({ "name": name, "port": port, "targetPort": name, "protocol": "TCP" });
    // Members find one another before any of them is ready.
    let headless = json!({ "spec": {
        "clusterIP": "None",
        "publishNotReadyAddresses": true,
        "selector": selector,
        "ports": [port("client", CLIENT_PORT), port("peer", PEER_PORT)],
    } });
    vec![
        service_account(meta()),
        Child::new(ChildKind::Service, meta(), &headless),
        Child::new(ChildKind::PodDisruptionBudget, meta(), &budget),
        Child::new(ChildKind::StatefulSet, meta(), &stateful_set(cluster, inputs, certificates)),
    ]
}

/// Returns the next step towards `replicas` members with a CA; `None` keeps their current CA.
fn next_step(replicas: u8, authority: Option<&str>, live: Option<&DynamicObject>) -> MembershipStep {
    let before =
        live.and_then(|live| live.data["spec"]["template"]["metadata"]["annotations"][AUTHORITY].as_str());
    let ca_changes = before.is_some() && authority.is_some() && before != authority;
    if ca_changes && !live.is_some_and(has_no_pods) {
        return MembershipStep { replicas: 0, authority: before.map(str::to_owned) };
    }
    MembershipStep { replicas, authority: authority.or(before).map(str::to_owned) }
}

/// Whether the controller has observed the current spec and no pod is left, not even a terminating one.
fn has_no_pods(live: &DynamicObject) -> bool {
    let status = &live.data["status"];
    let is_seen = status["observedGeneration"].as_i64() == live.metadata.generation;
    is_seen && status["replicas"].as_u64().unwrap_or_default() == 0
}

/// Whether volume claims are deleted with the StatefulSet: always after the first member was ready.
fn owns_claims(live: Option<&DynamicObject>) -> bool {
    live.is_some_and(|live| {
        let policy = &live.data["spec"]["persistentVolumeClaimRetentionPolicy"];
        live.data["status"]["readyReplicas"].as_u64() > Some(0) || policy["whenDeleted"] == "Delete"
    })
}

fn stateful_set(
    cluster: &KVCacheCluster,
    inputs: &ClusterInputs,
    certificates: Option<&CertificateDigests>,
) -> Value {
    let names = &inputs.agent_config.names;
    let managed = cluster.spec.etcd.managed.clone().unwrap_or_default();
    let authority = certificates.and_then(|certificates| certificates.authority.as_deref());
    let step = next_step(managed.replicas, authority, inputs.etcd.as_deref());
    let mut metadata = json!({ "labels": names.labels(Component::Etcd) });
    if let Some(authority) = step.authority {
        metadata["annotations"] = json!({ AUTHORITY: authority });
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
            "replicas": step.replicas,
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
            "volumeClaimTemplates": [{ "metadata": { "name": ETCD_CLAIM }, "spec": claim }],
        },
    })
}

fn pod(cluster: &KVCacheCluster, inputs: &ClusterInputs) -> Value {
    let (policy, pull_secrets) = pull(&cluster.spec.images);
    let managed = cluster.spec.etcd.managed.clone().unwrap_or_default();
    let defaults =
        DefaultResources { cpu_millis: CPU_MILLIS, memory: MEMORY_BYTES, extra_memory: 0, extra_limit: 0 };
    let port = |name: &str, port: u16| json!({ "name": name, "containerPort": port, "protocol": "TCP" });
    let container = json!({
        "name": "etcd",
        "image": inputs.images.etcd,
        "imagePullPolicy": policy,
        "args": arguments(&inputs.agent_config.names, managed.replicas),
        "env": [{
            "name": "POD_NAME",
            "valueFrom": { "fieldRef": { "apiVersion": "v1", "fieldPath": "metadata.name" } },
        }],
        "ports": [port("client", CLIENT_PORT), port("peer", PEER_PORT), port("metrics", METRICS_PORT)],
        "resources": resources(managed.resources.as_ref(), &defaults),
        "securityContext": unprivileged(),
        "startupProbe": startup(managed.replicas),
        "livenessProbe": probe("/livez", "metrics", 5, 6),
        "readinessProbe": probe("/readyz", "metrics", 2, 2),
        "volumeMounts": [
            { "name": ETCD_CLAIM, "mountPath": DATA_FOLDER },
            { "name": "tls", "mountPath": TLS_FOLDER, "readOnly": true },
        ],
    });
    without_empty(json!({
        "serviceAccountName": inputs.agent_config.names.etcd(),
        "automountServiceAccountToken": false,
        "imagePullSecrets": pull_secrets,
        "securityContext": restricted(),
        "topologySpreadConstraints": [{
            "maxSkew": 1,
            "topologyKey": cluster.spec.control_plane.spread_over,
            "whenUnsatisfiable": "ScheduleAnyway",
            "labelSelector": { "matchLabels": inputs.agent_config.names.selector(Component::Etcd) },
        }],
        "containers": [container],
        "volumes": [{ "name": "tls", "secret": { "secretName": inputs.agent_config.names.etcd_tls(), "defaultMode": 0o440 } }],
    }))
}

/// The startup probe. Unlike our programs, etcd answers before it is ready, so the first probe is sent after
/// a normal start: a single member becomes leader at once; several first resolve each other's new DNS names.
fn startup(replicas: u8) -> Value {
    let mut probe = probe("/readyz", "metrics", 2, START_PROBES);
    probe["initialDelaySeconds"] = json!(if replicas == 1 { STARTS_ALONE_SECONDS } else { STARTS_SECONDS });
    probe
}

/// etcd reads its certificates at every handshake, so renewed ones need no restart. See [`next_step`] for the
/// CA.
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
    ];
    for side in ["", "peer-"] {
        arguments.push(format!("--{side}client-cert-auth=true"));
        arguments.push(format!("--{side}trusted-ca-file={TLS_FOLDER}/ca.crt"));
        arguments.push(format!("--{side}cert-file={TLS_FOLDER}/server.crt"));
        arguments.push(format!("--{side}key-file={TLS_FOLDER}/server.key"));
    }
    arguments
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A StatefulSet whose controller has observed a generation, with this number of pods.
    fn live(authority: Option<&str>, observed: i64, pods: u32) -> DynamicObject {
        let annotations = authority.map(|authority| json!({ AUTHORITY: authority }));
        let whole = json!({
            "metadata": { "name": "c-etcd", "generation": 2 },
            "spec": { "template": { "metadata": { "annotations": annotations } } },
            "status": { "observedGeneration": observed, "replicas": pods },
        });
        serde_json::from_value(whole).expect("an object")
    }

    fn step_of(replicas: u8, authority: Option<&str>) -> MembershipStep {
        MembershipStep { replicas, authority: authority.map(str::to_owned) }
    }

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

    #[test]
    fn ca_change_replaces_all_members_at_once() {
        for replicas in [1, 3, 5] {
            let new = step_of(replicas, Some("new"));
            let step = |live: Option<&DynamicObject>| next_step(replicas, Some("new"), live);
            assert_eq!(step(None), new, "members are created");
            let none = step_of(0, Some("old"));
            assert_eq!(step(Some(&live(Some("old"), 2, replicas.into()))), none, "members are stopped");
            assert_eq!(step(Some(&live(Some("old"), 2, 1))), none, "one pod is left");
            assert_eq!(step(Some(&live(Some("old"), 1, 0))), none, "the controller has not observed it");
            assert_eq!(step(Some(&live(Some("old"), 2, 0))), new, "no pod is left");
            assert_eq!(step(Some(&live(Some("new"), 1, 0))), new, "members are started again");
            assert_eq!(step(Some(&live(Some("new"), 2, replicas.into()))), new, "members have started again");
        }
    }

    #[test]
    fn keeps_members_with_the_same_or_an_unknown_ca() {
        let same = step_of(3, Some("a"));
        assert_eq!(next_step(3, Some("a"), Some(&live(Some("a"), 2, 3))), same);
        assert_eq!(next_step(3, None, Some(&live(Some("a"), 2, 3))), same, "restoring the Secret is delayed");
        assert_eq!(next_step(3, Some("a"), Some(&live(None, 2, 3))), same, "rolling update");
        assert_eq!(next_step(3, None, None), step_of(3, None));
    }
}
