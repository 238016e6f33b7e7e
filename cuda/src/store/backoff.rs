//! Pauses between checks of a condition that no other thread reports: first none, then yields, then short sleeps.

use std::sync::mpsc::{Receiver, RecvTimeoutError, TryRecvError};
use std::time::{Duration, Instant};

/// Checks before the first pause.
const SPINS: u32 = 64;
/// Time of checks without a pause.
const YIELDS: Duration = Duration::from_micros(200);
/// Pause between two checks after that.
const PAUSE: Duration = Duration::from_micros(20);

/// A wait that has begun.
#[derive(Debug)]
pub(super) struct Backoff {
    checks: u32,
    began: Instant,
}

impl Backoff {
    pub(super) fn start() -> Backoff {
        Backoff { checks: 0, began: Instant::now() }
    }

    /// Returns when the next check is due.
    pub(super) fn wait(&mut self) {
        self.checks = self.checks.saturating_add(1);
        match self.checks {
            0..=SPINS => std::hint::spin_loop(),
            _ if self.began.elapsed() < YIELDS => std::thread::yield_now(),
            _ => std::thread::sleep(PAUSE),
        }
    }

    /// Returns what a channel gets before the next check is due.
    pub(super) fn receive<T>(&mut self, channel: &Receiver<T>) -> Result<T, RecvTimeoutError> {
        self.checks = self.checks.saturating_add(1);
        if self.checks > SPINS && self.began.elapsed() >= YIELDS {
            return channel.recv_timeout(PAUSE);
        }
        std::thread::yield_now();
        channel.try_recv().map_err(|error| match error {
            TryRecvError::Empty => RecvTimeoutError::Timeout,
            TryRecvError::Disconnected => RecvTimeoutError::Disconnected,
        })
    }
}
