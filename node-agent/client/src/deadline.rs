//! Instants that cannot overflow: a caller may pass `Duration::MAX` for "no limit".

use std::time::{Duration, Instant};

/// Practically unlimited, and far below the range of the system's clock.
const FOREVER: Duration = Duration::from_secs(100 * 365 * 24 * 3600);

/// Returns the instant `timeout` from now.
pub(crate) fn after(timeout: Duration) -> Instant {
    from(Instant::now(), timeout)
}

/// Returns the instant `timeout` after `begin`.
pub(crate) fn from(begin: Instant, timeout: Duration) -> Instant {
    begin + timeout.min(FOREVER)
}
