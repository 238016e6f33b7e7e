//! The devices of the pool as one store: allocation, eviction and failures.
//!
//! One eviction order per tenant covers all devices. New blocks go to the emptiest device, so writes follow
//! evictions wherever they free space. A block that is being read is not in the order. A freed slot is
//! reusable only when its free record is durable, so space is freed ahead of writes: a share of the pool's
//! bytes and of its journals' entries is kept free. If a slot size has no free slot, a segment is emptied for
//! it ([`space`]).
//!
//! A lost device is lost capacity. Its blocks are removed (copies in DRAM remain). Blocks that were being
//! written to it are written elsewhere as soon as it no longer reads their memory.
//!
//! Devices can be attached and detached at run time ([`attachment`]):
//!
//! ```text
//!  (vacant) ──attach──▶ Usable ──detach──▶ Closing ──last operation and read ended──▶ (vacant), DeviceReleased
//!                         └──it fails──▶ Lost ──detach──┘
//! ```
//!
//! The core treats a closing device like a lost one, but without reporting a failure. The number of a
//! released device may be reused, because no later report can refer to the old device.

use reprise_policy::Tier;
use reprise_policy::eviction::{EntryIndex, EvictionKind, EvictionPolicy, Group, Rank};

use super::AgentCore;
use super::index::Stored;
use super::limits::{DEVICES_MAX, POOL_EVICTIONS_PER_APPLY, READ_ERRORS_MAX};
use super::size_class::{SizeClass, SizeClassId};
use super::tenants::nvme_bytes;
use crate::effect::{Change, DeviceId, Diagnostic, Effect};
use crate::event::FillError;
use crate::pool::{
    BatchId, BlockWrite, DeviceError, DeviceOp, DevicePool, OpToken, PageNumber, PoolEvent, PoolUsage,
    StoredBlock,
};

mod attachment;
mod space;

pub(super) use space::SpaceState;

/// All devices, and one eviction order over them.
#[derive(Debug)]
pub(super) struct Devices {
    /// Devices by number; a vacant number is free for reuse.
    devices: Vec<Option<Device>>,
    /// Number of devices that are detached and not released yet.
    closing: usize,
    /// Stored blocks that are not being read.
    order: Box<dyn EvictionPolicy>,
    space_check: SpaceCheck,
}

/// Whether the devices' free space may have changed since the last check. A check costs about a microsecond,
/// and most events are fill updates that change nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SpaceCheck {
    Due,
    Unneeded,
}

/// Device with its pool.
#[derive(Debug)]
struct Device {
    pool: DevicePool,
    health: Health,
    /// Consecutive reads that failed.
    read_errors: u32,
    batches_in_flight: u32,
    /// Number of quarantine records that no journal write contains yet.
    records_owed: u32,
    /// Pool operations in flight.
    ops_in_flight: u64,
    /// Reads of blocks in flight.
    reads_in_flight: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Health {
    Usable,
    Lost,
    /// Detached, with operations in flight.
    Closing,
}

impl Devices {
    /// Creates usable devices from the pools. Pools beyond [`DEVICES_MAX`] are not used.
    pub(super) fn new(pools: Vec<DevicePool>, eviction: EvictionKind) -> Devices {
        Devices {
            devices: pools.into_iter().take(DEVICES_MAX).map(|pool| Some(Device::new(pool))).collect(),
            closing: 0,
            order: eviction.build(),
            space_check: SpaceCheck::Due,
        }
    }

    /// Number of usable devices.
    pub(super) fn usable(&self) -> usize {
        self.usable_devices().count()
    }

    /// Returns the device with the most free space that can start a batch and is not in `full`.
    pub(super) fn emptiest(&self, full: &[DeviceId]) -> Option<DeviceId> {
        self.ids()
            .filter(|id| !full.contains(id) && self.device(*id).can_start_batch())
            .max_by_key(|id| (self.device(*id).pool.usage().slot_bytes_free, std::cmp::Reverse(*id)))
    }

    /// Allocates a slot for a payload on a device.
    pub(super) fn allocate(&mut self, device: DeviceId, slot_bytes: u64) -> Option<PageNumber> {
        self.device_mut(device).pool.allocate(slot_bytes)
    }

