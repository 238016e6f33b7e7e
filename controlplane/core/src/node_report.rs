//! Reports of nodes about their usage, load and drain progress, about once a second.

use reprise_policy::{Amounts, DrainProgress};

/// A node's last report, about a second old.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NodeReport {
    /// Capacity of the node.
    pub capacity: Amounts,
    /// Bytes in use.
    pub used: Amounts,
    /// Bytes that peers have requested and not received yet.
    pub queued_bytes: u64,
    /// Progress of a drain, that is, of copying blocks that exist only on this node.
    pub drain: DrainProgress,
}
