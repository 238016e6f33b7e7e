//! The control plane's store: somebody else's that does not answer or whose secrets are wrong, and one of the operator's own.

use kube::ResourceExt;
use kube::api::{Patch, PatchParams};
use reprise_e2e::{PATIENCE, wait_until};
use serde_json::{Value, json};

use crate::convergence::settle;
use crate::lab::{Lab, SETTLED};

/// The Secret with the authority of a managed etcd.
const AUTHORITY: &str = "c-etcd-ca";
/// Annotation of etcd's pods: the authority that they trust.
const TRUSTS: &str = "reprise.dev/etcd-authority";

fn external(more: Value) -> Value {
    let mut external = json!({ "endpoints": ["http://127.0.0.1:1"] });
    external.as_object_mut().expect("made above").extend(more.as_object().expect("fields").clone());
    json!({ "etcd": { "mode": "External", "external": external } })
}

#[test]
fn a_store_that_does_not_answer_is_a_condition_and_members_are_made_all_the_same() {
    let lab = Lab::new();
    let operator = lab.operator();
    lab.cluster(external(json!({})));
    let said = lab.wait_condition("KVCacheCluster", "c", ["EtcdReady", "False", "EtcdUnreachable"]);
    for words in ["http://127.0.0.1:1", "Look at endpoints, network policies, certificates and user"] {
        assert!(said.contains(words), "{said}");
    }
    lab.wait_for("StatefulSet", "c-controlplane");
    lab.cluster(external(json!({ "endpoints": [lab.etcd.endpoint()] })));
    lab.wait_condition("KVCacheCluster", "c", ["EtcdReady", "True", "AsDesired"]);
    operator.kill();
}

#[test]
fn secrets_that_lack_something_are_said_before_anything_is_made() {
    let lab = Lab::new();
    let operator = lab.operator();
    let tls = json!({ "endpoints": ["https://127.0.0.1:1"], "tls": { "caSecretRef": { "name": "ca", "key": "ca.crt" } } });
    lab.cluster(external(tls));
    let said = lab.wait_condition("KVCacheCluster", "c", ["Accepted", "False", "ReferenceNotFound"]);
    assert!(said.contains("Secret ca"), "{said}");
    let secret = |data: Value| {
        lab.apply(&json!({ "apiVersion": "v1", "kind": "Secret", "metadata": { "name": "ca" }, "stringData": data }));
    };
    secret(json!({ "other": "x" }));
    let said = lab.wait_condition("KVCacheCluster", "c", ["Accepted", "False", "SecretInvalid"]);
    assert!(said.contains("no entry ca.crt"), "{said}");
    secret(json!({ "ca.crt": "not a certificate" }));
    wait_until("it is no PEM", PATIENCE, || {
        std::thread::sleep(std::time::Duration::from_millis(100));
        let said = lab.wait_condition("KVCacheCluster", "c", ["Accepted", "False", "SecretInvalid"]);
        said.contains("not PEM").then_some(())
    });
    assert!(lab.made().is_empty(), "nothing is half applied");
    operator.kill();
}

#[test]
fn what_this_release_does_not_have_is_refused_and_changes_nothing() {
    let lab = Lab::new();
    let operator = lab.operator();
    lab.cluster(json!({ "injection": { "mode": "Webhook" } }));
    let said = lab.wait_condition("KVCacheCluster", "c", ["Accepted", "False", "Unsupported"]);
    assert!(said.contains("injection.mode"), "{said}");
    std::thread::sleep(SETTLED);
    assert!(lab.made().is_empty());
    operator.kill();
}

