//! Time in the pure cores.

use std::time::Duration;

/// Microseconds since an arbitrary start (process start in production, zero in simulation); monotonic.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Tick(pub u64);

impl Tick {
    /// Returns the time after `delay`; saturates.
    pub fn after(self, delay: Duration) -> Tick {
        Tick(self.0.saturating_add(u64::try_from(delay.as_micros()).unwrap_or(u64::MAX)))
    }

    /// Time since `earlier`; zero if `earlier` is in the future.
    pub fn since(self, earlier: Tick) -> Duration {
        Duration::from_micros(self.0.saturating_sub(earlier.0))
    }
}
