//! Properties of the built children that other components rely on.

#![allow(clippy::needless_pass_by_value, reason = "specs are made where they are passed")]

use std::sync::Arc;

use reprise_crds::status::Reason;
use reprise_crds::{KVCacheCluster, SSDPool};
use serde_json::{Value, json};

use super::*;
use crate::framework::digest;
use crate::framework::refusal::Refusal;
use crate::reconcile::assignment::PoolAssignment;
use crate::reconcile::authority::AuthorityState;
use crate::reconcile::authority::tests::any_authority;
use crate::reconcile::cluster::dereference::NamedPool;
use crate::reconcile::cluster::dereference::tests::inputs;
use crate::reconcile::cluster::etcd::external::EtcdCheck;
use crate::reconcile::names::SECRETS;
use crate::reconcile::test_objects::{object, resource};

mod certificates;
mod policies;

fn cluster(spec: Value) -> KVCacheCluster {
    resource(json!({ "name": "c", "namespace": "n", "uid": "uid-c" }), json!({ "spec": spec }))
}

fn directory() -> Value {
    json!({ "directory": { "path": "/data/p", "size": "1Gi" } })
}

/// Adds pool `p`, which is assigned to cluster `n/c`.
fn add_pool(inputs: &mut ClusterInputs, spec: Value) {
    let pool: SSDPool = resource(json!({ "name": "p" }), json!({ "spec": spec }));
    let assignment = PoolAssignment { cluster: Some("n/c".to_owned()), ..PoolAssignment::default() };
    let named = NamedPool { name: "p".to_owned(), pool: Some(Arc::new(pool)), assignment };
    inputs.agent_config.pools.push(named);
}

/// Returns the children of a cluster, after changing its inputs.
fn built(spec: Value, change: impl FnOnce(&mut ClusterInputs)) -> Vec<Child> {
    let cluster = cluster(spec);
    let mut inputs = inputs(&cluster);
    change(&mut inputs);
    build(&cluster, &inputs)
}

/// Returns the only child of a kind and name.
fn child<'a>(children: &'a [Child], kind: ChildKind, name: &str) -> &'a Value {
    let matching: Vec<&Child> =
        children.iter().filter(|child| child.kind == kind && child.name == name).collect();
    let [one] = matching.as_slice() else { panic!("{} of {kind:?} {name}", matching.len()) };
    &one.body
}

/// Returns a file of a ConfigMap as JSON.
fn file(children: &[Child], map: &str, file: &str) -> Value {
    let data = &child(children, ChildKind::ConfigMap, map)["data"];
    toml::from_str(data[file].as_str().unwrap_or_else(|| panic!("no {file}: {data}"))).expect("TOML")
}

fn pod(workload: &Value) -> &Value {
    &workload["spec"]["template"]["spec"]
}

fn assert_values(within: &Value, expected: &[(&str, Value)]) {
    for (pointer, value) in expected {
        assert_eq!(within.pointer(pointer).unwrap_or(&Value::Null), value, "{pointer}");
    }
}

#[test]
fn agent_has_no_privileges_and_mounts_only_its_directories_and_devices_of_raw_pools() {
    let raw = json!({ "devices": { "globs": ["/dev/disk/by-id/nvme-*"] } });
    for (pool, folders) in [
        (directory(), vec!["/data/p", "/run/reprise", "/var/lib/reprise/c"]),
        (raw, vec!["/run/reprise", "/var/lib/reprise/c", "/dev"]),
    ] {
        let children = built(json!({ "pools": [{ "name": "p" }] }), |inputs| add_pool(inputs, pool));
        let pod = pod(child(&children, ChildKind::DaemonSet, "c-agent"));
        assert_values(
            pod,
            &[
                ("/hostNetwork", json!(null)),
                ("/hostIPC", json!(null)),
                ("/hostPID", json!(null)),
                ("/securityContext/seccompProfile/type", json!("RuntimeDefault")),
                ("/containers/0/securityContext/capabilities/drop", json!(["ALL"])),
                ("/containers/0/securityContext/privileged", json!(null)),
                // 1 GiB of arena and 1 GiB overhead.
                ("/containers/0/resources/limits/memory", json!("2Gi")),
            ],
        );
        let volumes = pod["volumes"].as_array().expect("volumes");
        let paths = volumes.iter().filter_map(|volume| volume["hostPath"]["path"].as_str());
        assert_eq!(paths.collect::<Vec<_>>(), folders);
        // The operator creates them with the first salt or key.
        for name in ["salts", "keys"] {
            let secret = json!({ "secretName": format!("c-{name}"), "defaultMode": 0o400, "optional": true });
            assert!(volumes.contains(&json!({ "name": name, "secret": secret })), "{name}");
        }
    }
}

