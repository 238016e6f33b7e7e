//! Replication: blocks for other nodes, and blocks that peers offer ([`inbound`]).
//!
//! Blocks for other nodes are hot blocks, all blocks of a draining node, and blocks that are to move.
//!
//! ```text
//!  hot keys, walk, eviction order ──▶ batch ──Place──▶ queried ──To──▶ Offer ──▶ accepted, or not
//!                                       ▲                 │ Enough                │
//!                                       └───── delay ─────┼───────────────────────┘
//!                                                         ▼ done (a moved block: dropped here)
//! ```
//!
//! A batch contains blocks of one size class for one reason. It is queried repeatedly until each of its
//! blocks has enough replicas, is no longer on this node, or is unplaceable. Lost, repeated or late answers
//! therefore do no harm. The only destructive step, dropping the copy of a moved block, requires the answer
//! that the other copy is durable.
//!
//! An accepted block is offered again only after the peer must have given it up. The copy in DRAM is then
//! compared with its checksums, because the peer cannot report why it failed. A peer that accepted fewer
//! blocks than offered and requested a delay receives no offers of the size class before the delay ends,
//! regardless of the answers of other peers.
//!
//! Only durable blocks are offered; write-back makes the others durable. The batch size bounds the cost of
//! one event. The bandwidth ([`bandwidth`]) bounds bytes: offers take tokens, and blocks that
//! are not accepted return them.

use std::collections::{BTreeMap, VecDeque};

use reprise_policy::eviction::EntryIndex;
use reprise_policy::{BlockKey, DrainProgress, NodeMode, Tick};

use crate::cache::{Cache, FrameIndex, SizeClassId};
use crate::context::Context;
use crate::counters::{Counters, ReplicateCounters};
use crate::effect::PlacementReason;
use crate::limits::{HOT_BATCHES_MAX, OUTBOUND_STEP_INTERVAL, PLACE_KEYS_MAX};
use crate::settings::Settings;
use crate::slab::SlabId;
use crate::timers::Timers;

mod bandwidth;
mod drain;
mod hot_keys;
mod inbound;
mod moves;
mod offers;
mod outbound;
mod queries;

use bandwidth::Bandwidth;
use drain::Drain;
use hot_keys::{Heat, HotKeys};
use inbound::Inbound;
use outbound::{Outbound, Stage};

pub(crate) use inbound::PullStep;

/// Consequence of an offer for another owner.
#[derive(Debug)]
pub(crate) enum ReplicateOutcome {
    /// Make the block that is being fetched by the fill in this slot durable.
    Retain { fill: u32 },
    /// Make a block in DRAM durable.
    SaveReplica { frame: FrameIndex },
}

/// Replication in both directions, its bandwidth and its deadlines.
#[derive(Debug)]
pub(crate) struct Replicate {
    hot: HotKeys,
    outbound: Outbound,
    inbound: Inbound,
    bandwidth: Bandwidth,
    timers: Timers<ReplicateTimer>,
    outcomes: VecDeque<ReplicateOutcome>,
    counters: ReplicateCounters,
}

/// Object of replication whose deadline has passed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum ReplicateTimer {
    /// The control plane did not answer a placement query.
    Place(SlabId),
    /// A peer did not answer an offer.
    Offer(SlabId),
}

impl Replicate {
    /// Creates the state of an active node.
    pub(crate) fn new(settings: &Settings) -> Replicate {
        Replicate {
            hot: HotKeys::new(settings.hot_reads, settings.hot_window),
            outbound: Outbound::new(),
            bandwidth: Bandwidth::new(settings.placement_bandwidth),
            inbound: Inbound::default(),
            timers: Timers::default(),
            outcomes: VecDeque::new(),
            counters: ReplicateCounters::default(),
        }
    }

    /// Mode of this node.
    pub(crate) fn mode(&self) -> NodeMode {
        self.outbound.mode()
    }

    /// Progress of draining, without blocks that are not durable yet.
    pub(crate) fn progress(&self) -> DrainProgress {
        self.outbound.progress()
    }

    /// Returns the next consequence for another owner.
    pub(crate) fn take_outcome(&mut self) -> Option<ReplicateOutcome> {
        self.outcomes.pop_front()
    }

    /// Time of the next deadline or step.
    pub(crate) fn next_deadline(&self) -> Option<Tick> {
        [self.outbound.wake(), self.inbound.wake(), self.timers.next()].into_iter().flatten().min()
    }

    /// Time of the first deadline of a query or offer.
    pub(crate) fn first_due(&self) -> Option<Tick> {
        self.timers.next()
    }

    /// Handles the first deadline, if it is due.
    pub(crate) fn fire_timer(&mut self, cache: &mut Cache, cx: &mut Context) {
        match self.timers.pop_due(cx.now) {
            Some(ReplicateTimer::Place(query)) => self.place_failed(cache, cx, query),
            Some(ReplicateTimer::Offer(offer)) => self.offer_failed(cx.now, offer),
            None => {}
        }
    }

    /// Sets the counters and gauges of replication.
    pub(crate) fn set_counters(&self, all: &mut Counters) {
        self.counters.copy_to(all);
        let drain = self.outbound.progress();
        all.node_mode = self.outbound.mode() as u64;
        all.drain_walked_blocks = drain.walked_blocks;
        all.drain_nowhere_blocks = drain.nowhere_blocks;
        all.given_bytes = drain.moved_bytes;
        all.pulls_waiting = self.inbound.waiting() as u64;
    }

