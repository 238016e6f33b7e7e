//! Which replica of a block to read.
//!
//! Order of expected arrival, measured on machines of the class this is built for: own DRAM (a copy), own NVMe
//! (milliseconds, no network), a peer's DRAM (one network hop), a peer's NVMe (hop and device). Among peers of
//! the same tier, one with clearly less queued work comes first; among equals the key decides, so that different
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

/// Tiers of this node that hold a block.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LocalTiers {
    dram: bool,
    nvme: bool,
}

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

/// A place to read a block from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Route {
    /// This node.
    Own(Tier),
    /// Another node.
    Peer(NodeId, Tier),
}

/// What routes are compared by; the smallest arrives soonest.
type Rank = (u8, u32, u64, NodeId);

impl LocalTiers {
    /// The block is not here.
    pub const NONE: LocalTiers = LocalTiers { dram: false, nvme: false };

    /// The same with one tier more.
    pub fn with(mut self, tier: Tier) -> LocalTiers {
        match tier {
            Tier::Dram => self.dram = true,
            Tier::Nvme => self.nvme = true,
        }
        self
    }

    /// The tiers, soonest first.
    pub fn iter(self) -> impl Iterator<Item = Tier> {
        let dram = self.dram.then_some(Tier::Dram);
        dram.into_iter().chain(self.nvme.then_some(Tier::Nvme))
    }
}

/// The route that arrives soonest. Candidates for which `excluded` holds (dead, tried in vain) do not count.
pub fn soonest(
    key: &BlockKey,
    local: LocalTiers,
    candidates: &[Candidate],
    excluded: impl Fn(NodeId) -> bool,
) -> Option<Route> {
    local.iter().next().map(Route::Own).or_else(|| {
        candidates
            .iter()
            .filter(|candidate| !excluded(candidate.node))
            .min_by_key(|candidate| rank(key, candidate))
            .map(|candidate| Route::Peer(candidate.node, candidate.tier))
    })
}

/// All routes, soonest first; `routes` is replaced.
pub fn order(
    key: &BlockKey,
    local: LocalTiers,
    candidates: &[Candidate],
    excluded: impl Fn(NodeId) -> bool,
    routes: &mut Vec<Route>,
) {
    routes.clear();
    let mut peers: Vec<&Candidate> =
        candidates.iter().filter(|candidate| !excluded(candidate.node)).collect();
    peers.sort_by_cached_key(|candidate| rank(key, candidate));
    routes.extend(local.iter().map(Route::Own));
    routes.extend(peers.into_iter().map(|peer| Route::Peer(peer.node, peer.tier)));
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

    #[test]
    fn routes_come_in_order_of_expected_arrival() {
        let local = LocalTiers::NONE.with(Tier::Nvme).with(Tier::Dram);
        let candidates = [candidate(1, Tier::Nvme, 0), candidate(2, Tier::Dram, 1 << 40)];
        let mut routes = Vec::new();
        order(&key(1), local, &candidates, nobody, &mut routes);
        assert_eq!(
            routes,
            [
                Route::Own(Tier::Dram),
                Route::Own(Tier::Nvme),
                Route::Peer(NodeId(2), Tier::Dram),
                Route::Peer(NodeId(1), Tier::Nvme),
            ]
        );
    }

    #[test]
    fn a_block_that_nobody_alive_has_has_no_route() {
        let candidates = [candidate(1, Tier::Dram, 0)];
        assert_eq!(soonest(&key(1), LocalTiers::NONE, &candidates, |node| node == NodeId(1)), None);
        assert_eq!(soonest(&key(1), LocalTiers::NONE, &[], nobody), None);
    }

    #[test]
    fn a_clearly_busier_peer_comes_after_an_idle_one() {
        let candidates = [candidate(1, Tier::Dram, 4 * LOAD_STEP_BYTES), candidate(2, Tier::Dram, 0)];
        for number in 0..64 {
            let route = soonest(&key(number), LocalTiers::NONE, &candidates, nobody);
            assert_eq!(route, Some(Route::Peer(NodeId(2), Tier::Dram)));
        }
    }

    #[test]
    fn keys_spread_over_equal_peers_in_fair_shares() {
        let candidates: Vec<Candidate> = (0..4).map(|node| candidate(node, Tier::Dram, 1000)).collect();
        let mut shares = [0u32; 4];
        for number in 0..4000 {
            match soonest(&key(number), LocalTiers::NONE, &candidates, nobody) {
                Some(Route::Peer(node, _)) => shares[usize::from(node.0)] += 1,
                other => panic!("expected a peer, got {other:?}"),
            }
        }
        assert!(shares.iter().all(|share| (850..1150).contains(share)), "{shares:?}");
    }

    proptest! {
        #[test]
        fn the_soonest_route_is_the_first_of_the_order_whatever_order_candidates_come_in(
            number: u32,
            nodes in prop::collection::vec((0..6u16, any::<bool>(), 0..1u64 << 30), 0..8),
            dead in 0..6u16,
            here: bool,
        ) {
            let local = if here { LocalTiers::NONE.with(Tier::Nvme) } else { LocalTiers::NONE };
            let mut candidates: Vec<Candidate> = nodes
                .into_iter()
                .map(|(node, dram, load)| candidate(node, if dram { Tier::Dram } else { Tier::Nvme }, load))
                .collect();
            let excluded = |node| node == NodeId(dead);
            let mut routes = Vec::new();
            order(&key(number), local, &candidates, excluded, &mut routes);
            prop_assert!(!routes.iter().any(|route| matches!(route, Route::Peer(node, _) if excluded(*node))));
            prop_assert_eq!(routes.first().copied(), soonest(&key(number), local, &candidates, excluded));
            candidates.reverse();
            prop_assert_eq!(routes.first().copied(), soonest(&key(number), local, &candidates, excluded));
        }
    }
}
