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
//! Deliberately absent: sending, waiting between attempts (`backoff.rs`), messages of the wire: a [`Batch`] has the form
//! that the directory reads, and whoever sends it puts it into a message.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

use reprise_policy::{BlockKey, Epoch, NodeId, Tier};

use crate::effect::{Change, ReplicaChange};

/// Changes in one message: 8,192 × 17 bytes = 136 KiB, about 2 ms of the directory's time.
pub const BATCH_CHANGES_MAX: usize = 8192;

/// Bit of an operation byte that says "withdrawn".
const WITHDRAWN: u8 = 0x80;

/// Changes to be sent together, and again and again until they are answered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Batch {
    /// Whose.
    pub node: NodeId,
    /// Under which registration.
    pub epoch: Epoch,
    /// Number of the first change within the registration.
    pub sequence: u64,
    /// What the changes are to what was sent before.
    pub begin: Begin,
    /// 16 bytes for each change.
    pub keys: Vec<u8>,
    /// One byte for each change: the tier, with 0x80 when the replica is withdrawn.
    pub operations: Vec<u8>,
}

/// Whether a batch continues or replaces what was announced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Begin {
    /// More of the same.
    Continue,
    /// A whole inventory begins: everything announced before is gone.
    Inventory,
}

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
    /// The directory has missed something: an inventory is wanted now.
    Gap,
    /// This registration is from the past: register again.
    Fenced,
    /// The answer is to a batch that is no longer of interest.
    Stale,
}

