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
use reprise_crds::slack::Canary;

use super::dereference::ProfileNode;

/// Progress of a node with a revision.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RolloutStage {
    /// It should not have the revision yet.
    Waiting,
    /// It should have it, and has not reported that it does.
    Updating,
    /// It has applied it.
    Applied,
    /// It has applied it, but measures larger errors than allowed.
    Drifted,
    /// Its agent has refused it.
    Refused,
}

/// The desired revisions of nodes, and what holds up the rollout.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rollout {
    /// Digest of the desired revision by node name.
    pub nodes: BTreeMap<String, String>,
    /// Why no node may follow before the canaries; `None` if there is no such reason, or every node should have
    /// the revision.
    pub obstacle: Option<Obstacle>,
}

/// Why further nodes wait for canary nodes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Obstacle {
    /// Canaries are configured, but the selector matches no node.
    NoCanary,
    /// All canary nodes have applied the revision; the others follow after this time.
    Soaking(Duration),
    /// A canary node does not report.
    CanarySilent(String),
    /// A canary node refuses it or drifts.
    CanaryFailed {
        /// Name of the node.
        node: String,
        /// The problem: `Drifted` or `Refused`.
        stage: RolloutStage,
    },
}

impl RolloutStage {
    /// Returns the progress of a node with the revision of a digest.
    pub fn of(node: &ProfileNode, digest: &str, max_error_percent: u8) -> RolloutStage {
        if node.desired.as_deref() != Some(digest) {
            return RolloutStage::Waiting;
        }
        match node.report.as_ref().filter(|report| report.digest.as_str() == digest) {
            None => RolloutStage::Updating,
            Some(report) if report.refused.is_some() => RolloutStage::Refused,
            Some(report)
                if report
                    .prediction_error_p99_percent
                    .is_some_and(|error| error > u32::from(max_error_percent)) =>
            {
                RolloutStage::Drifted
            }
            Some(_) => RolloutStage::Applied,
        }
    }

    /// Whether the node refuses the revision or drifts.
    pub fn is_bad(self) -> bool {
        matches!(self, RolloutStage::Drifted | RolloutStage::Refused)
    }
}

/// Returns the time since which all canary nodes have applied a revision: now if the status records no time
/// for this revision. Returns `None` if a canary has not applied it or does not report; a revision that takes
/// nodes down must not complete its soak.
pub fn soaking_since(
    profile: &SlackProfile,
    nodes: &[ProfileNode],
    digest: Option<&str>,
    now: &Time,
) -> Option<Time> {
    let digest = digest?;
    let works = |node: &ProfileNode| {
        !node.silent
            && RolloutStage::of(node, digest, profile.spec.max_error_percent.0) == RolloutStage::Applied
    };
    let mut canaries = nodes.iter().filter(|node| node.canary).peekable();
    canaries.peek()?;
    if !canaries.all(works) {
        return None;
    }
    let before = profile.status.as_ref();
    let same = before.filter(|status| status.digest.as_ref().is_some_and(|known| known.as_str() == digest));
    same.and_then(|status| status.soaking_since.clone()).or_else(|| Some(now.clone()))
}

/// Decides the rollout. `soaked` is the time for which all canary nodes have applied the revision.
pub fn build(
    profile: &SlackProfile,
    nodes: &[ProfileNode],
    digest: Option<&str>,
    soaked: Option<Duration>,
) -> Rollout {
    let current = |node: &ProfileNode| Some((node.name.clone(), node.desired.clone()?));
    let mut desired: BTreeMap<String, String> = nodes.iter().filter_map(current).collect();
    let Some(digest) = digest else { return Rollout { nodes: desired, obstacle: None } };
    let rollout = &profile.spec.rollout;
    let stage = |node: &ProfileNode| RolloutStage::of(node, digest, profile.spec.max_error_percent.0);
    let staged: Vec<(&ProfileNode, RolloutStage)> = nodes.iter().map(|node| (node, stage(node))).collect();
    let obstacle = rollout.canary.as_ref().and_then(|canary| canary_obstacle(&staged, canary, soaked));
    let are_canaries_next = has_unfinished_canary(&staged);
    // A silent node that is updating counts too, because the revision may be the cause.
    let unavailable =
        staged.iter().filter(|(_, stage)| *stage == RolloutStage::Updating || stage.is_bad()).count();
    let limit = (nodes.len() * usize::from(rollout.max_unavailable_percent.0) / 100).max(1);
    let free = limit.saturating_sub(unavailable);
    let is_next = |(node, stage): &&(&ProfileNode, RolloutStage)| {
        let is_eligible = obstacle.is_none() && (node.canary || !are_canaries_next);
        *stage == RolloutStage::Waiting && is_eligible && !node.silent && !node.frozen
    };
    for (node, _) in staged.iter().filter(is_next).take(free) {
        desired.insert(node.name.clone(), digest.to_owned());
    }
    let all = desired.len() == nodes.len() && desired.values().all(|desired| desired == digest);
    Rollout { nodes: desired, obstacle: obstacle.filter(|_| !all) }
}

/// Whether a canary node has not applied the revision yet, or drifts.
fn has_unfinished_canary(staged: &[(&ProfileNode, RolloutStage)]) -> bool {
    staged.iter().any(|(node, stage)| node.canary && *stage != RolloutStage::Applied)
}

/// Returns why no further node may get the revision because of the canaries.
fn canary_obstacle(
    staged: &[(&ProfileNode, RolloutStage)],
    canary: &Canary,
    soaked: Option<Duration>,
) -> Option<Obstacle> {
    let canaries = || staged.iter().filter(|(node, _)| node.canary);
    if let Some((node, stage)) = canaries().find(|(_, stage)| stage.is_bad()) {
        return Some(Obstacle::CanaryFailed { node: node.name.clone(), stage: *stage });
    }
    if canaries().next().is_none() {
        return Some(Obstacle::NoCanary);
    }
    if has_unfinished_canary(staged) {
        return None;
    }
    if let Some((node, _)) = canaries().find(|(node, _)| node.silent) {
        return Some(Obstacle::CanarySilent(node.name.clone()));
    }
    // Validated before: a profile with an unreadable time has no revision.
    let soak = canary.soak.duration().unwrap_or_default();
    let rest = soak.checked_sub(soaked.unwrap_or_default()).filter(|rest| !rest.is_zero());
    rest.map(Obstacle::Soaking)
}

#[cfg(test)]
pub(crate) mod tests;
