//! Checks of the members' answers to placement requests: only active nodes that send heartbeats are named, and another
//! durable replica exists where a member reports one.

use std::collections::BTreeSet;

use reprise_agent_core::effect::PlacementReason;
use reprise_agent_core::event::Placement;
use reprise_agent_core::limits::PLACE_KEYS_MAX;
use reprise_policy::{BlockKey, NodeId, NodeMode};

use crate::messages::{PlacementAnswer, PlacementRequest};
use crate::network::Host;
use crate::setup::DEAD_AFTER;
use crate::simulation::Simulation;

/// Checks a member's answer to a placement request.
pub(crate) fn check(
    simulation: &mut Simulation,
    member: usize,
    request: &PlacementRequest,
    answer: &PlacementAnswer,
) {
    assert!(request.keys.len() <= PLACE_KEYS_MAX, "{} keys in a placement request", request.keys.len());
    let now = simulation.env.time(Host::Member(member));
    note_asked(simulation, member, request);
    let running = simulation.members[member].as_ref().expect("the member answers");
    let mut seen: BTreeSet<NodeId> = BTreeSet::new();
    for (key, answer) in request.keys.iter().zip(&answer.answers) {
        match *answer {
            Placement::To(to) if seen.insert(to) => {
                let host = running.host_of(to).expect("only known nodes are named");
                let mode = running.reported_modes.get(&host).copied().unwrap_or_default().mode;
                assert_eq!(mode, NodeMode::Active, "member {member} places blocks on node {host}");
                assert!(to != request.holder, "a block is placed on its holder");
                let silence = running.last_seen.get(&to).map(|seen_at| now.since(*seen_at));
                assert!(
                    silence.is_some_and(|silence| silence < DEAD_AFTER),
                    "{to} is named, silent for {silence:?}"
                );
            }
            Placement::Enough => assert_enough(simulation, member, request, key),
            _ => {}
        }
    }
}

fn note_asked(simulation: &mut Simulation, member: usize, request: &PlacementRequest) {
    let running = simulation.members[member].as_ref().expect("the member answers");
    let Some(holder) = running.host_of(request.holder) else { return };
    let Some(process) = simulation.nodes[holder].process.as_mut() else { return };
    match request.reason {
        PlacementReason::Move(to) => {
            if let Some(host) = running.host_of(to) {
                process.placed.moves_to.entry(to).or_default().insert(host);
            }
        }
        PlacementReason::Drain => process.placed.asked_to_drain = Some(simulation.env.now),
        PlacementReason::Hot => {}
    }
}

/// Checks that there is another durable replica, or was one until recently.
fn assert_enough(simulation: &Simulation, member: usize, request: &PlacementRequest, key: &BlockKey) {
    let running = simulation.members[member].as_ref().expect("the member answers");
    let durable = match request.reason {
        PlacementReason::Move(to) => {
            running.host_of(to).is_some_and(|host| simulation.was_durable(host, key))
        }
        PlacementReason::Drain | PlacementReason::Hot => {
            let holder = running.host_of(request.holder);
            let others = (0..simulation.nodes.len()).filter(|host| Some(*host) != holder);
            others.into_iter().any(|host| simulation.was_durable(host, key))
        }
    };
    let reason = request.reason;
    assert!(durable, "member {member} reports, for {reason:?}, that {key} is durable where it is not");
}
