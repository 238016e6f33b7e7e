//! The core's sign of life: the time of its last turn, for whoever asks whether it is stuck.
//!
//! It does not pass through the inbox: a core with a full inbox is busy, and asking it by yet another input would take
//! that for its death.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use super::Clock;

/// The core's thread turns at least this often, with or without work.
pub(super) const PULSE_EVERY: Duration = Duration::from_secs(1);

/// A core without a turn for so long is stuck: a turn is [`PULSE_EVERY`] of waiting and 64 inputs of 1 to 100 µs.
const PULSE_AGE_MAX: Duration = Duration::from_secs(10);

/// The time of the core's last turn; clones are the same.
#[derive(Clone, Debug)]
pub(crate) struct Pulse {
    clock: Clock,
    last_us: Arc<AtomicU64>,
}

impl Pulse {
    /// Its first beat is now.
    pub(crate) fn new(clock: Clock) -> Pulse {
        let pulse = Pulse { clock, last_us: Arc::default() };
        pulse.beat();
        pulse
    }

    /// The core has begun a turn.
    pub(super) fn beat(&self) {
        self.last_us.store(self.clock.now().0, Ordering::Relaxed);
    }

    /// Whether the core turns.
    pub(crate) fn is_alive(&self) -> bool {
        self.age() <= PULSE_AGE_MAX
    }

    /// Since the last turn.
    fn age(&self) -> Duration {
        Duration::from_micros(self.clock.now().0.saturating_sub(self.last_us.load(Ordering::Relaxed)))
    }
}

const _: () = assert!(PULSE_AGE_MAX.as_micros() >= 5 * PULSE_EVERY.as_micros());

#[cfg(test)]
impl Pulse {
    /// A pulse that has not beaten for too long.
    pub(crate) fn stopped() -> Pulse {
        let long_ago = std::time::Instant::now().checked_sub(2 * PULSE_AGE_MAX);
        let start = long_ago.expect("this machine has been up for longer");
        Pulse { clock: Clock { start }, last_us: Arc::default() }
    }
}
