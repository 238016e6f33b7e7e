//! Batches that have ended, and the statuses of their contexts.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use reprise_nvme::spec::Status;

use crate::ring::layout::{self, CONTEXTS_MAX};
use crate::ring::{Ring, Shared, Ticket};

/// Pause between two checks for completions.
const PAUSE: Duration = Duration::from_micros(20);
/// Checks before the first pause.
const SPINS: u32 = 64;

/// State of a context.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ContextStatus {
    /// It has not ended.
    Pending,
    /// All bytes were transferred.
    Done,
    /// The controller has reported an error.
    Failed(Status),
    /// The batch was cancelled before the transfer had a command.
    Cancelled,
    /// It has not ended by the deadline of the batch.
    TimedOut,
    /// The controller has violated the specification. The queue must be reclaimed.
    Violation,
    /// Address, length or operation are outside of their ranges. No command was built.
    Invalid,
    /// The queue was stopped.
    Parked,
}

impl ContextStatus {
    fn of(word: u32) -> ContextStatus {
        const ENDED: u32 = 1 << 31;
        const REASON: u32 = 1 << 15;
        match word & 0xffff {
            _ if word & ENDED == 0 => ContextStatus::Pending,
            0 => ContextStatus::Done,
            code if code & REASON == 0 => ContextStatus::Failed(Status(code as u16)),
            code => match code & !REASON {
                1 => ContextStatus::Cancelled,
                2 => ContextStatus::TimedOut,
                3 => ContextStatus::Violation,
                4 => ContextStatus::Invalid,
                _ => ContextStatus::Parked,
            },
        }
    }
}

/// A batch that has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cqe {
    /// The batch.
    pub ticket: Ticket,
    /// Number that the caller gave it.
    pub token: u64,
    /// Index of its queue.
    pub queue: usize,
    /// Number of its contexts.
    pub contexts: usize,
    /// Number of contexts without success.
    pub failed: usize,
    /// Number of commands that the controller may still run: reclaim the queue before their memory has another use.
    pub given_up: usize,
    /// Time from when the ring took the batch until its end.
    pub duration: Duration,
}

impl Ring {
    /// Takes a batch that has ended, without waiting.
    pub fn poll_cqe(&mut self) -> Option<Cqe> {
        let count = self.queues.len();
        for step in 0..count {
            let index = (self.next + step) % count;
            if let Some(cqe) = self.take_completion(index) {
                self.next = index;
                return Some(cqe);
            }
        }
        None
    }

    /// Takes a batch that has ended, and waits for one at most `limit`; `None` then.
    pub fn wait_cqe(&mut self, limit: Duration) -> Option<Cqe> {
        let start = Instant::now();
        for look in 0_u32.. {
            if let Some(cqe) = self.poll_cqe() {
                return Some(cqe);
            }
            if look % 16 == 15 && start.elapsed() >= limit {
                return None;
            }
            match look {
                0..SPINS => std::hint::spin_loop(),
                _ if start.elapsed() < PAUSE * 10 => std::thread::yield_now(),
                _ => std::thread::sleep(PAUSE),
            }
        }
        None
    }

    fn take_completion(&mut self, index: usize) -> Option<Cqe> {
        let Shared { memory, layout, .. } = &*self.shared;
        let state = &mut self.queues[index];
        // Statuses and results of the batch are read after the count.
        if memory.load(layout.queue(index) + layout::queue::COMPLETED) == state.completed {
            return None;
        }
        let at = layout.completed(index) + 4 * (state.completed as usize % layout.depth);
        let batch = memory.word(at).load(Ordering::Relaxed) as usize;
        state.completed = state.completed.wrapping_add(1);
        let own = self.batches.get_mut(batch).filter(|own| own.queue == Some(index));
        // A processor that reports a batch that it does not have harms the batches that it does have.
        let own = own?;
        own.queue = None;
        self.free.push(batch);
        let result = layout.result(batch);
        let double = |at: usize| memory.double(at).load(Ordering::Relaxed);
        let (started, ended) =
            (double(result + layout::result::STARTED), double(result + layout::result::ENDED));
        Some(Cqe {
            ticket: Ticket { batch, use_number: own.use_number },
            token: own.token,
            queue: index,
            contexts: own.contexts,
            failed: memory.word(result + layout::result::FAILED).load(Ordering::Relaxed) as usize,
            given_up: memory.word(result + layout::result::GIVEN_UP).load(Ordering::Relaxed) as usize,
            duration: Duration::from_nanos(ended.saturating_sub(started)),
        })
    }

    /// Returns the status of a context of a batch; `None` if the batch has another use meanwhile, or for an index
    /// outside of it.
    pub fn status(&self, ticket: Ticket, context: usize) -> Option<ContextStatus> {
        let state = self.batches[ticket.batch];
        if state.use_number != ticket.use_number || context >= state.contexts {
            return None;
        }
        let Shared { memory, layout, .. } = &*self.shared;
        Some(ContextStatus::of(memory.load(layout.status(ticket.batch, context))))
    }

    /// Returns the statuses of all contexts of a batch; none if the batch has another use meanwhile.
    pub fn statuses(&self, ticket: Ticket) -> impl Iterator<Item = ContextStatus> + '_ {
        (0..CONTEXTS_MAX).map_while(move |context| self.status(ticket, context))
    }
}
