//! The transport interface of an agent: the trait and its types.

use std::sync::Arc;
use std::time::Duration;

use reprise_buffers::Span;
use reprise_policy::{BlockKey, Layout, TenantName, Tier};

use crate::counters::TransportStats;
use crate::error::TransportError;
use crate::limits::{BLOCKS_PER_REQUEST_MAX, KEYS_PER_OFFER_MAX};

/// Callback for every event, on a thread of the transport (or, for the in-memory transport, on the thread
/// that steps the hub). It may call methods of [`Transport`] except `shutdown`. It may wait for room in a
/// queue. Meanwhile its connection makes no progress, and the peer treats that as a stall after its stall
/// timeout.
pub type EventSink = Arc<dyn Fn(TransportEvent) + Send + Sync>;

/// Moves blocks between agents. No method waits for the network.
pub trait Transport: Send + Sync {
    /// Requests blocks from the peer at `peer` (`host:port`). Events report the results: every block ends in
    /// `Layers` with all its layers or in `Failed`, at the latest when the request's deadline passes.
    ///
    /// # Errors
    /// No request is sent and no event follows. [`ErrorKind::Busy`](crate::ErrorKind): connections, requests
    /// or blocks in flight are at their limits. `Invalid`: no blocks, too many, or a destination that is
    /// read-only or has the wrong length. `Closed`: after `shutdown`. `Os`: cannot spawn a thread.
    fn fetch(&self, peer: &str, request: FetchRequest) -> Result<(), TransportError>;

    /// Sends the header of a block of an incoming request: its tier and the CRC32C of each object, in order.
    /// Must precede the block's objects. Ignored for a serve that has ended.
    fn serve_header(&self, serve: u64, block: u32, tier: Tier, checksums: &[u32]);

    /// Sends objects of a block, after its header, straight from the span. Ignored for a serve that has
    /// ended.
    fn serve_objects(&self, objects: ServedObjects);

    /// Notifies the peer that it will not get (the rest of) a block. Ignored for a serve that has ended.
    fn serve_absent(&self, serve: u64, block: u32);

    /// Offers blocks of this node to the peer at `peer`. Ends in one `OfferAnswered` or `OfferFailed`, at the
    /// latest when the offer's deadline passes.
    ///
    /// # Errors
    /// No offer is sent and no event follows; kinds as for [`Transport::fetch`]. `Invalid`: no keys, or too
    /// many.
    fn offer(&self, peer: &str, request: OfferRequest) -> Result<(), TransportError>;

    /// Answers an incoming offer with the indices of the accepted keys, and the time after which the others
    /// may be offered again. Ignored for an offer that has ended, or was answered.
    fn answer_offer(&self, offer: u64, taken: &[u32], retry_after: Duration);

    /// Returns the totals since start.
    fn stats(&self) -> TransportStats;

    /// Ends all connections and threads: open fetches fail, open serves are aborted, and their events are
    /// delivered before this returns. Later calls are rejected or ignored.
    fn shutdown(&self);
}

/// A request for blocks of one peer.
#[derive(Debug)]
pub struct FetchRequest {
    /// Identifier for log lines; the transport does not need it to be unique.
    pub fetch: u64,
    /// Geometry of all blocks.
    pub layout: Layout,
    /// Time from now on after which unfinished blocks end in `Failed(PeerLost)`.
    pub deadline: Duration,
    /// Requested blocks and their destinations.
    pub blocks: Vec<FetchBlock>,
}

/// One block of a request.
#[derive(Debug)]
pub struct FetchBlock {
    /// Identifier that every event of this block contains.
    pub fill: u64,
    /// Key of the block.
    pub key: BlockKey,
    /// Destination of the payload: writable, `layout.block_bytes()` to `layout.slot_bytes()` long. The bytes
    /// behind the payload are zeroed before the last layer is reported.
    pub into: Span,
}

/// An offer of blocks to one peer.
#[derive(Clone, Debug)]
pub struct OfferRequest {
    /// Identifier that the answer contains.
    pub offer: u64,
    /// Geometry of all blocks.
    pub layout: Layout,
    /// Tenant that owns the blocks.
    pub tenant: TenantName,
    /// Time from now on after which an offer without an answer has failed.
    pub deadline: Duration,
    /// Keys of the offered blocks.
    pub keys: Vec<BlockKey>,
}

/// Objects of one block to send: bytes `offset .. offset + from.len()` of its payload.
#[derive(Clone, Debug)]
pub struct ServedObjects {
    /// Number of the incoming request.
    pub serve: u64,
    /// Index of the block in the request.
    pub block: u32,
    /// Exactly the bytes to send: whole objects.
    pub from: Span,
    /// Offset in the payload in bytes; a multiple of the object size.
    pub offset: u64,
    /// Whether these are the block's last objects.
    pub last: ServeLast,
}

