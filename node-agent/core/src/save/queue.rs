//! Queue of unsaved blocks: one lane per tenant, slot size and cause, each in order of commit.
//!
//! A lane without a free slot, or whose tenant is at its limit, does not delay the others. Tenants get shares of the
//! writes by their weights ([`FairOrder`]); of one tenant, the lane with the oldest block is served first. A run starts
//! with a list of all lanes ([`Candidates`]), and each of its blocks costs O(log tenants).

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

/// Lanes that a run may still serve.
#[derive(Debug, Default)]
pub(super) struct Candidates {
    /// Tenants with lanes, by start tag.
    tenants: BTreeSet<(u128, TenantIndex)>,
    /// Lanes of each tenant, in the order of their oldest blocks at the start of the run. A lane is served until it is
    /// empty or cannot be served.
    lanes: BTreeMap<TenantIndex, VecDeque<Lane>>,
    /// Tenants that cannot be served in this run, and bytes of one of their slots.
    passed_over: BTreeMap<TenantIndex, u64>,
}

impl Candidates {
    /// Returns the lane that is served next. [`Candidates::resume`] must follow.
    pub(super) fn take(&mut self) -> Option<Lane> {
        let (_, tenant) = self.tenants.pop_first()?;
        self.lanes.get(&tenant)?.front().copied()
    }

    /// Continues after a lane, without it if it is empty or was not served. Tenants that cannot be served keep a lead of
    /// at most one block.
    pub(super) fn resume(&mut self, queue: &mut Queue, lane: Lane, attempt: Attempt) {
        if attempt == Attempt::Served {
            for (tenant, slot_bytes) in &self.passed_over {
                queue.shares.pass_over(tenant, *slot_bytes, &lane.tenant);
            }
        }
        let lanes = self.lanes.entry(lane.tenant).or_default();
        if attempt == Attempt::Refused || queue.oldest_of(lane).is_none() {
            lanes.pop_front();
        }
        if !lanes.is_empty() {
            self.tenants.insert((queue.shares.tag(&lane.tenant), lane.tenant));
        } else if attempt == Attempt::Refused {
            self.passed_over.insert(lane.tenant, lane.slot_bytes);
        }
    }
}

