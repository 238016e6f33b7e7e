//! The devices of the pool, as one store: where blocks go, which go when room is needed, what a failure means.
//!
//! One order of eviction for each tenant covers all devices: blocks go to the emptiest device, so wherever room is made, writes
//! follow. A block that is being read is not in the order. Freed slots can be taken again only when the end of
//! their block is durable, so room is made ahead: a share of the pool is kept free, of its bytes and of the entries that
//! its journals have room for. Room for a slot size that has none is made by emptying a segment ([`room`]).
//!
//! A lost device is lost capacity: its blocks are forgotten (copies in DRAM stay), and what it was writing is written
//! elsewhere as soon as it no longer reads the memory.
//!
//! Devices come and go while the agent works ([`attached`]):
//!
//! ```text
//!  (vacant) ──attach──▶ Usable ──detach──▶ Closing ──the last operation and read has ended──▶ (vacant), DeviceReleased
//!                         └──it fails──▶ Lost ──detach──┘
//! ```
//!
//! To the core a device that is closed is as one that is lost, but nobody's fault. Its number may be given to another device once it is
//! released: nothing that is reported afterwards can speak of the old one.

use reprise_policy::Tier;
use reprise_policy::eviction::{EntryIndex, EvictionKind, EvictionPolicy, Group, Standing};

use super::AgentCore;
use super::index::Stored;
use super::limits::{DEVICES_MAX, POOL_EVICTIONS_PER_APPLY, READ_ERRORS_MAX};
use super::shapes::{Shape, ShapeId};
use super::tenants::nvme_bytes;
use crate::effect::{Change, DeviceId, Effect, Report};
use crate::event::FillError;
use crate::pool::{
    BatchId, BlockWrite, DeviceError, DeviceOp, DevicePool, OpToken, PageNumber, PoolEvent, PoolUsage,
    StoredBlock,
};

mod attached;
mod room;

pub(super) use room::Room;

/// The devices; see the module.
#[derive(Debug)]
pub(super) struct Devices {
    /// By number; vacant ones are between two devices, or before the first.
    devices: Vec<Option<Device>>,
    /// Those that are closed and not released yet.
    closing: usize,
    /// Stored blocks that are not being read.
    order: Box<dyn EvictionPolicy>,
    attention: Attention,
}

/// Whether the space of the devices may have changed since it was last looked at. Looking costs about a microsecond,
/// and most events are reports of fills that change nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Attention {
    Wanted,
    Unneeded,
}

/// One device.
#[derive(Debug)]
struct Device {
    pool: DevicePool,
    health: Health,
    /// Reads that failed since the last that did not.
    read_errors: u32,
    batches_in_flight: u32,
    /// Quarantines that no write to the journal carries yet.
    records_owed: u32,
    /// Operations of the pool that the device has not ended.
    ops_in_flight: u64,
    /// Reads of blocks that it has not ended.
    reads_in_flight: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Health {
    Usable,
    Lost,
    /// Not wanted any more.
    Closing,
}

impl Devices {
    /// These devices, all usable. Devices beyond the limit are not used.
    pub(super) fn new(pools: Vec<DevicePool>, eviction: EvictionKind) -> Devices {
        Devices {
            devices: pools.into_iter().take(DEVICES_MAX).map(|pool| Some(Device::new(pool))).collect(),
            closing: 0,
            order: eviction.build(),
            attention: Attention::Wanted,
        }
    }

    /// Devices that are not lost.
    pub(super) fn usable(&self) -> usize {
        self.usable_devices().count()
    }

    /// The device with most room among those that can take a batch and are not in `full`.
    pub(super) fn emptiest(&self, full: &[DeviceId]) -> Option<DeviceId> {
        self.ids()
            .filter(|id| !full.contains(id) && self.device(*id).can_start_batch())
            .max_by_key(|id| (self.device(*id).pool.usage().slot_bytes_free, std::cmp::Reverse(*id)))
    }

    /// A slot on a device for so many payload bytes.
    pub(super) fn allocate(&mut self, device: DeviceId, slot_bytes: u64) -> Option<PageNumber> {
        self.device_mut(device).pool.allocate(slot_bytes)
    }

    /// Starts a batch on a device.
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

