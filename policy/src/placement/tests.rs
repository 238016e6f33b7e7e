//! Targets are allowed ones, the best of them, and spread; a block that has enough gets none.

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;

const SLOT: u64 = 2 << 20;
const POOL: u64 = 1 << 40;

fn key(number: u64) -> BlockKey {
    let mut bytes = [0; 16];
    bytes[8..].copy_from_slice(&crate::shards::mix(number).to_le_bytes());
    BlockKey(bytes)
}

fn node(number: u16) -> PlacementNode {
    PlacementNode {
        node: NodeId(number),
        mode: NodeMode::Active,
        domain: Domain(number),
        capacity: POOL,
        used: 0,
        load: LoadHint(0),
    }
}

fn nvme(node: u16) -> Holding {
    Holding { node: NodeId(node), tier: Tier::Nvme }
}

fn dram(node: u16) -> Holding {
    Holding { node: NodeId(node), tier: Tier::Dram }
}

fn hot(nodes: Vec<PlacementNode>) -> Placement {
    Placement::new(NodeId(1), PlacementReason::Hot, SLOT, nodes)
}

#[test]
fn who_has_the_block_in_dram_comes_before_anybody_and_another_failure_domain_before_an_idle_node() {
    let busy = PlacementNode { used: POOL / 2, domain: Domain(1), ..node(3) };
    let nodes = vec![node(1), node(2), busy];
    assert_eq!(hot(nodes.clone()).place(&key(1), &[nvme(1), dram(3)]), Placed::On(NodeId(3)));
    let near = PlacementNode { domain: Domain(1), ..node(2) };
    let nodes = vec![node(1), near, PlacementNode { used: POOL / 2, ..node(3) }];
    assert_eq!(hot(nodes).place(&key(1), &[nvme(1)]), Placed::On(NodeId(3)));
}

#[test]
fn an_emptier_and_a_less_busy_node_comes_first() {
    let full = PlacementNode { used: POOL / 2, ..node(2) };
    let busy = PlacementNode { load: LoadHint(1 << 40), ..node(3) };
    for number in 0..50 {
        assert_eq!(
            hot(vec![node(1), full, busy, node(4)]).place(&key(number), &[nvme(1)]),
            Placed::On(NodeId(4))
        );
    }
}

#[test]
fn each_reason_has_its_own_enough() {
    let draining = PlacementNode { mode: NodeMode::Draining, ..node(3) };
    let cordoned = PlacementNode { mode: NodeMode::Cordoned, ..node(4) };
    let enough = |reason, holdings: &[Holding]| {
        let nodes = vec![node(1), node(2), draining, cordoned];
        Placement::new(NodeId(1), reason, SLOT, nodes).is_enough(holdings)
    };
    assert!(enough(PlacementReason::Hot, &[nvme(1), nvme(2)]));
    assert!(enough(PlacementReason::Hot, &[nvme(1), nvme(4)]), "a cordoned node stays");
    assert!(!enough(PlacementReason::Hot, &[nvme(1), dram(2), dram(1)]), "DRAM is not durable");
    assert!(!enough(PlacementReason::Hot, &[nvme(1), nvme(3)]), "a draining node leaves");
    assert!(!enough(PlacementReason::Hot, &[nvme(1), nvme(9)]), "a node that is not named is dead");
    assert!(enough(PlacementReason::Drain, &[nvme(1), nvme(2)]));
    assert!(!enough(PlacementReason::Drain, &[nvme(1), nvme(3), dram(2)]));
    assert!(enough(PlacementReason::Move(NodeId(2)), &[nvme(1), nvme(2)]));
    assert!(!enough(PlacementReason::Move(NodeId(2)), &[nvme(1), nvme(4)]));
}

#[test]
fn a_move_goes_to_its_node_or_nowhere() {
    let to = |reason, mode| {
        let nodes = vec![node(1), PlacementNode { mode, ..node(2) }, node(3)];
        Placement::new(NodeId(1), reason, SLOT, nodes).place(&key(1), &[nvme(1), dram(3)])
    };
    assert_eq!(to(PlacementReason::Move(NodeId(2)), NodeMode::Active), Placed::On(NodeId(2)));
    assert_eq!(to(PlacementReason::Move(NodeId(2)), NodeMode::Cordoned), Placed::Nowhere);
    assert_eq!(to(PlacementReason::Move(NodeId(1)), NodeMode::Active), Placed::Nowhere, "to itself");
    assert_eq!(to(PlacementReason::Move(NodeId(9)), NodeMode::Active), Placed::Nowhere);
}

#[test]
fn blocks_of_one_node_spread_over_many_others() {
    let mut placement = hot((1..=1000).map(node).collect());
    let mut counts: BTreeMap<NodeId, u32> = BTreeMap::new();
    for number in 0..9990 {
        let Placed::On(node) = placement.place(&key(number), &[nvme(1)]) else { panic!("all have room") };
        *counts.entry(node).or_default() += 1;
    }
    assert!(counts.len() > 990, "{} nodes", counts.len());
    assert!(counts.values().all(|count| *count < 40), "{:?}", counts.values().max());
}

