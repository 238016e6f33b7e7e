//! Announcements on their way to one member of the control plane: order kept, bounded, and replaced by inventories when
//! they cannot be.
//!
//! The member says which hash slots it owns and of which it wants this node's inventory ([`Outbox::follow`]). Each slot is
//! in one of three states:
//!
//! ```text
//!            follow: wanted                   inventory
//!   Idle ─────────────────────► Asked ─────────────────────► Begun
//!    ▲     changes are dropped:          changes are queued   │
//!    │     the inventory comes later                          │
//!    └── follow: not owned any more; overflow, gap, refusal ──┘
//! ```
//!
//! Sequence numbers count changes within one registration, from 0; a batch that opens inventories takes one more, before
//! its changes. A batch is built once and sent as it is until it is answered: the directory recognises what it has
//! already applied. After an overflow or a gap everything starts over: the first batch then says so.
//!
//! What the member wants is asked for while nothing is on its way that could be among it; so whatever it still wants, it
//! has lost.
//!
//! Deliberately absent: sending, waiting between attempts (`backoff.rs`), messages of the wire: a [`Batch`] has the form
//! that the directory reads, and whoever sends it puts it into a message.

mod batch;
#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::sync::Arc;

use reprise_policy::{BlockKey, Epoch, NodeId, SlotSet, Tier};

use crate::effect::ReplicaChange;
pub use batch::{BATCH_CHANGES_MAX, Batch, Opening};
use batch::{Inventory, changes_of};

/// What the directory answers to a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    /// The batch's registration is not the current one.
    Fenced,
    /// The directory has every change below this number.
    Expecting(u64),
}

/// What an answer meant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// This many changes are in the directory.
    Applied(usize),
    /// The directory has missed something: everything starts over.
    Gap,
    /// This registration is from the past: register again.
    Fenced,
    /// The answer is to a batch that is no longer of interest.
    Stale,
}

/// What is to be done now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Next {
    /// Ask the agent for its inventory of these slots; said once.
    Inventory(Box<SlotSet>),
    /// Ask the member which slots it owns and wants, for [`Outbox::follow`].
    Standing(NodeId, Epoch),
    /// Send this: the unanswered batch again, or a new one.
    Send(Arc<Batch>),
    /// Nothing, until something is announced, heard or granted.
    Wait,
}

/// See the module.
#[derive(Debug)]
pub struct Outbox {
    limit: usize,
    registration: Option<(NodeId, Epoch)>,
    /// Sequence number of the next batch to build.
    sequence: u64,
    /// Version of the member's slots that was heard of last, and the one that was followed.
    heard: Option<u64>,
    followed: Option<u64>,
    asked: SlotSet,
    begun: SlotSet,
    /// The part of `asked` that the agent has not been told.
    untold: SlotSet,
    /// The next inventory replaces everything, in all slots.
    anew: bool,
    inventories: VecDeque<Inventory>,
    /// Changes after the inventories, in slots that have begun.
    changes: VecDeque<ReplicaChange>,
    /// Built, not answered.
    in_flight: Option<Arc<Batch>>,
    superseded: u64,
}

impl Outbox {
    /// A queue of at most `limit` changes.
    pub fn new(limit: usize) -> Outbox {
        Outbox {
            limit,
            registration: None,
            sequence: 0,
            heard: None,
            followed: None,
            asked: SlotSet::EMPTY,
            begun: SlotSet::EMPTY,
            untold: SlotSet::EMPTY,
            anew: true,
            inventories: VecDeque::new(),
            changes: VecDeque::new(),
            in_flight: None,
            superseded: 0,
        }
    }

    /// A registration was granted: everything starts anew.
    pub fn grant(&mut self, node: NodeId, epoch: Epoch) {
        self.start_over();
        self.registration = Some((node, epoch));
        (self.sequence, self.heard) = (0, None);
    }

    /// The registration is gone.
    pub fn lose(&mut self) {
        self.start_over();
        self.registration = None;
    }

    /// The member has said which version its slots have.
    pub fn heard(&mut self, epoch: Epoch, version: u64) {
        if self.registration.is_some_and(|(_, current)| current == epoch) {
            self.heard = self.heard.max(Some(version));
        }
    }

    /// The member's slots may be others by now: it will be asked.
    pub fn doubt(&mut self) {
        self.followed = None;
    }

    /// The member has said, to a question under `epoch`, which slots it owns, and of which it wants an inventory.
    pub fn follow(&mut self, epoch: Epoch, version: u64, owned: &SlotSet, wanted: &SlotSet) {
        // An older answer, or one that came while inventories were begun again.
        if self.registration.is_none_or(|(_, current)| current != epoch) || !self.is_settled() {
            return;
        }
        self.heard(epoch, version);
        self.followed = Some(version);
        let wanted = if self.anew { owned.clone() } else { wanted.and(owned) };
        self.begun = self.begun.and(owned).without(&wanted);
        let kept = &self.begun;
        self.changes.retain(|change| kept.has_key(&change.key));
        (self.asked, self.untold) = (wanted.clone(), wanted);
    }

