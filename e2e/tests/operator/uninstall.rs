//! The `delete` command of the chart's uninstall hook: it deletes the release's objects and names the rest.

use std::process::{Child, Output, Stdio};
use std::time::Duration;

use kube::ResourceExt;
use reprise_e2e::{PATIENCE, wait_until};
use serde_json::{Value, json};

use crate::operator::queues::{GRANTED, KIND, create_allocation, report_queues, wait_deleted};
use crate::operator::test_cluster::{NAMESPACE, TestCluster, UNREACHABLE_ADDRESS};

fn run(k8s: &TestCluster, arguments: &[&str]) -> Output {
    k8s.operator_files("hook").command(arguments).output().expect("the operator can be started")
}

/// Starts the deletion of release `r`.
fn delete(k8s: &TestCluster, seconds: &str) -> Child {
    let arguments = ["delete", "--release", "r", "--namespace", NAMESPACE, "--timeout-seconds", seconds];
    let mut command = k8s.operator_files("hook").command(&arguments);
    command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the operator can be started")
}

/// Applies a cluster, two pools and two tenants as release `r`.
fn install(k8s: &TestCluster) {
    let cluster = json!({
        "apiVersion": "reprise.dev/v1alpha1", "kind": "KVCacheCluster", "metadata": { "name": "c" },
        "spec": {
            "etcd": { "mode": "External", "external": { "endpoints": [k8s.etcd.endpoint()] } },
            "pools": [{ "name": "p" }],
        },
    });
    let pool = |name: &str, more: Value| {
        let mut spec = json!({ "directory": { "path": format!("/var/lib/{name}"), "size": "64Mi" } });
        spec.as_object_mut().expect("an object").extend(more.as_object().expect("fields").clone());
        json!({ "apiVersion": "reprise.dev/v1alpha1", "kind": "SSDPool", "metadata": { "name": name }, "spec": spec })
    };
    let tenant = |name: &str, spec: Value| {
        let metadata = json!({ "name": name });
        json!({ "apiVersion": "reprise.dev/v1alpha1", "kind": "CacheTenant", "metadata": metadata, "spec": spec })
    };
    let limited = json!({ "budget": { "ssd": { "limit": "1Gi" } } });
    let objects = [
        cluster,
        pool("p", json!({})),
        pool("q", json!({ "deletionPolicy": "Wipe" })),
        tenant("t", json!({})),
        tenant("u", limited),
    ];
    let text = objects.map(|object| object.to_string()).join("\n---\n");
    let path = k8s.env.folder().join("release.yaml");
    std::fs::write(&path, text).expect("a file can be written");
    let path = path.to_str().expect("folders of tests are UTF-8");
    let output = run(k8s, &["apply", "--namespace", NAMESPACE, "--release", "r", path]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

/// Simulates foreground deletion: deletes the children of the cluster, then the cluster.
fn collect_garbage(k8s: &TestCluster) {
    for (name, object) in k8s.operator_objects() {
        let owners = object.metadata.owner_references.unwrap_or_default();
        if owners.iter().any(|owner| owner.kind == "KVCacheCluster") {
            let (kind, name) = name.split_once('/').expect("kind and name");
            k8s.delete(kind, name);
        }
    }
    k8s.merge("KVCacheCluster", "c", &json!({ "metadata": { "finalizers": null } }));
}

fn stderr_text(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn release_deletes_its_objects_and_keeps_others() {
    let (k8s, _operator) = TestCluster::with_operator();
    install(&k8s);
    k8s.pool("mine", "/var/lib/mine", json!({}));
    k8s.wait_for("DaemonSet", "c-agent");
    k8s.wait_for("CacheNode", "n1");
    k8s.wait_for("ClusterRoleBinding", "reprise-cache-c-agent");
    // The unreachable control plane blocks the deletion of a tenant with a budget.
    k8s.wait_condition("CacheTenant", "u", ["BudgetApplied", "False", "ControlPlaneUnreachable"]);

    let deletion = delete(&k8s, "45");
    k8s.wait_condition("CacheTenant", "u", ["DeletionBlocked", "True", "Releasing"]);
    wait_until("the cluster is being deleted", PATIENCE, || {
        let cluster = k8s.get("KVCacheCluster", "c")?;
        cluster.metadata.deletion_timestamp.map(|_| ())
    });
    assert!(k8s.get("CacheTenant", "t").is_none(), "tenants are deleted before the clusters");
    assert!(k8s.get("SSDPool", "p").is_some(), "pools that keep their data are deleted after the clusters");
    collect_garbage(&k8s);
    let output = deletion.wait_with_output().expect("it ends");
    assert!(output.status.success(), "{}", stderr_text(&output));
    for (kind, name) in [
        ("KVCacheCluster", "c"),
        ("CacheTenant", "u"),
        ("SSDPool", "p"),
        ("CacheNode", "n1"),
        ("CacheNode", "n2"),
        ("ClusterRoleBinding", "reprise-cache-c-agent"),
    ] {
        assert!(k8s.get(kind, name).is_none(), "{kind} {name} was not deleted");
    }
    assert!(k8s.get("SSDPool", "mine").is_some(), "the pool does not belong to the release");
    // The wipe of its data is not confirmed.
    assert!(
        k8s.get("SSDPool", "q").is_some() && stderr_text(&output).contains("the wipe is not confirmed"),
        "{}",
        stderr_text(&output)
    );
}

#[test]
fn objects_remaining_at_timeout_are_named_with_reason() {
    let (k8s, _operator) = TestCluster::with_operator();
    install(&k8s);
    k8s.wait_for("DaemonSet", "c-agent");
    k8s.wait_for("CacheNode", "n2");
    // Nothing simulates the garbage collector.
    let output = delete(&k8s, "3").wait_with_output().expect("it ends");
    let words = stderr_text(&output);
    assert!(!output.status.success(), "{words}");
    for named in
        ["KVCacheCluster c", "DaemonSet c-agent", "StatefulSet c-controlplane", "CacheNode n2", "after 3s"]
    {
        assert!(words.contains(named), "{named}: {words}");
    }
    // A second run continues the deletion.
    let deletion = delete(&k8s, "45");
    std::thread::sleep(Duration::from_millis(500));
    collect_garbage(&k8s);
    let output = deletion.wait_with_output().expect("it ends");
    assert!(output.status.success(), "{}", stderr_text(&output));
    assert!(k8s.get("CacheNode", "n2").is_none() && k8s.get("SSDPool", "p").is_none());
}

/// A pool of raw devices and a cluster on one node with it.
fn on_node(k8s: &TestCluster, cluster: &str, node: &str, pool: &str) -> [Value; 2] {
    let spec = json!({
        "etcd": { "mode": "External", "external": { "endpoints": [k8s.etcd.endpoint()] } },
        "cache": { "dram": "64Mi", "regionSize": "2Mi" },
        "agents": { "nodeSelector": { "name": node } },
        "pools": [{ "name": pool }],
    });
    let devices = json!({ "devices": { "globs": ["/dev/disk/by-id/nvme-*"] } });
    let object = |kind: &str, name: &str, spec: Value| json!({ "apiVersion": "reprise.dev/v1alpha1", "kind": kind, "metadata": { "name": name }, "spec": spec });
    [object("SSDPool", pool, devices), object("KVCacheCluster", cluster, spec)]
}

#[test]
fn grants_end_with_agents_of_release_and_remaining_ones_are_named() {
    let k8s = TestCluster::new();
    let files = k8s.operator_files("operator").control_plane(&format!("{NAMESPACE}/d"), UNREACHABLE_ADDRESS);
    let operator = files.start().expect("the operator starts");
    let path = k8s.env.folder().join("release.yaml");
    let text = on_node(&k8s, "c", "n1", "p").map(|object| object.to_string()).join("\n---\n");
    std::fs::write(&path, text).expect("a file can be written");
    let path = path.to_str().expect("folders of tests are UTF-8");
    let output = run(&k8s, &["apply", "--namespace", NAMESPACE, "--release", "r", path]);
    assert!(output.status.success(), "{}", stderr_text(&output));
    for object in on_node(&k8s, "d", "n2", "mine") {
        k8s.apply(&object);
    }
    for (node, pool) in [("n1", "p"), ("n2", "mine")] {
        wait_until("the node has its claim", PATIENCE, || {
            k8s.get("CacheNode", node)?.data["spec"]["claims"].is_array().then_some(())
        });
        let controllers = json!([{ "serial": "S1", "pool": pool, "queuePairs": 32, "queuePairsLent": 0 }]);
        report_queues(&k8s, node, &[], &[], json!({ "controllers": controllers }));
    }
    create_allocation(&k8s, "ends", json!({ "queuePairs": 4 }));
    create_allocation(&k8s, "goes", json!({ "queuePairs": 4 }));
    create_allocation(&k8s, "stays", json!({ "nodeName": "n2", "poolRef": { "name": "mine" } }));
    for name in ["ends", "goes", "stays"] {
        k8s.wait_condition(KIND, name, GRANTED);
    }
    let controllers = json!([{ "serial": "S1", "pool": "p", "queuePairs": 32, "queuePairsLent": 0 }]);
    let reported = json!({ "controllers": controllers, "observedGeneration": 1 });
    report_queues(&k8s, "n1", &[], &[("goes", 4)], reported);
    k8s.delete(KIND, "goes");
    k8s.wait_condition(KIND, "goes", ["DeletionBlocked", "True", "Releasing"]);

    let deletion = delete(&k8s, "45");
    wait_until("the cluster is being deleted", PATIENCE, || {
        let cluster = k8s.get("KVCacheCluster", "c")?;
        cluster.metadata.deletion_timestamp.map(|_| ())
    });
    collect_garbage(&k8s);
    k8s.wait_condition(KIND, "ends", ["Released", "False", "Releasing"]);
    // The agent's pod stops.
    let left = json!([{
        "type": "AgentReady", "status": "False", "reason": "AgentGone", "lastTransitionTime": "2026-01-01T00:00:00Z",
    }]);
    let last = json!({ "controllers": controllers, "conditions": left, "observedGeneration": 1 });
    report_queues(&k8s, "n1", &[], &[], last);
    let output = deletion.wait_with_output().expect("it ends");
    let words = stderr_text(&output);
    assert!(output.status.success(), "{words}");
    // Allocations of the release have no finalizer that would need a running operator.
    operator.kill();
    k8s.wait_condition(KIND, "ends", ["Released", "True", "AgentGone"]);
    k8s.delete(KIND, "ends");
    for name in ["ends", "goes"] {
        wait_deleted(&k8s, name);
    }
    let stays = k8s.get(KIND, "stays").expect("the object exists");
    assert_eq!(stays.finalizers(), ["reprise.dev/queues"]);
    assert!(words.contains("cache/stays") && words.contains("GPUQueueAllocations stay"), "{words}");
    assert!(!words.contains("cache/ends"), "{words}");
}
