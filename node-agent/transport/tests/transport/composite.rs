//! A cluster whose nodes have different transports: each pair uses the first protocol that both sides have.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::mpsc::Receiver;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use reprise_policy::peer::{
    FetchRequest, Offer, OfferId, PeerEndpoint, PeerEvent, PeerOfferId, ServeId, ServeObjects, TCP,
};
use reprise_policy::{TenantName, Tier};
use reprise_transport::{
    CompositeBuilder, CompositeTransport, ErrorKind, EventSink, MemoryHub, MemorySettings, MemoryTransport,
    TcpSettings, TcpTransport, Transport, TransportError, TransportEvent, TransportStats,
};

use crate::harness::{
    Block, LATER, PATIENCE, Serve, Tracker, TransportHandle, arena, bytes_of, key, recording_sink, serving,
    small_layout, wanted,
};

/// Protocol of the hub.
pub(crate) const MEMORY: &str = "memory";

/// A protocol of a later release.
const LATER_PROTOCOL: &str = "rdma-9";

/// What each node announces, by its name.
pub(crate) type Directory = Arc<Mutex<BTreeMap<String, Vec<PeerEndpoint>>>>;

/// A composite that finds its peers in a directory.
pub(crate) struct NamedPeers {
    pub(crate) composite: CompositeTransport,
    pub(crate) directory: Directory,
}

impl NamedPeers {
    fn endpoints(&self, peer: &str) -> Vec<PeerEndpoint> {
        self.directory.lock().expect("no panic under the lock")[peer].clone()
    }
}

impl Transport for NamedPeers {
    fn fetch(&self, peer: &str, request: FetchRequest<TenantName>) -> Result<(), TransportError> {
        self.composite.fetch(&self.endpoints(peer), request)
    }

    fn serve_header(&self, serve: ServeId, block: u32, tier: Tier, checksums: &[u32]) {
        self.composite.serve_header(serve, block, tier, checksums);
    }

    fn serve_objects(&self, objects: &ServeObjects) {
        self.composite.serve_objects(objects);
    }

    fn serve_absent(&self, serve: ServeId, block: u32) {
        self.composite.serve_absent(serve, block);
    }

    fn offer(&self, peer: &str, offer: Offer<TenantName>) -> Result<(), TransportError> {
        self.composite.offer(&self.endpoints(peer), offer)
    }

    fn answer_offer(&self, offer: PeerOfferId, taken: &[u32], retry_after: Duration) {
        self.composite.answer_offer(offer, taken, retry_after);
    }

    fn stats(&self) -> TransportStats {
        self.composite.stats()
    }

    fn shutdown(&self) {
        self.composite.shutdown();
    }
}

pub(crate) fn endpoint(protocol: &str, address: &str) -> PeerEndpoint {
    PeerEndpoint { protocol: protocol.to_owned(), address: address.to_owned() }
}

/// Adds the hub's transport to a composite; returns it with its endpoint.
pub(crate) fn add_memory(
    builder: &mut CompositeBuilder,
    hub: &MemoryHub,
    name: &str,
) -> (Arc<MemoryTransport>, PeerEndpoint) {
    let join = |sink: EventSink| Ok::<_, Infallible>(Arc::new(hub.join(name, arena(), sink)));
    let Ok(transport) = builder.add(MEMORY, join);
    (transport, endpoint(MEMORY, name))
}

/// Adds a TCP transport on loopback to a composite; returns it with its endpoint.
pub(crate) fn add_tcp(
    builder: &mut CompositeBuilder,
    settings: TcpSettings,
) -> (Arc<TcpTransport>, PeerEndpoint) {
    let bind = |sink| TcpTransport::bind(settings, arena(), sink).map(Arc::new);
    let transport = builder.add(TCP, bind).expect("listening on loopback works");
    let address = transport.local_address().to_string();
    (transport, PeerEndpoint::tcp(address))
}

/// A node of the mixed cluster.
struct Node {
    transport: Arc<dyn Transport>,
    memory: Option<Arc<MemoryTransport>>,
    tcp: Option<Arc<TcpTransport>>,
    events: Receiver<TransportEvent>,
}

struct Cluster {
    hub: MemoryHub,
    directory: Directory,
}

