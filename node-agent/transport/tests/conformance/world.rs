//! The two implementations behind one way to make nodes and wait for events.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, TryRecvError};
use std::time::Duration;

use reprise_transport::{
    IncomingOffer, MemoryHub, MemorySettings, OfferRequest, TcpSettings, TcpTransport, Transport,
    TransportEvent,
};

use crate::harness::{Own, PATIENCE, Serve, Tracker, Wanted, recording_sink};

/// Small enough that a few blocks exhaust it: a frame is at most 64 KiB.
pub(crate) const CREDIT_BYTES: u64 = 256 << 10;

const STALL_TIMEOUT: Duration = Duration::from_secs(2);

/// Makes nodes of one implementation.
pub(crate) trait World {
    fn join(&self, name: &str, sink: reprise_transport::EventSink) -> (Arc<dyn Transport>, String);

    /// The next event; panics when none comes.
    fn next(&self, events: &Receiver<TransportEvent>) -> TransportEvent;

    /// Lets time pass where it does not by itself.
    fn pass(&self, time: Duration);

    /// An address at which nobody is.
    fn nowhere(&self) -> String;
}

/// A node under test.
pub(crate) struct Node {
    pub(crate) transport: Arc<dyn Transport>,
    pub(crate) address: String,
    pub(crate) events: Receiver<TransportEvent>,
}

/// Real sockets on loopback.
pub(crate) struct TcpWorld;

/// A hub, moved on whenever a test waits.
pub(crate) struct MemoryWorld {
    hub: MemoryHub,
}

pub(crate) fn node(world: &dyn World, name: &str, serve: Serve) -> Node {
    let own = Own::default();
    let (sink, events) = recording_sink(&own, serve);
    let (transport, address) = world.join(name, sink);
    own.set(&transport);
    Node { transport, address, events }
}

impl Node {
    pub(crate) fn fetch(&self, from: &Node, wanted: Wanted) -> Vec<reprise_buffers::Span> {
        self.transport.fetch(&from.address, wanted.request).expect("the fetch is taken");
        wanted.spans
    }

    /// Waits until all fills of the tracker have ended.
    pub(crate) fn finish(&self, world: &dyn World, tracker: &mut Tracker) {
        while !tracker.is_over() {
            tracker.take(&world.next(&self.events));
        }
    }

    /// The next request of a peer.
    pub(crate) fn request(&self, world: &dyn World) -> reprise_transport::IncomingRequest {
        match world.next(&self.events) {
            TransportEvent::Request(request) => request,
            other => panic!("{other:?} instead of a request"),
        }
    }
}

impl Node {
    /// Offers keys to another node.
    pub(crate) fn offer(&self, to: &Node, request: OfferRequest) {
        self.transport.offer(&to.address, request).expect("the offer is taken");
    }

    /// The next offer of a peer.
    pub(crate) fn incoming_offer(&self, world: &dyn World) -> IncomingOffer {
        match world.next(&self.events) {
            TransportEvent::Offer(offer) => offer,
            other => panic!("{other:?} instead of an offer"),
        }
    }
}

impl World for TcpWorld {
    fn join(&self, name: &str, sink: reprise_transport::EventSink) -> (Arc<dyn Transport>, String) {
        let settings = TcpSettings {
            credit_bytes: CREDIT_BYTES,
            stall_timeout: STALL_TIMEOUT,
            ..TcpSettings::new(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)), name)
        };
        let transport = TcpTransport::bind(settings, sink).expect("loopback can be listened on");
        let address = transport.local_address().to_string();
        (Arc::new(transport), address)
    }

    fn next(&self, events: &Receiver<TransportEvent>) -> TransportEvent {
        events.recv_timeout(PATIENCE).expect("an event comes")
    }

    fn pass(&self, _time: Duration) {}

    fn nowhere(&self) -> String {
        let listener = std::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a free port");
        listener.local_addr().expect("it has an address").to_string()
    }
}

impl MemoryWorld {
    pub(crate) fn new() -> MemoryWorld {
        let settings = MemorySettings { credit_bytes: CREDIT_BYTES, stall_timeout: STALL_TIMEOUT };
        MemoryWorld { hub: MemoryHub::new(settings) }
    }
}

impl World for MemoryWorld {
    fn join(&self, name: &str, sink: reprise_transport::EventSink) -> (Arc<dyn Transport>, String) {
        (Arc::new(self.hub.join(name, sink)), name.to_owned())
    }

    fn next(&self, events: &Receiver<TransportEvent>) -> TransportEvent {
        loop {
            match events.try_recv() {
                Ok(event) => return event,
                Err(TryRecvError::Disconnected) => panic!("the node is gone"),
                Err(TryRecvError::Empty) => {}
            }
            if !self.hub.step() {
                let next = self.hub.next_deadline().expect("something is still to happen");
                self.hub.advance(next.saturating_sub(self.hub.now()));
            }
        }
    }

    fn pass(&self, time: Duration) {
        self.hub.advance(time);
    }

    fn nowhere(&self) -> String {
        "nowhere".to_owned()
    }
}
