//! What steps of processes leave for the checks.
//!
//! A step knows its own process and the environment. It notes what the checks need, and the checks run after the step,
//! with the whole simulation at hand.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use reprise_agent_core::event::Grant;
use reprise_policy::{BlockKey, Epoch, NodeId, TenantId};

use crate::environment::Environment;
use crate::memory::Tag;
use crate::messages::{LookupAnswer, PlacementAnswer, PlacementRequest};
use crate::simulation::Simulation;
use crate::store::Revision;
use crate::{answer_audit, block_audit, budgets, placement_answers, timed};

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
    /// An engine commits this content under a key.
    BlockCommitted { key: BlockKey, content: Tag },
    /// An engine has read this content under a key.
    BlockRead { key: BlockKey, content: Tag },
    /// An agent has accepted these layers of a block from a peer.
    LayersReceived { key: BlockKey, layers: Vec<Tag> },
    /// An agent has applied the grant of a member to a registration; the tenant had another one before.
    GrantApplied { node: usize, tenant: TenantId, epoch: Epoch, before: Option<Grant> },
    /// An agent has dropped blocks because they were moved to one of these hosts.
    BlocksMoved { node: usize, hosts: BTreeSet<usize>, keys: Vec<BlockKey> },
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
        timed::count(&mut simulation.env, &observation);
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
        Observation::BlockCommitted { key, content } => block_audit::committed(simulation, key, content),
        Observation::BlockRead { key, content } => block_audit::read(simulation, &key, content),
        Observation::LayersReceived { key, layers } => block_audit::received(simulation, &key, &layers),
        Observation::GrantApplied { node, tenant, epoch, before } => {
            budgets::audit_order(simulation, (node, tenant), epoch, before);
        }
        Observation::BlocksMoved { node, hosts, keys } => block_audit::moved(simulation, node, &hosts, &keys),
    }
}
