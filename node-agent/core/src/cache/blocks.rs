//! Blocks: index entries, their copies, and the changes that the directory learns of.

use reprise_policy::eviction::restore_cost::{RestoreFrom, restore_ns};
use reprise_policy::eviction::{Block, Class, EntryIndex, Group};
use reprise_policy::{BlockKey, Tier};

use crate::cache::Cache;
use crate::cache::accounts::{TenantIndex, nvme_bytes};
use crate::cache::describe::BlockOrigin;
use crate::cache::devices::group_of_read_only;
use crate::cache::index::{Dram, Stored};
use crate::cache::sizes::{SizeClass, SizeClassId};
use crate::effect::{Change, DeviceId, ReplicaChange};
use crate::event::Priority;
use crate::pool::StoredBlock;

/// Priority of an eviction class that was read from a journal.
pub(super) fn priority_of_class(class: u8) -> Priority {
    match class {
        0 => Priority::Low,
        1 => Priority::Normal,
        _ => Priority::High,
    }
}

/// Class of a priority in the eviction orders.
pub(super) fn class_of(priority: u8) -> Class {
    match priority_of_class(priority) {
        Priority::Low => Class::Evictable,
        Priority::Normal => Class::Recent,
        Priority::High => Class::Active,
    }
}

impl Cache {
    /// Adds a block to the index; the caller sets its location.
    pub(super) fn insert_entry(
        &mut self,
        key: BlockKey,
        size_class: SizeClassId,
        priority: Priority,
        origin: BlockOrigin,
    ) -> EntryIndex {
        self.sizes.hold(size_class);
        self.sizes.add_origin(size_class, origin);
        self.index.insert(key, size_class, priority, origin)
    }

    /// Records a change of a replica for the directory.
    pub(super) fn replica_changed(&mut self, entry: EntryIndex, tier: Tier, change: Change) {
        let key = self.index.entry(entry).key();
        self.changes.push(ReplicaChange { key, tier, change });
    }

    /// Records that a block is durable on a device.
    pub(super) fn keep_stored(&mut self, entry: EntryIndex, device: DeviceId, block: &StoredBlock) {
        self.index.set_stored(entry, Some(Stored { device, page: block.page }));
        let SizeClass { tenant_index, slot_bytes, .. } =
            *self.sizes.get(self.index.entry(entry).size_class());
        self.accounts.charge_nvme(tenant_index, slot_bytes);
        self.devices.order.attach(entry, self.nvme_group(entry));
        self.enter_nvme_order(entry);
        self.replica_changed(entry, Tier::Nvme, Change::Added);
        self.outcomes.stored += 1;
    }

    /// Makes a stored block evictable again that was not read after all.
    pub(super) fn keep_evictable(&mut self, entry: EntryIndex) {
        if self.index.entry(entry).stored().is_some() {
            self.enter_nvme_order(entry);
        }
    }

    /// Makes a stored block evictable, as the newest of its tenant, unless it is pinned or retained.
    pub(super) fn enter_nvme_order(&mut self, entry: EntryIndex) {
        if self.index.entry(entry).stored().is_some_and(|stored| self.devices.is_pinned(stored))
            || self.retained.contains(entry)
        {
            return;
        }
        let block = self.nvme_block(entry);
        self.devices.add_evictable(entry, &block);
    }

    /// Clears the location of a block on a device.
    pub(super) fn clear_stored(&mut self, entry: EntryIndex) {
        self.index.set_stored(entry, None);
        self.devices.order.detach(entry);
        let SizeClass { tenant_index, slot_bytes, .. } =
            *self.sizes.get(self.index.entry(entry).size_class());
        self.accounts.release_nvme(tenant_index, slot_bytes);
        self.retained.forget(entry);
        self.replica_changed(entry, Tier::Nvme, Change::Removed);
    }

    /// Removes a block's copy from its device. The copy must not be in use.
    pub(crate) fn remove_stored(&mut self, entry: EntryIndex) {
        let stored = self.index.entry(entry).stored().expect("the caller has checked");
        self.devices.remove_evictable(entry);
        self.devices.free(stored.device, stored.page);
        self.clear_stored(entry);
        self.remove_if_absent(entry);
    }

    /// Removes a block from the index if it is neither in DRAM, nor being filled, nor on a device.
    pub(super) fn remove_if_absent(&mut self, entry: EntryIndex) {
        let state = self.index.entry(entry);
        if state.dram() == Dram::Absent && state.stored().is_none() {
            let size_class = state.size_class();
            self.index.remove(entry);
            self.devices.order.forget(entry);
            self.sizes.release(size_class);
        }
    }

    /// Tenant of a size class.
    pub(crate) fn tenant_of(&self, size_class: SizeClassId) -> TenantIndex {
        self.sizes.get(size_class).tenant_index
    }

    /// Group of a stored block in the NVMe eviction order.
    pub(super) fn nvme_group(&self, entry: EntryIndex) -> Group {
        let state = self.index.entry(entry);
        let frees_space = state.stored().is_none_or(|stored| self.devices.is_writable(stored.device));
        let tenant = self.tenant_of(state.size_class());
        if frees_space { Group(tenant.0) } else { group_of_read_only(tenant) }
    }

    /// Facts of a stored block for the NVMe eviction order. An evicted block is computed again: whether a peer
    /// has it, only the directory knows.
    pub(super) fn nvme_block(&self, entry: EntryIndex) -> Block {
        let size_class = self.sizes.get(self.index.entry(entry).size_class());
        let (bytes, tokens) = (nvme_bytes(size_class.slot_bytes), size_class.layout.tokens());
        let restore_ns = restore_ns(RestoreFrom::Recompute, bytes, tokens);
        Block { group: self.nvme_group(entry), ..self.block(entry, (bytes, restore_ns)) }
    }

    /// Facts of a block in DRAM for the eviction order of the arena, without its group.
    pub(super) fn dram_block(&self, entry: EntryIndex) -> Block {
        let state = self.index.entry(entry);
        let size_class = self.sizes.get(state.size_class());
        let from = if state.stored().is_some() { RestoreFrom::Device } else { RestoreFrom::Recompute };
        let (bytes, tokens) = (size_class.slot_bytes, size_class.layout.tokens());
        self.block(entry, (bytes, restore_ns(from, bytes, tokens)))
    }

    fn block(&self, entry: EntryIndex, (bytes, restore_ns): (u64, u64)) -> Block {
        let state = self.index.entry(entry);
        Block {
            group: Group::default(),
            class: self.eviction_class(entry),
            key_hash: state.key().table_hash(),
            bytes,
            position: state.position(),
            restore_ns,
        }
    }
}
