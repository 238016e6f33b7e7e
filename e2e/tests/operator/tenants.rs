//! Tenants: configuration of agents, feasibility of reservations, mapping of pods, and conflicts.

use k8s_openapi::ByteString;
use reprise_e2e::{PATIENCE, wait_until};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use crate::operator::test_cluster::{TestCluster, sha256};

fn tenant(k8s: &TestCluster, name: &str, spec: &Value) {
    k8s.apply_resource("CacheTenant", name, spec);
}

#[test]
fn tenant_reservations_are_checked_against_node_capacity() {
    let (k8s, _operator) = TestCluster::with_operator();
    let reserves = |size: &str| json!({ "perNode": { "ssd": { "reserved": size } } });
    tenant(&k8s, "a", &reserves("48Mi"));
    k8s.cluster(json!({}));
    k8s.wait_condition("CacheTenant", "a", ["QuotaFeasible", "Unknown", "NotReported"]);
    let is_configured = |words: &str| {
        let config = k8s.get("ConfigMap", "c-agent")?;
        config.data["data"]["agent.toml"].as_str()?.contains(words).then_some(())
    };
    wait_until("the agents' configuration has the reservation", PATIENCE, || is_configured("48MiB"));
    // Each node reports 64Mi.
    for node in ["n1", "n2"] {
        k8s.agent_reports(node, "Open");
    }
    // Two reservations together exceed the capacity.
    tenant(&k8s, "b", &reserves("32Mi"));
    k8s.wait_message("CacheTenant", "b", ["QuotaFeasible", "False", "OverCapacity"], &["n1", "80Mi", "a, b"]);
    k8s.wait_condition("CacheTenant", "a", ["Ready", "False", "OverCapacity"]);
    tenant(&k8s, "b", &reserves("16Mi"));
    for name in ["a", "b"] {
        k8s.wait_condition("CacheTenant", name, ["Ready", "True", "AsDesired"]);
    }
    let counted = json!({ "maxGpuQueuePairs": 1, "perNode": { "ssd": { "limit": "17Mi" } } });
    tenant(&k8s, "c", &counted);
    k8s.wait_message("CacheTenant", "c", ["Accepted", "False", "Unsupported"], &["maxGpuQueuePairs"]);
    wait_until("the agents' configuration has b's new reservation", PATIENCE, || is_configured("16MiB"));
    assert!(is_configured("17MiB").is_none());
}

/// The file that maps pods to tenants, and its digest as agents report it.
fn tenant_map(k8s: &TestCluster) -> Option<(Value, String)> {
    let data = k8s.get("ConfigMap", "c-agent-tenants")?.data["data"].clone();
    let text = data["_tenants.json"].as_str()?;
    Some((serde_json::from_str(text).expect("JSON"), sha256(text.as_bytes())))
}

