//! Offsets in the memory of a ring. `native/ring_layout.h` has the same structures.

use crate::ring::{DEPTH_MAX, RingError, RingSettings};

pub(super) const MAGIC: u32 = 0x5247_4e52;
pub(super) const VERSION: u32 = 1;

/// Maximum number of contexts of a batch.
pub const CONTEXTS_MAX: usize = 2048;
/// Size of a context in bytes: an SGL descriptor of 16 bytes, block, length, checksum.
pub const CONTEXT_BYTES: usize = 32;
/// Size of a batch in bytes: 64, and its contexts.
pub const BATCH_BYTES: usize = 64 + CONTEXTS_MAX * CONTEXT_BYTES;

const LINE: usize = 128;
const RESULT_BYTES: usize = 32;
const QUEUE_BYTES: usize = 512;
const SLOT_BYTES: usize = 8;
const PROGRESS_BYTES: usize = 128 + 4 * CONTEXTS_MAX;

/// Offsets of fields of a context.
pub(super) mod context {
    pub(in crate::ring) const BLOCK: usize = 16;
    pub(in crate::ring) const LENGTH: usize = 24;
    pub(in crate::ring) const CHECKSUM: usize = 28;
}

/// Offsets of fields of a batch.
pub(super) mod batch {
    pub(in crate::ring) const CANCEL: usize = 12;
    pub(in crate::ring) const TIMEOUT: usize = 16;
    pub(in crate::ring) const TOKEN: usize = 24;
    pub(in crate::ring) const CONTEXTS: usize = 64;
}

/// Offsets of fields of a result.
pub(super) mod result {
    pub(in crate::ring) const FAILED: usize = 0;
    pub(in crate::ring) const GIVEN_UP: usize = 4;
    pub(in crate::ring) const STARTED: usize = 8;
    pub(in crate::ring) const ENDED: usize = 16;
}

/// Offsets of fields of the header.
pub(super) mod header {
    pub(in crate::ring) const WORK: usize = 16;
    pub(in crate::ring) const OFFSETS: usize = 24;
    pub(in crate::ring) const PROGRESS: usize = 56;
}

/// Offsets of fields of a queue.
pub(super) mod queue {
    pub(in crate::ring) const ADDRESSES: usize = 0;
    pub(in crate::ring) const ENTRIES: usize = 48;
    pub(in crate::ring) const SLOTS: usize = 72;
    pub(in crate::ring) const FREE_MASK: usize = 88;
    pub(in crate::ring) const ISSUED_OFFSET: usize = 96;
    pub(in crate::ring) const COMPLETED_OFFSET: usize = 104;
    pub(in crate::ring) const ISSUED: usize = 128;
    pub(in crate::ring) const REQUEST: usize = 132;
    pub(in crate::ring) const COMPLETED: usize = 256;
    pub(in crate::ring) const STATE: usize = 260;
    pub(in crate::ring) const GIVEN_UP: usize = 264;
    pub(in crate::ring) const BROKEN: usize = 268;
    pub(in crate::ring) const GIVEN_UP_OFFSET: usize = 272;
    pub(in crate::ring) const GIVEN_UP_COUNT: usize = 280;
    pub(in crate::ring) const COMMANDS: usize = 288;
}

/// Places of everything in the memory of a ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Layout {
    pub(super) depth: usize,
    pub(super) queues: usize,
    pub(super) entries_max: usize,
    queues_at: usize,
    indices_at: usize,
    pub(super) results_at: usize,
    pub(super) statuses_at: usize,
    pub(super) batches_at: usize,
    pub(super) shared_bytes: usize,
    pub(super) progress_at: usize,
    pub(super) work_bytes: usize,
}

impl Layout {
    pub(super) fn new(settings: &RingSettings) -> Result<Layout, RingError> {
        let RingSettings { depth, queues, entries_max } = *settings;
        let valid = depth.is_power_of_two() && (2..=DEPTH_MAX).contains(&depth);
        if !valid || !(1..=1024).contains(&queues) || !(2..=4096).contains(&entries_max) {
            return Err(RingError::Invalid(format!(
                "{depth} batches, {queues} queues, {entries_max} entries: expected a power of two from 2 to {DEPTH_MAX}, \
                 1 to 1024, 2 to 4096"
            )));
        }
        let mut end = LINE;
        let mut take = |bytes: usize| {
            let at = end;
            end = (end + bytes).next_multiple_of(LINE);
            at
        };
        let queues_at = take(queues * QUEUE_BYTES);
        let indices_at = take(queues * Layout::indices_bytes(depth, entries_max));
        let results_at = take(depth * RESULT_BYTES);
        let statuses_at = take(depth * CONTEXTS_MAX * 4);
        let batches_at = take(depth * BATCH_BYTES);
        let shared_bytes = end.next_multiple_of(reprise_buffers::PAGE_BYTES);
        let progress_at = queues * Layout::work_of_queue(entries_max);
        let work_bytes = (progress_at + depth * PROGRESS_BYTES).next_multiple_of(reprise_buffers::PAGE_BYTES);
        Ok(Layout {
            depth,
            queues,
            entries_max,
            queues_at,
            indices_at,
            results_at,
            statuses_at,
            batches_at,
            shared_bytes,
            progress_at,
            work_bytes,
        })
    }

