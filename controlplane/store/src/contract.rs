//! The store as its users see it.

use std::fmt;
use std::future::Future;
use std::pin::Pin;

use crate::error::StoreError;
use crate::lease::{Lease, LeaseId, TimeToLive};

/// Counts the transactions that changed something, from 1. 0: nothing was ever written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Revision(pub u64);

/// An entry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeyValue {
    /// Its key.
    pub key: Vec<u8>,
    /// Its value.
    pub value: Vec<u8>,
    /// Revision that created it (after its last deletion).
    pub created: Revision,
    /// Revision of its last change.
    pub modified: Revision,
    /// Changes since it was created, from 1.
    pub version: u64,
    /// The lease with which it goes, if any.
    pub lease: Option<LeaseId>,
}

/// All conditions, checked at one revision; all writes, at the next one.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Transaction {
    /// What must hold.
    pub conditions: Vec<Condition>,
    /// What to do then; at most one write for each key.
    pub writes: Vec<Write>,
}

/// What must hold for a transaction to be committed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Condition {
    /// There is no such key.
    Absent {
        /// The key.
        key: Vec<u8>,
    },
    /// The entry was last changed by this revision.
    Modified {
        /// The key.
        key: Vec<u8>,
        /// The revision, as read.
        revision: Revision,
    },
}

/// A change of one entry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Write {
    /// Creates or replaces it.
    Put {
        /// The key, 1 to [`KEY_BYTES_MAX`](crate::KEY_BYTES_MAX) bytes.
        key: Vec<u8>,
        /// The value, at most [`VALUE_BYTES_MAX`](crate::VALUE_BYTES_MAX) bytes.
        value: Vec<u8>,
        /// The lease with which the entry goes from now on; `None` detaches it from one that it had.
        lease: Option<LeaseId>,
    },
    /// Removes it; nothing happens when it is not there.
    Delete {
        /// The key.
        key: Vec<u8>,
    },
}

/// What became of a transaction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Done and durable, at this revision (the current one when nothing changed).
    Committed(Revision),
    /// A condition does not hold; nothing was changed. Read again and decide anew.
    Conflict,
}

/// Entries by prefix.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Range {
    /// In key order.
    pub entries: Vec<KeyValue>,
    /// There are more than the limit allowed.
    pub more: bool,
    /// The revision at which this was so: watch from the one after it.
    pub revision: Revision,
}

/// A change, as a watch reports it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// The entry after its creation or change.
    Put(KeyValue),
    /// The entry is gone.
    Deleted {
        /// Its key.
        key: Vec<u8>,
        /// The revision that deleted it.
        revision: Revision,
    },
}

/// Whole revisions' events, in order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WatchBatch {
    /// The last revision this batch covers.
    pub revision: Revision,
    /// What changed under the prefix; never empty.
    pub events: Vec<Event>,
}

/// The future of a store's call. Dropping it does not undo the call.
pub type StoreFuture<'a, T> = Pin<Box<dyn Future<Output = Result<T, StoreError>> + Send + 'a>>;

/// A store of small facts; see the crate.
///
/// # Leases
/// A lease lives for its time to live after its grant and after each keep-alive. When it expires or is revoked, all
/// entries that belong to it are deleted in one revision, in the order of their keys, and watches report that like any
/// other deletion. (A lease without entries makes no revision.) An entry belongs to the lease of its last put, or to none.
///
/// * From its expiry on a lease is gone for good: keep-alives and puts are refused with [`StoreError::LeaseGone`], and
///   ids are not given out again. The local stores show none of its entries from that instant; etcd may show them
///   for some moments (it looks twice a second), so that their absence is the sign and not their age.
/// * When a store is away and comes back (the embedded store is opened again, etcd elects another leader), its leases
///   have their whole time to live again: no holder loses a lease because the store was away. The memory store
///   forgets them with everything else.
/// * A store may grant more time than was asked for (etcd: at least 1.5 of its election timeouts).
pub trait Store: Send + Sync + fmt::Debug {
    /// One entry.
    fn get(&self, key: &[u8]) -> StoreFuture<'_, Option<KeyValue>>;

    /// At most `limit` entries whose keys begin with `prefix`.
    fn range(&self, prefix: &[u8], limit: usize) -> StoreFuture<'_, Range>;

    /// Commits all writes if all conditions hold. When it answers `Committed`, the writes survive power loss (as far
    /// as the store survives anything). When the conditions hold and a lease is gone, it answers
    /// [`StoreError::LeaseGone`] and has changed nothing.
    fn transact(&self, transaction: Transaction) -> StoreFuture<'_, Outcome>;

    /// Follows the changes under a prefix, beginning with revision `from` (which may lie ahead). A reader that
    /// falls behind the compacted history gets [`StoreError::Compacted`] and must read the range again.
    fn watch(&self, prefix: &[u8], from: Revision) -> StoreFuture<'_, Watch>;

    /// Forgets the history before `oldest`; entries stay. Nothing happens when that is done already.
    fn compact(&self, oldest: Revision) -> StoreFuture<'_, ()>;

    /// The current revision.
    fn revision(&self) -> StoreFuture<'_, Revision>;

    /// Grants a lease, with at least this time to live. Whoever does not get the answer leaves a lease that expires by
    /// itself.
    fn grant(&self, time_to_live: TimeToLive) -> StoreFuture<'_, Lease>;

    /// Gives a lease its whole time to live again; [`StoreError::LeaseGone`] when it has expired or was revoked.
    fn keep_alive(&self, lease: LeaseId) -> StoreFuture<'_, ()>;

    /// Ends a lease, and the entries with it; [`StoreError::LeaseGone`] when it has ended already.
    fn revoke(&self, lease: LeaseId) -> StoreFuture<'_, ()>;
}

/// Changes as they come. Dropping it ends the watch.
pub struct Watch {
    source: Box<dyn WatchSource>,
}

/// Where a [`Watch`] gets its changes from; one for each kind of store.
pub trait WatchSource: Send {
    /// Waits for the next changes. Dropping the future loses none.
    fn next(&mut self) -> StoreFuture<'_, WatchBatch>;
}

impl Watch {
    /// A watch over a store's source.
    pub fn new(source: Box<dyn WatchSource>) -> Watch {
        Watch { source }
    }

    /// Waits for the next changes. Dropping the future loses none.
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
    /// The key that changed.
    pub fn key(&self) -> &[u8] {
        match self {
            Event::Put(entry) => &entry.key,
            Event::Deleted { key, .. } => key,
        }
    }

    /// The revision of the change.
    pub fn revision(&self) -> Revision {
        match self {
            Event::Put(entry) => entry.modified,
            Event::Deleted { revision, .. } => *revision,
        }
    }
}
