//! Whether a pool needs its finalizer. Pure.
//!
//! A pool has one while its data is to be wiped before it goes. It is given up when every node has said so, or is gone.

use kube::ResourceExt;
use reprise_crds::SSDPool;
use reprise_crds::fields::DeletionPolicy;
use reprise_crds::node::DeviceState;

use super::dereference::{Found, PoolNode};
use crate::finalizers::Finalizer;
use crate::names::WIPE_FINALIZER;

/// How far a wipe is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wipe {
    /// The pool is not being deleted, or its data stays.
    None,
    /// It was asked for after the pool had been deleted, which takes no finalizer then: its data stays.
    TooLate,
    /// Nobody has confirmed it.
    Unconfirmed,
    /// No cluster has the pool, so no agent can do it.
    Nobody,
    /// So many nodes have not said that they have done it.
    UnderWay(usize),
    /// All have.
    Done,
}

/// How far the wipe of a pool is.
pub fn wipe(pool: &SSDPool, found: &Found) -> Wipe {
    if pool.metadata.deletion_timestamp.is_none() || pool.spec.deletion_policy != DeletionPolicy::Wipe {
        return Wipe::None;
    }
    if !pool.finalizers().iter().any(|one| one == WIPE_FINALIZER) {
        return Wipe::TooLate;
    }
    if found.plan.cluster.is_none() || !found.plan.is_used() {
        return Wipe::Nobody;
    }
    if pool.spec.wipe_confirmation.is_none() {
        return Wipe::Unconfirmed;
    }
    let generation = pool.metadata.generation.unwrap_or_default();
    let wiped = found.nodes.iter().filter(|node| is_wiped(node, generation)).count();
    // A node without a CacheNode counts as one that has not: somebody may have deleted it, and it is made again. A node that is
    // gone is not in the plan.
    let left = found.plan.nodes.len().saturating_sub(wiped);
    if left == 0 { Wipe::Done } else { Wipe::UnderWay(left) }
}

/// A node has done it when it follows the claim that says so and none of the pool's devices holds anything.
fn is_wiped(node: &PoolNode, generation: i64) -> bool {
    let follows = node.applied().is_some_and(|applied| applied.generation >= generation);
    follows && node.devices().all(|device| device.state == DeviceState::Wiped)
}

/// Whether the finalizer is wanted.
pub fn finalizer(pool: &SSDPool, found: &Found) -> Finalizer {
    let wipes = pool.spec.deletion_policy == DeletionPolicy::Wipe;
    // A pool that no cluster ever had has nothing to wipe.
    let never = wipe(pool, found) == Wipe::Nobody && !has_claims(pool, found) && pool.status.is_none();
    let is_over = [Wipe::Done, Wipe::TooLate].contains(&wipe(pool, found));
    if wipes && !is_over && !never { Finalizer::Wanted } else { Finalizer::Unwanted }
}

/// Whether the pool is held whether engines use it or not: what is to be wiped is until that is confirmed, since its data is destroyed then.
pub fn is_guarded(pool: &SSDPool, found: &Found) -> bool {
    let goes = pool.metadata.deletion_timestamp.is_some();
    let is_confirmed = goes && pool.spec.wipe_confirmation.is_some();
    finalizer(pool, found) == Finalizer::Wanted && !is_confirmed
}

fn has_claims(pool: &SSDPool, found: &Found) -> bool {
    let uid = pool.uid().unwrap_or_default();
    let claims = |node: &PoolNode| node.node.spec.claims.iter().any(|claim| claim.uid.as_str() == uid);
    found.nodes.iter().any(claims)
}

#[cfg(test)]
#[allow(clippy::needless_pass_by_value, reason = "specs are made where they are passed")]
mod tests {
    use std::sync::Arc;

    use serde_json::{Value, json};

    use super::*;
    use crate::in_use::Usage;
    use crate::plan::PoolPlan;

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

    fn found(states: &[(i64, &str)]) -> Found {
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
        let plan = PoolPlan { cluster: Some("n/c".to_owned()), nodes, refused: None };
        Found {
            plan,
            cluster: None,
            nodes: states.iter().enumerate().map(node).collect(),
            reserved: 0,
            usage: Usage::default(),
        }
    }

    #[test]
    fn a_pool_goes_when_every_node_has_wiped_it_after_it_was_confirmed() {
        let wipes = json!({ "deletionPolicy": "Wipe" });
        let confirmed =
            json!({ "deletionPolicy": "Wipe", "wipeConfirmation": "yes-really-destroy-the-data" });
        let all = found(&[(3, "Wiped"), (3, "Wiped")]);
        assert_eq!(wipe(&pool(confirmed.clone(), false), &all), Wipe::None);
        assert_eq!(wipe(&pool(json!({}), true), &all), Wipe::None);
        assert_eq!(wipe(&pool(wipes.clone(), true), &all), Wipe::Unconfirmed);
        let guarded = |spec: &Value, deleted| is_guarded(&pool(spec.clone(), deleted), &all);
        assert!(guarded(&wipes, false) && guarded(&wipes, true), "nobody has confirmed it");
        assert!(guarded(&confirmed, false), "it may be used until it is deleted");
        assert!(!guarded(&confirmed, true) && !guarded(&json!({}), false) && !guarded(&json!({}), true));
        assert_eq!(
            wipe(&pool(confirmed.clone(), true), &found(&[(3, "Wiped"), (3, "Open")])),
            Wipe::UnderWay(1)
        );
        // What was wiped for an older claim may have been opened again.
        assert_eq!(wipe(&pool(confirmed.clone(), true), &found(&[(2, "Wiped")])), Wipe::UnderWay(1));
        let mut late = pool(wipes.clone(), true);
        late.metadata.finalizers = None;
        assert_eq!((wipe(&late, &all), finalizer(&late, &all)), (Wipe::TooLate, Finalizer::Unwanted));
        assert!(!is_guarded(&late, &all), "a confirmation would do nothing");
        let mut one_is_missing = all.clone();
        one_is_missing.nodes.pop();
        assert_eq!(wipe(&pool(confirmed.clone(), true), &one_is_missing), Wipe::UnderWay(1));
        assert_eq!(wipe(&pool(confirmed.clone(), true), &all), Wipe::Done);
        assert_eq!(finalizer(&pool(confirmed.clone(), true), &all), Finalizer::Unwanted);
        assert_eq!(finalizer(&pool(confirmed, false), &all), Finalizer::Wanted);
        assert_eq!(finalizer(&pool(json!({}), false), &all), Finalizer::Unwanted);
    }
}
