//! Model test of readers of a changing directory: for any order of events, and however often a reader returns
//! or falls behind, it converges to the contents of the directory.

use std::collections::BTreeSet;

use proptest::prelude::*;
use reprise_controlplane_core::{
    ChangeLog, Changes, Cursor, Directory, Follower, FollowerMessage, Invalidation, LogId, Opening,
    Operation, Position, ReplicaEntry, Run, Scope, SnapshotReason, Source, Step, Update, UpdateOutcome,
};
use reprise_policy::{BlockKey, Epoch, NodeId, SlotSet};

const NODES: u16 = 4;
const LOG: LogId = LogId(7);

/// A few keys in three hash slots; some share their table hash.
fn key(number: u8) -> BlockKey {
    let mut key = [0; 16];
    key[0] = number % 3;
    key[1] = number;
    key[8..].copy_from_slice(&u64::from(number / 2).wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes());
    BlockKey(key)
}

/// Inventories that an update opens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Open {
    Nothing,
    /// The inventory of this key's slot.
    Slot(u8),
    /// Inventories of all slots, some of which may have been begun.
    Slots,
    /// All inventories, after a reset.
    Reset,
}

#[derive(Clone, Debug)]
enum Action {
    Update {
        node: u16,
        open: Open,
        changes: Vec<(u8, u8)>,
    },
    Forget {
        node: u16,
    },
    /// The slot of this key moves to another member.
    LoseSlot {
        key: u8,
    },
    /// All slots are owned again; regained slots are empty.
    RegainSlots,
    Sweep,
    /// The reader reads some messages.
    Read {
        messages: usize,
    },
    /// The reader reconnects at its last position.
    Return,
    /// The reader reconnects without a position, or with one of another log.
    Restart {
        foreign: bool,
    },
}

fn actions() -> impl Strategy<Value = Vec<Action>> {
    let node = 1..=NODES;
    let change = (0u8..60, prop::sample::select(vec![1u8, 2, 0x81, 0x82]));
    let open = prop_oneof![
        6 => Just(Open::Nothing),
        2 => (0u8..60).prop_map(Open::Slot),
        1 => Just(Open::Slots),
        1 => Just(Open::Reset),
    ];
    let action = prop_oneof![
        8 => (node.clone(), open, prop::collection::vec(change, 0..20))
            .prop_map(|(node, open, changes)| Action::Update { node, open, changes }),
        1 => node.prop_map(|node| Action::Forget { node }),
        1 => (0u8..60).prop_map(|key| Action::LoseSlot { key }),
        1 => Just(Action::RegainSlots),
        1 => Just(Action::Sweep),
        10 => (1usize..8).prop_map(|messages| Action::Read { messages }),
        1 => Just(Action::Return),
        1 => any::<bool>().prop_map(|foreign| Action::Restart { foreign }),
    ];
    prop::collection::vec(action, 1..120)
}

/// A directory with its log, fed like a member's.
struct TestCluster {
    directory: Directory,
    log: ChangeLog,
    epochs: Vec<u64>,
    sequences: Vec<u64>,
}

impl TestCluster {
    fn new(log_bytes: usize) -> TestCluster {
        let mut directory = Directory::new();
        directory.set_owned_slots(&SlotSet::ALL);
        for node in 1..=NODES {
            directory.register(NodeId(node), Epoch(1));
        }
        let count = usize::from(NODES) + 1;
        let (epochs, sequences) = (vec![1; count], vec![0; count]);
        let mut cluster = TestCluster { directory, log: ChangeLog::new(LOG, log_bytes), epochs, sequences };
        (1..=NODES).for_each(|node| cluster.announce(node, Open::Slots, &[]));
        cluster
    }

