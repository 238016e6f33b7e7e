//! Extents: pool slots that another process writes or reads itself.
//!
//! * A **lent** slot belongs to no block. Its tenant is charged for it from the lease on.
//! * A **pinned** slot holds a durable block, which is not in the NVMe eviction order. If the block is removed
//!   for another reason (damage, a move), its slot is freed with the last pin. Until then the pool treats the
//!   slot as lent, so that a restart does not find the removed block.
//!
//! A device is released only when no slot of it is lent or pinned.

use reprise_policy::eviction::EntryIndex;
use reprise_policy::{BlockKey, DevicePlace, Generation};

use crate::cache::accounts::TenantIndex;
use crate::cache::blocks::priority_of_class;
use crate::cache::describe::BlockOrigin;
use crate::cache::frames::FrameState;
use crate::cache::index::{Dram, Stored};
use crate::cache::order::ChainPlace;
use crate::cache::pins::Pin;
use crate::cache::sizes::{SizeClass, SizeClassId};
use crate::cache::{Cache, SlotRequest, nvme_bytes};
use crate::context::Context;
use crate::effect::{CommitStatus, DeviceId, Effect, Place};
use crate::event::Priority;
use crate::extents::{ExtentHolder, PinRefusal};
use crate::pool::{BatchId, ExtentCommit, PageNumber, StoredBlock};

/// Slot that another process may write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LentSlot {
    pub(crate) device: DeviceId,
    pub(crate) page: PageNumber,
    pub(crate) tenant: TenantIndex,
    /// Bytes of the payload.
    pub(crate) slot_bytes: u64,
}

impl Cache {
    /// Whether slots of a device can be lent or committed.
    pub(crate) fn can_lend(&self, device: DeviceId) -> bool {
        self.devices.can_lend(device)
    }

    /// Whether any device allows other processes to access its slots.
    pub(crate) fn any_lender(&self) -> bool {
        self.devices.usable_devices().any(|device| device.pool.allows_lending())
    }

    /// Number of slots that an earlier agent lent and that may still be written to.
    pub(crate) fn earlier_leases(&self) -> u64 {
        self.devices.usable_devices().map(|device| device.pool.earlier_leases().len() as u64).sum()
    }

    /// Slots that are pinned, by sessions and by imports.
    pub(crate) fn pinned_slots(&self) -> impl Iterator<Item = (DeviceId, PageNumber)> {
        self.devices.pins.keys().copied()
    }

    /// Allocates up to `count` slots to lend for blocks of a size class, evicting blocks of its tenant at the tenant's
    /// limit. Consecutive slots are of consecutive devices, near the GPU as long as those have space. Without a free
    /// slot, the list is empty, and space is being freed if possible.
    pub(crate) fn allocate_lent(
        &mut self,
        (size_class, count): (SizeClassId, u32),
        gpu: Option<&DevicePlace>,
    ) -> Vec<LentSlot> {
        let SizeClass { tenant_index: tenant, slot_bytes, .. } = *self.sizes.get(size_class);
        let request = SlotRequest { tenant, slot_bytes };
        let lenders = self.devices.lenders(slot_bytes, gpu, self.now);
        let has_budget = self.has_write_budget(slot_bytes);
        if lenders.is_empty() && has_budget && self.devices.ids().any(|id| self.devices.can_lend(id)) {
            // The client retries; the end of an eviction is not reported to it.
            let _ = self.make_pool_room(request);
        }
        let mut slots = Vec::new();
        for mut equally_near in lenders {
            while slots.len() < count as usize && self.make_nvme_room(request) {
                let Some((device, page)) = self.devices.allocate(&mut equally_near, slot_bytes) else {
                    break;
                };
                self.accounts.charge_nvme(tenant, slot_bytes);
                self.charge_write(device, slot_bytes, &mut equally_near);
                slots.push(LentSlot { device, page, tenant, slot_bytes });
            }
        }
        slots
    }

    /// Records that allocated slots of a device are lent; they may be written when the batch has ended.
    pub(crate) fn lend(
        &mut self,
        cx: &mut Context,
        size_class: SizeClassId,
        (device, batch): (DeviceId, BatchId),
        pages: &[PageNumber],
    ) {
        let SizeClass { tenant, layout, .. } = *self.sizes.get(size_class);
        let lender = self.devices.device_mut(device);
        lender.extents += pages.len() as u64;
        lender.batches_in_flight += 1;
        let ops = lender.pool.lend(batch, (tenant, layout), pages);
        self.emit_ops(cx, device, ops);
    }

