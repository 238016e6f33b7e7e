//! Decides whether a pool needs its wipe finalizer. Pure.
//!
//! A pool with a wipe policy has the finalizer until all nodes have reported the wipe or are gone. Where another pool names
//! the same devices, neither is wiped: a person has to decide first.

use kube::ResourceExt;
use reprise_crds::SSDPool;
use reprise_crds::fields::DeletionPolicy;
use reprise_crds::node::DeviceState;

use super::dereference::{PoolInputs, PoolNode};
use crate::framework::finalizers::Finalizer;
use crate::reconcile::names::WIPE_FINALIZER;

/// Progress of a wipe.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Wipe {
    /// The pool is not being deleted, or its data is kept.
    None,
    /// The policy was set after the deletion, when finalizers can no longer be added: the data is kept.
    TooLate,
    /// The pool belongs to no cluster, so no agent can wipe it.
    NoCluster,
    /// The pool is rejected, on all nodes or on some, which can therefore not wipe it.
    Rejected,
    /// The wipe is not confirmed.
    Unconfirmed,
    /// On this node, a younger pool names the same devices, so they are not wiped.
    Contested { node: String, other: String },
    /// Number of nodes that have not reported the wipe.
    InProgress(usize),
    /// All nodes have reported the wipe.
    Done,
}

/// Returns the progress of a pool's wipe.
pub fn wipe(pool: &SSDPool, inputs: &PoolInputs) -> Wipe {
    let assigned = &inputs.assignment;
    if pool.metadata.deletion_timestamp.is_none() || pool.spec.deletion_policy != DeletionPolicy::Wipe {
        return Wipe::None;
    }
    if !pool.finalizers().iter().any(|one| one == WIPE_FINALIZER) {
        return Wipe::TooLate;
    }
    if assigned.cluster.is_none() {
        return Wipe::NoCluster;
    }
    if assigned.refused.is_some() || assigned.conflict.is_some() {
        return Wipe::Rejected;
    }
    if pool.spec.wipe_confirmation.is_none() {
        return Wipe::Unconfirmed;
    }
    if let Some((node, other)) = assigned.contested.first_key_value() {
        return Wipe::Contested { node: node.clone(), other: other.clone() };
    }
    let generation = pool.metadata.generation.unwrap_or_default();
    let wiped = inputs.nodes.iter().filter(|node| is_wiped(node, generation)).count();
    // A node without a CacheNode counts as not wiped: it may have been deleted manually and will be
    // re-created. A node that is gone is not in the assignment.
    match assigned.nodes.len().saturating_sub(wiped) {
        0 => Wipe::Done,
        left => Wipe::InProgress(left),
    }
}

/// Whether a node has wiped the pool: it follows the claim that requests this, and none of the pool's devices
/// holds data.
fn is_wiped(node: &PoolNode, generation: i64) -> bool {
    let follows = node.applied().is_some_and(|applied| applied.generation >= generation);
    follows && node.devices().all(|device| device.state == DeviceState::Wiped)
}

/// Returns whether the finalizer is needed.
pub fn finalizer(pool: &SSDPool, inputs: &PoolInputs) -> Finalizer {
    let wipes = pool.spec.deletion_policy == DeletionPolicy::Wipe;
    let is_over = match wipe(pool, inputs) {
        Wipe::Done | Wipe::TooLate => true,
        // A pool that no node ever had has no data to wipe.
        Wipe::NoCluster | Wipe::Rejected => inputs.assignment.nodes.is_empty() && pool.status.is_none(),
        _ => false,
    };
    if wipes && !is_over { Finalizer::Present } else { Finalizer::Absent }
}

/// Whether the pool is guarded even if no engine uses it: a pool with a wipe policy is, until the wipe, which
/// destroys its data, is confirmed.
pub fn is_guarded(pool: &SSDPool, inputs: &PoolInputs) -> bool {
    let goes = pool.metadata.deletion_timestamp.is_some();
    let is_confirmed = goes && pool.spec.wipe_confirmation.is_some();
    finalizer(pool, inputs) == Finalizer::Present && !is_confirmed
}

#[cfg(test)]
#[allow(clippy::needless_pass_by_value, reason = "specs are made where they are passed")]
mod tests {
    use std::sync::Arc;

    use reprise_crds::status::Reason;
    use serde_json::{Value, json};

