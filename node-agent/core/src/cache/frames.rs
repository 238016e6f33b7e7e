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

use crate::cache::arena::RegionSlot;
use crate::cache::checksums::{ChecksumRow, Checksums};
use crate::cache::sizes::SizeClassId;

/// Number of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct FrameIndex(pub(crate) u32);

/// Arena slot in use.
#[derive(Debug)]
pub(crate) struct Frame {
    pub(crate) state: FrameState,
    /// Leases of loads, serves and checks.
    pub(crate) leases: u32,
    pub(super) entry: EntryIndex,
    pub(super) checksums: ChecksumRow,
    pub(crate) place: RegionSlot,
    pub(crate) size_class: SizeClassId,
    pub(crate) copy_state: CopyState,
    /// Position in the eviction order once the block is saved.
    pub(crate) position: EvictionPosition,
}

/// State of a frame; the module describes the transitions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FrameState {
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

/// Result of the last check of the bytes in a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CopyState {
    /// No check has found a difference.
    Trusted,
    /// A check is in progress.
    Checking,
    /// Damaged, and still in DRAM because a write reads the slot.
    Damaged,
}

/// Position of a saved block's DRAM copy in the eviction order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum EvictionPosition {
    /// Evicted last: the block is used on this node.
    Last,
    /// Evicted first in its class: only the replica on the device was requested, so it must not displace
    /// other blocks.
    First,
}

/// Table of all frames.
#[derive(Debug, Default)]
pub(crate) struct Frames {
    frames: Vec<Frame>,
    pub(super) free: Vec<FrameIndex>,
    pub(super) checksums: Checksums,
    pub(super) read_leases: u64,
}

pub(super) const NO_ENTRY: EntryIndex = EntryIndex(u32::MAX);

const _: () = assert!(size_of::<Frame>() == 28, "memory per resident block is part of the design");
const _: () = assert!(size_of::<Frame>() + size_of::<super::index::Entry>() <= 60);

impl FrameIndex {
    /// Value that stands for no frame.
    pub(crate) const NONE: FrameIndex = FrameIndex(u32::MAX);
}

impl Frame {
    /// Returns the index entry whose block is in this frame.
    pub(crate) fn entry(&self) -> Option<EntryIndex> {
        (self.entry != NO_ENTRY).then_some(self.entry)
    }

    pub(crate) fn set_entry(&mut self, entry: Option<EntryIndex>) {
        self.entry = entry.unwrap_or(NO_ENTRY);
    }

    /// Whether the checksums of the block in the slot are known.
    pub(crate) fn has_checksums(&self) -> bool {
        self.checksums != ChecksumRow::UNKNOWN
    }
}

impl Frames {
    pub(crate) fn get(&self, frame: FrameIndex) -> &Frame {
        &self.frames[frame.0 as usize]
    }

    pub(crate) fn get_mut(&mut self, frame: FrameIndex) -> &mut Frame {
        &mut self.frames[frame.0 as usize]
    }

    /// Number of leases on all frames.
    pub(crate) fn read_leases(&self) -> u64 {
        self.read_leases
    }

    /// Number of checksum rows in use.
    pub(crate) fn checksum_rows(&self) -> usize {
        self.checksums.len()
    }

    /// Iterates all frames in use.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (FrameIndex, &Frame)> {
        let in_use = |(_, frame): &(usize, &Frame)| frame.state != FrameState::Vacant;
        self.frames.iter().enumerate().filter(in_use).map(|(at, frame)| (FrameIndex(at as u32), frame))
    }

    pub(super) fn insert(&mut self, frame: Frame) -> FrameIndex {
        if let Some(index) = self.free.pop() {
            self.frames[index.0 as usize] = frame;
            return index;
        }
        self.frames.push(frame);
        FrameIndex(self.frames.len() as u32 - 1)
    }
}
