//! Versions of agents and members: the desired ones, the running ones, and their compatibility. Pure.
//!
//! | version | source |
//! |---|---|
//! | desired | the image tag if it is a version and the image has no digest; otherwise unknown until its pods run |
//! | running agents | reports in `CacheNode`s of the last minute |
//! | running members | the control plane's member list, read after the last change of their StatefulSet; during a rollout absent members count with their last known version |
//!
//! A desired version may differ from every running version by at most [`MINORS_APART_MAX`] minor versions,
//! for agents and members alike: during a rolling update each process meets all others. An image without a
//! version is not checked in advance. Condition `Compatible` reports this, and compares the versions that its
//! processes report once they run.
//!
//! Invariant: a reported running version always comes from a process.

use std::collections::BTreeSet;
use std::fmt;

use kube::api::DynamicObject;
use reprise_crds::KVCacheCluster;
use reprise_crds::cluster::RunningVersions;
use reprise_crds::fields::Version;
use reprise_crds::status::{ConditionType as Type, Finding, Reason};

use super::inputs::ClusterInputs;
use super::workloads::{image_of, updated};
use crate::framework::refusal::Refusal;
use crate::reconcile::membership::has_reported;
use crate::settings::DefaultImages;

/// Maximum difference of minor versions between agents and members.
const MINORS_APART_MAX: u64 = 1;
/// Maximum length of a version in a status, in characters.
const VERSION_CHARS_MAX: usize = 64;

const AGENTS: &str = "agents";
const MEMBERS: &str = "members";

/// Versions that the processes of a cluster have reported.
#[derive(Debug)]
pub struct Versions {
    agents: Reported,
    members: Reported,
}

/// Versions that the processes of one component have reported.
#[derive(Debug)]
struct Reported {
    component: &'static str,
    /// Desired image.
    image: String,
    /// Whether every process runs this image.
    is_replaced: bool,
    /// Distinct versions, the oldest first.
    versions: Vec<String>,
    /// Number of expected processes.
    expected: u32,
    /// Number of expected processes that have not reported.
    silent: u32,
    /// Set if the processes could not be asked: why.
    call_error: Option<String>,
}

/// A component with one of its versions: major and minor, which determine compatibility.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct ComponentVersion {
    component: &'static str,
    version: (u64, u64),
}

/// Returns why the desired versions are incompatible with the running ones; `None` if they are compatible.
pub fn skew(cluster: &KVCacheCluster, inputs: &ClusterInputs) -> Option<Refusal> {
    let wanted = wanted(&inputs.images);
    let runs = Versions::of(cluster, inputs).components();
    // If the running versions are already incompatible, allow a desired version that is compatible with one
    // of them; there is no other way to recover.
    let is_skewed = first_skew(&runs, &runs).is_some();
    let is_recovery =
        |one: &ComponentVersion| is_skewed && runs.iter().any(|other| skew_between(*one, *other).is_none());
    let bound: BTreeSet<ComponentVersion> = wanted.iter().copied().filter(|one| !is_recovery(one)).collect();
    first_skew(&bound, &runs).or_else(|| first_skew(&wanted, &wanted))
}

/// Returns the desired versions, as far as image tags contain them.
fn wanted(images: &DefaultImages) -> BTreeSet<ComponentVersion> {
    let images = [(AGENTS, &images.agent), (MEMBERS, &images.control_plane)];
    let versions = images
        .map(|(component, image)| Some(ComponentVersion { component, version: minor_of_image(image)? }));
    versions.into_iter().flatten().collect()
}

/// Returns the first incompatible pair between both sets.
fn first_skew(these: &BTreeSet<ComponentVersion>, those: &BTreeSet<ComponentVersion>) -> Option<Refusal> {
    these.iter().find_map(|one| those.iter().find_map(|other| skew_between(*one, *other)))
}

