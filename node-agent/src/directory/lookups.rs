//! Lookups on their way to the directory, bounded: what does not fit fails at once instead of waiting in vain.

use std::collections::VecDeque;
use std::time::Instant;

use reprise_agent_core::effect::LookupId;
use reprise_policy::BlockKey;

/// One question.
#[derive(Debug)]
pub(super) struct Lookup {
    pub(super) id: LookupId,
    pub(super) keys: Vec<BlockKey>,
    pub(super) deadline: Instant,
}

/// What to do next with the queue's head.
#[derive(Debug)]
pub(super) enum Next {
    /// Send it.
    Send(Lookup),
    /// Report it as failed.
    Fail(LookupId),
}

/// Waiting lookups and the number of those under way; both together stay below `limit`.
#[derive(Debug)]
pub(super) struct LookupQueue {
    limit: usize,
    waiting: VecDeque<Lookup>,
    under_way: usize,
    /// Refused because the queue was full. Not bounded here: 8 bytes for each lookup of the core that is still
    /// unanswered, and the core bounds those.
    refused: VecDeque<LookupId>,
}

impl LookupQueue {
    pub(super) fn new(limit: usize) -> LookupQueue {
        LookupQueue { limit, waiting: VecDeque::new(), under_way: 0, refused: VecDeque::new() }
    }

    pub(super) fn push(&mut self, lookup: Lookup) {
        if self.waiting.len() + self.under_way >= self.limit {
            self.refused.push_back(lookup.id);
        } else {
            self.waiting.push_back(lookup);
        }
    }

    /// The next thing to do, if any. Each `Send` must be followed by one [`LookupQueue::finished`].
    pub(super) fn next(&mut self) -> Option<Next> {
        if let Some(id) = self.refused.pop_front() {
            return Some(Next::Fail(id));
        }
        let lookup = self.waiting.pop_front()?;
        self.under_way += 1;
        Some(Next::Send(lookup))
    }

    pub(super) fn finished(&mut self) {
        self.under_way = self.under_way.checked_sub(1).expect("each lookup finishes once after it was sent");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lookup(id: u64) -> Lookup {
        Lookup { id: LookupId(id), keys: Vec::new(), deadline: Instant::now() }
    }

    #[test]
    fn what_exceeds_the_limit_fails_and_what_finishes_makes_room() {
        let mut queue = LookupQueue::new(2);
        (1..=3).for_each(|id| queue.push(lookup(id)));
        assert!(matches!(queue.next(), Some(Next::Fail(LookupId(3)))));
        assert!(matches!(queue.next(), Some(Next::Send(Lookup { id: LookupId(1), .. }))));
        queue.push(lookup(4));
        assert!(matches!(queue.next(), Some(Next::Fail(LookupId(4)))), "one is waiting, one under way");
        queue.finished();
        queue.push(lookup(5));
        assert!(matches!(queue.next(), Some(Next::Send(Lookup { id: LookupId(2), .. }))));
        assert!(matches!(queue.next(), Some(Next::Send(Lookup { id: LookupId(5), .. }))));
        assert!(queue.next().is_none());
    }
}
