//! Placement of further durable replicas.
//!
//! ```text
//!  candidates: alive, active, without a durable copy, with room after placements since their last report
//!       │ holds the block in DRAM   only a write, no transfer is needed
//!       │ other failure domain      than that of every node with the block
//!       │ score                     sixteenths of the pool in use + load class; lower is better
//!       ▼ hash of key and node      spreads blocks over equal nodes
//! ```
//!
//! For each key, the hash of the key selects [`DRAM_HOLDERS_SAMPLED`] of the nodes with the block in DRAM and
//! [`CANDIDATES_SAMPLED`] candidates ("the power of two choices in load balancing", Mitzenmacher, 2001). All
//! candidates are compared only if none of the selected ones is suitable. The holders of a block are marked
//! once per key, so that checking a candidate does not depend on their number. The cost is about 1 µs per key
//! for any number of nodes, plus some nanoseconds per copy of the block.
//!
//! Placed blocks are charged to their target, so that a batch spreads blocks like single queries would.
//!
//! Pure functions of their arguments. Out of scope: liveness of nodes (the caller passes live nodes only),
//! and the use of a decision. A decision is a hint: the target rejects blocks that it has no room for.

use crate::ids::NodeId;
use crate::key::BlockKey;
use crate::routing::{Domain, LoadHint, preference};
use crate::tier::Tier;

mod holders;

use holders::Holders;

/// Number of candidates compared for one key.
pub const CANDIDATES_SAMPLED: usize = 8;
/// Number of nodes with the block in DRAM compared for one key.
pub const DRAM_HOLDERS_SAMPLED: usize = 16;
/// Blocks that must fit into a target's free space in addition to the placed one, because its own writes are
/// in flight.
pub const ROOM_BLOCKS: u64 = 64;
/// Divisor for the share of its pool that a target must have free, if that is more.
pub const ROOM_PART: u64 = 64;

/// Mode of a node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum NodeMode {
    /// Accepts engines and replicas.
    #[default]
    Active,
    /// Accepts no new replicas; engines of the node still save to it.
    Cordoned,
    /// Like cordoned, and copies blocks that exist only on this node to other nodes.
    Draining,
}

/// Progress of draining a node, as the node reports it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DrainProgress {
    /// Whether every durable block has a replica on another node.
    pub drained: bool,
    /// Blocks that the current walk has processed.
    pub walked_blocks: u64,
    /// Number of durable blocks of the node.
    pub durable_blocks: u64,
    /// Slot bytes accepted by other nodes since the agent's start, for any reason.
    pub moved_bytes: u64,
    /// Blocks for which the walk found no node with capacity.
    pub nowhere_blocks: u64,
}

/// Live node that serves peers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlacementNode {
    /// Number of the node.
    pub node: NodeId,
    /// Mode of the node.
    pub mode: NodeMode,
    /// Failure domain; nodes of one domain may fail together.
    pub domain: Domain,
    /// Bytes of its pool; 0 before its first report.
    pub capacity: u64,
    /// Bytes of the pool in use, plus those placed there since the last report.
    pub used: u64,
    /// Bytes that peers have requested from it.
    pub load: LoadHint,
}

/// Copy of a block on a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReplicaLocation {
    /// Node that holds the copy.
    pub node: NodeId,
    /// Tier of the copy; a node with copies in both tiers is listed twice.
    pub tier: Tier,
}

/// Reason for a further replica; determines how many are enough.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum PlacementReason {
    /// Peers read the block often: two durable replicas on nodes that are not draining.
    Hot,
    /// The holder drains: one durable replica on another node that is not draining.
    Drain,
    /// The block moves from its holder to this node, which has more free capacity: one durable replica there.
    Move(NodeId),
}

/// Decision for one key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PlacementDecision {
    /// The block has enough replicas.
    Enough,
    /// Place one more replica on this node.
    On(NodeId),
    /// No suitable node has room now.
    NoCapacity,
}

/// Placement queries of one holder for blocks of one size.
#[derive(Debug)]
pub struct PlacementBatch {
    holder: NodeId,
    reason: PlacementReason,
    slot_bytes: u64,
    /// Sorted by node number.
    nodes: Vec<PlacementNode>,
    /// Indices in `nodes` of the candidates.
    open: Vec<usize>,
    /// Bytes placed by this batch on each node.
    charged: Vec<u64>,
    /// Holders of the block of the current key.
    holders: Holders,
}

/// Sort key of candidates; the smallest is best.
type CandidateKey = (u8, u8, u64, u64, NodeId);

impl PlacementNode {
    /// Whether one more block of this size fits, after `charged` bytes.
    fn has_room(&self, slot_bytes: u64, charged: u64) -> bool {
        let free = self.capacity.saturating_sub(self.used).saturating_sub(charged);
        free > 0 && free >= slot_bytes.saturating_mul(ROOM_BLOCKS).max(self.capacity / ROOM_PART)
    }

