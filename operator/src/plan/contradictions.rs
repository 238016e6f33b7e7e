//! What two pools of one cluster cannot both have.

use kube::ResourceExt;
use reprise_crds::SSDPool;
use reprise_crds::status::Reason;

use super::Refusal;

/// Why a pool cannot be beside an older one of its cluster; `shared` is a node that both select.
pub(super) fn between(pool: &SSDPool, older: &SSDPool, shared: Option<&str>) -> Option<Refusal> {
    settings(pool, older).or_else(|| devices(pool, older, shared?))
}

/// An agent has one configuration, which all agents of the cluster share: what is in it is said by all pools alike.
fn settings(pool: &SSDPool, older: &SSDPool) -> Option<Refusal> {
    let (ours, theirs) = (&pool.spec, &older.spec);
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
            let other = older.name_any();
            let message = format!(
                "{field} is {ours} here and {theirs} in SSDPool {other}, which is older and of the same cluster; an agent has one \
                 value for all its pools: write {theirs}, or put the pools into different clusters"
            );
            Refusal::new(Reason::Conflict, message)
        },
    )
}

/// One device or file is one pool's.
fn devices(pool: &SSDPool, older: &SSDPool, node: &str) -> Option<Refusal> {
    let other = older.name_any();
    let what = match (&pool.spec, &older.spec) {
        (ours, theirs) if ours.directory.is_some() && theirs.directory.is_some() => {
            let (ours, theirs) =
                (ours.directory.as_ref()?.path.as_str(), theirs.directory.as_ref()?.path.as_str());
            let within = |inner: &str, outer: &str| inner == outer || inner.starts_with(&format!("{outer}/"));
            (within(ours, theirs) || within(theirs, ours)).then(|| format!("directory {ours}"))
        }
        (ours, theirs) => {
            let (ours, theirs) = (&ours.devices.as_ref()?.globs, &theirs.devices.as_ref()?.globs);
            let overlaps = |glob: &&_| theirs.iter().any(|other| overlap_of(glob, other));
            ours.iter().find(overlaps).map(|glob| format!("devices {glob}"))
        }
    }?;
    let message = format!(
        "{what} on node {node} may be those of SSDPool {other}, which is older: claim other ones, or set nodeSelector so that no node \
         is selected by both"
    );
    Some(Refusal::new(Reason::Conflict, message))
}

fn overlap_of(one: &reprise_crds::fields::DeviceGlob, other: &reprise_crds::fields::DeviceGlob) -> bool {
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
