//! The directory against a naive model: random registrations, updates with gaps and repeats, deaths, sweeps, lookups.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;
use reprise_controlplane_core::{Begin, Changes, Directory, Found, LiveNodes, Replica, Update, Updated};
use reprise_policy::{BlockKey, Epoch, NodeId, Tier};

/// A few keys, so that nodes share them; some in one hash slot.
fn key(number: u8) -> BlockKey {
    let mut key = [0; 16];
    key[0] = number % 3;
    key[8..].copy_from_slice(&u64::from(number).wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes());
    BlockKey(key)
}

#[derive(Clone, Debug)]
enum Step {
    Register { node: u16 },
    Forget { node: u16 },
    Update { node: u16, skew: i64, epoch_back: u64, begin: Begin, changes: Vec<(u8, u8)> },
    Die { node: u16 },
    Return { node: u16 },
    Sweep { places: usize },
    Lookup { asking: u16 },
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let node = 1u16..5;
    let change = (0u8..40, prop::sample::select(vec![1u8, 2, 0x81, 0x82]));
    let update = (
        node.clone(),
        prop_oneof![8 => Just(0i64), 1 => -6i64..0, 1 => 1i64..4],
        prop_oneof![9 => Just(0u64), 1 => Just(1)],
        prop_oneof![6 => Just(Begin::Continue), 1 => Just(Begin::Inventory)],
        prop::collection::vec(change, 0..30),
    )
        .prop_map(|(node, skew, epoch_back, begin, changes)| Step::Update {
            node,
            skew,
            epoch_back,
            begin,
            changes,
        });
    let step = prop_oneof![
        1 => node.clone().prop_map(|node| Step::Register { node }),
        1 => node.clone().prop_map(|node| Step::Forget { node }),
        10 => update,
        1 => node.clone().prop_map(|node| Step::Die { node }),
        2 => node.clone().prop_map(|node| Step::Return { node }),
        2 => (1usize..3000).prop_map(|places| Step::Sweep { places }),
        4 => (0u16..6).prop_map(|asking| Step::Lookup { asking }),
    ];
    prop::collection::vec(step, 1..80)
}

/// What a directory is: the current inventory of each node.
#[derive(Default)]
struct Model {
    nodes: BTreeMap<u16, ModelNode>,
}

#[derive(Default)]
struct ModelNode {
    epoch: u64,
    registered: bool,
    expected: u64,
    held: BTreeSet<(BlockKey, Tier)>,
}

impl Model {
    fn apply(&mut self, step: &Step) -> Option<Updated> {
        match step {
            Step::Register { node } => {
                let epoch = self.nodes.get(node).map_or(0, |known| known.epoch) + 1;
                self.nodes.insert(*node, ModelNode { epoch, registered: true, ..ModelNode::default() });
            }
            Step::Forget { node } => {
                if let Some(known) = self.nodes.get_mut(node) {
                    known.registered = false;
                    known.held.clear();
                }
            }
            Step::Update { node, skew, epoch_back, begin, changes } => {
                return Some(self.update(*node, (*skew, *epoch_back, *begin), changes));
            }
            _ => {}
        }
        None
    }

    fn update(&mut self, node: u16, how: (i64, u64, Begin), changes: &[(u8, u8)]) -> Updated {
        let (skew, epoch_back, begin) = how;
        let Some(known) = self.nodes.get_mut(&node).filter(|known| known.registered && epoch_back == 0)
        else {
            return Updated::Fenced;
        };
        let sequence = known.expected.saturating_add_signed(skew);
        if begin == Begin::Inventory && sequence >= known.expected {
            known.held.clear();
            known.expected = sequence;
        } else if begin == Begin::Inventory || sequence > known.expected {
            return Updated::Expecting { expected: known.expected, applied: 0..0 };
        }
        let first = usize::try_from(known.expected - sequence).expect("small").min(changes.len());
        for (number, operation) in &changes[first..] {
            let replica = (key(*number), Tier::from_wire(operation & 0x7f).expect("a tier"));
            if operation & 0x80 == 0 {
                known.held.insert(replica);
            } else {
                known.held.remove(&replica);
            }
        }
        known.expected += (changes.len() - first) as u64;
        Updated::Expecting { expected: known.expected, applied: first..changes.len() }
    }

