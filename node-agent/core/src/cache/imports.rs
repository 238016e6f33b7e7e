//! Imports: blocks of a public tenant that are copied for another tenant.
//!
//! The source of an import is leased or pinned until the copy has ended. A reader may write to its own slot while it is
//! filled, so a failed verification there shows nothing about the public block: only errors of a device remove it.

use reprise_policy::eviction::EntryIndex;
use reprise_policy::{BlockKey, Layout, TenantId};

use crate::cache::Cache;
use crate::cache::describe::BlockOrigin;
use crate::cache::frames::{CopyState, FrameIndex};
use crate::cache::index::{Dram, Stored};
use crate::cache::lease::{Fill, Lease, Read};
use crate::cache::sizes::{SizeClass, SizeClassId};
use crate::context::Context;
use crate::effect::{BlockCopy, BlockRead, DeviceId, FillId, LossReason, Source};
use crate::event::FillError;
use crate::pool::StoredBlock;
use crate::slab::SlabId;

/// Copy of a public block on this node that an import reads.
#[derive(Debug)]
pub(crate) enum PublicCopy {
    /// In DRAM, with a lease on its slot.
    InDram(Lease<Read>),
    /// On a device, where its slot is pinned.
    Stored { key: BlockKey, stored: Stored },
}

/// How the slot of an import is filled.
#[derive(Debug)]
pub(crate) enum ImportStart {
    Copy(BlockCopy),
    Read(DeviceId, BlockRead),
}

impl PublicCopy {
    /// Frame that the import reads.
    pub(crate) fn frame(&self) -> Option<FrameIndex> {
        match self {
            PublicCopy::InDram(lease) => Some(lease.frame()),
            PublicCopy::Stored { .. } => None,
        }
    }

    /// Slot of a device that the import reads.
    pub(crate) fn stored(&self) -> Option<Stored> {
        match self {
            PublicCopy::InDram(_) => None,
            PublicCopy::Stored { stored, .. } => Some(*stored),
        }
    }
}

impl Cache {
    /// Returns where the block of a public tenant can be imported from on this node.
    pub(crate) fn public_source(&self, key: &BlockKey, of: (TenantId, &Layout)) -> Option<Source> {
        let entry = self.public_entry(key, of)?;
        match self.readable_frame(entry) {
            Some(_) => Some(Source::OwnDram),
            None => self.index.entry(entry).stored().map(|_| Source::OwnNvme),
        }
    }

    /// Leases or pins the blocks of a public tenant that are on this node, and marks them as used. Returns one result for
    /// each key, in their order.
    pub(crate) fn acquire_public(
        &mut self,
        keys: impl Iterator<Item = BlockKey>,
        of: (TenantId, &Layout),
    ) -> Vec<Option<PublicCopy>> {
        let entries: Vec<Option<EntryIndex>> = keys.map(|key| self.public_entry(&key, of)).collect();
        self.touch_chain(entries.iter().flatten().copied());
        entries.into_iter().map(|entry| self.acquire_public_entry(entry?)).collect()
    }

    fn acquire_public_entry(&mut self, entry: EntryIndex) -> Option<PublicCopy> {
        let copy = match self.readable_frame(entry) {
            Some(frame) => PublicCopy::InDram(self.lease(frame)),
            None => {
                let state = self.index.entry(entry);
                let (key, stored) = (state.key(), state.stored()?);
                self.pin_stored(entry, stored);
                PublicCopy::Stored { key, stored }
            }
        };
        self.count_use(entry);
        Some(copy)
    }

    /// Ends the lease or pin of a public copy.
    pub(crate) fn release_public(&mut self, copy: PublicCopy) {
        match copy {
            PublicCopy::InDram(lease) => self.release(lease),
            PublicCopy::Stored { stored, .. } => self.unpin(stored),
        }
    }

    /// Handles the failure of an import before the end of its lease or pin.
    pub(crate) fn public_copy_failed(&mut self, cx: &mut Context, copy: &PublicCopy, error: FillError) {
        match copy {
            PublicCopy::InDram(lease) if error == FillError::Corrupt => self.begin_check(cx, lease.frame()),
            PublicCopy::Stored { key, stored }
                if matches!(error, FillError::Device | FillError::Stranded) =>
            {
                let entry = self.index.find(key);
                let entry = entry.filter(|entry| self.index.entry(*entry).stored() == Some(*stored));
                if let Some(entry) = entry {
                    self.drop_stored(cx, entry, error);
                    self.remove_if_absent(entry);
                }
            }
            PublicCopy::InDram(_) | PublicCopy::Stored { .. } => {}
        }
    }

    /// Starts the import of a block that this node does not have under the reader's key.
    ///
    /// # Errors
    /// The key exists under another tenant or layout, or the arena has no room.
    pub(crate) fn begin_import(
        &mut self,
        (key, size_class): (BlockKey, SizeClassId),
        copy: &PublicCopy,
        fill: SlabId,
    ) -> Result<(Lease<Fill>, ImportStart), LossReason> {
        let (lease, fetch) = self.begin_fetch((key, size_class), fill, BlockOrigin::Loaded)?;
        let start = match copy {
            PublicCopy::InDram(source) => {
                let checksums: Box<[u32]> = self.checksums(source.frame()).into();
                self.set_checksums(lease.frame(), &checksums);
                let from = self.frame_slot(source.frame());
                ImportStart::Copy(BlockCopy { fill: FillId(fill.0), from, into: fetch.into, checksums })
            }
            PublicCopy::Stored { key, stored } => {
                self.devices.read_begun(stored.device);
                let reader = self.tenant_of(size_class);
                self.accounts.get_mut(reader).counts.nvme_read_bytes += fetch.into.bytes;
                let StoredBlock { page, generation, header_crc, .. } = self.devices.stored(*stored);
                let (fill, slot) = (FillId(fill.0), fetch.into);
                let read = BlockRead { fill, key: *key, page, generation, header_crc, slot };
                ImportStart::Read(stored.device, read)
            }
        };
        Ok((lease, start))
    }

    /// Finds a block by key, tenant and layout. Blocks of an erased tenant are about to be removed.
    fn public_entry(&self, key: &BlockKey, (tenant, layout): (TenantId, &Layout)) -> Option<EntryIndex> {
        let entry = self.index.find(key)?;
        let size_class = self.index.entry(entry).size_class();
        let SizeClass { tenant: owner, layout: of_block, .. } = self.sizes.get(size_class);
        let is_erased = self.is_erased(self.tenant_of(size_class));
        (*owner == tenant && of_block == layout && !is_erased).then_some(entry)
    }

    /// Frame of a block that is readable in DRAM and not known as damaged.
    fn readable_frame(&self, entry: EntryIndex) -> Option<FrameIndex> {
        match self.index.entry(entry).dram() {
            Dram::Resident(frame) if self.frames.get(frame).copy_state != CopyState::Damaged => Some(frame),
            Dram::Absent | Dram::Filling(_) | Dram::Resident(_) => None,
        }
    }
}
