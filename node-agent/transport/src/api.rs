//! The transport interface of an agent: the trait and its events. The messages are those of
//! [`reprise_policy::peer`], which the core uses, too.

use std::sync::Arc;
use std::time::Duration;

use reprise_buffers::{Arena, Span};
use reprise_policy::peer::{
    FetchBlock, FetchRequest, FillId, Offer, PeerEvent, PeerOffer, PeerOfferId, PeerRequest, ServeId,
    ServeObjects,
};
use reprise_policy::{ArenaSlot, BlockKey, TenantName, Tier};

use crate::counters::TransportStats;
use crate::error::TransportError;
use crate::limits::{BLOCKS_PER_REQUEST_MAX, KEYS_PER_OFFER_MAX};

/// Callback for every event, on a thread of the transport (or, for the in-memory transport, on the thread
/// that steps the hub). It may call methods of [`Transport`] except `shutdown`. It may wait for room in a
/// queue. Meanwhile its connection makes no progress, and the peer treats that as a stall after its stall
/// timeout.
pub type EventSink = Arc<dyn Fn(TransportEvent) + Send + Sync>;

/// Moves blocks between agents. No method waits for the network.
///
/// `Peer` names a peer: by an address in the form of one protocol (`str`), or by everything that the peer
/// announces (`[PeerEndpoint]`, [`CompositeTransport`](crate::CompositeTransport)).
pub trait Transport<Peer: ?Sized = str>: Send + Sync {
    /// Requests blocks from a peer into the arena given at construction. Events report the results: every block
    /// ends in `Layers` with all its layers or in `Failed`, at the latest when the request's deadline passes.
    ///
    /// # Errors
    /// No request is sent and no event follows. [`ErrorKind::Busy`](crate::ErrorKind): connections, requests
    /// or blocks in flight are at their limits. `Invalid`: no blocks, too many, or a destination that is
    /// outside the arena or has the wrong length. `NoProtocol`: no transport of this node can reach the peer.
    /// `Closed`: after `shutdown`. `Os`: cannot spawn a thread.
    fn fetch(&self, peer: &Peer, request: FetchRequest<TenantName>) -> Result<(), TransportError>;

    /// Sends the header of a block of an incoming request: its tier and the CRC32C of each object, in order.
    /// Must precede the block's objects. Ignored for a serve that has ended.
    fn serve_header(&self, serve: ServeId, block: u32, tier: Tier, checksums: &[u32]);

    /// Sends objects of a block, after its header, straight from the arena. Ignored for a serve that has
    /// ended.
    fn serve_objects(&self, objects: &ServeObjects);

    /// Notifies the peer that it will not get (the rest of) a block. Ignored for a serve that has ended.
    fn serve_absent(&self, serve: ServeId, block: u32);

    /// Offers blocks of this node to a peer. Ends in one `OfferAnswered` or `OfferFailed`, at the
    /// latest when the offer's deadline passes.
    ///
    /// # Errors
    /// No offer is sent and no event follows; kinds as for [`Transport::fetch`]. `Invalid`: no keys, or too
    /// many.
    fn offer(&self, peer: &Peer, offer: Offer<TenantName>) -> Result<(), TransportError>;

    /// Answers an incoming offer with the indices of the accepted keys, and the time after which the others
    /// may be offered again. Ignored for an offer that has ended, or was answered.
    fn answer_offer(&self, offer: PeerOfferId, taken: &[u32], retry_after: Duration);

    /// Returns the totals since start.
    fn stats(&self) -> TransportStats;

    /// Ends all connections and threads: open fetches fail, open serves are aborted, and their events are
    /// delivered before this returns. Later calls are rejected or ignored.
    fn shutdown(&self);
}

/// Event of a transport.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TransportEvent {
    /// Progress of fetches, serves and offers.
    Peer(PeerEvent),
    /// A peer requests blocks: answer each with a header and objects, or as absent.
    Request {
        /// Name of the peer, from its greeting.
        from: String,
        /// Requested blocks.
        request: PeerRequest<TenantName>,
    },
    /// A peer, named by its greeting, offers blocks: answer with [`Transport::answer_offer`]. No event reports
    /// that the peer no longer waits for the answer.
    Offer(PeerOffer<String, TenantName>),
}

impl From<PeerEvent> for TransportEvent {
    fn from(event: PeerEvent) -> TransportEvent {
        TransportEvent::Peer(event)
    }
}

/// Destinations of a checked [`FetchRequest`], in its order.
pub(crate) struct Destination {
    pub(crate) fill: FillId,
    pub(crate) key: BlockKey,
    pub(crate) into: Span,
}

/// Checks that every implementation makes before it accepts an offer.
pub(crate) fn check_offer(offer: &Offer<TenantName>) -> Result<(), TransportError> {
    if (1..=KEYS_PER_OFFER_MAX).contains(&offer.keys.len()) {
        return Ok(());
    }
    Err(TransportError::invalid(format!(
        "invalid offer: expected 1 to {KEYS_PER_OFFER_MAX} keys, found {}",
        offer.keys.len()
    )))
}

/// Checks that every implementation makes before it accepts a request. Returns the destinations.
pub(crate) fn check_fetch<Tenant>(
    request: &FetchRequest<Tenant>,
    arena: &Arena,
) -> Result<Vec<Destination>, TransportError> {
    if request.blocks.is_empty() || request.blocks.len() > BLOCKS_PER_REQUEST_MAX {
        return Err(TransportError::invalid(format!(
            "invalid fetch: expected 1 to {BLOCKS_PER_REQUEST_MAX} blocks, found {}",
            request.blocks.len()
        )));
    }
    let lengths = request.layout.block_bytes()..=request.layout.slot_bytes();
    let destination = |block: &FetchBlock| {
        if !lengths.contains(&block.into.bytes) {
            return Err(TransportError::invalid(format!(
                "invalid destination of {} bytes: the layout requires {} to {}",
                block.into.bytes,
                lengths.start(),
                lengths.end()
            )));
        }
        Ok(Destination { fill: block.fill, key: block.key, into: span(arena, block.into)? })
    };
    request.blocks.iter().map(destination).collect()
}

/// Returns the memory of a part of the arena.
pub(crate) fn span(arena: &Arena, slot: ArenaSlot) -> Result<Span, TransportError> {
    arena
        .span(slot.region.0, slot.offset, slot.bytes)
        .map_err(|error| TransportError::invalid(format!("invalid place: {error}")))
}