#[test]
fn volumes_without_a_storage_class_are_said_and_come_when_there_is_one() {
    let lab = Lab::new();
    let operator = lab.operator();
    let managed = |storage: Value| json!({ "mode": "Managed", "managed": { "storage": storage } });
    lab.cluster(json!({ "etcd": managed(json!({ "storageClassName": "fast" })) }));
    // Of the default class; on no node.
    lab.apply(&json!({
        "apiVersion": "reprise.dev/v1alpha1", "kind": "KVCacheCluster", "metadata": { "name": "d" },
        "spec": { "etcd": managed(json!({})), "agents": { "nodeSelector": { "disk": "none" } } },
    }));
    // Plays the controller of StatefulSets.
    for (claim, class) in [("data-c-etcd-0", json!("fast")), ("data-d-etcd-0", json!(null))] {
        lab.apply(&json!({
            "apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": { "name": claim },
            "spec": {
                "accessModes": ["ReadWriteOnce"], "storageClassName": class, "resources": { "requests": { "storage": "1Gi" } },
            },
        }));
    }
    let no_class = ["EtcdReady", "False", "NoStorageClass"];
    let said = lab.wait_condition("KVCacheCluster", "c", no_class);
    assert!(said.contains("ask for StorageClass fast") && said.contains("make that StorageClass"), "{said}");
    let said = lab.wait_condition("KVCacheCluster", "d", no_class);
    assert!(said.contains("is-default-class: \"true\""), "{said}");
    lab.wait_condition("KVCacheCluster", "c", ["Degraded", "True", "NoStorageClass"]);
    // A volume may be made by hand, so everything is there that would use it.
    lab.wait_for("StatefulSet", "c-etcd");
    let class = |annotations: Value| {
        lab.apply(&json!({
            "apiVersion": "storage.k8s.io/v1", "kind": "StorageClass",
            "metadata": { "name": "fast", "annotations": annotations },
            "provisioner": "kubernetes.io/no-provisioner",
        }));
    };
    class(json!({}));
    let coming = ["EtcdReady", "False", "Progressing"];
    lab.wait_condition("KVCacheCluster", "c", coming);
    lab.wait_condition("KVCacheCluster", "d", no_class);
    class(json!({ "storageclass.kubernetes.io/is-default-class": "true" }));
    lab.wait_condition("KVCacheCluster", "d", coming);
    // A claim that has its volume needs no class any more.
    lab.delete("StorageClass", "fast");
    lab.wait_condition("KVCacheCluster", "d", no_class);
    let (claims, params) = (lab.api("PersistentVolumeClaim"), PatchParams::default());
    let bound = Patch::Merge(json!({ "status": { "phase": "Bound" } }));
    let told = claims.patch_status("data-d-etcd-0", &params, &bound);
    lab.server.block_on(told).expect("a status is taken");
    lab.wait_condition("KVCacheCluster", "d", coming);
    lab.wait_condition("KVCacheCluster", "c", no_class);
    operator.kill();
}

#[test]
fn a_managed_store_has_certificates_that_are_made_anew_when_they_are_spoiled() {
    let lab = Lab::new();
    let operator = lab.operator();
    lab.cluster(json!({ "etcd": { "mode": "Managed" } }));
    let first = lab.wait_for("Secret", "c-etcd-tls");
    let authority = lab.wait_for("Secret", "c-etcd-ca");
    lab.wait_for("StatefulSet", "c-etcd");
    let digest = || {
        let set = lab.wait_for("StatefulSet", "c-controlplane");
        set.data["spec"]["template"]["metadata"]["annotations"]["reprise.dev/secrets"].clone()
    };
    let before = digest();
    let spoil = json!({ "stringData": { "server.key": "gone" } });
    lab.merge("Secret", "c-etcd-tls", &spoil);
    wait_until("there are new ones, of the same authority", PATIENCE, || {
        let found = lab.get("Secret", "c-etcd-tls")?;
        let new = found.data["data"]["server.key"] != first.data["data"]["server.key"]
            && found.data["data"]["server.key"].as_str()?.len() > 100;
        (new && found.data["data"]["ca.crt"] == first.data["data"]["ca.crt"]).then_some(())
    });
    wait_until("members are told", PATIENCE, || (digest() != before).then_some(()));
    assert_eq!(lab.wait_for("Secret", "c-etcd-ca").resource_version(), authority.resource_version());
    lab.cluster(json!({ "etcd": { "mode": "Managed", "managed": { "replicas": 3 } } }));
    lab.wait_condition("KVCacheCluster", "c", ["Accepted", "False", "Unsupported"]);
    operator.kill();
}

