//! Certificates of agents and members: their sidecars, volumes and settings.

use std::collections::BTreeMap;

use super::*;

const FOLDER: &str = "/run/reprise/certificates";

fn with_certificates() -> Vec<Child> {
    let cluster = cluster(json!({ "monitoring": { "mode": "PodMonitor" } }));
    build(&cluster, &found(&cluster), Some(&certificates()))
}

/// Returns the mounts of a container by their volume.
fn mounts(container: &Value) -> BTreeMap<String, String> {
    let mounts = container["volumeMounts"].as_array().expect("mounts").iter();
    let pair = |mount: &Value| {
        let text = |field: &str| mount[field].as_str().expect("a text").to_owned();
        (text("name"), text("mountPath"))
    };
    mounts.map(pair).collect()
}

#[test]
fn sidecar_gets_the_certificate_and_the_process_only_reads_it() {
    let children = with_certificates();
    for (kind, name, identity) in [
        (ChildKind::DaemonSet, "c-agent", "reprise://c.n/agent/$(NODE_NAME)"),
        (ChildKind::StatefulSet, "c-controlplane", "reprise://c.n/member"),
    ] {
        let pod = pod(child(&children, kind, name));
        let sidecar = &pod["initContainers"][0];
        assert_eq!(sidecar["image"], "operator:1");
        assert_eq!(sidecar["restartPolicy"], "Always", "it keeps running");
        assert_eq!(sidecar["args"][0], "certificate");
        let variables = sidecar["env"].as_array().expect("variables");
        assert_eq!(variables.last(), Some(&json!({ "name": "REPRISE_IDENTITY", "value": identity })));
        let check = sidecar["startupProbe"]["exec"]["command"].as_array().expect("a command");
        assert_eq!(check.last(), Some(&json!("--check")), "the process starts with a certificate");
        let is_replaced = |part: &Value| part.as_str().is_some_and(|part| part.contains("$("));
        assert!(!check.iter().any(is_replaced), "Kubernetes replaces no variables in probes: {check:?}");
        let own = mounts(&pod["containers"][0]);
        assert_eq!(own["certificates"], FOLDER);
        assert!(!own.contains_key("authorities") && !own.contains_key("api-token"), "{name}: {own:?}");
        let certificates = pod["volumes"].as_array().expect("volumes").iter();
        let volume = certificates.into_iter().find(|volume| volume["name"] == "certificates");
        assert_eq!(volume.expect("a volume")["emptyDir"]["medium"], "Memory", "keys are on no disk");
    }
    // The process of a member has no token; its sidecar has one.
    let member = pod(child(&children, ChildKind::StatefulSet, "c-controlplane"));
    assert_eq!(member["automountServiceAccountToken"], json!(false));
    assert!(mounts(&member["initContainers"][0]).contains_key("api-token"));
}

#[test]
fn processes_use_the_folder_and_trust_the_authorities_of_the_config_map() {
    let children = with_certificates();
    let agent = toml_of(child(&children, ChildKind::ConfigMap, "c-agent"), "agent.toml");
    assert_eq!(agent["tls"]["folder"].as_str(), Some(FOLDER));
    let member = toml_of(child(&children, ChildKind::ConfigMap, "c-controlplane"), "c-controlplane-0.toml");
    assert_eq!(member["tls"]["folder"].as_str(), Some(FOLDER));
    let trusted = child(&children, ChildKind::ConfigMap, "c-authorities");
    assert_eq!(trusted["data"]["ca.crt"].as_str(), Some(any_authority().trusted().as_str()));
    let binding = child(&children, ChildKind::ClusterRoleBinding, "reprise-n-c-controlplane");
    assert_eq!(binding["roleRef"]["name"], "reprise-member");
    assert_eq!(binding["subjects"][0]["name"], "c-controlplane");
}

#[test]
fn monitors_scrape_with_the_certificate_for_scrapers() {
    let children = with_certificates();
    for (name, server) in [("c-agent", "agent.reprise"), ("c-controlplane", "member.reprise")] {
        let endpoint = &child(&children, ChildKind::PodMonitor, name)["spec"]["podMetricsEndpoints"][0];
        assert_eq!(endpoint["scheme"], "https");
        assert_eq!(endpoint["tlsConfig"]["serverName"], server);
        assert_eq!(endpoint["tlsConfig"]["keySecret"], json!({ "name": "c-console", "key": "tls.key" }));
    }
    let etcd = &child(&children, ChildKind::PodMonitor, "c-etcd")["spec"]["podMetricsEndpoints"][0];
    assert_eq!(etcd["scheme"], Value::Null);
}
