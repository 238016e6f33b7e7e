//! The control plane's store: an external etcd that is unreachable or has wrong secrets, and a managed etcd.

use kube::api::{Patch, PatchParams};
use reprise_e2e::{PATIENCE, wait_until};
use serde_json::{Value, json};

use crate::operator::test_cluster::TestCluster;

/// Annotation of etcd's pods: digest of the authorities that they trust.
const TRUSTS: &str = "reprise.dev/authorities";

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
    k8s.settle();
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
fn another_authority_replaces_the_pods_of_etcd_one_by_one() {
    let (k8s, _operator) = TestCluster::with_operator();
    k8s.cluster(json!({ "etcd": { "mode": "Managed", "managed": { "replicas": 3 } } }));
    k8s.wait_for("StatefulSet", "c-etcd");
    k8s.make_pods_ready("c-etcd");
    k8s.wait_condition("KVCacheCluster", "c", ["EtcdReady", "True", "AsDesired"]);
    let etcd = || k8s.wait_for("StatefulSet", "c-etcd");
    let trusts = || etcd().data["spec"]["template"]["metadata"]["annotations"][TRUSTS].clone();
    let members = || k8s.wait_for("StatefulSet", "c-controlplane").metadata.generation;
    let (before, generation) = (trusts(), members());
    assert!(before.is_string(), "{before}");
    k8s.delete("Secret", "c-ca");
    wait_until("the pods of etcd have to trust both authorities", PATIENCE, || {
        (trusts() != before).then_some(())
    });
    let set = etcd();
    assert_eq!(set.data["spec"]["replicas"], 3, "the StatefulSet controller replaces one after another");
    assert_eq!(set.data["spec"]["updateStrategy"]["type"], "RollingUpdate");
    assert_eq!(members(), generation, "members follow their certificates without a restart");
    k8s.make_pods_ready("c-etcd");
    k8s.wait_condition("KVCacheCluster", "c", ["Degraded", "False", "AsDesired"]);
    k8s.cluster(json!({ "etcd": { "mode": "Managed", "managed": { "replicas": 5 } } }));
    k8s.wait_condition("KVCacheCluster", "c", ["Accepted", "False", "Unsupported"]);
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
    k8s.settle();
    assert_eq!(k8s.wait_for("StatefulSet", "c-etcd").data["spec"]["replicas"], 0);
    k8s.delete("StatefulSet", "c-etcd");
    k8s.settle();
    assert!(k8s.get("StatefulSet", "c-etcd").is_none(), "a paused cluster is not changed");
    pause(false);
    wait_for_three();
}
