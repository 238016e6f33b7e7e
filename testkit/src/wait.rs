//! Waits for a condition, with a bound.

use std::time::{Duration, Instant};

/// Bound for anything that must happen: far longer than it takes on a busy machine.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// Bound for a call that has an own deadline: a longer one has hung.
const HANG: Duration = Duration::from_secs(20);

/// Bounds of the interval between polls, a sixteenth of the time waited: polling by requests or commands causes little
/// load, and delays the test little.
const INTERVAL: [Duration; 2] = [Duration::from_millis(2), Duration::from_millis(200)];

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
        let waited = started.elapsed();
        assert!(waited < within, "timeout after {within:?}: {what}");
        std::thread::sleep((waited / 16).clamp(INTERVAL[0], INTERVAL[1]));
    }
}

/// Repeats a call until one takes less than `within`, and returns its result. A busy machine delays some calls, a
/// defect all of them.
///
/// # Panics
/// If a call has hung, or no call was fast enough within [`PATIENCE`]; `what` describes the call. A fault that the
/// system has noticed during the first call no longer delays the next ones: create it again in each call, or measure
/// only the first call.
pub fn fast_call<T>(what: &str, within: Duration, mut call: impl FnMut() -> T) -> T {
    let (started, mut fastest) = (Instant::now(), Duration::MAX);
    while started.elapsed() < PATIENCE {
        let begun = Instant::now();
        let result = call();
        let took = begun.elapsed();
        assert!(took < HANG, "a call hung for {took:?}: {what}");
        fastest = fastest.min(took);
        if fastest < within {
            return result;
        }
    }
    panic!("the fastest call took {fastest:?}, more than {within:?}: {what}");
}
