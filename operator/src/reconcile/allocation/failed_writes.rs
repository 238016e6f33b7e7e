//! Tracks failed writes that make parts of a decision invalid. Pure.
//!
//! A failed release blocks only grants that need its controllers. After a concurrent write by another client,
//! the decision's inputs are unknown: it grants nothing more, and the next reconcile decides again.

use std::collections::BTreeSet;

use super::build::{Operation, PendingWrite};

/// Failed writes of one pass.
#[derive(Debug, Default)]
pub struct FailedWrites {
    /// Serial numbers of controllers whose release failed or is not written yet.
    blocked: BTreeSet<String>,
    /// Whether an object changed after the decision.
    outdated: bool,
}

/// Why a write failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WriteFailure {
    /// The API server rejects the write.
    Rejected,
    /// The object has changed, or the write may still take effect.
    Conflict,
}

impl FailedWrites {
    /// Records a failed write.
    pub fn record_failure(&mut self, step: &PendingWrite, failure: WriteFailure) {
        self.outdated |= failure == WriteFailure::Conflict;
        self.block_controllers(step);
    }

    /// Blocks grants on the controllers that this write would have released.
    pub fn block_controllers(&mut self, step: &PendingWrite) {
        let Operation::EndGrant(update) = &step.operation else { return };
        if update.status.allocations.is_empty() {
            let grants = step.object.status.iter().flat_map(|status| &status.allocations);
            self.blocked.extend(grants.map(|grant| grant.serial.to_string()));
        }
    }

    /// Whether a write may still be executed.
    pub fn allows(&self, step: &PendingWrite) -> bool {
        match &step.operation {
            Operation::Grant(update) => {
                let mut grants = update.status.allocations.iter();
                !self.outdated && grants.all(|grant| !self.blocked.contains(grant.serial.as_str()))
            }
            _ => true,
        }
    }
}
