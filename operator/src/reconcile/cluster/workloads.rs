//! Pods of a cluster's workloads.

use kube::api::DynamicObject;

/// Numbers of pods of a StatefulSet or DaemonSet, as its controller last reported them.
#[derive(Clone, Copy, Debug, Default)]
pub struct Pods {
    pub ready: u32,
    /// Pods with the current template, if the controller has observed it.
    pub current: u32,
    /// The same, if the template has the desired image.
    pub updated: u32,
}

impl Pods {
    /// Reads the status of a workload; zeros if it does not exist.
    pub(super) fn of(workload: Option<&DynamicObject>, image: &str) -> Pods {
        let Some(workload) = workload else { return Pods::default() };
        let status = &workload.data["status"];
        let number = |fields: [&str; 2]| {
            let number = fields.into_iter().find_map(|field| status[field].as_u64());
            number.and_then(|number| u32::try_from(number).ok()).unwrap_or_default()
        };
        let observed = status["observedGeneration"].as_i64();
        let is_seen = observed.is_some() && observed == workload.metadata.generation;
        let is_wanted = workload.data["spec"]["template"]["spec"]["containers"][0]["image"] == image;
        let current = if is_seen { number(["updatedReplicas", "updatedNumberScheduled"]) } else { 0 };
        Pods {
            ready: number(["readyReplicas", "numberReady"]),
            current,
            updated: if is_wanted { current } else { 0 },
        }
    }
}
