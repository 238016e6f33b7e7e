//! Blocks of engines on their way from a reserved slot to a device.
//!
//! ```text
//! reserve ──▶ Lease<Write> ──publish──▶ Lease<Save> ──mark_unsaved, store──▶ saved
//!               └─discard──▶ (free)       ▲ claim, for a block that is in DRAM only
//! ```

use reprise_policy::eviction::EntryIndex;
use reprise_policy::{BlockKey, ContentId, Tier};

use crate::cache::describe::BlockOrigin;
use crate::cache::frames::{EvictionPosition, FrameIndex, FrameState};
use crate::cache::index::Dram;
use crate::cache::lease::{Lease, Save, Write};
use crate::cache::rotation::Target;
use crate::cache::sizes::{SizeClass, SizeClassId};
use crate::cache::{Cache, SlotRequest};
use crate::context::Context;
use crate::effect::{ArenaSlot, Change, DeviceId};
use crate::event::{CommitItem, Priority};
use crate::pool::{BatchId, BlockWrite, PageNumber, StoredBlock};

/// What a commit of one item finds on this node.
#[derive(Clone, Copy, Debug)]
pub(crate) enum CommitTarget {
    /// The key or the checksums are invalid, or the key exists under another tenant or layout.
    Invalid,
    /// The block is readable.
    Exists(BlockKey, EntryIndex),
    /// The block is absent, or only a fetch from a peer would bring it.
    New(BlockKey),
}

/// How far a readable block is from being durable.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Durability {
    Durable,
    /// Not durable yet; contains the slot of its record.
    Unsaved(u32),
    /// In DRAM only, and not being saved.
    DramOnly(FrameIndex),
}

impl Cache {
    /// Reserves a slot that an engine fills, evicting other blocks if necessary; `None` without room.
    pub(crate) fn reserve(&mut self, size_class: SizeClassId) -> Option<Lease<Write>> {
        self.allocate_frame(size_class, FrameState::Reserved).map(Lease::new)
    }

    /// Frees a reserved slot.
    pub(crate) fn discard(&mut self, lease: Lease<Write>) {
        self.free_frame(lease.redeem());
    }

    /// Address of a slot.
    pub(crate) fn slot<R>(&self, lease: &Lease<R>) -> ArenaSlot {
        self.frame_slot(lease.frame())
    }

    /// Space that a block needs, in its tenant's accounts and on a device.
    pub(crate) fn slot_request<R>(&self, lease: &Lease<R>) -> SlotRequest {
        let SizeClass { slot_bytes, tenant_index, .. } =
            *self.sizes.get(self.frames.get(lease.frame()).size_class);
        SlotRequest { tenant: tenant_index, slot_bytes }
    }

    /// Payload bytes of a block.
    pub(crate) fn block_bytes<R>(&self, lease: &Lease<R>) -> u64 {
        self.sizes.get(self.frames.get(lease.frame()).size_class).layout.block_bytes()
    }

    /// Finds the block of an item. Replaces a suspect copy of it.
    pub(crate) fn commit_target(&mut self, lease: &Lease<Write>, item: &CommitItem) -> CommitTarget {
        let size_class = self.frames.get(lease.frame()).size_class;
        let known = item.key.and_then(|key| self.index.find(&key));
        let is_visible = known.is_none_or(|entry| self.index.entry(entry).size_class() == size_class);
        let Some(key) = item.key.filter(|_| is_visible) else { return CommitTarget::Invalid };
        if item.checksums.len() != self.sizes.objects(size_class) {
            return CommitTarget::Invalid;
        }
        let Some(entry) = known else { return CommitTarget::New(key) };
        self.yield_to_commit(entry);
        match self.index.entry(entry).source(size_class) {
            Some(_) => CommitTarget::Exists(key, entry),
            None => CommitTarget::New(key),
        }
    }

