//! Eviction order within a chain: the tail is evicted before the head.
//!
//! A match finds only the leading run of a chain, so a block whose parent was evicted uses space and is never
//! found. The eviction orders know chains ([`EvictionOrder`]): a block waits for its descendants in the tier.
//! Chains are learned from commits and matches:
//!
//! * A commit names the block before its first item, and the position of the first item.
//! * A match has consecutive blocks, and the position of the first one.
//!
//! A client that does not know a position leaves it out. Then it follows from the block before, if that is known here,
//! and else it stays unknown: no block gets a wrong place, because a place is final.
//!
//! The NVMe order is the one over index entries, so it keeps the chain of every block on this node. The order
//! of the arena is over frames; its links are derived when a block is read into DRAM, or touched.
//!
//! Policies by recency evict a tail first without waiting if a parent is always newer than its children:
//!
//! ```text
//! match, load, read by a peer   blocks are touched from the last to the first     oldest … b3 b2 b1 b0  newest
//! commit                        each block enters immediately before its parent   … c1 c0 b3 b2 b1 b0
//! ```
//!
//! A commit does not make a chain newer, because the match and the load before it did.
//!
//! Links have lower positions at their parents, so they form no cycle, even if clients send wrong chains. A block gets its
//! position and its parent once. Links do not cross size classes, hence not tenants.
//!
//! Out of scope: chains in the pool's format. Blocks offered by peers and blocks found by recovery have no chain
//! until a match finds them.
//!
//! [`EvictionOrder`]: reprise_policy::eviction::EvictionOrder

use reprise_policy::BlockKey;
use reprise_policy::eviction::EntryIndex;

use crate::cache::Cache;
use crate::cache::arena::RegionSlot;
use crate::cache::frames::{FrameIndex, FrameState};
use crate::cache::index::Dram;
use crate::event::Priority;

/// Place of a committed block in its chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ChainPlace {
    /// Block before it; `None` for the first one, or if the client does not know it.
    pub(crate) parent: Option<BlockKey>,
    /// Number of blocks before it; `None` if the client does not know it.
    pub(crate) position: Option<u32>,
}

impl Cache {
    /// Marks consecutive blocks of a chain as used, in both tiers.
    pub(crate) fn touch_chain(&mut self, entries: impl DoubleEndedIterator<Item = EntryIndex>) {
        let entries: Vec<EntryIndex> = entries.rev().collect();
        let mut frames = Vec::with_capacity(entries.len());
        for entry in &entries {
            if let Dram::Resident(frame) = self.index.entry(*entry).dram() {
                self.link_frame(*entry, frame);
                frames.push(EntryIndex(frame.0));
            }
        }
        self.arena.touch_run(&frames);
        self.devices.touch_run(&entries);
    }

    /// Learns the chain of the blocks that a match found, and marks them as used. The first has this position, if
    /// the client knows it; the parts of a block for all ranks follow each other.
    pub(crate) fn touch_matched(&mut self, entries: &[EntryIndex], ranks: usize, position: Option<u32>) {
        for (at, entry) in entries.iter().enumerate() {
            let parent = at.checked_sub(ranks).map(|parent| entries[parent]);
            let position = match position {
                Some(first) => Some(first.saturating_add((at / ranks) as u32)),
                None => parent.and_then(|parent| self.position_after(parent)),
            };
            self.learn_chain(*entry, parent, position);
        }
        self.touch_chain(entries.iter().copied());
    }

    /// Learns the chain of a committed block.
    pub(crate) fn learn_committed(&mut self, entry: EntryIndex, place: ChainPlace) {
        let parent = place.parent.and_then(|parent| self.index.find(&parent));
        let position = place.position.or_else(|| self.position_after(parent?));
        self.learn_chain(entry, parent, position);
    }

    /// Position of the block after another one in its chain, if known.
    fn position_after(&self, parent: EntryIndex) -> Option<u32> {
        self.index.entry(parent).position().map(|position| position.saturating_add(1))
    }

    fn learn_chain(&mut self, entry: EntryIndex, parent: Option<EntryIndex>, position: Option<u32>) {
        if let Some(position) = position {
            self.index.entry_mut(entry).learn_position(position);
        }
        let Some(parent) = parent.filter(|_| self.devices.parent(entry).is_none()) else { return };
        let (state, before) = (self.index.entry(entry), self.index.entry(parent));
        let is_behind = before.position().zip(state.position()).is_some_and(|(before, own)| before < own);
        if is_behind && state.size_class() == before.size_class() {
            self.devices.link(entry, parent);
            if let Dram::Resident(frame) = state.dram() {
                self.link_frame(entry, frame);
            }
        }
    }

    /// Records that a block is readable in a frame.
    pub(super) fn enter_dram(&mut self, entry: EntryIndex, frame: FrameIndex) {
        self.arena.attach(self.frames.get(frame).place, frame);
        self.link_frame(entry, frame);
    }

    /// Links the frame of a block to the one of its parent, if that is in DRAM.
    fn link_frame(&mut self, entry: EntryIndex, frame: FrameIndex) {
        if self.arena.is_linked(frame) {
            return;
        }
        let parent = self.devices.parent(entry).map(|parent| self.index.entry(parent).dram());
        if let Some(Dram::Resident(parent)) = parent {
            self.arena.link(frame, parent);
        }
    }

    /// Counts a use of a block by a request, in both tiers.
    pub(super) fn count_use(&mut self, entry: EntryIndex) {
        if let Dram::Resident(frame) = self.index.entry(entry).dram() {
            self.arena.used(frame);
        }
        self.devices.used(entry);
        self.note_use(entry);
    }

    /// Whether a block is evictable from its device: neither being read, nor pinned, nor retained.
    pub(super) fn is_in_nvme_order(&self, entry: EntryIndex) -> bool {
        self.is_unused_on_device(entry) && !self.retained.contains(entry)
    }

    /// Whether a block on a device is neither being read nor pinned.
    pub(super) fn is_unused_on_device(&self, entry: EntryIndex) -> bool {
        let state = self.index.entry(entry);
        let is_read = matches!(state.dram(), Dram::Filling(_));
        state.stored().is_some_and(|stored| !is_read && !self.devices.is_pinned(stored))
    }

    /// Moves a block before its parent in its eviction orders, where it and its parent are evictable.
    pub(crate) fn settle(&mut self, entry: EntryIndex) {
        self.devices.settle(entry);
        if let Some((frame, _)) = self.evictable_frame(self.index.entry(entry).dram()) {
            self.arena.settle(frame);
        }
    }

    /// Returns the frame of a block in DRAM, if it is evictable.
    pub(super) fn evictable_frame(&self, dram: Dram) -> Option<(FrameIndex, RegionSlot)> {
        let Dram::Resident(frame) = dram else { return None };
        let state = self.frames.get(frame);
        (state.state == FrameState::Clean && state.leases == 0).then_some((frame, state.place))
    }

    /// Makes a clean, unleased frame the next victim of its class.
    pub(crate) fn evict_first(&mut self, frame: FrameIndex) {
        let state = self.frames.get(frame);
        if state.state == FrameState::Clean && state.leases == 0 {
            self.arena.put_first(frame);
        }
    }

    /// Raises the priority of a block. An evictable block moves to its new class, as the most recently used.
    /// The journal record keeps the old priority, which is in force again after a restart.
    pub(crate) fn raise_priority(&mut self, entry: EntryIndex, priority: Priority) {
        let before = self.eviction_class(entry);
        self.index.entry_mut(entry).raise_priority(priority);
        let after = self.eviction_class(entry);
        if before != after {
            self.reclass(entry, after);
        }
    }
}
