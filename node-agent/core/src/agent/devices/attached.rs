//! Devices that come and go while the agent works: what becomes of their blocks, and when a number is free again.

use super::super::AgentCore;
use super::super::describe::BlockOrigin;
use super::super::frames::FrameState;
use super::super::index::Dram;
use super::super::limits::DEVICES_MAX;
use super::super::priority_of_class;
use super::super::shapes::Shape;
use super::{Attention, Device, Devices, Health};
use crate::effect::{DeviceId, Effect};
use crate::pool::{DevicePool, StoredBlock};
use reprise_policy::eviction::EntryIndex;

/// What becomes of a copy on a device of a block that is known already.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Adoption {
    /// The block is durable there.
    Taken,
    /// The copy is ended.
    Ended,
}

impl Device {
    /// Whether it is closed and nothing of it will be reported any more.
    fn is_done(&self) -> bool {
        self.health == Health::Closing && self.ops_in_flight == 0 && self.reads_in_flight == 0
    }
}

impl Devices {
    /// A device is to read a block.
    pub(in crate::agent) fn read_begun(&mut self, device: DeviceId) {
        if let Some(device) = self.get_mut(device) {
            device.reads_in_flight += 1;
        }
    }

    /// It has ended, well or not.
    pub(in crate::agent) fn read_ended(&mut self, device: DeviceId) {
        if let Some(device) = self.get_mut(device) {
            device.reads_in_flight -= 1;
        }
    }
}

impl AgentCore {
    /// A device has been opened; its blocks follow ([`AgentCore::recovered`]).
    pub(in crate::agent) fn attach_device(&mut self, id: DeviceId, pool: DevicePool) {
        let at = usize::from(id.0);
        assert!(at < DEVICES_MAX, "numbers of devices are bounded");
        if self.devices.devices.len() <= at {
            self.devices.devices.resize_with(at + 1, || None);
        }
        assert!(self.devices.devices[at].is_none(), "a number is given again when its device is released");
        self.devices.devices[at] = Some(Device::new(pool));
        let ops = self.devices.device_mut(id).pool.flush_frees();
        self.emit_ops(id, ops);
        self.quotas_changed();
    }

    /// Blocks that were found on a device. It may have been lost or closed meanwhile.
    pub(in crate::agent) fn recovered(&mut self, id: DeviceId, blocks: Vec<StoredBlock>) {
        if self.devices.is_usable(id) {
            self.devices.attention = Attention::Wanted;
            self.adopt_stored(id, blocks);
            self.limits_may_be_passed();
        }
    }

    /// A device is not wanted any more.
    pub(in crate::agent) fn detach_device(&mut self, id: DeviceId) {
        let Some(device) = self.devices.get_mut(id) else { return };
        let before = std::mem::replace(&mut device.health, Health::Closing);
        if before != Health::Closing {
            self.devices.closing += 1;
        }
        if before == Health::Usable {
            self.forget_stored_on(id);
        }
    }

    /// Lets go of closed devices of which nothing will be reported any more.
    pub(in crate::agent) fn release_devices(&mut self) {
        if self.devices.closing == 0 {
            return;
        }
        for at in 0..self.devices.devices.len() {
            if self.devices.devices[at].as_ref().is_some_and(Device::is_done) {
                self.devices.devices[at] = None;
                self.devices.closing -= 1;
                self.emit(Effect::DeviceReleased { device: DeviceId(at as u8) });
            }
        }
    }

    /// Takes what recovery found. Of two copies of a block on devices the second is ended, and so is one whose block is on its
    /// way into DRAM or waits to be written: that ends soon, and may bring another one.
    pub(in crate::agent) fn adopt_stored(&mut self, device: DeviceId, blocks: Vec<StoredBlock>) {
        self.index.reserve(self.index.len() + blocks.len());
        for block in blocks {
            if let Some(entry) = self.index.find(&block.key) {
                match self.may_adopt(entry, &block) {
                    Adoption::Taken => self.keep_stored(entry, device, &block),
                    Adoption::Ended => self.devices.free(device, block.page),
                }
                continue;
            }
            let shape = self.intern(block.tenant, block.layout);
            let Some(shape) = shape else {
                self.devices.free(device, block.page);
                continue;
            };
            let priority = priority_of_class(block.priority);
            let entry = self.insert_entry(block.key, shape, priority, BlockOrigin::Recovered);
            self.keep_stored(entry, device, &block);
            debug_assert_eq!(self.index.entry(entry).dram(), Dram::Absent);
        }
    }

    /// What becomes of a copy on a device of a block that is known already.
    fn may_adopt(&self, entry: EntryIndex, block: &StoredBlock) -> Adoption {
        let state = self.index.entry(entry);
        let Dram::Resident(frame) = state.dram() else { return Adoption::Ended };
        let Shape { tenant, layout, .. } = *self.shapes.get(state.shape());
        let is_clean = self.frames.get(frame).state == FrameState::Clean;
        let is_same = (tenant, layout) == (block.tenant, block.layout);
        match is_clean && is_same && state.stored().is_none() {
            true => Adoption::Taken,
            false => Adoption::Ended,
        }
    }
}
