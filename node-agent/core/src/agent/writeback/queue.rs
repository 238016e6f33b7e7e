//! What waits to be written: one queue per slot size, each in order of commit.
//!
//! A size for which no device has a slot waits without holding up the others. Among sizes the one goes first whose
//! oldest block has waited longest. Sizes are few (those of the layouts in use), so walking them is cheap.

use std::collections::{BTreeMap, VecDeque};

use reprise_policy::Tick;

use super::super::slab::SlabId;

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Queue {
    /// By slot bytes; only sizes that something waits for.
    sizes: BTreeMap<u64, VecDeque<Waiting>>,
    bytes: u64,
}

/// A block that waits.
#[derive(Clone, Copy, Debug)]
struct Waiting {
    record: SlabId,
    since: Tick,
}

impl Queue {
    pub(super) fn is_empty(&self) -> bool {
        self.sizes.is_empty()
    }

    /// Whether a block of a size waits.
    pub(super) fn holds(&self, slot_bytes: u64) -> bool {
        self.sizes.contains_key(&slot_bytes)
    }

    /// Slot bytes of all that waits.
    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Since when the oldest waits.
    pub(super) fn oldest(&self) -> Option<Tick> {
        self.sizes.values().filter_map(|queue| queue.front()).map(|first| first.since).min()
    }

    /// Appends a new block.
    pub(super) fn push(&mut self, slot_bytes: u64, record: SlabId, since: Tick) {
        self.bytes += slot_bytes;
        self.sizes.entry(slot_bytes).or_default().push_back(Waiting { record, since });
    }

    /// A block that was taken goes first again.
    pub(super) fn put_back(&mut self, slot_bytes: u64, record: SlabId, since: Tick) {
        self.bytes += slot_bytes;
        self.sizes.entry(slot_bytes).or_default().push_front(Waiting { record, since });
    }

    /// Takes the first block of a size.
    pub(super) fn pop(&mut self, slot_bytes: u64) -> Option<SlabId> {
        let queue = self.sizes.get_mut(&slot_bytes)?;
        let first = queue.pop_front()?;
        if queue.is_empty() {
            self.sizes.remove(&slot_bytes);
        }
        self.bytes -= slot_bytes;
        Some(first.record)
    }

    /// The sizes, that of the oldest block first.
    pub(super) fn sizes(&self) -> Vec<u64> {
        let mut sizes: Vec<(Option<Tick>, u64)> = self
            .sizes
            .iter()
            .map(|(bytes, queue)| (queue.front().map(|first| first.since), *bytes))
            .collect();
        sizes.sort_unstable();
        sizes.into_iter().map(|(_, bytes)| bytes).collect()
    }

    /// Everything that waits, for the audit.
    pub(super) fn iter(&self) -> impl Iterator<Item = (u64, SlabId)> {
        self.sizes.iter().flat_map(|(bytes, queue)| queue.iter().map(|waiting| (*bytes, waiting.record)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_served_by_age_and_each_in_order() {
        let mut queue = Queue::default();
        queue.push(8192, SlabId(1), Tick(2));
        queue.push(4096, SlabId(2), Tick(1));
        queue.push(4096, SlabId(3), Tick(3));
        assert_eq!((queue.sizes(), queue.bytes(), queue.oldest()), (vec![4096, 8192], 16_384, Some(Tick(1))));
        assert_eq!(queue.pop(4096), Some(SlabId(2)));
        assert_eq!(queue.sizes(), [8192, 4096]);
        queue.put_back(4096, SlabId(2), Tick(1));
        assert_eq!(
            (queue.pop(4096), queue.pop(4096), queue.pop(4096)),
            (Some(SlabId(2)), Some(SlabId(3)), None)
        );
        assert_eq!((queue.pop(8192), queue.is_empty(), queue.bytes()), (Some(SlabId(1)), true, 0));
    }
}