/// Result of an attempt to serve a lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Attempt {
    /// The first block was removed.
    Served,
    /// The lane cannot be served in this run.
    Refused,
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

    /// Removes the first block of a lane, which is written.
    pub(super) fn pop(&mut self, lane: Lane) -> Option<SlabId> {
        if self.lanes.contains_key(&lane) {
            self.shares.charge(&lane.tenant, lane.slot_bytes);
        }
        self.remove_first(lane)
    }

    /// Removes the first block of a lane, which is not written: it does not count against the tenant's share.
    pub(super) fn remove_first(&mut self, lane: Lane) -> Option<SlabId> {
        let queue = self.lanes.get_mut(&lane)?;
        let first = queue.pop_front()?;
        if queue.is_empty() {
            self.lanes.remove(&lane);
            self.leave(lane.tenant);
        }
        self.bytes -= lane.slot_bytes;
        Some(first.record)
    }

    /// Returns all lanes in the order of their oldest blocks.
    pub(super) fn lanes(&self) -> Vec<Lane> {
        let mut lanes: Vec<(Option<Tick>, Lane)> =
            self.lanes.iter().map(|(lane, queue)| (queue.front().map(|first| first.since), *lane)).collect();
        lanes.sort_unstable();
        lanes.into_iter().map(|(_, lane)| lane).collect()
    }

    /// Returns all lanes in the order of their service.
    pub(super) fn candidates(&self) -> Candidates {
        let mut candidates = Candidates::default();
        for lane in self.lanes() {
            candidates.lanes.entry(lane.tenant).or_default().push_back(lane);
            candidates.tenants.insert((self.shares.tag(&lane.tenant), lane.tenant));
        }
        candidates
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

    /// Removes up to `count` blocks in the order of their service.
    fn serve(queue: &mut Queue, count: usize) -> Vec<(Lane, SlabId)> {
        let mut candidates = queue.candidates();
        let next = || {
            let lane = candidates.take()?;
            let record = queue.pop(lane)?;
            candidates.resume(queue, lane, Attempt::Served);
            Some((lane, record))
        };
        std::iter::from_fn(next).take(count).collect()
    }

    fn lane(slot_bytes: u64, tenant: u16) -> Lane {
        Lane { slot_bytes, tenant: TenantIndex(tenant), cause: WriteCause::Committed }
    }

    #[test]
    fn serves_the_lane_with_the_oldest_block_of_a_tenant_first() {
        let (large, small) = (lane(8192, 0), lane(4096, 0));
        let mut queue = Queue::new(Weights::default());
        queue.push(large, SlabId(1), Tick(2));
        queue.push(small, SlabId(2), Tick(1));
        queue.push(small, SlabId(3), Tick(3));
        assert_eq!((queue.oldest(), queue.bytes()), (Some(Tick(1)), 16_384));
        assert_eq!(serve(&mut queue, 1), [(small, SlabId(2))]);
        queue.push_front(small, SlabId(2), Tick(1));
        assert_eq!(serve(&mut queue, 9), [(small, SlabId(2)), (small, SlabId(3)), (large, SlabId(1))]);
        assert_eq!((queue.is_empty(), queue.bytes(), queue.pop(small)), (true, 0, None));
    }

    #[test]
    fn tenants_get_shares_by_weight_however_old_their_blocks_are() {
        let mut queue = Queue::new([(TenantIndex(1), 2)].into_iter().collect());
        (0..30).for_each(|number| queue.push(lane(4096, 0), SlabId(number), Tick(number)));
        (0..30).for_each(|number| queue.push(lane(4096, 1), SlabId(100 + number), Tick(1000 + number)));
        let served = [serve(&mut queue, 15), serve(&mut queue, 15)].concat();
        let of = |tenant| served.iter().filter(|(lane, _)| lane.tenant.0 == tenant).count();
        assert_eq!((of(0), of(1)), (10, 20), "{served:?}");
    }

    #[test]
    fn lane_that_cannot_be_served_does_not_delay_other_lanes() {
        let mut queue = Queue::new(Weights::default());
        let lanes = [lane(4096, 0), lane(8192, 0), lane(4096, 1)];
        (0..3).zip(lanes).for_each(|(number, lane)| queue.push(lane, SlabId(number), Tick(number)));
        let mut candidates = queue.candidates();
        let mut refused = BTreeSet::new();
        while let Some(lane) = candidates.take() {
            refused.insert(lane);
            candidates.resume(&mut queue, lane, Attempt::Refused);
        }
        assert_eq!(refused, BTreeSet::from(lanes));
    }

    #[test]
    fn tenant_that_could_not_be_served_does_not_catch_up() {
        let mut queue = Queue::new(Weights::default());
        (0..40).for_each(|number| queue.push(lane(4096, 0), SlabId(number), Tick(number)));
        (0..60).for_each(|number| queue.push(lane(4096, 1), SlabId(100 + number), Tick(number)));
        let mut candidates = queue.candidates();
        let mut served = 0;
        while served < 40
            && let Some(next) = candidates.take()
        {
            let attempt = if next.tenant == TenantIndex(0) { Attempt::Refused } else { Attempt::Served };
            if attempt == Attempt::Served {
                assert!(queue.pop(next).is_some());
                served += 1;
            }
            candidates.resume(&mut queue, next, attempt);
        }
        assert_eq!(served, 40);
        let next = serve(&mut queue, 10);
        let of_first = next.iter().filter(|(lane, _)| lane.tenant == TenantIndex(0)).count();
        assert!((5..=6).contains(&of_first), "{next:?}");
    }

    #[test]
    fn blocks_that_are_not_written_do_not_count_against_the_share() {
        let mut queue = Queue::new(Weights::default());
        (0..20).for_each(|number| queue.push(lane(4096, 0), SlabId(number), Tick(number)));
        (0..20).for_each(|number| queue.push(lane(4096, 1), SlabId(100 + number), Tick(number)));
        (0..10).for_each(|number| assert_eq!(queue.remove_first(lane(4096, 0)), Some(SlabId(number))));
        let next = serve(&mut queue, 10);
        assert_eq!(next.iter().filter(|(lane, _)| lane.tenant == TenantIndex(0)).count(), 5);
        assert_eq!(queue.bytes(), 20 * 4096);
    }
}
