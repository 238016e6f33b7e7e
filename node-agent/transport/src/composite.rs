//! Several transports as one: for each peer, a transport is chosen from what both sides announce.
//!
//! Each transport belongs to a protocol. A peer announces an address for each of its protocols. Calls that name
//! a peer go to the first transport, in this node's order of preference, whose protocol the peer announces, too.
//! Protocols that only one side has are ignored, so a node may have newer protocols than its peers.
//!
//! Numbers of incoming requests and offers are unique in one transport. The composite puts the position of the
//! transport into their upper [`POSITION_BITS`] bits: a number alone leads back to its transport, without a
//! table. Fills, fetches and own offers have numbers of the core, which pass unchanged.
//!
//! Not included: a second attempt by another transport when a peer does not answer. The core retries with other
//! replicas.

use std::fmt::Write;
use std::sync::Arc;
use std::time::Duration;

use reprise_policy::peer::{
    FetchRequest, Offer, PEER_ENDPOINTS_MAX, PeerEndpoint, PeerEvent, PeerOffer, PeerOfferId, PeerRequest,
    ServeId, ServeObjects,
};
use reprise_policy::{TenantName, Tier};

use crate::api::{EventSink, Transport, TransportEvent};
use crate::counters::TransportStats;
use crate::error::TransportError;

/// Upper bits of a number that hold the position of its transport. Transports count from 1: the rest suffices
/// for 2,000 years of a million requests a second.
const POSITION_BITS: u32 = 8;

/// First bit of the position.
const POSITION_SHIFT: u32 = u64::BITS - POSITION_BITS;

const _: () = assert!(PEER_ENDPOINTS_MAX <= 1 << POSITION_BITS, "each position has its own bits");

/// A [`Transport`] over several transports of one node.
pub struct CompositeTransport {
    /// In order of preference.
    members: Vec<Member>,
}

/// Collects the transports of a composite.
pub struct CompositeBuilder {
    sink: EventSink,
    members: Vec<Member>,
}

/// A transport with the name of its protocol.
struct Member {
    protocol: String,
    transport: Arc<dyn Transport>,
}

impl CompositeTransport {
    /// Returns a builder. `sink` receives the events of all transports.
    pub fn builder(sink: EventSink) -> CompositeBuilder {
        CompositeBuilder { sink, members: Vec::new() }
    }

    /// Chooses a transport for a peer; returns it with the peer's address.
    fn choose<'a>(
        &'a self,
        peer: &'a [PeerEndpoint],
    ) -> Result<(&'a dyn Transport, &'a str), TransportError> {
        let address_of = |member: &'a Member| {
            let endpoint = peer.iter().find(|endpoint| endpoint.protocol == member.protocol)?;
            Some((member.transport.as_ref(), endpoint.address.as_str()))
        };
        self.members.iter().find_map(address_of).ok_or_else(|| {
            let theirs = list(peer.iter().map(|endpoint| &endpoint.protocol));
            let own = list(self.members.iter().map(|member| &member.protocol));
            let text = format!("no protocol in common: the peer announces {theirs}, this node has {own}");
            TransportError::no_protocol(text)
        })
    }

    /// Returns the transport of a number, and its own number.
    fn route(&self, number: u64) -> Option<(&dyn Transport, u64)> {
        let position = usize::try_from(number >> POSITION_SHIFT).ok()?;
        let member = self.members.get(position)?;
        Some((member.transport.as_ref(), number & (u64::MAX >> POSITION_BITS)))
    }
}

/// Lists names in a message.
fn list<'a>(names: impl Iterator<Item = &'a String>) -> String {
    let mut text = String::new();
    for name in names {
        let comma = if text.is_empty() { "" } else { ", " };
        // Writing to a string cannot fail.
        let _ = write!(text, "{comma}{name}");
    }
    if text.is_empty() { "none".to_owned() } else { text }
}

