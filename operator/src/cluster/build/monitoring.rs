//! PodMonitors for the Prometheus operator: one for agents, one for members, and one for a managed etcd.

use reprise_crds::KVCacheCluster;
use reprise_crds::cluster::{EtcdMode, MonitoringMode};
use serde_json::json;

use super::metadata;
use crate::child::{Child, ChildKind, Ownership};
use crate::names::{ClusterNames, Component};

pub(super) fn build(cluster: &KVCacheCluster, names: &ClusterNames) -> Vec<Child> {
    if cluster.spec.monitoring.mode == MonitoringMode::None {
        return Vec::new();
    }
    let monitor = |component: Component, name: String, port: &str| {
        let rest = json!({
            "spec": {
                "selector": { "matchLabels": names.selector(component) },
                // The cluster of a pod becomes a label of its metrics.
                "podTargetLabels": ["app.kubernetes.io/instance"],
                "podMetricsEndpoints": [{ "port": port, "path": "/metrics" }],
            },
        });
        let metadata = metadata(cluster, names, component, &name);
        Child::new(ChildKind::PodMonitor, Ownership::Shared, metadata, &rest)
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
