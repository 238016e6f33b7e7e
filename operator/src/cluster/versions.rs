//! Versions of agents and members: what is wanted, what runs, and whether it may be together. Pure.
//!
//! | of | known from |
//! |---|---|
//! | what is wanted | the tag of its image, where that is a version and no digest stands beside it; otherwise nobody knows before it runs |
//! | what is being started | the same of the pods' template, once one of its pods serves |
//! | agents that run | what they have said in their `CacheNode` within a minute |
//! | members that run | what they have said to each other, which the control plane tells, asked after the last change of their StatefulSet; one that is away while members are replaced counts as what was said before |
//!
//! Nothing wanted may be further than [`MINORS_APART_MAX`] from anything that runs, agents and members alike: what is replaced one by one meets all
//! others as they were. An image that names no version is compared with nothing beforehand. `Compatible` says so, and compares what its
//! processes say once they are up.
//!
//! Invariant: no version is told of what runs but one that a process has said.

use std::collections::BTreeSet;
use std::fmt;

use kube::api::DynamicObject;
use reprise_crds::KVCacheCluster;
use reprise_crds::cluster::RunningVersions;
use reprise_crds::fields::Version;
use reprise_crds::status::{ConditionType as Type, Finding, Reason};

use super::dereference::Found;
use super::status::{has_reported, updated};
use crate::plan::Refusal;
use crate::settings::DefaultImages;

/// Versions of agents and members may be so far apart, in either direction.
const MINORS_APART_MAX: u64 = 1;
/// A version in a status has at most so many characters.
const VERSION_CHARS_MAX: usize = 64;

/// What the processes of a cluster have said that they are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Versions {
    agents: Said,
    members: Said,
}

/// What the processes of one kind have said.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Said {
    /// Each once, the oldest first.
    versions: Vec<String>,
    /// So many of those that there should be have said nothing.
    silent: usize,
}

/// The two kinds of processes between which versions may differ.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Who {
    Agents,
    Members,
}

/// As much of a version as decides who may run beside whom.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Minor {
    major: u64,
    minor: u64,
}

/// Processes of one kind and version.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Part {
    who: Who,
    version: Minor,
}

/// What is said of an image whose processes are not all known.
struct Told<'a> {
    who: Who,
    said: &'a Said,
    image: &'a str,
    /// Whether every process runs this image.
    is_replaced: bool,
    /// Why nobody could be asked, where that is so.
    unasked: Option<&'a str>,
}

/// Why what is wanted cannot come beside what runs, if it cannot.
pub fn refused(cluster: &KVCacheCluster, found: &Found) -> Option<Refusal> {
    let wanted = wanted(&found.images);
    let runs = Versions::of(cluster, found).parts();
    let mut meets = runs.clone();
    meets.extend(of_template(Who::Agents, found.agents.as_deref()));
    meets.extend(of_template(Who::Members, found.members.as_deref()));
    // Of what is torn there is no way back but past what is too far.
    let is_torn = first_apart(&runs, &runs).is_some();
    let leads_back = |one: &Part| is_torn && runs.iter().any(|other| apart(*one, *other).is_none());
    let bound: BTreeSet<Part> = wanted.iter().copied().filter(|one| !leads_back(one)).collect();
    first_apart(&bound, &meets).or_else(|| first_apart(&wanted, &wanted))
}

/// What is wanted, as far as the images tell.
fn wanted(images: &DefaultImages) -> BTreeSet<Part> {
    let part = |(who, image): (Who, &String)| Some(Part { who, version: Minor::of_image(image)? });
    [(Who::Agents, &images.agent), (Who::Members, &images.control_plane)]
        .into_iter()
        .filter_map(part)
        .collect()
}

/// What was wanted last, where anything of it runs: of what never did nobody has to be careful.
fn of_template(who: Who, workload: Option<&DynamicObject>) -> Option<Part> {
    let image = image_of(workload.filter(|workload| has_ready_pods(workload))?)?;
    Some(Part { who, version: Minor::of_image(&image)? })
}

