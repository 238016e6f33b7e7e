//! Outbound replication: hot blocks, all blocks of a draining node, and blocks that are to move.
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

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use reprise_policy::eviction::EntryIndex;
use reprise_policy::{BlockKey, DrainProgress, NodeId, NodeMode, Tick};

use crate::cache::{Cache, SizeClass, SizeClassId, nvme_bytes};
use crate::context::Context;
use crate::counters::{Counters, ReplicateCounters};
use crate::effect::{Effect, Offer, OfferId, PlaceReason};
use crate::limits::{
    HOT_BATCHES_MAX, LOOKUP_GRACE, OFFER_RETRY_MAX, OFFER_TIMEOUT, OUTBOUND_BATCHES_MAX,
    OUTBOUND_STEP_INTERVAL, PARKED_AFTER_ROUNDS, PARKED_BATCHES_MAX, PLACE_KEYS_MAX, PLACE_RETRY,
    PULL_WAIT_MAX,
};
use crate::settings::Settings;
use crate::slab::{Slab, SlabId};
use crate::timers::Timers;

mod bandwidth;
mod drain;
mod hot_keys;
mod moves;
mod queries;

pub(crate) use bandwidth::Bandwidth;
pub(crate) use drain::Drain;
pub(crate) use hot_keys::{Heat, HotKeys};
pub(crate) use moves::MoveProgress;
pub(crate) use queries::PlacementQuery;

/// Replication to other nodes, its bandwidth and its deadlines.
#[derive(Debug)]
pub(crate) struct Replicate {
    hot: HotKeys,
    outbound: Outbound,
    bandwidth: Bandwidth,
    timers: Timers<ReplicateTimer>,
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

/// Mode of the node, and batches of blocks to replicate.
#[derive(Debug)]
pub(crate) struct Outbound {
    mode: NodeMode,
    revision: u64,
    pub(crate) batches: Slab<Batch>,
    pub(crate) queries: Slab<PlacementQuery>,
    pub(crate) offers: Slab<OpenOffer>,
    /// Keys that became hot and are in no batch yet; at most one batch.
    hot: Vec<BlockKey>,
    drain: Drain,
    moving: Option<MoveProgress>,
    /// Time until which a peer gets no offers of a size class. Adding an entry removes expired ones, so there
    /// are at most as many entries as offers answered within [`OFFER_RETRY_MAX`].
    offer_pauses: BTreeMap<(NodeId, SizeClassId), Tick>,
    /// Time at which to continue if no event arrives before.
    wake: Option<Tick>,
    /// Slot bytes accepted by peers since the start.
    replicated_bytes: u64,
}

/// Blocks of one size class that are replicated for one reason.
#[derive(Debug)]
pub(crate) struct Batch {
    pub(crate) reason: PlaceReason,
    size_class: SizeClassId,
    pub(crate) blocks: Vec<OutboundBlock>,
    pub(crate) stage: Stage,
    /// Number of blocks at the front that the last query did not cover.
    unqueried: usize,
    /// Whether all blocks were just filtered: those that no peer has accepted need a placement.
    filtered: bool,
    /// Consecutive rounds without progress of any block.
    fruitless: u32,
}

/// Block that, as far as known, lacks a replica.
#[derive(Clone, Copy, Debug)]
pub(crate) struct OutboundBlock {
    key: BlockKey,
    acceptance: Acceptance,
}

/// Whether a peer has accepted a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Acceptance {
    Open,
    Accepted { since: Tick },
}

impl OutboundBlock {
    /// Whether a peer accepted the block and may still be storing it.
    fn is_pending(&self, now: Tick) -> bool {
        matches!(self.acceptance, Acceptance::Accepted { since } if since.after(PULL_WAIT_MAX) > now)
    }
}

/// Condition that a batch waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stage {
    /// Query it at this time.
    Due(Tick),
    /// Answer of the control plane.
    Querying(SlabId),
    /// Answers of `open` peers. The next query is at the earliest time that any of them allows, so that a
    /// full peer does not delay blocks for others.
    Offering { open: u32, again: Option<Tick> },
}

