//! Where a further durable replica of a block goes, and whether it needs one.
//!
//! ```text
//!  candidates: living, active, no durable copy yet, with room after what was placed there since they last reported
//!       │ who has it in DRAM        nothing to transfer but a write
//!       │ another failure domain    than that of every node that has it
//!       │ score                     sixteenths of the pool in use + load class, less is better
//!       ▼ hash of key and node      so that blocks spread
//! ```
//!
//! A key looks at [`IN_DRAM`] of the nodes that have it in DRAM and at [`DRAWN`] candidates, both drawn by its hash ("the
//! power of two choices in load balancing", Mitzenmacher, 2001), at all of them only when none of those will do. Who has it
//! is marked once a key, so that a look at a candidate costs the same however many have it: about 1 µs a key, whatever the
//! number of nodes, and some nanoseconds for each copy of the block.
//!
//! What is placed is charged to its target, so that a batch spreads like single questions would.
//!
//! Pure functions of their arguments. Deliberately absent: whether a node lives (the caller names those that do),
//! and what becomes of an answer: it is a hint, and the target refuses what it has no room for.

use crate::ids::NodeId;
use crate::key::BlockKey;
use crate::routing::{Domain, LoadHint, preference};
use crate::tier::Tier;

mod holders;

use holders::Holders;

/// Candidates that one key looks at.
pub const DRAWN: usize = 8;
/// Nodes with the block in DRAM that one key looks at.
pub const IN_DRAM: usize = 16;
/// Blocks that a target must have room for beside the one: it has writes of its own under way.
pub const ROOM_BLOCKS: u64 = 64;
/// And the part of its pool that must be free, whichever is more.
pub const ROOM_PART: u64 = 64;

/// What a node is for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum NodeMode {
    /// Everything.
    #[default]
    Active,
    /// Chosen for nothing new; its engines save there as ever.
    Cordoned,
    /// To leave: cordoned, and gives away what only it has.
    Draining,
}

/// How far the draining of a node is, as it says of itself.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DrainProgress {
    /// Every durable block is on another node as well.
    pub drained: bool,
    /// Blocks that the walk is through with.
    pub walked_blocks: u64,
    /// Durable blocks of the node.
    pub durable_blocks: u64,
    /// Slot bytes given away since the agent's start, for any reason.
    pub moved_bytes: u64,
    /// Blocks for which the walk found no node with room.
    pub nowhere_blocks: u64,
}

/// A living node that serves others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlacementNode {
    /// Which.
    pub node: NodeId,
    /// What it is for.
    pub mode: NodeMode,
    /// Nodes of one domain fail together.
    pub domain: Domain,
    /// Of its pool, in bytes; 0 when it has not said so.
    pub capacity: u64,
    /// Of that in use, and placed there since it said so.
    pub used: u64,
    /// Bytes wanted of it.
    pub load: LoadHint,
}

/// A copy of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Holding {
    /// Who has it.
    pub node: NodeId,
    /// In which tier; a node that has it in both is named twice.
    pub tier: Tier,
}

/// Why a block is to have another replica.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PlacementReason {
    /// Others keep reading it.
    Hot,
    /// Its holder is to leave.
    Drain,
    /// Its holder is fuller than this node.
    Move(NodeId),
}

/// The answer for one key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Placed {
    /// It has replicas enough.
    Enough,
    /// One more belongs there.
    On(NodeId),
    /// No node will do now.
    Nowhere,
}

/// A batch of questions of one holder, of blocks of one size.
#[derive(Debug)]
pub struct Placement {
    holder: NodeId,
    reason: PlacementReason,
    slot_bytes: u64,
    /// By number.
    nodes: Vec<PlacementNode>,
    /// Of `nodes`, those that are candidates for some key.
    open: Vec<usize>,
    /// Placed by this batch, node for node.
    charged: Vec<u64>,
    /// Who has the block of the key that is looked at.
    holders: Holders,
}

