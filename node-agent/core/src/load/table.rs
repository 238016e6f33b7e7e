//! Table of loads: the state of each, and what its session knows of it.

use std::time::Duration;

use reprise_policy::eviction::EntryIndex;
use reprise_policy::{BlockKey, TenantId, Tick};

use crate::cache::{Cache, FrameIndex, Lease, Read};
use crate::context::{Caller, Context};
use crate::effect::{
    Access, Effect, LoadId, LoadedBlock, LossReason, Place, ProgressEntry, ProgressUpdate, Reply, Source,
};
use crate::event::{LoadRequest, PublicKeys, Scope};
use crate::limits::{LOAD_DEADLINE_MAX, PROGRESS_ENTRIES};
use crate::load::progress::LayerProgress;
use crate::load::{LoadOutcome, LoadTimer, Loads};
use crate::regions::RegionSet;
use crate::slab::SlabId;
use crate::waiter::{Advanced, WaitId, WaiterId, WaiterOwner};

/// A load of a session.
#[derive(Debug)]
pub(super) struct Load {
    pub(super) caller: Caller,
    pub(super) keys: Box<[BlockKey]>,
    pub(super) blocks: Box<[LoadBlock]>,
    pub(super) progress: LayerProgress,
    pub(super) scope: Scope,
    /// Keys of its leading blocks of a public tenant.
    pub(super) public: Option<PublicKeys>,
    pub(super) read_bytes: u64,
    /// Deadline of the blocks; once they are complete, the end of the hold time.
    pub(super) deadline: Tick,
    pub(super) stage: Stage,
    /// Blocks to look up once the fills of the others were started, and the reason to report otherwise.
    pub(super) absent: (Vec<u32>, LossReason),
    entry: ProgressEntry,
}

/// One block of a load.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum LoadBlock {
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
pub(super) enum Stage {
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

/// What a session holds for reading.
#[derive(Debug)]
pub(super) struct Reader {
    /// Load of each entry of the progress page.
    loads: [Option<SlabId>; PROGRESS_ENTRIES],
    /// Regions that the session has received.
    readable: RegionSet,
}

const _: () = assert!(size_of::<LoadBlock>() <= 12, "8,192 blocks a load, 64 loads a session");

impl Default for Reader {
    fn default() -> Reader {
        Reader { loads: [None; PROGRESS_ENTRIES], readable: RegionSet::default() }
    }
}

impl Reader {
    /// Returns a progress entry that is not in use.
    pub(super) fn free_entry(&self) -> Option<ProgressEntry> {
        self.loads.iter().position(Option::is_none).map(|entry| ProgressEntry(entry as u16))
    }

    /// Iterates the session's loads.
    pub(super) fn loads(&self) -> impl Iterator<Item = SlabId> {
        self.loads.iter().flatten().copied()
    }

    /// Regions that the session may read.
    pub(super) fn regions(&self) -> &RegionSet {
        &self.readable
    }

    fn set_load(&mut self, entry: ProgressEntry, load: Option<SlabId>) {
        self.loads[usize::from(entry.0)] = load;
    }
}

/// Id of a block that waits.
pub(super) fn waiter(load: SlabId, block: u32) -> WaiterId {
    WaiterId { object: load.0, block, owner: WaiterOwner::Load }
}

/// Deadline of a load. It counts from the receipt, and includes the time in the core's queue.
fn deadline_of(cx: &Context, wanted: &LoadRequest, received: Tick) -> Tick {
    let span = match wanted.deadline {
        Duration::ZERO => cx.settings.load_deadline_default,
        span => span,
    };
    received.min(cx.now).after(span.min(LOAD_DEADLINE_MAX))
}

impl Load {
    /// Creates a load whose blocks are not placed.
    pub(super) fn new(
        cache: &Cache,
        cx: &Context,
        (caller, entry): (Caller, ProgressEntry),
        wanted: LoadRequest,
        received: Tick,
    ) -> Load {
        let deadline = deadline_of(cx, &wanted, received);
        let blocks = wanted.keys.len() as u32;
        let layers = cache.size_class(caller.size_class).layout.layers();
        let read_bytes = match wanted.read_bytes {
            0 => cx.settings.read_bytes_default,
            bytes => bytes,
        };
        Load {
            caller,
            keys: wanted.keys.into_boxed_slice(),
            blocks: (0..blocks).map(|_| LoadBlock::Unplaced).collect(),
            progress: LayerProgress::new(layers, blocks),
            scope: wanted.scope,
            public: wanted.public,
            read_bytes,
            deadline,
            stage: Stage::Placing,
            absent: (Vec::new(), LossReason::Miss),
            entry,
        }
    }

