//! Leases and states of frames.
//!
//! A frame is freed only when no reader holds a lease on it and nothing writes to it.
//!
//! A [`Lease`] is a value: only the cache creates one, it cannot be copied, and its owner redeems it once. A
//! lease that is dropped instead is found by the audit, which compares the leases that owners hold with
//! those that the frames count.

use std::marker::PhantomData;

use reprise_policy::Tier;
use reprise_policy::eviction::EntryIndex;

use crate::cache::Cache;
use crate::cache::checksums::ChecksumRow;
use crate::cache::frames::{CopyState, EvictionPosition, FrameIndex, FrameState};
use crate::cache::index::Dram;
use crate::cache::retained::LostRetention;
use crate::cache::sizes::SizeClass;
use crate::effect::{Access, ArenaSlot, Change, RegionGrant};
use crate::regions::RegionSet;

/// Right to use the slot of a frame.
#[must_use = "a lease that is not redeemed keeps its slot in use"]
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Lease<R> {
    frame: FrameIndex,
    right: PhantomData<R>,
}

/// Right to read a slot, until [`Cache::release`].
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Read {}

/// Right to fill a slot, until [`Cache::finish_fill`] or [`Cache::fail_fill`].
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Fill {}

/// Right of an engine to fill a reserved slot, until [`Cache::publish`] or [`Cache::discard`].
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Write {}

/// Right to make a readable block durable, until [`Cache::saved`] or [`Cache::not_saved`].
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Save {}

const _: () = assert!(size_of::<Lease<Read>>() == 4, "loads hold 8,192 leases each");

impl<R> Lease<R> {
    /// Frame of the slot.
    pub(crate) fn frame(&self) -> FrameIndex {
        self.frame
    }

    /// Ends the right; the caller updates the frame.
    pub(super) fn redeem(self) -> FrameIndex {
        self.frame
    }

    pub(super) fn new(frame: FrameIndex) -> Lease<R> {
        Lease { frame, right: PhantomData }
    }
}

impl Cache {
    /// Frees a frame and its slot. The frame must have no lease, no writer and no index entry.
    pub(super) fn free_frame(&mut self, frame: FrameIndex) {
        let state = self.frames.get_mut(frame);
        assert!(state.leases == 0, "a slot that is read is not freed");
        assert!(state.entry().is_none(), "a slot that can be found is not freed");
        let (place, size_class) = (state.place, state.size_class);
        let checksums = std::mem::replace(&mut state.checksums, ChecksumRow::UNKNOWN);
        state.state = FrameState::Vacant;
        state.copy_state = CopyState::Trusted;
        self.frames.checksums.remove(checksums, self.sizes.objects(size_class));
        self.frames.free.push(frame);
        self.arena.forget(frame);
        self.arena.free(place);
        let SizeClass { slot_bytes, tenant_index, .. } = *self.sizes.get(size_class);
        self.accounts.release_dram(tenant_index, slot_bytes);
        self.sizes.release(size_class);
    }

    /// Returns the CRC32C of each object of the block in a frame. The checksums must be known.
    pub(crate) fn checksums(&self, frame: FrameIndex) -> &[u32] {
        let state = self.frames.get(frame);
        self.frames.checksums.get(state.checksums, self.sizes.objects(state.size_class))
    }

    /// Sets the checksums of the block in a frame: one for each object of its size class.
    pub(crate) fn set_checksums(&mut self, frame: FrameIndex, checksums: &[u32]) {
        let state = self.frames.get(frame);
        assert!(!state.has_checksums(), "a slot is filled with one block");
        assert_eq!(checksums.len(), self.sizes.objects(state.size_class), "the caller has checked");
        let row = self.frames.checksums.insert(checksums);
        self.frames.get_mut(frame).checksums = row;
    }

    /// Acquires a read lease.
    pub(super) fn lease(&mut self, frame: FrameIndex) -> Lease<Read> {
        let state = self.frames.get_mut(frame);
        let evictable = state.leases == 0 && state.state == FrameState::Clean;
        state.leases += 1;
        let (place, now) = (state.place, state.state);
        self.frames.read_leases += 1;
        if let FrameState::Unsaved(_) = now {
            self.frames.get_mut(frame).position = EvictionPosition::Last;
        }
        if evictable {
            self.arena.remove_evictable(place, frame);
        }
        Lease::new(frame)
    }

