//! Decides the revision of each node. Pure.
//!
//! ```text
//! Waiting ──decided──▶ Updating ──agent applied it──▶ Applied ──measurements differ──▶ Drifted
//!                         └───────agent refused it──▶ Refused
//! ```
//!
//! Canary nodes come first. While one of them refuses the revision or drifts, no further node gets it. Once
//! all of them have applied it for `canary.soak`, the others follow. Nodes that are updating, refuse or drift
//! never exceed `maxUnavailablePercent` of all nodes, with a minimum of one. A bad revision therefore reaches
//! only the first nodes.
//!
//! A node that does not report gets no new revision. A node that falls silent with a new revision counts as
//! updating, because the revision may be the cause. Nodes keep their previous revision until they get the new
//! one; only nodes with too many profiles lose it ([`super::dereference::selected`]).

use std::collections::BTreeMap;
use std::time::Duration;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use reprise_crds::SlackProfile;
use reprise_crds::node::AppliedProfile;
use reprise_crds::status::{ConditionType, Finding, Reason};

use super::dereference::{ProfileInputs, ProfileNode};
use crate::framework::clock;

/// Progress of a node with the current revision.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RolloutStage {
    /// It should not have the revision yet.
    Waiting,
    /// It should have it, and has not reported that it does.
    Updating,
    /// It has applied it.
    Applied,
    /// It has applied it, but measures this error in percent, which is larger than allowed.
    Drifted(u32),
    /// Its agent has refused it, for this reason.
    Refused(String),
}

impl RolloutStage {
    /// Returns the progress of a node that should have the current revision with this digest; `None`: it should not.
    pub fn of(digest: Option<&str>, report: Option<&AppliedProfile>, max_error_percent: u8) -> RolloutStage {
        let Some(digest) = digest else { return RolloutStage::Waiting };
        let Some(report) = report.filter(|report| report.digest.as_str() == digest) else {
            return RolloutStage::Updating;
        };
        match (&report.refused, report.prediction_error_p99_percent) {
            (Some(refused), _) => RolloutStage::Refused(refused.to_string()),
            (None, Some(error)) if error > u32::from(max_error_percent) => RolloutStage::Drifted(error),
            (None, _) => RolloutStage::Applied,
        }
    }

    /// Whether the node has applied the revision.
    pub fn has_applied(&self) -> bool {
        matches!(self, RolloutStage::Applied | RolloutStage::Drifted(_))
    }
}

impl ProfileNode {
    /// Returns reason, description and remedy if the node refuses the revision with this number or drifts from it.
    pub fn problem(&self, revision: i64) -> Option<(Reason, String, &'static str)> {
        let name = &self.name;
        match &self.stage {
            RolloutStage::Refused(why) => Some((
                Reason::Refused,
                format!("node {name} refuses revision {revision}: {why}"),
                "correct the profile or the node, or restore the previous measurement",
            )),
            RolloutStage::Drifted(error) => Some((
                Reason::MeasuredDifference,
                format!("node {name} drifts from revision {revision}: an error of {error} %"),
                "measure again, or restore the previous measurement",
            )),
            RolloutStage::Waiting | RolloutStage::Updating | RolloutStage::Applied => None,
        }
    }
}

/// Returns the time since which all canary nodes have applied the revision: now if the status records no time
/// for it. Returns `None` if a canary has not applied it or does not report; a revision that takes nodes down must
/// not complete its soak.
pub fn soaking_since(profile: &SlackProfile, found: &ProfileInputs, now: &Time) -> Option<Time> {
    let digest = &found.current()?.digest;
    let mut canaries = found.nodes.iter().filter(|node| node.canary).peekable();
    canaries.peek()?;
    if !canaries.all(|node| node.stage == RolloutStage::Applied && !node.silent) {
        return None;
    }
    let before = profile.status.as_ref();
    let same = before.filter(|status| status.digest.as_ref().is_some_and(|known| known.as_str() == digest));
    same.and_then(|status| status.soaking_since.clone()).or_else(|| Some(now.clone()))
}

