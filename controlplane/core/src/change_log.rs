//! The most recent changes of the directory, in order: a ring buffer that each reader reads at its own
//! position.
//!
//! ```text
//!   sequence   oldest                                        next
//!              │ record │ record │ ...                │ record │
//!              └ segment of up to 4,096 ┘ └ segment ┘ └ filling ┘
//! ```
//!
//! A record is one change of one replica, or a *clearing*: the replicas of a node, of a hash slot, or of a
//! node in a hash slot are invalid. Records are numbered from 0 within one log, whose [`LogId`] is unique. A
//! [`Position`] is a log and the number of the next record to read.
//!
//! Invariants:
//! * Numbers have no gaps, and identify one record permanently.
//! * A read returns every record from its position on, in order, or reports that some were evicted.
//! * Memory stays within the given limit.
//!
//! A record has 20 bytes (key 16, node 2, kind 1, padding 1), so 32 MiB hold 1.6 million. At 10⁶ changes a
//! second in a cluster of 16 members, one member records 62,500 a second; a reader may lag by 26 s. Recording
//! copies 20 bytes, about 2 ns, under a lock that readers hold for one part (1,024 records, 20 KiB, about 3
//! µs). Segments are allocated one by one and reused when the ring is full, so records are never moved.
//!
//! Locks, waiting, and the positions of readers ([`crate::Follower`]) are the caller's.

use std::collections::VecDeque;

use reprise_policy::key::HASH_SLOTS;
use reprise_policy::{BlockKey, NodeId};

use crate::directory::Operation;

/// Size of a record in bytes.
pub const RECORD_BYTES: usize = size_of::<Record>();
/// Maximum number of records of a segment: 80 KiB.
const SEGMENT_RECORDS_MAX: usize = 4096;
/// Minimum number of segments, so that reusing the oldest one evicts at most an eighth of the history.
const SEGMENTS_MIN: usize = 8;
/// Kind of a clearing record; other kinds are wire operations.
const CLEARING: u8 = 0;
/// Hash slot in a clearing record that stands for every slot.
const EVERY_SLOT: u16 = u16::MAX;
const _: () = assert!(HASH_SLOTS < EVERY_SLOT, "no slot has this number");
/// Node in a clearing record that stands for every node; node numbers start at 1.
const EVERY_NODE: NodeId = NodeId(0);

/// Unique id of a log.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct LogId(pub u64);

/// A position in a log: everything before `next` has been read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Position {
    /// Log of the position.
    pub log: LogId,
    /// Number of the next record.
    pub next: u64,
}

/// Scope of a clearing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Scope {
    /// Replicas of this node; `None` for every node.
    pub node: Option<NodeId>,
    /// Keys of this hash slot; `None` for every slot.
    pub slot: Option<u16>,
}

/// A change of one replica.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReplicaChange {
    /// Node of the replica.
    pub node: NodeId,
    /// Key of the block.
    pub key: BlockKey,
    /// Announced or withdrawn, with the tier.
    pub operation: Operation,
}

/// Consecutive records of one kind.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Run {
    /// Changes, in order.
    Changes(Vec<ReplicaChange>),
    /// The replicas in this scope are invalid.
    Cleared {
        /// Replicas of this node; `None` for every node.
        node: Option<NodeId>,
        /// Keys of these hash slots; empty for every slot.
        slots: Vec<u16>,
    },
}

/// Result of a read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ReadResult {
    /// Records from the position on, and the number of the next one.
    Run(Run, u64),
    /// There are no records after the position yet.
    UpToDate,
    /// Records after the position were evicted.
    Evicted,
}

/// The change log of one directory.
#[derive(Debug)]
pub struct ChangeLog {
    id: LogId,
    /// Segments; all but the last are full.
    segments: VecDeque<Vec<Record>>,
    segment_records: usize,
    segments_max: usize,
    /// Number of the first record in the first segment.
    oldest: u64,
    next: u64,
}

#[derive(Clone, Copy, Debug)]
struct Record {
    /// Block key; in a clearing, the hash slot (little endian) and zeroes.
    key: [u8; BlockKey::SIZE],
    node: NodeId,
    kind: u8,
}

const _: () = assert!(size_of::<Record>() == 20, "the arithmetic of this module is for 20-byte records");