    /// Whether its replicas count as permanent.
    fn stays(&self) -> bool {
        self.mode != NodeMode::Draining
    }

    fn score(&self, charged: u64) -> u64 {
        let used = u128::from(self.used) + u128::from(charged);
        let sixteenths = (used * 16).checked_div(u128::from(self.capacity)).unwrap_or(16);
        u64::try_from(sixteenths).unwrap_or(u64::MAX).min(16) + u64::from(self.load.class().0)
    }
}

impl PlacementBatch {
    /// Creates a batch. `nodes` contains each live node that serves peers once.
    pub fn new(
        holder: NodeId,
        reason: PlacementReason,
        slot_bytes: u64,
        mut nodes: Vec<PlacementNode>,
    ) -> PlacementBatch {
        nodes.sort_unstable_by_key(|node| node.node);
        let fits = |node: &PlacementNode| {
            let wanted = match reason {
                PlacementReason::Move(to) => node.node == to,
                PlacementReason::Hot | PlacementReason::Drain => true,
            };
            wanted && node.node != holder && node.mode == NodeMode::Active && node.has_room(slot_bytes, 0)
        };
        let open = (0..nodes.len()).filter(|at| fits(&nodes[*at])).collect();
        let charged = vec![0; nodes.len()];
        let holders = Holders::of(&nodes);
        PlacementBatch { holder, reason, slot_bytes, nodes, open, charged, holders }
    }

    /// Decides for a block with these known locations, and charges the target.
    pub fn place(&mut self, key: &BlockKey, holdings: &[ReplicaLocation]) -> PlacementDecision {
        if self.is_enough(holdings) {
            return PlacementDecision::Enough;
        }
        self.holders.mark(&self.nodes, self.holder, holdings, &self.open);
        let Some(at) = self.best(key) else { return PlacementDecision::NoCapacity };
        self.charged[at] = self.charged[at].saturating_add(self.slot_bytes);
        if !self.nodes[at].has_room(self.slot_bytes, self.charged[at]) {
            self.open.retain(|open| *open != at);
        }
        PlacementDecision::On(self.nodes[at].node)
    }

    /// Bytes that this batch has placed on each node.
    pub fn charges(&self) -> impl Iterator<Item = (NodeId, u64)> {
        let charged = self.nodes.iter().zip(&self.charged).filter(|(_, bytes)| **bytes > 0);
        charged.map(|(node, bytes)| (node.node, *bytes))
    }

    /// Whether a block with these known locations needs no further replica.
    pub fn is_enough(&self, holdings: &[ReplicaLocation]) -> bool {
        let durable = holdings.iter().filter(|holding| holding.tier == Tier::Nvme);
        let mut staying = durable.filter_map(|holding| self.node(holding.node)).filter(|node| node.stays());
        match self.reason {
            PlacementReason::Hot => staying.count() >= 2,
            PlacementReason::Drain => staying.any(|node| node.node != self.holder),
            // Never satisfied by the holder, which drops its copy.
            PlacementReason::Move(to) => staying.any(|node| node.node == to && to != self.holder),
        }
    }

    fn node(&self, node: NodeId) -> Option<&PlacementNode> {
        self.holders.position(node).map(|at| &self.nodes[at])
    }

    /// Index of the best candidate.
    fn best(&self, key: &BlockKey) -> Option<usize> {
        let fits = |at: &usize| !self.holders.is_durable(*at);
        let rank = |at: &usize| self.candidate_key(key, *at);
        sample(key, self.holders.in_dram(), DRAM_HOLDERS_SAMPLED)
            .min_by_key(rank)
            .or_else(|| sample(key, &self.open, CANDIDATES_SAMPLED).filter(fits).min_by_key(rank))
            .or_else(|| self.open.iter().copied().filter(fits).min_by_key(rank))
    }

    fn candidate_key(&self, key: &BlockKey, at: usize) -> CandidateKey {
        let node = &self.nodes[at];
        (
            u8::from(!self.holders.has(at)),
            u8::from(self.holders.shares_domain(at, node.domain)),
            node.score(self.charged[at]),
            preference(key, node.node),
            node.node,
        )
    }
}

/// Selects some of the positions by the key's hash, or all if there are few. A position may be selected
/// twice.
fn sample(key: &BlockKey, of: &[usize], draws: usize) -> impl Iterator<Item = usize> {
    let (count, hash) = (of.len(), key.table_hash());
    (0..count.min(draws)).map(move |draw| {
        if count <= draws {
            return of[draw];
        }
        let number = crate::shards::mix(hash ^ crate::shards::mix(draw as u64));
        of[((u128::from(number) * count as u128) >> 64) as usize]
    })
}

#[cfg(test)]
mod tests;
