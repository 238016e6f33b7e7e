//! Capacity and load of a node, which it reports to the control plane about once a second.

/// Capacity and load of a node, as of the last event.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NodeUsage {
    /// Bytes of the arena.
    pub dram_capacity: u64,
    /// Bytes of arena slots in use.
    pub dram_used: u64,
    /// Bytes of the devices that are available for slots.
    pub nvme_capacity: u64,
    /// Bytes of pool slots in use.
    pub nvme_used: u64,
    /// Slot bytes of blocks that peers requested and have not received yet.
    pub queued_bytes: u64,
}
