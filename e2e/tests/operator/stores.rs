//! The control plane's store: an external etcd that is unreachable or has wrong secrets, and a managed etcd.

use kube::ResourceExt;
use kube::api::{Patch, PatchParams};
use reprise_e2e::{PATIENCE, wait_until};
use serde_json::{Value, json};

use crate::operator::convergence::wait_until_idle;
use crate::operator::test_cluster::{QUIET_PERIOD, TestCluster};

/// Secret with the certificate authority of a managed etcd.
const AUTHORITY: &str = "c-etcd-ca";
/// Annotation of etcd's pods: digest of the authority that they trust.
const TRUSTS: &str = "reprise.dev/etcd-authority";

fn external(more: Value) -> Value {
    let mut external = json!({ "endpoints": ["http://127.0.0.1:1"] });
    external.as_object_mut().expect("an object").extend(more.as_object().expect("fields").clone());
    json!({ "etcd": { "mode": "External", "external": external } })
}

#[test]
fn unreachable_store_is_a_condition_and_members_are_created() {
    let (k8s, _operator) = TestCluster::with_operator();
    k8s.cluster(external(json!({})));
    let message = k8s.wait_condition("KVCacheCluster", "c", ["EtcdReady", "False", "EtcdUnreachable"]);
    for words in ["http://127.0.0.1:1", "Check endpoints, network policies, certificates and user"] {
        assert!(message.contains(words), "{message}");
    }
    k8s.wait_for("StatefulSet", "c-controlplane");
    k8s.cluster(external(json!({ "endpoints": [k8s.etcd.endpoint()] })));
    k8s.wait_condition("KVCacheCluster", "c", ["EtcdReady", "True", "AsDesired"]);
}

#[test]
fn invalid_secrets_are_reported_before_creation() {
    let (k8s, _operator) = TestCluster::with_operator();
    let tls = json!({ "endpoints": ["https://127.0.0.1:1"], "tls": { "caSecretRef": { "name": "ca", "key": "ca.crt" } } });
    k8s.cluster(external(tls));
    k8s.wait_message("KVCacheCluster", "c", ["Accepted", "False", "ReferenceNotFound"], &["Secret ca"]);
    let secret = |data: Value| {
        k8s.apply(&json!({ "apiVersion": "v1", "kind": "Secret", "metadata": { "name": "ca" }, "stringData": data }));
    };
    secret(json!({ "other": "x" }));
    k8s.wait_message("KVCacheCluster", "c", ["Accepted", "False", "SecretInvalid"], &["no entry ca.crt"]);
    secret(json!({ "ca.crt": "not a certificate" }));
    wait_until("the message asks for PEM", PATIENCE, || {
        std::thread::sleep(std::time::Duration::from_millis(100));
        let message = k8s.wait_condition("KVCacheCluster", "c", ["Accepted", "False", "SecretInvalid"]);
        message.contains("expected PEM").then_some(())
    });
    assert!(k8s.operator_objects().is_empty(), "no objects of a rejected cluster");
}

#[test]
fn unsupported_setting_is_rejected_without_changes() {
    let (k8s, _operator) = TestCluster::with_operator();
    k8s.cluster(json!({ "injection": { "mode": "Webhook" } }));
    k8s.wait_message("KVCacheCluster", "c", ["Accepted", "False", "Unsupported"], &["injection.mode"]);
    std::thread::sleep(QUIET_PERIOD);
    assert!(k8s.operator_objects().is_empty());
}

#[test]
fn missing_storage_class_is_reported_until_it_exists() {
    let (k8s, _operator) = TestCluster::with_operator();
    let managed = |storage: Value| json!({ "mode": "Managed", "managed": { "storage": storage } });
    k8s.cluster(json!({ "etcd": managed(json!({ "storageClassName": "fast" })) }));
    // A second cluster with the default class and without nodes.
    k8s.apply_resource(
        "KVCacheCluster",
        "d",
        json!({ "etcd": managed(json!({})), "agents": { "nodeSelector": { "disk": "none" } } }),
    );
    // Simulates the claims that the StatefulSet controller creates.
    for (claim, class) in [("data-c-etcd-0", json!("fast")), ("data-d-etcd-0", json!(null))] {
        k8s.apply(&json!({
            "apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": { "name": claim },
            "spec": {
                "accessModes": ["ReadWriteOnce"], "storageClassName": class, "resources": { "requests": { "storage": "1Gi" } },
            },
        }));
    }
    let no_class = ["EtcdReady", "False", "NoStorageClass"];
    k8s.wait_message("KVCacheCluster", "c", no_class, &["StorageClass fast does not exist", "create it"]);
    k8s.wait_message("KVCacheCluster", "d", no_class, &["is-default-class: \"true\""]);
    k8s.wait_condition("KVCacheCluster", "c", ["Degraded", "True", "NoStorageClass"]);
    // Volumes may be created manually, so the StatefulSet and its children exist without a class.
    k8s.wait_for("StatefulSet", "c-etcd");
    let class = |annotations: Value| {
        k8s.apply(&json!({
            "apiVersion": "storage.k8s.io/v1", "kind": "StorageClass",
            "metadata": { "name": "fast", "annotations": annotations },
            "provisioner": "kubernetes.io/no-provisioner",
        }));
    };
    class(json!({}));
    let coming = ["EtcdReady", "False", "Progressing"];
    k8s.wait_condition("KVCacheCluster", "c", coming);
    k8s.wait_condition("KVCacheCluster", "d", no_class);
    class(json!({ "storageclass.kubernetes.io/is-default-class": "true" }));
    k8s.wait_condition("KVCacheCluster", "d", coming);
    // A bound claim no longer needs its class.
    k8s.delete("StorageClass", "fast");
    k8s.wait_condition("KVCacheCluster", "d", no_class);
    let (claims, params) = (k8s.api("PersistentVolumeClaim"), PatchParams::default());
    let bound = Patch::Merge(json!({ "status": { "phase": "Bound" } }));
    let patched = claims.patch_status("data-d-etcd-0", &params, &bound);
    k8s.server.block_on(patched).expect("the status is accepted");
    k8s.wait_condition("KVCacheCluster", "d", coming);
    k8s.wait_condition("KVCacheCluster", "c", no_class);
}

