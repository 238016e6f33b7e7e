//! What a profile is: conditions and counts over its nodes. Pure.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use reprise_crds::fields::Digest;
use reprise_crds::slack::{Measured, ProfileNodes};
use reprise_crds::status::{ConditionType as Type, Finding, Reason};
use reprise_crds::{SlackProfile, SlackProfileStatus};

use super::PROFILES_MAX;
use super::build::{Pace, Stage, Wave};
use super::content::Revision;
use super::dereference::{Found, ProfileNode};
use super::source::Source;
use crate::plan::Refusal;

/// So many names are in a message, at the most.
const NAMES_MAX: usize = 5;
/// What `Active` does not mean.
const UNUSED: &str = "nothing on the data path uses it in this release, its fallback included";

/// Everything that a status is made of.
pub struct Seen<'a> {
    /// The profile.
    pub profile: &'a SlackProfile,
    /// What it is about.
    pub found: &'a Found,
    /// Why it is refused.
    pub refused: Option<&'a Refusal>,
    /// The revision that it is, or why it is none.
    pub revision: Result<&'a Revision, &'a Refusal>,
    /// What was decided.
    pub wave: &'a Wave,
    /// Since when canary nodes work by it.
    pub soaking_since: Option<Time>,
}

/// What to say of a profile.
pub fn of(seen: &Seen<'_>) -> (SlackProfileStatus, Vec<Finding>) {
    let before = seen.profile.status.clone().unwrap_or_default();
    let good = seen.revision.ok().filter(|_| seen.refused.is_none());
    // Without a good one nodes should have what they should have before.
    let digest = good.map(|revision| Digest::new(&revision.digest)).or_else(|| before.digest.clone());
    let grown = i64::from(digest != before.digest);
    let counts = Counts::of(seen, digest.as_ref(), before.revision + grown);
    let status = SlackProfileStatus {
        revision: counts.revision,
        nodes: Some(ProfileNodes {
            target: number(counts.nodes.len()),
            applied: number(counts.with(|stage| matches!(stage, Stage::Works | Stage::Drifted)).count()),
            failed: number(counts.with(|stage| stage == Stage::Refused).count()),
        }),
        soaking_since: seen.soaking_since.clone(),
        measured: counts.measured(),
        digest,
        ..SlackProfileStatus::default()
    };
    let distributed = distributed(seen, &counts);
    let active = active(&counts, &distributed);
    let findings = vec![accepted(seen.refused), valid(seen), distributed, active, drifted(seen, &counts)];
    (status, findings)
}

fn number(count: usize) -> u32 {
    u32::try_from(count).unwrap_or(u32::MAX)
}

/// Nodes that have the GPU, each with how far it is.
struct Counts<'a> {
    revision: i64,
    nodes: Vec<(&'a ProfileNode, Stage)>,
}

impl<'a> Counts<'a> {
    fn of(seen: &Seen<'a>, digest: Option<&Digest>, revision: i64) -> Counts<'a> {
        let max_error = seen.profile.spec.max_error_percent.0;
        let stage = |node| digest.map_or(Stage::Before, |digest| Stage::of(node, digest.as_str(), max_error));
        Counts { revision, nodes: seen.found.nodes.iter().map(|node| (node, stage(node))).collect() }
    }

    /// Nodes at some stages.
    fn with(&self, is: impl Fn(Stage) -> bool) -> impl Iterator<Item = &'a ProfileNode> {
        self.nodes.iter().filter(move |(_, stage)| is(*stage)).map(|(node, _)| *node)
    }

    /// The largest errors that nodes measure by the present revision, where one measures.
    fn measured(&self) -> Option<Measured> {
        let works = || self.with(|stage| matches!(stage, Stage::Works | Stage::Drifted));
        let said = || works().filter_map(|node| node.said.as_ref());
        Some(Measured {
            prediction_error_p50_percent: said().filter_map(|said| said.p50).max()?,
            prediction_error_p99_percent: said().filter_map(|said| said.p99).max()?,
        })
    }

    /// What a node says against the revision.
    fn complaint(&self, node: &str) -> String {
        let found = self.nodes.iter().find(|(one, _)| one.name == node);
        let said = found.and_then(|(node, _)| node.said.as_ref());
        let refused = said.and_then(|said| said.refused.clone());
        refused.or_else(|| Some(format!("an error of {} %", said?.p99?))).unwrap_or_default()
    }
}