/// Returns why two versions are incompatible; `None` if they are compatible.
fn skew_between(one: ComponentVersion, other: ComponentVersion) -> Option<Refusal> {
    // Order the pair, so that the message does not depend on the order of arguments.
    let (first, second) = (one.min(other), one.max(other));
    let (older, newer) = if one.version <= other.version { (one, other) } else { (other, one) };
    let ((major, lowest), (newest_major, highest)) = (older.version, newer.version);
    let message = if major != newest_major {
        format!(
            "{first} and {second} differ in the major version and cannot run together: delete the cluster and create it again; \
             blocks on devices are kept"
        )
    } else if highest - lowest > MINORS_APART_MAX {
        let (component, step) = (older.component, lowest + MINORS_APART_MAX);
        format!(
            "{first} and {second} are more than one minor version apart: set the image of the {component} to \
             {major}.{step} first"
        )
    } else {
        return None;
    };
    Some(Refusal::new(Reason::VersionSkew, message))
}

impl Versions {
    /// Collects the reported versions.
    pub fn of(cluster: &KVCacheCluster, inputs: &ClusterInputs) -> Versions {
        Versions { agents: of_agents(inputs), members: of_members(cluster, inputs) }
    }

    /// Returns the oldest and newest version of each component, if any is known.
    pub fn running(&self) -> Option<RunningVersions> {
        let version = |text: Option<&String>| text.map(Version::new);
        let known = RunningVersions {
            control_plane: version(self.members.versions.first()),
            control_plane_max: version(self.members.versions.last()),
            agent_min: version(self.agents.versions.first()),
            agent_max: version(self.agents.versions.last()),
        };
        (known != RunningVersions::default()).then_some(known)
    }

    /// Returns condition `Compatible`: whether all running processes are compatible, as far as known.
    pub fn compatible(&self) -> Finding {
        let (kind, parts) = (Type::Compatible, self.components());
        if let Some(refusal) = first_skew(&parts, &parts) {
            return Finding::no(kind, refusal.reason, refusal.message);
        }
        let all = [&self.agents, &self.members];
        let unknown: Vec<&Reported> = all.into_iter().filter(|one| !one.is_complete()).collect();
        let join = |parts: &[&Reported], describe: fn(&Reported) -> String| -> String {
            parts.iter().map(|one| describe(one)).collect::<Vec<_>>().join("; ")
        };
        if unknown.is_empty() {
            return Finding::yes(kind, Reason::AsDesired, join(&all, Reported::describe));
        }
        let is_late = unknown.iter().any(|one| one.is_replaced);
        let reason = if is_late { Reason::NotReported } else { Reason::Progressing };
        Finding::unknown(kind, reason, join(&unknown, Reported::describe_unknown))
    }

    fn components(&self) -> BTreeSet<ComponentVersion> {
        let agents = self.agents.versions.iter().map(|version| (AGENTS, version));
        let all = agents.chain(self.members.versions.iter().map(|version| (MEMBERS, version)));
        all.filter_map(|(component, text)| Some(ComponentVersion { component, version: minor(text)? }))
            .collect()
    }
}

fn of_agents(inputs: &ClusterInputs) -> Reported {
    let nodes = inputs.cache_nodes.iter().filter(|node| has_reported(node));
    let reported = nodes.filter_map(|node| Some(node.status.as_ref()?.agent.as_ref()?.version.as_str()));
    let expected = u32::try_from(inputs.assignment.nodes.len()).unwrap_or(u32::MAX);
    let image = &inputs.images.agent;
    let updated = updated(inputs.agents.as_deref(), image, "updatedNumberScheduled");
    Reported::new(AGENTS, image, (updated, expected), reported)
}

fn of_members(cluster: &KVCacheCluster, inputs: &ClusterInputs) -> Reported {
    let state = inputs.control_plane_state.as_ref();
    let known = state.and_then(|state| state.as_ref().ok());
    let reported = known.iter().flat_map(|known| known.members.values()).flatten().map(String::as_str);
    let image = &inputs.images.control_plane;
    let updated = updated(inputs.members.as_deref(), image, "updatedReplicas");
    let numbers = (updated, cluster.spec.control_plane.replicas);
    let mut members = Reported::new(MEMBERS, image, numbers, reported);
    members.call_error = state.and_then(|state| state.as_ref().err().cloned());
    let is_known = known.is_some() && all_replaced(inputs.members.as_deref());
    if members.silent > 0 && !is_known {
        // The absent member may return with its previous version.
        let before = cluster.status.as_ref().and_then(|status| status.versions.as_ref());
        let before = before.into_iter().flat_map(|before| [&before.control_plane, &before.control_plane_max]);
        members.add(before.flatten().map(Version::as_str));
    }
    members
}

