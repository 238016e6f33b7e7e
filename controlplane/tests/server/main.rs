//! The control plane's services, called as agents call them: the generated gRPC clients against a member in this
//! process, on free loopback ports.

mod connection;
mod directory;
mod harness;
mod membership;
mod restart;
mod watches;
