//! What a cluster consists of, and what becomes of edits by others.

use std::fs;
use std::process::Command;

use kube::ResourceExt;
use reprise_e2e::process::{Starting, binary};
use reprise_e2e::{PATIENCE, control_plane, wait_until};
use serde_json::{Value, json};

use crate::lab::{Lab, SETTLED, versions};

#[test]
fn a_cluster_becomes_workloads_and_its_status_says_when_they_are_ready() {
    let lab = Lab::new();
    let operator = lab.operator();
    lab.pool("p", "/var/lib/pool", json!({}));
    lab.cluster(json!({ "pools": [{ "name": "p" }] }));
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
        lab.wait_for(kind, name);
    }
    let said = lab.wait_condition("KVCacheCluster", "c", ["AgentsReady", "False", "Progressing"]);
    assert!(said.contains("0 of 2") && said.contains("n1"), "{said}");
    lab.members_are_ready();
    for node in ["n1", "n2"] {
        lab.agent_reports(node, "Open");
    }
    for condition in ["Accepted", "EtcdReady", "ControlPlaneReady", "AgentsReady", "PoolsBound", "Ready"] {
        lab.wait_condition("KVCacheCluster", "c", [condition, "True", "AsDesired"]);
    }
    let status = lab.get("KVCacheCluster", "c").expect("it is there").data["status"].clone();
    assert_eq!(status["agents"]["ready"], 2);
    assert_eq!(status["connection"]["configMap"], "c-connection");
    assert_eq!(status["versions"]["agentMin"], "0.1.0");
    // Changes of conditions are events.
    wait_until("an event says that it is ready", PATIENCE, || {
        let told = lab.list("Event").into_iter().any(|event| event.data["action"] == "Ready");
        told.then_some(())
    });
    assert!(operator.terminate().success());
}

#[test]
fn agent_and_member_start_with_the_configurations_that_were_made_for_them() {
    let lab = Lab::new();
    let operator = lab.operator();
    lab.pool("p", "/var/lib/pool", json!({ "segmentSize": "4Mi" }));
    let tenant = json!({ "perNode": { "ssd": { "reserved": "0", "limit": "1Gi" } }, "number": 7 });
    lab.apply(&json!({
        "apiVersion": "reprise.dev/v1alpha1", "kind": "CacheTenant", "metadata": { "name": "team" }, "spec": tenant,
    }));
    lab.cluster(json!({ "pools": [{ "name": "p" }], "controlPlane": { "events": { "publish": {} } } }));
    let file = |map: &str, file: &str| {
        let map = lab.wait_for("ConfigMap", map);
        map.data["data"][file].as_str().expect("a file").to_owned()
    };
    // Ports and paths are those of pods, and several tests run at once: nothing else is changed.
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
        config
    };
    let folder = lab.world.folder();
    let member = free(&file("c-controlplane", "c-controlplane-0.toml"));
    let path = folder.join("member.toml");
    fs::write(&path, member.to_string()).expect("a file can be written");
    let starting = Starting::spawn(control_plane::command(&path), &folder.join("member.log"));
    let (_member, ready) = starting.ready().expect("a member starts with what was made for it");
    assert!(ready["grpc"].is_string());

    let mut agent = free(&file("c-agent", "agent.toml"));
    let session = agent["session"].as_table_mut().expect("a section");
    assert_eq!(session["socket"].as_str(), Some("/run/reprise/agent.sock"));
    session.insert("socket".to_owned(), folder.join("agent.sock").display().to_string().into());
    let plane = agent["controlplane"].as_table_mut().expect("a section");
    plane.insert("address".to_owned(), ready["grpc"].as_str().expect("checked above").into());
    let path = folder.join("agent.toml");
    fs::write(&path, agent.to_string()).expect("a file can be written");
    let mut command = Command::new(binary("reprise-agent"));
    command.arg("--config").arg(&path);
    let starting = Starting::spawn(command, &folder.join("agent.log"));
    let (_agent, ready) = starting.ready().expect("an agent starts with what was made for it");
    assert_eq!(ready["ready"], true);
    operator.kill();
}

