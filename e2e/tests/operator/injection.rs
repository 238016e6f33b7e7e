//! Admission policies that inject the agent's socket into labelled pods, or annotate why they do not.

use kube::ResourceExt;
use kube::api::{Api, ApiResource, DynamicObject, Patch, PatchParams, PostParams};
use kube::core::GroupVersionKind;
use reprise_e2e::{PATIENCE, wait_until};
use serde_json::{Value, json};

use crate::operator::test_cluster::{NAMESPACE, OTHER_MANAGER, TestCluster};

/// Namespace that the cluster selects.
const ENGINES: &str = "engines";
/// Selected namespace whose security level forbids host directories.
const STRICT: &str = "strict";
/// Namespace that the cluster does not select.
const OTHERS: &str = "others";

const ANNOTATION: &str = "reprise.dev/injection";

#[test]
fn labelled_pods_get_socket_and_connection_and_others_stay_unchanged() {
    let k8s = TestCluster::with_own_server();
    create_namespaces(&k8s);
    let _operator = k8s.operator();
    k8s.cluster(injecting());
    wait_for_policy(&k8s);

    let pod =
        create(&k8s, ENGINES, requesting(container(json!({ "env": [{ "name": "OWN", "value": "kept" }] }))));
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
    let published = k8s.get("ConfigMap", "c-connection").expect("the object exists").data["data"].clone();
    for (name, file, connector) in [
        ("REPRISE_KV_TRANSFER_CONFIG", "vllm-kv-transfer-config.json", "RepriseConnector"),
        ("REPRISE_GPU_KV_TRANSFER_CONFIG", "vllm-gpu-kv-transfer-config.json", "RepriseOffloadingConnector"),
    ] {
        let config: Value = serde_json::from_str(&variable(engine, name)).expect("JSON");
        assert_eq!(config["kv_connector"], connector, "{name}");
        let published = published[file].as_str().expect("a text");
        assert_eq!(config, serde_json::from_str::<Value>(published).expect("JSON"), "equal to the ConfigMap");
    }

    // Sidecars (init containers that keep running) get the socket; other init containers do not.
    let init = json!([
        { "name": "first", "image": "first:1" },
        { "name": "proxy", "image": "proxy:1", "restartPolicy": "Always", "env": [{ "name": "OWN", "value": "kept" }] },
    ]);
    let mut spec = container(json!({}));
    spec["initContainers"] = init.clone();
    let pod = create(&k8s, ENGINES, requesting(spec));
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

    // A variable that the container sets is kept.
    let own = json!({ "env": [{ "name": "REPRISE_SOCKET", "value": "/mine.sock" }] });
    let pod = create(&k8s, ENGINES, requesting(container(own)));
    assert_eq!(variable(&pod.data["spec"]["containers"][0], "REPRISE_SOCKET"), "/mine.sock");

    // Pods without the label, with the label of another cluster, or in a namespace that is not selected.
    let label = |cluster: &str| json!({ "reprise.dev/inject": cluster });
    for (space, labels) in [(ENGINES, json!({})), (ENGINES, label("other")), (OTHERS, label("c"))] {
        let pod = create(&k8s, space, (labels.clone(), container(json!({}))));
        let what = format!("{space} {labels}");
        assert!(!pod.annotations().contains_key(ANNOTATION), "{what}");
        assert_eq!(pod.data["spec"]["containers"][0]["env"], Value::Null, "{what}");
    }
}