/// Whether objects are the last ones of their block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ServeLast {
    /// More objects of this block follow.
    More,
    /// The block is complete: `ServeDone` follows when its objects are in the socket.
    Last,
}

/// Event of a transport.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TransportEvent {
    /// The first `layers` layers of a block are verified in its destination. `checksums` comes with the first
    /// event of a block. After the last layer the transport no longer uses the destination.
    Layers {
        /// Identifier of the block's fill.
        fill: u64,
        /// Number of verified leading layers; grows with every event of a block.
        layers: u32,
        /// CRC32C of each object in order; `Some` only in the block's first event.
        checksums: Option<Box<[u32]>>,
        /// Tier of the block on the peer.
        tier: Tier,
    },
    /// A block has failed; its destination is no longer used.
    Failed {
        /// Identifier of the block's fill.
        fill: u64,
        /// Reason of the failure.
        failure: FetchFailure,
    },
    /// A peer requests blocks: answer each with a header and objects, or as absent.
    Request(IncomingRequest),
    /// All queued pieces of a block are in the socket or dropped, and its memory is no longer read. Sent once
    /// for every block of a request (absent ones too), unless `ServeAborted` is sent instead.
    ServeDone {
        /// Number of the incoming request.
        serve: u64,
        /// Index of the block in it.
        block: u32,
    },
    /// The connection of a request has ended, or the peer has cancelled the request: nothing more is sent,
    /// and its memory is no longer read. The request's last event.
    ServeAborted {
        /// Number of the incoming request.
        serve: u64,
    },
    /// A peer offers blocks: answer with [`Transport::answer_offer`]. No event reports that the peer no
    /// longer waits for the answer.
    Offer(IncomingOffer),
    /// A peer has answered an offer.
    OfferAnswered {
        /// Identifier of the offer.
        offer: u64,
        /// Indices of the accepted keys, ascending.
        taken: Vec<u32>,
        /// Time after which the other keys may be offered again.
        retry_after: Duration,
    },
    /// The peer of an offer is unreachable, has stalled, violated the protocol, or missed the deadline.
    OfferFailed {
        /// Identifier of the offer.
        offer: u64,
    },
}

/// Reason for which a block was not received.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FetchFailure {
    /// An object did not match its checksum.
    Corrupt,
    /// The peer does not have it, or no longer has it.
    Absent,
    /// The peer is unreachable, has stalled, violated the protocol, or missed the deadline.
    PeerLost,
}

/// A request of a peer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IncomingRequest {
    /// Number of the request; unique on this node.
    pub serve: u64,
    /// Keys of the requested blocks; other calls use their index.
    pub keys: Vec<BlockKey>,
    /// Geometry that the peer expects.
    pub layout: Layout,
    /// Time after which the peer gives up.
    pub deadline: Duration,
}

/// An offer of a peer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IncomingOffer {
    /// Number of the offer; unique on this node.
    pub offer: u64,
    /// Name of the node that has the blocks, from its greeting.
    pub from: String,
    /// Tenant that owns the blocks.
    pub tenant: TenantName,
    /// Geometry of all blocks.
    pub layout: Layout,
    /// Keys of the offered blocks.
    pub keys: Vec<BlockKey>,
    /// Time after which the peer gives up.
    pub deadline: Duration,
}

impl OfferRequest {
    /// Checks that every implementation makes before it accepts an offer.
    pub(crate) fn check(&self) -> Result<(), TransportError> {
        if (1..=KEYS_PER_OFFER_MAX).contains(&self.keys.len()) {
            return Ok(());
        }
        Err(TransportError::invalid(format!(
            "invalid offer: expected 1 to {KEYS_PER_OFFER_MAX} keys, found {}",
            self.keys.len()
        )))
    }
}

impl FetchRequest {
    /// Checks that every implementation makes before it accepts a request.
    pub(crate) fn check(&self) -> Result<(), TransportError> {
        if self.blocks.is_empty() || self.blocks.len() > BLOCKS_PER_REQUEST_MAX {
            return Err(TransportError::invalid(format!(
                "invalid fetch: expected 1 to {BLOCKS_PER_REQUEST_MAX} blocks, found {}",
                self.blocks.len()
            )));
        }
        let lengths = self.layout.block_bytes()..=self.layout.slot_bytes();
        match self.blocks.iter().find(|block| !lengths.contains(&(block.into.len() as u64))) {
            Some(block) => Err(TransportError::invalid(format!(
                "invalid destination of {} bytes: the layout requires {} to {}",
                block.into.len(),
                lengths.start(),
                lengths.end()
            ))),
            None if self.blocks.iter().any(|block| !block.into.is_writable()) => {
                Err(TransportError::invalid("invalid destination: mapped read-only"))
            }
            None => Ok(()),
        }
    }
}
