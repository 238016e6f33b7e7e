//! Tenants: what reaches the agents, whether reservations fit, which pods are whose, and what is refused.

use reprise_e2e::{PATIENCE, wait_until};
use serde_json::{Value, json};

use crate::lab::{Lab, sha256};

fn tenant(lab: &Lab, name: &str, spec: &Value) {
    lab.apply(&json!({
        "apiVersion": "reprise.dev/v1alpha1", "kind": "CacheTenant", "metadata": { "name": name }, "spec": spec,
    }));
}

#[test]
fn reservations_of_tenants_are_compared_with_what_the_nodes_have() {
    let lab = Lab::new();
    let operator = lab.operator();
    let reserves = |size: &str| json!({ "perNode": { "ssd": { "reserved": size } } });
    tenant(&lab, "a", &reserves("48Mi"));
    lab.cluster(json!({}));
    lab.wait_condition("CacheTenant", "a", ["QuotaFeasible", "Unknown", "NotReported"]);
    let told = |words: &str| {
        let config = lab.get("ConfigMap", "c-agent")?;
        config.data["data"]["agent.toml"].as_str()?.contains(words).then_some(())
    };
    wait_until("agents are told of it", PATIENCE, || told("48MiB"));
    // Each node has 64Mi.
    for node in ["n1", "n2"] {
        lab.agent_reports(node, "Open");
    }
    // Another one, and together they are too many. One that is refused changes nothing on nodes.
    tenant(&lab, "b", &reserves("32Mi"));
    let said = lab.wait_condition("CacheTenant", "b", ["QuotaFeasible", "False", "OverCapacity"]);
    assert!(said.contains("n1") && said.contains("80Mi") && said.contains("a, b"), "{said}");
    lab.wait_condition("CacheTenant", "a", ["Ready", "False", "OverCapacity"]);
    tenant(&lab, "b", &reserves("16Mi"));
    for name in ["a", "b"] {
        lab.wait_condition("CacheTenant", name, ["Ready", "True", "AsDesired"]);
    }
    let counted = json!({ "maxGpuQueuePairs": 1, "perNode": { "ssd": { "limit": "17Mi" } } });
    tenant(&lab, "c", &counted);
    let said = lab.wait_condition("CacheTenant", "c", ["Accepted", "False", "Unsupported"]);
    assert!(said.contains("maxGpuQueuePairs"), "{said}");
    wait_until("b's new reservation is told", PATIENCE, || told("16MiB"));
    assert!(told("17MiB").is_none());
    operator.kill();
}

/// Digest of what agents are told of pods, as they say it back.
fn told(lab: &Lab) -> Option<(Value, String)> {
    let data = lab.get("ConfigMap", "c-agent-tenants")?.data["data"].clone();
    let text = data["_tenants.json"].as_str()?;
    Some((serde_json::from_str(text).expect("JSON"), sha256(text.as_bytes())))
}

#[test]
fn pods_of_selected_namespaces_are_a_tenants_and_agents_are_told_without_a_restart() {
    let lab = Lab::new();
    let operator = lab.operator();
    let team = json!({ "namespaceSelector": { "matchLabels": { "team": "a" } } });
    let space = |name: &str, labels: Value| {
        lab.apply(&json!({ "apiVersion": "v1", "kind": "Namespace", "metadata": { "name": name, "labels": labels } }));
    };
    lab.cluster(json!({}));
    tenant(&lab, "team-a", &team);
    // Kept for its pods, of which there are none.
    let kept = wait_until("the tenant to be kept", PATIENCE, || {
        told(&lab).filter(|(file, _)| file["tenants"] == json!(["team-a"]))
    });
    assert_eq!(kept.0["namespaces"], json!({}));
    let said = lab.wait_condition("CacheTenant", "team-a", ["PodsBound", "True", "AsDesired"]);
    assert!(said.contains("2 nodes say nothing"), "{said}");
    lab.agent_reports("n1", "Open");
    let said = lab.wait_condition("CacheTenant", "team-a", ["PodsBound", "False", "NotReported"]);
    assert!(said.contains("(n1)"), "{said}");
    let agents = lab.wait_for("DaemonSet", "c-agent").data["spec"].clone();

    space("chat", json!({ "team": "a" }));
    let account = json!([{ "namespace": "chat", "name": "batch" }]);
    tenant(&lab, "team-b", &json!({ "serviceAccounts": account }));
    let (file, digest) = wait_until("the namespace to be bound", PATIENCE, || {
        told(&lab).filter(|(file, _)| {
            file["namespaces"]["chat"] == "team-a" && file["serviceAccounts"]["chat.batch"] == "team-b"
        })
    });
    assert_eq!(file["tenants"], json!(["team-a", "team-b"]));
    lab.agent_says("n1", "Open", |status| status["applied"]["tenantsDigest"] = json!(digest));
    lab.agent_says("n2", "Open", |status| {
        status["applied"]["tenantsDigest"] = json!(format!("sha256:{}", "0".repeat(64)));
    });
    lab.wait_condition("CacheTenant", "team-a", ["PodsBound", "False", "Progressing"]);
    lab.agent_says("n2", "Open", |status| status["applied"]["tenantsDigest"] = json!(digest));
    let said = lab.wait_condition("CacheTenant", "team-a", ["PodsBound", "True", "AsDesired"]);
    assert!(said.contains("1 namespaces"), "{said}");

    // A younger one that selects the same is told, and changes nothing.
    tenant(&lab, "team-c", &team);
    let said = lab.wait_condition("CacheTenant", "team-c", ["PodsBound", "False", "Conflict"]);
    assert!(said.contains("namespace chat is team-a's"), "{said}");
    lab.wait_condition("CacheTenant", "team-c", ["Ready", "False", "Conflict"]);
    lab.delete("CacheTenant", "team-c");

    // A namespace that is labelled otherwise is nobody's, and one that is gone as well.
    space("more", json!({ "team": "a" }));
    space("chat", json!({}));
    wait_until("the labels to be followed", PATIENCE, || {
        told(&lab).filter(|(file, _)| file["namespaces"] == json!({ "more": "team-a" }))
    });
    lab.delete("CacheTenant", "team-a");
    lab.delete("CacheTenant", "team-b");
    wait_until("nobody to be kept for anybody", PATIENCE, || {
        told(&lab).filter(|(file, _)| file["tenants"] == json!([]))
    });
    assert_eq!(lab.wait_for("DaemonSet", "c-agent").data["spec"], agents, "no agent was restarted");
    operator.kill();
}
