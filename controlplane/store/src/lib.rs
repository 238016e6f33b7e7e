//! Stores of the control plane's small, slow-changing facts: node identities and epochs today, shard maps and tenants
//! to come. The directory is not among them; it is soft state.
//!
//! [`Store`] has the shape of etcd: revisions, transactions with conditions, ranges by prefix, watches that begin at a
//! revision and say so when that has been compacted away. [`EmbeddedStore`] keeps one file, [`EtcdStore`] a prefix of an
//! etcd cluster, [`MemoryStore`] forgets with the process. One conformance suite (`tests/conformance.rs`) runs over all of them.
//!
//! Both local stores hold their entries in memory (`state.rs`): thousands of records of a few hundred bytes. The file
//! is written before a transaction is answered and read only when the store is opened.
//!
//! Deliberately absent: leases (liveness is the membership's), nested transactions, values beyond 64 KiB.

mod contract;
mod embedded;
mod error;
mod etcd;
mod memory;
mod shared;
mod state;

pub use contract::{
    Condition, Event, KeyValue, Outcome, Range, Revision, Store, StoreFuture, Transaction, Watch, WatchBatch,
    WatchSource, Write,
};
pub use embedded::EmbeddedStore;
pub use error::StoreError;
pub use etcd::{EtcdSettings, EtcdStore};
pub use memory::MemoryStore;
pub use state::{HISTORY_REVISIONS_MAX, KEY_BYTES_MAX, OPERATIONS_MAX, VALUE_BYTES_MAX};
