//! Expected order of arrival of a key's replicas at a reading node, as one number.
//!
//! ```text
//!  bit  63     62        58..61       57                   16..56                    0..15
//!       0      tier      load class   another domain       hash of key and node      node
//! ```
//!
//! Replicas are thus ordered by comparing numbers, and the fields can be read from the number.

use crate::ids::NodeId;
use crate::key::BlockKey;
use crate::tier::Tier;

use super::{LOAD_STEP_BYTES, LoadHint, preference};

/// Log₂ of a node's queued bytes over [`LOAD_STEP_BYTES`]: 0 below one step, 1 below two, 2 below four, up to
/// 15.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct LoadClass(pub u8);

/// Number of a failure domain in a table; 0 means no domain and is never shared.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Domain(pub u16);

/// Domain and load of nodes, by node number. Nodes beyond its end are idle and have no domain.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PeerTable {
    peers: Vec<Peer>,
}

/// Domain and load of one node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Peer {
    /// Failure domain; nodes of one domain may fail together, and are close to each other.
    pub domain: Domain,
    /// Load of the node.
    pub load: LoadClass,
}

/// Rank of a replica by expected arrival, among the replicas of a key; the smallest arrives first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Arrival(u64);

impl LoadClass {
    /// Highest load class of a node.
    pub const MAX: LoadClass = LoadClass(15);

    /// Smallest number of queued bytes in the class.
    pub fn hint(self) -> LoadHint {
        match self.0.min(LoadClass::MAX.0) {
            0 => LoadHint(0),
            class => LoadHint(LOAD_STEP_BYTES << (class - 1)),
        }
    }
}

impl LoadHint {
    /// Load class of the bytes.
    pub fn class(self) -> LoadClass {
        let steps = u64::BITS - (self.0 / LOAD_STEP_BYTES).leading_zeros();
        LoadClass(steps.min(u32::from(LoadClass::MAX.0)) as u8)
    }
}

impl Domain {
    /// Whether both are the same domain, other than 0.
    pub fn is_shared_with(self, other: Domain) -> bool {
        self.0 != 0 && self == other
    }
}

impl PeerTable {
    /// Domain and load of a node.
    #[inline]
    pub fn of(&self, node: NodeId) -> Peer {
        self.peers.get(usize::from(node.0)).copied().unwrap_or_default()
    }
}

impl FromIterator<(NodeId, Peer)> for PeerTable {
    fn from_iter<I: IntoIterator<Item = (NodeId, Peer)>>(nodes: I) -> PeerTable {
        let mut table = PeerTable::default();
        for (node, peer) in nodes {
            let at = usize::from(node.0);
            if table.peers.len() <= at {
                table.peers.resize(at + 1, Peer::default());
            }
            table.peers[at] = peer;
        }
        table
    }
}

impl Arrival {
    /// Rank of a replica on a node, for a reading node in the domain `asking`.
    #[inline]
    pub fn of(key: &BlockKey, (node, tier): (NodeId, Tier), peer: Peer, asking: Domain) -> Arrival {
        let tier = match tier {
            Tier::Dram => 0,
            Tier::Nvme => 1,
        };
        let load = u64::from(peer.load.0.min(LoadClass::MAX.0));
        let far = u64::from(!peer.domain.is_shared_with(asking));
        let hash = preference(key, node) >> 23;
        Arrival(tier << 62 | load << 58 | far << 57 | hash << 16 | u64::from(node.0))
    }

    /// Node of the replica.
    #[inline]
    pub fn node(self) -> NodeId {
        NodeId(self.0 as u16)
    }

    /// Tier of the replica.
    #[inline]
    pub fn tier(self) -> Tier {
        if self.0 >> 62 == 0 { Tier::Dram } else { Tier::Nvme }
    }

    /// Load class of the node.
    #[inline]
    pub fn load(self) -> LoadClass {
        LoadClass((self.0 >> 58) as u8 & LoadClass::MAX.0)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn tier() -> impl Strategy<Value = Tier> {
        prop::sample::select(vec![Tier::Dram, Tier::Nvme])
    }

    #[test]
    fn load_class_is_the_power_of_two_of_its_steps() {
        let class = |bytes| LoadHint(bytes).class().0;
        assert_eq!([0, LOAD_STEP_BYTES - 1, LOAD_STEP_BYTES, 2 * LOAD_STEP_BYTES].map(class), [0, 0, 1, 2]);
        assert_eq!(class(u64::MAX), 15);
        for class in 0..=15 {
            assert_eq!(LoadClass(class).hint().class(), LoadClass(class));
        }
        assert_eq!(LoadClass(200).hint().class(), LoadClass::MAX, "invalid classes are clamped");
    }

    #[test]
    fn prefers_own_domain_among_equals_and_never_shares_domain_zero() {
        let key = BlockKey([7; 16]);
        let of = |node, domain, asking| {
            let peer = Peer { domain: Domain(domain), load: LoadClass(3) };
            Arrival::of(&key, (NodeId(node), Tier::Nvme), peer, Domain(asking))
        };
        assert!((0..100).all(|node| of(200, 1, 1) < of(node, 2, 1)));
        assert_eq!(of(1, 0, 0), of(1, 1, 2));
    }

    #[test]
    fn table_returns_its_entries_and_defaults_for_others() {
        let peer = Peer { domain: Domain(4), load: LoadClass(2) };
        let table: PeerTable = [(NodeId(3), peer)].into_iter().collect();
        assert_eq!([1, 3, 4].map(|node| table.of(NodeId(node))), [Peer::default(), peer, Peer::default()]);
    }

    proptest! {
        /// Compared with the definition: tier, load, distance, then any order.
        #[test]
        fn arrivals_order_by_tier_load_and_distance_and_return_their_fields(
            bytes: [u8; 16],
            replicas in prop::collection::vec((any::<u16>(), tier(), 0u8..16, 0u16..3), 2),
            asking in 0u16..3,
        ) {
            let key = BlockKey(bytes);
            let of = |(node, tier, load, domain): (u16, Tier, u8, u16)| {
                let peer = Peer { domain: Domain(domain), load: LoadClass(load) };
                Arrival::of(&key, (NodeId(node), tier), peer, Domain(asking))
            };
            let plain = |(_, tier, load, domain): (u16, Tier, u8, u16)| {
                (tier, load, !(domain != 0 && domain == asking))
            };
            for replica in &replicas {
                let arrival = of(*replica);
                prop_assert_eq!(
                    (arrival.node().0, arrival.tier(), arrival.load().0),
                    (replica.0, replica.1, replica.2)
                );
            }
            if plain(replicas[0]) != plain(replicas[1]) {
                prop_assert_eq!(of(replicas[0]) < of(replicas[1]), plain(replicas[0]) < plain(replicas[1]));
            }
        }
    }
}
