//! Admission policy that connects engine pods: it mounts the directory of the agent's socket and sets the
//! connection environment. The API server evaluates it (CEL), so no pod depends on a webhook.
//!
//! Pods of a tenant also get its name, and a token by which the agent authenticates them. The policy looks up
//! their namespace and service account in the ConfigMap that the operator maintains ([`super::identities`]).
//!
//! It applies to containers and to sidecars (init containers with `restartPolicy: Always`), such as an
//! engine's proxy or router. Other init containers exit before the engine starts and do not need the socket.
//!
//! A pod requests this with a label that names the cluster, in a namespace that the cluster selects. An
//! annotation records the result: the connected cluster, or why the pod was not connected. Pods that have the
//! annotation already are not changed.
//!
//! If the policy fails, the engine starts unchanged. Arguments that use the environment variables then fail
//! visibly.

use reprise_crds::KVCacheCluster;
use reprise_crds::cluster::InjectionMode;
use reprise_crds::fields::LabelSelector;
use reprise_policy::identity::TOKEN_AUDIENCE;
use serde_json::{Value, json};

use super::connection::{in_host_memory, offloading, socket};
use crate::framework::child::{Child, ChildKind};
use crate::reconcile::names::{ClusterNames, Component, INJECT, INJECTED_TENANT, INJECTION};

/// Names of the volumes of socket and token.
const SOCKET_VOLUME: &str = "reprise-socket";
const TOKEN_VOLUME: &str = "reprise-token";
/// Directory of the token.
const TOKEN_FOLDER: &str = "/var/run/secrets/reprise.dev";
/// Lifetime of a token in seconds; the kubelet renews it in time.
const TOKEN_SECONDS: u32 = 3600;

/// Returns the policy and its binding; nothing if no namespace is selected.
pub(super) fn build(cluster: &KVCacheCluster, names: &ClusterNames) -> Vec<Child> {
    let injection = &cluster.spec.injection;
    if injection.mode != InjectionMode::AdmissionPolicy
        || injection.namespace_selector == LabelSelector::default()
    {
        return Vec::new();
    }
    // They are not namespaced, so the cluster cannot own them (`crate::reconcile::orphans`).
    let metadata = || json!({ "name": names.injection(), "labels": names.labels(Component::Agent) });
    let policy = json!({ "spec": policy(cluster, names) });
    let parameters =
        json!({ "name": names.tenants(), "namespace": names.namespace, "parameterNotFoundAction": "Allow" });
    let binding = json!({ "spec": { "policyName": names.injection(), "paramRef": parameters } });
    vec![
        Child::new(ChildKind::MutatingAdmissionPolicy, metadata(), &policy),
        Child::new(ChildKind::MutatingAdmissionPolicyBinding, metadata(), &binding),
    ]
}

fn policy(cluster: &KVCacheCluster, names: &ClusterNames) -> Value {
    let variable = |name: &str, expression: String| json!({ "name": name, "expression": expression });
    let patch =
        |expression: String| json!({ "patchType": "JSONPatch", "jsonPatch": { "expression": expression } });
    let apply = |expression: String| json!({ "patchType": "ApplyConfiguration", "applyConfiguration": { "expression": expression } });
    json!({
        "failurePolicy": "Ignore",
        "reinvocationPolicy": "Never",
        "paramKind": { "apiVersion": "v1", "kind": "ConfigMap" },
        "matchConstraints": {
            "namespaceSelector": cluster.spec.injection.namespace_selector,
            "objectSelector": { "matchLabels": { INJECT: names.name } },
            "resourceRules": [{ "apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"] }],
        },
        "matchConditions": [{
            "name": "nothing-was-decided-yet",
            "expression": format!("!('{INJECTION}' in object.metadata.?annotations.orValue({{}}))"),
        }],
        "variables": [
            variable("directory", literal(cluster.spec.agents.socket.directory.as_str())),
            variable("level", LEVEL.to_owned()),
            variable("sidecars", SIDECARS.to_owned()),
            variable("mounting", MOUNTING.to_owned()),
            variable("tenant", TENANT.to_owned()),
            variable("refusal", refusal()),
        ],
        "mutations": [apply(decision(names)), patch(token()), apply(change(cluster))],
    })
}

/// CEL: enforced Pod Security level of the namespace.
const LEVEL: &str =
    "namespaceObject.metadata.?labels[?'pod-security.kubernetes.io/enforce'].orValue('privileged')";

/// CEL: init containers that run next to the containers.
const SIDECARS: &str =
    "object.spec.?initContainers.orValue([]).filter(c, c.?restartPolicy.orValue('') == 'Always')";

/// CEL: names of containers that already mount a volume at the directory.
const MOUNTING: &str = "(object.spec.containers.filter(c, c.?volumeMounts.orValue([]).exists(m, m.mountPath == \
                        variables.directory)).map(c, c.name) + variables.sidecars.filter(c, \
                        c.?volumeMounts.orValue([]).exists(m, m.mountPath == variables.directory)).map(c, c.name))";

