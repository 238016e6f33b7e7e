//! Queue of the writes of one pass over a node, and the decisions after failures. Pure.
//!
//! An allocation whose finalizer is rejected is skipped for the rest of the pass. The pass decides again
//! without it before its first write that is not a finalizer. Others therefore get its pairs for as long as
//! it cannot be written. Each new decision skips at least one more allocation, so a pass decides at most once
//! per allocation. A pass writes the finalizer of an object at most once: the write changes the
//! `resourceVersion`, which only the next pass reads.

use std::collections::{BTreeSet, VecDeque};

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::ResourceExt;

use super::build::{Operation, PendingWrite, pending_writes};
use super::dereference::{GrantInputs, name};
use super::failed_writes::{FailedWrites, WriteFailure};

/// Pending writes of one pass over a node.
#[derive(Debug)]
pub struct WriteQueue {
    inputs: GrantInputs,
    now: Time,
    due: VecDeque<PendingWrite>,
    failed: FailedWrites,
    /// Uids of allocations whose finalizer this pass has added or tried to add.
    tried: BTreeSet<String>,
    /// Whether an allocation was skipped since the last decision.
    is_outdated: bool,
}

impl WriteQueue {
    /// Decides the writes of a node.
    pub fn new(inputs: GrantInputs, now: Time) -> WriteQueue {
        let (failed, tried) = (FailedWrites::default(), BTreeSet::new());
        let mut queue = WriteQueue { inputs, now, due: VecDeque::new(), failed, tried, is_outdated: false };
        queue.decide();
        queue
    }

    /// Returns the next write, if there is one.
    pub fn next_write(&mut self) -> Option<PendingWrite> {
        loop {
            if self.is_outdated
                && self.due.front().is_none_or(|write| write.operation != Operation::AddFinalizer)
            {
                self.decide();
            }
            let write = self.due.pop_front()?;
            if write.operation == Operation::AddFinalizer {
                self.tried.insert(write.object.uid().unwrap_or_default());
            }
            if self.failed.allows(&write) {
                return Some(write);
            }
            tracing::info!(
                allocation = name(&write.object),
                "grant delayed until other allocations are updated"
            );
        }
    }

    /// Records that a write failed, which may change or block later ones.
    pub fn record_failure(&mut self, write: &PendingWrite, failure: WriteFailure) {
        if write.operation == Operation::AddFinalizer && failure == WriteFailure::Rejected {
            self.inputs.skipped.insert(write.object.uid().unwrap_or_default());
            self.is_outdated = true;
        } else {
            self.failed.record_failure(write, failure);
        }
    }

    fn decide(&mut self) {
        self.is_outdated = false;
        let mut due = pending_writes(&self.inputs, &self.now);
        due.retain(|write| write.object.uid().is_none_or(|uid| !self.tried.contains(&uid)));
        self.due = due.into();
    }
}
