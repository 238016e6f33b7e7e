//! Contradictions of clusters and of pools, with messages that name the older object and the remedy.

use std::collections::BTreeMap;

use kube::ResourceExt;
use reprise_crds::SSDPool;
use reprise_crds::fields::{DeviceGlob, Quantity};
use reprise_crds::pool::SSDPoolSpec;
use reprise_crds::status::Reason;

use crate::framework::refusal::{Refusal, list};

/// Returns why a pool contradicts the oldest one of its cluster in a setting of which an agent has one value for all pools.
pub(super) fn settings(pool: &SSDPool, oldest: &SSDPool) -> Option<Refusal> {
    let mut both = shared_settings(&pool.spec).into_iter().zip(shared_settings(&oldest.spec));
    let ((field, _, ours), (_, _, theirs)) = both.find(|((_, ours, _), (_, theirs, _))| ours != theirs)?;
    let message = format!(
        "{field} is {ours} here and {theirs} in the older SSDPool {} of the same cluster, but an agent has one value for \
         all its pools: set {theirs} here, set {ours} in all pools of the cluster, or move the pool to another cluster",
        oldest.name_any()
    );
    Some(Refusal::new(Reason::Conflict, message))
}

/// Returns the settings of which an agent has one value: the field, its value in a form that is equal for equal amounts, and
/// its value as the spec states it.
fn shared_settings(spec: &SSDPoolSpec) -> [(&'static str, String, String); 6] {
    let plain = |field, value: String| (field, value.clone(), value);
    let amount = |field, quantity: &Quantity| {
        let value = quantity.bytes().map_or_else(|_| quantity.to_string(), |bytes| bytes.to_string());
        (field, value, quantity.to_string())
    };
    [
        amount("segmentSize", &spec.segment_size),
        plain("queueDepth", spec.queue_depth.to_string()),
        plain("eviction", format!("{:?}", spec.eviction)),
        plain("admission", format!("{:?}", spec.admission)),
        match &spec.daily_write_budget {
            Some(budget) => amount("dailyWriteBudget", budget),
            None => plain("dailyWriteBudget", "unlimited".to_owned()),
        },
        plain("watermarks.freePermille", spec.watermarks.free_permille.0.to_string()),
    ]
}

/// Returns the directory or devices of a pool that another pool names as well: a file or device belongs to one pool.
pub(super) fn shared_location(pool: &SSDPool, other: &SSDPool) -> Option<String> {
    let (ours, theirs) = (&pool.spec, &other.spec);
    if let (Some(ours), Some(theirs)) = (&ours.directory, &theirs.directory) {
        let (ours, theirs) = (ours.path.as_str(), theirs.path.as_str());
        let within = |inner: &str, outer: &str| inner == outer || inner.starts_with(&format!("{outer}/"));
        return (within(ours, theirs) || within(theirs, ours)).then(|| format!("directory {ours}"));
    }
    let (ours, theirs) = (ours.devices.as_ref()?, theirs.devices.as_ref()?);
    let overlaps =
        |glob: &&DeviceGlob| theirs.globs.iter().any(|other| globs_overlap(glob.as_str(), other.as_str()));
    ours.globs.iter().find(overlaps).map(|glob| format!("devices {glob}"))
}

/// Returns the conflict of a cluster that selects nodes of other clusters, given the nodes with their clusters.
pub(super) fn nodes(contested: &BTreeMap<String, String>) -> Option<Refusal> {
    let owner = contested.values().next()?;
    let same = contested.iter().filter(|(_, other)| *other == owner);
    let nodes: Vec<&str> = same.map(|(node, _)| node.as_str()).collect();
    let message = format!(
        "KVCacheCluster {owner} has {}, so this cluster has no agent there: set \
         agents.nodeSelector of both clusters so that no node matches both",
        node_list(&nodes)
    );
    Some(Refusal::new(Reason::Conflict, message))
}

/// Names the nodes of a conflict.
pub(super) fn node_list(nodes: &[&str]) -> String {
    format!("{} {}", if nodes.len() == 1 { "node" } else { "nodes" }, list(nodes))
}

/// Returns whether some name matches both patterns. `*` matches any characters, `?` one. Takes at most 200 ×
/// 200 steps.
pub(super) fn globs_overlap(one: &str, other: &str) -> bool {
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
