//! The clock of one process: how it differs from the world's, and what becomes of it when its machine stands still.
//!
//! Processes never see the world's time: cores get what their process's clock shows, and timers are due when it shows
//! their instant. A clock begins anywhere and runs a little too fast or too slow. When a process is stopped its clock goes
//! on (`SIGSTOP`); a suspended machine's stands still or comes back far ahead, as its hypervisor decides.

use reprise_policy::Tick;

use crate::rng::Rng;

/// What a clock may run too fast or too slow, in millionths: ten times what quartz does.
const DRIFT_MAX: u64 = 1000;
/// A world second in microseconds.
const SECOND: u64 = 1_000_000;
/// Where clocks begin at the most.
const BEGIN_US_MAX: u64 = 3_600_000_000;

/// What two clocks may differ by over some time, both wrong as far as they may be.
pub(crate) fn drift_max(micros: u64) -> u64 {
    micros * 2 * DRIFT_MAX / SECOND + 2
}

/// See the module.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Clock {
    /// At this instant of the world it showed `shown`.
    since: Tick,
    shown: Tick,
    /// Microseconds that it goes on in a second of the world.
    pace: u64,
}

/// What a clock does while its process is stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stopped {
    /// It goes on.
    GoesOn,
    /// It stands still.
    Stands,
    /// It comes back this many microseconds ahead.
    Jumps(u64),
}

impl Clock {
    /// A process's clock, as it starts.
    pub(crate) fn draw(now: Tick, rng: &mut Rng) -> Clock {
        let shown = Tick(rng.next() % BEGIN_US_MAX);
        Clock { since: now, shown, pace: SECOND - DRIFT_MAX + rng.next() % (2 * DRIFT_MAX + 1) }
    }

    /// What it shows at an instant of the world.
    pub(crate) fn at(&self, now: Tick) -> Tick {
        Tick(self.shown.0 + (now.0 - self.since.0) * self.pace / SECOND)
    }

    /// The first instant of the world at which it shows `shown` or more; it may be past.
    pub(crate) fn when(&self, shown: Tick) -> Tick {
        let ahead = shown.0.saturating_sub(self.shown.0);
        // Deadlines of an hour and more are far from 64 bits.
        Tick(self.since.0 + (ahead.saturating_mul(SECOND)).div_ceil(self.pace))
    }

    /// Microseconds of the world in which it goes on by so many of its own.
    pub(crate) fn takes(&self, micros: u64) -> u64 {
        micros * SECOND / self.pace
    }

    /// A process goes on at `now` that was stopped at `stopped`.
    pub(crate) fn wake(&mut self, stopped: Tick, now: Tick, how: Stopped) {
        let shown = match how {
            Stopped::GoesOn => return,
            Stopped::Stands => self.at(stopped),
            Stopped::Jumps(ahead) => Tick(self.at(now).0 + ahead),
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
    fn a_suspended_machine_loses_its_time_or_finds_more_of_it_and_never_goes_back() {
        let begun = Clock { since: Tick(0), shown: Tick(50), pace: SECOND };
        let woken = |how| {
            let mut clock = begun;
            clock.wake(Tick(100), Tick(1100), how);
            (clock.at(Tick(1100)), clock.at(Tick(1200)))
        };
        assert_eq!(woken(Stopped::GoesOn), (Tick(1150), Tick(1250)));
        assert_eq!(woken(Stopped::Stands), (Tick(150), Tick(250)));
        assert_eq!(woken(Stopped::Jumps(5)), (Tick(1155), Tick(1255)));
    }
}
