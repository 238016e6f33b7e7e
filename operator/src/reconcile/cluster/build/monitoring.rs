//! PodMonitors for the Prometheus operator: one for agents, one for members, and one for a managed etcd.

use reprise_crds::KVCacheCluster;
use reprise_crds::cluster::MonitoringMode;
use reprise_identity::credentials::{AUTHORITIES_FILE, CERTIFICATE_FILE, KEY_FILE};
use serde_json::{Value, json};

use super::metadata::metadata;
use crate::framework::child::{Child, ChildKind};
use crate::reconcile::cluster::etcd::managed;
use crate::reconcile::names::{ClusterNames, Component};

pub(super) fn build(cluster: &KVCacheCluster, names: &ClusterNames) -> Vec<Child> {
    if cluster.spec.monitoring.mode == MonitoringMode::None {
        return Vec::new();
    }
    // Agents and members admit scrapers with a certificate only; their own names are in their certificates.
    let secured = |server: &str| {
        let entry = |name: String, key: &str| json!({ "name": name, "key": key });
        json!({ "port": "admin", "path": "/metrics", "scheme": "https", "tlsConfig": {
            "serverName": server,
            "ca": { "configMap": entry(names.authorities(), AUTHORITIES_FILE) },
            "cert": { "secret": entry(names.console(), CERTIFICATE_FILE) },
            "keySecret": entry(names.console(), KEY_FILE),
        } })
    };
    let monitor = |component: Component, name: String, endpoint: Value| {
        let rest = json!({
            "spec": {
                "selector": { "matchLabels": names.selector(component) },
                // The cluster of a pod becomes a label of its metrics.
                "podTargetLabels": ["app.kubernetes.io/instance"],
                "podMetricsEndpoints": [endpoint],
            },
        });
        Child::new(ChildKind::PodMonitor, metadata(cluster, names, component, &name), &rest)
    };
    let mut monitors = vec![
        monitor(Component::Agent, names.agent(), secured("agent.reprise")),
        monitor(Component::ControlPlane, names.control_plane(), secured("member.reprise")),
    ];
    if managed(cluster).is_some() {
        // etcd serves its metrics on a separate port without TLS.
        let endpoint = json!({ "port": "metrics", "path": "/metrics" });
        monitors.push(monitor(Component::Etcd, names.etcd(), endpoint));
    }
    monitors
}
