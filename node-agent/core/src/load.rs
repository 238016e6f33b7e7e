//! Loads of blocks by sessions, and matches, which return where blocks are.
//!
//! ```text
//!             a fill is found           verified                          Release
//!  Unplaced ──────────────────▶ Waiting ────────▶ Ready (leased) ────────────────▶
//!     │  ▲                        │  │ failed or late, after the answer
//!     │  └── failed, before the ──┘  └──────────▶ Held (leased, failed) ─────────▶
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
//!
//! Files call only files before them in this order: `progress`, `table`, `lookups`, then `sources` and
//! `matches`, then this one.

use std::collections::BTreeMap;

use reprise_policy::{BlockKey, SessionId, TenantId, Tick};

use crate::cache::Cache;
use crate::context::{Caller, Context};
use crate::counters::{Counters, LoadCounters};
use crate::effect::{LoadId, LossReason, Reply};
use crate::event::{LoadRequest, Replica};
use crate::limits::LOAD_BLOCKS_MAX;
use crate::load::lookups::{Lookup, Purpose};
use crate::load::sources::Retry;
use crate::load::table::{Load, LoadBlock, Reader, Stage, waiter};
use crate::slab::{Slab, SlabId};
use crate::timers::Timers;
use crate::waiter::{Advanced, Attached, Failed, FillRequest, WaitId, WaiterId};

mod audit;
mod lookups;
mod matches;
mod progress;
mod sources;
mod table;

pub(crate) use matches::MatchRequest;

/// All loads and lookups, their sessions and their deadlines.
#[derive(Debug)]
pub(crate) struct Loads {
    loads: Slab<Load>,
    lookups: Slab<Lookup>,
    sessions: BTreeMap<SessionId, Reader>,
    /// Loads whose fills failed before they were answered.
    retries: BTreeMap<SlabId, Retry>,
    timers: Timers<LoadTimer>,
    /// Tenant whose blocks all tenants may copy.
    public_tenant: Option<TenantId>,
    outcomes: Vec<LoadOutcome>,
    counters: LoadCounters,
}

/// Object whose deadline has passed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum LoadTimer {
    /// A load reached its deadline or its maximum hold time.
    Load(SlabId),
    /// The directory did not answer a lookup.
    Lookup(SlabId),
}

/// Request to the owner of fills.
#[derive(Debug)]
pub(crate) enum LoadOutcome {
    /// Start or join the fills of blocks.
    Fetch(FillRequest),
    /// A block no longer waits.
    Detach { wait: WaitId, waiter: WaiterId },
}

impl Loads {
    /// Creates the state without sessions.
    pub(crate) fn new() -> Loads {
        Loads {
            loads: Slab::new(),
            lookups: Slab::new(),
            sessions: BTreeMap::new(),
            retries: BTreeMap::new(),
            timers: Timers::default(),
            public_tenant: None,
            outcomes: Vec::new(),
            counters: LoadCounters::default(),
        }
    }

    /// Sets the tenant whose blocks all tenants may copy. Without it, loads in progress copy no further blocks.
    pub(crate) fn set_public_tenant(&mut self, tenant: Option<TenantId>) {
        self.public_tenant = tenant;
    }

    /// Whether there is anything to route.
    pub(crate) fn has_outcomes(&self) -> bool {
        !self.outcomes.is_empty()
    }

    /// Returns the requests since the last call, in order.
    pub(crate) fn take_outcomes(&mut self) -> Vec<LoadOutcome> {
        std::mem::take(&mut self.outcomes)
    }

    /// Time of the first deadline.
    pub(crate) fn first_due(&self) -> Option<Tick> {
        self.timers.next()
    }

    /// Handles the first deadline, if it is due.
    pub(crate) fn fire_timer(&mut self, cache: &mut Cache, cx: &mut Context) {
        match self.timers.pop_due(cx.now) {
            Some(LoadTimer::Load(load)) => self.expire(cache, cx, load),
            Some(LoadTimer::Lookup(lookup)) => self.lookup_failed(cache, cx, lookup),
            None => {}
        }
    }

    /// Sets the counters and gauges of loads.
    pub(crate) fn set_counters(&self, all: &mut Counters) {
        self.counters.copy_to(all);
        all.loads_held = self.loads.len() as u64;
    }

