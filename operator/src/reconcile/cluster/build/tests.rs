//! Properties of the built children that other components rely on.

#![allow(clippy::needless_pass_by_value, reason = "specs are made where they are passed")]

use std::sync::Arc;

use reprise_crds::status::Reason;
use reprise_crds::{CacheTenant, KVCacheCluster};
use reprise_policy::identity::{PodBindings, ServiceAccount};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use super::*;
use crate::framework::digest;
use crate::framework::labels::{APPLIED, CLUSTER_UID};
use crate::framework::refusal::Refusal;
use crate::reconcile::authority::AuthorityState;
use crate::reconcile::authority::tests::any_authority;
use crate::reconcile::cluster::etcd::external::EtcdCheck;
use crate::reconcile::cluster::inputs::tests::{add_pool, of as found};
use crate::reconcile::names::ClusterNames;
use crate::reconcile::names::SECRETS;

mod access;
mod certificates;
mod policies;

fn object<K: DeserializeOwned>(kind: &str, name: &str, spec: Value) -> K {
    let metadata = json!({ "name": name, "namespace": "n", "uid": format!("uid-{name}") });
    let whole =
        json!({ "apiVersion": "reprise.dev/v1alpha1", "kind": kind, "metadata": metadata, "spec": spec });
    serde_json::from_value(whole).expect("an object")
}

fn cluster(spec: Value) -> KVCacheCluster {
    object("KVCacheCluster", "c", spec)
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
        for mount in pod["containers"][0]["volumeMounts"].as_array().expect("mounts") {
            let volume = volumes.iter().find(|one| one["name"] == mount["name"]);
            let path = &volume.expect("a volume for every mount")["hostPath"]["path"];
            assert!(path.is_null() || *path == mount["mountPath"], "directories keep their paths: {mount}");
        }
    }
}

