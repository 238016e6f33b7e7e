//! Placement queries to the control plane, and the effect of their answers on a batch.
//!
//! The control plane charges a node for every block that it assigns to it, so a placement query covers only
//! blocks that could be offered now. Two kinds of blocks would make this slow or expensive: blocks that
//! already have enough replicas, which are most blocks in many walks, and blocks that a peer has accepted and
//! not announced yet. A batch that has accepted blocks, or more blocks than could be offered, is therefore
//! filtered first. The filter query covers the whole batch, charges almost nothing ([`FILTER_BYTES`]), and
//! leads to no offer. The remaining blocks that no peer has accepted are queried for placement immediately.
//!
//! The rest of a batch after a round joins another waiting batch of its kind, so that small rests do not
//! occupy the limited number of batches.

use std::collections::BTreeMap;

use reprise_policy::{BlockKey, NodeId, Tick};

use crate::cache::{Cache, SizeClassId, nvme_bytes};
use crate::context::Context;
use crate::effect::{Effect, PlaceId, PlacementReason};
use crate::event::Placement;
use crate::limits::{
    FILTER_BYTES, FRUITLESS_ROUNDS_MAX, LOOKUP_GRACE, PARKED_AFTER_ROUNDS, PLACE_HOLD, PLACE_KEYS_MAX,
    PLACE_RETRY, PLACE_TIMEOUT,
};
use crate::replicate::moves::DropResult;
use crate::replicate::outbound::{Acceptance, Batch, OutboundBlock, Stage, is_replicable};
use crate::replicate::{Replicate, ReplicateTimer};
use crate::slab::SlabId;

/// Query to the control plane that is not answered yet.
#[derive(Debug)]
pub(crate) struct PlacementQuery {
    pub(crate) batch: SlabId,
    kind: QueryKind,
    /// Number of blocks at the front of the batch that it covers.
    blocks: usize,
    /// Slot bytes of those blocks that would have to be offered.
    fresh_bytes: u64,
    expires: Tick,
}

/// Purpose of a query.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum QueryKind {
    /// Find out which blocks have enough replicas.
    Filter,
    /// Find nodes for further replicas.
    Place,
}

/// Blocks of a query, after its answer.
#[derive(Debug, Default)]
struct QueryResult {
    kept: Vec<OutboundBlock>,
    offers: BTreeMap<NodeId, Vec<BlockKey>>,
    /// Blocks with an answer.
    answered: u64,
    /// Blocks that are complete.
    ended: u64,
    /// Blocks whose target gets no offers now.
    paused: u64,
}

impl Replicate {
    /// Queries every batch that is due.
    pub(crate) fn query_due(&mut self, cache: &Cache, cx: &mut Context) {
        let due = self.outbound.batches.iter().filter(|(_, batch)| batch.is_due(cx.now));
        let mut due: Vec<(u32, SlabId)> = due.map(|(id, batch)| (batch.fruitless, id)).collect();
        // Batches with progress first, as long as there is bandwidth.
        due.sort_unstable();
        for (_, id) in due {
            self.remove_absent(cache, id);
            let Some(batch) = self.outbound.batches.get_mut(id) else { continue };
            if batch.fruitless >= FRUITLESS_ROUNDS_MAX {
                let (reason, blocks) = (batch.reason, batch.blocks.len() as u64);
                self.outbound.batches.remove(id);
                self.count_unplaced(reason, blocks);
            } else if self.bandwidth.wait(cx.now).is_zero() {
                self.query_or_hold(cache, cx, id);
            }
        }
    }

    /// Removes blocks from a batch that are no longer on this node.
    fn remove_absent(&mut self, cache: &Cache, id: SlabId) {
        let Some(batch) = self.outbound.batches.get_mut(id) else { return };
        let (size_class, reason, blocks) =
            (batch.size_class, batch.reason, std::mem::take(&mut batch.blocks));
        let before = blocks.len();
        let kept: Vec<OutboundBlock> =
            blocks.into_iter().filter(|block| is_replicable(cache, &block.key, size_class)).collect();
        self.count_walked(reason, (before - kept.len()) as u64);
        self.set_blocks(id, kept);
    }

    /// Sets the remaining blocks of a batch; an empty batch ends.
    pub(super) fn set_blocks(&mut self, id: SlabId, kept: Vec<OutboundBlock>) {
        if kept.is_empty() {
            self.outbound.batches.remove(id);
        } else if let Some(batch) = self.outbound.batches.get_mut(id) {
            batch.blocks = kept;
        }
    }

