//! A member's answers about placement, modes and moves. The rules are production code: the request
//! ([`PlacementCall`]), the choice of a target, modes ([`node_selection`]) and rebalancing. The order of
//! the steps follows `controlplane/src/placement/places.rs`.

use reprise_agent_core::event::{Move, Placement};
use reprise_controlplane_core::placement_call::{self, PlaceCertainty, PlacementCall};
use reprise_controlplane_core::{ModeRecord, node_selection};
use reprise_policy::placement::{PlacementDecision, PlacementNode, ReplicaLocation};
use reprise_policy::{Epoch, NodeId, Tick, Tier};

use super::{Member, machine_of};
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
        if !self.nodes.is_registered(holder, epoch) {
            return None;
        }
        let map_epoch = self.map().epoch();
        let mut call = PlacementCall::new(holder, reason, slot_bytes, self.placement_nodes(now));
        let certainty = if self.answers(now) { PlaceCertainty::Certain } else { PlaceCertainty::Uncertain };
        for key in keys.iter().filter(|_| certainty == PlaceCertainty::Certain) {
            let replicas = self.directory.holders(key).map(|all| all.map(|replica| self.seen(replica)));
            let replicas: Option<Vec<ReplicaLocation>> = replicas.map(Iterator::collect);
            call.visit(key, replicas.as_deref());
        }
        let (decisions, charges) = call.end(keys.len(), certainty);
        placement_call::charge(&mut self.nodes, &charges);
        let elsewhere = (0..).zip(&decisions).filter(|(_, decision)| decision.is_none()).map(|(at, _)| at);
        let answer = |decision: &Option<PlacementDecision>| match decision {
            Some(PlacementDecision::Enough) => Placement::Enough,
            Some(PlacementDecision::On(node)) => Placement::To(*node),
            Some(PlacementDecision::NoCapacity) | None => Placement::NoCapacity,
        };
        let (answers, elsewhere) = (decisions.iter().map(answer).collect(), elsewhere.collect());
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
        node_selection::placement_nodes(&self.nodes, &self.modes)
    }

    /// Returns the instructions for a node, in answer to its report.
    pub(crate) fn direct(&mut self, now: Tick, node: NodeId) -> Option<Direction> {
        let set = node_selection::send_mode(&mut self.nodes, &self.modes, node)?;
        Some(Direction { set, given: self.move_for(now, node) })
    }

    /// Decides about moves; only the owner of the first slot does.
    fn move_for(&mut self, now: Tick, node: NodeId) -> Option<Move> {
        self.with_place(now, |place, _| place.decides_moves()).filter(|decides| *decides)?;
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
        self.nodes.get(node).map(|(record, _)| machine_of(record))
    }

    /// Returns the newest registration of a node that this member knows.
    pub(crate) fn epoch_of(&self, node: NodeId) -> Option<Epoch> {
        self.nodes.get(node).map(|(record, _)| record.epoch)
    }

    /// Reports whether the agent of a host has a record.
    pub(crate) fn knows_host(&self, host: usize) -> bool {
        self.nodes.iter().any(|(record, _)| machine_of(record) == host)
    }
}
