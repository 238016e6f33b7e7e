//! Prefetch: blocks on this node's devices are read into DRAM before the requests that need them run.
//!
//! ```text
//!  hint ──▶ requests ──▶ plan (policy::prefetch) ──▶ Fetch, rank Prefetch ──▶ staged, leased
//!                                                                              │ load of the key
//!  cancelled, too long, session closed ──▶ wasted ◀──── lease ends ──▶ used ◀──┘
//! ```
//!
//! A hint is advice: its invalid parts are ignored and counted. Without hints, this owner has no state and causes
//! no reads. A load does not know of it: a load of a block that is being read joins the fill and waits for the
//! remainder only.
//!
//! Invariants:
//! * Slot bytes of staged blocks are at most the reserve, `prefetch.arena_permille` of the arena, and those of one
//!   session at most `prefetch.session_permille` of it.
//! * Slot bytes of one tenant's staged blocks are at most the same share of its DRAM limit.
//! * A session has at most `prefetch.session_keys` keys, left to read, staged or in DRAM.
//! * Every request ends: when it is cancelled, or after a time behind its first or last mention or its first staged
//!   block.
//! * Every block read ahead is counted once, as used, wasted or failed.
//!
//! Memory: at most 40 bytes for each key, about 150 for each staged block, 150 for each request. At the limits of one
//! session, 640 KiB and 300 KiB.
//!
//! Out of scope: blocks of peers, blocks that were saved after the hint that lists them.
//!
//! Files call only files before them in this order: `staged`, `requests`, `hint`, `pass`, `requested`, then this one.

use std::collections::{BTreeMap, VecDeque};

use reprise_policy::prefetch::{Lookahead, LookaheadReport, Plan};
use reprise_policy::{BlockKey, SessionId, Tick};

use crate::cache::{Cache, SizeClassId};
use crate::context::{Caller, Context};
use crate::counters::{Counters, PrefetchCounters};
use crate::effect::{DeviceId, Reply};
use crate::limits::LOOKAHEAD_READY_STEPS_MAX;
use crate::prefetch::pass::MeasuredChannel;
use crate::prefetch::requests::{Hinted, ListedBlock, Phase};
use crate::prefetch::staged::{BlockState, Staged, StagedBlock};
use crate::slab::SlabId;
use crate::timers::Timers;
use crate::transfer::DeviceReads;
use crate::waiter::{Advanced, Attached, FillRequest, WaitId, WaiterId, WaiterOwner};

mod audit;
mod hint;
mod pass;
mod requested;
mod requests;
mod staged;

pub(crate) use requested::RequestedReads;

/// Hints of all sessions, and the blocks that are read ahead.
#[derive(Debug, Default)]
pub(crate) struct Prefetch {
    sessions: BTreeMap<SessionId, Hinted>,
    staged: Staged,
    channels: BTreeMap<DeviceId, MeasuredChannel>,
    timers: Timers<(SessionId, u64)>,
    plan: Plan,
    /// Blocks whose read has failed and that may be read again; some may have ended meanwhile.
    failed: VecDeque<SlabId>,
    outcomes: Vec<PrefetchOutcome>,
    counters: PrefetchCounters,
}

/// Request to the owner of fills.
#[derive(Debug)]
pub(crate) enum PrefetchOutcome {
    /// Start or join the fills of blocks.
    Fetch(FillRequest),
    /// A block no longer waits.
    Detach { wait: WaitId, waiter: WaiterId },
}

/// Why a staged block ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ending {
    Used,
    Wasted,
}

impl Prefetch {
    /// Whether there is anything to route.
    pub(crate) fn has_outcomes(&self) -> bool {
        !self.outcomes.is_empty()
    }

    /// Returns the requests since the last call, in order.
    pub(crate) fn take_outcomes(&mut self) -> Vec<PrefetchOutcome> {
        std::mem::take(&mut self.outcomes)
    }

    /// Time of the first deadline.
    pub(crate) fn first_due(&self) -> Option<Tick> {
        self.timers.next()
    }

