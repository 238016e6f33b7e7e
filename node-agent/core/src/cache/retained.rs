//! Retained copies: those that a retention pin keeps from eviction, and changes of blocks on request.
//!
//! The copy in DRAM is kept by a read lease, which this table holds. The copy on a device leaves the eviction order; the
//! table charges its tenant. A copy that is removed leaves the table: a pin does not outlive the copy.
//!
//! Retained copies are advice. If a slot size finds no room in DRAM, the copies that alone keep a region of another size
//! are released ([`Cache::break_retained_region`]): one in each region would keep all other sizes out.

use std::collections::BTreeMap;

use reprise_policy::BlockKey;
use reprise_policy::eviction::EntryIndex;

use crate::cache::Cache;
use crate::cache::accounts::{TenantIndex, nvme_bytes};
use crate::cache::frames::{FrameIndex, FrameState};
use crate::cache::index::Dram;
use crate::cache::lease::{Lease, Read};
use crate::cache::sizes::SizeClassId;

/// Retained copies in both tiers.
#[derive(Debug, Default)]
pub(super) struct Retained {
    /// Blocks in DRAM, and the leases that keep them.
    pub(super) in_dram: BTreeMap<FrameIndex, (BlockKey, Lease<Read>)>,
    /// Charge of each copy on a device.
    copies: BTreeMap<EntryIndex, (TenantIndex, u64)>,
    by_tenant: BTreeMap<TenantIndex, u64>,
    /// Number of copies that were released because their region or segment was needed.
    pub(super) broken: u64,
}

/// Copy in DRAM whose retention ended before its pin: its slot was needed, or the copy was damaged or replaced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LostRetention {
    pub(crate) key: BlockKey,
    pub(crate) frame: FrameIndex,
}

/// Bytes that a new pin may charge in each tier.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Allowance {
    pub(crate) dram: u64,
    pub(crate) nvme: u64,
}

/// Copies of a block that were retained. A block without any keeps nothing.
#[derive(Debug)]
pub(crate) struct RetainedCopies {
    /// Frame of the copy in DRAM.
    pub(crate) dram: Option<FrameIndex>,
    /// Bytes of the copy on a device; 0 without one.
    pub(crate) nvme_bytes: u64,
}

/// Result of a change of one block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Change {
    /// The block was changed; slot bytes of the copies.
    Done(u64),
    /// The block has the requested state.
    Unneeded,
    /// The block is not on this node, or of another tenant or layout.
    Absent,
    /// The block is in use.
    InUse,
    /// A limit does not admit the change.
    OverLimit,
}

impl Retained {
    /// Whether a copy on a device is retained.
    pub(super) fn contains(&self, entry: EntryIndex) -> bool {
        !self.copies.is_empty() && self.copies.contains_key(&entry)
    }

    /// Whether no copy on a device is retained.
    pub(super) fn is_empty(&self) -> bool {
        self.copies.is_empty()
    }

    /// Counts the retained blocks among some that are evicted.
    pub(super) fn count_broken(&mut self, blocks: &[EntryIndex]) {
        self.broken += blocks.iter().filter(|entry| self.copies.contains_key(entry)).count() as u64;
    }

    /// Removes a copy; returns whether it was retained.
    pub(super) fn forget(&mut self, entry: EntryIndex) -> bool {
        let Some((tenant, bytes)) = self.copies.remove(&entry) else { return false };
        if let Some(charged) = self.by_tenant.get_mut(&tenant) {
            *charged -= bytes;
            if *charged == 0 {
                self.by_tenant.remove(&tenant);
            }
        }
        true
    }

    fn insert(&mut self, entry: EntryIndex, tenant: TenantIndex, bytes: u64) {
        self.copies.insert(entry, (tenant, bytes));
        *self.by_tenant.entry(tenant).or_default() += bytes;
    }
}