/// Why one of these does not run together with one of those, if so.
fn first_apart(these: &BTreeSet<Part>, those: &BTreeSet<Part>) -> Option<Refusal> {
    these.iter().find_map(|one| those.iter().find_map(|other| apart(*one, *other)))
}

/// Why these do not run together, if they do not.
fn apart(one: Part, other: Part) -> Option<Refusal> {
    // The same two are always told in the same order.
    let (first, second) = if one <= other { (one, other) } else { (other, one) };
    let (older, newer) = (one.version.min(other.version), one.version.max(other.version));
    let message = if older.major != newer.major {
        format!(
            "{first} and {second} differ in the major version, and are not run together: delete the cluster and apply it anew; \
             blocks on devices stay"
        )
    } else if newer.minor - older.minor > MINORS_APART_MAX {
        let step = Minor { minor: older.minor + MINORS_APART_MAX, ..older };
        format!("{first} and {second} are more than one minor version apart: go through {step} first")
    } else {
        return None;
    };
    Some(Refusal::new(Reason::VersionSkew, message))
}

impl Versions {
    /// As they were said.
    pub fn of(cluster: &KVCacheCluster, found: &Found) -> Versions {
        Versions { agents: of_agents(found), members: of_members(cluster, found) }
    }

    /// The oldest and the newest, where one is known.
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

    /// Whether all that runs may run together, as far as it is known.
    pub fn compatible(&self, cluster: &KVCacheCluster, found: &Found) -> Finding {
        let (kind, parts) = (Type::Compatible, self.parts());
        if let Some(refusal) = first_apart(&parts, &parts) {
            return Finding::no(kind, refusal.reason, refusal.message);
        }
        let unknown: Vec<Told<'_>> =
            self.known(cluster, found).into_iter().filter(|known| !known.is_all()).collect();
        if unknown.is_empty() {
            let message = format!("{}; {}", self.agents.text(Who::Agents), self.members.text(Who::Members));
            return Finding::yes(kind, Reason::AsDesired, message);
        }
        let is_late = unknown.iter().any(|known| known.is_replaced);
        let reason = if is_late { Reason::NotReported } else { Reason::Progressing };
        let message = unknown.iter().map(Told::text).collect::<Vec<_>>().join("; ");
        Finding::unknown(kind, reason, message)
    }

    fn known<'a>(&'a self, cluster: &KVCacheCluster, found: &'a Found) -> [Told<'a>; 2] {
        let images = &found.images;
        let unasked = found.said_by_members.as_ref().and_then(|look| look.as_ref().err());
        let agents = updated(found.agents.as_deref(), &images.agent, "updatedNumberScheduled");
        let members = updated(found.members.as_deref(), &images.control_plane, "updatedReplicas");
        [
            Told {
                who: Who::Agents,
                said: &self.agents,
                image: &images.agent,
                is_replaced: count(agents) >= found.plan.nodes.len(),
                unasked: None,
            },
            Told {
                who: Who::Members,
                said: &self.members,
                image: &images.control_plane,
                is_replaced: members >= cluster.spec.control_plane.replicas,
                unasked: unasked.map(String::as_str),
            },
        ]
    }

    fn parts(&self) -> BTreeSet<Part> {
        let of = |who, said: &Said| -> Vec<Part> {
            let versions = said.versions.iter().filter_map(|version| Minor::of(version));
            versions.map(|version| Part { who, version }).collect()
        };
        of(Who::Agents, &self.agents).into_iter().chain(of(Who::Members, &self.members)).collect()
    }
}

fn of_agents(found: &Found) -> Said {
    let nodes = found.cache_nodes.iter().filter(|node| has_reported(node));
    let said = nodes.filter_map(|node| Some(node.status.as_ref()?.agent.as_ref()?.version.as_str()));
    Said::new(said, found.plan.nodes.len())
}

