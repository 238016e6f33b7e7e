//! Behaviour of real sockets: peers that stall, die or send invalid data, corrupted bytes, limits.
//!
//! Times are bounds, not measurements, because a busy machine delays everything. What must not wait for a timeout is
//! tested with a timeout that is longer than the patience of the test.

mod abuse;
mod attacks;
mod deadlines;
mod limits;
mod offers;
mod proxy;
mod serving;
mod stalls;
mod violations;
mod wire;

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::sync::mpsc::Receiver;
use std::time::Duration;

use reprise_policy::peer::{FillError, ServeId};
use reprise_policy::{ArenaSlot, Tier};
use reprise_transport::{TcpSettings, TcpTransport, Transport, TransportEvent};

use crate::harness::{
    Block, FillOutcome, LATER, PATIENCE, Serve, Tracker, TransportHandle, arena, key, layout, recording_sink,
    small_layout, wanted,
};

/// A node with its recorded events.
pub(crate) struct Node {
    pub(crate) transport: Arc<TcpTransport>,
    pub(crate) events: Receiver<TransportEvent>,
}

pub(crate) fn settings() -> TcpSettings {
    TcpSettings {
        credit_bytes: 1 << 20,
        stall_timeout: LATER,
        ..TcpSettings::new(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)), "node")
    }
}

/// Settings of a node that treats 300 ms of silence as a stall.
pub(crate) fn impatient() -> TcpSettings {
    TcpSettings { stall_timeout: Duration::from_millis(300), ..settings() }
}

/// Settings of a node that stays connected to a peer with pauses of up to two seconds, as on a busy machine.
pub(crate) fn tolerant() -> TcpSettings {
    TcpSettings { stall_timeout: Duration::from_secs(2), ..settings() }
}

pub(crate) fn node(settings: TcpSettings, serve: Serve) -> Node {
    let own = TransportHandle::default();
    let (sink, events) = recording_sink(&own, serve);
    let transport =
        Arc::new(TcpTransport::bind(settings, arena(), sink).expect("listening on loopback works"));
    let shared: Arc<dyn Transport> = transport.clone();
    own.set(&shared);
    Node { transport, events }
}

impl Node {
    pub(crate) fn next(&self) -> TransportEvent {
        self.events.recv_timeout(PATIENCE).expect("an event")
    }

    /// Returns `host:port` of the node.
    pub(crate) fn address(&self) -> String {
        self.transport.local_address().to_string()
    }

    /// Serves a whole block.
    pub(crate) fn serve_block(&self, serve: ServeId, index: u32, block: &Block) {
        self.transport.serve_header(serve, index, Tier::Dram, &block.checksums);
        let range = (0, block.layout.block_bytes());
        self.transport.serve_objects(&block.objects(serve, index, range, true));
    }

    pub(crate) fn serve_number(&self) -> ServeId {
        match self.next() {
            TransportEvent::Request { request, .. } => request.serve,
            other => panic!("{other:?} instead of a request"),
        }
    }

    pub(crate) fn finish(&self, tracker: &mut Tracker) {
        while !tracker.is_over() {
            tracker.take(&self.next());
        }
    }

    /// Fetches `count` blocks of the small layout, fills 0, 1, …
    pub(crate) fn fetch(&self, peer: &str, count: u32) -> (Tracker, Vec<ArenaSlot>) {
        let keys: Vec<_> = (0..count).map(key).collect();
        let wanted = wanted(small_layout(), &keys, 0, LATER);
        let mut tracker = Tracker::default();
        tracker.expect(&wanted.request);
        self.transport.fetch(peer, wanted.request).expect("the fetch is accepted");
        (tracker, wanted.places)
    }
}

pub(crate) fn assert_lost(tracker: &Tracker, fill: u64) {
    assert_eq!(tracker.outcomes[&fill], FillOutcome::Failed(FillError::PeerLost), "fill {fill}");
}

/// Returns a block of 16 objects of 64 KiB.
pub(crate) fn large_block() -> Block {
    Block::new(0, layout(8, 1024, 32))
}

/// Waits for a consequence that has no event.
pub(crate) fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let started = std::time::Instant::now();
    while !holds() {
        assert!(started.elapsed() < PATIENCE, "never: {what}");
        std::thread::yield_now();
    }
}