    /// Adds a session without loads.
    pub(crate) fn open(&mut self, session: SessionId) {
        self.sessions.insert(session, Reader::default());
    }

    /// Ends the loads and matches of a session.
    pub(crate) fn close(&mut self, cache: &mut Cache, session: SessionId) {
        let Some(reader) = self.sessions.remove(&session) else { return };
        for load in reader.loads() {
            self.end(cache, load);
        }
        cache.revoke_regions(reader.regions());
        self.cancel_matches(session);
    }

    /// Starts a load for a session; returns it unless it was rejected.
    pub(crate) fn begin(
        &mut self,
        cache: &mut Cache,
        cx: &mut Context,
        caller: Caller,
        (wanted, received): (LoadRequest, Tick),
    ) -> Option<SlabId> {
        let reader = self.sessions.get(&caller.session)?;
        if wanted.keys.len() > LOAD_BLOCKS_MAX {
            let text = format!("{} keys in one load: send at most {LOAD_BLOCKS_MAX}", wanted.keys.len());
            cx.reply(caller, Reply::BadRequest(text));
            return None;
        }
        let Some(entry) = reader.free_entry() else {
            let message = "the session holds the maximum number of loads: release one".to_owned();
            let retry_after = cx.settings.retry_after;
            cx.reply(caller, Reply::Busy { message, retry_after });
            return None;
        };
        if let Err(text) = cache.check_block_size(caller.size_class) {
            cx.reply(caller, Reply::BadRequest(text));
            return None;
        }
        let load = Load::new(cache, cx, (caller, entry), wanted, received);
        let blocks: Vec<u32> = (0..load.blocks.len() as u32).collect();
        let id = self.insert(cx, load);
        self.place(cache, cx, id, (&blocks, LossReason::Miss));
        Some(id)
    }

    /// Keys of a load that was not released.
    pub(crate) fn keys(&self, load: SlabId) -> &[BlockKey] {
        self.loads.get(load).map_or(&[], |load| &load.keys)
    }

    /// Releases a load of a session.
    pub(crate) fn release(&mut self, cache: &mut Cache, cx: &mut Context, caller: Caller, load: LoadId) {
        let id = SlabId(load.0);
        if self.loads.get(id).is_none_or(|load| load.caller.session != caller.session) {
            let text = format!("this session holds no load {}", load.0);
            return cx.reply(caller, Reply::BadRequest(text));
        }
        self.end(cache, id);
        cx.reply(caller, Reply::Released);
    }

    /// Checks blocks of a load whose copies did not match their checksums.
    pub(crate) fn suspect(
        &mut self,
        cache: &mut Cache,
        cx: &mut Context,
        caller: Caller,
        (load, blocks): (LoadId, &[u32]),
    ) {
        let held = self.loads.get(SlabId(load.0));
        let Some(held) = held.filter(|load| load.caller.session == caller.session) else {
            let text = format!("this session holds no load {}", load.0);
            return cx.reply(caller, Reply::BadRequest(text));
        };
        for block in blocks {
            if let Some(LoadBlock::Ready { lease, .. }) = held.blocks.get(*block as usize) {
                self.counters.suspect_blocks += 1;
                cache.begin_check(cx, lease.frame());
            }
        }
        cx.reply(caller, Reply::Suspected);
    }

    /// Stores the wait of a block whose fill was started or joined.
    pub(crate) fn attached(&mut self, cache: &mut Cache, waiter: WaiterId, attached: Attached) {
        let Attached { lease, wait, source, layers, joined } = attached;
        self.counters.single_flight_joins += u64::from(joined);
        let Some(load) = self.loads.get_mut(SlabId(waiter.object)) else {
            self.outcomes.push(LoadOutcome::Detach { wait, waiter });
            return cache.release(lease);
        };
        load.blocks[waiter.block as usize] = LoadBlock::Waiting { lease, wait, source, layers };
        if layers > 0 {
            load.progress.advance(0, u32::from(layers));
        }
    }

    /// Loses a block that cannot be filled.
    pub(crate) fn refused(&mut self, cx: &mut Context, waiter: WaiterId, reason: LossReason) {
        self.lose(cx, SlabId(waiter.object), waiter.block, reason);
    }

