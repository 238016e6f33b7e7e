//! Announcements on their way to the directory: order kept, bounded, and replaced by an inventory when they cannot be.
//!
//! ```text
//!              grant                        announce_all
//! Unregistered ─────► WantingInventory ────────────────► Flowing
//!      ▲                 ▲      changes are dropped:        │   changes are queued
//!      │                 │      the inventory comes later   │
//!      │                 └──────────── overflow, gap ───────┘
//!      └── lost (from any)
//! ```
//!
//! Sequence numbers count changes within one registration, from 0. A batch is built once and sent as it is until it
//! is answered: the directory recognises what it has already applied. The first batch of an inventory carries `reset`.
//!
//! Pure: no clock, no I/O.

use std::collections::VecDeque;
use std::ops::Range;

use prost::bytes::Bytes;
use reprise_agent_core::effect::{Change, ReplicaChange};
use reprise_policy::{BlockKey, Epoch, NodeId, Tier};
use reprise_proto::controlplane::{UpdateReply, UpdateRequest};

use super::wire;

/// Changes in one message: 8,192 × 17 bytes = 136 KiB, about 2 ms of the directory's time.
pub(super) const BATCH_CHANGES_MAX: usize = 8192;

/// What an answer meant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    /// This many changes are in the directory.
    Applied(usize),
    /// The directory has missed something: an inventory is wanted now.
    Gap,
    /// This registration is from the past: register again.
    Fenced,
    /// The answer is to a batch that is no longer of interest.
    Stale,
}

/// See the module.
#[derive(Debug)]
pub(super) struct Outbox {
    limit: usize,
    phase: Phase,
    /// Registration that batches are sent under; meaningful unless `Unregistered`.
    node: NodeId,
    epoch: Epoch,
    /// Sequence number of the next batch to build.
    sequence: u64,
    inventory: Inventory,
    /// Changes after the inventory.
    changes: VecDeque<ReplicaChange>,
    /// Built, not answered.
    in_flight: Option<Batch>,
    /// An inventory must be asked for; taken by [`Outbox::take_inventory_notice`].
    notice_due: bool,
    superseded: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Unregistered,
    WantingInventory,
    Flowing,
}

/// The part of an inventory that is not yet in a batch.
#[derive(Debug, Default)]
struct Inventory {
    replicas: Vec<(BlockKey, Tier)>,
    sent: usize,
    /// The next batch starts this inventory, even when it is empty.
    reset_due: bool,
}

#[derive(Debug)]
struct Batch {
    request: UpdateRequest,
    changes: usize,
}

impl Outbox {
    /// A queue of at most `limit` changes.
    pub(super) fn new(limit: usize) -> Outbox {
        Outbox {
            limit,
            phase: Phase::Unregistered,
            node: NodeId(0),
            epoch: Epoch(0),
            sequence: 0,
            inventory: Inventory::default(),
            changes: VecDeque::new(),
            in_flight: None,
            notice_due: false,
            superseded: 0,
        }
    }

    /// A registration was granted: everything starts anew with an inventory.
    pub(super) fn grant(&mut self, node: NodeId, epoch: Epoch) {
        self.drop_all();
        (self.node, self.epoch, self.sequence) = (node, epoch, 0);
        self.want_inventory();
    }

    /// The registration is gone.
    pub(super) fn lose(&mut self) {
        self.drop_all();
        self.phase = Phase::Unregistered;
        self.notice_due = false;
    }

    pub(super) fn announce(&mut self, changes: &[ReplicaChange]) {
        if self.phase != Phase::Flowing {
            self.superseded += changes.len() as u64;
        } else if self.changes.len() + changes.len() > self.limit {
            self.superseded += changes.len() as u64;
            self.drop_all();
            self.want_inventory();
        } else {
            self.changes.extend(changes);
        }
    }

    pub(super) fn announce_all(&mut self, replicas: Vec<(BlockKey, Tier)>) {
        if self.phase == Phase::Unregistered {
            self.superseded += replicas.len() as u64;
            return;
        }
        self.drop_all();
        self.inventory = Inventory { replicas, sent: 0, reset_due: true };
        self.phase = Phase::Flowing;
        self.notice_due = false;
    }

    /// Whether the agent must be asked for an inventory; says so once per want.
    pub(super) fn take_inventory_notice(&mut self) -> bool {
        std::mem::take(&mut self.notice_due)
    }

    /// The batch to send: the unanswered one again, or the next one.
    pub(super) fn batch(&mut self) -> Option<UpdateRequest> {
        if self.in_flight.is_none() {
            self.in_flight = self.build();
        }
        self.in_flight.as_ref().map(|batch| batch.request.clone())
    }

