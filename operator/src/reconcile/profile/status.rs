//! Computes the status of a profile: conditions, and counts over its nodes. Pure.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use reprise_crds::fields::Digest;
use reprise_crds::node::AppliedProfile;
use reprise_crds::slack::{Measured, ProfileNodes};
use reprise_crds::status::{ConditionType as Type, Finding, Reason};
use reprise_crds::{SlackProfile, SlackProfileStatus};

use super::build::{Obstacle, RolloutStage};
use super::dereference::{ProfileInputs, ProfileNode};
use crate::framework::refusal::{Refusal, accepted};

/// Maximum number of names in a message.
const NAMES_MAX: usize = 5;
/// Limitation stated in the condition `Active`.
const UNUSED: &str = "engines that report their layers get the profile's budgets; tensorParallel, engineVersion and fallback have \
                      no effect on the agents' own I/O in this release";

/// Computes the status and conditions of a profile.
pub fn compute(
    profile: &SlackProfile,
    found: &ProfileInputs,
    refused: Option<&Refusal>,
    obstacle: Option<&Obstacle>,
    soaking_since: Option<Time>,
) -> (SlackProfileStatus, Vec<Finding>) {
    let before = profile.status.clone().unwrap_or_default();
    let good = found.revision.as_ref().ok().filter(|_| refused.is_none());
    // Without a valid revision, nodes should keep the previous one.
    let digest = good.map(|revision| Digest::new(&revision.digest)).or_else(|| before.digest.clone());
    let max_error = profile.spec.max_error_percent.0;
    let stage = |node| {
        digest
            .as_ref()
            .map_or(RolloutStage::Waiting, |digest| RolloutStage::of(node, digest.as_str(), max_error))
    };
    let counts = Counts {
        profile,
        found,
        revision: before.revision + i64::from(digest != before.digest),
        nodes: found.nodes.iter().map(|node| (node, stage(node))).collect(),
    };
    let distributed = distributed(&counts, refused, obstacle);
    let active = active(&counts, &distributed);
    let findings = vec![accepted(refused), valid(found), active, drifted(&counts), distributed];
    let status = SlackProfileStatus {
        revision: counts.revision,
        nodes: Some(ProfileNodes {
            target: number(counts.nodes.len()),
            applied: number(counts.having().count()),
            failed: number(counts.with(|stage| stage == RolloutStage::Refused).count()),
        }),
        soaking_since,
        measured: counts.measured(),
        digest,
        ..SlackProfileStatus::default()
    };
    (status, findings)
}

fn number(count: usize) -> u32 {
    u32::try_from(count).unwrap_or(u32::MAX)
}

/// Nodes that have the GPU of a profile, with their progress.
struct Counts<'a> {
    profile: &'a SlackProfile,
    found: &'a ProfileInputs,
    revision: i64,
    nodes: Vec<(&'a ProfileNode, RolloutStage)>,
}

impl<'a> Counts<'a> {
    /// Returns the nodes at certain stages.
    fn with(&self, is: impl Fn(RolloutStage) -> bool) -> impl Iterator<Item = &'a ProfileNode> {
        self.nodes.iter().filter(move |(_, stage)| is(*stage)).map(|(node, _)| *node)
    }

    /// Returns the nodes that have applied the current revision.
    fn having(&self) -> impl Iterator<Item = &'a ProfileNode> {
        self.with(|stage| matches!(stage, RolloutStage::Applied | RolloutStage::Drifted))
    }

    /// Returns the largest errors that nodes measure with the current revision.
    fn measured(&self) -> Option<Measured> {
        let largest = |error: fn(&AppliedProfile) -> Option<u32>| {
            self.having().filter_map(|node| error(node.report.as_ref()?)).max()
        };
        Some(Measured {
            prediction_error_p50_percent: largest(|report| report.prediction_error_p50_percent)?,
            prediction_error_p99_percent: largest(|report| report.prediction_error_p99_percent)?,
        })
    }

    /// Returns a node's reason against the revision.
    fn problem(&self, node: &str) -> String {
        let found = self.nodes.iter().find(|(one, _)| one.name == node);
        let Some(report) = found.and_then(|(node, _)| node.report.as_ref()) else { return String::new() };
        match (&report.refused, report.prediction_error_p99_percent) {
            (Some(refused), _) => refused.to_string(),
            (None, Some(error)) => format!("an error of {error} %"),
            (None, None) => String::new(),
        }
    }
}

