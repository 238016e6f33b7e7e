//! Adapter between the core and the transport: slots to spans, transport events to core events.
//!
//! The core decides on retries and chooses peers.

use std::sync::Arc;
use std::time::Duration;

use reprise_agent_core::effect::{
    ArenaSlot, FillId, Offer, OfferId, PeerFetch, PeerOfferId, ServeId, ServeObjects,
};
use reprise_agent_core::event::{Event, FillError, FillUpdate, PeerRequest};
use reprise_buffers::{Arena, BufferError, Span};
use reprise_policy::{TenantName, Tier};
use reprise_transport::{
    EventSink, FetchBlock, FetchFailure, FetchRequest, IncomingRequest, OfferRequest, ServeLast,
    ServedObjects, Transport, TransportEvent, TransportStats,
};

use crate::core_loop::{Inbox, Input};

/// The transport, as used by the core's effects.
#[derive(Clone)]
pub(crate) struct Peers {
    transport: Arc<dyn Transport>,
    arena: Arc<Arena>,
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
            Event::OfferAnswered { offer: OfferId(offer), taken, retry_after }
        }
        TransportEvent::OfferFailed { offer } => Event::OfferFailed { offer: OfferId(offer) },
        TransportEvent::Layers { fill, layers, checksums, tier } => {
            Event::Fill { fill: FillId(fill), update: FillUpdate::Layers { layers, checksums, tier } }
        }
        TransportEvent::Failed { fill, failure } => {
            let error = match failure {
                FetchFailure::Corrupt => FillError::Corrupt,
                FetchFailure::Absent => FillError::Absent,
                FetchFailure::PeerLost => FillError::PeerLost,
            };
            Event::Fill { fill: FillId(fill), update: FillUpdate::Failed(error) }
        }
        TransportEvent::Request(IncomingRequest { serve, keys, layout, deadline }) => {
            Event::PeerRequest(PeerRequest { serve: ServeId(serve), keys, layout, deadline })
        }
        TransportEvent::ServeDone { serve, block } => Event::ServeDone { serve: ServeId(serve), block },
        TransportEvent::ServeAborted { serve } => Event::ServeAborted { serve: ServeId(serve) },
    })
}

impl Peers {
    pub(crate) fn new(transport: Arc<dyn Transport>, arena: Arc<Arena>) -> Peers {
        Peers { transport, arena }
    }

    /// Requests blocks from a peer; never blocks.
    ///
    /// # Errors
    /// The reason why nothing was requested; no event follows.
    pub(crate) fn fetch(&self, address: &str, fetch: &PeerFetch) -> Result<(), String> {
        let block = |block: &reprise_agent_core::effect::PeerBlock| {
            let into = self.span(block.slot, 0, block.slot.bytes)?;
            Ok(FetchBlock { fill: block.fill.0, key: block.key, into })
        };
        let blocks: Result<Vec<FetchBlock>, BufferError> = fetch.blocks.iter().map(block).collect();
        let blocks = blocks.map_err(|error| error.to_string())?;
        let request =
            FetchRequest { fetch: fetch.fetch.0, layout: fetch.layout, deadline: fetch.deadline, blocks };
        self.transport.fetch(address, request).map_err(|error| error.to_string())
    }

    pub(crate) fn serve_header(&self, serve: ServeId, block: u32, tier: Tier, checksums: &[u32]) {
        self.transport.serve_header(serve.0, block, tier, checksums);
    }

    pub(crate) fn serve_objects(&self, objects: &ServeObjects) {
        let ServeObjects { serve, block, slot, offset, bytes, last } = *objects;
        match self.span(slot, offset, bytes) {
            Ok(from) => {
                let last = if last { ServeLast::Last } else { ServeLast::More };
                self.transport.serve_objects(ServedObjects { serve: serve.0, block, from, offset, last });
            }
            Err(error) => {
                tracing::error!(%error, "the core serves a span outside the arena");
                self.transport.serve_absent(serve.0, block);
            }
        }
    }

    pub(crate) fn serve_absent(&self, serve: ServeId, block: u32) {
        self.transport.serve_absent(serve.0, block);
    }

    /// Offers blocks to a peer; never blocks.
    ///
    /// # Errors
    /// The reason why nothing was offered; no event follows.
    pub(crate) fn offer(&self, address: &str, tenant: TenantName, offer: Offer) -> Result<(), String> {
        let Offer { offer: OfferId(offer), layout, keys, deadline, .. } = offer;
        let request = OfferRequest { offer, layout, tenant, deadline, keys };
        self.transport.offer(address, request).map_err(|error| error.to_string())
    }

    pub(crate) fn answer_offer(&self, offer: PeerOfferId, taken: &[u32], retry_after: Duration) {
        self.transport.answer_offer(offer.0, taken, retry_after);
    }

    pub(crate) fn stats(&self) -> TransportStats {
        self.transport.stats()
    }

    pub(crate) fn shutdown(&self) {
        self.transport.shutdown();
    }

    /// Returns the span of a part of a slot.
    fn span(&self, slot: ArenaSlot, offset: u64, bytes: u64) -> Result<Span, BufferError> {
        self.arena.span(slot.region.0, slot.offset.saturating_add(offset), bytes)
    }
}
