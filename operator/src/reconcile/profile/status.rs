//! Computes the status of a profile: conditions, and counts over its nodes. Pure.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use reprise_crds::fields::Digest;
use reprise_crds::slack::{Measured, ProfileNodes};
use reprise_crds::status::{ConditionType as Type, Finding, Reason};
use reprise_crds::{SlackProfile, SlackProfileStatus};

use super::PROFILES_MAX;
use super::build::{Rollout, RolloutStage, RolloutState};
use super::content::Revision;
use super::dereference::{ProfileInputs, ProfileNode};
use super::source::Source;
use crate::framework::refusal::Refusal;

/// Maximum number of names in a message.
const NAMES_MAX: usize = 5;
/// Limitation stated in the condition `Active`.
const UNUSED: &str = "engines that report their layers get the profile's budgets; tensorParallel, engineVersion and fallback have \
                      no effect on the agents' own I/O in this release";

/// The inputs of a profile's status.
pub struct StatusInputs<'a> {
    /// The profile as it was read.
    pub profile: &'a SlackProfile,
    /// The objects that it refers to.
    pub found: &'a ProfileInputs,
    /// Set if it is rejected: why.
    pub refused: Option<&'a Refusal>,
    /// Its revision, or why it has none.
    pub revision: Result<&'a Revision, &'a Refusal>,
    /// The decision on its rollout.
    pub decision: &'a Rollout,
    /// Since when all canary nodes have applied the revision.
    pub soaking_since: Option<Time>,
}

/// Computes the status and conditions of a profile.
pub fn compute(inputs: &StatusInputs<'_>) -> (SlackProfileStatus, Vec<Finding>) {
    let before = inputs.profile.status.clone().unwrap_or_default();
    let good = inputs.revision.ok().filter(|_| inputs.refused.is_none());
    // Without a valid revision, nodes should keep the previous one.
    let digest = good.map(|revision| Digest::new(&revision.digest)).or_else(|| before.digest.clone());
    let grown = i64::from(digest != before.digest);
    let counts = Counts::of(inputs, digest.as_ref(), before.revision + grown);
    let status = SlackProfileStatus {
        revision: counts.revision,
        nodes: Some(ProfileNodes {
            target: number(counts.nodes.len()),
            applied: number(
                counts.with(|stage| matches!(stage, RolloutStage::Applied | RolloutStage::Drifted)).count(),
            ),
            failed: number(counts.with(|stage| stage == RolloutStage::Refused).count()),
        }),
        soaking_since: inputs.soaking_since.clone(),
        measured: counts.measured(),
        digest,
        ..SlackProfileStatus::default()
    };
    let distributed = distributed(inputs, &counts);
    let active = active(&counts, &distributed);
    let findings =
        vec![accepted(inputs.refused), valid(inputs), distributed, active, drifted(inputs, &counts)];
    (status, findings)
}

fn number(count: usize) -> u32 {
    u32::try_from(count).unwrap_or(u32::MAX)
}

/// Nodes that have the GPU, with their progress.
struct Counts<'a> {
    revision: i64,
    nodes: Vec<(&'a ProfileNode, RolloutStage)>,
}

impl<'a> Counts<'a> {
    fn of(inputs: &StatusInputs<'a>, digest: Option<&Digest>, revision: i64) -> Counts<'a> {
        let max_error = inputs.profile.spec.max_error_percent.0;
        let stage = |node| {
            digest.map_or(RolloutStage::Waiting, |digest| RolloutStage::of(node, digest.as_str(), max_error))
        };
        Counts { revision, nodes: inputs.found.nodes.iter().map(|node| (node, stage(node))).collect() }
    }

    /// Returns the nodes at certain stages.
    fn with(&self, is: impl Fn(RolloutStage) -> bool) -> impl Iterator<Item = &'a ProfileNode> {
        self.nodes.iter().filter(move |(_, stage)| is(*stage)).map(|(node, _)| *node)
    }

    /// Returns the largest errors that nodes measure with the current revision.
    fn measured(&self) -> Option<Measured> {
        let works = || self.with(|stage| matches!(stage, RolloutStage::Applied | RolloutStage::Drifted));
        let report = || works().filter_map(|node| node.report.as_ref());
        Some(Measured {
            prediction_error_p50_percent: report().filter_map(|report| report.p50).max()?,
            prediction_error_p99_percent: report().filter_map(|report| report.p99).max()?,
        })
    }

    /// Returns a node's reason against the revision.
    fn problem(&self, node: &str) -> String {
        let found = self.nodes.iter().find(|(one, _)| one.name == node);
        let report = found.and_then(|(node, _)| node.report.as_ref());
        let refused = report.and_then(|report| report.refused.clone());
        refused.or_else(|| Some(format!("an error of {} %", report?.p99?))).unwrap_or_default()
    }
}

