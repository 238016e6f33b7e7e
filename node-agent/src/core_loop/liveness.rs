//! Liveness of the core's thread: the time of its last pass.
//!
//! It bypasses the inbox: a core with a full inbox is busy, and a query through the inbox would mistake
//! that for a stuck core.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use super::Clock;

/// Maximum time between two passes of the core's thread, with or without work.
pub(super) const BEAT_EVERY: Duration = Duration::from_secs(1);

/// Age of the last pass above which the core counts as stuck. A pass waits for at most [`BEAT_EVERY`] and
/// handles 64 inputs of 1 to 100 µs.
const BEAT_AGE_MAX: Duration = Duration::from_secs(10);

/// Time of the core's last pass; clones share it.
#[derive(Clone, Debug)]
pub(crate) struct Liveness {
    clock: Clock,
    last_us: Arc<AtomicU64>,
}

impl Liveness {
    /// Creates a liveness whose first pass is now.
    pub(crate) fn new(clock: Clock) -> Liveness {
        let liveness = Liveness { clock, last_us: Arc::default() };
        liveness.beat();
        liveness
    }

    /// Records the start of a pass.
    pub(super) fn beat(&self) {
        self.last_us.store(self.clock.now().0, Ordering::Relaxed);
    }

    /// Returns whether the last pass is recent enough.
    pub(crate) fn is_alive(&self) -> bool {
        self.age() <= BEAT_AGE_MAX
    }

    /// Returns the time since the last pass.
    fn age(&self) -> Duration {
        Duration::from_micros(self.clock.now().0.saturating_sub(self.last_us.load(Ordering::Relaxed)))
    }
}

const _: () = assert!(BEAT_AGE_MAX.as_micros() >= 5 * BEAT_EVERY.as_micros());

#[cfg(test)]
impl Liveness {
    /// Returns the liveness of a stuck core.
    pub(crate) fn stopped() -> Liveness {
        let long_ago = std::time::Instant::now().checked_sub(2 * BEAT_AGE_MAX);
        let start = long_ago.expect("the machine has been up for longer");
        Liveness { clock: Clock { start }, last_us: Arc::default() }
    }
}
