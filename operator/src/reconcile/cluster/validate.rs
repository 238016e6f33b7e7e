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
    let spec = &cluster.spec;
    let refuse = |field: &str, value: &str, instead: &str| {
        let message = format!("{field} is {value}, which this release does not support: {instead}");
        Some(Refusal::new(Reason::Unsupported, message))
    };
    if spec.agents.client_transport != ClientTransport::UnixSocket {
        return refuse("agents.clientTransport", spec.agents.client_transport.as_str(), "use UnixSocket");
    }
    let agents = &spec.agents;
    if agents.gpu_access.mode != GpuAccessMode::None {
        let instead = "its agents do no GPU I/O and list GPUs without access; use None";
        return refuse("agents.gpuAccess.mode", agents.gpu_access.mode.as_str(), instead);
    }
    if agents.rdma.mode != RdmaMode::None {
        let instead = "its agents use TCP between nodes; use None";
        return refuse("agents.rdma.mode", agents.rdma.mode.as_str(), instead);
    }
    if spec.injection.mode == InjectionMode::Webhook {
        let instead = "use AdmissionPolicy, or use None and mount the socket directory as described in the connection ConfigMap";
        return refuse("injection.mode", spec.injection.mode.as_str(), instead);
    }
    None
}

/// Rejects a cluster that needs optional kinds which the operator cannot create here.
fn missing(cluster: &KVCacheCluster, access: &BTreeMap<ChildKind, KindAccess>) -> Option<Refusal> {
    use ChildKind::{MutatingAdmissionPolicy, MutatingAdmissionPolicyBinding, PodMonitor};
    let spec = &cluster.spec;
    let injection: &[ChildKind] = &[MutatingAdmissionPolicy, MutatingAdmissionPolicyBinding];
    let refuse = |field: &str, kinds: &[ChildKind], server: &str, value: &str| {
        let of = |kind: &ChildKind| access.get(kind).copied().unwrap_or(KindAccess::NotServed);
        let (kind, lacks) =
            kinds.iter().map(|kind| (kind, of(kind))).find(|(_, access)| *access != KindAccess::Usable)?;
        let kind = kind.as_str();
        let message = match lacks {
            KindAccess::NotAllowed => format!(
                "{field} needs objects of kind {kind}, which the operator has no permission to write: set {value} of the chart, or use \
                 None"
            ),
            _ => format!(
                "{field} needs kind {kind}, which the API server does not serve: {server}, or use None"
            ),
        };
        Some(Refusal::new(Reason::Unsupported, message))
    };
    if spec.injection.mode == InjectionMode::AdmissionPolicy {
        let server = "use Kubernetes 1.36 or later";
        if let Some(refusal) = refuse("injection.mode", injection, server, "rbac.injection") {
            return Some(refusal);
        }
    }
    if spec.monitoring.mode == MonitoringMode::PodMonitor {
        return refuse(
            "monitoring.mode",
            &[PodMonitor],
            "install the Prometheus operator",
            "rbac.podMonitors",
        );
    }
    None
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn cluster(spec: Value) -> KVCacheCluster {
        KVCacheCluster::new("c", serde_json::from_value(spec).expect("a spec"))
    }

    #[test]
    fn rejects_unsupported_modes_and_names_the_field() {
        for accepted in [
            json!({}),
            json!({ "agents": { "deviceAccess": { "mode": "Privileged" } } }),
            json!({ "agents": { "gpuAccess": { "mode": "None" }, "rdma": { "mode": "None" } } }),
        ] {
            assert_eq!(unsupported(&cluster(accepted)), None);
        }
        let agents = |field: &str, access: Value| json!({ "agents": { field: access } });
        for (spec, field) in [
            (
                agents("gpuAccess", json!({ "mode": "Dra", "deviceClassName": "d" })),
                "agents.gpuAccess.mode is Dra",
            ),
            (
                agents("gpuAccess", json!({ "mode": "ManagementCdi" })),
                "agents.gpuAccess.mode is ManagementCdi",
            ),
            (
                agents("gpuAccess", json!({ "mode": "RuntimeClass", "runtimeClassName": "nvidia" })),
                "agents.gpuAccess.mode is RuntimeClass",
            ),
            (agents("gpuAccess", json!({ "mode": "Privileged" })), "agents.gpuAccess.mode is Privileged"),
            (
                agents("rdma", json!({ "mode": "DevicePlugin", "resourceName": "rdma/shared" })),
                "agents.rdma.mode is DevicePlugin",
            ),
            (
                agents("rdma", json!({ "mode": "SrIov", "resourceName": "example.com/vf" })),
                "agents.rdma.mode is SrIov",
            ),
            (agents("rdma", json!({ "mode": "Dra", "deviceClassName": "d" })), "agents.rdma.mode is Dra"),
            (agents("rdma", json!({ "mode": "HostNetwork" })), "agents.rdma.mode is HostNetwork"),
            (json!({ "agents": { "clientTransport": "NodeLocalService" } }), "agents.clientTransport"),
            (json!({ "injection": { "mode": "Webhook" } }), "injection.mode"),
        ] {
            let refused = unsupported(&cluster(spec)).expect(field);
            assert_eq!(refused.reason, Reason::Unsupported);
            assert!(refused.message.starts_with(field), "{}", refused.message);
        }
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
