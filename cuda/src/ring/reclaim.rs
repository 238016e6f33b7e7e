//! What happens to a queue after a batch has timed out: abort, and if that is not enough, a new queue pair.

use std::time::{Duration, Instant};

use reprise_nvme::{Backing, CommandId, Controller};

use crate::ring::{OwnedQueue, PARKED, Request, Ring, RingError, RingQueue, layout};

/// Pause between two checks of a queue.
const PAUSE: Duration = Duration::from_micros(100);
/// Time in which a processor follows a request.
const PARK_LIMIT: Duration = Duration::from_secs(5);

/// How a queue was reclaimed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reclaimed {
    /// No command was given up.
    Nothing,
    /// All commands that were given up have ended, most of them by an abort.
    Aborted,
    /// The queue pair was deleted and created again. Batches that were in flight have ended as parked.
    Recreated,
}

impl Ring {
    /// Ends the access of the controller to memory of commands that were given up: requests their abort, waits up to
    /// `grace` for their ends, and otherwise deletes the queue pair and creates it again. The processor of the queue
    /// must run; a thread of the host resumes the queue, a GPU needs another launch.
    ///
    /// # Errors
    /// `Nvme` if the controller fails; then only its reset ends its access. `Stuck` if the processor does not answer. After
    /// an error, `owned` keeps the queue pair mapped: it must live until the controller was reset.
    pub fn reclaim<B: Backing>(
        &mut self,
        queue: usize,
        owned: &mut OwnedQueue<B>,
        controller: &mut Controller<B>,
        grace: Duration,
    ) -> Result<Reclaimed, RingError> {
        if self.given_up(queue) == 0 && !self.is_broken(queue) {
            return Ok(Reclaimed::Nothing);
        }
        let until = Instant::now() + grace;
        while !self.is_broken(queue) && Instant::now() < until {
            self.request_aborts(queue, controller)?;
            if self.given_up(queue) == 0 {
                return Ok(Reclaimed::Aborted);
            }
            std::thread::sleep(PAUSE);
        }
        self.park(queue)?;
        let (before, _) = owned.doorbell_offsets();
        owned.recreate(controller)?;
        let moved = owned.doorbell_offsets().0 as i64 - before as i64;
        let pair = self.queues[queue].queue.as_ref().map(|one| one.doorbells.moved(moved));
        let doorbells = pair.ok_or_else(|| RingError::Invalid(format!("queue {queue} has no queue pair")))?;
        self.resume(queue, owned.with_doorbells(doorbells?)?)?;
        Ok(Reclaimed::Recreated)
    }

    /// Returns identifiers that were given up since the last call: for an abort by the owner of the controller.
    pub fn take_given_up(&mut self, queue: usize) -> Vec<CommandId> {
        let layout = &self.shared.layout;
        let count = self.queue_word(queue, layout::queue::GIVEN_UP_COUNT) as usize;
        let state = &mut self.queues[queue];
        let load = |index: usize| self.shared.memory.load(layout.given_up(queue) + 4 * index) as u16;
        let all = (state.aborted..count).map(|index| CommandId(load(index))).collect();
        state.aborted = state.aborted.max(count);
        all
    }

    fn request_aborts<B: Backing>(
        &mut self,
        queue: usize,
        controller: &mut Controller<B>,
    ) -> Result<(), RingError> {
        let Some(id) = self.queues[queue].queue.as_ref().map(|one| one.shape.id) else { return Ok(()) };
        let all = self.take_given_up(queue);
        for (index, command) in all.iter().enumerate() {
            if !controller.request_abort(id, *command)? {
                // As many are outstanding as allowed: the others follow.
                self.queues[queue].aborted -= all.len() - index;
                break;
            }
        }
        Ok(())
    }

    /// Stops a queue: batches in flight end as parked, and nothing accesses its queue pair from this side afterwards.
    /// Batches that were issued and not taken wait for [`resume`](Self::resume).
    ///
    /// # Errors
    /// `Stuck` if the processor does not follow.
    pub fn park(&mut self, queue: usize) -> Result<(), RingError> {
        self.shared.request(queue, Request::Park);
        let start = Instant::now();
        while self.queue_word(queue, layout::queue::STATE) != PARKED {
            if start.elapsed() >= PARK_LIMIT {
                return Err(RingError::Stuck { queue, limit: PARK_LIMIT });
            }
            std::thread::sleep(PAUSE);
        }
        Ok(())
    }

    /// Starts a parked queue again, with a queue pair that was created since. A thread of the host follows at once.
    ///
    /// # Errors
    /// As [`init_queue`](Ring::init_queue).
    pub fn resume(&mut self, queue: usize, pair: RingQueue) -> Result<(), RingError> {
        self.init_queue(queue, pair)?;
        self.shared.request(queue, Request::Run);
        Ok(())
    }
}
