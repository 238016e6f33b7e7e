//! Requests and results of lookups.

use reprise_policy::routing::{Arrival, Domain, PeerTable, Replica};
use reprise_policy::{BlockKey, NodeId, Tier};

use super::REPLICAS_PER_KEY_MAX;
use super::inventory_progress::Completeness;
use super::table::Entry;

/// Maximum number of replicas of a key that are considered. If more nodes hold a block, any of these suffice,
/// and lookups of such keys cost no more than others.
pub const CONSIDERED_MAX: usize = 64;

/// Requester of a lookup, with known properties of the nodes that may serve it.
#[derive(Clone, Copy, Debug)]
pub struct Requester<'a> {
    /// Requesting node, whose own replicas are left out; `None` to return those of all nodes.
    pub node: Option<NodeId>,
    /// Load and failure domain of nodes, which determine the order of replicas.
    pub peers: &'a PeerTable,
}

/// Results of a lookup. Reusing it avoids allocations.
#[derive(Clone, Debug, Default)]
pub struct LookupResult {
    offsets: Vec<u32>,
    replicas: Vec<Replica>,
    elsewhere: Vec<u32>,
    partial: u32,
    /// Inventory generation visible to the requester, by node; 0 if none.
    visible: Vec<u32>,
}

impl LookupResult {
    /// Number of keys in the result.
    pub fn keys(&self) -> usize {
        self.offsets.len().saturating_sub(1)
    }

    /// Replicas of the key at `index` of the lookup, soonest to arrive first.
    pub fn of(&self, index: usize) -> &[Replica] {
        &self.replicas[self.offsets[index] as usize..self.offsets[index + 1] as usize]
    }

    /// All replicas in key order.
    pub fn replicas(&self) -> &[Replica] {
        &self.replicas
    }

    /// Start of each key's replicas in [`LookupResult::replicas`], and the end: one more than there are keys.
    pub fn offsets(&self) -> &[u32] {
        &self.offsets
    }

    /// Indices of the keys in slots of other members, in order.
    pub fn elsewhere(&self) -> &[u32] {
        &self.elsewhere
    }

    /// Number of keys in slots with an incomplete inventory of some node.
    pub fn partial(&self) -> u32 {
        self.partial
    }

    /// Starts a result; `visible` has the visible inventory generation of each node in order.
    pub(super) fn begin(&mut self, visible: impl Iterator<Item = u32>) {
        self.offsets.clear();
        self.replicas.clear();
        self.visible.clear();
        self.elsewhere.clear();
        self.partial = 0;
        self.offsets.push(0);
        self.visible.extend(visible);
    }

    /// Adds a key that another member owns.
    pub(super) fn skip(&mut self) {
        self.elsewhere.push(self.offsets.len() as u32 - 1);
        self.offsets.push(self.replicas.len() as u32);
    }

    /// Adds the replicas of the next key. Keys with one replica are not sorted.
    #[inline]
    pub(super) fn collect<'a>(
        &mut self,
        key: &BlockKey,
        entries: impl Iterator<Item = &'a Entry>,
        completeness: Completeness,
        (peers, requester): (&PeerTable, Domain),
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
                Arrival::of(key, (replica.node, replica.tier), peers.of(replica.node), requester)
            });
            self.replicas.truncate(first + REPLICAS_PER_KEY_MAX);
        }
        // 8,192 keys × 16 replicas fit in 32 bits.
        self.offsets.push(self.replicas.len() as u32);
    }
}
