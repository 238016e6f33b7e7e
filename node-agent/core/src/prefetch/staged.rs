//! Blocks that are read ahead, and the leases that keep them in DRAM until a load uses them.
//!
//! ```text
//!  Requested ──attached──▶ Reading ──whole──▶ Ready ──load──▶ (used)
//!      │ refused             │ failed           │ last holder leaves
//!      └──────▶ Failed ◀─────┘                  └──▶ (wasted)
//! ```
//!
//! A block has as many holders as requests that list it. A load uses it up for all of them: from then on, the
//! block is one of the cache like any other.

use std::collections::BTreeMap;

use reprise_policy::{BlockKey, SessionId};

use crate::cache::{Cache, Lease, Read, SizeClassId, TenantIndex};
use crate::limits::PREFETCH_ATTEMPTS_MAX;
use crate::slab::{Slab, SlabId};
use crate::waiter::WaitId;

/// Blocks that are read ahead, by key.
#[derive(Debug, Default)]
pub(super) struct Staged {
    blocks: Slab<StagedBlock>,
    by_key: BTreeMap<BlockKey, SlabId>,
    /// Slot bytes of all blocks that have not failed, and those that each session requested.
    bytes: u64,
    by_session: BTreeMap<SessionId, u64>,
    by_tenant: BTreeMap<TenantIndex, u64>,
}

/// A block that is read ahead.
#[derive(Debug)]
pub(super) struct StagedBlock {
    pub(super) key: BlockKey,
    pub(super) size_class: SizeClassId,
    pub(super) slot_bytes: u64,
    /// Bytes without padding.
    pub(super) payload_bytes: u64,
    /// Session whose hint requested it.
    pub(super) session: SessionId,
    pub(super) tenant: TenantIndex,
    /// Number of reads so far.
    pub(super) attempts: u8,
    /// Number of requests that list it.
    pub(super) holders: u32,
    pub(super) state: BlockState,
}

/// State of a staged block.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum BlockState {
    /// Its fill was requested in this event.
    Requested,
    /// Being read, with some verified layers.
    Reading { lease: Lease<Read>, wait: WaitId, layers: u16 },
    /// Readable in DRAM.
    Ready { lease: Lease<Read> },
    /// It could not be read, or had no room: a load tries again.
    Failed,
}

/// State of a block for a request that lists it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Progress {
    /// In DRAM, where a lease keeps it.
    Complete,
    /// No longer staged: a load has used it.
    Ended,
    /// On its way.
    Reading,
    /// Not read ahead.
    Failed,
}

impl StagedBlock {
    /// Describes a block whose fill a session requests, with one holder.
    pub(super) fn requested(
        cache: &Cache,
        (key, class): (BlockKey, SizeClassId),
        session: SessionId,
    ) -> StagedBlock {
        let size_class = cache.size_class(class);
        StagedBlock {
            key,
            size_class: class,
            slot_bytes: size_class.slot_bytes,
            payload_bytes: size_class.layout.block_bytes(),
            session,
            tenant: cache.tenant_of(class),
            attempts: 1,
            holders: 1,
            state: BlockState::Requested,
        }
    }
}

impl Staged {
    /// Whether no block is staged.
    pub(super) fn is_empty(&self) -> bool {
        self.by_key.is_empty()
    }

    /// Slot bytes of all blocks.
    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Slot bytes of the blocks that a session requested.
    pub(super) fn bytes_of(&self, session: SessionId) -> u64 {
        self.by_session.get(&session).copied().unwrap_or(0)
    }

    /// Slot bytes of the blocks of a tenant.
    pub(super) fn bytes_of_tenant(&self, tenant: TenantIndex) -> u64 {
        self.by_tenant.get(&tenant).copied().unwrap_or(0)
    }

    /// Finds a block of a size class.
    pub(super) fn find(&self, key: &BlockKey, size_class: SizeClassId) -> Option<SlabId> {
        let id = *self.by_key.get(key)?;
        self.blocks.get(id).filter(|block| block.size_class == size_class).map(|_| id)
    }

    /// Adds a block whose fill is requested, with one holder.
    pub(super) fn insert(&mut self, block: StagedBlock) -> SlabId {
        self.charge((block.session, block.tenant), block.slot_bytes);
        let (key, id) = (block.key, self.blocks.insert(block));
        self.by_key.insert(key, id);
        id
    }

