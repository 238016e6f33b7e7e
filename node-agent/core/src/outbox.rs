//! Ordered, bounded queue of announcements to one member of the control plane. Inventories replace
//! announcements that the queue cannot keep.
//!
//! The member states which hash slots it owns, and for which of them it wants this node's inventory
//! ([`Outbox::set_slots`]). Each slot is in one of three states:
//!
//! ```text
//!          set_slots: wanted                 inventory
//!   Idle ─────────────────────► Requested ─────────────────► Started
//!    ▲     changes are dropped:          changes are queued     │
//!    │     the inventory follows                                │
//!    └─ set_slots: no longer owned; overflow, gap, rejection ───┘
//! ```
//!
//! Sequence numbers count the changes within one registration, from 0. A batch that starts inventories uses
//! one more number, before its changes. A batch is built once and sent unchanged until it is answered, so
//! that the directory recognises a repetition. After an overflow or a gap the outbox starts again: its next
//! batch resets everything announced before.
//!
//! The outbox requests the member's slots only while no inventory is requested, queued or in flight. A slot
//! that the member then still wants was lost by the member and must be announced again.
//!
//! Out of scope: sending, delays between attempts (`backoff.rs`) and wire messages. A [`Batch`] has the
//! directory's byte format; the sender puts it into a message.

mod batch;
#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::sync::Arc;

use reprise_policy::{BlockKey, Epoch, NodeId, SlotSet, Tier};

use crate::effect::ReplicaChange;
pub use batch::{BATCH_CHANGES_MAX, Batch, Opening};
use batch::{Inventory, changes_of};

/// Answer of the directory to a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    /// The batch's registration is not the current one.
    Fenced,
    /// The directory has all changes below this number.
    Expecting(u64),
}

/// Effect of an answer on the outbox.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// This many changes are in the directory.
    Applied(usize),
    /// The directory missed changes: the outbox starts again.
    Gap,
    /// This registration is outdated: register again.
    Fenced,
    /// The answer belongs to an obsolete batch.
    Stale,
}

/// Next action of the sender.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Next {
    /// Ask the agent for its inventory of these slots; returned once per request.
    Inventory(Box<SlotSet>),
    /// Ask the member which slots it owns and wants, then call [`Outbox::set_slots`].
    QuerySlots(NodeId, Epoch),
    /// Send this batch: the unanswered one again, or a new one.
    Send(Arc<Batch>),
    /// Wait for changes, an answer, a new slot version or a registration.
    Wait,
}

/// Queue of announcements to one member.
#[derive(Debug)]
pub struct Outbox {
    limit: usize,
    registration: Option<(NodeId, Epoch)>,
    /// Sequence number of the next batch.
    sequence: u64,
    /// Newest known version of the member's slots, and the version that was applied.
    latest_version: Option<u64>,
    applied_version: Option<u64>,
    // Slots whose inventory was requested and has not arrived, and slots whose inventory has.
    requested: SlotSet,
    started: SlotSet,
    /// Part of `requested` that [`Outbox::next_step`] has not returned yet.
    unsent_requests: SlotSet,
    /// Whether the next inventory replaces everything in all slots.
    reset: bool,
    inventories: VecDeque<Inventory>,
    /// Changes in slots whose inventory has arrived; sent after the inventories.
    changes: VecDeque<ReplicaChange>,
    /// Batch that was built and is not answered.
    in_flight: Option<Arc<Batch>>,
    superseded: u64,
}

impl Outbox {
    /// Creates a queue of at most `limit` changes.
    pub fn new(limit: usize) -> Outbox {
        Outbox {
            limit,
            registration: None,
            sequence: 0,
            latest_version: None,
            applied_version: None,
            requested: SlotSet::EMPTY,
            started: SlotSet::EMPTY,
            unsent_requests: SlotSet::EMPTY,
            reset: true,
            inventories: VecDeque::new(),
            changes: VecDeque::new(),
            in_flight: None,
            superseded: 0,
        }
    }

    /// Starts again under a new registration.
    pub fn register(&mut self, node: NodeId, epoch: Epoch) {
        self.start_again();
        self.registration = Some((node, epoch));
        (self.sequence, self.latest_version) = (0, None);
    }

    /// Drops the registration and everything queued.
    pub fn unregister(&mut self) {
        self.start_again();
        self.registration = None;
    }

    /// Records the version of the member's slots that was seen under a registration.
    pub fn note_version(&mut self, epoch: Epoch, version: u64) {
        if self.registration.is_some_and(|(_, current)| current == epoch) {
            self.latest_version = self.latest_version.max(Some(version));
        }
    }

    /// Makes the outbox request the member's slots again, because they may have changed.
    pub fn invalidate_slots(&mut self) {
        self.applied_version = None;
    }

