//! Frames that a device or a peer fills.
//!
//! A key has at most one frame that is being filled. The block is findable from the start of its fill, so that
//! others can join. Only the end of the fill makes the slot free or the block readable, because the device or
//! transport writes to the slot until then.

use reprise_policy::eviction::EntryIndex;
use reprise_policy::{BlockKey, Tier};

use crate::cache::Cache;
use crate::cache::describe::BlockOrigin;
use crate::cache::frames::{EvictionPosition, FrameIndex, FrameState};
use crate::cache::index::Dram;
use crate::cache::lease::{Fill, Lease, Read};
use crate::cache::sizes::{SizeClass, SizeClassId};
use crate::context::Context;
use crate::effect::{BlockRead, Change, DeviceId, FetchBlock, FillId, LossReason};
use crate::event::{FillError, Priority};
use crate::pool::StoredBlock;
use crate::slab::SlabId;

impl Cache {
    /// Starts to read a stored block that is not in DRAM; `None` if the arena has no room.
    pub(crate) fn begin_read(
        &mut self,
        entry: EntryIndex,
        fill: SlabId,
    ) -> Option<(DeviceId, Lease<Fill>, BlockRead)> {
        let state = self.index.entry(entry);
        debug_assert!(state.dram() == Dram::Absent, "one fill per key");
        let (key, size_class) = (state.key(), state.size_class());
        let stored = state.stored()?;
        // A block that is being read must not be evicted from its device.
        self.devices.remove_evictable(entry);
        let Some(frame) = self.allocate_frame(size_class, FrameState::Filling(fill.slot())) else {
            self.enter_nvme_order(entry);
            return None;
        };
        self.devices.read_begun(stored.device);
        self.index.entry_mut(entry).set_dram(Dram::Filling(frame));
        self.frames.get_mut(frame).set_entry(Some(entry));
        let slot = self.frame_slot(frame);
        let tenant = self.tenant_of(size_class);
        self.accounts.get_mut(tenant).counts.nvme_read_bytes += slot.bytes;
        let StoredBlock { page, generation, header_crc, .. } = self.devices.stored(stored);
        let read = BlockRead { fill: FillId(fill.0), key, page, generation, header_crc, slot };
        Some((stored.device, Lease::new(frame), read))
    }

    /// Starts the fetch of a block that is not on this node.
    pub(crate) fn begin_fetch(
        &mut self,
        (key, size_class): (BlockKey, SizeClassId),
        fill: SlabId,
        origin: BlockOrigin,
    ) -> Result<(Lease<Fill>, FetchBlock), LossReason> {
        if self.index.find(&key).is_some() {
            // The block is here under another tenant or layout: it counts as missing, because a key can exist
            // only once.
            return Err(LossReason::Miss);
        }
        let frame = self.allocate_frame(size_class, FrameState::Filling(fill.slot()));
        let frame = frame.ok_or(LossReason::NoSpace)?;
        let entry = self.insert_entry(key, size_class, Priority::Normal, origin);
        self.index.entry_mut(entry).set_dram(Dram::Filling(frame));
        self.frames.get_mut(frame).set_entry(Some(entry));
        let into = self.frame_slot(frame);
        Ok((Lease::new(frame), FetchBlock { fill: FillId(fill.0), key, into }))
    }

    /// Makes a verified block readable, and ends the read of a device. Returns the frame, and its position in
    /// the eviction order if the block is saved. `None` if a commit replaced the fill: this copy is not
    /// findable.
    pub(crate) fn finish_fill(
        &mut self,
        lease: Lease<Fill>,
        device: Option<DeviceId>,
    ) -> Option<(FrameIndex, EvictionPosition)> {
        let frame = lease.redeem();
        if let Some(device) = device {
            self.devices.read_succeeded(device);
            self.devices.read_ended(device);
        }
        let Some(entry) = self.frames.get(frame).entry() else {
            self.set_frame_state(frame, FrameState::Orphan);
            return None;
        };
        self.index.entry_mut(entry).set_dram(Dram::Resident(frame));
        self.enter_dram(entry, frame);
        self.resident_blocks += 1;
        self.set_frame_state(frame, FrameState::Clean);
        if self.index.entry(entry).stored().is_some() {
            self.enter_nvme_order(entry);
        }
        self.replica_changed(entry, Tier::Dram, Change::Added);
        let is_read = self.frames.get(frame).leases > 0;
        Some((frame, if is_read { EvictionPosition::Last } else { EvictionPosition::First }))
    }

    /// Ends a failed fill, and the read of a device. A stored block that could not be read is removed, unless
    /// the device did not start the read. The slot is free once its readers have released it; a slot that its
    /// device may still write to is never used again.
    pub(crate) fn fail_fill(
        &mut self,
        cx: &mut Context,
        lease: Lease<Fill>,
        device: Option<DeviceId>,
        error: FillError,
    ) {
        let frame = lease.redeem();
        if let Some(device) = device {
            self.devices.read_ended(device);
        }
        if let Some(entry) = self.frames.get(frame).entry() {
            self.frames.get_mut(frame).set_entry(None);
            self.index.entry_mut(entry).set_dram(Dram::Absent);
            match device {
                Some(_) if error == FillError::Refused => self.keep_evictable(entry),
                Some(_) => self.drop_stored(cx, entry, error),
                None => {}
            }
            self.remove_if_absent(entry);
        }
        if error == FillError::Stranded {
            self.counters.arena_lost_bytes += self.frame_slot(frame).bytes;
            self.set_frame_state(frame, FrameState::Retired);
            self.arena.stop_retiring(self.frames.get(frame).place.region);
        } else {
            self.set_frame_state(frame, FrameState::Orphan);
        }
    }

    /// Acquires a read lease on a slot that is being filled.
    pub(crate) fn lease_filling(&mut self, fill: &Lease<Fill>) -> Lease<Read> {
        self.lease(fill.frame())
    }

    /// Size class of a leased slot.
    pub(crate) fn size_class_of<R>(&self, lease: &Lease<R>) -> &SizeClass {
        self.sizes.get(self.frames.get(lease.frame()).size_class)
    }
}