fn join_names<'a>(nodes: impl Iterator<Item = &'a ProfileNode>) -> String {
    nodes.take(NAMES_MAX).map(|node| node.name.as_str()).collect::<Vec<_>>().join(", ")
}

fn accepted(refused: Option<&Refusal>) -> Finding {
    match refused {
        Some(Refusal { reason, message }) => Finding::no(Type::Accepted, *reason, message),
        None => Finding::yes(Type::Accepted, Reason::AsDesired, "the spec is valid"),
    }
}

fn valid(inputs: &StatusInputs<'_>) -> Finding {
    match (&inputs.found.source, inputs.revision) {
        (Source::Missing(refusal), _) => {
            Finding::unknown(Type::Valid, refusal.reason, "the measurement is unavailable")
        }
        (_, Err(refusal)) => Finding::no(Type::Valid, refusal.reason, &refusal.message),
        (_, Ok(_)) => Finding::yes(
            Type::Valid,
            Reason::AsDesired,
            "the windows do not overlap, and the kernel times are sorted",
        ),
    }
}

fn distributed(inputs: &StatusInputs<'_>, counts: &Counts<'_>) -> Finding {
    let kind = Type::Distributed;
    let (all, revision) = (counts.nodes.len(), counts.revision);
    if let Some(refusal) = inputs.refused.or(inputs.revision.err()) {
        let having = inputs.found.nodes.iter().filter(|node| node.desired.is_some()).count();
        let message = format!(
            "no revision is distributed until the profile is accepted and valid; {having} of {all} nodes keep their revision{}",
            over_limit_note(inputs)
        );
        return Finding::no(kind, refusal.reason, message);
    }
    if all == 0 {
        return no_matching_gpu(inputs);
    }
    let (reason, message) = match &inputs.decision.state {
        RolloutState::Idle | RolloutState::Complete | RolloutState::Progressing => {
            return in_progress(inputs, counts);
        }
        RolloutState::NoCanary => (
            Reason::NoNodes,
            format!(
                "rollout.canary.nodeSelector matches none of the {all} nodes with the GPU, and no other node gets revision {revision} \
                 before: label a node, or remove rollout.canary"
            ),
        ),
        RolloutState::Soaking(_) => (
            Reason::Progressing,
            format!(
                "all canary nodes have applied revision {revision}; the others follow once rollout.canary.soak has passed since \
                 status.soakingSince"
            ),
        ),
        RolloutState::CanarySilent(node) => (
            Reason::NotReported,
            format!(
                "canary node {node} has not reported for a minute, and the others wait for it: check its agent's pod, or exclude \
                 the node from rollout.canary"
            ),
        ),
        RolloutState::CanaryFailed { node, stage } => (
            reason_of(*stage),
            format!(
                "canary node {node} {} revision {revision}: {}. The other nodes keep their revision: {}",
                verb_of(*stage),
                counts.problem(node),
                remedy_of(*stage),
            ),
        ),
        RolloutState::LimitReached { node, stage } => (
            reason_of(*stage),
            format!(
                "{} of {all} nodes refuse revision {revision} or drift from it, which is the limit of rollout.maxUnavailablePercent: \
                 node {node} {} it: {}. The other nodes keep their revision: {}",
                counts.with(RolloutStage::is_bad).count(),
                verb_of(*stage),
                counts.problem(node),
                remedy_of(*stage),
            ),
        ),
    };
    Finding::no(kind, reason, message)
}

/// Returns a note on nodes that do not get the profile because of the limit.
fn over_limit_note(inputs: &StatusInputs<'_>) -> String {
    let over_limit = || inputs.found.nodes.iter().filter(|node| node.over_limit);
    match over_limit().count() {
        0 => String::new(),
        count => format!(
            "; {count} do not get it while {PROFILES_MAX} other profiles have precedence: {}. Narrow spec.slackProfiles of their \
             KVCacheCluster, or delete a profile",
            join_names(over_limit())
        ),
    }
}

fn reason_of(stage: RolloutStage) -> Reason {
    if stage == RolloutStage::Drifted { Reason::MeasuredDifference } else { Reason::Refused }
}

fn verb_of(stage: RolloutStage) -> &'static str {
    if stage == RolloutStage::Drifted { "drifts from" } else { "refuses" }
}

fn remedy_of(stage: RolloutStage) -> &'static str {
    if stage == RolloutStage::Drifted {
        "measure again, or restore the previous measurement"
    } else {
        "correct the profile or the node, or restore the previous measurement"
    }
}