/// Offer to a peer that is not answered yet.
#[derive(Debug)]
pub(crate) struct OpenOffer {
    pub(crate) batch: SlabId,
    node: NodeId,
    reason: PlaceReason,
    keys: Vec<BlockKey>,
    /// Slot bytes of each block.
    slot_bytes: u64,
    expires: Tick,
}

impl Outbound {
    /// Creates the state of an active node without batches.
    pub(crate) fn new() -> Outbound {
        Outbound {
            mode: NodeMode::Active,
            revision: 0,
            batches: Slab::new(),
            queries: Slab::new(),
            offers: Slab::new(),
            hot: Vec::new(),
            drain: Drain::default(),
            moving: None,
            offer_pauses: BTreeMap::new(),
            wake: None,
            replicated_bytes: 0,
        }
    }

    /// Mode of this node.
    pub(crate) fn mode(&self) -> NodeMode {
        self.mode
    }

    /// Time at which to continue if no event arrives before.
    pub(crate) fn wake(&self) -> Option<Tick> {
        self.wake
    }

    /// Whether no block needs replication, which is the normal state.
    fn is_idle(&self) -> bool {
        let nothing_to_send = self.hot.is_empty() && self.moving.is_none() && self.drain.is_off();
        nothing_to_send && self.batches.len() == 0
    }

    /// Number of batches with a kind of reason.
    fn count(&self, kind: impl Fn(PlaceReason) -> bool) -> usize {
        self.batches.iter().filter(|(_, batch)| kind(batch.reason)).count()
    }

    /// Number of batches of a kind that may start. Batches without progress do not use the regular places.
    fn room_for(&self, kind: impl Fn(PlaceReason) -> bool) -> usize {
        let all = self.count(&kind);
        let of_kind = self.batches.iter().filter(|(_, batch)| kind(batch.reason));
        let parked = of_kind.filter(|(_, batch)| batch.fruitless >= PARKED_AFTER_ROUNDS).count();
        let remaining = (OUTBOUND_BATCHES_MAX + PARKED_BATCHES_MAX).saturating_sub(all);
        OUTBOUND_BATCHES_MAX.saturating_sub(all - parked).min(remaining)
    }

    /// Whether a peer gets no offers of a size class now.
    fn is_paused(&self, node: NodeId, size_class: SizeClassId, now: Tick) -> bool {
        self.offer_pauses.get(&(node, size_class)).is_some_and(|until| *until > now)
    }

    /// Stops offers of a size class to a peer until a time.
    fn pause_offers(&mut self, of: (NodeId, SizeClassId), until: Tick, now: Tick) {
        self.offer_pauses.retain(|_, until| *until > now);
        self.offer_pauses.insert(of, until);
    }

    /// Drops the batches of a kind. Late answers find no batch.
    fn forget(&mut self, kind: impl Fn(PlaceReason) -> bool) {
        let gone: Vec<SlabId> =
            self.batches.iter().filter(|(_, batch)| kind(batch.reason)).map(|(id, _)| id).collect();
        for id in gone {
            self.batches.remove(id);
        }
    }

    fn begin_batch(&mut self, reason: PlaceReason, size_class: SizeClassId, keys: Vec<BlockKey>, now: Tick) {
        let blocks =
            keys.into_iter().map(|key| OutboundBlock { key, acceptance: Acceptance::Open }).collect();
        self.batches.insert(Batch {
            reason,
            size_class,
            blocks,
            stage: Stage::Due(now),
            unqueried: 0,
            filtered: false,
            fruitless: 0,
        });
    }
}

impl Batch {
    fn is_due(&self, now: Tick) -> bool {
        matches!(self.stage, Stage::Due(at) if at <= now)
    }
}

