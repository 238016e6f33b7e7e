//! Inbound replication: blocks that peers offer, and that this node stores.
//!
//! ```text
//!  PeerOffer ──▶ accepted? ──already here──▶ saved, if it is not durable
//!                  │ waiting ──room──▶ fetch without a session ──complete──▶ saved ──▶ announced as durable
//!                  └─▶ AnswerOffer: accepted keys, and when to offer the others again
//! ```
//!
//! Accepted blocks never evict other blocks from a device. A block is rejected without room beyond the free
//! target, and dropped if that room is used before the fetch. The bandwidth limits bytes at acceptance.
//! [`PULL_BYTES_MAX`](crate::limits::PULL_BYTES_MAX) and a share of the arena limit bytes that are being fetched
//! and written. Acceptance is not binding: the peer offers a block again that was not stored.
//!
//! A fetched block without a reader is evicted from DRAM first once it is saved, so that it displaces no
//! block in use. Otherwise it is an ordinary block from the start of its fetch: loads attach to it, and a
//! commit of the same block replaces it.

use std::collections::{BTreeSet, VecDeque};
use std::time::Duration;

use reprise_policy::{BlockKey, NodeId, NodeMode, Tick};

use crate::cache::{Cache, OfferedBlock, SizeClassId};
use crate::context::Context;
use crate::effect::{Diagnostic, Effect, LossReason};
use crate::event::PeerOffer;
use crate::limits::{
    OFFER_RETRY_MAX, OFFERED_SIZE_CLASSES_MAX, PLACE_KEYS_MAX, PLACE_RETRY, PULL_RETRY, PULL_WAIT_MAX,
    PULLS_WAITING_MAX,
};
use crate::replicate::{Replicate, ReplicateOutcome};

/// Accepted blocks, and limits on them.
#[derive(Debug, Default)]
pub(super) struct Inbound {
    waiting: VecDeque<Pull>,
    /// Keys of the pulls in `waiting`.
    keys: BTreeSet<BlockKey>,
    /// Time of the next attempt, after the arena had no room.
    retry_at: Option<Tick>,
    /// Whether the rejection of new layouts was reported.
    rejection_reported: bool,
}

/// Accepted block that is not being fetched yet; it holds its size class.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pull {
    pub(crate) key: BlockKey,
    pub(crate) size_class: SizeClassId,
    pub(crate) from: NodeId,
    since: Tick,
}

/// Pulls of one event.
#[derive(Debug, Default)]
pub(crate) struct PullRound {
    /// Size classes without room in the arena.
    stalled: BTreeSet<SizeClassId>,
    /// Pulls of those size classes.
    passed: Vec<Pull>,
}

/// What happens to the oldest accepted block.
#[derive(Debug)]
pub(crate) enum PullStep {
    /// Fetch it; [`Replicate::pull_ended`] takes the result.
    Fetch(Pull),
    /// It needs no fetch, or waits.
    Passed,
}

/// Limits on the blocks of one offer.
struct OfferAllowance {
    /// Number of blocks that may still be accepted.
    blocks: u64,
    /// Blocks in DRAM only that this offer makes durable.
    saved: BTreeSet<BlockKey>,
}

impl Inbound {
    /// Number of accepted blocks that are not being fetched yet.
    pub(super) fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// Time at which to continue if no event arrives before.
    pub(super) fn wake(&self) -> Option<Tick> {
        let first = self.waiting.front()?;
        Some(self.retry_at.unwrap_or(first.since.after(PULL_WAIT_MAX)))
    }

    /// Checks that a block waits once.
    pub(super) fn audit(&self) -> Result<(), String> {
        let Inbound { waiting, keys, .. } = self;
        let same = waiting.iter().all(|pull| keys.contains(&pull.key)) && waiting.len() == keys.len();
        ensure!(same, "{} waiting pulls, {} keys", waiting.len(), keys.len());
        Ok(())
    }
}

impl OfferAllowance {
    /// Uses up the allowance of one block; `false` if none is left.
    fn take(&mut self) -> bool {
        let any = self.blocks > 0;
        self.blocks = self.blocks.saturating_sub(1);
        any
    }
}

