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
//! * [`credentials`]: the three files of a process, checked as a whole.
//! * [`tls`]: TLS 1.3 with certificates on both sides.
//! * [`blocking`] and [`records`]: the same for threads that wait by themselves, with each direction on its own.
//! * [`security`]: the `[tls]` section of configurations, and the accept and dial functions of all connections.
//! * [`access`]: the table of what an identity may do.
//!
//! A process trusts all authorities in `ca.crt`, so an authority is replaced in three steps: trust both, issue
//! with the new one, trust the new one only.

pub mod access;
pub mod authority;
pub mod blocking;
pub mod credentials;
pub mod name;
pub mod records;
pub mod security;
pub mod tls;

pub use authority::Authority;
pub use credentials::Credentials;
pub use name::{Identity, Role};
pub use security::{Security, Stream, TlsSettings};
pub use tls::{Expected, Tls};
