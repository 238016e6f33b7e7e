//! A batch on its way to a queue: transfers are appended, then it is issued.

use std::sync::atomic::Ordering;

use reprise_nvme::spec::SglDescriptor;

use crate::ring::layout::{self, CONTEXTS_MAX};
use crate::ring::{Ring, RingError, Shared, Ticket, Transfer};

/// A batch that is being filled. Dropping it without [`issue_io`](Self::issue_io) frees it.
#[derive(Debug)]
pub struct Iocb<'a> {
    pub(super) ring: &'a mut Ring,
    pub(super) batch: usize,
    pub(super) contexts: usize,
    pub(super) is_issued: bool,
}

impl Iocb<'_> {
    /// Appends a transfer; false if the batch is full.
    pub fn push(&mut self, transfer: &Transfer) -> bool {
        if self.contexts == CONTEXTS_MAX {
            return false;
        }
        let Shared { memory, layout, .. } = &*self.ring.shared;
        let at = layout.context(self.batch, self.contexts);
        let [low, high] = SglDescriptor::data(transfer.address, transfer.bytes).words();
        memory.set_double(at, low);
        memory.set_double(at + 8, high);
        memory.set_double(at + layout::context::BLOCK, transfer.block);
        memory.set(at + layout::context::LENGTH, transfer.bytes);
        memory.set(at + layout::context::CHECKSUM, transfer.checksum);
        memory.set(layout.status(self.batch, self.contexts), 0);
        self.contexts += 1;
        true
    }

    /// Returns the number of transfers.
    pub fn len(&self) -> usize {
        self.contexts
    }

    /// Reports whether the batch has no transfers.
    pub fn is_empty(&self) -> bool {
        self.contexts == 0
    }

    /// Passes the batch to a queue, whose processor takes it after those before.
    ///
    /// # Errors
    /// `Invalid` for an empty batch, or a queue without a queue pair. The batch is free then.
    pub fn issue_io(mut self, queue: usize) -> Result<Ticket, RingError> {
        let ready = self.ring.queues.get(queue).is_some_and(|state| state.queue.is_some());
        if !ready || self.contexts == 0 {
            return Err(RingError::Invalid(format!(
                "a batch of {} contexts for queue {queue}: expected a queue with a queue pair, and contexts",
                self.contexts
            )));
        }
        let Ring { shared, batches, queues, .. } = &mut *self.ring;
        let Shared { memory, layout, .. } = &**shared;
        let (batch, state) = (&mut batches[self.batch], &mut queues[queue]);
        memory.set(layout.batch(self.batch), self.contexts as u32);
        batch.use_number += 1;
        batch.contexts = self.contexts;
        batch.queue = Some(queue);
        let at = layout.issued(queue) + 4 * (state.issued as usize % layout.depth);
        memory.set(at, self.batch as u32);
        state.issued = state.issued.wrapping_add(1);
        // The batch and its index are visible before the count.
        memory.word(layout.queue(queue) + layout::queue::ISSUED).store(state.issued, Ordering::Release);
        self.is_issued = true;
        Ok(Ticket { batch: self.batch, use_number: batch.use_number })
    }
}

impl Drop for Iocb<'_> {
    fn drop(&mut self) {
        if !self.is_issued {
            // Statuses of the earlier use were overwritten.
            self.ring.batches[self.batch].use_number += 1;
            self.ring.batches[self.batch].contexts = 0;
            self.ring.free.push(self.batch);
        }
    }
}