    /// Makes a committed block findable and readable. A fetch of the block from a peer continues without it.
    pub(crate) fn publish(
        &mut self,
        lease: Lease<Write>,
        key: BlockKey,
        checksums: &[u32],
        priority: Priority,
    ) -> (EntryIndex, Lease<Save>) {
        let frame = lease.redeem();
        self.set_checksums(frame, checksums);
        let size_class = self.frames.get(frame).size_class;
        let entry = match self.index.find(&key) {
            Some(entry) => {
                if let Dram::Filling(filling) = self.index.entry(entry).dram() {
                    self.frames.get_mut(filling).set_entry(None);
                }
                self.raise_priority(entry, priority);
                self.index.entry_mut(entry).set_origin(BlockOrigin::Saved);
                entry
            }
            None => self.insert_entry(key, size_class, priority, BlockOrigin::Saved),
        };
        self.index.entry_mut(entry).set_dram(Dram::Resident(frame));
        self.frames.get_mut(frame).set_entry(Some(entry));
        self.enter_dram(entry, frame);
        self.resident_blocks += 1;
        self.replica_changed(entry, Tier::Dram, Change::Added);
        (entry, Lease::new(frame))
    }

    /// Records that an engine committed a readable block once more; returns how durable the block is.
    pub(crate) fn recommit(&mut self, entry: EntryIndex) -> Durability {
        self.count_use(entry);
        self.index.entry_mut(entry).set_origin(BlockOrigin::Saved);
        let state = self.index.entry(entry);
        if state.stored().is_some() {
            return Durability::Durable;
        }
        let Dram::Resident(frame) = state.dram() else {
            unreachable!("a block with a source is stored or resident")
        };
        match self.frames.get(frame).state {
            FrameState::Unsaved(record) => Durability::Unsaved(record),
            _ => Durability::DramOnly(frame),
        }
    }

    /// Claims a clean frame, to make its block durable.
    pub(crate) fn claim(&mut self, frame: FrameIndex) -> Lease<Save> {
        debug_assert_eq!(
            self.frames.get(frame).state,
            FrameState::Clean,
            "others are saved, or not readable"
        );
        Lease::new(frame)
    }

    /// Claims a clean frame, to make its block durable as a replica; `None` if it is not clean, or its block
    /// cannot be stored. Such a frame is evicted first, if the replica was all that was wanted.
    pub(crate) fn claim_replica(
        &mut self,
        frame: FrameIndex,
        position: EvictionPosition,
    ) -> Option<Lease<Save>> {
        let lease = Lease::new(frame);
        if self.frames.get(frame).state == FrameState::Clean && self.may_be_saved(self.slot_request(&lease)) {
            let entry = self.frames.get(frame).entry().expect("a clean frame can be found");
            self.index.entry_mut(entry).set_origin(BlockOrigin::Placed);
            return Some(lease);
        }
        let frame = lease.redeem();
        if position == EvictionPosition::First {
            self.evict_first(frame);
        }
        None
    }

    /// Sets the record of a block that is being saved, and its later position in the eviction order.
    pub(crate) fn mark_unsaved(&mut self, lease: &Lease<Save>, record: u32, position: EvictionPosition) {
        self.set_position(lease, position);
        self.add_pending(self.frames.get(lease.frame()).size_class);
        self.set_frame_state(lease.frame(), FrameState::Unsaved(record));
    }

    /// Sets the later position of an unsaved block in the eviction order.
    pub(crate) fn set_position(&mut self, lease: &Lease<Save>, position: EvictionPosition) {
        self.frames.get_mut(lease.frame()).position = position;
    }

    /// Slot of the record of a block, if the block is unsaved.
    pub(crate) fn unsaved_record(&self, entry: EntryIndex) -> Option<u32> {
        let Dram::Resident(frame) = self.index.entry(entry).dram() else { return None };
        match self.frames.get(frame).state {
            FrameState::Unsaved(record) => Some(record),
            _ => None,
        }
    }