#[test]
fn corrupt_certificates_of_managed_store_are_replaced() {
    let (k8s, _operator) = TestCluster::with_operator();
    k8s.cluster(json!({ "etcd": { "mode": "Managed" } }));
    let first = k8s.wait_for("Secret", "c-etcd-tls");
    let authority = k8s.wait_for("Secret", "c-etcd-ca");
    k8s.wait_for("StatefulSet", "c-etcd");
    let digest = || {
        let set = k8s.wait_for("StatefulSet", "c-controlplane");
        set.data["spec"]["template"]["metadata"]["annotations"]["reprise.dev/secrets"].clone()
    };
    let before = digest();
    let spoil = json!({ "stringData": { "server.key": "gone" } });
    k8s.merge("Secret", "c-etcd-tls", &spoil);
    wait_until("new certificates of the same authority exist", PATIENCE, || {
        let found = k8s.get("Secret", "c-etcd-tls")?;
        let new = found.data["data"]["server.key"] != first.data["data"]["server.key"]
            && found.data["data"]["server.key"].as_str()?.len() > 100;
        (new && found.data["data"]["ca.crt"] == first.data["data"]["ca.crt"]).then_some(())
    });
    wait_until("the members' pod template has the new digest", PATIENCE, || {
        (digest() != before).then_some(())
    });
    assert_eq!(k8s.wait_for("Secret", "c-etcd-ca").resource_version(), authority.resource_version());
    k8s.cluster(json!({ "etcd": { "mode": "Managed", "managed": { "replicas": 3 } } }));
    k8s.wait_condition("KVCacheCluster", "c", ["Accepted", "False", "Unsupported"]);
}

/// Deletes the authority of a managed etcd, and waits until a condition reports it.
pub(crate) fn delete_authority(k8s: &TestCluster) {
    k8s.delete("Secret", AUTHORITY);
    let message = k8s.wait_condition("KVCacheCluster", "c", ["Degraded", "True", "SecretInvalid"]);
    for words in
        ["Secret c-etcd-ca", "does not exist", "restore it", "if Secret c-etcd-tls is deleted as well"]
    {
        assert!(message.contains(words), "{words}: {message}");
    }
}

#[test]
fn lost_authority_is_reported_and_etcd_keeps_running() {
    let (k8s, _operator) = TestCluster::with_operator();
    k8s.cluster(json!({ "etcd": { "mode": "Managed", "managed": { "replicas": 3 } } }));
    let backup = k8s.wait_for("Secret", AUTHORITY);
    k8s.wait_for("StatefulSet", "c-controlplane");
    k8s.make_pods_ready("c-etcd");
    k8s.wait_condition("KVCacheCluster", "c", ["EtcdReady", "True", "AsDesired"]);
    let parts = || {
        let secret = k8s.get("Secret", "c-etcd-tls").expect("the Secret remains").resource_version();
        let sets =
            ["c-etcd", "c-controlplane"].map(|name| k8s.wait_for("StatefulSet", name).metadata.generation);
        (secret, sets)
    };
    wait_until_idle(&k8s);
    let before = parts();
    delete_authority(&k8s);
    std::thread::sleep(QUIET_PERIOD);
    assert!(k8s.get("Secret", AUTHORITY).is_none(), "no new authority is generated");
    assert!(k8s.has_condition(("KVCacheCluster", "c"), ["EtcdReady", "True", "AsDesired"]));
    // A backup has no fields that the API server sets.
    let mut saved = serde_json::to_value(&backup).expect("an object");
    for field in ["resourceVersion", "uid", "creationTimestamp", "managedFields"] {
        saved["metadata"].as_object_mut().expect("fields").remove(field);
    }
    let mut spoiled = saved.clone();
    spoiled["data"]["tls.key"] = json!("bm9uZQ==");
    k8s.apply(&spoiled);
    wait_until("the modified authority is reported", PATIENCE, || {
        std::thread::sleep(std::time::Duration::from_millis(100));
        let message = k8s.wait_condition("KVCacheCluster", "c", ["Degraded", "True", "SecretInvalid"]);
        message.contains("was modified").then_some(())
    });
    k8s.apply(&saved);
    k8s.wait_condition("KVCacheCluster", "c", ["Degraded", "False", "AsDesired"]);
    assert_eq!(parts(), before, "no pods are restarted");
}

