//! Giving blocks to other nodes: hot ones, all of a draining node, those that are to move.
//!
//! ```text
//!  hot keys, walk, order of eviction ──▶ batch ──Place──▶ asked ──To──▶ Offer ──▶ taken, or not
//!                                         ▲                 │Enough                 │
//!                                         └──── a while ────┼───────────────────────┘
//!                                                           ▼ done (a moved block: dropped here)
//! ```
//!
//! A batch is blocks of one shape and one reason. It is asked about again until every block of it has enough replicas,
//! has gone from here, or goes nowhere: nothing depends on an answer that was lost, came twice or came late. What
//! destroys something, dropping a moved copy, follows only from the answer that the other copy is durable.
//!
//! A block that was taken is offered again only when the peer must have given it up; the copy in DRAM is then
//! compared with its checksums, because a peer cannot say what was wrong with it. A peer that took less than it was
//! offered and wishes for a pause is offered no blocks of the shape until then, whoever else answers meanwhile.
//!
//! Only durable blocks are given; those that are not yet become so by the write-back. Costs of one event are bounded by the
//! size of a batch, and bytes by the bandwidth ([`super::bandwidth`]), which is taken when blocks are offered and given
//! back for those that were not taken.

mod asking;
mod drain;
mod moves;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use reprise_policy::eviction::EntryIndex;
use reprise_policy::{BlockKey, NodeId, NodeMode, Tick};

use super::AgentCore;
use super::hot::Heat;
use super::limits::{
    GIVING_BATCHES_MAX, GIVING_STEP_EVERY, HOT_BATCHES_MAX, LOOKUP_GRACE, OFFER_RETRY_MAX, OFFER_TIMEOUT,
    PARKED_AFTER_ROUNDS, PARKED_BATCHES_MAX, PLACE_AGAIN, PLACE_KEYS_MAX, PULL_PATIENCE,
};
use super::shapes::{Shape, ShapeId};
use super::slab::{Slab, SlabId};
use super::tenants::nvme_bytes;
use super::timers::Timer;
use crate::effect::{Effect, Offer, OfferId, PlaceReason};
pub(super) use asking::Ask;
use drain::Drain;
use moves::Moving;

/// What is being given away; see the module.
#[derive(Debug)]
pub(super) struct Giving {
    mode: NodeMode,
    revision: u64,
    pub(super) batches: Slab<Batch>,
    pub(super) asks: Slab<Ask>,
    pub(super) offers: Slab<OpenOffer>,
    /// Keys that have become hot, not asked about yet; at most one batch's.
    hot: Vec<BlockKey>,
    drain: Drain,
    moving: Option<Moving>,
    /// Peers that want no blocks of a shape until then. Those whose time has come are dropped when one is added, so there are as
    /// many as offers are answered in [`OFFER_RETRY_MAX`].
    rests: BTreeMap<(NodeId, ShapeId), Tick>,
    /// When this is to be looked at again.
    wake: Option<Tick>,
    /// Slot bytes given away since the start.
    given_bytes: u64,
}

/// Blocks of one shape that are given for one reason.
#[derive(Debug)]
pub(super) struct Batch {
    pub(super) reason: PlaceReason,
    shape: ShapeId,
    pub(super) blocks: Vec<Given>,
    pub(super) stage: Stage,
    /// So many of the first blocks were not part of the last question.
    unasked: usize,
    /// All blocks were just asked about: those that nobody has taken want a place.
    sifted: bool,
    /// Rounds in a row in which no block got further.
    fruitless: u32,
}

/// A block that has not enough replicas yet, as far as is known.
#[derive(Clone, Copy, Debug)]
pub(super) struct Given {
    key: BlockKey,
    taken: Taken,
}

/// Whether a peer has said that it takes a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Taken {
    No,
    Yes { since: Tick },
}

impl Given {
    /// Whether a peer has taken the block, and may still be at it.
    fn is_coming(&self, now: Tick) -> bool {
        matches!(self.taken, Taken::Yes { since } if since.after(PULL_PATIENCE) > now)
    }
}