    use super::*;
    use crate::framework::refusal::Refusal;
    use crate::reconcile::assignment::PoolAssignment;
    use crate::reconcile::pool::guard::Guard;
    use crate::reconcile::test_objects;

    fn pool(spec: Value, deleted: bool) -> SSDPool {
        let metadata = match deleted {
            true => json!({ "deletionTimestamp": "2026-01-01T00:00:00Z", "finalizers": [WIPE_FINALIZER] }),
            false => json!({}),
        };
        test_objects::pool(metadata, spec)
    }

    fn found(states: &[(i64, &str)]) -> PoolInputs {
        let node = |(index, (generation, state)): (usize, &(i64, &str))| {
            let name = format!("n{index}");
            let status = json!({
                "applied": { "pools": [{ "pool": "p", "uid": "u", "generation": generation }] },
                "devices": [{ "path": "/p/pool", "pool": "p", "state": state }],
            });
            let parts = json!({ "spec": { "nodeName": name }, "status": status });
            let node = Arc::new(test_objects::resource(json!({ "name": name }), parts));
            PoolNode { node, pool_uid: "u".to_owned(), pool: "p".to_owned() }
        };
        let nodes = (0..states.len()).map(|index| format!("n{index}")).collect();
        let assignment =
            PoolAssignment { cluster: Some("n/c".to_owned()), nodes, ..PoolAssignment::default() };
        PoolInputs {
            assignment,
            cluster: None,
            nodes: states.iter().enumerate().map(node).collect(),
            reserved: 0,
            guard: Guard::default(),
        }
    }

    #[test]
    fn deletes_pool_once_every_node_has_wiped_it_after_confirmation() {
        use Finalizer::{Absent, Present};
        let wipes = || json!({ "deletionPolicy": "Wipe" });
        let confirmed =
            || json!({ "deletionPolicy": "Wipe", "wipeConfirmation": "yes-really-destroy-the-data" });
        let all = || found(&[(3, "Wiped"), (3, "Wiped")]);
        let with = |change: &dyn Fn(&mut PoolInputs)| {
            let mut inputs = all();
            change(&mut inputs);
            inputs
        };
        let contested = with(&|inputs| {
            inputs.assignment.contested.insert("n1".to_owned(), "q".to_owned());
        });
        let by_other = Wipe::Contested { node: "n1".to_owned(), other: "q".to_owned() };
        let conflict = || Refusal::new(Reason::Conflict, "SSDPool older has the devices");
        let partly = with(&|inputs| inputs.assignment.conflict = Some(conflict()));
        let alone = with(&|inputs| inputs.assignment.cluster = None);
        let never = with(&|inputs| {
            inputs.assignment.nodes.clear();
            inputs.assignment.refused = Some(conflict());
        });
        let without_node = with(&|inputs| drop(inputs.nodes.pop()));
        let going = || pool(confirmed(), true);
        let mut late = pool(wipes(), true);
        late.metadata.finalizers = None;
        for (pool, inputs, expected, finalizer_is, guarded) in [
            (pool(json!({}), false), all(), Wipe::None, Absent, false),
            (pool(json!({}), true), all(), Wipe::None, Absent, false),
            (pool(wipes(), false), all(), Wipe::None, Present, true),
            (pool(wipes(), true), all(), Wipe::Unconfirmed, Present, true),
            // It may be in use until it is deleted.
            (pool(confirmed(), false), all(), Wipe::None, Present, true),
            (going(), all(), Wipe::Done, Absent, false),
            (going(), found(&[(3, "Wiped"), (3, "Open")]), Wipe::InProgress(1), Present, false),
            // Data that was wiped for an older claim may have been opened again.
            (going(), found(&[(2, "Wiped")]), Wipe::InProgress(1), Present, false),
            // A node without a CacheNode.
            (going(), without_node, Wipe::InProgress(1), Present, false),
            (going(), contested, by_other, Present, false),
            (going(), alone, Wipe::NoCluster, Present, false),
            (going(), partly, Wipe::Rejected, Present, false),
            // No node ever had the pool.
            (going(), never, Wipe::Rejected, Absent, false),
            // The policy was set after the deletion.
            (late, all(), Wipe::TooLate, Absent, false),
        ] {
            let has = (wipe(&pool, &inputs), finalizer(&pool, &inputs), is_guarded(&pool, &inputs));
            assert_eq!(has, (expected, finalizer_is, guarded), "{:?} {:?}", pool.spec, pool.metadata);
        }
    }
}
