//! Whether the queues go on, for the liveness probe.
//!
//! A reconcile that waits is given up after a minute ([`crate::queue`]), so one that runs for longer holds its thread or waits for a lock that nobody
//! gives back. A queue that panicked or is never looked at again has no reconcile at all, so each tells from time to time that it lives. Neither
//! is mended by waiting; the kubelet makes a new process of it.
//!
//! What waits for somebody else (an API server that is away, a lease that another replica holds) is no reason to be ended: a new process would wait
//! as well.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// So long a queue may say nothing, and a reconcile run: five times what one is given.
pub const STUCK_AFTER: Duration = Duration::from_secs(300);

/// A queue that lives says so this often.
pub const SAID_EVERY: Duration = Duration::from_secs(10);

/// What is known of all queues, by the kind that they are of.
#[derive(Debug, Default)]
pub struct Progress {
    queues: Mutex<BTreeMap<&'static str, Queue>>,
}

#[derive(Debug)]
struct Queue {
    /// When it said last that it lives.
    said: Instant,
    /// When what runs began, by the object.
    running: HashMap<String, Instant>,
}

impl Progress {
    /// A queue lives.
    pub fn lives(&self, kind: &'static str, now: Instant) {
        self.with(kind, now, |queue| queue.said = now);
    }

    /// A reconcile has begun.
    pub fn begun(&self, kind: &'static str, key: &str, now: Instant) {
        self.with(kind, now, |queue| {
            queue.running.insert(key.to_owned(), now);
        });
    }

    /// It has ended.
    pub fn ended(&self, kind: &'static str, key: &str, now: Instant) {
        self.with(kind, now, |queue| {
            queue.running.remove(key);
        });
    }

    /// A queue was told to end, and has.
    pub fn stopped(&self, kind: &'static str) {
        self.queues.lock().unwrap_or_else(PoisonError::into_inner).remove(kind);
    }

    /// What does not go on, in words.
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
                let passed = now.duration_since(queue.said).as_secs();
                format!("the queue of {kind} has done nothing for {passed} s")
            };
            running.or_else(|| late(&queue.said).then(silent))
        })
    }

    fn with(&self, kind: &'static str, now: Instant, change: impl FnOnce(&mut Queue)) {
        let mut queues = self.queues.lock().unwrap_or_else(PoisonError::into_inner);
        change(queues.entry(kind).or_insert_with(|| Queue { said: now, running: HashMap::new() }));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reconcile_that_does_not_end_and_a_queue_that_says_nothing_are_stuck() {
        let progress = Progress::default();
        let start = Instant::now();
        let at = |seconds: u64| start + Duration::from_secs(seconds);
        assert_eq!(progress.stuck(at(10_000)), None, "a replica that waits for the lease has no queues");
        progress.lives("Node", start);
        progress.begun("Node", "Node//n1", at(10));
        progress.lives("Node", at(300));
        assert_eq!(progress.stuck(at(310)), None);
        let said = progress.stuck(at(311)).expect("it runs for longer than any");
        assert_eq!(said, "the reconcile of Node//n1 has been running for 301 s");
        progress.ended("Node", "Node//n1", at(311));
        assert_eq!(progress.stuck(at(600)), None);
        let said = progress.stuck(at(601)).expect("nobody looks at it any more");
        assert_eq!(said, "the queue of Node has done nothing for 301 s");
        progress.lives("SSDPool", at(601));
        assert!(progress.stuck(at(601)).is_some(), "another one's life is no help");
        progress.stopped("Node");
        assert_eq!(progress.stuck(at(601)), None);
    }
}
