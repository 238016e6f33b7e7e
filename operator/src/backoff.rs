//! How long a failed reconcile waits: from 1 s to 5 min, doubled each time, with jitter so that what failed together does not come
//! back together.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use rand::RngExt;

/// The first delay.
pub const DELAY_MIN: Duration = Duration::from_secs(1);
/// No delay is longer.
pub const DELAY_MAX: Duration = Duration::from_secs(300);
/// A delay is shortened by up to so many hundredths.
const JITTER_PERCENT: u64 = 25;

/// Failures in a row, by object.
#[derive(Debug, Default)]
pub struct Backoff {
    failures: Mutex<HashMap<String, u32>>,
}

impl Backoff {
    /// Counts a failure of an object, and says how long it waits.
    pub fn failed(&self, key: &str) -> Duration {
        let mut failures = self.failures.lock().unwrap_or_else(PoisonError::into_inner);
        let count = failures.entry(key.to_owned()).or_default();
        *count = count.saturating_add(1);
        let whole = delay(*count);
        let cut = rand::rng().random_range(0..=JITTER_PERCENT);
        whole - whole * u32::try_from(cut).expect("hundredths") / 100
    }

    /// Forgets the failures of an object.
    pub fn succeeded(&self, key: &str) {
        self.failures.lock().unwrap_or_else(PoisonError::into_inner).remove(key);
    }
}

/// The delay after so many failures in a row, without jitter.
fn delay(failures: u32) -> Duration {
    let doubled = failures.saturating_sub(1).min(16);
    (DELAY_MIN * 2_u32.pow(doubled)).min(DELAY_MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn delays_double_from_a_second_to_five_minutes_and_begin_anew_after_a_success() {
        let backoff = Backoff::default();
        let within = |delay: Duration, whole: u64| {
            let whole = Duration::from_secs(whole);
            assert!(delay <= whole && delay >= whole * 3 / 4, "{delay:?} of {whole:?}");
        };
        for whole in [1, 2, 4, 8, 16, 32, 64, 128, 256, 300, 300] {
            within(backoff.failed("a"), whole);
        }
        within(backoff.failed("b"), 1);
        backoff.succeeded("a");
        within(backoff.failed("a"), 1);
    }
}
