//! When a status is written: rarely, and never for nothing.

use std::time::Duration;

use tokio::time::Instant;

/// A status that says nothing new is written so often, so that its time stays younger than the minute after which an agent
/// counts as away, with one write lost.
pub const UNCHANGED_EVERY: Duration = Duration::from_secs(25);

/// What is news is written so soon after the last write, where writes were saved up.
const SOON: Duration = Duration::from_secs(1);

/// So many writes are saved up while there are none: what a device that goes, or a node that starts, has to say one after the other.
const SAVED_UP: u32 = 4;

/// What there is to say.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum News {
    /// Something is so that was not: what others act on.
    State,
    /// Amounts and words have changed, and nothing else.
    Amounts,
    /// It is as it was written.
    None,
}

/// Paces the writes of a status: one in `every` over time, and news before that as long as there were fewer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pace {
    every: Duration,
    /// The last attempt, whether it went well or not.
    tried: Option<Instant>,
    /// Until then all writes so far would have lasted, one in `every`. Never further ahead than those that may be saved up.
    spent: Option<Instant>,
}

impl Pace {
    /// Statuses are written so far apart, over time.
    pub(crate) fn new(every: Duration) -> Pace {
        Pace { every, tried: None, spent: None }
    }

    /// When the status is to be written next.
    pub(crate) fn due(&self, news: News, now: Instant) -> Instant {
        let (Some(tried), Some(spent)) = (self.tried, self.spent) else { return now };
        match news {
            News::State => {
                let saved = spent.checked_sub(self.every * (SAVED_UP - 1)).unwrap_or(tried);
                saved.max(tried + SOON.min(self.every))
            }
            News::Amounts => tried + self.every,
            News::None => tried + UNCHANGED_EVERY.max(self.every),
        }
    }

    /// It is being written.
    pub(crate) fn tried(&mut self, now: Instant) {
        self.spent = Some(self.spent.map_or(now, |spent| spent.max(now)) + self.every);
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
    fn amounts_wait_for_the_pause_and_their_absence_for_longer() {
        let start = Instant::now();
        let mut pace = Pace::new(EVERY);
        pace.tried(start);
        let later = start + Duration::from_secs(3);
        assert_eq!(pace.due(News::State, later), start + SOON);
        assert_eq!(pace.due(News::Amounts, later), start + EVERY);
        assert_eq!(pace.due(News::None, later), start + UNCHANGED_EVERY);
        assert!(pace.due(News::Amounts, start + 3 * EVERY) < start + 3 * EVERY, "overdue");
    }

    #[test]
    fn news_is_written_soon_until_what_was_saved_up_is_spent() {
        let start = Instant::now();
        let mut pace = Pace::new(EVERY);
        // There is news all the time.
        let mut at = start;
        let mut times = Vec::new();
        for _ in 0..8 {
            at = pace.due(News::State, at).max(at);
            pace.tried(at);
            times.push((at - start).as_secs());
        }
        assert_eq!(times, [0, 1, 2, 3, 10, 20, 30, 40], "one in ten seconds over time");
        // Nobody who was silent for long has more saved up than that.
        let later = at + 100 * EVERY;
        at = later;
        let mut times = Vec::new();
        for _ in 0..6 {
            at = pace.due(News::State, at).max(at);
            pace.tried(at);
            times.push((at - later).as_secs());
        }
        assert_eq!(times, [0, 1, 2, 3, 10, 20]);
    }

    #[test]
    fn who_tells_amounts_all_the_time_has_news_to_tell_as_soon() {
        let start = Instant::now();
        let mut pace = Pace::new(EVERY);
        let mut at = start;
        for _ in 0..20 {
            at = pace.due(News::Amounts, at);
            pace.tried(at);
        }
        assert_eq!(at, start + 19 * EVERY);
        assert_eq!(pace.due(News::State, at), at + SOON);
    }

    #[test]
    fn a_shorter_pause_than_that_is_kept() {
        let start = Instant::now();
        let mut pace = Pace::new(SOON / 10);
        pace.tried(start);
        assert_eq!(pace.due(News::State, start), start + SOON / 10);
    }

    #[test]
    fn a_status_is_younger_than_a_minute_with_one_write_lost() {
        assert!(2 * UNCHANGED_EVERY < Duration::from_secs(60));
    }
}
