//! Bytes a second for placement: a token bucket of one second.
//!
//! Whoever takes bytes needs some tokens, not all of them: a block larger than a second's worth goes all the same, and what
//! it took too much is waited for afterwards.

use std::time::Duration;

use reprise_policy::Tick;

/// Tokens are kept in bytes times microseconds, so that filling loses nothing.
const UNITS_PER_BYTE: i128 = 1_000_000;

/// See the module.
#[derive(Debug)]
pub(super) struct Bandwidth {
    /// Bytes a second; 0: nothing at all.
    rate: u64,
    units: i128,
    filled: Tick,
}

impl Bandwidth {
    /// A full bucket.
    pub(super) fn new(rate: u64) -> Bandwidth {
        Bandwidth { rate, units: i128::from(rate) * UNITS_PER_BYTE, filled: Tick(0) }
    }

    /// Whether nothing may be moved at all.
    pub(super) fn is_none(&self) -> bool {
        self.rate == 0
    }

    /// Takes bytes, if there are any tokens.
    pub(super) fn take(&mut self, bytes: u64, now: Tick) -> Result<(), Exhausted> {
        self.fill(now);
        if self.units <= 0 {
            return Err(Exhausted);
        }
        self.units -= i128::from(bytes) * UNITS_PER_BYTE;
        Ok(())
    }

    /// Bytes that were taken are not moved after all.
    pub(super) fn give_back(&mut self, bytes: u64) {
        self.units = (self.units + i128::from(bytes) * UNITS_PER_BYTE).min(self.full());
    }

    /// The time until something may be taken; zero when that is now.
    pub(super) fn wait(&mut self, now: Tick) -> Duration {
        self.fill(now);
        if self.units > 0 || self.rate == 0 {
            return Duration::ZERO;
        }
        let us = -self.units / i128::from(self.rate) + 1;
        Duration::from_micros(u64::try_from(us).unwrap_or(u64::MAX))
    }

    /// Bytes that may be taken now.
    pub(super) fn available(&mut self, now: Tick) -> u64 {
        self.fill(now);
        u64::try_from(self.units / UNITS_PER_BYTE).unwrap_or(0)
    }

    fn fill(&mut self, now: Tick) {
        let us = now.0.saturating_sub(self.filled.0);
        self.filled = self.filled.max(now);
        self.units = (self.units + i128::from(self.rate) * i128::from(us)).min(self.full());
    }

    fn full(&self) -> i128 {
        i128::from(self.rate) * UNITS_PER_BYTE
    }
}

/// Nothing may be taken now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Exhausted;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_second_s_worth_goes_at_once_and_the_rest_as_time_passes() {
        let mut bandwidth = Bandwidth::new(1000);
        assert_eq!(bandwidth.take(600, Tick(0)), Ok(()));
        assert_eq!(bandwidth.take(600, Tick(0)), Ok(()), "some were left");
        assert_eq!(bandwidth.take(1, Tick(0)), Err(Exhausted));
        assert_eq!(bandwidth.wait(Tick(0)), Duration::from_micros(200_001));
        assert_eq!(bandwidth.take(1, Tick(200_000)), Err(Exhausted));
        assert_eq!(bandwidth.take(1, Tick(200_001)), Ok(()));
        assert_eq!(bandwidth.take(900, Tick(60_000_000)), Ok(()), "no more than a second's worth is kept");
        assert_eq!(bandwidth.take(900, Tick(60_000_000)), Ok(()));
        assert_eq!(bandwidth.take(900, Tick(60_000_000)), Err(Exhausted));
    }

    #[test]
    fn what_is_given_back_can_be_taken_again() {
        let mut bandwidth = Bandwidth::new(1000);
        assert_eq!(bandwidth.take(5000, Tick(0)), Ok(()));
        bandwidth.give_back(5000);
        assert_eq!(bandwidth.wait(Tick(0)), Duration::ZERO);
    }

    #[test]
    fn no_bandwidth_is_none_for_ever() {
        let mut bandwidth = Bandwidth::new(0);
        assert!(bandwidth.is_none());
        assert_eq!(bandwidth.take(1, Tick(1 << 40)), Err(Exhausted));
    }
}
