//! What engines' pods get that ask for it: the directory of the agent's socket, and how to connect. Done by the API server itself, by a
//! policy in its expression language (CEL), so that no pod waits for a webhook of ours.
//!
//! Pods of a tenant are told which it is, and get a token by which the agent knows them: the policy looks their namespace and service account up
//! among the bindings that the operator keeps in a ConfigMap ([`super::identities`]).
//!
//! Containers get it, and init containers that go on beside them (`restartPolicy: Always`, sidecars): an engine's proxy or router may be one. Those that
//! end before the engine starts have no use for the socket.
//!
//! A pod asks by a label that names the cluster, in a namespace that the cluster selects. An annotation says what became of it: the
//! cluster that it was given, or why it was given nothing. A pod with that annotation is left alone.
//!
//! A policy that fails keeps no engine from starting; arguments that use the environment then say so.

use reprise_crds::KVCacheCluster;
use reprise_crds::cluster::InjectionMode;
use reprise_crds::fields::LabelSelector;
use reprise_policy::identity::TOKEN_AUDIENCE;
use serde_json::{Value, json};

use super::connection::{in_host_memory, offloading};
use crate::child::{Child, ChildKind, Ownership};
use crate::names::{ClusterNames, Component, INJECT, INJECTED_TENANT, INJECTION};

/// Name of the volume.
const VOLUME: &str = "reprise-socket";
/// Path of the socket, for programs that ask for it.
const SOCKET_VARIABLE: &str = "REPRISE_SOCKET";
/// vLLM's `--kv-transfer-config` where it keeps its KV in host memory: an argument may be `$(REPRISE_KV_TRANSFER_CONFIG)`.
const CONFIG_VARIABLE: &str = "REPRISE_KV_TRANSFER_CONFIG";
/// The same for engines on GPUs, as the ConfigMap has it for them. Which of the two an engine is, its pod does not say: the engine's argument does.
const GPU_CONFIG_VARIABLE: &str = "REPRISE_GPU_KV_TRANSFER_CONFIG";

/// Name of the volume with the token.
const TOKEN_VOLUME: &str = "reprise-token";
/// Where it is mounted.
const TOKEN_FOLDER: &str = "/var/run/secrets/reprise.dev";
/// How long a token holds; the kubelet replaces it in time.
const TOKEN_SECONDS: u32 = 3600;
/// Whose blocks the engine's are.
const TENANT_VARIABLE: &str = "REPRISE_TENANT";
/// Path of the token.
const TOKEN_VARIABLE: &str = "REPRISE_TOKEN_FILE";