/// What a batch waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    /// To be asked about from then on.
    Due(Tick),
    /// The control plane's answer.
    Asking(SlabId),
    /// Answers of so many peers. Asked about again then, at the earliest wish of those that have answered: who has no room
    /// does not hold up what the others take.
    Offering { open: u32, again: Option<Tick> },
}

/// An offer to a peer.
#[derive(Debug)]
pub(super) struct OpenOffer {
    pub(super) batch: SlabId,
    node: NodeId,
    reason: PlaceReason,
    keys: Vec<BlockKey>,
    /// Of each block.
    slot_bytes: u64,
    expires: Tick,
}

impl Giving {
    /// Nothing is given.
    pub(super) fn new() -> Giving {
        Giving {
            mode: NodeMode::Active,
            revision: 0,
            batches: Slab::new(),
            asks: Slab::new(),
            offers: Slab::new(),
            hot: Vec::new(),
            drain: Drain::default(),
            moving: None,
            rests: BTreeMap::new(),
            wake: None,
            given_bytes: 0,
        }
    }

    /// How far this node is used.
    pub(super) fn mode(&self) -> NodeMode {
        self.mode
    }

    /// When there is more to do though nothing happens.
    pub(super) fn wake(&self) -> Option<Tick> {
        self.wake
    }

    /// Whether there is nothing to give: nearly always.
    fn is_idle(&self) -> bool {
        let nothing_wanted = self.hot.is_empty() && self.moving.is_none() && self.drain.is_off();
        nothing_wanted && self.batches.len() == 0
    }

    /// Batches of a kind.
    fn count(&self, kind: impl Fn(PlaceReason) -> bool) -> usize {
        self.batches.iter().filter(|(_, batch)| kind(batch.reason)).count()
    }

    /// How many batches of a kind may begin: those that make no progress keep none of the usual ones from theirs.
    fn room_for(&self, kind: impl Fn(PlaceReason) -> bool) -> usize {
        let all = self.count(&kind);
        let of_kind = self.batches.iter().filter(|(_, batch)| kind(batch.reason));
        let parked = of_kind.filter(|(_, batch)| batch.fruitless >= PARKED_AFTER_ROUNDS).count();
        let beside_parked = (GIVING_BATCHES_MAX + PARKED_BATCHES_MAX).saturating_sub(all);
        GIVING_BATCHES_MAX.saturating_sub(all - parked).min(beside_parked)
    }

    /// Whether a peer wants no blocks of a shape now.
    fn is_resting(&self, node: NodeId, shape: ShapeId, now: Tick) -> bool {
        self.rests.get(&(node, shape)).is_some_and(|until| *until > now)
    }

    /// A peer wants no blocks of a shape for a while.
    fn let_rest(&mut self, of: (NodeId, ShapeId), until: Tick, now: Tick) {
        self.rests.retain(|_, until| *until > now);
        self.rests.insert(of, until);
    }

    /// Forgets batches of a kind. Answers that still come find nothing.
    fn forget(&mut self, kind: impl Fn(PlaceReason) -> bool) {
        let gone: Vec<SlabId> =
            self.batches.iter().filter(|(_, batch)| kind(batch.reason)).map(|(id, _)| id).collect();
        for id in gone {
            self.batches.remove(id);
        }
    }

    fn begin(&mut self, reason: PlaceReason, shape: ShapeId, keys: Vec<BlockKey>, now: Tick) {
        let blocks = keys.into_iter().map(|key| Given { key, taken: Taken::No }).collect();
        self.batches.insert(Batch {
            reason,
            shape,
            blocks,
            stage: Stage::Due(now),
            unasked: 0,
            sifted: false,
            fruitless: 0,
        });
    }
}

impl Batch {
    fn is_due(&self, now: Tick) -> bool {
        matches!(self.stage, Stage::Due(at) if at <= now)
    }
}

