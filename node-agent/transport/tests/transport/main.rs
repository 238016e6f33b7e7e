//! Tests of the transports: the conformance suite of both, real sockets, the in-memory hub, and the protocol's document.

mod conformance;
#[path = "../harness/mod.rs"]
mod harness;
mod memory;
mod protocol_document;
mod tcp;