    /// Queries a batch, unless open queries of other batches cover the available bandwidth.
    fn query_or_hold(&mut self, cache: &Cache, cx: &mut Context, id: SlabId) {
        let others: u64 = self.outbound.queries.iter().map(|(_, query)| query.fresh_bytes).sum();
        let available = self.bandwidth.available(cx.now).saturating_sub(others);
        let Some(batch) = self.outbound.batches.get_mut(id) else { return };
        if available == 0 && others > 0 {
            batch.stage = Stage::Due(cx.now.after(PLACE_HOLD));
        } else {
            batch.fruitless += u32::from(!batch.filtered);
            self.query(cache, cx, id, available);
        }
    }

    /// Sends a filter query, or a placement query for as many unaccepted blocks as could be offered now, at
    /// least one.
    fn query(&mut self, cache: &Cache, cx: &mut Context, id: SlabId, available: u64) {
        let now = cx.now;
        let Some(batch) = self.outbound.batches.get_mut(id) else { return };
        let slot_bytes = cache.slot_bytes(batch.size_class);
        let coming = batch.blocks.iter().filter(|block| block.is_pending(now)).count();
        let fresh = batch.blocks.len() - coming;
        let offered = usize::try_from((available / slot_bytes).max(1)).unwrap_or(usize::MAX).min(fresh);
        let is_filtered = std::mem::take(&mut batch.filtered) || batch.reason == PlacementReason::Hot;
        let (kind, blocks, fresh_bytes, bytes) =
            if fresh == 0 || (!is_filtered && offered < batch.blocks.len()) {
                (QueryKind::Filter, batch.blocks.len(), 0, FILTER_BYTES)
            } else {
                (QueryKind::Place, offered, offered as u64 * slot_bytes, nvme_bytes(slot_bytes))
            };
        if kind == QueryKind::Place && coming > 0 {
            batch.blocks.sort_by_key(|block| block.is_pending(now));
        }
        let keys: Vec<BlockKey> = batch.blocks[..blocks].iter().map(|block| block.key).collect();
        let reason = batch.reason;
        let expires = now.after(PLACE_TIMEOUT).after(LOOKUP_GRACE);
        let query =
            self.outbound.queries.insert(PlacementQuery { batch: id, kind, blocks, fresh_bytes, expires });
        batch.stage = Stage::Querying(query);
        self.timers.set(expires, ReplicateTimer::Place(query));
        self.counters.places += 1;
        self.counters.place_keys += keys.len() as u64;
        let (place, timeout) = (PlaceId(query.0), PLACE_TIMEOUT);
        cx.emit(Effect::Place { place, keys, slot_bytes: bytes, reason, timeout });
    }

    /// Handles a query that failed or timed out: the batch is queried again.
    pub(crate) fn place_failed(&mut self, cache: &mut Cache, cx: &mut Context, id: SlabId) {
        if self.outbound.queries.get(id).is_some() {
            self.counters.place_failures += 1;
            self.place_answered(cache, cx, id, &[]);
        }
    }

    /// Handles the control plane's answer to a query.
    pub(crate) fn place_answered(
        &mut self,
        cache: &mut Cache,
        cx: &mut Context,
        id: SlabId,
        answers: &[Placement],
    ) {
        let Some(query) = self.outbound.queries.remove(id) else { return };
        self.timers.clear(query.expires, ReplicateTimer::Place(id));
        let Some(batch) = self.outbound.batches.get_mut(query.batch) else { return };
        let (reason, size_class, mut blocks) =
            (batch.reason, batch.size_class, std::mem::take(&mut batch.blocks));
        let unqueried = blocks.split_off(query.blocks.min(blocks.len()));
        let answers = answers.iter().copied().chain(std::iter::repeat(Placement::Unanswered));
        let answers = blocks.into_iter().zip(answers);
        let result = self.classify_answers(cache, cx, (query.kind, reason, size_class), answers);
        let QueryResult { kept, offers, answered, ended, paused } = result;
        if !kept.is_empty() && reason == PlacementReason::Drain {
            self.outbound.drain.note_unfinished();
        }
        let open =
            offers.into_iter().map(|(node, keys)| self.offer(cache, cx, query.batch, (node, keys))).sum();
        let now = cx.now;
        let is_fresh = |block: &OutboundBlock| !block.is_pending(now);
        let needs_placement = query.kind == QueryKind::Filter && answered > 0 && kept.iter().any(is_fresh);
        let is_turn_of_others = kept.is_empty() && answered > 0 && unqueried.iter().any(is_fresh);
        if let Some(batch) = self.outbound.batches.get_mut(query.batch) {
            batch.stage = match open {
                0 if needs_placement || is_turn_of_others => Stage::Due(now),
                0 => Stage::Due(now.after(PLACE_RETRY)),
                open => Stage::Offering { open, again: None },
            };
            batch.filtered = needs_placement;
            if ended > 0 || answered == 0 {
                batch.fruitless = 0;
            } else if open == 0 && paused > 0 {
                // No offer was made, so the round does not count.
                batch.fruitless = batch.fruitless.saturating_sub(1);
            }
            batch.unqueried = unqueried.len();
        }
        self.set_blocks(query.batch, unqueried.into_iter().chain(kept).collect());
        self.end_round(query.batch);
    }