fn few<'a>(nodes: impl Iterator<Item = &'a ProfileNode>) -> String {
    nodes.take(NAMES_MAX).map(|node| node.name.as_str()).collect::<Vec<_>>().join(", ")
}

fn accepted(refused: Option<&Refusal>) -> Finding {
    match refused {
        Some(Refusal { reason, message }) => Finding::no(Type::Accepted, *reason, message),
        None => Finding::yes(Type::Accepted, Reason::AsDesired, "the spec is right"),
    }
}

fn valid(seen: &Seen<'_>) -> Finding {
    match (&seen.found.source, seen.revision) {
        (Source::Missing(refusal), _) => {
            Finding::unknown(Type::Valid, refusal.reason, "the windows could not be read")
        }
        (_, Err(refusal)) => Finding::no(Type::Valid, refusal.reason, &refusal.message),
        (_, Ok(_)) => {
            Finding::yes(Type::Valid, Reason::AsDesired, "the windows are in order, and none overlap")
        }
    }
}

fn distributed(seen: &Seen<'_>, counts: &Counts<'_>) -> Finding {
    let kind = Type::Distributed;
    let (all, revision) = (counts.nodes.len(), counts.revision);
    if let Some(refusal) = seen.refused.or(seen.revision.err()) {
        let having = seen.found.nodes.iter().filter(|node| node.wanted.is_some()).count();
        let message = format!(
            "nothing is distributed until the profile is accepted and valid; {having} of {all} nodes keep the revision that they have{}",
            without_place(seen)
        );
        return Finding::no(kind, refusal.reason, message);
    }
    if all == 0 {
        return nowhere(seen);
    }
    let (reason, message) = match &seen.wave.pace {
        Pace::Still | Pace::Given | Pace::Moving => return under_way(seen, counts),
        Pace::NoCanary => (
            Reason::NoNodes,
            format!(
                "rollout.canary.nodeSelector selects none of the {all} nodes that have the GPU, and no other node gets revision {revision} \
                 before: label a node, or remove rollout.canary"
            ),
        ),
        Pace::Soaking(_) => (
            Reason::Progressing,
            format!(
                "all canary nodes work by revision {revision}; the others follow once rollout.canary.soak has passed since \
                 status.soakingSince"
            ),
        ),
        Pace::CanarySilent(node) => (
            Reason::NotReported,
            format!(
                "canary node {node} has not reported for a minute, and the others wait for it: look at its agent's pod, or take the \
                 node out of rollout.canary"
            ),
        ),
        Pace::Stopped { node, stage } => (
            reason_of(*stage),
            format!(
                "canary node {node} {} revision {revision}: {}. The other nodes keep the revision that they have: {}",
                verb_of(*stage),
                counts.complaint(node),
                advice_of(*stage),
            ),
        ),
        Pace::Exhausted { node, stage } => (
            reason_of(*stage),
            format!(
                "{} of {all} nodes refuse revision {revision} or drift from it, as many as rollout.maxUnavailablePercent lets be between \
                 two: node {node} {} it: {}. The other nodes keep the revision that they have: {}",
                counts.with(Stage::is_bad).count(),
                verb_of(*stage),
                counts.complaint(node),
                advice_of(*stage),
            ),
        ),
    };
    Finding::no(kind, reason, message)
}

/// Nodes that have none of it, since others have their places there; nothing where there are none.
fn without_place(seen: &Seen<'_>) -> String {
    let crowded = || seen.found.nodes.iter().filter(|node| node.crowded);
    match crowded().count() {
        0 => String::new(),
        count => format!(
            "; {count} do not have it, as long as {PROFILES_MAX} others come before it: {}. Narrow slackProfiles of their KVCacheCluster, or \
             remove a profile",
            few(crowded())
        ),
    }
}

fn reason_of(stage: Stage) -> Reason {
    if stage == Stage::Drifted { Reason::MeasuredDifference } else { Reason::Refused }
}

fn verb_of(stage: Stage) -> &'static str {
    if stage == Stage::Drifted { "drifts from" } else { "refuses" }
}

fn advice_of(stage: Stage) -> &'static str {
    if stage == Stage::Drifted {
        "measure anew, or write the windows back that were there before"
    } else {
        "correct the profile or the node, or write the windows back that were there before"
    }
}