impl AgentCore {
    /// The control plane has said how far this node is used.
    pub(super) fn set_mode(&mut self, mode: NodeMode, revision: u64) {
        if revision <= self.giving.revision {
            return;
        }
        self.giving.revision = revision;
        if std::mem::replace(&mut self.giving.mode, mode) != mode {
            self.giving.forget(|reason| reason == PlaceReason::Drain);
            self.giving.drain = Drain::of_mode(mode, self.now);
        }
    }

    /// A peer reads a block.
    pub(super) fn note_read(&mut self, entry: EntryIndex) {
        let state = self.index.entry(entry);
        let wanted = !self.bandwidth.is_none() && self.giving.mode != NodeMode::Draining;
        if state.stored().is_none() || !wanted {
            return;
        }
        let key = state.key();
        if self.hot.note(key, self.now) == Heat::BecameHot && self.giving.hot.len() < PLACE_KEYS_MAX {
            self.counters.hot_blocks += 1;
            self.giving.hot.push(key);
        }
    }

    /// Goes on giving blocks away, a bounded piece for each event.
    pub(super) fn give(&mut self) {
        if self.bandwidth.is_none() || self.giving.is_idle() {
            self.giving.wake = None;
            return;
        }
        self.collect_hot();
        self.walk_on();
        self.collect_moves();
        self.ask_due();
        self.end_walk_if_over();
        self.giving.wake = self.next_giving();
    }

    /// Whether a block is here, durable and of a shape; what is not is not given.
    fn is_givable(&self, key: &BlockKey, shape: ShapeId) -> bool {
        let state = self.index.find(key).map(|entry| self.index.entry(entry));
        state.is_some_and(|state| state.shape() == shape && state.stored().is_some())
    }

    fn collect_hot(&mut self) {
        let room = HOT_BATCHES_MAX.saturating_sub(self.giving.count(|reason| reason == PlaceReason::Hot));
        if self.giving.hot.is_empty() || room == 0 {
            return;
        }
        let mut left = Vec::new();
        let keys = std::mem::take(&mut self.giving.hot);
        for (at, (shape, keys)) in self.by_shape(keys).into_iter().enumerate() {
            if at < room {
                self.giving.begin(PlaceReason::Hot, shape, keys, self.now);
            } else {
                left.extend(keys);
            }
        }
        self.giving.hot = left;
    }

    /// Durable blocks by their shapes.
    fn by_shape(&self, keys: impl IntoIterator<Item = BlockKey>) -> BTreeMap<ShapeId, Vec<BlockKey>> {
        let mut shapes: BTreeMap<ShapeId, Vec<BlockKey>> = BTreeMap::new();
        for key in keys {
            let state = self.index.find(&key).map(|entry| self.index.entry(entry));
            if let Some(state) = state.filter(|state| state.stored().is_some()) {
                shapes.entry(state.shape()).or_default().push(key);
            }
        }
        shapes
    }

    /// Offers blocks to a node, as many as the bandwidth allows; how many offers were made.
    fn offer(&mut self, batch: SlabId, node: NodeId, mut keys: Vec<BlockKey>) -> u32 {
        let Some(Batch { reason, shape, .. }) = self.giving.batches.get(batch) else { return 0 };
        let (reason, shape) = (*reason, *shape);
        let Shape { tenant, layout, slot_bytes, .. } = *self.shapes.get(shape);
        keys.retain(|key| self.is_givable(key, shape));
        let allowed = keys.iter().take_while(|_| self.bandwidth.take(slot_bytes, self.now).is_ok()).count();
        keys.truncate(allowed);
        if keys.is_empty() {
            return 0;
        }
        self.counters.offers += 1;
        self.counters.offer_keys += keys.len() as u64;
        let expires = self.now.after(OFFER_TIMEOUT).after(LOOKUP_GRACE);
        let open = OpenOffer { batch, node, reason, keys: keys.clone(), slot_bytes, expires };
        let id = self.giving.offers.insert(open);
        self.timers.set(expires, Timer::Offer(id));
        let (offer, deadline) = (OfferId(id.0), OFFER_TIMEOUT);
        self.emit(Effect::Offer(Offer { offer, node, tenant, layout, keys, deadline }));
        1
    }