    /// Two rings of indices, and identifiers that were given up.
    fn indices_bytes(depth: usize, entries_max: usize) -> usize {
        (2 * depth * 4 + entries_max * 4).next_multiple_of(LINE)
    }

    /// Slots, and the ring of those that are free.
    fn work_of_queue(entries_max: usize) -> usize {
        (entries_max * SLOT_BYTES + 2 * entries_max.next_power_of_two()).next_multiple_of(LINE)
    }

    pub(super) fn queue(&self, index: usize) -> usize {
        self.queues_at + index * QUEUE_BYTES
    }

    pub(super) fn issued(&self, queue: usize) -> usize {
        self.indices_at + queue * Layout::indices_bytes(self.depth, self.entries_max)
    }

    pub(super) fn completed(&self, queue: usize) -> usize {
        self.issued(queue) + 4 * self.depth
    }

    pub(super) fn given_up(&self, queue: usize) -> usize {
        self.completed(queue) + 4 * self.depth
    }

    pub(super) fn slots(&self, queue: usize) -> usize {
        queue * Layout::work_of_queue(self.entries_max)
    }

    pub(super) fn free(&self, queue: usize) -> usize {
        self.slots(queue) + self.entries_max * SLOT_BYTES
    }

    pub(super) fn batch(&self, index: usize) -> usize {
        self.batches_at + index * BATCH_BYTES
    }

    pub(super) fn context(&self, batch: usize, index: usize) -> usize {
        self.batch(batch) + batch::CONTEXTS + index * CONTEXT_BYTES
    }

    pub(super) fn status(&self, batch: usize, context: usize) -> usize {
        self.statuses_at + (batch * CONTEXTS_MAX + context) * 4
    }

    pub(super) fn result(&self, batch: usize) -> usize {
        self.results_at + batch * RESULT_BYTES
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    unsafe extern "C" {
        fn reprise_ring_layout(values: *mut u64, room: usize) -> usize;
    }

    /// Values that `reprise_ring_layout` returns, in its order.
    const NATIVE: &[usize] = &[
        CONTEXT_BYTES,
        context::BLOCK,
        context::LENGTH,
        context::CHECKSUM,
        batch::CONTEXTS,
        batch::CANCEL,
        batch::TIMEOUT,
        batch::TOKEN,
        BATCH_BYTES,
        RESULT_BYTES,
        result::STARTED,
        LINE,
        header::WORK,
        header::PROGRESS,
        QUEUE_BYTES,
        queue::ENTRIES,
        queue::SLOTS,
        queue::ISSUED_OFFSET,
        queue::ISSUED,
        queue::REQUEST,
        queue::COMPLETED,
        queue::STATE,
        queue::GIVEN_UP_OFFSET,
        queue::GIVEN_UP_COUNT,
        queue::COMMANDS,
        SLOT_BYTES,
        PROGRESS_BYTES,
        DEPTH_MAX,
    ];

    #[test]
    fn native_source_and_rust_have_the_same_structures() {
        let mut values = vec![0_u64; NATIVE.len()];
        // SAFETY: the function writes at most as many values as there is room for.
        let count = unsafe { reprise_ring_layout(values.as_mut_ptr(), values.len()) };
        assert_eq!(count, NATIVE.len());
        let expected: Vec<u64> = NATIVE.iter().map(|value| *value as u64).collect();
        assert_eq!(values, expected);
    }

    #[test]
    fn parts_do_not_overlap() {
        let settings = RingSettings { depth: 4, queues: 3, entries_max: 100 };
        let layout = Layout::new(&settings).expect("valid");
        let mut parts = vec![(0, LINE), (layout.queue(0), 3 * QUEUE_BYTES)];
        for queue in 0..3 {
            parts.push((layout.issued(queue), 4 * 4));
            parts.push((layout.completed(queue), 4 * 4));
            parts.push((layout.given_up(queue), 100 * 4));
        }
        for batch in 0..4 {
            parts.push((layout.result(batch), RESULT_BYTES));
            parts.push((layout.status(batch, 0), CONTEXTS_MAX * 4));
            parts.push((layout.batch(batch), BATCH_BYTES));
        }
        parts.sort_unstable();
        for two in parts.windows(2) {
            assert!(two[0].0 + two[0].1 <= two[1].0, "{two:?}");
        }
        let last = parts.last().expect("there are parts");
        assert!(last.0 + last.1 <= layout.shared_bytes);
        for queue in 0..2 {
            assert!(layout.free(queue) + 2 * 128 <= layout.slots(queue + 1));
        }
        assert!(layout.progress_at + 4 * PROGRESS_BYTES <= layout.work_bytes);
    }
}
