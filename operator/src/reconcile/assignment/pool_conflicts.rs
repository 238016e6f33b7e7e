//! Conflicts between two pools of one cluster: shared settings and overlapping devices.

use kube::ResourceExt;
use reprise_crds::SSDPool;
use reprise_crds::fields::{DeviceGlob, Quantity};
use reprise_crds::node::PoolClaim;
use reprise_crds::pool::SSDPoolSpec;
use reprise_crds::status::Reason;

use crate::framework::refusal::Refusal;

/// Returns why a pool conflicts with an earlier one of its cluster. `shared` is a node that both select.
pub(super) fn between(pool: &SSDPool, first: &SSDPool, shared: Option<&str>) -> Option<Refusal> {
    settings(pool, first).or_else(|| {
        let theirs = Location::of(first)?;
        devices(&Location::of(pool)?, &theirs, &first.name_any(), shared?)
    })
}

/// Returns why a pool conflicts with the claims that nodes have of another pool. Equal claims are compared
/// once.
pub(super) fn occupied<'a>(
    pool: &SSDPool,
    other: &str,
    claims: impl Iterator<Item = (&'a str, &'a PoolClaim)>,
) -> Option<Refusal> {
    let ours = Location::of(pool)?;
    let mut compared: Vec<&PoolClaim> = Vec::new();
    for (node, claim) in claims {
        let is_same = |known: &&PoolClaim| known.file == claim.file && known.globs == claim.globs;
        if compared.iter().any(is_same) {
            continue;
        }
        compared.push(claim);
        if let Some(refusal) = devices(&ours, &Location::of_claim(claim), other, node) {
            return Some(refusal);
        }
    }
    None
}

/// Location of a pool on a node.
enum Location<'a> {
    Directory(&'a str),
    Devices(&'a [DeviceGlob]),
}

impl Location<'_> {
    fn of(pool: &SSDPool) -> Option<Location<'_>> {
        let directory =
            pool.spec.directory.as_ref().map(|directory| Location::Directory(directory.path.as_str()));
        directory.or_else(|| Some(Location::Devices(&pool.spec.devices.as_ref()?.globs)))
    }

    fn of_claim(claim: &PoolClaim) -> Location<'_> {
        match &claim.file {
            // The pool's file is in its directory.
            Some(file) => {
                let file = file.as_str();
                Location::Directory(file.rsplit_once('/').map_or(file, |(directory, _)| directory))
            }
            None => Location::Devices(&claim.globs),
        }
    }
}

/// Compares settings that all pools of a cluster must share, because all its agents have the same
/// configuration file.
fn settings(pool: &SSDPool, first: &SSDPool) -> Option<Refusal> {
    let (ours, theirs) = (&pool.spec, &first.spec);
    let differing = [
        ("segmentSize", ours.segment_size.to_string(), theirs.segment_size.to_string()),
        ("queueDepth", ours.queue_depth.to_string(), theirs.queue_depth.to_string()),
        ("eviction", format!("{:?}", ours.eviction), format!("{:?}", theirs.eviction)),
        ("admission", format!("{:?}", ours.admission), format!("{:?}", theirs.admission)),
        ("dailyWriteBudget", budget(ours), budget(theirs)),
        (
            "watermarks.freePermille",
            ours.watermarks.free_permille.0.to_string(),
            theirs.watermarks.free_permille.0.to_string(),
        ),
    ];
    let same_bytes = |field: &str| {
        let bytes = |budget: &Option<Quantity>| budget.as_ref().and_then(|budget| budget.bytes().ok());
        match field {
            "segmentSize" => ours.segment_size.bytes().ok() == theirs.segment_size.bytes().ok(),
            "dailyWriteBudget" => bytes(&ours.daily_write_budget) == bytes(&theirs.daily_write_budget),
            _ => false,
        }
    };
    differing.into_iter().find(|(field, ours, theirs)| ours != theirs && !same_bytes(field)).map(
        |(field, ours, theirs)| {
            let other = first.name_any();
            let message = format!(
                "{field} is {ours} here and {theirs} in SSDPool {other} of the same cluster, but an agent \
                 has one value for all its pools: set {theirs} here, set {ours} in all pools of the cluster, \
                 or move the pool to another cluster"
            );
            Refusal::new(Reason::Conflict, message)
        },
    )
}

/// Describes the daily write budget of a pool.
fn budget(spec: &SSDPoolSpec) -> String {
    spec.daily_write_budget.as_ref().map_or_else(|| "unlimited".to_owned(), ToString::to_string)
}

/// Compares directories or device patterns. A device or file may belong to one pool only.
fn devices(ours: &Location, theirs: &Location, other: &str, node: &str) -> Option<Refusal> {
    let what = match (ours, theirs) {
        (Location::Directory(ours), Location::Directory(theirs)) => {
            let within = |inner: &str, outer: &str| inner == outer || inner.starts_with(&format!("{outer}/"));
            (within(ours, theirs) || within(theirs, ours)).then(|| format!("directory {ours}"))
        }
        (Location::Devices(ours), Location::Devices(theirs)) => {
            let overlaps = |glob: &&DeviceGlob| theirs.iter().any(|other| overlap_of(glob, other));
            ours.iter().find(overlaps).map(|glob| format!("devices {glob}"))
        }
        _ => None,
    }?;
    let message = format!(
        "{what} on node {node} may already belong to SSDPool {other}: use a different directory or other \
         devices, or set nodeSelector of both pools so that no node matches both"
    );
    Some(Refusal::new(Reason::Conflict, message))
}

fn overlap_of(one: &DeviceGlob, other: &DeviceGlob) -> bool {
    globs_overlap(one.as_str(), other.as_str())
}

/// Returns whether some name matches both patterns. `*` matches any characters, `?` one. Takes at most 200 ×
/// 200 steps.
pub fn globs_overlap(one: &str, other: &str) -> bool {
    let (one, other) = (one.as_bytes(), other.as_bytes());
    // Whether the rests of both patterns from these positions have a common match, filled in backwards.
    let mut common = vec![vec![false; other.len() + 1]; one.len() + 1];
    for at in (0..=one.len()).rev() {
        for there in (0..=other.len()).rev() {
            let here = (one.get(at), other.get(there));
            common[at][there] = match here {
                (None, None) => true,
                (Some(b'*'), Some(_)) => common[at + 1][there] || common[at][there + 1],
                (Some(b'*'), None) => common[at + 1][there],
                (Some(_), Some(b'*')) => common[at][there + 1] || common[at + 1][there],
                (None, Some(b'*')) => common[at][there + 1],
                (Some(a), Some(b)) => (a == b || *a == b'?' || *b == b'?') && common[at + 1][there + 1],
                (Some(_), None) | (None, Some(_)) => false,
            };
        }
    }
    common[0][0]
}
