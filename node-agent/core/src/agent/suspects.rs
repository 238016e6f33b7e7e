//! Blocks in DRAM of which an engine's verified copy did not match.
//!
//! Whatever maps a region for writing can scribble on what was committed in it, and memory can fail. The copy of such a
//! block fails in every engine until it leaves DRAM, which a hot block never does. So the engine says what it has seen,
//! and the agent looks for itself: an engine's word alone must not take a block from the others.
//!
//! ```text
//! Trusted ──an engine suspects it──▶ Checking ──intact, or could not be looked at──▶ Trusted
//!                                       └──damaged──▶ Damaged, dropped as soon as no write reads the slot
//! ```
//!
//! * The check holds a lease: the slot stays what it was while it is read.
//! * A dropped block is found where else it is: on NVMe, where reading verifies it, or on a peer. Whoever holds the
//!   damaged copy keeps it until the release.
//! * A block that is not saved yet stays in DRAM until its write has ended, because the write reads the slot. What is
//!   written may be damaged too, which the next read of it finds.
//! * A commit of a block that is doubted takes its place at once, unless a write reads the slot: whoever could not use the
//!   block has computed it anew.
//!
//! A peer that is sent a damaged block cannot say so. What a peer has taken and has not made durable within its time is
//! therefore looked at too: it might never come about otherwise, and a drain never end.
//!
//! Deliberately absent: asking peers to check. A peer that sends a damaged block loses the race for the next one only.

use reprise_policy::eviction::EntryIndex;
use reprise_policy::{BlockKey, SessionId, Tier};

use super::AgentCore;
use super::frames::{FrameIndex, FrameState};
use super::index::Dram;
use super::limits::CHECKS_MAX;
use super::loads::LoadBlock;
use super::slab::SlabId;
use crate::effect::{BlockCheck, Change, CheckId, Effect, LoadId, Reply, Report};
use crate::event::{Integrity, RequestId};

/// What is thought of the bytes in a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Doubt {
    /// They are what was committed.
    Trusted,
    /// A check is under way.
    Checking,
    /// They are not; a write reads the slot.
    Damaged,
}

impl AgentCore {
    /// Copies of these blocks of a load did not match their checksums.
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

    /// A peer has taken a block, and nothing has come of it.
    pub(super) fn doubt_own_copy(&mut self, key: &BlockKey) {
        let state = self.index.find(key).map(|entry| self.index.entry(entry));
        if let Some(Dram::Resident(frame)) = state.map(|state| state.dram()) {
            self.begin_check(frame);
        }
    }

    /// A check has ended.
    pub(super) fn checked(&mut self, id: SlabId, integrity: Integrity) {
        let Some(frame) = self.checks.remove(id) else { return };
        if self.frames.get(frame).doubt == Doubt::Checking {
            let doubt = if integrity == Integrity::Damaged { Doubt::Damaged } else { Doubt::Trusted };
            self.frames.get_mut(frame).doubt = doubt;
            if doubt == Doubt::Damaged {
                self.report_damaged(frame);
                self.drop_if_damaged(frame);
            }
        }
        self.unlease(frame);
    }

    /// Drops a damaged block from DRAM, unless a write still reads its slot.
    pub(super) fn drop_if_damaged(&mut self, frame: FrameIndex) {
        let state = self.frames.get(frame);
        if state.doubt != Doubt::Damaged || state.state != FrameState::Clean {
            return;
        }
        if let Some(entry) = state.entry() {
            self.detach_resident(entry, frame);
            self.forget_if_nowhere(entry);
        }
    }

    /// Takes a doubted copy out of the way of a commit of the same block, unless a write reads it.
    pub(super) fn make_way(&mut self, entry: EntryIndex) {
        let Dram::Resident(frame) = self.index.entry(entry).dram() else { return };
        let state = self.frames.get(frame);
        if state.doubt != Doubt::Trusted && state.state == FrameState::Clean {
            self.detach_resident(entry, frame);
        }
    }

    /// The block is no longer found in a clean frame; the frame goes with its last lease. The caller sees to it that the
    /// block is somewhere, or forgotten.
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
        if !findable || state.doubt != Doubt::Trusted || self.checks.len() >= CHECKS_MAX {
            return;
        }
        let layout = self.shapes.get(state.shape).layout;
        self.frames.get_mut(frame).doubt = Doubt::Checking;
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
            self.emit(Effect::Report(Report::CorruptMemory { slot, key }));
        }
    }
}