/// See the module.
#[derive(Debug)]
pub struct Outbox {
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
    in_flight: Option<Arc<Batch>>,
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

impl Outbox {
    /// A queue of at most `limit` changes.
    pub fn new(limit: usize) -> Outbox {
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
    pub fn grant(&mut self, node: NodeId, epoch: Epoch) {
        self.drop_all();
        (self.node, self.epoch, self.sequence) = (node, epoch, 0);
        self.want_inventory();
    }

    /// The registration is gone.
    pub fn lose(&mut self) {
        self.drop_all();
        self.phase = Phase::Unregistered;
        self.notice_due = false;
    }

    /// Something changed. Dropped while an inventory is wanted, which will contain it, and when there is no registration.
    pub fn announce(&mut self, changes: &[ReplicaChange]) {
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

    /// All that there is, replacing what was said and what waits.
    pub fn announce_all(&mut self, replicas: Vec<(BlockKey, Tier)>) {
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
    pub fn take_inventory_notice(&mut self) -> bool {
        std::mem::take(&mut self.notice_due)
    }

    /// The batch to send: the unanswered one again, or the next one.
    pub fn batch(&mut self) -> Option<Arc<Batch>> {
        if self.in_flight.is_none() {
            self.in_flight = self.build().map(Arc::new);
        }
        self.in_flight.clone()
    }

    /// The directory answered a batch that was sent under `epoch`, starting at `sequence`.
    pub fn answered(&mut self, epoch: Epoch, sequence: u64, answer: Answer) -> Outcome {
        let current = self.epoch == epoch && self.phase != Phase::Unregistered;
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
        // `build` has moved `self.sequence` past the batch.
        if expected == self.sequence {
            return Outcome::Applied(batch.len());
        }
        // An inventory is accepted at or after what the directory expects, never before it.
        self.sequence = self.sequence.max(expected);
        self.drop_all();
        self.want_inventory();
        Outcome::Gap
    }

    /// The directory refused a batch as malformed or for good: start over with an inventory rather than send it for ever.
    pub fn refused(&mut self) {
        if self.phase != Phase::Unregistered {
            self.drop_all();
            self.want_inventory();
        }
    }

    /// Changes and inventory entries waiting or in flight.
    pub fn queued(&self) -> usize {
        let in_flight = self.in_flight.as_ref().map_or(0, |batch| batch.len());
        self.inventory.left() + self.changes.len() + in_flight
    }

    /// Changes dropped because an inventory replaces them.
    pub fn superseded(&self) -> u64 {
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
        let (begin, keys, operations) = if self.inventory.reset_due || self.inventory.left() > 0 {
            self.build_inventory()
        } else if self.changes.is_empty() {
            return None;
        } else {
            self.build_changes()
        };
        let (node, epoch, sequence) = (self.node, self.epoch, self.sequence);
        self.sequence += operations.len() as u64;
        Some(Batch { node, epoch, sequence, begin, keys, operations })
    }

    fn build_inventory(&mut self) -> (Begin, Vec<u8>, Vec<u8>) {
        let begins = std::mem::take(&mut self.inventory.reset_due);
        let part = &self.inventory.replicas[self.inventory.next_part()];
        let keys = part.iter().flat_map(|(key, _)| key.0).collect::<Vec<u8>>();
        let operations: Vec<u8> = part.iter().map(|(_, tier)| operation(*tier, Change::Added)).collect();
        self.inventory.sent += operations.len();
        if self.inventory.left() == 0 {
            self.inventory = Inventory::default();
        }
        (if begins { Begin::Inventory } else { Begin::Continue }, keys, operations)
    }

    fn build_changes(&mut self) -> (Begin, Vec<u8>, Vec<u8>) {
        let count = self.changes.len().min(BATCH_CHANGES_MAX);
        let mut keys = Vec::with_capacity(count * BlockKey::SIZE);
        let mut operations = Vec::with_capacity(count);
        for change in self.changes.drain(..count) {
            keys.extend_from_slice(&change.key.0);
            operations.push(operation(change.tier, change.change));
        }
        (Begin::Continue, keys, operations)
    }
}

impl Batch {
    /// How many changes it has.
    pub fn len(&self) -> usize {
        self.operations.len()
    }

    /// Whether it has none: an inventory of nothing.
    pub fn is_empty(&self) -> bool {
        self.operations.is_empty()
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

/// A change as the directory's operation byte.
fn operation(tier: Tier, change: Change) -> u8 {
    match change {
        Change::Added => tier as u8,
        Change::Removed => tier as u8 | WITHDRAWN,
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

    fn acknowledge(outbox: &mut Outbox) -> Arc<Batch> {
        let batch = outbox.batch().expect("something to send");
        let answer = Answer::Expecting(batch.sequence + batch.len() as u64);
        assert_eq!(outbox.answered(batch.epoch, batch.sequence, answer), Outcome::Applied(batch.len()));
        batch
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
        let begin = |sequence| if sequence == 0 { Begin::Inventory } else { Begin::Continue };
        while outbox.queued() > 2 {
            let request = acknowledge(&mut outbox);
            assert_eq!((request.begin, request.sequence), (begin(sequence), sequence));
            assert!(request.operations.iter().all(|operation| *operation == 1));
            sequence += request.operations.len() as u64;
            sent.extend(BlockKey::unpack(&request.keys).expect("whole keys"));
        }
        assert_eq!(sent, replicas.iter().map(|(key, _)| *key).collect::<Vec<_>>());
        let last = acknowledge(&mut outbox);
        assert_eq!((last.begin, last.sequence), (Begin::Continue, 20_000));
        assert_eq!(last.operations, [2, 2]);
    }

    #[test]
    fn an_empty_inventory_is_announced_too() {
        let mut outbox = Outbox::new(10);
        outbox.grant(NODE, EPOCH);
        outbox.announce_all(Vec::new());
        let request = acknowledge(&mut outbox);
        assert!(request.begin == Begin::Inventory && request.is_empty() && request.keys.is_empty());
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
        let late = Answer::Expecting(4);
        assert_eq!(outbox.answered(EPOCH, in_flight.sequence, late), Outcome::Stale);
        outbox.announce_all(vec![(key(1), Tier::Dram)]);
        let request = acknowledge(&mut outbox);
        assert_eq!(request.begin, Begin::Inventory);
        assert_eq!(request.sequence, 4, "the dropped batch may have been applied: its numbers stay used");
    }

    #[test]
    fn a_gap_asks_for_an_inventory_that_the_directory_will_accept() {
        let mut outbox = flowing(10);
        outbox.announce(&added(0..2));
        let request = outbox.batch().expect("a batch");
        let answer = Answer::Expecting(9);
        assert_eq!(outbox.answered(EPOCH, request.sequence, answer), Outcome::Gap);
        assert!(outbox.take_inventory_notice());
        outbox.announce_all(Vec::new());
        let reset = outbox.batch().expect("an inventory");
        assert_eq!((reset.begin, reset.sequence), (Begin::Inventory, 9));
    }

    #[test]
    fn answers_of_an_older_registration_change_nothing() {
        let mut outbox = flowing(10);
        outbox.announce(&added(0..2));
        let request = outbox.batch().expect("a batch");
        outbox.grant(NODE, Epoch(4));
        outbox.announce_all(vec![(key(0), Tier::Dram)]);
        let fenced = Answer::Fenced;
        assert_eq!(outbox.answered(EPOCH, request.sequence, fenced), Outcome::Stale);
        let request = outbox.batch().expect("a batch");
        assert_eq!((request.epoch, request.sequence), (Epoch(4), 0));
        assert_eq!(outbox.answered(Epoch(4), 0, fenced), Outcome::Fenced);
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

    #[test]
    fn an_operation_is_the_tier_and_a_bit_for_withdrawal() {
        assert_eq!(operation(Tier::Nvme, Change::Added), 2);
        assert_eq!(operation(Tier::Dram, Change::Removed), 0x81);
    }
}
