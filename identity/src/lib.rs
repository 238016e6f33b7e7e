//! Identities of processes: certificates, the authority that issues them, and mutual TLS.
//!
//! ```text
//! Authority ── issues ──▶ ca.crt, tls.crt, tls.key in a folder ──▶ Credentials ──▶ Tls ──▶ dial, accept ──▶ Identity
//!                                        │                             ▲
//!                                        └──── changed: read again ────┘
//! ```
//!
//! * [`name`]: what a certificate states, for example `reprise://prod/agent/node-7`.
//! * [`authority`]: creates an authority, and issues certificates.
//! * [`request`]: requests of processes that keep their keys to themselves, and their certificates.
//! * [`authority_folder`]: the authority of a cluster without Kubernetes: issues, renews, and is replaced in three steps.
//! * [`certificate`]: facts of a certificate, for people and metrics.
//! * [`credentials`]: the three files of a process, checked as a whole.
//! * [`follow`]: uses changed files while the process runs, and warns before they end.
//! * [`tls`]: TLS 1.3 with certificates on both sides.
//! * [`blocking`] and [`records`]: the same for threads that wait by themselves, with each direction on its own.
//! * [`security`]: the `[tls]` section of configurations, and the accept and dial functions of all connections.
//! * [`access`]: the table of what an identity may do.
//! * [`limits`]: which client a connection counts against, and how long it may stay.
//!
//! A process trusts all authorities in `ca.crt`, so an authority is replaced in three steps: trust both, issue
//! with the new one, trust the new one only.

pub mod access;
pub mod authority;
pub mod authority_folder;
pub mod blocking;
pub mod certificate;
pub mod credentials;
pub mod follow;
#[cfg(test)]
mod fuzz;
pub mod limits;
pub mod name;
pub mod records;
pub mod request;
pub mod security;
pub mod tls;
mod write;

pub use authority::Authority;
pub use credentials::Credentials;
pub use name::{Identity, Role};
pub use request::{NewRequest, SigningRequest};
pub use security::{Security, Stream, TlsSettings};
pub use tls::{Expected, Tls};