/// Deletes the authority of a managed etcd, and waits until that is said.
pub(crate) fn lose_the_authority(lab: &Lab) {
    lab.delete("Secret", AUTHORITY);
    let said = lab.wait_condition("KVCacheCluster", "c", ["Degraded", "True", "SecretInvalid"]);
    for words in ["Secret c-etcd-ca", "is not there", "put it back", "deletes Secret c-etcd-tls as well"] {
        assert!(said.contains(words), "{words}: {said}");
    }
}

#[test]
fn an_authority_that_is_lost_is_said_and_etcd_goes_on_until_it_is_put_back() {
    let lab = Lab::new();
    let operator = lab.operator();
    lab.cluster(json!({ "etcd": { "mode": "Managed", "managed": { "replicas": 3 } } }));
    let backup = lab.wait_for("Secret", AUTHORITY);
    lab.wait_for("StatefulSet", "c-controlplane");
    lab.all_are_ready("c-etcd");
    lab.wait_condition("KVCacheCluster", "c", ["EtcdReady", "True", "AsDesired"]);
    let parts = || {
        let secret = lab.get("Secret", "c-etcd-tls").expect("it stays").resource_version();
        let sets =
            ["c-etcd", "c-controlplane"].map(|name| lab.wait_for("StatefulSet", name).metadata.generation);
        (secret, sets)
    };
    settle(&lab);
    let before = parts();
    lose_the_authority(&lab);
    std::thread::sleep(SETTLED);
    assert!(lab.get("Secret", AUTHORITY).is_none(), "no other one is drawn");
    assert!(lab.says(("KVCacheCluster", "c"), ["EtcdReady", "True", "AsDesired"]));
    // As somebody has saved it, without what the server has written.
    let mut saved = serde_json::to_value(&backup).expect("an object");
    for drawn in ["resourceVersion", "uid", "creationTimestamp", "managedFields"] {
        saved["metadata"].as_object_mut().expect("fields").remove(drawn);
    }
    let mut spoiled = saved.clone();
    spoiled["data"]["tls.key"] = json!("bm9uZQ==");
    lab.apply(&spoiled);
    wait_until("it is not as it was", PATIENCE, || {
        std::thread::sleep(std::time::Duration::from_millis(100));
        let said = lab.wait_condition("KVCacheCluster", "c", ["Degraded", "True", "SecretInvalid"]);
        said.contains("does not hold what was put into it").then_some(())
    });
    lab.apply(&saved);
    lab.wait_condition("KVCacheCluster", "c", ["Degraded", "False", "AsDesired"]);
    assert_eq!(parts(), before, "nothing is restarted");
    operator.kill();
}

