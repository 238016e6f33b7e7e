//! The control plane's services, called as agents call them: the generated gRPC clients against a member in this
//! process, on free loopback ports.

mod connection;
mod directory;
mod events;
mod failing;
mod forgetting;
mod harness;
mod holdings;
mod kv_events;
mod membership;
mod placement;
mod restart;
mod several;
mod tenants;
mod watches;
