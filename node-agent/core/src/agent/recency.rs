//! The order of eviction within a chain: the tail goes before the head.
//!
//! A match finds the leading run of a chain only, so a block whose parent was evicted takes room and is never found. Within
//! least-recently-used order a parent is therefore always newer than its children:
//!
//! ```text
//! match, load, read by a peer   blocks are touched from the last to the first     oldest … b3 b2 b1 b0  newest
//! commit                        each block enters immediately before its parent   … c1 c0 b3 b2 b1 b0
//! ```
//!
//! Both are O(1) a block. A commit does not make a chain newer: the match and the load before it have done so.
//!
//! Devices end their batches in any order, so a block may become durable before its parent. It then enters before its
//! nearest ancestor that is durable, and the parent comes to lie between the two. A block whose parent is leased enters as the
//! newest; the end of the lease makes the parent newer still.
//!
//! Deliberately absent: parents in the index. Blocks that a peer has offered and blocks found by recovery enter without
//! one, in the order in which they come, until a match or load touches their chain.

use reprise_policy::BlockKey;
use reprise_policy::eviction::EntryIndex;

use super::AgentCore;
use super::frames::FrameState;
use super::index::Dram;

impl AgentCore {
    /// Notes a use of consecutive blocks of a chain, in both tiers.
    pub(super) fn touch_chain(&mut self, entries: impl DoubleEndedIterator<Item = EntryIndex>) {
        for entry in entries.rev() {
            if let Dram::Resident(frame) = self.index.entry(entry).dram() {
                self.arena.touch(frame);
            }
            self.devices.touch(entry);
        }
    }

    /// Moves a block immediately before its parent in the orders that it is in; without one it becomes the newest.
    pub(super) fn order_before_parent(&mut self, entry: EntryIndex, parent: Option<BlockKey>) {
        let parent = self.nearest_saved(parent);
        let state = self.index.entry(entry);
        let (dram, class) = (state.dram(), state.class());
        let is_in_nvme_order = state.stored().is_some() && !matches!(dram, Dram::Filling(_));
        if is_in_nvme_order {
            let standing = self.nvme_standing(entry);
            match parent {
                Some(parent) => self.devices.order_before(entry, standing, parent),
                None => self.devices.touch(entry),
            }
        }
        let Dram::Resident(frame) = dram else { return };
        let state = self.frames.get(frame);
        if state.state != FrameState::Clean || state.leases > 0 {
            return;
        }
        let place = state.place;
        match parent.map(|parent| self.index.entry(parent).dram()) {
            Some(Dram::Resident(parent)) => self.arena.order_before(place, frame, class, parent),
            Some(Dram::Absent | Dram::Filling(_)) | None => self.arena.touch(frame),
        }
    }

    /// A block, or its nearest ancestor that does not wait to be saved.
    fn nearest_saved(&self, key: Option<BlockKey>) -> Option<EntryIndex> {
        let mut entry = self.index.find(&key?)?;
        // More steps than blocks can wait: parents that clients name may form a circle.
        for _ in 0..self.writeback.unsaved.len() {
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
