//! The wire contracts of Reprise, generated from the `.proto` files in `protos/`.
//!
//! * [`local`]: the session between an engine and its node's agent, over a unix socket (`docs/PROTOCOL.md`).
//! * [`controlplane`]: gRPC between agents, the command line and the control plane.
//! * [`connection`]: a gRPC client with low latency for small calls.
//! * [`dial`]: the connections below it and below tonic's channels, plain or with TLS.
//!
//! The agent-to-agent stream uses a fixed binary framing, defined by the transport crate.

// Generated code follows prost's style, not ours.
#![allow(missing_docs, unreachable_pub, clippy::all, clippy::pedantic, clippy::cast_lossless)]

#[cfg(feature = "clients")]
pub mod connection;
#[cfg(feature = "clients")]
pub mod dial;

/// Messages and limits of the local session protocol.
pub mod local {
    tonic::include_proto!("reprise.local.v1");

    /// Version of the local session protocol; the agent rejects clients with another version.
    pub const PROTOCOL_VERSION: u32 = 11;

    /// Maximum length of a frame in bytes, without its 4-byte length. A match over 8,192 keys takes 128
    /// KiB; a load reply of 8,192 blocks with 64 checksums each takes 2.3 MiB.
    pub const FRAME_BYTES_MAX: usize = 16 << 20;

    /// Maximum number of keys in one call (a request of 128 Ki tokens in blocks of 16).
    pub const KEYS_PER_CALL_MAX: usize = 8192;
}

/// Messages and services of the control plane.
pub mod controlplane {
    tonic::include_proto!("reprise.controlplane.v2");

    /// Package of these messages and services: its last part is the version of the protocol.
    pub const PACKAGE: &str = "reprise.controlplane.v2";

    impl PeerEndpoint {
        /// Creates an endpoint of the framed TCP transport.
        pub fn tcp(address: impl Into<String>) -> PeerEndpoint {
            PeerEndpoint { protocol: "tcp".to_owned(), address: address.into() }
        }
    }
}
