//! Messages between the core of an agent and its transport: fetches, serves and offers of blocks.
//!
//! Memory is named by its place in the arena. Nodes and tenants have numbers in the core and names in the
//! transport; [`FetchRequest`], [`PeerRequest`], [`Offer`] and [`PeerOffer`] are generic over them. All other messages
//! are the same for both.
//!
//! A node announces one [`PeerEndpoint`] for each protocol of its transport.

use std::time::Duration;

use crate::{ArenaSlot, BlockKey, Layout, Tier};

/// Number of a fill: one block that is read or fetched into an arena slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct FillId(pub u64);

/// Number of a request for blocks of one peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct FetchId(pub u64);

/// Number of a peer's request for blocks of this node; unique on this node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ServeId(pub u64);

/// Number of an offer of this node to a peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct OfferId(pub u64);

/// Number of a peer's offer to this node; unique on this node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PeerOfferId(pub u64);

/// One way to reach the transport of a node, as the node announces it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PeerEndpoint {
    /// Name of the protocol ([`is_protocol_name`]). Nodes ignore endpoints of protocols that they do not have.
    pub protocol: String,
    /// Address in the form of the protocol; of [`TCP`]: `host:port`.
    pub address: String,
}

/// Protocol of the framed TCP transport (`docs/PROTOCOL.md`, part 3).
pub const TCP: &str = "tcp";

/// Maximum number of endpoints of a node: one for each protocol.
pub const PEER_ENDPOINTS_MAX: usize = 8;

/// Maximum length of the name of a protocol in bytes.
pub const PROTOCOL_BYTES_MAX: usize = 32;

/// Reports whether a text can be the name of a protocol: 1 to 32 lowercase letters, digits and hyphens.
pub fn is_protocol_name(text: &str) -> bool {
    let allowed = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    (1..=PROTOCOL_BYTES_MAX).contains(&text.len()) && text.bytes().all(allowed)
}

impl PeerEndpoint {
    /// Creates an endpoint of the framed TCP transport.
    pub fn tcp(address: impl Into<String>) -> PeerEndpoint {
        PeerEndpoint { protocol: TCP.to_owned(), address: address.into() }
    }
}

/// A request for blocks of one peer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FetchRequest<Tenant> {
    /// Number of the fetch, for log lines.
    pub fetch: FetchId,
    /// Tenant that owns the blocks.
    pub tenant: Tenant,
    /// Layout of all blocks.
    pub layout: Layout,
    /// Time from now on after which unfinished blocks end in [`FillError::PeerLost`].
    pub deadline: Duration,
    /// Requested blocks and their destinations.
    pub blocks: Vec<FetchBlock>,
}

impl<Tenant> FetchRequest<Tenant> {
    /// Names the tenant in another way.
    pub fn of_tenant<Other>(self, tenant: Other) -> FetchRequest<Other> {
        let FetchRequest { fetch, layout, deadline, blocks, .. } = self;
        FetchRequest { fetch, tenant, layout, deadline, blocks }
    }
}

/// One block of a [`FetchRequest`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FetchBlock {
    /// Fill that every update names.
    pub fill: FillId,
    /// Key of the block.
    pub key: BlockKey,
    /// Destination of the payload, `layout.block_bytes()` to `layout.slot_bytes()` long. The bytes behind the
    /// payload are zeroed before the last layer is reported.
    pub into: ArenaSlot,
}

/// Objects of one block to send to a peer: bytes `offset .. offset + bytes` of its payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ServeObjects {
    /// Request of the peer.
    pub serve: ServeId,
    /// Index of the block in the request.
    pub block: u32,
    /// Arena slot of the block.
    pub slot: ArenaSlot,
    /// Offset in the payload in bytes; a multiple of the object size.
    pub offset: u64,
    /// Length in bytes, a multiple of the object size.
    pub bytes: u64,
    /// Whether these are the block's last objects. `ServeDone` follows when they are in the socket.
    pub last: bool,
}

impl ServeObjects {
    /// Returns the part of the slot to send; `None` if it ends behind the slot.
    pub fn source(&self) -> Option<ArenaSlot> {
        self.offset.checked_add(self.bytes).filter(|end| *end <= self.slot.bytes)?;
        let offset = self.slot.offset.checked_add(self.offset)?;
        Some(ArenaSlot { region: self.slot.region, offset, bytes: self.bytes })
    }
}

/// Progress of a fill.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FillUpdate {
    /// The block's checksums are known and its first `layers` layers are verified in the slot. The number of
    /// layers grows with every update. After the last layer, the slot is no longer written to.
    Layers {
        /// Number of leading layers that are verified.
        layers: u32,
        /// CRC32C of each object in order; only in the first update.
        checksums: Option<Box<[u32]>>,
        /// Tier that the block came from: on the peer, if the block was fetched.
        tier: Tier,
    },
    /// The fill failed. The slot is no longer written to, unless the error states otherwise. No update
    /// follows a failure or the last layer.
    Failed(FillError),
}

