//! Pinned slots of devices, and devices that lend slots.

use std::collections::BTreeSet;

use reprise_policy::{BlockKey, DevicePlace, Distance, Tick};

use crate::cache::accounts::nvme_bytes;
use crate::cache::devices::{Device, Devices};
use crate::cache::index::Stored;
use crate::cache::rotation::Target;
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

    /// Returns the devices that can lend a slot of a size and have a budget for it, by their distance to the GPU, the nearest first. Without the
    /// place of a GPU, all are equally near.
    pub(super) fn lenders(&self, slot_bytes: u64, gpu: Option<&DevicePlace>, now: Tick) -> Vec<Vec<Target>> {
        let distance = |device: &Device| gpu.map(|gpu| gpu.distance_to(device.pool.place()));
        let can_lend = |device: &Device| device.can_lend() && device.may_write(now, nvme_bytes(slot_bytes));
        let lenders = self.devices.iter().flatten().filter(|device| can_lend(device));
        let distances: BTreeSet<Option<Distance>> = lenders.map(distance).collect();
        let at = |at| self.targets(slot_bytes, |device| can_lend(device) && distance(device) == at);
        distances.into_iter().map(at).filter(|targets| !targets.is_empty()).collect()
    }

    /// Whether slots of a device can be lent or committed.
    pub(super) fn can_lend(&self, device: DeviceId) -> bool {
        self.get(device).is_some_and(Device::can_lend)
    }
}

impl Device {
    fn can_lend(&self) -> bool {
        self.is_writable() && self.pool.can_lend()
    }
}
