//! A common interface of the implementations to create nodes and wait for events.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, TryRecvError};
use std::time::Duration;

use reprise_identity::Security;
use reprise_policy::peer::{Offer, PeerOffer, PeerRequest, TCP};
use reprise_policy::{ArenaSlot, TenantName};
use reprise_transport::{
    CompositeTransport, MemoryHub, MemorySettings, TcpSettings, TcpTransport, Transport, TransportEvent,
};

use crate::composite::{Directory, MEMORY, NamedPeers, add_memory, add_tcp, endpoint};
use crate::harness::{
    PATIENCE, Serve, TestFetch, Tracker, TransportHandle, arena, by_hand, recording_sink, security_of,
};

/// Small enough that a few blocks exhaust it: a frame is at most 64 KiB.
pub(crate) const CREDIT_BYTES: u64 = 256 << 10;

const STALL_TIMEOUT: Duration = Duration::from_secs(2);

/// Creates nodes of one implementation.
pub(crate) trait Fixture {
    fn join(&self, name: &str, sink: reprise_transport::EventSink) -> (Arc<dyn Transport>, String);

    /// Returns the next event; panics if no event arrives.
    fn next(&self, events: &Receiver<TransportEvent>) -> TransportEvent;

    /// Advances time where it does not pass by itself.
    fn pass(&self, time: Duration);

    /// Returns an address without a node.
    fn nowhere(&self) -> String;
}

/// A node under test.
pub(crate) struct Node {
    pub(crate) transport: Arc<dyn Transport>,
    pub(crate) address: String,
    pub(crate) events: Receiver<TransportEvent>,
}

/// Real sockets on loopback.
pub(crate) struct TcpFixture {
    /// Certificates of the agent of a node.
    security: fn(&str) -> Security,
    /// Whether addresses name the node that is expected there.
    named: bool,
}

impl TcpFixture {
    pub(crate) fn plain() -> TcpFixture {
        TcpFixture { security: |_| Security::Plain, named: false }
    }

    pub(crate) fn tls() -> TcpFixture {
        TcpFixture { security: security_of, named: true }
    }
}

/// A hub that is stepped whenever a test waits.
pub(crate) struct MemoryFixture {
    hub: MemoryHub,
}

pub(crate) fn node(fixture: &dyn Fixture, name: &str, serve: Serve) -> Node {
    let own = TransportHandle::default();
    let (sink, events) = recording_sink(&own, serve);
    let (transport, address) = fixture.join(name, sink);
    own.set(&transport);
    Node { transport, address, events }
}

/// Returns a serving node, and a requesting one that the test answers by hand.
pub(crate) fn pair(fixture: &dyn Fixture, serve: Serve) -> (Node, Node) {
    (node(fixture, "server", serve), node(fixture, "requester", by_hand()))
}

impl Node {
    pub(crate) fn fetch(&self, from: &Node, wanted: TestFetch) -> Vec<ArenaSlot> {
        self.transport.fetch(&from.address, wanted.request).expect("the fetch is accepted");
        wanted.places
    }

    /// Fetches blocks, and returns a tracker of their fills, and their places.
    pub(crate) fn track(&self, from: &Node, wanted: TestFetch) -> (Tracker, Vec<ArenaSlot>) {
        let mut tracker = Tracker::default();
        tracker.expect(&wanted.request);
        (tracker, self.fetch(from, wanted))
    }

    /// Fetches blocks, and waits until all fills have ended.
    pub(crate) fn fetch_all(
        &self,
        fixture: &dyn Fixture,
        from: &Node,
        wanted: TestFetch,
    ) -> (Tracker, Vec<ArenaSlot>) {
        let (mut tracker, places) = self.track(from, wanted);
        self.finish(fixture, &mut tracker);
        (tracker, places)
    }

    /// Waits until all fills of the tracker have ended.
    pub(crate) fn finish(&self, fixture: &dyn Fixture, tracker: &mut Tracker) {
        while !tracker.is_over() {
            tracker.take(&fixture.next(&self.events));
        }
    }

    /// Waits for the next request of a peer.
    pub(crate) fn request(&self, fixture: &dyn Fixture) -> PeerRequest<TenantName> {
        match fixture.next(&self.events) {
            TransportEvent::Request { request, .. } => request,
            other => panic!("{other:?} instead of a request"),
        }
    }