impl Cluster {
    fn new() -> Cluster {
        let settings = MemorySettings { credit_bytes: 1 << 20, stall_timeout: Duration::from_secs(5) };
        Cluster { hub: MemoryHub::new(settings), directory: Directory::default() }
    }

    fn announce(&self, name: &str, endpoints: Vec<PeerEndpoint>) {
        self.directory.lock().expect("no panic under the lock").insert(name.to_owned(), endpoints);
    }

    /// Starts a node with these protocols, in its order of preference. It announces them in the opposite order,
    /// behind one of a later release.
    fn join(&self, name: &str, protocols: &[&str], serve: Serve) -> Node {
        let handle = TransportHandle::default();
        let (sink, events) = recording_sink(&handle, serve);
        let mut builder = CompositeTransport::builder(sink);
        let mut announced = Vec::new();
        let (mut memory, mut tcp) = (None, None);
        for protocol in protocols {
            if *protocol == MEMORY {
                let (transport, endpoint) = add_memory(&mut builder, &self.hub, name);
                memory = Some(transport);
                announced.push(endpoint);
            } else {
                let settings = TcpSettings::new(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)), name);
                let (transport, endpoint) = add_tcp(&mut builder, settings);
                tcp = Some(transport);
                announced.push(endpoint);
            }
        }
        announced.push(endpoint(LATER_PROTOCOL, "fe80::1/17"));
        announced.reverse();
        self.announce(name, announced);
        let peers = NamedPeers { composite: builder.build(), directory: self.directory.clone() };
        let transport: Arc<dyn Transport> = Arc::new(peers);
        handle.set(&transport);
        Node { transport, memory, tcp, events }
    }

    /// Returns the next event of a node. Frames of the hub move meanwhile.
    fn next(&self, node: &Node) -> TransportEvent {
        let give_up = Instant::now() + PATIENCE;
        loop {
            self.hub.run();
            if let Ok(event) = node.events.recv_timeout(Duration::from_millis(1)) {
                return event;
            }
            assert!(Instant::now() < give_up, "no event comes");
        }
    }

    /// Fetches blocks and checks their bytes.
    fn fetch(&self, node: &Node, from: &str, blocks: &[Block], first_fill: u64) {
        let keys: Vec<_> = blocks.iter().map(|block| block.key).collect();
        let fetch = wanted(small_layout(), &keys, first_fill, LATER);
        let mut tracker = Tracker::default();
        tracker.expect(&fetch.request);
        node.transport.fetch(from, fetch.request).expect("the fetch is accepted");
        while !tracker.is_over() {
            // The node also serves.
            if let event @ TransportEvent::Peer(PeerEvent::Fill { .. }) = self.next(node) {
                tracker.take(&event);
            }
        }
        for (block, place) in blocks.iter().zip(&fetch.places) {
            assert!(bytes_of(place).starts_with(&block.bytes), "another block arrived");
        }
    }
}

impl Node {
    /// Returns how many fetches used the hub, and how many TCP.
    fn fetches(&self) -> (u64, u64) {
        let memory = self.memory.as_ref().map_or(0, |transport| transport.stats().fetches);
        (memory, self.tcp.as_ref().map_or(0, |transport| transport.stats().fetches))
    }
}

fn offer(number: u64) -> Offer<TenantName> {
    let tenant = "team-a".parse().expect("a name");
    Offer {
        offer: OfferId(number),
        layout: small_layout(),
        tenant,
        deadline: LATER,
        keys: vec![key(1), key(2)],
    }
}

