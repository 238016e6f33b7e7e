//! Checks of the cache's invariants, for tests.

use std::collections::BTreeMap;

use crate::cache::Cache;
use crate::cache::accounts::{TenantIndex, nvme_bytes};
use crate::cache::extents::LentSlot;
use crate::cache::frames::{CopyState, FrameIndex, FrameState};
use crate::cache::index::Dram;
use crate::cache::pending_space::PendingSpace;
use crate::cache::sizes::{SizeClass, SizeClassId};

/// Slots and bytes of a tenant in one tier.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct SlotUsage {
    slots: u64,
    bytes: u64,
}

impl Cache {
    /// Checks the invariants within the cache. Costs time in proportion to its whole state.
    pub(crate) fn audit(&self) -> Result<(), String> {
        self.audit_frames()?;
        self.arena.audit()?;
        self.audit_classes()?;
        self.audit_index()
    }

    fn audit_frames(&self) -> Result<(), String> {
        let (mut slots, mut evictable, mut retired) = (BTreeMap::new(), 0, 0);
        for (index, frame) in self.frames.iter() {
            let slot = self.arena.slot(frame.place);
            ensure!(slots.insert((slot.region, slot.offset), index).is_none(), "{slot:?} is in two frames");
            let entry = frame.entry();
            let findable = entry.is_some_and(|entry| match self.index.entry(entry).dram() {
                Dram::Absent => false,
                Dram::Filling(by) => by == index && matches!(frame.state, FrameState::Filling(_)),
                Dram::Resident(by) => {
                    by == index && matches!(frame.state, FrameState::Clean | FrameState::Unsaved(_))
                }
            });
            match frame.state {
                FrameState::Vacant => {}
                FrameState::Reserved => {
                    ensure!(entry.is_none() && frame.leases == 0, "{slot:?} is reserved and readable");
                }
                FrameState::Filling(_) => {
                    ensure!(entry.is_none() || findable, "{slot:?}: its entry does not refer to it");
                }
                FrameState::Unsaved(_) => ensure!(findable, "{slot:?} is unsaved, but not findable"),
                FrameState::Clean => {
                    evictable += usize::from(frame.leases == 0);
                    ensure!(frame.copy_state != CopyState::Damaged, "{slot:?} is damaged, and clean");
                    ensure!(findable && frame.has_checksums(), "{slot:?} is clean, but not findable");
                }
                FrameState::Retired => {
                    retired += slot.bytes;
                    ensure!(entry.is_none(), "{slot:?} is retired, and findable");
                }
                FrameState::Orphan => {
                    ensure!(entry.is_none() && frame.leases > 0, "{slot:?} is an orphan without a lease");
                }
            }
        }
        let bytes: u64 = self.frames.iter().map(|(_, frame)| self.arena.slot(frame.place).bytes).sum();
        ensure!(
            bytes == self.arena.used_bytes(),
            "{bytes} bytes in frames, {} in use",
            self.arena.used_bytes()
        );
        let known = self.frames.iter().filter(|(_, frame)| frame.has_checksums()).count();
        let rows = self.frames.checksum_rows();
        ensure!(known == rows, "checksums of {known} frames are known, {rows} are kept");
        let lost = self.counters.arena_lost_bytes;
        ensure!(retired == lost, "{retired} bytes retired, {lost} counted");
        let listed = self.arena.evictable();
        ensure!(evictable == listed, "{evictable} evictable frames, {listed} in the policies");
        Ok(())
    }

    fn audit_index(&self) -> Result<(), String> {
        let (mut stored, mut in_use, mut resident) = (0, 0, 0);
        let mut places = BTreeMap::new();
        for (index, entry) in self.index.iter() {
            let key = entry.key();
            ensure!(self.index.find(&key) == Some(index), "{key} cannot be found by its key");
            match entry.dram() {
                Dram::Absent => ensure!(entry.stored().is_some(), "{key} has no copy"),
                Dram::Filling(frame) | Dram::Resident(frame) => {
                    let known = self.frames.get(frame).entry() == Some(index);
                    ensure!(known, "{key}: its frame belongs to another block");
                }
            }
            resident += u64::from(matches!(entry.dram(), Dram::Resident(_)));
            if let Some(at) = entry.stored() {
                stored += 1;
                in_use += usize::from(!self.is_in_nvme_order(index));
                ensure!(self.devices.is_usable(at.device), "{key} is on a lost device");
                let block = self.devices.stored(at);
                ensure!(
                    block.key == key && block.page == at.page,
                    "{key}: its pool slot holds {}",
                    block.key
                );
                ensure!(places.insert((at.device, at.page), key).is_none(), "{key} shares its pool slot");
            }
        }
        ensure!(stored == self.index.stored_blocks(), "{stored} stored blocks, not as counted");
        ensure!(resident == self.resident_blocks, "{resident} resident blocks, not as counted");
        let evictable = self.devices.evictable();
        ensure!(
            evictable + in_use == stored as usize,
            "{stored} stored blocks, {in_use} being read or pinned, {evictable} evictable"
        );
        Ok(())
    }

