//! Loads: the blocks that a session requested, their state, and what the session knows of it.
//!
//! ```text
//!             a source is found             verified                          Release
//!  Unplaced ────────────────────▶ Waiting ────────────▶ Ready (leased) ────────────────▶
//!     │  ▲                          │  │ failed or late, after the answer
//!     │  └── failed, before the ────┘  └──────────────▶ Held (leased, failed) ─────────▶
//!     │      answer: try another source
//!     └── no source, no room, late ──▶ Lost
//! ```
//!
//! A load is answered once the first layer of every block is ready, or the block is lost. At the deadline,
//! every incomplete block counts as lost (before the answer) or failed (after it). The answer is therefore
//! sent by the deadline.
//!
//! A slot in an answer stays leased until `Release`, even if its block failed. The lease ends early when the
//! load exceeds its maximum hold time: all its blocks then count as failed, and other blocks may use the
//! slots. An engine that reads such a slot finds bytes that do not match the checksums in the answer.

use std::time::Duration;

use reprise_policy::eviction::EntryIndex;
use reprise_policy::{BlockKey, SessionId, Tick};

use crate::agent::block_sources::MissingBlock;
use crate::agent::progress::LayerProgress;
use crate::agent::{AgentCore, Timer};
use crate::cache::{FrameIndex, Lease, Read, SizeClassId};
use crate::effect::{Effect, LoadId, LoadedBlock, LossReason, ProgressEntry, ProgressUpdate, Reply, Source};
use crate::event::{LoadRequest, RequestId, Scope};
use crate::limits::{LOAD_BLOCKS_MAX, LOAD_DEADLINE_MAX};
use crate::slab::SlabId;
use crate::waiter::{WaitId, WaiterId, WaiterOwner};

/// A load of a session.
#[derive(Debug)]
pub(crate) struct Load {
    pub(crate) session: SessionId,
    pub(crate) size_class: SizeClassId,
    pub(crate) keys: Box<[BlockKey]>,
    pub(crate) blocks: Box<[LoadBlock]>,
    pub(crate) progress: LayerProgress,
    pub(crate) scope: Scope,
    pub(crate) read_bytes: u64,
    /// Deadline of the blocks; once they are complete, the end of the hold time.
    pub(crate) deadline: Tick,
    pub(crate) stage: Stage,
    request: RequestId,
    entry: ProgressEntry,
}

/// One block of a load.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum LoadBlock {
    /// No fill was started for it.
    Unplaced,
    /// A fill is in progress, with `layers` verified layers.
    Waiting { lease: Lease<Read>, wait: WaitId, source: Source, layers: u16 },
    /// Complete.
    Ready { lease: Lease<Read>, source: Source },
    /// Failed after the answer.
    Held { lease: Lease<Read> },
    /// Failed before the answer.
    Lost(LossReason),
}

/// State of a load as the session knows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stage {
    /// Not answered yet.
    Placing,
    /// Answered with the source of each block.
    Answered {
        /// Number of layers reported as ready.
        layers: u32,
    },
    /// All blocks are complete or failed. The session holds the load until its deadline.
    Complete,
    /// The hold time has passed, and all leases were revoked.
    Expired,
}

const _: () = assert!(size_of::<LoadBlock>() <= 12, "8,192 blocks a load, 64 loads a session");

/// Id of a block that waits.
pub(crate) fn waiter(load: SlabId, block: u32) -> WaiterId {
    WaiterId { object: load.0, block, owner: WaiterOwner::Load }
}

impl Load {
    /// Takes the lease of a block that waits, with the layers it had; the block is unplaced then.
    pub(crate) fn detach(&mut self, block: u32) -> Option<(Lease<Read>, u32)> {
        let block = &mut self.blocks[block as usize];
        match std::mem::replace(block, LoadBlock::Unplaced) {
            LoadBlock::Waiting { lease, layers, .. } => Some((lease, u32::from(layers))),
            other => {
                *block = other;
                None
            }
        }
    }

