//! Queue of unsaved blocks: one lane per tenant, slot size and cause, each in order of commit.
//!
//! A lane without a free slot, or whose tenant is at its limit, does not delay the others. Tenants get shares of the
//! writes by their weights ([`FairOrder`]); of one tenant, the lane with the oldest block is served first. A block
//! costs O(log lanes).

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use reprise_policy::Tick;
use reprise_policy::fair_order::{FairOrder, Weights};

use crate::cache::{SlotRequest, TenantIndex};
use crate::slab::SlabId;

/// Lanes with at least one block.
#[derive(Debug)]
pub(super) struct Queue {
    /// Blocks of each lane; without empty lanes.
    lanes: BTreeMap<Lane, VecDeque<Waiting>>,
    bytes: u64,
    /// Tenants with blocks.
    shares: FairOrder<TenantIndex>,
    /// Number of lanes of each of these.
    lanes_of: BTreeMap<TenantIndex, usize>,
}

/// Blocks that compete for the same space.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Lane {
    /// Bytes of one slot.
    pub(super) slot_bytes: u64,
    /// Tenant of the blocks.
    pub(super) tenant: TenantIndex,
    /// Reason why the blocks are saved.
    pub(super) cause: WriteCause,
}

/// Reason why a block is saved.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum WriteCause {
    /// An engine committed the block.
    Committed,
    /// The block was in DRAM only, and its eviction was near. No ticket waits for it.
    Demoted,
    /// A peer offered the block: nothing is evicted for it, and no ticket waits for it.
    Replicated,
}

/// Queued block and the time at which it was queued.
#[derive(Clone, Copy, Debug)]
struct Waiting {
    record: SlabId,
    since: Tick,
}

impl Lane {
    /// Space for one block of the lane.
    pub(super) fn request(self) -> SlotRequest {
        SlotRequest { tenant: self.tenant, slot_bytes: self.slot_bytes }
    }
}

/// Place of a lane among those that can be served: share of its tenant, oldest block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct LanePlace(u128, Option<Tick>, Lane);

impl LanePlace {
    pub(super) fn lane(self) -> Lane {
        self.2
    }
}

impl Queue {
    /// Creates an empty queue.
    pub(super) fn new(weights: Weights<TenantIndex>) -> Queue {
        Queue { lanes: BTreeMap::new(), bytes: 0, shares: FairOrder::new(weights), lanes_of: BTreeMap::new() }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.lanes.is_empty()
    }

    /// Slot bytes of all queued blocks.
    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Time at which the oldest block was queued.
    pub(super) fn oldest(&self) -> Option<Tick> {
        self.lanes.values().filter_map(|queue| queue.front()).map(|first| first.since).min()
    }

    /// Slot bytes of each lane, and the time at which its oldest block was queued.
    pub(super) fn fronts(&self) -> impl Iterator<Item = (u64, Tick)> {
        let front =
            |(lane, queue): (&Lane, &VecDeque<Waiting>)| Some((lane.slot_bytes, queue.front()?.since));
        self.lanes.iter().filter_map(front)
    }

    /// Time at which the oldest block of a lane was queued; `None` for an empty lane.
    pub(super) fn oldest_of(&self, lane: Lane) -> Option<Tick> {
        self.lanes.get(&lane)?.front().map(|first| first.since)
    }

    /// Appends a block to a lane.
    pub(super) fn push(&mut self, lane: Lane, record: SlabId, since: Tick) {
        self.bytes += lane.slot_bytes;
        self.lane_mut(lane).push_back(Waiting { record, since });
    }

    /// Reinserts a block at the front of a lane.
    pub(super) fn push_front(&mut self, lane: Lane, record: SlabId, since: Tick) {
        self.bytes += lane.slot_bytes;
        self.lane_mut(lane).push_front(Waiting { record, since });
    }