    /// Ends the saving of a block that has a record. Its frame is clean; the caller orders it.
    pub(crate) fn saved(&mut self, lease: Lease<Save>) -> (EntryIndex, FrameIndex, EvictionPosition) {
        self.remove_pending(self.frames.get(lease.frame()).size_class);
        let position = self.frames.get(lease.frame()).position;
        let (entry, frame) = self.not_saved(lease);
        (entry, frame, position)
    }

    /// Makes the frame of a block without a record clean: nothing will save it.
    pub(crate) fn not_saved(&mut self, lease: Lease<Save>) -> (EntryIndex, FrameIndex) {
        let frame = lease.redeem();
        self.set_frame_state(frame, FrameState::Clean);
        (self.frames.get(frame).entry().expect("a readable block can be found"), frame)
    }

    /// Reports that a committed block cannot be saved.
    pub(crate) fn report_unsavable(&mut self, cx: &mut Context, lease: &Lease<Save>) {
        let request = self.slot_request(lease);
        if self.devices.can_hold(request.slot_bytes) {
            self.count_limited(request);
        } else {
            self.report_unstorable(cx, self.frames.get(lease.frame()).size_class);
        }
    }

    /// Key of a block that is being saved.
    pub(crate) fn key_of(&self, lease: &Lease<Save>) -> BlockKey {
        let entry = self.frames.get(lease.frame()).entry().expect("an unsaved block can be found");
        self.index.entry(entry).key()
    }

    /// Allocates space on the device whose turn is next and charges its tenant; `None` if no device has any.
    pub(crate) fn allocate_page(
        &mut self,
        targets: &mut Vec<Target>,
        request: SlotRequest,
    ) -> Option<(DeviceId, PageNumber)> {
        let place = self.devices.allocate(targets, request.slot_bytes)?;
        self.accounts.charge_nvme(request.tenant, request.slot_bytes);
        self.accounts.get_mut(request.tenant).counts.nvme_written_bytes += request.slot_bytes;
        self.charge_write(place.0, request.slot_bytes, targets);
        Some(place)
    }

    /// Releases the charge of a block whose write has ended.
    pub(crate) fn release_charge(&mut self, request: SlotRequest) {
        self.accounts.release_nvme(request.tenant, request.slot_bytes);
    }

    /// Starts to write blocks to a device.
    pub(crate) fn start_batch(
        &mut self,
        cx: &mut Context,
        device: DeviceId,
        batch: BatchId,
        writes: Vec<BlockWrite>,
    ) {
        let ops = self.devices.write_batch(device, batch, writes);
        self.emit_ops(cx, device, ops);
    }

    /// Describes the write of a block to a page.
    pub(crate) fn block_write(&self, lease: &Lease<Save>, page: PageNumber) -> BlockWrite {
        let state = self.frames.get(lease.frame());
        let entry = self.index.entry(state.entry().expect("an unsaved block can be found"));
        let SizeClass { tenant, tenant_index, layout, .. } = *self.sizes.get(state.size_class);
        BlockWrite {
            key: entry.key(),
            tenant,
            tenant_name: self.tenant_name(tenant_index),
            layout,
            content: ContentId::UNKNOWN,
            priority: entry.class(),
            checksums: self.checksums(lease.frame()).into(),
            slot: self.arena.slot(state.place),
            page,
        }
    }

    /// Records that a block is durable on a device, and returns the slot of its record. Frees the space of a
    /// block that is no longer unsaved.
    pub(crate) fn store(&mut self, device: DeviceId, block: &StoredBlock) -> Option<u32> {
        let found = self.index.find(&block.key);
        let Some((entry, record)) = found.and_then(|entry| Some((entry, self.unsaved_record(entry)?))) else {
            self.devices.free(device, block.page);
            return None;
        };
        let layout = self.sizes.get(self.index.entry(entry).size_class()).layout;
        self.counters.stored_blocks_total += 1;
        self.counters.stored_bytes_total += layout.block_bytes();
        self.keep_stored(entry, device, block);
        Some(record)
    }
}
