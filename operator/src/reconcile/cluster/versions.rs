//! Versions of agents and members: the desired ones, the running ones, and their compatibility. Pure.
//!
//! | version | source |
//! |---|---|
//! | desired | the image tag if it is a version and the image has no digest; otherwise unknown until its pods run |
//! | running agents | reports in `CacheNode`s of the last minute |
//! | running members | the control plane's member list; during a rollout absent members count with their last version |
//!
//! All of them may differ by at most [`MINORS_APART_MAX`] minor versions: during a rolling update each process meets all
//! others. An image without a version is not checked in advance.

use std::fmt;

use reprise_crds::KVCacheCluster;
use reprise_crds::cluster::RunningVersions;
use reprise_crds::fields::Version;
use reprise_crds::status::{ConditionType as Type, Finding, Reason};

use super::dereference::ClusterInputs;
use crate::framework::refusal::Refusal;
use crate::reconcile::membership::has_reported;

/// Maximum difference of minor versions between agents and members.
const MINORS_APART_MAX: u64 = 1;
/// Maximum length of a version in a status, in characters.
const VERSION_CHARS_MAX: usize = 64;

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
#[derive(Clone, Copy, Debug)]
struct ComponentVersion {
    component: &'static str,
    version: (u64, u64),
}

/// Returns why the desired versions are incompatible with the running ones; `None` if they are compatible.
pub fn skew(cluster: &KVCacheCluster, inputs: &ClusterInputs) -> Option<Refusal> {
    let versions = Versions::of(cluster, inputs);
    let (running, desired) = (versions.running(), versions.desired());
    // If the running versions are incompatible already, a desired version that is compatible with one of them is the only
    // remedy.
    let is_skewed = first_skew(&running, &running).is_some();
    let is_remedy = |one: &&ComponentVersion| {
        is_skewed && running.iter().any(|other| skew_between(**one, *other).is_none())
    };
    let bound: Vec<ComponentVersion> = desired.iter().filter(|one| !is_remedy(one)).copied().collect();
    first_skew(&bound, &running).or_else(|| first_skew(&desired, &desired))
}

/// Returns the first incompatible pair between both lists.
fn first_skew(these: &[ComponentVersion], those: &[ComponentVersion]) -> Option<Refusal> {
    these.iter().find_map(|one| those.iter().find_map(|other| skew_between(*one, *other)))
}

