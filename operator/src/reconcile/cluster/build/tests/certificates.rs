//! Certificates of agents, members and etcd: their sidecars, volumes and settings.

use std::collections::BTreeMap;

use super::*;

/// Returns the mounts of a container by their volume.
fn mounts(container: &Value) -> BTreeMap<&str, &str> {
    let mounts = container["volumeMounts"].as_array().expect("mounts").iter();
    mounts
        .map(|mount| (mount["name"].as_str().expect("a name"), mount["mountPath"].as_str().expect("a path")))
        .collect()
}

#[test]
fn sidecar_gets_the_certificate_and_the_process_only_reads_it() {
    let children = built(json!({}), |_| ());
    let run = "/run/reprise/certificates";
    for (kind, name, identity, volume, folder) in [
        (ChildKind::DaemonSet, "c-agent", "reprise://c.n/agent/$(NODE_NAME)", "certificates", run),
        (ChildKind::StatefulSet, "c-controlplane", "reprise://c.n/member", "certificates", run),
        (ChildKind::StatefulSet, "c-etcd", "reprise://c.n/etcd", "data", "/var/lib/etcd"),
    ] {
        let pod = pod(child(&children, kind, name));
        let (process, sidecar) = (&pod["containers"][0], &pod["initContainers"][0]);
        assert_eq!(sidecar["restartPolicy"], "Always", "it keeps running");
        let variables = sidecar["env"].as_array().expect("variables");
        assert_eq!(variables.last(), Some(&json!({ "name": "REPRISE_IDENTITY", "value": identity })));
        let check = sidecar["startupProbe"]["exec"]["command"].as_array().expect("a command");
        assert_eq!(check.last(), Some(&json!("--check")), "the process starts with a certificate");
        let (own, other) = (mounts(process), mounts(sidecar));
        assert_eq!((own[volume], other[volume]), (folder, folder));
        assert!(!own.contains_key("authorities") && !own.contains_key("api-token"), "{name}: {own:?}");
        let mut volumes = pod["volumes"].as_array().expect("volumes").iter();
        let in_memory = volumes.find(|one| one["name"] == "certificates");
        // The key of etcd is next to its data, so that it outlives the pod.
        assert_eq!(in_memory.is_some(), name != "c-etcd", "{name}");
        assert!(in_memory.is_none_or(|volume| volume["emptyDir"]["medium"] == "Memory"), "{name}");
        // The processes of members and etcd have no token; their sidecars have one.
        let has_token = name == "c-agent";
        assert_eq!(pod["automountServiceAccountToken"], json!(has_token));
        assert_eq!(other.contains_key("api-token"), !has_token, "{name}");
    }
}

#[test]
fn monitors_scrape_with_the_certificate_for_scrapers() {
    let children = built(json!({ "monitoring": { "mode": "PodMonitor" } }), |_| ());
    for (name, server) in [("c-agent", "agent.reprise"), ("c-controlplane", "member.reprise")] {
        let endpoint = &child(&children, ChildKind::PodMonitor, name)["spec"]["podMetricsEndpoints"][0];
        assert_eq!(endpoint["scheme"], "https");
        assert_eq!(endpoint["tlsConfig"]["serverName"], server);
        assert_eq!(endpoint["tlsConfig"]["keySecret"], json!({ "name": "c-console", "key": "tls.key" }));
    }
    let etcd = &child(&children, ChildKind::PodMonitor, "c-etcd")["spec"]["podMetricsEndpoints"][0];
    assert_eq!(*etcd, json!({ "port": "metrics", "path": "/metrics" }));
}