    /// Ends a stored block that nobody can find any more.
    pub(super) fn free(&mut self, device: DeviceId, page: PageNumber) {
        if self.is_usable(device) {
            self.device_mut(device).pool.free(page);
        }
    }

    /// A block may be evicted from its device, as the one used last.
    pub(super) fn enter_order(&mut self, entry: EntryIndex, standing: Standing) {
        self.order.insert(entry, standing);
        self.attention = Attention::Wanted;
    }

    /// A victim that cannot go after all goes next.
    pub(super) fn put_back(&mut self, entry: EntryIndex, standing: Standing) {
        self.order.put_back(entry, standing);
    }

    /// Takes the block of a tenant out of the order that should go next.
    pub(super) fn take_victim(&mut self, tenant: Group) -> Option<EntryIndex> {
        self.order.victim(tenant)
    }

    /// Blocks of a tenant behind one of them in the order of eviction; from the one that goes first on without one.
    pub(super) fn next_victims(
        &self,
        tenant: Group,
        behind: Option<EntryIndex>,
        count: usize,
    ) -> Vec<EntryIndex> {
        self.order.following(tenant, behind, count)
    }

    /// A block that may be evicted goes immediately before `successor`.
    pub(super) fn order_before(&mut self, entry: EntryIndex, standing: Standing, successor: EntryIndex) {
        self.order.insert_before(entry, standing, successor);
    }

    /// It may not.
    pub(super) fn leave_order(&mut self, entry: EntryIndex) {
        self.order.remove(entry);
    }

    /// What the pool knows of a block that the index finds on a device.
    pub(super) fn stored(&self, stored: Stored) -> StoredBlock {
        let block = self.device(stored.device).pool.stored(stored.page);
        block.expect("a block leaves the index before its pool slot")
    }

    /// It was used.
    pub(super) fn touch(&mut self, entry: EntryIndex) {
        self.order.touch(entry);
    }

    /// Blocks that may be evicted.
    pub(super) fn evictable(&self) -> usize {
        self.order.len()
    }

    /// A device has read well.
    pub(super) fn read_succeeded(&mut self, device: DeviceId) {
        if let Some(device) = self.get_mut(device) {
            device.read_errors = 0;
        }
    }

    /// Whether a usable device has a slot for a block of so many bytes now.
    pub(super) fn has_slot(&self, slot_bytes: u64) -> bool {
        self.usable_devices().any(|device| device.pool.allocatable(slot_bytes) > 0)
    }

    /// How many blocks of so many bytes the usable devices have slots for now.
    pub(super) fn slots_free(&self, slot_bytes: u64) -> u64 {
        self.usable_devices().map(|device| device.pool.allocatable(slot_bytes)).sum()
    }

    /// Bytes at the ends of segments that are lost, at the most, when so many blocks of so many bytes, header pages included,
    /// get slots in segments that were nobody's.
    pub(super) fn ends_of_segments(&self, bytes: u64, blocks: u64) -> u64 {
        let lost = |device: &Device| {
            let segment = nvme_bytes(device.pool.payload_bytes_max());
            let filled = blocks.checked_div(segment / bytes);
            filled.map_or(0, |filled| segment % bytes * (filled + 1))
        };
        self.usable_devices().map(lost).sum()
    }

    /// Whether any usable device has slots that a block of so many bytes fits into.
    pub(super) fn can_hold(&self, slot_bytes: u64) -> bool {
        self.usable_devices().any(|device| device.pool.payload_bytes_max() >= slot_bytes)
    }

    /// Whether a device is still used.
    pub(super) fn is_usable(&self, device: DeviceId) -> bool {
        self.get(device).is_some_and(|device| device.health == Health::Usable)
    }

    /// What the usable devices say of their space, added up.
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

    /// All devices.
    pub(super) fn ids(&self) -> impl Iterator<Item = DeviceId> + use<> {
        let there = self.devices.iter().enumerate().filter(|(_, device)| device.is_some());
        there.map(|(at, _)| DeviceId(at as u8)).collect::<Vec<_>>().into_iter()
    }

    /// What each usable device says of its space.
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
        self.get(id).expect("nothing refers to a device that is released")
    }

