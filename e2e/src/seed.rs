//! Seeds of random tests: fixed unless the environment names another one.
//!
//! `make test` draws the same numbers every time, so it fails only when the tree has changed. `make soak` runs the same tests with new seeds and prints
//! each. Timing remains the machine's: a seed decides what a test does, not how processes interleave with it.

use std::io::Write;

use rand::SeedableRng;
use rand::rngs::StdRng;

/// Seed of a run, if not [`FIXED`].
pub const SEED_VARIABLE: &str = "REPRISE_E2E_SEED";

/// Seed of a run that names none: with it the chaos of the operator meets many faults, and deletions that have to wait.
pub const FIXED: u64 = 5;

/// Returns a generator for a test, and prints its seed and how to replay it on standard error.
///
/// # Panics
/// When the variable does not hold a number.
pub fn seeded(test: &str) -> StdRng {
    let seed = number(SEED_VARIABLE, FIXED);
    say(&format!("{test}: replay with {SEED_VARIABLE}={seed}"));
    StdRng::seed_from_u64(seed)
}

/// Returns the number in an environment variable, or another one where it is not set.
///
/// # Panics
/// When the variable does not hold a number.
pub fn number(variable: &str, otherwise: u64) -> u64 {
    let text = std::env::var(variable).ok();
    text.map_or(otherwise, |text| {
        text.parse().unwrap_or_else(|_| panic!("invalid {variable} \"{text}\": expected a number"))
    })
}

/// Writes a line that is shown even when the test passes.
pub fn say(text: &str) {
    // Not the macro: it is captured, and what is said here must be seen.
    let _ = writeln!(std::io::stderr(), "[e2e] {text}");
}