    /// Starts a write batch on a device.
    pub(super) fn write_batch(
        &mut self,
        device: DeviceId,
        batch: BatchId,
        blocks: Vec<BlockWrite>,
    ) -> Vec<DeviceOp> {
        let device = self.device_mut(device);
        device.batches_in_flight += 1;
        device.pool.write_batch(batch, blocks)
    }

    /// Frees the slot of a stored block that is no longer in the index.
    pub(super) fn free(&mut self, device: DeviceId, page: PageNumber) {
        if self.is_usable(device) {
            self.device_mut(device).pool.free(page);
        }
    }

    /// Makes a block evictable from its device, as the most recently used.
    pub(super) fn add_evictable(&mut self, entry: EntryIndex, rank: Rank) {
        self.order.insert(entry, rank);
        self.space_check = SpaceCheck::Due;
    }

    /// Reinserts a victim that cannot be evicted as the next victim.
    pub(super) fn insert_oldest(&mut self, entry: EntryIndex, rank: Rank) {
        self.order.insert_oldest(entry, rank);
    }

    /// Removes and returns the next victim of a tenant.
    pub(super) fn take_victim(&mut self, tenant: Group) -> Option<EntryIndex> {
        self.order.victim(tenant)
    }

    /// Returns a tenant's blocks in eviction order, starting after `behind` or, without it, at the next
    /// victim.
    pub(super) fn next_victims(
        &self,
        tenant: Group,
        behind: Option<EntryIndex>,
        count: usize,
    ) -> Vec<EntryIndex> {
        self.order.following(tenant, behind, count)
    }

    /// Moves an evictable block immediately before `successor` in the eviction order.
    pub(super) fn order_before(&mut self, entry: EntryIndex, rank: Rank, successor: EntryIndex) {
        self.order.insert_before(entry, rank, successor);
    }

    /// Removes a block from the eviction order.
    pub(super) fn remove_evictable(&mut self, entry: EntryIndex) {
        self.order.remove(entry);
    }

    /// Returns the pool's record of a stored block.
    pub(super) fn stored(&self, stored: Stored) -> StoredBlock {
        let block = self.device(stored.device).pool.stored(stored.page);
        block.expect("a block leaves the index before its pool slot")
    }

    /// Marks a block as most recently used, if it is evictable.
    pub(super) fn touch(&mut self, entry: EntryIndex) {
        self.order.touch(entry);
    }

    /// Number of evictable blocks.
    pub(super) fn evictable(&self) -> usize {
        self.order.len()
    }

    /// Resets the count of consecutive read errors.
    pub(super) fn read_succeeded(&mut self, device: DeviceId) {
        if let Some(device) = self.get_mut(device) {
            device.read_errors = 0;
        }
    }

    /// Whether a usable device has a free slot for a block of this size.
    pub(super) fn has_slot(&self, slot_bytes: u64) -> bool {
        self.usable_devices().any(|device| device.pool.allocatable(slot_bytes) > 0)
    }

    /// Number of free slots for blocks of this size on all usable devices.
    pub(super) fn slots_free(&self, slot_bytes: u64) -> u64 {
        self.usable_devices().map(|device| device.pool.allocatable(slot_bytes)).sum()
    }

    /// Upper bound of the bytes lost at the ends of segments when `blocks` blocks of `bytes` bytes, header
    /// pages included, get slots in unassigned segments.
    pub(super) fn ends_of_segments(&self, bytes: u64, blocks: u64) -> u64 {
        let lost = |device: &Device| {
            let segment = nvme_bytes(device.pool.payload_bytes_max());
            let filled = blocks.checked_div(segment / bytes);
            filled.map_or(0, |filled| segment % bytes * (filled + 1))
        };
        self.usable_devices().map(lost).sum()
    }

    /// Whether a usable device has segments that are large enough for a block of this size.
    pub(super) fn can_hold(&self, slot_bytes: u64) -> bool {
        self.usable_devices().any(|device| device.pool.payload_bytes_max() >= slot_bytes)
    }

