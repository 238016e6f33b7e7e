//! Properties of placement: targets are valid, best and spread; a block with enough replicas gets none.

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

fn nvme(node: u16) -> ReplicaLocation {
    ReplicaLocation { node: NodeId(node), tier: Tier::Nvme }
}

fn dram(node: u16) -> ReplicaLocation {
    ReplicaLocation { node: NodeId(node), tier: Tier::Dram }
}

fn hot(nodes: Vec<PlacementNode>) -> PlacementBatch {
    PlacementBatch::new(NodeId(1), PlacementReason::Hot, SLOT, nodes)
}

#[test]
fn prefers_dram_holder_then_other_failure_domain_over_idle_node() {
    let busy = PlacementNode { used: POOL / 2, domain: Domain(1), ..node(3) };
    let nodes = vec![node(1), node(2), busy];
    assert_eq!(hot(nodes.clone()).place(&key(1), &[nvme(1), dram(3)]), PlacementDecision::On(NodeId(3)));
    let near = PlacementNode { domain: Domain(1), ..node(2) };
    let nodes = vec![node(1), near, PlacementNode { used: POOL / 2, ..node(3) }];
    assert_eq!(hot(nodes).place(&key(1), &[nvme(1)]), PlacementDecision::On(NodeId(3)));
}

#[test]
fn prefers_emptier_and_less_loaded_nodes() {
    let full = PlacementNode { used: POOL / 2, ..node(2) };
    let busy = PlacementNode { load: LoadHint(1 << 40), ..node(3) };
    for number in 0..50 {
        assert_eq!(
            hot(vec![node(1), full, busy, node(4)]).place(&key(number), &[nvme(1)]),
            PlacementDecision::On(NodeId(4))
        );
    }
}

#[test]
fn each_reason_requires_its_own_replicas() {
    let draining = PlacementNode { mode: NodeMode::Draining, ..node(3) };
    let cordoned = PlacementNode { mode: NodeMode::Cordoned, ..node(4) };
    let enough = |reason, holdings: &[ReplicaLocation]| {
        let nodes = vec![node(1), node(2), draining, cordoned];
        PlacementBatch::new(NodeId(1), reason, SLOT, nodes).is_enough(holdings)
    };
    assert!(enough(PlacementReason::Hot, &[nvme(1), nvme(2)]));
    assert!(enough(PlacementReason::Hot, &[nvme(1), nvme(4)]), "replicas on a cordoned node count");
    assert!(!enough(PlacementReason::Hot, &[nvme(1), dram(2), dram(1)]), "DRAM is not durable");
    assert!(!enough(PlacementReason::Hot, &[nvme(1), nvme(3)]), "replicas on a draining node do not count");
    assert!(!enough(PlacementReason::Hot, &[nvme(1), nvme(9)]), "an unknown node is dead");
    assert!(enough(PlacementReason::Drain, &[nvme(1), nvme(2)]));
    assert!(!enough(PlacementReason::Drain, &[nvme(1), nvme(3), dram(2)]));
    assert!(enough(PlacementReason::Move(NodeId(2)), &[nvme(1), nvme(2)]));
    assert!(!enough(PlacementReason::Move(NodeId(2)), &[nvme(1), nvme(4)]));
}

#[test]
fn move_uses_only_its_target_node() {
    let to = |reason, mode| {
        let nodes = vec![node(1), PlacementNode { mode, ..node(2) }, node(3)];
        PlacementBatch::new(NodeId(1), reason, SLOT, nodes).place(&key(1), &[nvme(1), dram(3)])
    };
    assert_eq!(to(PlacementReason::Move(NodeId(2)), NodeMode::Active), PlacementDecision::On(NodeId(2)));
    assert_eq!(to(PlacementReason::Move(NodeId(2)), NodeMode::Cordoned), PlacementDecision::NoCapacity);
    assert_eq!(
        to(PlacementReason::Move(NodeId(1)), NodeMode::Active),
        PlacementDecision::NoCapacity,
        "the holder itself"
    );
    assert_eq!(to(PlacementReason::Move(NodeId(9)), NodeMode::Active), PlacementDecision::NoCapacity);
}

#[test]
fn blocks_of_one_node_spread_over_many_nodes() {
    let mut placement = hot((1..=1000).map(node).collect());
    let mut counts: BTreeMap<NodeId, u32> = BTreeMap::new();
    for number in 0..9990 {
        let PlacementDecision::On(node) = placement.place(&key(number), &[nvme(1)]) else {
            panic!("all have room")
        };
        *counts.entry(node).or_default() += 1;
    }
    assert!(counts.len() > 990, "{} nodes", counts.len());
    assert!(counts.values().all(|count| *count < 40), "{:?}", counts.values().max());
}

