//! What an agent asks of a transport and what it is told: the trait and its types.

use std::sync::Arc;
use std::time::Duration;

use reprise_buffers::Span;
use reprise_policy::{BlockKey, Layout, TenantName, Tier};

use crate::counters::TransportStats;
use crate::error::TransportError;
use crate::limits::{BLOCKS_PER_REQUEST_MAX, KEYS_PER_OFFER_MAX};

/// Called with every event, on a thread of the transport (or, for the in-memory transport, on the thread that
/// steps the hub). It may call methods of [`Transport`] except `shutdown`. It may wait for room in a queue;
/// while it does, its connection makes no progress, and a peer takes that for a stall after its stall timeout.
pub type EventSink = Arc<dyn Fn(TransportEvent) + Send + Sync>;

/// Moves blocks between agents. No method waits for the network.
pub trait Transport: Send + Sync {
    /// Asks the peer at `peer` (`host:port`) for blocks. What comes of it is reported by events: every block
    /// ends in `Layers` with all its layers or in `Failed`, at the latest when the request's deadline passes.
    ///
    /// # Errors
    /// Nothing was asked and no event comes. [`ErrorKind::Busy`](crate::ErrorKind): connections, requests or
    /// blocks in flight are at their limits. `Invalid`: no blocks, too many, or a destination that is read-only
    /// or of a wrong length. `Closed`: after `shutdown`. `Os`: no thread could be started.
    fn fetch(&self, peer: &str, request: FetchRequest) -> Result<(), TransportError>;

    /// Sends the header of a block of an incoming request: where it lay and the CRC32C of each object, in order.
    /// Comes before the block's objects. A serve that has ended is ignored.
    fn serve_header(&self, serve: u64, block: u32, tier: Tier, checksums: &[u32]);

    /// Sends objects of a block, after its header, straight from the span. A serve that has ended is ignored.
    fn serve_objects(&self, objects: ServedObjects);

    /// Tells the peer that it will not get (the rest of) a block. A serve that has ended is ignored.
    fn serve_absent(&self, serve: u64, block: u32);

    /// Offers blocks of this node to the peer at `peer`. Ends in one `OfferAnswered` or `OfferFailed`, at the latest when
    /// the offer's deadline passes.
    ///
    /// # Errors
    /// Nothing was offered and no event comes; kinds as those of [`Transport::fetch`]. `Invalid`: no keys, or too many.
    fn offer(&self, peer: &str, request: OfferRequest) -> Result<(), TransportError>;

    /// Answers an incoming offer: the indices of the keys that are taken, and when to offer the others again. An offer that
    /// has ended, or was answered, is ignored.
    fn answer_offer(&self, offer: u64, taken: &[u32], retry_after: Duration);

    /// Totals since start.
    fn stats(&self) -> TransportStats;

    /// Ends all connections and threads: open fetches fail, open serves are aborted, their events are delivered
    /// before this returns. Later calls are refused or ignored.
    fn shutdown(&self);
}

/// Blocks wanted from one peer.
#[derive(Debug)]
pub struct FetchRequest {
    /// Named in log lines; the transport does not need it to be unique.
    pub fetch: u64,
    /// Geometry of all blocks.
    pub layout: Layout,
    /// From now; blocks that are unfinished then end in `Failed(PeerLost)`.
    pub deadline: Duration,
    /// What is wanted and where it goes.
    pub blocks: Vec<FetchBlock>,
}

/// One block wanted from a peer.
#[derive(Debug)]
pub struct FetchBlock {
    /// Reported with every event of this block.
    pub fill: u64,
    /// Its key.
    pub key: BlockKey,
    /// Where the payload goes: writable, `layout.block_bytes()` to `layout.slot_bytes()` long. What lies beyond the
    /// payload is zeroed before the last layer is reported.
    pub into: Span,
}

/// Blocks offered to one peer.
#[derive(Clone, Debug)]
pub struct OfferRequest {
    /// Reported with the answer.
    pub offer: u64,
    /// Geometry of all blocks.
    pub layout: Layout,
    /// Whose blocks they are.
    pub tenant: TenantName,
    /// From now; an offer without an answer by then has failed.
    pub deadline: Duration,
    /// Which blocks.
    pub keys: Vec<BlockKey>,
}

/// Objects of one block to send: bytes `offset .. offset + from.len()` of its payload.
#[derive(Clone, Debug)]
pub struct ServedObjects {
    /// The incoming request.
    pub serve: u64,
    /// Index of the block in it.
    pub block: u32,
    /// Exactly the bytes to send: whole objects.
    pub from: Span,
    /// Where in the payload they begin, in bytes; a multiple of the object size.
    pub offset: u64,
    /// Whether the block ends with them.
    pub last: ServeLast,
}

