//! Queues of the controller, and the completions that it writes.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use super::QUEUES_MAX;
use super::memory::{Mapping, Mappings, resolve};
use crate::spec::{CQE_BYTES, Completion, Status};

/// A submission queue of the controller.
#[derive(Debug)]
pub(super) struct Submissions {
    pub(super) address: u64,
    pub(super) entries: u32,
    pub(super) head: u32,
    /// Number of its completion queue.
    pub(super) completions: u16,
    /// Value of the doorbell whose write was dropped.
    pub(super) dropped: Option<u32>,
    /// Completions that were not written yet.
    pub(super) pending: VecDeque<Pending>,
}

/// A completion queue of the controller.
#[derive(Debug)]
pub(super) struct Completions {
    pub(super) address: u64,
    pub(super) entries: u32,
    pub(super) tail: u32,
    pub(super) phase: bool,
}

/// A completion that was not written yet.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pending {
    pub(super) id: u16,
    pub(super) status: Status,
    pub(super) result: u32,
    /// It is written when this has passed.
    pub(super) due: Option<Instant>,
    /// It is written after another one of the queue.
    pub(super) after_next: bool,
}

/// A place for a submission queue. The fields next to it let a thread pass a queue without work unlocked.
#[derive(Debug)]
pub(super) struct Place {
    pub(super) queue: Mutex<Option<Submissions>>,
    /// Value of the doorbell that announces nothing.
    pub(super) idle_at: AtomicU32,
    pub(super) exists: AtomicBool,
    pub(super) has_pending: AtomicBool,
}

/// All queues.
#[derive(Debug)]
pub(super) struct Queues {
    places: Vec<Place>,
    completions: Vec<Mutex<Option<Completions>>>,
    /// The largest number of a queue until now.
    highest: AtomicU32,
}

impl Queues {
    pub(super) fn new() -> Queues {
        let place = || Place {
            queue: Mutex::new(None),
            idle_at: AtomicU32::new(0),
            exists: AtomicBool::new(false),
            has_pending: AtomicBool::new(false),
        };
        Queues {
            places: (0..QUEUES_MAX).map(|_| place()).collect(),
            completions: (0..QUEUES_MAX).map(|_| Mutex::new(None)).collect(),
            highest: AtomicU32::new(0),
        }
    }

    /// Returns the numbers that one of `threads` threads serves. Thread 0 serves the admin queue.
    pub(super) fn of_thread(&self, thread: usize, threads: usize) -> impl Iterator<Item = u16> + use<> {
        let highest = self.highest.load(Ordering::Acquire) as usize;
        (thread..=highest).step_by(threads).map(|id| id as u16)
    }

    pub(super) fn place(&self, id: u16) -> &Place {
        &self.places[usize::from(id)]
    }

    pub(super) fn lock(&self, id: u16) -> MutexGuard<'_, Option<Submissions>> {
        self.place(id).queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn lock_completions(&self, id: u16) -> MutexGuard<'_, Option<Completions>> {
        self.completions[usize::from(id)].lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn insert(&self, id: u16, queue: Submissions) {
        *self.lock(id) = Some(queue);
        let place = self.place(id);
        place.idle_at.store(0, Ordering::Release);
        place.exists.store(true, Ordering::Release);
        self.highest.fetch_max(id.into(), Ordering::Release);
    }

    /// Removes a submission queue with its completions that were not written; false if there is none.
    pub(super) fn remove(&self, id: u16) -> bool {
        let place = self.place(id);
        place.exists.store(false, Ordering::Release);
        place.has_pending.store(false, Ordering::Release);
        self.lock(id).take().is_some()
    }

    /// Forgets all queues.
    pub(super) fn clear(&self) {
        for id in 0..=self.highest.load(Ordering::Acquire) as u16 {
            self.remove(id);
        }
        self.completions.iter().for_each(|one| *one.lock().unwrap_or_else(PoisonError::into_inner) = None);
    }
}

/// Result of an attempt to write a completion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Posted {
    Written,
    /// The queue is full.
    Full,
    /// The driver's doorbell has an impossible value.
    InvalidDoorbell,
    /// The memory of the queue is not mapped.
    Unmapped,
}

impl Completions {
    /// Returns the memory of the whole queue, if it is mapped.
    pub(super) fn memory<'a>(&self, mappings: &'a Mappings) -> Option<(&'a Mapping, usize)> {
        resolve(mappings, self.address, u64::from(self.entries) * CQE_BYTES as u64)
    }

    /// Writes a completion of queue `sq_id` at the tail; `head` is the driver's doorbell.
    pub(super) fn post(
        &mut self,
        memory: Option<(&Mapping, usize)>,
        head: u32,
        (sq_id, sq_head): (u16, u32),
        pending: &Pending,
    ) -> Posted {
        if head >= self.entries {
            return Posted::InvalidDoorbell;
        }
        let next = if self.tail + 1 == self.entries { 0 } else { self.tail + 1 };
        if next == head {
            return Posted::Full;
        }
        let Some((memory, base)) = memory else { return Posted::Unmapped };
        let (result, id, status) = (pending.result, pending.id, pending.status);
        let entry = Completion { result, sq_head: sq_head as u16, sq_id, id, status, phase: self.phase };
        let at = base + self.tail as usize * CQE_BYTES;
        let [first, second, third, last] = entry.encode();
        let word = |low: u32, high: u32| (u64::from(low) | u64::from(high) << 32).to_le();
        memory.word(at).store(word(first, second), Ordering::Relaxed);
        memory.half_word(at + 8).store(third.to_le(), Ordering::Relaxed);
        // Data and the other dwords are visible before the phase bit.
        memory.half_word(at + 12).store(last.to_le(), Ordering::Release);
        self.tail = next;
        if next == 0 {
            self.phase = !self.phase;
        }
        Posted::Written
    }
}
