//! Waiting for something to become true, never longer than a bound.

use std::time::{Duration, Instant};

/// Time for anything that must happen: far beyond what it takes on a machine that is busy with other tests.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// Pause between two looks. Looking costs an HTTP request or a call; this keeps it from being the load.
const PAUSE: Duration = Duration::from_millis(2);

/// Looks until there is an answer.
///
/// # Panics
/// When there is none within the bound; `what` says what was waited for.
pub fn wait_until<T>(what: &str, within: Duration, mut look: impl FnMut() -> Option<T>) -> T {
    let started = Instant::now();
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(started.elapsed() < within, "not within {within:?}: {what}");
        std::thread::sleep(PAUSE);
    }
}