    /// Place of a lent slot.
    pub(crate) fn place_of_lent(&self, slot: &LentSlot, generation: Generation) -> Place {
        let LentSlot { device, page, slot_bytes: bytes, .. } = *slot;
        Place::Extent { device, generation, offset: page.offset(), bytes, header_crc: 0 }
    }

    /// Frees a lent slot that was not written, and refunds its bytes to the budget of its device. A client that returns a
    /// slot has written nothing, or a part before the device failed.
    pub(crate) fn return_unwritten(&mut self, slot: &LentSlot) {
        let now = self.now;
        if let Some(budget) = self.devices.get_mut(slot.device).and_then(|device| device.budget.as_mut()) {
            budget.refund(now, nvme_bytes(slot.slot_bytes));
        }
        self.return_lent(slot);
    }

    /// Frees a lent slot that no process can write to.
    pub(crate) fn return_lent(&mut self, slot: &LentSlot) {
        self.end_lease(slot);
        if self.devices.is_usable(slot.device) {
            self.devices.device_mut(slot.device).pool.return_lent(slot.page);
        }
    }

    /// Ends the charge for a lent slot whose commit has ended.
    pub(crate) fn end_lease(&mut self, slot: &LentSlot) {
        self.accounts.release_nvme(slot.tenant, slot.slot_bytes);
        self.devices.device_mut(slot.device).extents -= 1;
    }

    /// Writes the header pages of blocks whose payloads are in lent slots, and makes the blocks durable.
    pub(crate) fn commit_lent(
        &mut self,
        cx: &mut Context,
        (device, batch): (DeviceId, BatchId),
        blocks: Vec<ExtentCommit>,
    ) {
        let written: u64 = blocks.iter().map(|block| block.layout.slot_bytes()).sum();
        self.counters.pool_written_bytes += written;
        let lender = self.devices.device_mut(device);
        lender.batches_in_flight += 1;
        let ops = lender.pool.commit_lent(batch, blocks);
        self.emit_ops(cx, device, ops);
    }

    /// Makes a durable block of a lent slot findable, unless another copy was faster. The charge for the
    /// lease has ended.
    pub(crate) fn extent_stored(
        &mut self,
        device: DeviceId,
        block: &StoredBlock,
        place: ChainPlace,
    ) -> CommitStatus {
        let entry = match self.entry_for_extent(block) {
            Ok(entry) => entry,
            Err(status) => {
                self.devices.free(device, block.page);
                if status == CommitStatus::Duplicate {
                    self.committed_again(&block.key, place);
                }
                return status;
            }
        };
        self.keep_stored(entry, device, block);
        self.counters.stored_blocks_total += 1;
        self.counters.stored_bytes_total += block.layout.block_bytes();
        self.learn_committed(entry, place);
        self.settle(entry);
        CommitStatus::Durable
    }

    /// Status of a commit whose key is in the index, unless the block has to be written. An existing block gets
    /// at least this priority, and is used.
    pub(crate) fn existing_block(
        &mut self,
        key: &BlockKey,
        size_class: SizeClassId,
        (priority, place): (Priority, ChainPlace),
    ) -> Option<CommitStatus> {
        let entry = self.index.find(key)?;
        if self.index.entry(entry).size_class() != size_class {
            return Some(CommitStatus::BadItem);
        }
        self.yield_to_commit(entry);
        let entry = self.index.find(key)?;
        if self.index.entry(entry).source(size_class).is_none() {
            // A copy that was given up may have been the only one.
            self.remove_if_absent(entry);
            return None;
        }
        self.raise_priority(entry, priority);
        self.index.entry_mut(entry).set_origin(BlockOrigin::Saved);
        self.committed_again(key, place);
        Some(CommitStatus::Duplicate)
    }

    /// Learns the chain of a block that a client has committed again, and counts the use, as after a commit from the
    /// arena.
    fn committed_again(&mut self, key: &BlockKey, place: ChainPlace) {
        let Some(entry) = self.index.find(key) else { return };
        self.learn_committed(entry, place);
        self.settle(entry);
        self.count_use(entry);
    }

