//! Properties of the built children that other components rely on.

#![allow(clippy::needless_pass_by_value, reason = "specs are made where they are passed")]

use std::sync::Arc;

use reprise_crds::status::Reason;
use reprise_crds::{CacheTenant, KVCacheCluster};
use reprise_policy::identity::{PodBindings, ServiceAccount};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use super::*;
use crate::framework::labels::{APPLIED, CLUSTER_UID};
use crate::framework::refusal::Refusal;
use crate::reconcile::authority::AuthorityState;
use crate::reconcile::authority::tests::any_authority;
use crate::reconcile::cluster::etcd::external::EtcdCheck;
use crate::reconcile::cluster::inputs::tests::{add_pool, of as found};
use crate::reconcile::names::ClusterNames;
use crate::reconcile::names::{CONFIGURATION, SECRETS};

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

fn with_pool(mut found: ClusterInputs, spec: Value) -> ClusterInputs {
    add_pool(&mut found, spec);
    found
}

/// Returns the only child of a kind and name.
fn child<'a>(children: &'a [Child], kind: ChildKind, name: &str) -> &'a Value {
    let mut matching = children.iter().filter(|child| child.kind == kind && child.name == name);
    let one = matching.next().unwrap_or_else(|| panic!("no {kind:?} {name}"));
    assert!(matching.next().is_none(), "two of {kind:?} {name}");
    &one.body
}

fn toml_of(child: &Value, file: &str) -> toml::Table {
    let text = child["data"][file].as_str().unwrap_or_else(|| panic!("no {file}: {child}"));
    text.parse().expect("TOML")
}

fn pod(workload: &Value) -> &Value {
    &workload["spec"]["template"]["spec"]
}

