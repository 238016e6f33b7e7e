//! Pods that ask for an agent's socket get it from the API server itself, or are told why not.

use kube::ResourceExt;
use kube::api::{Api, ApiResource, DynamicObject, Patch, PatchParams, PostParams};
use kube::core::GroupVersionKind;
use reprise_e2e::{PATIENCE, wait_until};
use serde_json::{Value, json};

use crate::lab::{Lab, SOMEBODY, SPACE};

/// Selected by the cluster.
const ENGINES: &str = "engines";
/// Selected too, and takes no directories of nodes.
const STRICT: &str = "strict";
/// Not selected.
const OTHERS: &str = "others";

const ANNOTATION: &str = "reprise.dev/injection";

#[test]
fn pods_that_ask_get_the_socket_and_how_to_connect_and_others_are_left_alone() {
    let lab = Lab::new();
    spaces(&lab);
    let operator = lab.operator();
    lab.cluster(injecting());
    wait_for_the_policy(&lab);

    let pod = create(&lab, ENGINES, asks(container(json!({ "env": [{ "name": "OWN", "value": "kept" }] }))));
    assert_eq!(pod.annotations()[ANNOTATION], "cache/c");
    let spec = &pod.data["spec"];
    let volume = &spec["volumes"].as_array().expect("volumes")[0];
    assert_eq!(volume["hostPath"], json!({ "path": "/run/reprise", "type": "DirectoryOrCreate" }));
    let engine = &spec["containers"][0];
    assert_eq!(engine["image"], "engine:1");
    let mounts = engine["volumeMounts"].as_array().expect("mounts");
    assert_eq!(*mounts, [json!({ "name": volume["name"], "mountPath": "/run/reprise", "readOnly": true })]);
    assert_eq!(variable(engine, "OWN"), "kept");
    assert_eq!(variable(engine, "REPRISE_SOCKET"), "/run/reprise/agent.sock");
    let published = lab.get("ConfigMap", "c-connection").expect("it is there").data["data"].clone();
    for (name, file, connector) in [
        ("REPRISE_KV_TRANSFER_CONFIG", "vllm-kv-transfer-config.json", "RepriseConnector"),
        ("REPRISE_GPU_KV_TRANSFER_CONFIG", "vllm-gpu-kv-transfer-config.json", "RepriseOffloadingConnector"),
    ] {
        let config: Value = serde_json::from_str(&variable(engine, name)).expect("JSON");
        assert_eq!(config["kv_connector"], connector, "{name}");
        let published = published[file].as_str().expect("a text");
        assert_eq!(
            config,
            serde_json::from_str::<Value>(published).expect("JSON"),
            "as the ConfigMap has it"
        );
    }

    // Init containers that go on beside the engine get it as well, and those that end before it do not.
    let init = json!([
        { "name": "first", "image": "first:1" },
        { "name": "proxy", "image": "proxy:1", "restartPolicy": "Always", "env": [{ "name": "OWN", "value": "kept" }] },
    ]);
    let mut spec = container(json!({}));
    spec["initContainers"] = init.clone();
    let pod = create(&lab, ENGINES, asks(spec));
    let [first, proxy] = pod.data["spec"]["initContainers"].as_array().expect("as sent").as_slice() else {
        panic!("{}", pod.data["spec"])
    };
    assert_eq!(
        (&first["name"], &first["env"], &first["volumeMounts"]),
        (&init[0]["name"], &Value::Null, &Value::Null)
    );
    assert_eq!((&proxy["name"], &proxy["restartPolicy"]), (&init[1]["name"], &json!("Always")));
    assert_eq!(proxy["volumeMounts"], engine["volumeMounts"]);
    assert_eq!(variable(proxy, "OWN"), "kept");
    assert_eq!(variable(proxy, "REPRISE_SOCKET"), "/run/reprise/agent.sock");
    assert!(has_variable(&pod.data["spec"]["containers"][0], "REPRISE_SOCKET"));

    // What a container says itself stays.
    let own = json!({ "env": [{ "name": "REPRISE_SOCKET", "value": "/mine.sock" }] });
    let pod = create(&lab, ENGINES, asks(container(own)));
    assert_eq!(variable(&pod.data["spec"]["containers"][0], "REPRISE_SOCKET"), "/mine.sock");

    // Who does not ask, asks somebody else, or is where nobody may ask.
    let label = |cluster: &str| json!({ "reprise.dev/inject": cluster });
    for (space, labels) in [(ENGINES, json!({})), (ENGINES, label("other")), (OTHERS, label("c"))] {
        let pod = create(&lab, space, (labels.clone(), container(json!({}))));
        let what = format!("{space} {labels}");
        assert!(!pod.annotations().contains_key(ANNOTATION), "{what}");
        assert_eq!(pod.data["spec"]["containers"][0]["env"], Value::Null, "{what}");
    }
    operator.kill();
}