    /// Records verified layers of a block that waits.
    pub(crate) fn advance(&mut self, block: u32, (from, to): (u32, u32), source: Source, is_whole: bool) {
        let state = &mut self.blocks[block as usize];
        if let LoadBlock::Waiting { source: known, layers, .. } = state {
            (*known, *layers) = (source, to as u16);
            self.progress.advance(from, to);
        }
        if is_whole && let Some((lease, _)) = self.detach(block) {
            self.blocks[block as usize] = LoadBlock::Ready { lease, source };
        }
    }
}

impl AgentCore {
    /// Starts a load for a session.
    pub(crate) fn load(
        &mut self,
        session: SessionId,
        request: RequestId,
        wanted: LoadRequest,
        received: Tick,
    ) {
        let Some(state) = self.sessions.get(&session) else { return };
        let size_class = state.size_class;
        if wanted.keys.len() > LOAD_BLOCKS_MAX {
            let text = format!("{} keys in one load: send at most {LOAD_BLOCKS_MAX}", wanted.keys.len());
            return self.reply(session, request, Reply::BadRequest(text));
        }
        let Some(entry) = state.free_entry() else {
            let message = "the session holds the maximum number of loads: release one".to_owned();
            let retry_after = self.settings.retry_after;
            return self.reply(session, request, Reply::Busy { message, retry_after });
        };
        if let Err(too_large) = self.cache.check_block_size(size_class) {
            return self.reply(session, request, Reply::BadRequest(too_large));
        }
        let deadline = self.deadline_of(&wanted, received);
        let id = self.begin_load((session, request, entry), wanted, deadline);
        let blocks = self.loads.get(id).map_or(0, |load| load.blocks.len() as u32);
        let missing = self.attach_local(id, (0..blocks).map(MissingBlock::anywhere).collect());
        self.fetch_remote(id, missing, LossReason::Miss);
        self.publish_progress(id);
    }

    /// Releases a load of a session.
    pub(crate) fn release(&mut self, session: SessionId, request: RequestId, load: LoadId) {
        let id = SlabId(load.0);
        if self.loads.get(id).is_none_or(|load| load.session != session) {
            let text = format!("this session holds no load {}", load.0);
            return self.reply(session, request, Reply::BadRequest(text));
        }
        self.end_load(id);
        self.reply(session, request, Reply::Released);
    }

    /// Handles the deadline of a load.
    pub(crate) fn expire_load(&mut self, id: SlabId) {
        let Some(load) = self.loads.get(id) else { return };
        if load.stage == Stage::Complete {
            return self.revoke_load(id);
        }
        let answered = load.stage != Stage::Placing;
        for at in 0..load.blocks.len() as u32 {
            let Some(load) = self.loads.get_mut(id) else { return };
            match load.blocks[at as usize] {
                LoadBlock::Unplaced => self.lose_block(id, at, LossReason::Deadline),
                LoadBlock::Waiting { wait, .. } => {
                    let Some((lease, layers)) = load.detach(at) else { continue };
                    self.transfer.detach(wait, waiter(id, at));
                    let held = if answered {
                        LoadBlock::Held { lease }
                    } else {
                        self.cache.release(lease);
                        LoadBlock::Lost(LossReason::Deadline)
                    };
                    self.counters.deadline_blocks += 1;
                    self.fail_block(id, at, layers, held);
                }
                LoadBlock::Ready { .. } | LoadBlock::Held { .. } | LoadBlock::Lost(_) => {}
            }
        }
        self.publish_progress(id);
    }

