//! Certificates of agents, members and etcd: the ConfigMap of trusted authorities, and the sidecar that keeps the certificate
//! of a pod ([`crate::signing::certificate`]).
//!
//! The sidecar is an init container that keeps running (`restartPolicy: Always`): the pod's process starts after its
//! probe has found a valid certificate, and ends before it. Key and certificate are in a volume that only the containers
//! of the pod share: in memory, or the data volume of etcd ([`crate::reconcile::cluster::etcd`]). The sidecar alone has a
//! token for the API server in pods of members and etcd.

use reprise_crds::KVCacheCluster;
use reprise_crds::cluster::EtcdMode;
use reprise_identity::credentials::AUTHORITIES_FILE;
use serde_json::{Value, json};

use super::metadata::{config_map, metadata, role_binding};
use super::pods::{append, field_variable, pull, unprivileged};
use crate::framework::child::Child;
use crate::reconcile::cluster::etcd;
use crate::reconcile::cluster::inputs::ClusterInputs;
use crate::reconcile::names::Component;

/// Folder of the process's certificate, key and trusted authorities.
pub const CERTIFICATES_FOLDER: &str = "/run/reprise/certificates";
/// Folder of the trusted authorities, which the kubelet updates.
const AUTHORITIES_FOLDER: &str = "/etc/reprise-authorities";
/// Folder in which clients of the API server expect the token.
const TOKEN_FOLDER: &str = "/var/run/secrets/kubernetes.io/serviceaccount";
/// Names of the volumes.
const CERTIFICATES: &str = "certificates";
const AUTHORITIES: &str = "authorities";
const TOKEN: &str = "api-token";
/// Variable with the identity. Kubernetes replaces `$(NODE_NAME)` in variables, but not in the commands of probes.
const IDENTITY: &str = "REPRISE_IDENTITY";
/// Program in the operator's image.
const PROGRAM: &str = "/reprise-operator";
/// Lifetime of tokens; the kubelet renews them.
const TOKEN_SECONDS: u32 = 3600;
/// ClusterRole of members and etcd, which the chart creates.
const MEMBER_ROLE: &str = "reprise-member";
/// Time in which the operator answers a request, with an operator that starts at the same time.
const STARTS_SECONDS: u32 = 600;
/// Time for one probe, which waits ([`CHECK_WAITS`](crate::signing::certificate::CHECK_WAITS)).
const PROBE_SECONDS: u32 = 60;

/// Pods with a certificate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Process {
    /// The agent of a node. Its pod has a token anyway.
    Agent,
    /// A member of the control plane.
    Member,
    /// A member of a managed etcd.
    Etcd,
}

/// ConfigMap of the trusted authorities, and the permission of members and etcd to request certificates.
pub(super) fn build(cluster: &KVCacheCluster, inputs: &ClusterInputs) -> Vec<Child> {
    let names = &inputs.agent_config.names;
    let authorities = inputs.certificates.trusted().map(|trusted| {
        let metadata = metadata(cluster, names, Component::ControlPlane, &names.authorities());
        config_map(metadata, &json!({ AUTHORITIES_FILE: trusted }))
    });
    let mut accounts = vec![names.control_plane()];
    if cluster.spec.etcd.mode == EtcdMode::Managed {
        accounts.push(names.etcd());
    }
    let binding =
        role_binding(names, Component::ControlPlane, &names.member_binding(), MEMBER_ROLE, &accounts);
    authorities.into_iter().chain([binding]).collect()
}

impl Process {
    /// Identity of the process, after the name of the cluster.
    fn role(self) -> &'static str {
        match self {
            Process::Agent => "agent/$(NODE_NAME)",
            Process::Member => "member",
            Process::Etcd => "etcd",
        }
    }

    /// Mount of the volume with certificate and key, and their folder in it.
    fn mount(self) -> (Value, &'static str) {
        let (volume, path, folder) = match self {
            Process::Agent | Process::Member => (CERTIFICATES, CERTIFICATES_FOLDER, CERTIFICATES_FOLDER),
            Process::Etcd => (etcd::DATA_VOLUME, etcd::DATA_FOLDER, etcd::CERTIFICATES_FOLDER),
        };
        (json!({ "name": volume, "mountPath": path }), folder)
    }
}

/// Adds the sidecar and its volumes to a pod whose first container is the process.
pub(crate) fn add_to(pod: &mut Value, cluster: &KVCacheCluster, inputs: &ClusterInputs, process: Process) {
    let names = &inputs.agent_config.names;
    pod["initContainers"] = json!([sidecar(cluster, inputs, process)]);
    let mut add = |volume: Value| append(&mut pod["volumes"], volume);
    if process != Process::Etcd {
        add(json!({ "name": CERTIFICATES, "emptyDir": { "medium": "Memory", "sizeLimit": "1Mi" } }));
    }
    add(json!({ "name": AUTHORITIES, "configMap": { "name": names.authorities() } }));
    if process != Process::Agent {
        add(token());
    }
    if process != Process::Etcd {
        let mount = json!({ "name": CERTIFICATES, "mountPath": CERTIFICATES_FOLDER, "readOnly": true });
        append(&mut pod["containers"][0]["volumeMounts"], mount);
    }
}

fn sidecar(cluster: &KVCacheCluster, inputs: &ClusterInputs, process: Process) -> Value {
    let (certificates, folder) = process.mount();
    let arguments = [
        "certificate".to_owned(),
        format!("--folder={folder}"),
        format!("--authorities={AUTHORITIES_FOLDER}/{AUTHORITIES_FILE}"),
    ];
    let check = [&[PROGRAM.to_owned()], arguments.as_slice(), &["--check".to_owned()]].concat();
    let mut mounts =
        vec![certificates, json!({ "name": AUTHORITIES, "mountPath": AUTHORITIES_FOLDER, "readOnly": true })];
    if process != Process::Agent {
        mounts.push(json!({ "name": TOKEN, "mountPath": TOKEN_FOLDER, "readOnly": true }));
    }
    let node = field_variable("NODE_NAME", "spec.nodeName");
    let identity = format!("reprise://{}/{}", inputs.agent_config.names.in_certificates(), process.role());
    let identity = json!({ "name": IDENTITY, "value": identity });
    let variables = if process == Process::Agent { vec![node, identity] } else { vec![identity] };
    json!({
        "name": "certificate",
        "image": inputs.images.operator,
        "imagePullPolicy": pull(&cluster.spec.images).0,
        "restartPolicy": "Always",
        "args": arguments,
        "env": variables,
        "resources": {
            "requests": { "cpu": "10m", "memory": "32Mi" },
            "limits": { "memory": "64Mi" },
        },
        "securityContext": unprivileged(),
        // The check is a process, because files are the only interface between the containers.
        "startupProbe": {
            "exec": { "command": check },
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
        "name": TOKEN,
        "projected": { "defaultMode": 0o644, "sources": [
            { "serviceAccountToken": { "path": "token", "expirationSeconds": TOKEN_SECONDS } },
            { "configMap": { "name": "kube-root-ca.crt", "items": [{ "key": "ca.crt", "path": "ca.crt" }] } },
            { "downwardAPI": { "items": [{
                "path": "namespace", "fieldRef": { "apiVersion": "v1", "fieldPath": "metadata.namespace" },
            }] } },
        ] },
    })
}
