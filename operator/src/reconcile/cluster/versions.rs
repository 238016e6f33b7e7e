//! Versions of agents and members: the desired ones, the running ones, and their compatibility. Pure.
//!
//! | version | source | |---|---| | desired | the image tag if it is a version and the image has no digest;
//! otherwise unknown until its pods run | | being rolled out | the same for the image in the pod template,
//! once one of its pods is ready | | running agents | reports in `CacheNode`s of the last minute | | running
//! members | the control plane's member list, read after the last change of their StatefulSet; during a
//! rollout absent members count with their last known version |
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
use super::workloads::{has_ready_pods, image_of, updated};
use crate::framework::refusal::Refusal;
use crate::reconcile::membership::has_reported;
use crate::settings::DefaultImages;

/// Maximum difference of minor versions between agents and members.
const MINORS_APART_MAX: u64 = 1;
/// Maximum length of a version in a status, in characters.
const VERSION_CHARS_MAX: usize = 64;

/// Versions that the processes of a cluster have reported.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Versions {
    agents: ReportedVersions,
    members: ReportedVersions,
}

/// Versions that the processes of one component have reported.
#[derive(Clone, Debug, PartialEq, Eq)]
struct ReportedVersions {
    /// Distinct versions, the oldest first.
    versions: Vec<String>,
    /// Number of expected processes.
    expected: usize,
    /// Number of expected processes that have not reported.
    silent: usize,
}

/// The two components whose versions may differ.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Component {
    Agents,
    Members,
}

/// Major and minor version, which determine compatibility.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Minor {
    major: u64,
    minor: u64,
}

/// A component with one of its versions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct ComponentVersion {
    component: Component,
    version: Minor,
}

/// An image of which not all processes have reported.
struct UnreportedImage<'a> {
    component: Component,
    reported: &'a ReportedVersions,
    image: &'a str,
    /// Whether every process runs this image.
    is_replaced: bool,
    /// Set if the control plane could not be read: why.
    call_error: Option<&'a str>,
}

/// Returns why the desired versions are incompatible with the running ones; `None` if they are compatible.
pub fn skew(cluster: &KVCacheCluster, inputs: &ClusterInputs) -> Option<Refusal> {
    let wanted = wanted(&inputs.images);
    let runs = Versions::of(cluster, inputs).components();
    let mut meets = runs.clone();
    meets.extend(template_version(Component::Agents, inputs.agents.as_deref()));
    meets.extend(template_version(Component::Members, inputs.members.as_deref()));
    // If the running versions are already incompatible, allow a desired version that is compatible with one
    // of them; there is no other way to recover.
    let is_skewed = first_skew(&runs, &runs).is_some();
    let is_recovery =
        |one: &ComponentVersion| is_skewed && runs.iter().any(|other| skew_between(*one, *other).is_none());
    let bound: BTreeSet<ComponentVersion> = wanted.iter().copied().filter(|one| !is_recovery(one)).collect();
    first_skew(&bound, &meets).or_else(|| first_skew(&wanted, &wanted))
}

/// Returns the desired versions, as far as image tags contain them.
fn wanted(images: &DefaultImages) -> BTreeSet<ComponentVersion> {
    let part = |(component, image): (Component, &String)| {
        Some(ComponentVersion { component, version: Minor::of_image(image)? })
    };
    [(Component::Agents, &images.agent), (Component::Members, &images.control_plane)]
        .into_iter()
        .filter_map(part)
        .collect()
}

/// Returns the version of the pod template, if one of its pods is ready.
fn template_version(component: Component, workload: Option<&DynamicObject>) -> Option<ComponentVersion> {
    let image = image_of(workload.filter(|workload| has_ready_pods(workload))?)?;
    Some(ComponentVersion { component, version: Minor::of_image(&image)? })
}

/// Returns the first incompatible pair between both sets.
fn first_skew(these: &BTreeSet<ComponentVersion>, those: &BTreeSet<ComponentVersion>) -> Option<Refusal> {
    these.iter().find_map(|one| those.iter().find_map(|other| skew_between(*one, *other)))
}

