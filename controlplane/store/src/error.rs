//! What can go wrong with a store, and what to do about it.

use std::path::PathBuf;

use crate::contract::Revision;

/// A setting that cannot work.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{field}: {reason}")]
pub struct InvalidSetting {
    /// Its name in the configuration.
    pub field: &'static str,
    /// What is wrong, and what to write instead.
    pub reason: String,
}

/// An error of a store. Each text says what to do.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// The call is wrong.
    #[error("invalid store request: {0}")]
    Invalid(String),
    /// The store cannot be opened with these settings.
    #[error(transparent)]
    Setting(#[from] InvalidSetting),
    /// The history a watch asks for is gone: read the range again and watch from its revision.
    #[error("history before revision {oldest} is compacted away: read the range again and watch from there")]
    Compacted {
        /// The oldest revision that can still be watched.
        oldest: Revision,
    },
    /// The store is not the one that it was: it was restored from a backup, or emptied. What is known from before may not be
    /// so any more: start anew. A transaction may have been committed.
    #[error(
        "the store is another than before ({reason}): it was restored from a backup or emptied, and this process must be started again"
    )]
    Replaced {
        /// By what it shows.
        reason: String,
    },
    /// The lease has expired or was revoked; its entries went with it.
    #[error(
        "the lease is gone (expired or revoked), and its entries with it: have another granted and put them again"
    )]
    LeaseGone,
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
    /// The store was written by another version.
    #[error(
        "the store at {place} has schema version {found}, this program reads and writes {supported}: run the version that wrote it, or start with a new store.path or store.prefix (agents will register again)"
    )]
    Schema {
        /// The file, or the key in etcd that says so.
        place: String,
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
    /// etcd refuses our user: trying again does not help before somebody has changed something.
    #[error(
        "etcd refuses this control plane's user ({reason}): check store.user (name and password_file), and that the user has a role that may read and write store.prefix"
    )]
    Denied {
        /// etcd's words.
        reason: String,
    },
    /// One of us does not trust the other's certificate: trying again does not help before somebody has changed something.
    #[error(
        "etcd and this control plane do not trust each other ({reason}): store.tls.ca_file must hold the CA of etcd's certificate, store.tls.server_name (or the host in store.endpoints) must be named in it, and store.tls.cert_file must be signed by the CA that etcd asks for (--trusted-ca-file)"
    )]
    Untrusted {
        /// What the handshake ended with.
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