/// Returns how much longer canary nodes must run the revision; `None` if that time is over.
pub fn soak_left(profile: &SlackProfile, since: &Time, now: &Time) -> Option<Duration> {
    // The schema permits only durations.
    let soak = profile.spec.rollout.canary.as_ref()?.soak.duration().unwrap_or_default();
    soak.checked_sub(clock::between(since, now)).filter(|left| !left.is_zero())
}

/// Returns the digest of the desired revision by node name, and condition `Distributed` while other nodes wait for canary
/// nodes. `is_soaking`: all canary nodes have applied the revision, but for a shorter time than required.
pub fn build(
    profile: &SlackProfile,
    found: &ProfileInputs,
    is_soaking: bool,
) -> (BTreeMap<String, String>, Option<Finding>) {
    let nodes = &found.nodes;
    let current = |node: &ProfileNode| Some((node.name.clone(), node.desired.clone()?));
    let mut desired: BTreeMap<String, String> = nodes.iter().filter_map(current).collect();
    let Some(revision) = found.current() else { return (desired, None) };
    let rollout = &profile.spec.rollout;
    let obstacle = rollout.canary.as_ref().and_then(|_| canary_obstacle(found, is_soaking));
    // A silent node that is updating counts too, because the revision may be the cause.
    let is_unavailable =
        |node: &&ProfileNode| node.stage == RolloutStage::Updating || node.problem(found.number).is_some();
    let limit = (nodes.len() * usize::from(rollout.max_unavailable_percent.0) / 100).max(1);
    let free = limit.saturating_sub(nodes.iter().filter(is_unavailable).count());
    let are_canaries_next = has_unfinished_canary(nodes);
    let is_next = |node: &&ProfileNode| {
        let is_eligible = obstacle.is_none() && (node.canary || !are_canaries_next);
        node.stage == RolloutStage::Waiting && is_eligible && !node.silent && !node.frozen
    };
    for node in nodes.iter().filter(is_next).take(free) {
        desired.insert(node.name.clone(), revision.digest.clone());
    }
    let all = desired.len() == nodes.len() && desired.values().all(|desired| *desired == revision.digest);
    (desired, obstacle.filter(|_| !all))
}

/// Whether a canary node has not applied the revision yet, or drifts.
fn has_unfinished_canary(nodes: &[ProfileNode]) -> bool {
    nodes.iter().any(|node| node.canary && node.stage != RolloutStage::Applied)
}

/// Returns why no further node may get the revision because of the canaries.
fn canary_obstacle(found: &ProfileInputs, is_soaking: bool) -> Option<Finding> {
    let (all, revision) = (found.nodes.len(), found.number);
    let canaries = || found.nodes.iter().filter(|node| node.canary);
    let problem = canaries().find_map(|node| node.problem(revision));
    let (reason, message) = if let Some((reason, problem, remedy)) = problem {
        (reason, format!("canary {problem}. The other nodes keep their revision: {remedy}"))
    } else if canaries().next().is_none() {
        let message = format!(
            "rollout.canary.nodeSelector matches none of the {all} nodes with the GPU, and no other node gets revision {revision} \
             before: label a node, or remove rollout.canary"
        );
        (Reason::NoNodes, message)
    } else if has_unfinished_canary(&found.nodes) {
        return None;
    } else if let Some(ProfileNode { name, .. }) = canaries().find(|node| node.silent) {
        let message = format!(
            "canary node {name} has not reported for a minute, and the others wait for it: check its agent's pod, or exclude \
             the node from rollout.canary"
        );
        (Reason::NotReported, message)
    } else if is_soaking {
        let message = format!(
            "all canary nodes have applied revision {revision}; the others follow once rollout.canary.soak has passed since \
             status.soakingSince"
        );
        (Reason::Progressing, message)
    } else {
        return None;
    };
    Some(Finding::no(ConditionType::Distributed, reason, message))
}

#[cfg(test)]
mod tests;