    /// Whether a device exists and has neither failed nor been detached.
    pub(super) fn is_usable(&self, device: DeviceId) -> bool {
        self.get(device).is_some_and(|device| device.health == Health::Usable)
    }

    /// Usage of all usable devices, added up.
    pub(super) fn usage(&self) -> PoolUsage {
        let mut sum = PoolUsage::default();
        for device in self.usable_devices() {
            let usage = device.pool.usage();
            sum.slot_bytes_used += usage.slot_bytes_used;
            sum.slot_bytes_free += usage.slot_bytes_free;
            sum.slots_quarantined += usage.slots_quarantined;
            sum.pending_frees_bytes += usage.pending_frees_bytes;
            sum.journal_bytes_used += usage.journal_bytes_used;
            sum.journal_bytes_capacity += usage.journal_bytes_capacity;
            sum.capacity_bytes += usage.capacity_bytes;
            sum.checkpoints += usage.checkpoints;
            sum.journal_records += usage.journal_records;
            sum.entries_free += usage.entries_free;
            sum.entries_pending += usage.entries_pending;
            sum.entries_max += usage.entries_max;
        }
        sum
    }

    /// Numbers of all devices that are not released.
    pub(super) fn ids(&self) -> impl Iterator<Item = DeviceId> + use<> {
        let there = self.devices.iter().enumerate().filter(|(_, device)| device.is_some());
        there.map(|(at, _)| DeviceId(at as u8)).collect::<Vec<_>>().into_iter()
    }

    /// Usage of each usable device.
    pub(super) fn usages(&self) -> impl Iterator<Item = (DeviceId, PoolUsage)> {
        let usage = |id| self.device(id).pool.usage();
        self.ids().filter(|id| self.is_usable(*id)).map(move |id| (id, usage(id)))
    }

    fn usable_devices(&self) -> impl Iterator<Item = &Device> {
        self.devices.iter().flatten().filter(|device| device.health == Health::Usable)
    }

    fn get(&self, id: DeviceId) -> Option<&Device> {
        self.devices.get(usize::from(id.0))?.as_ref()
    }

    fn get_mut(&mut self, id: DeviceId) -> Option<&mut Device> {
        self.devices.get_mut(usize::from(id.0))?.as_mut()
    }

    fn device(&self, id: DeviceId) -> &Device {
        self.get(id).expect("nothing refers to a released device")
    }

    fn device_mut(&mut self, id: DeviceId) -> &mut Device {
        self.space_check = SpaceCheck::Due;
        self.get_mut(id).expect("nothing refers to a released device")
    }
}

impl Device {
    fn new(pool: DevicePool) -> Device {
        Device {
            pool,
            health: Health::Usable,
            read_errors: 0,
            batches_in_flight: 0,
            records_owed: 0,
            ops_in_flight: 0,
            reads_in_flight: 0,
        }
    }

    fn can_start_batch(&self) -> bool {
        self.health == Health::Usable && self.pool.can_start_batch()
    }

    /// Whether records must be journaled that no batch will contain.
    fn owes_flush(&self) -> bool {
        self.health == Health::Usable
            && self.batches_in_flight == 0
            && (self.records_owed > 0 || self.pool.usage().pending_frees_bytes > 0)
    }
}

impl AgentCore {
    /// Sends pool operations to the runtime.
    pub(super) fn emit_ops(&mut self, device: DeviceId, ops: Vec<DeviceOp>) {
        if let Some(device) = self.devices.get_mut(device) {
            device.ops_in_flight += ops.len() as u64;
        }
        for op in ops {
            self.emit(Effect::Device { device, op });
        }
    }

    /// Handles the end of a pool operation.
    pub(super) fn device_done(&mut self, id: DeviceId, token: OpToken, result: Result<(), DeviceError>) {
        if self.devices.get(id).is_none() {
            return;
        }
        let device = self.devices.device_mut(id);
        device.ops_in_flight -= 1;
        let (ops, events) = device.pool.done(token, result);
        self.emit_ops(id, ops);
        for event in events {
            match event {
                // Also on a lost device: until this event, it may read the blocks' memory.
                PoolEvent::BatchDone { batch, stored, .. } => {
                    self.devices.device_mut(id).batches_in_flight -= 1;
                    self.batch_done(batch, &stored);
                }
                PoolEvent::SpaceFreed => {}
                PoolEvent::DeviceLost { reason } => self.lose_device(id, reason),
            }
        }
    }

