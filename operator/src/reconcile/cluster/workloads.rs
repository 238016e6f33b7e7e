//! States of a cluster's workloads: their images, ready pods, and members of etcd.

use kube::api::DynamicObject;
use reprise_crds::KVCacheCluster;
use reprise_crds::status::Reason;

use crate::framework::refusal::Refusal;
use crate::reconcile::names::ClusterNames;

/// Returns a number from a workload's status if its template has the desired image; 0 while the controller
/// has not observed the current template.
pub(super) fn updated(workload: Option<&DynamicObject>, image: &str, field: &str) -> u32 {
    let is_seen = |workload: &&DynamicObject| {
        let observed = workload.data["status"]["observedGeneration"].as_i64();
        observed.is_some() && observed == workload.metadata.generation
    };
    let is_wanted = |workload: &&DynamicObject| image_of(workload).is_some_and(|runs| runs == image);
    number(workload.filter(is_seen).filter(is_wanted), field)
}

/// Returns a number from a workload's status; 0 if it is missing.
pub(super) fn number(workload: Option<&DynamicObject>, field: &str) -> u32 {
    let number = workload.and_then(|workload| workload.data["status"][field].as_u64());
    number.and_then(|number| u32::try_from(number).ok()).unwrap_or_default()
}

/// Whether any pod of a workload is ready.
pub(super) fn has_ready_pods(workload: &DynamicObject) -> bool {
    let status = &workload.data["status"];
    [&status["readyReplicas"], &status["numberReady"]]
        .iter()
        .any(|ready| ready.as_u64().is_some_and(|ready| ready > 0))
}

/// Returns the image of a workload's pods.
pub(super) fn image_of(workload: &DynamicObject) -> Option<String> {
    workload.data["spec"]["template"]["spec"]["containers"][0]["image"].as_str().map(str::to_owned)
}

/// Whether the StatefulSet is scaled to zero, as in a CA change.
pub(super) fn is_scaled_to_zero(live: &DynamicObject) -> bool {
    live.data["spec"]["replicas"].as_u64() == Some(0)
}

/// Number of members of a managed etcd.
#[derive(Clone, Copy, Debug)]
pub(super) struct EtcdMembers {
    pub(super) desired: u32,
    pub(super) ready: u32,
}

impl EtcdMembers {
    /// Whether etcd has a quorum.
    pub(super) fn answer(self) -> bool {
        self.ready > self.desired / 2
    }

    /// Returns a refusal if etcd has a quorum but lacks members.
    pub(super) fn missing(self, names: &ClusterNames) -> Option<Refusal> {
        let EtcdMembers { desired, ready } = self;
        let spare = ready.saturating_sub(desired / 2);
        let message = format!(
            "{ready} of {desired} members of etcd are ready; it loses its quorum if {spare} more fail: check pods and volume claims of {}",
            names.etcd()
        );
        (self.answer() && ready < desired).then(|| Refusal::new(Reason::MembersMissing, message))
    }
}

/// Returns the number of desired and ready members.
pub(super) fn etcd_members(cluster: &KVCacheCluster, etcd: Option<&DynamicObject>) -> EtcdMembers {
    let desired = u32::from(cluster.spec.etcd.managed.clone().unwrap_or_default().replicas);
    EtcdMembers { desired, ready: number(etcd, "readyReplicas") }
}