/// Returns why two versions are incompatible; `None` if they are compatible.
fn skew_between(one: ComponentVersion, other: ComponentVersion) -> Option<Refusal> {
    let (older, newer) = if one.version <= other.version { (one, other) } else { (other, one) };
    let ((major, lowest), (newest_major, highest)) = (older.version, newer.version);
    let message = if major != newest_major {
        format!(
            "{older} and {newer} differ in the major version and cannot run together: delete the cluster and create it again; \
             blocks on devices are kept"
        )
    } else if highest - lowest > MINORS_APART_MAX {
        let (component, step) = (older.component, lowest + MINORS_APART_MAX);
        format!(
            "{older} and {newer} are more than one minor version apart: set the image of the {component} to \
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
        let nodes = inputs.cache_nodes.iter().filter(|node| has_reported(node));
        let reported = nodes.filter_map(|node| Some(node.status.as_ref()?.agent.as_ref()?.version.as_str()));
        let expected = u32::try_from(inputs.assignment.nodes.len()).unwrap_or(u32::MAX);
        let counts = (inputs.agents.updated, expected);
        let agents = Reported::new("agents", &inputs.images.agent, counts, reported);

        let state = inputs.control_plane_state.as_ref();
        let known = state.and_then(|state| state.as_ref().ok());
        let reported = known.iter().flat_map(|known| known.members.values()).flatten().map(String::as_str);
        let counts = (inputs.members.updated, cluster.spec.control_plane.replicas);
        let mut members = Reported::new("members", &inputs.images.control_plane, counts, reported);
        members.call_error = state.and_then(|state| state.as_ref().err().cloned());
        let is_replaced = known.is_some() && inputs.members.current >= cluster.spec.control_plane.replicas;
        if members.silent > 0 && !is_replaced {
            // An absent member may return with its previous version.
            let before = cluster.status.as_ref().and_then(|status| status.versions.as_ref());
            let before =
                before.into_iter().flat_map(|before| [&before.control_plane, &before.control_plane_max]);
            members.add(before.flatten().map(Version::as_str));
        }
        Versions { agents, members }
    }

    /// Returns the oldest and newest version of each component, if any is known.
    pub fn status(&self) -> Option<RunningVersions> {
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
        let (kind, running) = (Type::Compatible, self.running());
        if let Some(refusal) = first_skew(&running, &running) {
            return Finding::no(kind, refusal.reason, refusal.message);
        }
        let unknown: Vec<String> = self.components().filter_map(Reported::unknown).collect();
        if !unknown.is_empty() {
            let is_late = self.components().any(|one| one.silent > 0 && one.is_replaced);
            let reason = if is_late { Reason::NotReported } else { Reason::Progressing };
            return Finding::unknown(kind, reason, unknown.join("; "));
        }
        let known: Vec<String> = self.components().map(Reported::describe).collect();
        Finding::yes(kind, Reason::AsDesired, known.join("; "))
    }

    fn components(&self) -> impl Iterator<Item = &Reported> {
        [&self.agents, &self.members].into_iter()
    }

    fn running(&self) -> Vec<ComponentVersion> {
        let of = |one: &Reported| {
            let component = one.component;
            let versions = one.versions.iter().filter_map(|text| minor(text));
            versions.map(|version| ComponentVersion { component, version }).collect::<Vec<_>>()
        };
        self.components().flat_map(of).collect()
    }

    /// Returns the desired versions, as far as image tags contain them.
    fn desired(&self) -> Vec<ComponentVersion> {
        let of = |one: &Reported| {
            Some(ComponentVersion { component: one.component, version: minor_of_image(&one.image)? })
        };
        self.components().filter_map(of).collect()
    }
}

impl Reported {
    fn new<'a>(
        component: &'static str,
        image: &str,
        (replaced, expected): (u32, u32),
        reported: impl Iterator<Item = &'a str>,
    ) -> Reported {
        let reported: Vec<&str> = reported.filter(|version| is_version(version)).collect();
        let reports = u32::try_from(reported.len()).unwrap_or(u32::MAX);
        let mut new = Reported {
            component,
            image: image.to_owned(),
            is_replaced: replaced >= expected,
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

    fn describe(&self) -> String {
        let component = self.component;
        match self.versions.as_slice() {
            [] => format!("no {component} have reported a version"),
            [one] => format!("{component} run {one}"),
            [first, .., last] => format!("{component} run {first} to {last}"),
        }
    }

    /// Describes why versions are unknown. `None` if all processes have reported. With an image without a version, all of
    /// them must also run it.
    fn unknown(&self) -> Option<String> {
        let Reported { component, image, expected, silent, .. } = self;
        let has_version = minor_of_image(image).is_some();
        let mut late = match silent {
            0 if self.is_replaced || has_version => return None,
            0 => format!("not all {component} run it yet"),
            _ => format!("{silent} of {expected} {component}: version not reported"),
        };
        if !has_version {
            late =
                format!("image {image} has no version in its tag, so its compatibility is unknown ({late})");
        }
        if let Some(error) = &self.call_error {
            late = format!(
                "{late}. The control plane cannot be reached; if this persists, check its pods and network policies: {error}"
            );
        }
        Some(late)
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

/// Whether a text is a version that can be compared and that the CRD schema permits in a status.
fn is_version(text: &str) -> bool {
    let is_plain = |letter: char| letter.is_ascii_alphanumeric() || "-+.".contains(letter);
    text.len() <= VERSION_CHARS_MAX && text.chars().all(is_plain) && minor(text).is_some()
}

/// Returns the numbers of a version, for ordering.
fn numbers(version: &str) -> Vec<u64> {
    version.split(|letter: char| !letter.is_ascii_digit()).filter_map(|part| part.parse().ok()).collect()
}

impl fmt::Display for ComponentVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (major, minor) = self.version;
        write!(f, "{} of version {major}.{minor}", self.component)
    }
}

#[cfg(test)]
mod tests;
