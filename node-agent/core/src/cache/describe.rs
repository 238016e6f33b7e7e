//! Description of one block for diagnostics.
//!
//! No decision depends on it. The origin of a block is kept in memory only: a block that recovery finds on a
//! device has the origin `Recovered`, however it had arrived there.

use reprise_policy::BlockKey;
use reprise_policy::eviction::Class;

use crate::cache::Cache;
use crate::cache::blocks::priority_of_class;
use crate::cache::frames::FrameState;
use crate::cache::index::Dram;
use crate::effect::DeviceId;
use crate::event::Priority;

/// Why a block is on a node: the first reason, or a later, stronger one.
///
/// ```text
///  Loaded, Recovered ──made durable for a peer's offer──▶ Placed
///  Loaded, Recovered, Placed ──an engine commits the same block──▶ Saved
/// ```
///
/// A block that was removed and arrives again has a new origin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum BlockOrigin {
    /// An engine of this node committed it.
    Saved = 0,
    /// Fetched from a peer for a load of this node.
    Loaded = 1,
    /// Accepted from a peer that offered it because the block is hot, the peer drains, or the peer is fuller.
    /// The offer does not contain the reason.
    Placed = 2,
    /// Found on a device when the device was opened.
    Recovered = 3,
}

/// Copies of a block on a node, and their state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockDescription {
    /// Why the block is on this node.
    pub origin: BlockOrigin,
    /// State of the copy in DRAM, if there is one.
    pub dram: Option<DramCopy>,
    /// Device that stores the block, if any. While the DRAM copy is being filled, it is read from there.
    pub nvme: Option<DeviceId>,
    /// Eviction priority of the block.
    pub priority: Priority,
    /// Class in the eviction orders: that of the priority, unless a request that has begun lists the block.
    pub class: Class,
    /// Leases on the DRAM copy: of loads, of serves to peers, and of checks.
    pub leases: u32,
}

/// State of a block's copy in DRAM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DramCopy {
    /// Being read from a device or fetched from a peer.
    Filling,
    /// Readable, and not durable yet.
    Unsaved,
    /// Readable, and evictable when it is not leased.
    Clean,
}

impl BlockOrigin {
    /// All origins, in the order of their numbers.
    pub(crate) const ALL: [BlockOrigin; 4] =
        [BlockOrigin::Saved, BlockOrigin::Loaded, BlockOrigin::Placed, BlockOrigin::Recovered];
}

impl Cache {
    /// Describes a block; `None` if it is neither on this node nor being filled.
    pub(crate) fn describe(&self, key: &BlockKey) -> Option<BlockDescription> {
        let found = self.index.find(key)?;
        let entry = self.index.entry(found);
        let frame = match entry.dram() {
            Dram::Absent => None,
            Dram::Filling(frame) | Dram::Resident(frame) => Some(self.frames.get(frame)),
        };
        let copy = |state| match state {
            FrameState::Filling(_) => DramCopy::Filling,
            FrameState::Unsaved(_) => DramCopy::Unsaved,
            FrameState::Clean => DramCopy::Clean,
            FrameState::Vacant | FrameState::Reserved | FrameState::Orphan | FrameState::Retired => {
                unreachable!("between events, a frame with an index entry is being filled or readable")
            }
        };
        Some(BlockDescription {
            origin: entry.origin(),
            dram: frame.map(|frame| copy(frame.state)),
            nvme: entry.stored().map(|stored| stored.device),
            priority: priority_of_class(entry.class()),
            class: self.eviction_class(found),
            leases: frame.map_or(0, |frame| frame.leases),
        })
    }
}
