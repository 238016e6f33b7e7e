//! Answers of a lookup.

use reprise_policy::routing::{Arrival, Domain, LoadClass, PeerTable};
use reprise_policy::{BlockKey, NodeId, Tier};

use super::REPLICAS_PER_KEY_MAX;
use super::announced::Completeness;
use super::table::Entry;

/// Replicas of one key that are looked at, at the most: of a block that more nodes hold any of these will do, and a look-up
/// of such keys costs no more than of others.
pub const CONSIDERED_MAX: usize = 64;

/// Who asks, and what is known of those that may answer.
#[derive(Clone, Copy, Debug)]
pub struct Asker<'a> {
    /// Its own replicas are left out; none: nobody's are.
    pub node: Option<NodeId>,
    /// Load and failure domain of nodes, as they decide which replica arrives first.
    pub peers: &'a PeerTable,
}

/// A replica as a lookup answers it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Replica {
    /// Who holds it.
    pub node: NodeId,
    /// Where it lies there.
    pub tier: Tier,
    /// How busy the node is.
    pub load: LoadClass,
}

/// Answers of a lookup; reused between lookups it does not allocate.
#[derive(Clone, Debug, Default)]
pub struct Found {
    offsets: Vec<u32>,
    replicas: Vec<Replica>,
    elsewhere: Vec<u32>,
    partial: u32,
    /// Inventory number that is visible to the asker, by node; 0 for none.
    visible: Vec<u32>,
}

impl Found {
    /// Keys answered.
    pub fn keys(&self) -> usize {
        self.offsets.len().saturating_sub(1)
    }

    /// Replicas of the key at `index` of the lookup, the soonest first.
    pub fn of(&self, index: usize) -> &[Replica] {
        &self.replicas[self.offsets[index] as usize..self.offsets[index + 1] as usize]
    }

    /// All replicas, key after key.
    pub fn replicas(&self) -> &[Replica] {
        &self.replicas
    }

    /// Where each key's replicas begin in [`Found::replicas`], and the end: one more than there are keys.
    pub fn offsets(&self) -> &[u32] {
        &self.offsets
    }

    /// Indices of the keys that are in slots of others, in order.
    pub fn elsewhere(&self) -> &[u32] {
        &self.elsewhere
    }

    /// Keys in slots of which some node has not announced its whole inventory.
    pub fn partial(&self) -> u32 {
        self.partial
    }

    /// A new answer; `visible` has the number of the inventory that the asker may see, for each node in order.
    pub(super) fn begin(&mut self, visible: impl Iterator<Item = u32>) {
        self.offsets.clear();
        self.replicas.clear();
        self.visible.clear();
        self.elsewhere.clear();
        self.partial = 0;
        self.offsets.push(0);
        self.visible.extend(visible);
    }

    /// The next key is another member's.
    pub(super) fn skip(&mut self) {
        self.elsewhere.push(self.offsets.len() as u32 - 1);
        self.offsets.push(self.replicas.len() as u32);
    }

    /// Adds the answer for the next key. A key with one replica pays for no order.
    #[inline]
    pub(super) fn collect<'a>(
        &mut self,
        key: &BlockKey,
        entries: impl Iterator<Item = &'a Entry>,
        completeness: Completeness,
        (peers, asking): (&PeerTable, Domain),
    ) {
        self.partial += u32::from(completeness == Completeness::Partial);
        let first = self.replicas.len();
        for entry in entries {
            if entry.generation != self.visible[usize::from(entry.node.0)] {
                continue;
            }
            if self.replicas.len() - first >= CONSIDERED_MAX {
                break;
            }
            let load = peers.of(entry.node).load;
            for tier in [Tier::Dram, Tier::Nvme] {
                if entry.tiers.contains(tier) {
                    self.replicas.push(Replica { node: entry.node, tier, load });
                }
            }
        }
        if self.replicas.len() - first > 1 {
            self.replicas[first..].sort_unstable_by_key(|replica| {
                Arrival::of(key, (replica.node, replica.tier), peers.of(replica.node), asking)
            });
            self.replicas.truncate(first + REPLICAS_PER_KEY_MAX);
        }
        // 8,192 keys × 16 replicas are far from 32 bits.
        self.offsets.push(self.replicas.len() as u32);
    }
}