/// Whether a StatefulSet has no pods of a previous template.
fn all_replaced(workload: Option<&DynamicObject>) -> bool {
    let replicas = workload.and_then(|workload| workload.data["spec"]["replicas"].as_u64());
    let image = workload.and_then(image_of).unwrap_or_default();
    replicas.is_some_and(|replicas| u64::from(updated(workload, &image, "updatedReplicas")) >= replicas)
}

impl Reported {
    fn new<'a>(
        component: &'static str,
        image: &str,
        (updated, expected): (u32, u32),
        reported: impl Iterator<Item = &'a str>,
    ) -> Reported {
        let reported: Vec<&str> = reported.filter(|version| is_version(version)).collect();
        let reports = u32::try_from(reported.len()).unwrap_or(u32::MAX);
        let mut new = Reported {
            component,
            image: image.to_owned(),
            is_replaced: updated >= expected,
            versions: Vec::new(),
            expected,
            silent: expected.saturating_sub(reports),
            call_error: None,
        };
        new.add(reported.into_iter());
        new
    }

    /// Adds versions to those already known.
    fn add<'a>(&mut self, reported: impl Iterator<Item = &'a str>) {
        self.versions.extend(reported.map(str::to_owned));
        self.versions.sort_by_cached_key(|version| (numbers(version), version.clone()));
        self.versions.dedup();
    }

    /// Whether all processes have reported. With an image without a version, this includes that all of them
    /// run it.
    fn is_complete(&self) -> bool {
        self.silent == 0 && (self.is_replaced || minor_of_image(&self.image).is_some())
    }

    fn describe(&self) -> String {
        let component = self.component;
        match self.versions.as_slice() {
            [] => format!("no {component} have reported a version"),
            [one] => format!("{component} run {one}"),
            [first, .., last] => format!("{component} run {first} to {last}"),
        }
    }

    /// Describes why versions are unknown.
    fn describe_unknown(&self) -> String {
        let Reported { component, image, expected, silent, .. } = self;
        let late = match silent {
            0 => format!("not all {component} run it yet"),
            _ => format!("{silent} of {expected} {component}: version not reported"),
        };
        let late = match minor_of_image(image) {
            Some(_) => late,
            None => {
                format!("image {image} has no version in its tag, so its compatibility is unknown ({late})")
            }
        };
        match &self.call_error {
            Some(error) => format!(
                "{late}. The control plane cannot be reached; if this persists, check its pods and network policies: {error}"
            ),
            None => late,
        }
    }
}

/// Parses major and minor version; `None` if the text is not a version.
fn minor(version: &str) -> Option<(u64, u64)> {
    let mut parts = version.trim_start_matches('v').split('.');
    Some((parts.next()?.parse().ok()?, parts.next()?.parse().ok()?))
}

/// Parses the version in an image's tag. With a digest the tag has no effect, so it is ignored.
fn minor_of_image(image: &str) -> Option<(u64, u64)> {
    let (rest, tag) = image.rsplit_once(':')?;
    if tag.contains('/') || rest.contains('@') {
        return None;
    }
    minor(tag)
}

impl fmt::Display for ComponentVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (major, minor) = self.version;
        write!(f, "{} of version {major}.{minor}", self.component)
    }
}

/// Whether a text is a version that can be compared and that the CRD schema permits in a status.
fn is_version(text: &str) -> bool {
    let is_plain = |letter: char| letter.is_ascii_alphanumeric() || "-+.".contains(letter);
    text.len() <= VERSION_CHARS_MAX && text.chars().all(is_plain) && minor(text).is_some()
}

/// Returns the numbers of a version, for ordering.
fn numbers(version: &str) -> Vec<u64> {
    version.split(|letter: char| !letter.is_ascii_digit()).filter_map(|part| part.parse().ok()).collect()
}

#[cfg(test)]
mod tests;