/// Reason why a fill failed. A transport reports `Corrupt`, `Absent` and `PeerLost`; a device all but `PeerLost`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
pub enum FillError {
    /// The device reported an error.
    #[error("device error")]
    Device,
    /// The read was not started, for want of memory or queue entries. The block on the device is unaffected.
    #[error("the device did not start the read")]
    Refused,
    /// The device is lost and has not released the slot. It may write to the slot at any time, so the slot is
    /// never used again.
    #[error("the device is lost and may still write to the slot")]
    Stranded,
    /// The header or an object does not match its checksum, key or generation.
    #[error("verification failed")]
    Corrupt,
    /// The peer does not have the block, or no longer has it. Of a device: the block's encryption key is gone.
    #[error("the block is absent, or its encryption key is gone")]
    Absent,
    /// The peer is unreachable, has stalled, violated the protocol, or missed the deadline.
    #[error("the connection to the peer was lost")]
    PeerLost,
}

/// Request of a peer for blocks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PeerRequest<Tenant> {
    /// Number chosen by the transport, unique on this node.
    pub serve: ServeId,
    /// Tenant that the peer acts for; blocks of other tenants are reported as absent.
    pub tenant: Tenant,
    /// Layout that the peer expects; blocks of other layouts are reported as absent.
    pub layout: Layout,
    /// Keys of the requested blocks; other messages use their index.
    pub keys: Vec<BlockKey>,
    /// Time after which the peer gives up.
    pub deadline: Duration,
}

impl<Tenant> PeerRequest<Tenant> {
    /// Names the tenant in another way.
    pub fn of_tenant<Other>(self, tenant: Other) -> PeerRequest<Other> {
        let PeerRequest { serve, layout, keys, deadline, .. } = self;
        PeerRequest { serve, tenant, layout, keys, deadline }
    }
}

/// Offer of blocks to a peer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Offer<Tenant> {
    /// Number that the answer contains.
    pub offer: OfferId,
    /// Tenant that owns the blocks.
    pub tenant: Tenant,
    /// Layout of all blocks.
    pub layout: Layout,
    /// Keys of the offered blocks.
    pub keys: Vec<BlockKey>,
    /// Time from now on after which an offer without an answer has failed.
    pub deadline: Duration,
}

impl<Tenant> Offer<Tenant> {
    /// Names the tenant in another way.
    pub fn of_tenant<Other>(self, tenant: Other) -> Offer<Other> {
        let Offer { offer, layout, keys, deadline, .. } = self;
        Offer { offer, tenant, layout, keys, deadline }
    }
}

/// Blocks that a peer offers. This node fetches those it accepts and writes them to its devices.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PeerOffer<Node, Tenant> {
    /// Number to repeat in the answer.
    pub offer: PeerOfferId,
    /// Node that has the blocks.
    pub from: Node,
    /// Tenant that owns the blocks.
    pub tenant: Tenant,
    /// Layout of all blocks.
    pub layout: Layout,
    /// Keys of the offered blocks.
    pub keys: Vec<BlockKey>,
}

/// Event of a transport, except for the requests and offers of peers: those name nodes and tenants ([`PeerRequest`],
/// [`PeerOffer`]).
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PeerEvent {
    /// A block of a fetch made progress or failed. After its last layer or its failure, the transport no
    /// longer uses the destination.
    Fill {
        /// Fill from the request.
        fill: FillId,
        /// Verified layers, or the failure.
        update: FillUpdate,
    },
    /// All queued pieces of a block are in the socket or dropped, and its memory is no longer read. Sent once
    /// for every block of a request (absent ones too), unless `ServeAborted` is sent instead.
    ServeDone {
        /// Number of the incoming request.
        serve: ServeId,
        /// Index of the block in it.
        block: u32,
    },
    /// The connection of a request has ended, or the peer has cancelled the request: nothing more is sent,
    /// and its memory is no longer read. The request's last event.
    ServeAborted {
        /// Number of the incoming request.
        serve: ServeId,
    },
    /// A peer has answered an offer.
    OfferAnswered {
        /// Number of the offer.
        offer: OfferId,
        /// Indices of the accepted keys, ascending.
        taken: Vec<u32>,
        /// Time after which the other keys may be offered again.
        retry_after: Duration,
    },
    /// The peer of an offer is unreachable, has stalled, violated the protocol, or missed the deadline.
    OfferFailed {
        /// Number of the offer.
        offer: OfferId,
    },
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::RegionId;

    #[test]
    fn objects_to_serve_lie_within_the_slot_of_their_block() {
        let slot = ArenaSlot { region: RegionId(2), offset: 1 << 20, bytes: 8192 };
        let source = |offset, bytes| {
            ServeObjects { serve: ServeId(1), block: 0, slot, offset, bytes, last: false }.source()
        };
        let part = ArenaSlot { region: RegionId(2), offset: (1 << 20) + 4096, bytes: 4096 };
        assert_eq!(source(4096, 4096), Some(part));
        assert_eq!(source(4096, 4097), None);
        assert_eq!(source(u64::MAX, 1), None);
    }
}