#[test]
fn of_many_that_have_a_block_in_dram_a_key_looks_at_some_and_keys_spread() {
    let half = |number| PlacementNode { used: POOL / 2, ..node(number) };
    let nodes = (1..=1000).map(|number| if number == 500 { node(number) } else { half(number) });
    let mut placement = hot(nodes.collect());
    let holdings: Vec<Holding> = [nvme(1)].into_iter().chain((2..=1000).map(dram)).collect();
    let targets = (0..1000).map(|number| placement.place(&key(number), &holdings));
    let emptiest = targets.filter(|placed| *placed == Placed::On(NodeId(500))).count();
    assert!((5..40).contains(&emptiest), "16 of 999 are drawn for each of 1,000 keys: {emptiest}");
}

#[test]
fn a_node_that_has_a_block_itself_shares_its_failure_domain_with_others_only() {
    let together = |number| PlacementNode { domain: Domain(7), ..node(number) };
    let nodes = || vec![node(1), PlacementNode { used: POOL / 2, ..node(2) }, together(3), together(4)];
    let place = |holdings: &[Holding]| hot(nodes()).place(&key(1), holdings);
    assert_eq!(place(&[nvme(1), dram(2), dram(3)]), Placed::On(NodeId(3)), "alone in its domain");
    assert_eq!(place(&[nvme(1), dram(2), dram(3), dram(4)]), Placed::On(NodeId(2)));
    let mut batch = hot(nodes());
    batch.place(&key(1), &[nvme(1), dram(3), dram(4)]);
    assert_eq!(batch.place(&key(2), &[nvme(1), dram(2), dram(3)]), Placed::On(NodeId(3)), "nothing stays");
}

#[test]
fn a_batch_fills_nobody_beyond_its_room_and_then_there_is_nowhere() {
    // Room for 65 blocks beside the 64 that must be free: each node takes 66, the last of which leaves it below.
    let used = POOL - POOL / ROOM_PART - 65 * SLOT;
    let mut placement = hot((1..=12).map(|number| PlacementNode { used, ..node(number) }).collect());
    let placed = (0..10_000).filter(|number| placement.place(&key(*number), &[nvme(1)]) != Placed::Nowhere);
    assert_eq!(placed.count(), 11 * 66);
    assert!(placement.charges().all(|(_, bytes)| bytes == 66 * SLOT));
    assert_eq!(placement.place(&key(1), &[nvme(1), nvme(2)]), Placed::Enough, "which needs no room");
}

fn nodes() -> impl Strategy<Value = Vec<PlacementNode>> {
    let mode = prop::sample::select(vec![
        NodeMode::Active,
        NodeMode::Active,
        NodeMode::Cordoned,
        NodeMode::Draining,
    ]);
    let node = (mode, 0u16..4, 0u64..200, 0u64..12).prop_map(|(mode, domain, blocks, load)| PlacementNode {
        node: NodeId(0),
        mode,
        domain: Domain(domain),
        capacity: 200 * SLOT,
        used: blocks * SLOT,
        load: LoadHint(crate::routing::LOAD_STEP_BYTES << load),
    });
    prop::collection::vec(node, 1..40).prop_map(|mut nodes| {
        for (number, node) in (1..).zip(&mut nodes) {
            node.node = NodeId(number);
        }
        nodes
    })
}

proptest! {
    #[test]
    fn a_target_is_active_has_room_and_no_durable_copy_and_there_is_one_when_a_node_will_do(
        nodes in nodes(),
        blocks in prop::collection::vec((any::<u64>(), prop::collection::vec((1u16..40, any::<bool>()), 0..6)), 1..40),
    ) {
        let holder = NodeId(1);
        let batch = || Placement::new(holder, PlacementReason::Drain, SLOT, nodes.clone());
        let (mut placement, mut again) = (batch(), batch());
        let mut charged: BTreeMap<NodeId, u64> = BTreeMap::new();
        for (number, holdings) in blocks {
            let holdings: Vec<Holding> =
                holdings.into_iter().map(|(node, durable)| if durable { nvme(node) } else { dram(node) }).collect();
            let will_do = |node: &PlacementNode| {
                let spent = charged.get(&node.node).copied().unwrap_or(0);
                node.node != holder
                    && node.mode == NodeMode::Active
                    && !holdings.contains(&nvme(node.node.0))
                    && node.capacity - node.used >= ROOM_BLOCKS * SLOT + spent
            };
            let placed = placement.place(&key(number), &holdings);
            prop_assert_eq!(placed, again.place(&key(number), &holdings), "deterministic");
            match placed {
                Placed::Enough => prop_assert!(placement.is_enough(&holdings)),
                Placed::Nowhere => prop_assert!(!nodes.iter().any(will_do)),
                Placed::On(target) => {
                    let node = nodes.iter().find(|node| node.node == target).expect("a node");
                    prop_assert!(will_do(node), "{node:?}");
                    let in_dram = |node: &PlacementNode| holdings.contains(&dram(node.node.0));
                    let better = nodes.iter().filter(|node| will_do(node)).any(in_dram);
                    prop_assert_eq!(in_dram(node), better, "who has it in DRAM comes first");
                    *charged.entry(target).or_default() += SLOT;
                }
            }
        }
        prop_assert!(placement.charges().eq(charged.into_iter()));
    }
}
