//! A lease that is kept alive for its holder, who registers under it and is told when it is lost.
//!
//! ```text
//!   granted ──► held ──► lost: the store said so, or did not answer in time, or the holder released it
//!                │ ▲
//!                └─┘ kept alive, three times in its time to live
//! ```
//!
//! The holder's deadline counts from before the call that was answered, the store's from after it: the holder knows of
//! the loss no later than the entries vanish for others. (Clocks of one speed are assumed; a process that was stopped
//! learns of it when it goes on, which [`HeldLease::is_held`] takes into account.) What must not happen twice is fenced by
//! a condition on the entry's revision, not by the lease.
//!
//! A lease that is dropped, or released, is revoked; when the runtime ends first, it expires.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{oneshot, watch};
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep_until, timeout_at};

use crate::contract::Store;
use crate::error::StoreError;
use crate::lease::{Lease, LeaseId, TimeToLive};

/// Keep-alives in one time to live: two may be lost.
const KEEP_ALIVES: u32 = 3;
/// After a failed one the next comes sooner: this many fit in one time to live.
const RETRIES: u32 = 12;

/// See the module.
#[derive(Debug)]
pub struct HeldLease {
    lease: Lease,
    holding: watch::Receiver<Holding>,
    /// Dropped with the holder, which ends the task.
    stop: oneshot::Sender<()>,
    task: JoinHandle<Result<(), StoreError>>,
}

/// Whether a lease is held.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Holding {
    /// It is.
    Held {
        /// Until then for certain; later when it is kept alive meanwhile.
        until: Instant,
    },
    /// It is not, and will not be again.
    Lost(Loss),
}

/// Why a lease is held no more. Have another granted.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Loss {
    /// The store said so: it has expired there, or somebody has revoked it.
    #[error("the store says that the lease is gone")]
    Gone,
    /// The store did not confirm it in time. Its entries go by themselves; when the store was away, they have their whole
    /// time once more after its return.
    #[error("the lease was not kept alive in time: {last}")]
    Unconfirmed {
        /// The last answer, if any.
        last: String,
    },
    /// Its holder has released it.
    #[error("the lease was released")]
    Released,
}

impl HeldLease {
    /// Has a lease granted and keeps it alive from then on, in a task of the current runtime.
    ///
    /// # Errors
    /// Those of [`Store::grant`].
    pub async fn grant(store: Arc<dyn Store>, time_to_live: TimeToLive) -> Result<HeldLease, StoreError> {
        let asked = Instant::now();
        let lease = store.grant(time_to_live).await?;
        let schedule = Schedule::new(lease.time_to_live.duration(), asked);
        let (sender, holding) = watch::channel(Holding::Held { until: schedule.deadline });
        let (stop, stopped) = oneshot::channel();
        let keeper = Keeper { store, lease: lease.id, schedule, holding: sender };
        Ok(HeldLease { lease, holding, stop, task: tokio::spawn(keeper.keep(stopped)) })
    }

    /// What to put entries under.
    pub fn id(&self) -> LeaseId {
        self.lease.id
    }

    /// As it was granted.
    pub fn time_to_live(&self) -> TimeToLive {
        self.lease.time_to_live
    }

    /// Whether it is held at this instant.
    pub fn is_held(&self) -> bool {
        matches!(*self.holding.borrow(), Holding::Held { until } if Instant::now() < until)
    }

    /// Follows it; changes once, when it is lost.
    pub fn holding(&self) -> watch::Receiver<Holding> {
        self.holding.clone()
    }

    /// Waits until it is lost.
    pub async fn lost(&self) -> Loss {
        let mut holding = self.holding.clone();
        match holding.wait_for(|holding| matches!(holding, Holding::Lost(_))).await.as_deref() {
            Ok(Holding::Lost(loss)) => loss.clone(),
            // The task is gone with its runtime: nobody keeps the lease alive.
            Ok(Holding::Held { .. }) | Err(_) => Loss::Unconfirmed { last: "its task has ended".to_owned() },
        }
    }

    /// Gives it back, its entries with it: they are gone when this returns.
    ///
    /// # Errors
    /// Those of [`Store::revoke`], except that the lease is gone already.
    pub async fn release(self) -> Result<(), StoreError> {
        drop(self.stop);
        self.task.await.unwrap_or_else(|error| Err(StoreError::Unavailable { reason: error.to_string() }))
    }
}

struct Keeper {
    store: Arc<dyn Store>,
    lease: LeaseId,
    schedule: Schedule,
    holding: watch::Sender<Holding>,
}

impl Keeper {
    async fn keep(mut self, mut stopped: oneshot::Receiver<()>) -> Result<(), StoreError> {
        let loss = tokio::select! {
            biased;
            _ = &mut stopped => Loss::Released,
            loss = self.keep_alive() => loss,
        };
        self.holding.send_replace(Holding::Lost(loss.clone()));
        if loss != Loss::Released {
            return Ok(());
        }
        match self.store.revoke(self.lease).await {
            Ok(()) | Err(StoreError::LeaseGone) => Ok(()),
            Err(error) => Err(error),
        }
    }

    async fn keep_alive(&mut self) -> Loss {
        let mut last = "the store does not answer".to_owned();
        loop {
            let asked = Instant::now();
            match self.schedule.step(asked) {
                Step::Wait(until) => sleep_until(until).await,
                Step::GiveUp => return Loss::Unconfirmed { last },
                Step::KeepAlive => {
                    match timeout_at(self.schedule.deadline, self.store.keep_alive(self.lease)).await {
                        Ok(Ok(())) => self.confirmed(asked),
                        Ok(Err(StoreError::LeaseGone)) => return Loss::Gone,
                        Ok(Err(error)) => {
                            last = error.to_string();
                            self.schedule.failed(Instant::now());
                        }
                        Err(_) => self.schedule.failed(Instant::now()),
                    }
                }
            }
        }
    }

    fn confirmed(&mut self, asked: Instant) {
        self.schedule.confirmed(asked);
        let until = self.schedule.deadline;
        // Those who wait for the loss are not woken.
        self.holding.send_if_modified(|holding| {
            *holding = Holding::Held { until };
            false
        });
    }
}

/// When to keep a lease alive, and when to give it up. Reads no clock.
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

    /// The store has confirmed the lease, asked at this instant.
    fn confirmed(&mut self, asked: Instant) {
        *self = Schedule::new(self.time_to_live, asked);
    }

    fn failed(&mut self, now: Instant) {
        self.next = now + self.time_to_live / RETRIES;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lease_is_kept_alive_early_tried_again_soon_and_given_up_at_its_deadline() {
        let start = Instant::now();
        let at = |milliseconds| start + Duration::from_millis(milliseconds);
        let mut schedule = Schedule::new(Duration::from_secs(12), start);
        assert_eq!(schedule.step(at(0)), Step::Wait(at(4000)));
        assert_eq!(schedule.step(at(4000)), Step::KeepAlive);
        schedule.failed(at(6000));
        assert_eq!(schedule.step(at(6000)), Step::Wait(at(7000)));
        schedule.confirmed(at(7000));
        assert_eq!(schedule.step(at(10_999)), Step::Wait(at(11_000)));
        schedule.failed(at(18_900));
        assert_eq!(schedule.step(at(18_900)), Step::Wait(at(19_000)), "no later than the deadline");
        assert_eq!(schedule.step(at(19_000)), Step::GiveUp);
    }
}
