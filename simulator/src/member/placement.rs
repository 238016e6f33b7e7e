//! A member's answers about placement, modes and moves.
//!
//! As `controlplane/src/placement/{places,reports}.rs` and `cluster/node_selection.rs`, whose rules (node
//! selection, rebalancing, the choice of a target) are production code.

use reprise_agent_core::directives::REBALANCER_SLOT;
use reprise_agent_core::effect::PlaceReason;
use reprise_agent_core::event::{Move, Placement};
use reprise_controlplane_core::{ModeRecord, node_selection};
use reprise_policy::placement::{
    PlacementBatch as Choice, PlacementDecision, PlacementNode, PlacementReason, ReplicaLocation,
};
use reprise_policy::{Epoch, NodeId, Tick, Tier};

use super::{Member, member_name};
use crate::messages::{Direction, PlacementAnswer, PlacementRequest};
use crate::setup::Variant;

/// Returns the name with which a node registers.
pub(crate) fn node_name(node: usize) -> String {
    format!("n{node}")
}

impl Member {
    /// Returns the targets for further durable replicas; `None`: the holder's registration is not the newest.
    pub(crate) fn place(&mut self, now: Tick, request: &PlacementRequest) -> Option<PlacementAnswer> {
        let PlacementRequest { holder, epoch, ref keys, slot_bytes, reason } = *request;
        if !self.members.is_registered(holder, epoch) {
            return None;
        }
        let map_epoch = self.map().epoch();
        if self.certain_map(now).is_none() || self.slots_epoch != map_epoch {
            let (answers, elsewhere) =
                (vec![Placement::NoCapacity; keys.len()], (0..keys.len() as u32).collect());
            return Some(PlacementAnswer { answers, elsewhere, map_epoch });
        }
        let reason = match reason {
            PlaceReason::Hot => PlacementReason::Hot,
            PlaceReason::Drain => PlacementReason::Drain,
            PlaceReason::Move(to) => PlacementReason::Move(to),
        };
        let mut choice = Choice::new(holder, reason, slot_bytes, self.placement_nodes(now));
        let (mut answers, mut elsewhere) = (Vec::new(), Vec::new());
        for (at, key) in (0..).zip(keys) {
            let holdings = self.directory.holders(key).map(|all| all.map(|holding| self.seen(holding)));
            let holdings: Option<Vec<ReplicaLocation>> = holdings.map(Iterator::collect);
            answers.push(match holdings.map(|holdings| choice.place(key, &holdings)) {
                Some(PlacementDecision::Enough) => Placement::Enough,
                Some(PlacementDecision::On(node)) => Placement::To(node),
                Some(PlacementDecision::NoCapacity) => Placement::NoCapacity,
                None => {
                    elsewhere.push(at);
                    Placement::NoCapacity
                }
            });
        }
        choice.charges().for_each(|(node, bytes)| self.members.place(node, bytes));
        Some(PlacementAnswer { answers, elsewhere, map_epoch })
    }

    fn seen(&self, holding: ReplicaLocation) -> ReplicaLocation {
        match self.variant {
            Variant::DramCountsAsDurable => ReplicaLocation { tier: Tier::Nvme, ..holding },
            _ => holding,
        }
    }

    fn placement_nodes(&mut self, now: Tick) -> Vec<PlacementNode> {
        self.expire(now);
        node_selection::placement_nodes(&self.members, &self.modes)
    }

    /// Returns the instructions for a node, in answer to its report.
    pub(crate) fn direct(&mut self, now: Tick, node: NodeId) -> Option<Direction> {
        let (record, _) = self.members.get(node)?;
        let set = self.modes.of(&record.name);
        self.members.record_sent_mode(node, set.revision);
        Some(Direction { set, given: self.move_for(now, node) })
    }

    /// Decides about moves; only the owner of the first slot does.
    fn move_for(&mut self, now: Tick, node: NodeId) -> Option<Move> {
        let view = self.certain_map(now)?;
        let decides = view.map.owner(REBALANCER_SLOT) == view.map.position(&member_name(self.name));
        if !decides {
            return None;
        }
        let nodes = self.placement_nodes(now);
        let chosen = self.moves.move_for(now, node, || nodes)?;
        Some(Move { to: chosen.to, bytes: chosen.bytes })
    }

    /// Handles a node's mode from the store.
    pub(crate) fn learn_mode(&mut self, node: usize, set: ModeRecord) {
        let known = self.reported_modes.entry(node).or_default();
        if set.revision > known.revision {
            *known = set;
        }
        if self.variant != Variant::ModesIgnored {
            self.modes.set(&node_name(node), set);
        }
    }

    /// Returns the host of a node that has a record.
    pub(crate) fn host_of(&self, node: NodeId) -> Option<usize> {
        self.hosts.get(&node).copied()
    }

    /// Returns the newest registration of a node that this member knows.
    pub(crate) fn epoch_of(&self, node: NodeId) -> Option<Epoch> {
        self.members.get(node).map(|(record, _)| record.epoch)
    }

    /// Reports whether the agent of a host has a record.
    pub(crate) fn knows_host(&self, host: usize) -> bool {
        self.hosts.values().any(|known| *known == host)
    }
}
