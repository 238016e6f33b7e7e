//! The last changes of the directory, in order: a ring that readers follow from a position of their own.
//!
//! ```text
//!   sequence   oldest                                        next
//!              │ record │ record │ ...                │ record │
//!              └ segment of up to 4,096 ┘ └ segment ┘ └ filling ┘
//! ```
//!
//! A record is one change of one replica, or a *clearing*: all that was told of a node, of a hash slot, or of a node in a
//! hash slot is void. Records are numbered from 0 within the life of one log, whose [`LogId`] is unique; a [`Position`]
//! is a log and the number of the next record to read.
//!
//! Invariants:
//! * Numbers have no gaps, and a number means one record for ever.
//! * A read gets every record from its position on, in order, or is told that they are gone: never a part of them.
//! * Memory stays within the bytes given, whatever is recorded.
//!
//! Arithmetic: a record is 20 bytes (key 16, node 2, kind 1, and one to align). 32 MiB are 1.6 million. One of 16 members at
//! 10⁶ changes a second in the cluster records 62,500 a second, so a reader may be away for 26 s, or be that slow, and
//! loses nothing. Recording copies 20 bytes, about 2 ns, under a lock that readers hold for one part (1,024 records, 20 KiB,
//! about 3 µs). Segments come one by one and are used again when the ring is full, so nothing is ever moved.
//!
//! Deliberately absent: locks, waiting, what readers know already ([`crate::Follower`]).

use std::collections::VecDeque;

use reprise_policy::key::HASH_SLOTS;
use reprise_policy::{BlockKey, NodeId};

use crate::directory::Operation;

/// Bytes of a record.
pub const RECORD_BYTES: usize = size_of::<Record>();
/// Records of a segment at the most: 80 KiB.
const SEGMENT_RECORDS_MAX: usize = 4096;
/// Segments of a small log at the least, so that using the oldest again costs no more than an eighth of the history.
const SEGMENTS_MIN: usize = 8;
/// Kind of a record that clears; the others are operations as they are on the wire.
const CLEARING: u8 = 0;
/// Hash slot of a clearing record that means every slot.
const EVERY_SLOT: u16 = u16::MAX;
const _: () = assert!(HASH_SLOTS < EVERY_SLOT, "no slot has this number");
/// Node of a clearing record that means every node; node numbers begin with 1.
const EVERY_NODE: NodeId = NodeId(0);

/// One life of one directory's log, unlike any other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct LogId(pub u64);

/// A place in a log: everything before `next` has been read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Position {
    /// Which log.
    pub log: LogId,
    /// Number of the next record.
    pub next: u64,
}

/// What a clearing is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Scope {
    /// Replicas of this node; `None` for every node.
    pub node: Option<NodeId>,
    /// Keys of this hash slot; `None` for every slot.
    pub slot: Option<u16>,
}

/// What happened to one replica.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReplicaChange {
    /// Who holds it, or did.
    pub node: NodeId,
    /// The block.
    pub key: BlockKey,
    /// Whether it came or went, and in which tier.
    pub operation: Operation,
}

/// Consecutive records of a kind.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Run {
    /// Changes, in order.
    Changes(Vec<ReplicaChange>),
    /// All that was told of this scope is void.
    Cleared {
        /// Replicas of this node; `None` for every node.
        node: Option<NodeId>,
        /// Keys of these hash slots; none listed: of every slot.
        slots: Vec<u16>,
    },
}

/// What a read gets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Read {
    /// Records from the position on, and the number of the next.
    Run(Run, u64),
    /// Nothing has happened since.
    UpToDate,
    /// Records from the position on are not there any more.
    Gone,
}

/// See the module.
#[derive(Debug)]
pub struct Log {
    id: LogId,
    /// All full but the last.
    segments: VecDeque<Vec<Record>>,
    segment_records: usize,
    segments_max: usize,
    /// Number of the first record of the first segment.
    oldest: u64,
    next: u64,
}

#[derive(Clone, Copy, Debug)]
struct Record {
    /// Of a clearing: the hash slot, little endian, and zeroes.
    key: [u8; BlockKey::SIZE],
    node: NodeId,
    kind: u8,
}

const _: () = assert!(size_of::<Record>() == 20, "the arithmetic of this module is for 20-byte records");

impl Log {
    /// An empty log that never takes more than `bytes_max` (but as much as [`SEGMENTS_MIN`] records).
    pub fn new(id: LogId, bytes_max: usize) -> Log {
        let records_max = bytes_max / RECORD_BYTES;
        let segment_records = (records_max / SEGMENTS_MIN).clamp(1, SEGMENT_RECORDS_MAX);
        let segments_max = (records_max / segment_records).max(SEGMENTS_MIN);
        Log { id, segments: VecDeque::new(), segment_records, segments_max, oldest: 0, next: 0 }
    }