    /// Handles a failure of a device that the runtime detected.
    pub(super) fn device_lost(&mut self, id: DeviceId, reason: String) {
        if self.devices.get(id).is_some() {
            self.lose_device(id, reason);
        }
    }

    /// Usage of each usable device.
    pub fn device_usage(&self) -> impl Iterator<Item = (DeviceId, PoolUsage)> {
        self.devices.usages()
    }

    /// Records that a block is durable on a device.
    pub(super) fn keep_stored(&mut self, entry: EntryIndex, device: DeviceId, block: &StoredBlock) {
        self.index.set_stored(entry, Some(Stored { device, page: block.page }));
        let SizeClass { tenant_index, slot_bytes, .. } =
            *self.size_classes.get(self.index.entry(entry).size_class());
        self.tenants.charge_nvme(tenant_index, slot_bytes);
        self.enter_nvme_order(entry);
        self.replica_changed(entry, Tier::Nvme, Change::Added);
        self.note_saved();
    }

    /// Sets the share of the pool that is kept free.
    pub(super) fn set_pool_free(&mut self, permille: u16) {
        self.settings.pool_free_permille = permille;
        self.devices.space_check = SpaceCheck::Due;
        self.quotas_changed();
    }

    /// Evicts blocks until the free target is met, and flushes pending free records.
    pub(super) fn keep_pool_free(&mut self) {
        if self.devices.space_check == SpaceCheck::Unneeded {
            return;
        }
        let mut evicted = 0;
        while evicted < POOL_EVICTIONS_PER_APPLY && self.pool_short() && self.evict_stored() {
            evicted += 1;
        }
        for id in self.devices.ids().filter(|id| self.devices.device(*id).owes_flush()).collect::<Vec<_>>() {
            let device = self.devices.device_mut(id);
            device.records_owed = 0;
            let ops = device.pool.flush_frees();
            self.emit_ops(id, ops);
        }
        self.devices.space_check = match evicted {
            // The next event evicts the rest.
            POOL_EVICTIONS_PER_APPLY => SpaceCheck::Due,
            _ => SpaceCheck::Unneeded,
        };
    }

    pub(super) fn set_pool_gauges(&self, counters: &mut super::Counters) {
        let usage = self.devices.usage();
        counters.pool_capacity_bytes = usage.capacity_bytes;
        counters.pool_used_bytes = usage.slot_bytes_used;
        counters.pool_free_bytes = usage.slot_bytes_free;
        counters.pool_pending_free_bytes = usage.pending_frees_bytes;
        counters.pool_quarantined_slots = usage.slots_quarantined;
        counters.journal_used_bytes = usage.journal_bytes_used;
        counters.journal_capacity_bytes = usage.journal_bytes_capacity;
        counters.journal_checkpoints = usage.checkpoints;
        counters.journal_records = usage.journal_records;
    }

    /// Makes a stored block evictable again that was not read after all.
    pub(super) fn keep_evictable(&mut self, entry: EntryIndex) {
        if self.index.entry(entry).stored().is_some() {
            self.enter_nvme_order(entry);
        }
    }

    /// Makes a stored block evictable, as the most recently used of its tenant and class.
    pub(super) fn enter_nvme_order(&mut self, entry: EntryIndex) {
        let rank = self.nvme_rank(entry);
        self.devices.add_evictable(entry, rank);
    }

    /// Clears the location of a block on a device.
    fn clear_stored(&mut self, entry: EntryIndex) {
        self.index.set_stored(entry, None);
        let SizeClass { tenant_index, slot_bytes, .. } =
            *self.size_classes.get(self.index.entry(entry).size_class());
        self.tenants.release_nvme(tenant_index, slot_bytes);
        self.replica_changed(entry, Tier::Nvme, Change::Removed);
    }