    /// Revokes a load that was held too long: its blocks fail, and its slots are released.
    fn revoke_load(&mut self, id: SlabId) {
        let Some(load) = self.loads.get_mut(id) else { return };
        load.stage = Stage::Expired;
        let (session, entry) = (load.session, load.entry);
        let lost = load.blocks.iter().map(|_| LoadBlock::Lost(LossReason::Deadline)).collect();
        let held = std::mem::replace(&mut load.blocks, lost);
        self.counters.expired_loads += 1;
        let used = self.entries_of(&held);
        for (block, state) in (0..).zip(held) {
            match state {
                LoadBlock::Ready { lease, .. } => {
                    self.cache.release(lease);
                    let update = ProgressUpdate::BlockFailed { block };
                    self.emit(Effect::Progress { session, entry, update });
                }
                LoadBlock::Held { lease } => self.cache.release(lease),
                LoadBlock::Waiting { .. } => unreachable!("no block of a complete load waits"),
                LoadBlock::Unplaced | LoadBlock::Lost(_) => {}
            }
        }
        self.cache.touch_chain(used.into_iter());
        self.emit(Effect::Progress { session, entry, update: ProgressUpdate::Done });
    }

    /// Returns the load's blocks that are in DRAM, in the order of the load.
    fn entries_of(&self, blocks: &[LoadBlock]) -> Vec<EntryIndex> {
        let frame = |block: &LoadBlock| match block {
            LoadBlock::Ready { lease, .. } => Some(lease.frame()),
            _ => None,
        };
        blocks.iter().filter_map(frame).filter_map(|frame| self.cache.frames.get(frame).entry()).collect()
    }

    /// Ends a load, on release or with its session, and releases all its leases.
    pub(crate) fn end_load(&mut self, id: SlabId) {
        let Some(load) = self.loads.remove(id) else { return };
        let used = self.entries_of(&load.blocks);
        for (at, block) in (0..).zip(load.blocks) {
            match block {
                LoadBlock::Waiting { lease, wait, .. } => {
                    self.transfer.detach(wait, waiter(id, at));
                    self.cache.release(lease);
                }
                LoadBlock::Ready { lease, .. } | LoadBlock::Held { lease } => self.cache.release(lease),
                LoadBlock::Unplaced | LoadBlock::Lost(_) => {}
            }
        }
        self.cache.touch_chain(used.into_iter());
        self.timers.clear(load.deadline, Timer::Load(id));
        if let Some(session) = self.sessions.get_mut(&load.session) {
            session.set_load(load.entry, None);
        }
    }

    /// Marks an unplaced block as lost.
    pub(crate) fn lose_block(&mut self, id: SlabId, block: u32, reason: LossReason) {
        let counter = match reason {
            LossReason::Miss => &mut self.counters.miss_blocks,
            LossReason::Failed => &mut self.counters.failed_blocks,
            LossReason::NoSpace => &mut self.counters.no_space_blocks,
            LossReason::Deadline => &mut self.counters.deadline_blocks,
        };
        *counter += 1;
        self.fail_block(id, block, 0, LoadBlock::Lost(reason));
    }

    /// Marks a block as failed that had some layers, and notifies the session if the load was answered.
    pub(crate) fn fail_block(&mut self, id: SlabId, block: u32, layers: u32, becomes: LoadBlock) {
        let Some(load) = self.loads.get_mut(id) else { return };
        load.blocks[block as usize] = becomes;
        load.progress.fail(layers);
        if load.stage != Stage::Placing {
            let (session, entry) = (load.session, load.entry);
            self.emit(Effect::Progress { session, entry, update: ProgressUpdate::BlockFailed { block } });
        }
    }

    /// Publishes the progress that the session does not know yet, and answers the load if it can be answered.
    pub(crate) fn publish_progress(&mut self, id: SlabId) {
        let Some(load) = self.loads.get_mut(id) else { return };
        let (ready, pending) = (load.progress.ready(), load.progress.pending());
        let (session, entry, deadline) = (load.session, load.entry, load.deadline);
        let (known, answer) = match load.stage {
            Stage::Placing if ready > 0 => (0, true),
            Stage::Placing | Stage::Complete | Stage::Expired => return,
            Stage::Answered { layers } => (layers, false),
        };
        load.stage = if pending == 0 { Stage::Complete } else { Stage::Answered { layers: ready } };
        if pending == 0 {
            load.deadline = self.now.after(self.settings.load_hold_timeout);
            self.timers.clear(deadline, Timer::Load(id));
            self.timers.set(load.deadline, Timer::Load(id));
        }
        if ready > known {
            let update = ProgressUpdate::Layers { layers: ready };
            self.emit(Effect::Progress { session, entry, update });
        }
        if pending == 0 {
            self.emit(Effect::Progress { session, entry, update: ProgressUpdate::Done });
        }
        if answer {
            self.answer_load(id);
        }
    }