#[test]
fn pods_of_a_tenant_are_told_which_and_get_a_token_for_agents() {
    let lab = Lab::new();
    spaces(&lab);
    let operator = lab.operator();
    lab.cluster(injecting());
    let kind = json!({ "apiVersion": "reprise.dev/v1alpha1", "kind": "CacheTenant" });
    let tenant = |name: &str, spec: Value| {
        let mut object = kind.clone();
        (object["metadata"], object["spec"]) = (json!({ "name": name }), spec);
        lab.apply(&object);
    };
    tenant(
        "team-a",
        json!({ "namespaceSelector": { "matchLabels": { "kubernetes.io/metadata.name": ENGINES } } }),
    );
    tenant("team-b", json!({ "serviceAccounts": [{ "namespace": ENGINES, "name": "batch" }] }));
    wait_for_the_policy(&lab);
    account(&lab, ENGINES, "batch");
    let of_tenant = |account: &str, tenant: &str| {
        let mut spec = container(json!({}));
        spec["serviceAccountName"] = json!(account);
        wait_until(&format!("pods of {account} to be {tenant}'s"), PATIENCE, || {
            let pod = create(&lab, ENGINES, asks(spec.clone()));
            let engine = pod.data["spec"]["containers"][0].clone();
            (has_variable(&engine, "REPRISE_TENANT") && variable(&engine, "REPRISE_TENANT") == tenant)
                .then_some(pod)
        })
    };
    of_tenant("batch", "team-b");
    let pod = of_tenant("default", "team-a");
    let spec = &pod.data["spec"];
    let volumes = spec["volumes"].as_array().expect("volumes");
    let token = volumes.iter().find(|volume| volume["name"] == "reprise-token").expect("a token");
    let source = json!({ "audience": "reprise.dev", "expirationSeconds": 3600, "path": "token" });
    assert_eq!(token["projected"]["sources"], json!([{ "serviceAccountToken": source }]));
    let engine = &spec["containers"][0];
    let file = variable(engine, "REPRISE_TOKEN_FILE");
    let mounts = engine["volumeMounts"].as_array().expect("mounts");
    let mount = mounts.iter().find(|mount| mount["name"] == "reprise-token").expect("it is mounted");
    assert_eq!(file, format!("{}/token", mount["mountPath"].as_str().expect("a path")));
    assert_eq!(variable(engine, "REPRISE_SOCKET"), "/run/reprise/agent.sock");

    // Without its tenant a pod is nobody's again, and gets the rest.
    lab.delete("CacheTenant", "team-a");
    wait_until("pods to be nobody's", PATIENCE, || {
        let pod = create(&lab, ENGINES, asks(container(json!({}))));
        let engine = pod.data["spec"]["containers"][0].clone();
        (has_variable(&engine, "REPRISE_SOCKET") && !has_variable(&engine, "REPRISE_TENANT")).then_some(())
    });
    operator.kill();
}

#[test]
fn a_pod_that_gets_nothing_is_told_why() {
    let lab = Lab::new();
    spaces(&lab);
    let operator = lab.operator();
    lab.cluster(injecting());
    wait_for_the_policy(&lab);
    let mounting = json!({ "volumeMounts": [{ "name": "tmp", "mountPath": "/run/reprise" }] });
    let mut with_sidecar =
        json!({ "containers": [plain(json!({}))], "volumes": [{ "name": "tmp", "emptyDir": {} }] });
    with_sidecar["initContainers"] = json!([{
        "name": "proxy", "image": "proxy:1", "restartPolicy": "Always", "volumeMounts": mounting["volumeMounts"],
    }]);
    let with_volume = |name: &str, container: Value| json!({ "containers": [container], "volumes": [{ "name": name, "emptyDir": {} }] });
    for (space, spec, words) in [
        (STRICT, strict(), "security level restricted"),
        (ENGINES, with_volume("reprise-socket", plain(json!({}))), "has a volume reprise-socket"),
        (ENGINES, with_sidecar, "container proxy mounts something at /run/reprise"),
        (ENGINES, with_volume("tmp", plain(mounting)), "container engine mounts something at /run/reprise"),
    ] {
        let pod = create(&lab, space, asks(spec));
        let said = pod.annotations().get(ANNOTATION).unwrap_or_else(|| panic!("nothing is said: {words}"));
        assert!(said.starts_with("nothing of cache/c: ") && said.contains(words), "{said}");
        assert_eq!(pod.data["spec"]["containers"][0]["env"], Value::Null, "{words}");
    }
    operator.kill();
}

#[test]
fn policies_go_with_the_wish_for_them_and_with_the_cluster() {
    let lab = Lab::new();
    let operator = lab.operator();
    let (policy, binding) = ("MutatingAdmissionPolicy", "MutatingAdmissionPolicyBinding");
    let name = "reprise-cache-c-inject";
    let gone = |kind: &str| {
        wait_until(&format!("{kind} to go"), PATIENCE, || lab.get(kind, name).is_none().then_some(()));
    };
    lab.cluster(injecting());
    lab.wait_for(policy, name);
    lab.wait_for(binding, name);
    lab.cluster(json!({}));
    gone(policy);
    gone(binding);
    lab.cluster(injecting());
    lab.wait_for(binding, name);
    lab.delete("KVCacheCluster", "c");
    gone(policy);
    gone(binding);
    operator.kill();
}