    /// Records changes of a node, in order; how many they were. Hot.
    pub fn changed(&mut self, node: NodeId, changes: impl IntoIterator<Item = (BlockKey, Operation)>) -> u64 {
        let before_all = self.next;
        let mut changes = changes.into_iter().peekable();
        while changes.peek().is_some() {
            let segment_records = self.segment_records;
            let segment = self.segment_with_room();
            let before = segment.len();
            let part = changes.by_ref().take(segment_records - before);
            segment.extend(part.map(|(key, operation)| Record { key: key.0, node, kind: operation.wire() }));
            let recorded = segment.len() - before;
            self.next += recorded as u64;
        }
        self.next - before_all
    }

    /// Records that all that was told of a scope is void.
    pub fn cleared(&mut self, scope: Scope) {
        let mut key = [0; BlockKey::SIZE];
        key[..2].copy_from_slice(&scope.slot.unwrap_or(EVERY_SLOT).to_le_bytes());
        let record = Record { key, node: scope.node.unwrap_or(EVERY_NODE), kind: CLEARING };
        self.segment_with_room().push(record);
        self.next += 1;
    }

    /// Behind the last record.
    pub fn end(&self) -> Position {
        Position { log: self.id, next: self.next }
    }

    /// Whether a read from this position gets every record.
    pub fn reaches(&self, position: Position) -> Reach {
        if position.log != self.id || position.next > self.next {
            Reach::Foreign
        } else if position.next < self.oldest {
            Reach::Gone
        } else {
            Reach::There
        }
    }

    /// Reads records of one kind from number `from` on, at most `records_max` (and at least one).
    pub fn read(&self, from: u64, records_max: usize) -> Read {
        if from < self.oldest {
            return Read::Gone;
        }
        let ahead = usize::try_from(self.next.saturating_sub(from)).unwrap_or(usize::MAX);
        let count_max = records_max.max(1).min(ahead);
        let Some(first) = self.slices(from).find_map(<[Record]>::first) else { return Read::UpToDate };
        let run = if first.kind == CLEARING {
            clearing(first, self.slices(from).flatten().take(count_max))
        } else {
            changes(self.slices(from), count_max)
        };
        let next = from + run.records();
        Read::Run(run, next)
    }

    /// Heap memory, in bytes.
    pub fn bytes(&self) -> usize {
        self.segments.iter().map(|segment| segment.capacity() * RECORD_BYTES).sum()
    }

    /// The records from a number on that is not below the oldest.
    fn slices(&self, from: u64) -> impl Iterator<Item = &[Record]> {
        // What is beyond memory is beyond the end.
        let index = usize::try_from(from - self.oldest).unwrap_or(usize::MAX);
        let segments = self.segments.iter().skip(index / self.segment_records);
        let offsets = std::iter::once(index % self.segment_records).chain(std::iter::repeat(0));
        segments.zip(offsets).map(|(segment, offset)| segment.get(offset..).unwrap_or_default())
    }

    fn segment_with_room(&mut self) -> &mut Vec<Record> {
        if self.segments.back().is_none_or(|last| last.len() == self.segment_records) {
            let segment = self.segment();
            self.segments.push_back(segment);
        }
        self.segments.back_mut().expect("there is one with room")
    }

    /// An empty segment: the oldest, when there are enough.
    fn segment(&mut self) -> Vec<Record> {
        if self.segments.len() < self.segments_max {
            return Vec::with_capacity(self.segment_records);
        }
        let mut oldest = self.segments.pop_front().expect("there are several");
        self.oldest += oldest.len() as u64;
        oldest.clear();
        oldest
    }
}

/// Whether a log still has what comes after a position.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reach {
    /// Every record.
    There,
    /// Not any more.
    Gone,
    /// It is no position of this log.
    Foreign,
}

impl Position {
    /// The position `records` further on.
    pub fn after(self, records: u64) -> Position {
        Position { log: self.log, next: self.next + records }
    }
}

impl Scope {
    /// All of a node: its inventory is replaced, or it is forgotten.
    pub fn node(node: NodeId) -> Scope {
        Scope { node: Some(node), slot: None }
    }

    /// All of a hash slot: it is another member's.
    pub fn slot(slot: u16) -> Scope {
        Scope { node: None, slot: Some(slot) }
    }

    /// What a node holds of a hash slot.
    pub fn node_in_slot(node: NodeId, slot: u16) -> Scope {
        Scope { node: Some(node), slot: Some(slot) }
    }
}

impl Run {
    /// Records that it is made of.
    pub fn records(&self) -> u64 {
        match self {
            Run::Changes(changes) => changes.len() as u64,
            Run::Cleared { slots, .. } => (slots.len() as u64).max(1),
        }
    }
}

impl Record {
    fn slot(&self) -> u16 {
        u16::from_le_bytes([self.key[0], self.key[1]])
    }
}