#[test]
fn new_authority_replaces_all_etcd_members_at_once() {
    let (k8s, operator) = TestCluster::with_operator();
    k8s.cluster(json!({ "etcd": { "mode": "Managed", "managed": { "replicas": 3 } } }));
    let first = k8s.wait_for("Secret", "c-etcd-tls");
    k8s.make_pods_ready("c-etcd");
    k8s.wait_condition("KVCacheCluster", "c", ["EtcdReady", "True", "AsDesired"]);
    let annotation = |set: &str, name: &str| {
        let set = k8s.wait_for("StatefulSet", set);
        set.data["spec"]["template"]["metadata"]["annotations"][name].clone()
    };
    let before = annotation("c-etcd", TRUSTS);
    assert!(before.is_string(), "{before}");
    let members = annotation("c-controlplane", "reprise.dev/secrets");
    delete_authority(&k8s);
    k8s.delete("Secret", "c-etcd-tls");
    wait_until("certificates of another authority exist", PATIENCE, || {
        let found = k8s.get("Secret", "c-etcd-tls")?;
        let authority = k8s.get("Secret", AUTHORITY)?;
        let is_other = found.data["data"]["ca.crt"] != first.data["data"]["ca.crt"];
        (is_other && found.data["data"]["ca.crt"] == authority.data["data"]["tls.crt"]).then_some(())
    });
    let replicas = |wanted: u32| {
        wait_until(&format!("etcd has {wanted} desired replicas"), PATIENCE, || {
            let set = k8s.get("StatefulSet", "c-etcd")?;
            (set.data["spec"]["replicas"] == json!(wanted)).then_some(())
        });
    };
    replicas(0);
    k8s.wait_message(
        "KVCacheCluster",
        "c",
        ["EtcdReady", "False", "Progressing"],
        &["members are being replaced"],
    );
    std::thread::sleep(QUIET_PERIOD);
    assert_eq!(annotation("c-etcd", TRUSTS), before, "the template is unchanged while old members run");
    // Simulates the StatefulSet controller: the last old member stops. A restarted operator continues.
    operator.kill();
    k8s.make_pods_ready("c-etcd");
    let _operator = k8s.operator();
    replicas(3);
    assert_ne!(annotation("c-etcd", TRUSTS), before);
    k8s.make_pods_ready("c-etcd");
    k8s.wait_condition("KVCacheCluster", "c", ["EtcdReady", "True", "AsDesired"]);
    k8s.wait_condition("KVCacheCluster", "c", ["Degraded", "False", "AsDesired"]);
    assert_ne!(
        annotation("c-controlplane", "reprise.dev/secrets"),
        members,
        "the members' pod template has the new digest"
    );
}

#[test]
fn scaled_store_is_restored_unless_cluster_is_paused() {
    let (k8s, _operator) = TestCluster::with_operator();
    k8s.cluster(json!({ "etcd": { "mode": "Managed", "managed": { "replicas": 3 } } }));
    k8s.wait_for("StatefulSet", "c-etcd");
    k8s.make_pods_ready("c-etcd");
    k8s.wait_condition("KVCacheCluster", "c", ["EtcdReady", "True", "AsDesired"]);
    let api = k8s.api("StatefulSet");
    // Like `kubectl scale`, for which the API server records no field manager.
    let scale = |replicas: u32| {
        let params = PatchParams { field_manager: Some("kubectl".to_owned()), ..PatchParams::default() };
        let patch = Patch::Merge(json!({ "spec": { "replicas": replicas } }));
        k8s.server
            .block_on(api.patch_scale("c-etcd", &params, &patch))
            .expect("the StatefulSet can be scaled");
    };
    let wait_for_three = || {
        wait_until("etcd has three desired replicas", PATIENCE, || {
            (k8s.get("StatefulSet", "c-etcd")?.data["spec"]["replicas"] == 3).then_some(())
        });
    };
    scale(0);
    wait_for_three();

    let pause = |whether: bool| k8s.merge("KVCacheCluster", "c", &json!({ "spec": { "paused": whether } }));
    pause(true);
    k8s.wait_condition("KVCacheCluster", "c", ["Progressing", "False", "Paused"]);
    scale(0);
    k8s.make_pods_ready("c-etcd");
    std::thread::sleep(QUIET_PERIOD);
    assert_eq!(k8s.wait_for("StatefulSet", "c-etcd").data["spec"]["replicas"], 0);
    k8s.delete("StatefulSet", "c-etcd");
    std::thread::sleep(QUIET_PERIOD);
    assert!(k8s.get("StatefulSet", "c-etcd").is_none(), "a paused cluster is not changed");
    pause(false);
    wait_for_three();
}
