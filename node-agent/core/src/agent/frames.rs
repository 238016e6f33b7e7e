//! Frames: state, contents and leases of the arena slots in use.
//!
//! ```text
//!            reserve                      commit                    saved, or not storable
//!  (free) ───────────▶ Reserved ───────────────────────▶ Unsaved ───────────────────────▶ Clean
//!    ▲  ╲                 │ abort                                                        ▲   │ evict,
//!    │   ╲  load, serve   ▼                           complete                           │   │ if unleased
//!    │    ╲───────────▶ Filling ─────────────────────────────────────────────────────────┘   ▼
//!    │                    │ failed while leased, or replaced by a commit                  (free)
//!    └── last lease ends ─┴─▶ Orphan: not findable, still leased (also damaged copies)
//!                         └─▶ Retired, permanently: a lost device may still write to it
//! ```
//!
//! A frame is freed only when no reader holds a lease on it and nothing writes to it: neither an engine
//! (`Reserved`) nor a device or transport (`Filling`). A frame is in the eviction order exactly if it is
//! `Clean` and unleased.

use reprise_policy::eviction::EntryIndex;

use super::AgentCore;
use super::arena::RegionSlot;
use super::checksums::{ChecksumRow, Checksums};
use super::integrity::CopyState;
use super::size_class::{SizeClass, SizeClassId};
use crate::effect::ArenaSlot;

/// Number of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct FrameIndex(pub(super) u32);

/// Arena slot in use.
#[derive(Debug)]
pub(super) struct Frame {
    pub(super) state: FrameState,
    /// Leases of loads, serves and checks.
    pub(super) leases: u32,
    entry: EntryIndex,
    checksums: ChecksumRow,
    pub(super) place: RegionSlot,
    pub(super) size_class: SizeClassId,
    pub(super) copy_state: CopyState,
}

/// State of a frame; the module describes the transitions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FrameState {
    /// The frame has no slot.
    Vacant,
    /// An engine fills the slot.
    Reserved,
    /// A device or peer fills the slot; contains the slot of the fill.
    Filling(u32),
    /// Readable, and not durable yet; contains the slot of the unsaved record.
    Unsaved(u32),
    /// Readable, and evictable if unleased.
    Clean,
    /// Leased, and no longer findable.
    Orphan,
    /// A lost device may write to the slot at any time: it is never used again, and keeps its size class.
    Retired,
}

/// Table of all frames.
#[derive(Debug, Default)]
pub(super) struct Frames {
    frames: Vec<Frame>,
    free: Vec<FrameIndex>,
    checksums: Checksums,
    read_leases: u64,
}

const NO_ENTRY: EntryIndex = EntryIndex(u32::MAX);

const _: () = assert!(size_of::<Frame>() == 28, "memory per resident block is part of the design");
const _: () = assert!(size_of::<Frame>() + size_of::<super::index::Entry>() <= 56);

impl FrameIndex {
    /// Value that stands for no frame.
    pub(super) const NONE: FrameIndex = FrameIndex(u32::MAX);
}

impl Frame {
    /// Returns the index entry whose block is in this frame.
    pub(super) fn entry(&self) -> Option<EntryIndex> {
        (self.entry != NO_ENTRY).then_some(self.entry)
    }

    pub(super) fn set_entry(&mut self, entry: Option<EntryIndex>) {
        self.entry = entry.unwrap_or(NO_ENTRY);
    }

    /// Whether the checksums of the block in the slot are known.
    pub(super) fn has_checksums(&self) -> bool {
        self.checksums != ChecksumRow::UNKNOWN
    }
}

impl Frames {
    pub(super) fn get(&self, frame: FrameIndex) -> &Frame {
        &self.frames[frame.0 as usize]
    }

    pub(super) fn get_mut(&mut self, frame: FrameIndex) -> &mut Frame {
        &mut self.frames[frame.0 as usize]
    }

    /// Number of leases on all frames.
    pub(super) fn read_leases(&self) -> u64 {
        self.read_leases
    }

    /// Number of checksum rows in use.
    pub(super) fn checksum_rows(&self) -> usize {
        self.checksums.len()
    }

    /// Iterates all frames in use.
    pub(super) fn iter(&self) -> impl Iterator<Item = (FrameIndex, &Frame)> {
        let in_use = |(_, frame): &(usize, &Frame)| frame.state != FrameState::Vacant;
        self.frames.iter().enumerate().filter(in_use).map(|(at, frame)| (FrameIndex(at as u32), frame))
    }

    fn insert(&mut self, frame: Frame) -> FrameIndex {
        if let Some(index) = self.free.pop() {
            self.frames[index.0 as usize] = frame;
            return index;
        }
        self.frames.push(frame);
        FrameIndex(self.frames.len() as u32 - 1)
    }
}