    /// A peer cannot be reached, or has not answered.
    pub(super) fn offer_failed(&mut self, id: SlabId) {
        if self.giving.offers.get(id).is_some() {
            self.counters.offer_failures += 1;
            self.offer_answered(id, &[], Duration::ZERO);
        }
    }

    /// A peer has said which blocks it takes.
    pub(super) fn offer_answered(&mut self, id: SlabId, taken: &[u32], retry_after: Duration) {
        let Some(offer) = self.giving.offers.remove(id) else { return };
        self.timers.clear(offer.expires, Timer::Offer(id));
        let taken: BTreeSet<BlockKey> =
            taken.iter().filter_map(|at| offer.keys.get(*at as usize).copied()).collect();
        let bytes = offer.slot_bytes * taken.len() as u64;
        self.bandwidth.give_back(offer.slot_bytes * offer.keys.len() as u64 - bytes);
        self.counters.offer_keys_taken += taken.len() as u64;
        if offer.reason == PlaceReason::Hot {
            self.counters.hot_blocks_given += taken.len() as u64;
            self.giving.given_bytes += nvme_bytes(offer.slot_bytes) * taken.len() as u64;
        }
        let pause = retry_after.clamp(PLACE_AGAIN, OFFER_RETRY_MAX);
        let Some(batch) = self.giving.batches.get_mut(offer.batch) else { return };
        let shape = batch.shape;
        for block in batch.blocks.iter_mut().filter(|block| taken.contains(&block.key)) {
            let taken = Taken::Yes { since: self.now };
            if std::mem::replace(&mut block.taken, taken) == Taken::No {
                batch.fruitless = 0;
            }
        }
        if let Stage::Offering { open, again } = batch.stage {
            let wish = self.now.after(pause);
            let again = again.map_or(wish, |again| again.min(wish));
            batch.stage = match open - 1 {
                0 => Stage::Due(again),
                open => Stage::Offering { open, again: Some(again) },
            };
        }
        if taken.len() < offer.keys.len() {
            self.giving.let_rest((offer.node, shape), self.now.after(pause), self.now);
        }
        self.end_round(offer.batch);
    }

    /// When there is more to do though nothing happens.
    fn next_giving(&mut self) -> Option<Tick> {
        let due = self.giving.batches.iter().filter_map(|(_, batch)| match batch.stage {
            Stage::Due(at) => Some(at),
            Stage::Asking(_) | Stage::Offering { .. } => None,
        });
        let due = due.min().map(|at| at.max(self.now.after(self.bandwidth.wait(self.now))));
        let next = [due, self.next_walk(), self.next_move()].into_iter().flatten().min()?;
        // Whatever could be done now was done.
        Some(next.max(self.now.after(GIVING_STEP_EVERY)))
    }

    /// Batches, questions and offers know of each other; for the audit.
    pub(super) fn audit_giving(&self) -> Result<(), String> {
        let Giving { batches, asks, offers, mode, .. } = &self.giving;
        for (id, batch) in batches.iter() {
            if batch.blocks.is_empty() || batch.blocks.len() > PLACE_KEYS_MAX {
                return Err(format!("{id:?} gives {} blocks", batch.blocks.len()));
            }
            let waiting = offers.iter().filter(|(_, offer)| offer.batch == id).count();
            let known = match batch.stage {
                Stage::Due(_) => waiting == 0,
                Stage::Asking(ask) => waiting == 0 && asks.get(ask).is_some_and(|ask| ask.batch == id),
                Stage::Offering { open, .. } => waiting == open as usize && open > 0,
            };
            if !known {
                return Err(format!("{id:?} is {:?}, with {waiting} offers", batch.stage));
            }
            if batch.reason == PlaceReason::Drain && *mode != NodeMode::Draining {
                return Err(format!("{id:?} drains a node that is {mode:?}"));
            }
        }
        self.hot.audit()
    }
}