    /// The directory answered a batch that was sent under `epoch`, starting at `sequence`.
    pub(super) fn answered(&mut self, epoch: Epoch, sequence: u64, reply: &UpdateReply) -> Outcome {
        let current = self.epoch == epoch && self.phase != Phase::Unregistered;
        if current && reply.fenced {
            return Outcome::Fenced;
        }
        let Some(batch) = self
            .in_flight
            .take_if(|batch| current && batch.request.epoch == epoch.0 && batch.request.sequence == sequence)
        else {
            return Outcome::Stale;
        };
        // `build` has moved `self.sequence` past the batch.
        if reply.expected_sequence == self.sequence {
            return Outcome::Applied(batch.changes);
        }
        // An inventory is accepted at or after what the directory expects, never before it.
        self.sequence = self.sequence.max(reply.expected_sequence);
        self.drop_all();
        self.want_inventory();
        Outcome::Gap
    }

    /// The directory refused a batch as malformed or for good: start over with an inventory rather than send it for ever.
    pub(super) fn refused(&mut self) {
        if self.phase != Phase::Unregistered {
            self.drop_all();
            self.want_inventory();
        }
    }

    /// Changes and inventory entries waiting or in flight.
    pub(super) fn queued(&self) -> usize {
        let in_flight = self.in_flight.as_ref().map_or(0, |batch| batch.changes);
        self.inventory.left() + self.changes.len() + in_flight
    }

    /// Changes dropped because an inventory replaces them.
    pub(super) fn superseded(&self) -> u64 {
        self.superseded
    }

    fn want_inventory(&mut self) {
        self.phase = Phase::WantingInventory;
        self.notice_due = true;
    }

    /// Forgets what waits. Sequence numbers of a batch in flight stay used: it may have been applied.
    fn drop_all(&mut self) {
        self.superseded += self.queued() as u64;
        self.inventory = Inventory::default();
        self.changes.clear();
        // A queue that overflowed once would otherwise keep its 18 MiB.
        self.changes.shrink_to(BATCH_CHANGES_MAX);
        self.in_flight = None;
    }

    fn build(&mut self) -> Option<Batch> {
        let (reset, keys, operations) = if self.inventory.reset_due || self.inventory.left() > 0 {
            self.build_inventory()
        } else if self.changes.is_empty() {
            return None;
        } else {
            self.build_changes()
        };
        let changes = operations.len();
        let request = UpdateRequest {
            node: u32::from(self.node.0),
            epoch: self.epoch.0,
            sequence: self.sequence,
            keys,
            operations,
            reset,
        };
        self.sequence += changes as u64;
        Some(Batch { request, changes })
    }

    fn build_inventory(&mut self) -> (bool, Bytes, Bytes) {
        let reset = std::mem::take(&mut self.inventory.reset_due);
        let part = &self.inventory.replicas[self.inventory.next_part()];
        let keys = part.iter().flat_map(|(key, _)| key.0).collect::<Vec<u8>>();
        let operations: Vec<u8> =
            part.iter().map(|(_, tier)| wire::operation(*tier, Change::Added)).collect();
        self.inventory.sent += operations.len();
        if self.inventory.left() == 0 {
            self.inventory = Inventory::default();
        }
        (reset, keys.into(), operations.into())
    }

    fn build_changes(&mut self) -> (bool, Bytes, Bytes) {
        let count = self.changes.len().min(BATCH_CHANGES_MAX);
        let mut keys = Vec::with_capacity(count * BlockKey::SIZE);
        let mut operations = Vec::with_capacity(count);
        for change in self.changes.drain(..count) {
            keys.extend_from_slice(&change.key.0);
            operations.push(wire::operation(change.tier, change.change));
        }
        (false, keys.into(), operations.into())
    }
}

impl Inventory {
    fn left(&self) -> usize {
        self.replicas.len() - self.sent
    }

