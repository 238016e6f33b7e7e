//! Agents, members and engines as processes, on one machine: what they serve, what they survive, what they refuse.
//!
//! One program, since each takes as long to link as the tests in it to run.

mod agent;
mod chains;
mod check;
mod clocks;
mod control_plane;
mod corruption;
mod descriptors;
mod engines;
mod events;
mod failures;
mod floods;
mod forget;
mod kill;
mod members;
mod nodes;
mod owners;
mod partitions;
mod peers;
mod placement;
mod pressure;
mod seen;
mod sessions;
mod stalled;
mod start;
mod tenants;