#[test]
fn restarts_agents_only_if_their_configuration_changes() {
    let digest_of = |spec: Value, tenant: Option<Value>| {
        let cluster = cluster(spec);
        let mut inputs = inputs(&cluster);
        let tenant = tenant.map(|spec| resource(json!({ "name": "team" }), json!({ "spec": spec })));
        inputs.agent_config.tenants.extend(tenant.map(Arc::new));
        configuration::agent_digest(&cluster, &inputs.agent_config)
    };
    let plain = digest_of(json!({}), None);
    for (spec, tenant, restarts) in [
        (json!({ "controlPlane": { "replicas": 5 } }), None, false),
        (json!({ "cache": { "dram": "2Gi" } }), None, true),
        (json!({}), Some(json!({ "perNode": { "ssd": { "limit": "1Gi" } } })), true),
        (json!({}), Some(json!({ "bandwidth": { "weight": 4 } })), true),
        // The control plane enforces cluster-wide budgets.
        (json!({}), Some(json!({ "budget": { "ssd": { "limit": "1Gi" } } })), false),
    ] {
        assert_eq!(digest_of(spec.clone(), tenant.clone()) != plain, restarts, "{spec} {tenant:?}");
    }
}

#[test]
fn settings_of_a_rejected_pool_apply_only_without_an_accepted_one() {
    let pool = |depth: u32| {
        json!({
            "directory": { "path": "/data/p", "size": "1Gi" }, "segmentSize": "4Mi", "queueDepth": depth,
            "eviction": "S3Fifo", "admission": "SecondUse",
        })
    };
    for (accepted, depth) in [(false, 9), (true, 7)] {
        let children = built(json!({ "pools": [{ "name": "p" }] }), |inputs| {
            add_pool(inputs, pool(9));
            let refusal = Refusal::new(Reason::Unsupported, "no such engine");
            inputs.agent_config.pools[0].assignment.refused = Some(refusal);
            if accepted {
                add_pool(inputs, pool(7));
            }
        });
        let expected = json!({
            "segment_bytes": "4MiB", "queue_depth": depth, "eviction": { "kind": "s3_fifo" }, "admission": "second_use",
        });
        assert_eq!(file(&children, "c-agent", "agent.toml")["pool"], expected);
    }
}

#[test]
fn builds_no_policy_without_selected_namespaces() {
    for (selector, policies) in [(json!({}), 0), (json!({ "matchLabels": { "engines": "yes" } }), 1)] {
        let injection = json!({ "mode": "AdmissionPolicy", "namespaceSelector": selector });
        let children = built(json!({ "injection": injection }), |_| ());
        let found = children.iter().filter(|child| child.kind == ChildKind::MutatingAdmissionPolicy);
        assert_eq!(found.count(), policies, "{selector}");
    }
}

#[test]
fn each_member_has_its_own_file_and_a_new_member_restarts_none() {
    let of = |replicas: u32| {
        let children = built(json!({ "controlPlane": { "replicas": replicas } }), |_| ());
        let files = &child(&children, ChildKind::ConfigMap, "c-controlplane")["data"];
        assert!(files.get(format!("c-controlplane-{}.toml", replicas - 1)).is_some(), "{files}");
        child(&children, ChildKind::StatefulSet, "c-controlplane")["spec"]["template"].clone()
    };
    assert_eq!(of(2), of(3));
    assert_eq!(of(2)["spec"]["containers"][0]["args"][1], "/etc/reprise/$(POD_NAME).toml");
}

#[test]
fn first_reports_of_nodes_restart_no_member() {
    for (ssd, memory) in [(None, "512Mi"), (Some("1Ti"), "512Mi"), (Some("100Ti"), "4Gi")] {
        let children = built(json!({}), |inputs| {
            inputs.cache_nodes.extend(ssd.map(|ssd| {
                let capacity = json!({ "dramTotal": "64Gi", "dramUsed": "0", "ssdTotal": ssd, "ssdUsed": "0", "pageKind": "Small" });
                let status = json!({ "observedGeneration": 1, "capacity": capacity, "conditions": [] });
                let node = json!({ "spec": { "nodeName": "n1" }, "status": status });
                Arc::new(resource(json!({ "name": "n1" }), node))
            }));
        });
        let set = child(&children, ChildKind::StatefulSet, "c-controlplane");
        assert_values(pod(set), &[("/containers/0/resources/limits/memory", json!(memory))]);
    }
}

#[test]
fn etcd_admits_only_members_of_the_control_plane_and_of_itself() {
    let children = built(json!({ "etcd": { "managed": { "replicas": 3 } } }), |_| ());
    let set = child(&children, ChildKind::StatefulSet, "c-etcd");
    let arguments = pod(set)["containers"][0]["args"].as_array().expect("arguments");
    for argument in [
        // A later cluster of the same name must not join this one.
        "--initial-cluster-token=uid-c",
        "--client-cert-auth=true",
        "--client-cert-allowed-hostname=member.reprise",
        "--peer-client-cert-auth=true",
        "--peer-cert-allowed-hostname=etcd.reprise",
        "--enable-grpc-gateway=false",
        "--trusted-ca-file=/var/lib/etcd/certificates/ca.crt",
        "--peer-trusted-ca-file=/var/lib/etcd/certificates/ca.crt",
    ] {
        assert!(arguments.contains(&json!(argument)), "{argument}");
    }
}

