//! Readers of a directory that changes under them: whatever happens in which order, and however often a reader comes back
//! or falls behind, it ends with what the directory holds.

use std::collections::BTreeSet;

use proptest::prelude::*;
use reprise_controlplane_core::{
    Changes, Cursor, Directory, Follower, HeldReplica, Log, LogId, Opening, Operation, Position, Reason, Run,
    Scope, Source, Step, Told, Update, Updated, Voided,
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

/// What an update opens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Open {
    Nothing,
    /// The inventory of this key's slot.
    Slot(u8),
    /// That of all slots, of which others may have been begun before.
    Slots,
    /// Everything anew.
    Anew,
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
    /// The slot of this key is another member's from now on.
    LoseSlot {
        key: u8,
    },
    /// All slots are this one's again, and nothing is known of those that were not.
    RegainSlots,
    Sweep,
    /// The reader takes some messages.
    Read {
        messages: usize,
    },
    /// It comes back with the last position that it has.
    Return,
    /// It comes back without one, or with one of another log.
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
        1 => Just(Open::Anew),
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

/// A directory with its log, fed as a member feeds it.
struct World {
    directory: Directory,
    log: Log,
    epochs: Vec<u64>,
    sequences: Vec<u64>,
}

impl World {
    fn new(log_bytes: usize) -> World {
        let mut directory = Directory::new();
        directory.own(&SlotSet::ALL);
        for node in 1..=NODES {
            directory.register(NodeId(node), Epoch(1));
        }
        let count = usize::from(NODES) + 1;
        let (epochs, sequences) = (vec![1; count], vec![0; count]);
        let mut world = World { directory, log: Log::new(LOG, log_bytes), epochs, sequences };
        (1..=NODES).for_each(|node| world.announce(node, Open::Slots, &[]));
        world
    }

    /// As `controlplane/src/directory.rs` does it.
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
            Open::Anew => Opening::Anew(&SlotSet::ALL),
        };
        let sequence = &mut self.sequences[usize::from(node)];
        let epoch = Epoch(self.epochs[usize::from(node)]);
        let node = NodeId(node);
        let ends = &SlotSet::EMPTY;
        let update = Update { node, epoch, sequence: *sequence, opening, changes, ends };
        let updated = self.directory.update(&update);
        *sequence += u64::from(opening != Opening::Nothing) + changes.len() as u64;
        let Updated::Expecting { expected, applied, voided } = updated else { panic!("it is registered") };
        assert_eq!((expected, applied), (*sequence, 0..changes.len()));
        match voided {
            Voided::Nothing => {}
            Voided::Node => self.log.cleared(Scope::node(node)),
            Voided::Slots(slots) => {
                slots.iter().for_each(|slot| self.log.cleared(Scope::node_in_slot(node, slot)));
            }
        }
        self.log.changed(node, self.directory.taken(node, changes));
    }

    fn own(&mut self, slots: &SlotSet) {
        let lost = self.directory.owned().without(slots);
        self.directory.own(slots);
        lost.iter().for_each(|slot| self.log.cleared(Scope::slot(slot)));
    }

    fn forget(&mut self, node: u16) {
        let index = usize::from(node);
        self.directory.forget(NodeId(node), Epoch(self.epochs[index]));
        self.epochs[index] += 1;
        self.sequences[index] = 0;
        self.directory.register(NodeId(node), Epoch(self.epochs[index]));
        self.log.cleared(Scope::node(NodeId(node)));
    }

    /// Everything of the slot goes at once; the log has one record of it.
    fn lose_slot(&mut self, slot: u16) {
        let mut left = self.directory.owned().clone();
        left.remove(slot);
        self.own(&left);
    }

    fn held(&self) -> BTreeSet<HeldReplica> {
        let (mut cursor, mut held) = (Cursor::default(), Vec::new());
        while !cursor.is_at_end() {
            self.directory.read(&mut cursor, 3, &mut held);
        }
        let count = held.len();
        let set: BTreeSet<HeldReplica> = held.into_iter().collect();
        assert_eq!(set.len(), count, "nothing is read twice");
        let size = self.directory.size();
        let swept = self.directory.owned() == &SlotSet::ALL;
        assert!(
            count as u64 <= size.replicas && (!swept || count as u64 == size.replicas),
            "everything is read"
        );
        set
    }
}

/// What a reader makes of what it is told.
struct Reader {
    follower: Follower,
    held: BTreeSet<HeldReplica>,
    position: Option<Position>,
    snapshots: Vec<Reason>,
}

impl Reader {
    fn new(from: Option<Position>) -> Reader {
        let follower = Follower::new(from, 4);
        Reader { follower, held: BTreeSet::new(), position: from, snapshots: Vec::new() }
    }