#[test]
fn samples_some_of_many_dram_holders_and_spreads_keys() {
    let half = |number| PlacementNode { used: POOL / 2, ..node(number) };
    let nodes = (1..=1000).map(|number| if number == 500 { node(number) } else { half(number) });
    let mut placement = hot(nodes.collect());
    let holdings: Vec<ReplicaLocation> = [nvme(1)].into_iter().chain((2..=1000).map(dram)).collect();
    let targets = (0..1000).map(|number| placement.place(&key(number), &holdings));
    let emptiest = targets.filter(|placed| *placed == PlacementDecision::On(NodeId(500))).count();
    assert!((5..40).contains(&emptiest), "16 of 999 are sampled for each of 1,000 keys: {emptiest}");
}

#[test]
fn holder_does_not_share_its_failure_domain_with_itself() {
    let together = |number| PlacementNode { domain: Domain(7), ..node(number) };
    let nodes = || vec![node(1), PlacementNode { used: POOL / 2, ..node(2) }, together(3), together(4)];
    let place = |holdings: &[ReplicaLocation]| hot(nodes()).place(&key(1), holdings);
    assert_eq!(
        place(&[nvme(1), dram(2), dram(3)]),
        PlacementDecision::On(NodeId(3)),
        "the only holder in its domain"
    );
    assert_eq!(place(&[nvme(1), dram(2), dram(3), dram(4)]), PlacementDecision::On(NodeId(2)));
    let mut batch = hot(nodes());
    batch.place(&key(1), &[nvme(1), dram(3), dram(4)]);
    assert_eq!(
        batch.place(&key(2), &[nvme(1), dram(2), dram(3)]),
        PlacementDecision::On(NodeId(3)),
        "no marks remain from the previous key"
    );
}

#[test]
fn batch_fills_each_node_up_to_its_room_and_then_reports_no_capacity() {
    // Room for 65 blocks in addition to the 64 that must be free: each node accepts 66, the last of which
    // leaves less.
    let used = POOL - POOL / ROOM_PART - 65 * SLOT;
    let mut placement = hot((1..=12).map(|number| PlacementNode { used, ..node(number) }).collect());
    let placed = (0..10_000)
        .filter(|number| placement.place(&key(*number), &[nvme(1)]) != PlacementDecision::NoCapacity);
    assert_eq!(placed.count(), 11 * 66);
    assert!(placement.charges().all(|(_, bytes)| bytes == 66 * SLOT));
    assert_eq!(
        placement.place(&key(1), &[nvme(1), nvme(2)]),
        PlacementDecision::Enough,
        "no further replica is needed"
    );
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
    fn targets_are_valid_and_found_whenever_a_suitable_node_exists(
        nodes in nodes(),
        blocks in prop::collection::vec((any::<u64>(), prop::collection::vec((1u16..40, any::<bool>()), 0..6)), 1..40),
    ) {
        let holder = NodeId(1);
        let batch = || PlacementBatch::new(holder, PlacementReason::Drain, SLOT, nodes.clone());
        let (mut placement, mut again) = (batch(), batch());
        let mut charged: BTreeMap<NodeId, u64> = BTreeMap::new();
        for (number, holdings) in blocks {
            let holdings: Vec<ReplicaLocation> =
                holdings.into_iter().map(|(node, durable)| if durable { nvme(node) } else { dram(node) }).collect();
            let is_suitable = |node: &PlacementNode| {
                let spent = charged.get(&node.node).copied().unwrap_or(0);
                node.node != holder
                    && node.mode == NodeMode::Active
                    && !holdings.contains(&nvme(node.node.0))
                    && node.capacity - node.used >= ROOM_BLOCKS * SLOT + spent
            };
            let placed = placement.place(&key(number), &holdings);
            prop_assert_eq!(placed, again.place(&key(number), &holdings), "deterministic");
            match placed {
                PlacementDecision::Enough => prop_assert!(placement.is_enough(&holdings)),
                PlacementDecision::NoCapacity => prop_assert!(!nodes.iter().any(is_suitable)),
                PlacementDecision::On(target) => {
                    let node = nodes.iter().find(|node| node.node == target).expect("a node");
                    prop_assert!(is_suitable(node), "{node:?}");
                    let in_dram = |node: &PlacementNode| holdings.contains(&dram(node.node.0));
                    let better = nodes.iter().filter(|node| is_suitable(node)).any(in_dram);
                    prop_assert_eq!(in_dram(node), better, "DRAM holders are preferred");
                    *charged.entry(target).or_default() += SLOT;
                }
            }
        }
        prop_assert!(placement.charges().eq(charged.into_iter()));
    }
}
