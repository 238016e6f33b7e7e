//! When a status is written: rarely, and never for nothing.

use std::time::Duration;

use tokio::time::Instant;

/// A status that says nothing new is written so often, so that its time stays younger than the minute after which an agent
/// counts as away, with one write lost.
pub const UNCHANGED_EVERY: Duration = Duration::from_secs(25);

/// Whether there is something to say.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum News {
    /// The status differs from what was written.
    Some,
    /// It does not.
    None,
}

/// Paces the writes of a status.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pace {
    every: Duration,
    /// The last attempt, whether it went well or not.
    tried: Option<Instant>,
}

impl Pace {
    /// Changed statuses are written so far apart.
    pub(crate) fn new(every: Duration) -> Pace {
        Pace { every, tried: None }
    }

    /// When the status is to be written next.
    pub(crate) fn due(&self, news: News, now: Instant) -> Instant {
        let pause = match news {
            News::Some => self.every,
            News::None => UNCHANGED_EVERY.max(self.every),
        };
        self.tried.map_or(now, |tried| tried + pause)
    }

    /// It is being written.
    pub(crate) fn tried(&mut self, now: Instant) {
        self.tried = Some(now);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const EVERY: Duration = Duration::from_secs(10);

    #[test]
    fn the_first_status_is_written_at_once() {
        let now = Instant::now();
        assert_eq!(Pace::new(EVERY).due(News::None, now), now);
    }

    #[test]
    fn news_waits_for_the_pause_and_its_absence_for_longer() {
        let start = Instant::now();
        let mut pace = Pace::new(EVERY);
        pace.tried(start);
        let later = start + Duration::from_secs(3);
        assert_eq!(pace.due(News::Some, later), start + EVERY);
        assert_eq!(pace.due(News::None, later), start + UNCHANGED_EVERY);
        assert!(pace.due(News::Some, start + 3 * EVERY) < start + 3 * EVERY, "overdue");
    }

    #[test]
    fn a_status_is_younger_than_a_minute_with_one_write_lost() {
        assert!(2 * UNCHANGED_EVERY < Duration::from_secs(60));
    }
}