/// CEL: tenant of the pod, by its service account, else by its namespace; empty without a tenant.
const TENANT: &str = "params.?data[?(namespaceObject.metadata.name + '.' + \
                      object.spec.?serviceAccountName.orValue('default'))].orValue(\
                      params.?data[?namespaceObject.metadata.name].orValue(''))";

/// CEL: why a pod is not connected; empty if it is.
fn refusal() -> String {
    format!(
        "variables.level in ['baseline', 'restricted'] ? 'its namespace enforces the pod security level ' + variables.level + ', which \
         forbids hostPath volumes' : \
         object.spec.?volumes.orValue([]).exists(v, v.name == '{SOCKET_VOLUME}') ? 'it already has a volume {SOCKET_VOLUME}' : \
         size(variables.mounting) > 0 ? 'container ' + variables.mounting[0] + ' already mounts a volume at ' + variables.directory : ''"
    )
}

/// CEL: records the result in annotations.
fn decision(names: &ClusterNames) -> String {
    let key = names.key();
    format!(
        "Object{{metadata: Object.metadata{{annotations: {{\
         '{INJECTION}': variables.refusal == '' ? '{key}' : 'not connected to {key}: ' + variables.refusal, \
         '{INJECTED_TENANT}': variables.refusal != '' || variables.tenant == '' ? 'none' : variables.tenant}}}}}}"
    )
}

/// CEL: adds volumes, mounts and environment.
fn change(cluster: &KVCacheCluster) -> String {
    format!(
        "variables.refusal != '' ? Object{{}} : Object{{spec: Object.spec{{\
         volumes: [Object.spec.volumes{{name: '{SOCKET_VOLUME}', hostPath: Object.spec.volumes.hostPath{{\
         path: variables.directory, type: 'DirectoryOrCreate'}}}}], \
         containers: object.spec.containers.map(c, {container}), \
         initContainers: variables.sidecars.map(c, {sidecar})}}}}",
        container = container(cluster, "Object.spec.containers"),
        sidecar = container(cluster, "Object.spec.initContainers"),
    )
}

/// CEL: additions to container `c` of a list. Settings of the container itself are kept. The engine's argument decides
/// which of both configurations applies (`--kv-transfer-config=$(REPRISE_KV_TRANSFER_CONFIG)`); the pod spec does not show it.
fn container(cluster: &KVCacheCluster, list: &str) -> String {
    let socket = socket(cluster);
    let set = |name: &str, value: &str| format!("{list}.env{{name: '{name}', value: {value}}}");
    let connection = [
        set("REPRISE_SOCKET", &literal(&socket)),
        set("REPRISE_KV_TRANSFER_CONFIG", &literal(&in_host_memory(&socket).to_string())),
        set("REPRISE_GPU_KV_TRANSFER_CONFIG", &literal(&offloading(&socket).to_string())),
    ];
    let identity = [
        set("REPRISE_TENANT", "variables.tenant"),
        set("REPRISE_TOKEN_FILE", &literal(&format!("{TOKEN_FOLDER}/token"))),
    ];
    let mount = |volume: &str, at: &str| {
        format!("{list}.volumeMounts{{name: '{volume}', mountPath: {at}, readOnly: true}}")
    };
    format!(
        "{list}{{name: c.name, volumeMounts: [{mount}] + {token_mounts}, \
         env: ([{connection}] + {identities}).filter(e, !c.?env.orValue([]).exists(own, own.name == e.name))}}",
        mount = mount(SOCKET_VOLUME, "variables.directory"),
        token_mounts = of_a_tenant(&mount(TOKEN_VOLUME, &literal(TOKEN_FOLDER))),
        connection = connection.join(", "),
        identities = of_a_tenant(&identity.join(", ")),
    )
}

/// CEL: adds the token volume unless a volume of that name exists. The sources of a projected volume are an
/// atomic list in server-side apply, which a policy cannot apply; hence a JSON patch.
fn token() -> String {
    let value = format!(
        "Object.spec.volumes{{name: '{TOKEN_VOLUME}', projected: Object.spec.volumes.projected{{sources: [\
         Object.spec.volumes.projected.sources{{\
         serviceAccountToken: Object.spec.volumes.projected.sources.serviceAccountToken{{\
         audience: '{TOKEN_AUDIENCE}', expirationSeconds: {TOKEN_SECONDS}, path: 'token'}}}}]}}}}"
    );
    let add = |path: &str, value: &str| format!("JSONPatch{{op: 'add', path: '{path}', value: {value}}}");
    // The API server (1.36) cannot encode an object inside a new list in a patch. If there is no list, it is
    // therefore created first.
    format!(
        "variables.refusal != '' || variables.tenant == '' || object.spec.?volumes.orValue([]).exists(v, v.name == '{TOKEN_VOLUME}') \
         ? [] : (has(object.spec.volumes) ? [] : [{empty}]) + [{filled}]",
        empty = add("/spec/volumes", "[]"),
        filled = add("/spec/volumes/-", &value),
    )
}

/// CEL: a list that only pods of a tenant get.
fn of_a_tenant(items: &str) -> String {
    format!("(variables.tenant == '' ? [] : [{items}])")
}

/// A CEL string literal. JSON strings are valid CEL.
fn literal(text: &str) -> String {
    json!(text).to_string()
}
