//! The store interface: data types, transactions, leases and watches.

use std::fmt;
use std::future::Future;
use std::pin::Pin;

use crate::error::StoreError;
use crate::lease::{Lease, LeaseId, TimeToLive};

/// Number of transactions that changed something, starting at 1; 0 before the first write.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Revision(pub u64);

/// An entry of the store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeyValue {
    /// Key, not empty.
    pub key: Vec<u8>,
    /// Value; may be empty.
    pub value: Vec<u8>,
    /// Revision that created the entry since its last deletion.
    pub created: Revision,
    /// Revision of the last change.
    pub modified: Revision,
    /// Number of changes since creation, from 1.
    pub version: u64,
    /// Lease with which the entry is deleted, if any.
    pub lease: Option<LeaseId>,
}

/// Conditions checked at one revision, and writes applied at the next one.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Transaction {
    /// Conditions that must all hold.
    pub conditions: Vec<Condition>,
    /// Writes to apply; at most one per key.
    pub writes: Vec<Write>,
}

/// A condition for committing a transaction.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Condition {
    /// The key does not exist.
    Absent {
        /// Key of the missing entry.
        key: Vec<u8>,
    },
    /// The entry exists and was last modified by this revision.
    Modified {
        /// Key of the entry.
        key: Vec<u8>,
        /// Revision of the last change, as read.
        revision: Revision,
    },
}

/// A write of one entry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Write {
    /// Creates or replaces the entry.
    Put {
        /// Key of 1 to [`KEY_BYTES_MAX`](crate::KEY_BYTES_MAX) bytes.
        key: Vec<u8>,
        /// Value of at most [`VALUE_BYTES_MAX`](crate::VALUE_BYTES_MAX) bytes.
        value: Vec<u8>,
        /// Lease that the entry is attached to; `None` detaches it from its lease.
        lease: Option<LeaseId>,
    },
    /// Deletes the entry; no effect if it does not exist.
    Delete {
        /// Key of the entry.
        key: Vec<u8>,
    },
}

/// Outcome of a transaction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Committed durably at this revision, or without changes at the current one.
    Committed(Revision),
    /// A condition does not hold; nothing was changed. Read again and retry.
    Conflict,
}

/// Entries with a common prefix.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Range {
    /// Entries in key order.
    pub entries: Vec<KeyValue>,
    /// Whether there are more entries than the limit.
    pub more: bool,
    /// Revision at which this was current; watch from the next one.
    pub revision: Revision,
}

/// A change reported by a watch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// A created or changed entry, after the change.
    Put(KeyValue),
    /// A deleted entry.
    Deleted {
        /// Key of the entry.
        key: Vec<u8>,
        /// Revision that deleted it.
        revision: Revision,
    },
}

/// Events of complete revisions, in order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WatchBatch {
    /// Last revision that this batch covers.
    pub revision: Revision,
    /// Changes under the prefix; never empty.
    pub events: Vec<Event>,
}

/// Future of a store call. Dropping it does not undo the call.
pub type StoreFuture<'a, T> = Pin<Box<dyn Future<Output = Result<T, StoreError>> + Send + 'a>>;

/// A store of small facts.
///
/// # Leases
/// A lease lives for its time to live after its grant and after each keep-alive. When it expires or is
/// revoked, all attached entries are deleted in one revision, in key order. Watches report these deletions
/// like any others. A lease without entries makes no revision. An entry belongs to the lease of its last put,
/// or to none.
///
/// * An expired lease never returns: keep-alives and puts fail with [`StoreError::LeaseGone`], and ids are
///   not reused. The local stores hide its entries from that instant on. etcd may show them a little longer,
///   because it checks twice a second; so rely on an entry's absence, not on its age.
/// * After an interruption (the embedded store is reopened, etcd elects another leader), leases have their
///   whole time to live again. No holder loses a lease because the store was down. The memory store loses its
///   leases with everything else.
/// * A store may grant a longer time than requested (etcd: at least 1.5 of its election timeouts).
pub trait Store: Send + Sync + fmt::Debug {
    /// Reads the entry of a key.
    fn get(&self, key: &[u8]) -> StoreFuture<'_, Option<KeyValue>>;

    /// Reads at most `limit` entries whose keys start with `prefix`.
    fn range(&self, prefix: &[u8], limit: usize) -> StoreFuture<'_, Range>;

    /// Commits all writes if all conditions hold. After `Committed`, the writes survive power loss, if the
    /// store is durable. If the conditions hold but a lease is gone, returns [`StoreError::LeaseGone`]
    /// without any change.
    fn transact(&self, transaction: Transaction) -> StoreFuture<'_, Outcome>;

    /// Watches the changes under a prefix, starting at revision `from`, which may be in the future. A reader
    /// that falls behind the compacted history gets [`StoreError::Compacted`] and must read the range again.
    fn watch(&self, prefix: &[u8], from: Revision) -> StoreFuture<'_, Watch>;

    /// Deletes the history before `oldest`, but not entries. No effect if already compacted.
    fn compact(&self, oldest: Revision) -> StoreFuture<'_, ()>;

    /// Reads the current revision.
    fn revision(&self) -> StoreFuture<'_, Revision>;

    /// Grants a lease with at least this time to live. If the reply is lost, the lease expires by itself.
    fn grant(&self, time_to_live: TimeToLive) -> StoreFuture<'_, Lease>;

    /// Extends a lease by its whole time to live; [`StoreError::LeaseGone`] if it expired or was revoked.
    fn keep_alive(&self, lease: LeaseId) -> StoreFuture<'_, ()>;

    /// Revokes a lease and deletes its entries; [`StoreError::LeaseGone`] if it has already ended.
    fn revoke(&self, lease: LeaseId) -> StoreFuture<'_, ()>;
}

/// A stream of changes. Dropping it ends the watch.
pub struct Watch {
    source: Box<dyn WatchSource>,
}

/// Source of a [`Watch`], implemented by each store.
pub trait WatchSource: Send {
    /// Waits for the next changes. Cancel-safe.
    fn next(&mut self) -> StoreFuture<'_, WatchBatch>;
}

impl Watch {
    /// Creates a watch over a store's source.
    pub fn new(source: Box<dyn WatchSource>) -> Watch {
        Watch { source }
    }

    /// Waits for the next changes. Cancel-safe.
    pub async fn next(&mut self) -> Result<WatchBatch, StoreError> {
        self.source.next().await
    }
}

impl fmt::Debug for Watch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Watch").finish_non_exhaustive()
    }
}

impl fmt::Display for Revision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

impl Event {
    /// Key of the changed entry.
    pub fn key(&self) -> &[u8] {
        match self {
            Event::Put(entry) => &entry.key,
            Event::Deleted { key, .. } => key,
        }
    }

    /// Revision of the change.
    pub fn revision(&self) -> Revision {
        match self {
            Event::Put(entry) => entry.modified,
            Event::Deleted { revision, .. } => *revision,
        }
    }
}