    /// Sets the counters and gauges of prefetches.
    pub(crate) fn set_counters(&self, all: &mut Counters) {
        self.counters.copy_to(all);
        all.prefetch_staged_bytes = self.staged.bytes();
    }

    /// Whether a hint is valid; otherwise, answers it.
    pub(crate) fn admit(
        &mut self,
        cache: &Cache,
        cx: &mut Context,
        (caller, lookahead): (Caller, &Lookahead),
    ) -> bool {
        self.counters.prefetch_hints += 1;
        let ranks = cache.rank_classes(caller.size_class, lookahead.ranks).ranks();
        let checked = hint::check(lookahead, ranks);
        let is_valid = checked.is_ok();
        if let Err(text) = checked {
            self.counters.prefetch_rejected_hints += 1;
            cx.reply(caller, Reply::BadRequest(text));
        }
        is_valid
    }

    /// Handles an admitted hint, of which other owners have ignored a number of parts: updates the session's requests,
    /// then starts the reads that the plan admits.
    pub(crate) fn hint(
        &mut self,
        cache: &mut Cache,
        cx: &mut Context,
        (caller, ignored): (Caller, u32),
        (lookahead, reads): (Lookahead, &DeviceReads),
    ) {
        let listed: Vec<u64> = lookahead.requests.iter().map(|listed| listed.request).collect();
        let ignored = ignored + self.update(cache, cx, caller, lookahead);
        self.measure(reads, cx.now);
        self.pass(cache, cx, (caller, reads));
        let Some(hinted) = self.sessions.get_mut(&caller.session) else { return };
        let window = hinted.window.iterations().min(cx.settings.prefetch.window_max);
        let mut steps = LOOKAHEAD_READY_STEPS_MAX;
        let ready = listed.into_iter().filter(|request| {
            let wanted = hinted.requests.get_mut(request);
            wanted.is_some_and(|wanted| wanted.is_ready(cache, &self.staged, &mut steps))
        });
        let report = LookaheadReport { window, ignored, ready: ready.collect() };
        cx.reply(caller, Reply::LookaheadAccepted(report));
    }

    /// Stores the wait of a block whose fill was started or joined.
    pub(crate) fn attached(&mut self, cache: &mut Cache, waiter: WaiterId, attached: Attached) {
        let Attached { lease, wait, layers, .. } = attached;
        match self.staged.at_mut(waiter.block) {
            Some(block) => block.state = BlockState::Reading { lease, wait, layers },
            None => {
                self.outcomes.push(PrefetchOutcome::Detach { wait, waiter });
                cache.release(lease);
            }
        }
    }

    /// Handles a block that has no room or cannot be read.
    pub(crate) fn refused(&mut self, waiter: WaiterId) {
        self.counters.prefetch_failed_blocks += 1;
        self.staged.fail(waiter.block);
        self.failed.extend(self.staged.retriable(waiter.block));
    }

    /// Handles the failure of a block's fill.
    pub(crate) fn failed(&mut self, cache: &mut Cache, waiter: WaiterId) {
        self.counters.prefetch_failed_blocks += 1;
        if let Some(BlockState::Reading { lease, .. }) = self.staged.fail(waiter.block) {
            cache.release(lease);
        }
        self.failed.extend(self.staged.retriable(waiter.block));
    }

    /// Records verified layers of a block.
    pub(crate) fn advanced(&mut self, waiter: WaiterId, advanced: Advanced) {
        let Some(block) = self.staged.at_mut(waiter.block) else { return };
        let BlockState::Reading { layers, .. } = &mut block.state else { return };
        *layers = advanced.to;
        if advanced.is_whole
            && let BlockState::Reading { lease, .. } =
                std::mem::replace(&mut block.state, BlockState::Requested)
        {
            block.state = BlockState::Ready { lease };
            self.counters.prefetch_blocks += 1;
            self.counters.prefetch_bytes += block.payload_bytes;
        }
    }

