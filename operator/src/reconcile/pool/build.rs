//! Decides whether a pool needs its wipe finalizer. Pure.
//!
//! A pool with a wipe policy has the finalizer until all nodes have reported the wipe or are gone. Where another pool names
//! the same devices, neither is wiped: a person has to decide first.

use reprise_crds::SSDPool;
use reprise_crds::fields::DeletionPolicy;
use reprise_crds::node::DeviceState;
use reprise_crds::status::Reason;

use super::dereference::{PoolInputs, PoolNode};
use crate::framework::finalizers::{Finalizer, has};
use crate::framework::refusal::Refusal;
use crate::reconcile::names::WIPE_FINALIZER;

/// Progress of a wipe.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Wipe {
    /// The pool is not being deleted, or its data is kept.
    None,
    /// The wipe cannot begin, or cannot complete: some nodes do not wipe the pool.
    Blocked(Refusal),
    /// Number of nodes that have not reported the wipe.
    InProgress(usize),
    /// All nodes have reported the wipe.
    Done,
}

/// Returns the progress of a pool's wipe.
pub fn wipe(pool: &SSDPool, inputs: &PoolInputs) -> Wipe {
    let assigned = &inputs.assignment;
    let is_wiped_on_deletion = pool.spec.deletion_policy == DeletionPolicy::Wipe;
    // If the policy was set after the deletion, when finalizers can no longer be added, the data is kept.
    if !is_wiped_on_deletion || pool.metadata.deletion_timestamp.is_none() || !has(pool, WIPE_FINALIZER) {
        return Wipe::None;
    }
    // A pool that no node ever had has no data to wipe.
    let had_nodes = !assigned.nodes.is_empty() || pool.status.is_some();
    let blocked = |reason, problem: &str| {
        let message = format!("deletionPolicy is Wipe but {problem}, or set deletionPolicy to Retain");
        Wipe::Blocked(Refusal::new(reason, message))
    };
    if assigned.cluster.is_none() {
        let problem =
            "the pool belongs to no cluster, so no agent can wipe it: add the pool to its cluster again";
        return if had_nodes { blocked(Reason::ReferenceNotFound, problem) } else { Wipe::Done };
    }
    if let Some(refused) = &assigned.refused {
        let problem =
            "the pool is rejected, so nodes cannot wipe it: remove the cause that condition Accepted names";
        return if had_nodes { blocked(refused.reason, problem) } else { Wipe::Done };
    }
    if assigned.conflict.is_some() && !had_nodes {
        return Wipe::Done;
    }
    if pool.spec.wipe_confirmation.is_none() {
        let problem = "the wipe is not confirmed: set wipeConfirmation to yes-really-destroy-the-data";
        return blocked(Reason::ConfirmationMissing, problem);
    }
    if let Some((node, other)) = assigned.contested.first_key_value() {
        let problem = format!(
            "SSDPool {other} names the same devices on node {node}, so they are not wiped: set nodeSelector or the devices \
             of one of the pools so that they differ, delete SSDPool {other}"
        );
        return blocked(Reason::Conflict, &problem);
    }
    // Eight older pools have a node that may hold data of this one.
    if assigned.conflict.is_some() {
        let problem = "older pools exclude it from some nodes, where it is not wiped: remove the cause that condition Accepted \
                       names";
        return blocked(Reason::Conflict, problem);
    }
    let wiped = inputs.nodes.iter().filter(|node| is_wiped(node)).count();
    // A node without a CacheNode counts as not wiped: it may have been deleted manually and will be
    // re-created. A node that is gone is not in the assignment.
    match assigned.nodes.len().saturating_sub(wiped) {
        0 => Wipe::Done,
        left => Wipe::InProgress(left),
    }
}

/// Whether a node has wiped the pool: it follows the claim that requests this, and none of the pool's devices
/// holds data.
fn is_wiped(node: &PoolNode) -> bool {
    node.is_applied && node.devices.iter().all(|device| device.state == DeviceState::Wiped)
}

/// Returns whether the finalizer is needed.
pub fn finalizer(pool: &SSDPool, inputs: &PoolInputs) -> Finalizer {
    let is_deleting = pool.metadata.deletion_timestamp.is_some();
    let is_needed = match wipe(pool, inputs) {
        Wipe::None => pool.spec.deletion_policy == DeletionPolicy::Wipe && !is_deleting,
        Wipe::Blocked(_) | Wipe::InProgress(_) => true,
        Wipe::Done => false,
    };
    if is_needed { Finalizer::Present } else { Finalizer::Absent }
}

