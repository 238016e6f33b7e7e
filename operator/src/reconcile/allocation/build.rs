//! Decides the next write of a pass over a node's allocations. Pure.
//!
//! A pass begins with the objects that the API server lists. After each write it decides again, with the object that
//! the API server returned. So a grant never relies on pairs whose release is not written, and an operator that is
//! killed between two writes leaves pairs unused but never grants them twice. [`Operation`] has the order of writes.
//!
//! * An allocation of which the API server rejects a write takes part as it is stored: it keeps its pairs, requests
//!   none, and is not preempted. So others can get all pairs that it does not have.
//! * A former leader may be about to grant to an allocation that has the finalizer but no grant. So before a pass
//!   grants, it removes each such finalizer that this process has not added; see [`super::apply`]. If the API server
//!   rejects that, the pass grants nothing.
//! * A pass executes each operation on an allocation at most once, so it ends also if the API server drops a field. A
//!   grant is written in a later pass than its finalizer. If it fails, it is therefore retried after a delay: its pass
//!   wrote nothing whose watch event would repeat it at once.

use std::collections::BTreeSet;
use std::sync::Arc;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::ResourceExt;
use reprise_crds::GPUQueueAllocation;
use reprise_crds::queues::{QueueGrant, QueueQos};
use serde_json::Value;

use super::dereference::{AgentQueues, GrantInputs, ResolvedAllocation, name};
use super::grant::{ClaimState, Claimant, Verdict, decide};
use super::lifecycle::{Lifecycle, granted, lifecycle};
use super::status::{self, StatusUpdate};
use super::validate::validate;
use crate::framework::finalizers::{Finalizer, has, patch};
use crate::framework::refusal::Refusal;
use crate::reconcile::names::QUEUES_FINALIZER;

/// A single write to one allocation.
#[derive(Clone, Debug)]
pub struct PendingWrite {
    /// The allocation as it was when the write was decided.
    pub object: Arc<GPUQueueAllocation>,
    pub operation: Operation,
    /// The new status; `None` for a write of finalizers.
    pub update: Option<StatusUpdate>,
}

/// The kind of write to an allocation, in the order within a pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Operation {
    /// Mark the grant as ending or as released.
    EndGrant,
    /// Remove the finalizer from the object.
    RemoveFinalizer,
    /// Add the finalizer to the object.
    AddFinalizer,
    /// Write the grant to the status.
    Grant,
    /// Update the status without changing the grant.
    UpdateStatus,
}

/// An allocation while its grant is decided.
#[derive(Clone, Debug)]
pub struct Candidate<'a> {
    pub of: &'a ResolvedAllocation,
    pub refused: Option<Refusal>,
    /// Queue pairs that the agent holds, or may hold.
    pub kept: Option<AgentQueues>,
    /// Its state, derived from the stored objects.
    pub lifecycle: Lifecycle,
}

/// A pass over the allocations of a node.
#[derive(Debug)]
pub struct Pass {
    /// The objects of the node, including the results of the pass.
    pub inputs: GrantInputs,
    /// Uids of allocations to which this process added the finalizer, and whose grant it has not tried to write since.
    pub fresh_finalizers: BTreeSet<String>,
    now: Time,
    /// Writes that succeeded, by uid.
    written: BTreeSet<(String, Operation)>,
    /// Uids of allocations of which the API server has rejected a write.
    unwritable: BTreeSet<String>,
}

impl Pass {
    /// Begins a pass with the finalizers that this process has added.
    pub fn new(inputs: GrantInputs, fresh_finalizers: BTreeSet<String>, now: Time) -> Pass {
        Pass { inputs, fresh_finalizers, now, written: BTreeSet::new(), unwritable: BTreeSet::new() }
    }

    /// Returns the next write; `None` at the end of the pass.
    pub fn next_write(&self) -> Option<PendingWrite> {
        let candidates: Vec<Candidate<'_>> =
            self.inputs.allocations.iter().map(|of| self.candidate(of)).collect();
        let claimants: Vec<Claimant> = candidates.iter().map(|candidate| self.claimant(candidate)).collect();
        let verdicts = decide(&self.inputs.lenders, &claimants);
        let can_grant = !candidates.iter().any(|candidate| {
            candidate.lifecycle == Lifecycle::Pending && self.has_foreign_finalizer(&candidate.of.object)
        });
        let due = candidates.iter().zip(&verdicts);
        let due = due.filter_map(|(candidate, verdict)| self.write_of(candidate, verdict, can_grant));
        // An unused finalizer of this process is removed last: others' rejected writes may leave pairs for its grant.
        due.min_by_key(|write| {
            let is_fresh = self.fresh_finalizers.contains(&uid_of(&write.object));
            (is_fresh && write.operation == Operation::RemoveFinalizer, write.operation)
        })
    }

    /// Records that a write succeeded. `result` is the new object; `None` if the object is gone.
    pub fn record_success(&mut self, write: &PendingWrite, result: Option<GPUQueueAllocation>) {
        let uid = uid_of(&write.object);
        match write.operation {
            Operation::AddFinalizer => self.fresh_finalizers.insert(uid.clone()),
            _ => self.fresh_finalizers.remove(&uid),
        };
        // With its last finalizer, a deleted object is gone.
        let exists = |object: &GPUQueueAllocation| {
            object.metadata.deletion_timestamp.is_none() || !object.finalizers().is_empty()
        };
        let allocations = &mut self.inputs.allocations;
        match result.filter(exists) {
            None => allocations.retain(|of| uid_of(&of.object) != uid),
            Some(object) => {
                if let Some(of) = allocations.iter_mut().find(|of| uid_of(&of.object) == uid) {
                    of.object = Arc::new(object);
                }
            }
        }
        self.written.insert((uid, write.operation));
    }