/// No node has the GPU.
fn nowhere(seen: &Seen<'_>) -> Finding {
    let kind = Type::Distributed;
    let wanted = &seen.profile.spec.subject.gpu_product;
    let clusters: Vec<&str> =
        seen.found.clusters.iter().map(|selecting| selecting.cluster.as_str()).collect();
    let clusters = clusters.join(", ");
    if seen.found.products.is_empty() {
        let message = format!(
            "no node of {clusters} has said that it has a GPU: the agents read /proc/driver/nvidia/gpus, which is there once the driver is"
        );
        return Finding::no(kind, Reason::NoNodes, message);
    }
    let there: Vec<&str> = seen.found.products.iter().take(NAMES_MAX).map(String::as_str).collect();
    let message = format!(
        "no node of {clusters} has the GPU '{wanted}', but they have '{}': make a SlackProfile whose subject.gpuProduct is one of these, \
         measured on it",
        there.join("', '")
    );
    Finding::no(kind, Reason::WrongGpu, message)
}

/// Nothing stops it.
fn under_way(seen: &Seen<'_>, counts: &Counts<'_>) -> Finding {
    let kind = Type::Distributed;
    let (all, revision) = (counts.nodes.len(), counts.revision);
    let have = counts.with(|stage| matches!(stage, Stage::Works | Stage::Drifted)).count();
    if have == all {
        let message = format!("all {all} nodes that have the GPU have revision {revision}");
        return Finding::yes(kind, Reason::AsDesired, message);
    }
    let message = format!("{have} of {all} nodes have revision {revision}");
    if let Some(node) = counts.with(|stage| stage == Stage::Refused).next() {
        let why = counts.complaint(&node.name);
        let message =
            format!("{message}; node {} refuses it: {why}: {}", node.name, advice_of(Stage::Refused));
        return Finding::no(kind, Reason::Refused, message);
    }
    let waits = |stage| matches!(stage, Stage::Before | Stage::Between);
    let silent = few(counts.with(waits).filter(|node| node.silent));
    if !silent.is_empty() {
        let message = format!("{message}; not reporting for a minute: {silent}: look at their agents' pods");
        return Finding::no(kind, Reason::NotReported, message);
    }
    let left = few(counts.with(|stage| stage == Stage::Before).filter(|node| node.left));
    if !left.is_empty() {
        let clusters = &seen.found.clusters;
        let clusters: Vec<&str> = clusters.iter().map(|selecting| selecting.cluster.as_str()).collect();
        let message = format!(
            "{message}; {left} are left as they are, since the KVCacheCluster is paused or not accepted: look at {}",
            clusters.join(", ")
        );
        return Finding::no(kind, Reason::Paused, message);
    }
    Finding::no(kind, Reason::Progressing, message)
}

/// Whether every node has some revision of it ready. That nothing uses it is said with it, so that nobody looks for an effect.
fn active(counts: &Counts<'_>, distributed: &Finding) -> Finding {
    let kind = Type::Active;
    let all = counts.nodes.len();
    let works = |(node, _): &&(&ProfileNode, Stage)| {
        node.wanted.is_some() && node.said.as_ref().is_some_and(|said| said.refused.is_none())
    };
    let work = counts.nodes.iter().filter(works).count();
    if all == 0 {
        return Finding::no(kind, distributed.reason, format!("no node has it ready; {UNUSED}"));
    }
    let message = format!("{work} of {all} nodes have a revision of it ready; {UNUSED}");
    if work == all {
        return Finding::yes(kind, Reason::AsDesired, message);
    }
    let reason =
        if distributed.reason == Reason::AsDesired { Reason::Progressing } else { distributed.reason };
    Finding::no(kind, reason, message)
}

fn drifted(seen: &Seen<'_>, counts: &Counts<'_>) -> Finding {
    let kind = Type::Drifted;
    let most = seen.profile.spec.max_error_percent.0;
    let drifting = || counts.with(|stage| stage == Stage::Drifted);
    if let Some(first) = drifting().next() {
        let message = format!(
            "{} nodes measure a larger error than maxErrorPercent, {most}; {}: {}. Drivers, engines or clocks have changed: measure anew",
            drifting().count(),
            first.name,
            counts.complaint(&first.name),
        );
        return Finding::yes(kind, Reason::MeasuredDifference, message);
    }
    let mut measure = counts.with(|stage| stage == Stage::Works);
    if measure.any(|node| node.said.as_ref().is_some_and(|said| said.p99.is_some())) {
        return Finding::no(kind, Reason::AsDesired, format!("no node measures a larger error than {most}"));
    }
    let message = "no node has measured how good its predictions are, and no agent of this release does";
    Finding::unknown(kind, Reason::NotReported, message)
}

#[cfg(test)]
mod tests;
