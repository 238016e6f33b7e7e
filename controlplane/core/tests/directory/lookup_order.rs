//! Order of replicas in a lookup: tier, load, failure domain, and spreading of keys over equal replicas.

use reprise_controlplane_core::{Changes, Directory, LiveNodes, LookupResult, Opening, Requester, Update};
use reprise_policy::placement::ReplicaLocation;
use reprise_policy::routing::{Domain, LoadClass, Peer, PeerTable};
use reprise_policy::{BlockKey, Epoch, NodeId, SlotSet, Tier};

fn key(number: u64) -> BlockKey {
    let mut bytes = [0; 16];
    bytes[8..].copy_from_slice(&number.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes());
    BlockKey(bytes)
}

/// A directory of all slots in which these nodes hold these keys in these tiers.
fn directory(held: &[(u16, Tier)], keys: &[BlockKey]) -> Directory {
    let mut directory = Directory::new();
    directory.set_owned_slots(&SlotSet::ALL);
    for (node, tier) in held {
        let node = NodeId(*node);
        let opening =
            if directory.register(node, Epoch(1)) { Opening::Slots(&SlotSet::ALL) } else { Opening::Nothing };
        // Per tier of a node: the opening takes number 0, so changes start at 1.
        let sequence = if opening == Opening::Nothing { 1 + keys.len() as u64 } else { 0 };
        let (packed, operations) = (BlockKey::pack(keys), vec![*tier as u8; keys.len()]);
        let changes = Changes::parse(&packed, &operations).expect("whole changes");
        let ends = &SlotSet::ALL;
        directory.update(&Update { node, epoch: Epoch(1), sequence, opening, changes, ends });
    }
    directory
}

fn live(nodes: std::ops::RangeInclusive<u16>) -> LiveNodes {
    nodes.map(NodeId).collect()
}

fn peer(node: u16, domain: u16, load: u8) -> (NodeId, Peer) {
    (NodeId(node), Peer { domain: Domain(domain), load: LoadClass(load) })
}

fn order(directory: &Directory, peers: &PeerTable, asking: u16) -> Vec<(u16, Tier, u8)> {
    let mut found = LookupResult::default();
    let requester = Requester { node: Some(NodeId(asking)), peers };
    directory.lookup_for(requester, &[key(1)], &live(1..=9), &mut found);
    found.of(0).iter().map(|replica| (replica.node.0, replica.tier, replica.load.0)).collect()
}

#[test]
fn orders_replicas_by_tier_load_and_failure_domain() {
    let held = [(1, Tier::Nvme), (1, Tier::Dram), (2, Tier::Dram), (3, Tier::Dram), (4, Tier::Nvme)];
    let directory = directory(&held, &[key(1)]);
    let peers: PeerTable =
        [peer(1, 7, 3), peer(2, 7, 1), peer(3, 8, 1), peer(4, 9, 0), peer(5, 8, 0)].into_iter().collect();
    let rest = [(1, Tier::Dram, 3), (4, Tier::Nvme, 0), (1, Tier::Nvme, 3)];
    assert_eq!(order(&directory, &peers, 5)[..2], [(3, Tier::Dram, 1), (2, Tier::Dram, 1)]);
    assert_eq!(order(&directory, &peers, 5)[2..], rest);
    assert_eq!(
        order(&directory, &peers, 4)[2..],
        rest[..1].iter().chain(&rest[2..]).copied().collect::<Vec<_>>()
    );
    let alone = order(&directory, &peers, 2);
    assert_eq!(alone[..2], [(3, Tier::Dram, 1), (1, Tier::Dram, 3)], "its own replicas are left out");
}

#[test]
fn spreads_keys_over_equal_replicas() {
    let keys: Vec<BlockKey> = (0..4000).map(key).collect();
    let directory = directory(&[(1, Tier::Dram), (2, Tier::Dram), (3, Tier::Dram), (4, Tier::Dram)], &keys);
    let mut found = LookupResult::default();
    directory.lookup(&keys, &live(1..=4), None, &mut found);
    let mut firsts = [0; 5];
    (0..keys.len()).for_each(|at| firsts[usize::from(found.of(at)[0].node.0)] += 1);
    assert!(firsts[1..].iter().all(|count| (850..1150).contains(count)), "{firsts:?}");
}

#[test]
fn returns_all_holders_of_a_key_in_owned_slots_only() {
    let held: Vec<(u16, Tier)> = (1..=40).flat_map(|node| [(node, Tier::Dram), (node, Tier::Nvme)]).collect();
    let mut directory = directory(&held, &[key(1)]);
    let holders = |directory: &Directory, key: &BlockKey| {
        directory.holders(key).map(Iterator::collect::<Vec<ReplicaLocation>>)
    };
    assert_eq!(holders(&directory, &key(1)).map(|all| all.len()), Some(80));
    assert_eq!(holders(&directory, &key(2)), Some(Vec::new()));
    directory.forget(NodeId(40), Epoch(1));
    assert_eq!(holders(&directory, &key(1)).map(|all| all.len()), Some(78));
    directory.set_owned_slots(&SlotSet::ALL.without(&[key(1).hash_slot()].into_iter().collect()));
    assert_eq!(holders(&directory, &key(1)), None);
}

#[test]
fn returns_all_durable_holders_and_a_limited_number_of_others() {
    let mut held: Vec<(u16, Tier)> = (1..=100).map(|node| (node, Tier::Dram)).collect();
    held.extend((90..=105).map(|node| (node, Tier::Nvme)));
    let directory = directory(&held, &[key(1)]);
    let returned: Vec<ReplicaLocation> = directory.holders(&key(1)).expect("owned").collect();
    let of = |tier| returned.iter().filter(|location| location.tier == tier).count();
    assert_eq!((of(Tier::Nvme), of(Tier::Dram)), (16, 64 + 11));
}
