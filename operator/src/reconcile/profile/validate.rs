//! Validates a profile. Pure.

use kube::ResourceExt;
use reprise_crds::SlackProfile;
use reprise_crds::status::Reason;

use super::PROFILES_MAX;
use super::dereference::ProfileInputs;
use crate::framework::refusal::Refusal;

/// Returns why a profile is rejected: a missing reference, no selecting cluster, or too many profiles. `None`
/// if it is accepted. Condition `Valid` reports an invalid measurement.
pub fn validate(profile: &SlackProfile, inputs: &ProfileInputs) -> Option<Refusal> {
    if let Err(refusal) = &inputs.revision
        && refusal.reason != Reason::ProfileInvalid
    {
        return Some(refusal.clone());
    }
    if let Some(error) = profile.spec.rollout.canary.as_ref().and_then(|canary| canary.soak.duration().err())
    {
        return Some(Refusal::new(Reason::InvalidSpec, format!("rollout.canary.soak: {error}")));
    }
    if inputs.clusters.is_empty() {
        let message = format!(
            "no KVCacheCluster in namespace {} selects this profile: set spec.slackProfiles of a cluster to labels of the \
             profile",
            profile.namespace().unwrap_or_default()
        );
        return Some(Refusal::new(Reason::ReferenceNotFound, message));
    }
    let cluster = inputs.full.as_ref()?;
    let message = format!(
        "KVCacheCluster {cluster} selects {PROFILES_MAX} older profiles, which is the limit of nodes, so they do not get this one: \
         narrow spec.slackProfiles, or delete a profile"
    );
    Some(Refusal::new(Reason::Conflict, message))
}