#[test]
fn each_pair_uses_the_requesters_first_protocol_that_both_have() {
    let cluster = Cluster::new();
    let blocks: Vec<Block> = (100..104).map(|number| Block::new(number, small_layout())).collect();
    let a = cluster.join("a", &[MEMORY, TCP], serving(&blocks, 2));
    let b = cluster.join("b", &[TCP], serving(&blocks, 2));
    let c = cluster.join("c", &[TCP, MEMORY], serving(&blocks, 2));
    cluster.fetch(&a, "b", &blocks, 0);
    assert_eq!(a.fetches(), (0, 1), "b has no other protocol");
    cluster.fetch(&a, "c", &blocks, 10);
    assert_eq!(a.fetches(), (1, 1), "a prefers the hub");
    cluster.fetch(&c, "a", &blocks, 20);
    assert_eq!(c.fetches(), (0, 1), "c prefers TCP");
    cluster.fetch(&b, "a", &blocks, 30);
    cluster.fetch(&b, "c", &blocks, 40);
    assert_eq!(b.fetches(), (0, 2));
    for (node, served) in [(&a, 8), (&b, 4), (&c, 8)] {
        // A block counts as served a moment after its last byte has arrived.
        let give_up = Instant::now() + PATIENCE;
        while node.transport.stats().blocks_served < served && Instant::now() < give_up {
            std::thread::yield_now();
        }
        assert_eq!(node.transport.stats().blocks_served, served, "the totals of all transports");
    }
}

#[test]
fn requests_and_offers_of_two_transports_have_different_numbers() {
    let cluster = Cluster::new();
    let by_hand: Serve = Arc::new(|_, _| {});
    let a = cluster.join("a", &[MEMORY, TCP], by_hand.clone());
    let b = cluster.join("b", &[TCP], by_hand.clone());
    let c = cluster.join("c", &[TCP, MEMORY], by_hand);
    // Both transports of c count from 1.
    for (node, fill) in [(&a, 0), (&b, 10)] {
        node.transport.fetch("c", wanted(small_layout(), &[key(7)], fill, LATER).request).expect("accepted");
        node.transport.offer("c", offer(fill)).expect("accepted");
    }
    let (mut serves, mut offers) = (Vec::new(), BTreeMap::new());
    while serves.len() < 2 || offers.len() < 2 {
        match cluster.next(&c) {
            TransportEvent::Request { request, .. } => serves.push(request.serve),
            TransportEvent::Offer(offer) => {
                offers.insert(offer.from, offer.offer);
            }
            other => panic!("{other:?} instead of a request or an offer"),
        }
    }
    assert_ne!(serves[0], serves[1]);
    assert_ne!(offers["a"], offers["b"]);
    serves.iter().for_each(|serve| c.transport.serve_absent(*serve, 0));
    c.transport.answer_offer(offers["a"], &[0], Duration::ZERO);
    c.transport.answer_offer(offers["b"], &[1], Duration::ZERO);
    for (node, taken) in [(&a, [0]), (&b, [1])] {
        let (mut absent, mut answer) = (false, None);
        while !absent || answer.is_none() {
            match cluster.next(node) {
                TransportEvent::Peer(PeerEvent::Fill { .. }) => absent = true,
                TransportEvent::Peer(PeerEvent::OfferAnswered { taken, .. }) => answer = Some(taken),
                other => panic!("{other:?} instead of a failed fill or an answer"),
            }
        }
        assert_eq!(answer.expect("it was answered"), taken, "each peer gets its own answer");
        assert_eq!(node.transport.stats().blocks_absent, 1);
    }
}

#[test]
fn rejects_a_peer_without_a_common_protocol_and_names_those_of_both_sides() {
    let cluster = Cluster::new();
    let a = cluster.join("a", &[MEMORY, TCP], Arc::new(|_, _| {}));
    cluster.announce("newer", vec![endpoint(LATER_PROTOCOL, "fe80::2/17"), endpoint("shm-3", "x")]);
    cluster.announce("none", Vec::new());
    for (peer, theirs) in [("newer", "rdma-9, shm-3"), ("none", "none")] {
        let fetch = wanted(small_layout(), &[key(1)], 0, LATER).request;
        for error in [a.transport.fetch(peer, fetch).err(), a.transport.offer(peer, offer(1)).err()] {
            let error = error.expect("no transport reaches the peer");
            assert_eq!(error.kind(), ErrorKind::NoProtocol);
            let words = format!("the peer announces {theirs}, this node has memory, tcp");
            assert!(error.to_string().contains(&words), "{error}");
        }
    }
    // Numbers of no transport are ignored.
    a.transport.serve_absent(ServeId(u64::MAX), 0);
    a.transport.answer_offer(PeerOfferId(u64::MAX), &[], Duration::ZERO);
}
