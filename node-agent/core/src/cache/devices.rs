//! The devices of the pool as one store: allocation, eviction and failures.
//!
//! One eviction order per tenant covers all devices. New blocks go to the devices in turn, by their free space
//! ([`rotation`](super::rotation)), so writes follow evictions wherever they free space. A block that is being read is
//! not in the order. A freed slot is
//! reusable only when its free record is durable, so space is freed ahead of writes: a share of the pool's
//! bytes and of its journals' entries is kept free. If a slot size has no free slot, a segment is emptied for
//! it ([`space`](super::space)).
//!
//! A lost device is lost capacity. Its blocks are removed (copies in DRAM remain). Blocks that were being
//! written to it are written elsewhere as soon as it no longer reads their memory.
//!
//! A device that can no longer be written keeps its blocks: they are read, but nothing is saved to it.
//!
//! Devices can be attached and detached at run time ([`attachment`](super::attachment)):
//!
//! ```text
//!  (vacant) ──attach──▶ Usable ──detach──▶ Closing ──last operation and read ended──▶ (vacant), DeviceReleased
//!                         └──it fails──▶ Lost ──detach──┘
//! ```
//!
//! The core treats a closing device like a lost one, but without reporting a failure. The number of a
//! released device may be reused, because no later report can refer to the old device.

use std::collections::BTreeMap;

use reprise_policy::Tick;
use reprise_policy::admission::budget::{DailyBudget, WriteBudget};
use reprise_policy::eviction::{Block, EntryIndex, EvictionOrder, Group};

use crate::cache::accounts::{TenantIndex, nvme_bytes};
use crate::cache::index::Stored;
use crate::cache::pins::Pin;
use crate::cache::rotation::{Rotation, Target};
use crate::effect::DeviceId;
use crate::limits::{DEVICES_MAX, TENANTS_MAX};
use crate::pool::{BatchId, BlockWrite, DeviceOp, DevicePool, PageNumber, PoolUsage, StoredBlock};
use crate::settings::Settings;

/// All devices, and one eviction order over them.
#[derive(Debug)]
pub(crate) struct Devices {
    /// Devices by number; a vacant number is free for reuse.
    pub(super) devices: Vec<Option<Device>>,
    /// Number of devices that are detached and not released yet.
    pub(super) closing: usize,
    /// Stored blocks that are not being read.
    pub(super) order: EvictionOrder,
    /// Slots that processes outside the agent read; their blocks are not in the order.
    pub(super) pins: BTreeMap<(DeviceId, PageNumber), Pin>,
    rotation: Rotation,
    /// Limit of the writes of each device.
    daily_budget: Option<DailyBudget>,
    pub(super) space_check: SpaceCheck,
}

/// Whether the devices' free space may have changed since the last check. A check costs about a microsecond,
/// and most events are fill updates that change nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SpaceCheck {
    Due,
    Unneeded,
}

/// Device with its pool.
#[derive(Debug)]
pub(crate) struct Device {
    pub(super) pool: DevicePool,
    pub(super) health: Health,
    /// Consecutive reads that failed.
    pub(super) read_errors: u32,
    pub(super) batches_in_flight: u32,
    /// Number of records of quarantined and withdrawn slots that no journal write contains yet.
    pub(super) records_owed: u32,
    /// Pool operations in flight.
    pub(super) ops_in_flight: u64,
    /// Reads of blocks in flight.
    pub(super) reads_in_flight: u64,
    /// Slots that processes outside the agent may access: lent and pinned ones, and one more while those lent
    /// by an earlier agent may still be written to.
    pub(super) extents: u64,
    /// Bytes that may still be written; `None`: no limit.
    pub(super) budget: Option<WriteBudget>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Health {
    Usable,
    Lost,
    /// Detached, with operations in flight.
    Closing,
}

impl Devices {
    /// Creates usable devices from the pools. Pools beyond [`DEVICES_MAX`] are not used.
    pub(crate) fn new(pools: Vec<DevicePool>, settings: &Settings) -> Devices {
        let daily_budget = settings.daily_write_budget;
        let device = |pool| Some(Device::new(pool, daily_budget, Tick(0)));
        Devices {
            devices: pools.into_iter().take(DEVICES_MAX).map(device).collect(),
            closing: 0,
            order: EvictionOrder::new(settings.nvme_eviction),
            pins: BTreeMap::new(),
            rotation: Rotation::default(),
            daily_budget,
            space_check: SpaceCheck::Due,
        }
    }

