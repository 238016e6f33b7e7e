//! Choice of the replica to read, and ranking of nodes by the cached prefix of a prompt.
//!
//! Expected order of arrival, measured on machines of the target class: a peer's DRAM (one network hop), then
//! a peer's NVMe (network and device). Among peers of the same tier, one with clearly less queued work is
//! preferred, then one in the failure domain of the reading node. Among equals the key decides: different
//! blocks of a prompt spread over the replicas, and one block always selects the same peer, so that its copy
//! stays in DRAM there.
//!
//! The directory returns replicas in that order ([`Arrival`]); the reading node adds its own knowledge
//! ([`soonest`]). [`Ranker`] is for gateways.
//!
//! Pure functions of their arguments. Measured latencies are out of scope.

mod arrival;
mod chain;

pub use arrival::{Arrival, Domain, LoadClass, Peer, PeerTable};
pub use chain::{KeyReplicas, RankedNode, Ranker, Ranking};

use crate::ids::NodeId;
use crate::key::BlockKey;
use crate::tier::Tier;

/// Queued bytes below which two peers count as equally loaded: what one fetch connection has in flight (64
/// MiB). Above that, loads are compared by their power of two, so that small differences do not undo the
/// spreading.
pub const LOAD_STEP_BYTES: u64 = 64 << 20;

/// Bytes that a node has queued, as far as known; zero if unknown.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct LoadHint(pub u64);

/// Replica of a block, as the directory reports it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Replica {
    /// Node that holds the replica.
    pub node: NodeId,
    /// Tier of the replica on that node.
    pub tier: Tier,
    /// Load of that node, as last reported to the directory.
    pub load: LoadClass,
}

/// Replica on another node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Candidate {
    /// Node that holds the replica.
    pub node: NodeId,
    /// Tier of the block on that node.
    pub tier: Tier,
    /// Load of the node.
    pub load: LoadHint,
}

/// Returns the replica that is expected to arrive first; among equals, the first in the directory's order.
/// Nodes for which `excluded` returns `true` (dead, or already tried) are ignored.
pub fn soonest(candidates: &[Candidate], excluded: impl Fn(NodeId) -> bool) -> Option<Candidate> {
    let allowed = candidates.iter().filter(|candidate| !excluded(candidate.node));
    allowed.min_by_key(|candidate| (candidate.tier, steps(candidate.load))).copied()
}

/// Power of two of a load in steps; unlike a [`LoadClass`], without an upper bound.
fn steps(load: LoadHint) -> u32 {
    u64::BITS - (load.0 / LOAD_STEP_BYTES).leading_zeros()
}

/// Rendezvous hashing: each key ranks the nodes in its own order, and the loss of a node moves only the keys
/// that preferred it. The mixing constants are those of splitmix64.
pub(crate) fn preference(key: &BlockKey, node: NodeId) -> u64 {
    let mut bits = key.table_hash() ^ (u64::from(node.0) + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    bits ^ (bits >> 31)
}

const _: () = assert!((Tier::Dram as u8) < Tier::Nvme as u8, "the order of tiers is that of their arrival");

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

    fn none_excluded(_: NodeId) -> bool {
        false
    }

    #[test]
    fn prefers_dram_over_nvme_regardless_of_load() {
        let candidates = [candidate(1, Tier::Nvme, 0), candidate(2, Tier::Dram, 1 << 40)];
        assert_eq!(soonest(&candidates, none_excluded), Some(candidates[1]));
        assert_eq!(soonest(&candidates, |node| node == NodeId(2)), Some(candidates[0]));
    }

    #[test]
    fn returns_none_without_a_live_replica() {
        let candidates = [candidate(1, Tier::Dram, 0)];
        assert_eq!(soonest(&candidates, |node| node == NodeId(1)), None);
        assert_eq!(soonest(&[], none_excluded), None);
    }

    #[test]
    fn prefers_idle_peer_over_clearly_busier_one() {
        let candidates = [candidate(1, Tier::Dram, 4 * LOAD_STEP_BYTES), candidate(2, Tier::Dram, 0)];
        assert_eq!(soonest(&candidates, none_excluded), Some(candidates[1]));
    }

    #[test]
    fn keeps_directory_order_among_equals() {
        let candidates = [candidate(5, Tier::Dram, 1000), candidate(2, Tier::Dram, 0)];
        assert_eq!(soonest(&candidates, none_excluded), Some(candidates[0]));
    }

    #[test]
    fn keys_spread_evenly_over_equal_peers() {
        let mut shares = [0u32; 4];
        for number in 0..4000 {
            let arrival = |node| {
                let replica = (NodeId(node), Tier::Dram);
                Arrival::of(&key(number), replica, Peer::default(), Domain::default())
            };
            let first = (0..4).map(arrival).min().expect("four peers hold it");
            shares[usize::from(first.node().0)] += 1;
        }
        assert!(shares.iter().all(|share| (850..1150).contains(share)), "{shares:?}");
    }

    proptest! {
        #[test]
        fn selects_the_first_of_the_best_candidates(
            nodes in prop::collection::vec((0..6u16, any::<bool>(), 0..1u64 << 30), 0..8),
            dead in 0..6u16,
        ) {
            let candidates: Vec<Candidate> = nodes
                .into_iter()
                .map(|(node, dram, load)| candidate(node, if dram { Tier::Dram } else { Tier::Nvme }, load))
                .collect();
            let alive: Vec<Candidate> =
                candidates.iter().filter(|candidate| candidate.node != NodeId(dead)).copied().collect();
            let rank = |candidate: &Candidate| (candidate.tier, steps(candidate.load));
            let best = alive.iter().map(rank).min();
            let first = alive.iter().find(|candidate| Some(rank(candidate)) == best).copied();
            prop_assert_eq!(soonest(&candidates, |node| node == NodeId(dead)), first);
        }
    }
}