    /// Records that the API server rejected a write, or did not answer. After the latter, the pass must end.
    pub fn record_failure(&mut self, write: &PendingWrite) {
        self.fresh_finalizers.remove(&uid_of(&write.object));
        self.unwritable.insert(uid_of(&write.object));
    }

    fn is_unwritable(&self, object: &GPUQueueAllocation) -> bool {
        self.unwritable.contains(&uid_of(object))
    }

    fn has_written(&self, object: &GPUQueueAllocation, operation: Operation) -> bool {
        self.written.contains(&(uid_of(object), operation))
    }

    /// Whether another process may have added the finalizer.
    fn has_foreign_finalizer(&self, object: &GPUQueueAllocation) -> bool {
        has(object, QUEUES_FINALIZER) && !self.fresh_finalizers.contains(&uid_of(object))
    }

    fn candidate<'a>(&self, of: &'a ResolvedAllocation) -> Candidate<'a> {
        let kept = self.inputs.agent_queues(&of.object);
        let lifecycle = lifecycle(&of.object, kept.as_ref(), &self.inputs, &self.now);
        Candidate { of, refused: validate(of, &self.inputs), kept, lifecycle }
    }

    fn claimant(&self, candidate: &Candidate<'_>) -> Claimant {
        let (object, spec) = (&candidate.of.object, &candidate.of.object.spec);
        let share = |grant: &QueueGrant| (grant.serial.to_string(), grant.queue_pairs);
        let made = object.metadata.creation_timestamp.as_ref().map_or(i64::MAX, |made| made.0.as_second());
        let is_unwritable = self.is_unwritable(object);
        Claimant {
            name: name(object),
            made,
            pool: spec.pool_ref.name.to_string(),
            pairs: spec.queue_pairs,
            // Like a guaranteed grant, one whose end cannot be written is not preempted.
            qos: if is_unwritable { QueueQos::Guaranteed } else { spec.qos },
            isolation: spec.isolation,
            state: match &candidate.lifecycle {
                Lifecycle::Pending if candidate.refused.is_some() || is_unwritable => ClaimState::Inactive,
                Lifecycle::Pending => ClaimState::Pending,
                Lifecycle::Released => ClaimState::Inactive,
                Lifecycle::Granted => ClaimState::Granted,
                Lifecycle::Ending(_) | Lifecycle::Deleting => ClaimState::Ending,
            },
            shares: granted(object).iter().map(share).collect(),
        }
    }

    /// Returns the next write to one allocation. There is one at a time because each write changes the
    /// `resourceVersion`.
    fn write_of(
        &self,
        candidate: &Candidate<'_>,
        verdict: &Verdict,
        can_grant: bool,
    ) -> Option<PendingWrite> {
        let object = &candidate.of.object;
        let is_deleting = object.metadata.deletion_timestamp.is_some();
        let gets_grant = matches!(verdict, Verdict::Granted(_));
        let has_grant = matches!(candidate.lifecycle, Lifecycle::Granted | Lifecycle::Ending(_));
        let needs_finalizer = has_grant || (gets_grant && !self.has_foreign_finalizer(object));
        let operation = match has(&**object, QUEUES_FINALIZER) {
            true if !needs_finalizer => Operation::RemoveFinalizer,
            false if needs_finalizer && !is_deleting => Operation::AddFinalizer,
            _ if gets_grant => Operation::Grant,
            _ => match (&candidate.lifecycle, verdict) {
                (Lifecycle::Ending(_), _) | (_, Verdict::Preempted { .. }) => Operation::EndGrant,
                _ => Operation::UpdateStatus,
            },
        };
        let is_due = match operation {
            Operation::AddFinalizer => can_grant || has_grant,
            Operation::Grant => can_grant && !self.has_written(object, Operation::AddFinalizer),
            // The report of the agent in the inputs is older than a grant of this pass.
            Operation::EndGrant => !self.has_written(object, Operation::Grant),
            _ => true,
        };
        if !is_due || self.is_unwritable(object) || self.has_written(object, operation) {
            return None;
        }
        let update = match operation {
            Operation::AddFinalizer | Operation::RemoveFinalizer => None,
            _ => Some(status::compute(candidate, verdict, &self.inputs, &self.now)?),
        };
        Some(PendingWrite { object: Arc::clone(object), operation, update })
    }
}

impl PendingWrite {
    /// Returns the body of the write as a merge patch. It has the `resourceVersion`, so the API server rejects it if the
    /// object has changed.
    pub fn body(&self) -> Value {
        let finalizer = match self.operation {
            Operation::AddFinalizer => Finalizer::Present,
            _ => Finalizer::Absent,
        };
        let finalizers = || patch(&*self.object, QUEUES_FINALIZER, finalizer);
        self.update.as_ref().map_or_else(finalizers, |update| update.body(&self.object))
    }
}

fn uid_of(object: &GPUQueueAllocation) -> String {
    object.uid().unwrap_or_default()
}