impl Cache {
    /// Retains the copies of a block that fit the allowance: that in DRAM if it is readable, and that on a device.
    ///
    /// # Errors
    /// The reason why no copy is retained.
    pub(crate) fn retain_copies(
        &mut self,
        key: &BlockKey,
        size_class: SizeClassId,
        allowance: Allowance,
    ) -> Result<RetainedCopies, Change> {
        let entry = self.entry_of(key, size_class).ok_or(Change::Absent)?;
        let state = self.index.entry(entry);
        let (frame, is_stored) = (state.dram(), state.stored().is_some());
        let slot_bytes = self.slot_bytes(size_class);
        let on_device = nvme_bytes(slot_bytes);
        let takes_dram = matches!(frame, Dram::Resident(_)) && slot_bytes <= allowance.dram;
        let takes_nvme = is_stored && on_device <= allowance.nvme;
        if !takes_dram && !takes_nvme {
            let is_only_filled = matches!(frame, Dram::Filling(_)) && !is_stored;
            return Err(if is_only_filled { Change::InUse } else { Change::OverLimit });
        }
        let dram = match frame {
            Dram::Resident(frame) if takes_dram => {
                let lease = self.lease(frame);
                self.retained.in_dram.insert(frame, (*key, lease));
                Some(frame)
            }
            _ => None,
        };
        if takes_nvme {
            self.devices.remove_evictable(entry);
            self.retained.insert(entry, self.tenant_of(size_class), on_device);
        }
        Ok(RetainedCopies { dram, nvme_bytes: if takes_nvme { on_device } else { 0 } })
    }

    /// Makes the copies of a block evictable again, as the most recently used.
    pub(crate) fn end_retention(&mut self, key: &BlockKey, dram: Option<FrameIndex>) {
        if let Some(entry) = self.index.find(key)
            && self.retained.forget(entry)
            && self.is_in_nvme_order(entry)
        {
            self.enter_nvme_order(entry);
        }
        // The frame may have lost the block, and be another one's.
        if let Some(frame) = dram
            && self.retained.in_dram.get(&frame).is_some_and(|(of, _)| of == key)
            && let Some((_, lease)) = self.retained.in_dram.remove(&frame)
        {
            self.release(lease);
        }
    }

    /// Whether the copy of a block on a device is retained.
    pub(crate) fn is_retained_on_device(&self, key: &BlockKey) -> bool {
        self.index.find(key).is_some_and(|entry| self.retained.contains(entry))
    }

    /// Frames that retained copies keep.
    pub(crate) fn retained_frames(&self) -> impl Iterator<Item = FrameIndex> {
        self.retained.in_dram.keys().copied()
    }

    /// Retained copies that were lost, and that the owner of the pins does not know yet.
    pub(crate) fn lost_retentions(&self) -> &[LostRetention] {
        &self.outcomes.lost_retentions
    }

    /// Bytes of a tenant's retained copies on devices.
    pub(crate) fn retained_nvme_bytes(&self, tenant: TenantIndex) -> u64 {
        self.retained.by_tenant.get(&tenant).copied().unwrap_or(0)
    }

    /// Bytes of all retained copies on devices, beyond the reservations of their tenants.
    pub(crate) fn retained_beyond_reservations(&self) -> u64 {
        let beyond = |(tenant, bytes): (&TenantIndex, &u64)| {
            bytes.saturating_sub(self.accounts.nvme(*tenant).quota.reserved())
        };
        self.retained.by_tenant.iter().map(beyond).sum()
    }

    /// Bytes of all retained copies on devices.
    pub(crate) fn retained_bytes(&self) -> u64 {
        self.retained.by_tenant.values().sum()
    }

    /// Number of retained copies that were released because their region or segment was needed.
    pub(crate) fn broken_retentions(&self) -> u64 {
        self.retained.broken
    }

    /// Bytes of the devices that no reservation covers.
    pub(crate) fn unreserved_nvme_bytes(&self) -> u64 {
        let reserved = self.accounts.ids().map(|index| self.accounts.nvme(index).quota.reserved());
        self.devices.usage().capacity_bytes.saturating_sub(reserved.fold(0, u64::saturating_add))
    }

    /// Bytes that a tenant can have at most in DRAM and on devices.
    pub(crate) fn obtainable_bytes(&self, tenant: TenantIndex) -> Allowance {
        let (dram, nvme) = (self.accounts.dram(tenant), self.accounts.nvme(tenant));
        let regions = self.arena.obtainable_bytes(self.accounts.get(tenant).id);
        Allowance {
            dram: dram.quota.limit().min(regions),
            nvme: nvme.quota.limit().min(self.devices.usage().capacity_bytes),
        }
    }

