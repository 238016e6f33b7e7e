//! Frames: what is in each arena slot that is in use, and who holds it.
//!
//! ```text
//!            reserve                      commit                    saved, or cannot be
//!  (free) ───────────▶ Reserved ───────────────────────▶ Unsaved ───────────────────────▶ Clean
//!    ▲  ╲                 │ abort                                                        ▲   │ evict, when
//!    │   ╲  load, serve   ▼                           complete                           │   │ nobody reads
//!    │    ╲───────────▶ Filling ─────────────────────────────────────────────────────────┘   ▼
//!    │                    │ failed while read, or overtaken by a commit                    (free)
//!    └── last lease ends ─┴─▶ Orphan: no longer findable, still read (also what was found damaged)
//!                         └─▶ Retired, for ever: a lost device may still write to it
//! ```
//!
//! A frame is freed only when no reader holds a lease on it and nothing writes to it: an engine (`Reserved`) or a
//! device or transport (`Filling`). A frame is in its class's eviction policy exactly when it is `Clean` and
//! nobody holds a lease.

use reprise_policy::eviction::EntryIndex;

use super::AgentCore;
use super::arena::Place;
use super::checksums::{ChecksumRow, Checksums};
use super::shapes::{Shape, ShapeId};
use super::suspects::Doubt;
use crate::effect::ArenaSlot;

/// Number of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct FrameIndex(pub(super) u32);

/// A slot in use.
#[derive(Debug)]
pub(super) struct Frame {
    pub(super) state: FrameState,
    /// Readers: loads and peers.
    pub(super) leases: u32,
    entry: EntryIndex,
    checksums: ChecksumRow,
    pub(super) place: Place,
    pub(super) shape: ShapeId,
    pub(super) doubt: Doubt,
}

/// See the module.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FrameState {
    /// No slot.
    Vacant,
    /// An engine fills it.
    Reserved,
    /// A device or peer fills it: slot of the fill.
    Filling(u32),
    /// Readable, and not yet durable: number of its unsaved record.
    Unsaved(u32),
    /// Readable; may be dropped.
    Clean,
    /// Still read, no longer findable.
    Orphan,
    /// A lost device may write to it at any time: never used again. Its slot and shape stay taken.
    Retired,
}

/// All frames.
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
    /// No frame.
    pub(super) const NONE: FrameIndex = FrameIndex(u32::MAX);
}

impl Frame {
    /// The block that is found by this frame.
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

    /// Leases of readers on all frames.
    pub(super) fn read_leases(&self) -> u64 {
        self.read_leases
    }

    /// Rows of checksums that are kept.
    pub(super) fn checksum_rows(&self) -> usize {
        self.checksums.len()
    }

    /// All frames in use.
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
    /// A frame with a slot for a shape; evicts what may go when the arena is full or the tenant at its limit. `None`:
    /// everything of the tenant's is read, reserved, being filled or not saved yet, or the rest of the arena is others'.
    pub(super) fn allocate_frame(&mut self, shape: ShapeId, state: FrameState) -> Option<FrameIndex> {
        let Shape { class, slot_bytes, tenant_index: tenant, .. } = *self.shapes.get(shape);
        if !self.make_room_below_limit(tenant, class, slot_bytes) {
            self.urge_writeback();
            return None;
        }
        let place = loop {
            match self.arena.allocate(class) {
                Some(place) => break place,
                None if self.make_room(class) => {}
                None => {
                    self.urge_writeback();
                    return None;
                }
            }
        };
        let checksums = ChecksumRow::UNKNOWN;
        let frame =
            Frame { state, leases: 0, entry: NO_ENTRY, checksums, place, shape, doubt: Doubt::Trusted };
        let frame = self.frames.insert(frame);
        self.arena.set_frame(place, frame);
        self.shapes.hold(shape);
        self.tenants.take_dram(tenant, slot_bytes);
        Some(frame)
    }

    /// Gives a frame's slot back. Nobody may read it, write it or find it.
    pub(super) fn free_frame(&mut self, frame: FrameIndex) {
        let state = self.frames.get_mut(frame);
        assert!(state.leases == 0, "a slot that is read is not freed");
        assert!(state.entry().is_none(), "a slot that can be found is not freed");
        let (place, shape) = (state.place, state.shape);
        let checksums = std::mem::replace(&mut state.checksums, ChecksumRow::UNKNOWN);
        state.state = FrameState::Vacant;
        state.doubt = Doubt::Trusted;
        self.frames.checksums.remove(checksums, self.shapes.objects(shape));
        self.frames.free.push(frame);
        self.arena.free(place);
        let Shape { slot_bytes, tenant_index, .. } = *self.shapes.get(shape);
        self.tenants.give_dram(tenant_index, slot_bytes);
        self.shapes.release(shape);
    }

    /// CRC32C of each object of the block in a frame; they must be known.
    pub(super) fn checksums(&self, frame: FrameIndex) -> &[u32] {
        let state = self.frames.get(frame);
        self.frames.checksums.get(state.checksums, self.shapes.objects(state.shape))
    }

    /// Notes the checksums of the block in a frame, which were not known: one for each object of its shape.
    pub(super) fn set_checksums(&mut self, frame: FrameIndex, checksums: &[u32]) {
        let state = self.frames.get(frame);
        assert!(!state.has_checksums(), "a slot is filled with one block");
        assert_eq!(checksums.len(), self.shapes.objects(state.shape), "the caller has looked");
        let row = self.frames.checksums.insert(checksums);
        self.frames.get_mut(frame).checksums = row;
    }

    /// A reader takes a lease.
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

    /// A reader's lease ends.
    pub(super) fn unlease(&mut self, frame: FrameIndex) {
        let state = self.frames.get_mut(frame);
        state.leases = state.leases.checked_sub(1).expect("every lease ends once");
        self.frames.read_leases -= 1;
        self.settle_frame(frame);
    }

    /// Changes the state of a frame that is not evictable, and draws the consequence.
    pub(super) fn set_frame_state(&mut self, frame: FrameIndex, state: FrameState) {
        let before = self.frames.get_mut(frame);
        if before.state == FrameState::Clean && before.leases == 0 {
            let place = before.place;
            self.arena.remove_evictable(place, frame);
        }
        self.frames.get_mut(frame).state = state;
        self.settle_frame(frame);
    }

    /// Address of a frame's slot.
    pub(super) fn frame_slot(&self, frame: FrameIndex) -> ArenaSlot {
        self.arena.slot(self.frames.get(frame).place)
    }

    /// What follows when nobody reads a frame any more: a clean one may be evicted, an orphan is freed.
    fn settle_frame(&mut self, frame: FrameIndex) {
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
