//! What two pools of one cluster cannot both have.

use kube::ResourceExt;
use reprise_crds::SSDPool;
use reprise_crds::fields::DeviceGlob;
use reprise_crds::node::PoolClaim;
use reprise_crds::status::Reason;

use super::Refusal;

/// Why a pool cannot be beside one of its cluster that comes first; `shared` is a node that both select.
pub(super) fn between(pool: &SSDPool, first: &SSDPool, shared: Option<&str>) -> Option<Refusal> {
    settings(pool, first).or_else(|| {
        let theirs = Place::of(first)?;
        devices(&Place::of(pool)?, &theirs, &first.name_any(), shared?)
    })
}

/// Why a pool cannot be on nodes that have claims of another one. Most are the same, which are compared once.
pub(super) fn occupied<'a>(
    pool: &SSDPool,
    other: &str,
    claims: impl Iterator<Item = (&'a str, &'a PoolClaim)>,
) -> Option<Refusal> {
    let ours = Place::of(pool)?;
    let mut looked_at: Vec<&PoolClaim> = Vec::new();
    for (node, claim) in claims {
        let is_same = |known: &&PoolClaim| known.file == claim.file && known.globs == claim.globs;
        if looked_at.iter().any(is_same) {
            continue;
        }
        looked_at.push(claim);
        if let Some(refusal) = devices(&ours, &Place::of_claim(claim), other, node) {
            return Some(refusal);
        }
    }
    None
}

/// Where a pool is on a node.
enum Place<'a> {
    Directory(&'a str),
    Devices(&'a [DeviceGlob]),
}

impl Place<'_> {
    fn of(pool: &SSDPool) -> Option<Place<'_>> {
        let directory =
            pool.spec.directory.as_ref().map(|directory| Place::Directory(directory.path.as_str()));
        directory.or_else(|| Some(Place::Devices(&pool.spec.devices.as_ref()?.globs)))
    }

    fn of_claim(claim: &PoolClaim) -> Place<'_> {
        match &claim.file {
            // The pool's file lies in its directory.
            Some(file) => {
                let file = file.as_str();
                Place::Directory(file.rsplit_once('/').map_or(file, |(directory, _)| directory))
            }
            None => Place::Devices(&claim.globs),
        }
    }
}

/// An agent has one configuration, which all agents of the cluster share: what is in it is said by all pools alike.
fn settings(pool: &SSDPool, first: &SSDPool) -> Option<Refusal> {
    let (ours, theirs) = (&pool.spec, &first.spec);
    let differing = [
        ("segmentSize", ours.segment_size.to_string(), theirs.segment_size.to_string()),
        ("queueDepth", ours.queue_depth.to_string(), theirs.queue_depth.to_string()),
        (
            "watermarks.freePermille",
            ours.watermarks.free_permille.0.to_string(),
            theirs.watermarks.free_permille.0.to_string(),
        ),
    ];
    let same_bytes = |field: &str| {
        field == "segmentSize" && ours.segment_size.bytes().ok() == theirs.segment_size.bytes().ok()
    };
    differing.into_iter().find(|(field, ours, theirs)| ours != theirs && !same_bytes(field)).map(
        |(field, ours, theirs)| {
            let other = first.name_any();
            let message = format!(
                "{field} is {ours} here and {theirs} in SSDPool {other} of the same cluster; an agent has one value for all its \
                 pools: write {theirs}, or {ours} to all pools of the cluster, or put the pools into different clusters"
            );
            Refusal::new(Reason::Conflict, message)
        },
    )
}

/// One device or file is one pool's.
fn devices(ours: &Place, theirs: &Place, other: &str, node: &str) -> Option<Refusal> {
    let what = match (ours, theirs) {
        (Place::Directory(ours), Place::Directory(theirs)) => {
            let within = |inner: &str, outer: &str| inner == outer || inner.starts_with(&format!("{outer}/"));
            (within(ours, theirs) || within(theirs, ours)).then(|| format!("directory {ours}"))
        }
        (Place::Devices(ours), Place::Devices(theirs)) => {
            let overlaps = |glob: &&DeviceGlob| theirs.iter().any(|other| overlap_of(glob, other));
            ours.iter().find(overlaps).map(|glob| format!("devices {glob}"))
        }
        _ => None,
    }?;
    let message = format!(
        "{what} on node {node} may be those of SSDPool {other}, which has them: claim other ones, or set nodeSelector so that no node \
         is selected by both"
    );
    Some(Refusal::new(Reason::Conflict, message))
}

fn overlap_of(one: &DeviceGlob, other: &DeviceGlob) -> bool {
    globs_overlap(one.as_str(), other.as_str())
}

/// Whether some name matches both patterns; `*` stands for any characters, `?` for one. At most 200 × 200 steps.
pub fn globs_overlap(one: &str, other: &str) -> bool {
    let (one, other) = (one.as_bytes(), other.as_bytes());
    // Whether what is left of both from these places on has a name in common, from the ends backwards.
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
