//! Bandwidth limit of replication: a token bucket that holds one second's worth of bytes.
//!
//! A transfer may start as soon as there are any tokens, so that a block larger than the bucket can pass. The
//! tokens that it lacks delay the next transfers.

use std::time::Duration;

use reprise_policy::Tick;

/// Tokens are counted in bytes × microseconds, so that refilling is exact.
const UNITS_PER_BYTE: i128 = 1_000_000;

/// Token bucket; the balance may be negative.
#[derive(Debug)]
pub(crate) struct Bandwidth {
    /// Bytes per second; 0 forbids all transfers.
    rate: u64,
    units: i128,
    filled: Tick,
}

impl Bandwidth {
    /// Creates a full bucket.
    pub(crate) fn new(rate: u64) -> Bandwidth {
        Bandwidth { rate, units: i128::from(rate) * UNITS_PER_BYTE, filled: Tick(0) }
    }

    /// Whether all transfers are forbidden.
    pub(crate) fn is_disabled(&self) -> bool {
        self.rate == 0
    }

    /// Takes tokens for a transfer, if the balance is positive.
    pub(crate) fn take(&mut self, bytes: u64, now: Tick) -> Result<(), Exhausted> {
        self.fill(now);
        if self.units <= 0 {
            return Err(Exhausted);
        }
        self.units -= i128::from(bytes) * UNITS_PER_BYTE;
        Ok(())
    }

    /// Returns the tokens of a transfer that did not take place.
    pub(crate) fn return_tokens(&mut self, bytes: u64) {
        self.units = (self.units + i128::from(bytes) * UNITS_PER_BYTE).min(self.full());
    }

    /// Time until the balance is positive; zero if it is now, or if all transfers are forbidden.
    pub(crate) fn wait(&mut self, now: Tick) -> Duration {
        self.fill(now);
        if self.units > 0 || self.rate == 0 {
            return Duration::ZERO;
        }
        let us = -self.units / i128::from(self.rate) + 1;
        Duration::from_micros(u64::try_from(us).unwrap_or(u64::MAX))
    }

    /// Bytes in the bucket now.
    pub(crate) fn available(&mut self, now: Tick) -> u64 {
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

/// The bucket is empty.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Exhausted;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn allows_one_second_of_bytes_at_once_and_then_the_rate() {
        let mut bandwidth = Bandwidth::new(1000);
        assert_eq!(bandwidth.take(600, Tick(0)), Ok(()));
        assert_eq!(bandwidth.take(600, Tick(0)), Ok(()), "some tokens were left");
        assert_eq!(bandwidth.take(1, Tick(0)), Err(Exhausted));
        assert_eq!(bandwidth.wait(Tick(0)), Duration::from_micros(200_001));
        assert_eq!(bandwidth.take(1, Tick(200_000)), Err(Exhausted));
        assert_eq!(bandwidth.take(1, Tick(200_001)), Ok(()));
        assert_eq!(bandwidth.take(900, Tick(60_000_000)), Ok(()), "no more than a second's worth is kept");
        assert_eq!(bandwidth.take(900, Tick(60_000_000)), Ok(()));
        assert_eq!(bandwidth.take(900, Tick(60_000_000)), Err(Exhausted));
    }

    #[test]
    fn returned_tokens_can_be_taken_again() {
        let mut bandwidth = Bandwidth::new(1000);
        assert_eq!(bandwidth.take(5000, Tick(0)), Ok(()));
        bandwidth.return_tokens(5000);
        assert_eq!(bandwidth.wait(Tick(0)), Duration::ZERO);
    }

    #[test]
    fn zero_bandwidth_never_allows_a_transfer() {
        let mut bandwidth = Bandwidth::new(0);
        assert!(bandwidth.is_disabled());
        assert_eq!(bandwidth.take(1, Tick(1 << 40)), Err(Exhausted));
    }
}
