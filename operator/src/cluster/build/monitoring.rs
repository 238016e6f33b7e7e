//! What Prometheus' operator is told: one monitor for the agents and one for the members.

use reprise_crds::KVCacheCluster;
use reprise_crds::cluster::MonitoringMode;
use serde_json::json;

use super::metadata;
use crate::child::{Child, ChildKind, Ownership};
use crate::names::{ClusterNames, Component};

pub(super) fn build(cluster: &KVCacheCluster, names: &ClusterNames) -> Vec<Child> {
    if cluster.spec.monitoring.mode == MonitoringMode::None {
        return Vec::new();
    }
    let monitor = |component: Component, name: String| {
        let rest = json!({
            "spec": {
                "selector": { "matchLabels": names.selector(component) },
                // The cluster that a pod belongs to becomes a label of its metrics.
                "podTargetLabels": ["app.kubernetes.io/instance"],
                "podMetricsEndpoints": [{ "port": "admin", "path": "/metrics" }],
            },
        });
        let metadata = metadata(cluster, names, component, &name);
        Child::new(ChildKind::PodMonitor, Ownership::Shared, metadata, &rest)
    };
    vec![monitor(Component::Agent, names.agent()), monitor(Component::ControlPlane, names.control_plane())]
}
