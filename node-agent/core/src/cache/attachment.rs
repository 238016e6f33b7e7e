//! Attaching and detaching devices at run time: their blocks, and the reuse of their numbers.

use reprise_policy::eviction::EntryIndex;

use crate::cache::Cache;
use crate::cache::blocks::priority_of_class;
use crate::cache::describe::BlockOrigin;
use crate::cache::devices::{Device, Devices, Health, SpaceCheck};
use crate::cache::frames::FrameState;
use crate::cache::index::Dram;
use crate::cache::sizes::SizeClass;
use crate::context::Context;
use crate::effect::{DeviceId, Effect};
use crate::limits::DEVICES_MAX;
use crate::pool::{DevicePool, StoredBlock};

/// What to do with a device's copy of a block that is already in the index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Adoption {
    /// Keep the copy: the block is durable there.
    Adopted,
    /// Free the copy's slot.
    Discarded,
}

impl Device {
    /// Whether the device is closing, has nothing in flight, and no process accesses its slots.
    fn is_done(&self) -> bool {
        self.health == Health::Closing
            && self.ops_in_flight == 0
            && self.reads_in_flight == 0
            && self.extents == 0
    }
}

impl Devices {
    /// Counts a read that starts on a device.
    pub(crate) fn read_begun(&mut self, device: DeviceId) {
        if let Some(device) = self.get_mut(device) {
            device.reads_in_flight += 1;
        }
    }

    /// Counts a read that has ended, with or without success.
    pub(crate) fn read_ended(&mut self, device: DeviceId) {
        if let Some(device) = self.get_mut(device) {
            device.reads_in_flight -= 1;
        }
    }
}

impl Cache {
    /// Numbers of all devices that are not released.
    pub(crate) fn device_ids(&self) -> impl Iterator<Item = DeviceId> + use<> {
        self.devices.ids()
    }

    /// Attaches an opened device; its blocks follow ([`Cache::recovered`]).
    pub(crate) fn attach_device(&mut self, cx: &mut Context, id: DeviceId, pool: DevicePool) {
        let at = usize::from(id.0);
        assert!(at < DEVICES_MAX, "numbers of devices are bounded");
        self.devices.add(at, pool, self.now);
        let ops = self.devices.device_mut(id).pool.flush_frees();
        self.emit_ops(cx, id, ops);
        self.await_earlier_leases(cx, id);
        self.outcomes.capacity_changed = true;
    }

    /// Adds blocks found on a device, unless it was lost or detached meanwhile.
    pub(crate) fn recovered(&mut self, id: DeviceId, blocks: Vec<StoredBlock>) {
        if self.devices.is_usable(id) {
            self.devices.space_check = SpaceCheck::Due;
            self.adopt_stored(id, blocks);
            self.outcomes.recovered = true;
        }
    }

    /// Detaches a device and removes its blocks.
    pub(crate) fn detach_device(&mut self, id: DeviceId) {
        let Some(device) = self.devices.get_mut(id) else { return };
        let before = std::mem::replace(&mut device.health, Health::Closing);
        if before != Health::Closing {
            self.devices.closing += 1;
        }
        if before == Health::Usable {
            self.drop_stored_on(id);
        }
    }

    /// Releases closing devices that have nothing in flight.
    pub(crate) fn release_devices(&mut self, cx: &mut Context) {
        if self.devices.closing == 0 {
            return;
        }
        for at in 0..self.devices.devices.len() {
            if self.devices.devices[at].as_ref().is_some_and(Device::is_done) {
                self.devices.devices[at] = None;
                self.devices.closing -= 1;
                cx.emit(Effect::DeviceReleased { device: DeviceId(at as u8) });
            }
        }
    }

    /// Adds the blocks that recovery found. The second copy of a block on devices is freed. So is the copy of
    /// a block that is being filled or waits to be written, because that operation may soon store another
    /// copy.
    pub(crate) fn adopt_stored(&mut self, device: DeviceId, blocks: Vec<StoredBlock>) {
        self.index.reserve(self.index.len() + blocks.len());
        for block in blocks {
            if let Some(entry) = self.index.find(&block.key) {
                match self.may_adopt(entry, &block) {
                    Adoption::Adopted => self.keep_stored(entry, device, &block),
                    Adoption::Discarded => self.devices.free(device, block.page),
                }
                continue;
            }
            let size_class = self.intern(block.tenant, block.layout);
            let Some(size_class) = size_class else {
                self.devices.free(device, block.page);
                continue;
            };
            let priority = priority_of_class(block.priority);
            let entry = self.insert_entry(block.key, size_class, priority, BlockOrigin::Recovered);
            self.keep_stored(entry, device, &block);
            debug_assert_eq!(self.index.entry(entry).dram(), Dram::Absent);
        }
    }

    /// Decides about a device's copy of a block that is already in the index.
    fn may_adopt(&self, entry: EntryIndex, block: &StoredBlock) -> Adoption {
        let state = self.index.entry(entry);
        let Dram::Resident(frame) = state.dram() else { return Adoption::Discarded };
        let SizeClass { tenant, layout, .. } = *self.sizes.get(state.size_class());
        let is_clean = self.frames.get(frame).state == FrameState::Clean;
        let is_same = (tenant, layout) == (block.tenant, block.layout);
        match is_clean && is_same && state.stored().is_none() {
            true => Adoption::Adopted,
            false => Adoption::Discarded,
        }
    }
}