    fn announce(&mut self, node: u16, open: Open, changes: &[(u8, u8)]) {
        let packed: Vec<u8> = changes.iter().flat_map(|(number, _)| key(*number).0).collect();
        let operations: Vec<u8> = changes.iter().map(|(_, operation)| *operation).collect();
        let changes = Changes::parse(&packed, &operations).expect("well formed");
        let one: SlotSet = match open {
            Open::Slot(number) => [key(number).hash_slot()].into_iter().collect(),
            _ => SlotSet::EMPTY,
        };
        let opening = match open {
            Open::Nothing => Opening::Nothing,
            Open::Slot(_) => Opening::Slots(&one),
            Open::Slots => Opening::Slots(&SlotSet::ALL),
            Open::Reset => Opening::Reset(&SlotSet::ALL),
        };
        let sequence = &mut self.sequences[usize::from(node)];
        let epoch = Epoch(self.epochs[usize::from(node)]);
        let node = NodeId(node);
        let ends = &SlotSet::EMPTY;
        let update = Update { node, epoch, sequence: *sequence, opening, changes, ends };
        let updated = self.directory.update(&update);
        *sequence += u64::from(opening != Opening::Nothing) + changes.len() as u64;
        let UpdateOutcome::Expecting { expected, applied, invalidated } = updated else {
            panic!("the node is registered")
        };
        assert_eq!((expected, applied), (*sequence, 0..changes.len()));
        match invalidated {
            Invalidation::Nothing => {}
            Invalidation::Node => self.log.record_clearing(Scope::node(node)),
            Invalidation::Slots(slots) => {
                slots.iter().for_each(|slot| self.log.record_clearing(Scope::node_in_slot(node, slot)));
            }
        }
        self.log.record_changes(node, self.directory.accepted_changes(node, changes));
    }

    fn set_owned_slots(&mut self, slots: &SlotSet) {
        let lost = self.directory.owned().without(slots);
        self.directory.set_owned_slots(slots);
        lost.iter().for_each(|slot| self.log.record_clearing(Scope::slot(slot)));
    }

    fn forget(&mut self, node: u16) {
        let index = usize::from(node);
        self.directory.forget(NodeId(node), Epoch(self.epochs[index]));
        self.epochs[index] += 1;
        self.sequences[index] = 0;
        self.directory.register(NodeId(node), Epoch(self.epochs[index]));
        self.log.record_clearing(Scope::node(NodeId(node)));
    }

    /// Removes all entries of a slot, which is one record in the log.
    fn lose_slot(&mut self, slot: u16) {
        let mut left = self.directory.owned().clone();
        left.remove(slot);
        self.set_owned_slots(&left);
    }

    fn held(&self) -> BTreeSet<ReplicaEntry> {
        let (mut cursor, mut held) = (Cursor::default(), Vec::new());
        while !cursor.is_at_end() {
            self.directory.read(&mut cursor, 3, &mut held);
        }
        let count = held.len();
        let set: BTreeSet<ReplicaEntry> = held.into_iter().collect();
        assert_eq!(set.len(), count, "no duplicates");
        let size = self.directory.size();
        let swept = self.directory.owned() == &SlotSet::ALL;
        assert!(count as u64 <= size.replicas && (!swept || count as u64 == size.replicas), "complete");
        set
    }
}

/// State that a reader builds from its messages.
struct Reader {
    follower: Follower,
    held: BTreeSet<ReplicaEntry>,
    position: Option<Position>,
    snapshots: Vec<SnapshotReason>,
}

impl Reader {
    fn new(from: Option<Position>) -> Reader {
        let follower = Follower::new(from, 4);
        Reader { follower, held: BTreeSet::new(), position: from, snapshots: Vec::new() }
    }

    /// Reads one message; whether there was one.
    fn read(&mut self, cluster: &TestCluster) -> bool {
        loop {
            match self.follower.source() {
                Source::Directory => {
                    let message = self.follower.read_directory(&cluster.directory);
                    self.take(message, cluster);
                    return true;
                }
                Source::ChangeLog => match self.follower.read_log(&cluster.log) {
                    Step::Send(message) => {
                        self.take(message, cluster);
                        return true;
                    }
                    Step::Continue => {}
                    Step::Wait => {
                        assert_eq!(self.held, cluster.held(), "up to date");
                        return false;
                    }
                },
            }
        }
    }

    fn take(&mut self, message: FollowerMessage, cluster: &TestCluster) {
        match message {
            FollowerMessage::SnapshotBegins(reason) => {
                self.snapshots.push(reason);
                self.held.clear();
                self.position = None;
            }
            FollowerMessage::Run { run, position } => {
                self.apply(run);
                if let (Some(before), Some(after)) = (self.position, position) {
                    assert!(after.next > before.next, "positions increase");
                }
                self.position = position;
            }
            FollowerMessage::Current(position) => {
                if position == cluster.log.end() {
                    assert_eq!(self.held, cluster.held(), "message so");
                }
                self.position = Some(position);
            }
        }
    }

