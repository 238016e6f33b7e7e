//! Capacity and load of a node, which it reports to the control plane about once a second.

use super::AgentCore;

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

impl AgentCore {
    /// Capacity and load of this node.
    pub fn node_usage(&self) -> NodeUsage {
        let pools = self.devices.usage();
        NodeUsage {
            dram_capacity: self.arena.bytes(),
            dram_used: self.arena.used_bytes(),
            nvme_capacity: pools.capacity_bytes,
            nvme_used: pools.slot_bytes_used,
            queued_bytes: self.serves.values().map(super::serves::Serve::open_bytes).sum(),
        }
    }
}