/// Whether objects are the last ones of their block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ServeLast {
    /// More of this block follow.
    More,
    /// The block is complete: `ServeDone` follows when they are in the socket.
    Last,
}

/// What happened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TransportEvent {
    /// The first `layers` layers of a block are verified in its destination. `checksums` comes with the first
    /// event of a block. With the last layer the transport is done with the destination.
    Layers {
        /// The block's fill.
        fill: u64,
        /// Leading layers that are verified; grows with every event of a block.
        layers: u32,
        /// CRC32C of each object in order; `Some` in the block's first event only.
        checksums: Option<Box<[u32]>>,
        /// Where the block lay on the peer.
        tier: Tier,
    },
    /// A block will not come; its destination is no longer touched.
    Failed {
        /// The block's fill.
        fill: u64,
        /// Why.
        failure: FetchFailure,
    },
    /// A peer wants blocks: answer each with a header and objects, or as absent.
    Request(IncomingRequest),
    /// All that was queued of a block is in the socket or dropped, and its memory is no longer read. Comes once
    /// for every block of a request (absent ones too) unless `ServeAborted` comes instead.
    ServeDone {
        /// The incoming request.
        serve: u64,
        /// Index of the block in it.
        block: u32,
    },
    /// The connection of a request is gone, or the peer no longer wants it: nothing more of it will be sent, and
    /// none of its memory is read any more. The request's last event.
    ServeAborted {
        /// The incoming request.
        serve: u64,
    },
    /// A peer offers blocks: answer with [`Transport::answer_offer`]. Nothing says that nobody waits for the answer any more.
    Offer(IncomingOffer),
    /// A peer has answered an offer.
    OfferAnswered {
        /// From the offer.
        offer: u64,
        /// Indices of the keys that it takes, ascending.
        taken: Vec<u32>,
        /// When to offer the others again.
        retry_after: Duration,
    },
    /// The peer of an offer cannot be reached, stalled, broke the protocol, or was too slow for the deadline.
    OfferFailed {
        /// From the offer.
        offer: u64,
    },
}

/// Why a block did not come.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FetchFailure {
    /// An object did not match its checksum.
    Corrupt,
    /// The peer does not have it (any more).
    Absent,
    /// The peer cannot be reached, stalled, broke the protocol, or was too slow for the deadline.
    PeerLost,
}

/// A peer's request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IncomingRequest {
    /// Names the request; unique on this node.
    pub serve: u64,
    /// The blocks that it wants; their index names them.
    pub keys: Vec<BlockKey>,
    /// The geometry that it expects.
    pub layout: Layout,
    /// It gives up after this time.
    pub deadline: Duration,
}

/// A peer's offer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IncomingOffer {
    /// Names the offer; unique on this node.
    pub offer: u64,
    /// Name of the node that has the blocks, as it has greeted.
    pub from: String,
    /// Whose blocks they are.
    pub tenant: TenantName,
    /// Geometry of all blocks.
    pub layout: Layout,
    /// Which blocks.
    pub keys: Vec<BlockKey>,
    /// The peer gives up after this time.
    pub deadline: Duration,
}

impl OfferRequest {
    /// What every implementation checks before it takes an offer.
    pub(crate) fn check(&self) -> Result<(), TransportError> {
        if (1..=KEYS_PER_OFFER_MAX).contains(&self.keys.len()) {
            return Ok(());
        }
        Err(TransportError::invalid(format!(
            "an offer names 1 to {KEYS_PER_OFFER_MAX} keys, not {}",
            self.keys.len()
        )))
    }
}

impl FetchRequest {
    /// What every implementation checks before it takes a request.
    pub(crate) fn check(&self) -> Result<(), TransportError> {
        if self.blocks.is_empty() || self.blocks.len() > BLOCKS_PER_REQUEST_MAX {
            return Err(TransportError::invalid(format!(
                "a fetch names 1 to {BLOCKS_PER_REQUEST_MAX} blocks, not {}",
                self.blocks.len()
            )));
        }
        let lengths = self.layout.block_bytes()..=self.layout.slot_bytes();
        match self.blocks.iter().find(|block| !lengths.contains(&(block.into.len() as u64))) {
            Some(block) => Err(TransportError::invalid(format!(
                "a destination has {} bytes where the layout needs {} to {}",
                block.into.len(),
                lengths.start(),
                lengths.end()
            ))),
            None if self.blocks.iter().any(|block| !block.into.is_writable()) => {
                Err(TransportError::invalid("a destination is mapped read-only"))
            }
            None => Ok(()),
        }
    }
}
