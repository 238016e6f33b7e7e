//! Computes the status of a profile: conditions, and counts over its nodes. Pure.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use reprise_crds::fields::Digest;
use reprise_crds::node::AppliedProfile;
use reprise_crds::slack::{Measured, ProfileNodes};
use reprise_crds::status::{ConditionType as Type, Finding, Reason};
use reprise_crds::{SlackProfile, SlackProfileStatus};

use super::build::RolloutStage;
use super::dereference::{ProfileInputs, ProfileNode};
use crate::framework::refusal::{Refusal, accepted, list};

/// Limitation stated in the condition `Active`.
const UNUSED: &str = "engines that report their layers get the profile's budgets; tensorParallel, engineVersion and fallback have \
                      no effect on the agents' own I/O in this release";

/// Computes the status and conditions of a profile.
pub fn compute(
    profile: &SlackProfile,
    found: &ProfileInputs,
    obstacle: Option<Finding>,
    soaking_since: Option<Time>,
) -> (SlackProfileStatus, Vec<Finding>) {
    let distributed = distributed(profile, found).or(obstacle).unwrap_or_else(|| in_progress(found));
    let active = active(&found.nodes, &distributed);
    let findings =
        vec![accepted(found.refused.as_ref()), valid(found), active, drifted(profile, found), distributed];
    let number = |count: usize| u32::try_from(count).unwrap_or(u32::MAX);
    let failed = found.nodes.iter().filter(|node| matches!(node.stage, RolloutStage::Refused(_)));
    let largest = |error: fn(&AppliedProfile) -> Option<u32>| reports(found).filter_map(error).max();
    let median = largest(|report| report.prediction_error_p50_percent);
    let measured = median.zip(largest(|report| report.prediction_error_p99_percent));
    let status = SlackProfileStatus {
        digest: found.digest.as_ref().map(Digest::new),
        revision: found.number,
        nodes: Some(ProfileNodes {
            target: number(found.nodes.len()),
            applied: number(having(found)),
            failed: number(failed.count()),
        }),
        soaking_since,
        measured: measured.map(|(p50, p99)| Measured {
            prediction_error_p50_percent: p50,
            prediction_error_p99_percent: p99,
        }),
        ..SlackProfileStatus::default()
    };
    (status, findings)
}

/// Returns the number of nodes that have applied the current revision.
fn having(found: &ProfileInputs) -> usize {
    found.nodes.iter().filter(|node| node.stage.has_applied()).count()
}

/// Returns the reports of nodes that have applied the current revision.
fn reports(found: &ProfileInputs) -> impl Iterator<Item = &AppliedProfile> {
    found.nodes.iter().filter(|node| node.stage.has_applied()).filter_map(|node| node.report.as_ref())
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

/// Returns condition `Distributed` if there is no revision, or no node for it.
fn distributed(profile: &SlackProfile, found: &ProfileInputs) -> Option<Finding> {
    let (kind, all, clusters) = (Type::Distributed, found.nodes.len(), found.clusters.join(", "));
    if let Some(refusal) = found.refused.as_ref().or(found.revision.as_ref().err()) {
        let having = found.nodes.iter().filter(|node| node.desired.is_some()).count();
        let message = format!(
            "no revision is distributed until the profile is accepted and valid; {having} of {all} nodes keep their revision"
        );
        return Some(Finding::no(kind, refusal.reason, message));
    }
    if all > 0 {
        return None;
    }
    if found.products.is_empty() {
        let message = format!(
            "no node of {clusters} has reported a GPU: agents read /proc/driver/nvidia/gpus, which exists once the driver is loaded"
        );
        return Some(Finding::no(kind, Reason::NoNodes, message));
    }
    let there = list(found.products.iter().map(|product| format!("'{product}'")));
    let message = format!(
        "no node of {clusters} has the GPU '{}', but they have {there}: create a SlackProfile with one of these as subject.gpuProduct, \
         measured on that GPU",
        profile.spec.subject.gpu_product
    );
    Some(Finding::no(kind, Reason::WrongGpu, message))
}

/// Returns condition `Distributed` of a rollout without obstacles.
fn in_progress(found: &ProfileInputs) -> Finding {
    let (kind, nodes, revision) = (Type::Distributed, &found.nodes, found.number);
    let (all, have) = (nodes.len(), having(found));
    if have == all {
        let message = format!("all {all} nodes that have the GPU have revision {revision}");
        return Finding::yes(kind, Reason::AsDesired, message);
    }
    let message = format!("{have} of {all} nodes have revision {revision}");
    if let Some((reason, problem, remedy)) = nodes.iter().find_map(|node| node.problem(revision)) {
        let message =
            format!("{message}; {problem}. It counts towards rollout.maxUnavailablePercent: {remedy}");
        return Finding::no(kind, reason, message);
    }
    let names = |is: &dyn Fn(&ProfileNode) -> bool| {
        list(nodes.iter().filter(|node| is(node)).map(|node| node.name.as_str()))
    };
    let silent = names(&|node| node.silent && !node.stage.has_applied());
    if !silent.is_empty() {
        let message = format!("{message}; not reporting for a minute: {silent}: check their agents' pods");
        return Finding::no(kind, Reason::NotReported, message);
    }
    let frozen = names(&|node| node.frozen && node.stage == RolloutStage::Waiting);
    if !frozen.is_empty() {
        let message = format!(
            "{message}; {frozen} cannot be changed, because the KVCacheCluster is paused or not accepted: check {}",
            found.clusters.join(", ")
        );
        return Finding::no(kind, Reason::Paused, message);
    }
    Finding::no(kind, Reason::Progressing, message)
}

/// Returns condition `Active`: whether every node has applied some revision. The message states that the data
/// path of agents does not use profiles, so that users do not expect an effect.
fn active(nodes: &[ProfileNode], distributed: &Finding) -> Finding {
    let (kind, all) = (Type::Active, nodes.len());
    if all == 0 {
        return Finding::no(kind, distributed.reason, format!("no node has applied it; {UNUSED}"));
    }
    let works = |node: &&ProfileNode| {
        node.desired.is_some() && node.report.as_ref().is_some_and(|report| report.refused.is_none())
    };
    let work = nodes.iter().filter(works).count();
    let message = format!("{work} of {all} nodes have applied a revision of it; {UNUSED}");
    if work == all {
        return Finding::yes(kind, Reason::AsDesired, message);
    }
    let reason =
        if distributed.reason == Reason::AsDesired { Reason::Progressing } else { distributed.reason };
    Finding::no(kind, reason, message)
}

fn drifted(profile: &SlackProfile, found: &ProfileInputs) -> Finding {
    let (kind, max_error) = (Type::Drifted, profile.spec.max_error_percent.0);
    let drifting: Vec<String> = found
        .nodes
        .iter()
        .filter_map(|node| match node.stage {
            RolloutStage::Drifted(error) => Some(format!("{}: an error of {error} %", node.name)),
            _ => None,
        })
        .collect();
    if let Some(first) = drifting.first() {
        let message = format!(
            "{} nodes measure a larger error than maxErrorPercent ({max_error}); {first}. Drivers, engines or clocks have changed: \
             measure again",
            drifting.len(),
        );
        return Finding::yes(kind, Reason::MeasuredDifference, message);
    }
    if reports(found).any(|report| report.prediction_error_p99_percent.is_some()) {
        let message = format!("no node measures a larger error than {max_error}");
        return Finding::no(kind, Reason::AsDesired, message);
    }
    let message = "no node has measured the error of 100 predictions: engines report the times of their layers to their agents, or the \
         model's name differs from subject.model";
    Finding::unknown(kind, Reason::NotReported, message)
}
