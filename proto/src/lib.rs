//! The wire contracts of Reprise, generated from the `.proto` files in `protos/`.
//!
//! * [`local`]: the session between an engine and its node's agent, over a unix socket (`docs/PROTOCOL.md`).
//! * [`controlplane`]: gRPC between agents, command line and control plane.
//! * [`connection`]: the way of a small gRPC call to the socket, where its time counts.
//!
//! The agent-to-agent stream is a fixed binary framing and lives with its transport.

// Generated code follows prost's style, not ours.
#![allow(missing_docs, unreachable_pub, clippy::all, clippy::pedantic, clippy::cast_lossless)]

pub mod connection;

/// The local session: version, messages.
pub mod local {
    tonic::include_proto!("reprise.local.v1");

    /// Version of the local session protocol; a client whose version differs is refused with words.
    pub const PROTOCOL_VERSION: u32 = 1;

    /// Length of a frame (after its 4-byte little-endian length) at the most, in bytes. A match over 8,192
    /// keys is 128 KiB; a load reply of 8,192 blocks with 64 checksums each is 2.3 MiB.
    pub const FRAME_BYTES_MAX: usize = 16 << 20;

    /// Keys in one call at the most (a 128K-token request in blocks of 16 tokens).
    pub const KEYS_PER_CALL_MAX: usize = 8192;
}

/// The control plane's gRPC services.
pub mod controlplane {
    tonic::include_proto!("reprise.controlplane.v1");
}
