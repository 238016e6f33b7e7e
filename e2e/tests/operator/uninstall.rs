//! What the chart runs before a release goes: what the release has applied goes, and what remains is named.

use std::process::{Child, Output, Stdio};
use std::time::Duration;

use kube::ResourceExt;
use reprise_e2e::{PATIENCE, wait_until};
use serde_json::{Value, json};

use crate::lab::{Lab, NOBODY, SPACE};
use crate::queues::{GRANTED, KIND, agent_says, ask, wait_gone};

fn run(lab: &Lab, arguments: &[&str]) -> Output {
    lab.operator_files("hook").command(arguments).output().expect("the operator can be started")
}

/// Starts a deletion of the release `r`.
fn delete(lab: &Lab, seconds: &str) -> Child {
    let arguments = ["delete", "--release", "r", "--namespace", SPACE, "--timeout-seconds", seconds];
    let mut command = lab.operator_files("hook").command(&arguments);
    command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the operator can be started")
}

/// Applies a cluster, two pools and a tenant as a release.
fn install(lab: &Lab) {
    let cluster = json!({
        "apiVersion": "reprise.dev/v1alpha1", "kind": "KVCacheCluster", "metadata": { "name": "c" },
        "spec": {
            "etcd": { "mode": "External", "external": { "endpoints": [lab.etcd.endpoint()] } },
            "pools": [{ "name": "p" }],
        },
    });
    let pool = |name: &str, more: Value| {
        let mut spec = json!({ "directory": { "path": format!("/var/lib/{name}"), "size": "64Mi" } });
        spec.as_object_mut().expect("made above").extend(more.as_object().expect("fields").clone());
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
    let path = lab.world.folder().join("release.yaml");
    std::fs::write(&path, text).expect("a file can be written");
    let path = path.to_str().expect("folders of tests are UTF-8");
    let output = run(lab, &["apply", "--namespace", SPACE, "--release", "r", path]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

/// Plays Kubernetes: what has the cluster as its owner goes, and then the cluster.
fn collect_garbage(lab: &Lab) {
    for (name, object) in lab.made() {
        let owners = object.metadata.owner_references.unwrap_or_default();
        if owners.iter().any(|owner| owner.kind == "KVCacheCluster") {
            let (kind, name) = name.split_once('/').expect("kind and name");
            lab.delete(kind, name);
        }
    }
    lab.merge("KVCacheCluster", "c", &json!({ "metadata": { "finalizers": null } }));
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn a_release_takes_what_it_has_applied_with_it_and_leaves_everything_else() {
    let lab = Lab::new();
    let operator = lab.operator();
    install(&lab);
    lab.pool("mine", "/var/lib/mine", json!({}));
    lab.wait_for("DaemonSet", "c-agent");
    lab.wait_for("CacheNode", "n1");
    lab.wait_for("ClusterRoleBinding", "reprise-cache-c-agent");
    // The control plane is away, and cannot be told that the tenant's budget ends.
    lab.wait_condition("CacheTenant", "u", ["BudgetApplied", "False", "ControlPlaneUnreachable"]);

    let deletion = delete(&lab, "45");
    lab.wait_condition("CacheTenant", "u", ["DeletionBlocked", "True", "Releasing"]);
    wait_until("the cluster is being deleted", PATIENCE, || {
        let cluster = lab.get("KVCacheCluster", "c")?;
        cluster.metadata.deletion_timestamp.map(|_| ())
    });
    assert!(lab.get("CacheTenant", "t").is_none(), "tenants go before the clusters");
    assert!(lab.get("SSDPool", "p").is_some(), "pools that keep their data go after them");
    collect_garbage(&lab);
    let output = deletion.wait_with_output().expect("it ends");
    assert!(output.status.success(), "{}", said(&output));
    for (kind, name) in [
        ("KVCacheCluster", "c"),
        ("CacheTenant", "u"),
        ("SSDPool", "p"),
        ("CacheNode", "n1"),
        ("CacheNode", "n2"),
        ("ClusterRoleBinding", "reprise-cache-c-agent"),
    ] {
        assert!(lab.get(kind, name).is_none(), "{kind} {name} is there still");
    }
    assert!(lab.get("SSDPool", "mine").is_some(), "it is somebody else's");
    // Its data is to be destroyed, and nobody has confirmed it.
    assert!(
        lab.get("SSDPool", "q").is_some() && said(&output).contains("nobody has confirmed"),
        "{}",
        said(&output)
    );
    operator.kill();
}

#[test]
fn what_does_not_go_in_time_is_named_with_what_it_waits_for() {
    let lab = Lab::new();
    let operator = lab.operator();
    install(&lab);
    lab.wait_for("DaemonSet", "c-agent");
    lab.wait_for("CacheNode", "n2");
    // Nobody collects the garbage.
    let output = delete(&lab, "3").wait_with_output().expect("it ends");
    let words = said(&output);
    assert!(!output.status.success(), "{words}");
    for named in
        ["KVCacheCluster c", "DaemonSet c-agent", "StatefulSet c-controlplane", "CacheNode n2", "after 3s"]
    {
        assert!(words.contains(named), "{named}: {words}");
    }
    // It is gone on with where it was.
    let deletion = delete(&lab, "45");
    std::thread::sleep(Duration::from_millis(500));
    collect_garbage(&lab);
    let output = deletion.wait_with_output().expect("it ends");
    assert!(output.status.success(), "{}", said(&output));
    assert!(lab.get("CacheNode", "n2").is_none() && lab.get("SSDPool", "p").is_none());
    operator.kill();
}

/// A cluster on one node with a pool of devices, as it is applied.
fn on_node(lab: &Lab, cluster: &str, node: &str, pool: &str) -> [Value; 2] {
    let spec = json!({
        "etcd": { "mode": "External", "external": { "endpoints": [lab.etcd.endpoint()] } },
        "cache": { "dram": "64Mi", "regionSize": "2Mi" },
        "agents": { "nodeSelector": { "name": node } },
        "pools": [{ "name": pool }],
    });
    let devices = json!({ "devices": { "globs": ["/dev/disk/by-id/nvme-*"] } });
    let object = |kind: &str, name: &str, spec: Value| json!({ "apiVersion": "reprise.dev/v1alpha1", "kind": kind, "metadata": { "name": name }, "spec": spec });
    [object("SSDPool", pool, devices), object("KVCacheCluster", cluster, spec)]
}

#[test]
fn grants_end_with_the_agents_of_a_release_and_those_that_stay_are_named() {
    let lab = Lab::new();
    let files = lab.operator_files("operator").control_plane(&format!("{SPACE}/d"), NOBODY);
    let operator = files.start().expect("the operator starts");
    let path = lab.world.folder().join("release.yaml");
    let text = on_node(&lab, "c", "n1", "p").map(|object| object.to_string()).join("\n---\n");
    std::fs::write(&path, text).expect("a file can be written");
    let path = path.to_str().expect("folders of tests are UTF-8");
    let output = run(&lab, &["apply", "--namespace", SPACE, "--release", "r", path]);
    assert!(output.status.success(), "{}", said(&output));
    for object in on_node(&lab, "d", "n2", "mine") {
        lab.apply(&object);
    }
    for (node, pool) in [("n1", "p"), ("n2", "mine")] {
        wait_until("the node has its claim", PATIENCE, || {
            lab.get("CacheNode", node)?.data["spec"]["claims"].is_array().then_some(())
        });
        let controllers = json!([{ "serial": "S1", "pool": pool, "queuePairs": 32, "queuePairsLent": 0 }]);
        agent_says(&lab, node, &[], &[], json!({ "controllers": controllers }));
    }
    ask(&lab, "ends", json!({ "queuePairs": 4 }));
    ask(&lab, "goes", json!({ "queuePairs": 4 }));
    ask(&lab, "stays", json!({ "nodeName": "n2", "poolRef": { "name": "mine" } }));
    for name in ["ends", "goes", "stays"] {
        lab.wait_condition(KIND, name, GRANTED);
    }
    let controllers = json!([{ "serial": "S1", "pool": "p", "queuePairs": 32, "queuePairsLent": 0 }]);
    let says = json!({ "controllers": controllers, "observedGeneration": 1 });
    agent_says(&lab, "n1", &[], &[("goes", 4)], says);
    lab.delete(KIND, "goes");
    lab.wait_condition(KIND, "goes", ["DeletionBlocked", "True", "Releasing"]);

    let deletion = delete(&lab, "45");
    wait_until("the cluster is being deleted", PATIENCE, || {
        let cluster = lab.get("KVCacheCluster", "c")?;
        cluster.metadata.deletion_timestamp.map(|_| ())
    });
    collect_garbage(&lab);
    lab.wait_condition(KIND, "ends", ["Released", "False", "Releasing"]);
    // Its pod is stopped.
    let left = json!([{
        "type": "AgentReady", "status": "False", "reason": "AgentGone", "lastTransitionTime": "2026-01-01T00:00:00Z",
    }]);
    let last = json!({ "controllers": controllers, "conditions": left, "observedGeneration": 1 });
    agent_says(&lab, "n1", &[], &[], last);
    let output = deletion.wait_with_output().expect("it ends");
    let words = said(&output);
    assert!(output.status.success(), "{words}");
    // The operator goes now, and nothing of it holds them.
    operator.kill();
    lab.wait_condition(KIND, "ends", ["Released", "True", "AgentGone"]);
    lab.delete(KIND, "ends");
    for name in ["ends", "goes"] {
        wait_gone(&lab, name);
    }
    let stays = lab.get(KIND, "stays").expect("it is there");
    assert_eq!(stays.finalizers(), ["reprise.dev/queues"]);
    assert!(words.contains("cache/stays") && words.contains("the allocation stays"), "{words}");
    assert!(!words.contains("cache/ends"), "{words}");
}
