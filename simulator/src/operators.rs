//! Operators: they say what nodes are for, while things break and afterwards.
//!
//! When faults have stopped, in some worlds one node is to leave: unless others refuse what it offers, it must become drained.
//! At the end all nodes are cordoned, so that nothing is placed any more.

use std::time::Duration;

use reprise_policy::{BlockKey, NodeMode};

use crate::network::Host;
use crate::node::Node;
use crate::placements::STALE_IN_CALM_MAX;
use crate::world::{Action, World};

/// A drain in calm that nobody refuses anything is over by then: rounds of a second, offers that are made again after 10 s,
/// and two walks 5 s apart.
const DRAIN_TIME_MAX: Duration = Duration::from_secs(60);
/// A drain that was refused something this short ago need not be over.
const REFUSED_WITHIN: Duration = Duration::from_secs(20);
/// It is given up after this, when somebody refuses.
const REFUSED_AFTER: Duration = Duration::from_secs(25);
const LOOK_EVERY: Duration = Duration::from_millis(500);

impl World {
    /// An operator wants a node to be something, of some member; the next wish follows after a while.
    pub(crate) fn operate(&mut self) {
        if self.calm {
            return;
        }
        let mean = self.setup.operate_every.as_micros() as u64;
        let delay = self.rng.micros(mean / 4..mean * 7 / 4);
        self.after(delay, Action::Operate);
        let (member, node) = (self.rng.below(self.members.len()), self.rng.below(self.nodes.len()));
        let mode = match self.rng.below(10) {
            0..5 => NodeMode::Active,
            5..7 => NodeMode::Cordoned,
            _ => NodeMode::Draining,
        };
        if self.serves(member) && self.is_awake(Host::Member(member)) {
            self.set_mode(member, node, mode);
        }
    }

    /// In some worlds one node leaves, and all others are active.
    pub(crate) fn drain_in_calm(&mut self) {
        let Some(leaving) = self.setup.leaves_at_end else { return };
        for node in 0..self.nodes.len() {
            let mode = if leaving == node { NodeMode::Draining } else { NodeMode::Active };
            self.set_mode(0, node, mode);
        }
        let began = self.now;
        while self.now.since(began) < DRAIN_TIME_MAX {
            self.run_until(self.now.after(LOOK_EVERY));
            let core = &self.process(leaving).core;
            if core.mode() == NodeMode::Draining && core.drain_progress().drained {
                self.assert_drained(leaving);
                return self.count("drains finished");
            }
            if self.now.since(began) > REFUSED_AFTER && self.was_refused(leaving) {
                return self.count("drains refused");
            }
        }
        let progress = self.process(leaving).core.drain_progress();
        assert!(
            self.was_refused(leaving),
            "node {leaving} is refused nothing and does not drain: {progress:?}"
        );
    }

    fn was_refused(&mut self, node: usize) -> bool {
        let now = self.now;
        self.process(node).placed.refused.is_some_and(|at| now.since(at) < REFUSED_WITHIN)
    }

    /// Nothing is placed on any node any more.
    pub(crate) fn cordon_all(&mut self) {
        (0..self.nodes.len()).for_each(|node| self.set_mode(0, node, NodeMode::Cordoned));
    }

    /// What a drained node has durably others have as well, or had when it asked last.
    fn assert_drained(&mut self, leaving: usize) {
        let asked = self.process(leaving).placed.asked_to_drain;
        let has = |place: &Node, key: &BlockKey| {
            let kept_until = place.withdrawn.get(key).map(|at| at.after(STALE_IN_CALM_MAX));
            place.promised.contains(key) || kept_until.is_some_and(|until| asked.is_some_and(|at| at < until))
        };
        let others: Vec<usize> = (0..self.nodes.len()).filter(|node| *node != leaving).collect();
        let promised = &self.nodes[leaving].promised;
        let alone: Vec<_> =
            promised.iter().filter(|key| !others.iter().any(|other| has(&self.nodes[*other], key))).collect();
        assert!(alone.is_empty(), "node {leaving} is drained and alone has {alone:?}");
    }
}
