//! Detects stuck reconcile queues, for the liveness probe.
//!
//! Each queue sends heartbeats from the task that polls its reconciles. A waiting reconcile is aborted after a minute
//! ([`crate::framework::controller`]). One that blocks its thread or waits for a lock that is never released, and a
//! queue that panicked or is never polled, send no heartbeats. Neither recovers by itself; the kubelet must restart
//! the process.
//!
//! Waiting for other components (an unreachable API server, a lease of another replica) does not count: a new
//! process would wait as well.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

/// Maximum time without a heartbeat: five times the timeout of a reconcile.
pub const STUCK_AFTER: Duration = Duration::from_secs(300);

/// Interval of heartbeats of a queue.
pub const HEARTBEAT_INTERVAL: Duration = Duration::from_secs(10);

/// Last heartbeat of each queue, by kind.
#[derive(Debug, Default)]
pub struct Watchdog {
    heartbeats: Mutex<BTreeMap<&'static str, Instant>>,
}

impl Watchdog {
    /// Records a heartbeat of a queue.
    pub fn heartbeat(&self, kind: &'static str, now: Instant) {
        self.heartbeats.lock().unwrap_or_else(PoisonError::into_inner).insert(kind, now);
    }

    /// Removes a queue that has shut down.
    pub fn queue_stopped(&self, kind: &'static str) {
        self.heartbeats.lock().unwrap_or_else(PoisonError::into_inner).remove(kind);
    }

    /// Describes the first stuck queue.
    pub fn stuck(&self, now: Instant) -> Option<String> {
        let heartbeats = self.heartbeats.lock().unwrap_or_else(PoisonError::into_inner);
        let passed = |last: &Instant| now.duration_since(*last);
        let (kind, last) = heartbeats.iter().find(|(_, last)| passed(last) > STUCK_AFTER)?;
        Some(format!("the queue of {kind} has sent no heartbeat for {} s", passed(last).as_secs()))
    }
}
