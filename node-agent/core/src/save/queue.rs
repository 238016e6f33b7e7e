//! Queue of unsaved blocks: one lane per tenant, slot size and cause, each in order of commit.
//!
//! A lane without a free slot, or whose tenant is at its limit, does not delay the others. The lane with the
//! oldest block is served first. The number of lanes is small (layouts in use), so iterating them is cheap.

use std::collections::{BTreeMap, VecDeque};

use reprise_policy::Tick;

use crate::cache::{SlotRequest, TenantIndex};
use crate::slab::SlabId;

/// Lanes with at least one block.
#[derive(Debug, Default)]
pub(super) struct Queue {
    /// Blocks of each lane; without empty lanes.
    lanes: BTreeMap<Lane, VecDeque<Waiting>>,
    bytes: u64,
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

impl Queue {
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
        self.lanes.entry(lane).or_default().push_back(Waiting { record, since });
    }

    /// Reinserts a block at the front of a lane.
    pub(super) fn push_front(&mut self, lane: Lane, record: SlabId, since: Tick) {
        self.bytes += lane.slot_bytes;
        self.lanes.entry(lane).or_default().push_front(Waiting { record, since });
    }

    /// Removes the first block of a lane.
    pub(super) fn pop(&mut self, lane: Lane) -> Option<SlabId> {
        let queue = self.lanes.get_mut(&lane)?;
        let first = queue.pop_front()?;
        if queue.is_empty() {
            self.lanes.remove(&lane);
        }
        self.bytes -= lane.slot_bytes;
        Some(first.record)
    }

    /// Lanes in the order of their oldest blocks.
    pub(super) fn lanes(&self) -> Vec<Lane> {
        let mut lanes: Vec<(Option<Tick>, Lane)> =
            self.lanes.iter().map(|(lane, queue)| (queue.front().map(|first| first.since), *lane)).collect();
        lanes.sort_unstable();
        lanes.into_iter().map(|(_, lane)| lane).collect()
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

    #[test]
    fn serves_lanes_by_age_and_blocks_in_order() {
        let cause = WriteCause::Committed;
        let lane = |slot_bytes, tenant| Lane { slot_bytes, tenant: TenantIndex(tenant), cause };
        let (large, small, others) = (lane(8192, 0), lane(4096, 0), lane(4096, 1));
        let mut queue = Queue::default();
        queue.push(large, SlabId(1), Tick(2));
        queue.push(small, SlabId(2), Tick(1));
        queue.push(small, SlabId(3), Tick(3));
        queue.push(others, SlabId(4), Tick(4));
        assert_eq!((queue.lanes(), queue.bytes()), (vec![small, large, others], 20_480));
        assert_eq!((queue.pop(small), queue.oldest()), (Some(SlabId(2)), Some(Tick(2))));
        assert_eq!(queue.lanes(), [large, small, others]);
        queue.push_front(small, SlabId(2), Tick(1));
        assert_eq!(
            (queue.pop(small), queue.pop(small), queue.pop(small)),
            (Some(SlabId(2)), Some(SlabId(3)), None)
        );
        assert_eq!((queue.pop(others), queue.pop(large)), (Some(SlabId(4)), Some(SlabId(1))));
        assert_eq!((queue.is_empty(), queue.bytes()), (true, 0));
    }
}
