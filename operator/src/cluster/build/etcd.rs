//! An etcd that the operator runs: a StatefulSet of 1, 3 or 5, with TLS for clients and among its members.
//!
//! Its volumes go with the cluster: everything in them can be rebuilt from agents and resources, and a new cluster of the same name must
//! not find the facts of another. The StatefulSet becomes the owner of its claims once a member is ready: before that, while they are bound, its controller
//! would meet other writers of them, and each install would have a warning among its events.
//!
//! etcd reads whom it trusts once, at its start. Members that trust a new authority cannot talk to those that trust the one before, so one that is
//! replaced alone never becomes ready, and a StatefulSet replaces no second one before it is. Hence all go before any comes back:
//!
//! ```text
//!  N members ──another authority is drawn──▶ 0 are wanted, of the template of before ──none is left──▶ N of the new template
//! ```
//!
//! Which step it is stands in the StatefulSet, so another operator goes on where one was killed. Volumes stay. `maxUnavailable` of the update strategy
//! would do it in one step, but Kubernetes has that from 1.35 only, and upgrades would replace all members at once, too. Of a StatefulSet that names no
//! authority yet the members are replaced one after the other.

use kube::api::DynamicObject;
use reprise_crds::KVCacheCluster;
use serde_json::{Value, json};

use super::pods::{Reckoned, confined, probe, pull, resources, restricted, without_empty};
use super::{metadata, service_account};
use crate::child::{Child, ChildKind, Ownership};
use crate::cluster::certificates::Drawn;
use crate::cluster::dereference::Found;
use crate::names::{ClusterNames, Component};

/// Ports of etcd, by its own custom.
const CLIENT_PORT: u16 = 2379;
const PEER_PORT: u16 = 2380;
const METRICS_PORT: u16 = 2381;
/// CPU and memory of a member that the cluster says nothing about.
const CPU_MILLIS: u64 = 100;
const MEMORY_BYTES: u64 = 256 << 20;
/// Bytes of the store beyond which etcd refuses writes; some hundred bytes a node are kept.
const QUOTA_BYTES: u64 = 512 << 20;
/// A normal start of an etcd of one member, and of several.
const STARTS_ALONE_SECONDS: u32 = 5;
const STARTS_SECONDS: u32 = 10;
/// Probes of a start, each 2 s: one that replays its log or waits for other members takes long.
const START_PROBES: u32 = 300;
/// What its volumes are called in its pods; their claims are called by that, the StatefulSet and the number of the member.
pub(in crate::cluster) const ETCD_CLAIM: &str = "data";
/// Annotation of its pods: digest of the authority that they trust.
const AUTHORITY: &str = "reprise.dev/etcd-authority";
/// Where data and certificates are.
const DATA_FOLDER: &str = "/var/lib/etcd";
const TLS_FOLDER: &str = "/etc/etcd/tls";

/// `host:port` of a member for clients.
pub(super) fn address(names: &ClusterNames, index: u8) -> String {
    format!("{}:{CLIENT_PORT}", host(names, &format!("{}-{index}", names.etcd())))
}

fn host(names: &ClusterNames, pod: &str) -> String {
    format!("{pod}.{}.{}.svc", names.etcd(), names.namespace)
}

/// How many members there are now, and whom they trust.
#[derive(Debug, PartialEq, Eq)]
struct Stage {
    replicas: u8,
    authority: Option<String>,
}

pub(super) fn build(cluster: &KVCacheCluster, found: &Found, drawn: Option<&Drawn>) -> Vec<Child> {
    let names = &found.referred.names;
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
        Child::new(ChildKind::Service, Ownership::Shared, meta(), &headless),
        Child::new(ChildKind::PodDisruptionBudget, Ownership::Shared, meta(), &budget),
        Child::new(ChildKind::StatefulSet, Ownership::Shared, meta(), &stateful_set(cluster, found, drawn)),
    ]
}