    /// Drops the copy in DRAM of a block that is on a device.
    pub(crate) fn demote(&mut self, key: &BlockKey, size_class: SizeClassId) -> Change {
        let Some(entry) = self.entry_of(key, size_class) else { return Change::Absent };
        let state = self.index.entry(entry);
        let Dram::Resident(frame) = state.dram() else {
            return if state.stored().is_some() { Change::Unneeded } else { Change::InUse };
        };
        let held = self.frames.get(frame);
        if state.stored().is_none() || held.state != FrameState::Clean || held.leases > 0 {
            return Change::InUse;
        }
        let (place, bytes) = (held.place, self.slot_bytes(size_class));
        self.arena.remove_evictable(place, frame);
        self.evict_frame(frame);
        self.counters.demoted_on_request_blocks += 1;
        Change::Done(bytes)
    }

    /// Removes all copies of a block from this node. Loads that hold the copy in DRAM keep it until they end; a slot
    /// of a device that a client has pinned is freed after its pin.
    pub(crate) fn delete(&mut self, key: &BlockKey, size_class: SizeClassId) -> Change {
        let change = self.remove_copies(key, size_class);
        self.counters.deleted_blocks += u64::from(matches!(change, Change::Done(_)));
        change
    }

    /// As [`Cache::delete`], for a block whose encryption key is gone.
    pub(crate) fn erase(&mut self, key: &BlockKey, size_class: SizeClassId) -> Change {
        let change = self.remove_copies(key, size_class);
        self.counters.erased_blocks += u64::from(matches!(change, Change::Done(_)));
        change
    }

    fn remove_copies(&mut self, key: &BlockKey, size_class: SizeClassId) -> Change {
        let Some(entry) = self.entry_of(key, size_class) else { return Change::Absent };
        let state = self.index.entry(entry);
        let slot_bytes = self.slot_bytes(size_class);
        let frame = match state.dram() {
            Dram::Absent => None,
            Dram::Resident(frame) if self.frames.get(frame).state == FrameState::Clean => Some(frame),
            // A device, a peer or a write uses the slot.
            Dram::Resident(_) | Dram::Filling(_) => return Change::InUse,
        };
        let on_device = if state.stored().is_some() { nvme_bytes(slot_bytes) } else { 0 };
        if let Some(frame) = frame {
            self.detach_resident(entry, frame);
        }
        match on_device {
            0 => self.remove_if_absent(entry),
            _ => self.remove_stored(entry),
        }
        Change::Done(on_device + if frame.is_some() { slot_bytes } else { 0 })
    }

    fn entry_of(&self, key: &BlockKey, size_class: SizeClassId) -> Option<EntryIndex> {
        let entry = self.index.find(key)?;
        (self.index.entry(entry).size_class() == size_class).then_some(entry)
    }

    /// Checks that retained copies exist and are charged, and that each belongs to one of these pins.
    pub(crate) fn audit_retained(&self, pinned: impl Iterator<Item = BlockKey>) -> Result<(), String> {
        let pinned: std::collections::BTreeSet<BlockKey> = pinned.collect();
        for (frame, (key, _)) in &self.retained.in_dram {
            let entry = self.frames.get(*frame).entry();
            ensure!(
                entry.is_some() && entry == self.index.find(key),
                "{frame:?} is retained without its block"
            );
            ensure!(pinned.contains(key), "{key} is retained in DRAM without a pin");
        }
        let mut charged: BTreeMap<TenantIndex, u64> = BTreeMap::new();
        for (entry, (tenant, bytes)) in &self.retained.copies {
            let state = self.index.entry(*entry);
            ensure!(state.stored().is_some(), "{entry:?} is retained, and on no device");
            ensure!(self.tenant_of(state.size_class()) == *tenant, "{entry:?} is charged to another tenant");
            ensure!(pinned.contains(&state.key()), "{} is retained without a pin", state.key());
            *charged.entry(*tenant).or_default() += bytes;
        }
        let counted = &self.retained.by_tenant;
        ensure!(charged == *counted, "{charged:?} retained, {counted:?} charged");
        Ok(())
    }
}