    /// Number of devices that can be written.
    pub(crate) fn writable(&self) -> usize {
        self.writable_devices().count()
    }

    /// Adds a device under a free number.
    pub(super) fn add(&mut self, at: usize, pool: DevicePool, now: Tick) {
        if self.devices.len() <= at {
            self.devices.resize_with(at + 1, || None);
        }
        assert!(self.devices[at].is_none(), "a device number is reused only after its release");
        self.devices[at] = Some(Device::new(pool, self.daily_budget, now));
    }

    /// Returns the devices that can start a batch and have a slot and a budget for a payload.
    pub(super) fn write_targets(&self, slot_bytes: u64, now: Tick) -> Vec<Target> {
        let bytes = nvme_bytes(slot_bytes);
        self.targets(slot_bytes, |device| device.can_start_batch() && device.may_write(now, bytes))
    }

    /// Returns the suitable devices that have a slot for a payload, with their shares of the next blocks.
    pub(super) fn targets(&self, slot_bytes: u64, is_suitable: impl Fn(&Device) -> bool) -> Vec<Target> {
        let free = |id: DeviceId| {
            let device = self.device(id);
            let has_slot = is_suitable(device) && device.pool.allocatable(slot_bytes) > 0;
            has_slot.then(|| (id, device.pool.usage().slot_bytes_free))
        };
        Target::divide(&self.ids().filter_map(free).collect::<Vec<_>>(), nvme_bytes(slot_bytes))
    }

    /// Allocates a slot for a payload on the device whose turn is next; removes full devices from the targets.
    pub(super) fn allocate(
        &mut self,
        targets: &mut Vec<Target>,
        slot_bytes: u64,
    ) -> Option<(DeviceId, PageNumber)> {
        loop {
            let target = self.rotation.next(targets)?;
            if let Some(page) = self.device_mut(target.device).pool.allocate(slot_bytes) {
                self.rotation.advance(target);
                return Some((target.device, page));
            }
            targets.retain(|other| other.device != target.device);
        }
    }

    /// Starts a write batch on a device.
    pub(crate) fn write_batch(
        &mut self,
        device: DeviceId,
        batch: BatchId,
        blocks: Vec<BlockWrite>,
    ) -> Vec<DeviceOp> {
        let device = self.device_mut(device);
        device.batches_in_flight += 1;
        device.pool.write_batch(batch, blocks)
    }

    /// Frees the slot of a stored block after its removal from the index. A pinned slot is freed later.
    pub(crate) fn free(&mut self, device: DeviceId, page: PageNumber) {
        if !self.is_usable(device) {
            return;
        }
        let is_pinned = self.free_after_unpin(device, page);
        let device = self.device_mut(device);
        if is_pinned {
            device.pool.withdraw(page);
            device.records_owed += 1;
        } else {
            device.pool.free(page);
        }
    }

    /// Makes a block evictable from its device, as the newest in the eviction order.
    pub(super) fn add_evictable(&mut self, entry: EntryIndex, block: &Block) {
        self.order.insert(entry, block);
        self.space_check = SpaceCheck::Due;
    }

    /// Reinserts a victim that cannot be evicted as the next victim of its queue.
    pub(super) fn put_first(&mut self, entry: EntryIndex) {
        self.order.put_first(entry);
    }

    /// Records the block before another one in its chain.
    pub(super) fn link(&mut self, entry: EntryIndex, parent: EntryIndex) {
        self.order.link(entry, parent);
    }

    /// Returns the block before another one in its chain, if it is known and on this node.
    pub(super) fn parent(&self, entry: EntryIndex) -> Option<EntryIndex> {
        self.order.parent(entry)
    }

