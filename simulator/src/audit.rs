//! Checks after the end of all faults: every operation has ended, nothing is left over, and the directory is
//! the union of the agents' inventories.
//!
//! Checks after every step are in the modules concerned: audits of the cores in `node.rs` and
//! `control_plane.rs`, contents in `engine.rs` and `block_audit.rs`, durability in `random_faults.rs`.

use std::collections::{BTreeMap, BTreeSet};

use reprise_agent_core::event::Replica;
use reprise_policy::{BlockKey, NodeId, SessionId, SlotSet, Tier};

use crate::budgets;
use crate::counted::count_all;
use crate::member::incarnations;
use crate::network::Host;
use crate::operators::{cordon_all, drain_in_calm};
use crate::reports::StateSnapshot;
use crate::setup::{FINISH_TIME, Limits, all_keys};
use crate::simulation::Simulation;
use crate::store::{Key, Prefix, Revision, Value};

/// Size of the header page in front of every block on a device, in bytes.
const HEADER_BYTES: u64 = 4096;

/// Ends the faults, lets open requests finish, stops the engines and checks the final state.
pub(crate) fn finish(simulation: &mut Simulation) {
    simulation.end_faults();
    simulation.run_until(simulation.env.now.after(FINISH_TIME));
    for node in 0..simulation.nodes.len() {
        let Simulation { env, nodes, .. } = &mut *simulation;
        let engines = &nodes[node].process().engines;
        let sessions: Vec<SessionId> = engines.sessions.keys().copied().collect();
        for session in sessions {
            let left = nodes[node].process().engines.session(session).unfinished();
            assert!(left.is_none(), "node {node}: {}", left.unwrap_or_default());
            nodes[node].close_session(env, session);
        }
    }
    drain_in_calm(simulation);
    cordon_all(simulation);
    simulation.run_until(simulation.env.now.after(FINISH_TIME));
    if simulation.env.setup.limits == Limits::Budgets {
        budgets::share_out(simulation);
    }
    for node in 0..simulation.nodes.len() {
        let Simulation { env, nodes, .. } = &mut *simulation;
        count_all(&mut env.seen, &nodes[node].process().core);
        assert_nothing_left(simulation, node);
    }
    assert_converged(simulation);
}

fn assert_nothing_left(simulation: &mut Simulation, node: usize) {
    let holders = simulation.nodes[node].extents.holders() as u64;
    let process = simulation.process(node);
    let client = &process.client;
    let queued: usize = client.links.links.values().map(|link| link.announcer.outbox().queued()).sum();
    let counters = process.core.counters();
    let left = [
        ("sessions", counters.sessions),
        ("reserved bytes", counters.reserved_bytes),
        ("read leases", counters.read_leases),
        ("loads", counters.loads_held),
        ("fills", counters.fills_in_flight),
        ("serves", counters.serves_in_flight),
        ("unsaved blocks", counters.unsaved_blocks),
        ("pending frees", counters.pool_pending_free_bytes),
        ("pulls", counters.pulls_waiting),
        ("bytes of pulls", counters.pulls_in_flight_bytes),
        ("offers", process.offers.open.len() as u64),
        ("offers of peers", process.offers.received.len() as u64),
        ("placement requests", client.placements.pending.len() as u64),
        ("jobs", process.jobs.running.len() as u64),
        ("fetches", process.peers.fetches.len() as u64),
        ("requests of peers", process.peers.serves.len() as u64),
        ("announcements", queued as u64),
        ("calls", client.links.calls.waiting() as u64),
        ("lookups", client.lookups.pending.len() as u64),
        ("leased extents", counters.extents_leased),
        ("pins of extents", counters.extents_pinned),
        ("holders of extents", holders),
        ("awaited holders", process.awaited.len() as u64),
    ];
    for (what, count) in left {
        assert_eq!(count, 0, "node {node}: {what} are left");
    }
    assert_eq!(process.core.next_deadline(), None, "node {node}: the core still has a deadline");
    assert_space(simulation, node);
}

/// Checks that the bytes in use are those of announced blocks and of slots that lost devices may still
/// write to.
fn assert_space(simulation: &Simulation, node: usize) {
    let setup = &simulation.env.setup;
    let process = simulation.nodes[node].process.as_ref().expect("the agent runs");
    let counters = process.core.counters();
    let bytes = |tier: Tier, header: u64| -> u64 {
        let of_tier = process.replicas.held.iter().filter(|(_, other)| *other == tier);
        of_tier.map(|(key, _)| setup.layout_of(key).slot_bytes() + header).sum()
    };
    let dram = bytes(Tier::Dram, 0) + counters.arena_lost_bytes;
    assert_eq!(counters.arena_used_bytes, dram, "node {node}: slots of the arena leak");
    assert_eq!(
        counters.pool_used_bytes,
        bytes(Tier::Nvme, HEADER_BYTES),
        "node {node}: slots of the pool leak"
    );
    assert!(counters.arena_used_bytes <= counters.arena_bytes, "node {node}: the arena is over its budget");
}

