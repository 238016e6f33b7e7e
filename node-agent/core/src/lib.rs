//! Pure decision core of the node agent. It decides on I/O and never performs it.
//!
//! [`AgentCore::apply`](agent::AgentCore::apply) takes one [`Event`](event::Event) and the current time, and
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
//! [`OwnerQuery`](owner_query::OwnerQuery) divides lookups and placement requests among the owners of the keys.
//!
//! Out of scope: block payloads (the runtime moves them), sockets, files and metrics libraries.

pub mod agent;
pub mod announcer;
pub mod backoff;
pub mod directives;
pub mod effect;
pub mod event;
pub mod heartbeats;
pub mod outbox;
pub mod owner_query;
pub mod pool;
pub mod quota_grants;
pub mod registrar;
