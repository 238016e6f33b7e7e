//! Turns at the directory: how many calls are worked on at once, and how many may be held at all.
//!
//! A part of a call (see [`crate::directory`]) keeps its thread ([`crate::fronts`]) busy for up to 0.4 ms. One processor fewer than
//! there are is ever busy so: the last one is for heartbeats and for what goes on in the background, which must not wait
//! behind 1,000 agents that announce everything at once. Calls beyond that wait in the order in which they came, with their message in memory, so their number is
//! bounded; whoever comes then is told to come again.

use tokio::sync::{Semaphore, SemaphorePermit};
use tonic::Status;

/// See the module.
#[derive(Debug)]
pub struct Turns {
    held: Semaphore,
    working: Semaphore,
    calls_at_once: usize,
}

/// A call's turn, while it lives.
#[derive(Debug)]
pub struct Turn<'turns> {
    _working: SemaphorePermit<'turns>,
    _held: SemaphorePermit<'turns>,
}

impl Turns {
    /// Turns on `workers` threads; `calls_at_once` are held, working or waiting.
    pub fn new(workers: usize, calls_at_once: usize) -> Turns {
        let working = Semaphore::new(workers.saturating_sub(1).max(1));
        Turns { held: Semaphore::new(calls_at_once), working, calls_at_once }
    }

    /// Waits for a turn.
    ///
    /// # Errors
    /// `RESOURCE_EXHAUSTED`: too many calls wait already.
    pub async fn take(&self) -> Result<Turn<'_>, Status> {
        let held = self.held.try_acquire().map_err(|_| {
            Status::resource_exhausted(format!(
                "{} calls are waiting already: come again later, or raise limits.calls_at_once",
                self.calls_at_once
            ))
        })?;
        let working = self.working.acquire().await.expect("the semaphore is never closed");
        Ok(Turn { _working: working, _held: held })
    }
}

#[cfg(test)]
mod tests {
    use std::task::Poll;

    use tonic::Code;

    use super::*;

    #[tokio::test]
    async fn one_worker_stays_free_and_who_comes_too_many_is_refused() {
        let turns = Turns::new(3, 4);
        let (first, _second) = (turns.take().await.expect("a turn"), turns.take().await.expect("a turn"));
        let mut third = Box::pin(turns.take());
        let mut fourth = Box::pin(turns.take());
        assert!(matches!(poll_once(&mut third).await, Poll::Pending), "two of three workers are busy");
        assert!(matches!(poll_once(&mut fourth).await, Poll::Pending));
        let refused = turns.take().await.expect_err("four are held");
        assert_eq!(refused.code(), Code::ResourceExhausted);
        drop(first);
        let third = third.await.expect("the next in line");
        drop(third);
        fourth.await.expect("and the one behind it");
    }

    /// Polls once.
    async fn poll_once<F: Future + Unpin>(future: &mut F) -> Poll<F::Output> {
        std::future::poll_fn(|context| Poll::Ready(std::pin::Pin::new(&mut *future).poll(context))).await
    }
}