/// The next step to `replicas` members that trust an authority; `None`: whichever they trust.
fn stage(replicas: u8, authority: Option<&str>, live: Option<&DynamicObject>) -> Stage {
    let before =
        live.and_then(|live| live.data["spec"]["template"]["metadata"]["annotations"][AUTHORITY].as_str());
    let is_parted = before.is_some() && authority.is_some() && before != authority;
    if is_parted && !live.is_some_and(has_no_pods) {
        return Stage { replicas: 0, authority: before.map(str::to_owned) };
    }
    Stage { replicas, authority: authority.or(before).map(str::to_owned) }
}

/// Whether the controller has seen what is wanted, and no pod is there, not even one that goes.
fn has_no_pods(live: &DynamicObject) -> bool {
    let status = &live.data["status"];
    let is_seen = status["observedGeneration"].as_i64() == live.metadata.generation;
    is_seen && status["replicas"].as_u64().unwrap_or_default() == 0
}

/// Whether the claims of volumes are deleted with the StatefulSet: from the first ready member on, and then for ever.
fn owns_claims(live: Option<&DynamicObject>) -> bool {
    live.is_some_and(|live| {
        let policy = &live.data["spec"]["persistentVolumeClaimRetentionPolicy"];
        live.data["status"]["readyReplicas"].as_u64() > Some(0) || policy["whenDeleted"] == "Delete"
    })
}

/// Whether all members go before any comes back.
pub(in crate::cluster) fn is_replaced(live: &DynamicObject) -> bool {
    live.data["spec"]["replicas"].as_u64() == Some(0)
}

fn stateful_set(cluster: &KVCacheCluster, found: &Found, drawn: Option<&Drawn>) -> Value {
    let names = &found.referred.names;
    let managed = cluster.spec.etcd.managed.clone().unwrap_or_default();
    let authority = drawn.and_then(|drawn| drawn.authority.as_deref());
    let stage = stage(managed.replicas, authority, found.etcd.as_deref());
    let mut metadata = json!({ "labels": names.labels(Component::Etcd) });
    if let Some(authority) = stage.authority {
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
            "replicas": stage.replicas,
            "serviceName": names.etcd(),
            "podManagementPolicy": "Parallel",
            "updateStrategy": { "type": "RollingUpdate" },
            "persistentVolumeClaimRetentionPolicy": {
                "whenDeleted": if owns_claims(found.etcd.as_deref()) { "Delete" } else { "Retain" },
                "whenScaled": "Retain",
            },
            "selector": { "matchLabels": names.selector(Component::Etcd) },
            "template": {
                "metadata": metadata,
                "spec": pod(cluster, found),
            },
            "volumeClaimTemplates": [{ "metadata": { "name": ETCD_CLAIM }, "spec": claim }],
        },
    })
}

fn pod(cluster: &KVCacheCluster, found: &Found) -> Value {
    let (policy, pull_secrets) = pull(&cluster.spec.images);
    let managed = cluster.spec.etcd.managed.clone().unwrap_or_default();
    let reckoned = Reckoned { cpu_millis: CPU_MILLIS, memory: MEMORY_BYTES, beside: 0 };
    let port = |name: &str, port: u16| json!({ "name": name, "containerPort": port, "protocol": "TCP" });
    let container = json!({
        "name": "etcd",
        "image": found.images.etcd,
        "imagePullPolicy": policy,
        "args": arguments(&found.referred.names, managed.replicas),
        "env": [{
            "name": "POD_NAME",
            "valueFrom": { "fieldRef": { "apiVersion": "v1", "fieldPath": "metadata.name" } },
        }],
        "ports": [port("client", CLIENT_PORT), port("peer", PEER_PORT), port("metrics", METRICS_PORT)],
        "resources": resources(managed.resources.as_ref(), &reckoned),
        "securityContext": confined(),
        "startupProbe": startup(managed.replicas),
        "livenessProbe": probe("/livez", "metrics", 5, 6),
        "readinessProbe": probe("/readyz", "metrics", 2, 2),
        "volumeMounts": [
            { "name": ETCD_CLAIM, "mountPath": DATA_FOLDER },
            { "name": "tls", "mountPath": TLS_FOLDER, "readOnly": true },
        ],
    });
    without_empty(json!({
        "serviceAccountName": found.referred.names.etcd(),
        "automountServiceAccountToken": false,
        "imagePullSecrets": pull_secrets,
        "securityContext": restricted(),
        "topologySpreadConstraints": [{
            "maxSkew": 1,
            "topologyKey": cluster.spec.control_plane.spread_over,
            "whenUnsatisfiable": "ScheduleAnyway",
            "labelSelector": { "matchLabels": found.referred.names.selector(Component::Etcd) },
        }],
        "containers": [container],
        "volumes": [{ "name": "tls", "secret": { "secretName": found.referred.names.etcd_tls(), "defaultMode": 0o440 } }],
    }))
}