#[test]
fn tenant_pods_get_tenant_name_and_token() {
    let k8s = TestCluster::with_own_server();
    create_namespaces(&k8s);
    let _operator = k8s.operator();
    k8s.cluster(injecting());
    let kind = json!({ "apiVersion": "reprise.dev/v1alpha1", "kind": "CacheTenant" });
    let tenant = |name: &str, spec: Value| {
        let mut object = kind.clone();
        (object["metadata"], object["spec"]) = (json!({ "name": name }), spec);
        k8s.apply(&object);
    };
    tenant(
        "team-a",
        json!({ "namespaceSelector": { "matchLabels": { "kubernetes.io/metadata.name": ENGINES } } }),
    );
    tenant("team-b", json!({ "serviceAccounts": [{ "namespace": ENGINES, "name": "batch" }] }));
    wait_for_policy(&k8s);
    create_service_account(&k8s, ENGINES, "batch");
    let of_tenant = |account: &str, tenant: &str| {
        let mut spec = container(json!({}));
        spec["serviceAccountName"] = json!(account);
        wait_until(&format!("pods of {account} belong to {tenant}"), PATIENCE, || {
            let pod = create(&k8s, ENGINES, requesting(spec.clone()));
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
    let mount = mounts.iter().find(|mount| mount["name"] == "reprise-token").expect("the token is mounted");
    assert_eq!(file, format!("{}/token", mount["mountPath"].as_str().expect("a path")));
    assert_eq!(variable(engine, "REPRISE_SOCKET"), "/run/reprise/agent.sock");

    // After the deletion of the tenant, pods get the socket without a tenant.
    k8s.delete("CacheTenant", "team-a");
    wait_until("pods have no tenant", PATIENCE, || {
        let pod = create(&k8s, ENGINES, requesting(container(json!({}))));
        let engine = pod.data["spec"]["containers"][0].clone();
        (has_variable(&engine, "REPRISE_SOCKET") && !has_variable(&engine, "REPRISE_TENANT")).then_some(())
    });
}

#[test]
fn rejected_pod_gets_annotation_with_reason() {
    let k8s = TestCluster::with_own_server();
    create_namespaces(&k8s);
    let _operator = k8s.operator();
    k8s.cluster(injecting());
    wait_for_policy(&k8s);
    let mounting = json!({ "volumeMounts": [{ "name": "tmp", "mountPath": "/run/reprise" }] });
    let mut with_sidecar =
        json!({ "containers": [plain(json!({}))], "volumes": [{ "name": "tmp", "emptyDir": {} }] });
    with_sidecar["initContainers"] = json!([{
        "name": "proxy", "image": "proxy:1", "restartPolicy": "Always", "volumeMounts": mounting["volumeMounts"],
    }]);
    let with_volume = |name: &str, container: Value| json!({ "containers": [container], "volumes": [{ "name": name, "emptyDir": {} }] });
    for (space, spec, words) in [
        (STRICT, strict(), "security level restricted"),
        (ENGINES, with_volume("reprise-socket", plain(json!({}))), "already has a volume reprise-socket"),
        (ENGINES, with_sidecar, "container proxy already mounts a volume at /run/reprise"),
        (
            ENGINES,
            with_volume("tmp", plain(mounting)),
            "container engine already mounts a volume at /run/reprise",
        ),
    ] {
        let pod = create(&k8s, space, requesting(spec));
        let message = pod.annotations().get(ANNOTATION).unwrap_or_else(|| panic!("no annotation: {words}"));
        assert!(message.starts_with("not connected to cache/c: ") && message.contains(words), "{message}");
        assert_eq!(pod.data["spec"]["containers"][0]["env"], Value::Null, "{words}");
    }
}

#[test]
fn policies_are_deleted_with_injection_setting_and_with_cluster() {
    let (k8s, _operator) = TestCluster::with_operator();
    let (policy, binding) = ("MutatingAdmissionPolicy", "MutatingAdmissionPolicyBinding");
    let name = "reprise-cache-c-inject";
    let gone = |kind: &str| {
        wait_until(&format!("{kind} is deleted"), PATIENCE, || k8s.get(kind, name).is_none().then_some(()));
    };
    k8s.cluster(injecting());
    k8s.wait_for(policy, name);
    k8s.wait_for(binding, name);
    k8s.cluster(json!({}));
    gone(policy);
    gone(binding);
    k8s.cluster(injecting());
    k8s.wait_for(binding, name);
    k8s.delete("KVCacheCluster", "c");
    gone(policy);
    gone(binding);
}

#[test]
fn cluster_waits_for_missing_pod_monitor_kind() {
    let (k8s, _operator) = TestCluster::with_operator();
    k8s.cluster(json!({ "monitoring": { "mode": "PodMonitor" } }));
    k8s.wait_message(
        "KVCacheCluster",
        "c",
        ["Accepted", "False", "Unsupported"],
        &["PodMonitor", "install the Prometheus operator"],
    );
    k8s.serve_pod_monitors();
    k8s.wait_condition("KVCacheCluster", "c", ["Accepted", "True", "AsDesired"]);
    for (monitor, component) in [("c-agent", "agent"), ("c-controlplane", "control-plane")] {
        let spec = k8s.wait_for("PodMonitor", monitor).data["spec"].clone();
        assert_eq!(spec["selector"]["matchLabels"]["app.kubernetes.io/component"], component);
        assert_eq!(spec["podMetricsEndpoints"][0]["port"], "admin");
    }
}

/// Cluster spec with injection into the namespaces for engines.
fn injecting() -> Value {
    let selector = json!({ "matchLabels": { "engines": "yes" } });
    json!({ "injection": { "mode": "AdmissionPolicy", "namespaceSelector": selector } })
}

/// Waits until the API server applies a new policy, which takes a moment.
fn wait_for_policy(k8s: &TestCluster) {
    wait_until("the policy changes pods", PATIENCE, || {
        let pod = create(k8s, ENGINES, requesting(container(json!({}))));
        pod.annotations().contains_key(ANNOTATION).then_some(())
    });
}

fn create_namespaces(k8s: &TestCluster) {
    for (space, labels) in [
        (ENGINES, json!({ "engines": "yes" })),
        (STRICT, json!({ "engines": "yes", "pod-security.kubernetes.io/enforce": "restricted" })),
        (OTHERS, json!({})),
    ] {
        k8s.apply(&json!({
            "apiVersion": "v1", "kind": "Namespace", "metadata": { "name": space, "labels": labels },
        }));
        // No controller creates the default account here.
        create_service_account(k8s, space, "default");
    }
    assert_ne!(NAMESPACE, ENGINES, "engines have another namespace");
}

fn create_service_account(k8s: &TestCluster, space: &str, name: &str) {
    let account = json!({ "apiVersion": "v1", "kind": "ServiceAccount", "metadata": { "name": name } });
    let (api, params) =
        (namespaced_api(k8s, space, "ServiceAccount", "serviceaccounts"), PatchParams::apply(OTHER_MANAGER));
    let applied = k8s.server.block_on(api.patch(name, &params, &Patch::Apply(&account)));
    applied.expect("the account is accepted");
}

fn namespaced_api(k8s: &TestCluster, space: &str, kind: &str, plural: &str) -> Api<DynamicObject> {
    let resource = ApiResource::from_gvk_with_plural(&GroupVersionKind::gvk("", "v1", kind), plural);
    Api::namespaced_with(k8s.client(), space, &resource)
}

/// Creates a pod and returns it as the API server stores it.
fn create(k8s: &TestCluster, space: &str, (labels, spec): (Value, Value)) -> DynamicObject {
    let pod = json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": { "generateName": "engine-", "labels": labels }, "spec": spec,
    });
    let pod: DynamicObject = serde_json::from_value(pod).expect("an object");
    let api = namespaced_api(k8s, space, "Pod", "pods");
    let created = k8s.server.block_on(api.create(&PostParams::default(), &pod));
    created.unwrap_or_else(|error| panic!("cannot create a pod in {space}: {error}"))
}

/// Adds the label that requests the cluster's socket.
fn requesting(spec: Value) -> (Value, Value) {
    (json!({ "reprise.dev/inject": "c" }), spec)
}

fn plain(more: Value) -> Value {
    let mut container = json!({ "name": "engine", "image": "engine:1" });
    container.as_object_mut().expect("an object").extend(more.as_object().expect("fields").clone());
    container
}

/// Spec of a pod with one container.
fn container(more: Value) -> Value {
    json!({ "containers": [plain(more)], "automountServiceAccountToken": false })
}

/// Spec of a pod that a restricted namespace accepts.
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