    /// Counts a use of a block.
    pub(super) fn used(&mut self, entry: EntryIndex) {
        self.order.used(entry);
    }

    /// Removes and returns the next victim of a tenant.
    pub(super) fn take_victim(&mut self, tenant: Group) -> Option<EntryIndex> {
        self.order.victim(tenant)
    }

    /// Returns a tenant's blocks in eviction order, starting after `behind` or, without it, at the next
    /// victim.
    pub(crate) fn next_victims(
        &self,
        tenant: Group,
        behind: Option<EntryIndex>,
        count: usize,
    ) -> Vec<EntryIndex> {
        self.order.following(tenant, behind, count)
    }

    /// Moves an evictable block before its parent in the eviction order.
    pub(super) fn settle(&mut self, entry: EntryIndex) {
        self.order.settle(entry);
    }

    /// Removes a block from the eviction order.
    pub(crate) fn remove_evictable(&mut self, entry: EntryIndex) {
        self.order.remove(entry);
    }

    /// Returns the pool's record of a stored block.
    pub(crate) fn stored(&self, stored: Stored) -> StoredBlock {
        let block = self.device(stored.device).pool.stored(stored.page);
        block.expect("a block leaves the index before its pool slot")
    }

    /// Marks blocks as most recently used, one after the other, if they are evictable.
    pub(super) fn touch_run(&mut self, entries: &[EntryIndex]) {
        self.order.touch_run(entries);
    }

    /// Number of evictable blocks.
    pub(crate) fn evictable(&self) -> usize {
        self.order.len()
    }

    /// Resets the count of consecutive read errors.
    pub(crate) fn read_succeeded(&mut self, device: DeviceId) {
        if let Some(device) = self.get_mut(device) {
            device.read_errors = 0;
        }
    }

    /// Whether a writable device has a free slot for a block of this size.
    pub(crate) fn has_slot(&self, slot_bytes: u64) -> bool {
        self.writable_devices().any(|device| device.pool.allocatable(slot_bytes) > 0)
    }

    /// Number of free slots for blocks of this size on all writable devices.
    pub(super) fn slots_free(&self, slot_bytes: u64) -> u64 {
        self.writable_devices().map(|device| device.pool.allocatable(slot_bytes)).sum()
    }

    /// Upper bound of the bytes lost at the ends of segments when `blocks` blocks of `bytes` bytes, header
    /// pages included, get slots in unassigned segments.
    pub(super) fn ends_of_segments(&self, bytes: u64, blocks: u64) -> u64 {
        let lost = |device: &Device| {
            let segment = nvme_bytes(device.pool.payload_bytes_max());
            let filled = blocks.checked_div(segment / bytes);
            filled.map_or(0, |filled| segment % bytes * (filled + 1))
        };
        self.writable_devices().map(lost).sum()
    }

    /// Whether a writable device has segments that are large enough for a block of this size.
    pub(crate) fn can_hold(&self, slot_bytes: u64) -> bool {
        self.writable_devices().any(|device| device.pool.payload_bytes_max() >= slot_bytes)
    }

    /// Whether a device exists and has neither failed nor been detached.
    pub(crate) fn is_usable(&self, device: DeviceId) -> bool {
        self.get(device).is_some_and(|device| device.health == Health::Usable)
    }

    /// Whether a device is usable and can be written.
    pub(crate) fn is_writable(&self, device: DeviceId) -> bool {
        self.get(device).is_some_and(Device::is_writable)
    }

    /// Usage as reported to the control plane: free space of a device that is only read counts as used, so
    /// that no blocks are placed there.
    pub(crate) fn reported_usage(&self) -> PoolUsage {
        let mut usage = sum_of_usage(self.usable_devices());
        for device in self.usable_devices().filter(|device| !device.is_writable()) {
            let pool = device.pool.usage();
            usage.slot_bytes_used += pool.capacity_bytes - pool.slot_bytes_used;
        }
        usage
    }

    /// Usage of all usable devices, added up.
    pub(crate) fn usage(&self) -> PoolUsage {
        sum_of_usage(self.usable_devices())
    }

