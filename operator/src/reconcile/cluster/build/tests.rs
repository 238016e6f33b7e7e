//! Properties of the built children that other components rely on.

#![allow(clippy::needless_pass_by_value, reason = "specs are made where they are passed")]

use std::sync::Arc;

use reprise_crds::KVCacheCluster;
use reprise_crds::status::Reason;
use serde_json::{Value, json};

use super::*;
use crate::framework::digest;
use crate::framework::labels::{APPLIED, CLUSTER_UID};
use crate::framework::refusal::Refusal;
use crate::reconcile::authority::AuthorityState;
use crate::reconcile::authority::tests::any_authority;
use crate::reconcile::cluster::etcd::external::EtcdCheck;
use crate::reconcile::cluster::inputs::tests::{add_pool, of as found};
use crate::reconcile::names::SECRETS;
use crate::reconcile::test_objects::resource;

mod certificates;
mod policies;

fn cluster(spec: Value) -> KVCacheCluster {
    resource(json!({ "name": "c", "namespace": "n", "uid": "uid-c" }), json!({ "spec": spec }))
}

fn directory() -> Value {
    json!({ "directory": { "path": "/data/p", "size": "1Gi" } })
}

/// Returns the children of a cluster, after changing its inputs.
fn built(spec: Value, change: impl FnOnce(&mut ClusterInputs)) -> Vec<Child> {
    let cluster = cluster(spec);
    let mut inputs = found(&cluster);
    change(&mut inputs);
    build(&cluster, &inputs)
}

/// Returns the only child of a kind and name.
fn child<'a>(children: &'a [Child], kind: ChildKind, name: &str) -> &'a Value {
    let mut matching = children.iter().filter(|child| child.kind == kind && child.name == name);
    let one = matching.next().unwrap_or_else(|| panic!("no {kind:?} {name}"));
    assert!(matching.next().is_none(), "two of {kind:?} {name}");
    &one.body
}

/// Returns a file of a ConfigMap as JSON.
fn file(children: &[Child], map: &str, file: &str) -> Value {
    let data = &child(children, ChildKind::ConfigMap, map)["data"];
    toml::from_str(data[file].as_str().unwrap_or_else(|| panic!("no {file}: {data}"))).expect("TOML")
}