    /// Returns the keys of a public tenant, unless another tenant is the public one.
    pub(super) fn public_of(&self, tenant: Option<TenantId>) -> Option<&PublicKeys> {
        self.public.as_ref().filter(|public| tenant == Some(public.tenant))
    }

    /// Takes the lease of a block that waits, with the layers it had; the block is unplaced then.
    pub(super) fn take_waiting(&mut self, block: u32) -> Option<(Lease<Read>, u32)> {
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
    pub(super) fn advance(&mut self, block: u32, Advanced { from, to, source, is_whole }: Advanced) {
        let state = &mut self.blocks[block as usize];
        if let LoadBlock::Waiting { source: known, layers, .. } = state {
            (*known, *layers) = (source, to);
            self.progress.advance(u32::from(from), u32::from(to));
        }
        if is_whole && let Some((lease, _)) = self.take_waiting(block) {
            self.blocks[block as usize] = LoadBlock::Ready { lease, source };
        }
    }

    fn emit(&self, cx: &mut Context, update: ProgressUpdate) {
        cx.emit(Effect::Progress { session: self.caller.session, entry: self.entry, update });
    }
}

/// Returns the entries of complete blocks that are in DRAM, in the order of the load.
fn entries_of(cache: &Cache, blocks: &[LoadBlock]) -> Vec<EntryIndex> {
    let frame = |block: &LoadBlock| match block {
        LoadBlock::Ready { lease, .. } => Some(lease.frame()),
        _ => None,
    };
    blocks.iter().filter_map(frame).filter_map(|frame| cache.frame(frame).entry()).collect()
}

impl Loads {
    /// Adds a load to its session.
    pub(super) fn insert(&mut self, cx: &mut Context, load: Load) -> SlabId {
        let (session, entry, deadline) = (load.caller.session, load.entry, load.deadline);
        self.counters.loads += 1;
        self.counters.load_blocks += load.blocks.len() as u64;
        let id = self.loads.insert(load);
        self.timers.set(deadline, LoadTimer::Load(id));
        if let Some(reader) = self.sessions.get_mut(&session) {
            reader.set_load(entry, Some(id));
        }
        let update = ProgressUpdate::Begin { load: LoadId(id.0) };
        cx.emit(Effect::Progress { session, entry, update });
        id
    }

    /// Ends a load, on release or with its session, and releases all its leases.
    pub(super) fn end(&mut self, cache: &mut Cache, id: SlabId) {
        let Some(load) = self.loads.remove(id) else { return };
        let used = entries_of(cache, &load.blocks);
        for (at, block) in (0..).zip(load.blocks) {
            match block {
                LoadBlock::Waiting { lease, wait, .. } => {
                    self.outcomes.push(LoadOutcome::Detach { wait, waiter: waiter(id, at) });
                    cache.release(lease);
                }
                LoadBlock::Ready { lease, .. } | LoadBlock::Held { lease } => cache.release(lease),
                LoadBlock::Unplaced | LoadBlock::Lost(_) => {}
            }
        }
        cache.touch_chain(used.into_iter());
        self.timers.clear(load.deadline, LoadTimer::Load(id));
        if let Some(reader) = self.sessions.get_mut(&load.caller.session) {
            reader.set_load(load.entry, None);
        }
    }