/// The start-up probe. etcd does not wait with its answer until it is ready, as our programs do, so the first probe comes when a normal start is
/// over: an etcd of one member leads itself at once, others have to find each other by names that are new.
fn startup(replicas: u8) -> Value {
    let mut probe = probe("/readyz", "metrics", 2, START_PROBES);
    probe["initialDelaySeconds"] = json!(if replicas == 1 { STARTS_ALONE_SECONDS } else { STARTS_SECONDS });
    probe
}

/// etcd reads its certificates at every handshake, so renewed ones need no restart; of its authorities see [`stage`].
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

    /// A StatefulSet whose controller has seen a generation, with so many pods.
    fn live(authority: Option<&str>, observed: i64, pods: u32) -> DynamicObject {
        let annotations = authority.map(|authority| json!({ AUTHORITY: authority }));
        let whole = json!({
            "metadata": { "name": "c-etcd", "generation": 2 },
            "spec": { "template": { "metadata": { "annotations": annotations } } },
            "status": { "observedGeneration": observed, "replicas": pods },
        });
        serde_json::from_value(whole).expect("an object")
    }

    fn stage_of(replicas: u8, authority: Option<&str>) -> Stage {
        Stage { replicas, authority: authority.map(str::to_owned) }
    }

    #[test]
    fn claims_are_owned_from_the_first_ready_member_on() {
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
        assert!(owns_claims(Some(&set("Delete", None))), "all members are away for a while");
    }

    #[test]
    fn a_new_authority_replaces_all_members_at_once() {
        for replicas in [1, 3, 5] {
            let new = stage_of(replicas, Some("new"));
            let step = |live: Option<&DynamicObject>| stage(replicas, Some("new"), live);
            assert_eq!(step(None), new, "they come into being");
            let none = stage_of(0, Some("old"));
            assert_eq!(step(Some(&live(Some("old"), 2, replicas.into()))), none, "they go");
            assert_eq!(step(Some(&live(Some("old"), 2, 1))), none, "one is left");
            assert_eq!(step(Some(&live(Some("old"), 1, 0))), none, "nobody has seen it");
            assert_eq!(step(Some(&live(Some("old"), 2, 0))), new, "none is left");
            assert_eq!(step(Some(&live(Some("new"), 1, 0))), new, "they come back");
            assert_eq!(step(Some(&live(Some("new"), 2, replicas.into()))), new, "they are back");
        }
    }

    #[test]
    fn members_stay_that_trust_the_same_or_nobody_knows_whom() {
        let same = stage_of(3, Some("a"));
        assert_eq!(stage(3, Some("a"), Some(&live(Some("a"), 2, 3))), same);
        assert_eq!(stage(3, None, Some(&live(Some("a"), 2, 3))), same, "certificates are contested");
        assert_eq!(stage(3, Some("a"), Some(&live(None, 2, 3))), same, "one after the other");
        assert_eq!(stage(3, None, None), stage_of(3, None));
    }
}
