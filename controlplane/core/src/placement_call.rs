//! A placement request: which nodes receive further durable replicas of some blocks.
//!
//! The decisions count only if the member was certain of its place throughout. Then the chosen nodes are charged
//! until their next report; otherwise all keys are left to other members. The rules are in
//! [`reprise_policy::placement`].

use reprise_policy::placement::{
    PlacementBatch, PlacementDecision, PlacementNode, PlacementReason, ReplicaLocation,
};
use reprise_policy::{BlockKey, NodeId};

use crate::node_table::NodeTable;

/// One placement request; see the module.
#[derive(Debug)]
pub struct PlacementCall {
    batch: PlacementBatch,
    /// `None` for keys of other members.
    decisions: Vec<Option<PlacementDecision>>,
}

/// Whether a member was certain of its place while it answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PlaceCertainty {
    /// It was, all the time.
    Certain,
    /// It was not, or not all the time.
    Uncertain,
}

impl PlacementCall {
    /// Begins a request of a holder for blocks of this slot size. `nodes` are the live nodes that serve peers.
    pub fn new(
        holder: NodeId,
        reason: PlacementReason,
        slot_bytes: u64,
        nodes: Vec<PlacementNode>,
    ) -> PlacementCall {
        PlacementCall { batch: PlacementBatch::new(holder, reason, slot_bytes, nodes), decisions: Vec::new() }
    }

    /// Decides for the next key with its replicas; `None` if another member owns it.
    pub fn visit(&mut self, key: &BlockKey, replicas: Option<&[ReplicaLocation]>) {
        self.decisions.push(replicas.map(|replicas| self.batch.place(key, replicas)));
    }

    /// Returns the decisions for all `keys`, and the bytes to charge to nodes ([`charge`]).
    pub fn end(
        self,
        keys: usize,
        certainty: PlaceCertainty,
    ) -> (Vec<Option<PlacementDecision>>, Vec<(NodeId, u64)>) {
        match certainty {
            PlaceCertainty::Certain => (self.decisions, self.batch.charges().collect()),
            PlaceCertainty::Uncertain => (vec![None; keys], Vec::new()),
        }
    }
}

/// Adds the bytes placed on each node to its usage until its next report.
pub fn charge(nodes: &mut NodeTable, charges: &[(NodeId, u64)]) {
    charges.iter().for_each(|(node, bytes)| nodes.place(*node, *bytes));
}

#[cfg(test)]
mod tests {
    use reprise_policy::NodeMode;
    use reprise_policy::placement::PlacementDecision;
    use reprise_policy::routing::{Domain, LoadHint};

    use super::*;

    fn call() -> PlacementCall {
        let node = PlacementNode {
            node: NodeId(2),
            mode: NodeMode::Active,
            domain: Domain::default(),
            capacity: 1 << 30,
            used: 0,
            load: LoadHint::default(),
        };
        let mut call = PlacementCall::new(NodeId(1), PlacementReason::Drain, 1 << 10, vec![node]);
        call.visit(&BlockKey([1; 16]), Some(&[]));
        call.visit(&BlockKey([2; 16]), None);
        call
    }

    #[test]
    fn charges_the_targets_of_certain_decisions_only() {
        let (decisions, charges) = call().end(2, PlaceCertainty::Certain);
        assert_eq!(decisions, [Some(PlacementDecision::On(NodeId(2))), None]);
        assert_eq!(charges, [(NodeId(2), 1 << 10)]);
        assert_eq!(call().end(2, PlaceCertainty::Uncertain), (vec![None, None], Vec::new()));
    }
}
