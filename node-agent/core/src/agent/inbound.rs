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
//! [`PULL_BYTES_MAX`] and a share of the arena limit bytes that are being fetched and written. Acceptance is
//! not binding: the peer offers a block again that was not stored.
//!
//! A fetched block without a reader is evicted from DRAM first once it is saved, so that it displaces no
//! block in use. Otherwise it is an ordinary block from the start of its fetch: loads attach to it, and a
//! commit of the same block replaces it.

use std::collections::{BTreeSet, VecDeque};
use std::time::Duration;

use reprise_policy::{BlockKey, NodeId, NodeMode, Tick};

use crate::agent::AgentCore;
use crate::agent::tickets::TicketList;
use crate::agent::writeback::queue::WriteCause;
use crate::cache::{
    BlockOrigin, EvictionPosition, FrameIndex, FrameState, OfferedBlock, PendingSpace, SizeClass, SizeClassId,
};
use crate::effect::{Diagnostic, Effect, LossReason};
use crate::event::PeerOffer;
use crate::limits::{
    OFFER_RETRY_MAX, OFFERED_SIZE_CLASSES_MAX, PLACE_KEYS_MAX, PLACE_RETRY, PULL_RETRY, PULL_WAIT_MAX,
    PULLS_WAITING_MAX,
};

