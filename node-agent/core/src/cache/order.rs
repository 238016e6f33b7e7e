//! Eviction order within a chain: the tail is evicted before the head.
//!
//! A match finds only the leading run of a chain, so a block whose parent was evicted uses space and is never
//! found. In the least-recently-used order, a parent is therefore always newer than its children:
//!
//! ```text
//! match, load, read by a peer   blocks are touched from the last to the first     oldest … b3 b2 b1 b0  newest
//! commit                        each block enters immediately before its parent   … c1 c0 b3 b2 b1 b0
//! ```
//!
//! Both are O(1) per block. A commit does not make a chain newer, because the match and the load before it
//! did.
//!
//! Devices finish their batches in any order, so a block may become durable before its parent. It then enters
//! before its nearest durable ancestor, and the parent later enters between the two. A block whose parent is
//! leased enters as the newest; the end of the lease makes the parent newer still.
//!
//! Out of scope: parents in the index. Blocks offered by peers and blocks found by recovery enter without a
//! parent, in order of arrival, until a match or load touches their chain.

use reprise_policy::eviction::EntryIndex;

use crate::cache::Cache;
use crate::cache::arena::RegionSlot;
use crate::cache::frames::{FrameIndex, FrameState};
use crate::cache::index::Dram;
use crate::event::Priority;

impl Cache {
    /// Marks consecutive blocks of a chain as used, in both tiers.
    pub(crate) fn touch_chain(&mut self, entries: impl DoubleEndedIterator<Item = EntryIndex>) {
        for entry in entries.rev() {
            if let Dram::Resident(frame) = self.index.entry(entry).dram() {
                self.arena.touch(frame);
            }
            self.devices.touch(entry);
        }
    }

    /// Whether a block is in an eviction order.
    pub(crate) fn is_ordered(&self, entry: EntryIndex) -> bool {
        self.is_in_nvme_order(entry) || self.evictable_frame(self.index.entry(entry).dram()).is_some()
    }

    /// Whether a block is evictable from its device: neither being read nor pinned.
    pub(super) fn is_in_nvme_order(&self, entry: EntryIndex) -> bool {
        let state = self.index.entry(entry);
        let is_read = matches!(state.dram(), Dram::Filling(_));
        state.stored().is_some_and(|stored| !is_read && !self.devices.is_pinned(stored))
    }

    /// Moves a block immediately before its nearest saved ancestor in its eviction orders, or makes it the
    /// newest if it has none.
    pub(crate) fn order_before(&mut self, entry: EntryIndex, parent: Option<EntryIndex>) {
        let state = self.index.entry(entry);
        let (dram, class) = (state.dram(), state.class());
        let is_in_nvme_order = self.is_in_nvme_order(entry);
        let evictable = self.evictable_frame(dram);
        if !is_in_nvme_order && evictable.is_none() {
            return;
        }
        if is_in_nvme_order {
            let rank = self.nvme_rank(entry);
            match parent {
                Some(parent) => self.devices.order_before(entry, rank, parent),
                None => self.devices.touch(entry),
            }
        }
        let Some((frame, place)) = evictable else { return };
        match parent.map(|parent| self.index.entry(parent).dram()) {
            Some(Dram::Resident(parent)) => self.arena.order_before(place, frame, class, parent),
            Some(Dram::Absent | Dram::Filling(_)) | None => self.arena.touch(frame),
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
            let class = state.entry().map_or(0, |entry| self.index.entry(entry).class());
            self.arena.insert_oldest(state.place, frame, class);
        }
    }

    /// Raises the priority of a block. An evictable block moves to its new class, as the most recently used.
    /// The journal record keeps the old priority, which is in force again after a restart.
    pub(crate) fn raise_priority(&mut self, entry: EntryIndex, priority: Priority) {
        let before = self.index.entry(entry).class();
        self.index.entry_mut(entry).raise_priority(priority);
        let state = self.index.entry(entry);
        let class = state.class();
        if class == before {
            return;
        }
        let dram = state.dram();
        let is_read = matches!(dram, Dram::Filling(_));
        if state.stored().is_some() && !is_read {
            self.enter_nvme_order(entry);
        }
        if let Dram::Resident(index) = dram {
            let frame = self.frames.get(index);
            if frame.state == FrameState::Clean && frame.leases == 0 {
                let place = frame.place;
                self.arena.remove_evictable(place, index);
                self.arena.add_evictable(place, index, class);
            }
        }
    }
}
