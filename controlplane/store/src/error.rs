//! Errors of the store, with their remedies.

use std::path::PathBuf;

use crate::contract::Revision;

/// An invalid setting of the store.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{field}: {reason}")]
pub struct InvalidSetting {
    /// Name in the configuration, `table.key`.
    pub field: &'static str,
    /// Reason, and the valid values.
    pub reason: String,
}

/// An error of a store. Each message states the remedy.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// The request is invalid.
    #[error("invalid store request: {0}")]
    Invalid(String),
    /// The store cannot be opened with these settings.
    #[error(transparent)]
    Setting(#[from] InvalidSetting),
    /// The requested history was compacted: read the range again and watch from its revision.
    #[error("history before revision {oldest} is compacted away: read the range again and watch from there")]
    Compacted {
        /// Oldest revision that can still be watched.
        oldest: Revision,
    },
    /// The store was restored from a backup or emptied. Cached state may be invalid, so the process must
    /// restart. The transaction may have been committed.
    #[error("the store was restored from a backup or emptied ({reason}): restart this process")]
    Replaced {
        /// Evidence of the replacement.
        reason: String,
    },
    /// The lease expired or was revoked, and its entries were deleted.
    #[error(
        "the lease has expired or was revoked, and its entries are deleted: get a new lease and write them again"
    )]
    LeaseGone,
    /// Another process, or another part of this one, has opened the file.
    #[error(
        "store file {path} is in use by another process: stop the other control plane, or set another store.path"
    )]
    InUse {
        /// Path of the file.
        path: PathBuf,
    },
    /// The file is not a store.
    #[error(
        "{path} is not a Reprise store ({reason}): set store.path to a Reprise store or to a path that does not exist"
    )]
    Foreign {
        /// Path of the file.
        path: PathBuf,
        /// Reason why it is not a store.
        reason: String,
    },
    /// The store was written by another version.
    #[error(
        "the store at {place} has schema version {found}, but this program supports {supported}: run the version that wrote it, or set a new store.path or store.prefix (agents will register again)"
    )]
    Schema {
        /// Path of the file, or key in etcd.
        place: String,
        /// Schema version of the store.
        found: u64,
        /// Schema version of this program.
        supported: u64,
    },
    /// The file is damaged.
    #[error(
        "store file {path} is damaged ({reason}): restore it from a backup, or remove it (node numbers start over, agents will register again)"
    )]
    Corrupt {
        /// Path of the file.
        path: PathBuf,
        /// Description of the damage.
        reason: String,
    },
    /// The store does not answer. The transaction may or may not have been committed: read again.
    #[error("the store does not answer ({reason}): retrying; if it persists, check etcd and store.endpoints")]
    Unavailable {
        /// Reason why it does not answer.
        reason: String,
    },
    /// etcd rejects the configured user; retrying does not help.
    #[error(
        "etcd rejects this control plane's user ({reason}): check store.user (name and password_file), and that the user has a role with read and write permission for store.prefix"
    )]
    Denied {
        /// Message of etcd.
        reason: String,
    },
    /// The TLS handshake fails because a certificate is not trusted; retrying does not help.
    #[error(
        "etcd and this control plane do not trust each other ({reason}): store.tls.ca_file must hold the CA of etcd's certificate, store.tls.server_name (or the host in store.endpoints) must be named in it, and store.tls.cert_file must be signed by etcd's client CA (--trusted-ca-file)"
    )]
    Untrusted {
        /// Error of the handshake.
        reason: String,
    },
    /// The file system failed. The store rejects writes until it is reopened.
    #[error("cannot {action} store file {path}: {reason}")]
    Io {
        /// Path of the file.
        path: PathBuf,
        /// Attempted operation.
        action: &'static str,
        /// Message of the operating system.
        reason: String,
    },
}
