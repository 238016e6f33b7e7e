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

/// Sets the mode of a node at a member, and schedules the next change.
pub(crate) fn operate(simulation: &mut Simulation) {
    if simulation.env.calm {
        return;
    }
    let mean = simulation.env.setup.operate_every.as_micros() as u64;
    let delay = simulation.env.rng.micros(mean / 4..mean * 7 / 4);
    simulation.env.after(delay, Action::Operate);
    let (member, node) = (
        simulation.env.rng.below(simulation.members.len()),
        simulation.env.rng.below(simulation.nodes.len()),
    );
    let mode = match simulation.env.rng.below(10) {
        0..5 => NodeMode::Active,
        5..7 => NodeMode::Cordoned,
        _ => NodeMode::Draining,
    };
    if simulation.members[member].as_ref().is_some_and(|running| running.reachable(&simulation.env)) {
        simulation.at_member(member, |running, env| running.set_mode(env, node, mode));
    }
}

/// In some simulations drains one node while all others are active.
pub(crate) fn drain_in_calm(simulation: &mut Simulation) {
    let Some(leaving) = simulation.env.setup.leaves_at_end else { return };
    for node in 0..simulation.nodes.len() {
        let mode = if leaving == node { NodeMode::Draining } else { NodeMode::Active };
        simulation.at_member(0, |running, env| running.set_mode(env, node, mode));
    }
    let began = simulation.env.now;
    while simulation.env.now.since(began) < DRAIN_TIME_MAX {
        simulation.run_until(simulation.env.now.after(POLL_INTERVAL));
        let core = &simulation.process(leaving).core;
        if core.mode() == NodeMode::Draining && core.drain_progress().drained {
            assert_drained(simulation, leaving);
            return simulation.env.count("drains finished");
        }
        if simulation.env.now.since(began) > REFUSED_AFTER && was_refused(simulation, leaving) {
            return simulation.env.count("drains refused");
        }
    }
    let progress = simulation.process(leaving).core.drain_progress();
    assert!(
        was_refused(simulation, leaving),
        "node {leaving} does not drain although no offer was refused: {progress:?}"
    );
}

fn was_refused(simulation: &mut Simulation, node: usize) -> bool {
    let now = simulation.env.now;
    simulation.process(node).placed.refused.is_some_and(|at| now.since(at) < REFUSED_WITHIN)
}

/// Cordons all nodes: no further block is placed.
pub(crate) fn cordon_all(simulation: &mut Simulation) {
    for node in 0..simulation.nodes.len() {
        simulation.at_member(0, |running, env| running.set_mode(env, node, NodeMode::Cordoned));
    }
}

/// Checks that the durable blocks of a drained node are durable on others, or were at its last placement
/// request.
fn assert_drained(simulation: &mut Simulation, leaving: usize) {
    let asked = simulation.process(leaving).placed.asked_to_drain;
    let has = |place: &Node, key: &BlockKey| {
        let kept_until = place.durable.withdrawn.get(key).map(|at| at.after(STALE_IN_CALM_MAX));
        place.durable.reported.contains(key)
            || kept_until.is_some_and(|until| asked.is_some_and(|at| at < until))
    };
    let others: Vec<usize> = (0..simulation.nodes.len()).filter(|node| *node != leaving).collect();
    let reported_durable = &simulation.nodes[leaving].durable.reported;
    let alone: Vec<_> = reported_durable
        .iter()
        .filter(|key| !others.iter().any(|other| has(&simulation.nodes[*other], key)))
        .collect();
    assert!(alone.is_empty(), "node {leaving} is drained and has the only replica of {alone:?}");
}
