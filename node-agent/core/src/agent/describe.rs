//! What a node has of one block, and why: for people who ask.
//!
//! Nothing is decided by it. Why a block is here is kept in memory only: a block that is found on a device at the start
//! is known as that, however it had come there.

use reprise_policy::BlockKey;

use super::frames::FrameState;
use super::index::Dram;
use super::{AgentCore, priority_of_class};
use crate::effect::DeviceId;
use crate::event::Priority;

/// Why a block is on a node: how it has come, unless something has happened since that would have brought it too.
///
/// ```text
///  Loaded, Recovered ──it is made durable for a peer's offer──▶ Placed
///  Loaded, Recovered, Placed ──an engine commits the same block──▶ Saved
/// ```
///
/// Whoever comes here for another reason once the block is gone brings a new one: nothing is inherited.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum BlockOrigin {
    /// An engine of this node has committed it.
    Saved = 0,
    /// It was fetched from a peer for a load of this node.
    Loaded = 1,
    /// It was taken from a peer that offered it: because it is read much there, that node is drained, or it has less room.
    /// An offer does not say which.
    Placed = 2,
    /// It was found on a device at the start.
    Recovered = 3,
}

/// What a node has of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockDescription {
    /// Why it is here.
    pub origin: BlockOrigin,
    /// Its copy in DRAM, if there is one.
    pub dram: Option<DramCopy>,
    /// The device that it is on, if it is on one. With a copy that is being filled it is being read from there.
    pub nvme: Option<DeviceId>,
    /// How much it is worth keeping.
    pub priority: Priority,
    /// Leases on the copy in DRAM: blocks of loads and of answers to peers, and checks.
    pub leases: u32,
}

/// A block's copy in DRAM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DramCopy {
    /// On its way there, from a device or a peer.
    Filling,
    /// Readable; to be written to a device.
    Unsaved,
    /// Readable; may be dropped when nobody reads it.
    Clean,
}

impl BlockOrigin {
    /// All of them.
    pub(super) const ALL: [BlockOrigin; 4] =
        [BlockOrigin::Saved, BlockOrigin::Loaded, BlockOrigin::Placed, BlockOrigin::Recovered];
}

impl AgentCore {
    /// What this node has of a block; `None` when it is not here, nor on its way.
    pub fn describe(&self, key: &BlockKey) -> Option<BlockDescription> {
        let entry = self.index.entry(self.index.find(key)?);
        let frame = match entry.dram() {
            Dram::Absent => None,
            Dram::Filling(frame) | Dram::Resident(frame) => Some(self.frames.get(frame)),
        };
        let copy = |state| match state {
            FrameState::Filling(_) => DramCopy::Filling,
            FrameState::Unsaved(_) => DramCopy::Unsaved,
            FrameState::Clean => DramCopy::Clean,
            FrameState::Vacant | FrameState::Reserved | FrameState::Orphan | FrameState::Retired => {
                unreachable!("between events a frame that a block is found by is being filled or readable")
            }
        };
        Some(BlockDescription {
            origin: entry.origin(),
            dram: frame.map(|frame| copy(frame.state)),
            nvme: entry.stored().map(|stored| stored.device),
            priority: priority_of_class(entry.class()),
            leases: frame.map_or(0, |frame| frame.leases),
        })
    }
}
