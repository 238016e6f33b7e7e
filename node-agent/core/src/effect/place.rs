//! Where the bytes of a block are, and leases of such places.

use reprise_policy::{ArenaSlot, Generation};

use crate::effect::DeviceId;
use crate::slab::SlabId;

/// Location of the bytes of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// Slot of the arena.
    Arena(ArenaSlot),
    /// Slot of a device: a header page, and the payload directly behind it.
    Extent {
        /// Device that contains the slot.
        device: DeviceId,
        /// Generation of the slot.
        generation: Generation,
        /// Byte offset of the header page on the device.
        offset: u64,
        /// Bytes of the payload.
        bytes: u64,
        /// CRC32C that the header page must have; 0 if the slot is leased.
        header_crc: u32,
    },
}

impl Place {
    /// Slot of the arena, if the place is one.
    pub fn arena(self) -> Option<ArenaSlot> {
        match self {
            Place::Arena(slot) => Some(slot),
            Place::Extent { .. } => None,
        }
    }
}

/// Kind of a [`Place`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PlaceKind {
    /// Slot of the arena.
    Arena,
    /// Slot of a device.
    Extent,
}

/// Number of a reserved slot that a client fills.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct LeaseId(pub u64);

impl LeaseId {
    /// Bit of leases of extents. Two owners number their leases; memory bounds the slots of each below 2³¹.
    const EXTENT_BIT: u64 = 1 << 31;

    /// Kind of the place that is leased.
    pub fn kind(self) -> PlaceKind {
        if self.0 & LeaseId::EXTENT_BIT == 0 { PlaceKind::Arena } else { PlaceKind::Extent }
    }

    pub(crate) fn of_extent(id: SlabId) -> LeaseId {
        LeaseId(id.0 | LeaseId::EXTENT_BIT)
    }

    /// Id of a leased extent; `None` for a lease of the arena.
    pub(crate) fn extent(self) -> Option<SlabId> {
        (self.kind() == PlaceKind::Extent).then_some(SlabId(self.0 & !LeaseId::EXTENT_BIT))
    }
}
