//! Operations of the devices: their ends, and failures.
//!
//! A lost device is lost capacity. Its blocks are removed (copies in DRAM remain). Blocks that were being
//! written to it are written elsewhere as soon as it no longer reads their memory.

use reprise_policy::eviction::{EntryIndex, Group};

use crate::cache::devices::{Health, SpaceCheck};
use crate::cache::index::Stored;
use crate::cache::rotation::Target;
use crate::cache::sizes::SizeClassId;
use crate::cache::{Cache, DoneBatch};
use crate::context::Context;
use crate::effect::{DeviceId, Diagnostic, Effect};
use crate::event::FillError;
use crate::limits::READ_ERRORS_MAX;
use crate::pool::{DeviceError, DeviceOp, OpToken, PoolEvent};

impl Cache {
    /// Whether a device exists and has neither failed nor been detached.
    pub(crate) fn is_usable(&self, device: DeviceId) -> bool {
        self.devices.is_usable(device)
    }

    /// Whether a device is usable and can be written.
    pub(crate) fn is_writable(&self, device: DeviceId) -> bool {
        self.devices.is_writable(device)
    }

    /// Number of devices that can be written.
    pub(crate) fn writable_devices(&self) -> usize {
        self.devices.writable()
    }

    /// Returns the devices that can start a batch and have a slot and a budget for a block of this size.
    pub(crate) fn write_targets(&self, slot_bytes: u64) -> Vec<Target> {
        self.devices.write_targets(slot_bytes, self.now)
    }

    /// Whether a writable device has space for a block of this size.
    pub(crate) fn has_page(&self, slot_bytes: u64) -> bool {
        self.devices.has_slot(slot_bytes)
    }

    /// Whether a writable device has segments that are large enough for a block of this size.
    pub(crate) fn can_hold(&self, slot_bytes: u64) -> bool {
        self.devices.can_hold(slot_bytes)
    }

    /// Sends pool operations to the runtime.
    pub(super) fn emit_ops(&mut self, cx: &mut Context, device: DeviceId, ops: Vec<DeviceOp>) {
        if let Some(device) = self.devices.get_mut(device) {
            device.ops_in_flight += ops.len() as u64;
        }
        self.count_written(device, &ops);
        for op in ops {
            cx.emit(Effect::Device { device, op });
        }
    }

    /// Handles the end of a pool operation.
    pub(crate) fn device_done(
        &mut self,
        cx: &mut Context,
        id: DeviceId,
        token: OpToken,
        result: Result<(), DeviceError>,
    ) {
        if self.devices.get(id).is_none() {
            return;
        }
        let device = self.devices.device_mut(id);
        device.ops_in_flight -= 1;
        let (ops, events) = device.pool.done(token, result);
        self.emit_ops(cx, id, ops);
        for event in events {
            match event {
                // Also on a lost device: until this event, it may read the blocks' memory.
                PoolEvent::BatchDone { batch, stored, .. } => {
                    self.devices.device_mut(id).batches_in_flight -= 1;
                    self.outcomes.batches.push(DoneBatch { batch, stored });
                }
                PoolEvent::SpaceFreed => {}
                PoolEvent::WritesStopped { reason } => {
                    self.keep_blocks_of(id);
                    cx.emit(Effect::Diagnostic(Diagnostic::WritesStopped { device: id, reason }));
                }
                PoolEvent::DeviceLost { reason } => self.lose_device(cx, id, reason),
            }
        }
    }

    /// Excludes the blocks of a device that is only read from evictions for space on other devices. O(blocks).
    fn keep_blocks_of(&mut self, id: DeviceId) {
        for tenant in self.accounts.ids().collect::<Vec<_>>() {
            // In the order of eviction, which the blocks keep.
            for entry in self.devices.next_victims(Group(tenant.0), None, usize::MAX) {
                if self.index.entry(entry).stored().is_some_and(|stored| stored.device == id) {
                    self.enter_nvme_order(entry);
                }
            }
        }
    }

    /// Handles a failure of a device that the runtime detected.
    pub(crate) fn device_lost(&mut self, cx: &mut Context, id: DeviceId, reason: String) {
        if self.devices.get(id).is_some() {
            self.lose_device(cx, id, reason);
        }
    }

    /// Drops a stored block that could not be read or failed verification. After a medium error, its slot is
    /// quarantined. After a checksum mismatch, the slot is freed: the committing client may have sent a wrong
    /// checksum, and could otherwise use up the pool. A block whose key is gone leaves a usable slot, too.
    pub(super) fn drop_stored(&mut self, cx: &mut Context, entry: EntryIndex, error: FillError) {
        let Some(stored) = self.index.entry(entry).stored() else { return };
        let key = self.index.entry(entry).key();
        self.devices.remove_evictable(entry);
        self.clear_stored(entry);
        if error == FillError::Corrupt {
            self.devices.free(stored.device, stored.page);
            self.counters.corrupt_blocks += 1;
            let (device, page) = (stored.device, stored.page);
            cx.emit(Effect::Diagnostic(Diagnostic::CorruptBlock { device, page, key }));
            return;
        }
        if error == FillError::Absent {
            self.devices.free(stored.device, stored.page);
            return;
        }
        let device = self.devices.device_mut(stored.device);
        device.pool.quarantine(stored.page);
        device.records_owed += 1;
        device.read_errors += 1;
        if device.read_errors >= READ_ERRORS_MAX {
            self.lose_device(cx, stored.device, format!("{READ_ERRORS_MAX} consecutive reads failed"));
        }
    }

    /// Reports, once for each size class, that its blocks fit into no segment. Not reported without devices,
    /// because then no block can be durable.
    pub(super) fn report_unstorable(&mut self, cx: &mut Context, size_class: SizeClassId) {
        let segments = self.devices.writable_devices().map(|device| device.pool.payload_bytes_max());
        if let Some(payload_bytes_max) = segments.max()
            && self.sizes.mark_unstorable_reported(size_class)
        {
            let block_bytes = self.sizes.get(size_class).slot_bytes;
            cx.emit(Effect::Diagnostic(Diagnostic::Unstorable { block_bytes, payload_bytes_max }));
        }
    }

    pub(super) fn lose_device(&mut self, cx: &mut Context, id: DeviceId, reason: String) {
        let device = self.devices.device_mut(id);
        if device.health != Health::Usable {
            return;
        }
        device.health = Health::Lost;
        self.counters.devices_lost += 1;
        cx.emit(Effect::Diagnostic(Diagnostic::DeviceLost { device: id, reason }));
        self.drop_stored_on(id);
    }

    /// Removes all blocks on a device that is no longer usable; copies in DRAM remain.
    pub(super) fn drop_stored_on(&mut self, id: DeviceId) {
        self.devices.space_check = SpaceCheck::Due;
        let on_it = |stored: Stored| stored.device == id;
        let lost: Vec<EntryIndex> = self
            .index
            .iter()
            .filter(|(_, entry)| entry.stored().is_some_and(on_it))
            .map(|(entry, _)| entry)
            .collect();
        for entry in lost {
            self.devices.remove_evictable(entry);
            self.clear_stored(entry);
            self.remove_if_absent(entry);
        }
        self.outcomes.capacity_changed = true;
    }

    /// Starts the repairs that recovery requires.
    pub(crate) fn start_devices(&mut self, cx: &mut Context) {
        for id in self.devices.ids() {
            let ops = self.devices.device_mut(id).pool.flush_frees();
            self.emit_ops(cx, id, ops);
            self.await_earlier_leases(cx, id);
        }
    }
}
