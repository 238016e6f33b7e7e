//! Agent-to-agent transport: gets blocks from a peer into memory that the receiver chose, verified; offers a peer blocks to
//! get.
//!
//! Two implementations of [`Transport`] share one conformance suite (`tests/conformance.rs`):
//! * [`TcpTransport`]: framed TCP, blocking threads, one connection per peer and direction (`docs/PROTOCOL.md`);
//! * [`MemoryTransport`]: nodes of one [`MemoryHub`], virtual time, single steps, fault switches.
//!
//! The receiving side of both is the state machine of [`inbound`], the serving side that of [`outbound`].
//!
//! Sketch of the data path (2 MiB blocks, loopback at 6.3 GB/s, one core each): the sender gathers frame headers and
//! arena memory into one `sendmsg` of up to 4 MiB, with no copy of ours. The receiver takes 256 KiB at a time into a
//! buffer that stays in the second-level cache (the kernel's copy, ≈ 110 µs/MiB), and from there copies and checksums
//! in one pass with stores that go around the cache (≈ 55 µs/MiB): 160 µs/MiB, as much as the sender's copy out of
//! cold memory takes. So both cores are busy, and what is checksummed is what is stored: bytes in private memory,
//! which nobody can change between check and use.
//!
//! Invariants:
//! * a destination is written only between [`Transport::fetch`] and the block's last event, and no byte of a
//!   layer is written after that layer was reported;
//! * every fetched block ends in exactly one of: all layers reported, or `Failed`;
//! * every offer ends in exactly one of: `OfferAnswered`, or `OfferFailed`;
//! * no method of [`Transport`] waits for the network or for a peer;
//! * payload bytes in flight towards a requester never exceed the credit that it announced.
//!
//! Deliberately absent: retries (the core decides), encryption and authentication (they come with tenants),
//! RDMA.

#![forbid(unsafe_code)]

pub mod api;
pub mod bare;
mod counters;
mod error;
mod inbound;
pub mod limits;
mod memory;
mod outbound;
mod tcp;
mod wire;

pub use api::{
    EventSink, FetchBlock, FetchFailure, FetchRequest, IncomingOffer, IncomingRequest, OfferRequest,
    ServeLast, ServedObjects, Transport, TransportEvent,
};
pub use counters::TransportStats;
pub use error::{ErrorKind, TransportError};
pub use memory::{Fault, Link, MemoryHub, MemorySettings, MemoryTransport};
pub use tcp::{Congestion, TcpSettings, TcpTransport};
