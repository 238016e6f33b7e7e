//! Rate limit of status writes.

use std::time::Duration;

use tokio::time::Instant;

/// Interval between writes of an unchanged status. The status stays younger than the minute after which the
/// operator considers an agent lost, even if one write is lost.
pub const UNCHANGED_EVERY: Duration = Duration::from_secs(25);

/// Minimum distance of two writes within a burst.
const BURST_DISTANCE: Duration = Duration::from_secs(1);

/// Maximum burst: enough for the changes of a failing device or a starting node.
const BURST: u32 = 4;

/// How a status differs from the one written last.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StatusChange {
    /// A state has changed on which users or the operator act.
    State,
    /// Only amounts and messages have changed.
    Amounts,
    /// Nothing has changed since the last write.
    None,
}

/// A token bucket for status writes: one in `every` on average, with bursts for changes of state.
#[derive(Clone, Copy, Debug)]
pub(crate) struct WritePacer {
    every: Duration,
    /// Time of the last attempt, successful or not.
    attempted: Option<Instant>,
    /// Time until which the writes so far use up the average rate, bounded by the size of a burst.
    spent: Option<Instant>,
}

impl WritePacer {
    /// Allows one write in `every` on average.
    pub(crate) fn new(every: Duration) -> WritePacer {
        WritePacer { every, attempted: None, spent: None }
    }

    /// Returns when the status should be written next.
    pub(crate) fn due(&self, change: StatusChange, now: Instant) -> Instant {
        let (Some(attempted), Some(spent)) = (self.attempted, self.spent) else { return now };
        match change {
            StatusChange::State => {
                let earliest = spent.checked_sub(self.every * (BURST - 1)).unwrap_or(attempted);
                earliest.max(attempted + BURST_DISTANCE.min(self.every))
            }
            StatusChange::Amounts => attempted + self.every,
            StatusChange::None => attempted + UNCHANGED_EVERY.max(self.every),
        }
    }

    /// Records an attempt to write.
    pub(crate) fn attempted(&mut self, now: Instant) {
        self.spent = Some(self.spent.map_or(now, |spent| spent.max(now)) + self.every);
        self.attempted = Some(now);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const EVERY: Duration = Duration::from_secs(10);

    #[test]
    fn first_status_is_written_immediately() {
        let now = Instant::now();
        assert_eq!(WritePacer::new(EVERY).due(StatusChange::None, now), now);
    }

    #[test]
    fn changed_amounts_wait_for_the_interval_and_unchanged_status_waits_longer() {
        let start = Instant::now();
        let mut pacer = WritePacer::new(EVERY);
        pacer.attempted(start);
        let later = start + Duration::from_secs(3);
        assert_eq!(pacer.due(StatusChange::State, later), start + BURST_DISTANCE);
        assert_eq!(pacer.due(StatusChange::Amounts, later), start + EVERY);
        assert_eq!(pacer.due(StatusChange::None, later), start + UNCHANGED_EVERY);
        assert!(pacer.due(StatusChange::Amounts, start + 3 * EVERY) < start + 3 * EVERY, "overdue");
    }

    #[test]
    fn state_changes_are_written_quickly_until_the_burst_is_used_up() {
        let start = Instant::now();
        let mut pacer = WritePacer::new(EVERY);
        // The state changes all the time.
        let mut at = start;
        let mut times = Vec::new();
        for _ in 0..8 {
            at = pacer.due(StatusChange::State, at).max(at);
            pacer.attempted(at);
            times.push((at - start).as_secs());
        }
        assert_eq!(times, [0, 1, 2, 3, 10, 20, 30, 40], "one in ten seconds over time");
        // A long silence does not allow a longer burst.
        let later = at + 100 * EVERY;
        at = later;
        let mut times = Vec::new();
        for _ in 0..6 {
            at = pacer.due(StatusChange::State, at).max(at);
            pacer.attempted(at);
            times.push((at - later).as_secs());
        }
        assert_eq!(times, [0, 1, 2, 3, 10, 20]);
    }

    #[test]
    fn constant_writes_of_amounts_do_not_delay_a_state_change() {
        let start = Instant::now();
        let mut pacer = WritePacer::new(EVERY);
        let mut at = start;
        for _ in 0..20 {
            at = pacer.due(StatusChange::Amounts, at);
            pacer.attempted(at);
        }
        assert_eq!(at, start + 19 * EVERY);
        assert_eq!(pacer.due(StatusChange::State, at), at + BURST_DISTANCE);
    }

    #[test]
    fn shorter_interval_than_the_burst_distance_is_respected() {
        let start = Instant::now();
        let mut pacer = WritePacer::new(BURST_DISTANCE / 10);
        pacer.attempted(start);
        assert_eq!(pacer.due(StatusChange::State, start), start + BURST_DISTANCE / 10);
    }

    #[test]
    fn status_stays_younger_than_a_minute_with_one_lost_write() {
        assert!(2 * UNCHANGED_EVERY < Duration::from_secs(60));
    }
}
