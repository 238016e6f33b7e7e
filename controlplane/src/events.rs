//! Changes of this member's directory, for gRPC readers ([`service`]) and subscribers of KV events
//! ([`publisher`]).
//!
//! ```text
//!   directory changes ──► Events: change log ──► ChangeReader ──► gRPC stream, one per reader
//!   (under its lock)        (own lock)                └─────────► publisher ──► PUB, ROUTER
//! ```
//!
//! The log's lock is innermost. Writers take it under the directory's lock, so records have the order of the
//! changes; readers take it for one part at a time. Writers never wait for readers. A growing log wakes its
//! readers, and a reader that fell behind gets a snapshot (`reprise_controlplane_core::Follower`).
//!
//! A reader costs its follower, one message of at most 1,024 changes (24 KiB), and the messages in gRPC's
//! stream window (1 MiB). All readers share the log.

pub(crate) mod format;
#[cfg(test)]
pub(crate) mod fuzz;
mod publisher;
pub(crate) mod replay;
pub mod service;
mod sockets;
mod zmtp;

pub use publisher::Publisher;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use reprise_controlplane_core::{
    ChangeLog, Follower, FollowerMessage, LogId, Operation, Position, Scope, Source, Step,
};
use reprise_policy::{BlockKey, NodeId};
use tokio::sync::{Semaphore, watch};

use crate::cluster::Cluster;

/// Changes in one message, which has 19 KiB.
pub(crate) const PART_CHANGES: usize = 1024;
/// Snapshots that read the directory at once. One reads ten million entries a second; more would delay
/// heartbeats.
const SNAPSHOT_READS_MAX: usize = 1;

/// The change log, and the readers that wait for it.
#[derive(Debug)]
pub struct Events {
    log: Mutex<ChangeLog>,
    end: watch::Sender<LogEnd>,
    snapshot_reads: Semaphore,
}

/// End of the log, as readers observe it.
#[derive(Clone, Copy, Debug)]
enum LogEnd {
    /// Number of the next record.
    At(u64),
    /// The member shuts down.
    Closing,
}

/// A reader of the changes.
#[derive(Debug)]
pub struct ChangeReader {
    cluster: Arc<Cluster>,
    follower: Follower,
    end: watch::Receiver<LogEnd>,
}

impl Events {
    /// Creates an empty log with a new id that takes at most `bytes_max`.
    pub fn new(bytes_max: usize) -> Events {
        let log = ChangeLog::new(LogId(rand::random()), bytes_max);
        let end = watch::Sender::new(LogEnd::At(0));
        Events { log: Mutex::new(log), end, snapshot_reads: Semaphore::new(SNAPSHOT_READS_MAX) }
    }

    /// Logs changes of a node; returns their number. Call it under the directory's lock.
    pub fn record_changes(
        &self,
        node: NodeId,
        changes: impl IntoIterator<Item = (BlockKey, Operation)>,
    ) -> u64 {
        let mut log = self.log();
        let count = log.record_changes(node, changes);
        self.notify_readers(&log);
        count
    }

    /// Logs that the replicas in `scope` are invalid: an inventory was replaced, a node was forgotten, or a
    /// slot moved to another member. Call it under the directory's lock, before logging the replacement.
    pub fn record_clearing(&self, scope: Scope) {
        let mut log = self.log();
        log.record_clearing(scope);
        self.notify_readers(&log);
    }

    /// Ends all readers of the log.
    pub fn close(&self) {
        self.end.send_replace(LogEnd::Closing);
    }

    fn notify_readers(&self, log: &ChangeLog) {
        self.end.send_modify(|end| {
            if let LogEnd::At(next) = end {
                *next = log.end().next;
            }
        });
    }

    /// Locks the log. A poisoned lock is usable, because a panic cannot leave a record half written.
    fn log(&self) -> MutexGuard<'_, ChangeLog> {
        self.log.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ChangeReader {
    /// Creates a reader that knows all changes before `from`, or none. Parts have at most `part_max` changes.
    pub fn new(cluster: Arc<Cluster>, from: Option<Position>, part_max: usize) -> ChangeReader {
        let end = cluster.events.end.subscribe();
        ChangeReader { cluster, follower: Follower::new(from, part_max), end }
    }

    /// Returns the next message, or `None` when the member shuts down. Cancel-safe.
    pub async fn next(&mut self) -> Option<FollowerMessage> {
        loop {
            if matches!(*self.end.borrow_and_update(), LogEnd::Closing) {
                return None;
            }
            match self.follower.source() {
                Source::Directory => return Some(self.read_directory().await),
                Source::ChangeLog => {
                    let step = self.follower.read_log(&self.cluster.events.log());
                    match step {
                        Step::Send(message) => return Some(message),
                        Step::Continue => {}
                        Step::Wait => self.end.changed().await.ok()?,
                    }
                }
            }
        }
    }

    async fn read_directory(&mut self) -> FollowerMessage {
        let permit =
            self.cluster.events.snapshot_reads.acquire().await.expect("the semaphore is never closed");
        let message = self.follower.read_directory(&self.cluster.directory());
        drop(permit);
        message
    }
}