/// The leading changes, at most `count_max`.
fn changes<'a>(slices: impl Iterator<Item = &'a [Record]>, count_max: usize) -> Run {
    let mut changes = Vec::with_capacity(count_max);
    for slice in slices {
        let count = slice.len().min(count_max - changes.len());
        for record in &slice[..count] {
            let Some(operation) = Operation::from_wire(record.kind) else { return Run::Changes(changes) };
            changes.push(ReplicaChange { node: record.node, key: BlockKey(record.key), operation });
        }
        if changes.len() == count_max {
            break;
        }
    }
    Run::Changes(changes)
}

fn clearing<'a>(first: &Record, records: impl Iterator<Item = &'a Record>) -> Run {
    let node = Some(first.node).filter(|node| *node != EVERY_NODE);
    if first.slot() == EVERY_SLOT {
        return Run::Cleared { node, slots: Vec::new() };
    }
    let same = |record: &&Record| {
        record.kind == CLEARING && record.node == first.node && record.slot() != EVERY_SLOT
    };
    Run::Cleared { node, slots: records.take_while(same).map(Record::slot).collect() }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use reprise_policy::Tier;

    use super::*;

    /// What was recorded, one by one.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    enum One {
        Change(ReplicaChange),
        Cleared(Scope),
    }

    fn key(number: u8) -> BlockKey {
        BlockKey([number; 16])
    }

    fn record(log: &mut Log, one: One) {
        match one {
            One::Change(change) => {
                log.changed(change.node, [(change.key, change.operation)]);
            }
            One::Cleared(scope) => log.cleared(scope),
        }
    }

    fn ones(run: &Run) -> Vec<One> {
        match run {
            Run::Changes(changes) => changes.iter().copied().map(One::Change).collect(),
            Run::Cleared { node, slots } if slots.is_empty() => {
                vec![One::Cleared(Scope { node: *node, slot: None })]
            }
            Run::Cleared { node, slots } => {
                slots.iter().map(|slot| One::Cleared(Scope { node: *node, slot: Some(*slot) })).collect()
            }
        }
    }

    fn one() -> impl Strategy<Value = One> {
        let operation = prop::sample::select(vec![
            Operation::Announce(Tier::Dram),
            Operation::Announce(Tier::Nvme),
            Operation::Withdraw(Tier::Dram),
            Operation::Withdraw(Tier::Nvme),
        ]);
        let change = (1u16..4, any::<u8>(), operation).prop_map(|(node, number, operation)| {
            One::Change(ReplicaChange { node: NodeId(node), key: key(number), operation })
        });
        let scope = (prop::option::of((1u16..4).prop_map(NodeId)), prop::option::of(0u16..HASH_SLOTS))
            .prop_map(|(node, slot)| One::Cleared(Scope { node, slot }));
        prop_oneof![3 => change, 1 => scope]
    }

    proptest! {
        #[test]
        fn a_read_gets_all_records_from_its_position_in_order_or_is_told_that_they_are_gone(
            all in prop::collection::vec(one(), 0..200),
            bytes_max in 0usize..3000,
            records_max in 0usize..10,
            from in 0u64..220,
        ) {
            let mut log = Log::new(LogId(1), bytes_max);
            for one in &all {
                record(&mut log, *one);
                prop_assert!(log.bytes() <= bytes_max.max(SEGMENTS_MIN * RECORD_BYTES));
            }
            prop_assert_eq!(log.end(), Position { log: LogId(1), next: all.len() as u64 });
            let (mut at, mut got) = (from, Vec::new());
            let reach = log.reaches(Position { log: LogId(1), next: from });
            loop {
                match log.read(at, records_max) {
                    Read::Run(run, next) => {
                        prop_assert_eq!(next, at + run.records());
                        prop_assert!(run.records() <= records_max.max(1) as u64);
                        got.extend(ones(&run));
                        at = next;
                    }
                    Read::UpToDate => {
                        let first = usize::try_from(from).expect("small").min(all.len());
                        prop_assert_eq!(&got[..], &all[first..]);
                        let there = if from <= all.len() as u64 { Reach::There } else { Reach::Foreign };
                        prop_assert_eq!(reach, there);
                        break;
                    }
                    Read::Gone => {
                        prop_assert_eq!((at, got.len(), reach), (from, 0, Reach::Gone));
                        // Two segments of at least eight may be cut off: one that is being filled, and what is left over.
                        let kept = (bytes_max / RECORD_BYTES * 3 / 4).max(SEGMENTS_MIN - 1);
                        prop_assert!(from + (kept as u64) < all.len() as u64);
                        break;
                    }
                }
            }
        }
    }

    #[test]
    fn a_position_of_another_log_or_of_the_future_is_foreign() {
        let log = Log::new(LogId(1), 1000);
        assert_eq!(log.reaches(Position { log: LogId(1), next: 0 }), Reach::There);
        assert_eq!(log.reaches(Position { log: LogId(1), next: 1 }), Reach::Foreign);
        assert_eq!(log.reaches(Position { log: LogId(2), next: 0 }), Reach::Foreign);
    }
}