    /// Offers keys to another node.
    pub(crate) fn offer(&self, to: &Node, offer: Offer<TenantName>) {
        self.transport.offer(&to.address, offer).expect("the offer is accepted");
    }

    /// Waits for the next offer of a peer.
    pub(crate) fn incoming_offer(&self, fixture: &dyn Fixture) -> PeerOffer<String, TenantName> {
        match fixture.next(&self.events) {
            TransportEvent::Offer(offer) => offer,
            other => panic!("{other:?} instead of an offer"),
        }
    }
}

fn tcp_settings(name: &str) -> TcpSettings {
    TcpSettings {
        credit_bytes: CREDIT_BYTES,
        stall_timeout: STALL_TIMEOUT,
        ..TcpSettings::new(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)), name)
    }
}

impl Fixture for TcpFixture {
    fn join(&self, name: &str, sink: reprise_transport::EventSink) -> (Arc<dyn Transport>, String) {
        let settings = TcpSettings { security: (self.security)(name), ..tcp_settings(name) };
        let transport = TcpTransport::bind(settings, arena(), sink).expect("listening on loopback works");
        let address = transport.local_address();
        let address = if self.named { format!("{name}@{address}") } else { address.to_string() };
        (Arc::new(transport), address)
    }

    fn next(&self, events: &Receiver<TransportEvent>) -> TransportEvent {
        events.recv_timeout(PATIENCE).expect("an event")
    }

    fn pass(&self, _time: Duration) {}

    fn nowhere(&self) -> String {
        let listener = std::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a free port");
        listener.local_addr().expect("it has an address").to_string()
    }
}

impl MemoryFixture {
    pub(crate) fn new() -> MemoryFixture {
        let settings = MemorySettings { credit_bytes: CREDIT_BYTES, stall_timeout: STALL_TIMEOUT };
        MemoryFixture { hub: MemoryHub::new(settings) }
    }
}

impl Fixture for MemoryFixture {
    fn join(&self, name: &str, sink: reprise_transport::EventSink) -> (Arc<dyn Transport>, String) {
        (Arc::new(self.hub.join(name, arena(), sink)), name.to_owned())
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

/// Nodes with both transports that announce one of them, which is the second in their order of preference.
pub(crate) struct CompositeFixture {
    memory: MemoryFixture,
    announced: &'static str,
    directory: Directory,
}

/// Returns a fixture of composites that use TCP.
pub(crate) fn composite_tcp() -> CompositeFixture {
    CompositeFixture { memory: MemoryFixture::new(), announced: TCP, directory: Directory::default() }
}

/// Returns a fixture of composites that use the hub.
pub(crate) fn composite_memory() -> CompositeFixture {
    CompositeFixture { memory: MemoryFixture::new(), announced: MEMORY, directory: Directory::default() }
}

impl CompositeFixture {
    /// Announces an address next to that of a protocol of a later release.
    fn announce(&self, name: &str, address: &str) {
        let endpoints = vec![endpoint("later", "x"), endpoint(self.announced, address)];
        self.directory.lock().expect("no panic under the lock").insert(name.to_owned(), endpoints);
    }
}

impl Fixture for CompositeFixture {
    fn join(&self, name: &str, sink: reprise_transport::EventSink) -> (Arc<dyn Transport>, String) {
        let mut builder = CompositeTransport::builder(sink);
        if self.announced == TCP {
            add_memory(&mut builder, &self.memory.hub, name);
            let (_, tcp) = add_tcp(&mut builder, tcp_settings(name));
            self.announce(name, &tcp.address);
        } else {
            add_tcp(&mut builder, tcp_settings(name));
            add_memory(&mut builder, &self.memory.hub, name);
            self.announce(name, name);
        }
        let peers = NamedPeers { composite: builder.build(), directory: self.directory.clone() };
        (Arc::new(peers), name.to_owned())
    }

    fn next(&self, events: &Receiver<TransportEvent>) -> TransportEvent {
        if self.announced == TCP { TcpFixture::plain().next(events) } else { self.memory.next(events) }
    }

    fn pass(&self, time: Duration) {
        if self.announced == MEMORY {
            self.memory.pass(time);
        }
    }

    fn nowhere(&self) -> String {
        let address =
            if self.announced == TCP { TcpFixture::plain().nowhere() } else { self.memory.nowhere() };
        self.announce("absent", &address);
        "absent".to_owned()
    }
}
