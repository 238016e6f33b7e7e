//! Compares the directory with a simple model: random registrations, updates with gaps and repetitions,
//! changes of slots, deaths, sweeps and lookups.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;
use reprise_controlplane_core::{
    Changes, Directory, Invalidation, LiveNodes, LookupResult, Opening, Update, UpdateOutcome,
};
use reprise_policy::routing::{LoadClass, Replica};
use reprise_policy::{BlockKey, Epoch, NodeId, SlotSet, Tier};

/// Hash slots of the test keys.
const SLOTS: [u16; 3] = [0, 16, 32];

/// A few keys, so that nodes share them, with many in one hash slot.
fn key(number: u8) -> BlockKey {
    let mut key = [0; 16];
    key[0] = number % 3;
    key[8..].copy_from_slice(&u64::from(number).wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes());
    BlockKey(key)
}

/// A subset of the slots: one bit for each.
fn set(mask: u8) -> SlotSet {
    (0..3).filter(|bit| mask & (1 << bit) != 0).map(|bit| SLOTS[bit]).collect()
}

#[derive(Clone, Copy, Debug)]
enum Open {
    Nothing,
    Slots(u8),
    Reset(u8),
}

#[derive(Clone, Debug)]
struct Batch {
    skew: i64,
    epoch_back: u64,
    open: Open,
    changes: Vec<(u8, u8)>,
    ends: u8,
}

#[derive(Clone, Debug)]
enum Step {
    Own { mask: u8 },
    Expect { node: u16 },
    GiveUp { node: u16 },
    Register { node: u16 },
    Forget { node: u16 },
    Update { node: u16, batch: Batch },
    Die { node: u16 },
    Return { node: u16 },
    Sweep { places: usize },
    Lookup { asking: u16 },
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let node = 1u16..5;
    let change = (0u8..40, prop::sample::select(vec![1u8, 2, 0x81, 0x82]));
    let batch = (
        prop_oneof![8 => Just(0i64), 1 => -6i64..0, 1 => 1i64..4],
        prop_oneof![9 => Just(0u64), 1 => Just(1)],
        prop_oneof![5 => Just(Open::Nothing), 3 => (0u8..8).prop_map(Open::Slots), 1 => (0u8..8).prop_map(Open::Reset)],
        prop::collection::vec(change, 0..30),
        prop_oneof![1 => Just(0u8), 1 => 0u8..8],
    )
        .prop_map(|(skew, epoch_back, open, changes, ends)| Batch { skew, epoch_back, open, changes, ends });
    let step = prop_oneof![
        1 => prop_oneof![Just(7u8), 0u8..8].prop_map(|mask| Step::Own { mask }),
        1 => node.clone().prop_map(|node| Step::Expect { node }),
        1 => node.clone().prop_map(|node| Step::GiveUp { node }),
        1 => node.clone().prop_map(|node| Step::Register { node }),
        1 => node.clone().prop_map(|node| Step::Forget { node }),
        10 => (node.clone(), batch).prop_map(|(node, batch)| Step::Update { node, batch }),
        1 => node.clone().prop_map(|node| Step::Die { node }),
        2 => node.clone().prop_map(|node| Step::Return { node }),
        2 => (1usize..3000).prop_map(|places| Step::Sweep { places }),
        4 => (0u16..6).prop_map(|asking| Step::Lookup { asking }),
    ];
    prop::collection::vec(step, 1..80)
}

/// Model of a directory: announcements of each node in owned slots.
#[derive(Default)]
struct Model {
    owned: BTreeSet<u16>,
    nodes: BTreeMap<u16, ModelNode>,
}

#[derive(Default)]
struct ModelNode {
    epoch: u64,
    registered: bool,
    awaited: bool,
    expected: u64,
    begun: BTreeSet<u16>,
    whole: BTreeSet<u16>,
    held: BTreeSet<(BlockKey, Tier)>,
}

impl ModelNode {
    fn lose(&mut self, lost: impl Fn(u16) -> bool) {
        self.begun.retain(|slot| !lost(*slot));
        self.whole.retain(|slot| !lost(*slot));
        self.held.retain(|(key, _)| !lost(key.hash_slot()));
    }

