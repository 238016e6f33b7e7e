//! Operators: they set modes of nodes, during faults and afterwards.
//!
//! In some simulations one node is drained after the faults: it must become drained unless others refuse its
//! offers. At the end all nodes are cordoned, so that no further block is placed.

use std::time::Duration;

use reprise_policy::{BlockKey, NodeMode};

use crate::node::Node;
use crate::placement_audit::STALE_IN_CALM_MAX;
use crate::simulation::{Action, Simulation};

/// Maximum duration of a drain after the faults, if no offer is refused: rounds of a second, offers that are
/// repeated after 10 s, and two scans at an interval of 5 s.
const DRAIN_TIME_MAX: Duration = Duration::from_secs(60);
/// A drain that had an offer refused this recently need not be complete.
const REFUSED_WITHIN: Duration = Duration::from_secs(20);
/// The simulation stops waiting for a drain after this time if offers are refused.
const REFUSED_AFTER: Duration = Duration::from_secs(25);
const POLL_INTERVAL: Duration = Duration::from_millis(500);

impl Simulation {
    /// Sets the mode of a node at a member, and schedules the next change.
    pub(crate) fn operate(&mut self) {
        if self.env.calm {
            return;
        }
        let mean = self.env.setup.operate_every.as_micros() as u64;
        let delay = self.env.rng.micros(mean / 4..mean * 7 / 4);
        self.env.after(delay, Action::Operate);
        let (member, node) = (self.env.rng.below(self.members.len()), self.env.rng.below(self.nodes.len()));
        let mode = match self.env.rng.below(10) {
            0..5 => NodeMode::Active,
            5..7 => NodeMode::Cordoned,
            _ => NodeMode::Draining,
        };
        if self.members[member].as_ref().is_some_and(|running| running.reachable(&self.env)) {
            self.at_member(member, |running, env| running.set_mode(env, node, mode));
        }
    }

    /// In some simulations drains one node while all others are active.
    pub(crate) fn drain_in_calm(&mut self) {
        let Some(leaving) = self.env.setup.leaves_at_end else { return };
        for node in 0..self.nodes.len() {
            let mode = if leaving == node { NodeMode::Draining } else { NodeMode::Active };
            self.at_member(0, |running, env| running.set_mode(env, node, mode));
        }
        let began = self.env.now;
        while self.env.now.since(began) < DRAIN_TIME_MAX {
            self.run_until(self.env.now.after(POLL_INTERVAL));
            let core = &self.process(leaving).core;
            if core.mode() == NodeMode::Draining && core.drain_progress().drained {
                self.assert_drained(leaving);
                return self.env.count("drains finished");
            }
            if self.env.now.since(began) > REFUSED_AFTER && self.was_refused(leaving) {
                return self.env.count("drains refused");
            }
        }
        let progress = self.process(leaving).core.drain_progress();
        assert!(
            self.was_refused(leaving),
            "node {leaving} does not drain although no offer was refused: {progress:?}"
        );
    }

    fn was_refused(&mut self, node: usize) -> bool {
        let now = self.env.now;
        self.process(node).placed.refused.is_some_and(|at| now.since(at) < REFUSED_WITHIN)
    }

    /// Cordons all nodes: no further block is placed.
    pub(crate) fn cordon_all(&mut self) {
        for node in 0..self.nodes.len() {
            self.at_member(0, |running, env| running.set_mode(env, node, NodeMode::Cordoned));
        }
    }

    /// Checks that the durable blocks of a drained node are durable on others, or were at its last placement
    /// request.
    fn assert_drained(&mut self, leaving: usize) {
        let asked = self.process(leaving).placed.asked_to_drain;
        let has = |place: &Node, key: &BlockKey| {
            let kept_until = place.withdrawn.get(key).map(|at| at.after(STALE_IN_CALM_MAX));
            place.reported_durable.contains(key)
                || kept_until.is_some_and(|until| asked.is_some_and(|at| at < until))
        };
        let others: Vec<usize> = (0..self.nodes.len()).filter(|node| *node != leaving).collect();
        let reported_durable = &self.nodes[leaving].reported_durable;
        let alone: Vec<_> = reported_durable
            .iter()
            .filter(|key| !others.iter().any(|other| has(&self.nodes[*other], key)))
            .collect();
        assert!(alone.is_empty(), "node {leaving} is drained and has the only replica of {alone:?}");
    }
}