#[test]
fn what_somebody_changes_is_put_back_or_reported_and_what_is_deleted_comes_back() {
    let lab = Lab::new();
    let operator = lab.operator();
    lab.cluster(json!({}));
    let before = lab.wait_for("ConfigMap", "c-agent").data["data"].clone();
    lab.wait_for("DaemonSet", "c-agent");

    // A field that is ours alone.
    let edit = json!({ "data": { "agent.toml": "# mine now" } });
    lab.merge("ConfigMap", "c-agent", &edit);
    wait_until("the configuration is put back", PATIENCE, || {
        (lab.get("ConfigMap", "c-agent")?.data["data"] == before).then_some(())
    });

    // A field that others may have: reported, and left to them.
    lab.apply(&json!({
        "apiVersion": "apps/v1", "kind": "StatefulSet", "metadata": { "name": "c-controlplane" }, "spec": { "replicas": 3 },
    }));
    let said = lab.wait_condition("KVCacheCluster", "c", ["Ready", "False", "FieldConflict"]);
    assert!(said.contains("somebody") && said.contains("replicas"), "{said}");
    std::thread::sleep(SETTLED);
    assert_eq!(lab.get("StatefulSet", "c-controlplane").expect("it is there").data["spec"]["replicas"], 3);
    // The spec follows: both say the same, and nobody conflicts.
    lab.cluster(json!({ "controlPlane": { "replicas": 3 } }));
    lab.wait_condition("KVCacheCluster", "c", ["Ready", "False", "Progressing"]);

    for (kind, name) in [("DaemonSet", "c-agent"), ("Service", "c-controlplane"), ("CacheNode", "n1")] {
        let gone = lab.wait_for(kind, name).uid();
        lab.delete(kind, name);
        wait_until(&format!("{kind} {name} comes back"), PATIENCE, || {
            lab.get(kind, name).filter(|found| found.uid() != gone).map(|_| ())
        });
    }
    operator.kill();
}

#[test]
fn an_object_of_somebody_else_under_a_name_of_ours_is_left_alone() {
    let lab = Lab::new();
    lab.apply(&json!({
        "apiVersion": "v1", "kind": "ConfigMap", "metadata": { "name": "c-agent" }, "data": { "mine": "yes" },
    }));
    let operator = lab.operator();
    lab.cluster(json!({}));
    let said = lab.wait_condition("KVCacheCluster", "c", ["Ready", "False", "Conflict"]);
    assert!(said.contains("ConfigMap c-agent"), "{said}");
    assert_eq!(lab.get("ConfigMap", "c-agent").expect("it is there").data["data"], json!({ "mine": "yes" }));
    // The others are made all the same, and with the name free this one is.
    lab.wait_for("StatefulSet", "c-controlplane");
    lab.delete("ConfigMap", "c-agent");
    wait_until("the name is taken", PATIENCE, || {
        let found = lab.get("ConfigMap", "c-agent")?;
        found.data["data"]["agent.toml"].is_string().then_some(())
    });
    operator.kill();
}

#[test]
fn a_paused_cluster_is_not_changed_and_what_is_wanted_no_more_goes() {
    let lab = Lab::new();
    let operator = lab.operator();
    lab.cluster(json!({ "paused": true }));
    lab.wait_condition("KVCacheCluster", "c", ["Progressing", "False", "Paused"]);
    std::thread::sleep(SETTLED);
    assert!(lab.made().is_empty(), "{:?}", versions(&lab.made()));
    lab.cluster(json!({}));
    lab.wait_for("CacheNode", "n2");
    // A cluster of fewer nodes.
    lab.cluster(json!({ "agents": { "nodeSelector": { "name": "n1" } } }));
    wait_until("n2 is the cluster's no more", PATIENCE, || {
        lab.get("CacheNode", "n2").is_none().then_some(())
    });
    lab.wait_for("CacheNode", "n1");
    // What has the cluster's label and is not wanted: a ConfigMap of an older release.
    let uid = lab.get("KVCacheCluster", "c").and_then(|cluster| cluster.uid()).expect("it is there");
    let labels: Value =
        json!({ "app.kubernetes.io/managed-by": "reprise-operator", "reprise.dev/cluster-uid": uid });
    lab.apply(&json!({
        "apiVersion": "v1", "kind": "ConfigMap", "metadata": { "name": "c-old", "labels": labels }, "data": {},
    }));
    wait_until("it goes", PATIENCE, || lab.get("ConfigMap", "c-old").is_none().then_some(()));
    // A binding has no owner that would take it along.
    assert!(lab.get("ClusterRoleBinding", "reprise-cache-c-agent").is_some());
    lab.delete("KVCacheCluster", "c");
    wait_until("the binding goes", PATIENCE, || {
        lab.get("ClusterRoleBinding", "reprise-cache-c-agent").is_none().then_some(())
    });
    wait_until("the node goes", PATIENCE, || lab.get("CacheNode", "n1").is_none().then_some(()));
    operator.kill();
}
