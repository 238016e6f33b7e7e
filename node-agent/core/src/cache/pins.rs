//! Pinned slots of devices, and devices that lend slots.

use reprise_policy::BlockKey;

use crate::cache::devices::Devices;
use crate::cache::index::Stored;
use crate::effect::DeviceId;
use crate::pool::PageNumber;

/// Slot that other processes read.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pin {
    pub(super) key: BlockKey,
    pub(super) count: u32,
    /// Whether the block was removed; the slot is freed with the last pin.
    pub(super) removed: bool,
}

impl Devices {
    /// Whether other processes read the slot of a block.
    pub(crate) fn is_pinned(&self, stored: Stored) -> bool {
        self.pins.contains_key(&(stored.device, stored.page))
    }

    /// Marks a block as removed if its slot is pinned; returns whether it is.
    pub(super) fn free_after_unpin(&mut self, device: DeviceId, page: PageNumber) -> bool {
        let pin = self.pins.get_mut(&(device, page));
        pin.is_some_and(|pin| {
            pin.removed = true;
            true
        })
    }

    /// Returns the device with the most free space that can lend slots of a size.
    pub(super) fn emptiest_lender(&self, slot_bytes: u64) -> Option<DeviceId> {
        self.ids()
            .filter(|id| self.can_lend(*id) && self.device(*id).pool.allocatable(slot_bytes) > 0)
            .max_by_key(|id| (self.device(*id).pool.usage().slot_bytes_free, std::cmp::Reverse(*id)))
    }

    /// Whether slots of a device can be lent or committed.
    pub(super) fn can_lend(&self, device: DeviceId) -> bool {
        self.is_writable(device) && self.device(device).pool.can_lend()
    }
}