impl AgentCore {
    /// Allocates a frame with a slot for a size class, evicting other blocks if the arena is full or the
    /// tenant at its limit. `None` if nothing of the tenant's is evictable, and the rest of the arena belongs
    /// to other tenants.
    pub(super) fn allocate_frame(
        &mut self,
        size_class: SizeClassId,
        state: FrameState,
    ) -> Option<FrameIndex> {
        let SizeClass { slot_group, slot_bytes, tenant_index: tenant, .. } =
            *self.size_classes.get(size_class);
        if !self.make_room_below_limit(tenant, slot_group, slot_bytes) {
            self.expedite_writeback();
            return None;
        }
        let place = loop {
            match self.arena.allocate(slot_group) {
                Some(place) => break place,
                None if self.make_room(slot_group) => {}
                None => {
                    self.expedite_writeback();
                    return None;
                }
            }
        };
        let checksums = ChecksumRow::UNKNOWN;
        let frame = Frame {
            state,
            leases: 0,
            entry: NO_ENTRY,
            checksums,
            place,
            size_class,
            copy_state: CopyState::Trusted,
        };
        let frame = self.frames.insert(frame);
        self.arena.set_frame(place, frame);
        self.size_classes.hold(size_class);
        self.tenants.charge_dram(tenant, slot_bytes);
        Some(frame)
    }

    /// Frees a frame and its slot. The frame must have no lease, no writer and no index entry.
    pub(super) fn free_frame(&mut self, frame: FrameIndex) {
        let state = self.frames.get_mut(frame);
        assert!(state.leases == 0, "a slot that is read is not freed");
        assert!(state.entry().is_none(), "a slot that can be found is not freed");
        let (place, size_class) = (state.place, state.size_class);
        let checksums = std::mem::replace(&mut state.checksums, ChecksumRow::UNKNOWN);
        state.state = FrameState::Vacant;
        state.copy_state = CopyState::Trusted;
        self.frames.checksums.remove(checksums, self.size_classes.objects(size_class));
        self.frames.free.push(frame);
        self.arena.free(place);
        let SizeClass { slot_bytes, tenant_index, .. } = *self.size_classes.get(size_class);
        self.tenants.release_dram(tenant_index, slot_bytes);
        self.size_classes.release(size_class);
    }

    /// Returns the CRC32C of each object of the block in a frame. The checksums must be known.
    pub(super) fn checksums(&self, frame: FrameIndex) -> &[u32] {
        let state = self.frames.get(frame);
        self.frames.checksums.get(state.checksums, self.size_classes.objects(state.size_class))
    }

    /// Sets the checksums of the block in a frame: one for each object of its size class.
    pub(super) fn set_checksums(&mut self, frame: FrameIndex, checksums: &[u32]) {
        let state = self.frames.get(frame);
        assert!(!state.has_checksums(), "a slot is filled with one block");
        assert_eq!(checksums.len(), self.size_classes.objects(state.size_class), "the caller has checked");
        let row = self.frames.checksums.insert(checksums);
        self.frames.get_mut(frame).checksums = row;
    }

    /// Acquires a read lease.
    pub(super) fn lease(&mut self, frame: FrameIndex) {
        let state = self.frames.get_mut(frame);
        let evictable = state.leases == 0 && state.state == FrameState::Clean;
        state.leases += 1;
        let (place, now) = (state.place, state.state);
        self.frames.read_leases += 1;
        if let FrameState::Unsaved(slot) = now {
            self.writeback.note_read(slot);
        }
        if evictable {
            self.arena.remove_evictable(place, frame);
        }
    }

    /// Releases a read lease.
    pub(super) fn unlease(&mut self, frame: FrameIndex) {
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
        self.frames.get_mut(frame).state = state;
        self.update_unleased(frame);
    }

    /// Returns the address of a frame's slot.
    pub(super) fn frame_slot(&self, frame: FrameIndex) -> ArenaSlot {
        self.arena.slot(self.frames.get(frame).place)
    }

    /// Makes an unleased frame evictable if it is clean, or frees it if it is an orphan.
    fn update_unleased(&mut self, frame: FrameIndex) {
        let state = self.frames.get(frame);
        if state.leases > 0 {
            return;
        }
        match state.state {
            FrameState::Clean => {
                let class = state.entry().map_or(0, |entry| self.index.entry(entry).class());
                let place = state.place;
                self.arena.add_evictable(place, frame, class);
            }
            FrameState::Orphan => self.free_frame(frame),
            FrameState::Vacant
            | FrameState::Reserved
            | FrameState::Filling(_)
            | FrameState::Unsaved(_)
            | FrameState::Retired => {}
        }
    }
}
