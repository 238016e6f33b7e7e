//! What can go wrong with a store, and what to do about it.

use std::path::PathBuf;

use crate::contract::Revision;

/// An error of a store. Each text says what to do.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// The call is wrong.
    #[error("invalid store request: {0}")]
    Invalid(String),
    /// The history a watch asks for is gone: read the range again and watch from its revision.
    #[error("history before revision {oldest} is compacted away: read the range again and watch from there")]
    Compacted {
        /// The oldest revision that can still be watched.
        oldest: Revision,
    },
    /// Another process (or another part of this one) has the file open.
    #[error(
        "store file {path} is in use by another process: stop the other control plane, or give this one a store.path of its own"
    )]
    InUse {
        /// The file.
        path: PathBuf,
    },
    /// The file is something else.
    #[error(
        "{path} is not a Reprise store ({reason}): point store.path at a Reprise store or at a path that does not exist yet"
    )]
    Foreign {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// The file was written by another version.
    #[error(
        "store file {path} has schema version {found}, this program reads and writes {supported}: run the version that wrote it, or start with a new store.path (agents will register again)"
    )]
    Schema {
        /// The file.
        path: PathBuf,
        /// Its version.
        found: u64,
        /// Ours.
        supported: u64,
    },
    /// The file is damaged.
    #[error(
        "store file {path} is damaged ({reason}): restore it from a backup, or remove it (node numbers start over, agents will register again)"
    )]
    Corrupt {
        /// The file.
        path: PathBuf,
        /// What was found.
        reason: String,
    },
    /// Nobody answers, or a member of etcd that cannot. A transaction may have been committed or not: read again.
    #[error(
        "the store does not answer ({reason}): it is tried again; if that goes on, look at etcd and at store.endpoints"
    )]
    Unavailable {
        /// What happened.
        reason: String,
    },
    /// The file system failed. The store takes no more writes until it is opened again.
    #[error("cannot {action} store file {path}: {reason}")]
    Io {
        /// The file.
        path: PathBuf,
        /// What was attempted.
        action: &'static str,
        /// The system's words.
        reason: String,
    },
}
