//! Exponential backoff between attempts, with a cap. Jitter keeps a thousand agents from reconnecting at the
//! same time.
//!
//! Pure: the caller provides the random number for each jitter ([`Pause::draw`]).

use std::time::Duration;

/// Delay after the first failure, before jitter.
const FIRST: Duration = Duration::from_millis(50);
/// Maximum delay: the agent finds a restarted control plane within one second.
const CAP: Duration = Duration::from_secs(1);

/// A range of times to wait, from which the caller draws one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pause {
    least: Duration,
    spread: Duration,
}

impl Pause {
    /// A pause without any length.
    pub const NONE: Pause = Pause::within(Duration::ZERO);

    /// A pause of at most `longest`.
    pub const fn within(longest: Duration) -> Pause {
        Pause { least: Duration::ZERO, spread: longest }
    }

    /// Returns the time to wait; `random` selects a value in the range.
    pub fn draw(self, random: u32) -> Duration {
        let jitter_us = (self.spread.as_micros() as u64 * u64::from(random)) >> 32;
        self.least + Duration::from_micros(jitter_us)
    }
}

/// Number of consecutive failures.
#[derive(Debug, Default)]
pub struct Backoff {
    failures: u32,
}

impl Backoff {
    /// Resets the failure count.
    pub fn reset(&mut self) {
        self.failures = 0;
    }

    /// Returns the pause before the next attempt: between half and all of `min(50 ms × 2^failures, 1 s)`.
    pub fn next_pause(&mut self) -> Pause {
        let full = FIRST.saturating_mul(1 << self.failures.min(10)).min(CAP);
        self.failures = self.failures.saturating_add(1);
        Pause { least: full / 2, spread: full / 2 }
    }

    /// Returns the time to wait before the next attempt; `random` selects a value of the next pause.
    pub fn next(&mut self, random: u32) -> Duration {
        self.next_pause().draw(random)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn doubles_delay_up_to_cap_and_resets_after_success() {
        let mut backoff = Backoff::default();
        let delays: Vec<Duration> = (0..40).map(|_| backoff.next(u32::MAX / 3)).collect();
        assert!(delays[0] >= FIRST / 2 && delays[0] <= FIRST, "{:?}", delays[0]);
        assert!(delays[39] >= CAP / 2 && delays[39] <= CAP, "{:?}", delays[39]);
        backoff.reset();
        assert!(backoff.next(u32::MAX) <= FIRST);
    }

    #[test]
    fn random_numbers_spread_delays_over_half_of_the_range() {
        let delay = |random| Backoff { failures: 20 }.next(random);
        assert_eq!(delay(0), CAP / 2);
        assert!(delay(0) < delay(1 << 31) && delay(1 << 31) < delay(u32::MAX));
        assert!(delay(u32::MAX) <= CAP);
    }
}