    fn update(&mut self, owned: &BTreeSet<u16>, batch: &Batch) -> UpdateOutcome {
        if !self.registered || batch.epoch_back > 0 {
            return UpdateOutcome::Fenced;
        }
        let sequence = self.expected.saturating_add_signed(batch.skew);
        let refused = UpdateOutcome::Expecting {
            expected: self.expected,
            applied: 0..0,
            invalidated: Invalidation::Nothing,
        };
        // Handle each number separately, as if it were a message.
        let (opens, opened) = match batch.open {
            Open::Nothing => (0, SlotSet::EMPTY),
            Open::Slots(mask) => (1, set(mask)),
            Open::Reset(mask) => (1, set(mask)),
        };
        let mut invalidated = Invalidation::Nothing;
        if matches!(batch.open, Open::Reset(_)) {
            if sequence < self.expected {
                return refused;
            }
            self.lose(|_| true);
            self.expected = sequence;
            invalidated = Invalidation::Node;
        } else if sequence > self.expected {
            return refused;
        }
        let mut news = false;
        if opens == 1 && self.expected == sequence {
            let opened: BTreeSet<u16> = opened.iter().filter(|slot| owned.contains(slot)).collect();
            let again: SlotSet = opened.intersection(&self.begun).copied().collect();
            if !again.is_empty() {
                invalidated = Invalidation::Slots(Box::new(again));
            }
            self.lose(|slot| opened.contains(&slot));
            self.begun.extend(opened);
            self.expected += 1;
            news = true;
        }
        let first = self.expected - sequence - opens;
        let first = usize::try_from(first).expect("small").min(batch.changes.len());
        for (number, operation) in &batch.changes[first..] {
            (self.expected, news) = (self.expected + 1, true);
            let replica = (key(*number), Tier::from_wire(operation & 0x7f).expect("a tier"));
            if !self.begun.contains(&replica.0.hash_slot()) {
                continue;
            }
            if operation & 0x80 == 0 {
                self.held.insert(replica);
            } else {
                self.held.remove(&replica);
            }
        }
        if news {
            self.whole.extend(set(batch.ends).iter().filter(|slot| self.begun.contains(slot)));
        }
        UpdateOutcome::Expecting { expected: self.expected, applied: first..batch.changes.len(), invalidated }
    }
}

impl Model {
    fn set_owned_slots(&mut self, mask: u8) {
        self.owned = set(mask).iter().collect();
        let owned = &self.owned;
        self.nodes.values_mut().for_each(|node| node.lose(|slot| !owned.contains(&slot)));
    }

    fn register(&mut self, node: u16) -> u64 {
        let epoch = self.nodes.get(&node).map_or(0, |known| known.epoch) + 1;
        let registered = ModelNode { epoch, registered: true, awaited: true, ..ModelNode::default() };
        self.nodes.insert(node, registered);
        epoch
    }

    fn forget(&mut self, node: u16) {
        if let Some(known) = self.nodes.get_mut(&node).filter(|known| known.registered) {
            (known.registered, known.awaited) = (false, false);
            known.lose(|_| true);
        }
    }

    fn is_partial(&self, slot: u16) -> bool {
        self.nodes.values().any(|node| node.awaited && !node.whole.contains(&slot))
    }

    fn found(&self, key: &BlockKey, live: &BTreeSet<u16>, asking: u16) -> BTreeSet<Replica> {
        self.nodes
            .iter()
            .filter(|(node, _)| live.contains(node) && **node != asking)
            .flat_map(|(node, known)| known.held.iter().map(|(key, tier)| (*node, *key, *tier)))
            .filter(|(_, held, _)| held == key)
            .map(|(node, _, tier)| Replica { node: NodeId(node), tier, load: LoadClass::default() })
            .collect()
    }
}

