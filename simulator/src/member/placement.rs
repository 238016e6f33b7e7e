//! A member's answers about placement, and the modes of nodes. The rules and their order are production code: the request
//! ([`agent_calls`]), the choice of a target, and modes ([`reprise_controlplane_core::node_selection`]).
//!
//! The outputs are carried out in the order of `controlplane/src/placement/places.rs`.

use reprise_agent_core::event::Placement;
use reprise_controlplane_core::agent_calls::{self, PlacementHead};
use reprise_controlplane_core::{AnswerMap, ModeRecord};
use reprise_policy::placement::{PlacementDecision, ReplicaLocation};
use reprise_policy::{Epoch, NodeId, Tick, Tier};

use super::{Member, machine_of};
use crate::messages::{PlacementAnswer, PlacementRequest};
use crate::setup::Variant;

/// Returns the name with which a node registers.
pub(crate) fn node_name(node: usize) -> String {
    format!("n{node}")
}

impl Member {
    /// Returns the targets for further durable replicas; `None`: the holder's registration is not the newest.
    pub(crate) fn place(&mut self, now: Tick, request: &PlacementRequest) -> Option<PlacementAnswer> {
        let PlacementRequest { holder, epoch, ref keys, slot_bytes, reason } = *request;
        let head = PlacementHead { holder: (holder, epoch), reason, slot_bytes };
        let mut call = agent_calls::begin_placement(self, now, head)?;
        let map = AnswerMap::begin(self.answerable_map(now));
        for key in keys.iter().filter(|_| map.is_some()) {
            let replicas = self.directory.holders(key).map(|all| all.map(|replica| self.seen(replica)));
            let replicas: Option<Vec<ReplicaLocation>> = replicas.map(Iterator::collect);
            call.visit(key, replicas.as_deref());
        }
        let map_epoch = map.and_then(|map| map.end(self.answerable_map(now)));
        let decisions = agent_calls::end_placement(self, call, keys.len(), map_epoch);
        let elsewhere = (0..).zip(&decisions).filter(|(_, decision)| decision.is_none()).map(|(at, _)| at);
        let answer = |decision: &Option<PlacementDecision>| match decision {
            Some(PlacementDecision::Enough) => Placement::Enough,
            Some(PlacementDecision::On(node)) => Placement::To(*node),
            Some(PlacementDecision::NoCapacity) | None => Placement::NoCapacity,
        };
        let (answers, elsewhere) = (decisions.iter().map(answer).collect(), elsewhere.collect());
        Some(PlacementAnswer { answers, elsewhere, map_epoch: map_epoch.unwrap_or(self.map().epoch()) })
    }

    fn seen(&self, holding: ReplicaLocation) -> ReplicaLocation {
        match self.variant {
            Variant::DramCountsAsDurable => ReplicaLocation { tier: Tier::Nvme, ..holding },
            _ => holding,
        }
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
