//! Children of a cluster: creation, readiness, foreign edits, pause and deletion.

use std::fs;
use std::process::Command;

use kube::ResourceExt;
use reprise_e2e::process::{StartingProcess, binary};
use reprise_e2e::{PATIENCE, control_plane, wait_until};
use serde_json::{Value, json};

use crate::operator::field_ownership::{wait_restored, wait_warning};
use crate::operator::test_cluster::{OTHER_MANAGER, TestCluster, versions};

#[test]
fn cluster_creates_workloads_and_status_reports_their_readiness() {
    let (k8s, operator) = TestCluster::with_operator();
    k8s.pool("p", "/var/lib/pool", json!({}));
    k8s.cluster(json!({ "pools": [{ "name": "p" }] }));
    for (kind, name) in [
        ("ServiceAccount", "c-agent"),
        ("ClusterRoleBinding", "reprise-cache-c-agent"),
        ("ConfigMap", "c-agent"),
        ("ConfigMap", "c-controlplane"),
        ("ConfigMap", "c-connection"),
        ("Service", "c-agent"),
        ("Service", "c-controlplane"),
        ("Service", "c-controlplane-members"),
        ("PodDisruptionBudget", "c-controlplane"),
        ("StatefulSet", "c-controlplane"),
        ("DaemonSet", "c-agent"),
        ("CacheNode", "n1"),
        ("CacheNode", "n2"),
    ] {
        k8s.wait_for(kind, name);
    }
    k8s.wait_message("KVCacheCluster", "c", ["AgentsReady", "False", "Progressing"], &["0 of 2", "n1"]);
    k8s.make_members_ready();
    for node in ["n1", "n2"] {
        k8s.agent_reports(node, "Open");
    }
    for condition in ["Accepted", "EtcdReady", "ControlPlaneReady", "AgentsReady", "PoolsBound", "Ready"] {
        k8s.wait_condition("KVCacheCluster", "c", [condition, "True", "AsDesired"]);
    }
    let status = k8s.get("KVCacheCluster", "c").expect("the object exists").data["status"].clone();
    assert_eq!(status["agents"]["ready"], 2);
    assert_eq!(status["connection"]["configMap"], "c-connection");
    assert_eq!(status["versions"]["agentMin"], "0.1.0");
    // Changes of conditions cause events.
    wait_until("an event reports that the cluster is ready", PATIENCE, || {
        let is_reported = k8s.list("Event").into_iter().any(|event| event.data["action"] == "Ready");
        is_reported.then_some(())
    });
    assert!(operator.terminate().success());
}

#[test]
fn agent_and_member_start_with_generated_configurations() {
    let (k8s, _operator) = TestCluster::with_operator();
    k8s.pool("p", "/var/lib/pool", json!({ "segmentSize": "4Mi" }));
    let tenant = json!({ "perNode": { "ssd": { "reserved": "0", "limit": "1Gi" } }, "number": 7 });
    k8s.apply_resource("CacheTenant", "team", tenant);
    k8s.cluster(json!({ "pools": [{ "name": "p" }], "controlPlane": { "events": { "publish": {} } } }));
    let file = |map: &str, file: &str| {
        let map = k8s.wait_for("ConfigMap", map);
        map.data["data"][file].as_str().expect("a file").to_owned()
    };
    // Only ports and paths are replaced: the generated ones are for pods, and tests run in parallel.
    let free = |text: &str| {
        let mut config: toml::Table = text.parse().expect("TOML");
        for (section, key) in [("", "listen"), ("", "admin"), ("peers", "listen"), ("admin", "listen")] {
            let table = if section.is_empty() {
                Some(&mut config)
            } else {
                config.get_mut(section).and_then(|at| at.as_table_mut())
            };
            if let Some(value) = table.and_then(|table| table.get_mut(key)).filter(|value| value.is_str()) {
                *value = "127.0.0.1:0".into();
            }
        }
        if let Some(events) = config.get_mut("events").and_then(|events| events.as_table_mut()) {
            for key in ["publish", "replay"] {
                assert!(events.contains_key(key), "{events}");
                events.insert(key.to_owned(), "127.0.0.1:0".into());
            }
        }
        // No sidecar has put certificates there.
        let tls = config["tls"].as_table_mut().expect("a section");
        assert_eq!(tls["folder"].as_str(), Some("/run/reprise/certificates"));
        *tls = toml::Table::from_iter([("plain".to_owned(), true.into())]);
        config
    };
    let folder = k8s.env.folder();
    let member = free(&file("c-controlplane", "c-controlplane-0.toml"));
    let path = folder.join("member.toml");
    fs::write(&path, member.to_string()).expect("a file can be written");
    let starting = StartingProcess::spawn(control_plane::command(&path), &folder.join("member.log"));
    let (_member, ready) = starting.ready().expect("a member starts with its configuration");
    assert!(ready["grpc"].is_string());

    let mut agent = free(&file("c-agent", "agent.toml"));
    let session = agent["session"].as_table_mut().expect("a section");
    assert_eq!(session["socket"].as_str(), Some("/run/reprise/agent.sock"));
    session.insert("socket".to_owned(), folder.join("agent.sock").display().to_string().into());
    // No volume is mounted there.
    let encryption = agent["encryption"].as_table_mut().expect("a section");
    assert_eq!(encryption["keys"].as_str(), Some("/etc/reprise-keys"));
    let keys = folder.join("encryption-keys");
    fs::create_dir(&keys).expect("a folder can be created");
    encryption.insert("keys".to_owned(), keys.display().to_string().into());
    let control_plane = agent["controlplane"].as_table_mut().expect("a section");
    control_plane.insert("address".to_owned(), ready["grpc"].as_str().expect("checked above").into());
    let path = folder.join("agent.toml");
    fs::write(&path, agent.to_string()).expect("a file can be written");
    let mut command = Command::new(binary("reprise-agent"));
    command.arg("--config").arg(&path);
    let starting = StartingProcess::spawn(command, &folder.join("agent.log"));
    let (_agent, ready) = starting.ready().expect("an agent starts with its configuration");
    assert_eq!(ready["ready"], true);
}

