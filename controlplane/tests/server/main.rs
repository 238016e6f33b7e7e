//! The control plane's services, called like agents do: generated gRPC clients and a member in this process,
//! on free loopback ports. And the control plane as a process, alone and with other members.

#[path = "../../store/tests/store/authority/mod.rs"]
mod authority;
mod binary;
mod concurrent_registration;
mod connection;
mod directory;
mod events;
mod fatal_errors;
mod harness;
mod kv_events;
mod members;
mod membership;
mod node_removal;
mod placement;
mod process;
mod restart;
mod several_members;
mod tenant_usage;
mod tenants;
mod watches;