impl Replicate {
    /// Handles a peer's offer.
    pub(crate) fn peer_offer(&mut self, cache: &mut Cache, cx: &mut Context, offered: &PeerOffer) {
        self.counters.incoming_offers += 1;
        self.counters.incoming_offer_keys += offered.keys.len() as u64;
        let (taken, retry_after) = match self.size_class_of_offer(cache, cx, offered) {
            Some(size_class) => self.accept_offer(cache, cx.now, offered, size_class),
            None => (Vec::new(), OFFER_RETRY_MAX),
        };
        self.counters.incoming_offer_keys_taken += taken.len() as u64;
        cx.emit(Effect::AnswerOffer { offer: offered.offer, taken, retry_after });
    }

    /// Returns the size class of offered blocks, or `None` if this node rejects the whole offer.
    fn size_class_of_offer(
        &mut self,
        cache: &mut Cache,
        cx: &mut Context,
        offered: &PeerOffer,
    ) -> Option<SizeClassId> {
        let accepts = self.outbound.mode() == NodeMode::Active && !self.bandwidth.is_disabled();
        let accepts = accepts && cache.may_accept_replicas(offered.tenant);
        if !accepts || offered.keys.len() > PLACE_KEYS_MAX || !cache.may_hold(offered.layout.slot_bytes()) {
            return None;
        }
        let is_new = !cache.is_interned(offered.tenant, offered.layout);
        if is_new && cache.size_classes_in_use() >= OFFERED_SIZE_CLASSES_MAX {
            if !std::mem::replace(&mut self.inbound.rejection_reported, true) {
                let layouts = OFFERED_SIZE_CLASSES_MAX;
                cx.emit(Effect::Diagnostic(Diagnostic::OffersRefused { layouts }));
            }
            return None;
        }
        cache.intern(offered.tenant, offered.layout)
    }

    /// Accepts the blocks that there is room for; returns their indices and the delay for the others.
    fn accept_offer(
        &mut self,
        cache: &mut Cache,
        now: Tick,
        offered: &PeerOffer,
        size_class: SizeClassId,
    ) -> (Vec<u32>, Duration) {
        let blocks = cache.room_without_eviction(size_class);
        let mut room = OfferAllowance { blocks, saved: BTreeSet::new() };
        let (mut taken, mut retry_after) = (Vec::new(), Duration::MAX);
        for (at, key) in (0..).zip(&offered.keys) {
            let pull = Pull { key: *key, size_class, from: offered.from, since: now };
            match self.accept_block(cache, pull, &mut room) {
                Ok(()) => taken.push(at),
                Err(wait) => retry_after = retry_after.min(wait),
            }
        }
        let all = taken.len() == offered.keys.len();
        (taken, if all { Duration::ZERO } else { retry_after })
    }

    /// Accepts a block, or returns the delay after which to offer it again.
    fn accept_block(
        &mut self,
        cache: &mut Cache,
        pull: Pull,
        room: &mut OfferAllowance,
    ) -> Result<(), Duration> {
        let Pull { key, size_class, since: now, .. } = pull;
        match cache.offered_block(&key, size_class) {
            OfferedBlock::Durable => return Ok(()),
            OfferedBlock::Foreign => return Err(OFFER_RETRY_MAX),
            _ if self.inbound.keys.contains(&key) || room.saved.contains(&key) => return Ok(()),
            _ if !room.take() => return Err(OFFER_RETRY_MAX),
            OfferedBlock::InDram(frame) => {
                room.saved.insert(key);
                self.outcomes.push_back(ReplicateOutcome::SaveReplica { frame });
                return Ok(());
            }
            OfferedBlock::Filling(fill) => {
                self.outcomes.push_back(ReplicateOutcome::Retain { fill });
                return Ok(());
            }
            OfferedBlock::Unknown => {}
        }
        if self.inbound.waiting.len() >= PULLS_WAITING_MAX {
            return Err(PLACE_RETRY);
        }
        if self.bandwidth.take(cache.slot_bytes(size_class), now).is_err() {
            return Err(self.bandwidth.wait(now));
        }
        cache.hold_size_class(size_class);
        cache.add_pending(size_class);
        self.inbound.keys.insert(key);
        self.inbound.waiting.push_back(pull);
        Ok(())
    }