/// Returns why two versions are incompatible; `None` if they are compatible.
fn skew_between(one: ComponentVersion, other: ComponentVersion) -> Option<Refusal> {
    // Order the pair, so that the message does not depend on the order of arguments.
    let (first, second) = if one <= other { (one, other) } else { (other, one) };
    let (older, newer) = if one.version <= other.version { (one, other) } else { (other, one) };
    let (lowest, highest) = (older.version, newer.version);
    let message = if lowest.major != highest.major {
        format!(
            "{first} and {second} differ in the major version and cannot run together: delete the cluster and create it again; \
             blocks on devices are kept"
        )
    } else if highest.minor - lowest.minor > MINORS_APART_MAX {
        let step = Minor { minor: lowest.minor + MINORS_APART_MAX, ..lowest };
        let component = older.component;
        format!(
            "{first} and {second} are more than one minor version apart: set the image of the {component} to \
             {step} first"
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
    pub fn compatible(&self, cluster: &KVCacheCluster, inputs: &ClusterInputs) -> Finding {
        let (kind, parts) = (Type::Compatible, self.components());
        if let Some(refusal) = first_skew(&parts, &parts) {
            return Finding::no(kind, refusal.reason, refusal.message);
        }
        let unknown: Vec<UnreportedImage<'_>> =
            self.known(cluster, inputs).into_iter().filter(|known| !known.is_complete()).collect();
        if unknown.is_empty() {
            let message = format!(
                "{}; {}",
                self.agents.describe(Component::Agents),
                self.members.describe(Component::Members)
            );
            return Finding::yes(kind, Reason::AsDesired, message);
        }
        let is_late = unknown.iter().any(|known| known.is_replaced);
        let reason = if is_late { Reason::NotReported } else { Reason::Progressing };
        let message = unknown.iter().map(UnreportedImage::describe).collect::<Vec<_>>().join("; ");
        Finding::unknown(kind, reason, message)
    }

    fn known<'a>(&'a self, cluster: &KVCacheCluster, inputs: &'a ClusterInputs) -> [UnreportedImage<'a>; 2] {
        let images = &inputs.images;
        let call_error = inputs.control_plane_state.as_ref().and_then(|state| state.as_ref().err());
        let agents = updated(inputs.agents.as_deref(), &images.agent, "updatedNumberScheduled");
        let members = updated(inputs.members.as_deref(), &images.control_plane, "updatedReplicas");
        [
            UnreportedImage {
                component: Component::Agents,
                reported: &self.agents,
                image: &images.agent,
                is_replaced: count(agents) >= inputs.assignment.nodes.len(),
                call_error: None,
            },
            UnreportedImage {
                component: Component::Members,
                reported: &self.members,
                image: &images.control_plane,
                is_replaced: members >= cluster.spec.control_plane.replicas,
                call_error: call_error.map(String::as_str),
            },
        ]
    }

    fn components(&self) -> BTreeSet<ComponentVersion> {
        let of = |component, reported: &ReportedVersions| -> Vec<ComponentVersion> {
            let versions = reported.versions.iter().filter_map(|version| Minor::of(version));
            versions.map(|version| ComponentVersion { component, version }).collect()
        };
        of(Component::Agents, &self.agents).into_iter().chain(of(Component::Members, &self.members)).collect()
    }
}

fn of_agents(inputs: &ClusterInputs) -> ReportedVersions {
    let nodes = inputs.cache_nodes.iter().filter(|node| has_reported(node));
    let reported = nodes.filter_map(|node| Some(node.status.as_ref()?.agent.as_ref()?.version.as_str()));
    ReportedVersions::new(reported, inputs.assignment.nodes.len())
}

fn of_members(cluster: &KVCacheCluster, inputs: &ClusterInputs) -> ReportedVersions {
    let known = inputs.control_plane_state.as_ref().and_then(|state| state.as_ref().ok());
    let reported = known.iter().flat_map(|known| known.members.values()).flatten().map(String::as_str);
    let mut members = ReportedVersions::new(reported, count(cluster.spec.control_plane.replicas));
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
    let image = workload.and_then(image_of);
    replicas
        .zip(image)
        .is_some_and(|(replicas, image)| u64::from(updated(workload, &image, "updatedReplicas")) >= replicas)
}

fn count(number: u32) -> usize {
    usize::try_from(number).unwrap_or(usize::MAX)
}

impl ReportedVersions {
    fn new<'a>(reported: impl Iterator<Item = &'a str>, expected: usize) -> ReportedVersions {
        let reported: Vec<&str> = reported.filter(|version| is_version(version)).collect();
        let silent = expected.saturating_sub(reported.len());
        let mut new = ReportedVersions { versions: Vec::new(), expected, silent };
        new.add(reported.into_iter());
        new
    }

    /// Adds versions to those already known.
    fn add<'a>(&mut self, reported: impl Iterator<Item = &'a str>) {
        self.versions.extend(reported.map(str::to_owned));
        self.versions.sort_by_cached_key(|version| (numbers(version), version.clone()));
        self.versions.dedup();
    }

    fn describe(&self, component: Component) -> String {
        match self.versions.as_slice() {
            [] => format!("no {component} have reported a version"),
            [one] => format!("{component} run {one}"),
            [first, .., last] => format!("{component} run {first} to {last}"),
        }
    }
}

