//! What the operator asks to be made fits Kubernetes' schemas of all versions that Reprise is for, whatever a cluster is like: a real server of one
//! version would say nothing of the others.

use std::collections::BTreeSet;

use reprise_e2e::kubernetes::Schemas;
use reprise_e2e::{PATIENCE, wait_until};
use serde_json::{Value, json};

use crate::lab::{Lab, MADE, SETTLED, SPACE};

/// Kinds that Kubernetes does not have.
const OF_OTHERS: [&str; 2] = ["CacheNode", "PodMonitor"];
/// Kinds of version 1 that are new in 1.36. A cluster that needs them is refused by an older server, with words.
const NEW: [&str; 2] = ["MutatingAdmissionPolicy", "MutatingAdmissionPolicyBinding"];
const OLDER: [&str; 2] = ["1.34.", "1.35."];

/// Clusters that together have every part of pods and every object that specs can ask for.
fn clusters() -> [Value; 3] {
    let selector = json!({ "matchLabels": { "kubernetes.io/metadata.name": SPACE } });
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
            "gpuAccess": { "mode": "Dra", "deviceClassName": "gpu.example.com" },
            "rdma": { "mode": "Dra", "deviceClassName": "rdma.example.com" },
            "deviceAccess": { "mode": "DevicePlugin", "resourceName": "example.com/nvme" },
        },
        "injection": { "mode": "AdmissionPolicy", "namespaceSelector": selector },
        "monitoring": { "mode": "PodMonitor" },
    });
    let shared = json!({
        "pools": [{ "name": "p" }],
        "agents": {
            "updateStrategy": { "type": "OnDelete" }, "seccomp": { "mode": "Unconfined" },
            "gpuAccess": { "mode": "RuntimeClass", "runtimeClassName": "nvidia" },
            "rdma": { "mode": "DevicePlugin", "resourceName": "example.com/rdma" },
        },
    });
    let privileged = json!({
        "pools": [{ "name": "r" }],
        "agents": {
            "gpuAccess": { "mode": "ManagementCdi" }, "rdma": { "mode": "HostNetwork" },
            "deviceAccess": { "mode": "Privileged" },
        },
    });
    [everything, shared, privileged]
}

/// All that an operator asks to be made of a cluster like this.
fn asked_for(spec: Value) -> Vec<Value> {
    let lab = Lab::new();
    lab.serve_pod_monitors();
    // Claims of devices that others have may be made.
    let labels = json!({ "resource.kubernetes.io/admin-access": "true" });
    lab.apply(
        &json!({ "apiVersion": "v1", "kind": "Namespace", "metadata": { "name": SPACE, "labels": labels } }),
    );
    lab.pool("p", "/var/lib/pool", json!({}));
    lab.raw_pool("r", json!({}));
    lab.tenant("t", json!({ "perNode": { "ssd": { "reserved": "16Mi" } }, "namespaceSelector": {} }));
    lab.profile("s", "NVIDIA L4", 60);
    let gate = lab.world.interposer(&lab.server);
    gate.keep_written();
    let operator = lab.operator_files("operator").through(&gate).start().expect("the operator starts");
    lab.cluster(spec);
    wait_until("the agents and both nodes are asked for", PATIENCE, || {
        let asked = |kind: &str| gate.written().iter().filter(|object| object["kind"] == kind).count();
        (asked("DaemonSet") > 0 && asked("CacheNode") > 1).then_some(())
    });
    // Children come in the order of kinds, agents last but for those that stand alone.
    wait_until("all is asked for", PATIENCE, || {
        gate.quiet_for().is_some_and(|quiet| quiet > 3 * SETTLED).then_some(())
    });
    assert!(lab.says(("KVCacheCluster", "c"), ["Accepted", "True", "AsDesired"]), "{:#?}", lab.theirs());
    operator.kill();
    gate.written()
}

#[test]
fn all_that_is_made_fits_kubernetes_from_1_34_to_1_37() {
    let objects: Vec<Value> = clusters().into_iter().flat_map(asked_for).collect();
    let mut kinds = BTreeSet::new();
    for schemas in Schemas::all() {
        for object in &objects {
            let kind = object["kind"].as_str().expect("a kind");
            kinds.insert(kind);
            let Some(faults) = schemas.faults(object) else {
                let is_new =
                    NEW.contains(&kind) && OLDER.iter().any(|minor| schemas.version.starts_with(minor));
                let is_of_others =
                    OF_OTHERS.contains(&kind) || object["apiVersion"] == "reprise.dev/v1alpha1";
                assert!(is_new || is_of_others, "{} has no {kind}", schemas.version);
                continue;
            };
            assert!(faults.is_empty(), "{}: {} of {object:#}", schemas.version, faults.join(", "));
        }
    }
    let missing: Vec<&str> =
        MADE.iter().map(|(_, kind, ..)| *kind).filter(|kind| !kinds.contains(kind)).collect();
    assert!(missing.is_empty(), "not made by any of these clusters: {missing:?}");
}
