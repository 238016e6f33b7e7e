//! Certificates of agents, members and etcd: their sidecars, volumes and settings.

use std::collections::BTreeMap;

use super::*;

const FOLDER: &str = "/run/reprise/certificates";

fn with_certificates() -> Vec<Child> {
    built(json!({ "monitoring": { "mode": "PodMonitor" } }), |_| ())
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
    let etcd = "/var/lib/etcd";
    for (kind, name, identity, volume, folder) in [
        (ChildKind::DaemonSet, "c-agent", "reprise://c.n/agent/$(NODE_NAME)", "certificates", FOLDER),
        (ChildKind::StatefulSet, "c-controlplane", "reprise://c.n/member", "certificates", FOLDER),
        (ChildKind::StatefulSet, "c-etcd", "reprise://c.n/etcd", "data", etcd),
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
        assert_eq!(own[volume], folder);
        assert_eq!(mounts(sidecar)[volume], folder);
        assert!(!own.contains_key("authorities") && !own.contains_key("api-token"), "{name}: {own:?}");
        let mut volumes = pod["volumes"].as_array().expect("volumes").iter();
        let in_memory = volumes.find(|one| one["name"] == "certificates");
        // The key of etcd is next to its data, so that it outlives the pod.
        assert_eq!(in_memory.is_some(), name != "c-etcd", "{name}");
        assert!(in_memory.is_none_or(|volume| volume["emptyDir"]["medium"] == "Memory"), "{name}");
    }
    // The processes of members and etcd have no token; their sidecars have one.
    for name in ["c-controlplane", "c-etcd"] {
        let pod = pod(child(&children, ChildKind::StatefulSet, name));
        assert_eq!(pod["automountServiceAccountToken"], json!(false));
        assert!(mounts(&pod["initContainers"][0]).contains_key("api-token"));
    }
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
    assert_eq!(*etcd, json!({ "port": "metrics", "path": "/metrics" }));
}
