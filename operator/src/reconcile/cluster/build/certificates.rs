//! Certificates of agents and members: the ConfigMap of trusted authorities, and the sidecar that keeps the certificate
//! of a pod ([`crate::signing::certificate`]).
//!
//! The sidecar is an init container that keeps running (`restartPolicy: Always`): the pod's process starts after its
//! probe has found a valid certificate, and ends before it. Key and certificate are in a volume in memory, which only
//! the containers of the pod share. The sidecar alone has a token for the API server in pods of members.

use reprise_crds::KVCacheCluster;
use reprise_identity::credentials::AUTHORITIES_FILE;
use serde_json::{Value, json};

use super::metadata::{config_map, metadata};
use super::pods::{pull, unprivileged};
use crate::framework::child::{Child, ChildKind};
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
/// ClusterRole of members, which the chart creates.
const MEMBER_ROLE: &str = "reprise-member";
/// Time in which the operator answers a request, with an operator that starts at the same time.
const STARTS_SECONDS: u32 = 600;
/// Time for one probe, which waits ([`CHECK_WAITS`](crate::signing::certificate::CHECK_WAITS)).
const PROBE_SECONDS: u32 = 60;

/// Pods with a certificate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Process {
    /// The agent of a node. Its pod has a token anyway.
    Agent,
    /// A member of the control plane.
    Member,
}

/// ConfigMap of the trusted authorities, and the members' permission to request certificates.
pub(super) fn build(cluster: &KVCacheCluster, inputs: &ClusterInputs) -> Vec<Child> {
    let names = &inputs.agent_config.names;
    let authorities = inputs.certificates.trusted().map(|trusted| {
        let metadata = metadata(cluster, names, Component::ControlPlane, &names.authorities());
        config_map(metadata, &json!({ AUTHORITIES_FILE: trusted }))
    });
    let metadata = json!({ "name": names.member_binding(), "labels": names.labels(Component::ControlPlane) });
    let rest = json!({
        "roleRef": { "apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": MEMBER_ROLE },
        "subjects": [{ "kind": "ServiceAccount", "name": names.control_plane(), "namespace": names.namespace }],
    });
    let binding = Child::new(ChildKind::ClusterRoleBinding, metadata, &rest);
    authorities.into_iter().chain([binding]).collect()
}

/// Adds the sidecar and its volumes to a pod whose first container is the process.
pub(super) fn add_to(pod: &mut Value, cluster: &KVCacheCluster, inputs: &ClusterInputs, process: Process) {
    let names = &inputs.agent_config.names;
    pod["initContainers"] = json!([sidecar(cluster, inputs, process)]);
    let mut add = |volume: Value| pod["volumes"].as_array_mut().expect("made by us").push(volume);
    add(json!({ "name": CERTIFICATES, "emptyDir": { "medium": "Memory", "sizeLimit": "1Mi" } }));
    add(json!({ "name": AUTHORITIES, "configMap": { "name": names.authorities() } }));
    if process == Process::Member {
        add(token());
    }
    let mounts = pod["containers"][0]["volumeMounts"].as_array_mut().expect("made by us");
    mounts.push(json!({ "name": CERTIFICATES, "mountPath": CERTIFICATES_FOLDER, "readOnly": true }));
}

fn sidecar(cluster: &KVCacheCluster, inputs: &ClusterInputs, process: Process) -> Value {
    let names = &inputs.agent_config.names;
    let arguments = arguments();
    let mut check: Vec<String> = vec![PROGRAM.to_owned()];
    check.extend(arguments.iter().cloned());
    check.push("--check".to_owned());
    let mut mounts = vec![
        json!({ "name": CERTIFICATES, "mountPath": CERTIFICATES_FOLDER }),
        json!({ "name": AUTHORITIES, "mountPath": AUTHORITIES_FOLDER, "readOnly": true }),
    ];
    let mut sidecar = json!({
        "name": "certificate",
        "image": inputs.images.operator,
        "imagePullPolicy": pull(&cluster.spec.images).0,
        "restartPolicy": "Always",
        "args": arguments,
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
    });
    let cluster = names.in_certificates();
    let identity = |role: &str| json!({ "name": IDENTITY, "value": format!("reprise://{cluster}/{role}") });
    match process {
        Process::Agent => {
            let node = json!({ "apiVersion": "v1", "fieldPath": "spec.nodeName" });
            let node = json!({ "name": "NODE_NAME", "valueFrom": { "fieldRef": node } });
            sidecar["env"] = json!([node, identity("agent/$(NODE_NAME)")]);
        }
        Process::Member => {
            sidecar["env"] = json!([identity("member")]);
            mounts.push(json!({ "name": TOKEN, "mountPath": TOKEN_FOLDER, "readOnly": true }));
        }
    }
    sidecar["volumeMounts"] = json!(mounts);
    sidecar
}

fn arguments() -> Vec<String> {
    vec![
        "certificate".to_owned(),
        format!("--folder={CERTIFICATES_FOLDER}"),
        format!("--authorities={AUTHORITIES_FOLDER}/{AUTHORITIES_FILE}"),
    ]
}

/// Volume with a token, as the kubelet mounts it by default. The pods of members mount none by default, so that the
/// members have no access to the API server.
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
