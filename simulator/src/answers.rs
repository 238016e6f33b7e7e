//! What members say, looked at by somebody who sees everything: who may answer for a slot, and whether what is said to be
//! whole is.

use std::collections::BTreeMap;

use reprise_policy::{BlockKey, Epoch, NodeId};

use crate::clock::drift_max;
use crate::messages::Answered;
use crate::network::Host;
use crate::setup::{DEAD_AFTER, TIME_TO_LIVE};
use crate::store::Revision;
use crate::world::World;

/// So many changes of a directory are audited together, or as many as there are nodes.
const AUDIT_EVERY: u32 = 32;

/// What was said before.
#[derive(Debug, Default)]
pub(crate) struct Answers {
    /// Who has answered for a slot, under an epoch of a store.
    owners: BTreeMap<(u32, Epoch, u16), usize>,
    /// The members at a revision of a store, with their incarnations.
    lists: BTreeMap<(u64, Revision), BTreeMap<usize, Revision>>,
}

impl World {
    /// The directory has changed. To look at all of it takes as long as a hundred changes.
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

    /// Two members that know of one revision agree about the members.
    pub(crate) fn audit_list(&mut self, revision: Revision, listed: &BTreeMap<usize, Revision>) {
        let at = (self.keeper.store.wiped, revision);
        let known = self.answers.lists.entry(at).or_insert_with(|| listed.clone());
        assert_eq!(known, listed, "at revision {revision} members know other members than others");
    }

    /// An answer to a lookup, as it is given.
    pub(crate) fn audit_answer(
        &mut self,
        member: usize,
        keys: &[BlockKey],
        asking: Option<NodeId>,
        answered: &Answered,
    ) {
        let own: Vec<&BlockKey> =
            (0..).zip(keys).filter(|(at, _)| !answered.elsewhere.contains(at)).map(|(_, key)| key).collect();
        if own.is_empty() {
            return;
        }
        self.assert_lease(member);
        self.assert_alone(member, &own, answered.map_epoch);
        self.assert_offered(member, asking, answered);
        let running = self.members[member].as_ref().expect("it answers");
        let partial = own.iter().filter(|key| running.silent_about(key)).count();
        assert!(
            partial <= answered.partial,
            "member {member} says that it knows everything about {} of {partial} keys that nodes have not announced",
            partial - answered.partial
        );
    }

    /// A report, as it is answered: orders are of who has a lease as well.
    pub(crate) fn audit_orders(&self, member: usize) {
        let now = self.time(Host::Member(member));
        if self.members[member].as_ref().is_some_and(|running| running.certain_map(now).is_some()) {
            self.assert_lease(member);
        }
    }

    /// Whoever answers holds a lease, by its own clock, and unless one of the clocks stood still or jumped by the store's.
    fn assert_lease(&self, member: usize) {
        let host = Host::Member(member);
        let (now, stood) = (self.time(host), self.place(host).stood);
        let running = self.members[member].as_ref().expect("it answers");
        let lease = running.lease.expect("who answers has a lease");
        assert!(now < lease.until, "member {member} answers after its lease has expired by its own clock");
        let ended =
            self.keeper.store.ended.get(&lease.id).filter(|_| stood.is_none_or(|at| at <= lease.asked));
        if let Some(ended) = ended {
            let late = self.now.since(*ended);
            let bound = drift_max(TIME_TO_LIVE.as_micros() as u64);
            assert!(
                late.as_micros() as u64 <= bound,
                "member {member} answers {late:?} after the store has ended its lease"
            );
        }
    }

    /// Under one epoch one member answers for a slot.
    fn assert_alone(&mut self, member: usize, keys: &[&BlockKey], epoch: Epoch) {
        let store = self.identity_number(member);
        for key in keys {
            let of = (store, epoch, key.hash_slot());
            let owner = *self.answers.owners.entry(of).or_insert(member);
            assert_eq!(owner, member, "two members answer for slot {} at epoch {}", of.2, epoch.0);
        }
    }

    /// No lookup names the node that asks, nor one from which the member has not heard for too long.
    fn assert_offered(&self, member: usize, asking: Option<NodeId>, answered: &Answered) {
        let now = self.time(Host::Member(member));
        let running = self.members[member].as_ref().expect("it answers");
        for replica in answered.found.iter().flatten() {
            let node = replica.node;
            assert!(asking != Some(node), "a lookup names the node that asks");
            let silence = running.heard.get(&node).map(|heard| now.since(*heard));
            let silence = silence.expect("only nodes that have registered are named");
            assert!(silence < DEAD_AFTER, "a lookup names node {node}, silent for {silence:?}");
        }
    }
}
