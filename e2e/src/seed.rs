//! Seeds of random tests: fixed unless the environment sets another one.
//!
//! `make test` uses the same seed every time, so it fails only if the tree has changed. `make soak` runs the
//! same tests with new seeds and prints each. A seed determines a test's actions, but not the interleaving of
//! processes.

use std::io::Write;

use rand::SeedableRng;
use rand::rngs::StdRng;

/// Environment variable with the seed of a run.
pub const SEED_VARIABLE: &str = "REPRISE_E2E_SEED";

/// Seed of a run without the variable. It gives the operator's chaos test many faults and blocked deletions.
pub const FIXED: u64 = 5;

/// Returns a generator for a test, and prints its seed and how to replay it on standard error.
///
/// # Panics
/// If the variable is not a number.
pub fn seeded(test: &str) -> StdRng {
    let seed = number(SEED_VARIABLE, FIXED);
    print_line(&format!("{test}: replay with {SEED_VARIABLE}={seed}"));
    StdRng::seed_from_u64(seed)
}

/// Returns the number in an environment variable, or `otherwise` if it is not set.
///
/// # Panics
/// If the variable is not a number.
pub fn number(variable: &str, otherwise: u64) -> u64 {
    let text = std::env::var(variable).ok();
    text.map_or(otherwise, |text| {
        text.parse().unwrap_or_else(|_| panic!("invalid {variable} \"{text}\": expected a number"))
    })
}

/// Prints a line that is shown even if the test passes.
pub fn print_line(text: &str) {
    // `eprintln!` is captured by the test harness; writes to standard error are not.
    let _ = writeln!(std::io::stderr(), "[e2e] {text}");
}
