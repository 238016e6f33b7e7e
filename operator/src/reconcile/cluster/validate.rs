//! Validates a cluster: modes that this release does not support, incompatible versions, incomplete Secrets,
//! and unsafe changes of a managed etcd. A rejected cluster is left as it is.

use std::collections::BTreeMap;

use reprise_crds::KVCacheCluster;
use reprise_crds::cluster::{ClientTransport, GpuAccessMode, InjectionMode, MonitoringMode, RdmaMode};
use reprise_crds::status::Reason;

use super::etcd;
use super::inputs::ClusterInputs;
use super::versions;
use crate::framework::child::ChildKind;
use crate::framework::child_stores::KindAccess;
use crate::framework::refusal::Refusal;

/// Returns why a cluster is rejected; `None` if it is accepted.
pub fn validate(cluster: &KVCacheCluster, inputs: &ClusterInputs) -> Option<Refusal> {
    unsupported(cluster)
        .or_else(|| missing(cluster, &inputs.access))
        .or_else(|| versions::skew(cluster, inputs))
        .or_else(|| inputs.store.as_ref().and_then(|check| check.secrets.as_ref().err().cloned()))
        .or_else(|| etcd::refuse_change(cluster, inputs.etcd.as_deref()?))
}

/// Rejects modes that this release does not support.
fn unsupported(cluster: &KVCacheCluster) -> Option<Refusal> {
    let (agents, injection) = (&cluster.spec.agents, cluster.spec.injection.mode);
    let (transport, gpus, rdma) = (agents.client_transport, agents.gpu_access.mode, agents.rdma.mode);
    let modes = [
        (
            transport != ClientTransport::UnixSocket,
            ("agents.clientTransport", transport.as_str()),
            "use UnixSocket",
        ),
        (
            gpus != GpuAccessMode::None,
            ("agents.gpuAccess.mode", gpus.as_str()),
            "its agents do no GPU I/O and list GPUs without access; use None",
        ),
        (
            rdma != RdmaMode::None,
            ("agents.rdma.mode", rdma.as_str()),
            "its agents use TCP between nodes; use None",
        ),
        (
            injection == InjectionMode::Webhook,
            ("injection.mode", injection.as_str()),
            "use AdmissionPolicy, or use None and mount the socket directory as described in the connection ConfigMap",
        ),
    ];
    let (_, (field, value), instead) = modes.into_iter().find(|(is_unsupported, ..)| *is_unsupported)?;
    let message = format!("{field} is {value}, which this release does not support: {instead}");
    Some(Refusal::new(Reason::Unsupported, message))
}

/// Rejects a cluster that needs optional kinds which the operator cannot create here.
fn missing(cluster: &KVCacheCluster, access: &BTreeMap<ChildKind, KindAccess>) -> Option<Refusal> {
    use ChildKind::{MutatingAdmissionPolicy, MutatingAdmissionPolicyBinding, PodMonitor};
    let injects = cluster.spec.injection.mode == InjectionMode::AdmissionPolicy;
    let monitors = cluster.spec.monitoring.mode == MonitoringMode::PodMonitor;
    let injection = ("injection.mode", "use Kubernetes 1.36 or later", "rbac.injection");
    let monitoring = ("monitoring.mode", "install the Prometheus operator", "rbac.podMonitors");
    let needs = [
        (injects, MutatingAdmissionPolicy, injection),
        (injects, MutatingAdmissionPolicyBinding, injection),
        (monitors, PodMonitor, monitoring),
    ];
    let of = |kind| access.get(&kind).copied().unwrap_or(KindAccess::NotServed);
    let (_, kind, (field, server, value)) =
        needs.into_iter().find(|(is_needed, kind, _)| *is_needed && of(*kind) != KindAccess::Usable)?;
    let name = kind.as_str();
    let message = match of(kind) {
        KindAccess::NotAllowed => format!(
            "{field} needs objects of kind {name}, which the operator has no permission to write: set {value} of the chart, or use \
             None"
        ),
        _ => format!("{field} needs kind {name}, which the API server does not serve: {server}, or use None"),
    };
    Some(Refusal::new(Reason::Unsupported, message))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn cluster(spec: Value) -> KVCacheCluster {
        KVCacheCluster::new("c", serde_json::from_value(spec).expect("a spec"))
    }

    #[test]
    fn rejects_missing_optional_kinds_only_if_the_cluster_needs_them() {
        let injecting = cluster(json!({ "injection": { "mode": "AdmissionPolicy" } }));
        let monitored = cluster(json!({ "monitoring": { "mode": "PodMonitor" } }));
        let all = |access: KindAccess| ChildKind::ALL.into_iter().map(|kind| (kind, access)).collect();
        for (one, field, right) in [
            (&injecting, "injection.mode", "rbac.injection"),
            (&monitored, "monitoring.mode", "rbac.podMonitors"),
        ] {
            assert_eq!(missing(one, &all(KindAccess::Usable)), None);
            let message_of = |access| missing(one, &all(access)).expect("rejected").message;
            let not_served = message_of(KindAccess::NotServed);
            assert!(not_served.starts_with(field) && not_served.contains("does not serve"), "{not_served}");
            let not_allowed = message_of(KindAccess::NotAllowed);
            assert!(not_allowed.contains(&format!("set {right} of the chart")), "{not_allowed}");
        }
        assert_eq!(missing(&cluster(json!({})), &all(KindAccess::NotServed)), None);
    }
}