    fn next_part(&self) -> Range<usize> {
        self.sent..self.sent + self.left().min(BATCH_CHANGES_MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NODE: NodeId = NodeId(7);
    const EPOCH: Epoch = Epoch(3);

    fn key(number: u32) -> BlockKey {
        let mut key = [0; 16];
        key[..4].copy_from_slice(&number.to_be_bytes());
        BlockKey(key)
    }

    fn added(numbers: Range<u32>) -> Vec<ReplicaChange> {
        numbers
            .map(|number| ReplicaChange { key: key(number), tier: Tier::Nvme, change: Change::Added })
            .collect()
    }

    fn flowing(limit: usize) -> Outbox {
        let mut outbox = Outbox::new(limit);
        outbox.grant(NODE, EPOCH);
        outbox.announce_all(Vec::new());
        acknowledge(&mut outbox);
        outbox
    }

    fn acknowledge(outbox: &mut Outbox) -> UpdateRequest {
        let request = outbox.batch().expect("something to send");
        let expected_sequence = request.sequence + request.operations.len() as u64;
        let reply = UpdateReply { fenced: false, expected_sequence };
        let outcome = outbox.answered(Epoch(request.epoch), request.sequence, &reply);
        assert_eq!(outcome, Outcome::Applied(request.operations.len()));
        request
    }

    #[test]
    fn an_inventory_goes_out_in_order_with_reset_on_its_first_batch_only() {
        let mut outbox = Outbox::new(10);
        outbox.grant(NODE, EPOCH);
        assert!(outbox.take_inventory_notice());
        assert!(!outbox.take_inventory_notice(), "asked once");
        let replicas: Vec<_> = (0..20_000).map(|number| (key(number), Tier::Dram)).collect();
        outbox.announce_all(replicas.clone());
        outbox.announce(&added(1..3));
        let mut sent = Vec::new();
        let mut sequence = 0;
        while outbox.queued() > 2 {
            let request = acknowledge(&mut outbox);
            assert_eq!((request.reset, request.sequence), (sequence == 0, sequence));
            assert!(request.operations.iter().all(|operation| *operation == 1));
            sequence += request.operations.len() as u64;
            sent.extend(BlockKey::unpack(&request.keys).expect("whole keys"));
        }
        assert_eq!(sent, replicas.iter().map(|(key, _)| *key).collect::<Vec<_>>());
        let last = acknowledge(&mut outbox);
        assert_eq!((last.reset, last.sequence, last.operations.as_ref()), (false, 20_000, [2, 2].as_slice()));
    }

    #[test]
    fn an_empty_inventory_is_announced_too() {
        let mut outbox = Outbox::new(10);
        outbox.grant(NODE, EPOCH);
        outbox.announce_all(Vec::new());
        let request = acknowledge(&mut outbox);
        assert!(request.reset && request.keys.is_empty());
        assert!(outbox.batch().is_none());
    }

    #[test]
    fn changes_before_the_inventory_are_superseded_by_it() {
        let mut outbox = Outbox::new(10);
        outbox.announce(&added(0..1));
        outbox.grant(NODE, EPOCH);
        outbox.announce(&added(0..2));
        assert!(outbox.batch().is_none());
        assert_eq!(outbox.superseded(), 3);
    }

    #[test]
    fn a_batch_is_sent_again_unchanged_until_it_is_answered() {
        let mut outbox = flowing(10);
        outbox.announce(&added(0..2));
        let first = outbox.batch().expect("a batch");
        outbox.announce(&added(2..3));
        assert_eq!(outbox.batch(), Some(first));
        assert_eq!(acknowledge(&mut outbox).operations.len(), 2);
        assert_eq!(acknowledge(&mut outbox).operations.len(), 1);
    }

    #[test]
    fn overflow_drops_all_and_asks_for_an_inventory() {
        let mut outbox = flowing(10);
        assert!(!outbox.take_inventory_notice());
        outbox.announce(&added(0..4));
        let in_flight = outbox.batch().expect("a batch");
        outbox.announce(&added(4..11));
        outbox.announce(&added(11..15));
        assert!(outbox.take_inventory_notice());
        assert_eq!((outbox.queued(), outbox.superseded()), (0, 15));
        let late = UpdateReply { fenced: false, expected_sequence: 4 };
        assert_eq!(outbox.answered(EPOCH, in_flight.sequence, &late), Outcome::Stale);
        outbox.announce_all(vec![(key(1), Tier::Dram)]);
        let request = acknowledge(&mut outbox);
        assert!(request.reset);
        assert_eq!(request.sequence, 4, "the dropped batch may have been applied: its numbers stay used");
    }

    #[test]
    fn a_gap_asks_for_an_inventory_that_the_directory_will_accept() {
        let mut outbox = flowing(10);
        outbox.announce(&added(0..2));
        let request = outbox.batch().expect("a batch");
        let reply = UpdateReply { fenced: false, expected_sequence: 9 };
        assert_eq!(outbox.answered(EPOCH, request.sequence, &reply), Outcome::Gap);
        assert!(outbox.take_inventory_notice());
        outbox.announce_all(Vec::new());
        let reset = outbox.batch().expect("an inventory");
        assert_eq!((reset.reset, reset.sequence), (true, 9));
    }

    #[test]
    fn answers_of_an_older_registration_change_nothing() {
        let mut outbox = flowing(10);
        outbox.announce(&added(0..2));
        let request = outbox.batch().expect("a batch");
        outbox.grant(NODE, Epoch(4));
        outbox.announce_all(vec![(key(0), Tier::Dram)]);
        let fenced = UpdateReply { fenced: true, expected_sequence: 0 };
        assert_eq!(outbox.answered(EPOCH, request.sequence, &fenced), Outcome::Stale);
        let request = outbox.batch().expect("a batch");
        assert_eq!((request.epoch, request.sequence), (4, 0));
        assert_eq!(outbox.answered(Epoch(4), 0, &fenced), Outcome::Fenced);
    }

    #[test]
    fn a_refused_batch_is_not_sent_for_ever() {
        let mut outbox = flowing(10);
        outbox.announce(&added(0..2));
        assert!(outbox.batch().is_some());
        outbox.refused();
        assert!(outbox.batch().is_none());
        assert!(outbox.take_inventory_notice());
    }

    #[test]
    fn nothing_is_queued_without_a_registration() {
        let mut outbox = flowing(10);
        outbox.lose();
        outbox.announce(&added(0..2));
        outbox.announce_all(vec![(key(0), Tier::Dram)]);
        assert!(outbox.batch().is_none());
        assert!(!outbox.take_inventory_notice());
    }
}
