//! Stores of the control plane's small, slow-changing facts: nodes with their epochs and modes, members, tenants' budgets.
//! The directory is not among them; it is soft state.
//!
//! [`Store`] has the shape of etcd: revisions, transactions with conditions, ranges by prefix, watches that begin at a
//! revision and say so when that has been compacted away, leases with which entries go. [`EmbeddedStore`] keeps one file,
//! [`EtcdStore`] a prefix of an etcd cluster, [`MemoryStore`] forgets with the process. One conformance suite
//! (`tests/conformance.rs`, `tests/leases.rs`) runs over all of them. [`HeldLease`] keeps a lease alive for its holder.
//!
//! Both local stores hold their entries in memory (`state.rs`): thousands of records of a few hundred bytes. The file
//! is written before a transaction is answered and read only when the store is opened.
//!
//! Deliberately absent: nested transactions, values beyond 64 KiB.

mod contract;
mod embedded;
mod error;
mod etcd;
mod held;
mod lease;
mod local;
mod memory;
mod state;

pub use contract::{
    Condition, Event, KeyValue, Outcome, Range, Revision, Store, StoreFuture, Transaction, Watch, WatchBatch,
    WatchSource, Write,
};
pub use embedded::EmbeddedStore;
pub use error::{InvalidSetting, StoreError};
pub use etcd::{EtcdIdentity, EtcdSettings, EtcdStore, EtcdTls, EtcdUser};
pub use held::{HeldLease, Holding, Loss};
pub use lease::{Lease, LeaseId, TIME_TO_LIVE_MAX, TIME_TO_LIVE_MIN, TimeToLive};
pub use memory::MemoryStore;
pub use state::{HISTORY_REVISIONS_MAX, KEY_BYTES_MAX, LEASES_MAX, OPERATIONS_MAX, VALUE_BYTES_MAX};