/// Whether the pool is guarded even if no engine uses it: a pool with a wipe policy is, until the wipe, which
/// destroys its data, is confirmed.
pub fn is_guarded(pool: &SSDPool, inputs: &PoolInputs) -> bool {
    let is_confirmed = pool.metadata.deletion_timestamp.is_some() && pool.spec.wipe_confirmation.is_some();
    finalizer(pool, inputs) == Finalizer::Present && !is_confirmed
}

#[cfg(test)]
#[allow(clippy::needless_pass_by_value, reason = "specs are made where they are passed")]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::reconcile::test_objects;

    fn pool(spec: Value, deleted: bool) -> SSDPool {
        let metadata = match deleted {
            true => json!({ "deletionTimestamp": "2026-01-01T00:00:00Z", "finalizers": [WIPE_FINALIZER] }),
            false => json!({}),
        };
        test_objects::pool(metadata, spec)
    }

    /// Inputs with nodes that have applied this generation and have a device in this state.
    fn found(states: &[(i64, &str)]) -> PoolInputs {
        let mut inputs = PoolInputs::default();
        inputs.assignment.cluster = Some("n/c".to_owned());
        for (index, (generation, state)) in states.iter().enumerate() {
            let name = format!("n{index}");
            let status = json!({
                "applied": { "pools": [{ "pool": "p", "uid": "u", "generation": generation }] },
                "devices": [{ "path": "/p/pool", "pool": "p", "state": state }],
            });
            let parts = json!({ "spec": { "nodeName": name }, "status": status });
            let node = test_objects::resource(json!({ "name": name }), parts);
            inputs.nodes.push(PoolNode::of(&pool(json!({}), false), std::sync::Arc::new(node)));
            inputs.assignment.nodes.push(name);
        }
        inputs
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
        let conflict = || Refusal::new(Reason::Conflict, "SSDPool older has the devices");
        let partly = with(&|inputs| inputs.assignment.conflict = Some(conflict()));
        let alone = with(&|inputs| inputs.assignment.cluster = None);
        let rejected =
            with(&|inputs| inputs.assignment.refused = Some(Refusal::new(Reason::Unsupported, "claims")));
        let never = with(&|inputs| {
            inputs.assignment.nodes.clear();
            inputs.assignment.refused = Some(conflict());
        });
        let without_node = with(&|inputs| drop(inputs.nodes.pop()));
        let going = || pool(confirmed(), true);
        let mut late = pool(wipes(), true);
        late.metadata.finalizers = None;
        for (pool, inputs, expected, finalizer_is, guarded) in [
            (pool(json!({}), false), all(), "None", Absent, false),
            (pool(json!({}), true), all(), "None", Absent, false),
            (pool(wipes(), false), all(), "None", Present, true),
            (pool(wipes(), true), all(), "not confirmed", Present, true),
            // It may be in use until it is deleted.
            (pool(confirmed(), false), all(), "None", Present, true),
            (going(), all(), "Done", Absent, false),
            (going(), found(&[(3, "Wiped"), (3, "Open")]), "InProgress(1)", Present, false),
            // Data that was wiped for an older claim may have been opened again.
            (going(), found(&[(2, "Wiped")]), "InProgress(1)", Present, false),
            // A node without a CacheNode.
            (going(), without_node, "InProgress(1)", Present, false),
            (going(), contested, "SSDPool q names the same devices on node n1", Present, false),
            (going(), alone, "belongs to no cluster", Present, false),
            (going(), partly.clone(), "exclude it from some nodes", Present, false),
            (pool(wipes(), true), partly, "not confirmed", Present, true),
            (going(), rejected, "Unsupported", Present, false),
            // No node ever had the pool.
            (going(), never, "Done", Absent, false),
            // The policy was set after the deletion.
            (late, all(), "None", Absent, false),
        ] {
            let progress = format!("{:?}", wipe(&pool, &inputs));
            assert!(progress.contains(expected), "{progress} is not {expected}");
            let has = (finalizer(&pool, &inputs), is_guarded(&pool, &inputs));
            assert_eq!(has, (finalizer_is, guarded), "{:?} {:?}", pool.spec, pool.metadata);
        }
    }
}
