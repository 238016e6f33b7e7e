//! Places in the agent's arena, as the core, the devices and the transport name them.

/// Number of an arena region.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RegionId(pub u16);

/// Slot in the arena, or a part of one. The offset and length of a whole slot are multiples of 4096.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ArenaSlot {
    /// Region that contains the slot.
    pub region: RegionId,
    /// Byte offset in the region.
    pub offset: u64,
    /// Length in bytes; for a whole slot, the payload padded to whole pages.
    pub bytes: u64,
}