#[test]
fn foreign_edits_are_restored_and_deleted_children_recreated() {
    let (k8s, operator) = TestCluster::with_operator();
    k8s.cluster(json!({}));
    let before = k8s.wait_for("ConfigMap", "c-agent").data["data"].clone();
    k8s.wait_for("DaemonSet", "c-agent");

    // A field of a configuration.
    let edit = json!({ "data": { "agent.toml": "# mine now" } });
    k8s.merge("ConfigMap", "c-agent", &edit);
    wait_until("the configuration is restored", PATIENCE, || {
        (k8s.get("ConfigMap", "c-agent")?.data["data"] == before).then_some(())
    });

    // A field of a workload. Another field of the same manager is kept.
    let members = k8s.wait_for("StatefulSet", "c-controlplane").data["spec"]["replicas"].clone();
    assert_ne!(members, 3);
    k8s.apply(&json!({
        "apiVersion": "apps/v1", "kind": "StatefulSet", "metadata": { "name": "c-controlplane", "labels": { "theirs": "yes" } },
        "spec": { "replicas": 3 },
    }));
    wait_restored(&k8s, "StatefulSet", "c-controlplane", "/spec/replicas", Some(&members));
    wait_warning(
        &k8s,
        ("KVCacheCluster", "c"),
        "SetBack",
        &[OTHER_MANAGER, "spec.replicas", "c-controlplane"],
    );
    assert!(operator.metric("reprise_operator_put_backs_total", "kind=\"StatefulSet\"") >= 1.0);
    let kept = k8s.wait_for("StatefulSet", "c-controlplane");
    assert_eq!(kept.labels().get("theirs").map(String::as_str), Some("yes"));
    k8s.wait_condition("KVCacheCluster", "c", ["Ready", "False", "Progressing"]);

    for (kind, name) in [("DaemonSet", "c-agent"), ("Service", "c-controlplane"), ("CacheNode", "n1")] {
        let gone = k8s.wait_for(kind, name).uid();
        k8s.delete(kind, name);
        wait_until(&format!("{kind} {name} is re-created"), PATIENCE, || {
            k8s.get(kind, name).filter(|found| found.uid() != gone).map(|_| ())
        });
    }
}

#[test]
fn unowned_object_with_child_name_is_left_unchanged() {
    let k8s = TestCluster::new();
    k8s.apply(&json!({
        "apiVersion": "v1", "kind": "ConfigMap", "metadata": { "name": "c-agent" }, "data": { "mine": "yes" },
    }));
    let _operator = k8s.operator();
    k8s.cluster(json!({}));
    k8s.wait_message("KVCacheCluster", "c", ["Ready", "False", "Conflict"], &["ConfigMap c-agent"]);
    assert_eq!(
        k8s.get("ConfigMap", "c-agent").expect("the object exists").data["data"],
        json!({ "mine": "yes" })
    );
    // The other children are created, and this one as soon as its name is free.
    k8s.wait_for("StatefulSet", "c-controlplane");
    k8s.delete("ConfigMap", "c-agent");
    wait_until("the operator creates the ConfigMap", PATIENCE, || {
        let found = k8s.get("ConfigMap", "c-agent")?;
        found.data["data"]["agent.toml"].is_string().then_some(())
    });
}

#[test]
fn paused_cluster_is_unchanged_and_obsolete_children_are_deleted() {
    let (k8s, _operator) = TestCluster::with_operator();
    k8s.cluster(json!({ "paused": true }));
    k8s.wait_condition("KVCacheCluster", "c", ["Progressing", "False", "Paused"]);
    k8s.settle();
    assert!(k8s.operator_objects().is_empty(), "{:?}", versions(&k8s.operator_objects()));
    k8s.cluster(json!({}));
    k8s.wait_for("CacheNode", "n2");
    // The cluster no longer selects n2.
    k8s.cluster(json!({ "agents": { "nodeSelector": { "name": "n1" } } }));
    wait_until("the CacheNode of n2 is deleted", PATIENCE, || {
        k8s.get("CacheNode", "n2").is_none().then_some(())
    });
    k8s.wait_for("CacheNode", "n1");
    // A ConfigMap of an older release, which has the cluster's label and is obsolete.
    let uid = k8s.get("KVCacheCluster", "c").and_then(|cluster| cluster.uid()).expect("the object exists");
    let labels: Value =
        json!({ "app.kubernetes.io/managed-by": "reprise-operator", "reprise.dev/cluster-uid": uid });
    k8s.apply(&json!({
        "apiVersion": "v1", "kind": "ConfigMap", "metadata": { "name": "c-old", "labels": labels }, "data": {},
    }));
    wait_until("the obsolete ConfigMap is deleted", PATIENCE, || {
        k8s.get("ConfigMap", "c-old").is_none().then_some(())
    });
    // A ClusterRoleBinding has no owner, so garbage collection would not delete it.
    assert!(k8s.get("ClusterRoleBinding", "reprise-cache-c-agent").is_some());
    k8s.delete("KVCacheCluster", "c");
    wait_until("the binding is deleted", PATIENCE, || {
        k8s.get("ClusterRoleBinding", "reprise-cache-c-agent").is_none().then_some(())
    });
    wait_until("the CacheNode is deleted", PATIENCE, || k8s.get("CacheNode", "n1").is_none().then_some(()));
}