/// The policy and its binding; none where no namespace is selected.
pub(super) fn build(cluster: &KVCacheCluster, names: &ClusterNames) -> Vec<Child> {
    let injection = &cluster.spec.injection;
    if injection.mode != InjectionMode::AdmissionPolicy
        || injection.namespace_selector == LabelSelector::default()
    {
        return Vec::new();
    }
    // They have no namespace, so they cannot have the cluster as their owner (`crate::sweep`).
    let metadata = || json!({ "name": names.injection(), "labels": names.labels(Component::Agent) });
    let policy = json!({ "spec": policy(cluster, names) });
    let whose =
        json!({ "name": names.tenants(), "namespace": names.namespace, "parameterNotFoundAction": "Allow" });
    let binding = json!({ "spec": { "policyName": names.injection(), "paramRef": whose } });
    let ours = Ownership::OursAlone;
    vec![
        Child::new(ChildKind::MutatingAdmissionPolicy, ours, metadata(), &policy),
        Child::new(ChildKind::MutatingAdmissionPolicyBinding, ours, metadata(), &binding),
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
            "expression": format!("!({} in object.metadata.?annotations.orValue({{}}))", literal(INJECTION)),
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

/// What pods of the namespace may.
const LEVEL: &str =
    "namespaceObject.metadata.?labels[?'pod-security.kubernetes.io/enforce'].orValue('privileged')";

/// Init containers that go on beside the others.
const SIDECARS: &str =
    "object.spec.?initContainers.orValue([]).filter(c, c.?restartPolicy.orValue('') == 'Always')";

/// Names of containers that have something there already.
const MOUNTING: &str = "(object.spec.containers.filter(c, c.?volumeMounts.orValue([]).exists(m, m.mountPath == \
                        variables.directory)).map(c, c.name) + variables.sidecars.filter(c, \
                        c.?volumeMounts.orValue([]).exists(m, m.mountPath == variables.directory)).map(c, c.name))";

/// Whose the pod is: by its service account, else by its namespace; empty: nobody's.
const TENANT: &str = "params.?data[?(namespaceObject.metadata.name + '.' + \
                      object.spec.?serviceAccountName.orValue('default'))].orValue(\
                      params.?data[?namespaceObject.metadata.name].orValue(''))";

/// Why a pod gets nothing; empty when it gets what it asks for.
fn refusal() -> String {
    format!(
        "variables.level in ['baseline', 'restricted'] ? 'its namespace enforces the pod security level ' + variables.level + ', which \
         forbids directories of nodes' : \
         object.spec.?volumes.orValue([]).exists(v, v.name == {volume}) ? 'it has a volume {VOLUME} already' : \
         size(variables.mounting) > 0 ? 'container ' + variables.mounting[0] + ' mounts something at ' + variables.directory + ' already' : ''",
        volume = literal(VOLUME),
    )
}

/// Writes down what becomes of the pod.
fn decision(names: &ClusterNames) -> String {
    let (key, given) = (literal(INJECTION), literal(&names.key()));
    let refused = literal(&format!("nothing of {}: ", names.key()));
    format!(
        "Object{{metadata: Object.metadata{{annotations: {{{key}: variables.refusal == '' ? {given} : {refused} + variables.refusal, \
         {tenant}: variables.refusal != '' || variables.tenant == '' ? 'none' : variables.tenant}}}}}}",
        tenant = literal(INJECTED_TENANT),
    )
}

/// Adds what it gets.
fn change(cluster: &KVCacheCluster) -> String {
    let directory = format!(
        "Object.spec.volumes{{name: {}, hostPath: Object.spec.volumes.hostPath{{path: variables.directory, type: 'DirectoryOrCreate'}}}}",
        literal(VOLUME)
    );
    format!(
        "variables.refusal != '' ? Object{{}} : Object{{spec: Object.spec{{\
         volumes: [{directory}], \
         containers: object.spec.containers.map(c, {container}), \
         initContainers: variables.sidecars.map(c, {sidecar})}}}}",
        container = container(cluster, "Object.spec.containers"),
        sidecar = container(cluster, "Object.spec.initContainers"),
    )
}

/// What a container `c` of a list gets. What it has set itself stays.
fn container(cluster: &KVCacheCluster, list: &str) -> String {
    let socket = format!("{}/agent.sock", cluster.spec.agents.socket.directory);
    let set = |name: &str, value: &str| format!("{list}.env{{name: {}, value: {value}}}", literal(name));
    let connection = [
        set(SOCKET_VARIABLE, &literal(&socket)),
        set(CONFIG_VARIABLE, &literal(&in_host_memory(&socket).to_string())),
        set(GPU_CONFIG_VARIABLE, &literal(&offloading(&socket).to_string())),
    ];
    let identity = [
        set(TENANT_VARIABLE, "variables.tenant"),
        set(TOKEN_VARIABLE, &literal(&format!("{TOKEN_FOLDER}/token"))),
    ];
    let mount = |volume: &str, at: &str| {
        let volume = literal(volume);
        format!("{list}.volumeMounts{{name: {volume}, mountPath: {at}, readOnly: true}}")
    };
    format!(
        "{list}{{name: c.name, volumeMounts: [{mount}] + {token_mounts}, \
         env: ([{connection}] + {identities}).filter(e, !c.?env.orValue([]).exists(own, own.name == e.name))}}",
        mount = mount(VOLUME, "variables.directory"),
        token_mounts = of_a_tenant(&mount(TOKEN_VOLUME, &literal(TOKEN_FOLDER))),
        connection = connection.join(", "),
        identities = of_a_tenant(&identity.join(", ")),
    )
}

/// Adds the volume with the token, where there is none of that name. A list of sources is one value to whoever applies, and none that a policy may
/// apply: so it is a patch.
fn token() -> String {
    let volume = literal(TOKEN_VOLUME);
    let value = format!(
        "Object.spec.volumes{{name: {volume}, projected: Object.spec.volumes.projected{{sources: [Object.spec.volumes.projected.sources{{\
         serviceAccountToken: Object.spec.volumes.projected.sources.serviceAccountToken{{\
         audience: {audience}, expirationSeconds: {TOKEN_SECONDS}, path: 'token'}}}}]}}}}",
        audience = literal(TOKEN_AUDIENCE)
    );
    let add = |path: &str, value: &str| format!("JSONPatch{{op: 'add', path: '{path}', value: {value}}}");
    // An object in a list is no value of a patch: the API server (1.36) fails to write it. So the list is made first, where there is none.
    format!(
        "variables.refusal != '' || variables.tenant == '' || object.spec.?volumes.orValue([]).exists(v, v.name == {volume}) ? [] : \
         (has(object.spec.volumes) ? [] : [{empty}]) + [{filled}]",
        empty = add("/spec/volumes", "[]"),
        filled = add("/spec/volumes/-", &value),
    )
}

/// A list that only pods of a tenant get.
fn of_a_tenant(items: &str) -> String {
    format!("(variables.tenant == '' ? [] : [{items}])")
}

/// A text as CEL writes it: JSON's strings are among its own.
fn literal(text: &str) -> String {
    json!(text).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn built(spec: &Value) -> Vec<Child> {
        let cluster: KVCacheCluster = serde_json::from_value(json!({
            "apiVersion": "reprise.dev/v1alpha1", "kind": "KVCacheCluster",
            "metadata": { "name": "c", "namespace": "n" }, "spec": spec,
        }))
        .expect("an object");
        build(&cluster, &ClusterNames::of(&cluster))
    }

    #[test]
    fn nothing_is_injected_where_no_namespace_is_selected() {
        assert_eq!(built(&json!({})), []);
        assert_eq!(built(&json!({ "injection": { "mode": "AdmissionPolicy" } })), []);
        let selector = json!({ "matchLabels": { "engines": "yes" } });
        let made =
            built(&json!({ "injection": { "mode": "AdmissionPolicy", "namespaceSelector": selector } }));
        let [policy, binding] = made.as_slice() else { panic!("{made:?}") };
        let constraints = &policy.body["spec"]["matchConstraints"];
        assert_eq!(constraints["namespaceSelector"], selector);
        assert_eq!(constraints["objectSelector"]["matchLabels"][INJECT], "c");
        assert_eq!(binding.body["spec"]["policyName"], json!(policy.name));
    }

    #[test]
    fn texts_are_quoted_so_that_none_ends_early() {
        assert_eq!(literal("/run/it's \"here\""), r#""/run/it's \"here\"""#);
    }
}