    /// Drops a stored block that could not be read or failed verification. After a medium error, its slot is
    /// quarantined. After a checksum mismatch, the slot is freed: the committing client may have sent a wrong
    /// checksum, and could otherwise use up the pool.
    pub(super) fn drop_stored(&mut self, entry: EntryIndex, error: FillError) {
        let Some(stored) = self.index.entry(entry).stored() else { return };
        let key = self.index.entry(entry).key();
        self.devices.remove_evictable(entry);
        self.clear_stored(entry);
        if error == FillError::Corrupt {
            self.devices.free(stored.device, stored.page);
            self.counters.corrupt_blocks += 1;
            let (device, page) = (stored.device, stored.page);
            self.emit(Effect::Diagnostic(Diagnostic::CorruptBlock { device, page, key }));
            return;
        }
        let device = self.devices.device_mut(stored.device);
        device.pool.quarantine(stored.page);
        device.records_owed += 1;
        device.read_errors += 1;
        if device.read_errors >= READ_ERRORS_MAX {
            self.lose_device(stored.device, format!("{READ_ERRORS_MAX} consecutive reads failed"));
        }
    }

    /// Reports, once for each size class, that its blocks fit into no segment. Not reported without devices,
    /// because then no block can be durable.
    pub(super) fn report_unstorable(&mut self, size_class: SizeClassId) {
        let segments = self.devices.usable_devices().map(|device| device.pool.payload_bytes_max());
        if let Some(payload_bytes_max) = segments.max()
            && self.size_classes.mark_unstorable_reported(size_class)
        {
            let block_bytes = self.size_classes.get(size_class).slot_bytes;
            self.emit(Effect::Diagnostic(Diagnostic::Unstorable { block_bytes, payload_bytes_max }));
        }
    }

    /// Whether free and pending bytes, or journal entries, are below the target.
    fn pool_short(&self) -> bool {
        let usage = self.devices.usage();
        let target = |of: u64| of * u64::from(self.settings.pool_free_permille) / 1000;
        usage.slot_bytes_free + usage.pending_frees_bytes < target(usage.capacity_bytes)
            || usage.entries_free + usage.entries_pending < target(usage.entries_max)
    }

    /// Evicts the next victim; `false` if no block is evictable, or everything left is reserved.
    fn evict_stored(&mut self) -> bool {
        let Some(entry) = self.take_nvme_victim(None) else { return false };
        self.drop_victim(entry);
        true
    }

    /// Drops a stored block that was removed from the order.
    pub(super) fn drop_victim(&mut self, entry: EntryIndex) {
        let state = self.index.entry(entry);
        self.counters.nvme_evictions += 1;
        self.counters.nvme_evicted_bytes += self.size_classes.get(state.size_class()).slot_bytes;
        let tenant = self.tenant_of(state.size_class());
        self.tenants.get_mut(tenant).counts.nvme_evictions += 1;
        self.remove_stored(entry);
    }

    /// Removes a block's copy from its device. The copy must not be in use.
    pub(super) fn remove_stored(&mut self, entry: EntryIndex) {
        let stored = self.index.entry(entry).stored().expect("the caller has checked");
        self.devices.remove_evictable(entry);
        self.devices.free(stored.device, stored.page);
        self.clear_stored(entry);
        self.remove_if_absent(entry);
    }

    fn lose_device(&mut self, id: DeviceId, reason: String) {
        let device = self.devices.device_mut(id);
        if device.health != Health::Usable {
            return;
        }
        device.health = Health::Lost;
        self.counters.devices_lost += 1;
        self.emit(Effect::Diagnostic(Diagnostic::DeviceLost { device: id, reason }));
        self.drop_stored_on(id);
    }

    /// Removes all blocks on a device that is no longer usable; copies in DRAM remain.
    fn drop_stored_on(&mut self, id: DeviceId) {
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
        self.quotas_changed();
    }

    /// Starts the repairs that recovery requires.
    pub(super) fn start_devices(&mut self) {
        for id in self.devices.ids() {
            let ops = self.devices.device_mut(id).pool.flush_frees();
            self.emit_ops(id, ops);
        }
    }
}