#[test]
fn every_child_belongs_to_the_cluster() {
    let cluster = cluster(json!({}));
    let children = build(&cluster, &found(&cluster));
    let mut names: Vec<(ChildKind, &str)> =
        children.iter().map(|child| (child.kind, child.name.as_str())).collect();
    let count = names.len();
    names.sort_unstable();
    names.dedup();
    assert_eq!(names.len(), count, "names are unique per kind");
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
fn agent_has_no_privileges_and_mounts_only_its_directories() {
    let cluster = cluster(json!({ "pools": [{ "name": "p" }] }));
    let pooled = with_pool(found(&cluster), json!({ "directory": { "path": "/data/p", "size": "1Gi" } }));
    let children = build(&cluster, &pooled);
    let pod = pod(child(&children, ChildKind::DaemonSet, "c-agent"));
    for never in ["hostNetwork", "hostIPC", "hostPID"] {
        assert_eq!(pod[never], Value::Null, "{never}");
    }
    let container = &pod["containers"][0];
    assert_eq!(container["securityContext"]["capabilities"]["drop"], json!(["ALL"]));
    assert_eq!(container["securityContext"]["privileged"], Value::Null);
    assert_eq!(pod["securityContext"]["seccompProfile"]["type"], "RuntimeDefault");
    let paths: Vec<&str> = pod["volumes"]
        .as_array()
        .expect("volumes")
        .iter()
        .filter_map(|volume| volume["hostPath"]["path"].as_str())
        .collect();
    assert_eq!(paths, ["/data/p", "/run/reprise", "/var/lib/reprise/c"]);
    for mount in container["volumeMounts"].as_array().expect("mounts") {
        let volume =
            pod["volumes"].as_array().expect("volumes").iter().find(|one| one["name"] == mount["name"]);
        let path = &volume.expect("a volume for every mount")["hostPath"]["path"];
        assert!(path.is_null() || *path == mount["mountPath"], "directories keep their paths: {mount}");
    }
    // 1 GiB of arena and 1 GiB overhead.
    assert_eq!(container["resources"]["limits"]["memory"], "2Gi");
}

#[test]
fn mounts_devices_of_the_node_only_for_raw_pools() {
    let cluster = cluster(json!({ "pools": [{ "name": "p" }] }));
    let raw = with_pool(found(&cluster), json!({ "devices": { "globs": ["/dev/disk/by-id/nvme-*"] } }));
    let has_devices = |found: &ClusterInputs| {
        let children = build(&cluster, found);
        let set = child(&children, ChildKind::DaemonSet, "c-agent").clone();
        pod(&set)["volumes"].as_array().expect("volumes").iter().any(|one| one["name"] == "devices")
    };
    assert!(has_devices(&raw));
    assert!(!has_devices(&found(&cluster)));
}

#[test]
fn restarts_agents_only_if_their_configuration_changes() {
    let annotation = |spec: Value, change: fn(ClusterInputs) -> ClusterInputs| {
        let cluster = cluster(spec);
        let children = build(&cluster, &change(found(&cluster)));
        let set = child(&children, ChildKind::DaemonSet, "c-agent");
        set["spec"]["template"]["metadata"]["annotations"][CONFIGURATION].clone()
    };
    let plain = annotation(json!({}), |found| found);
    assert_eq!(plain, annotation(json!({ "controlPlane": { "replicas": 5 } }), |found| found));
    assert_ne!(plain, annotation(json!({ "cache": { "dram": "2Gi" } }), |found| found));
    let tenant = |mut found: ClusterInputs, spec: Value| {
        let tenant: CacheTenant = object("CacheTenant", "team", spec);
        found.agent_config.tenants.push(Arc::new(tenant));
        found
    };
    assert_ne!(
        plain,
        annotation(json!({}), |found| {
            let tenant: CacheTenant =
                object("CacheTenant", "t", json!({ "perNode": { "ssd": { "limit": "1Gi" } } }));
            let mut found = found;
            found.agent_config.tenants.push(Arc::new(tenant));
            found
        })
    );
    // The control plane enforces cluster-wide budgets.
    let cluster = cluster(json!({}));
    let weighted = tenant(found(&cluster), json!({ "bandwidth": { "weight": 4 } }));
    let text = configuration::agent(&cluster, &weighted.agent_config);
    let agent: toml::Table = text.parse().expect("TOML");
    assert_eq!(agent["tenants"][0]["bandwidth"]["weight"].as_integer(), Some(4));
    let budgeted = tenant(found(&cluster), json!({ "budget": { "ssd": { "limit": "1Gi" } } }));
    assert_eq!(
        configuration::agent(&cluster, &budgeted.agent_config),
        configuration::agent(&cluster, &found(&cluster).agent_config)
    );
}

#[test]
fn pool_sets_shared_agent_settings_and_lists_no_devices() {
    let cluster = cluster(
        json!({ "pools": [{ "name": "p" }], "cache": { "writeback": { "slackDelay": "3s" }, "eviction": "Lfu" } }),
    );
    let spec_of = |depth: u32| {
        json!({
            "directory": { "path": "/data/p", "size": "1Gi" },
            "segmentSize": "4Mi", "queueDepth": depth, "eviction": "S3Fifo", "admission": "SecondUse",
            "dailyWriteBudget": "2Ti", "watermarks": { "freePermille": 50 },
        })
    };
    let children = build(&cluster, &with_pool(found(&cluster), spec_of(7)));
    let agent = toml_of(child(&children, ChildKind::ConfigMap, "c-agent"), "agent.toml");
    assert_eq!(agent["pool"]["segment_bytes"].as_str(), Some("4MiB"));
    assert_eq!(agent["pool"]["queue_depth"].as_integer(), Some(7));
    assert_eq!(agent["pool"]["eviction"]["kind"].as_str(), Some("s3_fifo"));
    assert_eq!(agent["pool"]["admission"].as_str(), Some("second_use"));
    assert_eq!(agent["pool"]["daily_write_budget"].as_str(), Some("2TiB"));
    assert_eq!(agent["cache"]["eviction"]["kind"].as_str(), Some("lfu"));
    assert_eq!(agent["cache"]["pool_free_permille"].as_integer(), Some(50));
    assert_eq!(agent["writeback"]["slack_delay"].as_str(), Some("3s"));
    assert!(agent["pool"].get("devices").is_none() && agent.get("node").is_none());
    assert!(agent["peers"].get("advertise").is_none());
    assert_eq!(agent["controlplane"]["address"].as_str(), Some("c-controlplane.n.svc:7400"));
    // The settings of a rejected pool apply only if no pool is accepted.
    let mut inputs = with_pool(found(&cluster), spec_of(9));
    inputs.agent_config.pools[0].assignment.refused =
        Some(Refusal::new(Reason::Unsupported, "no such engine"));
    let agent = |inputs: &ClusterInputs| configuration::agent(&cluster, &inputs.agent_config);
    assert!(agent(&inputs).contains("queue_depth = 9\n"));
    assert!(agent(&with_pool(inputs, spec_of(7))).contains("queue_depth = 7\n"));
}

#[test]
fn cluster_sets_reads_ahead_retention_and_traces_of_agents() {
    let agent_of = |spec: Value| {
        let cluster = cluster(spec);
        toml_of(child(&build(&cluster, &found(&cluster)), ChildKind::ConfigMap, "c-agent"), "agent.toml")
    };
    let number = |agent: &toml::Table, section: &str, key: &str| agent[section][key].as_integer();
    let agent = agent_of(json!({}));
    for (section, key, default) in [
        ("prefetch", "arena_permille", 250),
        ("prefetch", "high_water_permille", 800),
        ("prefetch", "window", 64),
        ("retention", "permille", 250),
        ("retention", "blocks_per_tenant", 65_536),
    ] {
        assert_eq!(number(&agent, section, key), Some(default), "{section}.{key}");
    }
    assert_eq!(agent["admin"]["trace"].as_bool(), Some(false));
    let agent = agent_of(json!({ "agents": { "trace": "LocalClients" } }));
    assert_eq!(agent["admin"]["trace"].as_bool(), Some(true));
    let agent = agent_of(json!({ "cache": {
        "prefetch": { "arenaPermille": 100, "bandwidthPermille": 500, "window": 8 },
        "retention": { "permille": 0, "blocksPerTenant": 10, "ttlMax": "2h" },
    } }));
    assert_eq!(number(&agent, "prefetch", "arena_permille"), Some(100));
    assert_eq!(number(&agent, "prefetch", "high_water_permille"), Some(500));
    assert_eq!(number(&agent, "prefetch", "window"), Some(8));
    assert_eq!(number(&agent, "retention", "permille"), Some(0));
    assert_eq!(number(&agent, "retention", "blocks_per_tenant"), Some(10));
    assert_eq!(agent["retention"]["ttl_max"].as_str(), Some("2h"));
}

#[test]
fn profile_files_are_next_to_the_configuration_and_restart_no_agent() {
    let cluster = cluster(json!({ "slackProfiles": {} }));
    let plain = build(&cluster, &found(&cluster));
    let mut more = found(&cluster);
    more.profiles.insert("profile-0.json".to_owned(), "{}".to_owned());
    let with = build(&cluster, &more);
    let data = &child(&with, ChildKind::ConfigMap, "c-agent")["data"];
    assert!(data["profile-0.json"] == "{}" && data["agent.toml"].is_string(), "{data}");
    let pods = |children| child(children, ChildKind::DaemonSet, "c-agent").clone();
    assert_eq!(pods(&plain), pods(&with));
}

#[test]
fn replaces_next_agent_once_the_previous_one_is_stable() {
    let cluster = cluster(json!({ "agents": { "updateStrategy": { "maxUnavailable": 2 } } }));
    let children = build(&cluster, &found(&cluster));
    let set = &child(&children, ChildKind::DaemonSet, "c-agent")["spec"];
    assert_eq!(
        (&set["minReadySeconds"], &set["updateStrategy"]["rollingUpdate"]["maxUnavailable"]),
        (&json!(5), &json!(2))
    );
}

#[test]
fn each_member_has_its_own_file_and_a_new_member_restarts_none() {
    let of = |replicas: u32| {
        let cluster = cluster(json!({ "controlPlane": { "replicas": replicas } }));
        build(&cluster, &found(&cluster))
    };
    let (two, three) = (of(2), of(3));
    let files = child(&two, ChildKind::ConfigMap, "c-controlplane");
    let member = toml_of(files, "c-controlplane-1.toml");
    assert_eq!(member["member"]["name"].as_str(), Some("c-controlplane-1"));
    let advertised = member["member"]["advertise"].as_str();
    assert_eq!(advertised, Some("c-controlplane-1.c-controlplane-members.n.svc:7400"));
    assert_eq!(files["data"].as_object().map(serde_json::Map::len), Some(2));
    let template = |children: &[Child]| {
        child(children, ChildKind::StatefulSet, "c-controlplane")["spec"]["template"]["metadata"].clone()
    };
    assert_eq!(template(&two), template(&three));
    let set = child(&two, ChildKind::StatefulSet, "c-controlplane");
    assert_eq!(set["spec"]["minReadySeconds"], 5, "the next member is replaced once this one is stable");
    assert_eq!(pod(set)["containers"][0]["args"][1], "/etc/reprise/$(POD_NAME).toml");
}

#[test]
fn members_and_etcd_use_certificates_of_the_cluster_and_etcd_admits_no_others() {
    let cluster = cluster(json!({ "etcd": { "managed": { "replicas": 3 } } }));
    let children = build(&cluster, &found(&cluster));
    let member = toml_of(child(&children, ChildKind::ConfigMap, "c-controlplane"), "c-controlplane-0.toml");
    let endpoints: Vec<&str> = member["store"]["endpoints"]
        .as_array()
        .expect("a list")
        .iter()
        .filter_map(toml::Value::as_str)
        .collect();
    assert_eq!(endpoints.len(), 3);
    let [host, _] = ClusterNames::of(&cluster).etcd_hosts("c-etcd-2");
    assert_eq!(endpoints[2], format!("https://{host}:2379"), "the name is in the certificate");
    let key = member["store"]["tls"]["key_file"].as_str();
    assert_eq!(key, Some("/run/reprise/certificates/tls.key"));
    let etcd = child(&children, ChildKind::StatefulSet, "c-etcd");
    for (argument, value) in [
        ("--client-cert-auth", "true"),
        ("--client-cert-allowed-hostname", "member.reprise"),
        ("--peer-client-cert-auth", "true"),
        ("--peer-cert-allowed-hostname", "etcd.reprise"),
        ("--enable-grpc-gateway", "false"),
        ("--trusted-ca-file", "/var/lib/etcd/certificates/ca.crt"),
        ("--peer-cert-file", "/var/lib/etcd/certificates/tls.crt"),
    ] {
        assert_eq!(listed(etcd, argument), [value], "{argument}");
    }
    assert_eq!(etcd["spec"]["replicas"], 3);
}

/// Returns the values of a list argument of etcd.
fn listed(etcd: &Value, argument: &str) -> Vec<String> {
    let arguments = pod(etcd)["containers"][0]["args"].as_array().expect("arguments").clone();
    let of = |text: &str| text.strip_prefix(argument)?.strip_prefix('=').map(str::to_owned);
    let mut found = arguments.iter().filter_map(Value::as_str).filter_map(of);
    let value = found.next().unwrap_or_else(|| panic!("no {argument}"));
    assert_eq!(found.next(), None, "{argument} occurs once");
    value.split(',').map(str::to_owned).collect()
}

#[test]
fn changed_authorities_replace_the_pods_of_etcd_and_an_unusable_one_does_not() {
    let cluster = cluster(json!({ "etcd": { "managed": { "replicas": 3 } } }));
    let mut found = found(&cluster);
    let template = |found: &ClusterInputs| {
        child(&build(&cluster, found), ChildKind::StatefulSet, "c-etcd")["spec"]["template"].clone()
    };
    let before = template(&found);
    let annotation = &before["metadata"]["annotations"]["reprise.dev/authorities"];
    assert_eq!(*annotation, json!(crate::framework::digest::of(&any_authority().trusted())));
    let live = json!({ "metadata": { "name": "c-etcd" }, "spec": { "template": before } });
    found.etcd = Some(Arc::new(serde_json::from_value(live).expect("an object")));
    found.certificates = AuthorityState::Unusable(Refusal::new(Reason::SecretInvalid, "no key"));
    assert_eq!(template(&found), before);
    found.etcd = None;
    assert_ne!(template(&found), before, "the digest is that of the authorities");
}

#[test]
fn etcd_members_address_each_other_by_pod_names() {
    for replicas in [1_usize, 3] {
        let cluster = cluster(json!({ "etcd": { "managed": {
            "replicas": replicas, "storage": { "storageClassName": "fast", "size": "2Gi" },
        } } }));
        let children = build(&cluster, &found(&cluster));
        let set = child(&children, ChildKind::StatefulSet, "c-etcd");
        assert_eq!(set["spec"]["replicas"], replicas);
        // All members, each once, by the pod's name behind the headless service.
        let peers: Vec<String> = (0..replicas)
            .map(|index| format!("c-etcd-{index}=https://c-etcd-{index}.c-etcd.n.svc:2380"))
            .collect();
        assert_eq!(listed(set, "--initial-cluster"), peers);
        assert_eq!(listed(set, "--name"), ["$(POD_NAME)"]);
        let own = ["https://$(POD_NAME).c-etcd.n.svc:2380"];
        assert_eq!(listed(set, "--initial-advertise-peer-urls"), own);
        assert_eq!(listed(set, "--advertise-client-urls"), ["https://$(POD_NAME).c-etcd.n.svc:2379"]);
        // A later cluster of the same name must not join this one.
        assert_eq!(listed(set, "--initial-cluster-token"), ["uid-c"]);
        assert_eq!(listed(set, "--initial-cluster-state"), ["new"]);
        assert_eq!(
            pod(set)["containers"][0]["env"][0]["valueFrom"]["fieldRef"]["fieldPath"],
            "metadata.name"
        );
        // Members start in parallel: each becomes ready only together with others.
        assert_eq!(set["spec"]["podManagementPolicy"], "Parallel");
        assert_eq!(set["spec"]["serviceName"], "c-etcd");
        let service = &child(&children, ChildKind::Service, "c-etcd")["spec"];
        assert_eq!(
            (&service["clusterIP"], &service["publishNotReadyAddresses"]),
            (&json!("None"), &json!(true))
        );
        let ports = |of: &Value| {
            let ports = of.as_array().expect("ports").iter();
            let named = ports.map(|port| {
                let number =
                    if port["containerPort"].is_null() { &port["port"] } else { &port["containerPort"] };
                (port["name"].to_string(), number.as_u64().expect("a port"))
            });
            named.collect::<std::collections::BTreeMap<_, _>>()
        };
        let open = ports(&pod(set)["containers"][0]["ports"]);
        for (name, number) in ports(&service["ports"]) {
            assert_eq!(open.get(&name), Some(&number), "{name}");
        }
        // One member may be absent. With a single member, evictions are not blocked forever either.
        let budget = &child(&children, ChildKind::PodDisruptionBudget, "c-etcd")["spec"];
        assert_eq!(budget["maxUnavailable"], 1);
        let labels = &set["spec"]["template"]["metadata"]["labels"];
        for selector in [
            &set["spec"]["selector"]["matchLabels"],
            &budget["selector"]["matchLabels"],
            &service["selector"],
        ] {
            let selector = selector.as_object().expect("labels");
            assert!(!selector.is_empty() && selector.iter().all(|(key, value)| labels[key] == *value));
        }
        let claim = &set["spec"]["volumeClaimTemplates"][0]["spec"];
        assert_eq!(claim["storageClassName"], "fast");
        assert_eq!(claim["resources"]["requests"]["storage"], "2Gi");
        let member =
            toml_of(child(&children, ChildKind::ConfigMap, "c-controlplane"), "c-controlplane-0.toml");
        assert_eq!(member["store"]["endpoints"].as_array().map(Vec::len), Some(replicas));
    }
}

#[test]
fn etcd_volumes_use_the_default_class_if_none_is_specified() {
    let cluster = cluster(json!({ "etcd": { "managed": {} } }));
    let children = build(&cluster, &found(&cluster));
    let set = child(&children, ChildKind::StatefulSet, "c-etcd");
    let claim = &set["spec"]["volumeClaimTemplates"][0]["spec"];
    assert_eq!(claim.get("storageClassName"), None);
}

#[test]
fn external_etcd_has_no_pods_and_its_secrets_are_mounted() {
    let cluster = cluster(json!({ "etcd": { "mode": "External", "external": {
        "endpoints": ["https://etcd:2379"],
        "tls": { "caSecretRef": { "name": "ca", "key": "bundle" }, "clientSecretRef": { "name": "client" }, "serverName": "etcd" },
        "user": { "name": "reprise", "passwordSecretRef": { "name": "user", "key": "password" } },
    } } }));
    let mut found = found(&cluster);
    found.store = Some(EtcdCheck { secrets: Ok("digest".to_owned()), answer: Err("away".to_owned()) });
    let children = build(&cluster, &found);
    assert!(children.iter().all(|child| !child.name.contains("-etcd")));
    let member = toml_of(child(&children, ChildKind::ConfigMap, "c-controlplane"), "c-controlplane-0.toml");
    let tls = &member["store"]["tls"];
    assert_eq!(tls["ca_file"].as_str(), Some("/etc/reprise-etcd/tls/ca.crt"));
    assert_eq!(tls["key_file"].as_str(), Some("/etc/reprise-etcd/client/tls.key"));
    assert_eq!(tls["server_name"].as_str(), Some("etcd"));
    assert_eq!(member["store"]["user"]["password_file"].as_str(), Some("/etc/reprise-etcd/user/password"));
    let set = child(&children, ChildKind::StatefulSet, "c-controlplane");
    let volumes = pod(set)["volumes"].as_array().expect("volumes").clone();
    let of = |name: &str| volumes.iter().find(|volume| volume["name"] == name).cloned().unwrap_or_default();
    assert_eq!(of("etcd-tls")["secret"]["items"], json!([{ "key": "bundle", "path": "ca.crt" }]));
    assert_eq!(of("etcd-client")["secret"]["secretName"], "client");
    assert_eq!(of("etcd-user")["secret"]["secretName"], "user");
    assert_eq!(set["spec"]["template"]["metadata"]["annotations"][SECRETS], "digest");
}

#[test]
fn spreads_member_and_etcd_pods_over_the_specified_topology() {
    for (spec, over) in [
        (json!({}), "kubernetes.io/hostname"),
        (
            json!({ "controlPlane": { "spreadOver": "topology.kubernetes.io/zone" } }),
            "topology.kubernetes.io/zone",
        ),
    ] {
        let cluster = cluster(spec);
        let children = build(&cluster, &found(&cluster));
        for name in ["c-controlplane", "c-etcd"] {
            let set = child(&children, ChildKind::StatefulSet, name);
            let spread = &pod(set)["topologySpreadConstraints"];
            assert_eq!(spread.as_array().map(Vec::len), Some(1), "{name}");
            assert_eq!(
                (&spread[0]["topologyKey"], &spread[0]["maxSkew"]),
                (&json!(over), &json!(1)),
                "{name}"
            );
            // Two members on one node are better than a pending one.
            assert_eq!(spread[0]["whenUnsatisfiable"], "ScheduleAnyway", "{name}");
            let counted = &spread[0]["labelSelector"]["matchLabels"];
            assert_eq!(counted, &set["spec"]["selector"]["matchLabels"], "{name} counts its own pods");
        }
    }
}

#[test]
fn connection_config_map_holds_complete_engine_configurations() {
    let cluster = cluster(json!({ "agents": { "socket": { "directory": "/run/other" } } }));
    let children = build(&cluster, &found(&cluster));
    let data = &child(&children, ChildKind::ConfigMap, "c-connection")["data"];
    for file in ["vllm-kv-transfer-config.json", "vllm-gpu-kv-transfer-config.json"] {
        let text = data[file].as_str().expect("a text");
        let parsed: Value = serde_json::from_str(text).expect("JSON");
        assert_eq!(parsed["kv_role"], "kv_both");
        assert!(text.contains("/run/other/agent.sock"), "{text}");
    }
    assert_eq!(data["socket"], "/run/other/agent.sock");
}

#[test]
fn first_reports_of_nodes_restart_no_member() {
    let cluster = cluster(json!({}));
    let members = |found: &ClusterInputs| {
        let children = build(&cluster, found);
        pod(child(&children, ChildKind::StatefulSet, "c-controlplane"))["containers"][0]["resources"].clone()
    };
    let silent = found(&cluster);
    let of_capacity = |ssd: &str| {
        let mut reported = found(&cluster);
        let mut node: reprise_crds::CacheNode = object("CacheNode", "n1", json!({ "nodeName": "n1" }));
        let capacity = json!({ "dramTotal": "64Gi", "dramUsed": "0", "ssdTotal": ssd, "ssdUsed": "0", "pageKind": "Small" });
        let status = json!({ "observedGeneration": 1, "capacity": capacity, "conditions": [] });
        node.status = Some(serde_json::from_value(status).expect("a status"));
        reported.cache_nodes.push(Arc::new(node));
        reported
    };
    assert_eq!(members(&silent)["limits"]["memory"], "512Mi");
    assert_eq!(members(&of_capacity("1Ti")), members(&silent));
    assert_eq!(
        members(&of_capacity("100Ti"))["limits"]["memory"],
        "4Gi",
        "that many blocks need more memory"
    );
}

#[test]
fn tenant_bindings_are_a_file_for_agents_and_entries_for_the_policy() {
    let cluster = cluster(json!({}));
    let before = build(&cluster, &found(&cluster));
    let mut found = found(&cluster);
    let (a, b) = ("a".parse().expect("a name"), "b".parse().expect("a name"));
    found.bindings.bind_namespace("chat", &a);
    let account = ServiceAccount { namespace: "chat".to_owned(), name: "batch.v2".to_owned() };
    found.bindings.bind_service_account(&account, &b);
    let children = build(&cluster, &found);
    let named = |children: &[Child], kind: ChildKind, name: &str| {
        let found = children.iter().find(|child| child.kind == kind && child.name == name);
        found.unwrap_or_else(|| panic!("no {name}")).body.clone()
    };
    let data = named(&children, ChildKind::ConfigMap, "c-agent-tenants")["data"].clone();
    assert_eq!((&data["chat"], &data["chat.batch.v2"]), (&json!("a"), &json!("b")));
    let file: PodBindings =
        serde_json::from_str(data["_tenants.json"].as_str().expect("a text")).expect("reads");
    assert_eq!(file, found.bindings);

    let agents = |children: &[Child]| named(children, ChildKind::DaemonSet, "c-agent");
    assert_eq!(agents(&before), agents(&children), "a new namespace restarts no agent");
    let pod = agents(&children)["spec"]["template"]["spec"].clone();
    let volume =
        pod["volumes"].as_array().expect("volumes").iter().find(|one| one["name"] == "tenants").cloned();
    let items = json!([{ "key": "_tenants.json", "path": "tenants.json" }]);
    assert_eq!(
        volume.expect("a mounted volume")["configMap"],
        json!({ "name": "c-agent-tenants", "items": items })
    );
    let volumes = pod["volumes"].as_array().expect("volumes");
    let mounts = pod["containers"][0]["volumeMounts"].as_array().expect("mounts");
    for name in ["salts", "keys"] {
        let secret = json!({ "secretName": format!("c-{name}"), "defaultMode": 0o400, "optional": true });
        assert!(volumes.contains(&json!({ "name": name, "secret": secret })), "{volumes:?}");
        let mount = json!({ "name": name, "mountPath": format!("/etc/reprise-{name}"), "readOnly": true });
        assert!(mounts.contains(&mount), "{mounts:?}");
    }
    let agent = toml_of(child(&children, ChildKind::ConfigMap, "c-agent"), "agent.toml");
    assert_eq!(agent["encryption"]["keys"].as_str(), Some("/etc/reprise-keys"));
    assert_eq!(agent["session"]["salts"].as_str(), Some("/etc/reprise-salts"));
    let environment = pod["containers"][0]["env"].as_array().expect("an environment").clone();
    let expected = json!({ "name": "TENANTS_FILE", "value": "/etc/reprise-tenants/tenants.json" });
    assert!(environment.contains(&expected), "{environment:?}");
}
