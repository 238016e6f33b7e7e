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

use reprise_policy::BlockKey;
use reprise_policy::eviction::EntryIndex;

use super::AgentCore;
use super::arena::RegionSlot;
use super::frames::{FrameIndex, FrameState};
use super::index::Dram;
use super::limits::BATCH_BLOCKS_MAX;

/// Maximum unsaved ancestors to skip: the blocks by which other devices may lag behind, a batch on each of a
/// few.
const ANCESTORS_MAX: usize = 4 * BATCH_BLOCKS_MAX;

impl AgentCore {
    /// Marks consecutive blocks of a chain as used, in both tiers.
    pub(super) fn touch_chain(&mut self, entries: impl DoubleEndedIterator<Item = EntryIndex>) {
        for entry in entries.rev() {
            if let Dram::Resident(frame) = self.index.entry(entry).dram() {
                self.arena.touch(frame);
            }
            self.devices.touch(entry);
        }
    }

    /// Moves a block immediately before its parent in its eviction orders, or makes it the newest if it has
    /// none.
    pub(super) fn order_before_parent(&mut self, entry: EntryIndex, parent: Option<BlockKey>) {
        let state = self.index.entry(entry);
        let (dram, class) = (state.dram(), state.class());
        let is_in_nvme_order = state.stored().is_some() && !matches!(dram, Dram::Filling(_));
        let evictable = self.evictable_frame(dram);
        if !is_in_nvme_order && evictable.is_none() {
            return;
        }
        let parent = self.nearest_saved(parent);
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
    fn evictable_frame(&self, dram: Dram) -> Option<(FrameIndex, RegionSlot)> {
        let Dram::Resident(frame) = dram else { return None };
        let state = self.frames.get(frame);
        (state.state == FrameState::Clean && state.leases == 0).then_some((frame, state.place))
    }

    /// Returns a block or, if it is unsaved, its nearest saved ancestor.
    fn nearest_saved(&self, key: Option<BlockKey>) -> Option<EntryIndex> {
        let mut entry = self.index.find(&key?)?;
        // Parents that clients send may form a cycle.
        for _ in 0..ANCESTORS_MAX {
            let Dram::Resident(frame) = self.index.entry(entry).dram() else { break };
            let is_saved = !matches!(self.frames.get(frame).state, FrameState::Unsaved(_));
            if is_saved {
                break;
            }
            entry = self.index.find(&self.parent_of_unsaved(frame)?)?;
        }
        Some(entry)
    }
}