impl UnreportedImage<'_> {
    /// Whether all processes have reported. With an image without a version, this includes that all of them
    /// run it.
    fn is_complete(&self) -> bool {
        self.reported.silent == 0 && (self.is_replaced || Minor::of_image(self.image).is_some())
    }

    fn describe(&self) -> String {
        let late = self.unreported();
        match self.call_error {
            Some(error) => format!(
                "{late}. The control plane cannot be reached; if this persists, check its pods and network policies: {error}"
            ),
            None => late,
        }
    }

    fn unreported(&self) -> String {
        let UnreportedImage { component, reported, image, .. } = self;
        let ReportedVersions { expected, silent, .. } = reported;
        let not_reported = format!("{silent} of {expected} {component}: version not reported");
        if Minor::of_image(image).is_some() {
            return not_reported;
        }
        let late = match silent {
            0 => format!("not all {component} run it yet"),
            _ => not_reported,
        };
        format!("image {image} has no version in its tag, so its compatibility is unknown ({late})")
    }
}

impl Minor {
    /// Parses a version; `None` if the text is not one.
    fn of(version: &str) -> Option<Minor> {
        let mut parts = version.trim_start_matches('v').split('.');
        Some(Minor { major: parts.next()?.parse().ok()?, minor: parts.next()?.parse().ok()? })
    }

    /// Parses the version in an image's tag. With a digest the tag has no effect, so it is ignored.
    fn of_image(image: &str) -> Option<Minor> {
        let (rest, tag) = image.rsplit_once(':')?;
        if tag.contains('/') || rest.contains('@') {
            return None;
        }
        Minor::of(tag)
    }
}

impl fmt::Display for Minor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

impl fmt::Display for Component {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Component::Agents => "agents",
            Component::Members => "members",
        })
    }
}

impl fmt::Display for ComponentVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of version {}", self.component, self.version)
    }
}

/// Whether a text is a version that can be compared and that the CRD schema permits in a status.
fn is_version(text: &str) -> bool {
    let is_plain = |letter: char| letter.is_ascii_alphanumeric() || "-+.".contains(letter);
    text.len() <= VERSION_CHARS_MAX && text.chars().all(is_plain) && Minor::of(text).is_some()
}

/// Returns the numbers of a version, for ordering.
fn numbers(version: &str) -> Vec<u64> {
    version.split(|letter: char| !letter.is_ascii_digit()).filter_map(|part| part.parse().ok()).collect()
}

#[cfg(test)]
mod tests;
