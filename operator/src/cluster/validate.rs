//! What is refused of a cluster: modes that this release does not have, versions that are too far apart, secrets that lack something,
//! and changes of a managed etcd that would risk it. A cluster that is refused is left as it is.

use std::collections::BTreeMap;

use kube::api::DynamicObject;
use reprise_crds::KVCacheCluster;
use reprise_crds::cluster::{
    ClientTransport, EtcdMode, GpuAccessMode, InjectionMode, MonitoringMode, RdmaMode,
};
use reprise_crds::status::Reason;

use super::build::is_replaced;
use super::dereference::Found;
use super::versions;
use crate::child::ChildKind;
use crate::optional::Access;
use crate::plan::Refusal;

/// Why a cluster is refused, if it is.
pub fn validate(cluster: &KVCacheCluster, found: &Found) -> Option<Refusal> {
    unsupported(cluster)
        .or_else(|| missing(cluster, &found.access))
        .or_else(|| found.plan.refused.clone())
        .or_else(|| versions::refused(cluster, found))
        .or_else(|| found.store.as_ref().and_then(|look| look.secrets.as_ref().err().cloned()))
        .or_else(|| etcd_change(cluster, found.etcd.as_deref()?))
}

/// Modes that this release does not have.
fn unsupported(cluster: &KVCacheCluster) -> Option<Refusal> {
    let spec = &cluster.spec;
    let refuse = |field: &str, value: &str, instead: &str| {
        let message = format!("{field} is {value}, which this release does not have: {instead}");
        Some(Refusal::new(Reason::Unsupported, message))
    };
    if spec.agents.client_transport != ClientTransport::UnixSocket {
        return refuse("agents.clientTransport", spec.agents.client_transport.as_str(), "use UnixSocket");
    }
    if spec.injection.mode == InjectionMode::Webhook {
        let instead =
            "use AdmissionPolicy, or None and mount the socket's directory as the connection ConfigMap says";
        return refuse("injection.mode", spec.injection.mode.as_str(), instead);
    }
    None
}