impl Replicate {
    /// Creates the state of an active node.
    pub(crate) fn new(settings: &Settings) -> Replicate {
        Replicate {
            hot: HotKeys::new(settings.hot_reads, settings.hot_window),
            outbound: Outbound::new(),
            bandwidth: Bandwidth::new(settings.placement_bandwidth),
            timers: Timers::default(),
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

    /// Bandwidth of replication in both directions.
    pub(crate) fn bandwidth(&mut self) -> &mut Bandwidth {
        &mut self.bandwidth
    }

    /// Time of the next deadline or step.
    pub(crate) fn next_deadline(&self) -> Option<Tick> {
        [self.outbound.wake(), self.timers.next()].into_iter().flatten().min()
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

    /// Number of timers, queries and offers, for the audit.
    pub(crate) fn audit_timers(&self) -> Result<(), String> {
        let waiting = self.outbound.queries.len() + self.outbound.offers.len();
        ensure!(self.timers.len() == waiting, "{waiting} queries and offers, {} timers", self.timers.len());
        Ok(())
    }

    /// Sets the counters and gauges of replication.
    pub(crate) fn set_counters(&self, all: &mut Counters) {
        self.counters.copy_to(all);
        let drain = self.outbound.progress();
        all.node_mode = self.outbound.mode() as u64;
        all.drain_walked_blocks = drain.walked_blocks;
        all.drain_nowhere_blocks = drain.nowhere_blocks;
        all.given_bytes = drain.moved_bytes;
    }

    /// Sets the mode of this node, unless it is outdated.
    pub(crate) fn set_mode(&mut self, now: Tick, mode: NodeMode, revision: u64) {
        if revision <= self.outbound.revision {
            return;
        }
        self.outbound.revision = revision;
        if std::mem::replace(&mut self.outbound.mode, mode) != mode {
            self.outbound.forget(|reason| reason == PlaceReason::Drain);
            self.outbound.drain = Drain::of_mode(mode, now);
        }
    }

    /// Counts a read of a block by a peer.
    pub(crate) fn note_read(&mut self, cache: &Cache, now: Tick, entry: EntryIndex) {
        let state = cache.index.entry(entry);
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

    /// Continues replication, a bounded amount for each event.
    pub(crate) fn advance(&mut self, cache: &Cache, cx: &mut Context) {
        if self.bandwidth.is_disabled() || self.outbound.is_idle() {
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

    /// Whether a block is on this node, durable, and of a size class. Others are not replicated.
    fn is_replicable(&self, cache: &Cache, key: &BlockKey, size_class: SizeClassId) -> bool {
        let state = cache.index.find(key).map(|entry| cache.index.entry(entry));
        state.is_some_and(|state| state.size_class() == size_class && state.stored().is_some())
    }

    fn collect_hot(&mut self, cache: &Cache, now: Tick) {
        let room = HOT_BATCHES_MAX.saturating_sub(self.outbound.count(|reason| reason == PlaceReason::Hot));
        if self.outbound.hot.is_empty() || room == 0 {
            return;
        }
        let mut left = Vec::new();
        let keys = std::mem::take(&mut self.outbound.hot);
        for (at, (size_class, keys)) in self.group_by_size_class(cache, keys).into_iter().enumerate() {
            if at < room {
                self.outbound.begin_batch(PlaceReason::Hot, size_class, keys, now);
            } else {
                left.extend(keys);
            }
        }
        self.outbound.hot = left;
    }

    /// Groups durable blocks by size class.
    fn group_by_size_class(
        &self,
        cache: &Cache,
        keys: impl IntoIterator<Item = BlockKey>,
    ) -> BTreeMap<SizeClassId, Vec<BlockKey>> {
        let mut size_classes: BTreeMap<SizeClassId, Vec<BlockKey>> = BTreeMap::new();
        for key in keys {
            let state = cache.index.find(&key).map(|entry| cache.index.entry(entry));
            if let Some(state) = state.filter(|state| state.stored().is_some()) {
                size_classes.entry(state.size_class()).or_default().push(key);
            }
        }
        size_classes
    }

    /// Offers blocks to a node as far as the bandwidth allows; returns the number of offers.
    fn offer(
        &mut self,
        cache: &Cache,
        cx: &mut Context,
        batch: SlabId,
        (node, mut keys): (NodeId, Vec<BlockKey>),
    ) -> u32 {
        let Some(Batch { reason, size_class, .. }) = self.outbound.batches.get(batch) else { return 0 };
        let (reason, size_class) = (*reason, *size_class);
        let SizeClass { tenant, layout, slot_bytes, .. } = *cache.sizes.get(size_class);
        keys.retain(|key| self.is_replicable(cache, key, size_class));
        let allowed = keys.iter().take_while(|_| self.bandwidth.take(slot_bytes, cx.now).is_ok()).count();
        keys.truncate(allowed);
        if keys.is_empty() {
            return 0;
        }
        self.counters.offers += 1;
        self.counters.offer_keys += keys.len() as u64;
        let expires = cx.now.after(OFFER_TIMEOUT).after(LOOKUP_GRACE);
        let open = OpenOffer { batch, node, reason, keys: keys.clone(), slot_bytes, expires };
        let id = self.outbound.offers.insert(open);
        self.timers.set(expires, ReplicateTimer::Offer(id));
        let (offer, deadline) = (OfferId(id.0), OFFER_TIMEOUT);
        cx.emit(Effect::Offer(Offer { offer, node, tenant, layout, keys, deadline }));
        1
    }

    /// Handles an offer that failed or timed out.
    pub(crate) fn offer_failed(&mut self, now: Tick, id: SlabId) {
        if self.outbound.offers.get(id).is_some() {
            self.counters.offer_failures += 1;
            self.offer_answered(now, id, &[], Duration::ZERO);
        }
    }

    /// Handles a peer's answer to an offer.
    pub(crate) fn offer_answered(&mut self, now: Tick, id: SlabId, taken: &[u32], retry_after: Duration) {
        let Some(offer) = self.outbound.offers.remove(id) else { return };
        self.timers.clear(offer.expires, ReplicateTimer::Offer(id));
        let taken: BTreeSet<BlockKey> =
            taken.iter().filter_map(|at| offer.keys.get(*at as usize).copied()).collect();
        let bytes = offer.slot_bytes * taken.len() as u64;
        self.bandwidth.return_tokens(offer.slot_bytes * offer.keys.len() as u64 - bytes);
        self.counters.offer_keys_taken += taken.len() as u64;
        if offer.reason == PlaceReason::Hot {
            self.counters.hot_blocks_given += taken.len() as u64;
            self.outbound.replicated_bytes += nvme_bytes(offer.slot_bytes) * taken.len() as u64;
        }
        let pause = retry_after.clamp(PLACE_RETRY, OFFER_RETRY_MAX);
        let Some(batch) = self.outbound.batches.get_mut(offer.batch) else { return };
        let size_class = batch.size_class;
        for block in batch.blocks.iter_mut().filter(|block| taken.contains(&block.key)) {
            let acceptance = Acceptance::Accepted { since: now };
            if std::mem::replace(&mut block.acceptance, acceptance) == Acceptance::Open {
                batch.fruitless = 0;
            }
        }
        if let Stage::Offering { open, again } = batch.stage {
            let retry_at = now.after(pause);
            let again = again.map_or(retry_at, |again| again.min(retry_at));
            batch.stage = match open - 1 {
                0 => Stage::Due(again),
                open => Stage::Offering { open, again: Some(again) },
            };
        }
        if taken.len() < offer.keys.len() {
            self.outbound.pause_offers((offer.node, size_class), now.after(pause), now);
        }
        self.end_round(offer.batch);
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

    /// Checks that batches, queries and offers refer to each other, for the audit.
    pub(crate) fn audit_outbound(&self) -> Result<(), String> {
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
            if batch.reason == PlaceReason::Drain && *mode != NodeMode::Draining {
                return Err(format!("{id:?} drains, but the node is {mode:?}"));
            }
        }
        self.hot.audit()
    }
}
