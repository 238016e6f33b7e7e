//! Instants that cannot overflow: a caller may pass `Duration::MAX` for "as long as it takes".

use std::time::{Duration, Instant};

/// As good as for ever; far below where the system's clock ends.
const FOREVER: Duration = Duration::from_secs(100 * 365 * 24 * 3600);

/// The instant `timeout` from now.
pub(crate) fn after(timeout: Duration) -> Instant {
    from(Instant::now(), timeout)
}

/// The instant `timeout` after another one.
pub(crate) fn from(begin: Instant, timeout: Duration) -> Instant {
    begin + timeout.min(FOREVER)
}
