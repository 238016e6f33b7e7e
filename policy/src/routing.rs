//! Which peer's replica of a block to read, when this node has none.
//!
//! Order of expected arrival, measured on machines of the class this is built for: a peer's DRAM (one network hop),
//! a peer's NVMe (hop and device). Among peers of the same tier, one with clearly less queued work comes first; among equals the key decides, so that different
//! blocks of one prompt spread over the replicas and one block always picks the same peer, whose copy
//! then stays in DRAM.
//!
//! Pure functions of their arguments. Deliberately absent: topology (failure domains) and measured latencies.

use crate::ids::NodeId;
use crate::key::BlockKey;
use crate::tier::Tier;

/// Queued work below which two peers count as equally loaded: what one fetch connection has in flight (64 MiB).
/// Above it, loads are compared by their power of two, so that small differences do not undo the spreading.
pub const LOAD_STEP_BYTES: u64 = 64 << 20;

/// Bytes that a node has queued, as far as is known; zero when nothing is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct LoadHint(pub u64);

/// A replica on another node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Candidate {
    /// The node.
    pub node: NodeId,
    /// Where the block lies there.
    pub tier: Tier,
    /// How busy the node is.
    pub load: LoadHint,
}

/// What replicas are compared by; the smallest arrives soonest.
type Rank = (u8, u32, u64, NodeId);

/// The replica that arrives soonest. Candidates for which `excluded` holds (dead, tried in vain) do not count.
pub fn soonest(
    key: &BlockKey,
    candidates: &[Candidate],
    excluded: impl Fn(NodeId) -> bool,
) -> Option<Candidate> {
    candidates
        .iter()
        .filter(|candidate| !excluded(candidate.node))
        .min_by_key(|candidate| rank(key, candidate))
        .copied()
}

fn rank(key: &BlockKey, candidate: &Candidate) -> Rank {
    let tier = match candidate.tier {
        Tier::Dram => 0,
        Tier::Nvme => 1,
    };
    let load = u64::BITS - (candidate.load.0 / LOAD_STEP_BYTES).leading_zeros();
    (tier, load, preference(key, candidate.node), candidate.node)
}

/// Rendezvous hashing: each key ranks the nodes in an order of its own, and the loss of a node moves only
/// the keys that preferred it. The mixing constants are those of splitmix64.
fn preference(key: &BlockKey, node: NodeId) -> u64 {
    let mut bits = key.table_hash() ^ (u64::from(node.0) + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    bits ^ (bits >> 31)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn key(number: u32) -> BlockKey {
        let mut bytes = [0; 16];
        bytes[8..12].copy_from_slice(&number.to_le_bytes());
        BlockKey(bytes)
    }

    fn candidate(node: u16, tier: Tier, load: u64) -> Candidate {
        Candidate { node: NodeId(node), tier, load: LoadHint(load) }
    }

    fn nobody(_: NodeId) -> bool {
        false
    }

    fn soonest_node(number: u32, candidates: &[Candidate]) -> Option<NodeId> {
        soonest(&key(number), candidates, nobody).map(|candidate| candidate.node)
    }

    #[test]
    fn memory_comes_before_a_device_however_busy_the_node() {
        let candidates = [candidate(1, Tier::Nvme, 0), candidate(2, Tier::Dram, 1 << 40)];
        assert_eq!(soonest(&key(1), &candidates, nobody), Some(candidates[1]));
        assert_eq!(soonest(&key(1), &candidates, |node| node == NodeId(2)), Some(candidates[0]));
    }

    #[test]
    fn a_block_that_nobody_alive_has_has_no_replica() {
        let candidates = [candidate(1, Tier::Dram, 0)];
        assert_eq!(soonest(&key(1), &candidates, |node| node == NodeId(1)), None);
        assert_eq!(soonest(&key(1), &[], nobody), None);
    }

    #[test]
    fn a_clearly_busier_peer_comes_after_an_idle_one() {
        let candidates = [candidate(1, Tier::Dram, 4 * LOAD_STEP_BYTES), candidate(2, Tier::Dram, 0)];
        assert!((0..64).all(|number| soonest_node(number, &candidates) == Some(NodeId(2))));
    }

    #[test]
    fn keys_spread_over_equal_peers_in_fair_shares() {
        let candidates: Vec<Candidate> = (0..4).map(|node| candidate(node, Tier::Dram, 1000)).collect();
        let mut shares = [0u32; 4];
        for number in 0..4000 {
            let node = soonest_node(number, &candidates).expect("four peers have it");
            shares[usize::from(node.0)] += 1;
        }
        assert!(shares.iter().all(|share| (850..1150).contains(share)), "{shares:?}");
    }

    proptest! {
        #[test]
        fn the_choice_does_not_depend_on_the_order_of_candidates_and_none_is_better(
            number: u32,
            nodes in prop::collection::vec((0..6u16, any::<bool>(), 0..1u64 << 30), 0..8),
            dead in 0..6u16,
        ) {
            let mut candidates: Vec<Candidate> = nodes
                .into_iter()
                .map(|(node, dram, load)| candidate(node, if dram { Tier::Dram } else { Tier::Nvme }, load))
                .collect();
            let excluded = |node| node == NodeId(dead);
            let chosen = soonest(&key(number), &candidates, excluded);
            let alive = candidates.iter().filter(|candidate| !excluded(candidate.node));
            let best = alive.map(|candidate| rank(&key(number), candidate)).min();
            prop_assert_eq!(chosen.map(|candidate| rank(&key(number), &candidate)), best);
            candidates.reverse();
            let again = soonest(&key(number), &candidates, excluded);
            prop_assert_eq!(again.map(|candidate| candidate.node), chosen.map(|candidate| candidate.node));
        }
    }
}
