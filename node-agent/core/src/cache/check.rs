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

use reprise_policy::BlockKey;

use crate::cache::Cache;
use crate::cache::frames::{CopyState, FrameIndex, FrameState};
use crate::cache::index::Dram;
use crate::context::Context;
use crate::effect::{BlockCheck, CheckId, Diagnostic, Effect};
use crate::event::Integrity;
use crate::limits::CHECKS_MAX;
use crate::slab::SlabId;

impl Cache {
    /// Checks a block that a peer accepted and has not made durable in time.
    pub(crate) fn check_own_copy(&mut self, cx: &mut Context, key: &BlockKey) {
        let state = self.index.find(key).map(|entry| self.index.entry(entry));
        if let Some(Dram::Resident(frame)) = state.map(|state| state.dram()) {
            self.begin_check(cx, frame);
        }
    }

    /// Handles the result of a check.
    pub(crate) fn checked(&mut self, cx: &mut Context, id: SlabId, integrity: Integrity) {
        let Some(lease) = self.checks.remove(id) else { return };
        let frame = lease.frame();
        if self.frames.get(frame).copy_state == CopyState::Checking {
            let copy_state =
                if integrity == Integrity::Damaged { CopyState::Damaged } else { CopyState::Trusted };
            self.frames.get_mut(frame).copy_state = copy_state;
            if copy_state == CopyState::Damaged {
                self.report_damaged(cx, frame);
                self.drop_if_damaged(frame);
            }
        }
        self.release(lease);
    }

    pub(crate) fn begin_check(&mut self, cx: &mut Context, frame: FrameIndex) {
        let state = self.frames.get(frame);
        let findable = matches!(state.state, FrameState::Clean | FrameState::Unsaved(_));
        if !findable || state.copy_state != CopyState::Trusted || self.checks.len() >= CHECKS_MAX {
            return;
        }
        let layout = self.sizes.get(state.size_class).layout;
        self.frames.get_mut(frame).copy_state = CopyState::Checking;
        let lease = self.lease(frame);
        let check = CheckId(self.checks.insert(lease).0);
        let (slot, checksums) = (self.frame_slot(frame), self.checksums(frame).into());
        cx.emit(Effect::CheckBlock(BlockCheck { check, slot, layout, checksums }));
    }

    pub(super) fn report_damaged(&mut self, cx: &mut Context, frame: FrameIndex) {
        self.counters.dram_corrupt_blocks += 1;
        let slot = self.frame_slot(frame);
        if let Some(entry) = self.frames.get(frame).entry() {
            let key = self.index.entry(entry).key();
            cx.emit(Effect::Diagnostic(Diagnostic::CorruptMemory { slot, key }));
        }
    }
}
