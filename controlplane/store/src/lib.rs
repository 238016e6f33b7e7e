//! Stores for the control plane's small, slow-changing data: nodes with epochs and modes, members, tenant
//! budgets. The directory is soft state and not stored.
//!
//! [`Store`] is modelled on etcd: revisions, conditional transactions, ranges by prefix, watches from a
//! revision, and leases with attached entries. [`EmbeddedStore`] uses one file, [`EtcdStore`] a prefix of an
//! etcd cluster, and [`MemoryStore`] process memory. One conformance suite (`tests/store/conformance.rs`,
//! `tests/store/leases.rs`) runs on all of them. [`LeaseGuard`] keeps a lease alive.
//!
//! The local stores hold their entries in memory: thousands of records of a few hundred bytes. The file is
//! written before a transaction is confirmed, and read only on opening.
//!
//! Not supported: nested transactions, values above 64 KiB.

mod contract;
mod embedded;
mod error;
mod etcd;
mod lease;
mod lease_guard;
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
pub use lease::{Lease, LeaseId, TIME_TO_LIVE_MAX, TIME_TO_LIVE_MIN, TimeToLive};
pub use lease_guard::{LeaseGuard, LeaseLoss, LeaseStatus};
pub use memory::MemoryStore;
pub use state::{HISTORY_REVISIONS_MAX, KEY_BYTES_MAX, LEASES_MAX, OPERATIONS_MAX, VALUE_BYTES_MAX};
