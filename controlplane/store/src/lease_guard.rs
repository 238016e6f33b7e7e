//! A guard that keeps a lease alive in the background and reports its loss.
//!
//! ```text
//!   granted ──► held ──► lost: expired in the store, not confirmed in time, or released by the holder
//!                │ ▲
//!                └─┘ kept alive, three times per time to live
//! ```
//!
//! The guard's deadline counts from before a confirmed call, the store's from after it. So the guard reports
//! the loss no later than other processes see the entries deleted. This assumes clocks of equal speed; after
//! the process was suspended, [`LeaseGuard::is_held`] compares with the clock. Actions that must not happen
//! twice are fenced by a condition on the entry's revision, not by the lease.
//!
//! Dropping or releasing the guard revokes the lease. If the runtime ends first, the lease expires.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{oneshot, watch};
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep_until, timeout_at};

use crate::contract::Store;
use crate::error::StoreError;
use crate::lease::{Lease, LeaseId, TimeToLive};

/// Keep-alives per time to live; two may be lost.
const KEEP_ALIVES: u32 = 3;
/// Retries per time to live after a failed keep-alive.
const RETRIES: u32 = 12;

/// A lease that is kept alive until the guard is dropped.
#[derive(Debug)]
pub struct LeaseGuard {
    lease: Lease,
    status: watch::Receiver<LeaseStatus>,
    /// Ends the task when dropped.
    stop: oneshot::Sender<()>,
    task: JoinHandle<Result<(), StoreError>>,
}

/// Status of a kept lease.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LeaseStatus {
    /// The lease is held.
    Held {
        /// Guaranteed until this instant; later if it is kept alive meanwhile.
        until: Instant,
    },
    /// The lease is lost permanently.
    Lost(LeaseLoss),
}

/// Reasons for the loss of a lease. Get a new lease.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LeaseLoss {
    /// The store reports that the lease expired or was revoked.
    #[error("the lease has expired in the store or was revoked")]
    Expired,
    /// The store did not confirm the lease in time. Its entries expire by themselves, after an outage of the
    /// store with a whole time to live.
    #[error("the lease was not kept alive in time: {last}")]
    Unconfirmed {
        /// Last error of a keep-alive, if any.
        last: String,
    },
    /// The holder released the lease.
    #[error("the lease was released")]
    Released,
}

impl LeaseGuard {
    /// Gets a lease and keeps it alive in a task of the current runtime.
    ///
    /// # Errors
    /// Errors of [`Store::grant`].
    pub async fn grant(store: Arc<dyn Store>, time_to_live: TimeToLive) -> Result<LeaseGuard, StoreError> {
        let asked = Instant::now();
        let lease = store.grant(time_to_live).await?;
        let schedule = Schedule::new(lease.time_to_live.duration(), asked);
        let (sender, status) = watch::channel(LeaseStatus::Held { until: schedule.deadline });
        let (stop, stopped) = oneshot::channel();
        let keeper = LeaseKeeper { store, lease: lease.id, schedule, status: sender };
        Ok(LeaseGuard { lease, status, stop, task: tokio::spawn(keeper.keep(stopped)) })
    }

    /// Id of the lease, for puts.
    pub fn id(&self) -> LeaseId {
        self.lease.id
    }

    /// Granted time to live.
    pub fn time_to_live(&self) -> TimeToLive {
        self.lease.time_to_live
    }

    /// Whether the lease is held at this instant.
    pub fn is_held(&self) -> bool {
        matches!(*self.status.borrow(), LeaseStatus::Held { until } if Instant::now() < until)
    }

    /// Watch of the status; notifies once, on loss.
    pub fn status(&self) -> watch::Receiver<LeaseStatus> {
        self.status.clone()
    }

    /// Waits until the lease is lost.
    pub async fn wait_lost(&self) -> LeaseLoss {
        let mut status = self.status.clone();
        match status.wait_for(|status| matches!(status, LeaseStatus::Lost(_))).await.as_deref() {
            Ok(LeaseStatus::Lost(loss)) => loss.clone(),
            // The task ended with its runtime, so nothing keeps the lease alive.
            Ok(LeaseStatus::Held { .. }) | Err(_) => {
                LeaseLoss::Unconfirmed { last: "the keep-alive task has ended".to_owned() }
            }
        }
    }

