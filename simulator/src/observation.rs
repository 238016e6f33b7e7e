//! What steps of processes leave for the checks.
//!
//! A step knows its own process and the environment. It notes what the checks need, and the checks run after the step,
//! with the whole simulation at hand.

use std::collections::BTreeMap;
use std::sync::Arc;

use reprise_policy::{BlockKey, NodeId};

use crate::environment::Environment;
use crate::messages::{LookupAnswer, PlacementAnswer, PlacementRequest};
use crate::simulation::Simulation;
use crate::store::Revision;
use crate::{answer_audit, budgets, placement_answers};

/// An observation of a step.
#[derive(Debug)]
pub(crate) enum Observation {
    /// The directory of a member has changed.
    DirectoryChanged { member: usize },
    /// A member knows the members at a revision of the store, with their incarnations.
    MembersListed { revision: Revision, members: BTreeMap<usize, Revision> },
    /// A member has answered a lookup.
    LookupAnswered { member: usize, keys: Vec<BlockKey>, requester: Option<NodeId>, answer: LookupAnswer },
    /// A member has answered a placement request.
    PlacementAnswered { member: usize, request: Arc<PlacementRequest>, answer: Box<PlacementAnswer> },
    /// A member has answered the report of a node.
    ReportAnswered { member: usize },
    /// A member has updated its ledgers.
    LedgersUpdated { member: usize },
    /// The store has handled a request.
    StoreRequested,
    /// The store has lost its data.
    StoreWiped,
}

impl Environment {
    /// Notes an observation, for the checks after the step.
    pub(crate) fn observe(&mut self, observation: Observation) {
        self.observations.push(observation);
    }
}

/// Runs the checks of all observations since the last call.
pub(crate) fn check(simulation: &mut Simulation) {
    for observation in std::mem::take(&mut simulation.env.observations) {
        check_one(simulation, observation);
    }
}

fn check_one(simulation: &mut Simulation, observation: Observation) {
    match observation {
        Observation::DirectoryChanged { member } => answer_audit::directory(simulation, member),
        Observation::MembersListed { revision, members } => {
            answer_audit::list(simulation, revision, &members);
        }
        Observation::LookupAnswered { member, keys, requester, answer } => {
            answer_audit::lookup(simulation, member, (&keys, requester), &answer);
        }
        Observation::PlacementAnswered { member, request, answer } => {
            placement_answers::check(simulation, member, &request, &answer);
        }
        Observation::ReportAnswered { member } => answer_audit::report(simulation, member),
        Observation::LedgersUpdated { member } => budgets::note_given_up(simulation, member),
        Observation::StoreRequested => budgets::note_budgets(simulation),
        Observation::StoreWiped => budgets::clear_bounds(simulation),
    }
}