#[test]
fn a_new_authority_is_drawn_on_purpose_and_replaces_all_members_of_etcd_at_once() {
    let lab = Lab::new();
    let operator = lab.operator();
    lab.cluster(json!({ "etcd": { "mode": "Managed", "managed": { "replicas": 3 } } }));
    let first = lab.wait_for("Secret", "c-etcd-tls");
    lab.all_are_ready("c-etcd");
    lab.wait_condition("KVCacheCluster", "c", ["EtcdReady", "True", "AsDesired"]);
    let annotation = |set: &str, name: &str| {
        let set = lab.wait_for("StatefulSet", set);
        set.data["spec"]["template"]["metadata"]["annotations"][name].clone()
    };
    let before = annotation("c-etcd", TRUSTS);
    assert!(before.is_string(), "{before}");
    let members = annotation("c-controlplane", "reprise.dev/secrets");
    lose_the_authority(&lab);
    lab.delete("Secret", "c-etcd-tls");
    wait_until("certificates of another authority are there", PATIENCE, || {
        let found = lab.get("Secret", "c-etcd-tls")?;
        let authority = lab.get("Secret", AUTHORITY)?;
        let is_other = found.data["data"]["ca.crt"] != first.data["data"]["ca.crt"];
        (is_other && found.data["data"]["ca.crt"] == authority.data["data"]["tls.crt"]).then_some(())
    });
    let replicas = |wanted: u32| {
        wait_until(&format!("{wanted} members of etcd are wanted"), PATIENCE, || {
            let set = lab.get("StatefulSet", "c-etcd")?;
            (set.data["spec"]["replicas"] == json!(wanted)).then_some(())
        });
    };
    replicas(0);
    let said = lab.wait_condition("KVCacheCluster", "c", ["EtcdReady", "False", "Progressing"]);
    assert!(said.contains("replaced at once"), "{said}");
    std::thread::sleep(SETTLED);
    assert_eq!(annotation("c-etcd", TRUSTS), before, "some are left");
    // Plays the controller of StatefulSets: the last one is gone, and then all are back. Whoever comes after the operator goes on.
    operator.kill();
    lab.all_are_ready("c-etcd");
    let operator = lab.operator();
    replicas(3);
    assert_ne!(annotation("c-etcd", TRUSTS), before);
    lab.all_are_ready("c-etcd");
    lab.wait_condition("KVCacheCluster", "c", ["EtcdReady", "True", "AsDesired"]);
    lab.wait_condition("KVCacheCluster", "c", ["Degraded", "False", "AsDesired"]);
    assert_ne!(annotation("c-controlplane", "reprise.dev/secrets"), members, "members are told");
    operator.kill();
}

#[test]
fn a_store_that_is_scaled_is_as_the_cluster_wants_it_again_and_is_left_while_that_is_paused() {
    let lab = Lab::new();
    let operator = lab.operator();
    lab.cluster(json!({ "etcd": { "mode": "Managed", "managed": { "replicas": 3 } } }));
    lab.wait_for("StatefulSet", "c-etcd");
    lab.all_are_ready("c-etcd");
    lab.wait_condition("KVCacheCluster", "c", ["EtcdReady", "True", "AsDesired"]);
    let api = lab.api("StatefulSet");
    // As `kubectl scale` does it, of which the API server notes no manager.
    let scale = |replicas: u32| {
        let params = PatchParams { field_manager: Some("kubectl".to_owned()), ..PatchParams::default() };
        let patch = Patch::Merge(json!({ "spec": { "replicas": replicas } }));
        lab.server.block_on(api.patch_scale("c-etcd", &params, &patch)).expect("it can be scaled");
    };
    let wait_for_three = || {
        wait_until("three members of etcd are wanted", PATIENCE, || {
            (lab.get("StatefulSet", "c-etcd")?.data["spec"]["replicas"] == 3).then_some(())
        });
    };
    scale(0);
    wait_for_three();

    let pause = |whether: bool| lab.merge("KVCacheCluster", "c", &json!({ "spec": { "paused": whether } }));
    pause(true);
    lab.wait_condition("KVCacheCluster", "c", ["Progressing", "False", "Paused"]);
    scale(0);
    lab.all_are_ready("c-etcd");
    std::thread::sleep(SETTLED);
    assert_eq!(lab.wait_for("StatefulSet", "c-etcd").data["spec"]["replicas"], 0);
    lab.delete("StatefulSet", "c-etcd");
    std::thread::sleep(SETTLED);
    assert!(lab.get("StatefulSet", "c-etcd").is_none(), "nothing is changed of it");
    pause(false);
    wait_for_three();
    operator.kill();
}