    /// Sets the slots that the member owns and those whose inventory it wants. Ignored if `epoch` is
    /// outdated.
    pub fn set_slots(&mut self, epoch: Epoch, version: u64, owned: &SlotSet, wanted: &SlotSet) {
        // Ignore an answer to an old registration, or to a question from before inventories were requested.
        if self.registration.is_none_or(|(_, current)| current != epoch) || !self.is_idle() {
            return;
        }
        self.note_version(epoch, version);
        self.applied_version = Some(version);
        let wanted = if self.reset { owned.clone() } else { wanted.and(owned) };
        self.started = self.started.and(owned).without(&wanted);
        let started = &self.started;
        self.changes.retain(|change| started.has_key(&change.key));
        (self.requested, self.unsent_requests) = (wanted.clone(), wanted);
    }

    /// Queues changes. Changes in requested slots are dropped, because the inventory will contain them.
    pub fn announce(&mut self, changes: &[ReplicaChange]) {
        for change in changes {
            if self.started.has_key(&change.key) {
                self.changes.push_back(*change);
            } else if self.requested.has_key(&change.key) {
                self.superseded += 1;
            }
        }
        if self.changes.len() > self.limit {
            self.start_again();
        }
    }

    /// Queues the inventory of those of the slots that were requested.
    pub fn inventory(&mut self, slots: &SlotSet, replicas: &[(BlockKey, Tier)]) {
        let accepted = self.requested.and(slots);
        if accepted.is_empty() {
            return;
        }
        self.requested = self.requested.without(&accepted);
        self.unsent_requests = self.unsent_requests.without(&accepted);
        self.started = self.started.or(&accepted);
        self.inventories.push_back(Inventory::of(accepted, replicas));
    }

    /// Returns the next action of the sender.
    pub fn next_step(&mut self) -> Next {
        let Some((node, epoch)) = self.registration else { return Next::Wait };
        if !self.unsent_requests.is_empty() {
            return Next::Inventory(Box::new(std::mem::take(&mut self.unsent_requests)));
        }
        if self.is_idle() && (self.applied_version.is_none() || self.latest_version > self.applied_version) {
            return Next::QuerySlots(node, epoch);
        }
        if self.in_flight.is_none() {
            self.in_flight = self.build(node, epoch).map(Arc::new);
        }
        self.in_flight.clone().map_or(Next::Wait, Next::Send)
    }

    /// Processes the directory's answer to the batch sent under `epoch` that starts at `sequence`.
    pub fn process_answer(&mut self, epoch: Epoch, sequence: u64, answer: Answer) -> Outcome {
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
        // Building the batch has moved `self.sequence` past it.
        if expected == self.sequence {
            return Outcome::Applied(batch.len());
        }
        // The directory accepts a reset at or above the number that it expects, never below.
        self.sequence = self.sequence.max(expected);
        self.start_again();
        Outcome::Gap
    }

    /// Starts again after the directory rejected a batch permanently, instead of repeating the batch forever.
    pub fn process_rejection(&mut self) {
        self.start_again();
    }

    /// Number of changes and inventory entries that are queued or in flight.
    pub fn queued(&self) -> usize {
        let in_flight = self.in_flight.as_ref().map_or(0, |batch| batch.len());
        self.inventories.iter().map(Inventory::remaining).sum::<usize>() + self.changes.len() + in_flight
    }

    /// Number of changes dropped because an inventory replaces them.
    pub fn superseded(&self) -> u64 {
        self.superseded
    }

    /// Whether all requested inventories have arrived and were sent.
    fn is_idle(&self) -> bool {
        self.requested.is_empty() && self.inventories.is_empty() && self.in_flight.is_none()
    }

    /// Drops the queue and the member's slots. The sequence numbers of a batch in flight remain used, because
    /// the directory may have applied it.
    fn start_again(&mut self) {
        self.superseded += self.queued() as u64;
        self.inventories.clear();
        self.changes.clear();
        // A queue that overflowed once would otherwise keep its 18 MiB.
        self.changes.shrink_to(BATCH_CHANGES_MAX);
        self.in_flight = None;
        (self.requested, self.unsent_requests, self.started) =
            (SlotSet::EMPTY, SlotSet::EMPTY, SlotSet::EMPTY);
        (self.reset, self.applied_version) = (true, None);
    }

    fn build(&mut self, node: NodeId, epoch: Epoch) -> Option<Batch> {
        let part = match self.inventories.front_mut() {
            Some(inventory) if std::mem::take(&mut self.reset) => inventory.next_part(Opening::Reset),
            Some(inventory) => inventory.next_part(Opening::Slots),
            None if self.changes.is_empty() => return None,
            None => changes_of(&mut self.changes),
        };
        if self.inventories.front().is_some_and(|inventory| inventory.remaining() == 0) {
            self.inventories.pop_front();
        }
        let batch = Batch::of(part, (node, epoch), self.sequence);
        self.sequence += batch.numbers();
        Some(batch)
    }
}
