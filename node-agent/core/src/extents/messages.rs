//! Parts of requests and replies about extents.

use reprise_policy::SessionId;

use crate::effect::{DeviceId, Place};

/// Number of a pin.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PinId(pub u64);

/// Party that may still do I/O on extents after its session has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum ExtentHolder {
    /// A session of this agent.
    Session(SessionId),
    /// Sessions of earlier processes of the agent, on one device.
    Earlier(DeviceId),
}

/// Result of a pin for one key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PinnedBlock {
    /// The block stays at its place until the pin ends.
    Pinned {
        /// Number of the pin.
        pin: PinId,
        /// Place of the block.
        place: Place,
    },
    /// The block is not pinned.
    Refused(PinRefusal),
}

impl PinnedBlock {
    /// Number of the pin, if the block is pinned.
    pub fn pin(&self) -> Option<PinId> {
        match self {
            PinnedBlock::Pinned { pin, .. } => Some(*pin),
            PinnedBlock::Refused(_) => None,
        }
    }
}

/// Reason why a block is not pinned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PinRefusal {
    /// The block is not on this node.
    Miss,
    /// The block is on this node, but on no device that clients may read: load it through the arena.
    NotDurable,
    /// The session or all sessions hold their share of the devices: end some pins first.
    Limit,
}