impl ChangeLog {
    /// Creates an empty log that takes at most `bytes_max`, but at least [`SEGMENTS_MIN`] records.
    pub fn new(id: LogId, bytes_max: usize) -> ChangeLog {
        let records_max = bytes_max / RECORD_BYTES;
        let segment_records = (records_max / SEGMENTS_MIN).clamp(1, SEGMENT_RECORDS_MAX);
        let segments_max = (records_max / segment_records).max(SEGMENTS_MIN);
        ChangeLog { id, segments: VecDeque::new(), segment_records, segments_max, oldest: 0, next: 0 }
    }

    /// Records changes of a node, in order; returns their number. Hot path.
    pub fn record_changes(
        &mut self,
        node: NodeId,
        changes: impl IntoIterator<Item = (BlockKey, Operation)>,
    ) -> u64 {
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

    /// Records that the replicas in a scope are invalid.
    pub fn record_clearing(&mut self, scope: Scope) {
        let mut key = [0; BlockKey::SIZE];
        key[..2].copy_from_slice(&scope.slot.unwrap_or(EVERY_SLOT).to_le_bytes());
        let record = Record { key, node: scope.node.unwrap_or(EVERY_NODE), kind: CLEARING };
        self.segment_with_room().push(record);
        self.next += 1;
    }

    /// Position after the last record.
    pub fn end(&self) -> Position {
        Position { log: self.id, next: self.next }
    }

    /// Whether a read from this position returns every record.
    pub fn coverage(&self, position: Position) -> Coverage {
        if position.log != self.id || position.next > self.next {
            Coverage::Foreign
        } else if position.next < self.oldest {
            Coverage::Evicted
        } else {
            Coverage::Complete
        }
    }

    /// Reads records of one kind from number `from` on: at least one, at most `records_max`.
    pub fn read(&self, from: u64, records_max: usize) -> ReadResult {
        if from < self.oldest {
            return ReadResult::Evicted;
        }
        let ahead = usize::try_from(self.next.saturating_sub(from)).unwrap_or(usize::MAX);
        let count_max = records_max.max(1).min(ahead);
        let Some(first) = self.slices(from).find_map(<[Record]>::first) else { return ReadResult::UpToDate };
        let run = if first.kind == CLEARING {
            clearing(first, self.slices(from).flatten().take(count_max))
        } else {
            changes(self.slices(from), count_max)
        };
        let next = from + run.records();
        ReadResult::Run(run, next)
    }

    /// Heap memory of the log, in bytes.
    pub fn bytes(&self) -> usize {
        self.segments.iter().map(|segment| segment.capacity() * RECORD_BYTES).sum()
    }

    /// Records from number `from` on, which must not be below the oldest.
    fn slices(&self, from: u64) -> impl Iterator<Item = &[Record]> {
        // A difference beyond usize is beyond the end.
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
        self.segments.back_mut().expect("a segment with room was added")
    }

    /// An empty segment: new, or the oldest one if the maximum is reached.
    fn segment(&mut self) -> Vec<Record> {
        if self.segments.len() < self.segments_max {
            return Vec::with_capacity(self.segment_records);
        }
        let mut oldest = self.segments.pop_front().expect("the minimum is eight");
        self.oldest += oldest.len() as u64;
        oldest.clear();
        oldest
    }
}

/// Whether a log still contains all records after a position.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Coverage {
    /// All records are available.
    Complete,
    /// Some records were evicted.
    Evicted,
    /// The position does not belong to this log.
    Foreign,
}

impl Position {
    /// Position after `records` more records.
    pub fn after(self, records: u64) -> Position {
        Position { log: self.log, next: self.next + records }
    }
}

impl Scope {
    /// All replicas of a node, whose inventory is replaced or which is forgotten.
    pub fn node(node: NodeId) -> Scope {
        Scope { node: Some(node), slot: None }
    }

    /// All replicas in a hash slot that another member owns now.
    pub fn slot(slot: u16) -> Scope {
        Scope { node: None, slot: Some(slot) }
    }

    /// Replicas of a node in a hash slot.
    pub fn node_in_slot(node: NodeId, slot: u16) -> Scope {
        Scope { node: Some(node), slot: Some(slot) }
    }
}

