//! The etcd of a cluster: one that the operator runs, with 1, 3 or 5 members, or an [external] one.
//!
//! # Certificates of a managed etcd
//!
//! They are those of the cluster's authority ([`crate::reconcile::authority`]), requested by the sidecar of each pod. etcd
//! reads certificate and key at every handshake, so renewed ones need no restart. It reads the trusted authorities once,
//! when it starts, so a change of them replaces its pods one by one ([`build`]). Meanwhile a replaced pod must still have
//! its certificate of the authority before, because the other pods trust no other one. Certificate and key are therefore
//! in a folder of the data volume, and not in memory. Three minutes after the new authority was published, all sidecars
//! request certificates of it. By then all pods of etcd trust both.
//!
//! Limit: a pod of etcd that cannot be replaced within these minutes, for example on a node that is away, refuses new
//! connections from the others until it is replaced.

use std::time::Duration;

use kube::api::DynamicObject;
use reprise_crds::KVCacheCluster;
use reprise_crds::cluster::EtcdMode;
use reprise_crds::status::{ConditionStatus, ConditionType as Type, Finding, Reason, find};

use super::inputs::ClusterInputs;
use super::workloads::{number, updated};
use crate::framework::clock;
use crate::framework::refusal::Refusal;

pub(super) mod build;
pub mod external;
pub mod volumes;

/// Volume name in pods. The claims are named after it, the StatefulSet and the member's number.
pub(super) const DATA_VOLUME: &str = "data";
/// Directory of the volume.
pub(super) const DATA_FOLDER: &str = "/var/lib/etcd";
/// Directory of certificate, key and trusted authorities.
pub(super) const CERTIFICATES_FOLDER: &str = "/var/lib/etcd/certificates";

/// Time after the first `EtcdReady` within which missing members are not reported.
const MEMBERS_COME_WITHIN: Duration = Duration::from_secs(60);

/// Number of members of a managed etcd.
#[derive(Clone, Copy, Debug)]
struct Members {
    desired: u32,
    ready: u32,
}

impl Members {
    fn of(cluster: &KVCacheCluster, etcd: Option<&DynamicObject>) -> Members {
        let desired = u32::from(cluster.spec.etcd.managed.clone().unwrap_or_default().replicas);
        Members { desired, ready: number(etcd, "readyReplicas") }
    }

    /// Whether etcd has a quorum.
    fn answer(self) -> bool {
        self.ready > self.desired / 2
    }
}

/// Returns whether etcd is ready.
pub(super) fn ready(cluster: &KVCacheCluster, inputs: &ClusterInputs) -> Finding {
    let kind = Type::EtcdReady;
    if let Some(check) = &inputs.store {
        return check.finding(cluster);
    }
    if cluster.spec.etcd.mode == EtcdMode::External {
        return Finding::unknown(kind, Reason::Progressing, "etcd has not been checked yet");
    }
    let members = Members::of(cluster, inputs.etcd.as_deref());
    let Members { desired, ready } = members;
    if members.answer() {
        return Finding::yes(kind, Reason::AsDesired, format!("{ready} of {desired} members are ready"));
    }
    if let Some(problem) = &inputs.volumes {
        return Finding::no(kind, Reason::NoStorageClass, problem);
    }
    let message = format!(
        "{ready} of {desired} members of etcd are ready; if this persists, check pods and volume claims of {}",
        inputs.agent_config.names.etcd()
    );
    Finding::no(kind, Reason::Progressing, message)
}

/// Returns a refusal if a managed etcd has a quorum but lacks members. It is suppressed during the initial
/// start and during a rolling update.
pub(super) fn missing_members(cluster: &KVCacheCluster, inputs: &ClusterInputs) -> Option<Refusal> {
    let etcd = inputs.etcd.as_deref();
    let condition = cluster.status.as_ref().and_then(|status| find(&status.conditions, Type::EtcdReady));
    let is_settled = condition.is_some_and(|condition| {
        condition.status == ConditionStatus::True
            && clock::since(&condition.last_transition_time) >= MEMBERS_COME_WITHIN
    });
    let is_managed = cluster.spec.etcd.mode == EtcdMode::Managed;
    let members = Members::of(cluster, etcd);
    let is_updated = updated(etcd, &inputs.images.etcd, "updatedReplicas") >= members.desired;
    let Members { desired, ready } = members;
    let message = format!(
        "{ready} of {desired} members of etcd are ready; it loses its quorum if {} more fail: check pods and volume claims of {}",
        ready.saturating_sub(desired / 2),
        inputs.agent_config.names.etcd()
    );
    let is_missing = is_managed && is_settled && is_updated && members.answer() && ready < desired;
    is_missing.then(|| Refusal::new(Reason::MembersMissing, message))
}

/// Rejects changes that a StatefulSet cannot apply. After a manual change of the StatefulSet the spec is
/// accepted.
pub(super) fn refuse_change(cluster: &KVCacheCluster, live: &DynamicObject) -> Option<Refusal> {
    if cluster.spec.etcd.mode != EtcdMode::Managed {
        return None;
    }
    let wanted = cluster.spec.etcd.managed.clone().unwrap_or_default();
    let replicas = live.data["spec"]["replicas"].as_u64()?;
    if replicas != u64::from(wanted.replicas) && replicas != 0 {
        let message = format!(
            "etcd.managed.replicas is {} but etcd runs with {replicas}: this release cannot change the number of members; set it to \
             {replicas}",
            wanted.replicas
        );
        return Some(Refusal::new(Reason::Unsupported, message));
    }
    let size = &live.data["spec"]["volumeClaimTemplates"][0]["spec"]["resources"]["requests"]["storage"];
    let size = reprise_crds::fields::Quantity::new(size.as_str()?);
    if size.bytes().ok()? != wanted.storage.size.bytes().ok()? {
        let message = format!(
            "etcd.managed.storage.size is {} but etcd's volumes were created with {size}: this release cannot resize them; set it to \
             {size}",
            wanted.storage.size
        );
        return Some(Refusal::new(Reason::Unsupported, message));
    }
    None
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn rejects_changes_of_the_size_of_a_managed_etcd() {
        let live = |replicas: u32, size: &str| -> DynamicObject {
            let spec = json!({
                "replicas": replicas,
                "volumeClaimTemplates": [{ "spec": { "resources": { "requests": { "storage": size } } } }],
            });
            serde_json::from_value(json!({ "metadata": { "name": "c-etcd" }, "spec": spec }))
                .expect("an object")
        };
        let spec = json!({ "etcd": { "managed": { "replicas": 3, "storage": { "size": "1Gi" } } } });
        let wanted = KVCacheCluster::new("c", serde_json::from_value(spec).expect("a spec"));
        assert_eq!(refuse_change(&wanted, &live(3, "1024Mi")), None);
        let message_of = |live: &DynamicObject| refuse_change(&wanted, live).expect("rejected").message;
        assert_eq!(refuse_change(&wanted, &live(0, "1Gi")), None, "it was scaled manually, and is restored");
        assert!(message_of(&live(1, "1Gi")).contains("set it to 1"));
        assert!(message_of(&live(3, "2Gi")).contains("set it to 2Gi"));
    }
}
