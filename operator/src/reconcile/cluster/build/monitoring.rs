//! PodMonitors for the Prometheus operator: one for agents, one for members, and one for a managed etcd.

use reprise_crds::KVCacheCluster;
use reprise_crds::cluster::{EtcdMode, MonitoringMode};
use reprise_identity::credentials::{AUTHORITIES_FILE, CERTIFICATE_FILE, KEY_FILE};
use serde_json::{Value, json};

use super::metadata::metadata;
use crate::framework::child::{Child, ChildKind};
use crate::reconcile::names::{ClusterNames, Component};

pub(super) fn build(cluster: &KVCacheCluster, names: &ClusterNames) -> Vec<Child> {
    if cluster.spec.monitoring.mode == MonitoringMode::None {
        return Vec::new();
    }
    // Agents and members admit scrapers with a certificate only; their own names are in their certificates.
    let secured = |endpoint: &mut Value, server: &str| {
        let entry = |name: String, key: &str| json!({ "name": name, "key": key });
        endpoint["scheme"] = json!("https");
        endpoint["tlsConfig"] = json!({
            "serverName": server,
            "ca": { "configMap": entry(names.authorities(), AUTHORITIES_FILE) },
            "cert": { "secret": entry(names.console(), CERTIFICATE_FILE) },
            "keySecret": entry(names.console(), KEY_FILE),
        });
    };
    let monitor = |component: Component, name: String, port: &str| {
        let mut endpoint = json!({ "port": port, "path": "/metrics" });
        match component {
            Component::Agent => secured(&mut endpoint, "agent.reprise"),
            Component::ControlPlane => secured(&mut endpoint, "member.reprise"),
            Component::Etcd => {}
        }
        let rest = json!({
            "spec": {
                "selector": { "matchLabels": names.selector(component) },
                // The cluster of a pod becomes a label of its metrics.
                "podTargetLabels": ["app.kubernetes.io/instance"],
                "podMetricsEndpoints": [endpoint],
            },
        });
        let metadata = metadata(cluster, names, component, &name);
        Child::new(ChildKind::PodMonitor, metadata, &rest)
    };
    let mut monitors = vec![
        monitor(Component::Agent, names.agent(), "admin"),
        monitor(Component::ControlPlane, names.control_plane(), "admin"),
    ];
    if cluster.spec.etcd.mode == EtcdMode::Managed {
        // etcd serves its metrics on a separate port without TLS.
        monitors.push(monitor(Component::Etcd, names.etcd(), "metrics"));
    }
    monitors
}