impl Run {
    /// Number of records in the run.
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

/// Leading changes, at most `count_max`.
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

    /// A single recorded change or clearing.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    enum SingleRecord {
        Change(ReplicaChange),
        Cleared(Scope),
    }

    fn key(number: u8) -> BlockKey {
        BlockKey([number; 16])
    }

    fn record(log: &mut ChangeLog, one: SingleRecord) {
        match one {
            SingleRecord::Change(change) => {
                log.record_changes(change.node, [(change.key, change.operation)]);
            }
            SingleRecord::Cleared(scope) => log.record_clearing(scope),
        }
    }

    fn ones(run: &Run) -> Vec<SingleRecord> {
        match run {
            Run::Changes(changes) => changes.iter().copied().map(SingleRecord::Change).collect(),
            Run::Cleared { node, slots } if slots.is_empty() => {
                vec![SingleRecord::Cleared(Scope { node: *node, slot: None })]
            }
            Run::Cleared { node, slots } => slots
                .iter()
                .map(|slot| SingleRecord::Cleared(Scope { node: *node, slot: Some(*slot) }))
                .collect(),
        }
    }

    fn one() -> impl Strategy<Value = SingleRecord> {
        let operation = prop::sample::select(vec![
            Operation::Announce(Tier::Dram),
            Operation::Announce(Tier::Nvme),
            Operation::Withdraw(Tier::Dram),
            Operation::Withdraw(Tier::Nvme),
        ]);
        let change = (1u16..4, any::<u8>(), operation).prop_map(|(node, number, operation)| {
            SingleRecord::Change(ReplicaChange { node: NodeId(node), key: key(number), operation })
        });
        let scope = (prop::option::of((1u16..4).prop_map(NodeId)), prop::option::of(0u16..HASH_SLOTS))
            .prop_map(|(node, slot)| SingleRecord::Cleared(Scope { node, slot }));
        prop_oneof![3 => change, 1 => scope]
    }

    proptest! {
        #[test]
        fn a_read_returns_all_records_from_its_position_or_reports_eviction(
            all in prop::collection::vec(one(), 0..200),
            bytes_max in 0usize..3000,
            records_max in 0usize..10,
            from in 0u64..220,
        ) {
            let mut log = ChangeLog::new(LogId(1), bytes_max);
            for one in &all {
                record(&mut log, *one);
                prop_assert!(log.bytes() <= bytes_max.max(SEGMENTS_MIN * RECORD_BYTES));
            }
            prop_assert_eq!(log.end(), Position { log: LogId(1), next: all.len() as u64 });
            let (mut at, mut got) = (from, Vec::new());
            let reach = log.coverage(Position { log: LogId(1), next: from });
            loop {
                match log.read(at, records_max) {
                    ReadResult::Run(run, next) => {
                        prop_assert_eq!(next, at + run.records());
                        prop_assert!(run.records() <= records_max.max(1) as u64);
                        got.extend(ones(&run));
                        at = next;
                    }
                    ReadResult::UpToDate => {
                        let first = usize::try_from(from).expect("small").min(all.len());
                        prop_assert_eq!(&got[..], &all[first..]);
                        let there = if from <= all.len() as u64 { Coverage::Complete } else { Coverage::Foreign };
                        prop_assert_eq!(reach, there);
                        break;
                    }
                    ReadResult::Evicted => {
                        prop_assert_eq!((at, got.len(), reach), (from, 0, Coverage::Evicted));
                        // Up to two of at least eight segments are missing: the one being filled, and the
                        // remainder.
                        let kept = (bytes_max / RECORD_BYTES * 3 / 4).max(SEGMENTS_MIN - 1);
                        prop_assert!(from + (kept as u64) < all.len() as u64);
                        break;
                    }
                }
            }
        }
    }

    #[test]
    fn positions_of_another_log_or_beyond_the_end_are_foreign() {
        let log = ChangeLog::new(LogId(1), 1000);
        assert_eq!(log.coverage(Position { log: LogId(1), next: 0 }), Coverage::Complete);
        assert_eq!(log.coverage(Position { log: LogId(1), next: 1 }), Coverage::Foreign);
        assert_eq!(log.coverage(Position { log: LogId(2), next: 0 }), Coverage::Foreign);
    }
}
