//! The control plane of Reprise, one member: membership and replica directory over gRPC, an admin endpoint, and the
//! store of node identities.
//!
//! ```text
//!            gRPC ──────────────┐                       ┌── store: names → numbers, epochs
//!   Register, Heartbeat, List,  │  membership ──────────┤
//!   Watch                       │      │                └── Members   (its own lock, held for microseconds)
//!                               │      ▼ forget, register
//!   Update, Lookup, Describe    │  directory service ────── Directory (readers-writer lock, taken in parts)
//!                               │      ▼ changes
//!   Report, tenants, Place,     │  placement ────────────── Ledgers, and what nodes said last (the members' lock)
//!   Route, SetNode              │      └──────────────────── Lookup of the other members
//!   Follow                      │  events ───────────────── Log (its own lock) ──► ZeroMQ: PUB, ROUTER
//!            HTTP: /metrics /healthz /readyz /nodes /directory
//! ```
//!
//! Each gRPC connection has one thread that does everything for it ([`fronts`]). A heartbeat takes only the members' lock.
//! Updates and lookups take the directory's lock in parts of at most [`directory::PART_KEYS`] keys (about 0.2 ms) and let
//! other tasks run in between.
//!
//! This is a library only so that the binary and its tests share it; no other crate depends on it.
//!
//! Members register in the store and publish the map of hash slots ([`shards`]); each has the directory of its own slots and
//! the ledgers of the tenants in them ([`ledgers`], docs/adr/0002 and 0003).
//!
//! Deliberately absent: authentication (listen on loopback or inside a trusted network).

pub mod admin;
pub mod background;
pub mod chains;
pub mod cluster;
pub mod config;
mod descriptors;
pub mod directory;
#[cfg(test)]
mod document;
pub mod events;
pub mod followed;
pub mod fronts;
pub mod holdings;
pub mod identity;
pub mod keys;
pub mod ledgers;
pub mod membership;
pub mod metrics;
pub mod modes;
pub mod placement;
pub mod registry;
pub mod server;
pub mod shards;
pub mod tenants;
pub mod turns;