#[test]
fn pod_tenants_follow_namespaces_without_agent_restart() {
    let (k8s, _operator) = TestCluster::with_operator();
    let team = json!({ "namespaceSelector": { "matchLabels": { "team": "a" } } });
    let space = |name: &str, labels: Value| {
        k8s.apply(&json!({ "apiVersion": "v1", "kind": "Namespace", "metadata": { "name": name, "labels": labels } }));
    };
    k8s.cluster(json!({}));
    tenant(&k8s, "team-a", &team);
    // The file names the tenant even without pods.
    let kept = wait_until("the file names the tenant", PATIENCE, || {
        tenant_map(&k8s).filter(|(file, _)| file["tenants"] == json!(["team-a"]))
    });
    assert_eq!(kept.0["namespaces"], json!({}));
    k8s.wait_message("CacheTenant", "team-a", ["PodsBound", "True", "AsDesired"], &["2 nodes do not report"]);
    k8s.agent_reports("n1", "Open");
    k8s.wait_message("CacheTenant", "team-a", ["PodsBound", "False", "NotReported"], &["(n1)"]);
    let agents = k8s.wait_for("DaemonSet", "c-agent").data["spec"].clone();

    space("chat", json!({ "team": "a" }));
    let account = json!([{ "namespace": "chat", "name": "batch" }]);
    tenant(&k8s, "team-b", &json!({ "serviceAccounts": account }));
    let (file, digest) = wait_until("the file maps the namespace", PATIENCE, || {
        tenant_map(&k8s).filter(|(file, _)| {
            file["namespaces"]["chat"] == "team-a" && file["serviceAccounts"]["chat.batch"] == "team-b"
        })
    });
    assert_eq!(file["tenants"], json!(["team-a", "team-b"]));
    k8s.agent_reports_with("n1", "Open", |status| status["applied"]["tenantsDigest"] = json!(digest));
    k8s.agent_reports_with("n2", "Open", |status| {
        status["applied"]["tenantsDigest"] = json!(format!("sha256:{}", "0".repeat(64)));
    });
    k8s.wait_condition("CacheTenant", "team-a", ["PodsBound", "False", "Progressing"]);
    k8s.agent_reports_with("n2", "Open", |status| status["applied"]["tenantsDigest"] = json!(digest));
    k8s.wait_message("CacheTenant", "team-a", ["PodsBound", "True", "AsDesired"], &["1 namespaces"]);

    // A younger tenant that selects the same namespace reports a conflict and changes nothing.
    tenant(&k8s, "team-c", &team);
    k8s.wait_message(
        "CacheTenant",
        "team-c",
        ["PodsBound", "False", "Conflict"],
        &["namespace chat belongs to team-a"],
    );
    k8s.wait_condition("CacheTenant", "team-c", ["Ready", "False", "Conflict"]);
    k8s.delete("CacheTenant", "team-c");

    // A namespace without the label has no tenant.
    space("more", json!({ "team": "a" }));
    space("chat", json!({}));
    wait_until("the file follows the labels", PATIENCE, || {
        tenant_map(&k8s).filter(|(file, _)| file["namespaces"] == json!({ "more": "team-a" }))
    });
    k8s.delete("CacheTenant", "team-a");
    k8s.delete("CacheTenant", "team-b");
    wait_until("the file names no tenant", PATIENCE, || {
        tenant_map(&k8s).filter(|(file, _)| file["tenants"] == json!([]))
    });
    assert_eq!(k8s.wait_for("DaemonSet", "c-agent").data["spec"], agents, "no agent was restarted");
}

#[test]
fn keys_of_an_encrypted_tenant_are_copied_rotated_and_erased_with_their_secret() {
    let (k8s, _operator) = TestCluster::with_operator();
    k8s.cluster(json!({}));
    let [first, second] = ["1", "2"].map(|digit| digit.repeat(64));
    let secret = |keys: &str| {
        let metadata = json!({ "name": "kv-key" });
        k8s.apply(&json!({ "apiVersion": "v1", "kind": "Secret", "metadata": metadata, "stringData": { "key": keys } }));
    };
    let namespace = k8s.wait_for("ConfigMap", "c-agent").metadata.namespace.expect("it has a namespace");
    let reference = json!({ "namespace": namespace, "name": "kv-key", "key": "key" });
    tenant(&k8s, "team-a", &json!({ "isolation": "Encrypted", "keySecretRef": reference }));
    k8s.wait_message(
        "CacheTenant",
        "team-a",
        ["KeyAvailable", "False", "Releasing"],
        &["kv-key", "does not exist"],
    );
    let entry = |secret: &str| {
        let data = k8s.get("Secret", secret)?.data["data"].get("team-a")?.clone();
        let ByteString(bytes) = serde_json::from_value(data).ok()?;
        Some(String::from_utf8(bytes).expect("text"))
    };
    let salt = wait_until("the salt declares the encryption", PATIENCE, || entry("c-salts"));
    assert!(salt.ends_with("\nencrypted\n"), "{salt}");
    assert_eq!(entry("c-keys"), None);

    secret(&first);
    k8s.wait_condition("CacheTenant", "team-a", ["KeyAvailable", "True", "AsDesired"]);
    assert_eq!(entry("c-keys"), Some(format!("{first}\n")));
    let agents = k8s.wait_for("DaemonSet", "c-agent").data["spec"].clone();
    secret(&format!("{second}\n{first}"));
    wait_until("the copy has the new key", PATIENCE, || {
        (entry("c-keys")? == format!("{second}\n{first}\n")).then_some(())
    });
    secret("not a key");
    k8s.wait_message(
        "CacheTenant",
        "team-a",
        ["KeyAvailable", "False", "SecretInvalid"],
        &["64 hexadecimal digits"],
    );
    assert_eq!(entry("c-keys"), Some(format!("{second}\n{first}\n")), "an invalid entry erases nothing");

    k8s.delete("Secret", "kv-key");
    k8s.wait_condition("CacheTenant", "team-a", ["KeyAvailable", "False", "Releasing"]);
    assert_eq!(entry("c-keys"), None);
    assert_eq!(entry("c-salts"), Some(salt));
    assert_eq!(k8s.wait_for("DaemonSet", "c-agent").data["spec"], agents, "no agent was restarted");
}

