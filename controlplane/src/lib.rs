//! One member of the Reprise control plane: membership and replica directory over gRPC, an admin endpoint,
//! and the store of node identities.
//!
//! ```text
//!            gRPC ──────────────┐                       ┌── store: names → numbers, epochs
//!   Register, Heartbeat, List,  │  membership ──────────┤
//!   Watch                       │      │                └── NodeTable (its own lock, held for microseconds)
//!                               │      ▼ forget, register
//!   Update, Lookup, Describe    │  directory service ────── Directory (readers-writer lock, taken in parts)
//!                               │      ▼ changes
//!   Report, tenants, Place,     │  placement ────────────── Ledgers, and the nodes' last reports (node table's lock)
//!   Route, SetNode              │      └──────────────────── Lookup of the other members
//!   Follow                      │  events ───────────────── ChangeLog (its own lock) ──► ZeroMQ: PUB, ROUTER
//!            HTTP: /metrics /healthz /readyz /nodes /directory
//! ```
//!
//! One thread serves all calls of a gRPC connection ([`grpc_server`]). A heartbeat takes only the lock of the
//! node table. Updates and lookups hold the directory's lock for at most [`directory::PART_KEYS`] keys (about
//! 0.2 ms) at a time, and let other tasks run in between.
//!
//! The library exists so that the binary and its tests share it; no other crate depends on it.
//!
//! Members register in the store and publish the map of hash slots ([`shards`]). Each holds the directory of
//! its own slots and the ledgers of the tenants in them ([`ledgers`], docs/adr/0002 and 0003).
//!
//! There is no authentication by design: listen on loopback or inside a trusted network.

pub mod admin;
pub mod admission;
mod answers;
pub mod background;
pub mod cluster;
pub mod config;
mod descriptors;
pub mod directory;
pub mod events;
mod former_protocol;
#[cfg(test)]
mod fuzz;
pub mod grpc_server;
pub mod identity;
pub mod ledgers;
pub mod membership;
pub mod metrics;
pub mod modes;
pub mod placement;
pub mod prefix_match;
#[cfg(test)]
mod protocol_limits;
pub mod registry;
pub mod server;
pub mod shards;
pub mod store_keys;
pub mod store_watch;
pub mod tenant_usage;
pub mod tenants;