    /// Adds a holder of a block.
    pub(super) fn hold(&mut self, id: SlabId) {
        if let Some(block) = self.blocks.get_mut(id) {
            block.holders += 1;
        }
    }

    /// Removes a holder; returns the block if that was the last one.
    pub(super) fn drop_holder(&mut self, id: SlabId) -> Option<StagedBlock> {
        let block = self.blocks.get_mut(id)?;
        block.holders -= 1;
        if block.holders > 0 { None } else { self.remove(id) }
    }

    /// Removes a block, which all its holders from then on see as complete.
    pub(super) fn remove(&mut self, id: SlabId) -> Option<StagedBlock> {
        let block = self.blocks.remove(id)?;
        self.by_key.remove(&block.key);
        if block.state != BlockState::Failed {
            self.release_bytes((block.session, block.tenant), block.slot_bytes);
        }
        Some(block)
    }

    /// Returns the block in a slot.
    pub(super) fn at_mut(&mut self, slot: u32) -> Option<&mut StagedBlock> {
        self.blocks.at_mut(slot)
    }

    /// Marks the block in a slot as failed; returns its state before.
    pub(super) fn fail(&mut self, slot: u32) -> Option<BlockState> {
        let block = self.blocks.at_mut(slot)?;
        let before = std::mem::replace(&mut block.state, BlockState::Failed);
        let (holder, bytes) = ((block.session, block.tenant), block.slot_bytes);
        if before != BlockState::Failed {
            self.release_bytes(holder, bytes);
        }
        Some(before)
    }

    /// Returns a block whose read has failed.
    pub(super) fn failed(&self, id: SlabId) -> Option<&StagedBlock> {
        self.blocks.get(id).filter(|block| block.state == BlockState::Failed)
    }

    /// Requests the fill of a failed block again.
    pub(super) fn retry(&mut self, id: SlabId) {
        let Some(block) = self.blocks.get_mut(id).filter(|block| block.state == BlockState::Failed) else {
            return;
        };
        block.state = BlockState::Requested;
        block.attempts += 1;
        let (holder, bytes) = ((block.session, block.tenant), block.slot_bytes);
        self.charge(holder, bytes);
    }

    /// Returns the id of the block in a slot, if it may be read again.
    pub(super) fn retriable(&self, slot: u32) -> Option<SlabId> {
        let id = self.blocks.id_at(slot)?;
        self.blocks.get(id).filter(|block| block.attempts < PREFETCH_ATTEMPTS_MAX).map(|_| id)
    }

    /// State of a block for a request that lists it.
    pub(super) fn progress(&self, id: SlabId) -> Progress {
        match self.blocks.get(id).map(|block| &block.state) {
            None => Progress::Ended,
            Some(BlockState::Ready { .. }) => Progress::Complete,
            Some(BlockState::Requested | BlockState::Reading { .. }) => Progress::Reading,
            Some(BlockState::Failed) => Progress::Failed,
        }
    }

    /// Whether a block is staged, or was before it failed.
    pub(super) fn contains(&self, id: SlabId) -> bool {
        self.blocks.get(id).is_some()
    }

    /// Iterates all blocks of the table.
    pub(super) fn iter(&self) -> impl Iterator<Item = (SlabId, &StagedBlock)> {
        self.blocks.iter()
    }

    /// Number of keys in the table.
    pub(super) fn keys(&self) -> usize {
        self.by_key.len()
    }

    fn charge(&mut self, (session, tenant): (SessionId, TenantIndex), bytes: u64) {
        self.bytes += bytes;
        *self.by_session.entry(session).or_default() += bytes;
        *self.by_tenant.entry(tenant).or_default() += bytes;
    }

    fn release_bytes(&mut self, (session, tenant): (SessionId, TenantIndex), bytes: u64) {
        self.bytes -= bytes;
        if let Some(of_tenant) = self.by_tenant.get_mut(&tenant) {
            *of_tenant -= bytes;
            if *of_tenant == 0 {
                self.by_tenant.remove(&tenant);
            }
        }
        if let Some(of_session) = self.by_session.get_mut(&session) {
            *of_session -= bytes;
            if *of_session == 0 {
                self.by_session.remove(&session);
            }
        }
    }
}