    /// Returns the index entry that a durable block gets, without a copy on a device.
    fn entry_for_extent(&mut self, block: &StoredBlock) -> Result<EntryIndex, CommitStatus> {
        let size_class = self.intern(block.tenant, block.layout).ok_or(CommitStatus::Failed)?;
        let priority = priority_of_class(block.priority);
        let Some(entry) = self.index.find(&block.key) else {
            return Ok(self.insert_entry(block.key, size_class, priority, BlockOrigin::Saved));
        };
        let state = self.index.entry(entry);
        match state.dram() {
            _ if state.size_class() != size_class => return Err(CommitStatus::BadItem),
            _ if state.stored().is_some() => return Err(CommitStatus::Duplicate),
            Dram::Resident(frame) if self.frames.get(frame).state != FrameState::Clean => {
                return Err(CommitStatus::Duplicate);
            }
            // A fetch from a peer continues without the entry, as after a commit from the arena.
            Dram::Filling(frame) => {
                self.frames.get_mut(frame).set_entry(None);
                self.index.entry_mut(entry).set_dram(Dram::Absent);
            }
            Dram::Resident(_) | Dram::Absent => {}
        }
        self.yield_to_commit(entry);
        self.raise_priority(entry, priority);
        self.index.entry_mut(entry).set_origin(BlockOrigin::Saved);
        Ok(entry)
    }

    /// Pins the durable copy of a block for readers outside the agent. The pin is a use of the block.
    pub(crate) fn pin(
        &mut self,
        key: &BlockKey,
        size_class: SizeClassId,
    ) -> Result<(Stored, Place), PinRefusal> {
        let entry = self.index.find(key).ok_or(PinRefusal::Miss)?;
        self.index.entry(entry).source(size_class).ok_or(PinRefusal::Miss)?;
        let stored = self.index.entry(entry).stored().ok_or(PinRefusal::NotDurable)?;
        if !self.devices.device(stored.device).pool.allows_lending() {
            return Err(PinRefusal::NotDurable);
        }
        self.count_use(entry);
        self.pin_stored(entry, stored);
        let StoredBlock { generation, header_crc, page, layout, .. } = self.devices.stored(stored);
        let (device, bytes) = (stored.device, layout.slot_bytes());
        Ok((stored, Place::Extent { device, generation, offset: page.offset(), bytes, header_crc }))
    }

    /// Keeps the slot of a block on a device until [`Cache::unpin`].
    pub(super) fn pin_stored(&mut self, entry: EntryIndex, stored: Stored) {
        self.devices.remove_evictable(entry);
        let new = Pin { key: self.index.entry(entry).key(), count: 0, removed: false };
        let pin = self.devices.pins.entry((stored.device, stored.page)).or_insert(new);
        pin.count += 1;
        if pin.count == 1 {
            self.devices.device_mut(stored.device).extents += 1;
        }
    }

    /// Ends a pin. With the last one, the block is evictable again, as the most recently used, or its slot is
    /// freed if the block was removed.
    pub(crate) fn unpin(&mut self, stored: Stored) {
        let place = (stored.device, stored.page);
        let pin = self.devices.pins.get_mut(&place).expect("every unpin follows a pin");
        pin.count -= 1;
        let Pin { key, count, removed } = *pin;
        if count > 0 {
            return;
        }
        self.devices.pins.remove(&place);
        self.devices.device_mut(stored.device).extents -= 1;
        if removed {
            return self.devices.free(stored.device, stored.page);
        }
        let Some(entry) = self.index.find(&key) else { return };
        let state = self.index.entry(entry);
        if state.stored() == Some(stored) && !matches!(state.dram(), Dram::Filling(_)) {
            self.enter_nvme_order(entry);
        }
    }

    /// Bytes that a block of a size class uses on a device, and the share of all devices in thousandths.
    pub(crate) fn extent_share(&self, size_class: SizeClassId, permille: u64) -> (u64, u64) {
        let share = self.devices.usage().capacity_bytes / 1000 * permille;
        (nvme_bytes(self.sizes.get(size_class).slot_bytes), share)
    }

    /// Requests proof that processes which an earlier agent lent slots of a device to have ended their I/O.
    pub(super) fn await_earlier_leases(&mut self, cx: &mut Context, id: DeviceId) {
        let device = self.devices.device_mut(id);
        if !device.pool.earlier_leases().is_empty() {
            device.extents += 1;
            cx.emit(Effect::AwaitExtents { holder: ExtentHolder::Earlier(id) });
        }
    }

    /// Frees the slots of a device that an earlier agent lent.
    pub(crate) fn earlier_leases_ended(&mut self, id: DeviceId) {
        let Some(device) = self.devices.get(id) else { return };
        if device.pool.earlier_leases().is_empty() {
            return;
        }
        let is_usable = self.devices.is_usable(id);
        let device = self.devices.device_mut(id);
        device.extents -= 1;
        match is_usable {
            true => device.pool.end_earlier_leases(),
            false => device.pool.forget_earlier_leases(),
        }
    }
}
