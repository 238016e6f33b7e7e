//! Agent-to-agent transport: fetches verified blocks from a peer into memory chosen by the receiver, and
//! offers blocks to a peer.
//!
//! The implementations of [`Transport`] share one conformance suite (`tests/conformance`):
//!
//! * [`TcpTransport`]: framed TCP, blocking threads, one connection per peer and direction
//!   (`docs/PROTOCOL.md`);
//! * [`MemoryTransport`]: nodes of one [`MemoryHub`], virtual time, single steps, fault switches;
//! * [`CompositeTransport`]: several transports, one of which is chosen for each peer.
//!
//! The receiving side of the first two is the state machine of [`inbound`], the serving side that of [`outbound`].
//!
//! Cost of the data path (2 MiB blocks, loopback at 6.3 GB/s, one core each): the sender gathers frame
//! headers and arena memory into one `sendmsg` of up to 4 MiB, without a copy in user space. The receiver
//! reads up to 256 KiB at a time into a buffer that stays in the second-level cache (the kernel's copy, ≈ 110
//! µs/MiB). From there it copies and checksums in one pass with non-temporal stores (≈ 55 µs/MiB): 160
//! µs/MiB, as much as the sender's copy out of cold memory. Both cores are therefore busy. The checksummed
//! bytes are the stored bytes: they are in private memory, which no other process can change between check
//! and use.
//!
//! Invariants:
//!
//! * A transport knows the arena from its construction. Messages name places in it.
//! * A destination is written only between [`Transport::fetch`] and the block's last event, and no byte of a
//!   layer is written after that layer was reported.
//! * Every fetched block ends in exactly one of: all layers reported, or `Failed`.
//! * Every offer ends in exactly one of: `OfferAnswered`, or `OfferFailed`.
//! * No method of [`Transport`] waits for the network or for a peer.
//! * Payload bytes in flight towards a requester never exceed the credit that it announced.
//!
//! * With TLS ([`TcpSettings::security`]), both sides of a connection are agents of one cluster, with the names of their
//!   certificates. Records of 16 KiB are encrypted on the thread that sends, and decrypted on the one that receives.
//!
//! Not included: retries (the core decides), which tenants a node may request, RDMA.

#![forbid(unsafe_code)]

pub mod api;
pub mod bare;
mod composite;
mod counters;
mod error;
#[cfg(test)]
mod fuzz;
mod inbound;
pub mod limits;
mod memory;
mod outbound;
mod tcp;
mod wire;

pub use api::{EventSink, Transport, TransportEvent};
pub use composite::{CompositeBuilder, CompositeTransport};
pub use counters::TransportStats;
pub use error::{ErrorKind, TransportError};
pub use memory::{Fault, Link, MemoryHub, MemorySettings, MemoryTransport};
pub use tcp::{Congestion, TcpSettings, TcpTransport, record_layer};