fn agent(children: &[Child]) -> Value {
    file(children, "c-agent", "agent.toml")
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
fn every_child_belongs_to_the_cluster() {
    let children = built(json!({}), |_| ());
    let mut names: Vec<(ChildKind, &str)> =
        children.iter().map(|child| (child.kind, child.name.as_str())).collect();
    names.sort_unstable();
    names.dedup();
    assert_eq!(names.len(), children.len(), "names are unique per kind");
    for child in &children {
        let metadata = &child.body["metadata"];
        assert_eq!(metadata["labels"][CLUSTER_UID], "uid-c");
        assert_eq!(metadata["annotations"][APPLIED], json!(child.digest));
        if child.kind.is_namespaced() {
            assert_eq!(metadata["ownerReferences"][0]["uid"], "uid-c", "{}", child.name);
            assert_eq!(metadata["namespace"], "n");
        }
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
        let mut inputs = found(&cluster);
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
    let set = built(json!({ "agents": { "updateStrategy": { "maxUnavailable": 2 } } }), |_| ());
    assert_values(
        child(&set, ChildKind::DaemonSet, "c-agent"),
        &[
            ("/spec/template/metadata/annotations/reprise.dev~1configuration", json!(plain)),
            // The next agent is replaced once the previous one is stable.
            ("/spec/minReadySeconds", json!(5)),
            ("/spec/updateStrategy/rollingUpdate/maxUnavailable", json!(2)),
        ],
    );
}

#[test]
fn agents_get_settings_of_the_cluster_and_of_its_pool() {
    let spec = json!({
        "pools": [{ "name": "p" }],
        "agents": { "trace": "LocalClients" },
        "cache": { "eviction": "Lfu", "prefetch": { "bandwidthPermille": 500 } },
    });
    let pool = |depth: u32| {
        json!({
            "directory": { "path": "/data/p", "size": "1Gi" },
            "segmentSize": "4Mi", "queueDepth": depth, "eviction": "S3Fifo", "admission": "SecondUse",
            "dailyWriteBudget": "2Ti", "watermarks": { "freePermille": 50 },
        })
    };
    assert_values(
        &agent(&built(spec.clone(), |inputs| add_pool(inputs, pool(7)))),
        &[
            ("/admin/trace", json!(true)),
            ("/controlplane/address", json!("c-controlplane.n.svc:7400")),
            ("/cache/eviction/kind", json!("lfu")),
            ("/cache/pool_free_permille", json!(50)),
            ("/prefetch/high_water_permille", json!(500)),
            ("/pool/segment_bytes", json!("4MiB")),
            ("/pool/queue_depth", json!(7)),
            ("/pool/eviction/kind", json!("s3_fifo")),
            ("/pool/admission", json!("second_use")),
            ("/pool/daily_write_budget", json!("2TiB")),
        ],
    );
    // The settings of a rejected pool apply only if no pool is accepted.
    let cluster = cluster(spec);
    let text = |inputs: &ClusterInputs| configuration::agent(&cluster, &inputs.agent_config);
    let mut inputs = found(&cluster);
    add_pool(&mut inputs, pool(9));
    inputs.agent_config.pools[0].assignment.refused =
        Some(Refusal::new(Reason::Unsupported, "no such engine"));
    assert!(text(&inputs).contains("queue_depth = 9\n"));
    add_pool(&mut inputs, pool(7));
    assert!(text(&inputs).contains("queue_depth = 7\n"));
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
    let zone = "topology.kubernetes.io/zone";
    let of = |replicas: u32| {
        let spec = json!({ "controlPlane": { "replicas": replicas, "spreadOver": zone } });
        let children = built(spec, |_| ());
        let files = child(&children, ChildKind::ConfigMap, "c-controlplane")["data"].clone();
        assert_eq!(files.as_object().map(serde_json::Map::len), usize::try_from(replicas).ok());
        child(&children, ChildKind::StatefulSet, "c-controlplane")["spec"]["template"].clone()
    };
    assert_eq!(of(2), of(3));
    assert_values(
        &of(2)["spec"],
        &[
            ("/containers/0/args/1", json!("/etc/reprise/$(POD_NAME).toml")),
            ("/topologySpreadConstraints/0/topologyKey", json!(zone)),
        ],
    );
}

#[test]
fn first_reports_of_nodes_restart_no_member() {
    let memory = |ssd: Option<&str>| {
        let children = built(json!({}), |inputs| {
            let Some(ssd) = ssd else { return };
            let capacity = json!({ "dramTotal": "64Gi", "dramUsed": "0", "ssdTotal": ssd, "ssdUsed": "0", "pageKind": "Small" });
            let status = json!({ "observedGeneration": 1, "capacity": capacity, "conditions": [] });
            let node = json!({ "spec": { "nodeName": "n1" }, "status": status });
            inputs.cache_nodes.push(Arc::new(resource(json!({ "name": "n1" }), node)));
        });
        let set = child(&children, ChildKind::StatefulSet, "c-controlplane");
        pod(set)["containers"][0]["resources"]["limits"]["memory"].clone()
    };
    assert_eq!((memory(None), memory(Some("1Ti"))), (json!("512Mi"), json!("512Mi")));
    assert_eq!(memory(Some("100Ti")), "4Gi", "that many blocks need more memory");
}

#[test]
fn etcd_members_find_each_other_and_admit_only_members_of_the_control_plane() {
    let children = built(json!({ "etcd": { "managed": { "replicas": 3 } } }), |_| ());
    let set = child(&children, ChildKind::StatefulSet, "c-etcd");
    let arguments = pod(set)["containers"][0]["args"].as_array().expect("arguments");
    // All members, each once, by the pod's name behind the headless service.
    let peers = [0, 1, 2].map(|index| format!("c-etcd-{index}=https://c-etcd-{index}.c-etcd.n.svc:2380"));
    for (argument, value) in [
        ("--initial-cluster", peers.join(",").as_str()),
        ("--initial-advertise-peer-urls", "https://$(POD_NAME).c-etcd.n.svc:2380"),
        // A later cluster of the same name must not join this one.
        ("--initial-cluster-token", "uid-c"),
        ("--client-cert-auth", "true"),
        ("--client-cert-allowed-hostname", "member.reprise"),
        ("--peer-client-cert-auth", "true"),
        ("--peer-cert-allowed-hostname", "etcd.reprise"),
        ("--enable-grpc-gateway", "false"),
        ("--trusted-ca-file", "/var/lib/etcd/certificates/ca.crt"),
        ("--peer-cert-file", "/var/lib/etcd/certificates/tls.crt"),
    ] {
        assert!(arguments.contains(&json!(format!("{argument}={value}"))), "{argument}");
    }
    let claim = &set["spec"]["volumeClaimTemplates"][0];
    assert_eq!(claim["spec"].get("storageClassName"), None, "the default class");
    let store = &file(&children, "c-controlplane", "c-controlplane-0.toml")["store"];
    let endpoints = [0, 1, 2].map(|index| format!("https://c-etcd-{index}.c-etcd.n.svc:2379"));
    assert_eq!(store["endpoints"], json!(endpoints));
}

#[test]
fn changed_authorities_replace_the_pods_of_etcd_and_an_unusable_one_does_not() {
    let template = |etcd: Option<&Value>, certificates: Option<AuthorityState>| {
        let children = built(json!({}), |inputs| {
            let live = etcd.map(
                |template| json!({ "metadata": { "name": "c-etcd" }, "spec": { "template": template } }),
            );
            inputs.etcd = live.map(|live| Arc::new(serde_json::from_value(live).expect("an object")));
            inputs.certificates = certificates.unwrap_or_else(|| inputs.certificates.clone());
        });
        child(&children, ChildKind::StatefulSet, "c-etcd")["spec"]["template"].clone()
    };
    let before = template(None, None);
    let annotation = &before["metadata"]["annotations"]["reprise.dev/authorities"];
    assert_eq!(*annotation, json!(digest::of(&any_authority().trusted())));
    let unusable = || Some(AuthorityState::Unusable(Refusal::new(Reason::SecretInvalid, "no key")));
    assert_eq!(template(Some(&before), unusable()), before);
    assert_ne!(template(None, unusable()), before, "the digest is that of the authorities");
}

#[test]
fn external_etcd_has_no_pods_and_its_secrets_are_mounted() {
    let spec = json!({ "etcd": { "mode": "External", "external": {
        "endpoints": ["https://etcd:2379"],
        "tls": { "caSecretRef": { "name": "ca", "key": "bundle" }, "clientSecretRef": { "name": "client" }, "serverName": "etcd" },
        "user": { "name": "reprise", "passwordSecretRef": { "name": "user", "key": "password" } },
    } } });
    let children = built(spec, |inputs| {
        inputs.store = Some(EtcdCheck { secrets: Ok("digest".to_owned()), answer: Err("away".to_owned()) });
    });
    assert!(children.iter().all(|child| !child.name.contains("-etcd")));
    assert_values(
        &file(&children, "c-controlplane", "c-controlplane-0.toml")["store"],
        &[
            ("/tls/ca_file", json!("/etc/reprise-etcd/tls/ca.crt")),
            ("/tls/key_file", json!("/etc/reprise-etcd/client/tls.key")),
            ("/tls/server_name", json!("etcd")),
            ("/user/password_file", json!("/etc/reprise-etcd/user/password")),
        ],
    );
    let set = child(&children, ChildKind::StatefulSet, "c-controlplane");
    let volumes = pod(set)["volumes"].as_array().expect("volumes");
    let of = |name: &str| &volumes.iter().find(|volume| volume["name"] == name).expect(name)["secret"];
    assert_eq!(of("etcd-tls")["items"], json!([{ "key": "bundle", "path": "ca.crt" }]));
    assert_eq!([&of("etcd-client")["secretName"], &of("etcd-user")["secretName"]], ["client", "user"]);
    assert_eq!(set["spec"]["template"]["metadata"]["annotations"][SECRETS], "digest");
}

/// Returns the agent's container in a cluster with this access and this pool.
fn container(access: Value, pool: Value) -> Value {
    let spec = json!({ "pools": [{ "name": "p" }], "agents": { "deviceAccess": access } });
    let children = built(spec, |inputs| add_pool(inputs, pool));
    pod(child(&children, ChildKind::DaemonSet, "c-agent"))["containers"][0].clone()
}

#[test]
fn device_access_is_added_only_for_raw_pools() {
    let raw = || json!({ "devices": { "globs": ["/dev/disk/by-id/nvme-*"] } });
    let none = || json!({ "mode": "None" });
    let plugin = json!({ "mode": "DevicePlugin", "resourceName": "example.com/nvme" });
    let privileged = json!({ "mode": "Privileged" });
    for access in [plugin.clone(), privileged.clone()] {
        assert_eq!(container(access, directory()), container(none(), directory()));
    }
    let before = container(none(), raw());
    let mut expected = before.clone();
    for bound in ["requests", "limits"] {
        expected["resources"][bound]["example.com/nvme"] = json!("1");
    }
    assert_eq!(container(plugin, raw()), expected);
    let mut expected = before;
    expected["securityContext"] = json!({ "privileged": true, "readOnlyRootFilesystem": true });
    // Agents that drive controllers also have memory for 128 queue pairs with 1,024 entries each.
    expected["resources"]["limits"]["memory"] = json!("2570Mi");
    assert_eq!(container(privileged, raw()), expected);
}
