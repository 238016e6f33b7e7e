//! Offers of blocks to peers, and their answers.

use std::collections::BTreeSet;
use std::time::Duration;

use reprise_policy::{BlockKey, NodeId, Tick};

use crate::cache::{Cache, SizeClass, nvme_bytes};
use crate::context::Context;
use crate::effect::{Effect, Offer, OfferId, PlacementReason};
use crate::limits::{LOOKUP_GRACE, OFFER_RETRY_MAX, OFFER_TIMEOUT, PLACE_RETRY};
use crate::replicate::outbound::{Acceptance, Batch, OpenOffer, Stage, is_replicable};
use crate::replicate::{Replicate, ReplicateTimer};
use crate::slab::SlabId;

impl Replicate {
    /// Offers blocks to a node as far as the bandwidth allows; returns the number of offers.
    pub(super) fn offer(
        &mut self,
        cache: &Cache,
        cx: &mut Context,
        batch: SlabId,
        (node, mut keys): (NodeId, Vec<BlockKey>),
    ) -> u32 {
        let Some(Batch { reason, size_class, .. }) = self.outbound.batches.get(batch) else { return 0 };
        let (reason, size_class) = (*reason, *size_class);
        let SizeClass { tenant, layout, slot_bytes, .. } = *cache.size_class(size_class);
        keys.retain(|key| is_replicable(cache, key, size_class));
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
        cx.emit(Effect::Offer { node, offer: Offer { offer, tenant, layout, keys, deadline } });
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
        if offer.reason == PlacementReason::Hot {
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
}
