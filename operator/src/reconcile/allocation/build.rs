//! Computes the writes for a node's allocations, and their order. Pure.
//!
//! Order: finalizers for allocations that will be granted, releases, other status updates, removal of unused
//! finalizers, grants. An operator that is killed between two writes leaves pairs unused but never grants
//! them twice.
//!
//! * A grant is written in a later pass than its finalizer. Until then nothing is preempted for it, and pairs
//!   that the preemption would free are not granted to others. An allocation whose finalizer was rejected in
//!   this pass is skipped ([`GrantInputs::skipped`]): it requests nothing, so others can get its pairs.
//!   Allocations that have the finalizer but fit only together with a skipped one keep the finalizer.
//!   Otherwise they would gain and lose it in alternation.
//! * A former leader may be about to grant to an allocation that has the finalizer but no grant. A finalizer
//!   that this process did not add ([`GrantInputs::fresh_finalizers`]) is therefore removed, or a status is
//!   written, before anything is granted on the node; see [`super::apply`].

use std::collections::BTreeSet;
use std::sync::Arc;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::ResourceExt;
use reprise_crds::GPUQueueAllocation;

use super::dereference::{GrantInputs, ResolvedAllocation, name};
use super::failed_writes::FailedWrites;
use super::grant::{ClaimState, Claimant, QueueState, Share, Verdict, decide};
use super::lifecycle::{Lifecycle, lifecycle};
use super::status::{self, StatusUpdate};
use super::validate::validate;
use crate::framework::refusal::Refusal;
use crate::reconcile::names::QUEUES_FINALIZER;

/// A single write to one allocation.
#[derive(Clone, Debug)]
pub struct PendingWrite {
    /// The allocation as it was when the write was decided.
    pub object: Arc<GPUQueueAllocation>,
    /// The kind of write.
    pub operation: Operation,
}

/// The kind of write to an allocation.
#[derive(Clone, Debug, PartialEq)]
pub enum Operation {
    /// Add the finalizer to the object.
    AddFinalizer,
    /// Mark the grant as ending or as released.
    EndGrant(StatusUpdate),
    /// Update the status without changing the grant.
    UpdateStatus(StatusUpdate),
    /// Remove the finalizer from the object.
    RemoveFinalizer,
    /// Write the grant to the status.
    Grant(StatusUpdate),
}

/// An allocation while its grant is decided.
#[derive(Clone, Debug)]
pub struct Candidate<'a> {
    /// The allocation and its references.
    pub of: &'a ResolvedAllocation,
    /// Set if the spec is rejected: why.
    pub refused: Option<Refusal>,
    /// Its state, derived from the stored objects.
    pub lifecycle: Lifecycle,
}

/// Returns all pending writes of a node, in the order in which they are executed.
pub fn pending_writes(inputs: &GrantInputs, now: &Time) -> Vec<PendingWrite> {
    let candidates: Vec<Candidate<'_>> =
        inputs.allocations.iter().map(|of| candidate(of, inputs, now)).collect();
    let claimants: Vec<Claimant> = candidates.iter().map(|candidate| claimant(candidate, inputs)).collect();
    let verdicts = decide(&inputs.lenders, &claimants);
    let is_candidate = |(candidate, _): &(&Candidate<'_>, &Verdict)| !inputs.is_skipped(&candidate.of.object);
    let decided = candidates.iter().zip(&verdicts).filter(is_candidate);
    let due = decided
        .filter_map(|(candidate, verdict)| Some((verdict, next_write(candidate, verdict, inputs, now)?)));
    let mut steps = without_premature(due.collect());
    steps.sort_by_key(|step| step.operation.rank());
    steps
}

/// Removes preemptions in favor of allocations that cannot be granted in this pass, and grants that need the
/// pairs which these preemptions would free.
fn without_premature(mut due: Vec<(&Verdict, PendingWrite)>) -> Vec<PendingWrite> {
    let is_premature = |verdict: &Verdict, step: &PendingWrite| {
        matches!(verdict, Verdict::Granted(_)) && !matches!(step.operation, Operation::Grant(_))
    };
    let premature = due.iter().filter(|(verdict, step)| is_premature(verdict, step));
    let premature: BTreeSet<String> = premature.map(|(_, step)| name(&step.object)).collect();
    let is_for_premature =
        |verdict: &Verdict| matches!(verdict, Verdict::Preempted { by } if premature.contains(by));
    let mut failed = FailedWrites::default();
    for (_, step) in due.iter().filter(|(verdict, _)| is_for_premature(verdict)) {
        failed.block_controllers(step);
    }
    due.retain(|(verdict, step)| !is_for_premature(verdict) && failed.allows(step));
    due.into_iter().map(|(_, step)| step).collect()
}

fn candidate<'a>(of: &'a ResolvedAllocation, inputs: &GrantInputs, now: &Time) -> Candidate<'a> {
    let refused = validate(of, inputs);
    let lifecycle = lifecycle(&of.object, inputs, refused.as_ref(), now);
    Candidate { of, refused, lifecycle }
}