    /// Numbers of all devices that are not released.
    pub(crate) fn ids(&self) -> impl Iterator<Item = DeviceId> + use<> {
        let there = self.devices.iter().enumerate().filter(|(_, device)| device.is_some());
        there.map(|(at, _)| DeviceId(at as u8)).collect::<Vec<_>>().into_iter()
    }

    /// Usage of each usable device.
    pub(super) fn usages(&self) -> impl Iterator<Item = (DeviceId, PoolUsage)> {
        let usage = |id| self.device(id).pool.usage();
        self.ids().filter(|id| self.is_usable(*id)).map(move |id| (id, usage(id)))
    }

    pub(super) fn writable_devices(&self) -> impl Iterator<Item = &Device> {
        self.devices.iter().flatten().filter(|device| device.is_writable())
    }

    pub(super) fn usable_devices(&self) -> impl Iterator<Item = &Device> {
        self.devices.iter().flatten().filter(|device| device.health == Health::Usable)
    }

    pub(super) fn get(&self, id: DeviceId) -> Option<&Device> {
        self.devices.get(usize::from(id.0))?.as_ref()
    }

    pub(super) fn get_mut(&mut self, id: DeviceId) -> Option<&mut Device> {
        self.devices.get_mut(usize::from(id.0))?.as_mut()
    }

    pub(super) fn device(&self, id: DeviceId) -> &Device {
        self.get(id).expect("nothing refers to a released device")
    }

    pub(super) fn device_mut(&mut self, id: DeviceId) -> &mut Device {
        self.space_check = SpaceCheck::Due;
        self.get_mut(id).expect("nothing refers to a released device")
    }
}

/// Group of a tenant's blocks on devices that are only read: evicting them frees no space.
pub(super) fn group_of_read_only(tenant: TenantIndex) -> Group {
    Group(TENANTS_MAX as u16 + tenant.0)
}

const _: () = assert!(2 * TENANTS_MAX <= u16::MAX as usize);

/// Adds up the usage of devices. Free space of a device that cannot be written does not count.
pub(super) fn sum_of_usage<'a>(devices: impl Iterator<Item = &'a Device>) -> PoolUsage {
    let mut sum = PoolUsage::default();
    for device in devices {
        let usage = device.pool.usage();
        sum.slot_bytes_used += usage.slot_bytes_used;
        sum.slot_bytes_free += if device.is_writable() { usage.slot_bytes_free } else { 0 };
        sum.slots_quarantined += usage.slots_quarantined;
        sum.pending_frees_bytes += usage.pending_frees_bytes;
        sum.journal_bytes_used += usage.journal_bytes_used;
        sum.journal_bytes_capacity += usage.journal_bytes_capacity;
        sum.capacity_bytes += usage.capacity_bytes;
        sum.checkpoints += usage.checkpoints;
        sum.journal_records += usage.journal_records;
        sum.entries_free += if device.is_writable() { usage.entries_free } else { 0 };
        sum.entries_pending += usage.entries_pending;
        sum.entries_max += usage.entries_max;
    }
    sum
}

impl Device {
    fn new(pool: DevicePool, daily_budget: Option<DailyBudget>, now: Tick) -> Device {
        let block_bytes_max = nvme_bytes(pool.payload_bytes_max());
        Device {
            pool,
            health: Health::Usable,
            read_errors: 0,
            batches_in_flight: 0,
            records_owed: 0,
            ops_in_flight: 0,
            reads_in_flight: 0,
            extents: 0,
            budget: daily_budget.map(|limits| WriteBudget::new(limits, block_bytes_max, now)),
        }
    }

    pub(super) fn is_writable(&self) -> bool {
        self.health == Health::Usable && self.pool.is_writable()
    }

    fn can_start_batch(&self) -> bool {
        self.health == Health::Usable && self.pool.can_start_batch()
    }

    /// Whether records must be journaled that no batch will contain.
    pub(super) fn owes_flush(&self) -> bool {
        self.is_writable()
            && self.batches_in_flight == 0
            && (self.records_owed > 0 || self.pool.usage().pending_frees_bytes > 0)
    }
}