    /// Begins to start the fetches that there is room for; `None` if no block waits, or not yet.
    pub(crate) fn begin_pulls(&mut self, now: Tick) -> Option<PullRound> {
        if self.inbound.waiting.is_empty() || self.inbound.retry_at.is_some_and(|retry_at| retry_at > now) {
            return None;
        }
        self.inbound.retry_at = None;
        Some(PullRound::default())
    }

    /// Decides about the oldest accepted block; `None` if no further fetch may start. Blocks without room in
    /// the arena do not delay other size classes. `in_flight` are the slot bytes of replicas that are being
    /// fetched or written.
    pub(crate) fn next_pull(
        &mut self,
        cache: &mut Cache,
        now: Tick,
        round: &mut PullRound,
        in_flight: u64,
    ) -> Option<PullStep> {
        let pull = *self.inbound.waiting.front()?;
        let is_late = pull.since.after(PULL_WAIT_MAX) <= now;
        if is_late || self.outbound.mode() != NodeMode::Active {
            self.inbound.waiting.pop_front();
            self.drop_pull(cache, &pull);
            return Some(PullStep::Passed);
        }
        if round.stalled.contains(&pull.size_class) {
            self.inbound.waiting.pop_front();
            round.passed.push(pull);
            return Some(PullStep::Passed);
        }
        if in_flight > 0 && in_flight + cache.slot_bytes(pull.size_class) > cache.pull_bytes_max() {
            return None;
        }
        self.inbound.waiting.pop_front();
        match cache.offered_block(&pull.key, pull.size_class) {
            OfferedBlock::Unknown if cache.has_pending_room(pull.size_class) => {
                return Some(PullStep::Fetch(pull));
            }
            OfferedBlock::Unknown => self.drop_pull(cache, &pull),
            OfferedBlock::InDram(frame) => {
                self.outcomes.push_back(ReplicateOutcome::SaveReplica { frame });
                self.cancel_pull(cache, &pull);
            }
            OfferedBlock::Filling(fill) => {
                self.outcomes.push_back(ReplicateOutcome::Retain { fill });
                self.cancel_pull(cache, &pull);
            }
            OfferedBlock::Durable | OfferedBlock::Foreign => self.cancel_pull(cache, &pull),
        }
        Some(PullStep::Passed)
    }

    /// Handles the result of [`PullStep::Fetch`]. A block that could not be fetched for another reason than
    /// lack of room is here by now.
    pub(crate) fn pull_ended(
        &mut self,
        cache: &mut Cache,
        round: &mut PullRound,
        pull: &Pull,
        result: Result<(), LossReason>,
    ) {
        match result {
            Ok(()) => self.remove_pull(cache, pull),
            Err(LossReason::NoSpace) => {
                round.stalled.insert(pull.size_class);
                round.passed.push(*pull);
            }
            Err(_) => self.cancel_pull(cache, pull),
        }
    }

    /// Ends the pulls of one event; those without room are retried.
    pub(crate) fn end_pulls(&mut self, now: Tick, round: PullRound) {
        if !round.passed.is_empty() {
            self.inbound.retry_at = Some(now.after(PULL_RETRY));
        }
        round.passed.into_iter().rev().for_each(|pull| self.inbound.waiting.push_front(pull));
    }

    /// Cancels a pull that waited for too long, or whose room is gone.
    fn drop_pull(&mut self, cache: &mut Cache, pull: &Pull) {
        self.counters.pulls_dropped += 1;
        self.cancel_pull(cache, pull);
    }

    /// Cancels a waiting pull and returns its bandwidth tokens.
    fn cancel_pull(&mut self, cache: &mut Cache, pull: &Pull) {
        self.bandwidth.return_tokens(cache.slot_bytes(pull.size_class));
        self.remove_pull(cache, pull);
    }

    /// Removes a pull that no longer waits.
    fn remove_pull(&mut self, cache: &mut Cache, pull: &Pull) {
        self.inbound.keys.remove(&pull.key);
        cache.remove_pending(pull.size_class);
        cache.release_size_class(pull.size_class);
    }

    /// Size classes of the accepted blocks that are not being fetched yet, for the audit.
    pub(crate) fn waiting_pulls(&self) -> impl Iterator<Item = SizeClassId> {
        self.inbound.waiting.iter().map(|pull| pull.size_class)
    }
}
