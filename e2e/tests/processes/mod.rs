//! Agents, members and engines as processes on one machine: their services, the faults they survive, and
//! their errors.

mod admin_commands;
mod agent;
mod attacks;
mod check;
mod client_process;
mod clocks;
mod control_plane;
mod corruption;
mod descriptors;
mod disk_stall;
mod engine_states;
mod engines;
mod events;
mod extent_blocks;
mod extents;
mod failure_report;
mod floods;
mod kill;
mod members;
mod node_removal;
mod nodes;
mod observability;
mod partitions;
mod peers;
mod placement;
mod prefix_chains;
mod pressure;
mod rings;
mod sessions;
mod shard_owners;
mod slack;
mod start_errors;
mod tenants;
mod user_nvme;
