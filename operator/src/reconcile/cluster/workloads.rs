//! States of a cluster's workloads: their images and ready pods.

use kube::api::DynamicObject;

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

/// Returns the image of a workload's pods.
pub(super) fn image_of(workload: &DynamicObject) -> Option<String> {
    workload.data["spec"]["template"]["spec"]["containers"][0]["image"].as_str().map(str::to_owned)
}
