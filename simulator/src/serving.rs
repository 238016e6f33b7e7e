//! The timed world: engines, tiers and channels with the times of real hardware.
//!
//! ```text
//!  workload ─▶ engine: rotation, batch, step ─▶ compute, HBM
//!                │ blocks                         link, DRAM, NVMe, network, cold store
//!                ▼                                   ▲
//!              tiers: HBM ⇄ DRAM ⇄ NVMe ── loads ────┘      policies: the crate reprise-policy, as in production
//! ```
//!
//! The world is a discrete-event simulation with its own queue ([`events`]) in nanoseconds. It has no clock, no threads
//! and no hash maps, so equal inputs give equal outputs, byte by byte.
//!
//! [`reproduce`] runs the experiments of papers and compares the results with the published figures. [`accuracy`] has
//! the workloads that are compared with a real engine.

pub mod accuracy;
pub mod channel;
pub mod costs;
pub mod engine;
pub mod events;
pub mod fabric;
pub mod fleet;
mod lookahead;
mod prefix_loads;
pub mod profiles;
pub mod random;
pub mod reproduce;
pub mod statistics;
mod steps;
pub mod tiers;
pub mod workload;
