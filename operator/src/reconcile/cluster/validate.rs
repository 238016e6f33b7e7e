//! Validates a cluster: modes that this release does not support, incompatible versions, incomplete Secrets,
//! and unsafe changes of a managed etcd. A rejected cluster is left as it is.

use std::collections::BTreeMap;

use reprise_crds::KVCacheCluster;
use reprise_crds::cluster::{ClientTransport, GpuAccessMode, InjectionMode, MonitoringMode, RdmaMode};
use reprise_crds::status::Reason;

use super::dereference::ClusterInputs;
use super::etcd;
use super::versions;
use crate::framework::child::ChildKind;
use crate::framework::child_stores::KindAccess;
use crate::framework::refusal::Refusal;

/// Returns why a cluster is rejected; `None` if it is accepted.
pub fn validate(cluster: &KVCacheCluster, inputs: &ClusterInputs) -> Option<Refusal> {
    let unsupported = unsupported(cluster).or_else(|| missing(cluster, &inputs.access));
    unsupported
        .map(|message| Refusal::new(Reason::Unsupported, message))
        .or_else(|| versions::skew(cluster, inputs))
        .or_else(|| inputs.store.as_ref().and_then(|check| check.secrets.as_ref().err().cloned()))
        .or_else(|| etcd::refuse_change(cluster, inputs.etcd.as_deref()?))
}

/// Rejects modes that this release does not support.
fn unsupported(cluster: &KVCacheCluster) -> Option<String> {
    let (agents, injection) = (&cluster.spec.agents, cluster.spec.injection.mode);
    let (transport, gpus, rdma) = (agents.client_transport, agents.gpu_access.mode, agents.rdma.mode);
    let (field, value, instead) = if transport != ClientTransport::UnixSocket {
        ("agents.clientTransport", transport.as_str(), "use UnixSocket")
    } else if gpus != GpuAccessMode::None {
        let instead = "its agents do no GPU I/O and list GPUs without access; use None";
        ("agents.gpuAccess.mode", gpus.as_str(), instead)
    } else if rdma != RdmaMode::None {
        ("agents.rdma.mode", rdma.as_str(), "its agents use TCP between nodes; use None")
    } else if injection == InjectionMode::Webhook {
        let instead = "use AdmissionPolicy, or use None and mount the socket directory as described in the connection ConfigMap";
        ("injection.mode", injection.as_str(), instead)
    } else {
        return None;
    };
    Some(format!("{field} is {value}, which this release does not support: {instead}"))
}

/// Rejects a cluster that needs optional kinds which the operator cannot create here.
fn missing(cluster: &KVCacheCluster, access: &BTreeMap<ChildKind, KindAccess>) -> Option<String> {
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
    Some(match of(kind) {
        KindAccess::NotAllowed => format!(
            "{field} needs objects of kind {name}, which the operator has no permission to write: set {value} of the chart, or use \
             None"
        ),
        _ => format!("{field} needs kind {name}, which the API server does not serve: {server}, or use None"),
    })
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn rejects_missing_optional_kinds_only_if_the_cluster_needs_them() {
        let of = |spec: &Value, access: KindAccess| {
            let cluster = KVCacheCluster::new("c", serde_json::from_value(spec.clone()).expect("a spec"));
            missing(&cluster, &ChildKind::ALL.into_iter().map(|kind| (kind, access)).collect())
        };
        for (spec, field, right) in [
            (json!({ "injection": { "mode": "AdmissionPolicy" } }), "injection.mode", "rbac.injection"),
            (json!({ "monitoring": { "mode": "PodMonitor" } }), "monitoring.mode", "rbac.podMonitors"),
        ] {
            assert_eq!(of(&spec, KindAccess::Usable), None);
            let not_served = of(&spec, KindAccess::NotServed).expect("rejected");
            assert!(not_served.starts_with(field) && not_served.contains("does not serve"), "{not_served}");
            let not_allowed = of(&spec, KindAccess::NotAllowed).expect("rejected");
            assert!(not_allowed.contains(&format!("set {right} of the chart")), "{not_allowed}");
        }
        assert_eq!(of(&json!({}), KindAccess::NotServed), None);
    }
}
