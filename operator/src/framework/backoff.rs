//! Delays of failed reconciles: from 1 s to 5 min, doubled with each failure. Jitter spreads objects that
//! failed at the same time.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use rand::RngExt;

/// Delay after the first failure.
pub const DELAY_MIN: Duration = Duration::from_secs(1);
/// Upper bound of all delays.
pub const DELAY_MAX: Duration = Duration::from_secs(300);
/// Jitter: a delay is shortened by up to this percentage.
const JITTER_PERCENT: u64 = 25;

/// Consecutive failures, by object.
#[derive(Debug, Default)]
pub struct Backoff {
    failures: Mutex<HashMap<String, u32>>,
}

impl Backoff {
    /// Counts a failure of an object and returns how long to wait before the next attempt.
    pub fn record_failure(&self, key: &str) -> Duration {
        let doubled = self.count_failure(key).min(16);
        let whole = (DELAY_MIN * 2_u32.pow(doubled)).min(DELAY_MAX);
        let cut = rand::rng().random_range(0..=JITTER_PERCENT);
        whole - whole * u32::try_from(cut).expect("at most 25") / 100
    }

    /// Counts a failure of an object and returns the number of consecutive failures before it.
    pub fn count_failure(&self, key: &str) -> u32 {
        let mut failures = self.failures.lock().unwrap_or_else(PoisonError::into_inner);
        let count = failures.entry(key.to_owned()).or_default();
        *count = count.saturating_add(1);
        *count - 1
    }

    /// Forgets the failures of an object.
    pub fn record_success(&self, key: &str) {
        self.failures.lock().unwrap_or_else(PoisonError::into_inner).remove(key);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn delay_doubles_from_1_s_to_5_min_and_resets_on_success() {
        let backoff = Backoff::default();
        let within = |delay: Duration, whole: u64| {
            let whole = Duration::from_secs(whole);
            assert!(delay <= whole && delay >= whole * 3 / 4, "{delay:?} of {whole:?}");
        };
        for whole in [1, 2, 4, 8, 16, 32, 64, 128, 256, 300, 300] {
            within(backoff.record_failure("a"), whole);
        }
        within(backoff.record_failure("b"), 1);
        backoff.record_success("a");
        within(backoff.record_failure("a"), 1);
    }
}