    /// Sets the mode of this node, unless it is outdated.
    pub(crate) fn set_mode(&mut self, now: Tick, mode: NodeMode, revision: u64) {
        if revision <= self.outbound.revision {
            return;
        }
        self.outbound.revision = revision;
        if std::mem::replace(&mut self.outbound.mode, mode) != mode {
            self.outbound.forget(|reason| reason == PlacementReason::Drain);
            self.outbound.drain = Drain::of_mode(mode, now);
        }
    }

    /// Counts a read of a block by a peer.
    pub(crate) fn note_read(&mut self, cache: &Cache, now: Tick, entry: EntryIndex) {
        let state = cache.entry(entry);
        let wanted = !self.bandwidth.is_disabled() && self.outbound.mode != NodeMode::Draining;
        if state.stored().is_none() || !wanted {
            return;
        }
        let key = state.key();
        if self.hot.note(key, now) == Heat::BecameHot && self.outbound.hot.len() < PLACE_KEYS_MAX {
            self.counters.hot_blocks += 1;
            self.outbound.hot.push(key);
        }
    }

    /// Whether no block needs replication, which is the normal state.
    fn is_idle(&self) -> bool {
        let Outbound { hot, moving, drain, batches, .. } = &self.outbound;
        hot.is_empty() && moving.is_none() && drain.is_off() && batches.len() == 0
    }

    /// Continues replication, a bounded amount for each event.
    pub(crate) fn advance(&mut self, cache: &Cache, cx: &mut Context) {
        if self.bandwidth.is_disabled() || self.is_idle() {
            self.outbound.wake = None;
            return;
        }
        self.collect_hot(cache, cx.now);
        self.advance_walk(cache, cx.now);
        self.collect_moves(cache, cx.now);
        self.query_due(cache, cx);
        self.end_walk_if_complete(cx.now);
        self.outbound.wake = self.next_wakeup(cache, cx.now);
    }

    fn collect_hot(&mut self, cache: &Cache, now: Tick) {
        let room =
            HOT_BATCHES_MAX.saturating_sub(self.outbound.count(|reason| reason == PlacementReason::Hot));
        if self.outbound.hot.is_empty() || room == 0 {
            return;
        }
        let mut left = Vec::new();
        let keys = std::mem::take(&mut self.outbound.hot);
        for (at, (size_class, keys)) in group_by_size_class(cache, keys).into_iter().enumerate() {
            if at < room {
                self.outbound.begin_batch(PlacementReason::Hot, size_class, keys, now);
            } else {
                left.extend(keys);
            }
        }
        self.outbound.hot = left;
    }

    /// Time at which to continue if no event arrives before.
    fn next_wakeup(&mut self, cache: &Cache, now: Tick) -> Option<Tick> {
        let due = self.outbound.batches.iter().filter_map(|(_, batch)| match batch.stage {
            Stage::Due(at) => Some(at),
            Stage::Querying(_) | Stage::Offering { .. } => None,
        });
        let due = due.min().map(|at| at.max(now.after(self.bandwidth.wait(now))));
        let next = [due, self.next_walk(), self.next_move(cache)].into_iter().flatten().min()?;
        // Everything that is possible now was done.
        Some(next.max(now.after(OUTBOUND_STEP_INTERVAL)))
    }

    /// Checks that batches, queries and offers refer to each other and have timers, and the pulls.
    pub(crate) fn audit(&self) -> Result<(), String> {
        let waiting = self.outbound.queries.len() + self.outbound.offers.len();
        ensure!(self.timers.len() == waiting, "{waiting} queries and offers, {} timers", self.timers.len());
        ensure!(self.outcomes.is_empty(), "{:?} are not routed", self.outcomes);
        self.inbound.audit()?;
        let Outbound { batches, queries, offers, mode, .. } = &self.outbound;
        for (id, batch) in batches.iter() {
            if batch.blocks.is_empty() || batch.blocks.len() > PLACE_KEYS_MAX {
                return Err(format!("{id:?} has {} blocks", batch.blocks.len()));
            }
            let waiting = offers.iter().filter(|(_, offer)| offer.batch == id).count();
            let known = match batch.stage {
                Stage::Due(_) => waiting == 0,
                Stage::Querying(query) => {
                    waiting == 0 && queries.get(query).is_some_and(|query| query.batch == id)
                }
                Stage::Offering { open, .. } => waiting == open as usize && open > 0,
            };
            if !known {
                return Err(format!("{id:?} is {:?}, with {waiting} offers", batch.stage));
            }
            if batch.reason == PlacementReason::Drain && *mode != NodeMode::Draining {
                return Err(format!("{id:?} drains, but the node is {mode:?}"));
            }
        }
        self.hot.audit()
    }
}

/// Groups durable blocks by size class.
fn group_by_size_class(
    cache: &Cache,
    keys: impl IntoIterator<Item = BlockKey>,
) -> BTreeMap<SizeClassId, Vec<BlockKey>> {
    let mut size_classes: BTreeMap<SizeClassId, Vec<BlockKey>> = BTreeMap::new();
    for key in keys {
        let state = cache.find(&key).map(|entry| cache.entry(entry));
        if let Some(state) = state.filter(|state| state.stored().is_some()) {
            size_classes.entry(state.size_class()).or_default().push(key);
        }
    }
    size_classes
}