/// Returns the condition if no node has the GPU.
fn no_matching_gpu(inputs: &StatusInputs<'_>) -> Finding {
    let kind = Type::Distributed;
    let desired = &inputs.profile.spec.subject.gpu_product;
    let clusters: Vec<&str> =
        inputs.found.clusters.iter().map(|selecting| selecting.cluster.as_str()).collect();
    let clusters = clusters.join(", ");
    if inputs.found.products.is_empty() {
        let message = format!(
            "no node of {clusters} has reported a GPU: agents read /proc/driver/nvidia/gpus, which exists once the driver is loaded"
        );
        return Finding::no(kind, Reason::NoNodes, message);
    }
    let there: Vec<&str> = inputs.found.products.iter().take(NAMES_MAX).map(String::as_str).collect();
    let message = format!(
        "no node of {clusters} has the GPU '{desired}', but they have '{}': create a SlackProfile with one of these as subject.gpuProduct, \
         measured on that GPU",
        there.join("', '")
    );
    Finding::no(kind, Reason::WrongGpu, message)
}

/// Returns the condition of a rollout without obstacles.
fn in_progress(inputs: &StatusInputs<'_>, counts: &Counts<'_>) -> Finding {
    let kind = Type::Distributed;
    let (all, revision) = (counts.nodes.len(), counts.revision);
    let have = counts.with(|stage| matches!(stage, RolloutStage::Applied | RolloutStage::Drifted)).count();
    if have == all {
        let message = format!("all {all} nodes that have the GPU have revision {revision}");
        return Finding::yes(kind, Reason::AsDesired, message);
    }
    let message = format!("{have} of {all} nodes have revision {revision}");
    if let Some(node) = counts.with(|stage| stage == RolloutStage::Refused).next() {
        let why = counts.problem(&node.name);
        let message =
            format!("{message}; node {} refuses it: {why}: {}", node.name, remedy_of(RolloutStage::Refused));
        return Finding::no(kind, Reason::Refused, message);
    }
    let waits = |stage| matches!(stage, RolloutStage::Waiting | RolloutStage::Updating);
    let silent = join_names(counts.with(waits).filter(|node| node.silent));
    if !silent.is_empty() {
        let message = format!("{message}; not reporting for a minute: {silent}: check their agents' pods");
        return Finding::no(kind, Reason::NotReported, message);
    }
    let frozen = join_names(counts.with(|stage| stage == RolloutStage::Waiting).filter(|node| node.frozen));
    if !frozen.is_empty() {
        let clusters = &inputs.found.clusters;
        let clusters: Vec<&str> = clusters.iter().map(|selecting| selecting.cluster.as_str()).collect();
        let message = format!(
            "{message}; {frozen} cannot be changed, because the KVCacheCluster is paused or not accepted: check {}",
            clusters.join(", ")
        );
        return Finding::no(kind, Reason::Paused, message);
    }
    Finding::no(kind, Reason::Progressing, message)
}

/// Returns condition `Active`: whether every node has applied some revision. The message states that the data
/// path of agents does not use profiles, so that users do not expect an effect.
fn active(counts: &Counts<'_>, distributed: &Finding) -> Finding {
    let kind = Type::Active;
    let all = counts.nodes.len();
    let works = |(node, _): &&(&ProfileNode, RolloutStage)| {
        node.desired.is_some() && node.report.as_ref().is_some_and(|report| report.refused.is_none())
    };
    let work = counts.nodes.iter().filter(works).count();
    if all == 0 {
        return Finding::no(kind, distributed.reason, format!("no node has applied it; {UNUSED}"));
    }
    let message = format!("{work} of {all} nodes have applied a revision of it; {UNUSED}");
    if work == all {
        return Finding::yes(kind, Reason::AsDesired, message);
    }
    let reason =
        if distributed.reason == Reason::AsDesired { Reason::Progressing } else { distributed.reason };
    Finding::no(kind, reason, message)
}

fn drifted(inputs: &StatusInputs<'_>, counts: &Counts<'_>) -> Finding {
    let kind = Type::Drifted;
    let most = inputs.profile.spec.max_error_percent.0;
    let drifting = || counts.with(|stage| stage == RolloutStage::Drifted);
    if let Some(first) = drifting().next() {
        let message = format!(
            "{} nodes measure a larger error than maxErrorPercent ({most}); {}: {}. Drivers, engines or clocks have changed: measure again",
            drifting().count(),
            first.name,
            counts.problem(&first.name),
        );
        return Finding::yes(kind, Reason::MeasuredDifference, message);
    }
    let mut measure = counts.with(|stage| stage == RolloutStage::Applied);
    if measure.any(|node| node.report.as_ref().is_some_and(|report| report.p99.is_some())) {
        return Finding::no(kind, Reason::AsDesired, format!("no node measures a larger error than {most}"));
    }
    let message = "no node has measured the error of 100 predictions: engines report the times of their layers to their agents, or the \
         model's name differs from subject.model";
    Finding::unknown(kind, Reason::NotReported, message)
}

#[cfg(test)]
mod tests;