    /// Checks that the leases of frames are those that other owners hold, and those of checks.
    pub(crate) fn audit_leases(&self, held: impl Iterator<Item = FrameIndex>) -> Result<(), String> {
        let mut leases: BTreeMap<FrameIndex, u32> = BTreeMap::new();
        for frame in held.chain(self.checks.iter().map(|(_, lease)| lease.frame())) {
            *leases.entry(frame).or_default() += 1;
        }
        for (id, lease) in self.checks.iter() {
            let checked = self.frames.get(lease.frame()).copy_state == CopyState::Checking;
            ensure!(checked, "{id:?} checks a frame that is not being checked");
        }
        let total: u64 = leases.values().map(|leases| u64::from(*leases)).sum();
        ensure!(total == self.frames.read_leases(), "{total} leases held, not as counted");
        for (index, frame) in self.frames.iter() {
            let holders = leases.remove(&index).unwrap_or(0);
            ensure!(holders == frame.leases, "{index:?}: {} leases, {holders} holders", frame.leases);
        }
        ensure!(leases.is_empty(), "leases on free slots: {leases:?}");
        Ok(())
    }

    /// Checks that tenants are charged for their frames, their stored blocks, the frames that devices are writing,
    /// and lent slots.
    pub(crate) fn audit_accounts<'a>(
        &self,
        being_written: impl Iterator<Item = FrameIndex>,
        lent: impl Iterator<Item = &'a LentSlot>,
    ) -> Result<(), String> {
        let mut held: BTreeMap<TenantIndex, [SlotUsage; 2]> = BTreeMap::new();
        let mut count = |tenant: TenantIndex, tier: usize, bytes: u64| {
            let SlotUsage { slots, bytes: all } = &mut held.entry(tenant).or_default()[tier];
            (*slots, *all) = (*slots + 1, *all + bytes);
        };
        for (_, frame) in self.frames.iter() {
            let size_class = self.sizes.get(frame.size_class);
            count(size_class.tenant_index, 0, size_class.slot_bytes);
        }
        let stored = self.index.iter().filter(|(_, entry)| entry.stored().is_some());
        let stored = stored.map(|(_, entry)| entry.size_class());
        let written = being_written.map(|frame| self.frames.get(frame).size_class);
        for size_class in stored.chain(written) {
            let size_class = self.sizes.get(size_class);
            count(size_class.tenant_index, 1, nvme_bytes(size_class.slot_bytes));
        }
        for slot in lent {
            count(slot.tenant, 1, nvme_bytes(slot.slot_bytes));
        }
        for index in self.tenants() {
            let usage = self.tenant_usage(index);
            let dram = SlotUsage { slots: usage.blocks.dram, bytes: usage.dram.used };
            let nvme = SlotUsage { slots: usage.blocks.nvme, bytes: usage.nvme.used };
            let counted = held.remove(&index).unwrap_or_default();
            let used = [dram, nvme];
            ensure!(used == counted, "{:?} holds {counted:?}, but {used:?} are counted", usage.tenant);
        }
        ensure!(held.is_empty(), "bytes of unknown tenants: {held:?}");
        Ok(())
    }

    /// Checks that size classes are used by blocks and frames, and by `others`.
    pub(crate) fn audit_size_classes(&self, others: usize) -> Result<(), String> {
        let uses: u64 = self.sizes.uses().sum();
        let holders = self.index.len() + self.frames.iter().count() + self.listed.len() + others;
        ensure!(uses == holders as u64, "size classes: {uses} uses, {holders} holders");
        Ok(())
    }

    /// Checks that the pending space is that of these blocks.
    pub(crate) fn audit_pending_space(
        &self,
        blocks: impl Iterator<Item = SizeClassId>,
    ) -> Result<(), String> {
        let mut pending = PendingSpace::default();
        for size_class in blocks {
            let SizeClass { slot_bytes, tenant_index, .. } = *self.sizes.get(size_class);
            pending.add(tenant_index, slot_bytes);
        }
        let counted = &self.pending_space;
        ensure!(pending == *counted, "{pending:?} pending, {counted:?} counted");
        Ok(())
    }
}
