//! Bounded queue of lookups: beyond the limit, lookups fail immediately instead of waiting in vain.

use std::collections::VecDeque;
use std::time::Instant;

use reprise_agent_core::effect::LookupId;
use reprise_policy::BlockKey;

#[derive(Debug)]
pub(super) struct Lookup {
    pub(super) id: LookupId,
    pub(super) keys: Vec<BlockKey>,
    pub(super) deadline: Instant,
}

/// The next step for the head of the queue.
#[derive(Debug)]
pub(super) enum QueueStep {
    Send(Lookup),
    /// Report the lookup as failed.
    Fail(LookupId),
}

/// Queued lookups and the number in flight; the sum stays below `limit`.
#[derive(Debug)]
pub(super) struct LookupQueue {
    limit: usize,
    waiting: VecDeque<Lookup>,
    in_flight: usize,
    /// Lookups rejected because the queue was full. Not bounded here: 8 bytes for each pending lookup of
    /// the core, which bounds those.
    refused: VecDeque<LookupId>,
}

impl LookupQueue {
    pub(super) fn new(limit: usize) -> LookupQueue {
        LookupQueue { limit, waiting: VecDeque::new(), in_flight: 0, refused: VecDeque::new() }
    }

    pub(super) fn push(&mut self, lookup: Lookup) {
        if self.waiting.len() + self.in_flight >= self.limit {
            self.refused.push_back(lookup.id);
        } else {
            self.waiting.push_back(lookup);
        }
    }

    /// Returns the next step, if any. Each `Send` must be followed by one [`LookupQueue::finished`].
    pub(super) fn next(&mut self) -> Option<QueueStep> {
        if let Some(id) = self.refused.pop_front() {
            return Some(QueueStep::Fail(id));
        }
        let lookup = self.waiting.pop_front()?;
        self.in_flight += 1;
        Some(QueueStep::Send(lookup))
    }

    pub(super) fn finished(&mut self) {
        self.in_flight = self.in_flight.checked_sub(1).expect("each sent lookup finishes once");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lookup(id: u64) -> Lookup {
        Lookup { id: LookupId(id), keys: Vec::new(), deadline: Instant::now() }
    }

    #[test]
    fn lookups_beyond_the_limit_fail_and_finished_ones_free_a_place() {
        let mut queue = LookupQueue::new(2);
        (1..=3).for_each(|id| queue.push(lookup(id)));
        assert!(matches!(queue.next(), Some(QueueStep::Fail(LookupId(3)))));
        assert!(matches!(queue.next(), Some(QueueStep::Send(Lookup { id: LookupId(1), .. }))));
        queue.push(lookup(4));
        assert!(matches!(queue.next(), Some(QueueStep::Fail(LookupId(4)))), "one is queued, one in flight");
        queue.finished();
        queue.push(lookup(5));
        assert!(matches!(queue.next(), Some(QueueStep::Send(Lookup { id: LookupId(2), .. }))));
        assert!(matches!(queue.next(), Some(QueueStep::Send(Lookup { id: LookupId(5), .. }))));
        assert!(queue.next().is_none());
    }
}
