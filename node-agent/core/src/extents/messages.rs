//! Requests and replies about extents.

use std::time::Duration;

pub use reprise_policy::session::ExtentStatus;
use reprise_policy::{BlockKey, SessionId};

use crate::effect::{DeviceId, LeaseId, Place};
use crate::event::CommitRequest;

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

/// Request of a client that does its own I/O.
#[derive(Clone, Debug)]
pub enum ExtentRequest {
    /// Leases slots to write.
    Lease {
        /// Number of slots; the reply may contain fewer.
        count: u32,
    },
    /// Publishes blocks whose payloads were written to leased slots, and makes them durable.
    Commit(CommitRequest),
    /// Returns leased slots. The client has ended its I/O on them.
    Abort {
        /// Leases; unknown ones are ignored.
        leases: Vec<LeaseId>,
    },
    /// Pins durable blocks to read.
    Pin {
        /// Keys of the blocks.
        keys: Vec<BlockKey>,
    },
    /// Ends pins. The client has ended its I/O on these slots.
    Unpin {
        /// Pins; unknown ones are ignored.
        pins: Vec<PinId>,
    },
}

/// Reply to an [`ExtentRequest`].
#[derive(Clone, Debug)]
pub enum ExtentReply {
    /// Leased slots, possibly fewer than requested.
    Leased {
        /// Leases and places of the slots.
        leases: Vec<(LeaseId, Place)>,
        /// Time to wait before requesting the rest; zero if no slot is missing.
        retry_after: Duration,
    },
    /// Result of a commit: one status for each item, in order. Sent when every block has a final state.
    Committed {
        /// Statuses of the items.
        statuses: Vec<ExtentStatus>,
    },
    /// Leases were returned.
    Aborted,
    /// Result of a pin: one for each key, in order.
    Pinned {
        /// Pins and places, or refusals.
        blocks: Vec<PinnedBlock>,
    },
    /// Pins have ended.
    Unpinned,
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
