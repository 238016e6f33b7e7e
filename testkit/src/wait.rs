//! Waits for a condition, with a bound.

use std::time::{Duration, Instant};

/// Bound for anything that must happen: far longer than it takes on a busy machine.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// Interval between polls, so that polling by HTTP requests or calls causes little load.
const PAUSE: Duration = Duration::from_millis(2);

/// Polls until `poll` returns a value.
///
/// # Panics
/// If it returns none within the bound; `what` describes the condition.
pub fn wait_until<T>(what: &str, within: Duration, mut poll: impl FnMut() -> Option<T>) -> T {
    let started = Instant::now();
    loop {
        if let Some(found) = poll() {
            return found;
        }
        assert!(started.elapsed() < within, "timeout after {within:?}: {what}");
        std::thread::sleep(PAUSE);
    }
}