    fn apply(&mut self, run: Run) {
        match run {
            Run::Changes(changes) => changes.into_iter().for_each(|change| {
                let (Operation::Announce(tier) | Operation::Withdraw(tier)) = change.operation;
                let replica = ReplicaEntry { node: change.node, key: change.key, tier };
                match change.operation {
                    Operation::Announce(_) => self.held.insert(replica),
                    Operation::Withdraw(_) => self.held.remove(&replica),
                };
            }),
            Run::Cleared { node, slots } => self.held.retain(|replica| {
                let of_node = node.is_none_or(|node| node == replica.node);
                let in_slots = slots.is_empty() || slots.contains(&replica.key.hash_slot());
                !(of_node && in_slots)
            }),
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1024))]

    #[test]
    fn a_reader_converges_to_the_contents_of_the_directory(
        actions in actions(),
        log_bytes in prop_oneof![Just(400usize), Just(4000), Just(40_000)],
    ) {
        let mut cluster = TestCluster::new(log_bytes);
        let mut reader = Reader::new(None);
        for action in &actions {
            match action {
                Action::Update { node, open, changes } => cluster.announce(*node, *open, changes),
                Action::Forget { node } => cluster.forget(*node),
                Action::LoseSlot { key: number } => cluster.lose_slot(key(*number).hash_slot()),
                Action::RegainSlots => cluster.set_owned_slots(&SlotSet::ALL),
                Action::Sweep => { cluster.directory.sweep(1000); }
                Action::Read { messages } => { (0..*messages).all(|_| reader.read(&cluster)); }
                Action::Return => {
                    // Without a position the reader starts over, with a snapshot of unknown contents.
                    let held = std::mem::take(&mut reader.held);
                    let position = reader.position;
                    reader = Reader::new(position);
                    if position.is_some() {
                        reader.held = held;
                    }
                }
                Action::Restart { foreign } => {
                    let elsewhere = Position { log: LogId(8), next: cluster.log.end().next };
                    reader = Reader::new(foreign.then_some(elsewhere));
                }
            }
        }
        while reader.read(&cluster) {}
        prop_assert_eq!(reader.held, cluster.held());
        prop_assert_eq!(reader.position, Some(cluster.log.end()));
    }
}

fn drained(reader: &mut Reader, cluster: &TestCluster) -> usize {
    (0..).take_while(|_| reader.read(cluster)).count()
}

#[test]
fn a_returning_reader_gets_changes_without_a_snapshot() {
    let mut cluster = TestCluster::new(40_000);
    let mut reader = Reader::new(None);
    cluster.announce(1, Open::Nothing, &[(1, 1), (2, 1)]);
    drained(&mut reader, &cluster);
    assert_eq!(reader.snapshots, [SnapshotReason::Start]);
    cluster.announce(2, Open::Nothing, &[(2, 2)]);
    let mut back = Reader::new(reader.position);
    back.held = reader.held;
    assert_eq!(drained(&mut back, &cluster), 2, "the change, and the end of catching up");
    assert_eq!(back.snapshots, []);
}

#[test]
fn a_reader_with_an_unusable_position_gets_a_snapshot_with_its_reason() {
    let mut cluster = TestCluster::new(400);
    let early = cluster.log.end();
    for number in 0..60 {
        cluster.announce(1, Open::Nothing, &[(number, 1)]);
    }
    for (from, reason) in [
        (None, SnapshotReason::Start),
        (Some(early), SnapshotReason::Behind),
        (Some(Position { log: LogId(8), next: 60 }), SnapshotReason::OtherLog),
        (Some(Position { log: LOG, next: 61 }), SnapshotReason::OtherLog),
    ] {
        let mut reader = Reader::new(from);
        drained(&mut reader, &cluster);
        assert_eq!(reader.snapshots, [reason], "{from:?}");
        assert_eq!(reader.held.len(), 60);
    }
}

#[test]
fn only_a_reader_slower_than_the_log_gets_another_snapshot() {
    let mut cluster = TestCluster::new(4000);
    let (mut quick, mut slow) = (Reader::new(None), Reader::new(None));
    for round in 0..200_u8 {
        cluster.announce(1, Open::Nothing, &[(round % 60, 1), (round % 7, 0x81)]);
        (0..2).all(|_| quick.read(&cluster));
        if round % 100 == 0 {
            slow.read(&cluster);
        }
    }
    drained(&mut quick, &cluster);
    drained(&mut slow, &cluster);
    assert_eq!(quick.snapshots, [SnapshotReason::Start], "changes continue during the snapshot");
    assert_eq!(slow.snapshots, [SnapshotReason::Start, SnapshotReason::Behind]);
    assert_eq!((&quick.held, &slow.held), (&cluster.held(), &cluster.held()));
}
