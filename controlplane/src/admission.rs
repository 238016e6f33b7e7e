//! Admission control of directory calls: limits the calls that run at once, and the calls admitted in total.
//!
//! One part of a call (see [`crate::directory`]) occupies its gRPC thread ([`crate::grpc_server`]) for up to
//! 0.4 ms. Directory calls run on all but one of the processors. The last one stays free for heartbeats and
//! background tasks, which must not queue behind 1,000 agents that announce their inventories. Further calls
//! queue in arrival order. Queued calls hold their message in memory, so their number is bounded; calls
//! beyond the bound are rejected.

use tokio::sync::{Semaphore, SemaphorePermit};
use tonic::Status;

/// Admission control of directory calls.
#[derive(Debug)]
pub struct Admission {
    held: Semaphore,
    working: Semaphore,
    calls_at_once: usize,
}

/// Admission of one running call; released on drop.
#[derive(Debug)]
pub struct AdmissionPermit<'a> {
    _working: SemaphorePermit<'a>,
    _held: SemaphorePermit<'a>,
}

impl Admission {
    /// Admission control for `workers` threads that admits `calls_at_once` calls, running or queued.
    pub fn new(workers: usize, calls_at_once: usize) -> Admission {
        let working = Semaphore::new(workers.saturating_sub(1).max(1));
        Admission { held: Semaphore::new(calls_at_once), working, calls_at_once }
    }

    /// Waits for permission to run a call.
    ///
    /// # Errors
    /// `RESOURCE_EXHAUSTED`: the maximum number of calls is admitted.
    pub async fn acquire(&self) -> Result<AdmissionPermit<'_>, Status> {
        let held = self.held.try_acquire().map_err(|_| {
            Status::resource_exhausted(format!(
                "{} directory calls are already admitted: retry later, or raise limits.calls_at_once",
                self.calls_at_once
            ))
        })?;
        let working = self.working.acquire().await.expect("the semaphore is never closed");
        Ok(AdmissionPermit { _working: working, _held: held })
    }
}

#[cfg(test)]
mod tests {
    use std::task::Poll;

    use tonic::Code;

    use super::*;

    #[tokio::test]
    async fn keeps_one_worker_free_and_rejects_calls_beyond_the_limit() {
        let admission = Admission::new(3, 4);
        let (first, _second) =
            (admission.acquire().await.expect("admitted"), admission.acquire().await.expect("admitted"));
        let mut third = Box::pin(admission.acquire());
        let mut fourth = Box::pin(admission.acquire());
        assert!(matches!(poll_once(&mut third).await, Poll::Pending), "two of three workers are busy");
        assert!(matches!(poll_once(&mut fourth).await, Poll::Pending));
        let refused = admission.acquire().await.expect_err("four are admitted");
        assert_eq!(refused.code(), Code::ResourceExhausted);
        drop(first);
        let third = third.await.expect("the next in the queue");
        drop(third);
        fourth.await.expect("the last in the queue");
    }

    /// Polls a future once.
    async fn poll_once<F: Future + Unpin>(future: &mut F) -> Poll<F::Output> {
        std::future::poll_fn(|context| Poll::Ready(std::pin::Pin::new(&mut *future).poll(context))).await
    }
}