/// Accepted blocks, and limits on them.
#[derive(Debug, Default)]
pub(crate) struct Inbound {
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
struct Pull {
    key: BlockKey,
    size_class: SizeClassId,
    from: NodeId,
    since: Tick,
}

/// Result of an attempt to start a pull.
enum PullOutcome {
    /// The fetch was started.
    Fetched,
    /// The arena has no room for the size class now.
    NoRoom,
    /// The block is here, is being fetched for a load, or cannot be stored.
    Needless,
    /// The block waited for too long, or the devices have no room.
    Dropped,
}

/// Number of blocks of an offer that may still be accepted.
struct OfferAllowance {
    blocks: u64,
}

impl Inbound {
    /// Number of accepted blocks that are not being fetched yet.
    pub(crate) fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// Time at which to continue if no event arrives before.
    pub(crate) fn wake(&self) -> Option<Tick> {
        let first = self.waiting.front()?;
        Some(self.retry_at.unwrap_or(first.since.after(PULL_WAIT_MAX)))
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

impl AgentCore {
    /// Handles a peer's offer.
    pub(crate) fn peer_offer(&mut self, offered: &PeerOffer) {
        self.counters.incoming_offers += 1;
        self.counters.incoming_offer_keys += offered.keys.len() as u64;
        let (taken, retry_after) = match self.size_class_of_offer(offered) {
            Some(size_class) => self.accept_offer(offered, size_class),
            None => (Vec::new(), OFFER_RETRY_MAX),
        };
        self.counters.incoming_offer_keys_taken += taken.len() as u64;
        self.emit(Effect::AnswerOffer { offer: offered.offer, taken, retry_after });
    }

    /// Returns the size class of offered blocks, or `None` if this node rejects the whole offer.
    fn size_class_of_offer(&mut self, offered: &PeerOffer) -> Option<SizeClassId> {
        let accepts = self.replicate.mode() == NodeMode::Active && !self.replicate.bandwidth().is_disabled();
        let accepts = accepts && self.cache.arena.may_accept_replicas(offered.tenant);
        if !accepts || offered.keys.len() > PLACE_KEYS_MAX {
            return None;
        }
        let slot_bytes = offered.layout.slot_bytes();
        if slot_bytes > self.cache.arena.region_bytes_max() || !self.cache.devices.can_hold(slot_bytes) {
            return None;
        }
        let known = self.cache.sizes.find(offered.tenant, offered.layout);
        if known.is_none() && self.cache.sizes.in_use() >= OFFERED_SIZE_CLASSES_MAX {
            if !std::mem::replace(&mut self.inbound.rejection_reported, true) {
                self.emit(Effect::Diagnostic(Diagnostic::OffersRefused {
                    layouts: OFFERED_SIZE_CLASSES_MAX,
                }));
            }
            return None;
        }
        self.cache.intern(offered.tenant, offered.layout)
    }

    /// Accepts the blocks that there is room for; returns their indices and the delay for the others.
    fn accept_offer(&mut self, offered: &PeerOffer, size_class: SizeClassId) -> (Vec<u32>, Duration) {
        let mut room = OfferAllowance { blocks: self.cache.room_without_eviction(size_class) };
        let (mut taken, mut retry_after) = (Vec::new(), Duration::MAX);
        for (at, key) in (0..).zip(&offered.keys) {
            match self.accept_block((*key, size_class), offered.from, &mut room) {
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
        (key, size_class): (BlockKey, SizeClassId),
        from: NodeId,
        room: &mut OfferAllowance,
    ) -> Result<(), Duration> {
        match self.cache.offered_block(&key, size_class) {
            OfferedBlock::Durable => return Ok(()),
            OfferedBlock::Foreign => return Err(OFFER_RETRY_MAX),
            _ if self.inbound.keys.contains(&key) => return Ok(()),
            _ if !room.take() => return Err(OFFER_RETRY_MAX),
            OfferedBlock::InDram(frame) => {
                self.save_replica(frame, EvictionPosition::Last);
                return Ok(());
            }
            OfferedBlock::Filling(fill) => {
                self.transfer.retain(&mut self.cache, fill);
                return Ok(());
            }
            OfferedBlock::Unknown => {}
        }
        if self.inbound.waiting.len() >= PULLS_WAITING_MAX {
            return Err(PLACE_RETRY);
        }
        let SizeClass { slot_bytes, tenant_index, .. } = *self.cache.sizes.get(size_class);
        if self.replicate.bandwidth().take(slot_bytes, self.now).is_err() {
            return Err(self.replicate.bandwidth().wait(self.now));
        }
        self.cache.sizes.hold(size_class);
        self.inbound.keys.insert(key);
        self.cache.pending_space.add(tenant_index, slot_bytes);
        self.inbound.waiting.push_back(Pull { key, size_class, from, since: self.now });
        Ok(())
    }

    /// Queues a block in DRAM for writing, as a replica.
    pub(crate) fn save_replica(&mut self, frame: FrameIndex, position: EvictionPosition) {
        let lane = self.lane_of(frame, WriteCause::Replicated);
        if self.cache.frames.get(frame).state == FrameState::Clean && self.cache.may_be_saved(lane.request())
        {
            let entry = self.cache.frames.get(frame).entry().expect("a clean frame can be found");
            self.cache.index.entry_mut(entry).set_origin(BlockOrigin::Placed);
            self.queue_save((lane, position), frame, TicketList::default(), None);
        } else if position == EvictionPosition::First {
            self.cache.evict_first(frame);
        }
    }

    /// Starts the fetches that there is room for, the oldest first. Blocks without room in the arena do not
    /// delay other size classes.
    pub(crate) fn begin_pulls(&mut self) {
        if self.inbound.waiting.is_empty()
            || self.inbound.retry_at.is_some_and(|retry_at| retry_at > self.now)
        {
            return;
        }
        self.inbound.retry_at = None;
        let (mut passed, mut stalled) = (Vec::new(), BTreeSet::new());
        while let Some(pull) = self.inbound.waiting.front().copied() {
            let late = pull.since.after(PULL_WAIT_MAX) <= self.now;
            let begun = if late || self.replicate.mode() != NodeMode::Active {
                PullOutcome::Dropped
            } else if stalled.contains(&pull.size_class) {
                PullOutcome::NoRoom
            } else if !self.may_pull(pull.size_class) {
                break;
            } else {
                self.begin_pull(&pull)
            };
            self.inbound.waiting.pop_front();
            match begun {
                PullOutcome::Fetched => self.remove_pull(&pull),
                PullOutcome::NoRoom => {
                    stalled.insert(pull.size_class);
                    passed.push(pull);
                }
                PullOutcome::Needless => self.cancel_pull(&pull),
                PullOutcome::Dropped => {
                    self.counters.pulls_dropped += 1;
                    self.cancel_pull(&pull);
                }
            }
            self.route();
        }
        if !passed.is_empty() {
            self.inbound.retry_at = Some(self.now.after(PULL_RETRY));
        }
        passed.into_iter().rev().for_each(|pull| self.inbound.waiting.push_front(pull));
        self.transfer.send_fetches(&self.cache, context!(self));
    }

    /// Unsaved slot bytes that count against the engines' share of the arena. Replicas have their own share;
    /// their excess beyond it counts, because no unsaved block can be evicted.
    pub(crate) fn unsaved_bytes_of_engines(&self) -> u64 {
        self.writeback.unsaved_bytes() - self.writeback.replicated_bytes().min(self.cache.pull_bytes_max())
    }

    /// Slot bytes of replicas that are being fetched or written.
    pub(crate) fn pulls_in_flight_bytes(&self) -> u64 {
        self.transfer.retained_bytes() + self.writeback.replicated_bytes()
    }

    /// Whether one more block of a size class may be fetched.
    fn may_pull(&self, size_class: SizeClassId) -> bool {
        let bytes_max = self.cache.pull_bytes_max();
        let in_flight = self.pulls_in_flight_bytes();
        in_flight == 0 || in_flight + self.cache.sizes.get(size_class).slot_bytes <= bytes_max
    }

    /// Starts the fetch of a block, unless the block has arrived in the meantime.
    fn begin_pull(&mut self, pull: &Pull) -> PullOutcome {
        match self.cache.offered_block(&pull.key, pull.size_class) {
            OfferedBlock::Unknown => {}
            OfferedBlock::InDram(frame) => {
                self.save_replica(frame, EvictionPosition::Last);
                return PullOutcome::Needless;
            }
            OfferedBlock::Filling(fill) => {
                self.transfer.retain(&mut self.cache, fill);
                return PullOutcome::Needless;
            }
            OfferedBlock::Durable | OfferedBlock::Foreign => return PullOutcome::Needless,
        }
        if !self.still_has_room(pull.size_class) {
            return PullOutcome::Dropped;
        }
        match self.transfer.pull(&mut self.cache, (pull.key, pull.size_class), pull.from) {
            Ok(()) => PullOutcome::Fetched,
            Err(LossReason::NoSpace) => PullOutcome::NoRoom,
            Err(_) => PullOutcome::Needless,
        }
    }

    /// Whether the devices and the tenant's memory still have room for a waiting pull. The room seen at
    /// acceptance may have gone to engines and other pulls.
    fn still_has_room(&mut self, size_class: SizeClassId) -> bool {
        let SizeClass { slot_bytes, tenant, tenant_index, .. } = *self.cache.sizes.get(size_class);
        self.cache.pending_space.remove(tenant_index, slot_bytes);
        let has_room = self.cache.room_without_eviction(size_class) > 0;
        self.cache.pending_space.add(tenant_index, slot_bytes);
        has_room && self.cache.arena.may_accept_replicas(tenant)
    }

    /// Cancels a waiting pull and returns its bandwidth tokens.
    fn cancel_pull(&mut self, pull: &Pull) {
        self.replicate.bandwidth().return_tokens(self.cache.sizes.get(pull.size_class).slot_bytes);
        self.remove_pull(pull);
    }

    /// Removes a pull that no longer waits.
    fn remove_pull(&mut self, pull: &Pull) {
        self.inbound.keys.remove(&pull.key);
        let SizeClass { slot_bytes, tenant_index, .. } = *self.cache.sizes.get(pull.size_class);
        self.cache.pending_space.remove(tenant_index, slot_bytes);
        self.cache.sizes.release(pull.size_class);
    }

    /// Checks the counts of replicas, and that a block waits once, for the audit.
    pub(crate) fn audit_inbound(&self) -> Result<(), String> {
        let Inbound { waiting, keys, .. } = &self.inbound;
        let same = waiting.iter().all(|pull| keys.contains(&pull.key)) && waiting.len() == keys.len();
        if !same {
            return Err(format!("{} waiting pulls, {} keys", waiting.len(), keys.len()));
        }
        let unsaved =
            self.writeback.unsaved.iter().filter(|(_, block)| block.cause == WriteCause::Replicated);
        let unsaved: u64 = unsaved.map(|(_, block)| self.cache.frame_slot(block.frame).bytes).sum();
        if unsaved != self.writeback.replicated_bytes() {
            return Err(format!(
                "{unsaved} unsaved bytes of replicas, {} counted",
                self.writeback.replicated_bytes()
            ));
        }
        self.audit_pending_space()
    }

    fn audit_pending_space(&self) -> Result<(), String> {
        let frames = self.transfer.retained();
        let frames = frames.chain(self.writeback.unsaved.iter().map(|(_, block)| block.frame));
        let size_classes = frames.map(|frame| self.cache.frames.get(frame).size_class);
        let mut pending = PendingSpace::default();
        for size_class in size_classes.chain(self.inbound.waiting.iter().map(|pull| pull.size_class)) {
            let SizeClass { slot_bytes, tenant_index, .. } = *self.cache.sizes.get(size_class);
            pending.add(tenant_index, slot_bytes);
        }
        if pending != self.cache.pending_space {
            return Err(format!("{pending:?} pending, {:?} counted", self.cache.pending_space));
        }
        Ok(())
    }
}
