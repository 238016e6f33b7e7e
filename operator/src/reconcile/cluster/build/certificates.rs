//! Certificates of agents, members and etcd: the ConfigMap of trusted authorities, and the sidecar that keeps the certificate
//! of a pod ([`crate::signing::certificate`]).
//!
//! The sidecar is an init container that keeps running (`restartPolicy: Always`): the pod's process starts after its
//! probe has found a valid certificate, and ends before it. Key and certificate are in a volume that only the containers
//! of the pod share: in memory, or the data volume of etcd ([`crate::reconcile::cluster::etcd`]). The sidecar alone has a
//! token for the API server in pods of members and etcd.

use reprise_crds::KVCacheCluster;
use reprise_identity::credentials::AUTHORITIES_FILE;
use serde_json::{Value, json};

use super::metadata::{config_map, metadata, role_binding};
use super::pods::{Volumes, field_variable, pull, unprivileged};
use crate::framework::child::Child;
use crate::reconcile::cluster::dereference::ClusterInputs;
use crate::reconcile::cluster::etcd;
use crate::reconcile::names::Component;

/// Folder of the process's certificate, key and trusted authorities.
pub const CERTIFICATES_FOLDER: &str = "/run/reprise/certificates";
/// Folder of the trusted authorities, which the kubelet updates.
const AUTHORITIES_FOLDER: &str = "/etc/reprise-authorities";
/// Folder in which clients of the API server expect the token.
const TOKEN_FOLDER: &str = "/var/run/secrets/kubernetes.io/serviceaccount";
/// Lifetime of tokens; the kubelet renews them.
const TOKEN_SECONDS: u32 = 3600;
/// ClusterRole of members and etcd, which the chart creates.
const MEMBER_ROLE: &str = "reprise-member";
/// Time in which the operator answers a request, with an operator that starts at the same time.
const STARTS_SECONDS: u32 = 600;
/// Time for one probe, which waits ([`CHECK_WAITS`](crate::signing::certificate::CHECK_WAITS)).
const PROBE_SECONDS: u32 = 60;

/// ConfigMap of the trusted authorities, and the permission of members and etcd to request certificates.
pub(super) fn build(cluster: &KVCacheCluster, inputs: &ClusterInputs) -> Vec<Child> {
    let names = &inputs.agent_config.names;
    let authorities = inputs.certificates.trusted().map(|trusted| {
        let metadata = metadata(cluster, names, Component::ControlPlane, &names.authorities());
        config_map(metadata, &json!({ AUTHORITIES_FILE: trusted }))
    });
    let accounts: Vec<String> =
        [names.control_plane()].into_iter().chain(etcd::managed(cluster).map(|_| names.etcd())).collect();
    let binding =
        role_binding(names, Component::ControlPlane, &names.member_binding(), MEMBER_ROLE, &accounts);
    authorities.into_iter().chain([binding]).collect()
}

/// Returns the sidecar of a pod, and adds its volumes and the mount of the pod's process.
pub(crate) fn sidecar(
    cluster: &KVCacheCluster,
    inputs: &ClusterInputs,
    component: Component,
    volumes: &mut Volumes,
) -> Value {
    let names = &inputs.agent_config.names;
    let authorities = json!({ "name": "authorities", "mountPath": AUTHORITIES_FOLDER, "readOnly": true });
    let (mut mounts, mut variables) = (vec![authorities], Vec::new());
    let mut folder = CERTIFICATES_FOLDER;
    if component == Component::Etcd {
        folder = etcd::CERTIFICATES_FOLDER;
        mounts.push(json!({ "name": etcd::DATA_VOLUME, "mountPath": etcd::DATA_FOLDER }));
    } else {
        let memory = json!({ "emptyDir": { "medium": "Memory", "sizeLimit": "1Mi" } });
        volumes.add("certificates", memory, folder);
        mounts.push(json!({ "name": "certificates", "mountPath": folder }));
    }
    volumes.volumes.push(json!({ "name": "authorities", "configMap": { "name": names.authorities() } }));
    // The pod of an agent has a token anyway.
    if component == Component::Agent {
        variables.push(field_variable("NODE_NAME", "spec.nodeName"));
    } else {
        volumes.volumes.push(token());
        mounts.push(json!({ "name": "api-token", "mountPath": TOKEN_FOLDER, "readOnly": true }));
    }
    let role = match component {
        Component::Agent => "agent/$(NODE_NAME)",
        Component::ControlPlane => "member",
        Component::Etcd => "etcd",
    };
    // Kubernetes replaces `$(NODE_NAME)` in variables, but not in the commands of probes.
    let identity = format!("reprise://{}/{role}", names.in_certificates());
    variables.push(json!({ "name": "REPRISE_IDENTITY", "value": identity }));
    let folder = format!("--folder={folder}");
    let authorities = format!("--authorities={AUTHORITIES_FOLDER}/{AUTHORITIES_FILE}");
    json!({
        "name": "certificate",
        "image": inputs.images.operator,
        "imagePullPolicy": pull(&cluster.spec.images).0,
        "restartPolicy": "Always",
        "args": ["certificate", folder, authorities],
        "env": variables,
        "resources": {
            "requests": { "cpu": "10m", "memory": "32Mi" },
            "limits": { "memory": "64Mi" },
        },
        "securityContext": unprivileged(),
        // The check is a process, because files are the only interface between the containers.
        "startupProbe": {
            "exec": { "command": ["/reprise-operator", "certificate", folder, authorities, "--check"] },
            "periodSeconds": 1,
            "timeoutSeconds": PROBE_SECONDS,
            "failureThreshold": STARTS_SECONDS / PROBE_SECONDS,
        },
        "volumeMounts": mounts,
    })
}

/// Volume with a token, as the kubelet mounts it by default. The pods of members and etcd mount none by default, so that
/// these have no access to the API server.
fn token() -> Value {
    json!({
        "name": "api-token",
        "projected": { "defaultMode": 0o644, "sources": [
            { "serviceAccountToken": { "path": "token", "expirationSeconds": TOKEN_SECONDS } },
            { "configMap": { "name": "kube-root-ca.crt", "items": [{ "key": "ca.crt", "path": "ca.crt" }] } },
            { "downwardAPI": { "items": [{
                "path": "namespace", "fieldRef": { "apiVersion": "v1", "fieldPath": "metadata.namespace" },
            }] } },
        ] },
    })
}