fn join_names<'a>(nodes: impl Iterator<Item = &'a ProfileNode>) -> String {
    nodes.take(NAMES_MAX).map(|node| node.name.as_str()).collect::<Vec<_>>().join(", ")
}

fn valid(found: &ProfileInputs) -> Finding {
    match &found.revision {
        Ok(_) => Finding::yes(
            Type::Valid,
            Reason::AsDesired,
            "the windows do not overlap, and the kernel times are sorted",
        ),
        Err(Refusal { reason: Reason::ProfileInvalid, message }) => {
            Finding::no(Type::Valid, Reason::ProfileInvalid, message)
        }
        Err(refusal) => Finding::unknown(Type::Valid, refusal.reason, "the measurement is unavailable"),
    }
}

fn distributed(counts: &Counts<'_>, refused: Option<&Refusal>, obstacle: Option<&Obstacle>) -> Finding {
    let kind = Type::Distributed;
    let (all, revision) = (counts.nodes.len(), counts.revision);
    if let Some(refusal) = refused.or(counts.found.revision.as_ref().err()) {
        let having = counts.found.nodes.iter().filter(|node| node.desired.is_some()).count();
        let message = format!(
            "no revision is distributed until the profile is accepted and valid; {having} of {all} nodes keep their revision"
        );
        return Finding::no(kind, refusal.reason, message);
    }
    if all == 0 {
        return no_matching_gpu(counts);
    }
    let Some(obstacle) = obstacle else { return in_progress(counts) };
    let (reason, message) = match obstacle {
        Obstacle::NoCanary => (
            Reason::NoNodes,
            format!(
                "rollout.canary.nodeSelector matches none of the {all} nodes with the GPU, and no other node gets revision {revision} \
                 before: label a node, or remove rollout.canary"
            ),
        ),
        Obstacle::Soaking(_) => (
            Reason::Progressing,
            format!(
                "all canary nodes have applied revision {revision}; the others follow once rollout.canary.soak has passed since \
                 status.soakingSince"
            ),
        ),
        Obstacle::CanarySilent(node) => (
            Reason::NotReported,
            format!(
                "canary node {node} has not reported for a minute, and the others wait for it: check its agent's pod, or exclude \
                 the node from rollout.canary"
            ),
        ),
        Obstacle::CanaryFailed { node, stage } => {
            let (reason, verb, remedy) = words(*stage);
            let problem = counts.problem(node);
            let message = format!(
                "canary node {node} {verb} revision {revision}: {problem}. The other nodes keep their revision: {remedy}"
            );
            (reason, message)
        }
    };
    Finding::no(kind, reason, message)
}

/// Returns reason, verb and remedy of a node that refuses a revision or drifts from it.
fn words(stage: RolloutStage) -> (Reason, &'static str, &'static str) {
    if stage == RolloutStage::Drifted {
        let remedy = "measure again, or restore the previous measurement";
        return (Reason::MeasuredDifference, "drifts from", remedy);
    }
    let remedy = "correct the profile or the node, or restore the previous measurement";
    (Reason::Refused, "refuses", remedy)
}