fn update(directory: &mut Directory, model: &Model, node: u16, batch: &Batch) -> UpdateOutcome {
    let (epoch, expected) = model.nodes.get(&node).map_or((1, 0), |known| (known.epoch, known.expected));
    let keys: Vec<u8> = batch.changes.iter().flat_map(|(number, _)| key(*number).0).collect();
    let operations: Vec<u8> = batch.changes.iter().map(|(_, operation)| *operation).collect();
    let opened = match batch.open {
        Open::Nothing => SlotSet::EMPTY,
        Open::Slots(mask) | Open::Reset(mask) => set(mask),
    };
    directory.update(&Update {
        node: NodeId(node),
        epoch: Epoch(epoch - batch.epoch_back.min(epoch)),
        sequence: expected.saturating_add_signed(batch.skew),
        opening: match batch.open {
            Open::Nothing => Opening::Nothing,
            Open::Slots(_) => Opening::Slots(&opened),
            Open::Reset(_) => Opening::Reset(&opened),
        },
        changes: Changes::parse(&keys, &operations).expect("well formed"),
        ends: &set(batch.ends),
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn lookups_match_the_model(steps in steps()) {
        let mut directory = Directory::new();
        let mut model = Model::default();
        model.set_owned_slots(7);
        directory.set_owned_slots(&set(7));
        let mut live: BTreeSet<u16> = (1..5).collect();
        let mut found = LookupResult::default();
        let all_keys: Vec<BlockKey> = (0..40).map(key).collect();
        for step in &steps {
            match step {
                Step::Own { mask } => {
                    let version = directory.version();
                    let same = *directory.owned() == set(*mask);
                    model.set_owned_slots(*mask);
                    directory.set_owned_slots(&set(*mask));
                    prop_assert_eq!(directory.version() > version, !same);
                }
                Step::Expect { node } => {
                    model.nodes.entry(*node).or_default().awaited = true;
                    directory.expect_node(NodeId(*node));
                }
                Step::GiveUp { node } => {
                    if let Some(known) = model.nodes.get_mut(node).filter(|known| !known.registered) {
                        known.awaited = false;
                    }
                    directory.stop_expecting(NodeId(*node));
                }
                Step::Register { node } => {
                    let epoch = model.register(*node);
                    directory.register(NodeId(*node), Epoch(epoch));
                    directory.register(NodeId(*node), Epoch(epoch - 1)); // late, changes nothing
                }
                Step::Forget { node } => {
                    if let Some(known) = model.nodes.get(node) {
                        directory.forget(NodeId(*node), Epoch(known.epoch + 1)); // not the current one
                        directory.forget(NodeId(*node), Epoch(known.epoch));
                    }
                    model.forget(*node);
                }
                Step::Update { node, batch } => {
                    let updated = update(&mut directory, &model, *node, batch);
                    let owned = model.owned.clone();
                    let expected = model.nodes.get_mut(node).map_or(UpdateOutcome::Fenced, |known| known.update(&owned, batch));
                    prop_assert_eq!(updated, expected);
                }
                Step::Die { node } => { live.remove(node); }
                Step::Return { node } => { live.insert(*node); }
                Step::Sweep { places } => { directory.sweep(*places); }
                Step::Lookup { asking } => {
                    let set: LiveNodes = live.iter().map(|node| NodeId(*node)).collect();
                    directory.lookup(&all_keys, &set, Some(NodeId(*asking)), &mut found);
                    prop_assert_eq!(found.keys(), all_keys.len());
                    let mut partial = 0;
                    for (index, key) in (0u32..).zip(&all_keys) {
                        let answer = found.of(index as usize);
                        let answered: BTreeSet<Replica> = answer.iter().copied().collect();
                        prop_assert_eq!(answered.len(), answer.len(), "no duplicate replicas");
                        prop_assert_eq!(answered, model.found(key, &live, *asking));
                        let owned = model.owned.contains(&key.hash_slot());
                        prop_assert_eq!(found.elsewhere().contains(&index), !owned);
                        partial += u32::from(owned && model.is_partial(key.hash_slot()));
                    }
                    prop_assert_eq!(found.partial(), partial);
                }
            }
            prop_assert_eq!(directory.audit(), Ok(()));
            for (node, known) in &model.nodes {
                let standing = directory.slot_status(NodeId(*node), Epoch(known.epoch));
                prop_assert_eq!(standing.is_some(), known.registered);
                if let Some(standing) = standing {
                    let wanted: BTreeSet<u16> = model.owned.difference(&known.begun).copied().collect();
                    prop_assert!(standing.wanted.iter().eq(wanted));
                }
                for key in &all_keys {
                    prop_assert_eq!(directory.accepts(NodeId(*node), key), known.begun.contains(&key.hash_slot()));
                }
            }
        }
        while directory.sweep(1000) {}
        let size = directory.size();
        let held: BTreeSet<BlockKey> =
            model.nodes.values().flat_map(|node| node.held.iter().map(|(key, _)| *key)).collect();
        prop_assert_eq!(size.keys, held.len() as u64);
        prop_assert_eq!(size.stale_entries, 0);
        prop_assert_eq!(size.slots_owned, model.owned.len());
        prop_assert_eq!(size.slots_partial, model.owned.iter().filter(|slot| model.is_partial(**slot)).count());
        prop_assert_eq!(size.replicas, model.nodes.values().map(|node| node.held.len() as u64).sum::<u64>());
        for counted in size.nodes {
            let known = &model.nodes[&counted.node.0];
            let dram = known.held.iter().filter(|(_, tier)| *tier == Tier::Dram).count() as u64;
            prop_assert_eq!((counted.dram, counted.nvme), (dram, known.held.len() as u64 - dram));
        }
    }
}
