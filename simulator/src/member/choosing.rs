//! What a member says of places, modes and moves.
//!
//! As `controlplane/src/placement/{places,reports}.rs` and `cluster/choosing.rs`, whose rules (`choosing`, `rebalance`, the choice of a
//! target) are the production code.

use reprise_agent_core::directions::REBALANCER_SLOT;
use reprise_agent_core::effect::PlaceReason;
use reprise_agent_core::event::{Move, Placement};
use reprise_controlplane_core::{SetMode, choosing};
use reprise_policy::placement::{Holding, Placed, Placement as Choice, PlacementNode, PlacementReason};
use reprise_policy::{Epoch, NodeId, Tick, Tier};

use super::{Member, member_name};
use crate::messages::{Direction, PlaceAnswer, PlaceQuestion};
use crate::setup::Variant;

/// The name of a node, as it registers.
pub(crate) fn node_name(node: usize) -> String {
    format!("n{node}")
}

impl Member {
    /// Where further durable replicas go; `None`: the holder's registration is not the newest.
    pub(crate) fn place(&mut self, now: Tick, question: &PlaceQuestion) -> Option<PlaceAnswer> {
        let PlaceQuestion { holder, epoch, ref keys, slot_bytes, reason } = *question;
        if !self.members.is_registered(holder, epoch) {
            return None;
        }
        let map_epoch = self.view.map.epoch();
        if self.certain_map(now).is_none() || self.slots_epoch != map_epoch {
            let (answers, elsewhere) =
                (vec![Placement::Nowhere; keys.len()], (0..keys.len() as u32).collect());
            return Some(PlaceAnswer { answers, elsewhere, map_epoch });
        }
        let reason = match reason {
            PlaceReason::Hot => PlacementReason::Hot,
            PlaceReason::Drain => PlacementReason::Drain,
            PlaceReason::Move(to) => PlacementReason::Move(to),
        };
        let mut choice = Choice::new(holder, reason, slot_bytes, self.placement_nodes(now));
        let (mut answers, mut elsewhere) = (Vec::new(), Vec::new());
        for (at, key) in (0..).zip(keys) {
            let holdings = self.directory.holdings(key).map(|all| all.map(|holding| self.seen(holding)));
            let holdings: Option<Vec<Holding>> = holdings.map(Iterator::collect);
            answers.push(match holdings.map(|holdings| choice.place(key, &holdings)) {
                Some(Placed::Enough) => Placement::Enough,
                Some(Placed::On(node)) => Placement::To(node),
                Some(Placed::Nowhere) => Placement::Nowhere,
                None => {
                    elsewhere.push(at);
                    Placement::Nowhere
                }
            });
        }
        choice.charges().for_each(|(node, bytes)| self.members.place(node, bytes));
        Some(PlaceAnswer { answers, elsewhere, map_epoch })
    }

    fn seen(&self, holding: Holding) -> Holding {
        match self.variant {
            Variant::DramCountsAsDurable => Holding { tier: Tier::Nvme, ..holding },
            _ => holding,
        }
    }

    fn placement_nodes(&mut self, now: Tick) -> Vec<PlacementNode> {
        self.expire(now);
        choosing::placement_nodes(&self.members, &self.modes)
    }

    /// What a node is to do, in answer to its report.
    pub(crate) fn direct(&mut self, now: Tick, node: NodeId) -> Option<Direction> {
        let (record, _) = self.members.get(node)?;
        let set = self.modes.of(&record.name);
        self.members.tell_mode(node, set.revision);
        Some(Direction { set, given: self.move_of(now, node) })
    }

    /// One member decides about moves: the owner of the first slot.
    fn move_of(&mut self, now: Tick, node: NodeId) -> Option<Move> {
        let view = self.certain_map(now)?;
        let decides = view.map.owner(REBALANCER_SLOT) == view.map.position(&member_name(self.name));
        if !decides {
            return None;
        }
        let nodes = self.placement_nodes(now);
        let told = self.moves.move_of(now, node, || nodes)?;
        Some(Move { to: told.to, bytes: told.bytes })
    }

    /// The store says what a node is for.
    pub(crate) fn learn_mode(&mut self, node: usize, set: SetMode) {
        let known = self.told_modes.entry(node).or_default();
        if set.revision > known.revision {
            *known = set;
        }
        if self.variant != Variant::ModesUnfollowed {
            self.modes.set(&node_name(node), set);
        }
    }

    /// The machine of a node that has a record.
    pub(crate) fn host_of(&self, node: NodeId) -> Option<usize> {
        self.hosts.get(&node).copied()
    }

    /// The newest registration of a node that this member knows of.
    pub(crate) fn epoch_of(&self, node: NodeId) -> Option<Epoch> {
        self.members.get(node).map(|(record, _)| record.epoch)
    }

    /// Whether a machine's agent has a record.
    pub(crate) fn knows_host(&self, host: usize) -> bool {
        self.hosts.values().any(|known| *known == host)
    }
}
