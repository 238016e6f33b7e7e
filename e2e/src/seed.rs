//! Randomness of the tests: from one number, which is printed and can be given back; and how long tests go on that could do so for ever.

use std::io::Write;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rand::SeedableRng;
use rand::rngs::StdRng;

/// Set to the printed number, a run draws the same numbers again.
pub const SEED_VARIABLE: &str = "REPRISE_E2E_SEED";

/// A generator for a test; says its seed, and how to replay it, on standard error.
///
/// # Panics
/// When the variable holds no number.
pub fn seeded(test: &str) -> StdRng {
    let seed = match std::env::var(SEED_VARIABLE) {
        Ok(text) => text.parse().expect("the seed is a number"),
        Err(_) => {
            let since = SystemTime::now().duration_since(UNIX_EPOCH);
            since.map_or(1, |since| u64::from(since.subsec_nanos()) ^ since.as_secs() << 30)
        }
    };
    say(&format!("{test}: replay with {SEED_VARIABLE}={seed}"));
    StdRng::seed_from_u64(seed)
}

/// Seconds of a test that goes on for as long as it may: by a variable, or so many.
///
/// # Panics
/// When the variable holds no number.
pub fn seconds(variable: &str, otherwise: u64) -> Duration {
    let text = std::env::var(variable).ok();
    Duration::from_secs(text.map_or(otherwise, |text| text.parse().expect("seconds are a number")))
}

/// Writes a line that is shown even when the test passes.
pub fn say(text: &str) {
    // Not the macro: it is captured, and what is said here must be seen.
    let _ = writeln!(std::io::stderr(), "[e2e] {text}");
}
