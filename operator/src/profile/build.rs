//! Which node should have which revision now. Pure.
//!
//! ```text
//!  Before ──decided──▶ Between ──its agent says so──▶ Works ──its measurements differ──▶ Drifted
//!                         └──────its agent refuses──▶ Refused
//! ```
//!
//! Canary nodes come first. As long as one of them refuses the revision or drifts, no node gets it that has it not; once all of them have
//! worked by it for `canary.soak`, the others follow. Those that are between two revisions, and those that refuse or drift, are never more than
//! `maxUnavailablePercent` of all nodes, but one may always be: so the first nodes that take it badly are the last.
//!
//! A node that does not report is given nothing new; one that falls silent with a new revision counts as being between two, since it may be
//! silent because of it. Nothing is taken back: whoever has the former revision keeps it, but for a node that has no place for the profile
//! any more ([`super::order`]).

use std::collections::BTreeMap;
use std::time::Duration;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use reprise_crds::SlackProfile;
use reprise_crds::slack::Canary;

use super::dereference::ProfileNode;

/// How far a node is with a revision.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// It should not have it yet.
    Before,
    /// It should, and has not said that it does.
    Between,
    /// It works by it.
    Works,
    /// It works by it, and measures something else.
    Drifted,
    /// It has refused it.
    Refused,
}

/// What nodes should have, and how it goes on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wave {
    /// Digest of the revision that each node should have, by its name.
    pub nodes: BTreeMap<String, String>,
    /// How it goes on.
    pub pace: Pace,
}

/// How it goes on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Pace {
    /// There is no revision to give out, or no node to give it to.
    Still,
    /// Every node should have it.
    Given,
    /// Further nodes follow as those that have it say so, or report again.
    Moving,
    /// Canary nodes are wanted, and none is selected.
    NoCanary,
    /// All canary nodes work by it; the others follow after this time.
    Soaking(Duration),
    /// A canary node does not report.
    CanarySilent(String),
    /// A canary node takes it badly.
    Stopped {
        /// The node.
        node: String,
        /// `Drifted` or `Refused`.
        stage: Stage,
    },
    /// As many nodes take it badly as may be between two revisions.
    Exhausted {
        /// The first of them.
        node: String,
        /// `Drifted` or `Refused`.
        stage: Stage,
    },
}

/// Who may be given the revision.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Turn {
    Nobody,
    Canaries,
    Everybody,
}

impl Stage {
    /// How far a node is with the revision of a digest, by what it should have and what it says.
    pub fn of(node: &ProfileNode, digest: &str, max_error_percent: u8) -> Stage {
        if node.wanted.as_deref() != Some(digest) {
            return Stage::Before;
        }
        match node.said.as_ref().filter(|said| said.digest == digest) {
            None => Stage::Between,
            Some(said) if said.refused.is_some() => Stage::Refused,
            Some(said) if said.p99.is_some_and(|error| error > u32::from(max_error_percent)) => {
                Stage::Drifted
            }
            Some(_) => Stage::Works,
        }
    }

    /// Whether it takes it badly.
    pub fn is_bad(self) -> bool {
        matches!(self, Stage::Drifted | Stage::Refused)
    }
}

