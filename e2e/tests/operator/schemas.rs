//! The operator's objects match the Kubernetes schemas of all supported versions, which a test with one real
//! API server would not show.

use std::collections::BTreeSet;
use std::time::Duration;

use reprise_e2e::kubernetes::Schemas;
use reprise_e2e::{PATIENCE, wait_until};
use serde_json::{Value, json};

use crate::operator::test_cluster::{NAMESPACE, OPERATOR_KINDS, TestCluster};

/// Kinds that are not part of Kubernetes.
const FOREIGN_KINDS: [&str; 2] = ["CacheNode", "PodMonitor"];
/// Kinds whose v1 is new in Kubernetes 1.36. With an older server, a cluster that needs them is rejected.
const KINDS_NEW_IN_1_36: [&str; 2] = ["MutatingAdmissionPolicy", "MutatingAdmissionPolicyBinding"];
const OLDER_VERSIONS: [&str; 2] = ["1.34.", "1.35."];

/// Cluster specs that together cover every object and every part of a pod that a spec can request.
fn clusters() -> [Value; 3] {
    let selector = json!({ "matchLabels": { "kubernetes.io/metadata.name": NAMESPACE } });
    let tolerations = json!([
        { "key": "gpu", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 30 },
        { "key": "for", "operator": "Equal", "value": "caches", "effect": "NoSchedule" },
    ]);
    let resources = json!({
        "requests": { "cpu": "100m", "memory": "1Gi" }, "limits": { "cpu": "2", "memory": "2Gi" },
    });
    let images = json!({
        "agent": { "repository": "registry.example/agent", "digest": format!("sha256:{}", "a".repeat(64)) },
        "pullPolicy": "Always", "pullSecrets": [{ "name": "pull" }],
    });
    let managed = json!({
        "replicas": 3, "resources": resources, "storage": { "size": "2Gi", "storageClassName": "fast" },
    });
    let everything = json!({
        "pools": [{ "name": "p" }, { "name": "r" }], "slackProfiles": {}, "images": images,
        "etcd": { "mode": "Managed", "managed": managed },
        "controlPlane": {
            "replicas": 3, "tolerations": tolerations, "resources": resources, "nodeSelector": { "name": "n1" },
            "spreadOver": "topology.kubernetes.io/zone",
            "events": { "publish": { "port": 7001, "replayPort": 7002 } },
        },
        "agents": {
            "tolerations": tolerations, "resources": resources, "priorityClassName": "system-node-critical",
            "nodeSelector": { "disk": "fast" }, "updateStrategy": { "maxUnavailable": 2 },
            "seccomp": { "mode": "Localhost", "localhostProfile": "reprise/agent.json" },
            "deviceAccess": { "mode": "DevicePlugin", "resourceName": "example.com/nvme" },
        },
        "injection": { "mode": "AdmissionPolicy", "namespaceSelector": selector },
        "monitoring": { "mode": "PodMonitor" },
    });
    let shared = json!({
        "pools": [{ "name": "p" }],
        "agents": {
            "updateStrategy": { "type": "OnDelete" }, "seccomp": { "mode": "Unconfined" },
        },
    });
    let privileged = json!({
        "pools": [{ "name": "r" }],
        "agents": { "deviceAccess": { "mode": "Privileged" } },
    });
    [everything, shared, privileged]
}

/// Returns all objects that an operator writes for a cluster with this spec.
fn asked_for(spec: Value) -> Vec<Value> {
    let k8s = TestCluster::new();
    k8s.serve_pod_monitors();
    k8s.pool("p", "/var/lib/pool", json!({}));
    k8s.raw_pool("r", json!({}));
    k8s.tenant("t", json!({ "perNode": { "ssd": { "reserved": "16Mi" } }, "namespaceSelector": {} }));
    k8s.profile("s", "NVIDIA L4", 60);
    let proxy = k8s.env.fault_proxy(&k8s.server);
    proxy.record_writes();
    let operator = k8s.operator_files("operator").via_proxy(&proxy).start().expect("the operator starts");
    k8s.cluster(spec);
    wait_until("the agents and both CacheNodes are written", PATIENCE, || {
        let asked =
            |kind: &str| proxy.recorded_writes().iter().filter(|object| object["kind"] == kind).count();
        (asked("DaemonSet") > 0 && asked("CacheNode") > 1).then_some(())
    });
    // Children are written in the order of kinds. Some independent ones follow the agents.
    wait_until("all objects are written", PATIENCE, || {
        proxy.time_since_last_write().is_some_and(|quiet| quiet > Duration::from_secs(2)).then_some(())
    });
    assert!(
        k8s.has_condition(("KVCacheCluster", "c"), ["Accepted", "True", "AsDesired"]),
        "{:#?}",
        k8s.user_objects()
    );
    operator.kill();
    proxy.recorded_writes()
}

#[test]
fn created_objects_match_kubernetes_schemas_1_34_to_1_37() {
    let objects: Vec<Value> = clusters().into_iter().flat_map(asked_for).collect();
    let mut kinds = BTreeSet::new();
    for schemas in Schemas::all() {
        for object in &objects {
            let kind = object["kind"].as_str().expect("a kind");
            kinds.insert(kind);
            let Some(faults) = schemas.faults(object) else {
                let is_new = KINDS_NEW_IN_1_36.contains(&kind)
                    && OLDER_VERSIONS.iter().any(|minor| schemas.version.starts_with(minor));
                let is_of_others =
                    FOREIGN_KINDS.contains(&kind) || object["apiVersion"] == "reprise.dev/v1alpha1";
                assert!(is_new || is_of_others, "{} has no {kind}", schemas.version);
                continue;
            };
            assert!(faults.is_empty(), "{}: {} of {object:#}", schemas.version, faults.join(", "));
        }
    }
    let missing: Vec<&str> =
        OPERATOR_KINDS.iter().map(|(_, kind, ..)| *kind).filter(|kind| !kinds.contains(kind)).collect();
    assert!(missing.is_empty(), "no cluster has objects of these kinds: {missing:?}");
}
