//! Detects stuck reconcile queues, for the liveness probe.
//!
//! A waiting reconcile is aborted after a minute ([`crate::framework::controller`]). One that runs longer blocks its thread
//! or waits for a lock that is never released. A queue that panicked or is never polled runs no reconciles at
//! all, so each queue sends heartbeats. Neither recovers by itself; the kubelet must restart the process.
//!
//! Waiting for other components (an unreachable API server, a lease of another replica) does not count: a new
//! process would wait as well.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

/// Maximum time without a heartbeat, and of one reconcile: five times its timeout.
pub const STUCK_AFTER: Duration = Duration::from_secs(300);

/// Interval of heartbeats of a queue.
pub const HEARTBEAT_INTERVAL: Duration = Duration::from_secs(10);

/// State of all queues, by kind.
#[derive(Debug, Default)]
pub struct Watchdog {
    queues: Mutex<BTreeMap<&'static str, Queue>>,
}

#[derive(Debug)]
struct Queue {
    /// Time of the last heartbeat.
    last_heartbeat: Instant,
    /// Start times of running reconciles, by object.
    running: HashMap<String, Instant>,
}

impl Watchdog {
    /// Records a heartbeat of a queue.
    pub fn heartbeat(&self, kind: &'static str, now: Instant) {
        self.with(kind, now, |queue| queue.last_heartbeat = now);
    }

    /// Records the start of a reconcile.
    pub fn reconcile_started(&self, kind: &'static str, key: &str, now: Instant) {
        self.with(kind, now, |queue| {
            queue.running.insert(key.to_owned(), now);
        });
    }

    /// Records the end of a reconcile.
    pub fn reconcile_finished(&self, kind: &'static str, key: &str, now: Instant) {
        self.with(kind, now, |queue| {
            queue.running.remove(key);
        });
    }

    /// Removes a queue that has shut down.
    pub fn queue_stopped(&self, kind: &'static str) {
        self.queues.lock().unwrap_or_else(PoisonError::into_inner).remove(kind);
    }

    /// Describes the first stuck reconcile or queue.
    pub fn stuck(&self, now: Instant) -> Option<String> {
        let queues = self.queues.lock().unwrap_or_else(PoisonError::into_inner);
        queues.iter().find_map(|(kind, queue)| {
            let late = |since: &Instant| now.duration_since(*since) > STUCK_AFTER;
            let running = queue.running.iter().find(|(_, begun)| late(begun));
            let running = running.map(|(key, begun)| {
                format!(
                    "the reconcile of {key} has been running for {} s",
                    now.duration_since(*begun).as_secs()
                )
            });
            let silent = || {
                let passed = now.duration_since(queue.last_heartbeat).as_secs();
                format!("the queue of {kind} has sent no heartbeat for {passed} s")
            };
            running.or_else(|| late(&queue.last_heartbeat).then(silent))
        })
    }

    fn with(&self, kind: &'static str, now: Instant, change: impl FnOnce(&mut Queue)) {
        let mut queues = self.queues.lock().unwrap_or_else(PoisonError::into_inner);
        change(queues.entry(kind).or_insert_with(|| Queue { last_heartbeat: now, running: HashMap::new() }));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reports_endless_reconciles_and_queues_without_heartbeat() {
        let watchdog = Watchdog::default();
        let start = Instant::now();
        let at = |seconds: u64| start + Duration::from_secs(seconds);
        assert_eq!(watchdog.stuck(at(10_000)), None, "a replica without the lease has no queues");
        watchdog.heartbeat("Node", start);
        watchdog.reconcile_started("Node", "Node//n1", at(10));
        watchdog.heartbeat("Node", at(300));
        assert_eq!(watchdog.stuck(at(310)), None);
        let message = watchdog.stuck(at(311)).expect("a stuck reconcile");
        assert_eq!(message, "the reconcile of Node//n1 has been running for 301 s");
        watchdog.reconcile_finished("Node", "Node//n1", at(311));
        assert_eq!(watchdog.stuck(at(600)), None);
        let message = watchdog.stuck(at(601)).expect("a stuck queue");
        assert_eq!(message, "the queue of Node has sent no heartbeat for 301 s");
        watchdog.heartbeat("SSDPool", at(601));
        assert!(watchdog.stuck(at(601)).is_some(), "heartbeats of another queue do not count");
        watchdog.queue_stopped("Node");
        assert_eq!(watchdog.stuck(at(601)), None);
    }
}