#[test]
fn restarts_agents_only_if_their_configuration_changes() {
    let digest_of = |spec: Value, tenant: Option<Value>| {
        let cluster = cluster(spec);
        let mut inputs = found(&cluster);
        let tenant = tenant.map(|spec| Arc::new(object::<CacheTenant>("CacheTenant", "team", spec)));
        inputs.agent_config.tenants.extend(tenant);
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
    let defaults = agent(&built(json!({}), |_| ()));
    assert_values(
        &defaults,
        &[
            ("/prefetch/arena_permille", json!(250)),
            ("/prefetch/high_water_permille", json!(800)),
            ("/prefetch/window", json!(64)),
            ("/retention/permille", json!(250)),
            ("/retention/blocks_per_tenant", json!(65_536)),
            ("/admin/trace", json!(false)),
            ("/encryption/keys", json!("/etc/reprise-keys")),
            ("/session/salts", json!("/etc/reprise-salts")),
            ("/controlplane/address", json!("c-controlplane.n.svc:7400")),
            // From other sources.
            ("/node", json!(null)),
            ("/peers/advertise", json!(null)),
        ],
    );
    let spec = json!({
        "pools": [{ "name": "p" }],
        "agents": { "trace": "LocalClients" },
        "cache": {
            "writeback": { "slackDelay": "3s" }, "eviction": "Lfu",
            "prefetch": { "arenaPermille": 100, "bandwidthPermille": 500, "window": 8 },
            "retention": { "permille": 0, "blocksPerTenant": 10, "ttlMax": "2h" },
        },
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
            ("/cache/eviction/kind", json!("lfu")),
            ("/cache/pool_free_permille", json!(50)),
            ("/writeback/slack_delay", json!("3s")),
            ("/prefetch/arena_permille", json!(100)),
            ("/prefetch/high_water_permille", json!(500)),
            ("/prefetch/window", json!(8)),
            ("/retention/permille", json!(0)),
            ("/retention/blocks_per_tenant", json!(10)),
            ("/retention/ttl_max", json!("2h")),
            ("/pool/segment_bytes", json!("4MiB")),
            ("/pool/queue_depth", json!(7)),
            ("/pool/eviction/kind", json!("s3_fifo")),
            ("/pool/admission", json!("second_use")),
            ("/pool/daily_write_budget", json!("2TiB")),
            ("/pool/devices", json!(null)),
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
fn profiles_and_tenants_of_pods_are_files_and_restart_no_agent() {
    let (a, b) = ("a".parse().expect("a name"), "b".parse().expect("a name"));
    let mut bindings = PodBindings::default();
    bindings.bind_namespace("chat", &a);
    let account = ServiceAccount { namespace: "chat".to_owned(), name: "batch.v2".to_owned() };
    bindings.bind_service_account(&account, &b);
    let children = built(json!({}), |inputs| {
        inputs.bindings = bindings.clone();
        inputs.profiles.insert("profile-0.json".to_owned(), "{}".to_owned());
    });
    let set = child(&children, ChildKind::DaemonSet, "c-agent");
    assert_eq!(set, child(&built(json!({}), |_| ()), ChildKind::DaemonSet, "c-agent"));
    let data = &child(&children, ChildKind::ConfigMap, "c-agent")["data"];
    assert!(data["profile-0.json"] == "{}" && data["agent.toml"].is_string(), "{data}");
    let data = &child(&children, ChildKind::ConfigMap, "c-agent-tenants")["data"];
    assert_eq!((&data["chat"], &data["chat.batch.v2"]), (&json!("a"), &json!("b")));
    let file = data["_tenants.json"].as_str().expect("a text");
    assert_eq!(serde_json::from_str::<PodBindings>(file).expect("reads"), bindings);
    let has = |of: &Value, item: Value| of.as_array().expect("a list").contains(&item);
    let container = &pod(set)["containers"][0];
    let variable = json!({ "name": "TENANTS_FILE", "value": "/etc/reprise-tenants/tenants.json" });
    assert!(has(&container["env"], variable));
    let items = json!([{ "key": "_tenants.json", "path": "tenants.json" }]);
    let tenants = json!({ "name": "tenants", "configMap": { "name": "c-agent-tenants", "items": items } });
    assert!(has(&pod(set)["volumes"], tenants));
    for name in ["salts", "keys"] {
        let secret = json!({ "secretName": format!("c-{name}"), "defaultMode": 0o400, "optional": true });
        assert!(has(&pod(set)["volumes"], json!({ "name": name, "secret": secret })));
        let folder = format!("/etc/reprise-{name}");
        let mount = json!({ "name": name, "mountPath": folder, "readOnly": true });
        assert!(has(&container["volumeMounts"], mount));
    }
}

#[test]
fn each_member_has_its_own_file_and_a_new_member_restarts_none() {
    let of = |replicas: u32| built(json!({ "controlPlane": { "replicas": replicas } }), |_| ());
    let (two, three) = (of(2), of(3));
    let advertised = "c-controlplane-1.c-controlplane-members.n.svc:7400";
    let member = file(&two, "c-controlplane", "c-controlplane-1.toml");
    assert_values(
        &member["member"],
        &[("/name", json!("c-controlplane-1")), ("/advertise", json!(advertised))],
    );
    let files = &child(&two, ChildKind::ConfigMap, "c-controlplane")["data"];
    assert_eq!(files.as_object().map(serde_json::Map::len), Some(2));
    let set = |children| child(children, ChildKind::StatefulSet, "c-controlplane")["spec"].clone();
    assert_eq!(set(&two)["template"], set(&three)["template"]);
    assert_eq!(set(&two)["minReadySeconds"], 5, "the next member is replaced once this one is stable");
    assert_eq!(set(&two)["template"]["spec"]["containers"][0]["args"][1], "/etc/reprise/$(POD_NAME).toml");
}

#[test]
fn first_reports_of_nodes_restart_no_member() {
    let memory = |ssd: Option<&str>| {
        let children = built(json!({}), |inputs| {
            let Some(ssd) = ssd else { return };
            let mut node: reprise_crds::CacheNode = object("CacheNode", "n1", json!({ "nodeName": "n1" }));
            let capacity = json!({ "dramTotal": "64Gi", "dramUsed": "0", "ssdTotal": ssd, "ssdUsed": "0", "pageKind": "Small" });
            let status = json!({ "observedGeneration": 1, "capacity": capacity, "conditions": [] });
            node.status = Some(serde_json::from_value(status).expect("a status"));
            inputs.cache_nodes.push(Arc::new(node));
        });
        let set = child(&children, ChildKind::StatefulSet, "c-controlplane");
        pod(set)["containers"][0]["resources"]["limits"]["memory"].clone()
    };
    assert_eq!((memory(None), memory(Some("1Ti"))), (json!("512Mi"), json!("512Mi")));
    assert_eq!(memory(Some("100Ti")), "4Gi", "that many blocks need more memory");
}

#[test]
fn etcd_members_find_each_other_and_admit_only_members_of_the_control_plane() {
    for replicas in [1_usize, 3] {
        let spec = json!({ "etcd": { "managed": {
            "replicas": replicas, "storage": { "storageClassName": "fast", "size": "2Gi" },
        } } });
        let children = built(spec.clone(), |_| ());
        let set = child(&children, ChildKind::StatefulSet, "c-etcd");
        let arguments = pod(set)["containers"][0]["args"].as_array().expect("arguments");
        // All members, each once, by the pod's name behind the headless service.
        let peers =
            (0..replicas).map(|index| format!("c-etcd-{index}=https://c-etcd-{index}.c-etcd.n.svc:2380"));
        let peers = peers.collect::<Vec<_>>().join(",");
        for (argument, value) in [
            ("--initial-cluster", peers.as_str()),
            ("--name", "$(POD_NAME)"),
            ("--initial-advertise-peer-urls", "https://$(POD_NAME).c-etcd.n.svc:2380"),
            ("--advertise-client-urls", "https://$(POD_NAME).c-etcd.n.svc:2379"),
            // A later cluster of the same name must not join this one.
            ("--initial-cluster-token", "uid-c"),
            ("--initial-cluster-state", "new"),
            ("--client-cert-auth", "true"),
            ("--client-cert-allowed-hostname", "member.reprise"),
            ("--peer-client-cert-auth", "true"),
            ("--peer-cert-allowed-hostname", "etcd.reprise"),
            ("--enable-grpc-gateway", "false"),
            ("--trusted-ca-file", "/var/lib/etcd/certificates/ca.crt"),
            ("--peer-cert-file", "/var/lib/etcd/certificates/tls.crt"),
        ] {
            let of =
                arguments.iter().filter_map(|one| one.as_str()?.strip_prefix(argument)?.strip_prefix('='));
            assert_eq!(of.collect::<Vec<_>>(), [value], "{argument}");
        }
        let selector = json!({
            "app.kubernetes.io/name": "reprise", "app.kubernetes.io/instance": "c", "app.kubernetes.io/component": "etcd",
        });
        assert_values(
            &set["spec"],
            &[
                ("/replicas", json!(replicas)),
                // Members start in parallel: each becomes ready only together with others.
                ("/podManagementPolicy", json!("Parallel")),
                ("/serviceName", json!("c-etcd")),
                ("/selector/matchLabels", selector.clone()),
                ("/volumeClaimTemplates/0/spec/storageClassName", json!("fast")),
                ("/volumeClaimTemplates/0/spec/resources/requests/storage", json!("2Gi")),
            ],
        );
        assert_values(
            &child(&children, ChildKind::Service, "c-etcd")["spec"],
            &[
                ("/clusterIP", json!("None")),
                ("/publishNotReadyAddresses", json!(true)),
                ("/selector", selector.clone()),
                ("/ports/0/targetPort", json!("client")),
            ],
        );
        // One member may be absent. With a single member, evictions are not blocked forever either.
        assert_values(
            &child(&children, ChildKind::PodDisruptionBudget, "c-etcd")["spec"],
            &[("/maxUnavailable", json!(1)), ("/selector/matchLabels", selector)],
        );
        let [host, _] = ClusterNames::of(&cluster(spec)).etcd_hosts("c-etcd-0");
        let store = &file(&children, "c-controlplane", "c-controlplane-0.toml")["store"];
        assert_eq!(store["endpoints"].as_array().map(Vec::len), Some(replicas));
        assert_values(
            store,
            &[
                // The name is in the certificate.
                ("/endpoints/0", json!(format!("https://{host}:2379"))),
                ("/tls/key_file", json!("/run/reprise/certificates/tls.key")),
            ],
        );
    }
    let children = built(json!({ "etcd": { "managed": {} } }), |_| ());
    let claim = &child(&children, ChildKind::StatefulSet, "c-etcd")["spec"]["volumeClaimTemplates"][0];
    assert_eq!(claim["spec"].get("storageClassName"), None, "the default class");
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
    assert_eq!(
        (&of("etcd-client")["secretName"], &of("etcd-user")["secretName"]),
        (&json!("client"), &json!("user"))
    );
    assert_eq!(set["spec"]["template"]["metadata"]["annotations"][SECRETS], "digest");
}

#[test]
fn spreads_member_and_etcd_pods_over_the_specified_topology() {
    let zone = "topology.kubernetes.io/zone";
    for (spec, over) in
        [(json!({}), "kubernetes.io/hostname"), (json!({ "controlPlane": { "spreadOver": zone } }), zone)]
    {
        let children = built(spec, |_| ());
        for name in ["c-controlplane", "c-etcd"] {
            let set = child(&children, ChildKind::StatefulSet, name);
            let spread = json!([{
                "maxSkew": 1, "topologyKey": over, "whenUnsatisfiable": "ScheduleAnyway",
                // It counts its own pods.
                "labelSelector": { "matchLabels": set["spec"]["selector"]["matchLabels"] },
            }]);
            assert_eq!(pod(set)["topologySpreadConstraints"], spread, "{name}");
        }
    }
}