#[test]
fn authority_that_cannot_be_read_keeps_the_pods_of_etcd() {
    let template = |live: Option<&Value>, certificates: AuthorityState| {
        let children = built(json!({}), |inputs| {
            inputs.etcd = live.map(|template| {
                Arc::new(object(
                    json!({ "metadata": { "name": "c-etcd" }, "spec": { "template": template } }),
                ))
            });
            inputs.certificates = certificates;
        });
        child(&children, ChildKind::StatefulSet, "c-etcd")["spec"]["template"].clone()
    };
    let before = template(None, AuthorityState::Present(any_authority()));
    let annotation = &before["metadata"]["annotations"]["reprise.dev/authorities"];
    assert_eq!(*annotation, json!(digest::of(&any_authority().trusted())));
    let unusable = || AuthorityState::Unusable(Refusal::new(Reason::SecretInvalid, "no key"));
    assert_eq!(template(Some(&before), unusable()), before);
    assert_ne!(template(None, unusable()), before, "the digest is that of the authorities");
}

#[test]
fn external_etcd_has_no_pods_and_its_secrets_are_mounted() {
    let spec = json!({ "etcd": { "mode": "External", "external": {
        "endpoints": ["https://etcd:2379"],
        "tls": { "caSecretRef": { "name": "ca", "key": "bundle" }, "clientSecretRef": { "name": "client" }, "serverName": "etcd" },
        "user": { "name": "reprise", "passwordSecretRef": { "name": "user", "key": "secret" } },
    } } });
    let children = built(spec, |inputs| {
        inputs.store = Some(EtcdCheck { secrets: Ok("digest".to_owned()), answer: Err("away".to_owned()) });
    });
    assert!(children.iter().all(|child| !child.name.contains("-etcd")));
    assert_values(
        &file(&children, "c-controlplane", "c-controlplane-0.toml")["store"],
        &[
            ("/tls/ca_file", json!("/etc/reprise-etcd/ca.crt")),
            ("/tls/key_file", json!("/etc/reprise-etcd/tls.key")),
            ("/tls/server_name", json!("etcd")),
            ("/user/password_file", json!("/etc/reprise-etcd/password")),
        ],
    );
    let template = &child(&children, ChildKind::StatefulSet, "c-controlplane")["spec"]["template"];
    assert_eq!(template["metadata"]["annotations"][SECRETS], "digest");
    let mut volumes = template["spec"]["volumes"].as_array().expect("volumes").iter();
    let etcd = volumes.find(|volume| volume["name"] == "etcd").expect("a volume");
    let sources = etcd["projected"]["sources"].as_array().expect("sources").iter().map(|source| {
        let item = &source["secret"]["items"][0];
        [&source["secret"]["name"], &item["key"], &item["path"]].map(|text| text.as_str().expect("a text"))
    });
    let expected = [
        ["ca", "bundle", "ca.crt"],
        ["client", "tls.crt", "tls.crt"],
        ["client", "tls.key", "tls.key"],
        ["user", "secret", "password"],
    ];
    assert_eq!(sources.collect::<Vec<_>>(), expected);
}

#[test]
fn device_access_is_added_only_for_raw_pools() {
    let container = |access: &Value, pool: Value| {
        let spec = json!({ "pools": [{ "name": "p" }], "agents": { "deviceAccess": access } });
        let children = built(spec, |inputs| add_pool(inputs, pool));
        pod(child(&children, ChildKind::DaemonSet, "c-agent"))["containers"][0].clone()
    };
    let raw = || json!({ "devices": { "globs": ["/dev/disk/by-id/nvme-*"] } });
    let none = json!({ "mode": "None" });
    let mut plugged = container(&none, raw());
    let mut privileged = plugged.clone();
    for bound in ["requests", "limits"] {
        plugged["resources"][bound]["example.com/nvme"] = json!("1");
    }
    privileged["securityContext"] = json!({ "privileged": true, "readOnlyRootFilesystem": true });
    // Agents that drive controllers also have memory for 128 queue pairs with 1,024 entries each.
    privileged["resources"]["limits"]["memory"] = json!("2570Mi");
    for (access, expected) in [
        (json!({ "mode": "DevicePlugin", "resourceName": "example.com/nvme" }), plugged),
        (json!({ "mode": "Privileged" }), privileged),
    ] {
        assert_eq!(container(&access, directory()), container(&none, directory()));
        assert_eq!(container(&access, raw()), expected);
    }
}