    /// Revokes a load that was held too long: its blocks fail, and its slots are released.
    pub(super) fn revoke(&mut self, cache: &mut Cache, cx: &mut Context, id: SlabId) {
        let Some(load) = self.loads.get_mut(id) else { return };
        load.stage = Stage::Expired;
        let lost = load.blocks.iter().map(|_| LoadBlock::Lost(LossReason::Deadline)).collect();
        let held = std::mem::replace(&mut load.blocks, lost);
        self.counters.expired_loads += 1;
        let used = entries_of(cache, &held);
        for (block, state) in (0..).zip(held) {
            match state {
                LoadBlock::Ready { lease, .. } => {
                    cache.release(lease);
                    load.emit(cx, ProgressUpdate::BlockFailed { block });
                }
                LoadBlock::Held { lease } => cache.release(lease),
                LoadBlock::Waiting { .. } => unreachable!("no block of a complete load waits"),
                LoadBlock::Unplaced | LoadBlock::Lost(_) => {}
            }
        }
        cache.touch_chain(used.into_iter());
        load.emit(cx, ProgressUpdate::Done);
    }

    /// Marks an unplaced block as lost.
    pub(super) fn lose(&mut self, cx: &mut Context, id: SlabId, block: u32, reason: LossReason) {
        let counter = match reason {
            LossReason::Miss => &mut self.counters.miss_blocks,
            LossReason::Failed => &mut self.counters.failed_blocks,
            LossReason::NoSpace => &mut self.counters.no_space_blocks,
            LossReason::Deadline => &mut self.counters.deadline_blocks,
        };
        *counter += 1;
        self.fail(cx, (id, block), 0, LoadBlock::Lost(reason));
    }

    /// Marks a block as failed that had some layers, and notifies the session if the load was answered.
    pub(super) fn fail(
        &mut self,
        cx: &mut Context,
        (id, block): (SlabId, u32),
        layers: u32,
        becomes: LoadBlock,
    ) {
        let Some(load) = self.loads.get_mut(id) else { return };
        load.blocks[block as usize] = becomes;
        load.progress.fail(layers);
        if load.stage != Stage::Placing {
            load.emit(cx, ProgressUpdate::BlockFailed { block });
        }
    }

    /// Publishes the progress that the session does not know yet, and answers the load if it can be answered.
    pub(super) fn publish(&mut self, cache: &mut Cache, cx: &mut Context, id: SlabId) {
        let Some(load) = self.loads.get_mut(id) else { return };
        let (ready, pending) = (load.progress.ready(), load.progress.pending());
        let (known, answer) = match load.stage {
            Stage::Placing if ready > 0 => (0, true),
            Stage::Placing | Stage::Complete | Stage::Expired => return,
            Stage::Answered { layers } => (layers, false),
        };
        load.stage = if pending == 0 { Stage::Complete } else { Stage::Answered { layers: ready } };
        if pending == 0 {
            self.timers.clear(load.deadline, LoadTimer::Load(id));
            load.deadline = cx.now.after(cx.settings.load_hold_timeout);
            self.timers.set(load.deadline, LoadTimer::Load(id));
        }
        if ready > known {
            load.emit(cx, ProgressUpdate::Layers { layers: ready });
        }
        if pending == 0 {
            load.emit(cx, ProgressUpdate::Done);
        }
        if answer {
            self.answer(cache, cx, id);
        }
    }

    fn answer(&mut self, cache: &mut Cache, cx: &mut Context, id: SlabId) {
        let Some(load) = self.loads.get(id) else { return };
        let mut frames: Vec<FrameIndex> = Vec::with_capacity(load.blocks.len());
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
            let checksums = cache.checksums(frame).into();
            blocks.push(LoadedBlock::Ok { source, place: Place::Arena(cache.frame_slot(frame)), checksums });
            frames.push(frame);
        }
        let Some(reader) = self.sessions.get_mut(&load.caller.session) else { return };
        let regions = cache.new_regions(frames.into_iter(), Access::ReadOnly, &mut reader.readable);
        cx.reply(load.caller, Reply::Loaded { load: LoadId(id.0), entry: load.entry, regions, blocks });
    }
}
