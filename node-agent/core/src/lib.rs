//! The pure core of the node agent: what to do, decided without doing it.
//!
//! [`AgentCore::apply`](agent::AgentCore::apply) takes one [`Event`](event::Event) at an instant and returns
//! [`Effect`](effect::Effect)s; the runtime executes them and reports back with events. No clock, no
//! randomness, no I/O, no threads: tests drive the code of the agent with synthetic events.
//!
//! [`Outbox`](outbox::Outbox) is the other half of the agent's decisions: what the directory is told, in which order.
//!
//! [`Orders`](orders::Orders): what is said of tenants, and which orders about them are taken.
//!
//! Deliberately absent: bytes of blocks (the runtime moves them), sockets, files, metrics libraries.

pub mod agent;
pub mod backoff;
pub mod directions;
pub mod effect;
pub mod event;
pub mod orders;
pub mod outbox;
pub mod pool;