    fn found(&self, key: &BlockKey, live: &BTreeSet<u16>, asking: u16) -> BTreeSet<Replica> {
        self.nodes
            .iter()
            .filter(|(node, _)| live.contains(node) && **node != asking)
            .flat_map(|(node, known)| known.held.iter().map(|(key, tier)| (*node, *key, *tier)))
            .filter(|(_, held, _)| held == key)
            .map(|(node, _, tier)| Replica { node: NodeId(node), tier })
            .collect()
    }
}

fn update(directory: &mut Directory, model: &Model, step: &Step) -> Updated {
    let Step::Update { node, skew, epoch_back, begin, changes } = step else {
        unreachable!("only updates come here")
    };
    let (epoch, expected) = model.nodes.get(node).map_or((1, 0), |known| (known.epoch, known.expected));
    let keys: Vec<u8> = changes.iter().flat_map(|(number, _)| key(*number).0).collect();
    let operations: Vec<u8> = changes.iter().map(|(_, operation)| *operation).collect();
    directory.update(&Update {
        node: NodeId(*node),
        epoch: Epoch(epoch - epoch_back.min(&epoch)),
        sequence: expected.saturating_add_signed(*skew),
        begin: *begin,
        changes: Changes::parse(&keys, &operations).expect("well formed"),
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn the_directory_answers_what_the_current_inventories_of_live_nodes_hold(steps in steps()) {
        let mut directory = Directory::new();
        let mut model = Model::default();
        let mut live: BTreeSet<u16> = (1..5).collect();
        let mut found = Found::default();
        let all_keys: Vec<BlockKey> = (0..40).map(key).collect();
        for step in &steps {
            match step {
                Step::Register { node } => {
                    model.apply(step);
                    directory.register(NodeId(*node), Epoch(model.nodes[node].epoch));
                    directory.register(NodeId(*node), Epoch(model.nodes[node].epoch - 1)); // late, changes nothing
                }
                Step::Forget { node } => {
                    if let Some(known) = model.nodes.get(node) {
                        directory.forget(NodeId(*node), Epoch(known.epoch + 1)); // not the current one
                        directory.forget(NodeId(*node), Epoch(known.epoch));
                    }
                    model.apply(step);
                }
                Step::Update { .. } => {
                    let updated = update(&mut directory, &model, step);
                    prop_assert_eq!(Some(updated), model.apply(step));
                }
                Step::Die { node } => { live.remove(node); }
                Step::Return { node } => { live.insert(*node); }
                Step::Sweep { places } => { directory.sweep(*places); }
                Step::Lookup { asking } => {
                    let set: LiveNodes = live.iter().map(|node| NodeId(*node)).collect();
                    directory.lookup(&all_keys, &set, Some(NodeId(*asking)), &mut found);
                    prop_assert_eq!(found.keys(), all_keys.len());
                    for (index, key) in all_keys.iter().enumerate() {
                        let answered: BTreeSet<Replica> = found.of(index).iter().copied().collect();
                        prop_assert_eq!(answered.len(), found.of(index).len(), "no replica twice");
                        prop_assert_eq!(answered, model.found(key, &live, *asking));
                    }
                }
            }
            prop_assert_eq!(directory.audit(), Ok(()));
        }
        while directory.sweep(1000) {}
        let size = directory.size();
        let held: BTreeSet<BlockKey> =
            model.nodes.values().flat_map(|node| node.held.iter().map(|(key, _)| *key)).collect();
        prop_assert_eq!(size.keys, held.len() as u64);
        prop_assert_eq!(size.stale_entries, 0);
        prop_assert_eq!(size.replicas, model.nodes.values().map(|node| node.held.len() as u64).sum::<u64>());
        for counted in size.nodes {
            let known = &model.nodes[&counted.node.0];
            let dram = known.held.iter().filter(|(_, tier)| *tier == Tier::Dram).count() as u64;
            prop_assert_eq!((counted.dram, counted.nvme), (dram, known.held.len() as u64 - dram));
        }
    }
}