/// Since when all canary nodes work by a revision: since now, if that was not known of this revision. None: they do not, or one does not
/// report: a revision that takes nodes down does not soak meanwhile.
pub fn soaking_since(
    profile: &SlackProfile,
    nodes: &[ProfileNode],
    digest: Option<&str>,
    now: &Time,
) -> Option<Time> {
    let digest = digest?;
    let works = |node: &ProfileNode| {
        !node.silent && Stage::of(node, digest, profile.spec.max_error_percent.0) == Stage::Works
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

/// Decides. `soaked` is for how long all canary nodes have worked by the revision.
pub fn build(
    profile: &SlackProfile,
    nodes: &[ProfileNode],
    digest: Option<&str>,
    soaked: Option<Duration>,
) -> Wave {
    let has_place = |node: &&ProfileNode| !node.crowded;
    let kept = |node: &ProfileNode| Some((node.name.clone(), node.wanted.clone()?));
    let mut wanted: BTreeMap<String, String> = nodes.iter().filter(has_place).filter_map(kept).collect();
    let Some(digest) = digest.filter(|_| !nodes.is_empty()) else {
        return Wave { nodes: wanted, pace: Pace::Still };
    };
    let rollout = &profile.spec.rollout;
    let stage = |node: &ProfileNode| Stage::of(node, digest, profile.spec.max_error_percent.0);
    let staged: Vec<(&ProfileNode, Stage)> = nodes.iter().map(|node| (node, stage(node))).collect();
    let (turn, waits) = turn(&staged, rollout.canary.as_ref(), soaked);
    let busy = staged.iter().filter(|(_, stage)| *stage == Stage::Between || stage.is_bad()).count();
    let room = limit(nodes.len(), rollout.max_unavailable_percent.0).saturating_sub(busy);
    let is_next = |(node, stage): &&(&ProfileNode, Stage)| {
        let has_turn = match turn {
            Turn::Nobody => false,
            Turn::Canaries => node.canary,
            Turn::Everybody => true,
        };
        *stage == Stage::Before && has_turn && !node.silent && !node.left && !node.crowded
    };
    for (node, _) in staged.iter().filter(is_next).take(room) {
        wanted.insert(node.name.clone(), digest.to_owned());
    }
    let all = wanted.len() == nodes.len() && wanted.values().all(|wanted| wanted == digest);
    let pace = match waits {
        _ if all => Pace::Given,
        Some(waits) => waits,
        None if room == 0 => exhausted(&staged),
        None => Pace::Moving,
    };
    Wave { nodes: wanted, pace }
}

/// Nodes that may be between two revisions at once.
fn limit(nodes: usize, percent: u8) -> usize {
    (nodes * usize::from(percent) / 100).max(1)
}

/// Whose turn it is, and what the others wait for.
fn turn(
    staged: &[(&ProfileNode, Stage)],
    canary: Option<&Canary>,
    soaked: Option<Duration>,
) -> (Turn, Option<Pace>) {
    let Some(canary) = canary else { return (Turn::Everybody, None) };
    let canaries = || staged.iter().filter(|(node, _)| node.canary);
    if let Some((node, stage)) = canaries().find(|(_, stage)| stage.is_bad()) {
        return (Turn::Nobody, Some(Pace::Stopped { node: node.name.clone(), stage: *stage }));
    }
    if canaries().next().is_none() {
        return (Turn::Nobody, Some(Pace::NoCanary));
    }
    if canaries().any(|(_, stage)| *stage != Stage::Works) {
        return (Turn::Canaries, None);
    }
    if let Some((node, _)) = canaries().find(|(node, _)| node.silent) {
        return (Turn::Nobody, Some(Pace::CanarySilent(node.name.clone())));
    }
    // A time that nobody can read was refused before.
    let soak = canary.soak.duration().unwrap_or(Duration::MAX);
    match soak.checked_sub(soaked.unwrap_or_default()).filter(|rest| !rest.is_zero()) {
        Some(rest) => (Turn::Nobody, Some(Pace::Soaking(rest))),
        None => (Turn::Everybody, None),
    }
}

/// No further node may follow: either those that have it have not said so yet, or they take it badly.
fn exhausted(staged: &[(&ProfileNode, Stage)]) -> Pace {
    let has_begun = |stage: Stage| stage == Stage::Between || stage.is_bad();
    let mut begun = staged.iter().filter(|(_, stage)| has_begun(*stage));
    let first = staged.iter().find(|(_, stage)| stage.is_bad());
    match first {
        Some((node, stage)) if begun.all(|(_, stage)| stage.is_bad()) => {
            Pace::Exhausted { node: node.name.clone(), stage: *stage }
        }
        _ => Pace::Moving,
    }
}

#[cfg(test)]
mod tests;
