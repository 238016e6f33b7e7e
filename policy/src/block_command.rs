//! Commands on the blocks that a node has: retention pins, prefetches, demotion and deletion.
//!
//! A *retention pin* keeps the copies of a block from eviction for a limited time. It belongs to a tenant and outlives
//! the session that set it. A *pin of an extent* is a different thing: it keeps a slot of a device in place while a
//! client reads it, and ends with its session.
//!
//! Agents and clients use these types.

use std::time::Duration;

use crate::session::Ranks;
use crate::{BlockKey, SessionId};

/// Longest time of a retention pin.
pub const RETENTION_TTL_MAX: Duration = Duration::from_secs(7 * 86_400);

/// Shortest time of a retention pin: a shorter one ends before its answer is read.
pub const RETENTION_TTL_MIN: Duration = Duration::from_millis(1);

/// What to do with some blocks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlockCommand {
    /// Change of each block.
    pub action: BlockAction,
    /// Blocks to change.
    pub selection: BlockSelection,
    /// Ranks whose parts are selected. The keys of a session are those that its hints list.
    pub ranks: Ranks,
}

/// Change of one block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BlockAction {
    /// Keeps the copies that the block has now from eviction for this time. A pinned block gets the new time.
    Pin {
        /// Time until the pin ends by itself.
        ttl: Duration,
    },
    /// Ends the retention pin.
    Unpin,
    /// Reads the block from a device into DRAM, behind all other reads.
    Prefetch,
    /// Drops the copy in DRAM of a block that is on a device.
    Demote,
    /// Removes all copies of this node, and withdraws them from the directory.
    Delete,
}

/// Blocks that a command changes. All belong to the tenant of the session that sends it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BlockSelection {
    /// Blocks with these keys; of all ranks, those of a block follow each other.
    Keys(Vec<BlockKey>),
    /// Blocks that the last hint of a session lists.
    Listed(SessionId),
    /// All blocks of the session's namespace on this node, in steps.
    Namespace {
        /// 0, then [`BlockReport::next`] of the step before.
        from: u64,
    },
}

/// Number of blocks by what a command did with them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BlockCounts {
    /// Blocks that were changed.
    pub affected: u64,
    /// Blocks that had the requested state already.
    pub unchanged: u64,
    /// Keys without a block on this node.
    pub absent: u64,
    /// Blocks that a limit of the tenant or of the node does not admit.
    pub over_limit: u64,
    /// Blocks in use by loads, saves, transfers or pins of extents, and blocks whose only copy is in DRAM.
    pub in_use: u64,
    /// Blocks with a retention pin.
    pub pinned: u64,
    /// Slot bytes of the copies that were changed.
    pub bytes: u64,
}

/// Retention pins of a tenant, and their limits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RetentionUsage {
    /// Number of pinned blocks.
    pub blocks: u64,
    /// Maximum number of pinned blocks.
    pub blocks_max: u64,
    /// Pinned bytes in DRAM.
    pub dram_bytes: u64,
    /// Maximum pinned bytes in DRAM.
    pub dram_bytes_max: u64,
    /// Pinned bytes on devices, header pages included.
    pub nvme_bytes: u64,
    /// Maximum pinned bytes on devices.
    pub nvme_bytes_max: u64,
}

/// Answer to a command.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BlockReport {
    /// Blocks of this step.
    pub counts: BlockCounts,
    /// Where the next step begins; `None` after the last one.
    pub next: Option<u64>,
    /// Pins of the tenant after the command.
    pub retention: RetentionUsage,
}

impl BlockCounts {
    /// Number of blocks that are on this node, or were before the command.
    pub fn found(&self) -> u64 {
        self.affected + self.unchanged + self.refused()
    }

    /// Number of blocks that were not changed, although the command requested it.
    pub fn refused(&self) -> u64 {
        self.over_limit + self.in_use + self.pinned
    }

    /// Adds the numbers of another step.
    pub fn add(&mut self, other: &BlockCounts) {
        self.affected += other.affected;
        self.unchanged += other.unchanged;
        self.absent += other.absent;
        self.over_limit += other.over_limit;
        self.in_use += other.in_use;
        self.pinned += other.pinned;
        self.bytes += other.bytes;
    }
}
