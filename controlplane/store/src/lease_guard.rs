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

use reprise_policy::Tick;
use reprise_policy::lease_schedule::{LeaseEnd, LeaseInput, LeaseSchedule, LeaseStep};
use tokio::sync::{oneshot, watch};
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep_until, timeout_at};

use crate::contract::Store;
use crate::error::StoreError;
use crate::lease::{Lease, LeaseId, TimeToLive};

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
        let schedule = LeaseSchedule::new(lease.time_to_live.duration(), Tick(0));
        let until = instant(asked, schedule.deadline());
        let (sender, status) = watch::channel(LeaseStatus::Held { until });
        let (stop, stopped) = oneshot::channel();
        let keeper = LeaseKeeper { store, lease: lease.id, start: asked, schedule, status: sender };
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
    /// Time zero of the schedule.
    start: Instant,
    schedule: LeaseSchedule,
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
        let mut input = LeaseInput::Due;
        loop {
            let now = self.now();
            let step = self.schedule.on(now, input);
            self.publish_deadline();
            input = match step {
                LeaseStep::Wait(until) => {
                    sleep_until(instant(self.start, until)).await;
                    LeaseInput::Due
                }
                LeaseStep::GiveUp(LeaseEnd::Unconfirmed) => return LeaseLoss::Unconfirmed { last },
                LeaseStep::GiveUp(LeaseEnd::Ended) => return LeaseLoss::Expired,
                LeaseStep::KeepAlive => {
                    let deadline = instant(self.start, self.schedule.deadline());
                    match timeout_at(deadline, self.store.keep_alive(self.lease)).await {
                        Ok(Ok(())) => LeaseInput::Confirmed(now),
                        Ok(Err(StoreError::LeaseGone)) => LeaseInput::Ended,
                        Ok(Err(error)) => {
                            last = error.to_string();
                            LeaseInput::Failed
                        }
                        Err(_) => LeaseInput::Failed,
                    }
                }
            };
        }
    }

    fn now(&self) -> Tick {
        Tick(0).after(self.start.elapsed())
    }

    fn publish_deadline(&self) {
        let until = instant(self.start, self.schedule.deadline());
        // Do not notify: watchers wait only for the loss.
        self.status.send_if_modified(|status| {
            *status = LeaseStatus::Held { until };
            false
        });
    }
}

/// Converts a time of a schedule that begins at `start`.
fn instant(start: Instant, at: Tick) -> Instant {
    start + at.since(Tick(0))
}
