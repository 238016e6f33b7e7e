//! What waits to be written: one queue per tenant and slot size, each in order of commit.
//!
//! A lane for which no device has a slot, or whose tenant is at its limit, waits without holding up the others. Among lanes
//! the one goes first whose oldest block has waited longest. Lanes are few (those of the layouts in use), so walking them is
//! cheap.

use std::collections::{BTreeMap, VecDeque};

use reprise_policy::Tick;

use super::super::slab::SlabId;
use super::super::tenants::TenantIndex;

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Queue {
    /// Only lanes that something waits in.
    lanes: BTreeMap<Lane, VecDeque<Waiting>>,
    bytes: u64,
}

/// Blocks that wait for the same room.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(in crate::agent) struct Lane {
    /// Bytes of a slot.
    pub(in crate::agent) slot_bytes: u64,
    /// Whose blocks they are.
    pub(in crate::agent) tenant: TenantIndex,
    /// Why they are saved.
    pub(in crate::agent) cause: Cause,
}

/// Why a block is saved.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(in crate::agent) enum Cause {
    /// An engine has committed it.
    Committed,
    /// It was taken from a peer: nothing is evicted for it, and nobody waits for it.
    Taken,
}

/// A block that waits.
#[derive(Clone, Copy, Debug)]
struct Waiting {
    record: SlabId,
    since: Tick,
}

impl Queue {
    pub(super) fn is_empty(&self) -> bool {
        self.lanes.is_empty()
    }

    /// Whether a block of a lane waits.
    pub(super) fn holds(&self, lane: Lane) -> bool {
        self.lanes.contains_key(&lane)
    }

    /// Slot bytes of all that waits.
    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Since when the oldest waits.
    pub(super) fn oldest(&self) -> Option<Tick> {
        self.lanes.values().filter_map(|queue| queue.front()).map(|first| first.since).min()
    }

    /// Appends a new block.
    pub(super) fn push(&mut self, lane: Lane, record: SlabId, since: Tick) {
        self.bytes += lane.slot_bytes;
        self.lanes.entry(lane).or_default().push_back(Waiting { record, since });
    }

    /// A block that was taken goes first again.
    pub(super) fn put_back(&mut self, lane: Lane, record: SlabId, since: Tick) {
        self.bytes += lane.slot_bytes;
        self.lanes.entry(lane).or_default().push_front(Waiting { record, since });
    }

    /// Takes the first block of a lane.
    pub(super) fn pop(&mut self, lane: Lane) -> Option<SlabId> {
        let queue = self.lanes.get_mut(&lane)?;
        let first = queue.pop_front()?;
        if queue.is_empty() {
            self.lanes.remove(&lane);
        }
        self.bytes -= lane.slot_bytes;
        Some(first.record)
    }

    /// The lanes, that of the oldest block first.
    pub(super) fn lanes(&self) -> Vec<Lane> {
        let mut lanes: Vec<(Option<Tick>, Lane)> =
            self.lanes.iter().map(|(lane, queue)| (queue.front().map(|first| first.since), *lane)).collect();
        lanes.sort_unstable();
        lanes.into_iter().map(|(_, lane)| lane).collect()
    }

    /// Everything that waits, for the audit.
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
    fn lanes_are_served_by_age_and_each_in_order() {
        let cause = Cause::Committed;
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
        queue.put_back(small, SlabId(2), Tick(1));
        assert_eq!(
            (queue.pop(small), queue.pop(small), queue.pop(small)),
            (Some(SlabId(2)), Some(SlabId(3)), None)
        );
        assert_eq!((queue.pop(others), queue.pop(large)), (Some(SlabId(4)), Some(SlabId(1))));
        assert_eq!((queue.is_empty(), queue.bytes()), (true, 0));
    }
}