    /// Continues a load whose fills were started.
    pub(crate) fn started(&mut self, cache: &mut Cache, cx: &mut Context, object: u64) {
        self.look_up_absent(cx, SlabId(object));
        self.publish(cache, cx, SlabId(object));
    }

    /// Records verified layers of a block.
    pub(crate) fn advanced(
        &mut self,
        cache: &mut Cache,
        cx: &mut Context,
        waiter: WaiterId,
        advanced: Advanced,
    ) {
        let id = SlabId(waiter.object);
        let Some(load) = self.loads.get_mut(id) else { return };
        load.advance(waiter.block, advanced);
        if advanced.is_whole {
            let bytes = cache.size_class(load.caller.size_class).layout.block_bytes();
            self.counters.hit(advanced.source, 1, bytes);
        }
        self.publish(cache, cx, id);
    }

    /// Handles the failure of a block's fill. A load that was not answered yet tries another source once all
    /// waiters know of the failure.
    pub(crate) fn failed(&mut self, cache: &mut Cache, cx: &mut Context, waiter: WaiterId, failed: Failed) {
        let (id, block) = (SlabId(waiter.object), waiter.block);
        let Some(load) = self.loads.get_mut(id) else { return };
        let Some((lease, layers)) = load.take_waiting(block) else { return };
        if load.stage == Stage::Placing {
            load.progress.restart(layers);
            cache.release(lease);
            let retry = self.retries.entry(id).or_insert_with(|| Retry { failed, blocks: Vec::new() });
            return retry.blocks.push(block);
        }
        self.counters.failed_blocks += 1;
        self.fail(cx, (id, block), layers, LoadBlock::Held { lease });
        self.publish(cache, cx, id);
    }

    /// Tries another source for the blocks of one load whose fills failed; `false` if no load waits for that.
    pub(crate) fn retry_next(&mut self, cache: &mut Cache, cx: &mut Context) -> bool {
        let next = self.retries.pop_first();
        next.is_some_and(|(id, retry)| {
            self.retry(cache, cx, id, retry);
            true
        })
    }

    /// Handles the directory's answer: replicas of each key, in the lookup's order.
    pub(crate) fn lookup_answered(
        &mut self,
        cache: &mut Cache,
        cx: &mut Context,
        id: SlabId,
        found: Vec<Vec<Replica>>,
    ) {
        match self.end_lookup(id) {
            Some(Purpose::Match(waiting)) => self.finish_match(cache, cx, waiting, &found),
            Some(Purpose::Load { load, blocks, otherwise }) => {
                self.attach_found(cache, cx, load, (blocks, found, otherwise));
            }
            None => {}
        }
    }

    /// Handles a lookup that failed or timed out.
    pub(crate) fn lookup_failed(&mut self, cache: &mut Cache, cx: &mut Context, id: SlabId) {
        if self.lookups.get(id).is_some() {
            self.counters.lookup_failures += 1;
            self.lookup_answered(cache, cx, id, Vec::new());
        }
    }

    /// Handles the deadline of a load.
    fn expire(&mut self, cache: &mut Cache, cx: &mut Context, id: SlabId) {
        let Some(load) = self.loads.get(id) else { return };
        if load.stage == Stage::Complete {
            return self.revoke(cache, cx, id);
        }
        let answered = load.stage != Stage::Placing;
        for at in 0..load.blocks.len() as u32 {
            let Some(load) = self.loads.get_mut(id) else { return };
            match load.blocks[at as usize] {
                LoadBlock::Unplaced => self.lose(cx, id, at, LossReason::Deadline),
                LoadBlock::Waiting { wait, .. } => {
                    let Some((lease, layers)) = load.take_waiting(at) else { continue };
                    self.outcomes.push(LoadOutcome::Detach { wait, waiter: waiter(id, at) });
                    let held = if answered {
                        LoadBlock::Held { lease }
                    } else {
                        cache.release(lease);
                        LoadBlock::Lost(LossReason::Deadline)
                    };
                    self.counters.deadline_blocks += 1;
                    self.fail(cx, (id, at), layers, held);
                }
                LoadBlock::Ready { .. } | LoadBlock::Held { .. } | LoadBlock::Lost(_) => {}
            }
        }
        self.publish(cache, cx, id);
    }
}
