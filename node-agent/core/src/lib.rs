//! Pure decision core of the node agent. It decides on I/O and never performs it.
//!
//! [`AgentCore::apply`] takes one [`Event`](event::Event) and the current time, and
//! returns [`Effect`](effect::Effect)s. The runtime executes the effects and reports their results as further
//! events. The crate has no clock, no randomness, no I/O and no threads, so tests drive the agent's own code
//! with synthetic events.
//!
//! [`Outbox`](outbox::Outbox) decides which announcements the directory receives, and in which order.
//!
//! [`QuotaGrants`](quota_grants::QuotaGrants) decides what the node reports about its tenants and which quota
//! grants it accepts.
//!
//! [`Registrar`](registrar::Registrar), [`Heartbeats`](heartbeats::Heartbeats) and
//! [`Announcer`](announcer::Announcer) decide how the agent talks to one member of the control plane.
//! [`Home`](home::Home) chooses the member that lists the others, and [`Members`](members::Members) keeps a link
//! to each of them.
//! [`OwnerQuery`](owner_query::OwnerQuery) divides lookups and placement requests among the owners of the keys.
//!
//! Out of scope: block payloads (the runtime moves them), sockets, files and metrics libraries.

#[macro_use]
mod ensure;

pub mod announcer;
mod audit;
pub mod backoff;
mod begun;
mod cache;
mod context;
mod core;
mod counters;
pub mod directives;
pub mod effect;
mod erasures;
pub mod event;
pub mod extents;
pub mod heartbeats;
pub mod home;
pub mod limits;
mod load;
pub mod members;
mod namespaces;
pub mod outbox;
pub mod owner_query;
pub mod pool;
mod prefetch;
mod quota;
pub mod quota_grants;
mod regions;
pub mod registrar;
mod replicate;
pub mod report_schedule;
mod retention;
mod save;
mod serve;
mod settings;
mod slab;
mod timers;
mod transfer;
mod usage;
mod waiter;

pub use crate::cache::{
    BlockDescription, BlockOrigin, DramCopy, TenantBlocks, TenantCounts, TenantQuotas, TenantUsage,
};
pub use crate::core::AgentCore;
pub use crate::counters::Counters;
pub use crate::settings::{PrefetchSettings, Settings};
pub use crate::usage::NodeUsage;
