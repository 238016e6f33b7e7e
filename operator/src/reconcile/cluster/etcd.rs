//! The etcd of a cluster: one that the operator runs, with 1, 3 or 5 members, or an [external] one.
//!
//! The certificates of a managed etcd, and their limits, are described in ADR 18. Certificate and key are in a folder of
//! the data volume: a replaced pod must still have its certificate of the authority before, because the other pods trust no
//! other one yet.

use std::time::Duration;

use kube::api::DynamicObject;
use reprise_crds::KVCacheCluster;
use reprise_crds::cluster::{EtcdMode, ManagedEtcd};
use reprise_crds::fields::Quantity;
use reprise_crds::status::{ConditionStatus, ConditionType as Type, Finding, Reason, find};

use super::dereference::ClusterInputs;
use super::workloads::Pods;
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

/// Returns the settings of a managed etcd; `None` if etcd is external.
pub(super) fn managed(cluster: &KVCacheCluster) -> Option<ManagedEtcd> {
    let etcd = &cluster.spec.etcd;
    (etcd.mode == EtcdMode::Managed).then(|| etcd.managed.clone().unwrap_or_default())
}

/// Returns the number of desired members of a managed etcd.
fn desired_members(cluster: &KVCacheCluster) -> u32 {
    managed(cluster).map_or(0, |managed| u32::from(managed.replicas))
}

/// Whether the operator waits until a managed etcd has a quorum.
pub(super) fn is_starting(cluster: &KVCacheCluster, pods: Pods) -> bool {
    let desired = desired_members(cluster);
    desired > 0 && pods.ready <= desired / 2 && !cluster.spec.paused
}

/// Returns whether etcd is ready.
pub(super) fn ready(cluster: &KVCacheCluster, inputs: &ClusterInputs) -> Finding {
    let kind = Type::EtcdReady;
    if let Some(check) = &inputs.store {
        return check.finding(cluster);
    }
    let (desired, ready) = (desired_members(cluster), inputs.etcd_pods.ready);
    let message = format!("{ready} of {desired} members are ready");
    if ready > desired / 2 {
        return Finding::yes(kind, Reason::AsDesired, message);
    }
    if let Some(problem) = &inputs.volumes {
        return Finding::no(kind, Reason::NoStorageClass, problem);
    }
    let etcd = inputs.agent_config.names.etcd();
    let message = format!("{message}; if this persists, check pods and volume claims of {etcd}");
    Finding::no(kind, Reason::Progressing, message)
}

/// Returns a refusal if a managed etcd has a quorum but lacks members. It is suppressed during the initial
/// start and during a rolling update.
pub(super) fn missing_members(cluster: &KVCacheCluster, inputs: &ClusterInputs) -> Option<Refusal> {
    let (desired, Pods { ready, updated, .. }) = (desired_members(cluster), inputs.etcd_pods);
    let condition = cluster.status.as_ref().and_then(|status| find(&status.conditions, Type::EtcdReady));
    let is_settled = condition.is_some_and(|condition| {
        condition.status == ConditionStatus::True
            && clock::since(&condition.last_transition_time) >= MEMBERS_COME_WITHIN
    });
    if !is_settled || updated < desired || ready <= desired / 2 || ready >= desired {
        return None;
    }
    let message = format!(
        "{ready} of {desired} members of etcd are ready; it loses its quorum if {} more fail: check pods and volume claims of {}",
        ready - desired / 2,
        inputs.agent_config.names.etcd()
    );
    Some(Refusal::new(Reason::MembersMissing, message))
}

/// Rejects changes that a StatefulSet cannot apply. After a manual change of the StatefulSet the spec is
/// accepted.
pub(super) fn refuse_change(cluster: &KVCacheCluster, live: &DynamicObject) -> Option<Refusal> {
    let wanted = managed(cluster)?;
    let replicas = live.data["spec"]["replicas"].as_u64()?;
    let refuse = |message: String| Some(Refusal::new(Reason::Unsupported, message));
    if replicas != u64::from(wanted.replicas) && replicas != 0 {
        return refuse(format!(
            "etcd.managed.replicas is {} but etcd runs with {replicas}: this release cannot change the number of members; set it to \
             {replicas}",
            wanted.replicas
        ));
    }
    let size = &live.data["spec"]["volumeClaimTemplates"][0]["spec"]["resources"]["requests"]["storage"];
    let size = Quantity::new(size.as_str()?);
    if size.bytes().ok()? != wanted.storage.size.bytes().ok()? {
        return refuse(format!(
            "etcd.managed.storage.size is {} but etcd's volumes were created with {size}: this release cannot resize them; set it to \
             {size}",
            wanted.storage.size
        ));
    }
    None
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::reconcile::test_objects::{object, resource};

    #[test]
    fn rejects_changes_of_the_size_of_a_managed_etcd() {
        let managed = json!({ "replicas": 3, "storage": { "size": "1Gi" } });
        let wanted: KVCacheCluster =
            resource(json!({ "name": "c" }), json!({ "spec": { "etcd": { "managed": managed } } }));
        for (replicas, size, expected) in [
            (3, "1024Mi", None),
            // It was scaled by hand, and is restored.
            (0, "1Gi", None),
            (1, "1Gi", Some("set it to 1")),
            (3, "2Gi", Some("set it to 2Gi")),
        ] {
            let claim = json!({ "spec": { "resources": { "requests": { "storage": size } } } });
            let spec = json!({ "replicas": replicas, "volumeClaimTemplates": [claim] });
            let live: DynamicObject = object(json!({ "metadata": { "name": "c-etcd" }, "spec": spec }));
            let message = refuse_change(&wanted, &live).map(|refused| refused.message);
            assert_eq!(message.is_some(), expected.is_some(), "{replicas} {size}: {message:?}");
            assert!(message.unwrap_or_default().ends_with(expected.unwrap_or_default()));
        }
    }
}
