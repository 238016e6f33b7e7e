//! Adapter between the core and the transport: effects to calls, transport events to core events.
//!
//! The core decides on retries and chooses peers.

use std::sync::Arc;
use std::time::Duration;

use reprise_agent_core::effect::{Offer, PeerFetch, PeerOfferId, ServeId, ServeObjects};
use reprise_agent_core::event::Event;
use reprise_policy::peer::{self, FetchBlock, FetchRequest, PeerEndpoint};
use reprise_policy::{ArenaSlot, TenantName, Tier};
use reprise_transport::{CompositeTransport, EventSink, Transport, TransportEvent, TransportStats};

use crate::core_loop::{Inbox, Input};

/// The transport, as used by the core's effects.
#[derive(Clone)]
pub(crate) struct Peers {
    transport: Arc<CompositeTransport>,
}

/// Returns a sink that passes the transport's events to the core. A full inbox stalls only the sending
/// connection.
pub(crate) fn sink(inbox: Inbox) -> EventSink {
    Arc::new(move |event| {
        // Fails only if the core has stopped.
        let _ = inbox.send(convert(event));
    })
}

fn convert(event: TransportEvent) -> Input {
    Input::Event(match event {
        // Names are resolved where effects are executed.
        TransportEvent::Offer(offer) => return Input::PeerOffer(Box::new(offer)),
        TransportEvent::OfferAnswered { offer, taken, retry_after } => {
            Event::OfferAnswered { offer, taken, retry_after }
        }
        TransportEvent::OfferFailed { offer } => Event::OfferFailed { offer },
        TransportEvent::Fill { fill, update } => Event::Fill { fill, update },
        TransportEvent::Request(request) => Event::PeerRequest(request),
        TransportEvent::ServeDone { serve, block } => Event::ServeDone { serve, block },
        TransportEvent::ServeAborted { serve } => Event::ServeAborted { serve },
    })
}

impl Peers {
    pub(crate) fn new(transport: CompositeTransport) -> Peers {
        Peers { transport: Arc::new(transport) }
    }

    /// Requests blocks from a peer; never blocks.
    ///
    /// # Errors
    /// The reason why nothing was requested; no event follows.
    pub(crate) fn fetch(&self, peer: &[PeerEndpoint], fetch: &PeerFetch) -> Result<(), String> {
        let blocks = fetch.blocks.iter();
        let blocks = blocks.map(|block| FetchBlock { fill: block.fill, key: block.key, into: block.slot });
        let request = FetchRequest {
            fetch: fetch.fetch,
            layout: fetch.layout,
            deadline: fetch.deadline,
            blocks: blocks.collect(),
        };
        self.transport.fetch(peer, request).map_err(|error| error.to_string())
    }

    pub(crate) fn serve_header(&self, serve: ServeId, block: u32, tier: Tier, checksums: &[u32]) {
        self.transport.serve_header(serve, block, tier, checksums);
    }

    pub(crate) fn serve_objects(&self, objects: &ServeObjects) {
        let ServeObjects { serve, block, slot, offset, bytes, last } = *objects;
        let from = ArenaSlot { region: slot.region, offset: slot.offset.saturating_add(offset), bytes };
        self.transport.serve_objects(&peer::ServeObjects { serve, block, from, offset, last });
    }

    pub(crate) fn serve_absent(&self, serve: ServeId, block: u32) {
        self.transport.serve_absent(serve, block);
    }

    /// Offers blocks to a peer; never blocks.
    ///
    /// # Errors
    /// The reason why nothing was offered; no event follows.
    pub(crate) fn offer(
        &self,
        peer: &[PeerEndpoint],
        tenant: TenantName,
        offer: Offer,
    ) -> Result<(), String> {
        let Offer { offer, layout, keys, deadline, .. } = offer;
        let offer = peer::Offer { offer, tenant, layout, keys, deadline };
        self.transport.offer(peer, offer).map_err(|error| error.to_string())
    }

    pub(crate) fn answer_offer(&self, offer: PeerOfferId, taken: &[u32], retry_after: Duration) {
        self.transport.answer_offer(offer, taken, retry_after);
    }

    pub(crate) fn stats(&self) -> TransportStats {
        self.transport.stats()
    }

    pub(crate) fn shutdown(&self) {
        self.transport.shutdown();
    }
}