    /// Deadline of a load. It counts from the receipt, and includes the time in the core's queue.
    fn deadline_of(&self, wanted: &LoadRequest, received: Tick) -> Tick {
        let span = match wanted.deadline {
            Duration::ZERO => self.settings.load_deadline_default,
            span => span,
        };
        received.min(self.now).after(span.min(LOAD_DEADLINE_MAX))
    }

    fn begin_load(
        &mut self,
        (session, request, entry): (SessionId, RequestId, ProgressEntry),
        wanted: LoadRequest,
        deadline: Tick,
    ) -> SlabId {
        let Some(state) = self.sessions.get_mut(&session) else { unreachable!("the caller has checked") };
        let size_class = state.size_class;
        let blocks = wanted.keys.len();
        let read_bytes = match wanted.read_bytes {
            0 => self.settings.read_bytes_default,
            bytes => bytes,
        };
        let load = Load {
            session,
            size_class,
            keys: wanted.keys.into_boxed_slice(),
            blocks: (0..blocks).map(|_| LoadBlock::Unplaced).collect(),
            progress: LayerProgress::new(self.cache.sizes.get(size_class).layout.layers(), blocks as u32),
            scope: wanted.scope,
            read_bytes,
            deadline,
            stage: Stage::Placing,
            request,
            entry,
        };
        let id = self.loads.insert(load);
        state.set_load(entry, Some(id));
        self.timers.set(deadline, Timer::Load(id));
        self.counters.loads += 1;
        self.counters.load_blocks += blocks as u64;
        let update = ProgressUpdate::Begin { load: LoadId(id.0) };
        self.emit(Effect::Progress { session, entry, update });
        id
    }

    fn answer_load(&mut self, id: SlabId) {
        let Some(load) = self.loads.get(id) else { return };
        let (session, request, entry) = (load.session, load.request, load.entry);
        let mut frames = Vec::with_capacity(load.blocks.len());
        let mut blocks = Vec::with_capacity(load.blocks.len());
        for block in &load.blocks {
            let (frame, source) = match block {
                LoadBlock::Ready { lease, source } | LoadBlock::Waiting { lease, source, .. } => {
                    (lease.frame(), *source)
                }
                LoadBlock::Lost(reason) => {
                    blocks.push(LoadedBlock::Lost(*reason));
                    continue;
                }
                LoadBlock::Unplaced | LoadBlock::Held { .. } => {
                    unreachable!("a load is answered once, when every block is placed or lost")
                }
            };
            let checksums = self.cache.checksums(frame).into();
            blocks.push(LoadedBlock::Ok { source, slot: self.cache.frame_slot(frame), checksums });
            frames.push(frame);
        }
        let regions = self.grants(session, frames.into_iter());
        self.reply(session, request, Reply::Loaded { load: LoadId(id.0), entry, regions, blocks });
    }

    /// Checks blocks of a load whose copies did not match their checksums.
    pub(crate) fn suspect(&mut self, session: SessionId, request: RequestId, load: LoadId, blocks: &[u32]) {
        let Some(held) = self.loads.get(SlabId(load.0)).filter(|load| load.session == session) else {
            let text = format!("this session holds no load {}", load.0);
            return self.reply(session, request, Reply::BadRequest(text));
        };
        let ready = |block: &u32| match held.blocks.get(*block as usize) {
            Some(LoadBlock::Ready { lease, .. }) => Some(lease.frame()),
            _ => None,
        };
        let frames: Vec<FrameIndex> = blocks.iter().filter_map(ready).collect();
        self.counters.suspect_blocks += frames.len() as u64;
        for frame in frames {
            self.cache.begin_check(context!(self), frame);
        }
        self.reply(session, request, Reply::Suspected);
    }
}
