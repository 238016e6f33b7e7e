//! Checks of the members' answers, with knowledge of the whole simulation: which member may answer for a
//! slot, and whether slots that it reports as complete are complete.

use std::collections::BTreeMap;

use reprise_policy::{BlockKey, Epoch, NodeId};

use crate::clock::drift_max;
use crate::member::Member;
use crate::messages::LookupAnswer;
use crate::network::Host;
use crate::setup::{DEAD_AFTER, TIME_TO_LIVE};
use crate::simulation::Simulation;
use crate::store::Revision;

/// Number of directory changes that are audited together; at least the number of nodes.
const AUDIT_EVERY: u32 = 32;
/// The same where a trace fills the directory with many blocks.
const AUDIT_EVERY_TIMED: u32 = 4096;

/// Earlier answers and member lists.
#[derive(Debug, Default)]
pub(crate) struct AnswerAudit {
    /// Member that has answered for a slot, by the store's identity and the epoch.
    owners: BTreeMap<(u32, Epoch, u16), usize>,
    /// The members at a revision of a store, with their incarnations.
    lists: BTreeMap<(u64, Revision), BTreeMap<usize, Revision>>,
    /// Number of changes of each member's directory since its last audit.
    unaudited: BTreeMap<usize, u32>,
}

/// Called after a change of a directory. A full audit takes as long as a hundred changes, so it only runs
/// after several.
pub(crate) fn directory(simulation: &mut Simulation, member: usize) {
    let least = if simulation.env.timed.is_some() { AUDIT_EVERY_TIMED } else { AUDIT_EVERY };
    let every = least.max(simulation.nodes.len() as u32);
    let Some(running) = &simulation.members[member] else { return };
    let unaudited = simulation.answers.unaudited.entry(member).or_default();
    *unaudited += 1;
    if *unaudited == every {
        *unaudited = 0;
        running.directory.audit().unwrap_or_else(|broken| panic!("directory: {broken}"));
    }
}

/// Checks that two members at the same revision agree about the members.
pub(crate) fn list(simulation: &mut Simulation, revision: Revision, listed: &BTreeMap<usize, Revision>) {
    let at = (simulation.store_process.store.wiped, revision);
    let known = simulation.answers.lists.entry(at).or_insert_with(|| listed.clone());
    assert_eq!(known, listed, "members that know revision {revision} disagree about the members");
}

/// Checks an answer to a lookup when it is sent.
pub(crate) fn lookup(
    simulation: &mut Simulation,
    member: usize,
    (keys, requester): (&[BlockKey], Option<NodeId>),
    answered: &LookupAnswer,
) {
    let own: Vec<&BlockKey> =
        (0..).zip(keys).filter(|(at, _)| !answered.elsewhere.contains(at)).map(|(_, key)| key).collect();
    if own.is_empty() {
        return;
    }
    assert_lease(simulation, member);
    assert_alone(simulation, member, &own, answered.map_epoch);
    assert_offered(simulation, member, requester, answered);
    let running = running(simulation, member);
    let partial = own.iter().filter(|key| running.silent_about(key)).count();
    assert!(
        partial <= answered.partial,
        "member {member} reports complete knowledge of {} of {partial} keys that nodes have not announced",
        partial - answered.partial
    );
}

/// Checks the answer to a report: grants also require a lease.
pub(crate) fn report(simulation: &Simulation, member: usize) {
    let now = simulation.env.time(Host::Member(member));
    if simulation.members[member].as_ref().is_some_and(|running| running.certain_map(now).is_some()) {
        assert_lease(simulation, member);
    }
}

/// Checks that the member holds a lease by its own clock. Unless one of the clocks has stopped or jumped,
/// the lease must also be valid by the store's clock.
fn assert_lease(simulation: &Simulation, member: usize) {
    let host = Host::Member(member);
    let (now, clock_stopped_at) = (simulation.env.time(host), simulation.env.host(host).clock_stopped_at);
    let running = running(simulation, member);
    let lease = running.lease.expect("the member has a lease");
    assert!(
        now < lease.schedule.deadline(),
        "member {member} answers after its lease has expired by its own clock"
    );
    let ended = simulation
        .store_process
        .store
        .ended
        .get(&lease.id)
        .filter(|_| clock_stopped_at.is_none_or(|at| at <= lease.schedule.asked()));
    if let Some(ended) = ended {
        let late = simulation.env.now.since(*ended);
        let bound = drift_max(TIME_TO_LIVE.as_micros() as u64);
        assert!(
            late.as_micros() as u64 <= bound,
            "member {member} answers {late:?} after the store has ended its lease"
        );
    }
}

/// Checks that only one member answers for a slot under one epoch.
fn assert_alone(simulation: &mut Simulation, member: usize, keys: &[&BlockKey], epoch: Epoch) {
    let store = running(simulation, member).talk.identity_number();
    for key in keys {
        let of = (store, epoch, key.hash_slot());
        let owner = *simulation.answers.owners.entry(of).or_insert(member);
        assert_eq!(owner, member, "two members answer for slot {} at epoch {}", of.2, epoch.0);
    }
}

/// Checks that a lookup names neither the requesting node nor one that has been silent for too long.
fn assert_offered(
    simulation: &Simulation,
    member: usize,
    requester: Option<NodeId>,
    answered: &LookupAnswer,
) {
    let now = simulation.env.time(Host::Member(member));
    let running = running(simulation, member);
    for replica in answered.found.iter().flatten() {
        let node = replica.node;
        assert!(requester != Some(node), "a lookup names the requesting node");
        let silence = running.last_seen.get(&node).map(|seen_at| now.since(*seen_at));
        let silence = silence.expect("only nodes that have registered are named");
        assert!(silence < DEAD_AFTER, "a lookup names node {node}, silent for {silence:?}");
    }
}

fn running(simulation: &Simulation, member: usize) -> &Member {
    simulation.members[member].as_ref().expect("the member answers")
}
