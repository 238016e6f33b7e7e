//! Batches of blocks to replicate, and the offers that wait for an answer.

use std::collections::BTreeMap;

use reprise_policy::{BlockKey, NodeId, NodeMode, Tick};

use crate::cache::{Cache, SizeClassId};
use crate::effect::PlacementReason;
use crate::limits::{OUTBOUND_BATCHES_MAX, PARKED_AFTER_ROUNDS, PARKED_BATCHES_MAX, PULL_WAIT_MAX};
use crate::replicate::drain::Drain;
use crate::replicate::moves::MoveProgress;
use crate::replicate::queries::PlacementQuery;
use crate::slab::{Slab, SlabId};

/// Mode of the node, and batches of blocks to replicate.
#[derive(Debug)]
pub(super) struct Outbound {
    pub(super) mode: NodeMode,
    pub(super) revision: u64,
    pub(super) batches: Slab<Batch>,
    pub(super) queries: Slab<PlacementQuery>,
    pub(super) offers: Slab<OpenOffer>,
    /// Keys that became hot and are in no batch yet; at most one batch.
    pub(super) hot: Vec<BlockKey>,
    pub(super) drain: Drain,
    pub(super) moving: Option<MoveProgress>,
    /// Time until which a peer gets no offers of a size class. Adding an entry removes expired ones, so there
    /// are at most as many entries as offers answered within [`OFFER_RETRY_MAX`](crate::limits::OFFER_RETRY_MAX).
    pub(super) offer_pauses: BTreeMap<(NodeId, SizeClassId), Tick>,
    /// Time at which to continue if no event arrives before.
    pub(super) wake: Option<Tick>,
    /// Slot bytes accepted by peers since the start.
    pub(super) replicated_bytes: u64,
}

/// Blocks of one size class that are replicated for one reason.
#[derive(Debug)]
pub(super) struct Batch {
    pub(super) reason: PlacementReason,
    pub(super) size_class: SizeClassId,
    pub(super) blocks: Vec<OutboundBlock>,
    pub(super) stage: Stage,
    /// Number of blocks at the front that the last query did not cover.
    pub(super) unqueried: usize,
    /// Whether all blocks were just filtered: those that no peer has accepted need a placement.
    pub(super) filtered: bool,
    /// Consecutive rounds without progress of any block.
    pub(super) fruitless: u32,
}

/// Block that, as far as known, lacks a replica.
#[derive(Clone, Copy, Debug)]
pub(super) struct OutboundBlock {
    pub(super) key: BlockKey,
    pub(super) acceptance: Acceptance,
}

/// Whether a peer has accepted a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Acceptance {
    Open,
    Accepted { since: Tick },
}

impl OutboundBlock {
    /// Whether a peer accepted the block and may still be storing it.
    pub(super) fn is_pending(&self, now: Tick) -> bool {
        matches!(self.acceptance, Acceptance::Accepted { since } if since.after(PULL_WAIT_MAX) > now)
    }
}

/// Condition that a batch waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
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
pub(super) struct OpenOffer {
    pub(super) batch: SlabId,
    pub(super) node: NodeId,
    pub(super) reason: PlacementReason,
    pub(super) keys: Vec<BlockKey>,
    /// Slot bytes of each block.
    pub(super) slot_bytes: u64,
    pub(super) expires: Tick,
}

impl Outbound {
    /// Creates the state of an active node without batches.
    pub(super) fn new() -> Outbound {
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
    pub(super) fn mode(&self) -> NodeMode {
        self.mode
    }

    /// Time at which to continue if no event arrives before.
    pub(super) fn wake(&self) -> Option<Tick> {
        self.wake
    }

    /// Number of batches with a kind of reason.
    pub(super) fn count(&self, kind: impl Fn(PlacementReason) -> bool) -> usize {
        self.batches.iter().filter(|(_, batch)| kind(batch.reason)).count()
    }

    /// Number of batches of a kind that may start. Batches without progress do not use the regular places.
    pub(super) fn room_for(&self, kind: impl Fn(PlacementReason) -> bool) -> usize {
        let all = self.count(&kind);
        let of_kind = self.batches.iter().filter(|(_, batch)| kind(batch.reason));
        let parked = of_kind.filter(|(_, batch)| batch.fruitless >= PARKED_AFTER_ROUNDS).count();
        let remaining = (OUTBOUND_BATCHES_MAX + PARKED_BATCHES_MAX).saturating_sub(all);
        OUTBOUND_BATCHES_MAX.saturating_sub(all - parked).min(remaining)
    }

    /// Whether a peer gets no offers of a size class now.
    pub(super) fn is_paused(&self, node: NodeId, size_class: SizeClassId, now: Tick) -> bool {
        self.offer_pauses.get(&(node, size_class)).is_some_and(|until| *until > now)
    }

    /// Stops offers of a size class to a peer until a time.
    pub(super) fn pause_offers(&mut self, of: (NodeId, SizeClassId), until: Tick, now: Tick) {
        self.offer_pauses.retain(|_, until| *until > now);
        self.offer_pauses.insert(of, until);
    }

    /// Drops the batches of a kind. Late answers find no batch.
    pub(super) fn forget(&mut self, kind: impl Fn(PlacementReason) -> bool) {
        let gone: Vec<SlabId> =
            self.batches.iter().filter(|(_, batch)| kind(batch.reason)).map(|(id, _)| id).collect();
        for id in gone {
            self.batches.remove(id);
        }
    }

    pub(super) fn begin_batch(
        &mut self,
        reason: PlacementReason,
        size_class: SizeClassId,
        keys: Vec<BlockKey>,
        now: Tick,
    ) {
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
    pub(super) fn is_due(&self, now: Tick) -> bool {
        matches!(self.stage, Stage::Due(at) if at <= now)
    }
}

/// Whether a block is on this node, durable, and of a size class. Others are not replicated.
pub(super) fn is_replicable(cache: &Cache, key: &BlockKey, size_class: SizeClassId) -> bool {
    let state = cache.find(key).map(|entry| cache.entry(entry));
    state.is_some_and(|state| state.size_class() == size_class && state.stored().is_some())
}
