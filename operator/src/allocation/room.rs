//! Room that was decided about and that is not what the decision takes it for, since something could not be written. Pure.
//!
//! One that cannot be written stops nobody else, but those who need its room. Where somebody else has written meanwhile nobody knows who needs
//! what: then nothing more is granted by this decision, and another one is made.

use std::collections::BTreeSet;

use super::build::{Step, What};

/// What is not so, of what a decision was made by.
#[derive(Debug, Default)]
pub struct Room {
    /// Serial numbers of controllers with room that was to be given back, and is not.
    held: BTreeSet<String>,
    /// Whether something is stored that the decision did not know.
    outdated: bool,
}

/// Why something was not written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Failure {
    /// The API server does not take it.
    Refused,
    /// Somebody else has written meanwhile, or it may be written still.
    Outdated,
}

impl Room {
    /// Something was not written.
    pub fn failed(&mut self, step: &Step, failure: Failure) {
        self.outdated |= failure == Failure::Outdated;
        self.waits(step);
    }

    /// Something is not written yet: what it would make free is not.
    pub fn waits(&mut self, step: &Step) {
        let What::GiveBack(said) = &step.what else { return };
        if said.status.allocations.is_empty() {
            let grants = step.object.status.iter().flat_map(|status| &status.allocations);
            self.held.extend(grants.map(|grant| grant.serial.to_string()));
        }
    }

    /// Whether something may be written still.
    pub fn allows(&self, step: &Step) -> bool {
        match &step.what {
            What::Grant(said) => {
                let mut grants = said.status.allocations.iter();
                !self.outdated && grants.all(|grant| !self.held.contains(grant.serial.as_str()))
            }
            _ => true,
        }
    }
}