impl CompositeBuilder {
    /// Starts a transport and adds it behind the others in the order of preference. `start` gets the sink for
    /// the transport's events.
    ///
    /// # Errors
    /// Those of `start`; the transport is not added.
    ///
    /// # Panics
    /// If the protocol was added before, or there are more than [`PEER_ENDPOINTS_MAX`].
    pub fn add<T: Transport + 'static, E>(
        &mut self,
        protocol: &str,
        start: impl FnOnce(EventSink) -> Result<Arc<T>, E>,
    ) -> Result<Arc<T>, E> {
        assert!(self.members.iter().all(|member| member.protocol != protocol), "{protocol} is there already");
        assert!(self.members.len() < PEER_ENDPOINTS_MAX, "a node announces {PEER_ENDPOINTS_MAX} protocols");
        let transport = start(numbering_sink(self.members.len() as u64, self.sink.clone()))?;
        self.members.push(Member { protocol: protocol.to_owned(), transport: transport.clone() });
        Ok(transport)
    }

    /// Returns the composite of all added transports.
    pub fn build(self) -> CompositeTransport {
        CompositeTransport { members: self.members }
    }
}

/// Returns a sink that adds the position of a transport to the numbers in its events.
fn numbering_sink(position: u64, sink: EventSink) -> EventSink {
    let number = move |number: u64| {
        assert_eq!(number >> POSITION_SHIFT, 0, "transports count from 1");
        number | (position << POSITION_SHIFT)
    };
    let serve = move |ServeId(serve): ServeId| ServeId(number(serve));
    Arc::new(move |event| {
        let event = match event {
            TransportEvent::Peer(event) => event,
            TransportEvent::Request { from, request } => {
                let request = PeerRequest { serve: serve(request.serve), ..request };
                return sink(TransportEvent::Request { from, request });
            }
            TransportEvent::Offer(offer) => {
                let id = PeerOfferId(number(offer.offer.0));
                return sink(TransportEvent::Offer(PeerOffer { offer: id, ..offer }));
            }
        };
        sink(TransportEvent::Peer(match event {
            PeerEvent::ServeDone { serve: done, block } => PeerEvent::ServeDone { serve: serve(done), block },
            PeerEvent::ServeAborted { serve: aborted } => PeerEvent::ServeAborted { serve: serve(aborted) },
            event @ (PeerEvent::Fill { .. }
            | PeerEvent::OfferAnswered { .. }
            | PeerEvent::OfferFailed { .. }) => event,
        }));
    })
}

impl Transport<[PeerEndpoint]> for CompositeTransport {
    fn fetch(&self, peer: &[PeerEndpoint], request: FetchRequest<TenantName>) -> Result<(), TransportError> {
        let (transport, address) = self.choose(peer)?;
        transport.fetch(address, request)
    }

    fn serve_header(&self, ServeId(serve): ServeId, block: u32, tier: Tier, checksums: &[u32]) {
        if let Some((transport, serve)) = self.route(serve) {
            transport.serve_header(ServeId(serve), block, tier, checksums);
        }
    }

    fn serve_objects(&self, objects: &ServeObjects) {
        if let Some((transport, serve)) = self.route(objects.serve.0) {
            transport.serve_objects(&ServeObjects { serve: ServeId(serve), ..*objects });
        }
    }

    fn serve_absent(&self, ServeId(serve): ServeId, block: u32) {
        if let Some((transport, serve)) = self.route(serve) {
            transport.serve_absent(ServeId(serve), block);
        }
    }

    fn offer(&self, peer: &[PeerEndpoint], offer: Offer<TenantName>) -> Result<(), TransportError> {
        let (transport, address) = self.choose(peer)?;
        transport.offer(address, offer)
    }

    fn answer_offer(&self, PeerOfferId(offer): PeerOfferId, taken: &[u32], retry_after: Duration) {
        if let Some((transport, offer)) = self.route(offer) {
            transport.answer_offer(PeerOfferId(offer), taken, retry_after);
        }
    }

    fn stats(&self) -> TransportStats {
        let stats = self.members.iter().map(|member| member.transport.stats());
        stats.fold(TransportStats::default(), |sum, stats| sum.plus(&stats))
    }

    fn shutdown(&self) {
        self.members.iter().for_each(|member| member.transport.shutdown());
    }
}