    /// Releases a read lease.
    pub(crate) fn release(&mut self, lease: Lease<Read>) {
        let frame = lease.redeem();
        let state = self.frames.get_mut(frame);
        state.leases = state.leases.checked_sub(1).expect("every lease ends once");
        self.frames.read_leases -= 1;
        self.update_unleased(frame);
    }

    /// Sets the state of a frame, updating the eviction order.
    pub(super) fn set_frame_state(&mut self, frame: FrameIndex, state: FrameState) {
        let before = self.frames.get_mut(frame);
        if before.state == FrameState::Clean && before.leases == 0 {
            let place = before.place;
            self.arena.remove_evictable(place, frame);
        }
        let changed = self.frames.get_mut(frame);
        changed.state = state;
        if state == FrameState::Clean && self.arena.is_retiring(changed.place.region) {
            self.leaving.push(frame);
        }
        self.update_unleased(frame);
    }

    /// Returns the address of a frame's slot.
    pub(crate) fn frame_slot(&self, frame: FrameIndex) -> ArenaSlot {
        self.arena.slot(self.frames.get(frame).place)
    }

    /// Returns those regions of frames that are not in the set yet, with the access that is granted to them,
    /// and adds them.
    pub(crate) fn new_regions(
        &mut self,
        frames: impl Iterator<Item = FrameIndex>,
        access: Access,
        known: &mut RegionSet,
    ) -> Vec<RegionGrant> {
        let mut grants = Vec::new();
        for frame in frames {
            let position = self.frames.get(frame).place.region;
            let generation = self.arena.generation(position);
            if known.insert(position, generation) {
                self.arena.granted(position);
                let region = self.arena.region_id(position);
                grants.push(RegionGrant { region, generation, access });
            }
        }
        grants
    }

    /// Makes an unleased frame evictable if it is clean, or frees it if it is an orphan.
    pub(super) fn update_unleased(&mut self, frame: FrameIndex) {
        let state = self.frames.get(frame);
        if state.leases > 0 {
            return;
        }
        match state.state {
            FrameState::Clean => {
                let (place, entry) = (state.place, state.entry().expect("a clean frame can be found"));
                let block = self.dram_block(entry);
                self.arena.add_evictable(place, frame, &block);
            }
            FrameState::Orphan => self.free_frame(frame),
            FrameState::Vacant
            | FrameState::Reserved
            | FrameState::Filling(_)
            | FrameState::Unsaved(_)
            | FrameState::Retired => {}
        }
    }

    /// Drops a damaged block from DRAM, unless a write still reads its slot.
    pub(crate) fn drop_if_damaged(&mut self, frame: FrameIndex) {
        let state = self.frames.get(frame);
        if state.copy_state != CopyState::Damaged || state.state != FrameState::Clean {
            return;
        }
        if let Some(entry) = state.entry() {
            self.detach_resident(entry, frame);
            self.remove_if_absent(entry);
        }
    }

    /// Detaches a block from its clean frame, which is freed with its last lease. The lease of a retention pin ends at
    /// once. The caller must ensure that the block has another copy, or remove it from the index.
    pub(super) fn detach_resident(&mut self, entry: EntryIndex, frame: FrameIndex) {
        self.index.entry_mut(entry).set_dram(Dram::Absent);
        self.resident_blocks -= 1;
        self.replica_changed(entry, Tier::Dram, Change::Removed);
        self.arena.forget(frame);
        self.frames.get_mut(frame).set_entry(None);
        self.set_frame_state(frame, FrameState::Orphan);
        self.lose_retained_frame(frame);
    }

    /// Stops to retain a copy in DRAM, and reports it to the owner of the pin. Without a retained copy, nothing changes.
    pub(super) fn lose_retained_frame(&mut self, frame: FrameIndex) {
        if let Some((key, lease)) = self.retained.in_dram.remove(&frame) {
            self.release(lease);
            self.outcomes.lost_retentions.push(LostRetention { key, frame });
        }
    }

    /// Replaces a suspect copy before a commit of the same block, unless a write reads it.
    pub(super) fn yield_to_commit(&mut self, entry: EntryIndex) {
        let Dram::Resident(frame) = self.index.entry(entry).dram() else { return };
        let state = self.frames.get(frame);
        if state.copy_state != CopyState::Trusted && state.state == FrameState::Clean {
            self.detach_resident(entry, frame);
        }
    }
}
