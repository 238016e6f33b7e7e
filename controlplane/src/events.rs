//! The changes of this member's directory, for whoever follows them: gRPC readers ([`service`]) and subscribers of KV events
//! ([`publisher`]).
//!
//! ```text
//!   directory, changed ──► Events: the log ──► Reading ──► gRPC stream, one for each reader
//!   under its lock          (a lock inside)       └──────► publisher ──► PUB, ROUTER
//! ```
//!
//! The log's lock is the innermost: it is taken under the directory's by who changes that, so records are in the order of the
//! changes, and by readers for one part. Nobody waits for a reader: it is woken when the log has grown, and when it comes
//! too late, it gets a snapshot (`reprise_controlplane_core::Follower`).
//!
//! A reader costs its follower and one message of at most 1,024 changes (24 KiB) and those that gRPC holds (a stream window,
//! 1 MiB); the log is shared.

pub(crate) mod format;
mod publisher;
pub(crate) mod replay;
pub mod service;
mod sockets;
mod zmtp;

pub use publisher::Publisher;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use reprise_controlplane_core::{Follower, Log, LogId, Operation, Position, Scope, Source, Step, Told};
use reprise_policy::{BlockKey, NodeId};
use tokio::sync::{Semaphore, watch};

use crate::cluster::Cluster;

/// Changes in one message: 19 KiB.
pub(crate) const PART_CHANGES: usize = 1024;
/// Readers that read the directory at this instant. One reads ten million entries a second; more would only take workers
/// from heartbeats.
const READERS_OF_THE_DIRECTORY: usize = 1;

/// See the module.
#[derive(Debug)]
pub struct Events {
    log: Mutex<Log>,
    end: watch::Sender<End>,
    turns: Semaphore,
}

/// How far the log goes, for those who wait.
#[derive(Clone, Copy, Debug)]
enum End {
    /// Up to this number.
    At(u64),
    /// The member is going away.
    Closing,
}

/// One reader.
#[derive(Debug)]
pub struct Reading {
    cluster: Arc<Cluster>,
    follower: Follower,
    end: watch::Receiver<End>,
}

impl Events {
    /// An empty log of a new life, in at most `bytes_max`.
    pub fn new(bytes_max: usize) -> Events {
        let log = Log::new(LogId(rand::random()), bytes_max);
        let end = watch::Sender::new(End::At(0));
        Events { log: Mutex::new(log), end, turns: Semaphore::new(READERS_OF_THE_DIRECTORY) }
    }

    /// These changes of a node were applied; how many they were. Call it under the directory's lock.
    pub fn changed(&self, node: NodeId, changes: impl IntoIterator<Item = (BlockKey, Operation)>) -> u64 {
        let mut log = self.log();
        let count = log.changed(node, changes);
        self.grown(&log);
        count
    }

    /// All that the directory held of this scope is void: an inventory is replaced, a node is forgotten, or a slot is another
    /// member's. Call it under the directory's lock, before what replaces it.
    pub fn cleared(&self, scope: Scope) {
        let mut log = self.log();
        log.cleared(scope);
        self.grown(&log);
    }

    /// Ends all readings.
    pub fn close(&self) {
        self.end.send_replace(End::Closing);
    }

    fn grown(&self, log: &Log) {
        self.end.send_modify(|end| {
            if let End::At(next) = end {
                *next = log.end().next;
            }
        });
    }

    /// Each record is whole, so a poisoned lock is as good as any.
    fn log(&self) -> MutexGuard<'_, Log> {
        self.log.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Reading {
    /// A reader that knows everything before `from`, or nothing; parts have `part_max` changes.
    pub fn new(cluster: Arc<Cluster>, from: Option<Position>, part_max: usize) -> Reading {
        let end = cluster.events.end.subscribe();
        Reading { cluster, follower: Follower::new(from, part_max), end }
    }

    /// The next message; none when the member is going away. Nothing is lost when the wait is given up.
    pub async fn next(&mut self) -> Option<Told> {
        loop {
            if matches!(*self.end.borrow_and_update(), End::Closing) {
                return None;
            }
            match self.follower.source() {
                Source::Directory => return Some(self.read_directory().await),
                Source::Log => {
                    let step = self.follower.read_log(&self.cluster.events.log());
                    match step {
                        Step::Tell(told) => return Some(told),
                        Step::GoOn => {}
                        Step::Wait => self.end.changed().await.ok()?,
                    }
                }
            }
        }
    }

    async fn read_directory(&mut self) -> Told {
        let turn = self.cluster.events.turns.acquire().await.expect("the semaphore is never closed");
        let told = self.follower.read_directory(&self.cluster.directory());
        drop(turn);
        told
    }
}