fn claimant(candidate: &Candidate<'_>, inputs: &GrantInputs) -> Claimant {
    let (object, spec) = (&candidate.of.object, &candidate.of.object.spec);
    let granted = object.status.iter().flat_map(|status| &status.allocations);
    let shares: Vec<Share> =
        granted.map(|grant| Share { serial: grant.serial.to_string(), pairs: grant.queue_pairs }).collect();
    let made = object.metadata.creation_timestamp.as_ref().map_or(i64::MAX, |made| made.0.as_second());
    Claimant {
        name: candidate.of.name(),
        made,
        pool: spec.pool_ref.name.to_string(),
        pairs: spec.queue_pairs,
        qos: spec.qos,
        isolation: spec.isolation,
        state: match &candidate.lifecycle {
            Lifecycle::Refused | Lifecycle::Ended(_) | Lifecycle::Released => ClaimState::Inactive,
            Lifecycle::Pending if inputs.is_skipped(object) => ClaimState::Inactive,
            Lifecycle::Pending => ClaimState::Pending,
            Lifecycle::Granted { kept: Some(_) } => ClaimState::Granted { shares, queues: QueueState::InUse },
            Lifecycle::Granted { kept: None } => ClaimState::Granted { shares, queues: QueueState::None },
            Lifecycle::Ending(..) | Lifecycle::Deleting => ClaimState::Ending(shares),
        },
    }
}

/// Returns the next write to one allocation. There is one at a time because each write changes the
/// `resourceVersion`.
fn next_write(
    candidate: &Candidate<'_>,
    verdict: &Verdict,
    inputs: &GrantInputs,
    now: &Time,
) -> Option<PendingWrite> {
    let object = &candidate.of.object;
    let has = object.finalizers().iter().any(|one| one == QUEUES_FINALIZER);
    let is_deleting = object.metadata.deletion_timestamp.is_some();
    let is_granted = matches!(verdict, Verdict::Granted(_));
    let needs_finalizer =
        is_granted || matches!(candidate.lifecycle, Lifecycle::Granted { .. } | Lifecycle::Ending(..));
    let operation = if needs_finalizer && !has && !is_deleting {
        Operation::AddFinalizer
    } else if is_granted && !inputs.has_fresh_finalizer(object) {
        Operation::RemoveFinalizer
    } else if let Some(update) = status::compute(candidate, verdict, inputs, now) {
        match (&candidate.lifecycle, verdict) {
            (_, Verdict::Granted(_)) => Operation::Grant(update),
            (_, Verdict::Preempted { .. }) | (Lifecycle::Ending(..) | Lifecycle::Ended(_), _) => {
                Operation::EndGrant(update)
            }
            _ => Operation::UpdateStatus(update),
        }
    } else if has && !needs_finalizer && !waits_for_others(candidate, inputs) {
        Operation::RemoveFinalizer
    } else {
        return None;
    };
    Some(PendingWrite { object: Arc::clone(object), operation })
}

/// Whether a pending allocation may fit as soon as a skipped allocation can be written.
fn waits_for_others(candidate: &Candidate<'_>, inputs: &GrantInputs) -> bool {
    candidate.lifecycle == Lifecycle::Pending && !inputs.skipped.is_empty()
}

impl Operation {
    /// Position among the writes of one pass.
    fn rank(&self) -> u8 {
        match self {
            Operation::AddFinalizer => 0,
            Operation::EndGrant(_) => 1,
            Operation::UpdateStatus(_) => 2,
            Operation::RemoveFinalizer => 3,
            Operation::Grant(_) => 4,
        }
    }
}