    /// Revokes the lease and waits until its entries are deleted.
    ///
    /// # Errors
    /// Errors of [`Store::revoke`], except that the lease is already gone.
    pub async fn release(self) -> Result<(), StoreError> {
        drop(self.stop);
        self.task.await.unwrap_or_else(|error| Err(StoreError::Unavailable { reason: error.to_string() }))
    }
}

struct LeaseKeeper {
    store: Arc<dyn Store>,
    lease: LeaseId,
    schedule: Schedule,
    status: watch::Sender<LeaseStatus>,
}

impl LeaseKeeper {
    async fn keep(mut self, mut stopped: oneshot::Receiver<()>) -> Result<(), StoreError> {
        let loss = tokio::select! {
            biased;
            _ = &mut stopped => LeaseLoss::Released,
            loss = self.keep_alive() => loss,
        };
        self.status.send_replace(LeaseStatus::Lost(loss.clone()));
        if loss != LeaseLoss::Released {
            return Ok(());
        }
        match self.store.revoke(self.lease).await {
            Ok(()) | Err(StoreError::LeaseGone) => Ok(()),
            Err(error) => Err(error),
        }
    }

    async fn keep_alive(&mut self) -> LeaseLoss {
        let mut last = "the store does not answer".to_owned();
        loop {
            let asked = Instant::now();
            match self.schedule.step(asked) {
                Step::Wait(until) => sleep_until(until).await,
                Step::GiveUp => return LeaseLoss::Unconfirmed { last },
                Step::KeepAlive => {
                    match timeout_at(self.schedule.deadline, self.store.keep_alive(self.lease)).await {
                        Ok(Ok(())) => self.confirm(asked),
                        Ok(Err(StoreError::LeaseGone)) => return LeaseLoss::Expired,
                        Ok(Err(error)) => {
                            last = error.to_string();
                            self.schedule.record_failure(Instant::now());
                        }
                        Err(_) => self.schedule.record_failure(Instant::now()),
                    }
                }
            }
        }
    }

    fn confirm(&mut self, asked: Instant) {
        self.schedule.confirm(asked);
        let until = self.schedule.deadline;
        // Do not notify: watchers wait only for the loss.
        self.status.send_if_modified(|status| {
            *status = LeaseStatus::Held { until };
            false
        });
    }
}

/// Deadlines for keep-alives and for giving up; does not read the clock.
#[derive(Clone, Copy, Debug)]
struct Schedule {
    time_to_live: Duration,
    next: Instant,
    deadline: Instant,
}

#[derive(Debug, PartialEq, Eq)]
enum Step {
    Wait(Instant),
    KeepAlive,
    GiveUp,
}

impl Schedule {
    fn new(time_to_live: Duration, asked: Instant) -> Schedule {
        Schedule { time_to_live, next: asked + time_to_live / KEEP_ALIVES, deadline: asked + time_to_live }
    }

    fn step(&self, now: Instant) -> Step {
        if now >= self.deadline {
            return Step::GiveUp;
        }
        match now >= self.next {
            true => Step::KeepAlive,
            false => Step::Wait(self.next.min(self.deadline)),
        }
    }

    /// Records that the store confirmed the lease in a call made at `asked`.
    fn confirm(&mut self, asked: Instant) {
        *self = Schedule::new(self.time_to_live, asked);
    }

    fn record_failure(&mut self, now: Instant) {
        self.next = now + self.time_to_live / RETRIES;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keeps_alive_early_retries_soon_and_gives_up_at_the_deadline() {
        let start = Instant::now();
        let at = |milliseconds| start + Duration::from_millis(milliseconds);
        let mut schedule = Schedule::new(Duration::from_secs(12), start);
        assert_eq!(schedule.step(at(0)), Step::Wait(at(4000)));
        assert_eq!(schedule.step(at(4000)), Step::KeepAlive);
        schedule.record_failure(at(6000));
        assert_eq!(schedule.step(at(6000)), Step::Wait(at(7000)));
        schedule.confirm(at(7000));
        assert_eq!(schedule.step(at(10_999)), Step::Wait(at(11_000)));
        schedule.record_failure(at(18_900));
        assert_eq!(schedule.step(at(18_900)), Step::Wait(at(19_000)), "no later than the deadline");
        assert_eq!(schedule.step(at(19_000)), Step::GiveUp);
    }
}