    /// Evaluates the answer for each block.
    fn classify_answers(
        &mut self,
        cache: &mut Cache,
        cx: &mut Context,
        (kind, reason, size_class): (QueryKind, PlacementReason, SizeClassId),
        answers: impl Iterator<Item = (OutboundBlock, Placement)>,
    ) -> QueryResult {
        let mut result = QueryResult::default();
        for (block, answer) in answers {
            result.answered += u64::from(answer != Placement::Unanswered);
            match answer {
                Placement::Enough => match self.finish(cache, reason, size_class, block) {
                    DropResult::NotNow => result.kept.push(block),
                    DropResult::Done => result.ended += 1,
                },
                Placement::To(_) if kind == QueryKind::Filter => result.kept.push(block),
                Placement::To(node) if self.outbound.is_paused(node, size_class, cx.now) => {
                    result.paused += 1;
                    result.kept.push(block);
                }
                Placement::To(node) => {
                    if block.acceptance != Acceptance::Open {
                        cache.check_own_copy(cx, &block.key);
                    }
                    result.offers.entry(node).or_default().push(block.key);
                    result.kept.push(block);
                }
                Placement::NoCapacity => {
                    self.count_unplaced(reason, 1);
                    result.ended += 1;
                }
                Placement::Unanswered if reason == PlacementReason::Hot => {}
                Placement::Unanswered => result.kept.push(block),
            }
        }
        result
    }

    /// Completes a block that has enough replicas.
    fn finish(
        &mut self,
        cache: &mut Cache,
        reason: PlacementReason,
        size_class: SizeClassId,
        block: OutboundBlock,
    ) -> DropResult {
        let bytes = nvme_bytes(cache.slot_bytes(size_class));
        if let PlacementReason::Move(to) = reason {
            let dropped = self.drop_moved(cache, &block.key, size_class, to);
            if dropped == DropResult::NotNow {
                return dropped;
            }
        }
        self.count_walked(reason, 1);
        if block.acceptance != Acceptance::Open {
            self.outbound.replicated_bytes += bytes;
        }
        DropResult::Done
    }

    /// Ends a round. Hot blocks are queried once; if they stay hot, the next window repeats them.
    pub(crate) fn end_round(&mut self, id: SlabId) {
        let Some(batch) = self.outbound.batches.get_mut(id) else { return };
        if !matches!(batch.stage, Stage::Due(_)) {
            return;
        }
        if batch.reason == PlacementReason::Hot {
            let mut left = std::mem::take(&mut batch.blocks);
            left.truncate(batch.unqueried);
            self.set_blocks(id, left);
        } else if !batch.filtered {
            self.join_waiting(id);
        }
    }

    /// Merges the rest of a batch into another waiting batch of its kind.
    fn join_waiting(&mut self, id: SlabId) {
        let is_parked = |batch: &Batch| batch.fruitless >= PARKED_AFTER_ROUNDS;
        let Some(batch) = self.outbound.batches.get(id).filter(|batch| !is_parked(batch)) else { return };
        let Stage::Due(due) = batch.stage else { return };
        let (reason, size_class, count) = (batch.reason, batch.size_class, batch.blocks.len());
        let others = self.outbound.batches.iter().filter(|(other, _)| *other != id);
        let joined = others.filter_map(|(other, batch)| match batch.stage {
            Stage::Due(at)
                if (batch.reason, batch.size_class, batch.filtered) == (reason, size_class, false) =>
            {
                let fits = batch.blocks.len() + count <= PLACE_KEYS_MAX;
                (fits && !is_parked(batch)).then_some((other, at))
            }
            _ => None,
        });
        let Some((other, at)) = joined.min_by_key(|(other, _)| *other) else { return };
        let Some(batch) = self.outbound.batches.remove(id) else { return };
        if let Some(other) = self.outbound.batches.get_mut(other) {
            other.blocks.extend(batch.blocks);
            other.fruitless = other.fruitless.min(batch.fruitless);
            other.stage = Stage::Due(at.min(due));
        }
    }
}
