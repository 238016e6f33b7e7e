//! Tests of the transports: the conformance suite of all, real sockets, the in-memory hub, composites, and the
//! protocol's document.

mod composite;
mod conformance;
#[path = "../harness/mod.rs"]
mod harness;
mod memory;
mod protocol_document;
mod tcp;
