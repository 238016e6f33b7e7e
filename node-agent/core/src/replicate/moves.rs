//! Moves of blocks to a node with more free capacity.
//!
//! The control plane sets the target and the amount, and repeats them with every report. Blocks are taken
//! from the cold end of the eviction order, but not from its very end: moving blocks that are evicted soon is
//! wasted work. The local copy is dropped when the control plane confirms that the other copy is durable and
//! no reader uses the local one.

use std::collections::{BTreeMap, BTreeSet};

use reprise_policy::eviction::EntryIndex;
use reprise_policy::{BlockKey, NodeId, Tick};

use crate::cache::{Cache, Dram, SizeClassId, TenantIndex, nvme_bytes};
use crate::effect::PlacementReason;
use crate::event::Move;
use crate::limits::{
    MOVE_PASSES_PERMILLE, OUTBOUND_STEP_ENTRIES, OUTBOUND_STEP_INTERVAL, PLACE_KEYS_MAX, WALK_INTERVAL,
};
use crate::replicate::Replicate;
use crate::replicate::outbound::is_replicable;

/// Progress of a move.
#[derive(Debug)]
pub(crate) struct MoveProgress {
    order: Move,
    /// Slot bytes dropped here since the order arrived.
    moved: u64,
    /// Tenant whose eviction order is being scanned.
    tenant: u16,
    /// Last block that was scanned.
    after: Option<EntryIndex>,
    /// Bytes of this tenant's blocks that are still to be skipped.
    pass_bytes: u64,
    /// Earliest time of the next step.
    step_at: Tick,
}

/// Result of dropping the local copy of a moved block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DropResult {
    /// The copy was dropped, or does not exist.
    Done,
    /// A reader uses the copy.
    NotNow,
}

impl Replicate {
    /// Sets or replaces the current move.
    pub(crate) fn set_move(&mut self, cache: &Cache, now: Tick, order: Option<Move>) {
        let order = order.filter(|order| order.bytes > 0);
        let to = order.map(|order| order.to);
        let known = self.outbound.moving.as_ref().map(|moving| moving.order.to);
        if known != to {
            self.outbound.forget(|reason| matches!(reason, PlacementReason::Move(_)));
            self.outbound.moving = None;
        }
        let (pass_bytes, step_at) = (self.passed_bytes(cache, 0), now);
        let begin = |order| MoveProgress { order, moved: 0, tenant: 0, after: None, pass_bytes, step_at };
        match (order, &mut self.outbound.moving) {
            (Some(order), Some(moving)) => (moving.order, moving.moved) = (order, 0),
            (Some(order), none) => *none = Some(begin(order)),
            (None, _) => {}
        }
    }

    /// Creates batches of blocks to move, as many as needed and allowed.
    pub(crate) fn collect_moves(&mut self, cache: &Cache, now: Tick) {
        let wanted = self.wanted_of_move(cache);
        let Some(moving) = &self.outbound.moving else { return };
        if wanted == 0 || moving.step_at > now {
            return;
        }
        let to = moving.order.to;
        let mut room = self.room_for_moves();
        for (size_class, keys) in self.collect_cold(cache, now, wanted) {
            for keys in keys.chunks(PLACE_KEYS_MAX) {
                if room > 0 {
                    self.outbound.begin_batch(PlacementReason::Move(to), size_class, keys.to_vec(), now);
                    room -= 1;
                }
            }
        }
    }

    /// Bytes for which blocks are still to be found; 0 while no further batch is allowed.
    fn wanted_of_move(&self, cache: &Cache) -> u64 {
        let Some(moving) = &self.outbound.moving else { return 0 };
        if self.room_for_moves() == 0 {
            return 0;
        }
        let of_move = self.outbound.batches.iter().map(|(_, batch)| batch);
        let pending: u64 = of_move
            .filter(|batch| matches!(batch.reason, PlacementReason::Move(_)))
            .map(|batch| batch.blocks.len() as u64 * nvme_bytes(cache.slot_bytes(batch.size_class)))
            .sum();
        moving.order.bytes.saturating_sub(moving.moved + pending)
    }

    fn room_for_moves(&self) -> usize {
        self.outbound.room_for(|reason| matches!(reason, PlacementReason::Move(_)))
    }

