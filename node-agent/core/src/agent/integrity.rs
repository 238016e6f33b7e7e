//! Integrity checks of blocks in DRAM whose copy failed verification in an engine.
//!
//! A process that maps a region for writing can overwrite committed blocks, and memory can fail. Copies of
//! such a block fail in every engine until the block leaves DRAM, which a hot block never does. Engines
//! therefore report the failure. The agent checks the block itself, because a report alone must not remove a
//! block that other engines use.
//!
//! ```text
//! Trusted ──an engine reports a failed copy──▶ Checking ──intact, or not checked──▶ Trusted
//!                                               └──damaged──▶ Damaged, dropped when no write reads the slot
//! ```
//!
//! * A check holds a lease, so that the slot does not change while it is read.
//! * After the copy is dropped, the block is read from NVMe, where reading verifies it, or fetched from a
//!   peer. Loads that hold the damaged copy keep it until they release it.
//! * An unsaved block stays in DRAM until its write has ended, because the write reads the slot. The written
//!   block may be damaged too; its next read detects that.
//! * A commit of a block whose copy is suspect replaces the copy at once, unless a write reads the slot: an
//!   engine that could not use the block has recomputed it.
//!
//! A peer that receives a damaged block cannot report that. If a peer accepts a block and does not make it
//! durable in time, the block is therefore checked as well. Otherwise its replica might never succeed, and a
//! drain never end.
//!
//! Out of scope: requesting checks from peers.

use reprise_policy::eviction::EntryIndex;
use reprise_policy::{BlockKey, SessionId, Tier};

use super::AgentCore;
use super::frames::{FrameIndex, FrameState};
use super::index::Dram;
use super::limits::CHECKS_MAX;
use super::loads::LoadBlock;
use super::slab::SlabId;
use crate::effect::{BlockCheck, Change, CheckId, Diagnostic, Effect, LoadId, Reply};
use crate::event::{Integrity, RequestId};

/// Result of the last check of the bytes in a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CopyState {
    /// No check has found a difference.
    Trusted,
    /// A check is in progress.
    Checking,
    /// Damaged, and still in DRAM because a write reads the slot.
    Damaged,
}

impl AgentCore {
    /// Checks blocks of a load whose copies did not match their checksums.
    pub(super) fn suspect(&mut self, session: SessionId, request: RequestId, load: LoadId, blocks: &[u32]) {
        let Some(held) = self.loads.get(SlabId(load.0)).filter(|load| load.session == session) else {
            let text = format!("this session holds no load {}", load.0);
            return self.reply(session, request, Reply::BadRequest(text));
        };
        let ready = |block: &u32| match held.blocks.get(*block as usize) {
            Some(LoadBlock::Ready { frame, .. }) => Some(*frame),
            _ => None,
        };
        let frames: Vec<FrameIndex> = blocks.iter().filter_map(ready).collect();
        self.counters.suspect_blocks += frames.len() as u64;
        for frame in frames {
            self.begin_check(frame);
        }
        self.reply(session, request, Reply::Suspected);
    }

    /// Checks a block that a peer accepted and has not made durable in time.
    pub(super) fn check_own_copy(&mut self, key: &BlockKey) {
        let state = self.index.find(key).map(|entry| self.index.entry(entry));
        if let Some(Dram::Resident(frame)) = state.map(|state| state.dram()) {
            self.begin_check(frame);
        }
    }

    /// Handles the result of a check.
    pub(super) fn checked(&mut self, id: SlabId, integrity: Integrity) {
        let Some(frame) = self.checks.remove(id) else { return };
        if self.frames.get(frame).copy_state == CopyState::Checking {
            let copy_state =
                if integrity == Integrity::Damaged { CopyState::Damaged } else { CopyState::Trusted };
            self.frames.get_mut(frame).copy_state = copy_state;
            if copy_state == CopyState::Damaged {
                self.report_damaged(frame);
                self.drop_if_damaged(frame);
            }
        }
        self.unlease(frame);
    }

    /// Drops a damaged block from DRAM, unless a write still reads its slot.
    pub(super) fn drop_if_damaged(&mut self, frame: FrameIndex) {
        let state = self.frames.get(frame);
        if state.copy_state != CopyState::Damaged || state.state != FrameState::Clean {
            return;
        }
        if let Some(entry) = state.entry() {
            self.detach_resident(entry, frame);
            self.remove_if_absent(entry);
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

    /// Detaches a block from its clean frame, which is freed with its last lease. The caller must ensure that
    /// the block has another copy, or remove it from the index.
    fn detach_resident(&mut self, entry: EntryIndex, frame: FrameIndex) {
        self.index.entry_mut(entry).set_dram(Dram::Absent);
        self.resident_blocks -= 1;
        self.replica_changed(entry, Tier::Dram, Change::Removed);
        self.frames.get_mut(frame).set_entry(None);
        self.set_frame_state(frame, FrameState::Orphan);
    }

    fn begin_check(&mut self, frame: FrameIndex) {
        let state = self.frames.get(frame);
        let findable = matches!(state.state, FrameState::Clean | FrameState::Unsaved(_));
        if !findable || state.copy_state != CopyState::Trusted || self.checks.len() >= CHECKS_MAX {
            return;
        }
        let layout = self.size_classes.get(state.size_class).layout;
        self.frames.get_mut(frame).copy_state = CopyState::Checking;
        self.lease(frame);
        let check = CheckId(self.checks.insert(frame).0);
        let (slot, checksums) = (self.frame_slot(frame), self.checksums(frame).into());
        self.emit(Effect::CheckBlock(BlockCheck { check, slot, layout, checksums }));
    }

    fn report_damaged(&mut self, frame: FrameIndex) {
        self.counters.dram_corrupt_blocks += 1;
        let slot = self.frame_slot(frame);
        if let Some(entry) = self.frames.get(frame).entry() {
            let key = self.index.entry(entry).key();
            self.emit(Effect::Diagnostic(Diagnostic::CorruptMemory { slot, key }));
        }
    }
}