/// Checks that every slot has one owner with all inventories, and that all members and agents know the
/// owner.
fn assert_converged(simulation: &mut Simulation) {
    let listed = simulation.store_process.store.range(Prefix::Members);
    let registered: BTreeMap<usize, Revision> = listed
        .into_iter()
        .map(|(key, entry)| match key {
            Key::Member(name) => (name, entry.created),
            other => unreachable!("unexpected value of a member entry: {other:?}"),
        })
        .collect();
    assert_eq!(registered.len(), simulation.members.len(), "every member is registered");
    let mut known: BTreeSet<(NodeId, BlockKey, Tier)> = BTreeSet::new();
    let mut owned = SlotSet::EMPTY;
    for member in 0..simulation.members.len() {
        assert_member_converged(simulation, member, &registered, &mut owned);
        assert_reports_arrived(simulation, member);
        known.extend(known_by(simulation, member));
    }
    assert!(owned == SlotSet::ALL, "every slot has an owner");
    if simulation.env.setup.limits == Limits::Budgets {
        budgets::assert_budgets_converged(simulation);
    }
    let mut held = BTreeSet::new();
    for node in 0..simulation.nodes.len() {
        let number = node_number(simulation, node);
        assert_agent_converged(simulation, node, number);
        held.extend(simulation.process(node).replicas.held.iter().map(|(key, tier)| (number, *key, *tier)));
    }
    let phantom: Vec<_> = known.difference(&held).collect();
    let missing: Vec<_> = held.difference(&known).collect();
    assert!(phantom.is_empty(), "the directory lists missing replicas: {phantom:?}");
    assert!(missing.is_empty(), "the directory lacks replicas: {missing:?}");
}

fn assert_member_converged(
    simulation: &mut Simulation,
    member: usize,
    registered: &BTreeMap<usize, Revision>,
    owned: &mut SlotSet,
) {
    let now = simulation.env.time(Host::Member(member));
    let running = simulation.members[member].as_ref().expect("the member was restarted");
    assert_eq!(&incarnations(running.list.view()), registered, "member {member} does not know the members");
    assert!(running.certain_map(now).is_some(), "member {member} is not sure of its place");
    let (slots, size) = (running.directory.owned(), running.directory.size());
    assert!(owned.and(slots).is_empty(), "member {member} has slots of another");
    assert_eq!(size.slots_partial, 0, "member {member} does not know all inventories");
    *owned = owned.or(slots);
}

/// Checks that a member has the latest report of every node.
fn assert_reports_arrived(simulation: &Simulation, member: usize) {
    let running = simulation.members[member].as_ref().expect("the member was restarted");
    for node in 0..simulation.nodes.len() {
        let core = &simulation.nodes[node].process.as_ref().expect("the agent runs").core;
        let state = StateSnapshot::of(core);
        let known = running.report_of(node_number(simulation, node));
        assert_eq!(known, Some(&state.report()), "member {member} does not know the state of node {node}");
    }
}

/// Returns the replicas in a member's directory.
fn known_by(simulation: &mut Simulation, member: usize) -> Vec<(NodeId, BlockKey, Tier)> {
    let now = simulation.env.time(Host::Member(member));
    let keys = match simulation.env.setup.layout {
        Some(_) => simulation.truth.keys().copied().collect(),
        None => all_keys(),
    };
    let running = simulation.members[member].as_mut().expect("the member was restarted");
    let answered = running.lookup(now, &keys, None);
    let of = |(key, replicas): (&BlockKey, Vec<Replica>)| {
        let named: Vec<_> = replicas.iter().map(|replica| (replica.node, *key, replica.tier)).collect();
        named
    };
    keys.iter().zip(answered.found).flat_map(of).collect()
}

/// Returns the number of a host's agent from the store.
fn node_number(simulation: &Simulation, node: usize) -> NodeId {
    let entry = simulation.store_process.store.get(Key::Node(node)).expect("every agent has registered");
    match &entry.value {
        Value::Node(record) => record.node,
        other => unreachable!("unexpected value of a node record: {other:?}"),
    }
}

fn assert_agent_converged(simulation: &mut Simulation, node: usize, number: NodeId) {
    let members = simulation.members.len();
    let client = &simulation.process(node).client;
    let routes = client.links.routes().expect("the agent has a map");
    assert_eq!(routes.links().len(), members, "node {node} does not know all members");
    for link in routes.links() {
        let link = &client.links.links[link];
        let (granted, up, of) = (link.granted(), link.is_up(), link.member);
        let registered = granted.is_some_and(|granted| granted.node == number);
        assert!(registered, "node {node}, number {number}, is registered with member {of}: {granted:?}");
        assert!(up, "node {node} has a working link to member {of}");
    }
    assert_eq!(client.host_of(number), Some(node), "node {node} does not know its own host");
}