    fn device_mut(&mut self, id: DeviceId) -> &mut Device {
        self.attention = Attention::Wanted;
        self.get_mut(id).expect("nothing refers to a device that is released")
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

    /// Whether something should be journaled that no batch will carry.
    fn owes_flush(&self) -> bool {
        self.health == Health::Usable
            && self.batches_in_flight == 0
            && (self.records_owed > 0 || self.pool.usage().pending_frees_bytes > 0)
    }
}

impl AgentCore {
    /// Hands pool operations to the runtime.
    pub(super) fn emit_ops(&mut self, device: DeviceId, ops: Vec<DeviceOp>) {
        if let Some(device) = self.devices.get_mut(device) {
            device.ops_in_flight += ops.len() as u64;
        }
        for op in ops {
            self.emit(Effect::Device { device, op });
        }
    }

    /// An operation of a pool has ended.
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
                // Also of a lost device: until then it reads the blocks' memory.
                PoolEvent::BatchDone { batch, stored, .. } => {
                    self.devices.device_mut(id).batches_in_flight -= 1;
                    self.batch_done(batch, &stored);
                }
                PoolEvent::SpaceFreed => {}
                PoolEvent::DeviceLost { reason } => self.lose_device(id, reason),
            }
        }
    }

    /// The runtime has found a device to be beyond use.
    pub(super) fn device_lost(&mut self, id: DeviceId, reason: String) {
        if self.devices.get(id).is_some() {
            self.lose_device(id, reason);
        }
    }

    /// What each usable device says of its space.
    pub fn device_usage(&self) -> impl Iterator<Item = (DeviceId, PoolUsage)> {
        self.devices.usages()
    }

    /// A block is durable on a device.
    pub(super) fn keep_stored(&mut self, entry: EntryIndex, device: DeviceId, block: &StoredBlock) {
        self.index.set_stored(entry, Some(Stored { device, page: block.page }));
        let Shape { tenant_index, slot_bytes, .. } = *self.shapes.get(self.index.entry(entry).shape());
        self.tenants.take_nvme(tenant_index, slot_bytes);
        self.enter_nvme_order(entry);
        self.replica_changed(entry, Tier::Nvme, Change::Added);
        self.note_saved();
    }

    /// Another share of the pool is to be kept free.
    pub(super) fn set_pool_free(&mut self, permille: u16) {
        self.settings.pool_free_permille = permille;
        self.devices.attention = Attention::Wanted;
        self.quotas_changed();
    }

    /// Keeps a share of the pool free, and sees to it that ends of blocks become durable.
    pub(super) fn keep_pool_free(&mut self) {
        if self.devices.attention == Attention::Unneeded {
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
        self.update_pool_gauges();
        self.devices.attention = match evicted {
            // The rest follows with the next event.
            POOL_EVICTIONS_PER_APPLY => Attention::Wanted,
            _ => Attention::Unneeded,
        };
    }

    fn update_pool_gauges(&mut self) {
        let usage = self.devices.usage();
        let counters = &mut self.counters;
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

    /// A stored block is not read after all: it may be evicted again.
    pub(super) fn stay_stored(&mut self, entry: EntryIndex) {
        if self.index.entry(entry).stored().is_some() {
            self.enter_nvme_order(entry);
        }
    }

    /// A stored block may be evicted from its device, as the one of its tenant and class that was used last.
    pub(super) fn enter_nvme_order(&mut self, entry: EntryIndex) {
        let standing = self.nvme_standing(entry);
        self.devices.enter_order(entry, standing);
    }

    /// A block is on no device any more.
    fn unstore(&mut self, entry: EntryIndex) {
        self.index.set_stored(entry, None);
        let Shape { tenant_index, slot_bytes, .. } = *self.shapes.get(self.index.entry(entry).shape());
        self.tenants.give_nvme(tenant_index, slot_bytes);
        self.replica_changed(entry, Tier::Nvme, Change::Removed);
    }

    /// A stored block could not be read or did not verify: forgets it. Its slot is taken out of use when the medium
    /// reported an error. A checksum that does not match accuses nobody: whoever committed the block may have named a
    /// wrong one, and would otherwise use up the pool.
    pub(super) fn drop_stored(&mut self, entry: EntryIndex, error: FillError) {
        let Some(stored) = self.index.entry(entry).stored() else { return };
        let key = self.index.entry(entry).key();
        self.devices.leave_order(entry);
        self.unstore(entry);
        if error == FillError::Corrupt {
            self.devices.free(stored.device, stored.page);
            self.counters.corrupt_blocks += 1;
            let (device, page) = (stored.device, stored.page);
            self.emit(Effect::Report(Report::CorruptBlock { device, page, key }));
            return;
        }
        let device = self.devices.device_mut(stored.device);
        device.pool.quarantine(stored.page);
        device.records_owed += 1;
        device.read_errors += 1;
        if device.read_errors >= READ_ERRORS_MAX {
            self.lose_device(stored.device, format!("{READ_ERRORS_MAX} reads failed one after the other"));
        }
    }

    /// Tells the operator, once for each shape, that its blocks fit no segment of a device. Without a device nothing is
    /// expected to be durable.
    pub(super) fn report_unstorable(&mut self, shape: ShapeId) {
        let segments = self.devices.usable_devices().map(|device| device.pool.payload_bytes_max());
        if let Some(payload_bytes_max) = segments.max()
            && self.shapes.tell_unstorable(shape)
        {
            let block_bytes = self.shapes.get(shape).slot_bytes;
            self.emit(Effect::Report(Report::Unstorable { block_bytes, payload_bytes_max }));
        }
    }

    /// Whether less than the target is free or about to be, of bytes or of entries of the journal.
    fn pool_short(&self) -> bool {
        let usage = self.devices.usage();
        let target = |of: u64| of * u64::from(self.settings.pool_free_permille) / 1000;
        usage.slot_bytes_free + usage.pending_frees_bytes < target(usage.capacity_bytes)
            || usage.entries_free + usage.entries_pending < target(usage.entries_max)
    }

    /// Drops the stored block that should go next; `false` when there is none, or all the rest is reserved.
    fn evict_stored(&mut self) -> bool {
        let Some(entry) = self.take_nvme_victim(None) else { return false };
        self.drop_victim(entry);
        true
    }

    /// Drops a stored block that is no longer in the order.
    pub(super) fn drop_victim(&mut self, entry: EntryIndex) {
        let state = self.index.entry(entry);
        self.counters.nvme_evictions += 1;
        self.counters.nvme_evicted_bytes += self.shapes.get(state.shape()).slot_bytes;
        let tenant = self.tenant_of(state.shape());
        self.tenants.get_mut(tenant).counts.nvme_evictions += 1;
        self.end_stored(entry);
    }

    /// Ends a block's copy on a device that nobody reads.
    pub(super) fn end_stored(&mut self, entry: EntryIndex) {
        let stored = self.index.entry(entry).stored().expect("the caller has looked");
        self.devices.leave_order(entry);
        self.devices.free(stored.device, stored.page);
        self.unstore(entry);
        self.forget_if_nowhere(entry);
    }

    fn lose_device(&mut self, id: DeviceId, reason: String) {
        let device = self.devices.device_mut(id);
        if device.health != Health::Usable {
            return;
        }
        device.health = Health::Lost;
        self.counters.devices_lost += 1;
        self.emit(Effect::Report(Report::DeviceLost { device: id, reason }));
        self.forget_stored_on(id);
    }

    /// Forgets the blocks on a device that is not usable any more; copies in DRAM stay.
    fn forget_stored_on(&mut self, id: DeviceId) {
        self.devices.attention = Attention::Wanted;
        let on_it = |stored: Stored| stored.device == id;
        let lost: Vec<EntryIndex> = self
            .index
            .iter()
            .filter(|(_, entry)| entry.stored().is_some_and(on_it))
            .map(|(entry, _)| entry)
            .collect();
        for entry in lost {
            self.devices.leave_order(entry);
            self.unstore(entry);
            self.forget_if_nowhere(entry);
        }
        self.quotas_changed();
    }

    /// Starts the repairs that recovery has found necessary.
    pub(super) fn start_devices(&mut self) {
        for id in self.devices.ids() {
            let ops = self.devices.device_mut(id).pool.flush_frees();
            self.emit_ops(id, ops);
        }
    }
}
