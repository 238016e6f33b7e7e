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
        let counters = &self.counters;
        NodeUsage {
            dram_capacity: counters.arena_bytes,
            dram_used: counters.arena_used_bytes,
            nvme_capacity: counters.pool_capacity_bytes,
            nvme_used: counters.pool_used_bytes,
            queued_bytes: self.serves.values().map(super::serves::Serve::open_bytes).sum(),
        }
    }
}
