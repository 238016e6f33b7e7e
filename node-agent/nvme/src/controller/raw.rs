//! Queue pairs that another processor drives: a GPU, or another process.
//!
//! The owner of the memory writes commands and reads completions. The driver only creates, aborts and deletes. The
//! queues lie in any memory that the controller can access: mapped by [`Backing::map`], or in a BAR.

use crate::backing::Backing;
use crate::controller::Controller;
use crate::error::NvmeError;
use crate::queue::ENTRIES_MAX;
use crate::spec::{Command, DELETE_CQ, DELETE_SQ, PAGE_BYTES, offset};

/// Addresses of a queue pair for the controller: contiguous, and multiples of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueueAddresses {
    /// Submission queue: 64 bytes for each entry.
    pub submissions: u64,
    /// Completion queue: 16 bytes for each entry, zeroed before the creation.
    pub completions: u64,
}

/// A queue pair of which the driver does not access the memory. It must be deleted before its memory is released:
/// [`Controller::delete_raw_queue_pair`].
#[derive(Debug, PartialEq, Eq)]
#[must_use = "the controller accesses its memory until it is deleted"]
pub struct RawQueuePair {
    id: u16,
    entries: u32,
    addresses: QueueAddresses,
    stride: usize,
}

impl RawQueuePair {
    /// Returns the number of the queue.
    pub fn id(&self) -> u16 {
        self.id
    }

    /// Returns the number of entries. One of them stays empty.
    pub fn entries(&self) -> u32 {
        self.entries
    }

    /// Returns where the queues lie.
    pub fn addresses(&self) -> QueueAddresses {
        self.addresses
    }

    /// Returns the offset of the tail doorbell of the submission queue in BAR 0, in bytes.
    pub fn submission_doorbell(&self) -> usize {
        offset::sq_tail(self.id, self.stride)
    }

    /// Returns the offset of the head doorbell of the completion queue in BAR 0, in bytes.
    pub fn completion_doorbell(&self) -> usize {
        offset::cq_head(self.id, self.stride)
    }
}

impl<B: Backing> Controller<B> {
    /// Returns the maximum number of entries of a queue pair: of the controller, and of identifiers of 12 bits.
    pub fn entries_max(&self) -> u32 {
        self.capabilities.entries_max().min(ENTRIES_MAX)
    }

    /// Returns the number of queue pairs that can be created now.
    pub fn free_queue_pairs(&self) -> usize {
        self.free_queues.len()
    }

    /// Creates a queue pair in memory of the caller, with 2 to [`entries_max`](Self::entries_max) entries.
    ///
    /// # Errors
    /// `Invalid` for a number of entries or an address outside its range; `NoQueue` if all granted pairs are in use;
    /// `Refused`, or the admin queue fails.
    pub fn create_raw_queue_pair(
        &mut self,
        entries: u32,
        addresses: QueueAddresses,
    ) -> Result<RawQueuePair, NvmeError> {
        let most = self.entries_max();
        if !(2..=most).contains(&entries) {
            return Err(NvmeError::Invalid(format!(
                "{entries} entries of a queue pair: expected 2 to {most}"
            )));
        }
        if !(addresses.submissions | addresses.completions).is_multiple_of(PAGE_BYTES as u64) {
            return Err(NvmeError::Invalid(format!("{addresses:x?}: expected multiples of {PAGE_BYTES}")));
        }
        let stride = self.capabilities.doorbell_stride();
        self.with_free_number(|controller, id| {
            controller.create_queues(id, entries, addresses)?;
            Ok(RawQueuePair { id, entries, addresses, stride })
        })
    }

    /// Deletes a queue pair: the controller no longer accesses its memory, nor that of its commands, which may have
    /// run or not.
    ///
    /// # Errors
    /// If the controller does not confirm, that memory must not be used again before a reset.
    #[expect(clippy::needless_pass_by_value, reason = "a deleted queue pair is not used again")]
    pub fn delete_raw_queue_pair(&mut self, queue: RawQueuePair) -> Result<(), NvmeError> {
        let id = queue.id;
        // The submission queue first (Base 2.0, 5.6).
        self.command("Delete I/O Submission Queue", &Command::delete_queue(DELETE_SQ, id))?;
        self.command("Delete I/O Completion Queue", &Command::delete_queue(DELETE_CQ, id))?;
        self.free_queues.push(id);
        Ok(())
    }
}
