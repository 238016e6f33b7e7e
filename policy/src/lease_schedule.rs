//! When a lease is kept alive, and until when its holder may rely on it.
//!
//! ```text
//!   held ──a third of the time to live──► keep alive ──► confirmed: held from the time of the request
//!    ▲                                        │ failed: retry soon
//!    └────────────────────────────────────────┤
//!                                             └─ deadline ──► given up
//! ```
//!
//! The deadline counts from before a confirmed request, the store's from after it. So a holder gives up no
//! later than the store ends the lease, if their clocks have equal speed.

use std::time::Duration;

use crate::Tick;

/// Keep-alives per time to live; two may be lost.
const KEEP_ALIVES: u32 = 3;
/// Retries per time to live after a failed keep-alive.
const RETRIES: u32 = 12;

/// Deadlines of one lease; see the module.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LeaseSchedule {
    time_to_live: Duration,
    /// Time of the request whose answer confirmed the lease.
    asked: Tick,
    /// Time of the next keep-alive.
    next: Tick,
    /// Whether a keep-alive has no answer yet.
    is_asking: bool,
}

/// Input of a schedule.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LeaseInput {
    /// The lease was just granted, or the wait has ended.
    Due,
    /// The store has confirmed the lease, in answer to a keep-alive at this time.
    Confirmed(Tick),
    /// The keep-alive has failed.
    Failed,
    /// The store reports that the lease has ended.
    Ended,
}

/// Next action for a lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LeaseStep {
    /// Nothing is due before this time.
    Wait(Tick),
    /// Ask the store to keep the lease alive. [`LeaseInput::Confirmed`], [`LeaseInput::Failed`] or
    /// [`LeaseInput::Ended`] follows, no later than the deadline.
    KeepAlive,
    /// The lease is no longer certain.
    GiveUp(LeaseEnd),
}

/// Why a lease is given up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LeaseEnd {
    /// The store has not confirmed it in time.
    Unconfirmed,
    /// The store has ended it.
    Ended,
}

impl LeaseSchedule {
    /// The schedule of a lease that was granted in answer to a request at `asked`.
    pub fn new(time_to_live: Duration, asked: Tick) -> LeaseSchedule {
        LeaseSchedule { time_to_live, asked, next: asked.after(time_to_live / KEEP_ALIVES), is_asking: false }
    }

    /// Returns the time until which the lease is certain to live.
    pub fn deadline(&self) -> Tick {
        self.asked.after(self.time_to_live)
    }

    /// Returns the time of the request whose answer confirmed the lease.
    pub fn asked(&self) -> Tick {
        self.asked
    }

    /// Returns whether a keep-alive has no answer yet.
    pub fn is_asking(&self) -> bool {
        self.is_asking
    }

    /// Processes an input; returns the next action.
    pub fn on(&mut self, now: Tick, input: LeaseInput) -> LeaseStep {
        match input {
            LeaseInput::Due => {}
            LeaseInput::Confirmed(asked) => self.confirm(now, asked),
            LeaseInput::Failed => self.fail(now),
            LeaseInput::Ended => return LeaseStep::GiveUp(LeaseEnd::Ended),
        }
        let step = self.step(now);
        if step == LeaseStep::KeepAlive {
            self.is_asking = true;
        }
        step
    }

    fn step(&self, now: Tick) -> LeaseStep {
        let deadline = self.deadline();
        if now >= deadline {
            LeaseStep::GiveUp(LeaseEnd::Unconfirmed)
        } else if self.is_asking {
            LeaseStep::Wait(deadline)
        } else if now >= self.next {
            LeaseStep::KeepAlive
        } else {
            LeaseStep::Wait(self.next.min(deadline))
        }
    }

    /// The store confirms only leases that have not ended, so an answer after the deadline renews the lease, too. An
    /// answer that is older than the time to live has no effect.
    fn confirm(&mut self, now: Tick, asked: Tick) {
        let renewed = LeaseSchedule::new(self.time_to_live, asked);
        if now < renewed.deadline() {
            *self = renewed;
        }
    }

    fn fail(&mut self, now: Tick) {
        self.next = now.after(self.time_to_live / RETRIES);
        self.is_asking = false;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const START: Tick = Tick(1_000_000);

    fn at(milliseconds: u64) -> Tick {
        START.after(Duration::from_millis(milliseconds))
    }

    #[test]
    fn keeps_alive_early_retries_soon_and_gives_up_at_the_deadline() {
        let mut schedule = LeaseSchedule::new(Duration::from_secs(12), START);
        let mut on = |at, input| schedule.on(at, input);
        assert_eq!(on(at(0), LeaseInput::Due), LeaseStep::Wait(at(4000)));
        assert_eq!(on(at(4000), LeaseInput::Due), LeaseStep::KeepAlive);
        assert_eq!(on(at(4000), LeaseInput::Due), LeaseStep::Wait(at(12_000)), "one keep-alive at a time");
        assert_eq!(on(at(6000), LeaseInput::Failed), LeaseStep::Wait(at(7000)));
        assert_eq!(on(at(7000), LeaseInput::Due), LeaseStep::KeepAlive);
        assert_eq!(on(at(8000), LeaseInput::Confirmed(at(7000))), LeaseStep::Wait(at(11_000)));
        let end = LeaseStep::Wait(at(19_000));
        assert_eq!(on(at(18_900), LeaseInput::Failed), end, "no later than the deadline");
        assert_eq!(on(at(19_000), LeaseInput::Due), LeaseStep::GiveUp(LeaseEnd::Unconfirmed));
        assert_eq!(on(at(12_000), LeaseInput::Ended), LeaseStep::GiveUp(LeaseEnd::Ended), "at once");
    }

    #[test]
    fn a_late_confirmation_renews_the_lease_and_an_outdated_one_does_not() {
        let mut schedule = LeaseSchedule::new(Duration::from_secs(12), START);
        assert_eq!(schedule.on(at(11_000), LeaseInput::Due), LeaseStep::KeepAlive);
        let mut outdated = schedule;
        assert_eq!(schedule.on(at(12_500), LeaseInput::Confirmed(at(11_000))), LeaseStep::Wait(at(15_000)));
        assert_eq!((schedule.deadline(), schedule.asked()), (at(23_000), at(11_000)));
        let late = outdated.on(at(23_000), LeaseInput::Confirmed(at(11_000)));
        assert_eq!(late, LeaseStep::GiveUp(LeaseEnd::Unconfirmed));
    }
}