/// Kinds that the cluster needs and that cannot be made here.
fn missing(cluster: &KVCacheCluster, access: &BTreeMap<ChildKind, Access>) -> Option<Refusal> {
    use ChildKind::{
        MutatingAdmissionPolicy, MutatingAdmissionPolicyBinding, PodMonitor, ResourceClaimTemplate,
    };
    let spec = &cluster.spec;
    let injection: &[ChildKind] = &[MutatingAdmissionPolicy, MutatingAdmissionPolicyBinding];
    let refuse = |field: &str, kinds: &[ChildKind], server: &str, value: &str| {
        let of = |kind: &ChildKind| access.get(kind).copied().unwrap_or(Access::NotServed);
        let (kind, lacks) =
            kinds.iter().map(|kind| (kind, of(kind))).find(|(_, access)| *access != Access::Usable)?;
        let kind = kind.as_str();
        let message = match lacks {
            Access::NotAllowed => format!(
                "{field} needs objects of the kind {kind}, which the operator may not write: set {value} of the chart, or use None"
            ),
            _ => format!(
                "{field} needs the kind {kind}, which the API server does not have: {server}, or use None"
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
    let claiming = [
        ("agents.gpuAccess.mode", spec.agents.gpu_access.mode == GpuAccessMode::Dra),
        ("agents.rdma.mode", spec.agents.rdma.mode == RdmaMode::Dra),
    ];
    if let Some((field, _)) = claiming.into_iter().find(|(_, is_claiming)| *is_claiming) {
        let server = "use Kubernetes 1.34 or later";
        if let Some(refusal) = refuse(field, &[ResourceClaimTemplate], server, "rbac.resourceClaims") {
            return Some(refusal);
        }
    }
    if spec.monitoring.mode == MonitoringMode::PodMonitor {
        return refuse("monitoring.mode", &[PodMonitor], "install Prometheus' operator", "rbac.podMonitors");
    }
    None
}

/// A StatefulSet cannot follow these; by hand they can be done, and then the operator agrees with what is there.
fn etcd_change(cluster: &KVCacheCluster, live: &DynamicObject) -> Option<Refusal> {
    if cluster.spec.etcd.mode != EtcdMode::Managed {
        return None;
    }
    let wanted = cluster.spec.etcd.managed.clone().unwrap_or_default();
    let replicas = live.data["spec"]["replicas"].as_u64()?;
    if replicas != u64::from(wanted.replicas) && !is_replaced(live) {
        let message = format!(
            "etcd.managed.replicas is {} and etcd runs with {replicas}: this release does not add members; write {replicas}",
            wanted.replicas
        );
        return Some(Refusal::new(Reason::Unsupported, message));
    }
    let size = &live.data["spec"]["volumeClaimTemplates"][0]["spec"]["resources"]["requests"]["storage"];
    let size = reprise_crds::fields::Quantity::new(size.as_str()?);
    if size.bytes().ok()? != wanted.storage.size.bytes().ok()? {
        let message = format!(
            "etcd.managed.storage.size is {} and etcd's volumes were made with {size}: this release does not grow them; write {size}",
            wanted.storage.size
        );
        return Some(Refusal::new(Reason::Unsupported, message));
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
    fn what_this_release_does_not_have_is_refused_by_its_field() {
        assert_eq!(unsupported(&cluster(json!({}))), None);
        for (spec, words) in [
            (json!({ "agents": { "clientTransport": "NodeLocalService" } }), "agents.clientTransport"),
            (json!({ "injection": { "mode": "Webhook" } }), "injection.mode"),
        ] {
            let refused = unsupported(&cluster(spec)).expect(words);
            assert_eq!(refused.reason, Reason::Unsupported);
            assert!(refused.message.starts_with(words), "{}", refused.message);
        }
    }

    #[test]
    fn a_kind_that_cannot_be_made_here_is_missing_for_who_needs_it_only() {
        let injecting = cluster(json!({ "injection": { "mode": "AdmissionPolicy" } }));
        let monitored = cluster(json!({ "monitoring": { "mode": "PodMonitor" } }));
        let claiming = |part: &str, mode: Value| cluster(json!({ "agents": { part: mode } }));
        let dra = || json!({ "mode": "Dra", "deviceClassName": "d" });
        let all = |access: Access| ChildKind::ALL.into_iter().map(|kind| (kind, access)).collect();
        for (one, field, right) in [
            (&injecting, "injection.mode", "rbac.injection"),
            (&monitored, "monitoring.mode", "rbac.podMonitors"),
            (&claiming("gpuAccess", dra()), "agents.gpuAccess.mode", "rbac.resourceClaims"),
            (&claiming("rdma", dra()), "agents.rdma.mode", "rbac.resourceClaims"),
        ] {
            assert_eq!(missing(one, &all(Access::Usable)), None);
            let words = |access| missing(one, &all(access)).expect("it is missing").message;
            let not_served = words(Access::NotServed);
            assert!(not_served.starts_with(field) && not_served.contains("does not have"), "{not_served}");
            let not_allowed = words(Access::NotAllowed);
            assert!(not_allowed.contains(&format!("set {right} of the chart")), "{not_allowed}");
        }
        for plain in [
            cluster(json!({})),
            claiming("gpuAccess", json!({ "mode": "ManagementCdi" })),
            claiming("gpuAccess", json!({ "mode": "Privileged" })),
            claiming("rdma", json!({ "mode": "HostNetwork" })),
            claiming("rdma", json!({ "mode": "SrIov", "resourceName": "example.com/vf" })),
            claiming("deviceAccess", json!({ "mode": "Privileged" })),
        ] {
            assert_eq!((unsupported(&plain), missing(&plain, &all(Access::NotServed))), (None, None));
        }
    }

    #[test]
    fn a_managed_etcd_does_not_change_its_size_under_itself() {
        let live = |replicas: u32, size: &str| -> DynamicObject {
            let spec = json!({
                "replicas": replicas,
                "volumeClaimTemplates": [{ "spec": { "resources": { "requests": { "storage": size } } } }],
            });
            serde_json::from_value(json!({ "metadata": { "name": "c-etcd" }, "spec": spec }))
                .expect("an object")
        };
        let wanted =
            cluster(json!({ "etcd": { "managed": { "replicas": 3, "storage": { "size": "1Gi" } } } }));
        assert_eq!(etcd_change(&wanted, &live(3, "1024Mi")), None);
        let words = |live: &DynamicObject| etcd_change(&wanted, live).expect("refused").message;
        assert_eq!(etcd_change(&wanted, &live(0, "1Gi")), None, "all are replaced at once");
        assert!(words(&live(1, "1Gi")).contains("write 1"));
        assert!(words(&live(3, "2Gi")).contains("write 2Gi"));
    }
}