    /// Removes the first block of a lane.
    pub(super) fn pop(&mut self, lane: Lane) -> Option<SlabId> {
        let queue = self.lanes.get_mut(&lane)?;
        let first = queue.pop_front()?;
        let is_empty = queue.is_empty();
        self.shares.charge(&lane.tenant, lane.slot_bytes);
        if is_empty {
            self.lanes.remove(&lane);
            self.leave(lane.tenant);
        }
        self.bytes -= lane.slot_bytes;
        Some(first.record)
    }

    /// Returns the place of a lane now. It grows with each block of the tenant that is removed.
    pub(super) fn place(&self, lane: Lane) -> LanePlace {
        LanePlace(self.shares.tag(&lane.tenant), self.oldest_of(lane), lane)
    }

    /// Places of all lanes.
    pub(super) fn places(&self) -> BTreeSet<LanePlace> {
        self.lanes.keys().map(|lane| self.place(*lane)).collect()
    }

    fn lane_mut(&mut self, lane: Lane) -> &mut VecDeque<Waiting> {
        if !self.lanes.contains_key(&lane) {
            *self.lanes_of.entry(lane.tenant).or_default() += 1;
            self.shares.activate(&lane.tenant);
        }
        self.lanes.entry(lane).or_default()
    }

    /// Counts one lane of a tenant less.
    fn leave(&mut self, tenant: TenantIndex) {
        let Some(lanes) = self.lanes_of.get_mut(&tenant) else { return };
        *lanes -= 1;
        if *lanes == 0 {
            self.lanes_of.remove(&tenant);
            self.shares.deactivate(&tenant);
        }
    }

    /// Iterates all queued blocks, for the audit.
    pub(super) fn iter(&self) -> impl Iterator<Item = (u64, SlabId)> {
        self.lanes
            .iter()
            .flat_map(|(lane, queue)| queue.iter().map(|waiting| (lane.slot_bytes, waiting.record)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn order(queue: &Queue) -> Vec<Lane> {
        queue.places().into_iter().map(LanePlace::lane).collect()
    }

    #[test]
    fn serves_lanes_of_a_tenant_by_age_and_blocks_in_order() {
        let cause = WriteCause::Committed;
        let lane = |slot_bytes| Lane { slot_bytes, tenant: TenantIndex(0), cause };
        let (large, small) = (lane(8192), lane(4096));
        let mut queue = Queue::new(Weights::default());
        queue.push(large, SlabId(1), Tick(2));
        queue.push(small, SlabId(2), Tick(1));
        queue.push(small, SlabId(3), Tick(3));
        assert_eq!((order(&queue), queue.bytes()), (vec![small, large], 16_384));
        assert_eq!((queue.pop(small), queue.oldest()), (Some(SlabId(2)), Some(Tick(2))));
        assert_eq!(order(&queue), [large, small]);
        queue.push_front(small, SlabId(2), Tick(1));
        assert_eq!(
            (queue.pop(small), queue.pop(small), queue.pop(small)),
            (Some(SlabId(2)), Some(SlabId(3)), None)
        );
        assert_eq!(queue.pop(large), Some(SlabId(1)));
        assert_eq!((queue.is_empty(), queue.bytes()), (true, 0));
    }

    #[test]
    fn tenants_get_shares_by_weight_however_old_their_blocks_are() {
        let lane =
            |tenant| Lane { slot_bytes: 4096, tenant: TenantIndex(tenant), cause: WriteCause::Committed };
        let mut queue = Queue::new([(TenantIndex(1), 2)].into_iter().collect());
        (0..30).for_each(|number| queue.push(lane(0), SlabId(number), Tick(number)));
        (0..30).for_each(|number| queue.push(lane(1), SlabId(100 + number), Tick(1000 + number)));
        let mut served = Vec::new();
        for _ in 0..30 {
            let lane = order(&queue)[0];
            served.push(lane.tenant.0);
            queue.pop(lane);
        }
        let of = |tenant| served.iter().filter(|served| **served == tenant).count();
        assert!((9..=11).contains(&of(0)) && (19..=21).contains(&of(1)), "{served:?}");
    }
}