    /// Scans the next blocks of the eviction order; returns blocks of about `wanted` bytes, at least one.
    fn collect_cold(
        &mut self,
        cache: &Cache,
        now: Tick,
        wanted: u64,
    ) -> BTreeMap<SizeClassId, Vec<BlockKey>> {
        let mut found: BTreeMap<SizeClassId, Vec<BlockKey>> = BTreeMap::new();
        let Some(MoveProgress { tenant, after, .. }) = self.outbound.moving else { return found };
        let pending = self.keys_being_moved();
        let entries = cache.next_victims(TenantIndex(tenant), after, OUTBOUND_STEP_ENTRIES);
        let mut bytes_found = 0;
        for entry in &entries {
            if bytes_found >= wanted {
                break;
            }
            let state = cache.entry(*entry);
            let bytes = nvme_bytes(cache.slot_bytes(state.size_class()));
            let moving = self.outbound.moving.as_mut().expect("just seen");
            moving.after = Some(*entry);
            if moving.pass_bytes >= bytes {
                moving.pass_bytes -= bytes;
            } else if !pending.contains(&state.key()) {
                bytes_found += bytes;
                found.entry(state.size_class()).or_default().push(state.key());
            }
        }
        if entries.is_empty() {
            self.enter_next_tenant(cache, now, tenant);
        } else if let Some(moving) = &mut self.outbound.moving {
            moving.step_at = now.after(OUTBOUND_STEP_INTERVAL);
        }
        found
    }

    fn keys_being_moved(&self) -> BTreeSet<BlockKey> {
        let of_move = |reason| matches!(reason, PlacementReason::Move(_));
        let batches = self.outbound.batches.iter().filter(|(_, batch)| of_move(batch.reason));
        batches.flat_map(|(_, batch)| batch.blocks.iter().map(|block| block.key)).collect()
    }

    /// Continues with the next tenant's blocks or, after the last tenant and a delay, with the first.
    fn enter_next_tenant(&mut self, cache: &Cache, now: Tick, tenant: u16) {
        let next = cache.tenants().map(|known| known.0).find(|known| *known > tenant);
        let rest = if next.is_some() { OUTBOUND_STEP_INTERVAL } else { WALK_INTERVAL };
        let next = next.unwrap_or(0);
        let (pass_bytes, step_at) = (self.passed_bytes(cache, next), now.after(rest));
        if let Some(moving) = &mut self.outbound.moving {
            (moving.tenant, moving.after, moving.pass_bytes) = (next, None, pass_bytes);
            moving.step_at = step_at;
        }
    }

    /// Bytes of a tenant's blocks that are evicted soon and therefore skipped.
    fn passed_bytes(&self, cache: &Cache, tenant: u16) -> u64 {
        let known = cache.tenants().find(|known| known.0 == tenant);
        known.map_or(0, |known| cache.nvme_usage(known).used / 1000 * MOVE_PASSES_PERMILLE)
    }

    /// Drops the device copy of a block that is durable elsewhere. A copy in DRAM remains until it is
    /// evicted.
    pub(crate) fn drop_moved(
        &mut self,
        cache: &mut Cache,
        key: &BlockKey,
        size_class: SizeClassId,
        to: NodeId,
    ) -> DropResult {
        if !is_replicable(cache, key, size_class) {
            return DropResult::Done;
        }
        let Some(entry) = cache.find(key) else { return DropResult::Done };
        let is_read = match cache.entry(entry).dram() {
            Dram::Filling(_) => true,
            Dram::Resident(frame) => cache.frame(frame).leases > 0,
            Dram::Absent => false,
        };
        if is_read {
            return DropResult::NotNow;
        }
        let bytes = nvme_bytes(cache.slot_bytes(size_class));
        self.counters.moved_blocks += 1;
        self.counters.moved_bytes += bytes;
        cache.remove_stored(entry);
        if let Some(moving) = self.outbound.moving.as_mut().filter(|moving| moving.order.to == to) {
            moving.moved += bytes;
        }
        DropResult::Done
    }

    /// Time of the next scan if no event arrives before.
    pub(crate) fn next_move(&self, cache: &Cache) -> Option<Tick> {
        let moving = self.outbound.moving.as_ref()?;
        (self.wanted_of_move(cache) > 0).then_some(moving.step_at)
    }
}