/// What candidates are compared by; the smallest is best.
type Rank = (u8, u8, u64, u64, NodeId);

impl PlacementNode {
    /// Whether one more block of a size fits, after those that were charged.
    fn has_room(&self, slot_bytes: u64, charged: u64) -> bool {
        let free = self.capacity.saturating_sub(self.used).saturating_sub(charged);
        free > 0 && free >= slot_bytes.saturating_mul(ROOM_BLOCKS).max(self.capacity / ROOM_PART)
    }

    /// Whether what it has is there tomorrow.
    fn stays(&self) -> bool {
        self.mode != NodeMode::Draining
    }

    fn score(&self, charged: u64) -> u64 {
        let used = u128::from(self.used) + u128::from(charged);
        let sixteenths = (used * 16).checked_div(u128::from(self.capacity)).unwrap_or(16);
        u64::try_from(sixteenths).unwrap_or(u64::MAX).min(16) + u64::from(self.load.class().0)
    }
}

impl Placement {
    /// A batch: `nodes` are all that live and serve others, each once.
    pub fn new(
        holder: NodeId,
        reason: PlacementReason,
        slot_bytes: u64,
        mut nodes: Vec<PlacementNode>,
    ) -> Placement {
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
        Placement { holder, reason, slot_bytes, nodes, open, charged, holders }
    }

    /// The answer for a block that these nodes hold, as far as is known; charges its target.
    pub fn place(&mut self, key: &BlockKey, holdings: &[Holding]) -> Placed {
        if self.is_enough(holdings) {
            return Placed::Enough;
        }
        self.holders.mark(&self.nodes, self.holder, holdings, &self.open);
        let Some(at) = self.best(key) else { return Placed::Nowhere };
        self.charged[at] = self.charged[at].saturating_add(self.slot_bytes);
        if !self.nodes[at].has_room(self.slot_bytes, self.charged[at]) {
            self.open.retain(|open| *open != at);
        }
        Placed::On(self.nodes[at].node)
    }

    /// What was placed where by this batch, in bytes.
    pub fn charges(&self) -> impl Iterator<Item = (NodeId, u64)> {
        let charged = self.nodes.iter().zip(&self.charged).filter(|(_, bytes)| **bytes > 0);
        charged.map(|(node, bytes)| (node.node, *bytes))
    }

    /// Whether a block that these nodes hold needs no further replica.
    pub fn is_enough(&self, holdings: &[Holding]) -> bool {
        let durable = holdings.iter().filter(|holding| holding.tier == Tier::Nvme);
        let mut staying = durable.filter_map(|holding| self.node(holding.node)).filter(|node| node.stays());
        match self.reason {
            PlacementReason::Hot => staying.count() >= 2,
            PlacementReason::Drain => staying.any(|node| node.node != self.holder),
            // Never its holder: that one drops its copy.
            PlacementReason::Move(to) => staying.any(|node| node.node == to && to != self.holder),
        }
    }

    fn node(&self, node: NodeId) -> Option<&PlacementNode> {
        self.holders.position(node).map(|at| &self.nodes[at])
    }

    /// Position of the best candidate.
    fn best(&self, key: &BlockKey) -> Option<usize> {
        let fits = |at: &usize| !self.holders.is_durable(*at);
        let rank = |at: &usize| self.rank(key, *at);
        drawn(key, self.holders.in_dram(), IN_DRAM)
            .min_by_key(rank)
            .or_else(|| drawn(key, &self.open, DRAWN).filter(fits).min_by_key(rank))
            .or_else(|| self.open.iter().copied().filter(fits).min_by_key(rank))
    }

    fn rank(&self, key: &BlockKey, at: usize) -> Rank {
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

/// Some of these positions, drawn by the key's hash; all when they are few. One may be drawn twice.
fn drawn(key: &BlockKey, of: &[usize], draws: usize) -> impl Iterator<Item = usize> {
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
