//! The control plane's services, called like agents do: generated gRPC clients and a member in this process,
//! on free loopback ports.

mod connection;
mod directory;
mod events;
mod fatal_errors;
mod harness;
mod kv_events;
mod membership;
mod node_removal;
mod placement;
mod restart;
mod several_members;
mod tenant_usage;
mod tenants;
mod watches;
