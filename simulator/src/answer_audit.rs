//! Checks of the members' answers, with knowledge of the whole simulation: which member may answer for a
//! slot, and whether slots that it reports as complete are complete.

use std::collections::BTreeMap;

use reprise_policy::{BlockKey, Epoch, NodeId};

use crate::clock::drift_max;
use crate::messages::LookupAnswer;
use crate::network::Host;
use crate::setup::{DEAD_AFTER, TIME_TO_LIVE};
use crate::simulation::Simulation;
use crate::store::Revision;

/// Number of directory changes that are audited together; at least the number of nodes.
const AUDIT_EVERY: u32 = 32;

/// Earlier answers and member lists.
#[derive(Debug, Default)]
pub(crate) struct AnswerAudit {
    /// Member that has answered for a slot, by the store's identity and the epoch.
    owners: BTreeMap<(u32, Epoch, u16), usize>,
    /// The members at a revision of a store, with their incarnations.
    lists: BTreeMap<(u64, Revision), BTreeMap<usize, Revision>>,
}

impl Simulation {
    /// Called after a change of a directory. A full audit takes as long as a hundred changes, so it only runs
    /// after several.
    pub(crate) fn audit_directory(&mut self, member: usize) {
        let every = AUDIT_EVERY.max(self.nodes.len() as u32);
        let member = self.member(member);
        member.unaudited += 1;
        if member.unaudited < every {
            return;
        }
        member.unaudited = 0;
        member.directory.audit().unwrap_or_else(|broken| panic!("directory: {broken}"));
    }

    /// Checks that two members at the same revision agree about the members.
    pub(crate) fn audit_list(&mut self, revision: Revision, listed: &BTreeMap<usize, Revision>) {
        let at = (self.store_process.store.wiped, revision);
        let known = self.answers.lists.entry(at).or_insert_with(|| listed.clone());
        assert_eq!(known, listed, "members that know revision {revision} disagree about the members");
    }

    /// Checks an answer to a lookup when it is sent.
    pub(crate) fn audit_answer(
        &mut self,
        member: usize,
        keys: &[BlockKey],
        requester: Option<NodeId>,
        answered: &LookupAnswer,
    ) {
        let own: Vec<&BlockKey> =
            (0..).zip(keys).filter(|(at, _)| !answered.elsewhere.contains(at)).map(|(_, key)| key).collect();
        if own.is_empty() {
            return;
        }
        self.assert_lease(member);
        self.assert_alone(member, &own, answered.map_epoch);
        self.assert_offered(member, requester, answered);
        let running = self.members[member].as_ref().expect("the member answers");
        let partial = own.iter().filter(|key| running.silent_about(key)).count();
        assert!(
            partial <= answered.partial,
            "member {member} reports complete knowledge of {} of {partial} keys that nodes have not announced",
            partial - answered.partial
        );
    }

    /// Checks the answer to a report: grants also require a lease.
    pub(crate) fn audit_grants(&self, member: usize) {
        let now = self.env.time(Host::Member(member));
        if self.members[member].as_ref().is_some_and(|running| running.certain_map(now).is_some()) {
            self.assert_lease(member);
        }
    }

    /// Checks that the member holds a lease by its own clock. Unless one of the clocks has stopped or jumped,
    /// the lease must also be valid by the store's clock.
    fn assert_lease(&self, member: usize) {
        let host = Host::Member(member);
        let (now, clock_stopped_at) = (self.env.time(host), self.env.host(host).clock_stopped_at);
        let running = self.members[member].as_ref().expect("the member answers");
        let lease = running.lease.expect("the member has a lease");
        assert!(
            now < lease.schedule.deadline(),
            "member {member} answers after its lease has expired by its own clock"
        );
        let ended = self
            .store_process
            .store
            .ended
            .get(&lease.id)
            .filter(|_| clock_stopped_at.is_none_or(|at| at <= lease.schedule.asked()));
        if let Some(ended) = ended {
            let late = self.env.now.since(*ended);
            let bound = drift_max(TIME_TO_LIVE.as_micros() as u64);
            assert!(
                late.as_micros() as u64 <= bound,
                "member {member} answers {late:?} after the store has ended its lease"
            );
        }
    }

    /// Checks that only one member answers for a slot under one epoch.
    fn assert_alone(&mut self, member: usize, keys: &[&BlockKey], epoch: Epoch) {
        let store = self.identity_number(member);
        for key in keys {
            let of = (store, epoch, key.hash_slot());
            let owner = *self.answers.owners.entry(of).or_insert(member);
            assert_eq!(owner, member, "two members answer for slot {} at epoch {}", of.2, epoch.0);
        }
    }

    /// Checks that a lookup names neither the requesting node nor one that has been silent for too long.
    fn assert_offered(&self, member: usize, requester: Option<NodeId>, answered: &LookupAnswer) {
        let now = self.env.time(Host::Member(member));
        let running = self.members[member].as_ref().expect("the member answers");
        for replica in answered.found.iter().flatten() {
            let node = replica.node;
            assert!(requester != Some(node), "a lookup names the requesting node");
            let silence = running.last_seen.get(&node).map(|seen_at| now.since(*seen_at));
            let silence = silence.expect("only nodes that have registered are named");
            assert!(silence < DEAD_AFTER, "a lookup names node {node}, silent for {silence:?}");
        }
    }
}
