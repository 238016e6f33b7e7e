//! Decides whether a pool needs its wipe finalizer. Pure.
//!
//! A pool with a wipe policy has the finalizer until all nodes have reported the wipe or are gone.

use kube::ResourceExt;
use reprise_crds::SSDPool;
use reprise_crds::fields::DeletionPolicy;
use reprise_crds::node::DeviceState;

use super::dereference::{PoolInputs, PoolNode};
use crate::framework::finalizers::Finalizer;
use crate::reconcile::names::WIPE_FINALIZER;

/// Progress of a wipe.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wipe {
    /// The pool is not being deleted, or its data is kept.
    None,
    /// The policy was set after the deletion, when finalizers can no longer be added: the data is kept.
    TooLate,
    /// The wipe is not confirmed.
    Unconfirmed,
    /// The pool belongs to no cluster, so no agent can wipe it.
    NoCluster,
    /// Number of nodes that have not reported the wipe.
    InProgress(usize),
    /// All nodes have reported the wipe.
    Done,
}

/// Returns the progress of a pool's wipe.
pub fn wipe(pool: &SSDPool, inputs: &PoolInputs) -> Wipe {
    if pool.metadata.deletion_timestamp.is_none() || pool.spec.deletion_policy != DeletionPolicy::Wipe {
        return Wipe::None;
    }
    if !pool.finalizers().iter().any(|one| one == WIPE_FINALIZER) {
        return Wipe::TooLate;
    }
    if inputs.assignment.cluster.is_none() || !inputs.assignment.is_used() {
        return Wipe::NoCluster;
    }
    if pool.spec.wipe_confirmation.is_none() {
        return Wipe::Unconfirmed;
    }
    let generation = pool.metadata.generation.unwrap_or_default();
    let wiped = inputs.nodes.iter().filter(|node| is_wiped(node, generation)).count();
    // A node without a CacheNode counts as not wiped: it may have been deleted manually and will be
    // re-created. A node that is gone is not in the assignment.
    let left = inputs.assignment.nodes.len().saturating_sub(wiped);
    if left == 0 { Wipe::Done } else { Wipe::InProgress(left) }
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
    // A pool that never belonged to a cluster has no data to wipe.
    let never = wipe(pool, inputs) == Wipe::NoCluster && !has_claims(pool, inputs) && pool.status.is_none();
    let is_over = [Wipe::Done, Wipe::TooLate].contains(&wipe(pool, inputs));
    if wipes && !is_over && !never { Finalizer::Present } else { Finalizer::Absent }
}

/// Whether the pool is guarded even if no engine uses it: a pool with a wipe policy is, until the wipe, which
/// destroys its data, is confirmed.
pub fn is_guarded(pool: &SSDPool, inputs: &PoolInputs) -> bool {
    let goes = pool.metadata.deletion_timestamp.is_some();
    let is_confirmed = goes && pool.spec.wipe_confirmation.is_some();
    finalizer(pool, inputs) == Finalizer::Present && !is_confirmed
}

fn has_claims(pool: &SSDPool, inputs: &PoolInputs) -> bool {
    let uid = pool.uid().unwrap_or_default();
    let claims = |node: &PoolNode| node.node.spec.claims.iter().any(|claim| claim.uid.as_str() == uid);
    inputs.nodes.iter().any(claims)
}

#[cfg(test)]
#[allow(clippy::needless_pass_by_value, reason = "specs are made where they are passed")]
mod tests {
    use std::sync::Arc;

    use serde_json::{Value, json};

    use super::*;
    use crate::reconcile::assignment::PoolAssignment;
    use crate::reconcile::pool::guard::Guard;

    fn pool(more: Value, deleted: bool) -> SSDPool {
        let mut spec = json!({ "directory": { "path": "/p", "size": "1Gi" } });
        spec.as_object_mut().expect("made above").extend(more.as_object().expect("fields").clone());
        let mut metadata = json!({ "name": "p", "uid": "u", "generation": 3 });
        if deleted {
            metadata["deletionTimestamp"] = json!("2026-01-01T00:00:00Z");
            metadata["finalizers"] = json!([WIPE_FINALIZER]);
        }
        let whole = json!({ "apiVersion": "reprise.dev/v1alpha1", "kind": "SSDPool", "metadata": metadata, "spec": spec });
        serde_json::from_value(whole).expect("a pool")
    }

    fn found(states: &[(i64, &str)]) -> PoolInputs {
        let node = |(index, (generation, state)): (usize, &(i64, &str))| {
            let name = format!("n{index}");
            let node = json!({
                "apiVersion": "reprise.dev/v1alpha1", "kind": "CacheNode",
                "metadata": { "name": name }, "spec": { "nodeName": name },
                "status": {
                    "applied": { "pools": [{ "pool": "p", "uid": "u", "generation": generation }] },
                    "devices": [{ "path": "/p/pool", "pool": "p", "state": state }],
                },
            });
            let node = serde_json::from_value(node).expect("a CacheNode");
            PoolNode { node: Arc::new(node), pool_uid: "u".to_owned(), pool: "p".to_owned() }
        };
        let nodes = (0..states.len()).map(|index| format!("n{index}")).collect();
        let assignment = PoolAssignment { cluster: Some("n/c".to_owned()), nodes, refused: None };
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
        let wipes = json!({ "deletionPolicy": "Wipe" });
        let confirmed =
            json!({ "deletionPolicy": "Wipe", "wipeConfirmation": "yes-really-destroy-the-data" });
        let all = found(&[(3, "Wiped"), (3, "Wiped")]);
        assert_eq!(wipe(&pool(confirmed.clone(), false), &all), Wipe::None);
        assert_eq!(wipe(&pool(json!({}), true), &all), Wipe::None);
        assert_eq!(wipe(&pool(wipes.clone(), true), &all), Wipe::Unconfirmed);
        let guarded = |spec: &Value, deleted| is_guarded(&pool(spec.clone(), deleted), &all);
        assert!(guarded(&wipes, false) && guarded(&wipes, true), "the wipe is not confirmed");
        assert!(guarded(&confirmed, false), "it may be in use until it is deleted");
        assert!(!guarded(&confirmed, true) && !guarded(&json!({}), false) && !guarded(&json!({}), true));
        assert_eq!(
            wipe(&pool(confirmed.clone(), true), &found(&[(3, "Wiped"), (3, "Open")])),
            Wipe::InProgress(1)
        );
        // Data that was wiped for an older claim may have been opened again.
        assert_eq!(wipe(&pool(confirmed.clone(), true), &found(&[(2, "Wiped")])), Wipe::InProgress(1));
        let mut late = pool(wipes.clone(), true);
        late.metadata.finalizers = None;
        assert_eq!((wipe(&late, &all), finalizer(&late, &all)), (Wipe::TooLate, Finalizer::Absent));
        assert!(!is_guarded(&late, &all), "a confirmation has no effect");
        let mut one_is_missing = all.clone();
        one_is_missing.nodes.pop();
        assert_eq!(wipe(&pool(confirmed.clone(), true), &one_is_missing), Wipe::InProgress(1));
        assert_eq!(wipe(&pool(confirmed.clone(), true), &all), Wipe::Done);
        assert_eq!(finalizer(&pool(confirmed.clone(), true), &all), Finalizer::Absent);
        assert_eq!(finalizer(&pool(confirmed, false), &all), Finalizer::Present);
        assert_eq!(finalizer(&pool(json!({}), false), &all), Finalizer::Absent);
    }
}
