//! The clock of one process: its drift, and its behaviour while its machine is stopped.
//!
//! Processes never see the simulation's time: cores get the time of their process's clock, and timers are due
//! by that clock. A clock starts at any value and runs slightly too fast or too slow. While a process is
//! stopped (`SIGSTOP`) its clock continues. The clock of a suspended machine stops, or jumps ahead on resume.

use reprise_policy::Tick;

use crate::rng::Rng;

/// Maximum drift of a clock in millionths: ten times that of a quartz.
const DRIFT_MAX: u64 = 1000;
/// A second of the simulation in microseconds.
const SECOND: u64 = 1_000_000;
/// Maximum initial value of a clock in microseconds.
const BEGIN_US_MAX: u64 = 3_600_000_000;

/// Returns the maximum difference between two clocks over some time, with opposite maximum drifts.
pub(crate) fn drift_max(micros: u64) -> u64 {
    micros * 2 * DRIFT_MAX / SECOND + 2
}

/// A drifting clock; see the module.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Clock {
    /// Instant of the simulation at which the clock showed `shown`.
    since: Tick,
    shown: Tick,
    /// Microseconds that the clock advances in a second of the simulation.
    pace: u64,
}

/// Behaviour of a clock while its process is stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PauseClock {
    Runs,
    Stops,
    /// The clock jumps ahead by this many microseconds.
    Jumps(u64),
}

impl Clock {
    /// Draws the clock of a process that starts.
    pub(crate) fn draw(now: Tick, rng: &mut Rng) -> Clock {
        let shown = Tick(rng.next() % BEGIN_US_MAX);
        Clock { since: now, shown, pace: SECOND - DRIFT_MAX + rng.next() % (2 * DRIFT_MAX + 1) }
    }

    /// Returns the clock's value at an instant of the simulation.
    pub(crate) fn at(&self, now: Tick) -> Tick {
        Tick(self.shown.0 + (now.0 - self.since.0) * self.pace / SECOND)
    }

    /// Returns the first instant of the simulation at which the clock shows `shown` or more; it may be in the
    /// past.
    pub(crate) fn when(&self, shown: Tick) -> Tick {
        let ahead = shown.0.saturating_sub(self.shown.0);
        // Deadlines are at most hours away, far from overflow.
        Tick(self.since.0 + (ahead.saturating_mul(SECOND)).div_ceil(self.pace))
    }

    /// Converts a duration by this clock to microseconds of the simulation.
    pub(crate) fn takes(&self, micros: u64) -> u64 {
        micros * SECOND / self.pace
    }

    /// Resumes at `now` a process that was stopped at `stopped`.
    pub(crate) fn wake(&mut self, stopped: Tick, now: Tick, how: PauseClock) {
        let shown = match how {
            PauseClock::Runs => return,
            PauseClock::Stops => self.at(stopped),
            PauseClock::Jumps(ahead) => Tick(self.at(now).0 + ahead),
        };
        (self.since, self.shown) = (now, shown);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_timer_is_due_at_the_first_instant_at_which_the_clock_shows_it() {
        let mut rng = Rng::new(7);
        for _ in 0..1000 {
            let clock = Clock::draw(Tick(rng.next() % SECOND), &mut rng);
            let shown = Tick(clock.shown.0 + rng.next() % (100 * SECOND));
            let due = clock.when(shown);
            assert!(clock.at(due) >= shown && clock.at(due).0 - shown.0 <= 1, "{clock:?} {shown:?}");
            assert!(
                clock.takes(shown.0 - clock.shown.0).abs_diff(due.0 - clock.since.0) <= 1,
                "{clock:?} {shown:?}"
            );
            assert!(due == clock.since || clock.at(Tick(due.0 - 1)) < shown, "{clock:?} {shown:?}");
        }
    }

    #[test]
    fn the_clock_of_a_suspended_machine_stops_or_jumps_and_never_runs_backwards() {
        let begun = Clock { since: Tick(0), shown: Tick(50), pace: SECOND };
        let woken = |how| {
            let mut clock = begun;
            clock.wake(Tick(100), Tick(1100), how);
            (clock.at(Tick(1100)), clock.at(Tick(1200)))
        };
        assert_eq!(woken(PauseClock::Runs), (Tick(1150), Tick(1250)));
        assert_eq!(woken(PauseClock::Stops), (Tick(150), Tick(250)));
        assert_eq!(woken(PauseClock::Jumps(5)), (Tick(1155), Tick(1255)));
    }
}