#[test]
fn a_cluster_waits_for_a_kind_that_the_api_server_does_not_have_yet() {
    let lab = Lab::new();
    let operator = lab.operator();
    lab.cluster(json!({ "monitoring": { "mode": "PodMonitor" } }));
    let said = lab.wait_condition("KVCacheCluster", "c", ["Accepted", "False", "Unsupported"]);
    assert!(said.contains("PodMonitor") && said.contains("install Prometheus"), "{said}");
    lab.serve_pod_monitors();
    lab.wait_condition("KVCacheCluster", "c", ["Accepted", "True", "AsDesired"]);
    for (monitor, component) in [("c-agent", "agent"), ("c-controlplane", "control-plane")] {
        let spec = lab.wait_for("PodMonitor", monitor).data["spec"].clone();
        assert_eq!(spec["selector"]["matchLabels"]["app.kubernetes.io/component"], component);
        assert_eq!(spec["podMetricsEndpoints"][0]["port"], "admin");
    }
    operator.kill();
}

/// The cluster's namespaces for engines.
fn injecting() -> Value {
    let selector = json!({ "matchLabels": { "engines": "yes" } });
    json!({ "injection": { "mode": "AdmissionPolicy", "namespaceSelector": selector } })
}

/// The API server takes a moment until it goes by a new policy.
fn wait_for_the_policy(lab: &Lab) {
    wait_until("pods to be changed", PATIENCE, || {
        let pod = create(lab, ENGINES, asks(container(json!({}))));
        pod.annotations().contains_key(ANNOTATION).then_some(())
    });
}

fn spaces(lab: &Lab) {
    for (space, labels) in [
        (ENGINES, json!({ "engines": "yes" })),
        (STRICT, json!({ "engines": "yes", "pod-security.kubernetes.io/enforce": "restricted" })),
        (OTHERS, json!({})),
    ] {
        lab.apply(&json!({
            "apiVersion": "v1", "kind": "Namespace", "metadata": { "name": space, "labels": labels },
        }));
        // No controller makes it here.
        account(lab, space, "default");
    }
    assert_ne!(SPACE, ENGINES, "engines are elsewhere");
}

fn account(lab: &Lab, space: &str, name: &str) {
    let account = json!({ "apiVersion": "v1", "kind": "ServiceAccount", "metadata": { "name": name } });
    let (api, params) =
        (within(lab, space, "ServiceAccount", "serviceaccounts"), PatchParams::apply(SOMEBODY));
    let applied = lab.server.block_on(api.patch(name, &params, &Patch::Apply(&account)));
    applied.expect("an account is taken");
}

fn within(lab: &Lab, space: &str, kind: &str, plural: &str) -> Api<DynamicObject> {
    let resource = ApiResource::from_gvk_with_plural(&GroupVersionKind::gvk("", "v1", kind), plural);
    Api::namespaced_with(lab.client(), space, &resource)
}

/// A pod as the API server has made it.
fn create(lab: &Lab, space: &str, (labels, spec): (Value, Value)) -> DynamicObject {
    let pod = json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": { "generateName": "engine-", "labels": labels }, "spec": spec,
    });
    let pod: DynamicObject = serde_json::from_value(pod).expect("an object");
    let api = within(lab, space, "Pod", "pods");
    let created = lab.server.block_on(api.create(&PostParams::default(), &pod));
    created.unwrap_or_else(|error| panic!("a pod is not taken in {space}: {error}"))
}

/// With the label of who asks for the cluster's socket.
fn asks(spec: Value) -> (Value, Value) {
    (json!({ "reprise.dev/inject": "c" }), spec)
}

fn plain(more: Value) -> Value {
    let mut container = json!({ "name": "engine", "image": "engine:1" });
    container.as_object_mut().expect("made above").extend(more.as_object().expect("fields").clone());
    container
}

/// A pod of one container.
fn container(more: Value) -> Value {
    json!({ "containers": [plain(more)], "automountServiceAccountToken": false })
}

/// A pod that a strict namespace takes.
fn strict() -> Value {
    let context = json!({
        "allowPrivilegeEscalation": false, "runAsNonRoot": true, "capabilities": { "drop": ["ALL"] },
        "seccompProfile": { "type": "RuntimeDefault" },
    });
    container(json!({ "securityContext": context }))
}

fn has_variable(container: &Value, name: &str) -> bool {
    container["env"].as_array().is_some_and(|all| all.iter().any(|one| one["name"] == name))
}

fn variable(container: &Value, name: &str) -> String {
    let all = container["env"].as_array().expect("an environment");
    let found = all.iter().find(|one| one["name"] == name).unwrap_or_else(|| panic!("no {name}: {all:?}"));
    found["value"].as_str().expect("a text").to_owned()
}