    /// Something changed. What is in slots that are asked for is dropped: the inventory will contain it.
    pub fn announce(&mut self, changes: &[ReplicaChange]) {
        for change in changes {
            if self.begun.has_key(&change.key) {
                self.changes.push_back(*change);
            } else if self.asked.has_key(&change.key) {
                self.superseded += 1;
            }
        }
        if self.changes.len() > self.limit {
            self.start_over();
        }
    }

    /// The inventory of slots, of which this takes what it has asked for.
    pub fn inventory(&mut self, slots: &SlotSet, replicas: &[(BlockKey, Tier)]) {
        let taken = self.asked.and(slots);
        if taken.is_empty() {
            return;
        }
        self.asked = self.asked.without(&taken);
        self.untold = self.untold.without(&taken);
        self.begun = self.begun.or(&taken);
        self.inventories.push_back(Inventory::of(taken, replicas));
    }

    /// What is to be done now.
    pub fn next_step(&mut self) -> Next {
        let Some((node, epoch)) = self.registration else { return Next::Wait };
        if !self.untold.is_empty() {
            return Next::Inventory(Box::new(std::mem::take(&mut self.untold)));
        }
        if self.is_settled() && (self.followed.is_none() || self.heard > self.followed) {
            return Next::Standing(node, epoch);
        }
        if self.in_flight.is_none() {
            self.in_flight = self.build(node, epoch).map(Arc::new);
        }
        self.in_flight.clone().map_or(Next::Wait, Next::Send)
    }

    /// The directory answered a batch that was sent under `epoch`, starting at `sequence`.
    pub fn answered(&mut self, epoch: Epoch, sequence: u64, answer: Answer) -> Outcome {
        let current = self.registration.is_some_and(|(_, current)| current == epoch);
        let expected = match answer {
            Answer::Fenced if current => return Outcome::Fenced,
            Answer::Fenced => return Outcome::Stale,
            Answer::Expecting(expected) => expected,
        };
        let Some(batch) =
            self.in_flight.take_if(|batch| current && batch.epoch == epoch && batch.sequence == sequence)
        else {
            return Outcome::Stale;
        };
        // Building it has moved `self.sequence` past the batch.
        if expected == self.sequence {
            return Outcome::Applied(batch.len());
        }
        // To start over is accepted at or after what the directory expects, never before it.
        self.sequence = self.sequence.max(expected);
        self.start_over();
        Outcome::Gap
    }

    /// The directory refused a batch as malformed or for good: start over rather than send it for ever.
    pub fn refused(&mut self) {
        self.start_over();
    }

    /// Changes and inventory entries waiting or in flight.
    pub fn queued(&self) -> usize {
        let in_flight = self.in_flight.as_ref().map_or(0, |batch| batch.len());
        self.inventories.iter().map(Inventory::left).sum::<usize>() + self.changes.len() + in_flight
    }

    /// Changes dropped because an inventory replaces them.
    pub fn superseded(&self) -> u64 {
        self.superseded
    }

    /// Whether every inventory that was asked for has arrived.
    fn is_settled(&self) -> bool {
        self.asked.is_empty() && self.inventories.is_empty() && self.in_flight.is_none()
    }

    /// Forgets what waits and what the member said. Sequence numbers of a batch in flight stay used: it may have been
    /// applied.
    fn start_over(&mut self) {
        self.superseded += self.queued() as u64;
        self.inventories.clear();
        self.changes.clear();
        // A queue that overflowed once would otherwise keep its 18 MiB.
        self.changes.shrink_to(BATCH_CHANGES_MAX);
        self.in_flight = None;
        (self.asked, self.untold, self.begun) = (SlotSet::EMPTY, SlotSet::EMPTY, SlotSet::EMPTY);
        (self.anew, self.followed) = (true, None);
    }

    fn build(&mut self, node: NodeId, epoch: Epoch) -> Option<Batch> {
        let part = match self.inventories.front_mut() {
            Some(inventory) if std::mem::take(&mut self.anew) => inventory.next_part(Opening::Anew),
            Some(inventory) => inventory.next_part(Opening::Slots),
            None if self.changes.is_empty() => return None,
            None => changes_of(&mut self.changes),
        };
        if self.inventories.front().is_some_and(|inventory| inventory.left() == 0) {
            self.inventories.pop_front();
        }
        let batch = Batch::of(part, (node, epoch), self.sequence);
        self.sequence += batch.numbers();
        Some(batch)
    }
}