fn of_members(cluster: &KVCacheCluster, found: &Found) -> Said {
    let known = found.said_by_members.as_ref().and_then(|look| look.as_ref().ok());
    let said = known.iter().flat_map(|known| known.members.values()).flatten().map(String::as_str);
    let mut members = Said::new(said, count(cluster.spec.control_plane.replicas));
    let is_known = known.is_some() && all_replaced(found.members.as_deref());
    if members.silent > 0 && !is_known {
        // It may come back as what it was.
        let before = cluster.status.as_ref().and_then(|status| status.versions.as_ref());
        let before = before.into_iter().flat_map(|before| [&before.control_plane, &before.control_plane_max]);
        members.remember(before.flatten().map(Version::as_str));
    }
    members
}

/// Whether no pod of a StatefulSet is left of a template before.
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

impl Said {
    fn new<'a>(said: impl Iterator<Item = &'a str>, desired: usize) -> Said {
        let said: Vec<&str> = said.filter(|version| is_version(version)).collect();
        let mut new = Said { versions: Vec::new(), silent: desired.saturating_sub(said.len()) };
        new.remember(said.into_iter());
        new
    }

    /// Puts further ones beside those that are known.
    fn remember<'a>(&mut self, said: impl Iterator<Item = &'a str>) {
        self.versions.extend(said.map(str::to_owned));
        self.versions.sort_by_cached_key(|version| (numbers(version), version.clone()));
        self.versions.dedup();
    }

    fn text(&self, who: Who) -> String {
        match self.versions.as_slice() {
            [] => format!("there are no {who}"),
            [one] => format!("{who} run {one}"),
            [first, .., last] => format!("{who} run {first} to {last}"),
        }
    }
}

impl Told<'_> {
    /// Whether each process has said what it is. Of an image that names no version those that do not run it yet say nothing.
    fn is_all(&self) -> bool {
        self.said.silent == 0 && (self.is_replaced || Minor::of_image(self.image).is_some())
    }

    fn text(&self) -> String {
        let late = self.late();
        match self.unasked {
            Some(words) => format!(
                "{late}. The control plane cannot be asked from here; if it stays so, look at its pods and at network policies: {words}"
            ),
            None => late,
        }
    }

    fn late(&self) -> String {
        let Told { who, said, image, .. } = self;
        let silent = said.silent;
        if Minor::of_image(image).is_some() {
            return format!("{silent} of the {who} have not said their version");
        }
        let late = match silent {
            0 => format!("not all {who} run it yet"),
            _ => format!("{silent} of the {who} have not said theirs"),
        };
        format!(
            "image {image} names no version, and {late}: whether it may run beside the others is not known before"
        )
    }
}

impl Minor {
    /// Of a version; text that is none has none.
    fn of(version: &str) -> Option<Minor> {
        let mut parts = version.trim_start_matches('v').split('.');
        Some(Minor { major: parts.next()?.parse().ok()?, minor: parts.next()?.parse().ok()? })
    }

    /// Of an image's tag. Beside a digest a tag decides nothing, and nobody has to keep it right.
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

impl fmt::Display for Who {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Who::Agents => "agents",
            Who::Members => "members",
        })
    }
}

impl fmt::Display for Part {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of version {}", self.who, self.version)
    }
}

/// Whether a text can be compared, and stand in a status as the definitions want it.
fn is_version(text: &str) -> bool {
    let is_plain = |letter: char| letter.is_ascii_alphanumeric() || "-+.".contains(letter);
    text.len() <= VERSION_CHARS_MAX && text.chars().all(is_plain) && Minor::of(text).is_some()
}

/// The numbers of a version, to compare by.
fn numbers(version: &str) -> Vec<u64> {
    version.split(|letter: char| !letter.is_ascii_digit()).filter_map(|part| part.parse().ok()).collect()
}

/// Whether anything of a workload runs.
pub(super) fn has_ready_pods(workload: &DynamicObject) -> bool {
    let status = &workload.data["status"];
    [&status["readyReplicas"], &status["numberReady"]]
        .iter()
        .any(|ready| ready.as_u64().is_some_and(|ready| ready > 0))
}

/// The image of a workload's pods.
pub(super) fn image_of(workload: &DynamicObject) -> Option<String> {
    workload.data["spec"]["template"]["spec"]["containers"][0]["image"].as_str().map(str::to_owned)
}

#[cfg(test)]
mod tests;