    /// Handles a load that has leased its blocks: those that were read ahead count as used, and their leases
    /// end.
    pub(crate) fn loaded(&mut self, cache: &mut Cache, keys: &[BlockKey], size_class: SizeClassId) {
        if self.staged.is_empty() {
            return;
        }
        for key in keys {
            if let Some(id) = self.staged.find(key, size_class)
                && let Some(block) = self.staged.remove(id)
            {
                self.end(cache, id, block, Ending::Used);
            }
        }
    }

    /// Whether a load may use staged blocks.
    pub(crate) fn is_active(&self) -> bool {
        !self.staged.is_empty()
    }

    /// Ends the requests of a session.
    pub(crate) fn close(&mut self, cache: &mut Cache, session: SessionId) {
        let Some(hinted) = self.sessions.get(&session) else { return };
        for request in hinted.requests.keys().copied().collect::<Vec<u64>>() {
            self.end_request(cache, session, request);
        }
        self.sessions.remove(&session);
    }

    /// Handles the first deadline, if it is due.
    pub(crate) fn fire_timer(&mut self, cache: &mut Cache, now: Tick) {
        let Some((session, request)) = self.timers.pop_due(now) else { return };
        let Some(hinted) = self.sessions.get_mut(&session) else { return };
        let Some(wanted) = hinted.requests.get_mut(&request) else { return };
        wanted.due = None;
        if wanted.phase == Phase::Left {
            self.end_request(cache, session, request);
            return self.forget_requested(session);
        }
        hinted.keys -= wanted.keys();
        wanted.phase = Phase::Expired;
        wanted.pending = Vec::new();
        let blocks = std::mem::take(&mut wanted.blocks);
        self.counters.prefetch_expired_requests += 1;
        self.drop_blocks(cache, blocks);
    }

    /// Removes a request and its share of the staged blocks.
    fn end_request(&mut self, cache: &mut Cache, session: SessionId, request: u64) {
        let Some(hinted) = self.sessions.get_mut(&session) else { return };
        let Some(wanted) = hinted.requests.remove(&request) else { return };
        hinted.keys -= wanted.keys();
        if let Some(due) = wanted.due {
            self.timers.clear(due, (session, request));
        }
        self.drop_blocks(cache, wanted.blocks);
    }

    /// Removes one holder of each of these blocks.
    fn drop_blocks(&mut self, cache: &mut Cache, blocks: Vec<ListedBlock>) {
        for id in blocks.into_iter().filter_map(|block| block.staged) {
            if let Some(block) = self.staged.drop_holder(id) {
                self.end(cache, id, block, Ending::Wasted);
            }
        }
    }

    /// Ends the lease of a block that was removed from the table, and counts its bytes.
    fn end(&mut self, cache: &mut Cache, id: SlabId, block: StagedBlock, ending: Ending) {
        let StagedBlock { payload_bytes, session, state, .. } = block;
        let lease = match state {
            BlockState::Requested | BlockState::Failed => return,
            BlockState::Ready { lease } => lease,
            BlockState::Reading { lease, wait, .. } => {
                let waiter = waiter(id);
                self.outcomes.push(PrefetchOutcome::Detach { wait, waiter });
                // The device reads the rest in any case.
                self.counters.prefetch_blocks += 1;
                self.counters.prefetch_bytes += payload_bytes;
                self.counters.prefetch_joined_blocks += u64::from(ending == Ending::Used);
                lease
            }
        };
        cache.release(lease);
        let window = self.sessions.get_mut(&session).map(|hinted| &mut hinted.window);
        match ending {
            Ending::Used => {
                self.counters.prefetch_used_blocks += 1;
                self.counters.prefetch_used_bytes += payload_bytes;
                window.into_iter().for_each(|window| window.used(payload_bytes));
            }
            Ending::Wasted => {
                self.counters.prefetch_wasted_bytes += payload_bytes;
                window.into_iter().for_each(|window| window.wasted(payload_bytes));
            }
        }
    }
}

/// Waiter of a staged block.
fn waiter(id: SlabId) -> WaiterId {
    WaiterId { object: 0, block: id.slot(), owner: WaiterOwner::Prefetch }
}