    /// Takes one message; whether there was one.
    fn read(&mut self, world: &World) -> bool {
        loop {
            match self.follower.source() {
                Source::Directory => {
                    let told = self.follower.read_directory(&world.directory);
                    self.take(told, world);
                    return true;
                }
                Source::Log => match self.follower.read_log(&world.log) {
                    Step::Tell(told) => {
                        self.take(told, world);
                        return true;
                    }
                    Step::GoOn => {}
                    Step::Wait => {
                        assert_eq!(self.held, world.held(), "it is up to date");
                        return false;
                    }
                },
            }
        }
    }

    fn take(&mut self, told: Told, world: &World) {
        match told {
            Told::SnapshotBegins(reason) => {
                self.snapshots.push(reason);
                self.held.clear();
                self.position = None;
            }
            Told::Run { run, position } => {
                self.apply(run);
                if let (Some(before), Some(after)) = (self.position, position) {
                    assert!(after.next > before.next, "positions go forwards");
                }
                self.position = position;
            }
            Told::Current(position) => {
                if position == world.log.end() {
                    assert_eq!(self.held, world.held(), "told so");
                }
                self.position = Some(position);
            }
        }
    }

    fn apply(&mut self, run: Run) {
        match run {
            Run::Changes(changes) => changes.into_iter().for_each(|change| {
                let (Operation::Announce(tier) | Operation::Withdraw(tier)) = change.operation;
                let replica = HeldReplica { node: change.node, key: change.key, tier };
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
    fn a_reader_ends_with_what_the_directory_holds(
        actions in actions(),
        log_bytes in prop_oneof![Just(400usize), Just(4000), Just(40_000)],
    ) {
        let mut world = World::new(log_bytes);
        let mut reader = Reader::new(None);
        for action in &actions {
            match action {
                Action::Update { node, open, changes } => world.announce(*node, *open, changes),
                Action::Forget { node } => world.forget(*node),
                Action::LoseSlot { key: number } => world.lose_slot(key(*number).hash_slot()),
                Action::RegainSlots => world.own(&SlotSet::ALL),
                Action::Sweep => { world.directory.sweep(1000); }
                Action::Read { messages } => { (0..*messages).all(|_| reader.read(&world)); }
                Action::Return => {
                    // Without a position it has to begin anew, and does not know yet what it will be told.
                    let held = std::mem::take(&mut reader.held);
                    let position = reader.position;
                    reader = Reader::new(position);
                    if position.is_some() {
                        reader.held = held;
                    }
                }
                Action::Restart { foreign } => {
                    let elsewhere = Position { log: LogId(8), next: world.log.end().next };
                    reader = Reader::new(foreign.then_some(elsewhere));
                }
            }
        }
        while reader.read(&world) {}
        prop_assert_eq!(reader.held, world.held());
        prop_assert_eq!(reader.position, Some(world.log.end()));
    }
}

fn drained(reader: &mut Reader, world: &World) -> usize {
    (0..).take_while(|_| reader.read(world)).count()
}

#[test]
fn a_reader_that_comes_back_in_time_gets_the_changes_and_no_snapshot() {
    let mut world = World::new(40_000);
    let mut reader = Reader::new(None);
    world.announce(1, Open::Nothing, &[(1, 1), (2, 1)]);
    drained(&mut reader, &world);
    assert_eq!(reader.snapshots, [Reason::Start]);
    world.announce(2, Open::Nothing, &[(2, 2)]);
    let mut back = Reader::new(reader.position);
    back.held = reader.held;
    assert_eq!(drained(&mut back, &world), 2, "the change, and that it is current");
    assert_eq!(back.snapshots, []);
}

#[test]
fn a_reader_that_comes_back_too_late_or_to_another_life_is_told_why_it_gets_a_snapshot() {
    let mut world = World::new(400);
    let early = world.log.end();
    for number in 0..60 {
        world.announce(1, Open::Nothing, &[(number, 1)]);
    }
    for (from, reason) in [
        (None, Reason::Start),
        (Some(early), Reason::Behind),
        (Some(Position { log: LogId(8), next: 60 }), Reason::OtherLog),
        (Some(Position { log: LOG, next: 61 }), Reason::OtherLog),
    ] {
        let mut reader = Reader::new(from);
        drained(&mut reader, &world);
        assert_eq!(reader.snapshots, [reason], "{from:?}");
        assert_eq!(reader.held.len(), 60);
    }
}

#[test]
fn a_reader_that_is_slower_than_the_log_gets_another_snapshot_and_one_that_is_not_does_not() {
    let mut world = World::new(4000);
    let (mut quick, mut slow) = (Reader::new(None), Reader::new(None));
    for round in 0..200_u8 {
        world.announce(1, Open::Nothing, &[(round % 60, 1), (round % 7, 0x81)]);
        (0..2).all(|_| quick.read(&world));
        if round % 100 == 0 {
            slow.read(&world);
        }
    }
    drained(&mut quick, &world);
    drained(&mut slow, &world);
    assert_eq!(quick.snapshots, [Reason::Start], "changes go on while it takes a snapshot");
    assert_eq!(slow.snapshots, [Reason::Start, Reason::Behind]);
    assert_eq!((&quick.held, &slow.held), (&world.held(), &world.held()));
}
