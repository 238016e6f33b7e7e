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

/// Next action for a lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LeaseStep {
    /// Nothing is due before this time.
    Wait(Tick),
    /// Ask the store to keep the lease alive, and call [`LeaseSchedule::ask`].
    KeepAlive,
    /// The lease is no longer certain.
    GiveUp,
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

    /// Returns the next action.
    pub fn step(&self, now: Tick) -> LeaseStep {
        let deadline = self.deadline();
        if now >= deadline {
            LeaseStep::GiveUp
        } else if self.is_asking {
            LeaseStep::Wait(deadline)
        } else if now >= self.next {
            LeaseStep::KeepAlive
        } else {
            LeaseStep::Wait(self.next.min(deadline))
        }
    }

    /// Returns whether a keep-alive has no answer yet.
    pub fn is_asking(&self) -> bool {
        self.is_asking
    }

    /// Records that the store is asked to keep the lease alive.
    pub fn ask(&mut self) {
        self.is_asking = true;
    }

    /// Records that the store has confirmed the lease in a request made at `asked`. The store confirms only
    /// leases that have not ended, so an answer after the deadline renews the lease, too. An answer that is
    /// older than the time to live has no effect.
    pub fn confirm(&mut self, now: Tick, asked: Tick) {
        let renewed = LeaseSchedule::new(self.time_to_live, asked);
        if now < renewed.deadline() {
            *self = renewed;
        }
    }

    /// Records that a keep-alive has failed.
    pub fn fail(&mut self, now: Tick) {
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
        assert_eq!(schedule.step(at(0)), LeaseStep::Wait(at(4000)));
        assert_eq!(schedule.step(at(4000)), LeaseStep::KeepAlive);
        schedule.ask();
        assert_eq!(schedule.step(at(4000)), LeaseStep::Wait(at(12_000)), "one keep-alive at a time");
        schedule.fail(at(6000));
        assert_eq!(schedule.step(at(6000)), LeaseStep::Wait(at(7000)));
        schedule.confirm(at(8000), at(7000));
        assert_eq!(schedule.step(at(10_999)), LeaseStep::Wait(at(11_000)));
        schedule.fail(at(18_900));
        assert_eq!(schedule.step(at(18_900)), LeaseStep::Wait(at(19_000)), "no later than the deadline");
        assert_eq!(schedule.step(at(19_000)), LeaseStep::GiveUp);
    }

    #[test]
    fn a_late_confirmation_renews_the_lease_and_an_outdated_one_does_not() {
        let mut schedule = LeaseSchedule::new(Duration::from_secs(12), START);
        schedule.ask();
        let mut outdated = schedule;
        schedule.confirm(at(12_500), at(11_000));
        assert_eq!(schedule.step(at(12_500)), LeaseStep::Wait(at(15_000)));
        assert_eq!((schedule.deadline(), schedule.asked()), (at(23_000), at(11_000)));
        outdated.confirm(at(23_000), at(11_000));
        assert_eq!(outdated.step(at(23_000)), LeaseStep::GiveUp);
    }
}