/// Returns the condition if no node has the GPU.
fn no_matching_gpu(Counts { profile, found, .. }: &Counts<'_>) -> Finding {
    let kind = Type::Distributed;
    let desired = &profile.spec.subject.gpu_product;
    let clusters = found.clusters.join(", ");
    if found.products.is_empty() {
        let message = format!(
            "no node of {clusters} has reported a GPU: agents read /proc/driver/nvidia/gpus, which exists once the driver is loaded"
        );
        return Finding::no(kind, Reason::NoNodes, message);
    }
    let there: Vec<&str> = found.products.iter().take(NAMES_MAX).map(String::as_str).collect();
    let message = format!(
        "no node of {clusters} has the GPU '{desired}', but they have '{}': create a SlackProfile with one of these as subject.gpuProduct, \
         measured on that GPU",
        there.join("', '")
    );
    Finding::no(kind, Reason::WrongGpu, message)
}

/// Returns the condition of a rollout without obstacles.
fn in_progress(counts: &Counts<'_>) -> Finding {
    let kind = Type::Distributed;
    let (all, revision) = (counts.nodes.len(), counts.revision);
    let have = counts.having().count();
    if have == all {
        let message = format!("all {all} nodes that have the GPU have revision {revision}");
        return Finding::yes(kind, Reason::AsDesired, message);
    }
    let message = format!("{have} of {all} nodes have revision {revision}");
    if let Some((node, stage)) = counts.nodes.iter().find(|(_, stage)| stage.is_bad()) {
        let (reason, verb, remedy) = words(*stage);
        let (name, why) = (&node.name, counts.problem(&node.name));
        let message = format!(
            "{message}; node {name} {verb} it: {why}. It counts towards rollout.maxUnavailablePercent: {remedy}"
        );
        return Finding::no(kind, reason, message);
    }
    let waits = |stage| matches!(stage, RolloutStage::Waiting | RolloutStage::Updating);
    let silent = join_names(counts.with(waits).filter(|node| node.silent));
    if !silent.is_empty() {
        let message = format!("{message}; not reporting for a minute: {silent}: check their agents' pods");
        return Finding::no(kind, Reason::NotReported, message);
    }
    let frozen = join_names(counts.with(|stage| stage == RolloutStage::Waiting).filter(|node| node.frozen));
    if !frozen.is_empty() {
        let message = format!(
            "{message}; {frozen} cannot be changed, because the KVCacheCluster is paused or not accepted: check {}",
            counts.found.clusters.join(", ")
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
    if all == 0 {
        return Finding::no(kind, distributed.reason, format!("no node has applied it; {UNUSED}"));
    }
    let works = |node: &&ProfileNode| {
        node.desired.is_some() && node.report.as_ref().is_some_and(|report| report.refused.is_none())
    };
    let work = counts.with(|_| true).filter(works).count();
    let message = format!("{work} of {all} nodes have applied a revision of it; {UNUSED}");
    if work == all {
        return Finding::yes(kind, Reason::AsDesired, message);
    }
    let reason =
        if distributed.reason == Reason::AsDesired { Reason::Progressing } else { distributed.reason };
    Finding::no(kind, reason, message)
}

fn drifted(counts: &Counts<'_>) -> Finding {
    let (kind, max_error) = (Type::Drifted, counts.profile.spec.max_error_percent.0);
    let drifting = || counts.with(|stage| stage == RolloutStage::Drifted);
    if let Some(first) = drifting().next() {
        let message = format!(
            "{} nodes measure a larger error than maxErrorPercent ({max_error}); {}: {}. Drivers, engines or clocks have changed: measure again",
            drifting().count(),
            first.name,
            counts.problem(&first.name),
        );
        return Finding::yes(kind, Reason::MeasuredDifference, message);
    }
    let measures = |node: &ProfileNode| {
        node.report.as_ref().is_some_and(|report| report.prediction_error_p99_percent.is_some())
    };
    if counts.having().any(measures) {
        let message = format!("no node measures a larger error than {max_error}");
        return Finding::no(kind, Reason::AsDesired, message);
    }
    let message = "no node has measured the error of 100 predictions: engines report the times of their layers to their agents, or the \
         model's name differs from subject.model";
    Finding::unknown(kind, Reason::NotReported, message)
}

#[cfg(test)]
mod tests;