#[test]
fn younger_tenant_with_the_number_of_another_is_rejected_until_its_number_differs() {
    let (k8s, _operator) = TestCluster::with_operator();
    // The number of tenant t comes from its name.
    let digest = Sha256::digest(b"t");
    let number = u16::from_le_bytes([digest[0], digest[1]]);
    let limited = |number: u16| json!({ "number": number, "perNode": { "ssd": { "limit": "17Mi" } } });
    k8s.cluster(json!({}));
    tenant(&k8s, "old", &limited(number));
    k8s.wait_condition("CacheTenant", "old", ["Accepted", "True", "AsDesired"]);
    // Age is counted in seconds.
    k8s.wait_for_next_second();
    tenant(&k8s, "t", &json!({ "perNode": { "ssd": { "limit": "18Mi" } } }));
    let words = ["CacheTenant old", "spec.number"];
    k8s.wait_message("CacheTenant", "t", ["Accepted", "False", "Conflict"], &words);
    let config = || {
        k8s.get("ConfigMap", "c-agent")
            .and_then(|map| map.data["data"]["agent.toml"].as_str().map(str::to_owned))
    };
    wait_until("the agents' configuration has the older tenant", PATIENCE, || {
        config()?.contains("17MiB").then_some(())
    });
    assert!(!config().expect("a configuration").contains("18MiB"), "agents would refuse it");
    k8s.merge("CacheTenant", "t", &json!({ "spec": { "number": number.wrapping_add(1).max(1) } }));
    k8s.wait_condition("CacheTenant", "t", ["Accepted", "True", "AsDesired"]);
    wait_until("the agents' configuration has both tenants", PATIENCE, || {
        config()?.contains("18MiB").then_some(())
    });
}

#[test]
fn foreign_secret_is_reported_and_delays_only_children_that_need_it() {
    let (k8s, _operator) = TestCluster::with_operator();
    let foreign = |name: &str| {
        k8s.apply(&json!({ "apiVersion": "v1", "kind": "Secret", "metadata": { "name": name }, "stringData": { "a": "b" } }));
    };
    foreign("c-console");
    k8s.cluster(json!({}));
    k8s.wait_message(
        "KVCacheCluster",
        "c",
        ["Degraded", "True", "Conflict"],
        &["Secret c-console", "delete it"],
    );
    k8s.wait_for("DaemonSet", "c-agent");
    k8s.delete("Secret", "c-console");
    let is_created = || k8s.get("Secret", "c-console")?.data["data"]["tls.key"].is_string().then_some(());
    wait_until("the operator creates the certificate", PATIENCE, is_created);
    k8s.wait_condition("KVCacheCluster", "c", ["Degraded", "False", "AsDesired"]);
    foreign("c-salts");
    tenant(&k8s, "a", &json!({}));
    let words = ["Secret c-salts", "to keep the blocks", "reprise.dev/cluster-uid"];
    k8s.wait_message("KVCacheCluster", "c", ["Degraded", "True", "Conflict"], &words);
    k8s.delete("Secret", "c-salts");
    wait_until("the operator creates the salt", PATIENCE, || {
        k8s.get("Secret", "c-salts")?.data["data"]["a"].is_string().then_some(())
    });
}
